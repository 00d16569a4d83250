"""Search server sink: sends documents to Elasticsearch or OpenSearch and drops expired months.

:class:`SearchDestination` implements the archive's ``Destination``: it prepares the index template,
sends documents through ``bulk.BulkSender``, corrects stored ones, and returns refusals.
:data:`SINK_KIND` registers it together with the searcher in ``search``.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from steward.archive.errors import ArchiveUnavailable
from steward.archive.remote.destination import (
    ArchivedDocument,
    RefusedDocument,
    SinkKind,
    SinkSearcher,
)
from steward.extensions.search_servers.bulk import (
    BulkOperation,
    BulkSender,
    RequestPacer,
    delete_operation,
    index_operation,
    read_corrections,
    too_large_refusal,
)
from steward.extensions.search_servers.client import (
    HTTP_MISSING,
    REQUEST_TIMEOUT_S,
    SearchClient,
    decode_reply,
    parse_cause,
)
from steward.extensions.search_servers.documents import build_source, document_month, encode_source
from steward.extensions.search_servers.index_template import (
    check_product,
    fetch_max_request,
    put_template,
)
from steward.extensions.search_servers.settings import SearchSinkSettings

log = logging.getLogger(__name__)

_REQUEST_BYTES: Final = 2 << 20
"""Target size of a request: larger ones are no faster, and overload a server with a small heap."""

_MONTH_PATTERN: Final = re.compile(r"(\d{4})\.(0[1-9]|1[0-2])")


class SearchDestination:
    """Destination on Elasticsearch or OpenSearch; see ``archive.remote.destination.Destination``.

    It connects at the first call. A document's index is that of its script's month in the spool, so
    repeats and corrections go to the same index.

    Args:
        settings: The sink's settings.
        request_bytes: Target size of a request.
        timeout_s: Time limit of one request, in seconds.
    """

    def __init__(
        self,
        settings: SearchSinkSettings,
        *,
        request_bytes: int = _REQUEST_BYTES,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._settings = settings
        self._client = SearchClient(settings, timeout_s)
        self._pacer = RequestPacer(request_bytes)
        self._sender = BulkSender(self._client, self._pacer)
        self._max_request_bytes = 0
        self._is_ready = False
        self._checked_indices: set[str] = set()
        self._warned: set[str] = set()

    def send(self, documents: Sequence[ArchivedDocument]) -> list[RefusedDocument]:
        """Send documents; see :class:`steward.archive.remote.destination.Destination`.

        Raises:
            ArchiveUnavailable: The server is away or overloaded.
        """
        refusals: list[RefusedDocument] = []
        try:
            self._prepare()
            for batch in _split_duplicates(documents):
                refusals += self._send_distinct(batch)
        except ArchiveUnavailable:
            self._is_ready = False
            raise
        return refusals

    def expire(self, before: datetime) -> None:
        """Drop the indices of months that ended before a time.

        Raises:
            ArchiveUnavailable: The server is away, or permission is missing.
        """
        alias = self._settings.index
        try:
            self._prepare()
            reply = self._client.request("GET", f"/{alias}-*/_alias/{alias}")
            if reply.status == HTTP_MISSING:
                return
            aliases_by_index: dict[str, Any] = decode_reply(self._client, reply, dict[str, Any])
            for index in sorted(aliases_by_index):
                if _is_expired_month(index.removeprefix(f"{alias}-"), before):
                    self._drop_index(index, before)
        except ArchiveUnavailable:
            self._is_ready = False
            raise

    def _drop_index(self, index: str, before: datetime) -> None:
        """Delete one month's index; warn once if a person protects it."""
        reply = self._client.request("DELETE", f"/{index}")
        if parse_cause(reply).is_shut:
            # Somebody protects this index; the other months must go on.
            self._warn_once(
                index,
                f"cannot delete index {index}, which is older than retention_days "
                f"({parse_cause(reply)}): remove its block, or delete it",
            )
            return
        decode_reply(self._client, reply, dict[str, Any])
        self._checked_indices.discard(index)
        log.info("%s: deleted the index, all its documents are older than %s", index, before.date())

    def _warn_once(self, subject: str, message: str) -> None:
        """Log a warning once for each subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            log.warning("%s: %s", self._client.where, message)

    def close(self) -> None:
        """Close connections and end the threads."""
        self._sender.close()
        self._client.close()

    def _prepare(self) -> None:
        """Check the product, install the template and read the request limit, once."""
        if self._is_ready:
            return
        check_product(self._client)
        put_template(self._client)
        self._checked_indices.clear()
        self._max_request_bytes = fetch_max_request(self._client)
        if self._max_request_bytes:
            self._pacer.lower_bound(self._max_request_bytes)
        self._is_ready = True

    def _send_distinct(self, documents: Sequence[ArchivedDocument]) -> list[RefusedDocument]:
        """Send documents with distinct ids."""
        refusals: list[RefusedDocument] = []
        corrections: list[tuple[ArchivedDocument, str]] = []
        operations = self._build_operations(documents, corrections, refusals)
        refusals += self._sender.send(self._filter_oversized(operations, refusals))
        updates = read_corrections(self._client, corrections, self._pacer.limit_bytes)
        refusals += self._sender.send(self._filter_oversized(updates, refusals))
        if len(refusals) == len(documents) > 1:
            self._warn_of_template(refusals)
        return refusals

    def _warn_of_template(self, refusals: Sequence[RefusedDocument]) -> None:
        """Warn about the index template where the server rejects every document."""
        first = refusals[0]
        self._warn_once(
            first.why,
            f"none of {len(refusals)} documents was accepted ({first.why}): a template or "
            "mapping of the site must accept Steward's documents; GET "
            f"/_index_template/{self._settings.index} shows Steward's",
        )

    def _build_operations(
        self,
        documents: Sequence[ArchivedDocument],
        corrections: list[tuple[ArchivedDocument, str]],
        refusals: list[RefusedDocument],
    ) -> Iterator[BulkOperation]:
        """Yield operations that send whole documents; add corrections and refusals to the lists."""
        for document in documents:
            try:
                index = f"{self._settings.index}-{document_month(document)}"
            except OverflowError:
                reason = "its spool time is out of range: no index can take the document"
                refusals.append(RefusedDocument(document=document, why=reason))
                continue
            self._ensure_template(index)
            if document.deleted:
                yield delete_operation(document, index)
            elif document.partial:
                corrections.append((document, index))
            else:
                yield index_operation(document, index, encode_source(build_source(document)))

    def _ensure_template(self, index: str) -> None:
        """Check the template before an index's first document, which creates the index."""
        if index not in self._checked_indices:
            put_template(self._client)
            self._checked_indices.add(index)

    def _filter_oversized(
        self, operations: Iterable[BulkOperation | RefusedDocument], refusals: list[RefusedDocument]
    ) -> Iterator[BulkOperation]:
        """Yield operations within the request limit; collect the refusals."""
        for operation in operations:
            if isinstance(operation, RefusedDocument):
                refusals.append(operation)
            elif self._max_request_bytes and operation.size > self._max_request_bytes:
                refusals.append(too_large_refusal(operation))
            else:
                yield operation


