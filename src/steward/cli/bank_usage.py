"""``steward bank usage``: what was used by whom, as a table with bars."""

from typing import Annotated, Any

import msgspec
import typer

from steward.bank.actions.reports import Grouping, UsageAnswer, UsageRequest
from steward.bank.ledger import UsageRow
from steward.cli import options, output
from steward.cli.asking import Asked, asking_columns
from steward.cli.bank_text import Shown, plain, say, since, until
from steward.cli.drawing import bar, pens
from steward.cli.drawing import plain as without_styles
from steward.cli.output import Column
from steward.cli.times import show, zone_to_ask_in
from steward.core.errors import UsageError

_GROUPS = ("account", "user", "partition", "month", "day", "cluster")
_BAR = 24


@asking_columns
def usage(
    asked: Asked,
    accounts: Annotated[
        list[str] | None, typer.Argument(metavar="ACCOUNT", help="These; else all of yours.")
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            "--by",
            metavar="WHAT,…",
            help="user (if not given), account, partition, month, day or cluster.",
            callback=options.not_empty,
        ),
    ] = None,
    users: Annotated[
        list[str] | None,
        typer.Option(
            "--user", "-u", metavar="NAME,…", help="Only of these.", callback=options.not_empty
        ),
    ] = None,
    start: Annotated[str, since("Runs that began since; this year's if not given.")] = "",
    end: Annotated[str, until()] = "",
) -> None:
    """Sum up what was used.

    What was given back is taken off. Bars are shares of the largest row.
    """
    style = asked.style
    request = UsageRequest(
        by=_groups(options.split(by) or ("user",)),
        accounts=options.split(accounts),
        users=options.split(users),
        since=start,
        until=end,
        zone=zone_to_ask_in(),
    )
    answer: UsageAnswer = asked.call("bank.usage", request)
    if style.json:
        output.print_json(answer)
        return
    if not answer.rows and not style.parsable:
        begin, end = (show(at, answer.zone) for at in (answer.since, answer.until))
        whose = "" if answer.is_all else " to you or to accounts that you own or coordinate"
        say(f"No run that began from {begin} to {end} was charged{whose}.")
        return
    output.print_table(_columns(answer), answer.rows, style)
    if not style.parsable:
        output.note(f"{Shown(answer).whole(answer.total)} in all.")


def _groups(names: tuple[str, ...]) -> tuple[Grouping, ...]:
    for name in names:
        if name not in _GROUPS:
            raise UsageError(f"there is nothing to sum up by {name!r}: {', '.join(_GROUPS)}", name)
    found: tuple[Grouping, ...] = msgspec.convert(names, tuple[Grouping, ...])
    return found


def _columns(answer: UsageAnswer) -> list[Column]:
    shown = Shown(answer)
    largest = max((row.amount for row in answer.rows), default=0)
    drawing = pens()

    def share(row: UsageRow) -> str:
        return f"{100 * row.amount / answer.total:.1f}%" if answer.total > 0 else ""

    def drawn(row: UsageRow) -> str:
        part = row.amount / largest if largest > 0 else None
        return without_styles([bar(part, _BAR, drawing, "")]).strip()

    groups = [Column(name.capitalize(), _of(name)) for name in answer.by]
    return [
        *groups,
        Column("Charges", lambda row: str(row.charges), None, True),
        Column("Used", lambda row: shown.amount(row.amount), lambda row: plain(row.amount), True),
        Column("Share", share, None, True),
        # Programs have the numbers.
        Column("Bar", drawn, lambda _: ""),
    ]


def _of(name: str) -> Any:
    return lambda row: str(getattr(row, name)) or "-"
