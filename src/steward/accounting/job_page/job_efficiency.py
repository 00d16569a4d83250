"""Job efficiency and balance of tasks: used over allocated CPU, memory and time, as pure functions.

:func:`rate_efficiency` computes the efficiency of a run, :func:`compare_tasks` the balance between
the tasks of a step, :func:`summarize_values` the distribution over the tasks of an array.
docs/job.md explains the formulas.

CPU time is the sum of the tasks', which is exact. If the cgroup used more (processes that left
their task, containers), the cgroup's counts, because they used the CPUs too.
"""

import re
import signal
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from steward.accounting.job_page.requests import Balance, Efficiency, Spread
from steward.core.records import UsageLine
from steward.core.usage import StepUsage, TaskUsage

_US: Final = 1_000_000
_AMOUNT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGTPE]?)")
_UNITS: Final = {unit: 1024**power for power, unit in enumerate("KMGTPE", start=1)} | {"": 1}
_DOUBTS: Final = {"no-end", "tasks-missing", "lost-lines"}
"""Doubts that mean that actual usage may be higher than known."""


def is_doubtful(line: UsageLine) -> bool:
    """Return True if actual usage may be higher than a line says."""
    return bool(_DOUBTS & set(line.doubts.split(",")))


def compute_elapsed_s(line: UsageLine, now_us: int) -> float | None:
    """Return seconds from start to end or now, without suspension; None if never started."""
    if not line.start_us:
        return None
    end_us = line.end_us or now_us
    return max(0.0, (end_us - line.start_us) / _US - line.suspended_s)


def compute_cpu_used_s(line: UsageLine) -> float | None:
    """Return the CPU time of a line in seconds: its tasks', or its cgroups' if higher."""
    if line.user_us is None and line.system_us is None and line.cgroup_user_us is None:
        return None
    tasks = (line.user_us or 0) + (line.system_us or 0)
    cgroups = (line.cgroup_user_us or 0) + (line.cgroup_system_us or 0)
    return max(tasks, cgroups) / _US


def compute_share(used: float | None, allocated: float | None) -> float | None:
    """Return ``used / given``; None if one is unknown or ``allocated`` is 0."""
    return used / allocated if used is not None and allocated else None


def rate_efficiency(
    line: UsageLine,
    steps: Sequence[tuple[UsageLine, Sequence[StepUsage]]],
    now_us: int,
    pieces: Sequence[UsageLine] = (),
) -> Efficiency:
    """Compute the efficiency of a run: used over allocated CPU, memory and time.

    Args:
        line: The run's line.
        steps: Each step's line and its launches.
        now_us: Present time, µs since the epoch, for a run that has not ended.
        pieces: Former sizes of a resized job; the run's line is for its last size.
    """
    sizes = (*pieces, line)
    durations = [(size, compute_elapsed_s(size, now_us)) for size in sizes]
    elapsed = sum_values(seconds for _, seconds in durations)
    used = sum_values(compute_cpu_used_s(size) for size in sizes)
    allocated = sum_values(seconds * size.cpus for size, seconds in durations if seconds) or None
    memory = _find_memory_peak(line, steps)
    limit = line.time_limit_s
    # While a run goes on, only ended steps have reported their usage.
    has_ended = line.end_us > 0
    return Efficiency(
        cpu=compute_share(used, allocated) if has_ended else None,
        cpu_used_s=used,
        cpu_allocated_s=allocated,
        memory=compute_share(memory.peak, memory.allocated),
        memory_used_bytes=memory.peak,
        memory_allocated_bytes=memory.allocated,
        memory_node=memory.node,
        memory_at_least=memory.at_least,
        time=compute_share(elapsed, limit),
        elapsed_s=elapsed,
        limit_s=limit,
        at_least=not has_ended or is_doubtful(line) or any(is_doubtful(step) for step, _ in steps),
    )


