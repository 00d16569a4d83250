"""Archive maintenance: the operators' actions verify, reindex, erase, sinks and resend.

:func:`verify_sinks` recomputes checksums, :func:`rebuild_catalog` rebuilds the catalog,
:func:`erase_scripts` orders the removal of scripts, :func:`show_sinks` reports lag and errors of
each sink, and :func:`resend_scripts` orders a sink to archive scripts again. An order is an
archive.purge or archive.resend event in the journal, which the sinks apply later. Context of all:
:class:`ArchiveContext`. The catalog is the consumer ``catalog``; sinks are the consumers
``archive.NAME``.
"""

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from steward.archive.catalog.rebuild import CatalogRebuild
from steward.archive.context import ArchiveContext
from steward.archive.export import iterate_scripts
from steward.archive.files.index import WAITING, FilesRecords
from steward.archive.files.reader import FilesReader
from steward.archive.files.verify import VerificationProgress, iterate_tree_verifications
from steward.archive.remote.records import AWAITS_IDENTITY, DUE, RemoteRecords
from steward.archive.remote.sink import RemoteSink
from steward.archive.requests import (
    ErasedScript,
    EraseReply,
    EraseRequest,
    ProblemLine,
    Progress,
    ReindexReply,
    ReindexRequest,
    ResendReply,
    ResendRequest,
    SinkLine,
    SinksReply,
    SinksRequest,
    SinkState,
    VerifyReply,
    VerifyRequest,
)
from steward.archive.selection import make_job_filter, resolve_selection_span
from steward.archive.settings import FilesSinkSettings
from steward.core.access import Caller
from steward.core.actions import action
from steward.core.config import Settings
from steward.core.databases import SINK
from steward.core.errors import PermissionRefused, StewardError, Unavailable, UsageError
from steward.core.events import (
    ARCHIVE_PURGE,
    ARCHIVE_RESEND,
    ArchivePurge,
    ArchiveResend,
    Event,
    ResentScript,
)
from steward.core.journal import ConsumerStatus, JournalReader, refill_command
from steward.core.sqlite import SqliteUnavailable
from steward.core.storage import read_cursor
from steward.jobs import Job, JobFilter, Script, build_identity

log = logging.getLogger(__name__)

_MAX_EVENT_KEYS = 1000
_MAX_REASON = 1000


class NotAnOperator(PermissionRefused):
    """Error: the user is not an operator."""


class OrderError(StewardError):
    """Error: this process cannot append events to the journal."""


@action(
    "archive.verify",
    scope="admin",
    role="operator",
    command="archive verify",
    rows="problems",
)
def verify_sinks(
    context: ArchiveContext, caller: Caller, request: VerifyRequest
) -> Iterator[ProblemLine | Progress | VerifyReply]:
    """Recompute the checksum of every archived file.

    The command lists missing, changed, unknown and unreadable files, and exits with 1
    if there are any.

    Raises:
        NotAnOperator: The caller is not an operator.
        UsageError: There is no such sink of files.
    """
    require_operator(context, caller, "verify the archive")
    return _stream_verification(context, _select_files_sinks(context, request.sink))


@action(
    "archive.reindex",
    scope="admin",
    role="administrator",
    command="archive reindex",
)
def rebuild_catalog(
    context: ArchiveContext, caller: Caller, request: ReindexRequest
) -> Iterator[Progress | ReindexReply]:
    """Rebuild the catalog from the archived files.

    Searches use the old catalog until the new one is complete.

    Raises:
        NotAnOperator: The caller is not an operator.
        UsageError: There is no such sink of files.
    """
    require_operator(context, caller, "rebuild the catalog")
    sinks = _select_files_sinks(context, request.sink)
    if not sinks:
        raise UsageError(
            "cannot rebuild the catalog: it needs a sink of kind 'files', and none is configured"
        )
    return _stream_rebuild(context, CatalogRebuild(context.settings, sinks[0]).run())


