"""Status summary: collect journal, consumers, sinks, gaps, bank, clusters, disks and databases.

:class:`StatusContext` is the context of status.show and status.metrics and decides who may call
them. ``collect_status`` builds a StatusShowAnswer for both, with the actions of other packages. A
part that fails is listed with its error in ``unknown`` and hides no other part: administrators read
this status when something is wrong.
"""

import os
import platform
import pwd
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from typing import Final, TypeVar

import msgspec

from steward import __version__
from steward.admin.status.requests import (
    ClusterLine,
    ConsumerLine,
    ConsumerState,
    DatabaseLine,
    DiskLine,
    GapsLine,
    JournalLine,
    StatusShowAnswer,
    StatusShowRequest,
)
from steward.admin.status.workers import read_daemon_status
from steward.bank.actions.status import BankStatusReply, BankStatusRequest
from steward.capture.nodes.node_reports import list_recent_refusals
from steward.core.access import Access, Caller, raise_rights
from steward.core.actions import Registry, action, route
from steward.core.config import Settings
from steward.core.databases import CATALOG_MONTH, JOURNAL, list_files
from steward.core.drivers import list_needed_drivers
from steward.core.errors import PermissionRefused, StewardError
from steward.core.events import utc_now
from steward.core.journal import ConsumerStatus, refill_command
from steward.core.poll_status import PollStatusFiles
from steward.core.principals import STATUS
from steward.core.script_stores import read_hung_count
from steward.core.sqlite import SqliteError, SqliteMissing, SqliteUnavailable, read_free_bytes
from steward.jobs import Jobs, database_path
from steward.jobs.queries import list_clusters


