"""``steward job``: job page in the terminal, with state, timeline, efficiency, steps and tasks.

In order: the tables of steps and tasks; :func:`layout_array`, the summary of an array;
:func:`layout_job_page`, the page of a job; and the command :func:`job`, which sends
``accounting.job`` and prints the reply by :func:`layout_reply`. ``charts.py`` draws bars and
tables. ``steward mail`` appends the same page to mails.
"""

import sys
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Final

from steward.accounting.job_page.layouts import (
    MEMBER_LAYOUT,
    NOTE_TITLES,
    SIZE_LAYOUT,
    SPREAD_LAYOUT,
    STEP_LAYOUT,
    TASK_LAYOUT,
    list_spreads,
)
from steward.accounting.job_page.notes import format_duration
from steward.accounting.job_page.phrases import (
    describe_cpu,
    describe_end,
    describe_memory,
    describe_state,
    describe_task_ends,
    describe_time,
    format_share,
    split_time,
)
from steward.accounting.job_page.requests import (
    DEFAULT_SHOWN,
    MAX_TASKS_SHOWN,
    ArrayPart,
    MemberPart,
    PageAnswer,
    PageRequest,
    RunPart,
    StepPart,
    TaskPart,
    Waiting,
)
from steward.cli import output
from steward.cli.charts import (
    ChartSigns,
    StyledRow,
    StyledText,
    TimelineSpan,
    choose_signs,
    draw_bar,
    draw_timeline,
    make_heading,
    make_layout_table,
    make_text_row,
    render_plain,
    render_rich,
    wrap_text,
)
from steward.cli.options import Archive, Config, Json, Socket, make_option
from steward.cli.output import format_count, format_time, is_terminal, print_json, print_renderables
from steward.cli.parameters import Option
from steward.client.calls import call_action
from steward.client.places import ClientPlace
from steward.core.records import UsageLine
from steward.daemon.registry import get_action
from steward.jobs import filters

_US_PER_S: Final = 1_000_000
"""Microseconds in a second."""
STATE_STYLES = {
    "COMPLETED": "bold green",
    "RUNNING": "bold cyan",
    "PENDING": "bold yellow",
    "SUSPENDED": "bold yellow",
    "CANCELLED": "bold magenta",
}
"""Rich styles of job states; all others are failures."""
_FAILED_STYLE = "bold red"


def color_state(state: str) -> StyledText:
    """Return a job state in its colour."""
    return (state, STATE_STYLES.get(state, _FAILED_STYLE))


def choose_cpu_style(share: float | None, reply: PageAnswer) -> str:
    """Return the colour of a CPU efficiency."""
    if share is None:
        return "dim"
    if share < reply.cpu_low / 2:
        return "red"
    return "yellow" if share < reply.cpu_low else "green"


_TASK_STYLES: Final[dict[str, Callable[[TaskPart], str]]] = {
    "Exit": lambda task: "red" if task.signal or task.exit_code else "",
    "": lambda _: "dim",
}


def make_step_table(run: RunPart, reply: PageAnswer, width: int) -> list[StyledRow]:
    """Return the table of a run's steps, and of the tasks selected for it."""
    styles: dict[str, Callable[[StepPart], str]] = {
        "Step": lambda _: "bold",
        "State": lambda step: color_state(step.line.state)[1],
        "CPU": lambda step: choose_cpu_style(step.cpu, reply),
    }
    rows = make_heading("Steps")
    rows += make_layout_table(STEP_LAYOUT, run.steps, reply, width, styles)
    for step in run.steps:
        rows += _make_task_table(step, width)
    return rows


def _make_task_table(step: StepPart, width: int) -> list[StyledRow]:
    """Return the table of a step's tasks, if it adds to the step's row."""
    if step.all_tasks < 2 and not step.signals:
        return []
    if not step.tasks:
        return []
    suffix = "" if len(step.tasks) == step.all_tasks else f", {len(step.tasks)} of {step.all_tasks}"
    rows: list[StyledRow] = [[], [(f"  Tasks of step {step.line.step}{suffix}", "bold")]]
    rows += make_layout_table(TASK_LAYOUT, step.tasks, None, width, _TASK_STYLES)
    for text in describe_task_ends(step):
        rows += wrap_text(text, width)
    return rows


_BAR_WIDTH = 24
"""Width of bars, in characters."""


