"""Batches of samples: the series, the wire format, and checks of what a node reports.

An agent posts a batch to :data:`SAMPLES_PATH` each minute. ``decode_batch`` rejects a body that is
no batch; ``select_samples`` then drops and counts single values and samples out of range, since
values of samples cancel jobs and charge accounts. A missing value stays missing and never becomes
0.

:data:`SERIES` and :data:`GPU_SERIES` declare each series once. A GPU's series is named
``gpu.N.NAME``, where N is the minor number.
"""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import msgspec

from steward.core.errors import StewardError

SAMPLES_PATH: Final = "/nodes/1/samples"
"""Path that agents post batches of samples to."""
WIRE_VERSION: Final = 1
"""Version of the wire format."""
MAX_SAMPLES: Final = 20_000
"""Maximum number of samples in a batch."""
MAX_SERIES: Final = 512
"""Maximum number of series in a sample: those of 64 GPUs and of a job."""
MAX_AGE_MS: Final = 2 * 86_400_000
"""Age of the oldest sample that is accepted, in ms; an agent keeps its samples for a day."""
MAX_AHEAD_MS: Final = 5 * 60_000
"""How far the clock of a node may be ahead, in ms."""
NODE_TOTAL: Final = 0
"""Job id under which the store keeps a node's own samples."""

_MAX_BYTES: Final = 2**50
_MAX_COUNTER_US: Final = 2**56
_MAX_NUMBER: Final = 2**53


class BatchError(StewardError):
    """A batch cannot be decoded, or contradicts its sender. The agent must not send it again."""


# Series


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Series of samples.

    Attributes:
        name: Name in batches.
        unit: Unit of its values.
        kind: ``counter``: the value grows until it starts again; ``gauge``: a present value.
        maximum: Largest valid value; the smallest is 0.
    """

    name: str
    unit: str
    kind: Literal["counter", "gauge"]
    maximum: int


def _declare_series(*rows: tuple[str, str, Literal["counter", "gauge"], int]) -> dict[str, Series]:
    return {
        name: Series(name=name, unit=unit, kind=kind, maximum=maximum)
        for name, unit, kind, maximum in rows
    }


SERIES: Final[Mapping[str, Series]] = _declare_series(
    ("cpu_user_us", "us", "counter", _MAX_COUNTER_US),
    ("cpu_system_us", "us", "counter", _MAX_COUNTER_US),
    ("throttled_us", "us", "counter", _MAX_COUNTER_US),
    ("anon_bytes", "bytes", "gauge", _MAX_BYTES),
    ("shmem_bytes", "bytes", "gauge", _MAX_BYTES),
    ("file_bytes", "bytes", "gauge", _MAX_BYTES),
    ("kernel_bytes", "bytes", "gauge", _MAX_BYTES),
    ("memory_limit_bytes", "bytes", "gauge", _MAX_BYTES),
    ("memory_peak_bytes", "bytes", "gauge", _MAX_BYTES),
    ("oom_kills", "processes", "counter", 2**32),
    ("pressure_memory_us", "us", "counter", _MAX_COUNTER_US),
    ("pressure_cpu_us", "us", "counter", _MAX_COUNTER_US),
    ("pressure_io_us", "us", "counter", _MAX_COUNTER_US),
    ("read_bytes", "bytes", "counter", 2**60),
    ("written_bytes", "bytes", "counter", 2**60),
    ("processes", "processes", "gauge", 2**22),
)
"""Series of a job's step, of a job, or of a node."""
GPU_SERIES: Final[Mapping[str, Series]] = _declare_series(
    ("utilization_percent", "percent", "gauge", 100),
    ("memory_bytes", "bytes", "gauge", 2**42),
    ("power_mw", "mW", "gauge", 5_000_000),
    ("energy_mj", "mJ", "counter", 2**53),
    ("processes", "processes", "gauge", 2**22),
)
"""Series of a GPU."""

_GPU_NAME: Final = re.compile(r"gpu\.(0|[1-9][0-9]{0,2})\.([a-z_]{1,32})")


@lru_cache(maxsize=4096)
def find_series(name: str) -> Series | None:
    """Find a series by its name in a batch; None if there is no such series."""
    match = _GPU_NAME.fullmatch(name)
    return GPU_SERIES.get(match[2]) if match else SERIES.get(name)


