"""``steward bank balance``, ``statement``, ``holds`` and ``usage``: show balances and charges.

Each command calls one action and prints its table; the functions below each command define the
columns.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import typer

from steward.bank.actions.reports import (
    AccountBalance,
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
from steward.bank.ledger import StatementLine, UsageRow
from steward.bank.records import Hold, parse_charge_key
from steward.cli import options, output
from steward.cli.bank_options import (
    AccountOption,
    ClusterOption,
    ReplyFormatter,
    UserOption,
    format_exact_amount,
    make_since_option,
    make_until_option,
    print_line,
)
from steward.cli.charts import choose_signs, draw_bar, render_plain
from steward.cli.options import LARGEST_NUMBER, CommandCall, reject_empty, with_call_and_columns
from steward.cli.output import (
    Column,
    find_requested_zone,
    format_time,
    print_csv,
    print_json,
    print_table,
)
from steward.core.errors import UsageError
from steward.core.timestamps import from_micros


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
    print_table(_make_balance_columns(reply), reply.accounts, style)
    if not all(account.known for account in reply.accounts):
        output.print_note(
            "Jobs were charged to an account that nobody created: "
            "'steward bank account create' takes it over with what it owes."
        )
    if any(account.free is None for account in reply.accounts):
        output.print_note("The gate does not answer, so what is held is not known.")


def _make_balance_columns(reply: BalanceReply) -> list[Column]:
    """Define the table of balances; limits and payers appear only if any exist."""
    formatter = ReplyFormatter(reply)

    def ends(account: AccountBalance) -> str:
        allocations = [
            allocation
            for allocation in account.allocations
            if allocation.end and allocation.is_active(reply.at)
        ]
        return formatter.format_time(allocations[0].end) if allocations else ""

    def limit(account: AccountBalance) -> str:
        return (
            ""
            if account.user_limit is None
            else formatter.format_amount(account.user_limit - account.user_spent)
        )

    has_limits = any(account.user_limit is not None for account in reply.accounts)
    has_payers = any(account.payer != account.account for account in reply.accounts)
    return [
        Column("Account", lambda account: account.account),
        Column("Payer", lambda account: account.payer, is_default=has_payers),
        Column(
            "Balance",
            lambda account: formatter.format_amount(account.balance),
            lambda account: format_exact_amount(account.balance),
            True,
        ),
        Column(
            "Held",
            lambda account: formatter.format_amount(account.held),
            lambda account: format_exact_amount(account.held),
            True,
        ),
        Column(
            "Credit",
            lambda account: formatter.format_amount(account.credit),
            lambda account: format_exact_amount(account.credit),
            True,
            any(account.credit for account in reply.accounts),
        ),
        Column(
            "Free",
            lambda account: formatter.format_amount(account.free),
            lambda account: format_exact_amount(account.free),
            True,
        ),
        Column("Yours", limit, None, True, has_limits),
        Column("FirstEnd", ends),
        Column(
            "AsOf",
            lambda account: formatter.format_time(account.remote_at) if account.remote_at else "",
            is_default=any(account.remote_at for account in reply.accounts),
        ),
        Column(
            "State",
            lambda account: "closed" if account.closed else "" if account.known else "not created",
            is_default=any(account.closed or not account.known for account in reply.accounts),
        ),
    ]


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
    columns = _make_statement_columns(formatter, reply.names)
    if style.json:
        print_json(reply)
    elif as_csv:
        print_csv(columns, account_statement.lines, style)
    elif style.parsable:
        print_table(columns, account_statement.lines, style)
    else:
        if account_statement.account:
            print_line(
                f"{account_statement.account}: "
                f"{formatter.format_with_unit(account_statement.opening)} at "
                f"{formatter.format_time(account_statement.begin)}."
            )
        if account_statement.lines:
            print_table(columns, account_statement.lines, style)
        else:
            print_line("Nothing happened.")
        if account_statement.account and not account_statement.user:
            print_line(f"{formatter.format_with_unit(account_statement.closing)} at the end.")


def _make_statement_columns(
    formatter: ReplyFormatter, job_names: Mapping[str, str]
) -> list[Column]:
    """Define the table of a statement."""
    return [
        Column("Time", lambda line: formatter.format_time(line.at)),
        Column("Number", lambda line: str(line.number), None, True, False),
        Column("Account", lambda line: line.account, is_default=False),
        Column("Kind", lambda line: line.kind),
        Column("User", lambda line: line.user),
        Column(
            "What",
            lambda line: _describe_line(line, job_names),
            lambda line: line.charge or line.why,
            max_width=44,
        ),
        Column(
            "Amount",
            lambda line: formatter.format_amount(line.amount),
            lambda line: format_exact_amount(line.amount),
            True,
        ),
        Column(
            "Balance",
            lambda line: formatter.format_amount(line.balance),
            lambda line: format_exact_amount(line.balance),
            True,
        ),
        Column("By", lambda line: line.who, is_default=False),
        Column("Why", lambda line: line.why, is_default=False),
    ]


def _describe_line(line: StatementLine, job_names: Mapping[str, str]) -> str:
    """Return the job and why it was charged, or the reason of a manual transaction."""
    if not line.charge:
        return line.why
    key_parts = parse_charge_key(line.charge)
    job_label = (
        f"job {job_names.get(line.charge, str(key_parts[1]))}"
        if key_parts is not None
        else line.charge
    )
    return job_label if line.kind == "charge" else f"{job_label}: {line.why}"


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
    print_table(_make_hold_columns(reply), reply.holds, style)
    if reply.holds and not style.parsable:
        output.print_note(f"{ReplyFormatter(reply).format_with_unit(reply.total)} in all.")


def _make_hold_columns(reply: HoldsReply) -> list[Column]:
    """Define the table of SU holds."""
    formatter = ReplyFormatter(reply)
    clusters = {hold.cluster for hold in reply.holds}

    def state(hold: Hold) -> str:
        if hold.started:
            return "running"
        return "queued" if hold.confirmed else "unconfirmed"

    return [
        Column("Since", lambda hold: formatter.format_time(from_micros(hold.created_us))),
        Column("Cluster", lambda hold: hold.cluster, is_default=len(clusters) > 1),
        Column("JobID", lambda hold: str(hold.job_id) if hold.job_id else "", None, True),
        Column("User", lambda hold: hold.user or str(hold.uid)),
        Column("Account", lambda hold: hold.account),
        Column("Held", lambda hold: formatter.format_amount(hold.remaining),
               lambda hold: format_exact_amount(hold.remaining), True),
        Column("AtFirst", lambda hold: formatter.format_amount(hold.amount),
               lambda hold: format_exact_amount(hold.amount), True, False),
        Column("State", state),
        Column("Origin", lambda hold: hold.origin, is_default=False),
        Column("Hold", lambda hold: hold.id, is_default=False),
    ]  # fmt: skip


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
    print_table(_make_usage_columns(reply), reply.rows, style)
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
    formatter = ReplyFormatter(reply)
    largest = max((row.amount for row in reply.rows), default=0)
    signs = choose_signs()

    def share(row: UsageRow) -> str:
        return f"{100 * row.amount / reply.total:.1f}%" if reply.total > 0 else ""

    def drawn(row: UsageRow) -> str:
        filled_share = row.amount / largest if largest > 0 else None
        return render_plain([draw_bar(filled_share, _BAR_WIDTH, signs, "")]).strip()

    groups = [Column(name.capitalize(), _make_attribute_getter(name)) for name in reply.by]
    return [
        *groups,
        Column("Charges", lambda row: str(row.charges), None, True),
        Column(
            "Used",
            lambda row: formatter.format_amount(row.amount),
            lambda row: format_exact_amount(row.amount),
            True,
        ),
        Column("Share", share, None, True),
        # Programs get the numbers.
        Column("Bar", drawn, lambda _: ""),
    ]


def _make_attribute_getter(name: str) -> Any:
    """Return a function that reads an attribute of a row; "-" if empty."""
    return lambda row: str(getattr(row, name)) or "-"
