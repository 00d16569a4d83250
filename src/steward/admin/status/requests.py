"""Requests and answers of status.show and status.metrics, with a line type for each part.

``JournalLine``, ``ConsumerLine``, ``GapsLine``, ``ClusterLine``, ``DiskLine`` and ``DatabaseLine``
are parts of the ``StatusShowAnswer``; its ``WorkerLine`` is in ``workers.py``.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, ClassVar, Final, Literal

import msgspec

from steward.admin.status.workers import WorkerLine
from steward.archive.requests import SinkLine, SinksReply
from steward.bank.actions.status import BankStatusReply
from steward.core.actions import ActionMessage, Answer, Request, described
from steward.core.layouts import Column, Layout, read_ratio

ConsumerState = Literal["running", "waiting", "detached"]


class StatusShowRequest(Request, frozen=True, kw_only=True):
    """status.show: the status of Steward itself."""

    gaps: Annotated[bool, described("Also search for gaps in accounting, the slowest part.")] = True


class JournalLine(ActionMessage, frozen=True, kw_only=True):
    """Status of the journal.

    Attributes:
        head: Position of the last event.
        oldest: Position of the oldest event not yet trimmed.
        events: Number of stored events.
        bytes: Size on disk, in bytes.
        max_bytes: Size, with incoming scripts, above which consumers that are behind are
            detached.
    """

    head: int
    oldest: int
    events: int
    bytes: int
    max_bytes: int


class ConsumerLine(ActionMessage, frozen=True, kw_only=True):
    """Status of a consumer of the journal.

    Attributes:
        name: Name of the consumer.
        state: ``running``; ``waiting`` for an unavailable dependency; ``detached``, the
            journal no longer waits for it.
        detail: Reason for waiting.
        position: Position of the last event that it applied.
        lag: Number of events after that position.
        lag_s: Age of the oldest of these, in seconds; None for none.
        dead_letters: Number of its dead letters.
        missed: Number of events trimmed while it was detached.
        refill: Command that makes up for them; "" if it missed none.
        rate: Events applied per second, over the last minute.
        error: Last error, even if solved since.
        error_at: Time of that error.
    """

    name: str
    state: ConsumerState
    detail: str = ""
    position: int = 0
    lag: int = 0
    lag_s: float | None = None
    dead_letters: int = 0
    missed: int = 0
    refill: str = ""
    rate: float = 0.0
    error: str = ""
    error_at: datetime | None = None


class GapsLine(ActionMessage, frozen=True, kw_only=True):
    """Gaps in accounting: counts of missing or doubtful data; ``steward accounting gaps`` lists it.

    Attributes:
        since: Start of the period.
        until: End of the period.
        counts: Number of findings of each kind.
        labels: Name of each of these kinds, for people.
        total: Their sum.
        more: Whether there are more than were counted.
    """

    since: datetime
    until: datetime
    counts: dict[str, int]
    labels: dict[str, str]
    total: int
    more: bool = False


class ClusterLine(ActionMessage, frozen=True, kw_only=True):
    """Poll status of a cluster.

    Attributes:
        cluster: Name of the cluster.
        slurm: Slurm's version; "" if unknown.
        up: Whether slurmctld answered the last poll; None before the first one.
        message: Error text if it did not.
        polled_at: Time of the last poll.
        cost_s: Duration of the last answered poll, in seconds.
        jobs: Number of jobs in it.
        current_at: Time at which its result was last known to be current. Steward skips polls while
            slurmctld's state files show no change.
        interval_s: Time from then to the next poll or check, in seconds.
        remote: Whether another host's Steward polls the cluster.
        missed_scripts: Jobs whose scripts left the spool before capture read them, as long as
            jobs.db remembers; None if unknown.
    """

    cluster: str
    slurm: str = ""
    up: bool | None = None
    message: str = ""
    polled_at: datetime | None = None
    current_at: datetime | None = None
    cost_s: float | None = None
    jobs: int | None = None
    interval_s: float | None = None
    remote: bool = False
    missed_scripts: int | None = None

    @property
    def state(self) -> str:
        """``up``, ``down``, ``not asked`` yet, or ``remote``."""
        if self.remote:
            return "remote"
        return {True: "up", False: "down", None: "not asked"}[self.up]


class DiskLine(ActionMessage, frozen=True, kw_only=True):
    """A file system that Steward writes to.

    Attributes:
        purpose: ``state``, or ``archive`` and the sink's name.
        path: Directory on it.
        total: Size, in bytes.
        free: Space that Steward may still use, in bytes.
        files_free: Number of files that it may still create; None without such a limit.
    """

    purpose: str
    path: str
    total: int
    free: int
    files_free: int | None = None


class DatabaseLine(ActionMessage, frozen=True, kw_only=True):
    """Disk use of a database, or of the months of a catalog together.

    Attributes:
        name: Path below state_dir.
        writers: Workers that write it, and ``actions`` if actions of any process do.
        files: Number of databases: of months, for a catalog.
        bytes: Size on disk with the write-ahead log, in bytes.
        free: Size of the free pages in it, in bytes, which new rows use; None if it could not be
            read.
    """

    name: str
    writers: tuple[str, ...]
    files: int = 1
    bytes: int
    free: int | None = None


_DETAIL: Final = Column("Detail", "detail", "prose", show="filled")
_REFILL: Final = Column("Refill", "refill", "code", show="filled")


class StatusShowAnswer(Answer, frozen=True, kw_only=True):
    """Status of Steward itself.

    Attributes:
        steward: Version of the running daemon, or of this program if none runs.
        python: Version of Python.
        now: Time of this status.
        running: Whether the daemon runs.
        since: Start of the daemon.
        workers: Worker processes of the daemon.
        journal: The journal; None if it could not be read.
        consumers: Consumers of the journal.
        sinks: Sinks of the archive.
        dead_letters: Number of dead letters of all consumers.
        gaps: Gaps in accounting; None if not requested.
        bank: Status of the bank, as bank.status returns it; None without a bank.
        clusters: Clusters of the configuration.
        disks: File systems that Steward writes to.
        databases: Databases in state_dir.
        unavailable: Keys of the configuration whose driver is not installed, with the command
            that installs it.
        rejected: Addresses of agents whose batches were rejected within half an hour, with the
            reason.
        unknown: Parts of this status that could not be determined, with the error.
    """

    steward: str
    python: str
    now: datetime
    running: bool
    since: datetime | None = None
    workers: tuple[WorkerLine, ...] = ()
    journal: JournalLine | None = None
    consumers: tuple[ConsumerLine, ...] = ()
    sinks: tuple[SinkLine, ...] = ()
    dead_letters: int = 0
    gaps: GapsLine | None = None
    bank: BankStatusReply | None = None
    clusters: tuple[ClusterLine, ...] = ()
    disks: tuple[DiskLine, ...] = ()
    databases: tuple[DatabaseLine, ...] = ()
    unavailable: dict[str, str] = msgspec.field(default_factory=dict)
    rejected: dict[str, str] = msgspec.field(default_factory=dict)
    unknown: dict[str, str] = msgspec.field(default_factory=dict)
    layouts: ClassVar[Mapping[str, Layout]] = {
        "sinks": (*SinksReply.layout, _DETAIL, _REFILL),
        "consumers": (
            Column("Consumer", "name"),
            Column("State", "state", "state"),
            Column("Lag", "lag", "count", title="Lag, events"),
            Column("Oldest", "lag_s", "duration", title="Age of the oldest"),
            Column("Rate", "rate", "decimal", title="Events per second"),
            Column("DeadLetters", "dead_letters", "count", title="Dead letters"),
            Column("ErrorAt", "error_at", "time", title="Time of the last error"),
            Column("LastError", "error", "prose", title="Last error"),
            _DETAIL,
            _REFILL,
        ),
        "clusters": (
            Column("Cluster", "cluster"),
            Column("State", "state", "state"),
            Column("Slurm", "slurm"),
            Column("Polled", "polled_at", "time", title="Last poll"),
            Column("Current", "current_at", "time", title="Current at"),
            Column("Cost", "cost_s", "seconds", title="Poll time"),
            Column("Jobs", "jobs", "count"),
            Column("Interval", "interval_s", "duration", title="Poll interval"),
            Column("Message", "message", "prose"),
        ),
        "workers": (
            Column("Process", "name"),
            Column("State", "state", "state"),
            Column("PID", lambda row, _: row.pid or None, right=True),
            Column("Since", "since", "time"),
            Column("Restarts", "restarts", "count"),
            Column("ErrorAt", "error_at", "time", title="Last exit", show="filled"),
            Column("LastError", "error", "prose", title="Reason of the last exit", show="filled"),
        ),
        "disks": (
            Column("Disk", "purpose", title="File system"),
            Column("Directory", "path", "prose"),
            Column("Free", "free", "bytes"),
            Column("Free%", read_ratio("free", "total"), "percent", title="Free share"),
            Column("Size", "total", "bytes"),
            Column("FilesFree", "files_free", "count", title="Free inodes"),
        ),
        "databases": (
            Column("Database", "name"),
            Column("Writers", lambda row, _: ", ".join(row.writers)),
            Column("Files", "files", "count"),
            Column("Size", "bytes", "bytes"),
            Column("Free", "free", "bytes", title="Free pages"),
        ),
    }


class StatusRow(msgspec.Struct, frozen=True):
    """Row of the table of a status: component, state, details."""

    component: str
    state: str
    detail: str = ""
    layout: ClassVar[Layout] = (
        Column("Component", "component"),
        Column("State", "state"),
        Column("Detail", "detail"),
    )


class MetricsRequest(Request, frozen=True, kw_only=True):
    """status.metrics: metrics for Prometheus."""


class MetricsAnswer(Answer, frozen=True, kw_only=True):
    """Metrics for Prometheus.

    Attributes:
        text: Metrics in Prometheus's text format.
        content_type: HTTP content type of that format.
    """

    text: str
    content_type: str