# Wire format

_Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_NUMBER)]
_Step = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[0-9A-Za-z_.+-]*\Z")]
_Sluid = Annotated[str, msgspec.Meta(max_length=32, pattern=r"^[0-9A-Za-z]*\Z")]


class WireSample(msgspec.Struct, frozen=True, kw_only=True):
    """Sample as an agent sends it.

    Attributes:
        at_ms: Time of the sample, ms since the epoch.
        job: Raw job id; None for the node, or if only the SLUID is known.
        step: Step, such as ``0`` or ``batch``; "" for the whole job.
        sluid: SLUID of the job, from Slurm 26.05 on; "" if unknown.
        values: Values by series.
    """

    at_ms: int
    job: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)] | None = None
    step: _Step = ""
    sluid: _Sluid = ""
    values: Annotated[dict[str, Any], msgspec.Meta(max_length=MAX_SERIES)]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Batch of samples as an agent sends it.

    Attributes:
        v: Version of the wire format.
        node: NodeName.
        boot: Boot id of the node, which makes the numbers of its batches unique.
        batch: Number of the batch since the boot.
        samples: Samples, in any order.
        dropped: Samples that the agent discarded since the batch before.
    """

    v: int
    node: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    boot: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[0-9A-Za-z-]+\Z")]
    batch: _Count
    samples: Annotated[list[WireSample], msgspec.Meta(max_length=MAX_SAMPLES)]
    dropped: _Count = 0


_decoder: Final = msgspec.json.Decoder(Batch)


def decode_batch(body: bytes, node: str) -> Batch:
    """Decode a batch.

    Args:
        body: JSON text.
        node: NodeName of its authenticated sender.

    Raises:
        BatchError: It is no batch, is of another version, or is of another node.
    """
    try:
        batch = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BatchError(f"cannot decode a batch of samples of node {node}: {error}") from error
    if batch.v != WIRE_VERSION:
        raise BatchError(
            f"node {node} sends version {batch.v} of samples, not {WIRE_VERSION}: install the "
            "agent of Steward's version"
        )
    if batch.node != node:
        raise BatchError(f"node {node} sent samples of node {batch.node!r}")
    return batch


# Checks


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """Sample whose values are in range.

    Attributes:
        at_ms: Time of the sample, ms since the epoch.
        job: Raw job id; :data:`NODE_TOTAL` for the node itself; None if only the SLUID is known.
        sluid: SLUID of the job; "" if unknown.
        step: Step; "" for the whole job.
        values: Values by series; at least one.
    """

    at_ms: int
    job: int | None
    sluid: str
    step: str
    values: dict[str, int]


class CheckedSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of a batch that passed the checks.

    Attributes:
        samples: Samples with valid values.
        out_of_range: Number of values, and of times, out of range or of an unknown series.
    """

    samples: tuple[Sample, ...]
    out_of_range: int


def select_samples(batch: Batch, now_ms: int) -> CheckedSamples:
    """Select the valid samples and values of a batch.

    Args:
        batch: The batch.
        now_ms: Present time, ms since the epoch.
    """
    samples: list[Sample] = []
    out_of_range = 0
    earliest_ms, latest_ms = now_ms - MAX_AGE_MS, now_ms + MAX_AHEAD_MS
    for sample in batch.samples:
        if not earliest_ms <= sample.at_ms <= latest_ms:
            out_of_range += max(1, len(sample.values))
            continue
        values: dict[str, int] = {}
        for name, value in sample.values.items():
            number = check_value(name, value)
            if number is None:
                out_of_range += 1
            else:
                values[name] = number
        if values:
            is_total = sample.job is None and not sample.sluid
            job = NODE_TOTAL if is_total else sample.job
            samples.append(Sample(sample.at_ms, job, sample.sluid, sample.step, values))
    return CheckedSamples(samples=tuple(samples), out_of_range=out_of_range)


def check_value(name: str, value: Any) -> int | None:
    """Return a valid value, rounded to an integer; None if its series is unknown or it is invalid.

    Args:
        name: Name of the series.
        value: Decoded JSON value.
    """
    series = find_series(name)
    if series is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not math.isfinite(value) or not 0 <= value <= series.maximum:
        return None
    return round(value)
