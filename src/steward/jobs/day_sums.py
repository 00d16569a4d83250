"""Day sums in jobs.db: usage of ended runs by day, so that reports need not read every run.

A sum is what the accounting lines of ended runs add up to, for one day of a cluster and one
account, user, partition and QOS. Whoever changes lines does so inside :func:`track_lines`, which
reads the lines of the changed job ids before and after and adds the difference, in the same
transaction. So the sums always equal a recount of the lines, in whatever order facts arrive.

Sums hold *regular* runs only: those whose usage of a period is the sum of that of its days, to the
second. All others are listed in table ``irregular`` and read from their lines: resized runs, runs
suspended on more than one day, times with fractions of a second, and implausible amounts.

Tables: ``summed`` (clusters with sums), ``summed_day`` (days with sums), ``day_sum`` (the sums),
``crossing`` (days that a run touches before the day of its end, which the index of ends misses),
``irregular``. Days are cut in the cluster's zone; a change of zone rebuilds them, in small parts.
The same functions maintain the node index (:mod:`steward.jobs.node_runs`).
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, time, tzinfo
from functools import lru_cache
from itertools import groupby
from typing import Any, Final, NamedTuple

import msgspec

from steward.core.sqlite import Connection
from steward.core.storage import Index, Table
from steward.core.timestamps import to_micros
from steward.jobs.lines import TEXT_FIELDS, FullRunKey
from steward.jobs.node_runs import NodeEnd, drop_node_runs, write_node_runs
from steward.slurm.job_states import FINISHED
from steward.slurm.times import TimeError, load_zone
from steward.slurm.tres import count_gpus

UNKNOWN_UID: Final = -1
"""Stored instead of an unknown uid, because a key has no NULL."""
COMPLETE: Final = 2**63 - 1
"""``SummedCluster.upto`` of a cluster whose sums are complete."""

_US: Final = 1_000_000
_DAY_US: Final = 86_400 * _US
_SUCCESS_STATE: Final = "COMPLETED"
_MAX_DAYS: Final = 400
"""Maximum number of days of a regular run: a wrong start time must not write thousands of rows."""
_MAX_AMOUNT: Final = 1 << 24
"""Maximum of CPUs, GPUs and nodes of a regular run, so that no sum exceeds 64 bits."""
_RULES_S: Final = range(631_152_000, 2_840_140_800, 86_400)
"""Days of which a zone's rules are compared: 1990 to 2060."""
REBUILD_JOBS: Final = 2000
"""Number of job ids that one step of a rebuild sums."""


class SummedCluster(msgspec.Struct, frozen=True, kw_only=True):
    """Cluster with sums.

    Attributes:
        cluster: Cluster name.
        zone: IANA name of the zone that its days are cut in; "" for a zone without a name.
        upto: Job ids up to this one are summed: :data:`COMPLETE`, or progress of a rebuild.
        rules: Digest of the zone's rules, which a new tzdata or /etc/localtime can change.
    """

    cluster: str
    zone: str
    upto: int
    rules: str = ""


class SummedDay(msgspec.Struct, frozen=True):
    """Day of a cluster on which a regular run was active: its midnights, µs since the epoch."""

    cluster: str
    begin_us: int
    end_us: int


