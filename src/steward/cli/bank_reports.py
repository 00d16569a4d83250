"""``steward bank balance``, ``statement``, ``holds`` and ``usage``: show balances and charges.

Each command calls one action and prints its table; the functions below each command define the
columns.
"""

from functools import partial
from typing import Annotated

import msgspec
import typer

from steward.bank.actions.reports import (
    BalanceReply,
    BalanceRequest,
    Grouping,
    HoldsReply,
    HoldsRequest,
    StatementReply,
    StatementRequest,
    UsageReply,
    UsageRequest,
)
from steward.bank.ledger import UsageRow
from steward.cli import options, output
from steward.cli.bank_options import (
    AccountOption,
    ClusterOption,
    ReplyFormatter,
    UserOption,
    make_since_option,
    make_until_option,
    print_line,
)
from steward.cli.charts import choose_signs, draw_bar, render_plain
from steward.cli.options import LARGEST_NUMBER, CommandCall, reject_empty, with_call_and_columns
from steward.cli.output import (
    find_requested_zone,
    format_time,
    print_csv,
    print_json,
    print_table,
)
from steward.core.errors import UsageError
from steward.core.layouts import Column


@with_call_and_columns
def balance(
    call: CommandCall,
    accounts: Annotated[
        list[str] | None, typer.Argument(metavar="ACCOUNT", help="These; else all of yours.")
    ] = None,
) -> None:
    """Show what accounts have.

    Balance is what allocations hold that can be drawn on now, Held what jobs that have
    not ended may still cost, Free what a new job may cost.
    """
    style = call.style
    request = BalanceRequest(accounts=options.split_lists(accounts))
    reply: BalanceReply = call.send("bank.balance", request)
    if style.json:
        print_json(reply)
        return
    if not reply.accounts:
        output.print_note("There is no account that you are in.")
    print_table(reply.layout, reply.accounts, style, reply)
    if not all(account.known for account in reply.accounts):
        output.print_note(
            "Jobs were charged to an account that nobody created: "
            "'steward bank account create' takes it over with what it owes."
        )
    if any(account.free is None for account in reply.accounts):
        output.print_note("The gate does not answer, so what is held is not known.")


@with_call_and_columns
def statement(
    call: CommandCall,
    account: Annotated[
        str, typer.Argument(metavar="ACCOUNT", help="The account; else all, for operators.")
    ] = "",
    user: UserOption = "",
    start: Annotated[
        str, make_since_option("Since; the beginning of this month if not given.")
    ] = "",
    end: Annotated[str, make_until_option()] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a table with commas.")] = False,
) -> None:
    """Show what happened to an account's money.

    Owners, coordinators and operators see all of it, others what their own jobs were
    charged.
    """
    style = call.style
    if as_csv and (style.json or style.parsable):
        raise UsageError("--csv, --json and --parsable2 exclude each other")
    request = StatementRequest(
        account=account, user=user, since=start, until=end, zone=find_requested_zone()
    )
    reply: StatementReply = call.send("bank.statement", request)
    account_statement, formatter = reply.statement, ReplyFormatter(reply)
    if style.json:
        print_json(reply)
    elif as_csv:
        print_csv(reply.layout, account_statement.lines, style, reply)
    elif style.parsable:
        print_table(reply.layout, account_statement.lines, style, reply)
    else:
        if account_statement.account:
            print_line(
                f"{account_statement.account}: "
                f"{formatter.format_with_unit(account_statement.opening)} at "
                f"{formatter.format_time(account_statement.begin)}."
            )
        if account_statement.lines:
            print_table(reply.layout, account_statement.lines, style, reply)
        else:
            print_line("Nothing happened.")
        if account_statement.account and not account_statement.user:
            print_line(f"{formatter.format_with_unit(account_statement.closing)} at the end.")


