"""Layouts of the job page's tables: sizes, steps, tasks and nodes of a run, and an array's tasks.

``steward job`` and the web page show them. Values that depend on the job come from the reply, a
:class:`PageAnswer`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from steward.accounting.job_page.job_efficiency import compute_elapsed_s
from steward.accounting.job_page.notes import format_duration
from steward.accounting.job_page.phrases import describe_exit
from steward.accounting.job_page.requests import (
    ArrayPart,
    NoteKind,
    PageAnswer,
    Spread,
    StepPart,
    TaskPart,
)
from steward.core.layouts import Column, Layout
from steward.core.records import UsageLine
from steward.core.timestamps import from_micros, to_micros

_US_PER_S: Final = 1_000_000

SIZE_LAYOUT: Final[Layout] = (
    Column("Size", lambda size, _: size[0]),
    Column("CPUs", lambda size, _: size[1].cpus, "count"),
    Column("Nodes", lambda size, _: size[1].nodelist, "prose"),
    Column("Elapsed", lambda size, _: compute_elapsed_s(size[1], size[1].end_us), "seconds"),
    Column(
        "Until",
        lambda size, _: from_micros(size[1].end_us) if size[1].end_us else None,
        "time",
        title="Ended",
        show="pages",
    ),
)
"""Columns of the sizes of a resized run, see ``RunPart.sizes``."""


def _read_line(get_value: Callable[[UsageLine], Any]) -> Callable[[StepPart, object], Any]:
    """Return a value source for a fact of a step's accounting line."""
    return lambda step, _: get_value(step.line)


def _read_step_elapsed_s(step: StepPart, page: PageAnswer) -> float | None:
    return compute_elapsed_s(step.line, to_micros(page.now))


def _read_peak_bytes(line: UsageLine) -> int | None:
    return line.peak_bytes if line.peak_bytes is not None else line.max_rss_bytes


def _to_seconds(us: int | None) -> float | None:
    return None if us is None else us / _US_PER_S


def _describe_faults(minor: int | None, major: int | None) -> str:
    """Describe page faults: without and with I/O."""
    if minor is None and major is None:
        return ""
    return f"{minor or 0}+{major}" if major else str(minor or 0)


STEP_LAYOUT: Final[Layout] = (
    Column("Step", _read_line(lambda line: line.step), is_key=True),
    Column("Name", _read_line(lambda line: line.name[:20]), drop_rank=4),
    Column("State", _read_line(lambda line: line.state), "state"),
    Column(
        "Exit", _read_line(lambda line: describe_exit(line.exit_code, line.exit_signal)), right=True
    ),
    Column("Tasks", _read_line(lambda line: line.tasks or None), "count"),
    Column("Elapsed", _read_step_elapsed_s, "seconds"),
    Column("CPU", "cpu", "percent", title="CPU efficiency", drop_rank=1),
    Column(
        "User", _read_line(lambda line: _to_seconds(line.user_us)), "seconds", title="User CPU time"
    ),
    Column(
        "System",
        _read_line(lambda line: _to_seconds(line.system_us)),
        "seconds",
        title="System CPU time",
    ),
    Column("Memory", _read_line(_read_peak_bytes), "bytes", title="Memory peak"),
    Column(
        "Node",
        _read_line(lambda line: line.peak_node or line.max_rss_node),
        title="Node of the peak",
        drop_rank=3,
    ),
    Column(
        "Faults",
        _read_line(lambda line: _describe_faults(line.minor_faults, line.max_pages)),
        title="Page faults",
        right=True,
        drop_rank=5,
    ),
    Column("Read", _read_line(lambda line: line.read_bytes or None), "bytes", drop_rank=2),
    Column("Written", _read_line(lambda line: line.written_bytes or None), "bytes", drop_rank=2),
)
"""Columns of a run's steps."""


def _list_remarks(task: TaskPart, _: object) -> str:
    marks = ("core dumped" * task.core, "with TaskEpilog" * task.includes_epilog)
    return ", ".join(filter(None, marks))


