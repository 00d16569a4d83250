"""Bulk requests to a search server: operations, request size, results, and corrections.

:class:`Bulk` sends operations two requests at a time and turns each outcome into success, a retry
(``ArchiveUnavailable``) or a refusal. :class:`Pace` adapts the size of requests to the server's
load. :func:`corrections` reads stored documents and returns the operations that update them.
``destination`` uses it all. Versions are external (``external_gte``), so repeats and late arrivals
do no harm.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

import msgspec

from steward.archive.errors import ArchiveUnavailable
from steward.archive.remote.destination import Document, Refusal
from steward.extensions.search_servers.client import (
    CONFLICT,
    LINES,
    REQUESTS_AT_ONCE,
    TOO_LARGE,
    TOO_MANY,
    BulkReply,
    Outcome,
    Reply,
    SearchClient,
    read,
    unavailable,
)
from steward.extensions.search_servers.documents import Doc, corrected, documents, is_past, versions

_LEAST_BYTES: Final = 64 * 1024
"""Smallest limit on request size, in bytes."""
_GROWTH: Final = 1.25
"""Growth of the limit after a successful request."""
_PATIENCE: Final = 6
"""Overload replies after which a document that was sent alone is refused; pauses grow between them.
"""
_TARGET: Final = (
    "/_bulk?filter_path=items.*.status,items.*.error.type,items.*.error.reason,"
    "items.*.error.caused_by"
)


class Operation(msgspec.Struct, frozen=True):
    """One document's part of a bulk request.

    Attributes:
        document: The document.
        index: The name of its index.
        action: Action line: JSON without its newline.
        source: Document line, likewise; b"" for a deletion.
    """

    document: Document
    index: str
    action: bytes
    source: bytes = b""

    @property
    def size(self) -> int:
        """Size in the request, in bytes."""
        return len(self.action) + len(self.source) + 2

    @property
    def deletes(self) -> bool:
        """Whether the operation is a deletion."""
        return not self.source


def index(document: Document, name: str, source: bytes) -> Operation:
    """Build an operation that stores a document, unless the server has a later version."""
    return Operation(document, name, _action("index", document, name, document.version), source)


def delete(document: Document, name: str, version: int = 0) -> Operation:
    """Build an operation that deletes a document, also where the server has a later version."""
    latest = max(document.version, version)
    return Operation(document, name, _action("delete", document, name, latest))


def _action(what: str, document: Document, name: str, version: int) -> bytes:
    """Encode an action line, with external versioning."""
    return msgspec.json.encode(
        {
            what: {
                "_index": name,
                "_id": document.id,
                "version": version,
                "version_type": "external_gte",
            }
        }
    )


class Pace:
    """Limit on request size: halved when the server is overloaded, raised after successes.

    Args:
        most_bytes: Upper bound, in bytes.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self.bytes = most_bytes

    def bound(self, most_bytes: int) -> None:
        """Lower the upper bound."""
        self.bytes = min(self.bytes, most_bytes)
        self._most = min(self._most, most_bytes)

    def slow(self) -> None:
        """Halve the size: the server is overloaded."""
        self.bytes = max(min(_LEAST_BYTES, self._most), self.bytes // 2)

    def grow(self) -> None:
        """Raise the size after a successful request."""
        self.bytes = min(self._most, int(self.bytes * _GROWTH))


class Bulk:
    """Sender of operations in requests of the pace's size, two at a time.

    While the server works on one request, the next is built and sent. Their order is undefined: no
    two operations may concern the same document.

    Args:
        client: The server.
        pace: Limit on request size.
    """

    def __init__(self, client: SearchClient, pace: Pace) -> None:
        self._client = client
        self._pace = pace
        self._pool = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="bulk")
        self._flying: deque[tuple[list[Operation], Future[Reply]]] = deque()
        self._impatient: dict[str, int] = {}

    def send(self, operations: Iterable[Operation]) -> Iterator[Refusal]:
        """Send operations; yield the refusals.

        Raises:
            ArchiveUnavailable: Some must be sent again.
        """
        flying = self._flying
        try:
            for some in self._requests(operations):
                if len(flying) == REQUESTS_AT_ONCE:
                    yield from self._landed(*flying.popleft())
                flying.append((some, self._pool.submit(self._post, some)))
            while flying:
                yield from self._landed(*flying.popleft())
        finally:
            # Also after a failure, no request is in flight when the same documents are sent again.
            self._await_flying()
            flying.clear()

    def close(self) -> None:
        """End the sender threads."""
        self._pool.shutdown()

    def _await_flying(self) -> None:
        wait([future for _, future in self._flying])

    def _requests(self, operations: Iterable[Operation]) -> Iterator[list[Operation]]:
        """Group operations into requests of the pace's size."""
        waiting: list[Operation] = []
        size = 0
        for operation in operations:
            if waiting and size + operation.size > self._pace.bytes:
                yield waiting
                waiting, size = [], 0
            waiting.append(operation)
            size += operation.size
        if waiting:
            yield waiting

    def _post(self, operations: list[Operation]) -> Reply:
        return self._client.request("POST", _TARGET, _body(operations), LINES)

    def _landed(
        self,
        operations: list[Operation],
        answered: "Future[Reply] | None" = None,
        *,
        alone: bool = False,
    ) -> Iterator[Refusal]:
        """Handle the reply to a request: split, retry, or judge each outcome."""
        reply = answered.result() if answered is not None else self._post(operations)
        if reply.status == TOO_LARGE:
            self._pace.slow()
            if len(operations) == 1:
                yield too_large(operations[0])
                return
            half = len(operations) // 2
            yield from self._landed(operations[:half])
            yield from self._landed(operations[half:])
            return
        if reply.status == TOO_MANY:
            self._pace.slow()
            yield from self._too_many(operations, unavailable(self._client, reply), alone=alone)
            return
        outcomes = read(self._client, reply, BulkReply).outcomes()
        if len(outcomes) != len(operations):
            raise ArchiveUnavailable(
                f"{self._client.where} answered for {len(outcomes)} of {len(operations)} documents",
                self._client.where,
            )
        yield from self._judged(operations, outcomes, alone=alone)

    def _judged(
        self, operations: list[Operation], outcomes: list[Outcome], *, alone: bool
    ) -> Iterator[Refusal]:
        """Yield the refusals among the outcomes, provided that nothing must be sent again."""
        both = list(zip(operations, outcomes, strict=True))
        again = [one for of, one in both if _is_again(of, one)]
        if any(one.status == TOO_MANY for one in again):
            self._pace.slow()
            if len(again) == len(operations):
                yield from self._too_many(operations, _again(self._client, again), alone=alone)
                return
        if again:
            raise _again(self._client, again)
        for operation, outcome in both:
            if outcome.is_shut:
                yield shut(self._client, operation.document, outcome.why)
            elif outcome.is_refused and not outcome.is_done:
                why = f"{self._client.product} refuses it: {outcome.why}"
                yield Refusal(document=operation.document, why=why)
        for operation in operations:
            self._impatient.pop(operation.document.id, None)
        overtaken = [of for of, one in both if of.deletes and one.status == CONFLICT]
        if overtaken:
            yield from self._deleted(overtaken)
        self._pace.grow()

    def _too_many(
        self, operations: list[Operation], error: ArchiveUnavailable, *, alone: bool
    ) -> Iterator[Refusal]:
        """Handle a request for which the server has no room.

        A document is refused if the server repeatedly has no room for it while nothing else is in
        flight: it is larger than all the room there is.
        """
        if len(operations) > 1:
            raise error
        (operation,) = operations
        if not alone:
            # Requests in flight may have taken the room.
            self._await_flying()
            yield from self._landed(operations, alone=True)
            return
        times = self._impatient.pop(operation.document.id, 0) + 1
        if times < _PATIENCE:
            self._impatient[operation.document.id] = times
            raise error
        yield Refusal(
            document=operation.document,
            why=(
                f"the server has no room for its {operation.size} bytes, also where it comes "
                "alone: raise its indexing_pressure.memory.limit, or its heap"
            ),
        )

    def _deleted(self, operations: list[Operation]) -> Iterator[Refusal]:
        """Delete documents that are stored in a later version: a purge always wins."""
        found = versions(self._client, [(of.document, of.index) for of in operations])
        later = [
            delete(of.document, of.index, version)
            for of, version in zip(operations, found, strict=True)
            if version is not None
        ]
        if any(of.action == one.action for of in operations for one in later):
            raise ArchiveUnavailable(
                f"{self._client.where} does not delete what it has: somebody else writes there",
                self._client.where,
            )
        if later:
            yield from self._landed(later)