def layout_array(reply: PageAnswer, array: ArrayPart, signs: ChartSigns) -> list[StyledRow]:
    """Return the summary page of an array."""
    record = reply.record
    owner = record.user or ("" if record.uid is None else str(record.uid))
    tasks = sum(array.states.values())
    rows: list[StyledRow] = [
        [
            ("Array ", "bold"),
            *make_text_row(array.job, "bold"),
            ("  ", ""),
            *make_text_row(record.name, "bold"),
            ("  on cluster ", "dim"),
            *make_text_row(reply.cluster),
        ],
        [("  ", ""), *make_text_row(f"{owner}, {format_count(tasks, 'task')}")],
    ]
    rows += _layout_states(array, tasks, signs)
    rows += _make_spread_table(array, signs)
    if array.notes:
        rows += make_heading("Notes")
        for kind, count in array.notes.items():
            rows.append(
                [
                    (f"  {signs.note} ", "bold yellow"),
                    (f"{NOTE_TITLES[kind]}: {format_count(count, 'task')}", ""),
                ]
            )
    if array.worst:
        rows += make_heading("Failed, least efficient and longest tasks")
        rows += make_layout_table(MEMBER_LAYOUT, array.worst, reply, signs.width, _MEMBER_STYLES)
        first_job = array.worst[0].job
        rows += [[], [(f"  Show one: 'steward job {first_job}'.", "dim")]]
    return rows


def _layout_states(array: ArrayPart, tasks: int, signs: ChartSigns) -> list[StyledRow]:
    """Return bars of the number of tasks by state."""
    rows = make_heading("States")
    width = max((len(state) for state in array.states), default=0)
    for state, count in array.states.items():
        name, style = color_state(state)
        share = count / tasks
        colour = style.removeprefix("bold ")
        rows.append(
            [
                (f"  {name:<{width}}  ", style),
                *draw_bar(share, _BAR_WIDTH, signs, colour),
                (f" {count:>6}  {share:4.0%}", ""),
            ]
        )
    if array.waiting:
        rows.append([("  Not started yet: ", "dim"), *make_text_row(array.waiting)])
    return rows


_MEMBER_STYLES: Final[dict[str, Callable[[MemberPart], str]]] = {
    "Task": lambda _: "bold",
    "State": lambda member: color_state(member.state)[1],
}


def _make_spread_table(array: ArrayPart, signs: ChartSigns) -> list[StyledRow]:
    """Return the table of quartiles over an array's tasks."""
    spreads = list_spreads(array)
    if not spreads:
        return []
    rows = [
        *make_heading("Distribution over ended tasks"),
        *make_layout_table(SPREAD_LAYOUT, spreads, None, signs.width, {"Tasks": lambda _: "dim"}),
    ]
    if array.cpu_used_s:
        rows.append([(f"  CPU time of all tasks: {format_duration(array.cpu_used_s)}", "")])
    return rows


_MAX_EARLIER_JOBS = 5
"""Earlier jobs with the same id that the page mentions."""


def layout_job_page(reply: PageAnswer, signs: ChartSigns) -> list[StyledRow]:
    """Return the page of a job."""
    rows = _layout_head(reply)
    if reply.waiting is not None:
        rows += _make_waiting_rows(reply, reply.waiting, signs)
    for run in reply.runs:
        if len(reply.runs) > 1:
            rows += make_heading(
                f"Run {run.line.restarts + 1} of {reply.runs[-1].line.restarts + 1}"
            )
            rows += _make_fact_rows(_list_run_facts(run.line, reply.zone))
        rows += _layout_run(run, reply, signs)
    if not reply.runs and reply.waiting is None:
        rows += [[], [("No run of this job is known.", "")]]
    if reply.components:
        part_ids = " ".join(reply.components)
        rows += [[], [("Components: ", "dim"), *make_text_row(part_ids)]]
    if reply.others:
        times = ", ".join(
            format_time(submitted_at, reply.zone)
            for submitted_at in reply.others[:_MAX_EARLIER_JOBS]
        )
        rows += [
            [],
            [(f"Slurm used the id {reply.job} for earlier jobs, submitted at {times}.", "dim")],
        ]
    return rows


