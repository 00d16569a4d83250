"""Local RPC on Unix sockets: one line of JSON as request, lines of JSON as reply.

Commands, calls of the gate and of the journal, reloads and slurmctld's triggers use it. A request
(`ActionRequest`) is ``{"v":1,"action":"archive.list","args":{…}}``, one per connection. ``"auth"``
adds the secret of a session, token or trigger; ``"key"`` is an idempotency key; ``"keep":true``
lets the web server's process send more requests on the same connection.

A reply (`ReplyLine`) is ``{"item":…}`` for every item of a stream, then either
``{"ok":true,"answer":{…}}`` or ``{"error":"…","exit_code":1,"kind":"PermissionRefused"}``. A
service may add errors of its own to the kinds. `send_request` is the client of a process's own
socket, whose server is `rpc_server.RpcListener`. `shorten_socket_path`, `connect_socket` and
`make_socket_directory` serve the paths of Unix sockets.
"""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec

from steward.core.actions import ActionError
from steward.core.errors import (
    Conflict,
    InternalFailure,
    NotFound,
    PermissionRefused,
    StewardError,
    Unavailable,
    UnknownCredential,
    UsageError,
)

VERSION: Final = 1
LONGEST_REQUEST: Final = 1 << 20
"""Maximum length of a request line, in bytes."""
_READ_BYTES: Final = 1 << 18
_LONGEST_REPLY: Final = 1 << 20
"""Default of the maximum length of a reply that `send_request` reads, in bytes."""


_LONGEST_ADDRESS: Final = 108
_NOTHING: Final = msgspec.Raw()
_Answer = TypeVar("_Answer")


@contextlib.contextmanager
def shorten_socket_path(path: str) -> Iterator[str]:
    """Return a Unix socket's path in a form that fits sun_path, however long it is.

    sun_path holds 107 bytes, unix(7); a link to the directory in /proc is shorter.

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


def make_socket_directory(directory: str) -> None:
    """Make the directory of a socket for all users, whatever Steward's umask.

    Raises:
        OSError: The directory cannot be made.
    """
    if not os.path.isdir(directory):
        os.makedirs(directory, exist_ok=True)
        os.chmod(directory, 0o755)  # noqa: S103 - all users connect to what is in it


class ActionRequest(msgspec.Struct, frozen=True):
    """Request on the daemon's socket.

    Attributes:
        v: Version of the protocol.
        action: The action's name.
        args: The action's request as plain values.
        auth: Secret of the caller's session or token; "" for the peer itself.
        keep: Whether another request follows on this connection.
        key: Idempotency key of the caller; an action that changes something runs once per key.
        state_dir: State directory of the daemon that may answer; "" for any.
    """

    v: int
    action: str
    args: Any = {}
    auth: str = ""
    keep: bool = False
    key: str = ""
    state_dir: str = ""


class RawRequest(ActionRequest, frozen=True):
    """Request whose arguments its service decodes, straight into their type."""

    args: msgspec.Raw = msgspec.Raw(b"null")


class ReplyLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a reply.

    Attributes:
        ok: Set on the last line of a successful reply.
        answer: The answer, on that last line.
        item: One item of a stream.
        error: The error message; this is the last line.
        exit_code: Exit code for the command.
        kind: The error's class: ``UnknownCredential``, ``NotFound``, ``UsageError`` …, or one of
            the service's own; "" for any other.
    """

    ok: bool = False
    answer: msgspec.Raw = _NOTHING
    item: msgspec.Raw = _NOTHING
    error: str = ""
    exit_code: int = 0
    kind: str = ""


class DaemonBusy(Unavailable):
    """The daemon closed a connection before it read the request: it can be sent again."""


class RpcUnavailable(Unavailable):
    """No process answers on the socket."""


ErrorTypes = Sequence[type[StewardError]]
_FAMILIES: ErrorTypes = (
    DaemonBusy,
    UnknownCredential,
    NotFound,
    Conflict,
    PermissionRefused,
    Unavailable,
    UsageError,
    InternalFailure,
)
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ReplyLine)


def encode_answer_line(answer: Any) -> bytes:
    """Encode the last line of a successful reply."""
    return _encode_line(ReplyLine(ok=True, answer=msgspec.Raw(_encoder.encode(answer))))


def encode_item_line(item: Any) -> bytes:
    """Encode one item of a stream."""
    return _encode_line(ReplyLine(item=msgspec.Raw(_encoder.encode(item))))


def encode_error_line(error: StewardError, own: ErrorTypes = ()) -> bytes:
    """Encode the last line of a failed reply; ``own`` are the service's own errors."""
    families = (*own, *_FAMILIES)
    kind = next((family.__name__ for family in families if isinstance(error, family)), "")
    text = str(error).encode("utf-8", "backslashreplace").decode()
    return _encode_line(ReplyLine(error=text or "failed", exit_code=error.exit_code, kind=kind))


