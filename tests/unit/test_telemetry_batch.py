"""Batches of samples: decoding, ranges, hostile bodies."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.telemetry.batch import (
    GPU_SERIES,
    MAX_AGE_MS,
    MAX_AHEAD_MS,
    MAX_SAMPLES,
    NODE_TOTAL,
    SERIES,
    BatchError,
    check_value,
    decode_batch,
    find_series,
    select_samples,
)

NOW_MS = 1_764_000_000_000


def body_of(*samples: dict[str, Any], **fields: Any) -> bytes:
    batch = {"v": 1, "node": "n1", "boot": "b-1", "batch": 7, "dropped": 0, **fields}
    return msgspec.json.encode({"samples": list(samples), **batch})


def sample_of(**fields: Any) -> dict[str, Any]:
    sample = {"at_ms": NOW_MS, "job": 5, "step": "0", "sluid": "", "values": {"processes": 2}}
    return {**sample, **fields}


def test_a_batch_is_decoded() -> None:
    batch = decode_batch(body_of(sample_of(), sample_of(job=None, step="")), "n1")
    checked = select_samples(batch, NOW_MS)
    assert (batch.boot, batch.batch, checked.out_of_range) == ("b-1", 7, 0)
    assert [sample.job for sample in checked.samples] == [5, NODE_TOTAL]
    assert checked.samples[0].values == {"processes": 2}


def test_a_sample_with_only_a_sluid_has_no_job_id_yet() -> None:
    batch = decode_batch(body_of(sample_of(job=None, sluid="sFRSM834DPX600")), "n1")
    (sample,) = select_samples(batch, NOW_MS).samples
    assert (sample.job, sample.sluid) == (None, "sFRSM834DPX600")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        body_of(v=2),
        body_of(node="n2"),
        body_of(node=""),
        body_of(boot=""),
        body_of(boot="../x"),
        body_of(batch=-1),
        body_of(batch=2**60),
        body_of(batch=True),
        body_of(dropped=-1),
        body_of(sample_of(job=0)),
        body_of(sample_of(job=-3)),
        body_of(sample_of(job="5")),
        body_of(sample_of(step="a/b")),
        body_of(sample_of(step="0\n")),
        body_of(sample_of(step="x" * 65)),
        body_of(sample_of(sluid="s'; --")),
        body_of(sample_of(at_ms=1.5)),
        body_of(sample_of(values=[1])),
        body_of(sample_of(values={f"gpu.{n}.power_mw": 1 for n in range(600)})),
        body_of(*[sample_of(values={})] * (MAX_SAMPLES + 1)),
    ],
)
def test_a_hostile_body_is_rejected(body: bytes) -> None:
    with pytest.raises(BatchError):
        decode_batch(body, "n1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("processes", -1),
        ("processes", True),
        ("processes", None),
        ("processes", "2"),
        ("processes", [2]),
        ("processes", float("nan")),
        ("processes", float("inf")),
        ("processes", 2**70),
        ("cpu_user_us", 1e300),
        ("gpu.0.utilization_percent", 101),
        ("gpu.00.power_mw", 1),
        ("gpu.1000.power_mw", 1),
        ("gpu.-1.power_mw", 1),
        ("gpu.0.cpu_user_us", 1),
        ("secret", 1),
        ("", 1),
    ],
)
def test_a_value_out_of_range_is_dropped_and_never_0(name: str, value: object) -> None:
    assert check_value(name, value) is None


def test_values_out_of_range_are_counted() -> None:
    values = {"processes": -1, "anon_bytes": 3, "unknown": 4, "file_bytes": None}
    batch = decode_batch(body_of(sample_of(values=values), sample_of(values={"x": 1})), "n1")
    checked = select_samples(batch, NOW_MS)
    assert checked.out_of_range == 4
    assert [sample.values for sample in checked.samples] == [{"anon_bytes": 3}]


def test_samples_of_other_times_are_counted_and_dropped() -> None:
    times = (0, -(2**60), NOW_MS - MAX_AGE_MS - 1, NOW_MS + MAX_AHEAD_MS + 1, NOW_MS - MAX_AGE_MS)
    batch = decode_batch(body_of(*(sample_of(at_ms=at_ms) for at_ms in times)), "n1")
    checked = select_samples(batch, NOW_MS)
    assert checked.out_of_range == 4
    assert [sample.at_ms for sample in checked.samples] == [NOW_MS - MAX_AGE_MS]


def test_every_series_has_a_unit_in_its_name_or_counts_something() -> None:
    for series in (*SERIES.values(), *GPU_SERIES.values()):
        has_unit = series.name.endswith(f"_{series.unit.lower()}")
        assert has_unit or series.name in {"processes", "oom_kills"}
    assert find_series("gpu.7.energy_mj") == GPU_SERIES["energy_mj"]


@given(st.sampled_from([*SERIES, "gpu.3.power_mw"]), st.floats() | st.integers())
def test_a_checked_value_is_in_range(name: str, value: float) -> None:
    number = check_value(name, value)
    series = find_series(name)
    assert series is not None
    assert number is None or 0 <= number <= series.maximum