def _layout_head(reply: PageAnswer) -> list[StyledRow]:
    """Return the head of a page: job, cluster, state and facts."""
    record = reply.record
    title = [
        ("Job ", "bold"),
        *make_text_row(reply.job, "bold"),
        ("  ", ""),
        *make_text_row(record.name, "bold"),
    ]
    cluster_text: StyledRow = [("  on cluster ", "dim"), *make_text_row(reply.cluster)]
    state = describe_state(reply)
    if record.state == "CANCELLED" and record.cancelled_by is not None:
        state_text: StyledRow = [color_state(state), (f" by uid {record.cancelled_by}", "")]
    else:
        state_text = [color_state(state)]
    rows: list[StyledRow] = [
        [*title, *cluster_text],
        [("  ", ""), *state_text, *make_text_row(describe_end(reply))],
    ]
    if reply.ahead:
        notice = "  This is Slurm's present state; newer changes follow within seconds."
        rows.append([(notice, "dim")])
    owner = record.user or ("" if record.uid is None else str(record.uid))
    facts = [
        ("Owner", owner + (f", account {record.account}" if record.account else "")),
        ("Partition", record.partition + (f", QOS {record.qos}" if record.qos else "")),
        ("Requested", record.tres_requested),
    ]
    if len(reply.runs) == 1:
        facts += _list_run_facts(reply.runs[0].line, reply.zone)
    elif not reply.runs:
        facts.append(("Submitted", format_time(record.submit, reply.zone)))
    facts += [
        ("Command", record.submit_line or record.command),
        ("Directory", record.work_dir),
        ("Output", record.stdout),
        ("Comment", record.comment),
    ]
    return [*rows, *_make_fact_rows(facts)]


def _list_run_facts(line: UsageLine, zone: str) -> list[tuple[str, str]]:
    """Return times and nodes of a run."""
    allocated = (
        [format_count(line.nodes, "node"), format_count(line.cpus, "CPU")] if line.nodes else []
    )
    times = [
        ("Submitted", line.submit_us),
        ("Eligible", line.eligible_us if line.eligible_us > line.submit_us else 0),
        ("Started", line.start_us),
        ("Ended", line.end_us),
    ]
    return [
        ("Ran on", _join_words(line.nodelist, ", ".join(allocated)) if line.start_us else ""),
        *((name, _format_us_time(us, zone)) for name, us in times),
    ]


def _join_words(*words: str) -> str:
    """Join the non-empty words with colons."""
    return ": ".join(word for word in words if word)


def _format_us_time(us: int, zone: str) -> str:
    """Format microseconds since 1970 as a time; "" for 0."""
    if not us:
        return ""
    try:
        return format_time(datetime.fromtimestamp(us / _US_PER_S).astimezone(), zone)
    except (OverflowError, OSError, ValueError):
        return ""


def _make_fact_rows(facts: list[tuple[str, str]]) -> list[StyledRow]:
    """Return rows of names and values, aligned; empty values are omitted."""
    filled = [(name, value) for name, value in facts if value]
    width = max((len(name) for name, _ in filled), default=0)
    return [[(f"  {name:<{width}}  ", "dim"), *make_text_row(value)] for name, value in filled]


def _make_waiting_rows(reply: PageAnswer, waiting: Waiting, signs: ChartSigns) -> list[StyledRow]:
    """Return why a pending job waits, and its expected start."""
    rows = make_heading("Pending reason")
    explanation = waiting.explanation or waiting.reason or "Slurm gives no reason."
    code = f" ({waiting.reason})" if waiting.explanation and waiting.reason else ""
    rows += wrap_text(explanation + code, signs.width)
    for line in waiting.details:
        rows += wrap_text(line, signs.width, ("    ", ""))
    expected_text = format_time(waiting.expected_start, reply.zone)
    suffix = f" on {waiting.expected_nodes}" if waiting.expected_nodes else ""
    facts = [
        ("Expected start", expected_text + suffix if expected_text else ""),
        ("Priority", "" if waiting.priority is None else str(waiting.priority)),
    ]
    if waiting.queried and not expected_text:
        facts.insert(0, ("Expected start", "none planned by Slurm yet"))
    if waiting.error:
        facts.append(("Last observed", waiting.error))
    return [*rows, *_make_fact_rows(facts)]


def _layout_run(run: RunPart, reply: PageAnswer, signs: ChartSigns) -> list[StyledRow]:
    """Return timeline, efficiency, sizes and steps of a run."""
    rows: list[StyledRow] = []
    spans = _make_timeline_spans(run, int(reply.now.timestamp() * _US_PER_S), signs)
    if timeline := draw_timeline(spans, signs):
        rows += [[], *timeline]
    if run.line.start_us:
        rows += _make_efficiency_rows(run, reply, signs)
    if run.pieces:
        rows += make_heading("Resized")
        rows += make_layout_table(SIZE_LAYOUT, run.sizes, reply, signs.width, {})
    if run.steps:
        rows += make_step_table(run, reply, signs.width)
    elif run.line.end_us and run.line.start_us:
        rows += [[], [("  No node reported on the steps of this job.", "yellow")]]
    if run.notes:
        rows += make_heading("Notes")
        for note in run.notes:
            rows += wrap_text(note.words, signs.width, (f"  {signs.note} ", "bold yellow"))
    return rows


