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
    BalanceAnswer,
    BalanceRequest,
    Grouping,
    HoldsAnswer,
    HoldsRequest,
    StatementAnswer,
    StatementRequest,
    UsageAnswer,
    UsageRequest,
)
from steward.bank.ledger import StatementLine, UsageRow
from steward.bank.records import Hold
from steward.cli import options, output
from steward.cli.bank_options import (
    AccountOption,
    ClusterOption,
    Shown,
    UserOption,
    plain,
    say,
    since,
    until,
)
from steward.cli.charts import bar, pens
from steward.cli.charts import plain as without_styles
from steward.cli.options import LAST, Asked, asking_columns, not_empty
from steward.cli.output import Column, print_csv, print_json, print_table, show_time, zone_to_ask_in
from steward.core.errors import UsageError
from steward.core.timestamps import moment


@asking_columns
def balance(
    asked: Asked,
    accounts: Annotated[
        list[str] | None, typer.Argument(metavar="ACCOUNT", help="These; else all of yours.")
    ] = None,
) -> None:
    """Show what accounts have.

    Balance is what allocations hold that can be drawn on now, Held what jobs that have
    not ended may still cost, Free what a new job may cost.
    """
    style = asked.style
    request = BalanceRequest(accounts=options.split(accounts))
    answer: BalanceAnswer = asked.call("bank.balance", request)
    if style.json:
        print_json(answer)
        return
    if not answer.accounts:
        output.note("There is no account that you are in.")
    print_table(_balances(answer), answer.accounts, style)
    if not all(one.known for one in answer.accounts):
        output.note(
            "Jobs were charged to an account that nobody created: "
            "'steward bank account create' takes it over with what it owes."
        )
    if any(one.free is None for one in answer.accounts):
        output.note("The gate does not answer, so what is held is not known.")


def _balances(answer: BalanceAnswer) -> list[Column]:
    """Define the table of balances; limits and payers appear only if any exist."""
    shown = Shown(answer)

    def ends(one: AccountBalance) -> str:
        active = [pot for pot in one.allocations if pot.end and pot.active(answer.at)]
        return shown.time(active[0].end) if active else ""

    def limit(one: AccountBalance) -> str:
        return "" if one.user_limit is None else shown.amount(one.user_limit - one.user_spent)

    has_limits = any(one.user_limit is not None for one in answer.accounts)
    has_payers = any(one.payer != one.account for one in answer.accounts)
    return [
        Column("Account", lambda one: one.account),
        Column("Payer", lambda one: one.payer, usual=has_payers),
        Column(
            "Balance", lambda one: shown.amount(one.balance), lambda one: plain(one.balance), True
        ),
        Column("Held", lambda one: shown.amount(one.held), lambda one: plain(one.held), True),
        Column(
            "Credit",
            lambda one: shown.amount(one.credit),
            lambda one: plain(one.credit),
            True,
            any(one.credit for one in answer.accounts),
        ),
        Column("Free", lambda one: shown.amount(one.free), lambda one: plain(one.free), True),
        Column("Yours", limit, None, True, has_limits),
        Column("FirstEnd", ends),
        Column(
            "AsOf",
            lambda one: shown.time(one.remote_at) if one.remote_at else "",
            usual=any(one.remote_at for one in answer.accounts),
        ),
        Column(
            "State",
            lambda one: "closed" if one.closed else "" if one.known else "not created",
            usual=any(one.closed or not one.known for one in answer.accounts),
        ),
    ]


@asking_columns
def statement(
    asked: Asked,
    account: Annotated[
        str, typer.Argument(metavar="ACCOUNT", help="The account; else all, for operators.")
    ] = "",
    user: UserOption = "",
    start: Annotated[str, since("Since; the beginning of this month if not given.")] = "",
    end: Annotated[str, until()] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a table with commas.")] = False,
) -> None:
    """Show what happened to an account's money.

    Owners, coordinators and operators see all of it, others what their own jobs were
    charged.
    """
    style = asked.style
    if as_csv and (style.json or style.parsable):
        raise UsageError("--csv, --json and --parsable2 exclude each other")
    request = StatementRequest(
        account=account, user=user, since=start, until=end, zone=zone_to_ask_in()
    )
    answer: StatementAnswer = asked.call("bank.statement", request)
    found, shown = answer.statement, Shown(answer)
    table = _lines(shown, answer.names)
    if style.json:
        print_json(answer)
    elif as_csv:
        print_csv(table, found.lines, style)
    elif style.parsable:
        print_table(table, found.lines, style)
    else:
        if found.account:
            say(f"{found.account}: {shown.whole(found.opening)} at {shown.time(found.begin)}.")
        if found.lines:
            print_table(table, found.lines, style)
        else:
            say("Nothing happened.")
        if found.account and not found.user:
            say(f"{shown.whole(found.closing)} at the end.")


