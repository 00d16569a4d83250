"""Bank imports: read accounts, users, money and rates from files into a plan, and apply it.

- :class:`ImportPlan`, :func:`apply_plan`: the wanted contents, and their transfer to the ledger.
- :func:`read_bank_config`: ``bank-config.toml`` of slurm-banking-plugins (rates).
- :func:`read_csv`: a table of accounts, users and allocations; see ``COLUMNS``.
- :func:`read_dump`, :func:`read_associations`: accounts and users from ``sacctmgr dump``, or from
  slurmdbd. Slurm's own limits are not imported: they limit what runs, not money.

``steward.bank.actions.maintenance`` calls one reader, then :func:`apply_plan`. Imports are
repeatable: existing entries stay, and money has an idempotency key made from the contents of
its line.
"""

import csv
import hashlib
import io
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steward.bank import money
from steward.bank.errors import BankUsage
from steward.bank.ledger import Account, Authorship, Member
from steward.bank.ledger.records import Rollover, Transfer
from steward.bank.money import format_money
from steward.bank.rate_validation import check_rate, format_rate, list_rate_warnings
from steward.bank.records import Rate

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Transaction


_DIGEST_LENGTH: Final = 16
"""Length of the digest in idempotency keys, in hexadecimal digits."""
_NAME: Final = re.compile(r"[^\s,|:;\"'\x00-\x1f]{1,128}")
"""Names of accounts, users, partitions and QOS."""


class PlannedMoney(msgspec.Struct, frozen=True, kw_only=True):
    """Planned allocation, or deposit into an account's open-ended allocation.

    Attributes:
        account: The account.
        amount: Amount, in micro-SU.
        begin: Start of an allocation; None for now.
        end: End of an allocation; None for a deposit into the open-ended one.
        rollover: What happens to the balance at the end.
        note: Description, for people.
        line: Line number in the file.
        key_text: Remaining cells of the line as written; part of the idempotency key, so that
            lines may move within the file.
    """

    account: str
    amount: int
    begin: datetime | None = None
    end: datetime | None = None
    rollover: Rollover = "none"
    note: str = ""
    line: str = ""
    key_text: str = ""


class ImportPlan(msgspec.Struct, kw_only=True):
    """Wanted contents of the ledger.

    Attributes:
        accounts: Accounts by name; parents may come in any order.
        members: Users in accounts.
        money: Allocations and deposits.
        rates: Rates of partitions.
        remarks: Parts of the file that were skipped, and why.
    """

    accounts: dict[str, Account] = msgspec.field(default_factory=dict)
    members: dict[tuple[str, str], Member] = msgspec.field(default_factory=dict)
    money: list[PlannedMoney] = msgspec.field(default_factory=list)
    rates: list[Rate] = msgspec.field(default_factory=list)
    remarks: list[str] = msgspec.field(default_factory=list)


class ImportChange(msgspec.Struct, frozen=True, kw_only=True):
    """Change made by an import.

    Attributes:
        object: ``account``, ``user``, ``allocation``, ``deposit`` or ``rate``.
        name: Name of the object.
        change: ``create``, ``change`` or ``keep``.
        detail: The new properties.
        amount: Amount in micro-SU; None if it is not about money.
    """

    object: str
    name: str
    change: str
    detail: str = ""
    amount: int | None = None


def validate_name(name: str, what: str) -> str:
    """Return the name if Slurm could have it.

    Raises:
        BankUsage: The name is invalid.
    """
    if not _NAME.fullmatch(name):
        raise BankUsage(
            f"invalid name of {what}: {name!r}. Names have 1 to 128 characters, and no spaces, "
            "quotes, commas, colons, semicolons or |",
            name,
        )
    return name


