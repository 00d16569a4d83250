"""Statements of a month, by mail to account owners, each once.

What was sent is marked in the ledger, in the transaction that puts the mail into its
outbox: a month is told once, whenever the daemon happens to run.
"""

from collections.abc import Iterable
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.ledger import Account, Statement, StatementLine
from steward.bank.money import Unit, show
from steward.bank.notices import Notice
from steward.core.config import Settings
from steward.slurm.times import zone_called

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Ledger, Transaction

OUTBOX: Final = "notice"
"""The kind under which notices wait in the ledger's outbox, as JSON."""

_MARK: Final = "statements"
_MOST_LINES: Final = 2000


def mail_due(ledger: "Ledger", settings: Settings, now: datetime) -> int:
    """Put the statements of last month into the outbox, unless they were.

    Args:
        ledger: The ledger.
        settings: The whole configuration.
        now: The present moment; the cluster's zone says which month that is.

    Returns:
        How many were put there.

    Raises:
        LedgerUnavailable: The ledger's database is away.
    """
    if not settings.bank.notify.statements:
        return 0
    begin, end = last_month(settings, now)
    name = begin.strftime("%Y-%m")
    with ledger.transaction() as t:
        if t.mark(_MARK) >= name:
            return 0
        is_first = not t.mark(_MARK)
        t.set_mark(_MARK, name)
        if is_first:
            # A bank that has just begun has nothing to tell of the month before.
            return 0
        notices = [
            notice_of(settings, account, t.reading.statement(account.name, "", begin, end), name)
            for account in _owned(t)
        ]
        for notice in notices:
            t.outbox.put(OUTBOX, msgspec.json.encode(notice), key=f"{name}/{notice.subject}")
    return len(notices)


def last_month(settings: Settings, now: datetime) -> tuple[datetime, datetime]:
    """When the month before this one began and ended, in the first cluster's zone."""
    known = next(iter(settings.cluster.values()), None)
    zone = zone_called(known.timezone if known else "")
    here = now.astimezone(zone)
    end = here.replace(day=1, hour=0, minute=0, second=0, microsecond=0, fold=0)
    before = end.replace(year=end.year - 1, month=12) if end.month == 1 else None
    return before or end.replace(month=end.month - 1), end


def notice_of(settings: Settings, account: Account, found: Statement, month: str) -> Notice:
    """The mail with an account's statement."""
    unit = Unit(settings.bank.unit, settings.bank.decimals)
    return Notice(
        kind="bank.statement",
        subject=f"[bank] {account.name}: statement of {month}",
        text=text_of(found, unit, found.begin.tzinfo if found.begin else None),
        to=account.owners,
        body={
            "account": account.name,
            "month": month,
            "opening": found.opening,
            "closing": found.closing,
            "lines": len(found.lines),
        },
    )


def text_of(found: Statement, unit: Unit, zone: tzinfo | None = None) -> str:
    """A statement as a mail shows it: sums by kind and user, then each move but charges.

    Args:
        found: The statement.
        unit: What amounts are shown in.
        zone: The zone that times are shown in; their own if None.
    """
    head = [f"Account {found.account}", ""]
    rows = [("At the beginning", found.opening)]
    rows += [(f"Charges of {user}", amount) for user, amount in _by_user(found.lines)]
    other: dict[str, int] = {}
    for line in found.lines:
        if line.kind not in _CHARGES:
            other[line.kind] = other.get(line.kind, 0) + line.amount
    rows += [(kind.capitalize(), amount) for kind, amount in other.items()]
    rows.append(("At the end", found.closing))
    head += _columns((name, show(amount, unit)) for name, amount in rows)
    moves = [line for line in found.lines if line.kind not in _CHARGES][:_MOST_LINES]
    if moves:
        head += ["", "Moved by hand, or by the clock:", ""]
        head += [_move(line, unit, zone) for line in moves]
    head += ["", "Every line of it:", "", f"  steward bank statement {found.account}", ""]
    return "\n".join(head)


_CHARGES: Final = frozenset({"charge", "correction"})


def _by_user(lines: Iterable[StatementLine]) -> list[tuple[str, int]]:
    sums: dict[str, int] = {}
    for line in lines:
        if line.kind in _CHARGES:
            name = line.user or "nobody known"
            sums[name] = sums.get(name, 0) + line.amount
    return sorted(sums.items(), key=lambda one: (one[1], one[0]))


def _columns(rows: Iterable[tuple[str, str]]) -> list[str]:
    cells = list(rows)
    left = max(len(name) for name, _ in cells)
    right = max(len(value) for _, value in cells)
    return [f"  {name:<{left}}  {value:>{right}}" for name, value in cells]


def _move(line: StatementLine, unit: Unit, zone: tzinfo | None) -> str:
    here = line.at.astimezone(zone) if zone is not None else line.at
    who = f", {line.who}" if line.who else ""
    return f"  {here:%Y-%m-%d %H:%M}  {line.kind:<9} {show(line.amount, unit)}  ({line.why}{who})"


def _owned(t: "Transaction") -> list[Account]:
    """Accounts that somebody looks after, with money of their own."""
    return [one for one in t.accounts.all() if one.owners and not one.draws_on_parent]
