"""``steward bank account``, ``user`` and ``allocation``: show, create and change them.

In order: option types, the commands for accounts, users and allocations, and the tables they print.
All commands call actions of the bank; amounts are in SU.
"""

from typing import Annotated, Any, Literal

import msgspec
import typer

from steward.bank import money
from steward.bank.actions.accounts import (
    AccountChangeRequest,
    AccountCreateRequest,
    AccountReply,
    AccountShowRequest,
    AccountUserRequest,
    AllocationChangeRequest,
    AllocationCreateRequest,
    UserShowRequest,
)
from steward.cli import options
from steward.cli.bank_options import (
    Account,
    Amount,
    Key,
    Reason,
    ReplyFormatter,
    ensure_key,
    format_exact_amount,
    note_gate_unaware,
    print_line,
)
from steward.cli.options import (
    LARGEST_NUMBER,
    CommandCall,
    reject_empty,
    with_call,
    with_call_and_columns,
    with_options,
)
from steward.cli.output import Column, Style, find_requested_zone, print_json, print_table
from steward.core.errors import UsageError

Names = Annotated[
    list[str] | None, typer.Argument(metavar="ACCOUNT", help="These; else all of yours.")
]
Ended = Annotated[bool, typer.Option("--ended", help="Allocations that have ended as well.")]
Owners = Annotated[
    str, typer.Option("--owners", metavar="USER,…", help="Who looks after it; '' for nobody.")
]
Parent = Annotated[
    str, typer.Option("--parent", metavar="ACCOUNT", help="The account above; '' for none.")
]
Credit = Annotated[str, typer.Option("--credit", metavar="AMOUNT", help="What it may owe.")]
Draws = Annotated[
    bool | None,
    typer.Option("--draws-on-parent/--pays-itself", help="Who pays: the account above, or it."),
]
Listed = Annotated[
    bool | None,
    typer.Option(
        "--only-listed/--everyone", help="Who may charge it: users created in it, or all."
    ),
]
Note = Annotated[str, typer.Option("--note", metavar="TEXT", help="What it is.")]
Limit = Annotated[
    str,
    typer.Option(
        "--limit",
        metavar="AMOUNT",
        help="What the user may spend of it; 'none' for no limit.",
        callback=reject_empty,
    ),
]
User = Annotated[str, typer.Argument(metavar="USER", help="The user.")]


@with_call_and_columns
def account_show(
    asked: CommandCall,
    names: Names = None,
) -> None:
    """Show accounts."""
    style = asked.style
    request = AccountShowRequest(names=options.split_lists(names))
    _print_accounts(asked.call("bank.account_show", request), style)


class AccountOptions(msgspec.Struct, frozen=True):
    """Options of ``account create`` and ``account change``.

    Attributes:
        name: Name of the account.
        given: Fields that the command line sets.
        reason: Reason recorded in the ledger.
    """

    name: str
    given: dict[str, Any]
    reason: str


def _read_account_options(
    context: typer.Context,
    name: Account,
    parent: Parent = "",
    owners: Owners = "",
    credit: Credit = "",
    draws_on_parent: Draws = None,
    only_listed: Listed = None,
    note: Note = "",
    reason: Reason = "",
) -> AccountOptions:
    """Read the options that describe an account; only typed ones are passed on."""
    fields = {
        "parent": parent,
        "owners": options.split_lists([owners]),
        "credit": money.parse_money(credit) if credit else None,
        "draws_on_parent": draws_on_parent,
        "only_listed": only_listed,
        "note": note,
    }

    def is_given(option: str) -> bool:
        source = context.get_parameter_source(option)
        return source is not None and source.name == "COMMANDLINE"

    given = {
        field: value for field, value in fields.items() if is_given(field) and value is not None
    }
    return AccountOptions(name, given, reason)


@with_call
@with_options(_read_account_options)
def account_create(said: AccountOptions, asked: CommandCall) -> None:
    """Create an account.

    It has a name that Slurm's accounts have, in lower case, and nothing to spend yet.
    """
    request = AccountCreateRequest(name=said.name, reason=said.reason, **said.given)
    _print_accounts(asked.call("bank.account_create", request), asked.style, changed=True)


