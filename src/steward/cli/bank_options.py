"""What the commands of the bank share: amounts as they are typed and shown, reasons, keys."""

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
    """The option for a beginning."""
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
    """The option for an end."""
    found: typer.models.OptionInfo = typer.Option(
        "--endtime", "--until", "-E", metavar="TIME", help=text, callback=not_empty
    )
    return found


def unit_of(answer: BankAnswer) -> Unit:
    """How amounts of an answer are shown."""
    return Unit(answer.unit, answer.decimals)


class Shown:
    """Shows the amounts and times of one answer.

    Args:
        answer: The answer.
    """

    def __init__(self, answer: BankAnswer) -> None:
        self.unit = unit_of(answer)
        self._bare = Unit("", answer.decimals)
        self._zone = answer.zone

    def amount(self, value: int | None) -> str:
        """An amount for a column: without the unit's name, ``-`` where it is not known."""
        return "-" if value is None else money.show(value, self._bare).strip()

    def whole(self, value: int) -> str:
        """An amount in a sentence, with its unit."""
        return money.show(value, self.unit)

    def time(self, value: datetime | None) -> str:
        """A time in the cluster's zone; "" for none."""
        return show_time(value, self._zone)


def plain(value: int | None) -> str:
    """An amount for programs: exact; "" where it is not known."""
    return "" if value is None else money.plain(value)


def key_or_random(key: str) -> str:
    """The key that was given, or one that nobody else has."""
    return key or secrets.token_hex(8)


def say(text: str) -> None:
    """Print a line, whatever names are in it."""
    print(output.printable(text))


def tell_gate(knows: bool) -> None:
    """Say to a person that a change counts for jobs only when the daemon has told the gate."""
    if not knows:
        output.note("The gate does not know yet: the daemon tells it when both run.")