def apply_plan(t: "Transaction", plan: ImportPlan, author: Authorship) -> list[ImportChange]:
    """Apply a plan to the ledger; existing entries stay.

    Args:
        t: Transaction of the ledger; a dry run rolls it back.
        plan: The wanted contents.
        author: Author; its ``key`` is the name of the file.

    Returns:
        The changes made, in order.

    Raises:
        BankUsage: A parent is unknown, parents form a cycle, money from an earlier import has
            changed in the file, or a rate is invalid.
    """
    for rate in plan.rates:
        check_rate(rate)
        plan.remarks += list_rate_warnings(t, rate)
    changes = [_apply_account(t, planned, author) for planned in _sort_parents_first(t, plan)]
    changes += [_apply_member(t, planned, author) for planned in plan.members.values()]
    money_by_key = _index_by_key(plan.money, author)
    _reject_changed_lines(t, plan, money_by_key, author)
    changes += [_apply_money(t, planned, key, author) for key, planned in money_by_key.items()]
    changes += [_apply_rate(t, planned, author) for planned in plan.rates]
    return changes


def _sort_parents_first(t: "Transaction", plan: ImportPlan) -> list[Account]:
    """Sort the planned accounts so that parents come before their children."""
    remaining = dict(plan.accounts)
    ordered: dict[str, Account] = {}
    while remaining:
        ready = [
            name
            for name, account in remaining.items()
            if not account.parent or account.parent in ordered or account.parent not in remaining
        ]
        if not ready:
            raise BankUsage(f"accounts form a cycle of parents: {', '.join(sorted(remaining))}")
        for name in ready:
            account = remaining.pop(name)
            unknown = account.parent and account.parent not in plan.accounts
            if unknown and t.accounts.get(account.parent) is None:
                raise BankUsage(
                    f"unknown parent {account.parent!r} of account {name}: list it in the "
                    "file, or create it",
                    name,
                )
            ordered[name] = account
    return list(ordered.values())


def _apply_account(t: "Transaction", planned: Account, author: Authorship) -> ImportChange:
    """Create or change an account as planned; existing properties stay."""
    existing = t.accounts.get(planned.name)
    authorship = Authorship(who=author.who, why=author.why, at=author.at)
    if existing is None or not existing.known:
        t.accounts.create(planned, authorship)
        return ImportChange(
            object="account", name=planned.name, change="create", detail=_describe_account(planned)
        )
    # Properties missing from the file keep their values in the ledger.
    merged = msgspec.structs.replace(
        existing,
        parent=planned.parent or existing.parent,
        owners=tuple(dict.fromkeys((*existing.owners, *planned.owners))),
        credit_limit=planned.credit_limit or existing.credit_limit,
        parent_pays=planned.parent_pays or existing.parent_pays,
        only_listed=planned.only_listed or existing.only_listed,
        note=existing.note or planned.note,
    )
    changed_fields = [
        name
        for name in existing.__struct_fields__
        if getattr(existing, name) != getattr(merged, name)
    ]
    if not changed_fields:
        return ImportChange(object="account", name=planned.name, change="keep")
    changed = t.accounts.change(
        planned.name,
        authorship,
        parent=merged.parent,
        owners=merged.owners,
        credit_limit=merged.credit_limit,
        parent_pays=merged.parent_pays,
        only_listed=merged.only_listed,
        note=merged.note,
    )
    return ImportChange(
        object="account",
        name=planned.name,
        change="change",
        detail=f"{', '.join(changed_fields)}: {_describe_account(changed)}",
    )


def _describe_account(account: Account) -> str:
    """Describe the properties of an account in a phrase."""
    parts = [f"below {account.parent}" if account.parent else "", ", ".join(account.owners)]
    parts.append("parent pays" if account.parent_pays else "")
    parts.append("only listed users" if account.only_listed else "")
    return "; ".join(part for part in parts if part)


