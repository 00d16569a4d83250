"""``steward bank notices``: mails, webhooks and jobs that were not told yet, and why."""

from typing import Annotated

import typer

from steward.bank.actions.upkeep import (
    NoticeLine,
    NoticesAnswer,
    NoticesRequest,
    NoticesRetryAnswer,
    NoticesRetryRequest,
)
from steward.cli import options, output
from steward.cli.asking import Asked, asking_columns
from steward.cli.bank_text import Shown, say
from steward.cli.output import Column
from steward.cli.text import number
from steward.core.errors import UsageError

_ALL = "all"


@asking_columns
def notices(
    asked: Asked,
    retry: Annotated[
        str,
        typer.Option(
            "--retry",
            metavar="NUMBER,…|all",
            help="Have these told at once; all: whatever was set aside.",
            callback=options.not_empty,
        ),
    ] = "",
) -> None:
    """List mails and other notices that were not sent.

    What is refused is tried a few times, what cannot be sent for a week; then it is set
    aside until --retry. What a myBRC server elsewhere was not told is listed, too.
    """
    style = asked.style
    if retry:
        request = NoticesRetryRequest(numbers=_numbers(retry))
        done: NoticesRetryAnswer = asked.call("bank.notices_retry", request)
        if style.json:
            output.print_json(done)
        else:
            say(f"{number(done.retried, 'notice')} will be tried again.")
        return
    answer: NoticesAnswer = asked.call("bank.notices", NoticesRequest())
    if style.json:
        output.print_json(answer)
        return
    if not answer.notices and not style.parsable:
        say("Nothing waits to be told.")
        return
    output.print_table(_columns(Shown(answer)), answer.notices, style)
    if answer.more:
        output.note("There are more.")


def _numbers(text: str) -> tuple[int, ...]:
    if text == _ALL:
        return ()
    parts = options.split([text])
    if not all(part.isascii() and part.isdecimal() and len(part) < 19 for part in parts):
        raise UsageError(f"{text!r} is no list of numbers: --retry 12,13, or --retry all", text)
    return tuple(int(part) for part in parts)


def _columns(shown: Shown) -> list[Column]:
    def next_try(one: NoticeLine) -> str:
        return "set aside" if one.aside else shown.time(one.next_at)

    return [
        Column("Number", lambda one: str(one.number), right=True),
        Column("By", lambda one: one.way or "-"),
        Column("What", lambda one: one.what, widest=50),
        Column("To", lambda one: ", ".join(one.to), usual=False),
        Column("Tries", lambda one: str(one.tries), right=True),
        Column("Next", next_try),
        Column("Error", lambda one: one.error, widest=60),
    ]
