"""Tables of sums in jobs.db, and their schema. :mod:`steward.jobs.day_sums` maintains them.

A :class:`Cube` adds up amounts of ended runs by the columns of its key: ``usage_sum``, ``wait_sum``
and ``count_sum`` by day and by month, ``capacity_sum`` by quarter of an hour. Beside them:
``summed`` (clusters with sums), ``summed_day`` (days with sums), ``crossing`` (days that a run
touches before the day of its end, which the index of ends misses) and ``irregular`` (ended runs
that a sum leaves out).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from steward.core.sqlite import Connection
from steward.core.storage import Index, Table

UNKNOWN_UID: Final = -1
"""Stored instead of an unknown uid, because a key has no NULL."""
COMPLETE: Final = 2**63 - 1
"""``SummedCluster.upto`` of a cluster whose sums are complete."""
QUARTER_S: Final = 900
"""Length of a quarter of an hour, in seconds."""
_SMALLEST_ROUNDED: Final = 32

Record = TypeVar("Record", bound=msgspec.Struct)


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
    """Day of a cluster with sums: its midnights and when its month begins, µs since the epoch."""

    cluster: str
    begin_us: int
    end_us: int
    month_us: int


class SummedUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of the regular runs of one day or month, account, user, partition and QOS.

    Attributes:
        is_month: Whether it is of a month; else of a day.
        begin_us: Begin of the day or month, µs since the epoch.
        uid: Uid; :data:`UNKNOWN_UID` if unknown.
        touched: Number of runs that were active in that time.
        began: Number of these that were not active in an earlier day or month.
        cpu_s: Allocated CPUs times seconds.
        gpu_s: The same for GPUs.
        node_s: The same for nodes.
        completed: Number of runs that ended successfully in that time.
        failed: Number of runs that ended otherwise.
        ended: Number of runs that ended in that time; this and all following fields are of
            :class:`steward.jobs.waste.Waste`.
    """

    cluster: str
    is_month: bool
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
    ended: int
    measured: int
    measured_cpu_s: int
    used_cpu_ms: int
    memory_measured: int
    memory_mib_s: int
    used_memory_mib_s: int
    limited: int
    limit_s: int
    elapsed_s: int


class SummedWaits(msgspec.Struct, frozen=True, kw_only=True):
    """Number of regular runs that started in one day or month after about the same wait.

    Attributes:
        is_month: Whether it is of a month; else of a day.
        begin_us: Begin of the day or month, µs since the epoch.
        cpus: Size: the largest power of two up to the run's CPUs; 0 without CPUs.
        wait_s: Time from eligible to start, by :func:`round_wait`.
        runs: Number of runs.
    """

    cluster: str
    is_month: bool
    begin_us: int
    partition: str
    cpus: int
    wait_s: int
    runs: int


class CrossingRun(msgspec.Struct, frozen=True):
    """Run that was active on a day and on a later one."""

    cluster: str
    begin_us: int
    job_id: int
    submit_us: int
    restarts: int


class SummedCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Number and usage of the regular runs of one day or month, account, state and size.

    Attributes:
        is_month: Whether it is of a month; else of a day.
        begin_us: Begin of the day or month, µs since the epoch.
        state: The run's last state.
        cpus: Number of its allocated CPUs; of its requested ones if it never had any.
        touched: Number of runs that were active in that time, or ended in it without a start.
        began: Number of these that were not active in an earlier day or month.
        cpu_s: Allocated CPUs times seconds.
        gpu_s: The same for GPUs.
    """

    cluster: str
    is_month: bool
    begin_us: int
    account: str
    state: str
    cpus: int
    touched: int
    began: int
    cpu_s: int
    gpu_s: int


class SummedCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Allocated and awaited resources of regular runs in a quarter of an hour.

    Attributes:
        begin_s: Begin of the quarter, seconds since the epoch.
        cpu_s: Allocated CPUs times seconds in the quarter, of runs that began or ended in it.
        cpus: Change of the number of CPUs that other runs had, from the begin of the quarter on.
        gpu_s: The same as ``cpu_s`` for GPUs.
        gpus: The same as ``cpus`` for GPUs.
        planned_cpu_s: The same as ``cpu_s`` for CPUs that eligible runs waited for.
        planned_cpus: The same as ``cpus`` for these.
    """

    cluster: str
    begin_s: int
    cpu_s: int
    cpus: int
    gpu_s: int
    gpus: int
    planned_cpu_s: int
    planned_cpus: int