def _stream_rebuild(
    context: ArchiveContext, items: Iterator[Progress | ReindexReply]
) -> Iterator[Progress | ReindexReply]:
    for item in items:
        if isinstance(item, ReindexReply):
            try:
                report_refill(context, "catalog", None)
            except Unavailable as error:
                # The catalog is complete; it does no harm if the journal still suggests a rebuild.
                log.debug("cannot report the new catalog to the journal: %s", error)
        yield item


def report_refill(context: ArchiveContext, consumer: str, since: datetime | None) -> None:
    """Tell the journal that a consumer gets the events that it missed, if it missed any.

    Args:
        context: Context with the connection to the journal.
        consumer: The consumer's name.
        since: Submit time of the oldest job that it gets again; None for all jobs.

    Raises:
        Unavailable: The journal cannot be reached now.
    """
    reader = JournalReader(context.settings.state_dir)
    try:
        missed = any(status.missed for status in reader.list_consumers() if status.name == consumer)
    finally:
        reader.close()
    if missed and context.mark_refilled is not None:
        context.mark_refilled(consumer, int(since.timestamp()) if since else 0)


@action(
    "archive.erase",
    scope="admin",
    role="operator",
    command="archive erase",
    rows="scripts",
    writes=True,
)
def erase_scripts(context: ArchiveContext, caller: Caller, request: EraseRequest) -> EraseReply:
    """Remove scripts and environments permanently.

    Name jobs (-j) or users (-u). Steward erases their scripts and environments from
    every sink and the catalog, and private texts from the job records. Without --yes,
    the command only lists the scripts. If no script matches, it exits with 1.

    Raises:
        NotAnOperator: The caller is not an operator.
        UsageError: Neither jobs nor users are named, or there is no such sink.
        OrderError: This process cannot append to the journal.
    """
    require_operator(context, caller, "erase scripts", request.clusters)
    if not request.jobs and not request.users:
        raise UsageError("no scripts selected: give `jobs` or `users`")
    if request.sink:
        select_sinks(context, request.sink)
    span = resolve_selection_span(context, request, default=False)
    job_filter = make_job_filter(request, span, context.get_visible_jobs(caller, scripts=True))
    scripts = list(iterate_scripts(context, caller, job_filter, include_unused=True))
    lines = tuple(
        ErasedScript(
            job=context.make_job_line(caller, job, script),
            script=context.make_script_line(script, request.sink),
        )
        for job, script in scripts
    )
    if request.yes and scripts:
        if context.order is None:
            raise OrderError(
                "cannot erase without the daemon: start 'steward serve', and run the command there"
            )
        context.order(_make_purge_events(context, caller, request, scripts))
    sizes = ((line.script.length or 0) + (line.script.environment_length or 0) for line in lines)
    return EraseReply(
        done=request.yes,
        scripts=lines,
        total_bytes=sum(sizes),
        sinks=tuple(select_sinks(context, request.sink)),
    )


def _make_purge_events(
    context: ArchiveContext,
    caller: Caller,
    request: EraseRequest,
    scripts: Sequence[tuple[Job, Script]],
) -> list[Event]:
    """Make the archive.purge events, in batches by cluster."""
    keys: dict[str, list[str]] = {}
    for _, script in scripts:
        keys.setdefault(script.cluster, []).append(script.key)
    events = []
    for cluster, cluster_keys in keys.items():
        for start in range(0, len(cluster_keys), _MAX_EVENT_KEYS):
            body = ArchivePurge(
                script_keys=tuple(cluster_keys[start : start + _MAX_EVENT_KEYS]),
                sink=request.sink,
                asked_by=caller.signature,
                reason=request.reason[:_MAX_REASON],
            )
            events.append(make_order_event(context, cluster, ARCHIVE_PURGE, body, body.script_keys))
    return events


