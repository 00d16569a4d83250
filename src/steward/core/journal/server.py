"""The process that owns the journal: commits what is waiting at once, tells who wants to know.

There is no timer before a commit: while one commit is under way the next
events gather, so batches grow with the load by themselves. Events that every
consumer has passed are trimmed together with their kept bytes.
"""

import logging
import os
import selectors
import socket
import time
from typing import Any

import msgspec

from steward.core.config import JournalSettings
from steward.core.errors import StewardError, Unavailable
from steward.core.incoming import Stores
from steward.core.journal.link import SOCKET, Frames, frame
from steward.core.journal.lock import take_lock
from steward.core.journal.store import Journal, JournalError, Row
from steward.core.journal.trimming import bound, remove_old
from steward.core.sqlite import SqliteError
from steward.core.waiting import Backoff, Stop

log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 64
_BATCH_EVENTS = 500
_LONGEST_HOLD_S = 3600.0


class _Peer:
    """One connection, with what it still has to be sent."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.frames = Frames()
        self.subscribed = False
        self.out = bytearray()


class JournalServer:
    """Serves the journal to the other processes of one Steward.

    Args:
        state_dir: The directory that holds the journal.
        settings: When to trim and to detach.
        stores: Where kept bytes lie, to unlink them when their event is trimmed.
        trim_every_s: Time between two trims, in seconds.
        flush_every_s: Time between two writes of the consumers' cursors, in seconds.
    """

    def __init__(
        self,
        state_dir: str,
        settings: JournalSettings,
        stores: Stores,
        *,
        trim_every_s: float = 5.0,
        flush_every_s: float = 0.5,
    ) -> None:
        self._state_dir = state_dir
        self._settings = settings
        self._stores = stores
        self._trim_every_s = trim_every_s
        self._flush_every_s = flush_every_s
        self._peers: dict[int, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._waiting: list[tuple[_Peer, int, list[Row]]] = []
        self._standings: dict[str, tuple[Any, ...]] = {}
        self._running: dict[str, _Peer] = {}
        self._retry_at = 0.0
        self._backoff = Backoff(0.2, 5.0)
        self._flush_at = self._trim_at = 0.0
        self._lock = take_lock(state_dir)
        self._journal = Journal(state_dir)
        self._listener = _listen(state_dir)

    def run(self, stop: Stop, beat: "Any" = None) -> None:
        """Serve until the Stop is raised; then commit what came in and return."""
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(stop.fd, selectors.EVENT_READ, None)
        while not stop.is_set():
            if beat is not None:
                beat()
            self._turn(stop, self._timeout_s())
        # The last words of processes that are stopping at the same time.
        self._turn(None, 0.05)
        self._flush_standings()
        self.close()

    def close(self) -> None:
        """Close everything and let the lock go."""
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._selector.close()
        self._listener.close()
        self._journal.close()
        self._lock.close()

    def _timeout_s(self) -> float:
        now = time.monotonic()
        due = min(self._flush_at if self._standings else now + 60.0, self._trim_at)
        if self._waiting:
            due = min(due, self._retry_at)
        return max(0.0, due - now)

    def _turn(self, stop: Stop | None, timeout_s: float) -> None:
        for key, mask in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Peer):
                if mask & selectors.EVENT_WRITE:
                    self._write(key.data)
                if mask & selectors.EVENT_READ:
                    self._read(key.data)
        now = time.monotonic()
        if self._waiting and now >= self._retry_at:
            self._commit()
        if self._standings and now >= self._flush_at:
            self._flush_standings()
        if stop is not None and now >= self._trim_at:
            self._trim_at = now + self._trim_every_s
            self._housekeeping()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if len(self._peers) >= _MOST_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        peer = _Peer(connection)
        self._peers[connection.fileno()] = peer
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(1 << 20)
            messages = peer.frames.feed(data) if data else []
        except BlockingIOError:
            return
        except (OSError, JournalError) as error:
            log.warning("a connection to the journal broke: %s", error)
            self._drop(peer)
            return
        if not data:
            self._drop(peer)
            return
        for message in messages:
            try:
                self._handle(peer, message)
            except (ValueError, TypeError, IndexError, SqliteError) as error:
                log.warning("a message to the journal makes no sense: %s", error)
                self._drop(peer)
                return

    def _handle(self, peer: _Peer, message: list[Any]) -> None:
        verb = message[0]
        if verb == "append":
            rows = msgspec.convert(message[2], list[Row])
            self._waiting.append((peer, int(message[1]), rows))
        elif verb == "subscribe":
            peer.subscribed = True
            self._send(peer, ["head", self._journal.head()])
        elif verb == "passed":
            name, position, state, detail, *more = message[1:]
            self._standings[name] = (position, state, detail, *more)
            self._running[name] = peer
        elif verb == "revived":
            self._journal.revived(*message[1:])
        else:
            self._answer(peer, verb, message[1], message[2])

    def _answer(self, peer: _Peer, verb: str, number: int, args: list[Any]) -> None:
        try:
            if verb == "forget":
                runner = self._running.get(args[0])
                if runner is not None and runner.socket.fileno() >= 0:
                    raise JournalError(
                        f"consumer {args[0]} is running: take it out of the configuration first",
                        args[0],
                    )
                self._standings.pop(args[0], None)
                self._journal.forget(args[0])
                result: Any = True
            elif verb == "replay":
                result = self._journal.replay(*args)
                self._announce(["look"])
            elif verb == "aside":
                self._journal.set_aside(*args)
                result = True
            elif verb == "refilled":
                self._journal.refilled(*args)
                result = True
            elif verb == "hold":
                # A backup copies what events tell of: none of it may be removed meanwhile.
                self._trim_at = time.monotonic() + min(float(args[0]), _LONGEST_HOLD_S)
                result = True
            elif verb == "standings":
                self._flush_standings()
                result = self._journal.head()
            else:
                raise JournalError(f"the journal knows no {verb!r}", verb)
        except StewardError as error:
            self._send(peer, ["refused", number, str(error)])
        else:
            self._send(peer, ["ok", number, result])

    def _commit(self) -> None:
        taken: list[tuple[_Peer, int, list[Row]]] = []
        rows: list[Row] = []
        for entry in self._waiting:
            taken.append(entry)
            rows.extend(entry[2])
            if len(rows) >= _BATCH_EVENTS:
                break
        try:
            head = self._journal.append(rows)
        except Unavailable as error:
            wait_s = self._backoff.next_s()
            self._retry_at = time.monotonic() + wait_s
            log.error("the journal cannot be written, trying again in %.1f s: %s", wait_s, error)
            return
        self._backoff.reset()
        self._retry_at = 0.0
        del self._waiting[: len(taken)]
        for peer, number, _ in taken:
            self._send(peer, ["ok", number, head])
        self._announce(["head", self._journal.head()])

    def _announce(self, message: list[Any]) -> None:
        data = frame(message)
        for peer in list(self._peers.values()):
            if peer.subscribed and not peer.out:
                self._send_bytes(peer, data)

    def _send(self, peer: _Peer, message: list[Any]) -> None:
        self._send_bytes(peer, frame(message))

    def _send_bytes(self, peer: _Peer, data: bytes) -> None:
        if peer.socket.fileno() < 0:
            return
        peer.out += data
        self._write(peer)

    def _write(self, peer: _Peer) -> None:
        try:
            sent = peer.socket.send(peer.out)
            del peer.out[:sent]
        except BlockingIOError:
            sent = 0
        except OSError as error:
            log.debug("a connection to the journal ended: %s", error)
            self._drop(peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        self._selector.modify(peer.socket, wanted, peer)

    def _drop(self, peer: _Peer) -> None:
        if peer.socket.fileno() >= 0:
            self._peers.pop(peer.socket.fileno(), None)
            self._selector.unregister(peer.socket)
            peer.socket.close()

    def _flush_standings(self) -> None:
        self._flush_at = time.monotonic() + self._flush_every_s
        standings, self._standings = self._standings, {}
        try:
            for name, standing in standings.items():
                self._journal.passed(name, *standing)
        except Unavailable as error:
            log.error("the journal cannot be written: %s", error)
            self._standings = {**standings, **self._standings}

    def _housekeeping(self) -> None:
        try:
            more = remove_old(self._journal, self._stores, keep_s=self._settings.keep_s)
            more |= bound(self._journal, self._stores, max_bytes=self._settings.max_bytes)
            if not self._waiting and not self._selector.select(0):
                more |= self._journal.shrink()
            if more:
                # A batch a turn: commits go before, and the process shows that it lives.
                self._trim_at = time.monotonic()
        except Unavailable as error:
            log.error("the journal cannot be trimmed now: %s", error)


def _listen(state_dir: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Long state directories exceed sun_path; the link in /proc does not.
    fd = os.open(state_dir, os.O_PATH | os.O_DIRECTORY)
    try:
        path = f"/proc/self/fd/{fd}/{SOCKET}"
        if os.path.lexists(path):
            os.unlink(path)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
    finally:
        os.close(fd)
    listener.listen(_MOST_CONNECTIONS)
    listener.setblocking(False)
    return listener
