"""What reports are asked, and what they answer.

Amounts are in seconds of a CPU or GPU: an hour of four CPUs is 14,400 ``cpu_s``.
"""

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Final, Literal

import msgspec

from steward.core.actions import Answer, Request
from steward.core.errors import UsageError
from steward.slurm.times import parse_time

By = Literal["", "month", "week", "day"]


class ReportRequest(Request, frozen=True, kw_only=True):
    """What every report is asked.

    Attributes:
        since: Where the time begins; "" for midnight before yesterday's jobs, as sreport has it.
        until: Where it ends; "" for last midnight; what lies ahead is left out.
        zone: IANA name of the zone that times are typed and cut in; "" for the cluster's.
        by: Each month, week or day for itself; "" for all of the time as one.
        clusters: Only these clusters; all if empty.
        accounts: Only jobs of these accounts.
        users: Only jobs of these users, names or uids.
        partitions: Only jobs in these partitions.
    """

    since: str = ""
    until: str = ""
    zone: str = ""
    by: By = ""
    clusters: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()


class ClusterRequest(ReportRequest, frozen=True, kw_only=True):
    """reports.cluster: what a cluster's CPUs and GPUs did.

    Accounts, users and partitions must not be given: capacity is nobody's alone.
    """


class AccountsRequest(ReportRequest, frozen=True, kw_only=True):
    """reports.accounts: who used what, by account and user."""


class UsersRequest(ReportRequest, frozen=True, kw_only=True):
    """reports.users: who used most.

    Attributes:
        top: So many of each cluster and period; 0 for all.
    """

    top: int = 0


class PartitionsRequest(ReportRequest, frozen=True, kw_only=True):
    """reports.partitions: what was used, and how long jobs waited, by partition."""


class WaitsRequest(ReportRequest, frozen=True, kw_only=True):
    """reports.waits: how long jobs waited, from when they might begin until they did.

    Attributes:
        group: Beside the partition: by size, account or user.
        sizes: Where sizes are parted, in CPUs: ``50`` parts 49 from 50.
    """

    group: Literal["", "size", "account", "user"] = ""
    sizes: tuple[int, ...] = (2, 8, 32, 128, 512)


class JobsRequest(ReportRequest, frozen=True, kw_only=True):
    """reports.jobs: how many jobs there were, by account, size and state.

    Attributes:
        sizes: Where sizes are parted, in CPUs: ``50`` parts 49 from 50.
    """

    sizes: tuple[int, ...] = (50, 250, 500, 1000)


