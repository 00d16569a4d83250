"""How the bank tells people: by mail, and by a post to the site's webhook.

Whoever keeps a notice sends it again until that raises nothing: a mail comes
twice rather than not at all. So that the one does not come again because the other
fails, whoever keeps it takes it apart first. A webhook's URL is a secret of the
site's: of it no more than the host is said.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from steward.bank.ledger import Account, Statement, StatementLine
from steward.bank.money import Unit, show
from steward.bank.records import AccountBooks, AllocationBooks
from steward.bank.settings import BankSettings
from steward.core.config import Settings
from steward.core.errors import Unavailable
from steward.core.events import BankThreshold
from steward.core.notifications import (
    Letter,
    WebhookAway,
    WebhookRefused,
    post_webhook,
    send_letter,
)
from steward.core.timestamps import micros, moment
from steward.slurm.times import zone_called

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger, Transaction


log = logging.getLogger(__name__)

_ADDRESS: Final = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+=~-]{0,127}(?:@[A-Za-z0-9.-]{1,255})?")


class NoticeNotSent(Unavailable):
    """A notice did not reach the webhook, or nobody knows whether it did."""


class NoticeRefused(NoticeNotSent):
    """The webhook does not take a notice: to tell it again is of little use."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Something that people are to be told.

    Attributes:
        kind: ``bank.threshold`` or ``bank.statement``.
        subject: One line.
        text: The mail's.
        to: Users, or addresses, beside those that get every notice.
        body: What the webhook is told, as JSON.
        by: The one way that it is to go; "" for all.
    """

    kind: str
    subject: str
    text: str
    to: tuple[str, ...] = ()
    body: dict[str, Any] = msgspec.field(default_factory=dict)
    by: Literal["", "mail", "webhook"] = ""


def parts(settings: Settings, notice: Notice) -> list[Notice]:
    """A notice for each way that it is to go, so that each is tried again by itself."""
    if notice.by:
        return [notice]
    found = []
    if addresses(settings, notice.to):
        found.append(msgspec.structs.replace(notice, by="mail"))
    if settings.bank.notify.webhook:
        found.append(msgspec.structs.replace(notice, by="webhook"))
    return found


def send(settings: Settings, notice: Notice) -> None:
    """Send a notice to whom the configuration says; where it says nobody, nothing is done.

    Takes at most [mail].timeout_s and ten seconds.

    Raises:
        NotTaken: The mail was refused.
        NotSent: It was not sent: try again later.
        NoticeRefused: The webhook refuses it.
        NoticeNotSent: The webhook does not answer now: try again later.
    """
    if notice.by in ("", "mail"):
        _mail(settings, notice)
    if notice.by in ("", "webhook"):
        _tell_webhook(settings.bank.notify.webhook, notice)


def addresses(settings: Settings, to: Sequence[str]) -> tuple[str, ...]:
    """The addresses of users, and those that get every notice, each once.

    Args:
        settings: The whole configuration; [bank.notify] says what stands behind a name.
        to: Users, or addresses.
    """
    rules = settings.bank.notify
    found: list[str] = []
    for name in to:
        address = name if "@" in name or not rules.domain else f"{name}@{rules.domain}"
        if _ADDRESS.fullmatch(address):
            found.append(address)
        else:
            log.warning("%r is no address that a mail can be sent to", address)
    return tuple(dict.fromkeys((*found, *rules.mail)))


def threshold_notice(
    settings: Settings, threshold: BankThreshold, owners: Sequence[str], cluster: str = ""
) -> Notice:
    """What is said of an allocation that is used so far, or ends so soon.

    Args:
        settings: The whole configuration.
        threshold: Which it is.
        owners: The account's owners.
        cluster: The cluster whose zone times are told in; the first if "".
    """
    bank = settings.bank
    unit = Unit(bank.unit, bank.decimals)
    account = threshold.account
    left = show(threshold.balance, unit)
    name = cluster or next(iter(settings.cluster), "")
    known = settings.cluster.get(name)
    zone = zone_called(known.timezone if known else "")
    end = threshold.end.astimezone(zone).strftime("%Y-%m-%d %H:%M") if threshold.end else ""
    if threshold.kind == "used":
        subject = f"{account}: {threshold.value} % of allocation {threshold.allocation} is used"
        first = (
            f"{threshold.value} % of what allocation {threshold.allocation} of account {account} "
            f"was given is used."
        )
    else:
        subject = f"{account}: allocation {threshold.allocation} ends in {_days(threshold.value)}"
        first = (
            f"Allocation {threshold.allocation} of account {account} ends in "
            f"{_days(threshold.value)}."
        )
    facts = [("Left", left), ("Given", show(threshold.total, unit)), ("Ends", end)]
    lines = [first, "", *(f"  {name:<6} {value}" for name, value in facts if value)]
    lines += ["", "What was used by whom:", "", f"  steward bank statement {account}", ""]
    return Notice(
        kind="bank.threshold",
        subject=f"[bank] {subject}",
        text="\n".join(lines),
        to=tuple(owners) if bank.notify.owners else (),
        body=msgspec.to_builtins(threshold),
    )


def _days(count: int) -> str:
    return "1 day" if count == 1 else f"{count} days"


def _mail(settings: Settings, notice: Notice) -> None:
    to = addresses(settings, notice.to)
    if not to:
        return
    mail = settings.mail
    letter = Letter(
        to=to,
        subject=notice.subject,
        body=notice.text.encode(),
        program=mail.program,
        sendmail=mail.sendmail,
        sender=mail.sender,
        timeout_s=mail.timeout_s,
    )
    send_letter(letter, "")


def _tell_webhook(url: str, notice: Notice) -> None:
    if not url:
        return
    said = {
        "version": 1,
        "kind": notice.kind,
        "subject": notice.subject,
        "text": notice.text,
        "body": notice.body,
    }
    try:
        post_webhook(url, said)
    except WebhookRefused as error:
        raise NoticeRefused(str(error), error.offender) from error
    except WebhookAway as error:
        raise NoticeNotSent(str(error), error.offender) from error


_DAY_US: Final = 86_400_000_000


def list_crossed_thresholds(
    account: AccountBooks, settings: BankSettings, now: datetime
) -> Iterator[tuple[BankThreshold, bool]]:
    """Every threshold of an account's allocations, and whether it is crossed."""
    now_us = micros(now)
    for one in account.allocations:
        if one.end_us and one.end_us <= now_us:
            continue
        if one.total > 0 and one.begin_us <= now_us:
            used = (one.total - one.balance) * 100 // one.total
            for percent in settings.warn_percent:
                yield _threshold(account, one, "used", percent), used >= percent
        if one.end_us and one.balance > 0:
            soon_us = settings.warn_days * _DAY_US
            days = max(0, (one.end_us - now_us) // _DAY_US)
            is_soon = one.end_us - now_us <= soon_us
            yield _threshold(account, one, "ends", settings.warn_days, days=days), is_soon


def queue_threshold_notices(
    t: "Transaction", accounts: Iterable[AccountBooks], settings: BankSettings, now: datetime
) -> list[BankThreshold]:
    """The thresholds that were crossed since they were looked at last.

    Of several shares of one allocation all are told; whoever sends notices sends the last.

    Args:
        t: A transaction of the ledger, which remembers what was told.
        accounts: The accounts to look at.
        settings: Which shares and days are told.
        now: The present moment.
    """
    news: list[BankThreshold] = []
    for account in accounts:
        by_matter: dict[tuple[int, str], list[tuple[BankThreshold, bool]]] = {}
        for one, is_crossed in list_crossed_thresholds(account, settings, now):
            by_matter.setdefault((one.allocation, one.kind), []).append((one, is_crossed))
        for matter, found in by_matter.items():
            is_less = t.thresholds.told(*matter) > sum(is_crossed for _, is_crossed in found)
            if is_less:
                # Money came in: what is crossed still was told, the rest is news once more.
                t.thresholds.forget(*matter)
            for one, is_crossed in found:
                value = settings.warn_days if one.kind == "ends" else one.value
                if is_crossed and t.thresholds.tell(*matter, value) and not is_less:
                    news.append(one)
    return news


def worst_threshold(told: Iterable[BankThreshold]) -> list[BankThreshold]:
    """Of each allocation the last threshold of a kind: one notice is enough."""
    found: dict[tuple[int, str], BankThreshold] = {}
    for one in told:
        key = (one.allocation, one.kind)
        before = found.get(key)
        if before is None or one.value > before.value:
            found[key] = one
    return list(found.values())


def _threshold(
    account: AccountBooks, one: AllocationBooks, kind: str, value: int, *, days: int | None = None
) -> BankThreshold:
    return BankThreshold(
        account=account.name,
        allocation=one.number,
        kind="used" if kind == "used" else "ends",
        value=value if days is None else days,
        balance=one.balance,
        total=one.total,
        end=moment(one.end_us) if one.end_us else None,
    )


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
