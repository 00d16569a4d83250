"""``steward bank quote``, and the printers of ``steward bank allow`` and ``explain``.

``quote`` passes sbatch's options and script to the daemon, which estimates the cost.
"""

import os
from collections.abc import Sequence
from typing import Annotated

import click

from steward.bank.actions.jobs import AllowReply, ExplainedCharge, ExplainReply
from steward.bank.actions.quotes import QuoteReply, QuoteRequest
from steward.bank.context import BankReply
from steward.bank.records import PriceLine, Quote
from steward.cli.commands import prints
from steward.cli.options import Config, Json, Socket, reject_empty
from steward.cli.output import Style, format_time, print_json, print_line, print_table
from steward.cli.parameters import Argument, Option, wrap_function
from steward.client.calls import call_action
from steward.client.places import ClientPlace
from steward.core.errors import UsageError
from steward.daemon.registry import get_action

_MAX_SCRIPT_BYTES = 4 * 1024 * 1024
"""Largest script, in bytes."""


def quote(
    context: click.Context,
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="OPTION|SCRIPT", help="Options and script, as on the command line of sbatch."
        ),
    ] = None,
    on: Annotated[
        str,
        Option(
            "--on",
            metavar="NAME",
            help="Cluster. Default: the first in the configuration.",
            callback=reject_empty,
        ),
    ] = "",
    by: Annotated[
        str,
        Option(
            "--as",
            metavar="USER",
            help="Owner of the job; only operators may name others. Default: you.",
            callback=reject_empty,
        ),
    ] = "",
    as_json: Json = False,
    config: Config = "",
    socket: Socket = "",
) -> None:
    """Run the action ``bank.quote`` and print its reply.

    Give options of sbatch and a script; Steward applies the #SBATCH lines of the script. The
    command submits nothing and places no SU hold. The bank never charges more than this price,
    unless Slurm lets the job use more than requested.
    """
    arguments = tuple(words or ())
    if "-h" in arguments[:1]:
        # Handled here rather than as an option, which would take the h out of a word such as
        # -phigh.
        print(context.get_help())
        return
    request = QuoteRequest(options=arguments, script=_read_script(arguments), cluster=on, user=by)
    reply: QuoteReply = call_action(
        ClientPlace(config=config, socket=socket), get_action("bank.quote"), request
    )
    if as_json:
        print_json(reply)
        return
    for number, component in enumerate(reply.quotes):
        if len(reply.quotes) > 1:
            print_line(f"Component {number}:")
        _print_quote(component, reply)
    if len(reply.quotes) > 1:
        print_line(f"Total: at most {reply.format_with_unit(reply.amount)}.")
    if reply.available is not None:
        available = reply.format_with_unit(reply.available)
        print_line(f"{reply.quotes[0].account} has {available} available now.")
    if reply.is_admitted is False:
        print_line(
            "The gate would reject it now."
            if not reply.message
            else reply.message.split("\n", 1)[0]
        )


# sbatch's options pass through: ours have no single letters, because sbatch's do.
quote_app = wrap_function(quote, ignore_unknown_options=True, help_option_names=["--help"])


def _print_quote(price_quote: Quote, reply: BankReply) -> None:
    """Print a quote: total, where it holds, and its parts."""
    scope = ", ".join(
        part for part in (price_quote.partition, price_quote.qos, price_quote.account) if part
    )
    print_line(f"At most {reply.format_with_unit(price_quote.amount)} ({scope}).")
    _print_lines(price_quote.lines, reply)


def _print_lines(lines: Sequence[PriceLine], reply: BankReply) -> None:
    """Print the parts of a price."""
    width = max((len(line.description) for line in lines), default=0)
    for line in lines:
        amount = "" if line.amount is None else reply.format_amount(line.amount)
        print_line(f"  {line.description:<{width}}  {amount:>12}".rstrip())


def _read_script(arguments: tuple[str, ...]) -> str:
    """Return the text of the script among sbatch's arguments, or "".

    An option's value may look like a script; sbatch's option table, part of the estimate, decides.
    """
    from steward.bank.estimate import find_script

    path = find_script(arguments)
    if not path:
        return ""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > _MAX_SCRIPT_BYTES:
                raise UsageError(f"{path} is too large for a script: sbatch rejects it, too", path)
            return file.read(_MAX_SCRIPT_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", path) from error


@prints("bank.allow")
def print_allowance(reply: AllowReply, style: Style) -> None:
    """Print the end of an allowance: a sentence for people, a row for programs."""
    if style.is_for_programs:
        print_table(reply.layout, reply.allowances, style, reply)
        return
    print_line(f"The gate accepts job {reply.job} until {format_time(reply.until, reply.zone)}.")


@prints("bank.explain")
def print_explanation(reply: ExplainReply, style: Style) -> None:
    """Print the charges of a job: prose for people, rows for programs."""
    if style.is_for_programs:
        print_table(reply.layout, reply.charges, style, reply)
        return
    amount = reply.format_with_unit(reply.amount)
    print_line(f"Job {reply.job} of {reply.user} was charged {amount} to {reply.account}.")
    for explanation in reply.charges:
        _print_charge(explanation, reply)


def _print_charge(explanation: ExplainedCharge, reply: BankReply) -> None:
    """Print a charge with its parts."""
    charge = explanation.charge
    run_label = f", run {charge.restarts + 1}" if charge.restarts else ""
    size_note = ", until a resize" if charge.piece_us else ""
    rate_label = f", rate {charge.rate}" if charge.rate else ""
    amount = reply.format_amount(charge.amount)
    print_line(
        f"{explanation.name}{run_label}{size_note} in {charge.partition}: {amount}{rate_label}, "
        f"source {charge.source}"
    )
    _print_lines(explanation.list_parts(), reply)
