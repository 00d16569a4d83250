"""Accounts and users as slurmdbd has them: what ``sacctmgr dump`` wrote, or what it answers.

Both say accounts with their parents, users in them, and coordinators, who become
owners. Limits of Slurm's are limits of what runs, not of money, and are left there.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from steward.bank.errors import BankUsage
from steward.bank.importing.plan import Plan, named
from steward.bank.ledger import Account, Member

_LINE: Final = re.compile(r"(Cluster|Parent|Account|User)\s+-\s+'?([^':]*)'?(.*)")
_FIELD: Final = re.compile(r":([A-Za-z]+)=(?:'((?:[^'\\]|\\.)*)'|([^:]*))")
ROOT: Final = "root"
"""The account at the top of Slurm's tree, which no job runs under."""


def read_dump(text: str) -> Plan:
    """The plan that a file of ``sacctmgr dump`` makes (sacctmgr(1), "Flat file dump and load").

    Raises:
        BankUsage: It is no such file.
    """
    plan = Plan()
    owners: dict[str, list[str]] = {}
    parent: str | None = None
    seen = 0
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if not found:
            raise BankUsage(f"line {number}: {line[:60]!r} is no line of sacctmgr's dump", line)
        seen += 1
        kind, name, rest = found.groups()
        fields = {key: quoted or plain for key, quoted, plain in _FIELD.findall(rest)}
        if kind == "Parent":
            parent = name.lower()
        elif kind == "Account":
            if parent is None:
                raise BankUsage(f"line {number}: an account comes behind its Parent line", line)
            add_account(plan, name, parent, fields.get("Description", ""))
        elif kind == "User":
            if parent is None:
                raise BankUsage(f"line {number}: a user comes behind a Parent line", line)
            add_user(plan, name, parent)
            for account in fields.get("Coordinator", "").split(","):
                owners.setdefault(account.strip().lower(), []).append(name)
    if not seen:
        raise BankUsage("the file is empty: 'sacctmgr dump CLUSTER file=FILE' writes one")
    add_owners(plan, owners)
    return plan


def of_associations(
    rows: Iterable[tuple[str, str, str]], coordinators: Mapping[str, Iterable[str]]
) -> Plan:
    """The plan that slurmdbd's associations make.

    Args:
        rows: Account, parent ("" in a user's) and user ("" in an account's own).
        coordinators: By account the users who coordinate it.

    Raises:
        BankUsage: A name is none.
    """
    plan = Plan()
    for account, parent, user in rows:
        if user:
            add_user(plan, user, account)
        else:
            add_account(plan, account, parent, "")
    add_owners(plan, coordinators)
    return plan


def add_account(plan: Plan, name: str, parent: str, note: str) -> None:
    """Plan an account; the tree's top is none, and what is below it has no parent."""
    own = name.lower()
    if own == ROOT:
        return
    above = parent.lower()
    plan.accounts[named(own, "an account")] = Account(
        name=own,
        parent="" if above in ("", ROOT) else named(above, "an account"),
        note="" if note == own else note,
    )


def add_user(plan: Plan, user: str, account: str) -> None:
    """Plan a user in an account; in the tree's top there are only officers."""
    own = account.lower()
    if own == ROOT or not user:
        return
    member = Member(account=named(own, "an account"), user=named(user, "a user"))
    plan.members[own, user] = member
    plan.accounts.setdefault(own, Account(name=own))


def add_owners(plan: Plan, owners: Mapping[str, Iterable[str]]) -> None:
    """Let coordinators own their accounts."""
    for account, users in owners.items():
        known = plan.accounts.get(account)
        if known is not None:
            names = tuple(dict.fromkeys(sorted(users)))
            plan.accounts[account] = msgspec.structs.replace(known, owners=names)
