"""Socket connections of submit plugins to the gate.

`GatePeer` is one non-blocking connection with a line buffer and a time-out, so that a slow, silent
or faulty peer costs one descriptor for a second. `unix_listener` makes a socket file with access
control.

Nothing here blocks: `server.py` waits for all descriptors with one epoll. A peer sends one line and
gets one back.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Final

from steward.bank.errors import GateUnavailable
from steward.core.listeners import open_unix_listener

log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_CHUNK: Final = 1 << 18
"""Maximum number of bytes per read."""
_MOST_WAITING: Final = 32 << 20
"""Maximum number of unsent bytes of one peer; beyond it the connection is dropped."""


class GatePeer:
    """One non-blocking connection of the gate, with its line buffer and time-out.

    Args:
        connection: Its socket; set to non-blocking.
        max_line: Maximum length of its line, in bytes.
        timeout_s: Seconds within which it must send a whole line, or read its answer.
    """

    def __init__(self, connection: socket.socket, *, max_line: int, timeout_s: float) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.fd = connection.fileno()
        self.is_ended = False
        self.is_watched = False
        """Whether the gate waits for its events."""
        self.out = bytearray()
        self._timeout_s = timeout_s
        self._max_line = max_line
        self._received = bytearray()
        self._has_line = False
        self.deadline = time.monotonic() + timeout_s

    def read_line(self) -> bytes | None:
        """Read; return the line when it is complete. End the connection at EOF or a long line."""
        while not self.is_ended:
            try:
                data = self.socket.recv(_CHUNK)
            except BlockingIOError:
                return None
            except OSError:
                data = b""  # the peer is gone: nobody to report to
            if not data:
                self.is_ended = True
                return None
            head, newline, _ = data.partition(b"\n")
            self._received += head
            if len(self._received) > self._max_line:
                log.warning("a peer of the gate sent a line that is too long")
                self.is_ended = True
            elif newline:
                self.deadline = time.monotonic() + self._timeout_s
                line, self._received = bytes(self._received), bytearray()
                self._has_line = True
                return line
        return None

    @property
    def is_reading(self) -> bool:
        """Return True if its line is not complete."""
        return not (self.is_ended or self._has_line)

    def has_left(self) -> bool:
        """Return True if the peer waits for no answer any more: it closed the connection."""
        try:
            return self.is_ended or not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, data: bytes) -> None:
        """Send as much as the peer accepts now, and keep the rest in ``out``; end after all."""
        self.out += data
        while self.out and not self.is_ended:
            try:
                sent = self.socket.send(self.out)
            except BlockingIOError:
                break
            except OSError:
                self.is_ended = True  # the peer is gone: nobody to report to
                break
            del self.out[:sent]
        if len(self.out) > _MOST_WAITING or not self.out:
            self.is_ended = True

    def close(self) -> None:
        """Close the connection."""
        self.is_ended = True
        self.socket.close()


@contextlib.contextmanager
def unix_listener(path: str, uids: Iterable[int] = ()) -> Iterator[socket.socket]:
    """Listen on a Unix socket path, and remove the socket at the end unless another replaced it.

    Args:
        path: Path of the socket file.
        uids: Users who may connect, besides Steward's user and root.

    Raises:
        GateUnavailable: The socket cannot be made.
    """
    try:
        listener = open_unix_listener(path, _BACKLOG, uids)
    except OSError as error:
        raise GateUnavailable(f"cannot listen on {path}: {error.strerror}", path) from error
    inode = os.lstat(path).st_ino
    try:
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            if os.lstat(path).st_ino == inode:
                os.unlink(path)
