"""``steward job``: job page in the terminal, with state, timeline, efficiency, steps and tasks.

:func:`job` is the command; it sends ``accounting.job`` and prints :func:`rows_of` the reply:
:func:`page` for a job, :func:`array` for the summary of an array. ``charts.py`` draws bars and
tables. ``steward mail`` appends the same page to mails.
"""

import sys
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Final

import typer

from steward.accounting.job_page.job_efficiency import elapsed_s, signal_name
from steward.accounting.job_page.notes import duration, size
from steward.accounting.job_page.requests import (
    FEW,
    MOST_TASKS,
    ArrayPart,
    MemberPart,
    PageAnswer,
    PageRequest,
    RunPart,
    Spread,
    StepPart,
    TaskPart,
    Waiting,
)
from steward.accounting.job_page.wording import (
    cpu_words,
    end_words,
    ends_of_tasks,
    exit_word,
    memory_words,
    share_word,
    spans,
    state_word,
    time_words,
)
from steward.cli import output
from steward.cli.charts import (
    Head,
    Pens,
    Piece,
    Row,
    Span,
    bar,
    drawn,
    heading,
    line_of_time,
    pens,
    plain,
    table,
    text,
    wrapped,
)
from steward.cli.options import Archive, Cluster, Config, JobId, Json, Socket
from steward.cli.output import is_terminal, number, print_all, print_json, show_time
from steward.client.calls import call
from steward.client.places import Place
from steward.core.records import Line
from steward.daemon.registry import action

_US: Final = 1_000_000
"""Microseconds in a second."""
STATE_STYLES = {
    "COMPLETED": "bold green",
    "RUNNING": "bold cyan",
    "PENDING": "bold yellow",
    "SUSPENDED": "bold yellow",
    "CANCELLED": "bold magenta",
}
"""Rich styles of job states; all others are failures."""
_FAILED = "bold red"


def state_piece(state: str) -> Piece:
    """Return a job state in its colour."""
    return (state, STATE_STYLES.get(state, _FAILED))


def cpu_style(share: float | None, answer: PageAnswer) -> str:
    """Return the colour of a CPU efficiency."""
    if share is None:
        return "dim"
    if share < answer.cpu_low / 2:
        return "red"
    return "yellow" if share < answer.cpu_low else "green"


def pieces(run: RunPart, width: int) -> list[Row]:
    """Return the table of sizes that a resized job had."""
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
    """Return the table of a run's steps, and of their most notable tasks."""
    now_us = int(answer.now.timestamp() * _US)
    rows = heading("Steps")
    rows += table(_STEP_HEADS, [_step_cells(step, now_us, answer) for step in run.steps], width)
    for step in run.steps:
        rows += _tasks(step, width)
    return rows


def _step_cells(step: StepPart, now_us: int, answer: PageAnswer) -> list[Piece]:
    """Return the cells of a step."""
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
    """Format microseconds as a duration; "" for None."""
    return "" if us is None else duration(us / _US)


def _bytes(count: int | None) -> str:
    return size(count) if count else ""


def _faults(minor: int | None, major: int | None) -> str:
    """Format page faults: without and with I/O."""
    if minor is None and major is None:
        return ""
    return f"{minor or 0}+{major}" if major else str(minor or 0)


def _tasks(step: StepPart, width: int) -> list[Row]:
    """Return the table of a step's tasks, if it adds to the step's row."""
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
    """Return the cells of a task."""
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


_BAR = 24
"""Width of bars, in characters."""


def array(answer: PageAnswer, part: ArrayPart, pens: Pens) -> list[Row]:
    """Return the summary page of an array."""
    record = answer.record
    owner = record.user or ("" if record.uid is None else str(record.uid))
    tasks = sum(part.states.values())
    rows: list[Row] = [
        [
            ("Array ", "bold"),
            *text(part.job, "bold"),
            ("  ", ""),
            *text(record.name, "bold"),
            ("  on cluster ", "dim"),
            *text(answer.cluster),
        ],
        [("  ", ""), *text(f"{owner}, {number(tasks, 'task')}")],
    ]
    rows += _states(part, tasks, pens)
    rows += _spreads(part, pens)
    if part.notes:
        rows += heading("Notes")
        for kind, count in part.notes.items():
            rows.append(
                [(f"  {pens.note} ", "bold yellow"), (f"{kind}: {number(count, 'task')}", "")]
            )
    if part.worst:
        rows += heading("Look at these first")
        rows += table(_HEADS, [_cells(member) for member in part.worst], pens.width)
        first = part.worst[0].job
        rows += [[], [(f"  'steward job {first}' shows one of them.", "dim")]]
    return rows


