"""The shapes of what is asked and told of Steward itself."""

from datetime import datetime
from typing import Literal

import msgspec

from steward.admin.status.workers import PartLine
from steward.archive.requests import SinkLine
from steward.bank.actions.upkeep import BankStandingAnswer
from steward.core.actions import Answer, Request, Shape

ConsumerState = Literal["running", "waiting", "detached"]


class StatusShowRequest(Request, frozen=True, kw_only=True):
    """status.show: how Steward itself stands.

    Attributes:
        gaps: Whether the books are looked through for what is missing, which takes longest.
    """

    gaps: bool = True


class JournalLine(Shape, frozen=True, kw_only=True):
    """How the journal stands.

    Attributes:
        head: Position of the last event.
        oldest: Position of the oldest event that is still here.
        events: How many are here.
        bytes: What the journal takes on disk.
        max_bytes: At which size, kept scripts included, who is behind is detached.
    """

    head: int
    oldest: int
    events: int
    bytes: int
    max_bytes: int


class ConsumerLine(Shape, frozen=True, kw_only=True):
    """How a consumer of the journal stands.

    Attributes:
        name: Its name.
        state: ``running``; ``waiting``, something that it needs is away; ``detached``, the
            journal waits for it no more.
        detail: Why it waits.
        position: The last event that it put to use.
        behind: How many events it has still to see.
        behind_s: Age of the oldest of these, in seconds; None for none.
        set_aside: How many events were set aside for it.
        missed: How many events were trimmed while it was detached.
        refill: The command that makes up for them; "" where it missed none.
        rate: How many events a second it put to use over the last minute.
        error: What went wrong last, also where it went on since.
        error_at: When that was.
    """

    name: str
    state: ConsumerState
    detail: str = ""
    position: int = 0
    behind: int = 0
    behind_s: float | None = None
    set_aside: int = 0
    missed: int = 0
    refill: str = ""
    rate: float = 0.0
    error: str = ""
    error_at: datetime | None = None


class GapsLine(Shape, frozen=True, kw_only=True):
    """What is missing in the books, or doubtful; ``steward accounting gaps`` lists it.

    Attributes:
        since: Beginning of the time looked at.
        until: Its end.
        counts: How many findings there are of each kind.
        total: Their sum.
        more: Whether there are more than were counted.
    """

    since: datetime
    until: datetime
    counts: dict[str, int]
    total: int
    more: bool = False


class ClusterLine(Shape, frozen=True, kw_only=True):
    """How a cluster was last looked at.

    Attributes:
        cluster: Its name.
        slurm: Slurm's version; "" where it is not known.
        up: Whether slurmctld answered then; None where nobody looked yet.
        message: What it said where it did not.
        looked_at: When that was.
        cost_s: How long the last answer took, in seconds.
        jobs: How many jobs it showed.
        interval_s: How long it is from that look to the next, in seconds.
        remote: Whether another host's Steward looks.
        missed_scripts: Jobs whose scripts left the spool before capture read them, as long as
            jobs.db remembers.
    """

    cluster: str
    slurm: str = ""
    up: bool | None = None
    message: str = ""
    looked_at: datetime | None = None
    cost_s: float | None = None
    jobs: int | None = None
    interval_s: float | None = None
    remote: bool = False
    missed_scripts: int = 0


class DiskLine(Shape, frozen=True, kw_only=True):
    """A file system that Steward writes to.

    Attributes:
        what: ``state``, or ``archive`` and the sink's name.
        path: Where it is.
        total: Its size, in bytes.
        free: What Steward may still write, in bytes.
        files_free: How many files it may still make; None where there is no such bound.
    """

    what: str
    path: str
    total: int
    free: int
    files_free: int | None = None


class StatusShowAnswer(Answer, frozen=True, kw_only=True):
    """How Steward itself stands.

    Attributes:
        steward: Its version: the running daemon's, or this program's where none runs.
        python: Python's.
        now: When this was so.
        running: Whether the daemon runs.
        since: Since when.
        parts: Its processes.
        journal: The journal; None where it could not be read.
        consumers: Those who read it.
        sinks: Where the archive goes.
        dead_letters: How many events were set aside altogether.
        gaps: What is missing in the books; None where that was not asked for.
        bank: The bank, as bank.standing tells of it; None where there is none.
        clusters: The configuration's clusters.
        disks: What is written to.
        unavailable: Keys of the configuration whose driver is not installed, with the command
            that installs it.
        refused: Addresses of agents whose batches were refused within half an hour, and why.
        unknown: What could not be told of these, by its name, and why.
    """

    steward: str
    python: str
    now: datetime
    running: bool
    since: datetime | None = None
    parts: tuple[PartLine, ...] = ()
    journal: JournalLine | None = None
    consumers: tuple[ConsumerLine, ...] = ()
    sinks: tuple[SinkLine, ...] = ()
    dead_letters: int = 0
    gaps: GapsLine | None = None
    bank: BankStandingAnswer | None = None
    clusters: tuple[ClusterLine, ...] = ()
    disks: tuple[DiskLine, ...] = ()
    unavailable: dict[str, str] = msgspec.field(default_factory=dict)
    refused: dict[str, str] = msgspec.field(default_factory=dict)
    unknown: dict[str, str] = msgspec.field(default_factory=dict)


class MetricsRequest(Request, frozen=True, kw_only=True):
    """status.metrics: figures for Prometheus."""


class MetricsAnswer(Answer, frozen=True, kw_only=True):
    """Figures for Prometheus.

    Attributes:
        text: In its text format.
        content_type: What an HTTP answer calls that.
    """

    text: str
    content_type: str