def make_order_event(
    context: ArchiveContext,
    cluster: str,
    kind: str,
    body: ArchivePurge | ArchiveResend,
    script_keys: Sequence[str],
) -> Event:
    """Make an archive.purge or archive.resend event; each has a new key, so it can be repeated.

    Args:
        context: Context with the clock.
        cluster: The scripts' cluster.
        kind: ``archive.purge`` or ``archive.resend``.
        body: Body of the event.
        script_keys: Keys of the scripts.
    """
    now = context.now()
    verb = kind.rpartition(".")[2]
    digest = hashlib.sha256("\n".join(script_keys).encode()).hexdigest()[:16]
    return Event(
        kind=kind,
        cluster=cluster,
        key=f"{verb}:{time.time_ns()}:{digest}",
        at=now,
        seen_at=now,
        source=verb,
        body=body,
    )


def _stream_verification(
    context: ArchiveContext, sinks: Sequence[str]
) -> Iterator[ProblemLine | Progress | VerifyReply]:
    problems = files = total_bytes = 0
    for sink in sinks:
        for tree in iterate_tree_verifications(context.settings, sink):
            progress = VerificationProgress(files=0, total_files=0, total_bytes=0)
            for item in tree:
                if isinstance(item, VerificationProgress):
                    progress = item
                    yield Progress(done=item.files, total=item.total_files, what="files")
                    continue
                problems += 1
                yield ProblemLine(
                    sink=sink,
                    problem=item.kind,
                    path=item.path,
                    script_key=item.script_key,
                    detail=item.detail,
                )
            files += progress.files
            total_bytes += progress.total_bytes
    yield VerifyReply(files=files, total_bytes=total_bytes, problems=problems)


def select_sinks(context: ArchiveContext, name: str) -> list[str]:
    """Return the sink of a name, or all sinks if the name is empty.

    Raises:
        UsageError: There is no such sink.
    """
    names = list(context.settings.archive.sink)
    if name and name not in names:
        raise UsageError(f"unknown sink {name!r}: use one of {', '.join(names)}", name)
    return [name] if name else names


def _select_files_sinks(context: ArchiveContext, name: str) -> list[str]:
    """Return the files sink of a name, or all files sinks if the name is empty."""
    trees = context.settings.files_sinks()
    sinks = [sink for sink in select_sinks(context, name) if sink in trees]
    if name and not sinks:
        raise UsageError(
            f"sink {name!r} is not of kind 'files', so Steward cannot read its content", name
        )
    return sinks


def require_operator(
    context: ArchiveContext, caller: Caller, task: str, clusters: Sequence[str] = ()
) -> None:
    """Raise NotAnOperator unless the user is an operator of these clusters, or of all.

    Raises:
        NotAnOperator: The user is not an operator.
    """
    is_operator = (
        all(context.access.is_operator(caller, cluster) for cluster in clusters)
        if clusters
        else context.is_operator(caller)
    )
    if not is_operator:
        raise NotAnOperator(f"permission denied: only operators may {task}", caller)


_PREFIX = "archive."


class SinkBacklog(msgspec.Struct, frozen=True, kw_only=True):
    """Backlog of a sink according to its own database.

    Attributes:
        cursor: Position of the last event it applied or accepted.
        scripts: Number of scripts accepted and not archived yet.
        since_ns: Time at which the oldest of them was accepted, ns since the epoch.
    """

    cursor: int = 0
    scripts: int = 0
    since_ns: int | None = None


@action(
    "archive.sinks",
    scope="read",
    role="operator",
    command="archive sinks",
    rows="sinks",
)
def show_sinks(context: ArchiveContext, caller: Caller, _request: SinksRequest) -> SinksReply:
    """Show state, backlog and errors of each sink.

    Backlog is the number of scripts to archive. Oldest is the age of the oldest of them.
    Rate is the number of events applied per second in the last minute.

    Raises:
        NotAnOperator: The caller is not an operator.
    """
    require_operator(context, caller, "see the sinks")
    configured = context.settings.archive.sink
    reader = JournalReader(context.settings.state_dir)
    try:
        statuses = {
            status.name.removeprefix(_PREFIX): status
            for status in reader.list_consumers()
            if status.name.startswith(_PREFIX)
        }
        names = [*configured, *(name for name in statuses if name not in configured)]
        lines = tuple(_make_sink_line(context, reader, name, statuses.get(name)) for name in names)
    finally:
        reader.close()
    return SinksReply(sinks=lines)


