"""The page of a job, drawn: what it was, its times, how well it used what it had, its steps."""

from datetime import datetime

from steward.accounting.job_page.requests import PageAnswer, RunPart, Waiting
from steward.accounting.job_page.wording import (
    cpu_words,
    end_words,
    memory_words,
    share_word,
    spans,
    state_word,
    time_words,
)
from steward.cli.drawing import (
    Pens,
    Row,
    Span,
    bar,
    heading,
    line_of_time,
    text,
    wrapped,
)
from steward.cli.job_steps import cpu_style, pieces, state_piece, steps
from steward.cli.text import number
from steward.cli.times import show as show_time
from steward.core.records import Line

_BAR = 24
_US = 1_000_000
_MOST_OTHERS = 5


def page(answer: PageAnswer, pens: Pens) -> list[Row]:
    """All rows of a page."""
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
    """When and where a run was."""
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
    return ": ".join(word for word in words if word)


def _when(us: int, zone: str) -> str:
    if not us:
        return ""
    try:
        return show_time(datetime.fromtimestamp(us / _US).astimezone(), zone)
    except (OverflowError, OSError, ValueError):
        return ""


def _facts(facts: list[tuple[str, str]]) -> list[Row]:
    shown = [(name, value) for name, value in facts if value]
    width = max((len(name) for name, _ in shown), default=0)
    return [[(f"  {name:<{width}}  ", "dim"), *text(value)] for name, value in shown]


def _waiting(answer: PageAnswer, waiting: Waiting, pens: Pens) -> list[Row]:
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
    """A run's spans of time, with what each is drawn with."""
    ran = state_piece(run.line.state)[1].removeprefix("bold ")
    drawn = {
        "held": (pens.held, "dim"),
        "waited": (pens.waited, "yellow"),
        "ran": (pens.ran, ran),
        "suspended": (pens.suspended, "yellow"),
    }
    return [Span(one.seconds, *drawn[one.kind], one.words) for one in spans(run, now_us)]


def _efficiency(run: RunPart, answer: PageAnswer, pens: Pens) -> list[Row]:
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
    return [
        (f"  {name:<8}", ""),
        *bar(share, _BAR, pens, style),
        (f" {share_word(share):>5}  ", style),
        *text(words),
    ]


def _memory_style(share: float | None, answer: PageAnswer) -> str:
    if share is None:
        return "dim"
    if share > answer.memory_high:
        return "red"
    return "yellow" if share < answer.memory_low else "green"


def _time_style(run: RunPart) -> str:
    return "red" if run.line.state == "TIMEOUT" else "cyan"