def _apply_member(t: "Transaction", planned: Member, author: Authorship) -> ImportChange:
    """Add a planned user to an account, or change their limit."""
    name = f"{planned.user} in {planned.account}"
    existing = {member.user: member for member in t.accounts.list_users(planned.account)}.get(
        planned.user
    )
    limit = planned.limit if planned.limit is not None or existing is None else existing.limit
    if existing is not None and existing.listed and existing.limit == limit:
        return ImportChange(object="user", name=name, change="keep")
    authorship = Authorship(who=author.who, why=author.why, at=author.at)
    t.accounts.set_user(planned.account, planned.user, authorship, limit=limit, listed=True)
    how = "change" if existing is not None and existing.listed else "create"
    return ImportChange(object="user", name=name, change=how, amount=limit)


def _index_by_key(
    planned_money: Iterable[PlannedMoney], author: Authorship
) -> dict[str, PlannedMoney]:
    """Index money by idempotency key: account, amount, digest of the rest, counter."""
    counts: Counter[str] = Counter()
    by_key = {}
    for planned in planned_money:
        digest = hashlib.sha256(planned.key_text.encode("utf-8", "replace")).hexdigest()[
            :_DIGEST_LENGTH
        ]
        key_prefix = f"{author.key}/{planned.account}/{planned.amount}/{digest}"
        counts[key_prefix] += 1
        by_key[f"{key_prefix}/{counts[key_prefix]}"] = planned
    return by_key


def _reject_changed_lines(
    t: "Transaction", plan: ImportPlan, money_by_key: Mapping[str, PlannedMoney], author: Authorship
) -> None:
    """Reject a line that may be a changed old line: its money would be given twice.

    Raises:
        BankUsage: An account gets new money, and earlier money from this file that has not
            ended is missing from the file.
    """
    accounts = {planned.account for planned in plan.money} | set(plan.accounts)
    missing: dict[str, Transfer] = {}
    missing_count = 0
    known_keys = set()
    for transfer in t.transfers.list_by_key_prefix(f"{author.key}/"):
        account, *rest = transfer.key.removeprefix(f"{author.key}/").rsplit("/", 3)
        if len(rest) != 3 or account != transfer.account:
            continue  # from another file, whose name begins with this one's
        known_keys.add(transfer.key)
        if transfer.key in money_by_key:
            continue
        missing_count += 1
        if account in accounts and _is_unended(t, transfer, author):
            missing.setdefault(account, transfer)
    for key, planned in money_by_key.items():
        earlier = missing.get(planned.account)
        if earlier is not None and key not in known_keys:
            raise BankUsage(
                f"line {planned.line}: {planned.account} has a new amount "
                f"{format_money(planned.amount)}, but the file lacks the "
                f"{format_money(earlier.amount)} that it granted on {earlier.at:%Y-%m-%d}. "
                "Change granted amounts with 'steward bank', and import new amounts from a "
                "file of another name",
                planned.account,
            )
    if missing_count:
        plan.remarks.append(
            "amounts granted by an earlier version of this file and missing now, kept "
            f"unchanged: {missing_count}"
        )


def _is_unended(t: "Transaction", transfer: Transfer, author: Authorship) -> bool:
    """Return True if the allocation of an earlier deposit has not ended."""
    numbers = {entry.allocation for entry in transfer.postings if entry.allocation}
    allocations = [t.allocations.get(number) for number in numbers]
    return any(
        allocation is not None
        and (allocation.end is None or author.at is None or allocation.end > author.at)
        for allocation in allocations
    )


