"""Bank actions for accounts, their users and allocations: create, show and change.

Request and reply types come first, then one function per action (``bank.account_create``,
``bank.user_change``, ``bank.allocation_create`` and so on), then the list ``ACTIONS`` for the
registry. Operators change accounts and allocations; owners and coordinators set their users'
limits. Amounts are micro-SU.
"""

from datetime import datetime
from typing import Any, Final, Literal

from steward.bank.context import BankContext, BankReply
from steward.bank.errors import BankRefused, BankUsage
from steward.bank.ledger import Account, Allocation, Member
from steward.core.access import Asker
from steward.core.actions import Action, Request

_OPERATORS: Final = "create or change accounts and allocations"


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


class AccountReply(BankReply, frozen=True, kw_only=True):
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


def create_account(room: BankContext, asker: Asker, request: AccountCreateRequest) -> AccountReply:
    """Create an account.

    Raises:
        BankRefused: The caller is no operator.
        BankUsage: The name is taken, or the parent does not exist.
    """
    with room.ledger.transaction() as t:
        room.rights(asker, t).need_operator(_OPERATORS)
        before = t.seq
        made = t.accounts.create(
            Account(
                name=request.name.lower(),
                parent=request.parent.lower(),
                owners=request.owners,
                credit=request.credit,
                draws_on_parent=request.draws_on_parent,
                only_listed=request.only_listed,
                note=request.note,
            ),
            room.by(asker, request.reason),
        )
        page = _account_page(t, (made,))
    return _reply_to_change(room, before, **page)


def change_account(room: BankContext, asker: Asker, request: AccountChangeRequest) -> AccountReply:
    """Change an account.

    Raises:
        BankRefused: The caller is no operator.
        BankUsage: The account does not exist, or would be its own ancestor.
    """
    with room.ledger.transaction() as t:
        room.rights(asker, t).need_operator(_OPERATORS)
        before = t.seq
        parent = request.parent if request.parent is None else request.parent.lower()
        changed = t.accounts.change(
            request.name.lower(),
            room.by(asker, request.reason),
            parent=parent,
            owners=request.owners,
            credit=request.credit,
            draws_on_parent=request.draws_on_parent,
            only_listed=request.only_listed,
            closed=request.closed,
            note=request.note,
        )
        page = _account_page(t, (changed,))
    return _reply_to_change(room, before, **page)


def show_accounts(room: BankContext, asker: Asker, request: AccountShowRequest) -> AccountReply:
    """Show accounts: operators see all, others those they use or manage.

    Raises:
        BankRefused: The caller may not see an account.
        BankUsage: An account does not exist.
    """
    with room.ledger.reading() as t:
        rights = room.rights(asker, t)
        for name in request.names:
            rights.need_sight(name.lower())
        if request.names:
            found = [t.accounts.need(name.lower()) for name in request.names]
        else:
            found = [one for one in t.accounts.all(unknown=True) if rights.sees(one.name)]
        page = _account_page(t, tuple(found), ended=request.ended)
    users = tuple(
        one for one in page["users"] if rights.leads(one.account) or one.user == rights.user
    )
    return _make_reply(room, **{**page, "users": users})


def change_account_user(
    room: BankContext, asker: Asker, request: AccountUserRequest
) -> AccountReply:
    """Set a user's spending limit in an account; owners and coordinators may, too.

    Raises:
        BankRefused: The caller does not manage the account.
        BankUsage: The account does not exist.
    """
    account = request.account.lower()
    if not request.user:
        raise BankUsage("name the user")
    with room.ledger.transaction() as t:
        if not room.rights(asker, t).leads(account):
            raise BankRefused(f"only owners of {account} and operators may set limits", account)
        before = t.seq
        found = t.accounts.need(account)
        known = {one.user: one for one in t.accounts.users(account)}.get(request.user)
        limit = request.limit if request.is_limited or known is None else known.limit
        listed = request.listed
        if listed is None:
            listed = known.listed if known is not None else True
        if limit is not None and limit < 0:
            raise BankUsage("a limit is not below zero", limit)
        t.accounts.set_user(
            account, request.user, room.by(asker, request.reason), limit=limit, listed=listed
        )
        page = _account_page(t, (found,))
    return _reply_to_change(room, before, **page)


