"""Bank actions for accounts, their users and allocations: create, show and change.

Request and reply types come first, then one function per action (``bank.account_create``,
``bank.user_change``, ``bank.allocation_create`` and so on), then the list ``ACTIONS`` for the
registry. Operators change accounts and allocations; owners and coordinators set their users'
limits. Amounts are micro-SU.
"""

from datetime import datetime
from functools import cached_property
from typing import Any, ClassVar, Final, Literal

from steward.bank.context import BankContext, BankReply
from steward.bank.errors import BankRefused, BankUsage
from steward.bank.ledger import Account, Allocation, Member
from steward.core.access import Caller
from steward.core.actions import Action, Request
from steward.core.layouts import Column, Layout

_OPERATOR_TASK: Final = "create or change accounts and allocations"


class AccountCreateRequest(Request, frozen=True, kw_only=True):
    """Request of bank.account_create: a new account.

    Attributes:
        name: Name; Slurm keeps it in lower case.
        parent: Name of the account above; "" for none.
        owners: Users who manage it.
        credit: Credit limit: how far below zero it may go, in micro-SU.
        draws_on_parent: Whether it has no money of its own and the account above pays.
        only_listed: Whether only users that were created in it may charge it.
        note: Description, for people.
        reason: Reason, recorded in the ledger.
    """

    name: str
    parent: str = ""
    owners: tuple[str, ...] = ()
    credit: int = 0
    draws_on_parent: bool = False
    only_listed: bool = False
    note: str = ""
    reason: str = ""


class AccountChangeRequest(Request, frozen=True, kw_only=True):
    """Request of bank.account_change: None leaves a property unchanged.

    Attributes:
        name: Name of the account.
        parent: Name of the account above; "" for none.
        owners: Users who manage it.
        credit: Credit limit, in micro-SU.
        draws_on_parent: Whether the account above pays.
        only_listed: Whether only users that were created in it may charge it.
        closed: Whether new charges are forbidden.
        note: Description, for people.
        reason: Reason, recorded in the ledger.
    """

    name: str
    parent: str | None = None
    owners: tuple[str, ...] | None = None
    credit: int | None = None
    draws_on_parent: bool | None = None
    only_listed: bool | None = None
    closed: bool | None = None
    note: str | None = None
    reason: str = ""


class AccountShowRequest(Request, frozen=True, kw_only=True):
    """Request of bank.account_show: accounts with their users and allocations.

    Attributes:
        names: Accounts to show; all that the caller may see if empty.
        ended: Whether to include allocations that have ended.
    """

    names: tuple[str, ...] = ()
    ended: bool = False


def _read_begin(allocation: Allocation, _: object) -> datetime | str:
    """Return the begin of an allocation; the first of an account has none."""
    return allocation.begin if allocation.begin.year > 1970 else "always"


def _list_rules(account: Account, _: object) -> str:
    rules = {
        "draws on parent": account.draws_on_parent,
        "listed users": account.only_listed,
        "closed": account.closed,
    }
    return ", ".join(rule for rule, applies in rules.items() if applies)


