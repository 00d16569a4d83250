"""How a mail gets out: through the program that the site's MailProg was, or through sendmail."""

import os
import select
import subprocess
import sys
import time
from email.header import Header
from email.message import EmailMessage
from email.utils import formataddr, formatdate, parseaddr
from typing import Final

import msgspec

from steward.core.ending import end_group
from steward.core.errors import Unavailable

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


def post(letter: Letter, page: str) -> None:
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
        _run([letter.sendmail, "-i", "-t"], message(letter, text), letter.timeout_s)


def message(letter: Letter, text: str) -> bytes:
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
