"""What a MUNGE credential that comes with a request of HTTP is made over: that request, no other.

The text is four lines: a word for what it is, method and path, the SHA-256 of the body,
and the pages' address, so that a server which is sent a credential cannot take it to
another. munged itself sees to it that one is opened once, and soon.
"""

import hashlib
import re
from typing import Final

from steward.core.errors import UsageError

SCHEME: Final = "Munge"
"""In the header ``Authorization``, before the credential."""
_WORD: Final = "steward api 1"
_USUAL_PORTS: Final = (":443", ":80")
_LINE: Final = re.compile(r"[A-Z]{1,20} /[!-~]{0,16384}", re.ASCII)
_CREDENTIAL: Final = re.compile(r"MUNGE:[A-Za-z0-9+/]{4,16384}={0,2}:", re.ASCII)
_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


def statement(method: str, target: str, body: bytes, origin: str) -> bytes:
    """The text that a credential for a request is made over.

    Args:
        method: Of HTTP.
        target: The path from ``/api/`` on, with its query if there is one.
        body: What is sent.
        origin: Host, and port if it is not the usual one, of the pages' address.
    """
    return _text(method, target, digest(body), origin)


def digest(body: bytes) -> str:
    """What stands for a body in a statement: its SHA-256, in hexadecimal."""
    return hashlib.sha256(body).hexdigest()


def is_credential(text: str) -> bool:
    """Whether a text may be a credential, as far as can be said without munged."""
    return _CREDENTIAL.fullmatch(text) is not None


def statement_over(method: str, target: str, shown: str, origin: str) -> bytes:
    """The same as :func:`statement`, by the digest of a body that somebody else has read.

    Args:
        method: Of HTTP.
        target: The path from ``/api/`` on, with its query if there is one.
        shown: The digest of what is sent.
        origin: Host, and port if it is not the usual one, of the pages' address.

    Raises:
        UsageError: It is not a request of HTTP that is described so.
    """
    if not _LINE.fullmatch(f"{method} {target}") or not _DIGEST.fullmatch(shown):
        raise UsageError("that is no request of HTTP, whose maker MUNGE could name")
    return _text(method, target, shown, origin)


def difference(made: bytes, asked: bytes) -> str:
    """In what a credential's text is not that of the request it came with; "" if it is."""
    if made == asked:
        return ""
    made_lines, asked_lines = made.split(b"\n"), asked.split(b"\n")
    if len(made_lines) != len(asked_lines) or made_lines[:3] != asked_lines[:3]:
        return "was made over another request"
    theirs, ours = (
        lines[3].decode("utf-8", "backslashreplace") for lines in (made_lines, asked_lines)
    )
    return f"was made for {theirs!r}, and these pages are {ours!r} ('url' of [web])"


def _text(method: str, target: str, shown: str, origin: str) -> bytes:
    return f"{_WORD}\n{method} {target}\n{shown}\n{_plain(origin)}\n".encode()


def _plain(origin: str) -> str:
    host = origin.rpartition("@")[2].lower()
    for port in _USUAL_PORTS:
        host = host.removesuffix(port)
    return host