def _is_again(operation: Operation, outcome: Outcome) -> bool:
    """Return True if an operation must be sent again unchanged."""
    if outcome.is_shut:
        return not is_past(operation.document)
    return not outcome.is_done and not outcome.is_refused


def shut(client: SearchClient, document: Document, why: str) -> Refusal:
    """Build the refusal of a document whose past month's index a person has closed."""
    return Refusal(
        document=document,
        why=(
            f"its month's index on {client.where} is closed or may not be written ({why}): open "
            "it, then run 'steward journal replay archive.NAME' with this sink's name"
        ),
    )


def too_large(operation: Operation) -> Refusal:
    """Build the refusal of a document that exceeds the server's request limit."""
    return Refusal(
        document=operation.document,
        why=(
            f"with {operation.size} bytes it is larger than the server takes: "
            "raise its http.max_content_length"
        ),
    )


def _body(operations: list[Operation]) -> bytes:
    """Join operations into a request body of JSON lines."""
    parts: list[bytes] = []
    for operation in operations:
        parts += (operation.action, operation.source) if operation.source else (operation.action,)
    parts.append(b"")
    return b"\n".join(parts)


def _again(client: SearchClient, outcomes: list[Outcome]) -> ArchiveUnavailable:
    """Build the error for documents that must be sent again, with a remedy."""
    first = outcomes[0]
    if first.status == TOO_MANY:
        text = f"{client.where} asks for patience ({first.why})"
    elif first.type == "validation_exception":
        text = (
            f"{client.where} makes no more indices ({first.why}): drop old ones with "
            "retention_days, or raise its cluster.max_shards_per_node"
        )
    elif first.is_shut:
        text = (
            f"{client.where} has the present month's index closed, or lets nobody write it "
            f"({first.why}): nothing new can be archived there until it is opened"
        )
    elif first.status == 403:
        text = (
            f"{client.where} lets nothing be written ({first.why}): check the user's rights, and "
            "whether its disks are full"
        )
    elif first.type == "index_not_found_exception":
        text = (
            f"{client.where} makes no index by itself: have its action.auto_create_index "
            f"allow {client.settings.index}-*"
        )
    else:
        text = f"{client.where} cannot take all documents now ({first.why})"
    return ArchiveUnavailable(text, client.where)