def create_account_user(
    room: BankContext, asker: Asker, request: AccountUserRequest
) -> AccountReply:
    """Add a user to an account; owners and coordinators may, too.

    Raises:
        BankRefused: The caller does not manage the account.
        BankUsage: The account does not exist, or the user is in it already.
    """
    with room.ledger.reading() as t:
        if room.rights(asker, t).leads(request.account.lower()):
            for one in t.accounts.users(request.account.lower()):
                if one.user == request.user and one.listed:
                    raise BankUsage(
                        f"{one.user} is in {one.account} already: 'bank user change' changes that",
                        one.user,
                    )
    listed = True if request.listed is None else request.listed
    asked = {**_field_values(request), "listed": listed}
    return change_account_user(room, asker, AccountUserRequest(**asked))


def show_account_users(room: BankContext, asker: Asker, request: UserShowRequest) -> AccountReply:
    """Show the accounts of users; in accounts of others, callers see only themselves.

    Raises:
        BankRefused: The caller may not see an account.
    """
    accounts = [name.lower() for name in request.accounts]
    with room.ledger.reading() as t:
        rights = room.rights(asker, t)
        for name in accounts:
            rights.need_sight(name)
        if not accounts:
            accounts = [one.name for one in t.accounts.all(unknown=True) if rights.sees(one.name)]
        users = tuple(
            one
            for name in accounts
            for one in t.accounts.users(name)
            if (rights.leads(name) or one.user == rights.user)
            and (not request.users or one.user in request.users)
        )
    return _make_reply(room, users=users)


def create_allocation(
    room: BankContext, asker: Asker, request: AllocationCreateRequest
) -> AccountReply:
    """Create an allocation: grant an account service units for a period.

    Raises:
        BankRefused: The caller is no operator.
        BankUsage: The account does not exist, or the amount or a time is invalid.
    """
    if request.amount < 0:
        raise BankUsage("an allocation is not below zero", request.amount)
    begin = room.moment(request.begin, request.zone)
    end = room.moment(request.end, request.zone)
    if end is None:
        raise BankUsage("an allocation has an --end; 'bank deposit' gives money that has none")
    _require_order(begin or room.now(), end)
    with room.ledger.transaction() as t:
        room.rights(asker, t).need_operator(_OPERATORS)
        before = t.seq
        made = t.allocations.create(
            request.account.lower(),
            request.amount,
            room.by(asker, request.reason or "a new allocation", request.key),
            begin=begin,
            end=end,
            rollover=request.rollover,
            note=request.note,
        )
        account = t.accounts.need(made.account)
    return _reply_to_change(room, before, accounts=(account,), allocations=(made,))


def change_allocation(
    room: BankContext, asker: Asker, request: AllocationChangeRequest
) -> AccountReply:
    """Change the period or the rollover of an allocation.

    Raises:
        BankRefused: The caller is no operator.
        BankUsage: The allocation does not exist, or a time is invalid.
    """
    begin = room.moment(request.begin or "", request.zone)
    end = room.moment(request.end or "", request.zone)
    with room.ledger.transaction() as t:
        room.rights(asker, t).need_operator(_OPERATORS)
        before = t.seq
        changed = t.allocations.change(
            request.number,
            room.by(asker, request.reason),
            begin=begin,
            end=end,
            rollover=request.rollover,
            note=request.note,
        )
        _require_order(changed.begin, changed.end)
        account = t.accounts.need(changed.account)
    return _reply_to_change(room, before, accounts=(account,), allocations=(changed,))


def _require_order(begin: datetime, end: datetime | None) -> None:
    """Reject an allocation that ends before it begins."""
    if end is not None and end <= begin:
        raise BankUsage("an allocation ends after it begins: give a later --end", end)


def _field_values(request: AccountUserRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


def _account_page(t: Any, accounts: tuple[Account, ...], *, ended: bool = False) -> dict[str, Any]:
    """Collect users and allocations of accounts for a reply."""
    return {
        "accounts": accounts,
        "users": tuple(user for one in accounts for user in t.accounts.users(one.name)),
        "allocations": tuple(
            some for one in accounts for some in t.allocations.of(one.name, ended=ended)
        ),
    }


def _reply_to_change(room: BankContext, before: int, **page: Any) -> AccountReply:
    """Reply to a change, after telling the gate about it."""
    return _make_reply(room, **page, gate_knows=room.tell_gate(before))


def _make_reply(room: BankContext, **page: Any) -> AccountReply:
    """Build the reply of an action on accounts."""
    return AccountReply(**page, **room.heading())


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