@with_call
@with_options(_read_account_options)
def account_change(
    said: AccountOptions,
    asked: CommandCall,
    closed: Annotated[
        bool | None, typer.Option("--close/--reopen", help="Let nothing be charged to it any more.")
    ] = None,
) -> None:
    """Change an account.

    What is not given stays.
    """
    request = AccountChangeRequest(name=said.name, closed=closed, reason=said.reason, **said.given)
    _print_accounts(asked.call("bank.account_change", request), asked.style, changed=True)


@with_call_and_columns
def user_show(
    asked: CommandCall,
    users: Annotated[
        list[str] | None, typer.Argument(metavar="USER", help="These; else all you may see.")
    ] = None,
    accounts: Annotated[
        list[str] | None,
        typer.Option("--account", "-A", metavar="NAME,…", help="In these.", callback=reject_empty),
    ] = None,
) -> None:
    """Show who is in which account."""
    style = asked.style
    request = UserShowRequest(
        users=options.split_lists(users), accounts=options.split_lists(accounts)
    )
    _print_users(asked.call("bank.user_show", request), style)


@with_call
def user_create(
    asked: CommandCall,
    account: Account,
    user: User,
    limit: Limit = "",
    reason: Reason = "",
) -> None:
    """Put a user into an account.

    Owners of the account and its coordinators in Slurm may, too.
    """
    style = asked.style
    request = _make_user_request(account, user, limit, reason)
    _print_users(asked.call("bank.user_create", request), style, user)


@with_call
def user_change(
    asked: CommandCall,
    account: Account,
    user: User,
    limit: Limit = "",
    listed: Annotated[
        bool | None,
        typer.Option("--listed/--unlisted", help="Whether they may charge it if only listed may."),
    ] = None,
    reason: Reason = "",
) -> None:
    """Set what a user may spend.

    Owners of the account and its coordinators in Slurm may, too.
    """
    style = asked.style
    if not limit and listed is None:
        raise UsageError("nothing is to be changed: give --limit, --listed or --unlisted")
    request = _make_user_request(account, user, limit, reason, listed=listed)
    _print_users(asked.call("bank.user_change", request), style, user)


def _make_user_request(
    account: str, user: str, limit: str, reason: str, *, listed: bool | None = None
) -> AccountUserRequest:
    """Build the request that sets a user's limit and listing in an account."""
    amount = None if limit in ("", "none") else money.parse_money(limit)
    return AccountUserRequest(
        account=account,
        user=user,
        limit=amount,
        is_limited=bool(limit),
        listed=listed,
        reason=reason,
    )


@with_call_and_columns
def allocation_show(
    asked: CommandCall,
    names: Names = None,
    ended: Ended = False,
) -> None:
    """Show allocations.

    Every account has one without an end, which is drawn on last.
    """
    style = asked.style
    request = AccountShowRequest(names=options.split_lists(names), ended=ended)
    print_allocations(asked.call("bank.allocation_show", request), style)


def print_allocations(answer: AccountReply, style: Style, *, changed: bool = False) -> None:
    """Print the allocations of a reply."""
    if style.json:
        print_json(answer)
        return
    shown = ReplyFormatter(answer)
    columns = [
        Column("Number", lambda one: str(one.number), None, True),
        Column("Account", lambda one: one.account),
        Column("Begin", lambda one: shown.time(one.begin) if one.end else ""),
        Column("End", lambda one: shown.time(one.end)),
        Column(
            "Given",
            lambda one: shown.amount(one.given),
            lambda one: format_exact_amount(one.given),
            True,
        ),
        Column(
            "Left",
            lambda one: shown.amount(one.balance),
            lambda one: format_exact_amount(one.balance),
            True,
        ),
        Column("Rollover", lambda one: one.rollover if one.end else ""),
        Column("Note", lambda one: one.note, widest=40),
    ]
    print_table(columns, answer.allocations, style)
    if changed:
        note_gate_unaware(answer.gate_knows)


