"""Bank actions for accounts, their users and allocations: create, show and change.

Request and reply types come first, then one function per action (``bank.account_create``,
``bank.user_change``, ``bank.allocation_create`` and so on). Operators change
accounts and allocations; owners and coordinators set their users' limits. Amounts are micro-SU.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec.structs import replace

from steward.bank.context import (
    NO_ACCOUNTS,
    AccountName,
    Amount,
    BankContext,
    ChangeReply,
    Key,
    Reason,
)
from steward.bank.errors import BankRefused, BankUsage
from steward.bank.ledger import Account, Allocation, Member
from steward.core.access import Caller
from steward.core.actions import Request, Zone, action, argument, described, option, route
from steward.core.layouts import Column, Layout

_OPERATOR_TASK: Final = "create or change accounts and allocations"


AccountNames = Annotated[
    tuple[str, ...], argument("Only these accounts.", "ACCOUNT", default="all that you may see")
]
UserName = Annotated[str, argument("Name of the user.", "USER")]
_PARENT = option("Parent account; '' for none.", "--parent", metavar="ACCOUNT", allows_empty=True)
_OWNERS = option(
    "Owners, who manage the account; '' for none.", "--owners", metavar="USER,…", allows_empty=True
)
_CREDIT_LIMIT = option(
    "Credit limit: amount by which the balance may go below zero.",
    "--credit-limit",
    metavar="AMOUNT",
    unit="money",
)
_PARENT_PAYS = option(
    "Account that pays: the parent, or the account itself.", "--parent-pays/--pays-itself"
)
_ONLY_LISTED = option(
    "Users who may charge the account: only its listed users, or all.", "--only-listed/--everyone"
)
_ACCOUNT_NOTE = option(
    "Description, for people; '' for none.", "--note", metavar="TEXT", allows_empty=True
)
_NOTE = option("Description, for people.", "--note", metavar="TEXT")
_BEGIN = option("Start of the period.", "--begin", metavar="TIME", default="now")
_NEW_BEGIN = option("Start of the period.", "--begin", metavar="TIME")
_END = option("End of the period.", "--end", metavar="TIME")
_ROLLOVER = option(
    "Balance at the end of the period: 'none' lets it expire, 'next' moves it to the next "
    "allocation.",
    "--rollover",
)


class AccountCreateRequest(Request, frozen=True, kw_only=True):
    """Request of bank.account_create: a new account."""

    name: AccountName
    parent: Annotated[str, _PARENT] = ""
    owners: Annotated[tuple[str, ...], _OWNERS] = ()
    credit_limit: Annotated[int, _CREDIT_LIMIT] = 0
    parent_pays: Annotated[bool, _PARENT_PAYS] = False
    only_listed: Annotated[bool, _ONLY_LISTED] = False
    note: Annotated[str, _ACCOUNT_NOTE] = ""
    reason: Reason = ""


class AccountChangeRequest(Request, frozen=True, kw_only=True):
    """Request of bank.account_change: None leaves a property unchanged."""

    name: AccountName
    parent: Annotated[str | None, _PARENT] = None
    owners: Annotated[tuple[str, ...] | None, _OWNERS] = None
    credit_limit: Annotated[int | None, _CREDIT_LIMIT] = None
    parent_pays: Annotated[bool | None, _PARENT_PAYS] = None
    only_listed: Annotated[bool | None, _ONLY_LISTED] = None
    closed: Annotated[
        bool | None,
        option(
            "Close the account to new jobs and service units, or reopen it.", "--close/--reopen"
        ),
    ] = None
    note: Annotated[str | None, _ACCOUNT_NOTE] = None
    reason: Reason = ""


class AccountShowRequest(Request, frozen=True, kw_only=True):
    """Request of bank.account_show: accounts with their users and allocations."""

    names: AccountNames = ()
    ended: Annotated[bool, described("Also include allocations that have ended.")] = False


class AllocationShowRequest(AccountShowRequest, frozen=True, kw_only=True):
    """Request of bank.allocation_show: allocations of accounts."""

    ended: Annotated[bool, option("Also list allocations that have ended.", "--ended")] = False


def _read_begin(allocation: Allocation, _: object) -> datetime | str:
    """Return the begin of an allocation; the first of an account has none."""
    return allocation.begin if allocation.begin.year > 1970 else "none"


def _list_rules(account: Account, _: object) -> str:
    rules = {
        "parent pays": account.parent_pays,
        "listed users": account.only_listed,
        "closed": account.closed,
    }
    return ", ".join(rule for rule, applies in rules.items() if applies)


class AccountReply(ChangeReply, frozen=True, kw_only=True, dict=True):
    """Reply with accounts, their users and their allocations.

    Attributes:
        accounts: The accounts.
        users: Their users; in accounts the caller does not manage, only the caller.
        allocations: Their allocations.
        key: Idempotency key of the change; "" for none.
    """

    accounts: tuple[Account, ...] = ()
    users: tuple[Member, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    key: str = ""
    layout: ClassVar[Layout] = (
        Column("Account", "name"),
        Column("Parent", "parent"),
        Column("Owners", "owners"),
        Column("Balance", lambda row, reply: reply.balances.get(row.name, 0), "money"),
        Column("CreditLimit", "credit_limit", "money", title="Credit limit"),
        Column("Rules", _list_rules),
        Column("Note", lambda row, _: row.note if row.known else "nobody created it", max_width=40),
    )
    layouts: ClassVar[Mapping[str, Layout]] = {
        "users": (
            Column("Account", "account", link="account"),
            Column("User", "user", link="user"),
            Column(
                "Limit",
                lambda row, _: "none" if row.limit is None else row.limit,
                "money",
                exact="limit",
            ),
            Column("Spent", "spent", "money"),
            Column(
                "Remaining",
                lambda row, _: None if row.limit is None else row.limit - row.spent,
                "money",
                show="pages",
            ),
            Column("Listed", "listed"),
        ),
        "allocations": (
            Column("Number", "number", right=True),
            Column("Account", "account"),
            Column(
                "Begin", _read_begin, "time", exact=lambda row, _: row.begin if row.end else None
            ),
            Column("End", lambda row, _: row.end or "none", "time", exact="end"),
            Column("Granted", "granted", "money"),
            Column("Balance", "balance", "money"),
            Column("Rollover", lambda row, _: row.rollover if row.end else ""),
            Column("Note", "note", max_width=40),
        ),
    }

    @cached_property
    def balances(self) -> dict[str, int]:
        """Sum of the allocations of each account, in micro-SU."""
        balances: dict[str, int] = {}
        for item in self.allocations:
            balances[item.account] = balances.get(item.account, 0) + item.balance
        return balances

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        return NO_ACCOUNTS

    def list_lines(self) -> Iterable[str]:
        """Return the idempotency key of the change."""
        return (f"Key: {self.key}",) if self.key else ()


class AccountUserRequest(Request, frozen=True, kw_only=True):
    """Request of bank.user_create and bank.user_change: a user and their spending limit."""

    account: AccountName
    user: UserName
    limit: Annotated[
        int | Literal["none"] | None,
        option(
            "Spending limit of the user in this account; 'none' for no limit.",
            "--limit",
            metavar="AMOUNT",
            default="unchanged; none for a new user",
            unit="money",
        ),
    ] = None
    listed: Annotated[
        bool | None,
        option(
            "Put the user on the account's list. If the account is --only-listed, only users on "
            "the list may charge it.",
            "--listed/--unlisted",
            default="unchanged; yes for a new user",
        ),
    ] = None
    reason: Reason = ""


class UserShowRequest(Request, frozen=True, kw_only=True):
    """Request of bank.user_show: the accounts and spending limits of users."""

    users: Annotated[
        tuple[str, ...],
        argument("Only these users.", "USER", default="you, or for operators all users"),
    ] = ()
    accounts: Annotated[
        tuple[str, ...],
        option("Only users of these accounts.", "--account", "-A", metavar="NAME,…"),
    ] = ()


class AllocationCreateRequest(Request, frozen=True, kw_only=True):
    """Request of bank.allocation_create: service units granted for a period."""

    account: AccountName
    amount: Amount
    begin: Annotated[str, _BEGIN] = ""
    end: Annotated[str, _END]
    rollover: Annotated[Literal["none", "next"], _ROLLOVER] = "none"
    note: Annotated[str, _NOTE] = ""
    zone: Zone = ""
    reason: Reason = ""
    key: Key = ""


class AllocationChangeRequest(Request, frozen=True, kw_only=True):
    """Request of bank.allocation_change: None leaves a property unchanged."""

    number: Annotated[int, argument("Number of the allocation.", "NUMBER", ge=1)]
    begin: Annotated[str | None, _NEW_BEGIN] = None
    end: Annotated[str | None, _END] = None
    rollover: Annotated[Literal["none", "next"] | None, _ROLLOVER] = None
    note: Annotated[str | None, _NOTE] = None
    zone: Zone = ""
    reason: Reason = ""


@action(
    "bank.account_create",
    scope="bank",
    role="operator",
    command="bank account create",
    rows="accounts",
    routes=(route("POST /accounts"),),
)
def create_account(
    context: BankContext, caller: Caller, request: AccountCreateRequest
) -> AccountReply:
    """Create an account.

    Its name is that of a Slurm account, in lower case. It has no service units yet.

    Raises:
        BankRefused: The caller is not an operator.
        BankUsage: The name is taken, or the parent does not exist.
    """
    with context.ledger.transaction() as t:
        context.get_rights(caller, t).require_operator(_OPERATOR_TASK)
        seq_before = t.seq
        account = t.accounts.create(
            Account(
                name=request.name.lower(),
                parent=request.parent.lower(),
                owners=request.owners,
                credit_limit=request.credit_limit,
                parent_pays=request.parent_pays,
                only_listed=request.only_listed,
                note=request.note,
            ),
            context.make_authorship(caller, request.reason),
        )
        fields = _collect_reply_fields(t, (account,))
    return _reply_to_change(context, seq_before, **fields)


@action(
    "bank.account_change",
    scope="bank",
    role="operator",
    command="bank account change",
    rows="accounts",
    routes=(route("PATCH /accounts/{account}", parts={"account": "name"}),),
)
def change_account(
    context: BankContext, caller: Caller, request: AccountChangeRequest
) -> AccountReply:
    """Change an account.

    Only the given properties change.

    Raises:
        BankRefused: The caller is not an operator.
        BankUsage: There is nothing to change, or the account does not exist or would be its own
            ancestor.
    """
    changes = _collect_changes(
        parent=None if request.parent is None else request.parent.lower(),
        owners=request.owners,
        credit_limit=request.credit_limit,
        parent_pays=request.parent_pays,
        only_listed=request.only_listed,
        closed=request.closed,
        note=request.note,
    )
    with context.ledger.transaction() as t:
        context.get_rights(caller, t).require_operator(_OPERATOR_TASK)
        seq_before = t.seq
        author = context.make_authorship(caller, request.reason)
        account = t.accounts.change(request.name.lower(), author, **changes)
        fields = _collect_reply_fields(t, (account,))
    return _reply_to_change(context, seq_before, **fields)


@action(
    "bank.account_show",
    scope="read",
    command="bank account show",
    rows="accounts",
    routes=(
        route("GET /accounts"),
        route("GET /accounts/{account}", parts={"account": "names"}),
    ),
    only_reads=True,
)
def show_accounts(
    context: BankContext, caller: Caller, request: AccountShowRequest
) -> AccountReply:
    """Show accounts.

    Operators see all, others those they use or manage.

    Raises:
        BankRefused: The caller may not see an account.
        BankUsage: An account does not exist.
    """
    with context.ledger.reading() as t:
        rights = context.get_rights(caller, t)
        for name in request.names:
            rights.require_balance_access(name.lower())
        if request.names:
            accounts = [t.accounts.require(name.lower()) for name in request.names]
        else:
            accounts = [
                item
                for item in t.accounts.list_all(unknown=True)
                if rights.can_see_balance(item.name)
            ]
        fields = _collect_reply_fields(t, tuple(accounts), ended=request.ended)
    users = tuple(
        item for item in fields["users"] if rights.is_led(item.account) or item.user == rights.user
    )
    return _make_reply(context, **{**fields, "users": users})


@action(
    "bank.allocation_show",
    scope="read",
    command="bank allocation show",
    rows="allocations",
    routes=(route("GET /accounts/{account}/allocations", parts={"account": "names"}),),
    only_reads=True,
)
def show_allocations(
    context: BankContext, caller: Caller, request: AllocationShowRequest
) -> AccountReply:
    """Show allocations.

    Every account has an allocation without an end. Jobs are charged to it last.

    Raises:
        BankRefused: The caller may not see an account.
        BankUsage: An account does not exist.
    """
    return show_accounts(context, caller, request)


@action(
    "bank.user_change",
    scope="bank",
    command="bank user change",
    rows="users",
    routes=(
        route(
            "PUT /accounts/{account}/users/{user}",
            "Set the spending limit of a user in an account.",
        ),
    ),
)
def change_account_user(
    context: BankContext, caller: Caller, request: AccountUserRequest
) -> AccountReply:
    """Set the spending limit of a user in an account.

    Operators, owners of the account and its coordinators in Slurm may do this.

    Raises:
        BankRefused: The caller does not manage the account.
        BankUsage: The account does not exist.
    """
    account = request.account.lower()
    if not request.user:
        raise BankUsage("no user given: name the user whose limit changes")
    if request.limit is None and request.listed is None:
        raise BankUsage("nothing to change: give `limit` or `listed`")
    with context.ledger.transaction() as t:
        if not context.get_rights(caller, t).is_led(account):
            raise BankRefused(
                f"permission denied: only owners of account {account} and operators may set limits",
                account,
            )
        seq_before = t.seq
        bank_account = t.accounts.require(account)
        member = {candidate.user: candidate for candidate in t.accounts.list_users(account)}.get(
            request.user
        )
        limit = request.limit
        if limit is None and member is not None:
            limit = member.limit
        elif limit == "none":
            limit = None
        listed = request.listed
        if listed is None:
            listed = member.listed if member is not None else True
        if limit is not None and limit < 0:
            raise BankUsage(f"invalid spending limit of user {request.user}: give 0 or more", limit)
        t.accounts.set_user(
            account,
            request.user,
            context.make_authorship(caller, request.reason),
            limit=limit,
            listed=listed,
        )
        fields = _collect_reply_fields(t, (bank_account,))
    fields["users"] = tuple(row for row in fields["users"] if row.user == request.user)
    return _reply_to_change(context, seq_before, **fields)


@action(
    "bank.user_create",
    scope="bank",
    command="bank user create",
    rows="users",
)
def create_account_user(
    context: BankContext, caller: Caller, request: AccountUserRequest
) -> AccountReply:
    """Add a user to an account.

    Operators, owners of the account and its coordinators in Slurm may do this.

    Raises:
        BankRefused: The caller does not manage the account.
        BankUsage: The account does not exist, or the user is in it already.
    """
    with context.ledger.reading() as t:
        if context.get_rights(caller, t).is_led(request.account.lower()):
            for member in t.accounts.list_users(request.account.lower()):
                if member.user == request.user and member.listed:
                    raise BankUsage(
                        f"user {member.user} is already in account {member.account}: "
                        "'steward bank user change' changes their limit",
                        member.user,
                    )
    listed = True if request.listed is None else request.listed
    return change_account_user(context, caller, replace(request, listed=listed))


@action(
    "bank.user_show",
    scope="read",
    command="bank user show",
    rows="users",
    routes=(
        route("GET /accounts/{account}/users", parts={"account": "accounts"}),
        route(
            "GET /users/{user}/accounts",
            "Show the accounts of a user and the spending limits.",
            parts={"user": "users"},
        ),
    ),
    only_reads=True,
)
def show_account_users(
    context: BankContext, caller: Caller, request: UserShowRequest
) -> AccountReply:
    """Show the users of accounts and their spending limits.

    In accounts that you do not manage, you see only yourself.

    Raises:
        BankRefused: The caller may not see an account.
    """
    accounts = [name.lower() for name in request.accounts]
    with context.ledger.reading() as t:
        rights = context.get_rights(caller, t)
        for name in accounts:
            rights.require_balance_access(name)
        if not accounts:
            accounts = [
                item.name
                for item in t.accounts.list_all(unknown=True)
                if rights.can_see_balance(item.name)
            ]
        users = tuple(
            item
            for name in accounts
            for item in t.accounts.list_users(name)
            if (rights.is_led(name) or item.user == rights.user)
            and (not request.users or item.user in request.users)
        )
    return _make_reply(context, users=users)


@action(
    "bank.allocation_create",
    scope="bank",
    role="operator",
    command="bank allocation create",
    rows="allocations",
    routes=(route("POST /accounts/{account}/allocations"),),
)
def create_allocation(
    context: BankContext, caller: Caller, request: AllocationCreateRequest
) -> AccountReply:
    """Create an allocation: service units for a period.

    Jobs are charged first to the allocation that ends first.

    Raises:
        BankRefused: The caller is not an operator.
        BankUsage: The account does not exist, or the amount or a time is invalid.
    """
    if request.amount < 0:
        raise BankUsage(
            f"invalid amount of an allocation of account {request.account}: give 0 or more",
            request.amount,
        )
    begin = context.parse_moment(request.begin, request.zone)
    end = context.parse_moment(request.end, request.zone)
    if end is None:
        raise BankUsage(
            "no end of the allocation given: set `end`. 'steward bank deposit' grants service "
            "units without an end"
        )
    _require_order(begin or context.now(), end)
    with context.ledger.transaction() as t:
        context.get_rights(caller, t).require_operator(_OPERATOR_TASK)
        seq_before = t.seq
        allocation = t.allocations.create(
            request.account.lower(),
            request.amount,
            context.make_authorship(caller, request.reason or "a new allocation", request.key),
            begin=begin,
            end=end,
            rollover=request.rollover,
            note=request.note,
        )
        account = t.accounts.require(allocation.account)
    return _reply_to_change(
        context,
        seq_before,
        accounts=(account,),
        allocations=(allocation,),
        key=request.key,
    )


@action(
    "bank.allocation_change",
    scope="bank",
    role="operator",
    command="bank allocation change",
    rows="allocations",
    routes=(route("PATCH /allocations/{allocation}", parts={"allocation": "number"}),),
)
def change_allocation(
    context: BankContext, caller: Caller, request: AllocationChangeRequest
) -> AccountReply:
    """Change the period, rollover or description of an allocation.

    Only the given properties change. To change the amount, run 'bank deposit' or
    'bank withdraw' with --allocation.

    Raises:
        BankRefused: The caller is not an operator.
        BankUsage: There is nothing to change, the allocation does not exist, or a time is invalid.
    """
    changes = _collect_changes(
        begin=context.parse_moment(request.begin or "", request.zone),
        end=context.parse_moment(request.end or "", request.zone),
        rollover=request.rollover,
        note=request.note,
    )
    with context.ledger.transaction() as t:
        context.get_rights(caller, t).require_operator(_OPERATOR_TASK)
        seq_before = t.seq
        author = context.make_authorship(caller, request.reason)
        allocation = t.allocations.change(request.number, author, **changes)
        _require_order(allocation.begin, allocation.end)
        account = t.accounts.require(allocation.account)
    return _reply_to_change(context, seq_before, accounts=(account,), allocations=(allocation,))


def _collect_changes(**properties: Any) -> dict[str, Any]:
    """Return the properties to change; None leaves a property unchanged.

    Raises:
        BankUsage: All are None.
    """
    changes = {name: value for name, value in properties.items() if value is not None}
    if not changes:
        *names, last_name = (f"`{name}`" for name in properties)
        raise BankUsage(f"nothing to change: give {', '.join(names)} or {last_name}")
    return changes


def _require_order(begin: datetime, end: datetime | None) -> None:
    """Reject an allocation that ends before it begins."""
    if end is not None and end <= begin:
        raise BankUsage(
            "invalid period of an allocation: `end` is not after its begin. Give a later `end`", end
        )


def _collect_reply_fields(
    t: Any, accounts: tuple[Account, ...], *, ended: bool = False
) -> dict[str, Any]:
    """Collect users and allocations of accounts for a reply."""
    return {
        "accounts": accounts,
        "users": tuple(
            user for account in accounts for user in t.accounts.list_users(account.name)
        ),
        "allocations": tuple(
            allocation
            for account in accounts
            for allocation in t.allocations.list_own(account.name, with_ended=ended)
        ),
    }


def _reply_to_change(context: BankContext, seq_before: int, **fields: Any) -> AccountReply:
    """Reply to a change, after telling the gate about it."""
    return _make_reply(context, **fields, gate_knows=context.update_gate(seq_before))


def _make_reply(context: BankContext, **fields: Any) -> AccountReply:
    """Build the reply of an action on accounts."""
    return AccountReply(**fields, **context.make_heading())
