"""Sample store: telemetry.db, from minute tails to hourly chunks to five-minute means (SQLite).

A batch is stored once, by node, boot and number, in one transaction, and acknowledged after it.
Its samples go to ``tail``, one row for each target and hour. :meth:`SampleStore.maintain` folds
complete hours into chunks, thins chunks that are older than the full resolution to five-minute
means and maxima, deletes expired ones, and keeps the quota: oldest curves first.

Samples of a job that Slurm has not shown on that node yet wait in ``unconfirmed``, which nobody
reads, until :class:`Placements` finds it there; after 15 minutes they are dropped and counted.

Measured with chunks of an hour at 15 s: about 2 bytes for each sample of a varying series.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby, pairwise
from typing import Any, Final, Protocol

import msgspec

from steward.core.databases import TELEMETRY
from steward.core.sqlite import Connection, Database
from steward.core.storage import Index, Table, encode_json
from steward.core.timestamps import to_micros
from steward.telemetry.batch import (
    NODE_TOTAL,
    Batch,
    BatchError,
    Sample,
    find_series,
    select_samples,
)
from steward.telemetry.chunks import (
    Columns,
    decode_columns,
    encode_columns,
    list_samples,
    merge_samples,
)

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
COARSE_STEP_S: Final = 300
"""Step of thinned curves, in seconds."""
MAXIMUM_SUFFIX: Final = ":max"
"""Suffix of the series with the maxima of a thinned series."""
LEAST_FULL_DAYS: Final = 3
"""Shortest retention at full resolution, in days: longer than samples are accepted after."""

_FOLD_GRACE_MS: Final = 10 * 60_000
"""Time after an hour's end until it is folded, in ms: late batches come meanwhile."""
_UNCONFIRMED_PERIOD: Final = timedelta(minutes=15)
"""Longest wait of samples until Slurm shows their job."""
_BOOT_PERIOD: Final = timedelta(days=3)
"""How long the batches of a boot are remembered after the last; longer than samples are valid."""
_MAX_BOOTS: Final = 16
"""Maximum number of boots of a node that are remembered."""
_MAX_RANGES: Final = 1000
"""Maximum number of gaps between the batches of a boot, less one."""
_MAX_UNCONFIRMED: Final = 4096
"""Maximum number of unconfirmed rows of a node."""
_SLICE_ROWS: Final = 200
"""Rows that one transaction of maintenance handles."""


class StaleBatch(BatchError):
    """Error: a batch is older than the batches that the store remembers."""


class JobPlacement(msgspec.Struct, frozen=True):
    """Placement of a job by Slurm: its raw id, and the nodes of all its runs."""

    job_id: int
    nodes: frozenset[str]


class Placements(Protocol):
    """Knowledge of which jobs Slurm placed on which nodes."""

    def find_job(
        self, cluster: str, node: str, job_id: int | None, sluid: str
    ) -> JobPlacement | None:
        """Find a job by its raw id, else by SLUID; None unless Slurm is known to run it on a node.

        Raises:
            Unavailable: That cannot be queried now.
        """


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Target of samples: a node, a job on a node, or a step of a job on a node.

    Attributes:
        number: Row number.
        cluster: Cluster of the node.
        node: NodeName.
        job: Raw job id; 0 for the node itself.
        step: Step; "" for the whole job, or the node.
    """

    number: int = 0
    cluster: str
    node: str
    job: int
    step: str


class _TailPart(msgspec.Struct, frozen=True):
    """Samples of a batch, of one target and hour."""

    number: int
    target: int
    hour_ms: int
    columns: bytes


class _Chunk(msgspec.Struct, frozen=True):
    """Samples of a target in an hour (``step_s`` 0), or its means and maxima in a day."""

    number: int
    target: int
    step_s: int
    start_ms: int
    columns: bytes


class _UnconfirmedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of a job that Slurm has not shown yet."""

    number: int = 0
    cluster: str
    node: str
    job: int | None
    sluid: str
    step: str
    received_at: datetime
    columns: bytes


