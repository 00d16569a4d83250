"""The steps and tasks of a job's page, drawn, and the colours that states and shares have."""

from typing import Final

from steward.accounting.job_page.job_efficiency import elapsed_s, signal_name
from steward.accounting.job_page.notes import duration, size
from steward.accounting.job_page.requests import PageAnswer, RunPart, StepPart, TaskPart
from steward.accounting.job_page.wording import ends_of_tasks, exit_word
from steward.cli.drawing import Head, Piece, Row, heading, table, wrapped

_US: Final = 1_000_000
STATE_STYLES = {
    "COMPLETED": "bold green",
    "RUNNING": "bold cyan",
    "PENDING": "bold yellow",
    "SUSPENDED": "bold yellow",
    "CANCELLED": "bold magenta",
}
_FAILED = "bold red"


def state_piece(state: str) -> Piece:
    """A state in its colour."""
    return (state, STATE_STYLES.get(state, _FAILED))


def cpu_style(share: float | None, answer: PageAnswer) -> str:
    """The colour of a CPU efficiency."""
    if share is None:
        return "dim"
    if share < answer.cpu_low / 2:
        return "red"
    return "yellow" if share < answer.cpu_low else "green"


def pieces(run: RunPart, width: int) -> list[Row]:
    """The sizes that a resized job had."""
    heads = [Head("Size", right=False), Head("CPUs"), Head("Nodes", right=False), Head("Elapsed")]
    rows = [
        [
            (f"{place}", ""),
            (str(line.cpus), ""),
            (line.nodelist, ""),
            (duration(elapsed_s(line, line.end_us)), ""),
        ]
        for place, line in enumerate((*run.pieces, run.line), start=1)
    ]
    return [*heading("Resized"), *table(heads, rows, width)]


_STEP_HEADS = (
    Head("Step", right=False),
    Head("Name", right=False, spare=4),
    Head("State", right=False),
    Head("Exit"),
    Head("Tasks"),
    Head("Elapsed"),
    Head("CPU", spare=1),
    Head("User"),
    Head("System"),
    Head("Memory"),
    Head("Node", right=False, spare=3),
    Head("Faults", spare=5),
    Head("Read", spare=2),
    Head("Written", spare=2),
)
_TASK_HEADS = (
    Head("Task"),
    Head("Node", right=False),
    Head("Exit", right=False),
    Head("User"),
    Head("System"),
    Head("Memory"),
    Head("Faults", spare=3),
    Head("Read", spare=2),
    Head("Written", spare=2),
    Head("", right=False),
)


def steps(run: RunPart, answer: PageAnswer, width: int) -> list[Row]:
    """The steps of a run, and their most notable tasks."""
    now_us = int(answer.now.timestamp() * _US)
    rows = heading("Steps")
    rows += table(_STEP_HEADS, [_step_cells(step, now_us, answer) for step in run.steps], width)
    for step in run.steps:
        rows += _tasks(step, width)
    return rows


def _step_cells(step: StepPart, now_us: int, answer: PageAnswer) -> list[Piece]:
    line = step.line
    peak = line.peak_bytes if line.peak_bytes is not None else line.max_rss_bytes
    return [
        (line.step, "bold"),
        (line.name[:20], ""),
        state_piece(line.state),
        (exit_word(line.exit_code, line.exit_signal), ""),
        (str(line.tasks) if line.tasks else "", ""),
        (duration(elapsed_s(line, now_us)) if line.start_us else "", ""),
        (f"{step.cpu:.0%}" if step.cpu is not None else "", cpu_style(step.cpu, answer)),
        (_seconds(line.user_us), ""),
        (_seconds(line.system_us), ""),
        (size(peak) if peak is not None else "", ""),
        (line.peak_node or line.max_rss_node, ""),
        (_faults(line.minor_faults, line.max_pages), ""),
        (_bytes(line.read_bytes), ""),
        (_bytes(line.written_bytes), ""),
    ]


def _seconds(us: int | None) -> str:
    return "" if us is None else duration(us / _US)


def _bytes(count: int | None) -> str:
    return size(count) if count else ""


def _faults(minor: int | None, major: int | None) -> str:
    """Page faults without and with I/O."""
    if minor is None and major is None:
        return ""
    return f"{minor or 0}+{major}" if major else str(minor or 0)


def _tasks(step: StepPart, width: int) -> list[Row]:
    """The tasks of a step, where they tell more than its own row."""
    if step.all_tasks < 2 and not step.signals:
        return []
    if not step.tasks:
        return []
    of_all = "" if len(step.tasks) == step.all_tasks else f", {len(step.tasks)} of {step.all_tasks}"
    rows: list[Row] = [[], [(f"  Tasks of step {step.line.step}{of_all}", "bold")]]
    rows += table(_TASK_HEADS, [_task_cells(task) for task in step.tasks], width)
    for words in ends_of_tasks(step):
        rows += wrapped(words, width)
    return rows


def _task_cells(task: TaskPart) -> list[Piece]:
    end = signal_name(task.signal) if task.signal else str(task.exit_code)
    style = "" if end == "0" else "red"
    marks = [("core dumped" if task.core else ""), "with TaskEpilog" * task.includes_epilog]
    return [
        (str(task.task), ""),
        (task.node, ""),
        (end, style),
        (duration(task.user_s), ""),
        (duration(task.system_s), ""),
        (size(task.max_rss_bytes) if task.max_rss_bytes is not None else "", ""),
        (_faults(task.minor_faults, task.major_faults), ""),
        (_bytes(task.read_bytes), ""),
        (_bytes(task.written_bytes), ""),
        (", ".join(filter(None, marks)), "dim"),
    ]