class DaySum(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of the regular runs of one day, account, user, partition and QOS.

    Attributes:
        begin_us: Begin of the day, µs since the epoch.
        uid: Uid; :data:`UNKNOWN_UID` if unknown.
        touched: Number of runs that were active on the day.
        began: Number of these that were not active on an earlier day.
        cpu_s: Allocated CPUs times seconds.
        gpu_s: The same for GPUs.
        node_s: The same for nodes.
        completed: Number of runs that ended successfully on the day.
        failed: Number of runs that ended otherwise.
    """

    cluster: str
    begin_us: int
    account: str
    user: str
    uid: int
    partition: str
    qos: str
    touched: int
    began: int
    cpu_s: int
    gpu_s: int
    node_s: int
    completed: int
    failed: int


class CrossingRun(msgspec.Struct, frozen=True):
    """Run that was active on a day and on a later one."""

    cluster: str
    begin_us: int
    job_id: int
    submit_us: int
    restarts: int


class IrregularRun(msgspec.Struct, frozen=True):
    """Ended run that no sum includes."""

    cluster: str
    job_id: int
    submit_us: int
    restarts: int
    end_us: int
    start_us: int = 0


_SUMMED: Final = Table(SummedCluster, "summed", key="cluster", later=("rules",))
_DAYS: Final = Table(SummedDay, "summed_day", key="cluster, begin_us")
_KEY: Final = "cluster, begin_us, account, user, uid, partition, qos"
_SUMS: Final = Table(DaySum, "day_sum", key=_KEY)
_CROSSING: Final = Table(
    CrossingRun, "crossing", key="cluster, begin_us, job_id, submit_us, restarts"
)
_IRREGULAR: Final = Table(
    *(IrregularRun, "irregular"),
    key="cluster, job_id, submit_us, restarts",
    indexes={"by_end": Index("cluster, end_us")},
    later=("start_us",),
)
ZONE_RULES: Final = f"""
    {_SUMMED.additions[0]}
    {_IRREGULAR.additions[0]}
    DROP INDEX irregular_by_end;
    CREATE INDEX irregular_by_times ON irregular (cluster, end_us, start_us);
"""
"""Script that adds the later columns. Sums of a cluster without rules are rebuilt."""
RESTART_REBUILD: Final = """
    DELETE FROM summed_day;
    DELETE FROM day_sum;
    DELETE FROM crossing;
    DELETE FROM irregular;
    UPDATE summed SET upto = 0;
"""
"""Script that makes the worker sum all lines again."""
_TABLES: Final = (_SUMMED, _DAYS, _SUMS, _CROSSING, _IRREGULAR)
SUMS_SCHEMA: Final = "".join(table.schema for table in _TABLES)
"""Script that creates the tables."""

_AMOUNTS: Final = ("touched", "began", "cpu_s", "gpu_s", "node_s", "completed", "failed")
_ADD: Final = _SUMS.build_upsert(()) + ", ".join(
    f"{name} = {name} + excluded.{name}" for name in _AMOUNTS
)
_PUT_SUMMED: Final = _SUMMED.build_upsert()
_KEY_MARKS: Final = " AND ".join(f"{name} = ?" for name in _KEY.split(", "))
_DROP_EMPTY: Final = f"DELETE FROM day_sum WHERE {_KEY_MARKS} AND touched = 0"  # noqa: S608 -- our own columns
_DROP_CROSSING: Final = (
    "DELETE FROM crossing WHERE cluster = ? AND begin_us = ? AND job_id = ? "
    "AND submit_us = ? AND restarts = ?"
)
_DROP_IRREGULAR: Final = (
    "DELETE FROM irregular WHERE cluster = ? AND job_id = ? AND submit_us = ? AND restarts = ?"
)

Day = tuple[int, int]
"""Begin and end of a day, µs since the epoch."""


class _RunLine(NamedTuple):
    """Line of an ended run or piece, with the fields that sums depend on."""

    job_id: int
    submit_us: int
    restarts: int
    piece_us: int
    account: str
    user: str
    uid: int
    partition: str
    qos: str
    eligible_us: int
    start_us: int
    end_us: int
    suspended_s: int
    cpus: int
    nodes: int
    tres_allocated: str
    state: str
    nodelist: str


def _read_column(name: str) -> str:
    """Return the SQL of a column of a line, with a value instead of NULL."""
    absent = UNKNOWN_UID if name == "uid" else "''" if name in TEXT_FIELDS else 0
    return f'coalesce("{name}", {absent})'


# The index skips steps, of which a job may have thousands.
_LINES_OF_JOBS: Final = (
    f"SELECT {', '.join(map(_read_column, _RunLine._fields))} "  # noqa: S608 -- our own columns
    "FROM line INDEXED BY line_by_id WHERE cluster = ? "
    "AND job_id IN (SELECT value FROM json_each(?)) AND step = '' AND end_us > 0 "
    "ORDER BY job_id, submit_us, restarts, piece_us"
)
_encode = msgspec.json.Encoder().encode

_RunLines = dict[FullRunKey, list[_RunLine]]


def add_cluster(connection: Connection, cluster: str, zone: str) -> None:
    """Begin to sum a cluster, or sum it again if its zone or the zone's rules changed.

    The caller has begun a transaction.

    Args:
        connection: Connection to jobs.db.
        cluster: Cluster name.
        zone: IANA name of its zone; "" for this host's.
    """
    name, rules = describe_zone(zone)
    summed = _read_summed(connection, cluster)
    if summed is not None and (summed.zone, summed.rules) == (name, rules):
        return
    for table in _TABLES:
        connection.execute(f"DELETE FROM {table.name} WHERE cluster = ?", (cluster,))  # noqa: S608 -- our own names
    drop_node_runs(connection, cluster)
    has_lines = connection.execute("SELECT 1 FROM line WHERE cluster = ? LIMIT 1", (cluster,))
    upto = 0 if has_lines.fetchone() else COMPLETE
    _SUMMED.insert(connection, SummedCluster(cluster=cluster, zone=name, upto=upto, rules=rules))


def list_complete_clusters(connection: Connection) -> set[str]:
    """Return the clusters of which all lines are summed, and in the node index."""
    rows = connection.execute("SELECT cluster FROM summed WHERE upto = ?", (COMPLETE,))
    return {cluster for (cluster,) in rows}


def find_incomplete_cluster(connection: Connection) -> SummedCluster | None:
    """Return a cluster with lines that are not summed yet, or None."""
    row = connection.execute(
        f"SELECT {_SUMMED.select_list} FROM summed WHERE upto < ? LIMIT 1",  # noqa: S608 -- our own names
        (COMPLETE,),
    ).fetchone()
    return None if row is None else _SUMMED.decode(row)


def continue_rebuild(connection: Connection, summed: SummedCluster) -> None:
    """Sum the next lines of a cluster that is not complete, inside a transaction."""
    job_ids = [
        job_id
        for (job_id,) in connection.execute(
            "SELECT DISTINCT job_id FROM line WHERE cluster = ? AND job_id > ? "
            "ORDER BY job_id LIMIT ?",
            (summed.cluster, summed.upto, REBUILD_JOBS),
        )
    ]
    runs = _read_runs(connection, summed.cluster, job_ids)
    _write_changes(connection, summed, {}, runs)
    upto = job_ids[-1] if len(job_ids) == REBUILD_JOBS else COMPLETE
    connection.execute(_PUT_SUMMED, _SUMMED.encode(msgspec.structs.replace(summed, upto=upto)))


@contextmanager
def track_lines(connection: Connection, cluster: str, job_ids: Iterable[int]) -> Iterator[None]:
    """Add to the sums what the body changes in the lines of some jobs, inside a transaction.

    Args:
        connection: Connection to jobs.db.
        cluster: Cluster name; without sums (:func:`add_cluster`) nothing is tracked.
        job_ids: Every job id whose lines may change.
    """
    summed = _read_summed(connection, cluster)
    tracked = [job_id for job_id in job_ids if summed is not None and job_id <= summed.upto]
    before = _read_runs(connection, cluster, tracked)
    yield
    after = _read_runs(connection, cluster, tracked)
    if summed is not None and before != after:
        _write_changes(connection, summed, before, after)


def _read_summed(connection: Connection, cluster: str) -> SummedCluster | None:
    row = connection.execute(
        f"SELECT {_SUMMED.select_list} FROM summed WHERE cluster = ?",  # noqa: S608 -- our own names
        (cluster,),
    ).fetchone()
    return None if row is None else _SUMMED.decode(row)


def _read_runs(connection: Connection, cluster: str, job_ids: Sequence[int]) -> _RunLines:
    """Read the lines of the ended runs of some jobs, former pieces included."""
    if not job_ids:
        return {}
    rows = connection.execute(_LINES_OF_JOBS, (cluster, _encode(job_ids).decode()))
    lines = map(_RunLine._make, rows.fetchall())
    return {key: list(run) for key, run in groupby(lines, lambda line: line[:3])}


class _Changes:
    """Rows that a change of lines adds and removes."""

    def __init__(self, cluster: str, zone: tzinfo) -> None:
        self._cluster = cluster
        self._zone = zone
        self.sums: dict[tuple[Any, ...], list[int]] = {}
        self.days: set[Day] = set()
        self.crossing: dict[int, list[CrossingRun]] = {1: [], -1: []}
        self.irregular: dict[int, list[IrregularRun]] = {1: [], -1: []}

    def add(self, key: FullRunKey, run: Sequence[_RunLine], sign: int) -> None:
        """Add a run, or subtract it with a ``sign`` of -1."""
        line = run[0]
        # A resized run that has not ended has lines of former sizes only.
        if line.piece_us or not any(piece.start_us for piece in run):
            return
        gpus = count_gpus(line.tres_allocated)
        days = _cut_regular(run, gpus, self._zone)
        if not days:
            start_us = min(piece.start_us for piece in run if piece.start_us)
            end_us = max(max(piece.start_us, piece.end_us) for piece in run)
            self.irregular[sign].append(IrregularRun(self._cluster, *key, end_us, start_us))
            return
        group = line[4:9]
        last = days[-1]
        for day in days:
            begin_us, day_end_us = day
            since, until = max(line.start_us, begin_us), min(line.end_us, day_end_us)
            amounts = self.sums.setdefault((begin_us, *group), [0] * len(_AMOUNTS))
            if until > since:
                off_us = min(line.suspended_s * _US, until - since)
                seconds = (until - since - off_us) // _US * sign
                amounts[2] += line.cpus * seconds
                amounts[3] += gpus * seconds
                amounts[4] += line.nodes * seconds
            amounts[0] += sign
            amounts[1] += sign * (day is days[0])
            if day is not last:
                self.crossing[sign].append(CrossingRun(self._cluster, begin_us, *key))
            elif line.state in FINISHED:
                amounts[5 if line.state == _SUCCESS_STATE else 6] += sign
            if sign > 0:
                self.days.add(day)


def _write_changes(
    connection: Connection, summed: SummedCluster, before: _RunLines, after: _RunLines
) -> None:
    """Subtract the runs as they were before a change, and add them as they are after it."""
    cluster = summed.cluster
    changes = _Changes(cluster, load_zone(summed.zone))
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if old:
            changes.add(key, old, -1)
        if new:
            changes.add(key, new, 1)
    rows = [((cluster, *key), amounts) for key, amounts in changes.sums.items() if any(amounts)]
    connection.executemany(_ADD, [(*key, *amounts) for key, amounts in rows])
    if before:
        connection.executemany(_DROP_EMPTY, [key for key, amounts in rows if amounts[0] < 0])
        connection.executemany(_DROP_CROSSING, map(_CROSSING.encode, changes.crossing[-1]))
        irregular = [_IRREGULAR.encode(run)[:4] for run in changes.irregular[-1]]
        connection.executemany(_DROP_IRREGULAR, irregular)
    days = [SummedDay(cluster, *day) for day in changes.days]
    _DAYS.insert_all(connection, days, "ignore")
    _CROSSING.insert_all(connection, changes.crossing[1])
    _IRREGULAR.insert_all(connection, changes.irregular[1])
    write_node_runs(connection, cluster, _list_node_ends(before), _list_node_ends(after))


def _list_node_ends(runs: _RunLines) -> Iterator[NodeEnd]:
    """Yield what the node index must know of ended runs and pieces."""
    for lines in runs.values():
        for line in lines:
            if line.nodelist:
                yield line.nodelist, line.job_id, line.end_us // _US


def _cut_regular(run: Sequence[_RunLine], gpus: int, zone: tzinfo) -> list[Day]:
    """Return the days on which a regular run was active; none if the run is irregular."""
    line = run[0]
    amounts = (line.cpus, line.nodes, gpus)
    if (
        len(run) > 1
        or line.start_us % _US
        or line.end_us % _US
        or not line.eligible_us <= line.start_us <= line.end_us
        or line.end_us - line.start_us > _MAX_DAYS * _DAY_US
        or not 0 <= min(amounts) <= max(amounts) <= _MAX_AMOUNT
        or line.suspended_s < 0
    ):
        return []
    days = _cut_days(line.start_us, line.end_us, zone)
    return [] if line.suspended_s and len(days) > 1 else days


def _cut_days(start_us: int, end_us: int, zone: tzinfo) -> list[Day]:
    """Return the days between two times; one if they are equal, none outside the years of dates."""
    try:
        ordinal = datetime.fromtimestamp(start_us // _US, zone).toordinal()
        # Where midnight does not exist or comes twice, its date is not the day that holds it.
        while _find_midnight(ordinal, zone) > start_us:
            ordinal -= 1
        days: list[Day] = []
        begin_us = _find_midnight(ordinal, zone)
        while begin_us < end_us or not days:
            ordinal += 1
            day_end_us = _find_midnight(ordinal, zone)
            if day_end_us > start_us and day_end_us > begin_us:
                days.append((begin_us, day_end_us))
            begin_us = day_end_us
    except (ValueError, OverflowError, OSError):
        return []
    return days


@lru_cache(maxsize=4096)
def _find_midnight(ordinal: int, zone: tzinfo) -> int:
    """Return when a day begins in a zone, µs since the epoch."""
    return to_micros(datetime.combine(date.fromordinal(ordinal), time(), zone).astimezone(UTC))


@lru_cache(maxsize=64)
def describe_zone(zone: str) -> tuple[str, str]:
    """Return the IANA name of a zone and the digest of its rules, for this process's lifetime."""
    name = _resolve_zone_name(zone)
    return name, _digest_rules(load_zone(name))


def _digest_rules(zone: tzinfo) -> str:
    """Return the digest of a zone's offsets, and of the times when they change."""
    changes: list[tuple[int, float]] = []

    def read_offset(at_s: int) -> float:
        offset = datetime.fromtimestamp(at_s, zone).utcoffset()
        return offset.total_seconds() if offset is not None else 0.0

    last = read_offset(_RULES_S[0])
    for day_s in _RULES_S:
        if read_offset(day_s + _RULES_S.step) == last:
            continue
        for at_s in range(day_s, day_s + _RULES_S.step + 1, 900):
            offset = read_offset(at_s)
            if offset != last:
                changes.append((at_s, offset))
                last = offset
    return hashlib.sha256(_encode([read_offset(_RULES_S[0]), changes])).hexdigest()[:16]


def _resolve_zone_name(name: str) -> str:
    """Return the IANA name of a zone, also for this host's; "" if that has none."""
    _, _, host_name = os.path.realpath("/etc/localtime").rpartition("/zoneinfo/")
    for candidate in (name, os.environ.get("TZ", "").lstrip(":"), host_name):
        if candidate:
            try:
                load_zone(candidate)
            except TimeError:
                continue
            return candidate
    return ""


class UsageShare(NamedTuple):
    """Usage of a group of runs within one period of a report.

    Attributes:
        period: Index of the period.
        jobs: Number of runs that no earlier share of the period and group counts.
    """

    period: int
    cluster: str
    account: str
    user: str
    uid: int | None
    partition: str
    jobs: int
    cpu_s: int
    gpu_s: int
    node_s: int
    completed: int
    failed: int