class _Boot(msgspec.Struct, frozen=True, kw_only=True):
    """Batches of a boot that were stored: inclusive ranges of their numbers above ``floor``."""

    cluster: str
    node: str
    boot: str
    heard_at: datetime
    floor: int = -1
    ranges: list[tuple[int, int]] = []


class NodeIntake(msgspec.Struct, frozen=True, kw_only=True):
    """Samples that a node sent, since telemetry.db was created.

    Attributes:
        cluster: Cluster of the node.
        node: NodeName.
        heard_at: Time of its last batch.
        samples: Samples that were stored or wait for their job.
        out_of_range: Values dropped because they, their time or their series are invalid.
        unplaced: Samples dropped because Slurm did not place their job on the node.
        dropped: Samples that the agent discarded.
    """

    cluster: str
    node: str
    heard_at: datetime
    samples: int = 0
    out_of_range: int = 0
    unplaced: int = 0
    dropped: int = 0


class Evictions(msgspec.Struct, frozen=True, kw_only=True):
    """Curves deleted to keep the quota.

    Attributes:
        parts: Number of deleted chunks and tail rows.
        until_ms: Latest start of one of them, ms since the epoch; 0 if none.
    """

    parts: int = 0
    until_ms: int = 0


TARGETS: Final = Table(
    Target,
    "target",
    key="number",
    unique="cluster, node, job, step",
    autoincrement=True,
    indexes={"by_job": Index("cluster, job")},
)
_TAIL: Final = Table(
    _TailPart,
    "tail",
    key="number",
    indexes={"by_target": Index("target, hour_ms"), "by_hour": Index("hour_ms, target")},
)
_CHUNKS: Final = Table(
    _Chunk,
    "chunk",
    key="number",
    unique="target, step_s, start_ms",
    indexes={"by_start": Index("step_s, start_ms, target"), "by_age": Index("start_ms")},
)
_UNCONFIRMED: Final = Table(
    _UnconfirmedPart, "unconfirmed", key="number", indexes={"by_node": Index("cluster, node")}
)
_BOOTS: Final = Table(_Boot, "boot", key="cluster, node, boot")
INTAKES: Final = Table(NodeIntake, "intake", key="cluster, node")
EVICTIONS: Final = Table(Evictions, "eviction", has_one_row=True)
_TABLES: Final = (TARGETS, _TAIL, _CHUNKS, _UNCONFIRMED, _BOOTS, INTAKES, EVICTIONS)
_MIGRATIONS: Final = ("".join(table.schema for table in _TABLES),)


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of a batch.

    Attributes:
        is_duplicate: Whether the batch was stored before; then the other fields are 0.
        samples: Samples stored, including those that wait for their job.
        out_of_range: Values dropped because they, their time or their series are invalid.
        unplaced: Samples dropped because Slurm did not place their job on the node.
    """

    is_duplicate: bool = False
    samples: int = 0
    out_of_range: int = 0
    unplaced: int = 0


class SampleStore:
    """Writer of telemetry.db. Use it from one thread at a time.

    Args:
        state_dir: The state directory.
        placements: Tells where Slurm placed a job.
        quota_bytes: Maximum size of the stored curves, in bytes.
        full_days: Retention at full resolution, in days.
        coarse_days: Retention of five-minute means and maxima, in days, from the sample on.

    Raises:
        SqliteUnavailable: The database cannot be opened now.
        ValueError: ``full_days`` is too short.
    """

    def __init__(
        self,
        state_dir: str,
        placements: Placements,
        *,
        quota_bytes: int,
        full_days: int = 30,
        coarse_days: int = 365,
    ) -> None:
        if full_days < LEAST_FULL_DAYS:
            raise ValueError(f"full_days must be at least {LEAST_FULL_DAYS}")
        self._placements = placements
        self._quota_bytes = quota_bytes
        self._full_ms, self._coarse_ms = full_days * DAY_MS, coarse_days * DAY_MS
        # A power loss may undo the last batches; a killed process loses none.
        path = TELEMETRY.locate(state_dir)
        self._database = Database(path, _MIGRATIONS, synchronous="NORMAL")

    def add_batch(self, cluster: str, batch: Batch, now: datetime) -> StoredBatch:
        """Store a batch once; when this returns, it may be acknowledged.

        Args:
            cluster: Cluster of the authenticated sender.
            batch: The batch.
            now: Present time.

        Raises:
            StaleBatch: The batch is too old to tell whether it was stored.
            SqliteUnavailable: It is not stored, for now.
        """
        checked = select_samples(batch, to_micros(now) // 1000)
        with self._database.transaction() as connection:
            if not self._mark_batch(connection, cluster, batch, now):
                return StoredBatch(is_duplicate=True)
            samples = unplaced = 0
            for (job, sluid, step), group in _group_samples(checked.samples):
                if self._add_group(connection, cluster, batch.node, job, sluid, step, group, now):
                    samples += len(group)
                else:
                    unplaced += len(group)
            self._count_intake(
                connection,
                NodeIntake(
                    cluster=cluster,
                    node=batch.node,
                    heard_at=now,
                    samples=samples,
                    out_of_range=checked.out_of_range,
                    unplaced=unplaced,
                    dropped=batch.dropped,
                ),
            )
        return StoredBatch(samples=samples, out_of_range=checked.out_of_range, unplaced=unplaced)

    def maintain(self, now: datetime) -> bool:
        """Do one slice of maintenance: confirm, fold, thin, expire, evict.

        Args:
            now: Present time.

        Returns:
            Whether another call has work now.

        Raises:
            SqliteUnavailable: telemetry.db cannot be written now.
        """
        now_ms = to_micros(now) // 1000
        with self._database.transaction() as connection:
            self._confirm_jobs(connection, now)
            steps = (
                self._fold_hours(connection, now_ms),
                self._thin_days(connection, now_ms),
                self._expire(connection, now_ms),
                self._evict(connection),
            )
            self._forget_boots(connection, now)
        return any(steps)

    def read_used_bytes(self) -> int:
        """Return the size of all used pages of the database, in bytes."""
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (self._database.fetch_value(f"PRAGMA {name}") for name in names)
        return int((pages - free) * size)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    # Intake

    def _mark_batch(
        self, connection: Connection, cluster: str, batch: Batch, now: datetime
    ) -> bool:
        """Remember the number of a batch; return False if it is stored already."""
        key = (cluster, batch.node, batch.boot)
        boots = _BOOTS.select(self._database, "WHERE cluster = ? AND node = ? AND boot = ?", *key)
        boot = boots[0] if boots else None
        floor, ranges = (boot.floor, boot.ranges) if boot else (-1, [])
        if any(first <= batch.batch <= last for first, last in ranges):
            return False
        if batch.batch <= floor:
            raise StaleBatch(
                f"batch {batch.batch} of node {batch.node} is older than batch {floor}, and may be "
                "stored already"
            )
        ranges = add_to_ranges(ranges, batch.batch)
        if len(ranges) > _MAX_RANGES:
            floor = ranges[0][1]
            ranges = ranges[1:]
        if boot is None:
            connection.execute(
                "DELETE FROM boot WHERE cluster = ?1 AND node = ?2 AND boot NOT IN "
                "(SELECT boot FROM boot WHERE cluster = ?1 AND node = ?2 "
                "ORDER BY heard_at DESC LIMIT ?3)",
                (cluster, batch.node, _MAX_BOOTS - 1),
            )
        record = _Boot(
            cluster=cluster,
            node=batch.node,
            boot=batch.boot,
            heard_at=now,
            floor=floor,
            ranges=ranges,
        )
        _BOOTS.insert(connection, record, "replace")
        return True

    def _add_group(
        self,
        connection: Connection,
        cluster: str,
        node: str,
        job: int | None,
        sluid: str,
        step: str,
        samples: Sequence[Sample],
        now: datetime,
    ) -> bool:
        """Store samples of one job's step; return False if they were dropped."""
        parts = [(sample.at_ms, sample.values) for sample in samples]
        if job == NODE_TOTAL:
            self._add_to_tail(connection, cluster, node, NODE_TOTAL, step, parts)
            return True
        placement = self._placements.find_job(cluster, node, job, sluid)
        if placement is not None:
            self._add_to_tail(connection, cluster, node, placement.job_id, step, parts)
            return True
        waiting = self._database.fetch_value(
            "SELECT count(*) FROM unconfirmed WHERE cluster = ? AND node = ?", cluster, node
        )
        if waiting >= _MAX_UNCONFIRMED:
            return False
        part = _UnconfirmedPart(
            cluster=cluster,
            node=node,
            job=job,
            sluid=sluid,
            step=step,
            received_at=now,
            columns=encode_columns(merge_samples(parts), compress=False),
        )
        _UNCONFIRMED.insert(connection, part)
        return True

    def _add_to_tail(
        self,
        connection: Connection,
        cluster: str,
        node: str,
        job: int,
        step: str,
        samples: Iterable[tuple[int, Mapping[str, int]]],
    ) -> None:
        """Add samples of a target to the tail, by hour."""
        key = (cluster, node, job, step)
        connection.execute(
            TARGETS.build_insert("cluster, node, job, step") + " ON CONFLICT DO NOTHING",
            key,
        )
        target = self._database.fetch_value(
            "SELECT number FROM target WHERE cluster = ? AND node = ? AND job = ? AND step = ?",
            *key,
        )
        for hour_ms, group in _group_by(samples, HOUR_MS):
            columns = encode_columns(merge_samples(group), compress=False)
            _TAIL.insert(connection, _TailPart(0, target, hour_ms, columns))

    @staticmethod
    def _count_intake(connection: Connection, intake: NodeIntake) -> None:
        """Add the counts of a batch to its node's."""
        connection.execute(
            INTAKES.build_insert(", ".join(INTAKES.columns))
            + " ON CONFLICT DO UPDATE SET heard_at = excluded.heard_at, "
            + ", ".join(
                f"{name} = {name} + excluded.{name}"
                for name in ("samples", "out_of_range", "unplaced", "dropped")
            ),
            INTAKES.encode(intake),
        )

    # Maintenance

    def _confirm_jobs(self, connection: Connection, now: datetime) -> None:
        """Move samples of jobs that Slurm shows now to the tail; drop those of unknown jobs."""
        for part in _UNCONFIRMED.select(self._database, "ORDER BY number"):
            placement = self._placements.find_job(part.cluster, part.node, part.job, part.sluid)
            if placement is None and now - part.received_at < _UNCONFIRMED_PERIOD:
                continue
            samples = list_samples(decode_columns(part.columns))
            if placement is not None:
                self._add_to_tail(
                    connection, part.cluster, part.node, placement.job_id, part.step, samples
                )
            else:
                count = len(samples)
                connection.execute(
                    "UPDATE intake SET samples = samples - ?, unplaced = unplaced + ? "
                    "WHERE cluster = ? AND node = ?",
                    (count, count, part.cluster, part.node),
                )
            connection.execute("DELETE FROM unconfirmed WHERE number = ?", (part.number,))

    def _fold_hours(self, connection: Connection, now_ms: int) -> bool:
        """Fold complete hours of the tail into chunks."""
        before_ms = now_ms - HOUR_MS - _FOLD_GRACE_MS
        groups = self._database.fetch(
            "SELECT DISTINCT hour_ms, target FROM tail WHERE hour_ms <= ? "
            "ORDER BY hour_ms, target LIMIT ?",
            *(before_ms, _SLICE_ROWS),
        )
        for hour_ms, target in groups:
            # The chunk first, then parts in the order of their arrival: the first value is kept.
            chunks = self._fetch_columns(_SELECT_CHUNK, target, 0, hour_ms)
            parts = self._fetch_columns(_SELECT_TAIL, target, hour_ms)
            samples = [sample for part in (*chunks, *parts) for sample in list_samples(part)]
            self._put_chunk(connection, target, 0, hour_ms, merge_samples(samples))
            connection.execute(
                "DELETE FROM tail WHERE target = ? AND hour_ms = ?", (target, hour_ms)
            )
        return len(groups) == _SLICE_ROWS

    def _thin_days(self, connection: Connection, now_ms: int) -> bool:
        """Replace old chunks by five-minute means and maxima, a day in a chunk."""
        before_ms = (now_ms - self._full_ms) // DAY_MS * DAY_MS
        days = self._database.fetch(
            "SELECT DISTINCT target, start_ms / ?1 * ?1 FROM chunk "
            "WHERE step_s = 0 AND start_ms < ?2 ORDER BY 2, 1 LIMIT ?3",
            *(DAY_MS, before_ms, _SLICE_ROWS),
        )
        for target, day_ms in days:
            period = (target, day_ms, day_ms + DAY_MS)
            parts = self._fetch_columns(_SELECT_HOURS, *period)
            samples = merge_samples(sample for part in parts for sample in list_samples(part))
            earlier = self._fetch_columns(_SELECT_CHUNK, target, COARSE_STEP_S, day_ms)
            thinned = [*earlier, thin_columns(samples, COARSE_STEP_S)]
            merged = merge_samples(sample for part in thinned for sample in list_samples(part))
            self._put_chunk(connection, target, COARSE_STEP_S, day_ms, merged)
            connection.execute(
                "DELETE FROM chunk WHERE target = ? AND step_s = 0 AND start_ms >= ? "
                "AND start_ms < ?",
                period,
            )
        return len(days) == _SLICE_ROWS

    def _expire(self, connection: Connection, now_ms: int) -> bool:
        """Delete chunks past their retention."""
        rows = self._database.fetch(
            "SELECT number, target, start_ms FROM chunk WHERE start_ms < ? "
            "ORDER BY start_ms LIMIT ?",
            *(now_ms - max(self._coarse_ms, self._full_ms) - DAY_MS, _SLICE_ROWS),
        )
        self._delete_parts(connection, "chunk", rows)
        return len(rows) == _SLICE_ROWS

    def _evict(self, connection: Connection) -> bool:
        """Delete the oldest curves while they take more than the quota."""
        if self.read_used_bytes() <= self._quota_bytes:
            return False
        rows = self._database.fetch(
            "SELECT number, target, start_ms FROM chunk ORDER BY start_ms LIMIT ?", _SLICE_ROWS
        )
        table = "chunk"
        if not rows:
            table = "tail"
            rows = self._database.fetch(
                "SELECT number, target, hour_ms FROM tail ORDER BY hour_ms LIMIT ?", _SLICE_ROWS
            )
        if not rows:
            return False
        self._delete_parts(connection, table, rows)
        connection.execute(
            "UPDATE eviction SET parts = parts + ?, until_ms = max(until_ms, ?)",
            (len(rows), rows[-1][2]),
        )
        return self.read_used_bytes() > self._quota_bytes

    @staticmethod
    def _delete_parts(
        connection: Connection, table: str, rows: Sequence[tuple[int, int, int]]
    ) -> None:
        """Delete parts by number, and targets without any part."""
        numbers = encode_json([number for number, _, _ in rows])
        targets = encode_json(sorted({target for _, target, _ in rows}))
        connection.execute(
            f"DELETE FROM {table} WHERE number IN (SELECT value FROM json_each(?))",  # noqa: S608 -- our own table names
            (numbers,),
        )
        connection.execute(
            "DELETE FROM target WHERE number IN (SELECT value FROM json_each(?)) "
            "AND NOT EXISTS (SELECT 1 FROM chunk WHERE chunk.target = target.number) "
            "AND NOT EXISTS (SELECT 1 FROM tail WHERE tail.target = target.number)",
            (targets,),
        )

    @staticmethod
    def _forget_boots(connection: Connection, now: datetime) -> None:
        """Forget boots whose samples would be too old to be accepted again."""
        connection.execute("DELETE FROM boot WHERE heard_at < ?", (now - _BOOT_PERIOD,))

    def _put_chunk(
        self, connection: Connection, target: int, step_s: int, start_ms: int, columns: Columns
    ) -> None:
        """Write a chunk in place of an earlier one."""
        connection.execute(
            _CHUNKS.build_insert("target, step_s, start_ms, columns")
            + " ON CONFLICT DO UPDATE SET columns = excluded.columns",
            (target, step_s, start_ms, encode_columns(columns)),
        )

    def _fetch_columns(self, statement: str, *values: Any) -> list[Columns]:
        """Return the decoded columns of a query."""
        return [decode_columns(data) for (data,) in self._database.fetch(statement, *values)]


