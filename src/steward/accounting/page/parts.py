"""The parts of a page, from lines and launches: pure, and bounded however many tasks there are."""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from steward.accounting.page import formulas
from steward.accounting.page.notes import notes_on
from steward.accounting.page.shapes import (
    FEW,
    MOST_TASKS,
    NodePart,
    RunPart,
    StepPart,
    TaskPart,
)
from steward.accounting.settings import NotesSettings
from steward.core.lines import Line
from steward.core.usage import StepUsage, TaskUsage

_US = 1_000_000
_Worked = tuple[str, TaskUsage]
"""A task, and the node that it ran on."""


def run_part(
    line: Line,
    steps: Sequence[tuple[Line, Sequence[StepUsage]]],
    settings: NotesSettings,
    *,
    now_us: int,
    pieces: Iterable[Line] = (),
    suspended_at: datetime | None = None,
    tasks: int = FEW,
    nodes: int = FEW,
) -> RunPart:
    """A run as its page shows it.

    Args:
        line: The run's line.
        steps: Each step's line and its launches.
        settings: Thresholds of notes.
        now_us: The present moment, µs since the epoch.
        pieces: Of a resized job what it had before.
        suspended_at: When it was suspended or resumed last.
        tasks: How many tasks of each step are told at most.
        nodes: How many nodes likewise.
    """
    pieces = tuple(pieces)
    efficiency = formulas.efficiency(line, steps, now_us, pieces)
    parts = tuple(
        step_part(step, launches, now_us=now_us, tasks=tasks, nodes=nodes)
        for step, launches in steps
    )
    return RunPart(
        line=line,
        suspended_at=suspended_at,
        pieces=pieces,
        steps=parts,
        efficiency=efficiency,
        notes=notes_on(line, efficiency, parts, settings),
    )


def step_part(
    line: Line, launches: Sequence[StepUsage], *, now_us: int, tasks: int = FEW, nodes: int = FEW
) -> StepPart:
    """A step as its page shows it; arguments as of :func:`run_part`."""
    worked = [(launch.node, task) for launch in launches for task in launch.tasks]
    outcomes = Counter(formulas.outcome(task.status)[:2] for _, task in worked)
    signals: Counter[int] = Counter()
    codes: Counter[int] = Counter()
    for (code, number), count in outcomes.items():
        if number:
            signals[number] += count
        else:
            codes[code] += count
    elapsed = formulas.elapsed_s(line, now_us)
    given = elapsed * line.cpus if elapsed and line.cpus and line.end_us else None
    return StepPart(
        line=line,
        cpu=formulas.share(formulas.cpu_used_s(line), given),
        signals=dict(sorted(signals.items())),
        codes=dict(sorted(codes.items())) if set(codes) - {0} else {},
        balance=formulas.balance(task for _, task in worked),
        tasks=tuple(_task(node, task) for node, task in _notable(worked, min(tasks, MOST_TASKS))),
        nodes=tuple(_node(launch) for launch in _notable_launches(launches, nodes)),
        all_tasks=len(worked),
        all_nodes=len({launch.node for launch in launches}),
    )


def _notable(worked: Sequence[_Worked], most: int) -> list[_Worked]:
    """The tasks to look at first: failed, busiest, largest, idlest; in order of their ids."""
    if len(worked) <= most:
        return sorted(worked, key=lambda one: one[1].task)
    failed = (one for one in worked if one[1].status)
    lists: list[list[_Worked]] = [
        heapq.nsmallest(most, failed, key=lambda one: one[1].task),
        heapq.nlargest(most, worked, key=lambda one: formulas.task_cpu_s(one[1])),
        heapq.nlargest(most, worked, key=lambda one: one[1].max_rss_bytes or 0),
        heapq.nsmallest(most, worked, key=lambda one: formulas.task_cpu_s(one[1])),
    ]
    return sorted(_in_turn(lists, most), key=lambda one: one[1].task)


def _in_turn(lists: Sequence[Sequence[_Worked]], most: int) -> list[_Worked]:
    """One of each list in turn, nothing twice, until there are enough."""
    chosen: dict[int, _Worked] = {}
    for place in range(max((len(one) for one in lists), default=0)):
        for one in lists:
            if place < len(one) and len(chosen) < most:
                chosen.setdefault(id(one[place][1]), one[place])
    return list(chosen.values())


def _notable_launches(launches: Sequence[StepUsage], most: int) -> list[StepUsage]:
    """The nodes to look at first: without an end, with the highest peak, the most CPU time."""
    if len(launches) > most:
        launches = heapq.nlargest(
            most,
            launches,
            key=lambda one: (one.end is None, formulas.peak_of(one) or 0, _cpu_s(one)),
        )
    return sorted(launches, key=lambda one: (one.node, one.launched_us))


def _cpu_s(launch: StepUsage) -> float:
    return sum(formulas.task_cpu_s(task) for task in launch.tasks)


def _node(launch: StepUsage) -> NodePart:
    start, end = launch.start, launch.end
    cgroup = None
    if end is not None and end.cgroup_user_us is not None:
        cgroup = (end.cgroup_user_us + (end.cgroup_system_us or 0)) / _US
    return NodePart(
        node=launch.node,
        cpus=start.cpus if start is not None else 0,
        tasks=len(launch.tasks),
        started=moment(launch.launched_us),
        ended=moment(launch.ended_us) if launch.ended_us else None,
        cpu_s=_cpu_s(launch),
        cgroup_cpu_s=cgroup,
        peak_bytes=formulas.peak_of(launch),
        memory_bytes=start.memory_bytes if start is not None else None,
        lost=end.lost if end is not None else 0,
    )


def _task(node: str, task: TaskUsage) -> TaskPart:
    code, number, core = formulas.outcome(task.status)
    return TaskPart(
        task=task.task,
        node=node,
        pid=task.pid,
        ended=moment(task.ended_us),
        exit_code=code,
        signal=number,
        core=core,
        cpu_s=formulas.task_cpu_s(task),
        user_s=task.user_us / _US,
        system_s=task.system_us / _US,
        max_rss_bytes=task.max_rss_bytes,
        minor_faults=task.minor_faults,
        major_faults=task.major_faults,
        read_bytes=task.read_bytes,
        written_bytes=task.written_bytes,
        voluntary_switches=task.voluntary_switches,
        involuntary_switches=task.involuntary_switches,
        includes_epilog=task.includes_epilog,
    )


def moment(us: int) -> datetime:
    """A time, from µs since the epoch; what lies beyond the calendar becomes the epoch."""
    try:
        return datetime.fromtimestamp(us / _US, UTC)
    except (OverflowError, OSError, ValueError):
        return datetime.fromtimestamp(0, UTC)
