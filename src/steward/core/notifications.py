"""How a mail gets out: through the program that the site's MailProg was, or through sendmail."""

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
from steward.core.processes import end_group

_MOST_BODY: Final = 1024 * 1024
_BODY_S: Final = 10.0
_LONGEST_PLAIN: Final = 900
"""A line has at most 998 letters (RFC 5322); encoded words can be broken anywhere."""
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""slurmctld gives MailProg no PATH."""


class NotSent(Unavailable):
    """A mail was not sent, or nobody knows whether it was."""


class NotTaken(NotSent):
    """The program that sends mails refused one."""


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """A mail to be sent.

    Attributes:
        to: Addresses, which were looked at.
        subject: One line.
        body: What was to be sent.
        program: What is called as MailProg is; "" for sendmail.
        sendmail: What takes a whole message.
        sender: From whom; "" for whom it runs as.
        timeout_s: How long it may take, in seconds.
    """

    to: tuple[str, ...]
    subject: str
    body: bytes
    program: str
    sendmail: str
    sender: str
    timeout_s: float


def read_body() -> bytes:
    """What comes on the standard input, as long as it comes soon."""
    if sys.stdin is None or sys.stdin.isatty():
        return b""
    found = b""
    deadline = time.monotonic() + _BODY_S
    descriptor = sys.stdin.fileno()
    while len(found) < _MOST_BODY:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(descriptor, 65536) if ready else b""
        if not piece:
            break
        found += piece
    return found


def send_letter(letter: Letter, page: str) -> None:
    """Send a mail, with a page behind what was to be said.

    Raises:
        NotTaken: It was refused.
        NotSent: It was not sent, or nobody knows whether it was.
    """
    said = letter.body.decode("utf-8", "replace")
    text = "\n".join(part for part in (said.rstrip("\n"), page) if part)
    if letter.program:
        words = [letter.program, "-s", letter.subject, ",".join(letter.to)]
        _run(words, text.encode(), letter.timeout_s)
    else:
        _run([letter.sendmail, "-i", "-t"], letter_message(letter, text), letter.timeout_s)


def letter_message(letter: Letter, text: str) -> bytes:
    """A whole message, for sendmail."""
    headers = {
        "To": ", ".join(letter.to),
        "Subject": _encoded(letter.subject),
        "From": letter.sender if letter.sender.isascii() else _named(letter.sender),
        "Date": formatdate(localtime=True),
        # So that nobody's absence is answered to slurmctld (RFC 3834).
        "Auto-Submitted": "auto-generated",
    }
    # By hand: an EmailMessage decodes the encoded words of what it is given as a header, and
    # what they stand for may have newlines. It makes those of the body only.
    head = "".join(f"{name}: {_whole(value)}\n" for name, value in headers.items() if value)
    built = EmailMessage()
    built.set_content(text or "\n", cte="quoted-printable" if not text.isascii() else None)
    return head.encode("ascii") + bytes(built)


def _encoded(text: str) -> str:
    """A header's text, which is itself no encoded word, whatever it looks like."""
    is_plain = text.isascii() and text.isprintable() and "=?" not in text
    is_plain = is_plain and len(text) <= _LONGEST_PLAIN
    charset = None if is_plain else "utf-8"
    return Header(text.encode("utf-8", "replace").decode(), charset).encode()


def _named(sender: str) -> str:
    name, address = parseaddr(sender)
    return formataddr((name, address.encode("ascii", "replace").decode()))


def _whole(value: str) -> str:
    """A header's value, on lines none of which could be taken for another header."""
    return "\n ".join(line.strip() for line in value.splitlines() if line.strip())


def _run(words: list[str], data: bytes, timeout_s: float) -> None:
    environment = {**os.environ, "PATH": os.environ.get("PATH") or _PATH}
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise NotSent(f"{words[0]} cannot be started: {error.strerror}", words) from error
    try:
        process.communicate(data, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise NotSent(f"{words[0]} did not end within {timeout_s:g} s", words) from None
    finally:
        if process.returncode is None:
            end_group(process)
    if process.returncode == os.EX_TEMPFAIL:
        raise NotSent(f"{words[0]} ended with {os.EX_TEMPFAIL}: it cannot be sent now", words)
    if process.returncode:
        raise NotTaken(f"{words[0]} ended with {process.returncode}", words)


TIMEOUT_S: Final = 10.0
_REFUSED: Final = range(400, 500)
_TRY_AGAIN: Final = frozenset({408, 425, 429})


class WebhookAway(Unavailable):
    """A webhook does not answer now, or nobody knows whether it was told."""


class WebhookRefused(StewardError):
    """A webhook does not take what it is told, and will not."""


def post_webhook(url: str, said: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S) -> int:
    """Tell a webhook something; the status that it answers with.

    Args:
        url: Where it is.
        said: What it is told, as JSON.
        timeout_s: How long it may take for each of connecting, sending and answering.

    Raises:
        WebhookAway: It does not answer: try again later.
        WebhookRefused: It does not take it.
    """
    import httpx

    where = host_of(url)
    try:
        answer = httpx.post(
            url,
            content=msgspec.json.encode(said),
            headers={"Content-Type": "application/json"},
            timeout=timeout_s,
            follow_redirects=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        # What it says may hold the URL, and where the error is shown its cause is, too.
        kind = type(error).__name__
        raise WebhookAway(f"{where} cannot be told: {kind}", where) from None
    code = answer.status_code
    if code in _REFUSED and code not in _TRY_AGAIN:
        raise WebhookRefused(f"{where} does not take it: it answers {code}", where)
    if not answer.is_success:
        raise WebhookAway(f"{where} answers {code}", where)
    return code


def host_of(url: str) -> str:
    """A webhook, as it may be spoken of."""
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None  # it is no URL, and that is said when it is used
    return f"the webhook at {host}" if host else "the webhook"