@with_call_and_columns
def holds(
    call: CommandCall,
    account: AccountOption = "",
    user: UserOption = "",
    cluster: ClusterOption = "",
    job: Annotated[
        int,
        typer.Option(
            "--jobs", "-j", min=0, max=LARGEST_NUMBER, metavar="ID", help="Only of this job."
        ),
    ] = 0,
) -> None:
    """Show what money is spoken for.

    A job's hold is what it may cost at the most; what it did not use is free at its end.
    """
    style = call.style
    request = HoldsRequest(account=account, user=user, cluster=cluster, job_id=job)
    reply: HoldsReply = call.send("bank.holds", request)
    if style.json:
        print_json(reply)
        return
    if not reply.holds:
        output.print_note("Nothing is held.")
    print_table(reply.layout, reply.holds, style, reply)
    if reply.holds and not style.parsable:
        output.print_note(f"{ReplyFormatter(reply).format_with_unit(reply.total)} in all.")


_GROUPS = ("account", "user", "partition", "month", "day", "cluster")
"""Names that ``usage --by`` accepts."""
_BAR_WIDTH = 24
"""Width of the bars of ``usage``, in characters."""


@with_call_and_columns
def usage(
    call: CommandCall,
    accounts: Annotated[
        list[str] | None, typer.Argument(metavar="ACCOUNT", help="These; else all of yours.")
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            "--by",
            metavar="WHAT,…",
            help="user (if not given), account, partition, month, day or cluster.",
            callback=reject_empty,
        ),
    ] = None,
    users: Annotated[
        list[str] | None,
        typer.Option(
            "--user", "-u", metavar="NAME,…", help="Only of these.", callback=reject_empty
        ),
    ] = None,
    start: Annotated[
        str, make_since_option("Runs that began since; this year's if not given.")
    ] = "",
    end: Annotated[str, make_until_option()] = "",
) -> None:
    """Sum up what was used.

    What was given back is taken off. Bars are shares of the largest row.
    """
    style = call.style
    request = UsageRequest(
        by=_check_groups(options.split_lists(by) or ("user",)),
        accounts=options.split_lists(accounts),
        users=options.split_lists(users),
        since=start,
        until=end,
        zone=find_requested_zone(),
    )
    reply: UsageReply = call.send("bank.usage", request)
    if style.json:
        print_json(reply)
        return
    if not reply.rows and not style.parsable:
        begin, end = (format_time(at, reply.zone) for at in (reply.since, reply.until))
        visibility = "" if reply.is_all else " to you or to accounts that you own or coordinate"
        print_line(f"No run that began from {begin} to {end} was charged{visibility}.")
        return
    print_table(_make_usage_columns(reply), reply.rows, style, reply)
    if not style.parsable:
        output.print_note(f"{ReplyFormatter(reply).format_with_unit(reply.total)} in all.")


def _check_groups(names: tuple[str, ...]) -> tuple[Grouping, ...]:
    """Validate the names to group by."""
    for name in names:
        if name not in _GROUPS:
            raise UsageError(f"there is nothing to sum up by {name!r}: {', '.join(_GROUPS)}", name)
    groupings: tuple[Grouping, ...] = msgspec.convert(names, tuple[Grouping, ...])
    return groupings


def _make_usage_columns(reply: UsageReply) -> list[Column]:
    """Define the table of usage, with shares and bars."""
    largest = max((row.amount for row in reply.rows), default=0)
    signs = choose_signs()

    def share(row: UsageRow) -> str:
        return f"{100 * row.amount / reply.total:.1f}%" if reply.total > 0 else ""

    def drawn(row: UsageRow) -> str:
        filled_share = row.amount / largest if largest > 0 else None
        return render_plain([draw_bar(filled_share, _BAR_WIDTH, signs, "")]).strip()

    groups = [Column(name.capitalize(), partial(_read_group, name)) for name in reply.by]
    return [
        *groups,
        Column("Charges", "charges", "count"),
        Column("Used", "amount", "money"),
        Column("Share", lambda row, _: share(row), right=True),
        # Programs get the numbers.
        Column("Bar", lambda row, _: drawn(row), exact=lambda *_: ""),
    ]


def _read_group(name: str, row: UsageRow, _: object) -> str:
    """Return what a row is the sum of; "-" if empty."""
    return getattr(row, name) or "-"
