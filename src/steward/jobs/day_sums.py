"""Day sums in jobs.db: usage, waits and capacity of ended runs by time, for reports.

A sum is what the accounting lines of ended runs add up to, for one day or month of a cluster and
the other columns of its table (:mod:`steward.jobs.sum_tables`). Whoever changes lines does so
inside :func:`track_lines`, which reads the lines of the changed job ids before and after and adds
the difference, in the same transaction. So the sums always equal a recount of the lines, in
whatever order facts arrive.

Sums hold *regular* runs only: those whose usage of a period is the sum of that of its days, to the
second. All others are listed in table ``irregular`` and read from their lines: resized runs, runs
suspended on more than one day, times with fractions of a second, and implausible amounts. Sums of
capacity also leave out runs with any suspension, and those in a reservation.

Days are cut in the cluster's zone; a change of zone rebuilds the sums, in small parts. The same
functions maintain the node index (:mod:`steward.jobs.node_runs`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import tzinfo
from itertools import groupby
from operator import add
from typing import Any, Final, NamedTuple

import msgspec

from steward.core.sqlite import Connection
from steward.jobs.lines import TEXT_FIELDS, FullRunKey
from steward.jobs.node_runs import NodeEnd, drop_node_runs, write_node_runs
from steward.jobs.sum_tables import (
    CAPACITY,
    COMPLETE,
    COUNTS,
    CROSSING,
    CUBES,
    DAYS,
    IRREGULAR,
    QUARTER_S,
    SUMMED,
    TABLES,
    UNKNOWN_UID,
    USAGE,
    WAITS,
    CrossingRun,
    Cube,
    IrregularRun,
    SummedCluster,
    SummedDay,
    round_wait,
)
from steward.jobs.waste import Waste, measure_waste
from steward.jobs.zone_days import ZoneDay, cut_days, describe_zone
from steward.slurm.arrays import count_tasks
from steward.slurm.job_states import FINISHED
from steward.slurm.times import load_zone
from steward.slurm.tres import count_gpus

_US: Final = 1_000_000
_SUCCESS_STATE: Final = "COMPLETED"
_MAX_LENGTH_US: Final = 400 * 86_400 * _US
"""Maximum length of a regular run: a wrong start time must not write thousands of rows."""
_MAX_AMOUNT: Final = 1 << 24
"""Maximum of CPUs, GPUs and nodes of a regular run, so that no sum exceeds 64 bits."""
_MAX_WASTE: Final = 1 << 57
"""Maximum of each amount of waste of a regular run, for the same reason."""
_MAX_PLANNED: Final = 1 << 40
"""Maximum of CPUs that the tasks of an array wait for, for the same reason."""
_NO_WASTE: Final = Waste()
REBUILD_JOBS: Final = 2000
"""Number of job ids that one step of a rebuild sums."""
_PUT_SUMMED: Final = SUMMED.build_upsert()
_DROP_CROSSING: Final = (
    "DELETE FROM crossing WHERE cluster = ? AND begin_us = ? AND job_id = ? "
    "AND submit_us = ? AND restarts = ?"
)
_DROP_IRREGULAR: Final = (
    "DELETE FROM irregular WHERE cluster = ? AND job_id = ? AND submit_us = ? AND restarts = ?"
)


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
    requested_cpus: int
    nodes: int
    tres_allocated: str
    state: str
    nodelist: str
    reservation: str
    array_task: str
    time_limit_s: int | None
    user_us: int | None
    system_us: int | None
    cgroup_user_us: int | None
    cgroup_system_us: int | None
    peak_bytes: int | None
    peak_allocated_bytes: int | None


_FIRST_USED: Final = _RunLine._fields.index("time_limit_s")
"""Index of the first field of the run's use."""


def _read_column(name: str) -> str:
    """Return the SQL of a column of a line, with a value instead of NULL, but not of its use."""
    if name in _RunLine._fields[_FIRST_USED:]:
        return f'"{name}"'
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
    for table in TABLES:
        connection.execute(f"DELETE FROM {table.name} WHERE cluster = ?", (cluster,))  # noqa: S608 -- our own names
    drop_node_runs(connection, cluster)
    has_lines = connection.execute("SELECT 1 FROM line WHERE cluster = ? LIMIT 1", (cluster,))
    upto = 0 if has_lines.fetchone() else COMPLETE
    SUMMED.insert(connection, SummedCluster(cluster=cluster, zone=name, upto=upto, rules=rules))


def list_complete_clusters(connection: Connection) -> set[str]:
    """Return the clusters of which all lines are summed, and in the node index."""
    rows = connection.execute("SELECT cluster FROM summed WHERE upto = ?", (COMPLETE,))
    return {cluster for (cluster,) in rows}