def sum_values(values: Iterable[float | None]) -> float | None:
    """Sum the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


class _Memory(msgspec.Struct, frozen=True):
    """Peak memory on a node, its allocation there, and whether the peak is a lower bound."""

    peak: int | None
    allocated: int | None
    node: str
    at_least: bool


def get_peak_memory(launch: StepUsage) -> int | None:
    """Return the peak memory of a launch on its node: its cgroup's, or its only task's.

    Without a cgroup, the largest of several tasks gives a lower bound.
    """
    end = launch.end
    if end is not None and end.peak_bytes is not None:
        return end.peak_bytes
    known = [task.max_rss_bytes for task in launch.tasks if task.max_rss_bytes is not None]
    if end is not None and end.max_rss_bytes is not None:
        known.append(end.max_rss_bytes)
    return max(known, default=None)


def _is_lower_bound(launch: StepUsage) -> bool:
    """Return True if the peak of a launch is only a lower bound."""
    end = launch.end
    return end is None or (end.peak_bytes is None and max(end.tasks, len(launch.tasks)) > 1)


def _find_memory_peak(
    line: UsageLine, steps: Sequence[tuple[UsageLine, Sequence[StepUsage]]]
) -> _Memory:
    """Return peak, allocation and node where the peak came closest to the allocation.

    If no allocation is known: of the node with the highest peak.
    """
    per_node = compute_memory_per_node(line)
    peaks: list[_Memory] = []
    for _, launches in steps:
        for launch in launches:
            peak, start = get_peak_memory(launch), launch.start
            if peak is not None:
                allocated = (start.memory_bytes if start is not None else None) or per_node
                peaks.append(_Memory(peak, allocated or None, launch.node, _is_lower_bound(launch)))
    if peaks:
        return max(peaks, key=_rate_nearness)
    best = max(
        (line, *(step for step, _ in steps)),
        key=lambda line_or_step: line_or_step.peak_bytes or line_or_step.max_rss_bytes or 0,
    )
    return _Memory(
        best.peak_bytes or best.max_rss_bytes,
        best.peak_allocated_bytes or line.peak_allocated_bytes or per_node,
        best.peak_node or best.max_rss_node,
        # With several tasks the largest one's peak is a lower bound of their sum.
        best.tasks > max(best.nodes, 1) and best.peak_bytes in (None, best.max_rss_bytes),
    )


def _rate_nearness(memory: _Memory) -> tuple[float, int]:
    """Return the sort key of a peak: its share of the allocation, then its size."""
    return compute_share(memory.peak, memory.allocated) or 0.0, memory.peak or 0


def compute_memory_per_node(line: UsageLine) -> int | None:
    """Return the memory allocated per node, if evenly distributed; None if unknown."""
    total = parse_tres_bytes(line.tres_allocated).get("mem")
    if not total or line.nodes < 1:
        return None
    return total // line.nodes


def parse_tres_bytes(text: str) -> dict[str, int]:
    """Parse TRES (``cpu=4,mem=8G,node=1``) into numbers: memory in bytes, others as counted.

    Malformed amounts are left out.
    """
    amounts: dict[str, int] = {}
    for part in text.split(","):
        name, _, amount = part.rpartition("=")
        match = _AMOUNT.fullmatch(amount)
        if not name or match is None:
            continue
        unit = match[2]
        if name == "mem" and not unit:
            # Without a unit, Slurm means MiB.
            unit = "M"
        number = int(match[1]) if match[1].isdecimal() else float(match[1])
        amounts[name] = int(number * _UNITS[unit])
    return amounts


def get_task_cpu_s(task: TaskUsage) -> float:
    """Return the CPU time of a task, in seconds."""
    return (task.user_us + task.system_us) / _US


def compare_tasks(tasks: Iterable[TaskUsage]) -> Balance | None:
    """Compare the CPU time of tasks; None for fewer than two, or if they used none."""
    known = sorted((get_task_cpu_s(task), task.task) for task in tasks)
    total = sum(used for used, _ in known)
    if len(known) < 2 or total <= 0:
        return None
    mean = total / len(known)
    least, most = known[0], known[-1]
    return Balance(
        ratio=most[0] / mean,
        busiest=most[1],
        busiest_s=most[0],
        idlest=least[1],
        idlest_s=least[0],
        mean_s=mean,
    )


def summarize_values(values: Iterable[float | None]) -> Spread | None:
    """Return minimum, quartiles and maximum of the known values; None if none is known."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None

    def at(fraction: float) -> float:
        position = fraction * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

    return Spread(
        minimum=ordered[0],
        lower_quartile=at(0.25),
        median=at(0.5),
        upper_quartile=at(0.75),
        maximum=ordered[-1],
        count=len(ordered),
    )


def decode_wait_status(status: int) -> tuple[int, int, bool]:
    """Return exit code, signal and core dump flag of a raw wait status."""
    # Decoded here instead of by os.W*: a node may send an invalid status.
    number = status & 0x7F
    if number in (0, 0x7F):
        return status >> 8 & 0xFF, 0, False
    return 0, number, bool(status & 0x80)


# Slurm reports 0:53 for a script that never began because its output could not be opened.
OUTPUT_NOT_OPENED: Final = 53


def get_signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGKILL`` for 9, ``signal 99`` if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