def _make_sink_line(
    context: ArchiveContext, reader: JournalReader, name: str, status: ConsumerStatus | None
) -> SinkLine:
    """Make the reply row of a sink."""
    sink_settings = context.settings.archive.sink.get(name)
    own_backlog = (
        read_sink_backlog(context.settings, name) if sink_settings is not None else SinkBacklog()
    )
    # The sink's own cursor is exact, but does not move for events of other kinds.
    position = (
        max(own_backlog.cursor, status.position) if status is not None else own_backlog.cursor
    )
    backlog = reader.count_backlog(name, position, RemoteSink.kinds)
    oldest_times = [backlog.oldest] if backlog.oldest else []
    if own_backlog.since_ns is not None:
        oldest_times.append(datetime.fromtimestamp(own_backlog.since_ns / 1e9, UTC))
    line = SinkLine(
        name=name,
        kind=sink_settings.kind if sink_settings is not None else "",
        state="new",
        backlog=backlog.scripts + own_backlog.scripts,
        lag=backlog.events + own_backlog.scripts,
        oldest_s=max(timedelta(), context.now() - min(oldest_times)).total_seconds()
        if oldest_times
        else None,
    )
    if status is None:
        return line
    return msgspec.structs.replace(
        line,
        state=_get_sink_state(status, is_configured=sink_settings is not None),
        detail=status.detail,
        position=status.position,
        error=status.error,
        error_at=datetime.fromtimestamp(status.error_at, UTC) if status.error_at else None,
        rate=status.rate,
        dead_letters=status.dead_letters,
        missed=status.missed,
        refill=refill_command(status.name, status.missed_from) if status.missed else "",
    )


def _get_sink_state(status: ConsumerStatus, *, is_configured: bool) -> SinkState:
    if not is_configured:
        return "removed"
    if status.detached:
        return "detached"
    return "running" if status.state == "running" else "waiting"


def read_sink_backlog(settings: Settings, name: str) -> SinkBacklog:
    """Read a sink's backlog from its database; zero before its first run."""
    if isinstance(settings.archive.sink[name], FilesSinkSettings):
        try:
            files = FilesRecords(settings, name, read_only=True)
        except Unavailable:
            return SinkBacklog()
        try:
            ((scripts, since_ns),) = files.query(
                "SELECT count(*), min(since_ns) FROM script WHERE state = ?", WAITING
            )
            return SinkBacklog(cursor=files.load_cursor(), scripts=scripts, since_ns=since_ns)
        finally:
            files.close()
    try:
        remote = RemoteRecords(SINK.locate(settings.state_dir, name), read_only=True)
    except Unavailable:
        return SinkBacklog()
    try:
        scripts, since_ns = remote.count_unsent()
        return SinkBacklog(cursor=read_cursor(remote.database), scripts=scripts, since_ns=since_ns)
    finally:
        remote.close()


_MAX_EVENT_SCRIPTS = 200
_PURGES_AT_ONCE = 100

ResendRef = tuple[str, str]
"""Identity of a script: (cluster, key)."""


