"""What a search server's client is to us, either product's: a request, a reply, an error.

Below both clients and the one who chooses between them, so that neither of
them has to know who that is.
"""

from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from steward.archive.errors import ArchiveUnavailable

REQUESTS_AT_ONCE: Final = 2
"""How many a server is sent without waiting for the first reply."""


class Reply(msgspec.Struct, frozen=True):
    """What a server answered, whatever its status.

    Attributes:
        status: The HTTP status.
        body: The body, decompressed.
    """

    status: int
    body: bytes


class Wire(Protocol):
    """One of the two clients."""

    def send(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Reply:
        """Send a request; a status that is an error is returned, too.

        Raises:
            ArchiveUnavailable: There was no reply.
        """
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


def no_answer(urls: str, what: str, advice: str = "") -> ArchiveUnavailable:
    """The error for a server that did not answer.

    Args:
        urls: Which.
        what: What happened.
        advice: What to do about it, if we know.
    """
    text = cleaned(f"{urls} cannot be asked: {what}")
    return ArchiveUnavailable(f"{text}: {advice}" if advice else text, urls)


def too_slow(urls: str, timeout_s: float) -> ArchiveUnavailable:
    """The error for a server that took longer than it may."""
    return no_answer(urls, f"no answer within {timeout_s:g} s", "raise timeout_s if it is slow")


def tls_failed(urls: str, what: str) -> ArchiveUnavailable:
    """The error for a connection whose encryption failed."""
    if "CERTIFICATE_VERIFY_FAILED" in what:
        advice = "set ca_file to the certificate that signed the server's, and check its name"
    elif "WRONG_VERSION_NUMBER" in what or "RECORD_LAYER" in what:
        advice = "the server does not speak TLS on that port: write http:// or another port"
    elif "REQUIRED" in what or "ALERT" in what.upper():
        advice = "the server refused our side: check certificate_file and key_file"
    else:
        advice = "check ca_file, certificate_file and key_file"
    return no_answer(urls, f"TLS failed ({what})", advice)


def cleaned(text: str, longest: int = 300) -> str:
    """What a server said, as one line of a log or a table: printable, and not endless."""
    text = text[: 4 * longest]
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def innermost(error: BaseException) -> str:
    """What the deepest cause of a client's error says."""
    seen: Any = error
    for _ in range(8):
        inner = seen.__cause__ or getattr(seen, "reason", None) or seen.__context__
        if not isinstance(inner, BaseException):
            break
        seen = inner
    text = str(getattr(seen, "strerror", None) or seen)
    return text or type(seen).__name__
