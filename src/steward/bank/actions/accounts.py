"""The actions about accounts, their users, and their allocations: create, show, change."""

from datetime import datetime
from typing import Any, Final, Literal

from steward.bank.context import BankAnswer, BankRoom
from steward.bank.errors import BankRefused, BankUsage
from steward.bank.ledger import Account, Allocation, Member
from steward.core.access import Asker
from steward.core.actions import Action, Request

_OPERATORS: Final = "create or change accounts and allocations"


class AccountCreateRequest(Request, frozen=True, kw_only=True):
    """bank.account_create: a new account.

    Attributes:
        name: Its name, which Slurm has in lower case.
        parent: The account above; "" for none.
        owners: Users who look after it.
        credit: What it may owe, micro-SU.
        draws_on_parent: Whether it has no money of its own, but the account above pays.
        only_listed: Whether only users that were created in it may charge it.
        note: What it is, for people.
        reason: Why, for the books.
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
    """bank.account_change: what is None stays; the others as for a new one.

    Attributes:
        name: Its name.
        parent: The account above; "" for none.
        owners: Users who look after it.
        credit: What it may owe, micro-SU.
        draws_on_parent: Whether the account above pays.
        only_listed: Whether only users that were created in it may charge it.
        closed: Whether nothing may be charged to it any more.
        note: What it is, for people.
        reason: Why, for the books.
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
    """bank.account_show: accounts with their users and allocations.

    Attributes:
        names: These; all that the asker sees if empty.
        ended: Whether allocations that have ended are wanted, too.
    """

    names: tuple[str, ...] = ()
    ended: bool = False