def _make_timeline_spans(run: RunPart, now_us: int, signs: ChartSigns) -> list[TimelineSpan]:
    """Return the time spans of a run with sign and colour."""
    state_style = color_state(run.line.state)[1].removeprefix("bold ")
    signs_and_styles = {
        "held": (signs.held, "dim"),
        "waited": (signs.waiting, "yellow"),
        "ran": (signs.running, state_style),
        "suspended": (signs.suspended, "yellow"),
    }
    return [
        TimelineSpan(span.seconds, *signs_and_styles[span.kind], span.words)
        for span in split_time(run, now_us)
    ]


def _make_efficiency_rows(run: RunPart, reply: PageAnswer, signs: ChartSigns) -> list[StyledRow]:
    """Return bars of CPU, memory and time efficiency."""
    efficiency = run.efficiency
    rows = make_heading("Efficiency")
    cpu = describe_cpu(efficiency, is_over=run.line.end_us > 0)
    rows.append(
        _make_efficiency_bar(
            "CPU", efficiency.cpu, choose_cpu_style(efficiency.cpu, reply), cpu, signs
        )
    )
    style = _choose_memory_style(efficiency.memory, reply)
    rows.append(
        _make_efficiency_bar("Memory", efficiency.memory, style, describe_memory(efficiency), signs)
    )
    rows.append(
        _make_efficiency_bar(
            "Time", efficiency.time, _choose_time_style(run), describe_time(efficiency), signs
        )
    )
    if efficiency.at_least and run.line.end_us:
        warning = (
            "Records are missing, so the real use may be higher: run 'steward accounting gaps'."
        )
        rows += wrap_text(warning, signs.width)
    return rows


def _make_efficiency_bar(
    name: str, share: float | None, style: str, text: str, signs: ChartSigns
) -> StyledRow:
    """Return a bar with its percentage and words."""
    return [
        (f"  {name:<8}", ""),
        *draw_bar(share, _BAR_WIDTH, signs, style),
        (f" {format_share(share):>5}  ", style),
        *make_text_row(text),
    ]


def _choose_memory_style(share: float | None, reply: PageAnswer) -> str:
    """Return the colour of a memory efficiency."""
    if share is None:
        return "dim"
    if share > reply.memory_high:
        return "red"
    return "yellow" if share < reply.memory_low else "green"


def _choose_time_style(run: RunPart) -> str:
    """Return the colour of the time used: red after a TIMEOUT."""
    return "red" if run.line.state == "TIMEOUT" else "cyan"


def job(
    job: Annotated[str, make_option(filters.JobId)],
    array: Annotated[
        bool,
        Option("--array", help="Summarize the whole array, even if JOB is one of its tasks."),
    ] = False,
    every: Annotated[
        bool,
        Option(
            "--all",
            "-a",
            help="Show every task and node. Default: a selection with the failed ones.",
        ),
    ] = False,
    cluster: Annotated[str, make_option(filters.Cluster, "Cluster of the job.")] = "",
    as_json: Json = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Run the action ``accounting.job`` and print its reply.

    For a pending job, the page shows the reason and the expected start.
    """
    place = ClientPlace(config=config, socket=socket, archive=archive)
    task_limit = MAX_TASKS_SHOWN if every else DEFAULT_SHOWN
    request = PageRequest(job=job, cluster=cluster, array=array, tasks=task_limit, nodes=task_limit)
    reply: PageAnswer = call_action(place, get_action("accounting.job"), request)
    if as_json:
        print_json(reply)
    elif is_terminal():
        print_renderables(*render_rich(layout_reply(reply, choose_signs())))
    else:
        page = render_plain(layout_reply(reply, choose_signs()))
        output.write_bytes(page.encode(sys.stdout.encoding, "backslashreplace"))


def layout_reply(reply: PageAnswer, signs: ChartSigns) -> list[StyledRow]:
    """Return the page of a job, or the summary of an array."""
    if reply.array is not None:
        return layout_array(reply, reply.array, signs)
    return layout_job_page(reply, signs)