_AT_ONCE: Final = 500
"""Documents looked up in one request."""
_SIZES: Final = "version,script_bytes,environment_bytes"


class _Size(msgspec.Struct, frozen=True):
    version: int = 0
    script_bytes: int = 0
    environment_bytes: int = 0


def corrections(
    client: SearchClient, wanted: Sequence[tuple[Document, str]], most_bytes: int
) -> Iterator[Operation | Refusal]:
    """Read stored documents and yield the operations that correct them.

    Args:
        client: The server.
        wanted: Documents with distinct ids, each with the name of its index.
        most_bytes: Most bytes of documents to hold in memory.

    Raises:
        ArchiveUnavailable: The server is away.
    """
    for first in range(0, len(wanted), _AT_ONCE):
        some = wanted[first : first + _AT_ONCE]
        found = documents(client, some, f"_source_includes={_SIZES}")
        here: list[tuple[Document, str, int]] = []
        for (document, name), doc in zip(some, found, strict=True):
            if not doc.found:
                yield _unread(client, document, doc)
                continue
            size = msgspec.json.decode(doc.source, type=_Size)
            if size.version <= document.version:
                here.append((document, name, 3 * size.script_bytes + 3 * size.environment_bytes))
        yield from _corrected(client, here, most_bytes)


def _corrected(
    client: SearchClient, here: Sequence[tuple[Document, str, int]], most_bytes: int
) -> Iterator[Operation | Refusal]:
    """Group documents by size, so that each group fits in memory."""
    some: list[tuple[Document, str]] = []
    size = 0
    for document, name, bytes_ in here:
        if some and size + bytes_ > most_bytes:
            yield from _read(client, some)
            some, size = [], 0
        some.append((document, name))
        size += bytes_
    if some:
        yield from _read(client, some)


def _read(
    client: SearchClient, some: Sequence[tuple[Document, str]]
) -> Iterator[Operation | Refusal]:
    """Fetch stored documents and yield the operations that replace them."""
    found = documents(client, some, "_source=true")
    for (document, name), doc in zip(some, found, strict=True):
        if not doc.found:
            yield _unread(client, document, doc)
        else:
            yield index(document, name, corrected(bytes(doc.source), document))


def _unread(client: SearchClient, document: Document, doc: Doc) -> Refusal:
    """Handle a document that could not be read: refuse it, or raise to retry."""
    if not doc.is_shut:
        return _missing(document)
    if is_past(document):
        return shut(client, document, str(doc.error))
    raise ArchiveUnavailable(
        f"{client.where} has the present month's index closed ({doc.error}): nothing can be "
        "corrected there until it is opened",
        client.where,
    )


def _missing(document: Document) -> Refusal:
    """Build the refusal of a correction whose document the server does not have."""
    return Refusal(
        document=document,
        why=(
            "the server does not have what is to be corrected: "
            "'steward archive resend' sends it whole"
        ),
    )