def _apply_money(
    t: "Transaction", planned: PlannedMoney, key: str, author: Authorship
) -> ImportChange:
    """Create a planned allocation or deposit, unless its key was used before."""
    authorship = Authorship(who=author.who, why=planned.note or author.why, key=key, at=author.at)
    what = "deposit" if planned.end is None else "allocation"
    if t.transfers.find_by_key(key) is not None:
        return ImportChange(object=what, name=planned.account, change="keep", amount=planned.amount)
    if planned.end is None:
        t.transfers.deposit(planned.account, planned.amount, authorship)
    else:
        begin = planned.begin or author.at
        if begin is None:
            raise BankUsage(
                f"the allocation of account {planned.account} has no begin: fill column 'begin'",
                planned.account,
            )
        t.allocations.create(
            planned.account,
            planned.amount,
            authorship,
            begin=begin,
            end=planned.end,
            rollover=planned.rollover,
            note=planned.note,
        )
    end = f"until {planned.end:%Y-%m-%dT%H:%M:%SZ}" if planned.end else ""
    return ImportChange(
        object=what, name=planned.account, change="create", detail=end, amount=planned.amount
    )


def _apply_rate(t: "Transaction", planned: Rate, author: Authorship) -> ImportChange:
    """Add a planned rate, unless an equal one exists."""
    name = f"{planned.cluster} {planned.partition}"
    for rate in t.rates.list_all(planned.cluster):
        if _is_equal_rate(rate, planned):
            return ImportChange(
                object="rate", name=name, change="keep", detail=format_rate(planned)
            )
    t.rates.add(planned, Authorship(who=author.who, why=author.why, at=author.at))
    return ImportChange(object="rate", name=name, change="create", detail=format_rate(planned))


def _is_equal_rate(first: Rate, second: Rate) -> bool:
    """Compare two rates, ignoring number, start of validity and creation time."""
    ignored = {"number": 0, "valid_from": None, "created_us": 0}
    comparable = msgspec.structs.replace(first, **ignored)
    return comparable == msgspec.structs.replace(second, **ignored)


_PERMILLE: Final = 1000
_MAX_DIGITS: Final = 30
"""Maximum number of digits of a number in TOML."""
_MAX_QUOTED: Final = 200
"""Maximum length of text quoted in an error."""
_KNOWN_TABLES: Final = frozenset({"Enable", "PartitionPrice", "QosMultiplier", "API"})
"""Tables of bank-config.toml that are known."""


def read_bank_config(text: str, cluster: str) -> ImportPlan:
    """Read a ``bank-config.toml`` into a plan: one rate for each partition.

    ``PartitionPrice`` has the price of a CPU hour by partition, ``QosMultiplier`` the factors of
    QOSes; numbers may be written as text. A QOS without a multiplier counts once, and a partition
    without a price is rejected, both there and here.

    Args:
        text: Content of the file.
        cluster: Cluster of its partitions.

    Raises:
        BankUsage: It is not such a file, or a price is invalid.
    """
    try:
        config = tomllib.loads(text, parse_float=Decimal)
    except RecursionError as error:
        raise BankUsage("not valid TOML: nested too deeply", text[:_MAX_QUOTED]) from error
    except ValueError as error:
        # From tomllib, or from Python's int() for numbers with thousands of digits.
        raise BankUsage(f"not valid TOML: {error}", text[:_MAX_QUOTED]) from error
    prices = _get_table(config, "PartitionPrice")
    if not prices:
        raise BankUsage("the file has no [PartitionPrice]: is it a bank-config.toml?")
    qos_factors = {
        validate_name(name, "a QOS"): _parse_multiplier(name, value)
        for name, value in _get_table(config, "QosMultiplier").items()
    }
    plan = ImportPlan()
    for partition, value in prices.items():
        plan.rates.append(
            _read_rate(cluster, validate_name(partition, "a partition"), value, qos_factors)
        )
    if "Enable" in config:
        switches = ", ".join(
            f"{name} = {value}" for name, value in _get_table(config, "Enable").items()
        )
        plan.remarks.append(
            f"[Enable] is not imported ({switches[:_MAX_QUOTED]}): set the mode with 'steward "
            "bank mode', and [bank] enabled for charges"
        )
    if "API" in config:
        plan.remarks.append("[API] is not imported: [bank.remote] sends charges to a myBRC server")
    plan.remarks += [
        f"[{name}] is unknown and not imported" for name in config if name not in _KNOWN_TABLES
    ]
    return plan


