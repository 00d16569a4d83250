"""Notifications: send mail through MailProg or sendmail, and post JSON to webhooks.

``send_mail`` sends an :class:`OutgoingMail` through the program that was the site's MailProg
before Steward, or through sendmail. ``read_mail_body`` reads the text that slurmctld gives to
MailProg. ``post_webhook`` sends JSON to a webhook; errors name only its host, because its URL is a
secret of the site.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from email.header import Header
from email.message import EmailMessage
from email.utils import formataddr, formatdate, parseaddr
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from steward.core.errors import StewardError, Unavailable
from steward.core.processes import kill_group

MAIL_TIMEOUT_S: Final = 60.0
"""Longest run time of the program that sends a mail, in seconds."""
_WHOLE_MESSAGE_PROGRAMS: Final = frozenset({"sendmail", "msmtp", "ssmtp"})
"""Names, without ending, of programs that take a whole message with recipients in its header."""
_MOST_BODY: Final = 1024 * 1024
"""Largest mail text, in bytes."""
_BODY_S: Final = 10.0
"""Longest wait for the mail's text, in seconds."""
_LONGEST_PLAIN: Final = 900
"""Longest header text in plain form, in characters; a longer one is encoded, to fold it anywhere.

RFC 5322 allows 998 characters in a line.
"""
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Default PATH: slurmctld gives MailProg none."""


class MailNotSent(Unavailable):
    """A mail was not sent, or its fate is unknown."""


class MailRejected(MailNotSent):
    """The program that sends mail rejected a message."""


class OutgoingMail(msgspec.Struct, frozen=True, kw_only=True):
    """A mail to send.

    Attributes:
        to: Validated addresses.
        subject: One line.
        body: Original text of the mail.
        program: Program to call as MailProg, or a ``sendmail``, which takes a whole message.
        sender: Sender address; "" for the user of the process.
        timeout_s: Longest run time of the program, in seconds.
    """

    to: tuple[str, ...]
    subject: str
    body: bytes
    program: str
    sender: str
    timeout_s: float = MAIL_TIMEOUT_S


def read_mail_body() -> bytes:
    """Read the mail's text from standard input, within a time limit."""
    if sys.stdin is None or sys.stdin.isatty():
        return b""
    body = b""
    deadline = time.monotonic() + _BODY_S
    descriptor = sys.stdin.fileno()
    while len(body) < _MOST_BODY:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(descriptor, 65536) if ready else b""
        if not chunk:
            break
        body += chunk
    return body


def send_mail(mail: OutgoingMail, page: str) -> None:
    """Send a mail, with the text ``page`` (the job's page) after its body.

    Raises:
        MailRejected: The program rejected it.
        MailNotSent: It was not sent, or its fate is unknown.
    """
    body = mail.body.decode("utf-8", "replace")
    text = "\n".join(part for part in (body.rstrip("\n"), page) if part)
    if os.path.basename(mail.program).partition(".")[0] in _WHOLE_MESSAGE_PROGRAMS:
        command, data = [mail.program, "-i", "-t"], build_mail_message(mail, text)
    else:
        command, data = [mail.program, "-s", mail.subject, ",".join(mail.to)], text.encode()
    _run_mail_program(command, data, mail.timeout_s)


def build_mail_message(mail: OutgoingMail, text: str) -> bytes:
    """Build the whole message, for sendmail."""
    headers = {
        "To": ", ".join(mail.to),
        "Subject": _encode_header(mail.subject),
        "From": mail.sender if mail.sender.isascii() else _format_sender(mail.sender),
        "Date": formatdate(localtime=True),
        # Keeps vacation responders from answering slurmctld (RFC 3834).
        "Auto-Submitted": "auto-generated",
    }
    # By hand: an EmailMessage decodes encoded words in its headers, which may then contain
    # newlines. It builds only the body.
    head = "".join(f"{name}: {_fold_header(value)}\n" for name, value in headers.items() if value)
    message = EmailMessage()
    message.set_content(text or "\n", cte="quoted-printable" if not text.isascii() else None)
    return head.encode("ascii") + bytes(message)


def _encode_header(text: str) -> str:
    """Encode a header's text, so that plain text cannot pass for an encoded word."""
    is_plain = text.isascii() and text.isprintable() and "=?" not in text
    is_plain = is_plain and len(text) <= _LONGEST_PLAIN
    charset = None if is_plain else "utf-8"
    return Header(text.encode("utf-8", "replace").decode(), charset).encode()


def _format_sender(sender: str) -> str:
    name, address = parseaddr(sender)
    return formataddr((name, address.encode("ascii", "replace").decode()))


def _fold_header(value: str) -> str:
    """Fold a header's value, so that none of its lines can pass for another header."""
    return "\n ".join(line.strip() for line in value.splitlines() if line.strip())


def _run_mail_program(command: list[str], data: bytes, timeout_s: float) -> None:
    """Run a mail program with the message on its standard input."""
    environment = {**os.environ, "PATH": os.environ.get("PATH") or _PATH}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise MailNotSent(
            f"cannot send mail: cannot start {command[0]}: {error.strerror}. Correct 'program' of "
            "[mail], or --program",
            command,
        ) from error
    try:
        process.communicate(data, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise MailNotSent(f"{command[0]} did not end within {timeout_s:g} s", command) from None
    finally:
        if process.returncode is None:
            kill_group(process)
    if process.returncode == os.EX_TEMPFAIL:
        raise MailNotSent(
            f"{command[0]} exited with code {os.EX_TEMPFAIL}: temporary failure",
            command,
        )
    if process.returncode:
        raise MailRejected(f"{command[0]} exited with code {process.returncode}", command)


TIMEOUT_S: Final = 10.0
"""Default time-out of a webhook, in seconds."""
_REFUSED: Final = range(400, 500)
"""HTTP statuses that reject a message for good, except those of ``_TRY_AGAIN``."""
_TRY_AGAIN: Final = frozenset({408, 425, 429})
"""HTTP statuses after which the message may be sent again."""


class WebhookUnavailable(Unavailable):
    """A webhook does not answer now, or it is unknown whether it received the message."""


class WebhookRejected(StewardError):
    """A webhook rejects the message for good."""


def post_webhook(url: str, payload: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S) -> int:
    """Post JSON to a webhook; return the HTTP status of its answer.

    Args:
        url: Address of the webhook.
        payload: Data to send, as JSON.
        timeout_s: Time-out of each of connecting, sending and answering, in seconds.

    Raises:
        WebhookUnavailable: It does not answer: try again later.
        WebhookRejected: It rejects the message.
    """
    import httpx

    target = describe_webhook(url)
    try:
        reply = httpx.post(
            url,
            content=msgspec.json.encode(payload),
            headers={"Content-Type": "application/json"},
            timeout=timeout_s,
            follow_redirects=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        # The error's text may hold the URL, and its cause would be shown with it.
        kind = type(error).__name__
        raise WebhookUnavailable(f"cannot notify {target}: {kind}", target) from None
    code = reply.status_code
    if code in _REFUSED and code not in _TRY_AGAIN:
        raise WebhookRejected(f"{target} rejects the notification with status {code}", target)
    if not reply.is_success:
        raise WebhookUnavailable(f"cannot notify {target}: it answers with status {code}", target)
    return code


def describe_webhook(url: str) -> str:
    """Name a webhook by its host, without the secret parts of its URL."""
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None  # not a URL: sending to it reports that
    return f"the webhook at {host}" if host else "the webhook"