class AccountPage(BankAnswer, frozen=True, kw_only=True):
    """Accounts, each with what belongs to it.

    Attributes:
        accounts: The accounts.
        users: Users in them; of others' accounts the asker alone.
        allocations: Their allocations.
        gate_knows: Whether the gate reckons with a change already; it is told soon otherwise.
    """

    accounts: tuple[Account, ...] = ()
    users: tuple[Member, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    gate_knows: bool = False


class UserRequest(Request, frozen=True, kw_only=True):
    """bank.user_create, bank.user_change: a user in an account, and what they may spend.

    Attributes:
        account: The account.
        user: The user's name.
        limit: Micro-SU that the user may spend of it; None for no limit.
        is_limited: Whether ``limit`` is meant; else it stays, or there is none.
        listed: Whether the user may charge an account that only listed users may; None to
            leave that, or yes for a new one.
        reason: Why, for the books.
    """

    account: str
    user: str
    limit: int | None = None
    is_limited: bool = False
    listed: bool | None = None
    reason: str = ""


class UserShowRequest(Request, frozen=True, kw_only=True):
    """bank.user_show: in which accounts users are, and what they may spend.

    Attributes:
        users: These; the asker if both are empty, or for operators all.
        accounts: In these accounts; in all if empty.
    """

    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()


class AllocationCreateRequest(Request, frozen=True, kw_only=True):
    """bank.allocation_create: money that can be drawn on for a time.

    Attributes:
        account: Whose it is.
        amount: Micro-SU.
        begin: From when on, as people type times; "" for now.
        end: Until when.
        rollover: What becomes of the rest: it expires (``none``) or goes on (``next``).
        note: What it is, for people.
        zone: IANA name of the zone that times are meant in; "" for the cluster's.
        reason: Why, for the books.
        key: The caller's name for it; "" for none.
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
    """bank.allocation_change: what is None stays.

    Attributes:
        number: Its number.
        begin: From when on, as people type times.
        end: Until when.
        rollover: What becomes of the rest.
        note: What it is, for people.
        zone: IANA name of the zone that times are meant in; "" for the cluster's.
        reason: Why, for the books.
    """

    number: int
    begin: str | None = None
    end: str | None = None
    rollover: Literal["none", "next"] | None = None
    note: str | None = None
    zone: str = ""
    reason: str = ""


def account_create(room: BankRoom, asker: Asker, request: AccountCreateRequest) -> AccountPage:
    """Create an account.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: There is one of that name, or no such parent.
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
        page = _page(t, (made,))
    return _done(room, before, **page)


def account_change(room: BankRoom, asker: Asker, request: AccountChangeRequest) -> AccountPage:
    """Change an account.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: There is no such account, or it would be its own parent.
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
        page = _page(t, (changed,))
    return _done(room, before, **page)


def account_show(room: BankRoom, asker: Asker, request: AccountShowRequest) -> AccountPage:
    """Show accounts: operators all, others those that they are in or look after.

    Raises:
        BankRefused: The asker is in no such account.
        BankUsage: There is none.
    """
    with room.ledger.reading() as t:
        rights = room.rights(asker, t)
        for name in request.names:
            rights.need_sight(name.lower())
        if request.names:
            found = [t.accounts.need(name.lower()) for name in request.names]
        else:
            found = [one for one in t.accounts.all(unknown=True) if rights.sees(one.name)]
        page = _page(t, tuple(found), ended=request.ended)
    users = tuple(
        one for one in page["users"] if rights.leads(one.account) or one.user == rights.user
    )
    return _answer(room, **{**page, "users": users})


def user_change(room: BankRoom, asker: Asker, request: UserRequest) -> AccountPage:
    """Set what a user may spend of an account; owners and coordinators may as well.

    Raises:
        BankRefused: The asker does not look after the account.
        BankUsage: There is no such account.
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
        page = _page(t, (found,))
    return _done(room, before, **page)


def user_create(room: BankRoom, asker: Asker, request: UserRequest) -> AccountPage:
    """Put a user into an account; raises as :func:`user_change`, and where they are in it."""
    with room.ledger.reading() as t:
        if room.rights(asker, t).leads(request.account.lower()):
            for one in t.accounts.users(request.account.lower()):
                if one.user == request.user and one.listed:
                    raise BankUsage(
                        f"{one.user} is in {one.account} already: 'bank user change' changes that",
                        one.user,
                    )
    listed = True if request.listed is None else request.listed
    asked = {**_fields(request), "listed": listed}
    return user_change(room, asker, UserRequest(**asked))


def user_show(room: BankRoom, asker: Asker, request: UserShowRequest) -> AccountPage:
    """Show which accounts users are in; of others' accounts the asker is shown alone.

    Raises:
        BankRefused: The asker is in no such account.
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
    return _answer(room, users=users)


def allocation_create(
    room: BankRoom, asker: Asker, request: AllocationCreateRequest
) -> AccountPage:
    """Give an account money that can be drawn on for a time.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: There is no such account, no amount, or no such time.
    """
    if request.amount < 0:
        raise BankUsage("an allocation is not below zero", request.amount)
    begin = room.moment(request.begin, request.zone)
    end = room.moment(request.end, request.zone)
    if end is None:
        raise BankUsage("an allocation has an --end; 'bank deposit' gives money that has none")
    _in_order(begin or room.now(), end)
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
    return _done(room, before, accounts=(account,), allocations=(made,))


def allocation_change(
    room: BankRoom, asker: Asker, request: AllocationChangeRequest
) -> AccountPage:
    """Change when an allocation begins or ends, or what becomes of its rest.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: There is no such allocation, or no such time.
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
        _in_order(changed.begin, changed.end)
        account = t.accounts.need(changed.account)
    return _done(room, before, accounts=(account,), allocations=(changed,))


def _in_order(begin: datetime, end: datetime | None) -> None:
    if end is not None and end <= begin:
        raise BankUsage("an allocation ends after it begins: give a later --end", end)


def _fields(request: UserRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


def _page(t: Any, accounts: tuple[Account, ...], *, ended: bool = False) -> dict[str, Any]:
    return {
        "accounts": accounts,
        "users": tuple(user for one in accounts for user in t.accounts.users(one.name)),
        "allocations": tuple(
            some for one in accounts for some in t.allocations.of(one.name, ended=ended)
        ),
    }


def _done(room: BankRoom, before: int, **page: Any) -> AccountPage:
    """The answer after a change, which the gate is told of."""
    return _answer(room, **page, gate_knows=room.tell_gate(before))


def _answer(room: BankRoom, **page: Any) -> AccountPage:
    return AccountPage(**page, **room.heading())


ACTIONS: Final = tuple(
    Action(
        name=f"bank.{name}", help=words, request=request, answer=AccountPage, run=run,
        role="everyone" if name.endswith("show") or name.startswith("user") else "operator",
        only_reads=name.endswith("show"),
    )
    for name, words, request, run in (
        ("account_create", "Create an account.", AccountCreateRequest, account_create),
        ("account_show", "Show accounts.", AccountShowRequest, account_show),
        ("account_change", "Change an account.", AccountChangeRequest, account_change),
        ("user_create", "Put a user into an account.", UserRequest, user_create),
        ("user_show", "Show who is in which account.", UserShowRequest, user_show),
        ("user_change", "Set what a user may spend.", UserRequest, user_change),
        (
            "allocation_create",
            "Give an account money for a time.",
            AllocationCreateRequest,
            allocation_create,
        ),
        ("allocation_show", "Show allocations.", AccountShowRequest, account_show),
        (
            "allocation_change",
            "Change an allocation's time.",
            AllocationChangeRequest,
            allocation_change,
        ),
    )
)  # fmt: skip