def find_incomplete_cluster(connection: Connection) -> SummedCluster | None:
    """Return a cluster with lines that are not summed yet, or None."""
    row = connection.execute(
        f"SELECT {SUMMED.select_list} FROM summed WHERE upto < ? LIMIT 1",  # noqa: S608 -- our own names
        (COMPLETE,),
    ).fetchone()
    return None if row is None else SUMMED.decode(row)


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
    connection.execute(_PUT_SUMMED, SUMMED.encode(msgspec.structs.replace(summed, upto=upto)))


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
        f"SELECT {SUMMED.select_list} FROM summed WHERE cluster = ?",  # noqa: S608 -- our own names
        (cluster,),
    ).fetchone()
    return None if row is None else SUMMED.decode(row)


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
        self.sums: dict[Cube[Any], dict[tuple[Any, ...], list[int]]] = {cube: {} for cube in CUBES}
        self.days: set[ZoneDay] = set()
        self.crossing: dict[int, list[CrossingRun]] = {1: [], -1: []}
        self.irregular: dict[int, list[IrregularRun]] = {1: [], -1: []}

    def add(self, key: FullRunKey, run: Sequence[_RunLine], sign: int) -> None:
        """Add a run, or subtract it with a ``sign`` of -1."""
        line = run[0]
        # A resized run that has not ended has lines of former sizes only.
        if line.piece_us:
            return
        gpus = count_gpus(line.tres_allocated)
        waste = measure_waste(run)
        days = _cut_regular(run, gpus, waste, self._zone)
        if days:
            self._add_usage(line, gpus, days, waste, sign)
            self._add_wait(line, days[0], sign)
            self.crossing[sign] += [
                CrossingRun(self._cluster, day.begin_us, *key) for day in days[:-1]
            ]
        elif _is_regular_wait(run):
            days = cut_days(line.end_us, line.end_us, self._zone)
            for day in days:
                for key_of_day in ((False, day.begin_us), (True, day.month_us)):
                    size = (line.account, line.state, line.cpus or line.requested_cpus)
                    self._add(COUNTS, key_of_day, size, (sign, sign, 0, 0))
        if sign > 0:
            self.days.update(days)
        # Where a suspension or a reservation counts depends on the report.
        if line.suspended_s or line.reservation or not days:
            end_us = max(max(piece.start_us, piece.end_us) for piece in run)
            times = [at_us for piece in run for at_us in (piece.eligible_us, piece.start_us)]
            since_us = min(filter(None, times), default=end_us)
            irregular = IrregularRun(self._cluster, *key, end_us, since_us, is_daily=bool(days))
            self.irregular[sign].append(irregular)
        else:
            self._add_capacity(line, gpus, sign)

    def _add(
        self, cube: Cube[Any], day: tuple[bool, int], group: tuple[Any, ...], amounts: Sequence[int]
    ) -> None:
        """Add amounts to a row of a cube; ``day`` is its day or month."""
        row = self._get_row(cube, *day, *group)
        row[:] = map(add, row, amounts)

    def _get_row(self, cube: Cube[Any], *key: Any) -> list[int]:
        """Return the amounts to add to a row of a cube."""
        sums = self.sums[cube]
        row = sums.get((self._cluster, *key))
        if row is None:
            row = sums[self._cluster, *key] = [0] * len(cube.amounts)
        return row

    def _add_usage(
        self, line: _RunLine, gpus: int, days: Sequence[ZoneDay], waste: Waste, sign: int
    ) -> None:
        """Add the usage of a run to its days and months."""
        group, size = line[4:9], (line.account, line.state, line.cpus or line.requested_cpus)
        months: dict[int, list[int]] = {}
        for day in days:
            seconds = _count_seconds(line, day) * sign
            is_over = day is days[-1] and line.state in FINISHED
            is_success = line.state == _SUCCESS_STATE
            amounts = [
                *(sign, sign * (day is days[0])),
                *(line.cpus * seconds, gpus * seconds, line.nodes * seconds),
                *(sign * (is_over and is_success), sign * (is_over and not is_success)),
                *(sign * amount for amount in (waste if day is days[-1] else _NO_WASTE)),
            ]
            self._add(USAGE, (False, day.begin_us), group, amounts)
            self._add(COUNTS, (False, day.begin_us), size, amounts[:4])
            if day.month_us in months:
                # A run is active in its month once, however many days.
                months[day.month_us][2:] = map(add, months[day.month_us][2:], amounts[2:])
            else:
                months[day.month_us] = amounts
        for month_us, amounts in months.items():
            self._add(USAGE, (True, month_us), group, amounts)
            self._add(COUNTS, (True, month_us), size, amounts[:4])

    def _add_wait(self, line: _RunLine, day: ZoneDay, sign: int) -> None:
        """Add the wait of a run to the day and month of its start."""
        if not line.eligible_us:
            return
        cpus = line.cpus or line.requested_cpus
        wait_s = round_wait((line.start_us - line.eligible_us) // _US)
        group = (line.partition, 1 << cpus.bit_length() >> 1, wait_s)
        self._add(WAITS, (False, day.begin_us), group, (sign,))
        self._add(WAITS, (True, day.month_us), group, (sign,))

    def _add_capacity(self, line: _RunLine, gpus: int, sign: int) -> None:
        """Add what a run had allocated, and waited for, to the quarters."""
        end_s = line.end_us // _US
        begin_s = line.start_us // _US or end_s
        for index, amount in enumerate((line.cpus, gpus)):
            self._add_span(2 * index, begin_s, end_s, amount * sign)
        if line.eligible_us:
            self._add_span(4, line.eligible_us // _US, begin_s, _count_planned_cpus(line) * sign)

    def _add_span(self, index: int, begin_s: int, end_s: int, amount: int) -> None:
        """Add an amount from one time to another: seconds at an index, the change at the next."""
        if begin_s >= end_s or not amount:
            return
        first_s, last_s = begin_s - begin_s % QUARTER_S, end_s - end_s % QUARTER_S
        if first_s == last_s:
            self._get_row(CAPACITY, first_s)[index] += amount * (end_s - begin_s)
            return
        following_s = first_s + QUARTER_S
        self._get_row(CAPACITY, first_s)[index] += amount * (following_s - begin_s)
        self._get_row(CAPACITY, following_s)[index + 1] += amount
        last = self._get_row(CAPACITY, last_s)
        last[index] += amount * (end_s - last_s)
        last[index + 1] -= amount


def _count_planned_cpus(line: _RunLine) -> int:
    """Return the number of CPUs that a run waited for."""
    tasks = 1 if line.start_us else max(1, count_tasks(line.array_task))
    return line.requested_cpus * tasks


def _is_regular_wait(run: Sequence[_RunLine]) -> bool:
    """Return whether a run that never started waited for a plausible time and number of CPUs."""
    line = run[0]
    return (
        len(run) == 1
        and not line.start_us
        and line.eligible_us <= line.end_us
        and 0 <= _count_planned_cpus(line) <= _MAX_PLANNED
    )


def _count_seconds(line: _RunLine, day: ZoneDay) -> int:
    """Return how long a regular run was active on a day, in seconds, less suspended time."""
    lasted_us = min(line.end_us, day.end_us) - max(line.start_us, day.begin_us)
    return max(0, lasted_us - line.suspended_s * _US) // _US


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
    for cube, sums in changes.sums.items():
        cube.add(connection, sums, drops=bool(before))
    if before:
        connection.executemany(_DROP_CROSSING, map(CROSSING.encode, changes.crossing[-1]))
        irregular = [IRREGULAR.encode(run)[:4] for run in changes.irregular[-1]]
        connection.executemany(_DROP_IRREGULAR, irregular)
    days = [SummedDay(cluster, *day) for day in changes.days]
    DAYS.insert_all(connection, days, "ignore")
    CROSSING.insert_all(connection, changes.crossing[1])
    IRREGULAR.insert_all(connection, changes.irregular[1])
    write_node_runs(connection, cluster, _list_node_ends(before), _list_node_ends(after))


def _list_node_ends(runs: _RunLines) -> Iterator[NodeEnd]:
    """Yield what the node index must know of ended runs and pieces."""
    for lines in runs.values():
        for line in lines:
            if line.nodelist:
                yield line.nodelist, line.job_id, line.end_us // _US


def _cut_regular(run: Sequence[_RunLine], gpus: int, waste: Waste, zone: tzinfo) -> list[ZoneDay]:
    """Return the days on which a regular run was active; none if the run is irregular."""
    line = run[0]
    amounts = (line.cpus, line.requested_cpus, line.nodes, gpus)
    if (
        len(run) > 1
        or not line.start_us
        or line.start_us % _US
        or line.end_us % _US
        or not line.eligible_us <= line.start_us <= line.end_us
        or line.end_us - line.start_us > _MAX_LENGTH_US
        or not 0 <= min(amounts) <= max(amounts) <= _MAX_AMOUNT
        or line.suspended_s < 0
        or not 0 <= min(waste) <= max(waste) <= _MAX_WASTE
    ):
        return []
    days = cut_days(line.start_us, line.end_us, zone)
    return [] if line.suspended_s and len(days) > 1 else days