TASK_LAYOUT: Final[Layout] = (
    Column("Task", "task", right=True),
    Column("Node", "node"),
    Column("Exit", lambda task, _: describe_exit(task.exit_code, task.signal)),
    Column("User", "user_s", "seconds", title="User CPU time"),
    Column("System", "system_s", "seconds", title="System CPU time"),
    Column("Memory", "max_rss_bytes", "bytes", title="Memory peak"),
    Column(
        "Faults",
        lambda task, _: _describe_faults(task.minor_faults, task.major_faults),
        title="Page faults",
        right=True,
        drop_rank=3,
    ),
    Column("Read", lambda task, _: task.read_bytes or None, "bytes", drop_rank=2),
    Column("Written", lambda task, _: task.written_bytes or None, "bytes", drop_rank=2),
    Column("", _list_remarks, title="Remarks"),
)
"""Columns of a step's tasks."""

NODE_LAYOUT: Final[Layout] = (
    Column("Node", "node", link="node"),
    Column("CPUs", "cpus", "count"),
    Column("Tasks", "tasks", "count"),
    Column("CPUTime", "cpu_s", "seconds", title="CPU time"),
    Column("Peak", "peak_bytes", "bytes", title="Memory peak"),
    Column("Memory", "memory_bytes", "bytes", title="Allocated memory"),
)
"""Columns of a step's nodes."""

MEMBER_LAYOUT: Final[Layout] = (
    Column("Task", "job", link="job", is_key=True),
    Column("State", "state", "state"),
    Column(
        "Exit",
        lambda member, _: describe_exit(member.exit_code or 0, member.exit_signal),
        right=True,
    ),
    Column("Elapsed", "elapsed_s", "seconds"),
    Column("CPU", "cpu", "percent", title="CPU efficiency"),
    Column("Memory", "memory", "percent", title="Memory efficiency"),
    Column("Reason", "reason", "prose"),
)
"""Columns of an array's tasks to look at first."""


class SpreadRow(msgspec.Struct, frozen=True):
    """Distribution of a value over an array's tasks.

    Attributes:
        name: Name of the value.
        spread: Its distribution.
        is_share: Whether it is a ratio; else seconds.
    """

    name: str
    spread: Spread
    is_share: bool = True


def list_spreads(array: ArrayPart) -> list[SpreadRow]:
    """Return the known distributions over an array's tasks."""
    spreads = (
        ("CPU efficiency", array.cpu, True),
        ("Memory efficiency", array.memory, True),
        ("Time limit used", array.time, True),
        ("Elapsed", array.elapsed_s, False),
    )
    return [SpreadRow(name, spread, is_share) for name, spread, is_share in spreads if spread]


def _make_spread_column(name: str, attribute: str) -> Column:
    """Return the column of one quantile."""

    def read(row: SpreadRow, _: object) -> str:
        value: float = getattr(row.spread, attribute)
        return f"{value:.0%}" if row.is_share else format_duration(value)

    return Column(name, read, right=True)


SPREAD_LAYOUT: Final[Layout] = (
    Column("", "name", title="Value"),
    _make_spread_column("Minimum", "minimum"),
    _make_spread_column("25%", "lower_quartile"),
    _make_spread_column("Median", "median"),
    _make_spread_column("75%", "upper_quartile"),
    _make_spread_column("Maximum", "maximum"),
    Column("Tasks", lambda row, _: row.spread.count, "count"),
)
"""Columns of distributions over an array's tasks."""

NOTE_TITLES: Final[Mapping[NoteKind, str]] = {
    "out-of-memory": "Out of memory",
    "timeout": "Time limit reached",
    "node-fail": "Node failure",
    "failed-early": "Early failure",
    "memory-high": "Memory nearly ran out",
    "memory-low": "Memory request too high",
    "serial": "Serial on several CPUs",
    "cpu-low": "Idle CPUs",
    "time-low": "Time limit too high",
    "time-high": "Time limit nearly reached",
    "imbalance": "Uneven tasks",
}
"""Titles of notes in the summary of an array."""
