"""Where the trigger helper wakes the sensor: a Unix socket, and what is believed on it.

A wake-up is no news, only a reason to look. So what a forger could gain is one look,
and those are bounded by whoever looks; still only root, SlurmUser and Steward's own user
are heard, and of them who knows the secret. All the waiting is done by a thread,
which answers at once however long a look takes.
"""

import contextlib
import hmac
import logging
import os
import select
import socket
import stat
import struct
import threading
import time
from typing import Final, NamedTuple

import msgspec

from steward.core.listening import unix_listener_at

log = logging.getLogger(__name__)

_PEERCRED: Final = struct.Struct("3i")
_BACKLOG: Final = 64
_MOST: Final = 32
"""How many may be half heard at once; beyond, the one that has been so longest goes."""
_HEARS_S: Final = 5.0
_LONGEST: Final = 16384
_SHORTEST_SECRET: Final = 16
_SAY_AGAIN_S: Final = 60.0
_MOST_WAKES: Final = 4096
_TAKEN: Final = b"ok\n"
_REFUSED: Final = b"no\n"


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """What the helper says."""

    version: int
    secret: str
    cluster: str
    event: str
    nodes: str = ""


class Wake(NamedTuple):
    """One trigger that went off.

    Attributes:
        event: Its event (``drained``).
        nodes: The list of nodes that it is about; "" for none, or for one of a daemon.
    """

    event: str
    nodes: str = ""


_decode: Final = msgspec.json.Decoder(_Said).decode


class _Peer:
    """Somebody who has connected, and has not said all yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.said = b""
        self.until = time.monotonic() + _HEARS_S


class Wakeups:
    """Listens for the helper.

    Args:
        path: The socket's.
        secret_file: What the helper proves itself with; of root's or our own, mode 0600.
        cluster: Whose triggers are meant.
    """

    def __init__(self, path: str, secret_file: str, cluster: str) -> None:
        self._path = path
        self._secret_file = secret_file
        self._cluster = cluster
        self._wakes: set[Wake] = set()
        self._is_full = False
        self._lock = threading.Lock()
        # Both ends of each: one that says there is news, and one that ends the thread.
        self.fd, self._news_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._end_fd, self._ending_fd = os.pipe2(os.O_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._said_at = 0.0

    def start(self) -> None:
        """Begin to listen.

        Raises:
            OSError: The socket cannot be made.
        """
        listener = unix_listener_at(self._path, _BACKLOG, self._believed())
        self._thread = threading.Thread(target=self._hear, args=(listener,), name="wakeups")
        self._thread.start()

    def take(self) -> frozenset[Wake]:
        """The triggers that went off since the last call; ``fd`` can be read if there are."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
        with self._lock:
            wakes, self._wakes = self._wakes, set()
            self._is_full = False
        return frozenset(wakes)

    def close(self) -> None:
        """Listen no more."""
        os.close(self._ending_fd)
        if self._thread is not None:
            self._thread.join()
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        for fd in (self.fd, self._news_fd, self._end_fd):
            os.close(fd)

    def _hear(self, listener: socket.socket) -> None:
        peers: dict[int, _Peer] = {}
        with listener:
            while True:
                poller = select.poll()
                for fd in (self._end_fd, listener.fileno(), *peers):
                    poller.register(fd, select.POLLIN)
                ready = {fd for fd, _ in poller.poll(1000.0 if peers else None)}
                if self._end_fd in ready:
                    break
                for fd in ready & set(peers):
                    if not self._read(peers[fd]):
                        peers.pop(fd).connection.close()
                now = time.monotonic()
                for fd in [fd for fd, peer in peers.items() if peer.until < now]:
                    peers.pop(fd).connection.close()
                if listener.fileno() in ready:
                    self._accept(listener, peers)
        for peer in peers.values():
            peer.connection.close()

    def _accept(self, listener: socket.socket, peers: dict[int, _Peer]) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            # It went again before it was heard, or we are short of descriptors for a moment.
            log.debug("cannot accept a connection on %s: %s", self._path, error)
            time.sleep(0.01)
            return
        connection.setblocking(False)
        _, uid, _ = _PEERCRED.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        )
        if uid not in self._believed():
            self._say(f"uid {uid} is none who may wake the sensor")
            _answer(connection, _REFUSED)
            connection.close()
            return
        if len(peers) >= _MOST:
            oldest = min(peers, key=lambda fd: peers[fd].until)
            peers.pop(oldest).connection.close()
        peers[connection.fileno()] = _Peer(connection)

    def _believed(self) -> set[int]:
        uids = {0, os.geteuid()}
        # Root's daemon keeps a secret that is SlurmUser's.
        with contextlib.suppress(OSError):
            uids.add(os.stat(self._secret_file).st_uid)
        return uids

    def _read(self, peer: _Peer) -> bool:
        """Take in what a peer says; whether there is more to come."""
        try:
            data = peer.connection.recv(_LONGEST)
        except OSError:
            return False  # it has gone: whoever has something to say comes again
        peer.said += data
        if b"\n" not in peer.said:
            return bool(data) and len(peer.said) <= _LONGEST
        _answer(peer.connection, _TAKEN if self._takes(peer.said) else _REFUSED)
        return False

    def _takes(self, line: bytes) -> bool:
        try:
            wake = _decode(line.partition(b"\n")[0])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._say("what was said is no wake-up")
            return False
        secret = self._secret()
        if not secret or not hmac.compare_digest(wake.secret.encode(), secret):
            self._say("a wake-up came without the secret")
            return False
        if wake.cluster != self._cluster:
            self._say(f"a wake-up is of cluster {wake.cluster[:64]!r}, this is {self._cluster}")
            return False
        with self._lock:
            taken = Wake(wake.event[:64], wake.nodes)
            has_room = len(self._wakes) < _MOST_WAKES or taken in self._wakes
            is_first_lost = not has_room and not self._is_full
            self._is_full = self._is_full or not has_room
            if has_room:
                self._wakes.add(taken)
        if is_first_lost:
            log.warning(
                "cluster %s: %d wake-ups wait for a look at the nodes: a state that passes before "
                "it is not told where its wake-up comes later (%s was the first)",
                *(self._cluster, _MOST_WAKES, taken.event),
            )
        with contextlib.suppress(BlockingIOError):
            os.write(self._news_fd, b"!")  # a full pipe can be read, which is all it is for
        return True

    def _secret(self) -> bytes:
        """The secret as the file has it now; empty where there is none that can be trusted."""
        try:
            fd = os.open(self._secret_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            self._say(f"{self._secret_file}: {error.strerror}")
            return b""
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) & 0o077:
                self._say(f"{self._secret_file} is open to others: give it the mode 0600")
                return b""
            secret = file.read(_LONGEST).strip()
        if len(secret) < _SHORTEST_SECRET:
            self._say(f"{self._secret_file} holds no secret of {_SHORTEST_SECRET} letters or more")
            return b""
        return secret

    def _say(self, what: str) -> None:
        now = time.monotonic()
        if now < self._said_at + _SAY_AGAIN_S and self._said_at:
            return
        self._said_at = now
        log.warning("cluster %s: a wake-up is refused on %s: %s", self._cluster, self._path, what)


def _answer(connection: socket.socket, answer: bytes) -> None:
    # Whoever does not read the answer has told us all the same.
    with contextlib.suppress(OSError):
        connection.send(answer)
