"""Options and helpers that the ``steward bank`` commands share.

Options for accounts, amounts, reasons, idempotency keys and periods; :class:`Shown`, which formats
the amounts and times of a reply; and small helpers to print and to note that the gate is not
updated.
"""

import secrets
from datetime import datetime
from typing import Annotated

import typer

from steward.bank import money
from steward.bank.context import BankAnswer
from steward.bank.money import Unit
from steward.cli import output
from steward.cli.options import not_empty
from steward.cli.output import show_time

Reason = Annotated[
    str,
    typer.Option("--reason", metavar="TEXT", help="Why; it stands in the books for good."),
]
NeededReason = Annotated[
    str,
    typer.Option(
        "--reason",
        metavar="TEXT",
        help="Why; it stands in the books for good.",
        callback=not_empty,
    ),
]
Key = Annotated[
    str,
    typer.Option(
        "--key",
        metavar="TEXT",
        help="A name for this: done again under the same, nothing is done. Random if not given.",
        callback=not_empty,
    ),
]
Account = Annotated[str, typer.Argument(metavar="ACCOUNT", help="The account.")]
Amount = Annotated[str, typer.Argument(metavar="AMOUNT", help="Such as 1250 or 0.5.")]
AccountOption = Annotated[
    str,
    typer.Option("--account", "-A", metavar="NAME", help="Only this account.", callback=not_empty),
]
UserOption = Annotated[
    str,
    typer.Option("--user", "-u", metavar="NAME", help="Only this user.", callback=not_empty),
]
ClusterOption = Annotated[
    str,
    typer.Option("--cluster", "-M", metavar="NAME", help="The cluster.", callback=not_empty),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]


def since(text: str) -> typer.models.OptionInfo:
    """Return the option for the start of a period, with this help text."""
    found: typer.models.OptionInfo = typer.Option(
        "--starttime",
        "--since",
        "-S",
        metavar="TIME",
        help=text,
        callback=not_empty,
    )
    return found


def until(text: str = "Until; now if not given.") -> typer.models.OptionInfo:
    """Return the option for the end of a period, with this help text."""
    found: typer.models.OptionInfo = typer.Option(
        "--endtime", "--until", "-E", metavar="TIME", help=text, callback=not_empty
    )
    return found


def unit_of(answer: BankAnswer) -> Unit:
    """Return the unit and the decimals that a reply's amounts are shown in."""
    return Unit(answer.unit, answer.decimals)


class Shown:
    """Formatter of the amounts and times of one reply.

    Args:
        answer: The reply; it names the unit, the decimals and the time zone.
    """

    def __init__(self, answer: BankAnswer) -> None:
        self.unit = unit_of(answer)
        self._bare = Unit("", answer.decimals)
        self._zone = answer.zone

    def amount(self, value: int | None) -> str:
        """Format an amount for a column, without the unit; ``-`` if unknown."""
        return "-" if value is None else money.show(value, self._bare).strip()

    def whole(self, value: int) -> str:
        """Format an amount with its unit, for a sentence."""
        return money.show(value, self.unit)

    def time(self, value: datetime | None) -> str:
        """Format a time in the cluster's zone; "" for None."""
        return show_time(value, self._zone)


def plain(value: int | None) -> str:
    """Format an amount for programs, exact; "" if unknown."""
    return "" if value is None else money.plain(value)


def key_or_random(key: str) -> str:
    """Return the given idempotency key, or a random one."""
    return key or secrets.token_hex(8)


def say(text: str) -> None:
    """Print a line, with unsafe characters escaped."""
    print(output.printable(text))


def tell_gate(knows: bool) -> None:
    """Note that a change reaches the gate only once the daemon runs, unless the gate knows it."""
    if not knows:
        output.note("The gate does not know yet: the daemon tells it when both run.")
