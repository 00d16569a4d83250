"""How efficiency and balance are reckoned: pure functions, explained in docs/job.md.

The CPU time of a step is that of its tasks, which is exact. Where its cgroup
had more (processes that left their task behind, containers) the cgroup's counts:
they used the CPUs, too.
"""

import re
import signal
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from steward.accounting.job_page.requests import Balance, Efficiency, Spread
from steward.core.records import Line
from steward.core.usage import StepUsage, TaskUsage

_US: Final = 1_000_000
_AMOUNT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGTPE]?)")
_UNITS: Final = {unit: 1024**power for power, unit in enumerate("KMGTPE", start=1)} | {"": 1}
_DOUBTS: Final = {"no-end", "tasks-missing", "lost-lines"}
"""Doubts that mean that more may have been used than is known."""


def doubtful(line: Line) -> bool:
    """Whether more may have been used than a line says."""
    return bool(_DOUBTS & set(line.doubts.split(",")))


def elapsed_s(line: Line, now_us: int) -> float | None:
    """Seconds from start to end, or to now, without suspension; None for what never started."""
    if not line.start_us:
        return None
    end_us = line.end_us or now_us
    return max(0.0, (end_us - line.start_us) / _US - line.suspended_s)


def cpu_used_s(line: Line) -> float | None:
    """CPU time of a line, in seconds: its tasks', or its cgroups' where those had more."""
    if line.user_us is None and line.system_us is None and line.cgroup_user_us is None:
        return None
    tasks = (line.user_us or 0) + (line.system_us or 0)
    cgroups = (line.cgroup_user_us or 0) + (line.cgroup_system_us or 0)
    return max(tasks, cgroups) / _US


def share_of(used: float | None, given: float | None) -> float | None:
    """``used / given``; None where one of them is not known or nothing was given."""
    return used / given if used is not None and given else None


def rate_efficiency(
    line: Line,
    steps: Sequence[tuple[Line, Sequence[StepUsage]]],
    now_us: int,
    pieces: Sequence[Line] = (),
) -> Efficiency:
    """How much of what a run was given it used.

    Args:
        line: The run's line.
        steps: Each step's line and its launches.
        now_us: The present moment, µs since the epoch, for a run that has not ended.
        pieces: Of a resized job what it had before; the run's line is of its last size.
    """
    sizes = (*pieces, line)
    lasted = [(size, elapsed_s(size, now_us)) for size in sizes]
    elapsed = total(seconds for _, seconds in lasted)
    used = total(cpu_used_s(size) for size in sizes)
    given = total(seconds * size.cpus for size, seconds in lasted if seconds) or None
    memory = _memory(line, steps)
    limit = line.time_limit_s
    # Of a run that goes on, what its steps have used so far is only known of those that ended.
    is_over = line.end_us > 0
    return Efficiency(
        cpu=share_of(used, given) if is_over else None,
        cpu_used_s=used,
        cpu_given_s=given,
        memory=share_of(memory.peak, memory.allocated),
        memory_used_bytes=memory.peak,
        memory_given_bytes=memory.allocated,
        memory_node=memory.node,
        memory_at_least=memory.at_least,
        time=share_of(elapsed, limit),
        elapsed_s=elapsed,
        limit_s=limit,
        at_least=not is_over or doubtful(line) or any(doubtful(step) for step, _ in steps),
    )


