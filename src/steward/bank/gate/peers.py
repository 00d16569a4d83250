"""The connections of the gate: whoever is slow, silent or mad costs a descriptor for a second.

Nothing here blocks. A plugin sends one line and gets one back; another gate
keeps its connection, which is encrypted, and sends many.
"""

import contextlib
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Final

from steward.bank.errors import GateUnavailable
from steward.core.listeners import let_in

log = logging.getLogger(__name__)

_PEERCRED: Final = struct.Struct("3i")
CHUNK: Final = 1 << 18
"""Bytes that are read at once."""
_MOST_WAITING: Final = 32 << 20
"""Bytes that may wait for a peer to read them."""


class Peer:
    """One connection.

    Args:
        connection: Its socket; not blocking from here on.
        longest: The longest line that it may send, in bytes.
        within_s: Seconds within which it must have sent a whole line, or read its answer.
        stays: Whether it may send further lines.
    """

    def __init__(
        self, connection: socket.socket, *, longest: int, within_s: float, stays: bool = False
    ) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.fd = connection.fileno()
        self.stays = stays
        self.is_over = False
        self.out = bytearray()
        self._within_s = within_s
        self._longest = longest
        self._in = bytearray()
        self.until = time.monotonic() + within_s

    def take(self) -> list[bytes]:
        """The whole lines that have come. Ends the connection at its end, or where it is mad."""
        lines: list[bytes] = []
        while not self.is_over:
            data = self._receive()
            if data is None:
                break
            if not data:
                self.is_over = True
                break
            self._in += data
            if b"\n" in data:
                *whole, rest = bytes(self._in).split(b"\n")
                self._in = bytearray(rest)
                lines += whole
                self.until = time.monotonic() + self._within_s
                if not self.stays:
                    break
            if len(self._in) > self._longest:
                log.warning("a peer of the gate sent a line that is too long")
                self.is_over = True
        return lines

    def send(self, data: bytes) -> None:
        """Send as much as the peer takes now; the rest waits in ``out``."""
        self.out += data
        while self.out and not self.is_over:
            sent = self._send()
            if sent is None:
                break
            del self.out[:sent]
        if len(self.out) > _MOST_WAITING:
            self.is_over = True
        if not self.out and not self.stays:
            self.is_over = True

    def close(self) -> None:
        """Drop the connection."""
        self.is_over = True
        self.socket.close()

    def _receive(self) -> bytes | None:
        """What has come; b"" at the end, None while there is nothing."""
        try:
            return self.socket.recv(CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            return b""  # a peer that is gone cannot be told

    def _send(self) -> int | None:
        try:
            return self.socket.send(self.out)
        except BlockingIOError:
            return None
        except OSError:
            self.is_over = True  # a peer that is gone cannot be told
            return None


def uid_of(connection: socket.socket) -> int:
    """Who is at the other end of a Unix socket, by the kernel's word."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    return int(_PEERCRED.unpack(data)[1])


@contextlib.contextmanager
def unix_listener(path: str, uids: Iterable[int] = ()) -> Iterator[socket.socket]:
    """A Unix socket at a path, in place of what a former process has left there.

    Args:
        path: Where.
        uids: Who may connect beside us and root.

    Raises:
        GateUnavailable: It cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        directory = os.path.dirname(path)
        os.makedirs(directory, mode=0o755, exist_ok=True)
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Long paths exceed sun_path; the link in /proc does not. Made aside and moved to
            # its place, it is never there without listening.
            fresh = f"{os.path.basename(path)}.{os.getpid()}"
            made = os.path.join(directory, fresh)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made)
            listener.bind(f"/proc/self/fd/{fd}/{fresh}")
            let_in(made, uids)
            listener.listen(1024)
            if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise GateUnavailable(f"{path} is there and is no socket: remove it", path)
            os.replace(made, path)
        finally:
            os.close(fd)
    except OSError as error:
        listener.close()
        raise GateUnavailable(f"cannot listen on {path}: {error.strerror}", path) from error
    listener.setblocking(False)
    own = os.lstat(path).st_ino
    try:
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            if os.lstat(path).st_ino == own:
                os.unlink(path)


def split(address: str) -> tuple[str, int]:
    """Host and port of a ``HOST:PORT``; an IPv6 address stands in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
