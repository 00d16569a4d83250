"""How the bank tells people: by mail, and by a post to the site's webhook.

Whoever keeps a notice sends it again until that raises nothing: a mail comes
twice rather than not at all. So that the one does not come again because the other
fails, whoever keeps it takes it apart first. A webhook's URL is a secret of the
site's: of it no more than the host is said.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from steward.bank.money import Unit, show
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
from steward.slurm.times import zone_called

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