class AccountReply(BankReply, frozen=True, kw_only=True, dict=True):
    """Reply with accounts, their users and their allocations.

    Attributes:
        accounts: The accounts.
        users: Their users; in accounts the caller does not manage, only the caller.
        allocations: Their allocations.
        gate_knows: Whether the gate already applies a change; otherwise it does soon.
    """

    accounts: tuple[Account, ...] = ()
    users: tuple[Member, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    gate_knows: bool = False
    layout: ClassVar[Layout] = (
        Column("Account", "name"),
        Column("Parent", "parent"),
        Column("Owners", "owners"),
        Column("Left", lambda row, reply: reply.balances.get(row.name, 0), "money"),
        Column("Credit", "credit", "money"),
        Column("Rules", _list_rules),
        Column("Note", lambda row, _: row.note if row.known else "nobody created it", max_width=40),
    )
    user_layout: ClassVar[Layout] = (
        Column("Account", "account"),
        Column("User", "user", link="user"),
        Column(
            "Limit",
            lambda row, _: "none" if row.limit is None else row.limit,
            "money",
            exact="limit",
        ),
        Column("Spent", "spent", "money"),
        Column("Listed", "listed"),
    )
    allocation_layout: ClassVar[Layout] = (
        Column("Number", "number", right=True),
        Column("Account", "account"),
        Column("Begin", _read_begin, "time", exact=lambda row, _: row.begin if row.end else None),
        Column("End", lambda row, _: row.end or "open", "time", exact="end"),
        Column("Given", "given", "money"),
        Column("Left", "balance", "money"),
        Column("Rollover", lambda row, _: row.rollover if row.end else ""),
        Column("Note", "note", max_width=40),
    )

    @cached_property
    def balances(self) -> dict[str, int]:
        """Sum of the allocations of each account, in micro-SU."""
        balances: dict[str, int] = {}
        for item in self.allocations:
            balances[item.account] = balances.get(item.account, 0) + item.balance
        return balances


class AccountUserRequest(Request, frozen=True, kw_only=True):
    """Request of bank.user_create and bank.user_change: a user and their spending limit.

    Attributes:
        account: The account.
        user: The user's name.
        limit: Spending limit of the user in this account, in micro-SU; None for no limit.
        is_limited: Whether to set ``limit``; otherwise it stays, or there is none.
        listed: Whether the user may charge an account restricted to listed users; None leaves
            it unchanged, or means yes for a new user.
        reason: Reason, recorded in the ledger.
    """

    account: str
    user: str
    limit: int | None = None
    is_limited: bool = False
    listed: bool | None = None
    reason: str = ""


class UserShowRequest(Request, frozen=True, kw_only=True):
    """Request of bank.user_show: the accounts and spending limits of users.

    Attributes:
        users: Users to show; if both are empty the caller, or for operators everyone.
        accounts: Only in these accounts; in all if empty.
    """

    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()


class AllocationCreateRequest(Request, frozen=True, kw_only=True):
    """Request of bank.allocation_create: service units granted for a period.

    Attributes:
        account: The account that receives it.
        amount: Amount, in micro-SU.
        begin: Start of the period, as people type times; "" for now.
        end: End of the period.
        rollover: Balance at the end: it expires (``none``) or moves on (``next``).
        note: Description, for people.
        zone: IANA time zone of the times given; "" for the cluster's.
        reason: Reason, recorded in the ledger.
        key: Idempotency key chosen by the caller; "" for none.
    """

    account: str
    amount: int
    begin: str = ""
    end: str = ""
    rollover: Literal["none", "next"] = "none"
    note: str = ""
    zone: str = ""
    reason: str = ""
    key: str = ""


class AllocationChangeRequest(Request, frozen=True, kw_only=True):
    """Request of bank.allocation_change: None leaves a property unchanged.

    Attributes:
        number: Number of the allocation.
        begin: Start of the period, as people type times.
        end: End of the period.
        rollover: What happens to the balance at the end.
        note: Description, for people.
        zone: IANA time zone of the times given; "" for the cluster's.
        reason: Reason, recorded in the ledger.
    """

    number: int
    begin: str | None = None
    end: str | None = None
    rollover: Literal["none", "next"] | None = None
    note: str | None = None
    zone: str = ""
    reason: str = ""


def create_account(
    context: BankContext, caller: Caller, request: AccountCreateRequest
) -> AccountReply:
    """Create an account.

    Raises:
        BankRefused: The caller is no operator.
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
                credit=request.credit,
                draws_on_parent=request.draws_on_parent,
                only_listed=request.only_listed,
                note=request.note,
            ),
            context.make_authorship(caller, request.reason),
        )
        fields = _collect_reply_fields(t, (account,))
    return _reply_to_change(context, seq_before, **fields)


def change_account(
    context: BankContext, caller: Caller, request: AccountChangeRequest
) -> AccountReply:
    """Change an account.

    Raises:
        BankRefused: The caller is no operator.
        BankUsage: The account does not exist, or would be its own ancestor.
    """
    with context.ledger.transaction() as t:
        context.get_rights(caller, t).require_operator(_OPERATOR_TASK)
        seq_before = t.seq
        parent = request.parent if request.parent is None else request.parent.lower()
        account = t.accounts.change(
            request.name.lower(),
            context.make_authorship(caller, request.reason),
            parent=parent,
            owners=request.owners,
            credit=request.credit,
            draws_on_parent=request.draws_on_parent,
            only_listed=request.only_listed,
            closed=request.closed,
            note=request.note,
        )
        fields = _collect_reply_fields(t, (account,))
    return _reply_to_change(context, seq_before, **fields)


def show_accounts(
    context: BankContext, caller: Caller, request: AccountShowRequest
) -> AccountReply:
    """Show accounts: operators see all, others those they use or manage.

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


def change_account_user(
    context: BankContext, caller: Caller, request: AccountUserRequest
) -> AccountReply:
    """Set a user's spending limit in an account; owners and coordinators may, too.

    Raises:
        BankRefused: The caller does not manage the account.
        BankUsage: The account does not exist.
    """
    account = request.account.lower()
    if not request.user:
        raise BankUsage("name the user")
    with context.ledger.transaction() as t:
        if not context.get_rights(caller, t).is_led(account):
            raise BankRefused(f"only owners of {account} and operators may set limits", account)
        seq_before = t.seq
        bank_account = t.accounts.require(account)
        member = {candidate.user: candidate for candidate in t.accounts.list_users(account)}.get(
            request.user
        )
        limit = request.limit if request.is_limited or member is None else member.limit
        listed = request.listed
        if listed is None:
            listed = member.listed if member is not None else True
        if limit is not None and limit < 0:
            raise BankUsage("a limit is not below zero", limit)
        t.accounts.set_user(
            account,
            request.user,
            context.make_authorship(caller, request.reason),
            limit=limit,
            listed=listed,
        )
        fields = _collect_reply_fields(t, (bank_account,))
    return _reply_to_change(context, seq_before, **fields)


def create_account_user(
    context: BankContext, caller: Caller, request: AccountUserRequest
) -> AccountReply:
    """Add a user to an account; owners and coordinators may, too.

    Raises:
        BankRefused: The caller does not manage the account.
        BankUsage: The account does not exist, or the user is in it already.
    """
    with context.ledger.reading() as t:
        if context.get_rights(caller, t).is_led(request.account.lower()):
            for member in t.accounts.list_users(request.account.lower()):
                if member.user == request.user and member.listed:
                    raise BankUsage(
                        f"{member.user} is in {member.account} already: 'bank user change' "
                        "changes that",
                        member.user,
                    )
    listed = True if request.listed is None else request.listed
    values = {**_field_values(request), "listed": listed}
    return change_account_user(context, caller, AccountUserRequest(**values))


def show_account_users(
    context: BankContext, caller: Caller, request: UserShowRequest
) -> AccountReply:
    """Show the accounts of users; in accounts of others, callers see only themselves.

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


def create_allocation(
    context: BankContext, caller: Caller, request: AllocationCreateRequest
) -> AccountReply:
    """Create an allocation: grant an account service units for a period.

    Raises:
        BankRefused: The caller is no operator.
        BankUsage: The account does not exist, or the amount or a time is invalid.
    """
    if request.amount < 0:
        raise BankUsage("an allocation is not below zero", request.amount)
    begin = context.parse_moment(request.begin, request.zone)
    end = context.parse_moment(request.end, request.zone)
    if end is None:
        raise BankUsage("an allocation has an --end; 'bank deposit' gives money that has none")
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
    return _reply_to_change(context, seq_before, accounts=(account,), allocations=(allocation,))


def change_allocation(
    context: BankContext, caller: Caller, request: AllocationChangeRequest
) -> AccountReply:
    """Change the period or the rollover of an allocation.

    Raises:
        BankRefused: The caller is no operator.
        BankUsage: The allocation does not exist, or a time is invalid.
    """
    begin = context.parse_moment(request.begin or "", request.zone)
    end = context.parse_moment(request.end or "", request.zone)
    with context.ledger.transaction() as t:
        context.get_rights(caller, t).require_operator(_OPERATOR_TASK)
        seq_before = t.seq
        allocation = t.allocations.change(
            request.number,
            context.make_authorship(caller, request.reason),
            begin=begin,
            end=end,
            rollover=request.rollover,
            note=request.note,
        )
        _require_order(allocation.begin, allocation.end)
        account = t.accounts.require(allocation.account)
    return _reply_to_change(context, seq_before, accounts=(account,), allocations=(allocation,))


def _require_order(begin: datetime, end: datetime | None) -> None:
    """Reject an allocation that ends before it begins."""
    if end is not None and end <= begin:
        raise BankUsage("an allocation ends after it begins: give a later --end", end)


def _field_values(request: AccountUserRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


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


ACTIONS: Final = tuple(
    Action(
        name=f"bank.{name}", help=words, request=request, answer=AccountReply, run=run,
        role="everyone" if name.endswith("show") or name.startswith("user") else "operator",
        only_reads=name.endswith("show"),
    )
    for name, words, request, run in (
        ("account_create", "Create an account.", AccountCreateRequest, create_account),
        ("account_show", "Show accounts.", AccountShowRequest, show_accounts),
        ("account_change", "Change an account.", AccountChangeRequest, change_account),
        ("user_create", "Put a user into an account.", AccountUserRequest, create_account_user),
        ("user_show", "Show who is in which account.", UserShowRequest, show_account_users),
        ("user_change", "Set what a user may spend.", AccountUserRequest, change_account_user),
        (
            "allocation_create",
            "Give an account money for a time.",
            AllocationCreateRequest,
            create_allocation,
        ),
        ("allocation_show", "Show allocations.", AccountShowRequest, show_accounts),
        (
            "allocation_change",
            "Change an allocation's time.",
            AllocationChangeRequest,
            change_allocation,
        ),
    )
)  # fmt: skip
