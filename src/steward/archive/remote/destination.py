"""Remote destinations: interface of the remote sink to Elasticsearch, OpenSearch and Kafka.

:class:`ArchivedDocument` is what :class:`.sink.RemoteSink` sends; a :class:`Destination` delivers
it; :class:`RefusedDocument` is a document that the server will never accept. Extensions offer a
:class:`SinkKind` by the entry point group ``steward.sink``, with an optional :class:`SinkSearcher`
(``steward archive search --in``).
"""

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from steward.archive.settings import FilesSinkSettings
from steward.core.config import Settings
from steward.core.errors import StewardError, UsageError
from steward.core.events import JobIdentity, JobScript
from steward.core.extensions import load_offer

if TYPE_CHECKING:
    from steward.archive.catalog.matches import TermMatcher
    from steward.archive.catalog.month import ScriptUse
    from steward.archive.catalog.search import HitPage, UseFilter, UsePosition


class ArchivedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One archived script in its present version; it is sent again when it changes.

    Attributes:
        cluster: The cluster's name.
        key: Key of the job.script event.
        version: Version, which grows with every change of the document.
        body: Body of the job.script event; None if it is no longer known, which happens only if
            ``partial`` or ``deleted``.
        identity: Latest identity of the job; None until Slurm confirms it (unverified).
        script: Bytes of the script, as archived.
        environment: Bytes of the environment, redacted, as archived.
        partial: The bytes are no longer available: only ``identity`` changed.
        deleted: The script was purged: the server must delete all of it.
        corrects: The server has an earlier version with the bytes; only the job's details changed.
    """

    cluster: str
    key: str
    version: int
    body: JobScript | None = None
    identity: JobIdentity | None = None
    script: bytes | None = None
    environment: bytes | None = None
    partial: bool = False
    deleted: bool = False
    corrects: bool = False

    @property
    def id(self) -> str:
        """Return the unique id in all clusters: ``hpc1/1234:1763740800000000000``.

        It consists of cluster, job id, and the script's time in the scheduler's spool in ns since
        the epoch.
        """
        return f"{self.cluster}/{self.key.removeprefix('script:')}"

    @property
    def job_id(self) -> int:
        """Return the id in the spool entry's name."""
        return int(self.key.split(":")[1])

    @property
    def spool_mtime_ns(self) -> int:
        """Return the script's time in the spool, ns since the epoch; it selects the month."""
        return int(self.key.split(":")[2])


class RefusedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Document that the server rejects permanently.

    Attributes:
        document: The document.
        why: The reason, and the setting to change if one helps.
    """

    document: ArchivedDocument
    why: str


class Destination(Protocol):
    """Connection to a server. One thread of one process creates, uses and closes it."""

    def send(self, documents: Sequence[ArchivedDocument]) -> list[RefusedDocument]:
        """Send documents in order; on return each is durable on the server, or refused.

        Sending one again does no harm, nor does an older version after a newer one.

        Raises:
            Unavailable: The server is unavailable, or asks to retry later (429); the whole batch is
                sent again.
        """
        ...

    def expire(self, before: datetime) -> None:
        """Remove documents older than a time (UTC), if the server does not expire them itself.

        Raises:
            Unavailable: As for :meth:`send`.
        """
        ...

    def close(self) -> None:
        """Close connections; unacknowledged documents may be lost on the server, not here."""
        ...


log = logging.getLogger(__name__)

SINK_ENTRY_POINTS: Final = "steward.sink"
"""Group of entry points. The name of each is a ``kind`` in [archive.sink.NAME]."""


class SinkSearcher(Protocol):
    """Searcher of one sink, with the interface of the catalog's searcher."""

    def find_page(
        self,
        matcher: "TermMatcher",
        use_filter: "UseFilter",
        is_allowed: Callable[["ScriptUse"], bool],
        *,
        limit: int,
        lines: int = 3,
        after: "UsePosition | None" = None,
        timeout_s: float = 10.0,
    ) -> "HitPage":
        """Return the next hits, as ``CatalogSearcher.find_page`` of the catalog does.

        Raises:
            ArchiveUnavailable: The server does not answer.
            UsageError: The query names too many jobs.
        """

    def count(
        self,
        matcher: "TermMatcher",
        use_filter: "UseFilter",
        is_allowed: Callable[["ScriptUse"], bool],
        *,
        timeout_s: float = 60.0,
    ) -> int | None:
        """Return the number of all hits; None if counting took too long.

        Raises:
            ArchiveUnavailable: The server does not answer.
            UsageError: The query names too many jobs.
        """

    def close(self) -> None:
        """Close all connections."""


class SinkKind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of sink on other machines.

    Attributes:
        destination: Creates the destination of a sink from its settings and name; raises
            Unavailable if that fails for now.
        searcher: Creates the searcher of a sink from its settings; None if sinks of this kind
            cannot be searched.
    """

    destination: Callable[[Any, str], Destination]
    searcher: Callable[[Any], SinkSearcher] | None = None


def load_sink_kind(kind: str) -> SinkKind:
    """Load a sink kind from the extension that offers it.

    Raises:
        StewardError: No installed package offers the kind, or its import fails.
    """
    offer: SinkKind = load_offer(SINK_ENTRY_POINTS, kind)
    return offer


def resolve_searchable_sink(settings: Settings, name: str) -> str:
    """Resolve ``--in NAME`` to a sink: by its name, or by a kind that only one sink has.

    Raises:
        UsageError: No sink has this name or kind, several have the kind, or it is not searchable.
    """
    sinks = settings.archive.sink
    searchable = [
        sink_name
        for sink_name, sink in sinks.items()
        if not isinstance(sink, FilesSinkSettings) and _is_searchable(sink.kind)
    ]
    if name in searchable:
        return name
    if name in sinks:
        raise UsageError(
            f"sink {name!r} of kind {sinks[name].kind!r} cannot be searched: omit --in to search "
            "the catalog",
            name,
        )
    of_kind = [sink_name for sink_name in searchable if sinks[sink_name].kind == name]
    if len(of_kind) == 1:
        return of_kind[0]
    if of_kind:
        raise UsageError(
            f"several sinks are of kind {name!r}: use one of {_join_names(of_kind)}", name
        )
    hint = (
        f"use one of {_join_names(searchable)}"
        if searchable
        else "no sink can be searched: omit --in to search the catalog"
    )
    raise UsageError(f"no searchable sink {name!r}: {hint}", name)


def _is_searchable(kind: str) -> bool:
    try:
        return load_sink_kind(kind).searcher is not None
    except StewardError as error:
        # The sink itself reports it; the other sinks can be searched.
        log.debug("%s", error)
        return False


def make_sink_searcher(settings: Settings, name: str) -> SinkSearcher:
    """Create the searcher of a sink that :func:`resolve_searchable_sink` returned."""
    sink = settings.archive.sink[name]
    make_searcher = load_sink_kind(sink.kind).searcher
    assert make_searcher is not None, "sink_called returns only searchable sinks"
    return make_searcher(sink)


def _join_names(names: list[str]) -> str:
    return ", ".join(sorted(names))
