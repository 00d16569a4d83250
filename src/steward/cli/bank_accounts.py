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
    ensure_key,
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
from steward.cli.output import Style, find_requested_zone, print_json, print_table
from steward.core.errors import UsageError

AccountNames = Annotated[
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
DrawsOnParent = Annotated[
    bool | None,
    typer.Option("--draws-on-parent/--pays-itself", help="Who pays: the account above, or it."),
]
OnlyListed = Annotated[
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
    call: CommandCall,
    names: AccountNames = None,
) -> None:
    """Show accounts."""
    style = call.style
    request = AccountShowRequest(names=options.split_lists(names))
    _print_accounts(call.send("bank.account_show", request), style)


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
    draws_on_parent: DrawsOnParent = None,
    only_listed: OnlyListed = None,
    note: Note = "",
    reason: Reason = "",
) -> AccountOptions:
    """Read the options that describe an account; only typed ones are passed on."""
    option_values = {
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

    fields = {
        field: value
        for field, value in option_values.items()
        if is_given(field) and value is not None
    }
    return AccountOptions(name, fields, reason)


@with_call
@with_options(_read_account_options)
def account_create(account_options: AccountOptions, call: CommandCall) -> None:
    """Create an account.

    It has a name that Slurm's accounts have, in lower case, and nothing to spend yet.
    """
    request = AccountCreateRequest(
        name=account_options.name, reason=account_options.reason, **account_options.given
    )
    _print_accounts(call.send("bank.account_create", request), call.style, is_change=True)


@with_call
@with_options(_read_account_options)
def account_change(
    account_options: AccountOptions,
    call: CommandCall,
    closed: Annotated[
        bool | None, typer.Option("--close/--reopen", help="Let nothing be charged to it any more.")
    ] = None,
) -> None:
    """Change an account.

    What is not given stays.
    """
    request = AccountChangeRequest(
        name=account_options.name,
        closed=closed,
        reason=account_options.reason,
        **account_options.given,
    )
    _print_accounts(call.send("bank.account_change", request), call.style, is_change=True)


@with_call_and_columns
def user_show(
    call: CommandCall,
    users: Annotated[
        list[str] | None, typer.Argument(metavar="USER", help="These; else all you may see.")
    ] = None,
    accounts: Annotated[
        list[str] | None,
        typer.Option("--account", "-A", metavar="NAME,…", help="In these.", callback=reject_empty),
    ] = None,
) -> None:
    """Show who is in which account."""
    style = call.style
    request = UserShowRequest(
        users=options.split_lists(users), accounts=options.split_lists(accounts)
    )
    _print_users(call.send("bank.user_show", request), style)


@with_call
def user_create(
    call: CommandCall,
    account: Account,
    user: User,
    limit: Limit = "",
    reason: Reason = "",
) -> None:
    """Put a user into an account.

    Owners of the account and its coordinators in Slurm may, too.
    """
    style = call.style
    request = _make_user_request(account, user, limit, reason)
    _print_users(call.send("bank.user_create", request), style, user)


@with_call
def user_change(
    call: CommandCall,
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
    style = call.style
    if not limit and listed is None:
        raise UsageError("nothing is to be changed: give --limit, --listed or --unlisted")
    request = _make_user_request(account, user, limit, reason, listed=listed)
    _print_users(call.send("bank.user_change", request), style, user)


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
    call: CommandCall,
    names: AccountNames = None,
    ended: Ended = False,
) -> None:
    """Show allocations.

    Every account has one without an end, which is drawn on last.
    """
    style = call.style
    request = AccountShowRequest(names=options.split_lists(names), ended=ended)
    print_allocations(call.send("bank.allocation_show", request), style)


def print_allocations(reply: AccountReply, style: Style, *, is_change: bool = False) -> None:
    """Print the allocations of a reply."""
    if style.json:
        print_json(reply)
        return
    print_table(reply.allocation_layout, reply.allocations, style, reply)
    if is_change:
        note_gate_unaware(reply.gate_knows)


def _print_accounts(reply: AccountReply, style: Style, *, is_change: bool = False) -> None:
    """Print the accounts of a reply."""
    if style.json:
        print_json(reply)
        return
    print_table(reply.layout, reply.accounts, style, reply)
    if is_change:
        note_gate_unaware(reply.gate_knows)


def _print_users(reply: AccountReply, style: Style, user: str = "") -> None:
    """Print the users of a reply, all or one."""
    if style.json:
        print_json(reply)
        return
    rows = [row for row in reply.users if not user or row.user == user]
    print_table(reply.user_layout, rows, style, reply)
    if user:
        note_gate_unaware(reply.gate_knows)


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
    call: CommandCall,
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
    style = call.style
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
    reply: AccountReply = call.send("bank.allocation_create", request)
    print_allocations(reply, style, is_change=True)
    if not style.json and not style.parsable:
        print_line(f"Key: {request.key}")


@with_call
def allocation_change(
    call: CommandCall,
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
    style = call.style
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
    reply: AccountReply = call.send("bank.allocation_change", request)
    print_allocations(reply, style, is_change=True)