def _print_accounts(answer: AccountReply, style: Style, *, changed: bool = False) -> None:
    """Print the accounts of a reply."""
    if style.json:
        print_json(answer)
        return
    shown = ReplyFormatter(answer)
    left: dict[str, int] = {}
    for pot in answer.allocations:
        left[pot.account] = left.get(pot.account, 0) + pot.balance
    flags = {
        "draws_on_parent": "draws on parent",
        "only_listed": "listed users",
        "closed": "closed",
    }
    columns = [
        Column("Account", lambda one: one.name),
        Column("Parent", lambda one: one.parent),
        Column("Owners", lambda one: ",".join(one.owners)),
        Column(
            "Left",
            lambda one: shown.amount(left.get(one.name, 0)),
            lambda one: format_exact_amount(left.get(one.name, 0)),
            True,
        ),
        Column(
            "Credit",
            lambda one: shown.amount(one.credit),
            lambda one: format_exact_amount(one.credit),
            True,
        ),
        Column(
            "Rules",
            lambda one: ", ".join(word for name, word in flags.items() if getattr(one, name)),
        ),
        Column("Note", lambda one: one.note if one.known else "nobody created it", widest=40),
    ]
    print_table(columns, answer.accounts, style)
    if changed:
        note_gate_unaware(answer.gate_knows)


def _print_users(answer: AccountReply, style: Style, user: str = "") -> None:
    """Print the users of a reply, all or one."""
    if style.json:
        print_json(answer)
        return
    shown = ReplyFormatter(answer)
    rows = [one for one in answer.users if not user or one.user == user]
    columns = [
        Column("Account", lambda one: one.account),
        Column("User", lambda one: one.user),
        Column(
            "Limit",
            lambda one: "none" if one.limit is None else shown.amount(one.limit),
            lambda one: format_exact_amount(one.limit),
            True,
        ),
        Column(
            "Spent",
            lambda one: shown.amount(one.spent),
            lambda one: format_exact_amount(one.spent),
            True,
        ),
        Column("Listed", lambda one: "yes" if one.listed else "no"),
    ]
    print_table(columns, rows, style)
    if user:
        note_gate_unaware(answer.gate_knows)


Rollover = Annotated[
    Literal["none", "next"] | None,
    typer.Option("--rollover", help="What is left at the end expires, or goes on."),
]
Begin = Annotated[
    str,
    typer.Option("--begin", metavar="TIME", help="From when on.", callback=reject_empty),
]


@with_call
def allocation_create(
    asked: CommandCall,
    account: Account,
    amount: Amount,
    end: Annotated[
        str,
        typer.Option("--end", metavar="TIME", help="Until when.", callback=reject_empty),
    ],
    begin: Begin = "",
    rollover: Rollover = None,
    note: Note = "",
    reason: Reason = "",
    key: Key = "",
) -> None:
    """Give an account money for a time.

    Of several allocations the one that ends first is drawn on first.
    """
    style = asked.style
    request = AllocationCreateRequest(
        account=account,
        amount=money.parse_money(amount),
        begin=begin,
        end=end,
        rollover=rollover or "none",
        note=note,
        zone=find_requested_zone(),
        reason=reason,
        key=ensure_key(key),
    )
    answer: AccountReply = asked.call("bank.allocation_create", request)
    print_allocations(answer, style, changed=True)
    if not style.json and not style.parsable:
        print_line(f"Key: {request.key}")


@with_call
def allocation_change(
    asked: CommandCall,
    number: Annotated[
        int, typer.Argument(metavar="NUMBER", min=1, max=LARGEST_NUMBER, help="The allocation's.")
    ],
    begin: Begin = "",
    end: Annotated[
        str,
        typer.Option("--end", metavar="TIME", help="Until when.", callback=reject_empty),
    ] = "",
    rollover: Rollover = None,
    note: Note = "",
    reason: Reason = "",
) -> None:
    """Change an allocation's time.

    Its money is changed by deposit and withdraw, with --allocation.
    """
    style = asked.style
    if not (begin or end or rollover or note):
        raise UsageError("nothing is to be changed: give --begin, --end, --rollover or --note")
    request = AllocationChangeRequest(
        number=number,
        begin=begin or None,
        end=end or None,
        rollover=rollover,
        note=note or None,
        zone=find_requested_zone(),
        reason=reason,
    )
    answer: AccountReply = asked.call("bank.allocation_change", request)
    print_allocations(answer, style, changed=True)