_SELECT_CHUNK: Final = "SELECT columns FROM chunk WHERE target = ? AND step_s = ? AND start_ms = ?"
_SELECT_TAIL: Final = "SELECT columns FROM tail WHERE target = ? AND hour_ms = ? ORDER BY number"
_SELECT_HOURS: Final = (
    "SELECT columns FROM chunk WHERE target = ? AND step_s = 0 AND start_ms >= ? AND start_ms < ? "
    "ORDER BY start_ms"
)


def add_to_ranges(ranges: Sequence[tuple[int, int]], number: int) -> list[tuple[int, int]]:
    """Add a number to ascending, disjoint, inclusive ranges."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted([*ranges, (number, number)]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def thin_columns(columns: Columns, step_s: int) -> Columns:
    """Thin columns to one sample for each step that has any.

    A gauge becomes its mean, a counter keeps its last value, and each gets a second series with
    :data:`MAXIMUM_SUFFIX`: the largest value of a gauge, the largest growth of a counter, per
    second. The time is that of the last sample in the step.

    Args:
        columns: The samples.
        step_s: Step in seconds.
    """
    thinned: dict[int, dict[str, int]] = {}
    step_ends: dict[int, int] = {}
    for at_ms in columns.times_ms:
        step_ends[at_ms // (step_s * 1000)] = at_ms
    for name, values in columns.series.items():
        series = find_series(name)
        if series is None:
            continue
        points = [
            (at_ms, value)
            for at_ms, value in zip(columns.times_ms, values, strict=True)
            if value is not None
        ]
        rates = compute_rates(points) if series.kind == "counter" else {}
        for step, group in groupby(points, key=lambda point: point[0] // (step_s * 1000)):
            members = list(group)
            present = thinned.setdefault(step_ends[step], {})
            if series.kind == "gauge":
                numbers = [value for _, value in members]
                present[name] = round(sum(numbers) / len(numbers))
                present[name + MAXIMUM_SUFFIX] = max(numbers)
            else:
                present[name] = members[-1][1]
                growth = [rates[at_ms] for at_ms, _ in members if at_ms in rates]
                if growth:
                    present[name + MAXIMUM_SUFFIX] = round(max(growth))
    return merge_samples(thinned.items())


def compute_rates(points: Sequence[tuple[int, int]]) -> dict[int, float]:
    """Compute the growth of a counter per second, by the time at which each interval ends.

    An interval in which the counter started again has none.

    Args:
        points: Time in ms and value, by time.
    """
    return {
        at_ms: (value - before) * 1000 / (at_ms - before_ms)
        for (before_ms, before), (at_ms, value) in pairwise(points)
        if value >= before
    }


def _group_samples(
    samples: Iterable[Sample],
) -> list[tuple[tuple[int | None, str, str], list[Sample]]]:
    """Group samples by job, SLUID and step."""
    groups: dict[tuple[int | None, str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.job, sample.sluid, sample.step), []).append(sample)
    return list(groups.items())


def _group_by(
    samples: Iterable[tuple[int, Mapping[str, int]]], period_ms: int
) -> list[tuple[int, list[tuple[int, Mapping[str, int]]]]]:
    """Group samples by the start of their period, in order."""
    groups: dict[int, list[tuple[int, Mapping[str, int]]]] = {}
    for sample in samples:
        groups.setdefault(sample[0] // period_ms * period_ms, []).append(sample)
    return sorted(groups.items(), key=lambda item: item[0])
