"""Bank notices: mails and webhook posts about used-up allocations, and monthly statements.

- :class:`Notice`, :func:`split_notice`, :func:`send_notice`: deliver a notice. The caller repeats
  until no error is raised, so a mail may arrive twice rather than never. It first splits a notice
  by way (mail, webhook), so that a failing webhook does not repeat the mail.
- :func:`queue_threshold_notices`: find thresholds crossed since the last check. Each is reported
  once, and again if it is crossed again after a deposit.
- :func:`queue_statements`: put last month's statements into the outbox.

``steward.bank.schedule`` queues notices in the ledger's outbox, and sends them from there.

A webhook's URL is a secret: messages name only its host.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from steward.bank.ledger import Account, Statement, StatementLine
from steward.bank.money import Unit, format_money
from steward.bank.records import AccountBooks, AllocationBooks
from steward.bank.settings import BankSettings
from steward.core.config import Settings
from steward.core.errors import Unavailable
from steward.core.events import BankThreshold
from steward.core.notifications import (
    OutgoingMail,
    WebhookRejected,
    WebhookUnavailable,
    post_webhook,
    send_mail,
)
from steward.core.principals import NOTICES
from steward.core.timestamps import from_micros, to_micros
from steward.slurm.times import load_zone

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger, Transaction


log = logging.getLogger(__name__)

_ADDRESS: Final = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+=~-]{0,127}(?:@[A-Za-z0-9.-]{1,255})?")
"""Mail addresses and local user names that a mail can be sent to."""


class NoticeNotSent(Unavailable):
    """Error: a notice did not reach the webhook, or it is unknown whether it did."""


class NoticeRefused(NoticeNotSent):
    """Error: the webhook rejects a notice, so a retry is of little use."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Message to people about their account.

    Attributes:
        kind: ``bank.threshold`` or ``bank.statement``.
        subject: Subject, one line.
        text: Text of the mail.
        to: Users or addresses, in addition to those that get every notice.
        body: Content for the webhook, as JSON.
        by: The only way to send it; "" for all ways.
    """

    kind: str
    subject: str
    text: str
    to: tuple[str, ...] = ()
    body: dict[str, Any] = msgspec.field(default_factory=dict)
    by: Literal["", "mail", "webhook"] = ""


def split_notice(settings: Settings, notice: Notice) -> list[Notice]:
    """Split a notice into one for each way, so that each is retried separately."""
    if notice.by:
        return [notice]
    notices = []
    if resolve_addresses(settings, notice.to):
        notices.append(msgspec.structs.replace(notice, by="mail"))
    if settings.bank.notify.webhook:
        notices.append(msgspec.structs.replace(notice, by="webhook"))
    return notices


def send_notice(settings: Settings, notice: Notice) -> None:
    """Send a notice to the configured recipients; do nothing if there are none.

    Takes at most ``MAIL_TIMEOUT_S`` plus ten seconds.

    Raises:
        MailRejected: The mail was rejected.
        MailNotSent: The mail was not sent: retry later.
        NoticeRefused: The webhook rejects it.
        NoticeNotSent: The webhook does not answer now: retry later.
    """
    if notice.by in ("", "mail"):
        _send_mail(settings, notice)
    if notice.by in ("", "webhook"):
        _post_to_webhook(settings.bank.notify.webhook, notice)


def resolve_addresses(settings: Settings, recipients: Sequence[str]) -> tuple[str, ...]:
    """Return the mail addresses of users and of those who get every notice, each once.

    Args:
        settings: The whole configuration; [bank.notify] completes user names to addresses.
        recipients: Users or addresses.
    """
    notify = settings.bank.notify
    addresses: list[str] = []
    for name in recipients:
        address = name if "@" in name or not notify.domain else f"{name}@{notify.domain}"
        if _ADDRESS.fullmatch(address):
            addresses.append(address)
        else:
            log.warning("invalid mail address %r", address)
    return tuple(dict.fromkeys((*addresses, *notify.mail)))


def write_threshold_notice(
    settings: Settings, threshold: BankThreshold, owners: Sequence[str], cluster: str = ""
) -> Notice:
    """Write the notice for an allocation that is used to a threshold or ends soon.

    Args:
        settings: The whole configuration.
        threshold: The threshold crossed.
        owners: The account's owners.
        cluster: Cluster whose time zone is used; "" for the first.
    """
    bank_settings = settings.bank
    unit = Unit(bank_settings.unit, bank_settings.decimals)
    account = threshold.account
    balance = format_money(threshold.balance, unit)
    name = cluster or next(iter(settings.cluster), "")
    cluster_settings = settings.cluster.get(name)
    zone = load_zone(cluster_settings.timezone if cluster_settings else "")
    end = threshold.end.astimezone(zone).strftime("%Y-%m-%d %H:%M") if threshold.end else ""
    if threshold.kind == "used":
        subject = f"{account}: {threshold.value} % of allocation {threshold.allocation} is used"
        sentence = (
            f"{threshold.value} % of allocation {threshold.allocation} of account {account} "
            "is used."
        )
    else:
        subject = (
            f"{account}: allocation {threshold.allocation} ends in {_format_days(threshold.value)}"
        )
        sentence = (
            f"Allocation {threshold.allocation} of account {account} ends in "
            f"{_format_days(threshold.value)}."
        )
    details = [
        ("Balance", balance),
        ("Granted", format_money(threshold.total, unit)),
        ("Ends", end),
    ]
    lines = [sentence, "", *(f"  {name:<7} {value}" for name, value in details if value)]
    lines += ["", "Charges by user:", "", f"  steward bank statement {account}", ""]
    return Notice(
        kind="bank.threshold",
        subject=f"[bank] {subject}",
        text="\n".join(lines),
        to=tuple(owners) if bank_settings.notify.owners else (),
        body=msgspec.to_builtins(threshold),
    )


def _format_days(count: int) -> str:
    """Format a number of days."""
    return "1 day" if count == 1 else f"{count} days"


def _send_mail(settings: Settings, notice: Notice) -> None:
    """Send a notice by mail to its addresses, if there are any."""
    addresses = resolve_addresses(settings, notice.to)
    if not addresses:
        return
    NOTICES.require("notify.email")
    mail_settings = settings.mail
    message = OutgoingMail(
        to=addresses,
        subject=notice.subject,
        body=notice.text.encode(),
        program=mail_settings.program,
        sender=mail_settings.sender,
    )
    send_mail(message, "")


def _post_to_webhook(url: str, notice: Notice) -> None:
    """Post a notice to the webhook, if one is configured."""
    if not url:
        return
    NOTICES.require("notify.webhook")
    payload = {
        "version": 1,
        "kind": notice.kind,
        "subject": notice.subject,
        "text": notice.text,
        "body": notice.body,
    }
    try:
        post_webhook(url, payload)
    except WebhookRejected as error:
        raise NoticeRefused(str(error), error.offender) from error
    except WebhookUnavailable as error:
        raise NoticeNotSent(str(error), error.offender) from error


_DAY_US: Final = 86_400_000_000


def list_crossed_thresholds(
    account: AccountBooks, settings: BankSettings, now: datetime
) -> Iterator[tuple[BankThreshold, bool]]:
    """List the thresholds of an account's allocations, and whether each is crossed."""
    now_us = to_micros(now)
    for allocation in account.allocations:
        if allocation.end_us and allocation.end_us <= now_us:
            continue
        if allocation.total > 0 and allocation.begin_us <= now_us:
            used_percent = (allocation.total - allocation.balance) * 100 // allocation.total
            for percent in settings.warn_percent:
                yield _make_threshold(account, allocation, "used", percent), used_percent >= percent
        if allocation.end_us and allocation.balance > 0:
            soon_us = settings.warn_days * _DAY_US
            days = max(0, (allocation.end_us - now_us) // _DAY_US)
            is_soon = allocation.end_us - now_us <= soon_us
            yield (
                _make_threshold(account, allocation, "ends", settings.warn_days, days=days),
                is_soon,
            )


def queue_threshold_notices(
    t: "Transaction", accounts: Iterable[AccountBooks], settings: BankSettings, now: datetime
) -> list[BankThreshold]:
    """Return the thresholds crossed since the last check, and record them as reported.

    It returns every threshold crossed; the caller sends only the highest one.

    Args:
        t: Ledger transaction, which records what was reported.
        accounts: The accounts to check.
        settings: Percentages and days to report.
        now: The current time.
    """
    new_thresholds: list[BankThreshold] = []
    for account in accounts:
        by_allocation: dict[tuple[int, str], list[tuple[BankThreshold, bool]]] = {}
        for threshold, is_crossed in list_crossed_thresholds(account, settings, now):
            by_allocation.setdefault((threshold.allocation, threshold.kind), []).append(
                (threshold, is_crossed)
            )
        for allocation_kind, thresholds in by_allocation.items():
            is_reset = t.thresholds.count_reported(*allocation_kind) > sum(
                is_crossed for _, is_crossed in thresholds
            )
            if is_reset:
                # A deposit came in. Thresholds still crossed were reported; those crossed later are
                # new.
                t.thresholds.forget_reported(*allocation_kind)
            for threshold, is_crossed in thresholds:
                value = settings.warn_days if threshold.kind == "ends" else threshold.value
                if (
                    is_crossed
                    and t.thresholds.record_reported(*allocation_kind, value)
                    and not is_reset
                ):
                    new_thresholds.append(threshold)
    return new_thresholds


def keep_highest_thresholds(thresholds: Iterable[BankThreshold]) -> list[BankThreshold]:
    """Keep the highest threshold of each allocation and kind: one notice is enough."""
    highest: dict[tuple[int, str], BankThreshold] = {}
    for threshold in thresholds:
        key = (threshold.allocation, threshold.kind)
        previous = highest.get(key)
        if previous is None or threshold.value > previous.value:
            highest[key] = threshold
    return list(highest.values())


def _make_threshold(
    account: AccountBooks,
    allocation: AllocationBooks,
    kind: str,
    value: int,
    *,
    days: int | None = None,
) -> BankThreshold:
    """Build the event of a threshold."""
    return BankThreshold(
        account=account.name,
        allocation=allocation.number,
        kind="used" if kind == "used" else "ends",
        value=value if days is None else days,
        balance=allocation.balance,
        total=allocation.total,
        end=from_micros(allocation.end_us) if allocation.end_us else None,
    )


NOTICE_KIND: Final = "notice"
"""Kind of notices in the ledger's outbox; their payload is JSON."""

_STATEMENTS_MARK: Final = "statements"
"""Name of the ledger's note with the last month whose statements were queued."""
_MAX_STATEMENT_TRANSFERS: Final = 2000
"""Maximum number of transfers in a statement mail."""


def queue_statements(ledger: "Ledger", settings: Settings, now: datetime) -> int:
    """Put the statements of last month into the outbox, once.

    The same transaction marks the month in the ledger, so each month is sent once, whenever the
    daemon runs.

    Args:
        ledger: The ledger.
        settings: The whole configuration.
        now: The current time; the cluster's zone determines the month.

    Returns:
        Number of statements put there.

    Raises:
        LedgerUnavailable: The ledger's database is unreachable.
    """
    if not settings.bank.notify.statements:
        return 0
    begin, end = get_last_month(settings, now)
    name = begin.strftime("%Y-%m")
    with ledger.transaction() as t:
        if t.read_mark(_STATEMENTS_MARK) >= name:
            return 0
        is_first = not t.read_mark(_STATEMENTS_MARK)
        t.set_mark(_STATEMENTS_MARK, name)
        if is_first:
            # A bank that has just started has no statement for the month before.
            return 0
        notices = [
            write_statement_notice(
                settings, account, t.queries.get_statement(account.name, "", begin, end), name
            )
            for account in _list_owned_accounts(t)
        ]
        for notice in notices:
            t.outbox.add(NOTICE_KIND, msgspec.json.encode(notice), key=f"{name}/{notice.subject}")
    return len(notices)


def get_last_month(settings: Settings, now: datetime) -> tuple[datetime, datetime]:
    """Return begin and end of the previous month, in the first cluster's time zone."""
    cluster_settings = next(iter(settings.cluster.values()), None)
    zone = load_zone(cluster_settings.timezone if cluster_settings else "")
    local_now = now.astimezone(zone)
    end = local_now.replace(day=1, hour=0, minute=0, second=0, microsecond=0, fold=0)
    last_december = end.replace(year=end.year - 1, month=12) if end.month == 1 else None
    return last_december or end.replace(month=end.month - 1), end


def write_statement_notice(
    settings: Settings, account: Account, statement: Statement, month: str
) -> Notice:
    """Write the notice with an account's monthly statement."""
    unit = Unit(settings.bank.unit, settings.bank.decimals)
    return Notice(
        kind="bank.statement",
        subject=f"[bank] {account.name}: statement of {month}",
        text=format_statement(statement, unit, statement.begin.tzinfo if statement.begin else None),
        to=account.owners,
        body={
            "account": account.name,
            "month": month,
            "opening": statement.opening,
            "closing": statement.closing,
            "lines": len(statement.lines),
        },
    )


def format_statement(statement: Statement, unit: Unit, zone: tzinfo | None = None) -> str:
    """Format a statement for a mail: sums by kind and user, then each other transfer.

    Args:
        statement: The statement.
        unit: Unit that amounts are shown in.
        zone: Time zone that times are shown in; None to keep theirs.
    """
    text_lines = [f"Account {statement.account}", ""]
    rows = [("Opening balance", statement.opening)]
    rows += [(f"Charges of {user}", amount) for user, amount in _sum_by_user(statement.lines)]
    other_sums: dict[str, int] = {}
    for line in statement.lines:
        if line.kind not in _CHARGE_KINDS:
            other_sums[line.kind] = other_sums.get(line.kind, 0) + line.amount
    rows += [(kind.capitalize(), amount) for kind, amount in other_sums.items()]
    rows.append(("Closing balance", statement.closing))
    text_lines += _align_columns((name, format_money(amount, unit)) for name, amount in rows)
    transfers = [line for line in statement.lines if line.kind not in _CHARGE_KINDS][
        :_MAX_STATEMENT_TRANSFERS
    ]
    if transfers:
        text_lines += ["", "Deposits, withdrawals and other transactions:", ""]
        text_lines += [_format_transfer(line, unit, zone) for line in transfers]
    text_lines += ["", "All transactions:", "", f"  steward bank statement {statement.account}", ""]
    return "\n".join(text_lines)


_CHARGE_KINDS: Final = frozenset({"charge", "correction"})
"""Kinds of transfers summed up by user in a statement mail."""


def _sum_by_user(lines: Iterable[StatementLine]) -> list[tuple[str, int]]:
    """Sum the charges of a statement by user."""
    sums: dict[str, int] = {}
    for line in lines:
        if line.kind in _CHARGE_KINDS:
            name = line.user or "nobody known"
            sums[name] = sums.get(name, 0) + line.amount
    return sorted(sums.items(), key=lambda user_sum: (user_sum[1], user_sum[0]))


def _align_columns(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Align names and amounts in two columns."""
    cells = list(rows)
    name_width = max(len(name) for name, _ in cells)
    value_width = max(len(value) for _, value in cells)
    return [f"  {name:<{name_width}}  {value:>{value_width}}" for name, value in cells]


def _format_transfer(line: StatementLine, unit: Unit, zone: tzinfo | None) -> str:
    """Format a transfer as a line of the mail."""
    local_time = line.at.astimezone(zone) if zone is not None else line.at
    author = f", {line.posted_by}" if line.posted_by else ""
    return (
        f"  {local_time:%Y-%m-%d %H:%M}  {line.kind:<9} {format_money(line.amount, unit)}  "
        f"({line.reason}{author})"
    )


def _list_owned_accounts(t: "Transaction") -> list[Account]:
    """List accounts that have owners and money of their own."""
    return [
        account for account in t.accounts.list_all() if account.owners and not account.parent_pays
    ]
