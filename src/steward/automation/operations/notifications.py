"""Notification operations: send mail (``notify.email``), post to a webhook (``notify.webhook``).

Webhooks are those that the site names in ``[actions.webhooks]``.
"""

import re
from typing import Annotated, Any, Final

import msgspec

from steward.automation.errors import InvalidParameters
from steward.automation.operation import OperationContext, Parameters, operation
from steward.core.actions import described
from steward.core.notifications import (
    MAIL_TIMEOUT_S,
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

    to: Annotated[
        tuple[str, ...], described("Recipients: mail addresses, or users of the daemon's host.")
    ]
    subject: Annotated[str, described("Subject, one line.")]
    body: Annotated[str, described("Text of the mail.")] = ""


class WebhookParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of notify.webhook."""

    name: Annotated[str, described("Name of the webhook in [actions.webhooks].")]
    subject: Annotated[str, described("Subject, one line.")]
    text: Annotated[str, described("Text of the message.")] = ""
    body: Annotated[dict[str, Any], described("Data for programs, a JSON object.")] = msgspec.field(
        default_factory=dict
    )


@operation("notify.email", role="operator", on_cluster=False)
def send_email(context: OperationContext, parameters: EmailParameters) -> dict[str, Any]:
    """Send a mail.

    Returns:
        Recipients, and whether the mail was sent.
    """
    invalid = [address for address in parameters.to if _ADDRESS.fullmatch(address) is None]
    if invalid or not parameters.to:
        problem = f"invalid address {invalid[0]!r}" if invalid else "no recipient given"
        raise InvalidParameters(f"notify.email: {problem}", invalid)
    if len(parameters.subject) > _MAX_SUBJECT or len(parameters.body) > _MAX_BODY:
        raise InvalidParameters("notify.email: the mail is too long: shorten subject or text")
    mail_settings = context.settings.mail
    message = OutgoingMail(
        to=parameters.to,
        subject=" ".join(parameters.subject.split()),
        body=parameters.body.encode("utf-8", "replace"),
        program=mail_settings.program,
        sender=mail_settings.sender,
        timeout_s=min(MAIL_TIMEOUT_S, context.remaining_s),
    )
    if not context.dry_run:
        context.begin()
        send_mail(message, "")
    return {"to": list(parameters.to), "sent": not context.dry_run}


@operation("notify.webhook", role="operator", on_cluster=False)
def notify_webhook(context: OperationContext, parameters: WebhookParameters) -> dict[str, Any]:
    """Post a message to a configured webhook.

    Returns:
        Name and host of the webhook, and the HTTP status of its reply.
    """
    webhooks = context.settings.actions.webhooks
    url = webhooks.get(parameters.name)
    if url is None:
        names = ", ".join(webhooks) or "none"
        raise InvalidParameters(
            f"unknown webhook {parameters.name!r}: [actions.webhooks] has {names}", parameters.name
        )
    payload = {
        "version": 1,
        "kind": "action",
        "cluster": context.cluster,
        "subject": parameters.subject,
        "text": parameters.text,
        "body": parameters.body,
        "by": context.speaker,
    }
    if context.dry_run:
        return {"name": parameters.name, "where": describe_webhook(url), "told": False}
    context.begin()
    http_status = post_webhook(url, payload, timeout_s=min(TIMEOUT_S, context.remaining_s))
    return {
        "name": parameters.name,
        "where": describe_webhook(url),
        "told": True,
        "answer": http_status,
    }