def _read_rate(cluster: str, partition: str, price: Any, qos_factors: dict[str, int]) -> Rate:
    """Build the rate of a partition of bank-config.toml."""
    amount = _parse_price(partition, price)
    return Rate(
        cluster=cluster,
        partition=partition,
        weights={"cpu": amount} if amount else {},
        # A price of zero there becomes an explicit "free" here.
        free=not amount,
        qos_permille={name: factor for name, factor in qos_factors.items() if factor != _PERMILLE}
        if amount
        else {},
        note="from bank-config.toml",
    )


def _get_table(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a table of the TOML file; empty if absent."""
    table = config.get(name, {})
    if not isinstance(table, dict):
        raise BankUsage(f"{name} is not a table: write it as [{name}]", name)
    return table


def _parse_price(partition: str, value: Any) -> int:
    """Parse a price into micro-SU."""
    amount = money.parse_money(_number_text(f"price of partition {partition}", value))
    if amount < 0:
        raise BankUsage(f"partition {partition} has a negative price: give 0 or more", value)
    return amount


def _parse_multiplier(qos: str, value: Any) -> int:
    """Parse a multiplier into thousandths."""
    amount = money.parse_money(_number_text(f"multiplier of QOS {qos}", value))
    factor, remainder = divmod(amount * _PERMILLE, money.MICRO)
    if amount < 0 or remainder:
        raise BankUsage(
            f"invalid multiplier of QOS {qos}: give 0 or more, with up to three decimals", value
        )
    return factor


def _number_text(name: str, value: Any) -> str:
    """Return a TOML number as text, exactly."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal | str):
        raise BankUsage(f"the {name} is not a number: {value!r}", value)
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise BankUsage(f"the {name} is not a number: {value}", value)
        if max(abs(value.adjusted()), len(value.as_tuple().digits)) > _MAX_DIGITS:
            # Written out, the number would be as long as its exponent is large.
            raise BankUsage(
                f"invalid {name}: {value:.3e} has more than {_MAX_DIGITS} digits",
                str(value)[:_MAX_QUOTED],
            )
        return f"{value:f}"
    return str(value)


COLUMNS: Final = (
    *("account", "parent", "owners", "credit_limit", "parent_pays", "only_listed", "note"),
    *("user", "limit", "amount", "begin", "end", "rollover"),
)
"""Columns of the CSV table."""
_YES: Final = frozenset({"1", "yes", "true", "y"})
_NO: Final = frozenset({"", "0", "no", "false", "n"})

TimeParser = Callable[[str], datetime | None]
"""Function that parses a time; it returns None for ""."""


def read_csv(text: str, parse_time: TimeParser) -> ImportPlan:
    """Read a CSV table into a plan.

    The first line names the columns, in any order; only ``account`` is required. A line with a
    ``user`` adds the user to the account. One with an ``amount`` grants an allocation if it has an
    ``end``, otherwise a deposit. A line may do all of this.

    Args:
        text: The table.
        parse_time: Parses times.

    Raises:
        BankUsage: A line is invalid; the message names its number.
    """
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    plan = ImportPlan()
    columns: list[str] = []
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if not any(cells) or cells[0].startswith("#"):
                continue
            if not columns:
                columns = _parse_header(cells)
                continue
            _read_line(plan, _parse_fields(columns, cells), parse_time, str(reader.line_num))
    except csv.Error as error:
        raise BankUsage(f"line {reader.line_num}: {error}", text) from error
    except BankUsage as error:
        raise BankUsage(f"line {reader.line_num}: {error}", error.offender) from error
    if not columns:
        raise BankUsage("the table is empty: name the columns in its first line")
    return plan


def _parse_header(cells: list[str]) -> list[str]:
    """Check the header line and return the column names."""
    columns = [cell.lower().replace(" ", "_") for cell in cells]
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown:
        raise BankUsage(f"unknown column {unknown[0]!r}: the columns are {', '.join(COLUMNS)}")
    if "account" not in columns:
        raise BankUsage("missing column 'account': add it to the first line")
    if len(set(columns)) < len(columns):
        raise BankUsage("duplicate column: name each column once")
    return columns


def _parse_fields(columns: list[str], cells: list[str]) -> dict[str, str]:
    if any(cells[len(columns) :]):
        raise BankUsage(
            f"{len(cells)} fields, but {len(columns)} columns: quote fields that contain commas"
        )
    return dict(zip(columns, cells, strict=False))


def _read_line(
    plan: ImportPlan, fields: dict[str, str], parse_time: TimeParser, line_number: str
) -> None:
    """Read one line of the CSV table into the plan."""
    account = validate_name(fields.get("account", "").lower(), "an account")
    _read_account(plan, account, fields)
    user = fields.get("user", "")
    limit = fields.get("limit", "")
    if user:
        member = Member(
            account=account,
            user=validate_name(user, "a user"),
            limit=money.parse_money(limit) if limit else None,
        )
        plan.members[account, user] = member
    elif limit:
        raise BankUsage("a limit needs a user: fill column 'user'")
    _read_money(plan, account, fields, parse_time, line_number)


def _read_account(plan: ImportPlan, name: str, fields: dict[str, str]) -> None:
    """Merge a line's account properties into the plan; empty cells leave earlier values."""
    existing = plan.accounts.get(name) or Account(name=name)
    parent = fields.get("parent", "").lower()
    owners = tuple(
        validate_name(owner, "a user")
        for owner in fields.get("owners", "").replace(",", " ").split()
    )
    credit_limit = fields.get("credit_limit", "")
    plan.accounts[name] = msgspec.structs.replace(
        existing,
        parent=validate_name(parent, "an account") if parent else existing.parent,
        owners=tuple(dict.fromkeys((*existing.owners, *owners))),
        credit_limit=money.parse_money(credit_limit) if credit_limit else existing.credit_limit,
        parent_pays=_parse_bool(fields, "parent_pays") or existing.parent_pays,
        only_listed=_parse_bool(fields, "only_listed") or existing.only_listed,
        note=fields.get("note", "") or existing.note,
    )


def _read_money(
    plan: ImportPlan, account: str, fields: dict[str, str], parse_time: TimeParser, line_number: str
) -> None:
    """Add a line's allocation or deposit to the plan."""
    amount = fields.get("amount", "")
    if not amount:
        if any(fields.get(name) for name in ("begin", "end", "rollover")):
            raise BankUsage(
                f"the allocation of account {account} has no amount: fill column 'amount'"
            )
        return
    if not fields.get("end") and (fields.get("begin") or fields.get("rollover")):
        raise BankUsage(f"the allocation of account {account} has no end: fill column 'end'")
    rollover = fields.get("rollover", "").lower() or "none"
    if rollover not in ("none", "next"):
        raise BankUsage(f"invalid rollover {rollover!r}: give none or next")
    note = fields.get("note", "")
    plan.money.append(
        PlannedMoney(
            account=account,
            amount=_require_above_zero(money.parse_money(amount)),
            begin=parse_time(fields.get("begin", "")),
            end=parse_time(fields.get("end", "")),
            rollover="next" if rollover == "next" else "none",
            note=note,
            line=line_number,
            # Times as written: "now+1year" must give the same key tomorrow.
            key_text="\0".join((fields.get("begin", ""), fields.get("end", ""), rollover, note)),
        )
    )


def _require_above_zero(amount: int) -> int:
    if amount <= 0:
        raise BankUsage(
            f"invalid amount {money.format_money(amount)}: give more than 0, or leave it empty",
            amount,
        )
    return amount


def _parse_bool(fields: dict[str, str], name: str) -> bool:
    """Parse a yes or no cell."""
    text = fields.get(name, "").lower()
    if text not in _YES | _NO:
        raise BankUsage(f"invalid {name} {text!r}: give yes or no")
    return text in _YES


_LINE: Final = re.compile(r"(Cluster|Parent|Account|User)\s+-\s+'?([^':]*)'?(.*)")
_FIELD: Final = re.compile(r":([A-Za-z]+)=(?:'((?:[^'\\]|\\.)*)'|([^:]*))")
ROOT: Final = "root"
"""Account at the top of Slurm's tree, under which no job runs."""


def read_dump(text: str) -> ImportPlan:
    """Read a file of ``sacctmgr dump`` into a plan (sacctmgr(1), "Flat file dump and load").

    Raises:
        BankUsage: It is not such a file.
    """
    plan = ImportPlan()
    owners: dict[str, list[str]] = {}
    parent: str | None = None
    line_count = 0
    for number, raw_line in enumerate(text.split("\n"), start=1):
        line = raw_line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if not match:
            raise BankUsage(f"line {number}: {line[:60]!r} is not a line of 'sacctmgr dump'", line)
        line_count += 1
        kind, name, rest = match.groups()
        fields = {key: quoted or plain for key, quoted, plain in _FIELD.findall(rest)}
        if kind == "Parent":
            parent = name.lower()
        elif kind == "Account":
            if parent is None:
                raise BankUsage(f"line {number}: account {name} comes before its Parent line", line)
            add_account(plan, name, parent, fields.get("Description", ""))
        elif kind == "User":
            if parent is None:
                raise BankUsage(f"line {number}: user {name} comes before a Parent line", line)
            add_user(plan, name, parent)
            for account in fields.get("Coordinator", "").split(","):
                owners.setdefault(account.strip().lower(), []).append(name)
    if not line_count:
        raise BankUsage("the file is empty: write one with 'sacctmgr dump CLUSTER file=FILE'")
    add_owners(plan, owners)
    return plan


def read_associations(
    rows: Iterable[tuple[str, str, str]], coordinators: Mapping[str, Iterable[str]]
) -> ImportPlan:
    """Convert slurmdbd's associations into a plan.

    Args:
        rows: Account, parent ("" in a user's row) and user ("" in an account's row).
        coordinators: By account, the users who coordinate it.

    Raises:
        BankUsage: A name is invalid.
    """
    plan = ImportPlan()
    for account, parent, user in rows:
        if user:
            add_user(plan, user, account)
        else:
            add_account(plan, account, parent, "")
    add_owners(plan, coordinators)
    return plan


def add_account(plan: ImportPlan, name: str, parent: str, note: str) -> None:
    """Add an account to the plan; root is left out, so its children have no parent."""
    account_name = name.lower()
    if account_name == ROOT:
        return
    parent_name = parent.lower()
    plan.accounts[validate_name(account_name, "an account")] = Account(
        name=account_name,
        parent="" if parent_name in ("", ROOT) else validate_name(parent_name, "an account"),
        note="" if note == account_name else note,
    )


def add_user(plan: ImportPlan, user: str, account: str) -> None:
    """Add a user to the plan; users of root are only administrators and left out."""
    account_name = account.lower()
    if account_name == ROOT or not user:
        return
    member = Member(
        account=validate_name(account_name, "an account"), user=validate_name(user, "a user")
    )
    plan.members[account_name, user] = member
    plan.accounts.setdefault(account_name, Account(name=account_name))


def add_owners(plan: ImportPlan, owners: Mapping[str, Iterable[str]]) -> None:
    """Make coordinators the owners of their accounts, as far as the plan has these."""
    for account, users in owners.items():
        existing = plan.accounts.get(account)
        if existing is not None:
            names = tuple(dict.fromkeys(sorted(users)))
            plan.accounts[account] = msgspec.structs.replace(existing, owners=names)
