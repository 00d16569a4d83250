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
    CONCURRENT_REQUESTS,
    HTTP_MISSING,
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
    """

    def __init__(self, settings: SearchSinkSettings) -> None:
        self._settings = settings
        self._client = SearchClient(settings)
        self._pace = RequestPacer(min(_REQUEST_BYTES, settings.batch_bytes // CONCURRENT_REQUESTS))
        self._bulk = BulkSender(self._client, self._pace)
        self._longest = 0
        self._ready = False
        self._seen: set[str] = set()
        self._told: set[str] = set()

    def send(self, documents: Sequence[ArchivedDocument]) -> list[RefusedDocument]:
        """Send documents; see :class:`steward.archive.remote.destination.Destination`.

        Raises:
            ArchiveUnavailable: The server is away or overloaded.
        """
        refusals: list[RefusedDocument] = []
        try:
            self._prepare()
            for some in _split_duplicates(documents):
                refusals += self._send(some)
        except ArchiveUnavailable:
            self._ready = False
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
            found: dict[str, Any] = decode_reply(self._client, reply, dict[str, Any])
            for name in sorted(found):
                if _is_expired_month(name.removeprefix(f"{alias}-"), before):
                    self._drop(name, before)
        except ArchiveUnavailable:
            self._ready = False
            raise

    def _drop(self, name: str, before: datetime) -> None:
        """Delete one month's index; warn once if a person protects it."""
        reply = self._client.request("DELETE", f"/{name}")
        if parse_cause(reply).is_shut:
            # Somebody protects this index; the other months must go on.
            self._tell(
                name,
                f"index {name} is older than retention_days and cannot be dropped "
                f"({parse_cause(reply)}): take its block away, or drop it",
            )
            return
        decode_reply(self._client, reply, dict[str, Any])
        self._seen.discard(name)
        log.info("%s: dropped, everything in it is older than %s", name, before.date())

    def _tell(self, about: str, text: str) -> None:
        """Log a warning once for each subject."""
        if about not in self._told:
            self._told.add(about)
            log.warning("%s: %s", self._client.where, text)

    def close(self) -> None:
        """Close connections and end the threads."""
        self._bulk.close()
        self._client.close()

    def _prepare(self) -> None:
        """Check the product, install the template and read the request limit, once."""
        if self._ready:
            return
        check_product(self._client)
        put_template(self._client)
        self._seen.clear()
        self._longest = fetch_max_request(self._client)
        if self._longest:
            self._pace.bound(self._longest)
        self._ready = True

    def _send(self, documents: Sequence[ArchivedDocument]) -> list[RefusedDocument]:
        """Send documents with distinct ids."""
        refusals: list[RefusedDocument] = []
        corrected: list[tuple[ArchivedDocument, str]] = []
        operations = self._operations(documents, corrected, refusals)
        refusals += self._bulk.send(self._that_fit(operations, refusals))
        found = read_corrections(self._client, corrected, self._pace.bytes)
        refusals += self._bulk.send(self._that_fit(found, refusals))
        if len(refusals) == len(documents) > 1:
            self._tell_of_index(refusals)
        return refusals

    def _tell_of_index(self, refusals: Sequence[RefusedDocument]) -> None:
        """Warn about the index template where the server rejects every document."""
        first = refusals[0]
        self._tell(
            first.why,
            f"none of {len(refusals)} documents was taken ({first.why}): where the index "
            f"template or the mapping is the site's own, it has to take what Steward sends; "
            f"GET /_index_template/{self._settings.index} shows Steward's",
        )

    def _operations(
        self,
        documents: Sequence[ArchivedDocument],
        corrected: list[tuple[ArchivedDocument, str]],
        refusals: list[RefusedDocument],
    ) -> Iterator[BulkOperation]:
        """Yield operations that send whole documents; add corrections and refusals to the lists."""
        for document in documents:
            try:
                name = f"{self._settings.index}-{document_month(document)}"
            except OverflowError:
                why = "its time in the spool is in no calendar: nothing can be done"
                refusals.append(RefusedDocument(document=document, why=why))
                continue
            self._look_at(name)
            if document.deleted:
                yield delete_operation(document, name)
            elif document.partial:
                corrected.append((document, name))
            else:
                yield index_operation(document, name, encode_source(build_source(document)))

    def _look_at(self, name: str) -> None:
        """Check the template before an index's first document, which creates the index."""
        if name not in self._seen:
            put_template(self._client)
            self._seen.add(name)

    def _that_fit(
        self, found: Iterable[BulkOperation | RefusedDocument], refusals: list[RefusedDocument]
    ) -> Iterator[BulkOperation]:
        """Yield operations within the request limit; collect the refusals."""
        for one in found:
            if isinstance(one, RefusedDocument):
                refusals.append(one)
            elif self._longest and one.size > self._longest:
                refusals.append(too_large_refusal(one))
            else:
                yield one


def _split_duplicates(documents: Sequence[ArchivedDocument]) -> list[list[ArchivedDocument]]:
    """Split documents into rounds without duplicate ids, so that each id keeps its order."""
    rounds: list[list[ArchivedDocument]] = []
    seen: dict[str, int] = {}
    for document in documents:
        number = seen.get(document.id, 0)
        seen[document.id] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(document)
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