def _states(part: ArrayPart, tasks: int, pens: Pens) -> list[Row]:
    """Return bars of the number of tasks by state."""
    rows = heading("States")
    width = max((len(state) for state in part.states), default=0)
    for state, count in part.states.items():
        name, style = state_piece(state)
        share = count / tasks
        colour = style.removeprefix("bold ")
        rows.append(
            [
                (f"  {name:<{width}}  ", style),
                *bar(share, _BAR, pens, colour),
                (f" {count:>6}  {share:4.0%}", ""),
            ]
        )
    if part.waiting:
        rows.append([("  Not started yet: ", "dim"), *text(part.waiting)])
    return rows


def _spreads(part: ArrayPart, pens: Pens) -> list[Row]:
    """Return the table of quartiles over an array's tasks."""
    heads = (
        Head("", right=False),
        *(Head(name) for name in ("Least", "Quarter", "Middle", "3 quarters", "Most", "Tasks")),
    )
    shown: list[list[Piece]] = []
    for name, one, words in (
        ("CPU efficiency", part.cpu, _percent),
        ("Memory efficiency", part.memory, _percent),
        ("Time of its limit", part.time, _percent),
        ("Elapsed", part.elapsed_s, duration),
    ):
        if one is not None:
            shown.append(_spread(name, one, words))
    if not shown:
        return []
    rows = [*heading("Spread over tasks that have ended"), *table(heads, shown, pens.width)]
    if part.cpu_used_s:
        rows.append([(f"  CPU time of all tasks: {duration(part.cpu_used_s)}", "")])
    return rows


def _percent(share: float | None) -> str:
    """Format a share as a percentage; "" for None."""
    return "" if share is None else f"{share:.0%}"


def _spread(name: str, one: Spread, words: Callable[[float | None], str]) -> list[Piece]:
    """Return the cells of one row of quartiles."""
    values = (one.least, one.quarter, one.middle, one.three_quarters, one.most)
    return [(name, ""), *((words(value), "") for value in values), (str(one.count), "dim")]


_HEADS = (
    Head("Task", right=False),
    Head("State", right=False),
    Head("Exit"),
    Head("Elapsed"),
    Head("CPU"),
    Head("Memory"),
    Head("Why", right=False),
)


def _cells(member: MemberPart) -> list[Piece]:
    """Return the cells of a notable task of an array."""
    end = signal_name(member.exit_signal) if member.exit_signal else str(member.exit_code or 0)
    return [
        (member.job, "bold"),
        state_piece(member.state),
        (end, ""),
        (duration(member.elapsed_s) if member.elapsed_s is not None else "", ""),
        (_percent(member.cpu), ""),
        (_percent(member.memory), ""),
        (member.why, ""),
    ]


_MOST_OTHERS = 5
"""Earlier jobs with the same id that the page mentions."""


def page(answer: PageAnswer, pens: Pens) -> list[Row]:
    """Return the page of a job."""
    rows = _head(answer)
    if answer.waiting is not None:
        rows += _waiting(answer, answer.waiting, pens)
    for run in answer.runs:
        if len(answer.runs) > 1:
            rows += heading(f"Run {run.line.restarts + 1} of {answer.runs[-1].line.restarts + 1}")
            rows += _facts(_of_run(run.line, answer.zone))
        rows += _run(run, answer, pens)
    if not answer.runs and answer.waiting is None:
        rows += [[], [("Nothing is known of its runs.", "")]]
    if answer.parts:
        shown = " ".join(answer.parts)
        rows += [[], [("Its parts: ", "dim"), *text(shown)]]
    if answer.others:
        times = ", ".join(show_time(when, answer.zone) for when in answer.others[:_MOST_OTHERS])
        rows += [[], [(f"Slurm has used the id {answer.job} before: {times}.", "dim")]]
    return rows