class IrregularRun(msgspec.Struct, frozen=True):
    """Ended run that a sum leaves out.

    Attributes:
        since_us: When it became eligible or started, whichever is known and earlier.
        is_daily: Whether sums by day include it, but not those of capacity.
    """

    cluster: str
    job_id: int
    submit_us: int
    restarts: int
    end_us: int
    since_us: int
    is_daily: bool


class Cube(Generic[Record]):
    """Table of sums.

    Args:
        record: Struct of a row: the fields of the key, then the amounts.
        name: Name of the table.
        keys: Number of fields of the key.
    """

    def __init__(self, record: type[Record], name: str, keys: int) -> None:
        self.name = name
        self.keys, self.amounts = (
            record.__struct_fields__[:keys],
            record.__struct_fields__[keys:],
        )
        self.table = Table(record, name, key=", ".join(self.keys))
        self._add = self.table.build_upsert(()) + ", ".join(
            f"{amount} = {amount} + excluded.{amount}" for amount in self.amounts
        )
        conditions = [f"{key} = ?" for key in self.keys] + [f"{name} = 0" for name in self.amounts]
        self._drop_empty = f"DELETE FROM {name} WHERE {' AND '.join(conditions)}"  # noqa: S608 -- our own columns

    def add(
        self, connection: Connection, sums: Mapping[tuple[Any, ...], Sequence[int]], *, drops: bool
    ) -> None:
        """Add amounts by key, inside a transaction; ``drops`` if rows may become empty by them."""
        rows = [(*key, *amounts) for key, amounts in sums.items() if any(amounts)]
        connection.executemany(self._add, rows)
        if drops:
            empty = [key for key, amounts in sums.items() if min(amounts) < 0]
            connection.executemany(self._drop_empty, empty)


def round_wait(wait_s: int) -> int:
    """Round a wait to the middle of its bucket, by at most 1/32; exact below 32 s."""
    if wait_s < _SMALLEST_ROUNDED:
        return wait_s
    shift = wait_s.bit_length() - 5
    return (wait_s >> shift << shift) + (1 << shift >> 1)


SUMMED: Final = Table(SummedCluster, "summed", key="cluster", later=("rules",))
DAYS: Final = Table(SummedDay, "summed_day", key="cluster, begin_us")
USAGE: Final = Cube(SummedUsage, "usage_sum", 8)
WAITS: Final = Cube(SummedWaits, "wait_sum", 6)
CAPACITY: Final = Cube(SummedCapacity, "capacity_sum", 2)
COUNTS: Final = Cube(SummedCounts, "count_sum", 6)
CUBES: Final = (USAGE, WAITS, COUNTS, CAPACITY)
CROSSING: Final = Table(
    CrossingRun, "crossing", key="cluster, begin_us, job_id, submit_us, restarts"
)
IRREGULAR: Final = Table(
    *(IrregularRun, "irregular"),
    key="cluster, job_id, submit_us, restarts",
    indexes={"by_times": Index("cluster, end_us, since_us")},
)
_REBUILT: Final = (DAYS, *(cube.table for cube in CUBES), CROSSING, IRREGULAR)
TABLES: Final = (SUMMED, *_REBUILT)
SUMS_SCHEMA: Final = f"""
    DROP TABLE IF EXISTS day_sum;
    DROP TABLE IF EXISTS summed_day;
    DROP TABLE IF EXISTS crossing;
    DROP TABLE IF EXISTS irregular;
    {"".join(table.schema for table in _REBUILT)}
    UPDATE summed SET upto = 0;
"""  # noqa: S608 -- our own names
"""Script that creates the tables but ``summed``, and makes the worker sum all lines."""


def is_complete(connection: Connection, cluster: str) -> bool:
    """Return whether all lines of a cluster are summed."""
    row = connection.execute(
        "SELECT 1 FROM summed WHERE cluster = ? AND upto = ?", (cluster, COMPLETE)
    ).fetchone()
    return row is not None
