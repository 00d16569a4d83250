"""Notification operations: send mail (``notify.email``), post to a webhook (``notify.webhook``).

Webhooks are those that the site names in ``[actions.webhooks]``.
"""

import re
from typing import Annotated, Any, Final

import msgspec

from steward.automation.errors import InvalidParameters
from steward.automation.operation import Operation, OperationContext, Parameters
from steward.core.notifications import (
    TIMEOUT_S,
    OutgoingMail,
    describe_webhook,
    post_webhook,
    send_mail,
)

_ADDRESS: Final = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+=~-]{0,127}(?:@[A-Za-z0-9.-]{1,255})?")
"""Mail address, or name of a user on this host."""
_MAX_SUBJECT: Final = 500
"""Maximum length of a subject, in characters."""
_MAX_BODY: Final = 1024 * 1024
"""Maximum length of a mail, in characters."""


class EmailParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of notify.email."""

    to: Annotated[tuple[str, ...], msgspec.Meta(description="Addresses, or users of this host.")]
    subject: Annotated[str, msgspec.Meta(description="One line.")]
    body: Annotated[str, msgspec.Meta(description="The mail's text.")] = ""


class WebhookParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of notify.webhook."""

    name: Annotated[
        str, msgspec.Meta(description="Which: a name of [actions.webhooks] in the configuration.")
    ]
    subject: Annotated[str, msgspec.Meta(description="One line.")]
    text: Annotated[str, msgspec.Meta(description="More, for people.")] = ""
    body: Annotated[
        dict[str, Any], msgspec.Meta(description="What programs are told, as JSON.")
    ] = msgspec.field(default_factory=dict)


def send_email(doing: OperationContext, asked: EmailParameters) -> dict[str, Any]:
    """Send a mail."""
    wrong = [address for address in asked.to if _ADDRESS.fullmatch(address) is None]
    if wrong or not asked.to:
        what = f"{wrong[0]!r} is no address" if wrong else "nobody is named"
        raise InvalidParameters(f"notify.email: {what}", wrong)
    if len(asked.subject) > _MAX_SUBJECT or len(asked.body) > _MAX_BODY:
        raise InvalidParameters("notify.email: that is longer than a mail should be")
    mail = doing.settings.mail
    letter = OutgoingMail(
        to=asked.to,
        subject=" ".join(asked.subject.split()),
        body=asked.body.encode("utf-8", "replace"),
        program=mail.program,
        sendmail=mail.sendmail,
        sender=mail.sender,
        timeout_s=min(mail.timeout_s, doing.left_s),
    )
    if not doing.dry_run:
        doing.begin()
        send_mail(letter, "")
    return {"to": list(asked.to), "sent": not doing.dry_run}


def notify_webhook(doing: OperationContext, asked: WebhookParameters) -> dict[str, Any]:
    """Post a JSON message to a configured webhook."""
    known = doing.settings.actions.webhooks
    url = known.get(asked.name)
    if url is None:
        names = ", ".join(known) or "none"
        raise InvalidParameters(
            f"[actions.webhooks] names no {asked.name!r}: there are {names}", asked.name
        )
    said = {
        "version": 1,
        "kind": "action",
        "cluster": doing.cluster,
        "subject": asked.subject,
        "text": asked.text,
        "body": asked.body,
        "by": doing.speaker,
    }
    if doing.dry_run:
        return {"name": asked.name, "where": describe_webhook(url), "told": False}
    doing.begin()
    code = post_webhook(url, said, timeout_s=min(TIMEOUT_S, doing.left_s))
    return {"name": asked.name, "where": describe_webhook(url), "told": True, "answer": code}


OPERATIONS: Final = (
    Operation(
        ref="notify.email",
        help="Send a mail.",
        gives="To whom it was sent.",
        parameters=EmailParameters,
        run=send_email,
        right="operator",
        changes=True,
        on_cluster=False,
    ),
    Operation(
        ref="notify.webhook",
        help="Tell a webhook.",
        gives="The host that was told, and the status that it answered with.",
        parameters=WebhookParameters,
        run=notify_webhook,
        right="operator",
        changes=True,
        on_cluster=False,
    ),
)
