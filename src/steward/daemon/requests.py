"""What goes over the daemon's socket: a line of JSON asked, lines of JSON answered.

A request is ``{"v":1,"action":"archive.list","args":{…}}``, one a connection. Whoever asks
for somebody else adds ``"auth"``, the secret of that one's session or token, whoever wants it
done once ``"key"``, and the pages' process ``"keep":true`` where it has more to ask on the same
connection.
The answer is ``{"item":…}`` for every item of a stream, and at last either
``{"ok":true,"answer":{…}}`` or ``{"error":"…","exit_code":1,"kind":"Refused"}``.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from steward.admin.credentials.errors import NotKnown
from steward.core.errors import (
    Conflict,
    Failed,
    Missing,
    Refused,
    StewardError,
    Unavailable,
    UsageError,
)

VERSION: Final = 1
LONGEST_REQUEST: Final = 1 << 20
"""Bytes of the longest request line that is read."""


_LONGEST_ADDRESS: Final = 108
_NOTHING: Final = msgspec.Raw()


@contextlib.contextmanager
def address(path: str) -> Iterator[str]:
    """A Unix socket's path in a form that the kernel takes, however long the path is.

    A socket's address holds 107 bytes, unix(7); a link to its directory in /proc is shorter.

    Raises:
        OSError: The socket's directory cannot be reached.
    """
    if len(os.fsencode(path)) < _LONGEST_ADDRESS:
        yield path
        return
    fd = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{os.path.basename(path)}"
    finally:
        os.close(fd)


def make_directory(directory: str) -> None:
    """Make the directory of a socket that all users connect to, whatever our umask.

    Raises:
        OSError: It cannot be made.
    """
    if not os.path.isdir(directory):
        os.makedirs(directory, exist_ok=True)
        os.chmod(directory, 0o755)  # noqa: S103 - all users connect to what is in it


class Ask(msgspec.Struct, frozen=True):
    """A request.

    Attributes:
        v: Version of the protocol.
        action: Name of the action.
        args: Its request as plain values.
        auth: Secret of the session or token of whoever asks; "" for the peer itself.
        keep: Whether another request follows on this connection.
        key: A word of whoever asks: what changes something is done once under it.
    """

    v: int
    action: str
    args: Any = {}
    auth: str = ""
    keep: bool = False
    key: str = ""


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of an answer.

    Attributes:
        ok: Set on the last line of an answer that is none of an error.
        answer: The answer; on that last line, empty on others.
        item: One item of a stream, empty on the last line.
        error: One line that says what went wrong; this is the last line.
        exit_code: What the command should exit with.
        kind: The error's family: ``NotKnown``, ``Missing``, ``UsageError`` …; "" for none of them.
    """

    ok: bool = False
    answer: msgspec.Raw = _NOTHING
    item: msgspec.Raw = _NOTHING
    error: str = ""
    exit_code: int = 0
    kind: str = ""


class Busy(Unavailable):
    """The daemon turned a connection away before it read the request: it can be sent again."""


_FAMILIES: tuple[type[StewardError], ...] = (
    *(Busy, NotKnown, Missing, Conflict, Refused, Unavailable, UsageError, Failed),
)
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Reply)


def answer_line(answer: Any) -> bytes:
    """The last line of an answer."""
    return _line(Reply(ok=True, answer=msgspec.Raw(_encoder.encode(answer))))


def item_line(item: Any) -> bytes:
    """The line of one item of a stream."""
    return _line(Reply(item=msgspec.Raw(_encoder.encode(item))))


def error_line(error: StewardError) -> bytes:
    """The last line of an answer that went wrong."""
    kind = next((family.__name__ for family in _FAMILIES if isinstance(error, family)), "")
    text = str(error).encode("utf-8", "backslashreplace").decode()
    return _line(Reply(error=text or "failed", exit_code=error.exit_code, kind=kind))


def ask_line(
    action: str, request: Any, *, auth: str = "", keep: bool = False, key: str = ""
) -> bytes:
    """The line that asks for an action."""
    return _encoder.encode(Ask(VERSION, action, request, auth, keep, key)) + b"\n"


def read_reply(line: bytes) -> Reply:
    """A line of an answer.

    Raises:
        msgspec.MsgspecError: It is none.
    """
    return _decoder.decode(line)


def error_of(reply: Reply) -> StewardError:
    """The error that a reply tells of, of the family that it was."""
    family = next((known for known in _FAMILIES if known.__name__ == reply.kind), StewardError)
    error = family(reply.error)
    error.exit_code = reply.exit_code or 1
    return error


def _line(reply: Reply) -> bytes:
    # JSON escapes newlines within strings, so that the only one is the line's end.
    return _encoder.encode(reply) + b"\n"