def _head(answer: PageAnswer) -> list[Row]:
    """Return the head of a page: job, cluster, state and facts."""
    record = answer.record
    title = [("Job ", "bold"), *text(answer.job, "bold"), ("  ", ""), *text(record.name, "bold")]
    where: Row = [("  on cluster ", "dim"), *text(answer.cluster)]
    state = state_word(answer)
    if record.state == "CANCELLED" and record.cancelled_by is not None:
        state_text: Row = [state_piece(state), (f" by uid {record.cancelled_by}", "")]
    else:
        state_text = [state_piece(state)]
    rows: list[Row] = [[*title, *where], [("  ", ""), *state_text, *text(end_words(answer))]]
    if answer.ahead:
        words = "  Slurm says so just now; what it has done since follows in some seconds."
        rows.append([(words, "dim")])
    owner = record.user or ("" if record.uid is None else str(record.uid))
    facts = [
        ("Owner", owner + (f", account {record.account}" if record.account else "")),
        ("Partition", record.partition + (f", QOS {record.qos}" if record.qos else "")),
        ("Asked for", record.tres_requested),
    ]
    if len(answer.runs) == 1:
        facts += _of_run(answer.runs[0].line, answer.zone)
    elif not answer.runs:
        facts.append(("Submitted", show_time(record.submit, answer.zone)))
    facts += [
        ("Command", record.submit_line or record.command),
        ("Directory", record.work_dir),
        ("Output", record.stdout),
        ("Comment", record.comment),
    ]
    return [*rows, *_facts(facts)]


def _of_run(line: Line, zone: str) -> list[tuple[str, str]]:
    """Return times and nodes of a run."""
    given = [number(line.nodes, "node"), number(line.cpus, "CPU")] if line.nodes else []
    times = [
        ("Submitted", line.submit_us),
        ("Eligible", line.eligible_us if line.eligible_us > line.submit_us else 0),
        ("Started", line.start_us),
        ("Ended", line.end_us),
    ]
    return [
        ("Ran on", _joined(line.nodelist, ", ".join(given)) if line.start_us else ""),
        *((name, _when(us, zone)) for name, us in times),
    ]


def _joined(*words: str) -> str:
    """Join the non-empty words with colons."""
    return ": ".join(word for word in words if word)


def _when(us: int, zone: str) -> str:
    """Format microseconds since 1970 as a time; "" for 0."""
    if not us:
        return ""
    try:
        return show_time(datetime.fromtimestamp(us / _US).astimezone(), zone)
    except (OverflowError, OSError, ValueError):
        return ""


def _facts(facts: list[tuple[str, str]]) -> list[Row]:
    """Return rows of names and values, aligned; empty values are omitted."""
    shown = [(name, value) for name, value in facts if value]
    width = max((len(name) for name, _ in shown), default=0)
    return [[(f"  {name:<{width}}  ", "dim"), *text(value)] for name, value in shown]


def _waiting(answer: PageAnswer, waiting: Waiting, pens: Pens) -> list[Row]:
    """Return why a pending job waits, and its expected start."""
    rows = heading("Why it waits")
    words = waiting.words or waiting.reason or "Slurm gives no reason."
    code = f" ({waiting.reason})" if waiting.words and waiting.reason else ""
    rows += wrapped(words + code, pens.width)
    for what in waiting.behind:
        rows += wrapped(what, pens.width, ("    ", ""))
    expected = show_time(waiting.expected_start, answer.zone)
    where = f" on {waiting.expected_nodes}" if waiting.expected_nodes else ""
    facts = [
        ("Expected start", expected + where if expected else ""),
        ("Priority", "" if waiting.priority is None else str(waiting.priority)),
    ]
    if waiting.asked and not expected:
        facts.insert(0, ("Expected start", "Slurm has made no plan for it yet"))
    if waiting.trouble:
        facts.append(("As seen last", waiting.trouble))
    return [*rows, *_facts(facts)]


