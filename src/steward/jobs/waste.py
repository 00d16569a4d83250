"""Waste of a run: allocated and used CPU time, memory and time limit, for sums and reports."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from steward.slurm.tres import parse_tres

_US: Final = 1_000_000
_MIB: Final = 1 << 20


class Waste(NamedTuple):
    """Allocated and used resources of runs that ended.

    Attributes:
        ended: Number of runs.
        measured: Number of these whose CPU use is known.
        measured_cpu_s: Allocated CPUs times seconds of the measured runs.
        used_cpu_ms: CPU time that the measured runs used.
        memory_measured: Number of runs whose peak memory is known.
        memory_mib_s: Allocated memory times seconds of those runs.
        used_memory_mib_s: Peak memory times the same seconds.
        limited: Number of runs with a time limit of their own.
        limit_s: Sum of their time limits.
        elapsed_s: Sum of their elapsed times.
    """

    ended: int = 0
    measured: int = 0
    measured_cpu_s: int = 0
    used_cpu_ms: int = 0
    memory_measured: int = 0
    memory_mib_s: int = 0
    used_memory_mib_s: int = 0
    limited: int = 0
    limit_s: int = 0
    elapsed_s: int = 0


def measure_waste(run: Sequence[Any]) -> Waste:
    """Return the waste of one run that ended.

    Args:
        run: Its pieces in order, of any type with the fields of job lines.
    """
    lasted_s = cpu_s = used_cpu_us = memory_mib_s = used_memory_mib_s = 0
    used = [_get_used_cpu_us(piece) for piece in run]
    is_measured = any(cpu_us is not None for cpu_us in used)
    is_memory_known = False
    for piece, used_us in zip(run, used, strict=True):
        elapsed_s = max(0, (piece.end_us - piece.start_us) // _US - piece.suspended_s)
        lasted_s += elapsed_s
        if is_measured:
            cpu_s += piece.cpus * elapsed_s
            used_cpu_us += used_us or 0
        allocated_mib = _parse_memory_mib(piece.tres_allocated)
        if allocated_mib and piece.peak_bytes is not None:
            is_memory_known = True
            memory_mib_s += allocated_mib * elapsed_s
            used_memory_mib_s += _estimate_used_bytes(piece, allocated_mib) * elapsed_s // _MIB
    limit_s = run[-1].time_limit_s or 0
    return Waste(
        1,
        *(int(is_measured), cpu_s, used_cpu_us // 1000),
        *(int(is_memory_known), memory_mib_s, used_memory_mib_s),
        *(int(limit_s > 0), limit_s, lasted_s if limit_s else 0),
    )


def _get_used_cpu_us(piece: Any) -> int | None:
    """Return the known CPU time: of the tasks, or of the cgroups if larger; None if unknown."""
    if piece.user_us is None and piece.system_us is None and piece.cgroup_user_us is None:
        return None
    tasks: int = (piece.user_us or 0) + (piece.system_us or 0)
    cgroups: int = (piece.cgroup_user_us or 0) + (piece.cgroup_system_us or 0)
    return max(tasks, cgroups)


def _estimate_used_bytes(piece: Any, allocated_mib: int) -> int:
    """Return the memory used at the peak, on all nodes.

    The peak is measured on one node; the others are assumed to use the same share.
    """
    allocated = allocated_mib * _MIB
    node_allocated: int = piece.peak_allocated_bytes or allocated // max(1, piece.nodes)
    peak_bytes: int = piece.peak_bytes
    return min(allocated, allocated * peak_bytes // max(1, node_allocated))


@lru_cache(maxsize=8192)
def _parse_memory_mib(text: str) -> int:
    """Return the memory in a TRES string, in MiB; 0 if it names none."""
    return parse_tres(text).get("mem", 0)
