"""Report requests and replies: the Structs of ``reports.*``, and their reporting periods.

Amounts are seconds of a CPU, GPU or node: one hour of four CPUs is 14,400 ``cpu_s``. Times in
replies are UTC.

In order: one request class for each report (:class:`ReportRequest` has the common filters),
:class:`Period`, one row class for each report, one reply class for each report, then
:func:`resolve_interval` (resolve the requested interval) and :func:`divide_interval` (divide it
into periods).
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Annotated, ClassVar, Final, Literal

import msgspec

from steward.core.actions import Answer, Request, Zone, described, option
from steward.core.errors import UsageError
from steward.core.layouts import Column, Layout, read_ratio, read_user
from steward.jobs.filters import Accounts, Clusters, Partitions, Users
from steward.slurm.times import parse_time

PeriodLength = Literal["", "month", "week", "day"]

_Sizes = Annotated[
    tuple[int, ...],
    described("Lower bounds of the size classes, in CPUs: 2,8 makes the classes 1, 2-7 and 8+."),
]
_Top = Annotated[
    int,
    option(
        "Maximum number of rows of each cluster and period; 0 means all.",
        "--top",
        "-L",
        default="all",
        ge=0,
    ),
]


class ReportRequest(Request, frozen=True, kw_only=True):
    """Common fields of every report request: interval, periods and clusters."""

    since: Annotated[
        str,
        option(
            "Start of the interval: now-30days, 2026-11-01.",
            *("--starttime", "--since", "-S"),
            default="the start of yesterday",
            metavar="TIME",
        ),
    ] = ""
    until: Annotated[
        str,
        option(
            "End of the interval, exclusive; now at the latest.",
            *("--endtime", "--until", "-E"),
            default="last midnight",
            metavar="TIME",
        ),
    ] = ""
    zone: Zone = ""
    by: Annotated[
        PeriodLength,
        option(
            "Split the interval into periods of this length, each with its own rows.",
            "--by",
            default="the whole interval",
        ),
    ] = ""
    clusters: Clusters = ()


class JobReportRequest(ReportRequest, frozen=True, kw_only=True):
    """Common fields of requests for reports on jobs: also the filters of jobs."""

    accounts: Accounts = ()
    users: Users = ()
    partitions: Partitions = ()


class ClusterRequest(ReportRequest, frozen=True, kw_only=True):
    """Request of ``reports.cluster``: CPU and GPU utilization of whole clusters."""


class AccountsRequest(JobReportRequest, frozen=True, kw_only=True):
    """Request of ``reports.accounts``: usage by account and user."""


class UsersRequest(JobReportRequest, frozen=True, kw_only=True):
    """Request of ``reports.users``: usage by user, largest first."""

    top: _Top = 0


class PartitionUsageRequest(JobReportRequest, frozen=True, kw_only=True):
    """Request of ``reports.partitions``: usage and wait times by partition."""


class WaitsRequest(JobReportRequest, frozen=True, kw_only=True):
    """Request of ``reports.waits``: wait times, from eligible to start."""

    group: Annotated[
        Literal["", "size", "account", "user"],
        option("Group rows by this, in addition to the partition.", "--group"),
    ] = ""
    sizes: _Sizes = (2, 8, 32, 128, 512)


class JobCountsRequest(JobReportRequest, frozen=True, kw_only=True):
    """Request of ``reports.jobs``: number of jobs by account, size and state."""

    sizes: _Sizes = (50, 250, 500, 1000)


class WasteRequest(JobReportRequest, frozen=True, kw_only=True):
    """Request of ``reports.waste``: allocated less used, for jobs that ended in the interval."""

    top: _Top = 0


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """A reporting period.

    Attributes:
        label: ``2026-11``, ``2026-W47`` or ``2026-11-22``; "" for the whole interval.
        since: Begin, UTC.
        until: End, UTC.
    """

    label: str = ""
    since: datetime
    until: datetime


class ReportRow(msgspec.Struct, frozen=True, kw_only=True):
    """Common fields of report rows.

    Attributes:
        period: Index of the period in the reply, from 0.
        cluster: The cluster's name.
    """

    period: int = 0
    cluster: str = ""


class ClusterRow(ReportRow, frozen=True, kw_only=True):
    """CPU and GPU utilization of a cluster in a period; the parts add up to the reported total.

    Attributes:
        jobs: Number of runs; each run counts once.
        allocated_cpu_s: Allocated to jobs or to reservations.
        down_cpu_s: Of nodes that were down, or drained with no job left. Without a sensor capacity
            is unknown, and this and all following capacity fields are None.
        planned_down_cpu_s: In maintenance reservations, or of nodes that were powered down.
        planned_cpu_s: Idle while eligible jobs waited (sreport's "Planned").
        idle_cpu_s: Idle while no job waited.
        reported_cpu_s: Total of all parts.
        allocated_gpu_s: The same for GPUs, as in the next four fields; GPUs have no planned part.
        known_s: Seconds of the period for which capacity is known, that is since the sensor
            started.
        cpus: Number of CPUs at the end of the period.
        gpus: Number of GPUs at the end of the period.
        nodes: Number of nodes at the end of the period.
    """

    jobs: int = 0
    allocated_cpu_s: int = 0
    down_cpu_s: int | None = None
    planned_down_cpu_s: int | None = None
    planned_cpu_s: int | None = None
    idle_cpu_s: int | None = None
    reported_cpu_s: int | None = None
    allocated_gpu_s: int = 0
    down_gpu_s: int | None = None
    planned_down_gpu_s: int | None = None
    idle_gpu_s: int | None = None
    reported_gpu_s: int | None = None
    known_s: int = 0
    cpus: int = 0
    gpus: int = 0
    nodes: int = 0


class AccountRow(ReportRow, frozen=True, kw_only=True):
    """Usage of an account, or of one user in it.

    Attributes:
        account: The account.
        user: The user; "" in the account's total.
        uid: The uid; None in the account's total.
        jobs: Number of runs in the period.
        cpu_s: Allocated CPUs times seconds.
        gpu_s: Allocated GPUs times seconds.
        node_s: Allocated nodes times seconds.
    """

    account: str = ""
    user: str = ""
    uid: int | None = None
    jobs: int = 0
    cpu_s: int = 0
    gpu_s: int = 0
    node_s: int = 0


class UserRow(ReportRow, frozen=True, kw_only=True):
    """Usage of a user over all accounts, largest CPU usage first.

    Attributes:
        user: The name; "" if the uid resolves to none.
        uid: The uid.
        accounts: Accounts that were charged.
        jobs: Number of runs in the period.
        completed: Runs that ended in the period with state COMPLETED.
        failed: Runs that ended in the period with any other state.
    """

    user: str = ""
    uid: int | None = None
    accounts: tuple[str, ...] = ()
    jobs: int = 0
    completed: int = 0
    failed: int = 0
    cpu_s: int = 0
    gpu_s: int = 0
    node_s: int = 0


class WaitTimesRow(ReportRow, frozen=True, kw_only=True):
    """Wait times of runs that started in the period, from eligible to start.

    Attributes:
        started: Number of runs that started.
        median_s: Median wait time; None if no run started.
        p90_s: 90th percentile of the wait times.
        longest_s: Longest wait time.
    """

    started: int = 0
    median_s: int | None = None
    p90_s: int | None = None
    longest_s: int | None = None


class PartitionRow(WaitTimesRow, frozen=True, kw_only=True):
    """Usage of a partition, and the wait times of its jobs."""

    partition: str = ""
    jobs: int = 0
    cpu_s: int = 0
    gpu_s: int = 0
    node_s: int = 0


class WaitRow(WaitTimesRow, frozen=True, kw_only=True):
    """Wait times of one group of jobs.

    Attributes:
        partition: Partition in which they ran.
        account: Set when grouped by account.
        user: Set when grouped by user.
        least_cpus: Smallest number of CPUs, when grouped by size.
        most_cpus: Largest number of CPUs, when grouped by size; 0 for no upper bound.
    """

    partition: str = ""
    account: str = ""
    user: str = ""
    least_cpus: int = 0
    most_cpus: int = 0


class JobCountsRow(ReportRow, frozen=True, kw_only=True):
    """Number of runs of one account, size and state in a period.

    Attributes:
        account: The account.
        least_cpus: Smallest number of CPUs.
        most_cpus: Largest number of CPUs; 0 for no upper bound.
        state: The latest known state.
        jobs: Number of runs.
        cpu_s: Allocated CPUs times seconds within the period.
        gpu_s: The same for GPUs.
    """

    account: str = ""
    least_cpus: int = 0
    most_cpus: int = 0
    state: str = ""
    jobs: int = 0
    cpu_s: int = 0
    gpu_s: int = 0


class WasteRow(ReportRow, frozen=True, kw_only=True):
    """Allocated and used CPU time, memory and time limits of a user in an account.

    Attributes:
        account: The account.
        user: The user; "" if the uid resolves to none.
        uid: The uid.
        jobs: Number of runs that ended in the period and have a known start.
        measured: Number of these whose CPU use is known.
        cpu_s: Allocated CPUs times seconds of the measured runs.
        used_cpu_s: CPU seconds that the measured runs used.
        memory_measured: Number of runs whose peak memory is known.
        memory_byte_s: Allocated memory times seconds of those runs.
        used_memory_byte_s: Peak memory times the same seconds.
        limited: Number of runs with a time limit of their own.
        limit_s: Sum of their time limits.
        elapsed_s: Sum of their elapsed times.
    """

    account: str = ""
    user: str = ""
    uid: int | None = None
    jobs: int = 0
    measured: int = 0
    cpu_s: int = 0
    used_cpu_s: int = 0
    memory_measured: int = 0
    memory_byte_s: int = 0
    used_memory_byte_s: int = 0
    limited: int = 0
    limit_s: int = 0
    elapsed_s: int = 0


def _read_period(row: ReportRow, reply: "ReportReply") -> Period:
    return reply.periods[row.period]


def _read_cpu_range(row: "WaitRow | JobCountsRow", _: object) -> str:
    """Return the range of CPU counts of a size class; "" without size classes."""
    return f"{row.least_cpus}-{row.most_cpus or ''}" if row.most_cpus or row.least_cpus else ""


_PERIOD_COLUMNS: Final = (
    Column(
        "Period",
        lambda row, reply: _read_period(row, reply).label,
        show=lambda reply: len(reply.periods) > 1,
    ),
    Column("Start", lambda row, reply: _read_period(row, reply).since, "time", show="requested"),
    Column("End", lambda row, reply: _read_period(row, reply).until, "time", show="requested"),
    Column("Cluster", "cluster", show="several"),
)
_ACCOUNT: Final = Column("Account", "account", link="account")
_USER: Final = Column("User", read_user, link="user")
_PARTITION: Final = Column("Partition", "partition", link="partition")
_JOBS: Final = Column("Jobs", "jobs", "count")
_CPU: Final = Column("CPU", "cpu_s", "hours", title="CPU hours")
_GPU: Final = Column("GPU", "gpu_s", "hours", title="GPU hours", show="filled")
_USAGE_COLUMNS: Final = (
    _JOBS,
    _CPU,
    _GPU,
    Column("Node", "node_s", "hours", title="Node hours", show="pages"),
)
_WAIT_COLUMNS: Final = (
    Column("Started", "started", "count"),
    Column("Median", "median_s", "duration", title="Median wait"),
    Column("P90", "p90_s", "duration", title="90th percentile of waits"),
    Column("LongestWait", "longest_s", "duration", title="Longest wait"),
)


class ReportReply(Answer, frozen=True, kw_only=True):
    """Common fields of every report reply.

    Attributes:
        periods: The reporting periods, in order of time.
        zone: IANA name of the zone that divides the periods.
        is_all: True if all users' jobs are included, False if only those that the user may see.
        is_default: Whether the request gave no start, so that the report begins with yesterday.
        is_summed: Whether whole days come from day sums, with waits rounded by up to 3 %; False if
            every job was read.
        rows: The rows of the report.
        title: Title of the report's page.
        plotted: Attribute of the rows whose totals by period pages plot.
    """

    title: ClassVar[str]
    plotted: ClassVar[str] = "cpu_s"
    periods: tuple[Period, ...]
    zone: str
    is_all: bool = True
    is_default: bool = False
    is_summed: bool = False
    rows: tuple[ReportRow, ...]

    @property
    def period(self) -> tuple[datetime, datetime]:
        """Interval of the report."""
        return self.periods[0].since, self.periods[-1].until

    def list_notes(self) -> Iterable[str]:
        """Return which jobs are counted."""
        if not self.is_all:
            yield "Only jobs that you may see: your own, and those of accounts that you coordinate."

    def list_warnings(self) -> Iterable[str]:
        """Return the reason why there are no rows."""
        if not self.rows:
            visibility = "" if self.is_all else " that you may see"
            hint = (
                " The default period is yesterday; choose another with --starttime."
                if self.is_default
                else ""
            )
            yield f"No jobs{visibility} in this period.{hint}"


def _has_gpus(reply: "ClusterReply") -> bool:
    return any(row.gpus or row.allocated_gpu_s for row in reply.rows)


class ClusterReply(ReportReply, frozen=True, kw_only=True):
    """Reply of ``reports.cluster``.

    Attributes:
        rows: Rows by period and cluster.
        sensor: Whether a sensor is enabled; capacity is known only with one.
    """

    title = "Cluster utilization"
    plotted = "allocated_cpu_s"
    rows: tuple[ClusterRow, ...]
    sensor: bool = False
    layout: ClassVar[Layout] = (
        *_PERIOD_COLUMNS,
        _JOBS,
        Column("Allocated", "allocated_cpu_s", "hours"),
        Column("Down", "down_cpu_s", "hours"),
        Column("PlannedDown", "planned_down_cpu_s", "hours", title="Planned down"),
        Column("Idle", "idle_cpu_s", "hours"),
        Column("Planned", "planned_cpu_s", "hours"),
        Column("Reported", "reported_cpu_s", "hours"),
        Column(
            "Used%", read_ratio("allocated_cpu_s", "reported_cpu_s"), "percent", title="Utilization"
        ),
        Column("GPUAllocated", "allocated_gpu_s", "hours", title="GPUs allocated", show=_has_gpus),
        Column("GPUDown", "down_gpu_s", "hours", show="requested"),
        Column("GPUPlannedDown", "planned_down_gpu_s", "hours", show="requested"),
        Column("GPUIdle", "idle_gpu_s", "hours", title="GPUs idle", show=_has_gpus),
        Column("GPUReported", "reported_gpu_s", "hours", title="GPUs reported", show=_has_gpus),
        Column(
            "GPUUsed%",
            read_ratio("allocated_gpu_s", "reported_gpu_s"),
            "percent",
            title="GPU utilization",
            show=_has_gpus,
        ),
        Column("Known", "known_s", "hours", show="requested"),
        Column("CPUs", "cpus", "count", show="requested"),
        Column("GPUs", "gpus", "count", show="requested"),
        Column("Nodes", "nodes", "count", show="requested"),
    )

    def list_notes(self) -> Iterable[str]:
        """Return that capacity is unknown."""
        if not self.sensor:
            yield "Capacity is unknown without a sensor: see [sensor]."

    def list_warnings(self) -> Iterable[str]:
        """Return the reason why there are no rows."""
        if not self.sensor and not self.rows:
            yield (
                "No rows: the sensor records capacity and is off. Set 'enabled = true' in [sensor]."
            )
        elif not self.rows:
            yield "No rows: the sensor recorded no nodes in this period, and no jobs ran in it."


class AccountsReply(ReportReply, frozen=True, kw_only=True):
    """Reply of ``reports.accounts``: a total row for each account, then a row for each user."""

    title = "Usage by account"
    rows: tuple[AccountRow, ...]
    layout: ClassVar[Layout] = (*_PERIOD_COLUMNS, _ACCOUNT, _USER, *_USAGE_COLUMNS)


class UsersReply(ReportReply, frozen=True, kw_only=True):
    """Reply of ``reports.users``, largest usage first."""

    title = "Usage by user"
    rows: tuple[UserRow, ...]
    layout: ClassVar[Layout] = (
        *_PERIOD_COLUMNS,
        _USER,
        Column("Accounts", "accounts", max_width=40),
        *_USAGE_COLUMNS,
        Column("Completed", "completed", "count"),
        Column("Failed", "failed", "count"),
    )


class WaitTimesReply(ReportReply, frozen=True, kw_only=True):
    """Common part of replies with wait times."""

    def list_notes(self) -> Iterable[str]:
        """Return also that wait times are rounded."""
        yield from super().list_notes()
        if self.is_summed and self.rows:
            yield "Waits from 32 s are rounded by up to 3 %, because they come from day sums."


class PartitionUsageReply(WaitTimesReply, frozen=True, kw_only=True):
    """Reply of ``reports.partitions``."""

    title = "Partitions"
    rows: tuple[PartitionRow, ...]
    layout: ClassVar[Layout] = (*_PERIOD_COLUMNS, _PARTITION, *_USAGE_COLUMNS, *_WAIT_COLUMNS)


class WaitsReply(WaitTimesReply, frozen=True, kw_only=True):
    """Reply of ``reports.waits``."""

    title = "Wait times"
    plotted = "median_s"
    rows: tuple[WaitRow, ...]
    layout: ClassVar[Layout] = (
        *_PERIOD_COLUMNS,
        _PARTITION,
        Column("Account", "account", link="account", show="filled"),
        Column("User", "user", link="user", show="filled"),
        Column("CPUs", _read_cpu_range, show="filled", right=True),
        *_WAIT_COLUMNS,
    )


class JobCountsReply(ReportReply, frozen=True, kw_only=True):
    """Reply of ``reports.jobs``."""

    title = "Jobs by state and size"
    plotted = "jobs"
    rows: tuple[JobCountsRow, ...]
    layout: ClassVar[Layout] = (
        *_PERIOD_COLUMNS,
        _ACCOUNT,
        Column("CPUs", _read_cpu_range, right=True),
        Column("State", "state"),
        _JOBS,
        _CPU,
        _GPU,
    )


def _make_share_column(name: str, used: str, allocated: str, title: str) -> Column:
    """Return the column of a used share, drawn as a bar on pages."""
    ratio = read_ratio(used, allocated)
    return Column(name, ratio, "percent", title=title, absent="not measured", low=0.25)


class WasteReply(ReportReply, frozen=True, kw_only=True):
    """Reply of ``reports.waste``, largest waste of CPU time first."""

    title = "Waste: allocated and not used"
    rows: tuple[WasteRow, ...]
    layout: ClassVar[Layout] = (
        *_PERIOD_COLUMNS,
        _ACCOUNT,
        _USER,
        _JOBS,
        Column("Measured", "measured", "count", show="requested"),
        _CPU,
        Column("Used", "used_cpu_s", "hours", title="CPU hours used"),
        _make_share_column("Used%", "used_cpu_s", "cpu_s", "CPU efficiency"),
        _make_share_column("Memory%", "used_memory_byte_s", "memory_byte_s", "Memory efficiency"),
        _make_share_column("Time%", "elapsed_s", "limit_s", "Time limit used"),
    )


_MAX_PERIODS: Final = 1500
"""Maximum number of periods in a report: four years of days."""


def resolve_interval(
    since: str, until: str, now: datetime, zone: tzinfo
) -> tuple[datetime, datetime]:
    """Resolve the begin and end of a requested interval to UTC. Default: yesterday.

    Args:
        since: Text of the begin. Default: the midnight before the last one, as in sreport(1).
        until: Text of the end. Default: last midnight, or now if the interval begins later.
        now: The current time; later times are cut off.
        zone: Time zone of the texts.

    Raises:
        UsageError: The interval is shorter than a second, or a time is invalid.
    """
    today = now.astimezone(zone).date()
    begin = (
        parse_time(since, now, zone) if since else _find_midnight(today - timedelta(days=1), zone)
    )
    midnight = _find_midnight(today, zone)
    end = parse_time(until, now, zone) if until else (midnight if begin < midnight else now)
    # Slurm's times are whole seconds. Whole-second bounds lose no fraction between two periods.
    begin, end = (at.astimezone(UTC).replace(microsecond=0) for at in (begin, min(end, now)))
    if end <= begin:
        raise UsageError(
            "invalid period: it is empty, shorter than a second, or in the future. Change "
            "`since` or `until`"
        )
    return begin, end


def divide_interval(
    begin: datetime, end: datetime, by: PeriodLength, zone: tzinfo
) -> tuple[Period, ...]:
    """Divide an interval into periods; the first and the last may be shorter than the others.

    Args:
        begin: Begin of the interval.
        end: End of the interval.
        by: Length of a period; "" for a single one.
        zone: Zone whose midnights separate the periods.

    Raises:
        UsageError: There would be too many periods.
    """
    if not by:
        return (Period(since=begin, until=end),)
    periods: list[Period] = []
    day = _find_period_start(begin.astimezone(zone).date(), by)
    for next_day in _iterate_period_starts(day, by):
        since, until = (
            max(begin, _find_midnight(day, zone)),
            min(end, _find_midnight(next_day, zone)),
        )
        if since < until:
            periods.append(Period(label=_format_period_label(day, by), since=since, until=until))
        if until >= end:
            return tuple(periods)
        if len(periods) > _MAX_PERIODS:
            break
        day = next_day
    raise UsageError(f"more than {_MAX_PERIODS} periods: choose weeks or months", by)


def _find_midnight(day: date, zone: tzinfo) -> datetime:
    return datetime.combine(day, time(), zone).astimezone(UTC)


def _find_period_start(day: date, by: PeriodLength) -> date:
    """Return the first day of the month or week that contains a day."""
    if by == "month":
        return day.replace(day=1)
    return day - timedelta(days=day.weekday()) if by == "week" else day


def _iterate_period_starts(day: date, by: PeriodLength) -> Iterator[date]:
    """Yield the first day of each following period."""
    while True:
        if by == "month":
            day = (day.replace(day=1) + timedelta(days=31)).replace(day=1)
        else:
            day += timedelta(days=7 if by == "week" else 1)
        yield day


def _format_period_label(day: date, by: PeriodLength) -> str:
    """Return the label of a period that begins on a day: 2026-11, 2026-W47 or 2026-11-22."""
    if by == "month":
        return f"{day:%Y-%m}"
    if by == "week":
        year, week, _ = day.isocalendar()
        return f"{year}-W{week:02}"
    return day.isoformat()