@action(
    "archive.resend",
    scope="admin",
    role="operator",
    command="archive resend",
    writes=True,
)
def resend_scripts(
    context: ArchiveContext, caller: Caller, request: ResendRequest
) -> Iterator[Progress | ResendReply]:
    """Archive scripts again in a sink.

    Without filters, the command resends the scripts of all jobs. The sink does not
    duplicate scripts that it has. 'steward archive sinks' shows the progress.

    Raises:
        NotAnOperator: The caller is not an operator.
        UsageError: There is no such sink.
        OrderError: This process cannot append to the journal.
    """
    require_operator(context, caller, "archive scripts again", request.clusters)
    sinks = context.settings.archive.sink
    if not request.sink:
        raise UsageError(f"no sink selected: give `sink`, one of {', '.join(sinks)}")
    if request.sink == "catalog" and request.sink not in sinks:
        raise UsageError("the catalog is not a sink: 'steward archive reindex' rebuilds it")
    select_sinks(context, request.sink)
    if context.order is None:
        raise OrderError(
            "cannot archive scripts again without the daemon: start 'steward serve', and run "
            "the command there"
        )
    span = resolve_selection_span(context, request, default=False)
    job_filter = make_job_filter(request, span, context.get_visible_jobs(caller, scripts=True))
    reader = JournalReader(context.settings.state_dir)
    return _stream_resend(context, caller, request, job_filter, reader)


def _stream_resend(
    context: ArchiveContext,
    caller: Caller,
    request: ResendRequest,
    job_filter: JobFilter,
    reader: JournalReader,
) -> Iterator[Progress | ResendReply]:
    archived = _ArchivedScripts(context, request.sink) if request.missing else None
    orders = _ResendOrders(context, caller, request.sink, reader)
    scanned = skipped = 0
    try:
        for scripts in _batch_scripts(
            iterate_scripts(context, caller, job_filter, include_unused=True)
        ):
            missing = archived.list_missing(scripts) if archived is not None else scripts
            orders.send(missing)
            scanned += len(scripts)
            skipped += len(scripts) - len(missing)
            yield Progress(done=scanned)
        if _is_unfiltered(request):
            report_refill(context, f"archive.{request.sink}", job_filter.since)
    finally:
        if archived is not None:
            archived.close()
        reader.close()
    yield ResendReply(
        sink=request.sink,
        scripts=orders.scripts,
        total_bytes=orders.total_bytes,
        present=skipped,
    )


def _batch_scripts(pairs: Iterable[tuple[Job, Script]]) -> Iterator[list[Script]]:
    batch: list[Script] = []
    for _, script in pairs:
        batch.append(script)
        if len(batch) == _MAX_EVENT_SCRIPTS:
            yield batch
            batch = []
    if batch:
        yield batch


def _is_unfiltered(request: ResendRequest) -> bool:
    """Return whether only ``since`` limits the request: then it fills every gap since that time."""
    bounds = (request.clusters, request.users, request.accounts, request.partitions)
    return not any((*bounds, request.jobs, request.names, request.states, request.until))