class StatusContext:
    """Context of the status actions.

    Args:
        settings: The whole configuration.
        access: Access decisions.
        registry: Registry of other packages' actions.
        now: Clock.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        access: Access,
        registry: Registry,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.settings = settings
        self.now = now
        self._access = access
        self.registry = registry

    def require_operator(self, caller: Caller) -> None:
        """Require an operator.

        Raises:
            PermissionRefused: The asker is not an operator on every cluster.
        """
        if not self.is_operator(caller):
            raise PermissionRefused(
                "permission denied: only operators may see the status of Steward"
            )

    def require_scraper(self, caller: Caller) -> None:
        """Require an operator or the user of the web process, which serves metrics.

        Raises:
            PermissionRefused: The asker is neither.
        """
        if caller.uid != _find_uid(self.settings.web.user) and not self.is_operator(caller):
            raise PermissionRefused(
                "permission denied: only operators and the user of 'steward web' may read metrics"
            )

    def is_operator(self, caller: Caller) -> bool:
        """Return whether the asker is an operator on every cluster."""
        return all(
            self._access.is_operator(caller, cluster) for cluster in list_clusters(self.settings)
        )


def _find_uid(user: str) -> int | None:
    if not user:
        return None
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        return None  # no such user on this host, so no caller is that user


T = TypeVar("T")
JournalStatus = tuple[JournalLine | None, tuple[ConsumerLine, ...]]
_DISK_S: Final = 2.0
"""Longest wait for statvfs(3), in seconds."""


@action(
    "status.show",
    scope="read",
    role="operator",
    routes=(route("GET /status"),),
    only_reads=True,
    help="Show the status of Steward: processes, backlog, clusters, disks, the bank.",
)
def show_status(
    context: StatusContext, caller: Caller, request: StatusShowRequest
) -> StatusShowAnswer:
    """Return the status of Steward itself.

    Raises:
        PermissionRefused: The asker is not an operator on every cluster.
    """
    context.require_operator(caller)
    service = raise_rights(caller, STATUS, "status.show")
    return collect_status(context, service, gaps=request.gaps)


def collect_status(
    context: StatusContext, service: Caller, *, gaps: bool, accounts: bool = False
) -> StatusShowAnswer:
    """Collect the status of Steward itself, for a caller with permission.

    Args:
        context: Context of the action.
        service: Service principal that calls the actions of other packages.
        gaps: Whether to search for gaps in accounting.
        accounts: Whether to include the balances of all bank accounts.
    """
    from steward.archive.requests import SinksRequest

    settings = context.settings
    unknown: dict[str, str] = {}

    def read_or_report(part: str, read: Callable[[], T], default: T) -> T:
        try:
            return read()
        except StewardError as error:
            unknown[part] = str(error)
            return default

    daemon = read_daemon_status(settings.state_dir)
    if daemon is not None and not daemon.is_known:
        unknown["workers"] = f"no status file in {settings.state_dir}: is its disk full?"
    count = read_hung_count(settings.state_dir)
    if count is not None:
        unknown["incoming files"] = (
            f"cannot count the files in {', '.join(count.directories)}: pid {count.pid} hangs "
            f"since {count.since.isoformat()} and cannot be killed. Repair the file system: "
            "Steward counts again when the process has ended"
        )
    has_books = not settings.forward.to
    no_journal: JournalStatus = (None, ())
    journal, consumers = read_or_report(
        "journal", lambda: _collect_journal(context, service), no_journal
    )
    sinks = read_or_report(
        "sinks",
        lambda: (
            context.registry.call("archive.sinks", service, SinksRequest()).sinks
            if has_books
            else ()
        ),
        (),
    )
    missed = (
        read_or_report("missed scripts", lambda: _count_missed(settings), None)
        if has_books
        else None
    )
    return StatusShowAnswer(
        steward=(daemon.version if daemon is not None else "") or __version__,
        python=platform.python_version(),
        now=context.now(),
        running=daemon is not None,
        since=daemon.since if daemon is not None else None,
        workers=daemon.workers if daemon is not None else (),
        journal=journal,
        consumers=consumers,
        sinks=sinks,
        dead_letters=sum(item.dead_letters for item in consumers),
        gaps=read_or_report("gaps", lambda: _collect_gaps(context, service), None)
        if gaps and has_books
        else None,
        bank=read_or_report("bank", lambda: _collect_bank(context, service, accounts), None)
        if settings.bank.enabled
        else None,
        clusters=tuple(
            _make_cluster_line(context, name, missed[name] if missed is not None else None)
            for name in settings.cluster
        ),
        disks=collect_disks(context, unknown),
        databases=collect_databases(settings.state_dir, unknown),
        unavailable={
            ".".join(key): driver.missing_error
            for key, driver in list_needed_drivers(settings)
            if not driver.is_installed
        },
        rejected={
            item.address: item.why
            for item in list_recent_refusals(settings.state_dir, context.now())
        }
        if settings.nodes.listen
        else {},
        unknown=unknown,
    )


def _collect_journal(context: StatusContext, service: Caller) -> JournalStatus:
    from steward.admin.journal import StatusAnswer, StatusRequest

    answer: StatusAnswer = context.registry.call("journal.status", service, StatusRequest())
    path = JOURNAL.locate(context.settings.state_dir)
    line = JournalLine(
        head=answer.head,
        oldest=answer.oldest,
        events=answer.events,
        bytes=_get_database_size(path),
        max_bytes=context.settings.journal.max_bytes,
    )
    now = context.now()
    return line, tuple(_make_consumer_line(consumer, now) for consumer in answer.consumers)


def _make_consumer_line(status: ConsumerStatus, now: datetime) -> ConsumerLine:
    state: ConsumerState = "running" if status.state == "running" else "waiting"
    return ConsumerLine(
        name=status.name,
        state="detached" if status.detached else state,
        detail=status.detail,
        position=status.position,
        lag=status.lag,
        lag_s=max(0.0, (now - status.oldest).total_seconds()) if status.oldest else None,
        dead_letters=status.dead_letters,
        missed=status.missed,
        refill=refill_command(status.name, status.missed_from) if status.missed else "",
        rate=status.rate,
        error=status.error,
        error_at=datetime.fromtimestamp(status.error_at, UTC) if status.error_at else None,
    )


def _collect_gaps(context: StatusContext, service: Caller) -> GapsLine | None:
    from steward.accounting.gaps import GAP_LABELS, GapsAnswer, GapsRequest

    answer: GapsAnswer = context.registry.call("accounting.gaps", service, GapsRequest())
    counts = Counter(finding.kind for finding in answer.findings)
    return GapsLine(
        since=answer.since,
        until=answer.until,
        counts=dict(sorted(counts.items())),
        labels={kind: GAP_LABELS[kind] for kind in counts},
        total=len(answer.findings),
        more=answer.more,
    )


def _collect_bank(context: StatusContext, service: Caller, accounts: bool) -> BankStatusReply:
    request = BankStatusRequest(accounts=accounts)
    answer: BankStatusReply = context.registry.call("bank.status", service, request)
    return answer


def _count_missed(settings: Settings) -> dict[str, int]:
    """Return the number of jobs of each cluster whose scripts capture missed."""
    try:
        jobs = Jobs(database_path(settings.state_dir))
    except SqliteMissing:
        return dict.fromkeys(settings.cluster, 0)
    with closing(jobs):
        return {name: jobs.count_missed(name) for name in settings.cluster}


def _make_cluster_line(context: StatusContext, name: str, missed: int | None) -> ClusterLine:
    settings = context.settings.cluster[name]
    poll = PollStatusFiles(context.settings.state_dir).get(name)
    if poll is None:
        return ClusterLine(cluster=name, remote=settings.remote, missed_scripts=missed)
    return ClusterLine(
        cluster=name,
        slurm=poll.version,
        up=poll.up,
        message=poll.message,
        polled_at=poll.at,
        current_at=poll.current_at,
        cost_s=poll.cost_s,
        jobs=poll.jobs if poll.up else None,
        interval_s=poll.interval_s,
        remote=settings.remote,
        missed_scripts=missed,
    )


def collect_disks(context: StatusContext, unknown: dict[str, str]) -> tuple[DiskLine, ...]:
    """Return the file systems that Steward writes to; failures are added to ``unknown``."""
    settings = context.settings
    places = {"state": settings.state_dir}
    if not settings.forward.to:
        places |= {f"archive {name}": settings.sink_path(name) for name in settings.files_sinks()}
    lines = []
    for purpose, path in places.items():
        status = _query_statvfs(path)
        if not isinstance(status, os.statvfs_result):
            unknown[f"disk of {purpose}"] = f"{path}: {status}"
            continue
        lines.append(
            DiskLine(
                purpose=purpose,
                path=path,
                total=status.f_blocks * status.f_frsize,
                free=status.f_bavail * status.f_frsize,
                files_free=status.f_favail if status.f_files else None,
            )
        )
    return tuple(lines)


def collect_databases(state_dir: str, unknown: dict[str, str]) -> tuple[DatabaseLine, ...]:
    """Return the disk use of the databases; failures are added to ``unknown``."""
    lines: dict[str, DatabaseLine] = {}
    for file, path in list_files(state_dir):
        name = os.path.relpath(path, state_dir)
        writers = file.name_writers(name)
        if file is CATALOG_MONTH:
            name = os.path.join(os.path.dirname(name), "*.db")
        free = None
        try:
            free = read_free_bytes(path)
        except SqliteMissing:
            continue  # purged meanwhile
        except (SqliteError, SqliteUnavailable) as error:
            unknown[f"database {name}"] = str(error)
        line = lines.get(name, DatabaseLine(name=name, writers=writers, files=0, bytes=0))
        lines[name] = msgspec.structs.replace(
            line,
            files=line.files + 1,
            bytes=line.bytes + _get_database_size(path),
            free=line.free if free is None else free + (line.free or 0),
        )
    return tuple(lines.values())


def _get_database_size(path: str) -> int:
    """Return the size of a database with its write-ahead log, in bytes."""
    return _get_file_size(path) + _get_file_size(f"{path}-wal")


def _query_statvfs(path: str) -> os.statvfs_result | str:
    """Call statvfs(3) with a time limit, or return the error: a dead mount never answers."""
    results: list[os.statvfs_result | str] = []

    def look() -> None:
        try:
            results.append(os.statvfs(path))
        except OSError as error:
            results.append(str(error.strerror))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(_DISK_S)
    return results[0] if results else f"no answer within {_DISK_S:g} s"


def _get_file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