def _split_duplicates(documents: Sequence[ArchivedDocument]) -> list[list[ArchivedDocument]]:
    """Split documents into rounds without duplicate ids, so that each id keeps its order."""
    rounds: list[list[ArchivedDocument]] = []
    next_round: dict[str, int] = {}
    for document in documents:
        round_index = next_round.get(document.id, 0)
        next_round[document.id] = round_index + 1
        if round_index == len(rounds):
            rounds.append([])
        rounds[round_index].append(document)
    return rounds


def _is_expired_month(month: str, before: datetime) -> bool:
    """Return True if the month at the end of an index's name ended before the time."""
    match = _MONTH_PATTERN.fullmatch(month)
    if match is None:
        return False  # not an index of this sink
    year, number = int(match[1]), int(match[2])
    latest = before.astimezone(UTC)
    return (year, number) < (latest.year, latest.month)


def _make_destination(settings: SearchSinkSettings, _name: str) -> SearchDestination:
    return SearchDestination(settings)


def _make_searcher(settings: SearchSinkSettings) -> SinkSearcher:
    # Imported late: the process of a sink never searches.
    from steward.extensions.search_servers import search

    return search.SearchServerSearcher(settings)


SINK_KIND: Final = SinkKind(destination=_make_destination, searcher=_make_searcher)
"""Sink kind behind [archive.sink.NAME] with kind = "elasticsearch" or "opensearch"."""
