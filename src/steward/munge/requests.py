"""What a MUNGE credential that comes with a request of HTTP is made over: that request, no other.

The text is four lines: a word for what it is, method and path, the SHA-256 of the body,
and the pages' address, so that a server which is sent a credential cannot take it to
another. munged itself sees to it that one is opened once, and soon.
"""

import hashlib
from typing import Final

SCHEME: Final = "Munge"
"""In the header ``Authorization``, before the credential."""
_WORD: Final = "steward api 1"
_USUAL_PORTS: Final = (":443", ":80")


def statement(method: str, target: str, body: bytes, origin: str) -> bytes:
    """The text that a credential for a request is made over.

    Args:
        method: Of HTTP.
        target: The path from ``/api/`` on, with its query if there is one.
        body: What is sent.
        origin: Host, and port if it is not the usual one, of the pages' address.
    """
    digest = hashlib.sha256(body).hexdigest()
    return f"{_WORD}\n{method} {target}\n{digest}\n{_plain(origin)}\n".encode()


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


def _plain(origin: str) -> str:
    host = origin.rpartition("@")[2].lower()
    for port in _USUAL_PORTS:
        host = host.removesuffix(port)
    return host