def encode_request_line(
    action: str,
    request: Any,
    *,
    auth: str = "",
    keep: bool = False,
    key: str = "",
    state_dir: str = "",
) -> bytes:
    """Encode a request."""
    message = ActionRequest(VERSION, action, request, auth, keep, key, state_dir)
    return _encoder.encode(message) + b"\n"


def decode_request(line: bytes, request_type: type[ActionRequest] = ActionRequest) -> ActionRequest:
    """Decode a request and check its protocol version.

    Raises:
        ActionError: It is malformed, or of another version.
    """
    try:
        message = msgspec.json.decode(line, type=request_type)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ActionError(f"cannot decode the request: {error}") from error
    if message.v != VERSION:
        raise ActionError(
            f"this daemon uses version {VERSION} of the protocol, not {message.v}: "
            "use the steward command of the same release"
        )
    return message


def decode_reply_line(line: bytes) -> ReplyLine:
    """Decode one line of a reply.

    Raises:
        msgspec.MsgspecError: The line is malformed.
    """
    return _decoder.decode(line)


def make_error(reply: ReplyLine, own: ErrorTypes = ()) -> StewardError:
    """Convert an error reply to the exception that it names; ``own`` as in encoding."""
    families = (*own, *_FAMILIES)
    family = next((each for each in families if each.__name__ == reply.kind), StewardError)
    error = family(reply.error)
    error.exit_code = reply.exit_code or 1
    return error


def _encode_line(reply: ReplyLine) -> bytes:
    # JSON escapes newlines within strings, so the only newline ends the line.
    return _encoder.encode(reply) + b"\n"


def connect_socket(connection: socket.socket, path: str) -> None:
    """Connect to a Unix socket, however long its path is.

    Raises:
        OSError: No process listens there.
    """
    with shorten_socket_path(path) as name:
        connection.connect(name)


def send_request(
    path: str,
    action: str,
    args: Any,
    answer: type[_Answer],
    *,
    timeout_s: float,
    own: ErrorTypes = (),
    max_bytes: int = _LONGEST_REPLY,
) -> _Answer:
    """Send a request to a process's own socket and return the answer.

    Args:
        path: Path of the socket.
        action: Name of the action.
        args: Its request.
        answer: Type of the answer.
        timeout_s: Longest wait for the answer, in seconds.
        own: The service's own errors.
        max_bytes: Maximum size of the reply, in bytes.

    Raises:
        RpcUnavailable: No process answers.
        StewardError: The error that it answers.
    """
    with (
        _explain_failures(path, timeout_s),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
    ):
        connection.settimeout(timeout_s)
        connect_socket(connection, path)
        # The server rejects a user without reading the request; its reply says why.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(encode_request_line(action, args))
        with connection.makefile("rb") as lines:
            line = lines.readline(max_bytes + 1)
    return _read_answer(line, path, answer, own, max_bytes)


async def send_request_async(
    path: str,
    action: str,
    args: Any,
    answer: type[_Answer],
    *,
    timeout_s: float,
    own: ErrorTypes = (),
    max_bytes: int = _LONGEST_REPLY,
) -> _Answer:
    """Send a request as `send_request` does, from an event loop.

    Raises:
        RpcUnavailable: No process answers.
        StewardError: The error that it answers.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    line = bytearray()
    with _explain_failures(path, timeout_s):
        async with asyncio.timeout(timeout_s):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.setblocking(False)
                connect_socket(connection, path)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    await loop.sock_sendall(connection, encode_request_line(action, args))
                while not line.endswith(b"\n") and len(line) <= max_bytes:
                    piece = await loop.sock_recv(connection, _READ_BYTES)
                    if not piece:
                        break
                    line += piece
    return _read_answer(bytes(line), path, answer, own, max_bytes)


@contextlib.contextmanager
def _explain_failures(path: str, timeout_s: float) -> Iterator[None]:
    """Raise RpcUnavailable, with the reason, if a socket fails or is silent."""
    try:
        yield
    except TimeoutError as error:
        raise RpcUnavailable(
            f"the daemon at {path} did not answer within {timeout_s:g} s: see its log", path
        ) from error
    except OSError as error:
        raise RpcUnavailable(
            f"cannot reach a daemon at {path}: {error.strerror or error}. Is 'steward serve' "
            "running, and are you root or its user?",
            path,
        ) from error


def _read_answer(
    line: bytes, path: str, answer: type[_Answer], own: ErrorTypes, max_bytes: int
) -> _Answer:
    """Return the answer in the last line of a reply, or raise the error in it."""
    if len(line) > max_bytes:
        raise RpcUnavailable(
            f"the reply of the daemon at {path} is too large: {len(line)} bytes or more, of "
            f"{max_bytes} at most: request less",
            path,
        )
    if not line.endswith(b"\n"):
        raise RpcUnavailable(
            f"the daemon at {path} closed the connection without a reply: see its log", path
        )
    try:
        reply = decode_reply_line(line)
        if not reply.error:
            return msgspec.json.decode(reply.answer, type=answer)
    except msgspec.MsgspecError as error:
        raise RpcUnavailable(
            f"cannot decode the reply of the daemon at {path}: {error}", path
        ) from error
    raise make_error(reply, own)
