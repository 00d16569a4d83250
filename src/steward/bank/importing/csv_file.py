"""Accounts, users and money from a table with commas: what a spreadsheet writes.

The first line names the columns, in any order; ``account`` is there, the others may be::

    account, parent, owners, credit, draws_on_parent, only_listed, note,
    user, limit, amount, begin, end, rollover

A line with a ``user`` puts that user into the account, one with an ``amount`` gives
it an allocation (where there is an ``end``) or a deposit; all may be on one line.
"""

import csv
import io
from collections.abc import Callable
from datetime import datetime
from typing import Final

import msgspec

from steward.bank import money
from steward.bank.errors import BankUsage
from steward.bank.importing.plan import Plan, PlannedMoney, named
from steward.bank.ledger import Account, Member

COLUMNS: Final = (
    *("account", "parent", "owners", "credit", "draws_on_parent", "only_listed", "note"),
    *("user", "limit", "amount", "begin", "end", "rollover"),
)
_YES: Final = frozenset({"1", "yes", "true", "y"})
_NO: Final = frozenset({"", "0", "no", "false", "n"})

Moment = Callable[[str], datetime | None]
"""The moment that a text means; None for ""."""


def read(text: str, moment: Moment) -> Plan:
    """The plan that a table makes.

    Args:
        text: The table.
        moment: Reads times.

    Raises:
        BankUsage: A line cannot be understood; it is named by its number.
    """
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    plan = Plan()
    heads: list[str] = []
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if not any(cells) or cells[0].startswith("#"):
                continue
            if not heads:
                heads = _heads(cells)
                continue
            _line(plan, _fields(heads, cells), moment, str(reader.line_num))
    except csv.Error as error:
        raise BankUsage(f"line {reader.line_num}: {error}", text) from error
    except BankUsage as error:
        raise BankUsage(f"line {reader.line_num}: {error}", error.offender) from error
    if not heads:
        raise BankUsage("the table is empty: its first line names the columns")
    return plan


def _heads(cells: list[str]) -> list[str]:
    heads = [cell.lower().replace(" ", "_") for cell in cells]
    unknown = [name for name in heads if name not in COLUMNS]
    if unknown:
        raise BankUsage(f"there is no column {unknown[0]!r}: the columns are {', '.join(COLUMNS)}")
    if "account" not in heads:
        raise BankUsage("there is no column 'account'")
    if len(set(heads)) < len(heads):
        raise BankUsage("a column is there twice")
    return heads


def _fields(heads: list[str], cells: list[str]) -> dict[str, str]:
    if any(cells[len(heads) :]):
        raise BankUsage(f"there are {len(cells)} fields, but {len(heads)} columns")
    return dict(zip(heads, cells, strict=False))


def _line(plan: Plan, fields: dict[str, str], moment: Moment, number: str) -> None:
    account = named(fields.get("account", "").lower(), "an account")
    _account(plan, account, fields)
    user = fields.get("user", "")
    limit = fields.get("limit", "")
    if user:
        member = Member(
            account=account,
            user=named(user, "a user"),
            limit=money.parse(limit) if limit else None,
        )
        plan.members[account, user] = member
    elif limit:
        raise BankUsage("a limit is a user's: name the user")
    _money(plan, account, fields, moment, number)


def _account(plan: Plan, name: str, fields: dict[str, str]) -> None:
    """Take in what a line says of its account; what it leaves empty another may have said."""
    known = plan.accounts.get(name) or Account(name=name)
    parent = fields.get("parent", "").lower()
    owners = tuple(
        named(one, "a user") for one in fields.get("owners", "").replace(",", " ").split()
    )
    credit = fields.get("credit", "")
    plan.accounts[name] = msgspec.structs.replace(
        known,
        parent=named(parent, "an account") if parent else known.parent,
        owners=tuple(dict.fromkeys((*known.owners, *owners))),
        credit=money.parse(credit) if credit else known.credit,
        draws_on_parent=_yes(fields, "draws_on_parent") or known.draws_on_parent,
        only_listed=_yes(fields, "only_listed") or known.only_listed,
        note=fields.get("note", "") or known.note,
    )


def _money(plan: Plan, account: str, fields: dict[str, str], moment: Moment, number: str) -> None:
    amount = fields.get("amount", "")
    if not amount:
        if any(fields.get(name) for name in ("begin", "end", "rollover")):
            raise BankUsage("an allocation has an amount")
        return
    if not fields.get("end") and (fields.get("begin") or fields.get("rollover")):
        raise BankUsage("an allocation has an end")
    rollover = fields.get("rollover", "").lower() or "none"
    if rollover not in ("none", "next"):
        raise BankUsage(f"rollover is none or next, not {rollover!r}")
    note = fields.get("note", "")
    plan.money.append(
        PlannedMoney(
            account=account,
            amount=_positive(money.parse(amount)),
            begin=moment(fields.get("begin", "")),
            end=moment(fields.get("end", "")),
            rollover="next" if rollover == "next" else "none",
            note=note,
            line=number,
            # As it is written: "now+1year" is the same line tomorrow.
            says="\0".join((fields.get("begin", ""), fields.get("end", ""), rollover, note)),
        )
    )


def _positive(amount: int) -> int:
    if amount <= 0:
        raise BankUsage("an amount is above zero", amount)
    return amount


def _yes(fields: dict[str, str], name: str) -> bool:
    said = fields.get(name, "").lower()
    if said not in _YES | _NO:
        raise BankUsage(f"{name} is yes or no, not {said!r}")
    return said in _YES