def total(values: Iterable[float | None]) -> float | None:
    """The sum of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


class _Memory(msgspec.Struct, frozen=True):
    """A peak, what was allocated there, and whether it may have been more."""

    peak: int | None
    allocated: int | None
    node: str
    at_least: bool


def peak_of(launch: StepUsage) -> int | None:
    """Peak of a launch's memory on its node: its cgroup's, or that of its only task.

    Without a cgroup the largest of several tasks is the least that it can have been.
    """
    end = launch.end
    if end is not None and end.peak_bytes is not None:
        return end.peak_bytes
    known = [task.max_rss_bytes for task in launch.tasks if task.max_rss_bytes is not None]
    if end is not None and end.max_rss_bytes is not None:
        known.append(end.max_rss_bytes)
    return max(known, default=None)


def _is_least(launch: StepUsage) -> bool:
    """Whether the peak of a launch is only the least that it can have been."""
    end = launch.end
    return end is None or (end.peak_bytes is None and max(end.tasks, len(launch.tasks)) > 1)


def _memory(line: Line, steps: Sequence[tuple[Line, Sequence[StepUsage]]]) -> _Memory:
    """Peak, allocation and name of the node whose peak was nearest to what was allocated.

    Where none is known to have had an allocation, of the node with the highest peak.
    """
    per_node = memory_per_node(line)
    found: list[_Memory] = []
    for _, launches in steps:
        for launch in launches:
            peak, start = peak_of(launch), launch.start
            if peak is not None:
                allocated = (start.memory_bytes if start is not None else None) or per_node
                found.append(_Memory(peak, allocated or None, launch.node, _is_least(launch)))
    if found:
        return max(found, key=_nearness)
    best = max(
        (line, *(step for step, _ in steps)),
        key=lambda one: one.peak_bytes or one.max_rss_bytes or 0,
    )
    return _Memory(
        best.peak_bytes or best.max_rss_bytes,
        best.peak_allocated_bytes or line.peak_allocated_bytes or per_node,
        best.peak_node or best.max_rss_node,
        # A sum of several is not the peak of the largest of them: that is all that is known.
        best.tasks > max(best.nodes, 1) and best.peak_bytes in (None, best.max_rss_bytes),
    )


def _nearness(one: _Memory) -> tuple[float, int]:
    return share_of(one.peak, one.allocated) or 0.0, one.peak or 0


def memory_per_node(line: Line) -> int | None:
    """Memory that a run was given on each node, if evenly; None where nothing says."""
    total = tres(line.tres_allocated).get("mem")
    if not total or line.nodes < 1:
        return None
    return total // line.nodes


def tres(text: str) -> dict[str, int]:
    """``cpu=4,mem=8G,node=1`` as numbers: memory in bytes, all else as it is counted.

    What is no number is left out.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, amount = part.rpartition("=")
        match = _AMOUNT.fullmatch(amount)
        if not name or match is None:
            continue
        unit = match[2]
        if name == "mem" and not unit:
            # Slurm counts memory in MiB, and says so wherever it says it with a unit.
            unit = "M"
        number = int(match[1]) if match[1].isdecimal() else float(match[1])
        found[name] = int(number * _UNITS[unit])
    return found


def task_cpu_s(task: TaskUsage) -> float:
    """CPU time of a task, in seconds."""
    return (task.user_us + task.system_us) / _US


def balance(tasks: Iterable[TaskUsage]) -> Balance | None:
    """How evenly tasks worked; None for less than two, or where they used nothing."""
    known = sorted((task_cpu_s(task), task.task) for task in tasks)
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


def spread(values: Iterable[float | None]) -> Spread | None:
    """Least, quartiles and most of what is known; None where nothing is."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None

    def at(part: float) -> float:
        place = part * (len(known) - 1)
        low = int(place)
        high = min(low + 1, len(known) - 1)
        return known[low] + (known[high] - known[low]) * (place - low)

    return Spread(
        least=known[0],
        quarter=at(0.25),
        middle=at(0.5),
        three_quarters=at(0.75),
        most=known[-1],
        count=len(known),
    )


def outcome(status: int) -> tuple[int, int, bool]:
    """Exit code, signal, and whether there is a core dump, of a raw wait status."""
    # By hand, as wait(2) has it: what a node sends may be no status at all.
    number = status & 0x7F
    if number in (0, 0x7F):
        return status >> 8 & 0xFF, 0, False
    return 0, number, bool(status & 0x80)


# Slurm writes 0:53 for a script that it could not begin, since its output did not open.
UNOPENED: Final = 53


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 99`` for what has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
