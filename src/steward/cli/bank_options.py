"""Options and helpers that the ``steward bank`` commands share.

Options for accounts, users, clusters and periods; :class:`ReplyFormatter`, which formats the
amounts and times of a reply; and :func:`print_line`.
"""

from datetime import datetime
from typing import Annotated

import typer

from steward.bank import money
from steward.bank.context import BankReply
from steward.bank.money import Unit
from steward.cli import output
from steward.cli.options import reject_empty
from steward.cli.output import format_time

AccountOption = Annotated[
    str,
    typer.Option(
        "--account", "-A", metavar="NAME", help="Only this account.", callback=reject_empty
    ),
]
UserOption = Annotated[
    str,
    typer.Option("--user", "-u", metavar="NAME", help="Only this user.", callback=reject_empty),
]
ClusterOption = Annotated[
    str,
    typer.Option("--cluster", "-M", metavar="NAME", help="The cluster.", callback=reject_empty),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]


def make_since_option(help_text: str) -> typer.models.OptionInfo:
    """Return the option for the start of a period, with this help text."""
    option: typer.models.OptionInfo = typer.Option(
        "--starttime",
        "--since",
        "-S",
        metavar="TIME",
        help=help_text,
        callback=reject_empty,
    )
    return option


def make_until_option(help_text: str = "Until; now if not given.") -> typer.models.OptionInfo:
    """Return the option for the end of a period, with this help text."""
    option: typer.models.OptionInfo = typer.Option(
        "--endtime", "--until", "-E", metavar="TIME", help=help_text, callback=reject_empty
    )
    return option


class ReplyFormatter:
    """Formatter of the amounts and times of one reply.

    Args:
        reply: The reply; it names the unit, the decimals and the time zone.
    """

    def __init__(self, reply: BankReply) -> None:
        self.unit = Unit(reply.unit, reply.decimals)
        self._unit_without_name = Unit("", reply.decimals)
        self._zone = reply.zone

    def format_amount(self, value: int | None) -> str:
        """Format an amount for a column, without the unit; ``-`` if unknown."""
        return "-" if value is None else money.format_money(value, self._unit_without_name).strip()

    def format_with_unit(self, value: int) -> str:
        """Format an amount with its unit, for a sentence."""
        return money.format_money(value, self.unit)

    def format_time(self, value: datetime | None) -> str:
        """Format a time in the cluster's zone; "" for None."""
        return format_time(value, self._zone)


def print_line(text: str) -> None:
    """Print a line, with unsafe characters escaped."""
    print(output.escape_unprintable(text))
