"""Unix socket transport: send a request to the local daemon and decode its reply lines.

``remote`` is the entry point; ``replies``, ``told`` and ``not_understood`` decode the lines of
an answer and serve ``web.py`` too.
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
from steward.core.waits import Backoff
from steward.daemon.requests import Busy, Reply, address, ask_line, error_of, read_reply

_CONNECT_S: Final = 10
"""Longest wait for a place in the daemon's queue, and for retries while it is busy."""
_TIMEVAL: Final = struct.Struct("ll")
SILENCE_S: Final = 330.0
"""Longest silence within an answer, in seconds: slightly more than an action may take."""


def remote(path: str, action: Action, request: Any, key: str = "") -> Iterator[Any]:
    """Send a request to the daemon that listens on a socket; yield items and answer.

    Args:
        path: Path of the socket.
        action: The action.
        request: A value of its request type.
        key: Idempotency key; "" for none.

    Raises:
        DaemonAway: No daemon answers.
        ClientError: Its answer cannot be understood.
        StewardError: The action rejects the request or fails.
    """
    until = time.monotonic() + _CONNECT_S
    backoff = Backoff(0.05, 1.0)
    while True:
        try:
            yield from _asked(path, action, request, key)
        except Busy:
            # The daemon neither ran nor answered any part of it.
            wait_s = backoff.next_s() * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
            if time.monotonic() + wait_s >= until:
                raise
            time.sleep(wait_s)
        else:
            return


def _asked(path: str, action: Action, request: Any, key: str) -> Iterator[Any]:
    with _connect(path) as connection:
        # A rejected client's request is not read; the reason is read next.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(ask_line(action.name, request, key=key))
        with connection.makefile("rb") as lines:
            yield from told(action, replies(lines, f"the daemon on {path}"))


def told(action: Action, found: Iterator[Reply]) -> Iterator[Any]:
    """Decode reply lines; yield the items of a stream, then the answer.

    Raises:
        ClientError: They cannot be understood.
        StewardError: The error that a line reports.
    """
    items = msgspec.json.Decoder(_union(action.items))
    for reply in found:
        if reply.error:
            raise error_of(reply)
        try:
            if reply.ok:
                yield msgspec.json.decode(reply.answer, type=action.answer)
                return
            item = items.decode(reply.item)
        except msgspec.MsgspecError as error:
            raise not_understood(action.name, error) from error
        yield item


def replies(lines: BinaryIO, who: str) -> Iterator[Reply]:
    """Read the reply lines of an answer; only the last line ends it.

    Raises:
        DaemonAway: They break off.
        ClientError: A line is invalid.
    """
    while True:
        try:
            line = lines.readline()
        except TimeoutError as error:
            raise DaemonAway(f"{who} does not answer any more", who) from error
        except ConnectionResetError:
            line = b""
        if not line:
            raise DaemonAway(f"{who} ended the connection: its log says why", who)
        try:
            yield read_reply(line)
        except msgspec.MsgspecError as error:
            raise not_understood(who, error) from error


def not_understood(who: str, error: Exception) -> ClientError:
    """Make the error for an answer that cannot be decoded."""
    return ClientError(
        f"the answer of {who} cannot be understood: is it of another release? ({error})", who
    )


def _connect(path: str) -> socket.socket:
    """Connect to the daemon, waiting for a place in its queue."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The kernel waits for a place in the daemon's queue; with a time-out of Python's it would
    # fail at once if the queue is full.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(_CONNECT_S, 0))
    try:
        with address(path) as name:
            connection.connect(name)
    except OSError as error:
        connection.close()
        reason = error.strerror or str(error)
        raise DaemonAway(
            f"no daemon answers on {path} ({reason}): start 'steward serve', "
            "or say with --config or --socket where to ask",
            path,
        ) from error
    connection.settimeout(SILENCE_S)
    return connection


def _union(types: tuple[type[msgspec.Struct], ...]) -> Any:
    union: Any = Any
    for index, kind in enumerate(types):
        union = kind if index == 0 else union | kind
    return union
