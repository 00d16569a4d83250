"""A plan: what is to be in the ledger, told by a file, and how it gets there.

Whatever is there already as the plan has it is left alone, so a file can be
brought in again; money has a key made of what its line says, for the same reason.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.errors import BankUsage
from steward.bank.ledger import Account, By, Member
from steward.bank.ledger.records import Rollover, Transfer
from steward.bank.money import show
from steward.bank.records import Rate
from steward.bank.weighing import check_rate, doubts, worded

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Transaction

_DIGEST: Final = 16
_NAME: Final = re.compile(r"[^\s,|:;\"'\x00-\x1f]{1,128}")


class PlannedMoney(msgspec.Struct, frozen=True, kw_only=True):
    """An allocation, or money for an account's open-ended one.

    Attributes:
        account: Whose it is.
        amount: Micro-SU.
        begin: From when on, of an allocation; None for now.
        end: Until when; None for what goes into the open-ended one.
        rollover: What becomes of the rest.
        note: What it is, for people.
        line: Number of the file's line.
        says: What tells it from other money of the account and the same amount, as the
            file has it; part of its key, so that lines may move within the file.
    """

    account: str
    amount: int
    begin: datetime | None = None
    end: datetime | None = None
    rollover: Rollover = "none"
    note: str = ""
    line: str = ""
    says: str = ""


class Plan(msgspec.Struct, kw_only=True):
    """What is to be in the ledger.

    Attributes:
        accounts: By name, parents anywhere among them.
        members: Users in accounts.
        money: Allocations and deposits.
        rates: What jobs cost.
        remarks: What of the file was passed over, and why.
    """

    accounts: dict[str, Account] = msgspec.field(default_factory=dict)
    members: dict[tuple[str, str], Member] = msgspec.field(default_factory=dict)
    money: list[PlannedMoney] = msgspec.field(default_factory=list)
    rates: list[Rate] = msgspec.field(default_factory=list)
    remarks: list[str] = msgspec.field(default_factory=list)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that an import does.

    Attributes:
        what: ``account``, ``user``, ``allocation``, ``deposit`` or ``rate``.
        name: Which one.
        how: ``create``, ``change`` or ``keep``.
        detail: What is new about it.
        amount: Micro-SU; None for what is no money.
    """

    what: str
    name: str
    how: str
    detail: str = ""
    amount: int | None = None


def named(name: str, what: str) -> str:
    """A name that Slurm could have.

    Raises:
        BankUsage: It could not.
    """
    if not _NAME.fullmatch(name):
        raise BankUsage(f"{name!r} is no name of {what}", name)
    return name


def carry_out(t: "Transaction", plan: Plan, by: By) -> list[Change]:
    """Bring a plan into the ledger; what is there already stays.

    Args:
        t: A transaction of the ledger; a dry run rolls it back.
        plan: What is to be there.
        by: Who does it, and the name of the file in ``key``.

    Returns:
        What was done, in order.

    Raises:
        BankUsage: A parent is unknown, accounts are each other's parents, money that the file
            gave before is another now, or a rate is none.
    """
    for rate in plan.rates:
        check_rate(rate)
        plan.remarks += doubts(t, rate)
    done = [_account(t, one, by) for one in _parents_first(t, plan)]
    done += [_member(t, one, by) for one in plan.members.values()]
    money = _keyed(plan.money, by)
    _no_contradiction(t, plan, money, by)
    done += [_money(t, one, key, by) for key, one in money.items()]
    done += [_rate(t, one, by) for one in plan.rates]
    return done


def _parents_first(t: "Transaction", plan: Plan) -> list[Account]:
    left = dict(plan.accounts)
    done: dict[str, Account] = {}
    while left:
        ready = [
            name
            for name, one in left.items()
            if not one.parent or one.parent in done or one.parent not in left
        ]
        if not ready:
            raise BankUsage(f"accounts are each other's parents: {', '.join(sorted(left))}")
        for name in ready:
            one = left.pop(name)
            unknown = one.parent and one.parent not in plan.accounts
            if unknown and t.accounts.get(one.parent) is None:
                raise BankUsage(f"{name}: there is no parent {one.parent!r}", name)
            done[name] = one
    return list(done.values())


def _account(t: "Transaction", wanted: Account, by: By) -> Change:
    known = t.accounts.get(wanted.name)
    own = By(who=by.who, why=by.why, at=by.at)
    if known is None or not known.known:
        t.accounts.create(wanted, own)
        return Change(what="account", name=wanted.name, how="create", detail=_said(wanted))
    # A file that says nothing of these leaves what was set here.
    merged = msgspec.structs.replace(
        known,
        parent=wanted.parent or known.parent,
        owners=tuple(dict.fromkeys((*known.owners, *wanted.owners))),
        credit=wanted.credit or known.credit,
        draws_on_parent=wanted.draws_on_parent or known.draws_on_parent,
        only_listed=wanted.only_listed or known.only_listed,
        note=known.note or wanted.note,
    )
    new = [
        name for name in known.__struct_fields__ if getattr(known, name) != getattr(merged, name)
    ]
    if not new:
        return Change(what="account", name=wanted.name, how="keep")
    changed = t.accounts.change(
        wanted.name,
        own,
        parent=merged.parent,
        owners=merged.owners,
        credit=merged.credit,
        draws_on_parent=merged.draws_on_parent,
        only_listed=merged.only_listed,
        note=merged.note,
    )
    return Change(
        what="account", name=wanted.name, how="change", detail=f"{', '.join(new)}: {_said(changed)}"
    )


