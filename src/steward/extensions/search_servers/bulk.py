"""Bulk requests to a search server: operations, request size, results, and corrections.

:class:`RequestPacer` adapts the size of requests to the server's load. :class:`BulkSender` sends
operations two requests at a time and turns each outcome into success, a retry
(``ArchiveUnavailable``) or a refusal. Versions are external (``external_gte``), so repeats and late
arrivals do no harm. ``destination`` uses all of it.

:func:`read_corrections` corrects stored documents whose bytes are no longer at hand. Neither
product's update accepts an external version; both would increment the version, and an older repeat
could then get past it. So it reads a document, replaces the identity, and writes it in its new
version. That is safe because a sink is the only writer of its documents.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

import msgspec

from steward.archive.errors import ArchiveUnavailable
from steward.archive.remote.destination import ArchivedDocument, RefusedDocument
from steward.extensions.search_servers.client import (
    CONCURRENT_REQUESTS,
    HTTP_CONFLICT,
    HTTP_TOO_LARGE,
    HTTP_TOO_MANY,
    NDJSON_TYPE,
    BulkOutcome,
    BulkReply,
    SearchClient,
    ServerReply,
    decode_reply,
    unavailable_error,
)
from steward.extensions.search_servers.documents import (
    StoredDocument,
    apply_correction,
    fetch_documents,
    fetch_versions,
    is_past_month,
)

_MIN_REQUEST_BYTES: Final = 64 * 1024
"""Smallest limit on request size, in bytes."""
_GROWTH: Final = 1.25
"""Growth of the limit after a successful request."""
_MAX_OVERLOADS: Final = 6
"""Overload replies after which a document that was sent alone is refused; pauses grow between them.
"""
_BULK_PATH: Final = (
    "/_bulk?filter_path=items.*.status,items.*.error.type,items.*.error.reason,"
    "items.*.error.caused_by"
)


class BulkOperation(msgspec.Struct, frozen=True):
    """One document's part of a bulk request.

    Attributes:
        document: The document.
        index: The name of its index.
        action: Action line: JSON without its newline.
        source: Document line, likewise; b"" for a deletion.
    """

    document: ArchivedDocument
    index: str
    action: bytes
    source: bytes = b""

    @property
    def size(self) -> int:
        """Size in the request, in bytes."""
        return len(self.action) + len(self.source) + 2

    @property
    def is_deletion(self) -> bool:
        """Whether the operation is a deletion."""
        return not self.source


def index_operation(document: ArchivedDocument, index: str, source: bytes) -> BulkOperation:
    """Build an operation that stores a document, unless the server has a later version."""
    return BulkOperation(
        document, index, _encode_action("index", document, index, document.version), source
    )


def delete_operation(document: ArchivedDocument, index: str, version: int = 0) -> BulkOperation:
    """Build an operation that deletes a document, also where the server has a later version."""
    latest = max(document.version, version)
    return BulkOperation(document, index, _encode_action("delete", document, index, latest))


def _encode_action(action_type: str, document: ArchivedDocument, index: str, version: int) -> bytes:
    """Encode an action line, with external versioning."""
    return msgspec.json.encode(
        {
            action_type: {
                "_index": index,
                "_id": document.id,
                "version": version,
                "version_type": "external_gte",
            }
        }
    )


class RequestPacer:
    """Limit on request size: halved when the server is overloaded, raised after successes.

    Args:
        max_bytes: Upper bound, in bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.limit_bytes = max_bytes

    def lower_bound(self, max_bytes: int) -> None:
        """Lower the upper bound."""
        self.limit_bytes = min(self.limit_bytes, max_bytes)
        self._max_bytes = min(self._max_bytes, max_bytes)

    def halve_limit(self) -> None:
        """Halve the size: the server is overloaded."""
        self.limit_bytes = max(min(_MIN_REQUEST_BYTES, self._max_bytes), self.limit_bytes // 2)

    def raise_limit(self) -> None:
        """Raise the size after a successful request."""
        self.limit_bytes = min(self._max_bytes, int(self.limit_bytes * _GROWTH))


class BulkSender:
    """Sender of operations in requests of the pace's size, two at a time.

    While the server works on one request, the next is built and sent. Their order is undefined: no
    two operations may concern the same document.

    Args:
        client: The server.
        pacer: Limit on request size.
    """

    def __init__(self, client: SearchClient, pacer: RequestPacer) -> None:
        self._client = client
        self._pacer = pacer
        self._pool = ThreadPoolExecutor(CONCURRENT_REQUESTS, thread_name_prefix="bulk")
        self._in_flight: deque[tuple[list[BulkOperation], Future[ServerReply]]] = deque()
        self._overload_counts: dict[str, int] = {}

    def send(self, operations: Iterable[BulkOperation]) -> Iterator[RefusedDocument]:
        """Send operations; yield the refusals.

        Raises:
            ArchiveUnavailable: Some must be sent again.
        """
        in_flight = self._in_flight
        try:
            for batch in self._group_requests(operations):
                if len(in_flight) == CONCURRENT_REQUESTS:
                    yield from self._handle_reply(*in_flight.popleft())
                in_flight.append((batch, self._pool.submit(self._post, batch)))
            while in_flight:
                yield from self._handle_reply(*in_flight.popleft())
        finally:
            # Also after a failure, no request is in flight when the same documents are sent again.
            self._await_in_flight()
            in_flight.clear()

    def close(self) -> None:
        """End the sender threads."""
        self._pool.shutdown()

    def _await_in_flight(self) -> None:
        wait([future for _, future in self._in_flight])

    def _group_requests(self, operations: Iterable[BulkOperation]) -> Iterator[list[BulkOperation]]:
        """Group operations into requests of the pace's size."""
        batch: list[BulkOperation] = []
        size = 0
        for operation in operations:
            if batch and size + operation.size > self._pacer.limit_bytes:
                yield batch
                batch, size = [], 0
            batch.append(operation)
            size += operation.size
        if batch:
            yield batch

    def _post(self, operations: list[BulkOperation]) -> ServerReply:
        return self._client.request("POST", _BULK_PATH, _join_operations(operations), NDJSON_TYPE)

    def _handle_reply(
        self,
        operations: list[BulkOperation],
        future: "Future[ServerReply] | None" = None,
        *,
        is_alone: bool = False,
    ) -> Iterator[RefusedDocument]:
        """Handle the reply to a request: split, retry, or judge each outcome."""
        reply = future.result() if future is not None else self._post(operations)
        if reply.status == HTTP_TOO_LARGE:
            self._pacer.halve_limit()
            if len(operations) == 1:
                yield too_large_refusal(operations[0])
                return
            half = len(operations) // 2
            yield from self._handle_reply(operations[:half])
            yield from self._handle_reply(operations[half:])
            return
        if reply.status == HTTP_TOO_MANY:
            self._pacer.halve_limit()
            yield from self._handle_overload(
                operations, unavailable_error(self._client, reply), is_alone=is_alone
            )
            return
        outcomes = decode_reply(self._client, reply, BulkReply).outcomes()
        if len(outcomes) != len(operations):
            raise ArchiveUnavailable(
                f"{self._client.where} replied for {len(outcomes)} of {len(operations)} documents",
                self._client.where,
            )
        yield from self._judge_outcomes(operations, outcomes, is_alone=is_alone)

    def _judge_outcomes(
        self, operations: list[BulkOperation], outcomes: list[BulkOutcome], *, is_alone: bool
    ) -> Iterator[RefusedDocument]:
        """Yield the refusals among the outcomes, provided that nothing must be sent again."""
        pairs = list(zip(operations, outcomes, strict=True))
        to_resend = [result for sent, result in pairs if _must_resend(sent, result)]
        if any(result.status == HTTP_TOO_MANY for result in to_resend):
            self._pacer.halve_limit()
            if len(to_resend) == len(operations):
                yield from self._handle_overload(
                    operations, _resend_error(self._client, to_resend), is_alone=is_alone
                )
                return
        if to_resend:
            raise _resend_error(self._client, to_resend)
        for operation, outcome in pairs:
            if outcome.is_shut:
                yield index_closed_refusal(self._client, operation.document, outcome.why)
            elif outcome.is_refused and not outcome.is_done:
                why = f"{self._client.product} rejects the document: {outcome.why}"
                yield RefusedDocument(document=operation.document, why=why)
        for operation in operations:
            self._overload_counts.pop(operation.document.id, None)
        conflicting = [
            sent for sent, result in pairs if sent.is_deletion and result.status == HTTP_CONFLICT
        ]
        if conflicting:
            yield from self._delete_later_versions(conflicting)
        self._pacer.raise_limit()

    def _handle_overload(
        self, operations: list[BulkOperation], error: ArchiveUnavailable, *, is_alone: bool
    ) -> Iterator[RefusedDocument]:
        """Handle a request for which the server has no room.

        A document is refused if the server repeatedly has no room for it while nothing else is in
        flight: it is larger than all the room there is.
        """
        if len(operations) > 1:
            raise error
        (operation,) = operations
        if not is_alone:
            # Requests in flight may have used up the room.
            self._await_in_flight()
            yield from self._handle_reply(operations, is_alone=True)
            return
        overload_count = self._overload_counts.pop(operation.document.id, 0) + 1
        if overload_count < _MAX_OVERLOADS:
            self._overload_counts[operation.document.id] = overload_count
            raise error
        yield RefusedDocument(
            document=operation.document,
            why=(
                f"the server has no memory for a document of {operation.size} bytes, even sent "
                "alone: raise its indexing_pressure.memory.limit, or its heap"
            ),
        )

    def _delete_later_versions(self, operations: list[BulkOperation]) -> Iterator[RefusedDocument]:
        """Delete documents that are stored in a later version: a purge always wins."""
        versions = fetch_versions(
            self._client, [(operation.document, operation.index) for operation in operations]
        )
        deletions = [
            delete_operation(operation.document, operation.index, version)
            for operation, version in zip(operations, versions, strict=True)
            if version is not None
        ]
        if any(
            operation.action == deletion.action
            for operation in operations
            for deletion in deletions
        ):
            raise ArchiveUnavailable(
                f"{self._client.where} does not delete documents: another program changes them "
                "at the same time",
                self._client.where,
            )
        if deletions:
            yield from self._handle_reply(deletions)


def _must_resend(operation: BulkOperation, outcome: BulkOutcome) -> bool:
    """Return True if an operation must be sent again unchanged."""
    if outcome.is_shut:
        return not is_past_month(operation.document)
    return not outcome.is_done and not outcome.is_refused


def index_closed_refusal(
    client: SearchClient, document: ArchivedDocument, why: str
) -> RefusedDocument:
    """Build the refusal of a document whose past month's index a person has closed."""
    return RefusedDocument(
        document=document,
        why=(
            f"the index of its month on {client.where} is closed or write-protected ({why}): "
            "open it, then run 'steward journal retry archive.NAME' with this sink's name"
        ),
    )


def too_large_refusal(operation: BulkOperation) -> RefusedDocument:
    """Build the refusal of a document that exceeds the server's request limit."""
    return RefusedDocument(
        document=operation.document,
        why=(
            f"document of {operation.size} bytes is larger than the server accepts: raise its "
            "http.max_content_length"
        ),
    )


def _join_operations(operations: list[BulkOperation]) -> bytes:
    """Join operations into a request body of JSON lines."""
    parts: list[bytes] = []
    for operation in operations:
        parts += (operation.action, operation.source) if operation.source else (operation.action,)
    parts.append(b"")
    return b"\n".join(parts)


def _resend_error(client: SearchClient, outcomes: list[BulkOutcome]) -> ArchiveUnavailable:
    """Build the error for documents that must be sent again, with a remedy."""
    first = outcomes[0]
    if first.status == HTTP_TOO_MANY:
        text = f"{client.where} is overloaded ({first.why})"
    elif first.type == "validation_exception":
        text = (
            f"{client.where} creates no more indices ({first.why}): delete old ones with "
            "retention_days, or raise its cluster.max_shards_per_node"
        )
    elif first.is_shut:
        text = (
            f"the index of the present month on {client.where} is closed or write-protected "
            f"({first.why}): open it, and archiving continues"
        )
    elif first.status == 403:
        text = (
            f"{client.where} rejects all writes ({first.why}): check the user's rights, and "
            "whether its disks are full"
        )
    elif first.type == "index_not_found_exception":
        text = (
            f"{client.where} does not create indices automatically: have its "
            f"action.auto_create_index allow {client.settings.index}-*"
        )
    else:
        text = f"{client.where} does not accept all documents now ({first.why})"
    return ArchiveUnavailable(text, client.where)


_LOOKUP_DOCUMENTS: Final = 500
"""Documents looked up in one request."""
_SIZE_FIELDS: Final = "version,script_bytes,environment_bytes"


class _StoredSize(msgspec.Struct, frozen=True):
    version: int = 0
    script_bytes: int = 0
    environment_bytes: int = 0


def read_corrections(
    client: SearchClient, corrections: Sequence[tuple[ArchivedDocument, str]], max_bytes: int
) -> Iterator[BulkOperation | RefusedDocument]:
    """Read stored documents and yield the operations that correct them.

    Args:
        client: The server.
        corrections: Documents with distinct ids, each with the name of its index.
        max_bytes: Most bytes of documents to hold in memory.

    Raises:
        ArchiveUnavailable: The server is away.
    """
    for first in range(0, len(corrections), _LOOKUP_DOCUMENTS):
        batch = corrections[first : first + _LOOKUP_DOCUMENTS]
        stored_sizes = fetch_documents(client, batch, f"_source_includes={_SIZE_FIELDS}")
        sized_documents: list[tuple[ArchivedDocument, str, int]] = []
        for (document, index), stored in zip(batch, stored_sizes, strict=True):
            if not stored.found:
                yield _unread_refusal(client, document, stored)
                continue
            size = msgspec.json.decode(stored.source, type=_StoredSize)
            if size.version <= document.version:
                sized_documents.append(
                    (document, index, 3 * size.script_bytes + 3 * size.environment_bytes)
                )
        yield from _read_in_batches(client, sized_documents, max_bytes)


def _read_in_batches(
    client: SearchClient,
    sized_documents: Sequence[tuple[ArchivedDocument, str, int]],
    max_bytes: int,
) -> Iterator[BulkOperation | RefusedDocument]:
    """Group documents by size, so that each group fits in memory."""
    batch: list[tuple[ArchivedDocument, str]] = []
    size = 0
    for document, index, bytes_ in sized_documents:
        if batch and size + bytes_ > max_bytes:
            yield from _read_documents(client, batch)
            batch, size = [], 0
        batch.append((document, index))
        size += bytes_
    if batch:
        yield from _read_documents(client, batch)


def _read_documents(
    client: SearchClient, batch: Sequence[tuple[ArchivedDocument, str]]
) -> Iterator[BulkOperation | RefusedDocument]:
    """Fetch stored documents and yield the operations that replace them."""
    stored_documents = fetch_documents(client, batch, "_source=true")
    for (document, index), stored in zip(batch, stored_documents, strict=True):
        if not stored.found:
            yield _unread_refusal(client, document, stored)
        else:
            yield index_operation(document, index, apply_correction(bytes(stored.source), document))


def _unread_refusal(
    client: SearchClient, document: ArchivedDocument, stored: StoredDocument
) -> RefusedDocument:
    """Handle a document that could not be read: refuse it, or raise to retry."""
    if not stored.is_shut:
        return _missing_refusal(document)
    if is_past_month(document):
        return index_closed_refusal(client, document, str(stored.error))
    raise ArchiveUnavailable(
        f"the index of the present month on {client.where} is closed ({stored.error}): open it, "
        "and Steward continues with the corrections",
        client.where,
    )


def _missing_refusal(document: ArchivedDocument) -> RefusedDocument:
    """Build the refusal of a correction whose document the server does not have."""
    return RefusedDocument(
        document=document,
        why="the server lacks the document to correct: 'steward archive resend' sends it whole",
    )
