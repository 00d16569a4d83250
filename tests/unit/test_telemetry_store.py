"""Sample store: each batch once, placement, folding, thinning, quota."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.events import NOON, at
from steward.core.databases import TELEMETRY
from steward.core.sqlite import Database
from steward.core.timestamps import to_micros
from steward.telemetry.batch import Batch, WireSample
from steward.telemetry.chunks import Columns, merge_samples
from steward.telemetry.curves import CurveReader
from steward.telemetry.store import (
    EVICTIONS,
    INTAKES,
    JobPlacement,
    SampleStore,
    StaleBatch,
    add_to_ranges,
    thin_columns,
)

NOON_MS = to_micros(NOON) // 1000
DAY = timedelta(days=1)


class FixedPlacements:
    """Placements by raw id and SLUID, as a test sets them."""

    def __init__(self, **jobs: frozenset[str]) -> None:
        self.nodes = {int(name[1:]): nodes for name, nodes in jobs.items()}
        self.sluids: dict[str, int] = {}

    def find_job(
        self, cluster: str, node: str, job_id: int | None, sluid: str
    ) -> JobPlacement | None:
        assert cluster == "c1"
        number = job_id or self.sluids.get(sluid, 0)
        nodes = self.nodes.get(number, frozenset())
        return JobPlacement(number, nodes) if node in nodes else None


@contextmanager
def open_store(
    directory: Path | str, placements: FixedPlacements | None = None, **options: Any
) -> Iterator[SampleStore]:
    placements = placements or FixedPlacements(j5=frozenset({"n1"}))
    options = {"quota_bytes": 1 << 30, **options}
    with closing(SampleStore(str(directory), placements, **options)) as store:
        yield store


def sample(seconds: float, processes: int = 1, job: int | None = 5, **fields: Any) -> WireSample:
    values = fields.pop("values", {"processes": processes})
    return WireSample(at_ms=NOON_MS + int(seconds * 1000), job=job, values=values, **fields)


def batch(number: int, *samples: WireSample, **fields: Any) -> Batch:
    return Batch(
        **{"v": 1, "node": "n1", "boot": "b1", "batch": number, **fields}, samples=[*samples]
    )


def read(directory: Path | str, job: int = 5, since: datetime = NOON - 40 * DAY) -> dict[str, Any]:
    with closing(CurveReader(str(directory))) as reader:
        targets = reader.read_job("c1", job, since, NOON + 400 * DAY)
        return {
            f"{item.target.node}/{item.target.step}": [
                ((at_ms - NOON_MS) / 1000, value)
                for at_ms, value in zip(
                    item.columns.times_ms, item.columns.series["processes"], strict=True
                )
            ]
            for item in targets
        }


def intake(directory: Path) -> tuple[int, int, int, int]:
    database = Database(TELEMETRY.locate(str(directory)), (), read_only=True)
    with closing(database):
        (row,) = INTAKES.select(database)
    return row.samples, row.out_of_range, row.unplaced, row.dropped


def test_a_batch_is_stored_once_by_node_boot_and_number(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert store.add_batch("c1", batch(1, sample(0)), NOON).samples == 1
        assert store.add_batch("c1", batch(1, sample(1)), NOON).is_duplicate
        assert store.add_batch("c1", batch(1, sample(2), boot="b2"), NOON).samples == 1
    with open_store(tmp_path) as store:
        assert store.add_batch("c1", batch(1, sample(0)), NOON).is_duplicate
    assert read(tmp_path) == {"n1/": [(0, 1), (2, 1)]}
    assert intake(tmp_path) == (2, 0, 0, 0)


def test_a_node_reports_only_jobs_that_slurm_placed_on_it(tmp_path: Path) -> None:
    placements = FixedPlacements(j5=frozenset({"n1"}), j6=frozenset({"n2"}))
    with open_store(tmp_path, placements) as store:
        stored = store.add_batch(
            "c1", batch(1, sample(0), sample(0, job=6), sample(0, values={"x": 1})), NOON
        )
        store.maintain(at(3600))
    assert (stored.samples, stored.out_of_range) == (2, 1)
    assert read(tmp_path, 6) == {}
    assert intake(tmp_path) == (1, 1, 1, 0)


def test_samples_wait_for_a_job_that_slurm_shows_later(tmp_path: Path) -> None:
    placements = FixedPlacements()
    with open_store(tmp_path, placements) as store:
        samples = (sample(0, 2), sample(0, 3, None, sluid="sA"), sample(0, job=9))
        assert store.add_batch("c1", batch(1, *samples), NOON).samples == 3
        store.maintain(NOON)
        assert read(tmp_path) == {}
        placements.nodes = {5: frozenset({"n1"}), 7: frozenset({"n1"})}
        placements.sluids = {"sA": 7}
        store.maintain(at(60))
        assert read(tmp_path) == {"n1/": [(0, 2)]}
        assert read(tmp_path, 7) == {"n1/": [(0, 3)]}
        assert intake(tmp_path) == (3, 0, 0, 0)
        store.maintain(at(3600))
        placements.nodes[9] = frozenset({"n1"})
        store.maintain(at(3601))
    assert read(tmp_path, 9) == {}
    assert intake(tmp_path) == (2, 0, 1, 0)


def test_a_complete_hour_is_folded_and_late_samples_join_it(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.add_batch("c1", batch(1, sample(0), sample(15, 2), sample(3600, 4)), at(3601))
        store.maintain(at(3 * 3600))
        store.add_batch("c1", batch(2, sample(30, 3), sample(15, 9), job_step()), at(3 * 3600))
        assert read(tmp_path)["n1/"] == [(0, 1), (15, 2), (30, 3), (3600, 4)]
        store.maintain(at(5 * 3600))
    assert read(tmp_path) == {"n1/": [(0, 1), (15, 2), (30, 3), (3600, 4)], "n1/0": [(1, 8)]}


def job_step() -> WireSample:
    return sample(1, 8, step="0")


def test_old_curves_are_thinned_and_then_expire(tmp_path: Path) -> None:
    with open_store(tmp_path, full_days=3, coarse_days=10) as store:
        store.add_batch("c1", batch(1, *(sample(15 * n, n) for n in range(40))), at(900))
        store.maintain(NOON + DAY)
        assert len(read(tmp_path)["n1/"]) == 40
        store.maintain(NOON + 5 * DAY)
        assert read(tmp_path)["n1/"] == [(285, 10), (585, 30)]
        store.maintain(NOON + 12 * DAY)
    assert read(tmp_path) == {}


def test_the_quota_evicts_the_oldest_curves_first(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for hour in range(3):
            store.add_batch("c1", batch(hour, sample(3600 * hour, hour)), at(3600 * hour))
            store.maintain(at(3600 * (hour + 2)))
        used = store.read_used_bytes()
        assert len(read(tmp_path)["n1/"]) == 3
    with open_store(tmp_path, quota_bytes=used // 2) as store:
        store.maintain(at(6 * 3600))
    assert read(tmp_path) == {}
    with closing(Database(TELEMETRY.locate(str(tmp_path)), (), read_only=True)) as database:
        (evictions,) = EVICTIONS.select(database)
    assert (evictions.parts, evictions.until_ms) == (3, NOON_MS + 2 * 3_600_000)


def test_a_batch_below_many_gaps_is_refused_and_not_acknowledged(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for number in range(0, 2004, 2):
            store.add_batch("c1", batch(number), NOON)
        with pytest.raises(StaleBatch):
            store.add_batch("c1", batch(1, sample(0)), NOON)
        assert store.add_batch("c1", batch(2001, sample(0)), NOON).samples == 1


def test_full_resolution_is_kept_longer_than_samples_are_accepted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="full_days"):
        SampleStore(str(tmp_path), FixedPlacements(), quota_bytes=1, full_days=2)


def test_thinned_counters_keep_their_last_value_and_fastest_growth() -> None:
    points = [(0, 0), (15_000, 15), (30_000, 45), (300_000, 315), (315_000, 0), (330_000, 60)]
    columns = merge_samples((at_ms, {"cpu_user_us": value}) for at_ms, value in points)
    assert thin_columns(columns, 300) == Columns(
        [30_000, 330_000], {"cpu_user_us": [45, 60], "cpu_user_us:max": [2, 4]}
    )


@given(st.lists(st.integers(0, 60)))
def test_ranges_hold_exactly_the_numbers_added(numbers: list[int]) -> None:
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        ranges = add_to_ranges(ranges, number)
    held = [n for first, last in ranges for n in range(first, last + 1)]
    assert held == sorted(set(numbers))


STEPS = st.lists(st.one_of(st.integers(0, 11), st.sampled_from(("fold", "reopen"))), max_size=30)


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_no_acknowledged_sample_is_lost_or_doubled(steps: list[int | str]) -> None:
    """Batches in any order, again and again, with folds and restarts between them."""
    placements = FixedPlacements(j5=frozenset({"n1"}))
    sent: set[int] = set()
    with TemporaryDirectory() as directory:
        store = SampleStore(directory, placements, quota_bytes=1 << 30)
        now = at(12 * 1200)
        for step in steps:
            if step == "fold":
                while store.maintain(now):
                    pass
                now += timedelta(minutes=30)
            elif step == "reopen":
                store.close()
                store = SampleStore(directory, placements, quota_bytes=1 << 30)
            else:
                number = int(step)
                samples = [sample(1200 * number + 300 * n, number) for n in range(4)]
                stored = store.add_batch("c1", batch(number, *samples), now)
                assert stored.is_duplicate == (number in sent)
                sent.add(number)
        store.close()
        expected = [(1200 * n + 300 * k, n) for n in sorted(sent) for k in range(4)]
        assert read(directory).get("n1/", []) == expected
        assert all(value for value in read(directory).values())