def _said(one: Account) -> str:
    parts = [f"below {one.parent}" if one.parent else "", ", ".join(one.owners)]
    parts.append("draws on its parent" if one.draws_on_parent else "")
    parts.append("only listed users" if one.only_listed else "")
    return "; ".join(part for part in parts if part)


def _member(t: "Transaction", wanted: Member, by: By) -> Change:
    name = f"{wanted.user} in {wanted.account}"
    known = {one.user: one for one in t.accounts.users(wanted.account)}.get(wanted.user)
    limit = wanted.limit if wanted.limit is not None or known is None else known.limit
    if known is not None and known.listed and known.limit == limit:
        return Change(what="user", name=name, how="keep")
    own = By(who=by.who, why=by.why, at=by.at)
    t.accounts.set_user(wanted.account, wanted.user, own, limit=limit, listed=True)
    how = "change" if known is not None and known.listed else "create"
    return Change(what="user", name=name, how=how, amount=limit)


def _keyed(wanted: Iterable[PlannedMoney], by: By) -> dict[str, PlannedMoney]:
    """Money under its key: the account, the amount, a digest of the rest, and which of its like."""
    seen: Counter[str] = Counter()
    found = {}
    for one in wanted:
        digest = hashlib.sha256(one.says.encode("utf-8", "replace")).hexdigest()[:_DIGEST]
        same = f"{by.key}/{one.account}/{one.amount}/{digest}"
        seen[same] += 1
        found[f"{same}/{seen[same]}"] = one
    return found


def _no_contradiction(
    t: "Transaction", plan: Plan, money: Mapping[str, PlannedMoney], by: By
) -> None:
    """Refuse a line that may be an old one that was changed: its money would be given twice.

    Raises:
        BankUsage: An account gets something new, and something that the file gave it before
            is not in the file any more, though it has not ended.
    """
    accounts = {one.account for one in plan.money} | set(plan.accounts)
    gone: dict[str, Transfer] = {}
    left_out = 0
    known = set()
    for made in t.transfers.keyed(f"{by.key}/"):
        account, *rest = made.key.removeprefix(f"{by.key}/").rsplit("/", 3)
        if len(rest) != 3 or account != made.account:
            continue  # of a file whose name begins with this one's
        known.add(made.key)
        if made.key in money:
            continue
        left_out += 1
        if account in accounts and _is_open(t, made, by):
            gone.setdefault(account, made)
    for key, one in money.items():
        former = gone.get(one.account)
        if former is not None and key not in known:
            raise BankUsage(
                f"line {one.line}: {one.account} gets {show(one.amount)} that is new, and "
                f"{show(former.amount)} that this file gave it on {former.at:%Y-%m-%d} is not in "
                "it any more: change what was given by 'steward bank', and bring in what is new "
                "by a file of another name",
                one.account,
            )
    if left_out:
        plan.remarks.append(
            f"amounts that this file gave before and has no more, which stay: {left_out}"
        )


def _is_open(t: "Transaction", made: Transfer, by: By) -> bool:
    """Whether money that was given has not ended."""
    numbers = {entry.allocation for entry in made.entries if entry.allocation}
    found = [t.allocations.get(number) for number in numbers]
    return any(
        one is not None and (one.end is None or by.at is None or one.end > by.at) for one in found
    )


def _money(t: "Transaction", wanted: PlannedMoney, key: str, by: By) -> Change:
    own = By(who=by.who, why=wanted.note or by.why, key=key, at=by.at)
    what = "deposit" if wanted.end is None else "allocation"
    if t.transfers.by_key(key) is not None:
        return Change(what=what, name=wanted.account, how="keep", amount=wanted.amount)
    if wanted.end is None:
        t.transfers.deposit(wanted.account, wanted.amount, own)
    else:
        begin = wanted.begin or by.at
        if begin is None:
            raise BankUsage(f"{wanted.account}: say when the allocation begins", wanted.account)
        t.allocations.create(
            wanted.account,
            wanted.amount,
            own,
            begin=begin,
            end=wanted.end,
            rollover=wanted.rollover,
            note=wanted.note,
        )
    end = f"until {wanted.end:%Y-%m-%dT%H:%M:%SZ}" if wanted.end else ""
    return Change(what=what, name=wanted.account, how="create", detail=end, amount=wanted.amount)


def _rate(t: "Transaction", wanted: Rate, by: By) -> Change:
    name = f"{wanted.cluster} {wanted.partition}"
    for one in t.rates.all(wanted.cluster):
        if _same(one, wanted):
            return Change(what="rate", name=name, how="keep", detail=worded(wanted))
    t.rates.add(wanted, By(who=by.who, why=by.why, at=by.at))
    return Change(what="rate", name=name, how="create", detail=worded(wanted))


def _same(one: Rate, other: Rate) -> bool:
    """Whether two rates say the same, whatever their number and beginning."""
    ours = {"number": 0, "valid_from": None, "created_us": 0}
    plain = msgspec.structs.replace(one, **ours)
    return plain == msgspec.structs.replace(other, **ours)