def _run(run: RunPart, answer: PageAnswer, pens: Pens) -> list[Row]:
    """Return timeline, efficiency, sizes and steps of a run."""
    rows: list[Row] = []
    drawn_as = _spans(run, int(answer.now.timestamp() * _US), pens)
    if drawn := line_of_time(drawn_as, pens):
        rows += [[], *drawn]
    if run.line.start_us:
        rows += _efficiency(run, answer, pens)
    if run.pieces:
        rows += pieces(run, pens.width)
    if run.steps:
        rows += steps(run, answer, pens.width)
    elif run.line.end_us and run.line.start_us:
        rows += [[], [("  No node has reported on its steps.", "yellow")]]
    if run.notes:
        rows += heading("Notes")
        for note in run.notes:
            rows += wrapped(note.words, pens.width, (f"  {pens.note} ", "bold yellow"))
    return rows


def _spans(run: RunPart, now_us: int, pens: Pens) -> list[Span]:
    """Return the time spans of a run with sign and colour."""
    ran = state_piece(run.line.state)[1].removeprefix("bold ")
    drawn = {
        "held": (pens.held, "dim"),
        "waited": (pens.waited, "yellow"),
        "ran": (pens.ran, ran),
        "suspended": (pens.suspended, "yellow"),
    }
    return [Span(one.seconds, *drawn[one.kind], one.words) for one in spans(run, now_us)]


def _efficiency(run: RunPart, answer: PageAnswer, pens: Pens) -> list[Row]:
    """Return bars of CPU, memory and time efficiency."""
    used = run.efficiency
    rows = heading("Efficiency")
    cpu = cpu_words(used, is_over=run.line.end_us > 0)
    rows.append(_share("CPU", used.cpu, cpu_style(used.cpu, answer), cpu, pens))
    style = _memory_style(used.memory, answer)
    rows.append(_share("Memory", used.memory, style, memory_words(used), pens))
    rows.append(_share("Time", used.time, _time_style(run), time_words(used), pens))
    if used.at_least and run.line.end_us:
        missing = "Facts are missing, so more may have been used: 'steward accounting gaps'."
        rows += wrapped(missing, pens.width)
    return rows


def _share(name: str, share: float | None, style: str, words: str, pens: Pens) -> Row:
    """Return a bar with its percentage and words."""
    return [
        (f"  {name:<8}", ""),
        *bar(share, _BAR, pens, style),
        (f" {share_word(share):>5}  ", style),
        *text(words),
    ]


def _memory_style(share: float | None, answer: PageAnswer) -> str:
    """Return the colour of a memory efficiency."""
    if share is None:
        return "dim"
    if share > answer.memory_high:
        return "red"
    return "yellow" if share < answer.memory_low else "green"


def _time_style(run: RunPart) -> str:
    """Return the colour of the time used: red after a TIMEOUT."""
    return "red" if run.line.state == "TIMEOUT" else "cyan"


def job(
    job: JobId,
    array: Annotated[
        bool, typer.Option("--array", help="Sum up the array that it is, or is a task of.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="Show every task, not only the most notable.")
    ] = False,
    cluster: Cluster = "",
    as_json: Json = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Show what a job was, what it used, and how well.

    Of a job that waits it says why, and when Slurm expects to start it.
    """
    place = Place(config=config, socket=socket, archive=archive)
    most = MOST_TASKS if every else FEW
    request = PageRequest(job=job, cluster=cluster, array=array, tasks=most, nodes=most)
    answer: PageAnswer = call(place, action("accounting.job"), request)
    if as_json:
        print_json(answer)
    elif is_terminal():
        print_all(*drawn(rows_of(answer, pens())))
    else:
        page = plain(rows_of(answer, pens()))
        output.write(page.encode(sys.stdout.encoding, "backslashreplace"))


def rows_of(answer: PageAnswer, with_: Pens) -> list[Row]:
    """Return the page of a job, or the summary of an array."""
    if answer.array is not None:
        return array(answer, answer.array, with_)
    return page(answer, with_)
