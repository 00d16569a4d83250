"""Unix socket transport: send a request to the local daemon and decode its reply lines.

``ask_socket`` is the entry point; it retries for 10 s while the daemon is busy. ``decode_replies``,
``read_replies`` and ``make_decode_error`` decode the lines of an answer and serve ``web.py`` too.
"""

import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import msgspec

from steward.client.places import ClientError, DaemonAway
from steward.core.actions import Action
from steward.core.rpc import (
    DaemonBusy,
    ReplyLine,
    decode_reply_line,
    encode_request_line,
    make_error,
    shorten_socket_path,
)
from steward.core.waits import Backoff

_CONNECT_S: Final = 10
"""Longest wait for a place in the daemon's queue, and for retries while it is busy, in seconds."""
_TIMEVAL: Final = struct.Struct("ll")
SILENCE_S: Final = 330.0
"""Longest silence within an answer, in seconds: slightly more than an action may take."""


def ask_socket(
    path: str,
    action: Action,
    request: Any,
    key: str = "",
    *,
    silence_s: float = SILENCE_S,
    state_dir: str = "",
) -> Iterator[Any]:
    """Send a request to the daemon that listens on a socket; yield items and answer.

    Args:
        path: Path of the socket.
        action: The action.
        request: A value of its request type.
        key: Idempotency key; "" for none.
        silence_s: Longest silence within the answer, in seconds.
        state_dir: State directory of the daemon that may answer; "" for any.

    Raises:
        DaemonAway: No daemon answers.
        ClientError: Its answer cannot be understood.
        StewardError: The action rejects the request or fails.
    """
    line = encode_request_line(action.name, request, key=key, state_dir=state_dir)
    deadline = time.monotonic() + _CONNECT_S
    backoff = Backoff(0.05, 1.0)
    while True:
        try:
            yield from _send_request(path, action, line, silence_s)
        except DaemonBusy:
            # The daemon neither ran nor answered any part of it.
            wait_s = backoff.next_s() * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
            if time.monotonic() + wait_s >= deadline:
                raise
            time.sleep(wait_s)
        else:
            return


def _send_request(path: str, action: Action, line: bytes, silence_s: float) -> Iterator[Any]:
    with _connect_socket(path) as connection:
        connection.settimeout(silence_s)
        # The daemon does not read the request of a client that it rejects; its reply says why.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(line)
        with connection.makefile("rb") as lines:
            yield from decode_replies(action, read_replies(lines, f"the daemon on {path}"))


def decode_replies(action: Action, replies: Iterator[ReplyLine]) -> Iterator[Any]:
    """Decode reply lines; yield the items of a stream, then the answer.

    Raises:
        ClientError: They cannot be understood.
        StewardError: The error that a line reports.
    """
    items = msgspec.json.Decoder(_make_union(action.items))
    for reply in replies:
        if reply.error:
            raise make_error(reply)
        try:
            if reply.ok:
                yield msgspec.json.decode(reply.answer, type=action.answer)
                return
            item = items.decode(reply.item)
        except msgspec.MsgspecError as error:
            raise make_decode_error(action.name, error) from error
        yield item


def read_replies(lines: BinaryIO, sender: str) -> Iterator[ReplyLine]:
    """Read the reply lines of an answer; only the last line ends it.

    Raises:
        DaemonAway: They break off.
        ClientError: A line is invalid.
    """
    while True:
        try:
            line = lines.readline()
        except TimeoutError as error:
            raise DaemonAway(f"{sender} no longer answers", sender) from error
        except ConnectionResetError:
            line = b""
        if not line:
            raise DaemonAway(
                f"{sender} closed the connection before the end of its reply: see its log",
                sender,
            )
        try:
            yield decode_reply_line(line)
        except msgspec.MsgspecError as error:
            raise make_decode_error(sender, error) from error


def make_decode_error(sender: str, error: Exception) -> ClientError:
    """Make the error for an answer that cannot be decoded."""
    return ClientError(
        f"cannot decode the reply of {sender}: is it of another release? ({error})", sender
    )


def _connect_socket(path: str) -> socket.socket:
    """Connect to the daemon, waiting for a place in its queue."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The kernel waits for a place in the daemon's queue; with a time-out of Python's it would
    # fail at once if the queue is full.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(_CONNECT_S, 0))
    try:
        with shorten_socket_path(path) as name:
            connection.connect(name)
    except OSError as error:
        connection.close()
        reason = error.strerror or str(error)
        raise DaemonAway(
            f"no daemon answers at {path} ({reason}): start 'steward serve', or name its "
            "configuration or socket with --config or --socket",
            path,
        ) from error
    return connection


def _make_union(types: tuple[type[msgspec.Struct], ...]) -> Any:
    union: Any = Any
    for index, item_type in enumerate(types):
        union = item_type if index == 0 else union | item_type
    return union
