"""An array's sum, drawn: its states, how efficiency is spread, the tasks to look at first."""

from collections.abc import Callable

from steward.accounting.job_page.job_efficiency import signal_name
from steward.accounting.job_page.notes import duration
from steward.accounting.job_page.requests import ArrayPart, MemberPart, PageAnswer, Spread
from steward.cli.drawing import Head, Pens, Piece, Row, bar, heading, table, text
from steward.cli.job_steps import state_piece
from steward.cli.text import number

_BAR = 24


def array(answer: PageAnswer, part: ArrayPart, pens: Pens) -> list[Row]:
    """All rows of an array's sum."""
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
    return "" if share is None else f"{share:.0%}"


def _spread(name: str, one: Spread, words: Callable[[float | None], str]) -> list[Piece]:
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