class _ResendOrders:
    """Writer of archive.resend events that revokes those of scripts purged meanwhile."""

    def __init__(
        self, context: ArchiveContext, caller: Caller, sink: str, reader: JournalReader
    ) -> None:
        self._library = context
        self._asked_by = caller.signature
        self._sink = sink
        self._reader = reader
        self._purged: set[ResendRef] = set()
        # Purges that jobs.db has not applied yet are read from here, so take its position first.
        self._purges_upto = context.jobs.cursor()
        self.scripts = 0
        self.total_bytes = 0

    def send(self, scripts: Sequence[Script]) -> None:
        """Order the sink to archive these scripts again, except purged ones.

        Raises:
            JournalUnavailable: The daemon is not running.
        """
        assert self._library.order is not None, "this process cannot order"
        self._read_purges()
        remaining = [script for script in scripts if _get_script_ref(script) not in self._purged]
        if not remaining:
            return
        self._library.order(
            [
                self._make_resend_event(*cluster_scripts)
                for cluster_scripts in _group_scripts_by_cluster(remaining)
            ]
        )
        # A purge that arrived meanwhile precedes this order in the journal.
        self._read_purges()
        purged = [script for script in remaining if _get_script_ref(script) in self._purged]
        for cluster, cluster_scripts in _group_scripts_by_cluster(purged):
            keys = tuple(script.key for script in cluster_scripts)
            body = ArchivePurge(
                script_keys=keys,
                sink=self._sink,
                asked_by=self._asked_by,
                reason="erased while it was sent again",
            )
            self._library.order(
                [make_order_event(self._library, cluster, ARCHIVE_PURGE, body, keys)]
            )
        self.scripts += len(remaining) - len(purged)
        self.total_bytes += sum(
            _count_script_bytes(script) for script in remaining if script not in purged
        )

    def _make_resend_event(self, cluster: str, scripts: Sequence[Script]) -> Event:
        """Make the archive.resend event for scripts of one cluster."""
        keys = [script.key for script in scripts]
        owners = self._library.jobs.find_by_scripts(keys, cluster)
        resent = tuple(
            ResentScript(
                script_key=script.key,
                script=script.body,
                identity=build_identity(owners[script.key], script.key)
                if script.key in owners
                else None,
            )
            for script in scripts
        )
        body = ArchiveResend(sink=self._sink, scripts=resent, asked_by=self._asked_by)
        return make_order_event(self._library, cluster, ARCHIVE_RESEND, body, keys)

    def _read_purges(self) -> None:
        """Read purges that arrived in the journal since the last call."""
        while True:
            events, upto = self._reader.read(self._purges_upto, {ARCHIVE_PURGE}, _PURGES_AT_ONCE)
            for event in events:
                if isinstance(event.body, ArchivePurge) and event.body.sink in {"", self._sink}:
                    self._purged.update((event.cluster, key) for key in event.body.script_keys)
            self._purges_upto = upto
            if len(events) < _PURGES_AT_ONCE:
                return


class _ArchivedScripts:
    """Lookup of the scripts that a sink already has."""

    def __init__(self, context: ArchiveContext, sink: str) -> None:
        self._files_reader: FilesReader | None = None
        self._remote_records: RemoteRecords | None = None
        settings = context.settings
        if sink in settings.files_sinks():
            self._files_reader = FilesReader(settings, sink)
            return
        try:
            self._remote_records = RemoteRecords(
                SINK.locate(settings.state_dir, sink), read_only=True
            )
        except Unavailable:
            # It has not run yet, so it has no scripts.
            self._remote_records = None

    def list_missing(self, scripts: Sequence[Script]) -> list[Script]:
        """Return the scripts that the sink lacks, as far as is known here."""
        if self._files_reader is not None:
            return [script for script in scripts if not self._is_filed(self._files_reader, script)]
        if self._remote_records is None:
            return list(scripts)
        rows = self._remote_records.load_rows(map(_get_script_ref, scripts))
        archived = {
            ref for ref, row in rows.items() if row.has_bytes or row.state in (AWAITS_IDENTITY, DUE)
        }
        archived -= {ref for ref, row in rows.items() if row.deleted}
        return [script for script in scripts if _get_script_ref(script) not in archived]

    @staticmethod
    def _is_filed(files: FilesReader, script: Script) -> bool:
        try:
            return files.locate(script.key, script.cluster) is not None
        except SqliteUnavailable:
            # It has not run yet, so it has no scripts; resending does no harm.
            return False

    def close(self) -> None:
        """Close the sink's database."""
        if self._files_reader is not None:
            self._files_reader.close()
        if self._remote_records is not None:
            self._remote_records.close()


def _get_script_ref(script: Script) -> ResendRef:
    return script.cluster, script.key


def _group_scripts_by_cluster(scripts: Iterable[Script]) -> list[tuple[str, list[Script]]]:
    groups: dict[str, list[Script]] = {}
    for script in scripts:
        groups.setdefault(script.cluster, []).append(script)
    return list(groups.items())


def _count_script_bytes(script: Script) -> int:
    files = (script.body.script, script.body.environment)
    return sum(file.length for file in files if file is not None)
