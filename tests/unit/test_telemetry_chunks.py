"""Chunks: round trip of any samples, size on curves of jobs, damaged chunks."""

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.telemetry.chunks import (
    ChunkError,
    Columns,
    decode_columns,
    encode_columns,
    list_samples,
    merge_samples,
)

VALUES = st.one_of(st.integers(0, 300), st.integers(0, 2**62))
SAMPLES = st.dictionaries(
    st.integers(0, 2**45),
    st.dictionaries(st.sampled_from(("a", "b", "gpu.0.power_mw")), VALUES, min_size=1),
    max_size=40,
)


@given(SAMPLES, st.booleans())
def test_a_chunk_returns_the_samples_that_went_in(
    samples: dict[int, dict[str, int]], compress: bool
) -> None:
    columns = merge_samples(samples.items())
    chunk = encode_columns(columns, compress=compress)
    assert decode_columns(chunk) == columns
    assert list_samples(decode_columns(chunk)) == sorted(samples.items())


def test_a_gap_stays_none() -> None:
    columns = merge_samples([(2, {"a": 0}), (1, {"b": 5}), (3, {"a": 7, "b": 0})])
    assert columns == Columns([1, 2, 3], {"a": [None, 0, 7], "b": [5, None, 0]})
    assert decode_columns(encode_columns(columns)) == columns


def test_of_two_values_for_one_time_the_first_is_kept() -> None:
    columns = merge_samples([(1, {"a": 1}), (1, {"a": 2, "b": 3})])
    assert columns == Columns([1], {"a": [1], "b": [3]})


def test_an_hour_of_a_job_takes_two_bytes_a_sample() -> None:
    """Counters and gauges with the noise of a computing job, every 15 seconds."""
    noise = random.Random(20)
    user = system = read = 0
    memory, samples = 4 << 30, []
    for index in range(240):
        user += 15_000_000 - noise.randrange(40_000)
        system += noise.randrange(60_000)
        read += noise.randrange(8 << 20) if noise.random() < 0.1 else 0
        memory += noise.randrange(-64, 128) * 4096 if noise.random() < 0.5 else 0
        values = {
            "cpu_user_us": user,
            "cpu_system_us": system,
            "throttled_us": 0,
            "anon_bytes": memory,
            "shmem_bytes": 0,
            "kernel_bytes": 12 << 20,
            "memory_limit_bytes": 64 << 30,
            "read_bytes": read,
            "processes": 17,
            "gpu.0.utilization_percent": 90 + noise.randrange(10),
            "gpu.0.memory_bytes": 30 << 30,
            "gpu.0.power_mw": 400_000 + noise.randrange(-9000, 9000),
        }
        samples.append((1_700_000_000_000 + 15_000 * index, values))
    chunk = encode_columns(merge_samples(samples))
    varying = {"cpu_user_us", "cpu_system_us", "anon_bytes", "read_bytes"}
    assert varying < set(samples[0][1])
    assert len(chunk) / (240 * 12) < 1.2
    assert len(chunk) / (240 * 6) < 2.2


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_reported_as_damaged(data: bytes) -> None:
    with contextlib.suppress(ChunkError):
        decode_columns(data)


@given(SAMPLES.filter(bool), st.data())
def test_a_cut_chunk_is_reported_as_damaged(
    samples: dict[int, dict[str, int]], data: st.DataObject
) -> None:
    chunk = encode_columns(merge_samples(samples.items()))
    end = data.draw(st.integers(0, len(chunk) - 1))
    with pytest.raises(ChunkError):
        decode_columns(chunk[:end])
