"""Status summary: collect journal, consumers, sinks, gaps, bank, clusters and disks.

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
from typing import Any, Final, TypeVar

from steward import __version__
from steward.admin.status.requests import (
    ClusterLine,
    ConsumerLine,
    ConsumerState,
    DiskLine,
    GapsLine,
    JournalLine,
    StatusShowAnswer,
    StatusShowRequest,
)
from steward.admin.status.workers import read_daemon_status
from steward.bank.actions.upkeep import BankStatusReply, BankStatusRequest
from steward.capture.nodes.last_seen import list_recent_refusals
from steward.core.access import Access, Asker
from steward.core.actions import Registry
from steward.core.config import Settings
from steward.core.drivers import list_needed_drivers
from steward.core.errors import PermissionRefused, StewardError
from steward.core.events import utc_now
from steward.core.journal import ConsumerStatus, refill_command
from steward.core.journal.reader import JOURNAL_FILENAME
from steward.core.poll_status import PollStatusFiles
from steward.core.sqlite import SqliteUnavailable
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
        self._registry = registry

    def admit(self, asker: Asker) -> None:
        """Require an operator.

        Raises:
            PermissionRefused: The asker is not an operator on every cluster.
        """
        if not self.is_operator(asker):
            raise PermissionRefused("how Steward itself stands is for operators to see")

    def admit_scraper(self, asker: Asker) -> None:
        """Require an operator or the user of the web process, which serves metrics.

        Raises:
            PermissionRefused: The asker is neither.
        """
        if asker.uid != _find_uid(self.settings.web.user) and not self.is_operator(asker):
            raise PermissionRefused(
                "figures are for operators and for the user of Steward's web process"
            )

    def is_operator(self, asker: Asker) -> bool:
        """Return whether the asker is an operator on every cluster."""
        clusters = list_clusters(self.settings)
        return all(self._access.is_operator(asker, cluster) for cluster in clusters)

    def ask(self, name: str, request: Any) -> Any:
        """Call another package's action as Steward itself, for an already admitted caller.

        Raises:
            StewardError: The action rejects the request or fails.
        """
        return self._registry.call(name, self._own(), request)

    def _own(self) -> Asker:
        try:
            uid = os.stat(self.settings.state_dir).st_uid
        except OSError:
            uid = os.geteuid()
        return Asker(uid=uid, how="local")


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


def show_status(room: StatusContext, asker: Asker, request: StatusShowRequest) -> StatusShowAnswer:
    """Return the status of Steward itself.

    Raises:
        PermissionRefused: The asker is not an operator on every cluster.
    """
    room.admit(asker)
    return collect_status(room, gaps=request.gaps)


def collect_status(room: StatusContext, *, gaps: bool, accounts: bool = False) -> StatusShowAnswer:
    """Collect the status of Steward itself, for an already admitted caller.

    Args:
        room: Context of the action.
        gaps: Whether to search for gaps in accounting.
        accounts: Whether to include the balances of all bank accounts.
    """
    from steward.archive.requests import SinksRequest

    settings = room.settings
    unknown: dict[str, str] = {}

    def known(what: str, look: Callable[[], T], otherwise: T) -> T:
        try:
            return look()
        except StewardError as error:
            unknown[what] = str(error)
            return otherwise

    daemon = read_daemon_status(settings.state_dir)
    if daemon is not None and not daemon.is_known:
        unknown["parts"] = f"not written down in {settings.state_dir}: is its disk full?"
    has_books = not settings.forward.to
    nothing: JournalStatus = (None, ())
    journal, consumers = known("journal", lambda: _collect_journal(room), nothing)
    sinks = known(
        "sinks",
        lambda: room.ask("archive.sinks", SinksRequest()).sinks if has_books else (),
        (),
    )
    none_missed: dict[str, int] = {}
    missed = (
        known("missed scripts", lambda: _count_missed(settings), none_missed)
        if has_books
        else none_missed
    )
    return StatusShowAnswer(
        steward=(daemon.version if daemon is not None else "") or __version__,
        python=platform.python_version(),
        now=room.now(),
        running=daemon is not None,
        since=daemon.since if daemon is not None else None,
        parts=daemon.parts if daemon is not None else (),
        journal=journal,
        consumers=consumers,
        sinks=sinks,
        dead_letters=sum(one.set_aside for one in consumers),
        gaps=known("gaps", lambda: _collect_gaps(room), None) if gaps and has_books else None,
        bank=known("bank", lambda: _collect_bank(room, accounts), None)
        if settings.bank.enabled
        else None,
        clusters=tuple(
            _make_cluster_line(room, name, missed.get(name, 0)) for name in settings.cluster
        ),
        disks=collect_disks(room, unknown),
        unavailable={
            ".".join(key): driver.missing
            for key, driver in list_needed_drivers(settings)
            if not driver.is_installed
        },
        refused={
            one.address: one.why for one in list_recent_refusals(settings.state_dir, room.now())
        }
        if settings.nodes.listen
        else {},
        unknown=unknown,
    )


def _collect_journal(room: StatusContext) -> JournalStatus:
    from steward.admin.journal import StatusAnswer, StatusRequest

    answer: StatusAnswer = room.ask("journal.status", StatusRequest())
    path = os.path.join(room.settings.state_dir, JOURNAL_FILENAME)
    line = JournalLine(
        head=answer.head,
        oldest=answer.oldest,
        events=answer.events,
        bytes=_get_file_size(path) + _get_file_size(f"{path}-wal"),
        max_bytes=room.settings.journal.max_bytes,
    )
    now = room.now()
    return line, tuple(_make_consumer_line(one, now) for one in answer.consumers)


def _make_consumer_line(one: ConsumerStatus, now: datetime) -> ConsumerLine:
    state: ConsumerState = "running" if one.state == "running" else "waiting"
    return ConsumerLine(
        name=one.name,
        state="detached" if one.detached else state,
        detail=one.detail,
        position=one.position,
        behind=one.behind,
        behind_s=max(0.0, (now - one.oldest).total_seconds()) if one.oldest else None,
        set_aside=one.dead,
        missed=one.missed,
        refill=refill_command(one.name, one.missed_from) if one.missed else "",
        rate=one.rate,
        error=one.error,
        error_at=datetime.fromtimestamp(one.error_at, UTC) if one.error_at else None,
    )


def _collect_gaps(room: StatusContext) -> GapsLine | None:
    from steward.accounting.gaps import GapsAnswer, GapsRequest

    answer: GapsAnswer = room.ask("accounting.gaps", GapsRequest())
    counts = Counter(one.kind for one in answer.findings)
    return GapsLine(
        since=answer.since,
        until=answer.until,
        counts=dict(sorted(counts.items())),
        total=len(answer.findings),
        more=answer.more,
    )


def _collect_bank(room: StatusContext, accounts: bool) -> BankStatusReply:
    request = BankStatusRequest(accounts=accounts)
    answer: BankStatusReply = room.ask("bank.standing", request)
    return answer


def _count_missed(settings: Settings) -> dict[str, int]:
    """Return the number of jobs of each cluster whose scripts capture missed."""
    try:
        jobs = Jobs(database_path(settings.state_dir))
    except SqliteUnavailable:
        return {}  # it is not made yet
    with closing(jobs):
        return {name: jobs.count_missed(name) for name in settings.cluster}


def _make_cluster_line(room: StatusContext, name: str, missed: int) -> ClusterLine:
    of = room.settings.cluster[name]
    look = PollStatusFiles(room.settings.state_dir).get(name)
    if look is None:
        return ClusterLine(cluster=name, remote=of.remote, missed_scripts=missed)
    return ClusterLine(
        cluster=name,
        slurm=look.version,
        up=look.up,
        message=look.message,
        looked_at=look.at,
        cost_s=look.cost_s,
        jobs=look.jobs if look.up else None,
        interval_s=look.interval_s,
        remote=of.remote,
        missed_scripts=missed,
    )


def collect_disks(room: StatusContext, unknown: dict[str, str]) -> tuple[DiskLine, ...]:
    """Return the file systems that Steward writes to; failures are added to ``unknown``."""
    settings = room.settings
    places = {"state": settings.state_dir}
    if not settings.forward.to:
        places |= {f"archive {name}": settings.sink_path(name) for name in settings.files_sinks()}
    lines = []
    for what, path in places.items():
        found = _query_statvfs(path)
        if not isinstance(found, os.statvfs_result):
            unknown[f"disk of {what}"] = f"{path}: {found}"
            continue
        lines.append(
            DiskLine(
                what=what,
                path=path,
                total=found.f_blocks * found.f_frsize,
                free=found.f_bavail * found.f_frsize,
                files_free=found.f_favail if found.f_files else None,
            )
        )
    return tuple(lines)


def _query_statvfs(path: str) -> os.statvfs_result | str:
    """Call statvfs(3) with a time limit, or return the error: a dead mount never answers."""
    said: list[os.statvfs_result | str] = []

    def look() -> None:
        try:
            said.append(os.statvfs(path))
        except OSError as error:
            said.append(str(error.strerror))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(_DISK_S)
    return said[0] if said else f"no answer within {_DISK_S:g} s"


def _get_file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