class WasteRequest(ReportRequest, frozen=True, kw_only=True):
    """reports.waste: what was asked for and not used, of jobs that ended in the time.

    Attributes:
        top: So many of each cluster and period, those who wasted most; 0 for all.
    """

    top: int = 0


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """A time that is reported on.

    Attributes:
        label: ``2026-11``, ``2026-W47``, ``2026-11-22``; "" for all of the time as one.
        since: Where it begins, UTC.
        until: Where it ends.
    """

    label: str = ""
    since: datetime
    until: datetime


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What rows of reports have in common.

    Attributes:
        period: Which of the answer's periods, from 0.
        cluster: The cluster's name.
    """

    period: int = 0
    cluster: str = ""


class ClusterRow(Row, frozen=True, kw_only=True):
    """What a cluster's CPUs and GPUs did; the parts add up to what is reported.

    Attributes:
        jobs: How many jobs ran, each run once.
        allocated_cpu_s: That jobs had, or reservations kept for them.
        down_cpu_s: Of nodes that were down, or drained with no job left. None, as all that
            follow, where there is no sensor: then capacity is not known.
        planned_down_cpu_s: In maintenance reservations, or of nodes that were powered down.
        planned_cpu_s: Idle while jobs waited that might have begun (sreport's "Planned").
        idle_cpu_s: Idle, with nothing waiting.
        reported_cpu_s: All of it.
        allocated_gpu_s: The same of GPUs; planned is not told of them.
        known_s: Of how many seconds of the period capacity is known: since the sensor began.
        cpus: How many there were at the end.
        gpus: Likewise.
        nodes: Likewise.
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


class AccountRow(Row, frozen=True, kw_only=True):
    """What an account, or a user of it, used.

    Attributes:
        account: The account.
        user: The user; "" for the account in all.
        uid: Of the user; None for the account in all.
        jobs: How many runs there were in the time.
        cpu_s: CPUs times seconds that they had them.
        gpu_s: The same of GPUs.
        node_s: The same of nodes.
    """

    account: str = ""
    user: str = ""
    uid: int | None = None
    jobs: int = 0
    cpu_s: int = 0
    gpu_s: int = 0
    node_s: int = 0


class UserRow(Row, frozen=True, kw_only=True):
    """What a user used, in all accounts; who used most CPUs first.

    Attributes:
        user: The name; "" for a uid that resolves to none.
        uid: The uid.
        accounts: Where that was charged.
        jobs: How many runs there were in the time.
        completed: Of those that ended in the time, how many with success …
        failed: … and how many otherwise.
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


class Waits(Row, frozen=True, kw_only=True):
    """How long runs that began in the time had waited since they might begin.

    Attributes:
        started: How many began.
        median_s: Half of them waited no longer; None where none began.
        p90_s: Nine in ten waited no longer.
        longest_s: None waited longer.
    """

    started: int = 0
    median_s: int | None = None
    p90_s: int | None = None
    longest_s: int | None = None


class PartitionRow(Waits, frozen=True, kw_only=True):
    """What was used of a partition, and how long jobs waited for it."""

    partition: str = ""
    jobs: int = 0
    cpu_s: int = 0
    gpu_s: int = 0
    node_s: int = 0


class WaitRow(Waits, frozen=True, kw_only=True):
    """How long jobs of one kind waited.

    Attributes:
        partition: Where they ran.
        account: Where it was asked for by account.
        user: Where it was asked for by user.
        least_cpus: Where it was asked for by size: that they have so many at the least …
        most_cpus: … and at the most; 0 for any number.
    """

    partition: str = ""
    account: str = ""
    user: str = ""
    least_cpus: int = 0
    most_cpus: int = 0


class JobsRow(Row, frozen=True, kw_only=True):
    """How many runs of one account, size and state there were in the time.

    Attributes:
        account: The account.
        least_cpus: They have so many CPUs at the least …
        most_cpus: … and at the most; 0 for any number.
        state: The state, as it is known now.
        jobs: How many.
        cpu_s: What they had in the time.
        gpu_s: The same of GPUs.
    """

    account: str = ""
    least_cpus: int = 0
    most_cpus: int = 0
    state: str = ""
    jobs: int = 0
    cpu_s: int = 0
    gpu_s: int = 0


class WasteRow(Row, frozen=True, kw_only=True):
    """What a user asked for in an account, and did not use.

    Attributes:
        account: The account.
        user: The user; "" for a uid that resolves to none.
        uid: The uid.
        jobs: How many runs ended in the time, whose begin is known.
        measured: Of how many of them it is known what they used.
        cpu_s: CPUs times seconds that those had …
        used_cpu_s: … and what they used.
        memory_measured: Of how many runs it is known what memory they used at the most.
        memory_byte_s: Memory times seconds that those had …
        used_memory_byte_s: … and the most that they used, times the same seconds.
        limited: How many runs had a time limit of their own.
        limit_s: Their limits …
        elapsed_s: … and how long they ran.
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


class ReportAnswer(Answer, frozen=True, kw_only=True):
    """What every report answers.

    Attributes:
        periods: The times that are reported on, the first first.
        zone: IANA name of the zone that they are cut in.
        is_all: Whether everybody's jobs are in it: else those that the asker may see.
        rows: What is reported.
    """

    periods: tuple[Period, ...]
    zone: str
    is_all: bool = True
    rows: tuple[Row, ...]


class ClusterAnswer(ReportAnswer, frozen=True, kw_only=True):
    """What clusters did.

    Attributes:
        rows: By period and cluster.
        sensor: Whether there is a sensor: capacity is known through it alone.
    """

    rows: tuple[ClusterRow, ...]
    sensor: bool = False


class AccountsAnswer(ReportAnswer, frozen=True, kw_only=True):
    """Who used what: of each account a row in all, then one for each user."""

    rows: tuple[AccountRow, ...]


class UsersAnswer(ReportAnswer, frozen=True, kw_only=True):
    """Who used most."""

    rows: tuple[UserRow, ...]


class PartitionsAnswer(ReportAnswer, frozen=True, kw_only=True):
    """What was used of partitions."""

    rows: tuple[PartitionRow, ...]


class WaitsAnswer(ReportAnswer, frozen=True, kw_only=True):
    """How long jobs waited."""

    rows: tuple[WaitRow, ...]


class JobsAnswer(ReportAnswer, frozen=True, kw_only=True):
    """How many jobs there were."""

    rows: tuple[JobsRow, ...]


class WasteAnswer(ReportAnswer, frozen=True, kw_only=True):
    """What was asked for and not used, who wasted most CPUs first."""

    rows: tuple[WasteRow, ...]


_MOST: Final = 1500
"""Periods of one report: four years of days."""


def asked(since: str, until: str, now: datetime, zone: tzinfo) -> tuple[datetime, datetime]:
    """Where the time that is asked for begins and ends, UTC; yesterday where none is.

    Args:
        since: What was typed; "" for the midnight before the last one, as sreport(1) has it.
        until: What was typed; "" for last midnight, or for now where the time begins later.
        now: The present moment; what lies ahead is left out.
        zone: Where times are typed.

    Raises:
        UsageError: It has no whole second that is over, or cannot be understood.
    """
    today = now.astimezone(zone).date()
    begin = parse_time(since, now, zone) if since else _midnight(today - timedelta(days=1), zone)
    midnight = _midnight(today, zone)
    end = parse_time(until, now, zone) if until else (midnight if begin < midnight else now)
    # Slurm's times are whole seconds: so no share of one is lost between two periods.
    begin, end = (at.astimezone(UTC).replace(microsecond=0) for at in (begin, min(end, now)))
    if end <= begin:
        raise UsageError(
            "the requested time is shorter than a second, ends before it begins, or is in the "
            "future: change since or until"
        )
    return begin, end


def cut(begin: datetime, end: datetime, by: By, zone: tzinfo) -> tuple[Period, ...]:
    """A time in periods, the first and the last of them as short as the time makes them.

    Args:
        begin: Where it begins.
        end: Where it ends.
        by: What each is of; "" for one period.
        zone: Whose midnights part them.

    Raises:
        UsageError: There would be too many.
    """
    if not by:
        return (Period(since=begin, until=end),)
    found: list[Period] = []
    day = _first(begin.astimezone(zone).date(), by)
    for following in _firsts(day, by):
        since, until = max(begin, _midnight(day, zone)), min(end, _midnight(following, zone))
        if since < until:
            found.append(Period(label=_label(day, by), since=since, until=until))
        if until >= end:
            return tuple(found)
        if len(found) > _MOST:
            break
        day = following
    raise UsageError(f"that would be more than {_MOST} periods: ask for weeks or months", by)


def _midnight(day: date, zone: tzinfo) -> datetime:
    return datetime.combine(day, time(), zone).astimezone(UTC)


def _first(day: date, by: By) -> date:
    """The first day of the month or week that a day is in."""
    if by == "month":
        return day.replace(day=1)
    return day - timedelta(days=day.weekday()) if by == "week" else day


def _firsts(day: date, by: By) -> Iterator[date]:
    """The first days of all that follow."""
    while True:
        if by == "month":
            day = (day.replace(day=1) + timedelta(days=31)).replace(day=1)
        else:
            day += timedelta(days=7 if by == "week" else 1)
        yield day


def _label(day: date, by: By) -> str:
    if by == "month":
        return f"{day:%Y-%m}"
    if by == "week":
        year, week, _ = day.isocalendar()
        return f"{year}-W{week:02}"
    return day.isoformat()