def _lines(shown: Shown, names: Mapping[str, str]) -> list[Column]:
    """Define the table of a statement."""
    return [
        Column("Time", lambda one: shown.time(one.at)),
        Column("Number", lambda one: str(one.number), None, True, False),
        Column("Account", lambda one: one.account, usual=False),
        Column("Kind", lambda one: one.kind),
        Column("User", lambda one: one.user),
        Column("What", lambda one: _what(one, names), lambda one: one.charge or one.why, widest=44),
        Column("Amount", lambda one: shown.amount(one.amount), lambda one: plain(one.amount), True),
        Column(
            "Balance", lambda one: shown.amount(one.balance), lambda one: plain(one.balance), True
        ),
        Column("By", lambda one: one.who, usual=False),
        Column("Why", lambda one: one.why, usual=False),
    ]


def _what(one: StatementLine, names: Mapping[str, str]) -> str:
    """Return the job and why it was charged, or the reason of a manual transaction."""
    if not one.charge:
        return one.why
    parts = one.charge.split("/")
    named = f"job {names.get(one.charge, parts[1])}" if len(parts) == 5 else one.charge
    return named if one.kind == "charge" else f"{named}: {one.why}"


@asking_columns
def holds(
    asked: Asked,
    account: AccountOption = "",
    user: UserOption = "",
    cluster: ClusterOption = "",
    job: Annotated[
        int,
        typer.Option("--jobs", "-j", min=0, max=LAST, metavar="ID", help="Only of this job."),
    ] = 0,
) -> None:
    """Show what money is spoken for.

    A job's hold is what it may cost at the most; what it did not use is free at its end.
    """
    style = asked.style
    request = HoldsRequest(account=account, user=user, cluster=cluster, job_id=job)
    answer: HoldsAnswer = asked.call("bank.holds", request)
    if style.json:
        print_json(answer)
        return
    if not answer.holds:
        output.note("Nothing is held.")
    print_table(_holds(answer), answer.holds, style)
    if answer.holds and not style.parsable:
        output.note(f"{Shown(answer).whole(answer.total)} in all.")


def _holds(answer: HoldsAnswer) -> list[Column]:
    """Define the table of SU holds."""
    shown = Shown(answer)
    clusters = {one.cluster for one in answer.holds}

    def state(one: Hold) -> str:
        if one.started:
            return "running"
        return "queued" if one.confirmed else "unconfirmed"

    return [
        Column("Since", lambda one: shown.time(moment(one.created_us))),
        Column("Cluster", lambda one: one.cluster, usual=len(clusters) > 1),
        Column("JobID", lambda one: str(one.job_id) if one.job_id else "", None, True),
        Column("User", lambda one: one.user or str(one.uid)),
        Column("Account", lambda one: one.account),
        Column("Held", lambda one: shown.amount(one.remaining), lambda one: plain(one.remaining),
               True),
        Column("AtFirst", lambda one: shown.amount(one.amount), lambda one: plain(one.amount),
               True, False),
        Column("State", state),
        Column("Origin", lambda one: one.origin, usual=False),
        Column("Hold", lambda one: one.id, usual=False),
    ]  # fmt: skip


_GROUPS = ("account", "user", "partition", "month", "day", "cluster")
"""Names that ``usage --by`` accepts."""
_BAR = 24
"""Width of the bars of ``usage``, in characters."""


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
            callback=not_empty,
        ),
    ] = None,
    users: Annotated[
        list[str] | None,
        typer.Option("--user", "-u", metavar="NAME,…", help="Only of these.", callback=not_empty),
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
        print_json(answer)
        return
    if not answer.rows and not style.parsable:
        begin, end = (show_time(at, answer.zone) for at in (answer.since, answer.until))
        whose = "" if answer.is_all else " to you or to accounts that you own or coordinate"
        say(f"No run that began from {begin} to {end} was charged{whose}.")
        return
    print_table(_columns(answer), answer.rows, style)
    if not style.parsable:
        output.note(f"{Shown(answer).whole(answer.total)} in all.")


def _groups(names: tuple[str, ...]) -> tuple[Grouping, ...]:
    """Validate the names to group by."""
    for name in names:
        if name not in _GROUPS:
            raise UsageError(f"there is nothing to sum up by {name!r}: {', '.join(_GROUPS)}", name)
    found: tuple[Grouping, ...] = msgspec.convert(names, tuple[Grouping, ...])
    return found


def _columns(answer: UsageAnswer) -> list[Column]:
    """Define the table of usage, with shares and bars."""
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
        # Programs get the numbers.
        Column("Bar", drawn, lambda _: ""),
    ]


def _of(name: str) -> Any:
    """Return a function that reads an attribute of a row; "-" if empty."""
    return lambda row: str(getattr(row, name)) or "-"
