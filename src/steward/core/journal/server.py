"""Journal server: the process that owns the journal, commits appends, trims and limits its size.

``trim_journal`` deletes events that every consumer has passed, with the script bytes that they
refer to; ``limit_size`` keeps journal and bytes below ``max_bytes`` by detaching consumers that
can be refilled. ``lock_state_dir`` ensures one Steward for each state directory.

:class:`JournalServer` serves the socket that ``client.py`` connects to, and the control socket of
``control.py``. One turn of its loop reads the ready sockets, commits all waiting appends in one
transaction and answers them, wakes the consumers that are due, writes their positions (every
0.5 s), and trims (every 5 s); a turn in which nothing came shrinks the file. An append is committed
at once, unless another client has just appended too and may do so again: then the appends of 3 ms
share a transaction. Events that arrive during one commit form the next batch. A consumer says how
many events wake it at once, and after which time a single one does, so wake-ups do not grow with
the load.
"""

import errno
import fcntl
import logging
import math
import os
import selectors
import socket
import time
from typing import Any

import msgspec

from steward.core.config import JournalSettings
from steward.core.errors import Conflict, StewardError, Unavailable, UsageError
from steward.core.events import JobScript, utc_now
from steward.core.files import describe_os_error, resolve_path
from steward.core.journal.client import JOURNAL_SOCKET, FrameDecoder, encode_frame
from steward.core.journal.control import (
    CONTROL_ACTION,
    CONTROL_SOCKET,
    ClearMissed,
    ForgetConsumer,
    HoldTrimming,
    JournalCommand,
    RetryDeadLetters,
    WritePositions,
)
from steward.core.journal.reader import refill_command
from steward.core.journal.store import EncodedEvent, Journal, JournalError, JournalUnavailable
from steward.core.rpc_server import RpcCall, RpcListener
from steward.core.script_stores import IncomingStores, LeftoverCount, StoreError
from steward.core.sqlite import SLICE_S, SqliteError
from steward.core.waits import Backoff, Stop

_BATCH = 1000
"""Events that one trim deletes."""
_REMEMBER_S = 90 * 86400
"""How long the journal remembers the key of a trimmed event, in seconds."""
SINK_PREFIX = "archive."
"""Prefix of the consumer names of sinks."""
CATALOG_CONSUMER = "catalog"
"""Name of the consumer that feeds the catalog."""


def remove_expired(journal: Journal, stores: IncomingStores, *, keep_s: float) -> bool:
    """Delete one batch of passed events and one of keys that no source repeats any more.

    Args:
        journal: The journal.
        stores: Incoming stores of script bytes.
        keep_s: Retention of a passed event, in seconds after its observation.

    Returns:
        Whether there may be more to delete now.

    Raises:
        Unavailable: The journal cannot be written now.
    """
    is_full = trim_journal(journal, stores, keep_s=keep_s) == _BATCH
    return journal.forget_old_keys(int(utc_now().timestamp()) - _REMEMBER_S) or is_full


def trim_journal(
    journal: Journal, stores: IncomingStores, *, keep_s: float, dead: bool = False
) -> int:
    """Delete one batch of events that every consumer has passed, observed ``keep_s`` ago.

    A script among the dead letters stays, with its bytes, until it is retried or purged; with
    ``dead`` it is deleted too.

    Bytes are deleted first: an event without bytes harms nobody who has passed it, while bytes
    without an event would look like the remains of a crash.

    Returns:
        Number of deleted events.

    Raises:
        Unavailable: The journal cannot be written now.
    """
    now = utc_now().timestamp()
    # A time in the future came from a clock that was ahead, here or on another host: its age
    # is unknown, and it must not stay for years.
    old = [
        event
        for event in journal.list_trimmable(_BATCH, dead=dead)
        if not now - keep_s < event.seen_at.timestamp() <= now
    ]
    if not old:
        return 0
    for event in old:
        if isinstance(event.body, JobScript):
            _remove_script_bytes(stores, event.body)
    journal.trim(old)
    return len(old)


def _remove_script_bytes(stores: IncomingStores, body: JobScript) -> None:
    """Delete the script bytes of a trimmed event."""
    paths = [file.path for file in (body.script, body.environment) if file]
    try:
        stores.get(body.store).unlink(paths)
    except Unavailable as error:
        # The next start deletes bytes whose event is known and trimmed; others must not wait.
        log.warning(
            "cannot remove the captured files of job %d, retrying later: %s", body.job_id, error
        )
    except StoreError as error:
        # Its sink was removed from the configuration. Nothing can be deleted there any more, and
        # the journal must go on for all others.
        log.warning("cannot remove the captured files of job %d: %s", body.job_id, error)


def limit_size(
    journal: Journal,
    stores: IncomingStores,
    *,
    max_bytes: int,
    leftovers: LeftoverCount | None = None,
) -> bool:
    """Keep journal and incoming bytes below ``max_bytes``, one step a call.

    First it trims passed events at once, and dead letters of which a files sink has a copy.
    Then it detaches a consumer that is behind, if it can be refilled: the catalog from the
    archive, a sink from a files sink that is ahead of it. It never gives up what no such sink
    has: then it logs which consumer is in the way. Where leftovers make the difference, it first
    has them counted again: an administrator may have deleted them since.

    Args:
        journal: The journal, which counts the incoming bytes of its events.
        stores: Incoming stores of script bytes.
        max_bytes: Most bytes of both.
        leftovers: Count of incoming bytes of no event.

    Returns:
        Whether there may be more to do: call again soon.

    Raises:
        Unavailable: The journal cannot be written now.
    """
    known_size = journal.size_bytes() + journal.count_incoming_bytes()
    size = known_size + (leftovers.size if leftovers else 0)
    if size <= max_bytes:
        return False
    # Only files sinks can give bytes back, and each of them has a store.
    files_sinks = frozenset(store.name for store in stores)
    is_archived = any(name in files_sinks for name in journal.list_attached())
    if trim_journal(journal, stores, keep_s=0.0, dead=is_archived):
        return True
    if leftovers and known_size <= max_bytes and leftovers.refresh():
        return False
    behind = journal.list_lagging()
    for name, position in behind:
        if _is_refillable(name, position, journal.list_attached(), files_sinks):
            log.error(
                "the journal has %d bytes, more than max_bytes: detached consumer %s; fix it "
                "(see 'steward journal status'), then run '%s' to catch up",
                size,
                name,
                refill_command(name),
            )
            journal.detach(name)
            return True
    if behind:
        log.error(
            "the journal has %d bytes, more than max_bytes, and consumer %s needs them: "
            "fix the consumer (steward journal status) or provide more disk space",
            size,
            behind[0][0],
        )
    return False


def _is_refillable(
    name: str, position: int, attached: dict[str, int], files_sinks: frozenset[str]
) -> bool:
    if name == CATALOG_CONSUMER:
        return True
    return name.startswith(SINK_PREFIX) and any(
        other != name and other in files_sinks and other_position > position
        for other, other_position in attached.items()
    )


_LOCK = "journal.lock"
_WAIT_S = 10.0
"""Longest wait for the lock of a predecessor that is ending, in seconds."""


class StateLock:
    """The held lock of a state directory; closing it or ending the process releases it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        """Release the lock."""
        os.close(self._fd)


def lock_state_dir(state_dir: str, wait_s: float = _WAIT_S) -> StateLock:
    """Lock the state directory, waiting a little for a predecessor that is ending.

    Raises:
        JournalUnavailable: Another Steward holds it, or the directory cannot be used.
    """
    path = os.path.join(state_dir, _LOCK)
    try:
        fd = os.open(resolve_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        reason = describe_os_error(error, path)
        raise JournalUnavailable(f"cannot use {path}: {reason}", path) from error
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                os.close(fd)
                raise JournalUnavailable(f"cannot lock {path}: {error.strerror}", path) from error
            if time.monotonic() > deadline:
                os.close(fd)
                raise JournalUnavailable(
                    f"another Steward uses {state_dir}: stop it, or set another state_dir",
                    path,
                ) from error
            time.sleep(0.02)
        else:
            return StateLock(fd)


log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 64
"""Most client connections."""
_BATCH_EVENTS = 500
"""Events after which a commit takes no further append."""
_GATHER_S = 0.003
"""Longest time for which appends gather, in seconds."""
_GATHER_EVENTS = 64
"""Events after which appends gather no longer."""
_RECENT_S = 0.02
"""Time since its last append in which a client is expected to append again, in seconds."""


class _Wake(msgspec.Struct, frozen=True):
    """A client's wish to be woken once, see :meth:`JournalLink.wait`; the time is monotonic."""

    position: int
    events: int
    ready_at: float


class _ClientConnection:
    """One client connection, with its unsent output."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.frames = FrameDecoder()
        self.has_waited = False
        self.wake: _Wake | None = None
        self.out = bytearray()
        self.mask = selectors.EVENT_READ
        self.appends = 0
        """Number of appends that wait for a commit."""
        self.appended_at = -math.inf


class JournalServer:
    """Server of the journal for the other processes of one Steward.

    Args:
        state_dir: Directory of the journal.
        settings: Limits for trimming and detaching.
        stores: Incoming stores, whose bytes are deleted when their event is trimmed.
        trim_every_s: Time between two trims, in seconds.
        flush_every_s: Time between two writes of the consumers' positions, in seconds.
    """

    def __init__(
        self,
        state_dir: str,
        settings: JournalSettings,
        stores: IncomingStores,
        *,
        trim_every_s: float = 5.0,
        flush_every_s: float = 0.5,
    ) -> None:
        self._state_dir = state_dir
        self._settings = settings
        self._stores = stores
        self._trim_every_s = trim_every_s
        self._flush_every_s = flush_every_s
        self._clients: dict[int, _ClientConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._pending_appends: list[tuple[_ClientConnection, int, list[EncodedEvent]]] = []
        self._positions: dict[str, tuple[Any, ...]] = {}
        self._consumer_clients: dict[str, _ClientConnection] = {}
        self._gathering_since = self._retry_at = 0.0
        self._backoff = Backoff(0.2, 5.0)
        self._flush_at = self._trim_at = 0.0
        self._can_shrink = False
        self._lock = lock_state_dir(state_dir)
        self._journal = Journal(state_dir)
        self._head = self._journal.head()
        self._leftovers = LeftoverCount(stores, state_dir=state_dir)
        self._listener = _open_socket(state_dir)
        self._control = RpcListener(os.path.join(state_dir, CONTROL_SOCKET))

    def run(self, stop: Stop, send_heartbeat: "Any" = None) -> None:
        """Serve until the Stop is set; then commit what came in and return."""
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._control.fd, selectors.EVENT_READ, None)
        self._selector.register(stop.fd, selectors.EVENT_READ, None)
        while not stop.is_set():
            if send_heartbeat is not None:
                send_heartbeat()
            self._run_turn(stop, self._get_timeout_s())
        # Handle the last messages of processes that stop at the same time.
        self._run_turn(None, 0.05)
        self._flush_positions()
        self.close()

    def close(self) -> None:
        """Close all connections and files, and release the lock."""
        for client in list(self._clients.values()):
            self._disconnect(client)
        self._selector.close()
        self._listener.close()
        self._control.close()
        self._leftovers.close()
        self._journal.close()
        self._lock.close()

    def _get_timeout_s(self) -> float:
        now = time.monotonic()
        due = min(self._flush_at if self._positions else now + 60.0, self._trim_at)
        if self._pending_appends:
            due = min(due, self._get_commit_time(now))
        for client in self._clients.values():
            if client.wake is not None and client.wake.position < self._head:
                due = min(due, client.wake.ready_at)
        return min(max(0.0, due - now), SLICE_S if self._can_shrink else math.inf)

    def _run_turn(self, stop: Stop | None, timeout_s: float) -> None:
        """Handle ready sockets, then commit, flush positions and trim if due."""
        events = self._selector.select(timeout_s)
        calls = self._control.receive()
        if calls:
            # Handle what clients sent before these commands first.
            events = self._selector.select(0)
        for key, mask in events:
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _ClientConnection):
                if mask & selectors.EVENT_WRITE:
                    self._write(key.data)
                if mask & selectors.EVENT_READ:
                    self._read(key.data)
        for call in calls:
            self._answer(call)
        now = time.monotonic()
        if self._pending_appends and (stop is None or now >= self._get_commit_time(now)):
            self._commit()
        self._wake_clients()
        if self._positions and now >= self._flush_at:
            self._flush_positions()
        if stop is not None and now >= self._trim_at:
            self._trim_at = now + self._trim_every_s
            self._trim()
        elif self._can_shrink and not (events or calls or self._pending_appends):
            self._shrink()

    def _accept(self) -> None:
        """Accept a client connection, unless there are too many."""
        connection, _ = self._listener.accept()
        if len(self._clients) >= _MOST_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        client = _ClientConnection(connection)
        self._clients[connection.fileno()] = client
        self._selector.register(connection, selectors.EVENT_READ, client)
        # A command of this turn may follow what the client has sent.
        self._read(client)

    def _read(self, client: _ClientConnection) -> None:
        """Read and handle a client's messages; drop the client on errors."""
        try:
            data = client.socket.recv(1 << 20)
            messages = client.frames.feed(data) if data else []
        except BlockingIOError:
            return
        except (OSError, JournalError) as error:
            log.warning("a connection to the journal failed: %s", error)
            self._disconnect(client)
            return
        if not data:
            self._disconnect(client)
            return
        for message in messages:
            try:
                self._handle(client, message)
            except (ValueError, TypeError, IndexError, SqliteError) as error:
                log.warning("the journal received an invalid message: %s", error)
                self._disconnect(client)
                return

    def _handle(self, client: _ClientConnection, message: list[Any]) -> None:
        """Queue an append, or handle a message at once."""
        verb = message[0]
        if verb == "append":
            rows = msgspec.convert(message[2], list[EncodedEvent])
            client.appended_at = time.monotonic()
            client.appends += 1
            if not self._pending_appends:
                self._gathering_since = client.appended_at
            self._pending_appends.append((client, int(message[1]), rows))
        elif verb == "wake":
            position, events, delay_s = message[1:]
            client.has_waited = True
            client.wake = _Wake(int(position), int(events), time.monotonic() + float(delay_s))
        elif verb == "passed":
            name, position, state, detail, *more = message[1:]
            self._positions[name] = (position, state, detail, *more)
            self._consumer_clients[name] = client
        elif verb == "revived":
            self._journal.delete_dead_letter(*message[1:])
        elif verb == "aside":
            self._store_dead_letter(client, message[1], message[2])
        else:
            raise ValueError(f"unknown verb {verb!r}")

    def _store_dead_letter(self, client: _ClientConnection, number: int, args: list[Any]) -> None:
        """Store a dead letter, and answer its consumer."""
        try:
            self._journal.add_dead_letter(*args)
        except StewardError as error:
            self._send(client, ["refused", number, str(error)])
        else:
            self._send(client, ["ok", number, True])

    def _answer(self, call: RpcCall) -> None:
        """Run a command and answer it."""
        try:
            if call.message.action != CONTROL_ACTION:
                raise UsageError(
                    f"unknown action {call.message.action!r}: the journal's socket accepts only "
                    f"{CONTROL_ACTION}"
                )
            answer = self._run_command(msgspec.convert(call.message.args, JournalCommand))
        except msgspec.ValidationError as error:
            call.reject(UsageError(f"cannot decode the command to the journal: {error}"))
        except StewardError as error:
            call.reject(error)
        else:
            call.reply(answer)

    def _run_command(self, command: JournalCommand) -> int:
        """Run a command and return its answer."""
        match command:
            case ForgetConsumer(consumer):
                runner = self._consumer_clients.get(consumer)
                if runner is not None and runner.socket.fileno() >= 0:
                    raise Conflict(
                        f"consumer {consumer} is running: remove it from the configuration first",
                        consumer,
                    )
                self._positions.pop(consumer, None)
                self._journal.remove_consumer(consumer)
            case RetryDeadLetters(consumer, event_id):
                count = self._journal.mark_for_retry(consumer, event_id)
                for client in list(self._clients.values()):
                    if client.has_waited:
                        self._send(client, ["look"])
                return count
            case ClearMissed(consumer, since_s):
                self._journal.clear_missed(consumer, since_s)
            case HoldTrimming(seconds):
                self._trim_at = time.monotonic() + seconds
            case WritePositions():
                self._flush_positions()
                return self._journal.head()
        return 0

    def _get_commit_time(self, now: float) -> float:
        """Return when to commit the waiting appends: at once, or when more may have come."""
        if (
            self._retry_at
            or sum(len(rows) for _, _, rows in self._pending_appends) > _GATHER_EVENTS
        ):
            return self._retry_at
        recent = now - _RECENT_S
        if any(not c.appends and c.appended_at > recent for c in self._clients.values()):
            return self._gathering_since + _GATHER_S
        return now

    def _commit(self) -> None:
        """Commit waiting appends in one transaction, and answer their clients."""
        batch: list[tuple[_ClientConnection, int, list[EncodedEvent]]] = []
        rows: list[EncodedEvent] = []
        for entry in self._pending_appends:
            batch.append(entry)
            rows.extend(entry[2])
            if len(rows) >= _BATCH_EVENTS:
                break
        try:
            self._head = self._journal.append(rows)
        except Unavailable as error:
            wait_s = self._backoff.next_s()
            self._retry_at = time.monotonic() + wait_s
            log.error("cannot write the journal, retrying in %.1f s: %s", wait_s, error)
            return
        self._backoff.reset()
        self._retry_at = 0.0
        del self._pending_appends[: len(batch)]
        self._gathering_since = time.monotonic()
        for client, number, _ in batch:
            client.appends -= 1
            self._send(client, ["ok", number, self._head])

    def _wake_clients(self) -> None:
        """Wake the clients that have enough new events, or some and waited for long enough."""
        now = time.monotonic()
        for client in list(self._clients.values()):
            wake = client.wake
            if wake is None or self._head <= wake.position:
                continue
            if self._head - wake.position >= wake.events or now >= wake.ready_at:
                client.wake = None
                self._send(client, ["head", self._head])

    def _send(self, client: _ClientConnection, message: list[Any]) -> None:
        if client.socket.fileno() < 0:
            return
        client.out += encode_frame(message)
        self._write(client)

    def _write(self, client: _ClientConnection) -> None:
        """Send pending output; watch for writability while some is left."""
        try:
            sent = client.socket.send(client.out)
            del client.out[:sent]
        except BlockingIOError:
            sent = 0
        except OSError as error:
            log.debug("a connection to the journal ended: %s", error)
            self._disconnect(client)
            return
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.out else 0)
        if mask != client.mask:
            client.mask = mask
            self._selector.modify(client.socket, mask, client)

    def _disconnect(self, client: _ClientConnection) -> None:
        if client.socket.fileno() >= 0:
            self._clients.pop(client.socket.fileno(), None)
            self._selector.unregister(client.socket)
            client.socket.close()

    def _flush_positions(self) -> None:
        """Write the collected positions of consumers to the journal."""
        self._flush_at = time.monotonic() + self._flush_every_s
        positions, self._positions = self._positions, {}
        try:
            for name, position in positions.items():
                self._journal.record_position(name, *position)
        except Unavailable as error:
            log.error("cannot write the journal: %s", error)
            self._positions = {**positions, **self._positions}

    def _trim(self) -> None:
        """Trim and limit the size, one batch a turn; then the file can shrink."""
        try:
            more = remove_expired(self._journal, self._stores, keep_s=self._settings.keep_s)
            self._leftovers.update(self._journal.count_incoming_bytes())
            more |= limit_size(
                self._journal,
                self._stores,
                max_bytes=self._settings.max_bytes,
                leftovers=self._leftovers,
            )
            if more:
                # One batch a turn: commits take precedence, and the heartbeat goes on.
                self._trim_at = time.monotonic()
            self._can_shrink = not more
        except Unavailable as error:
            log.error("cannot trim the journal, retrying later: %s", error)

    def _shrink(self) -> None:
        """Shrink the file by one slice, in a turn in which no process sent anything."""
        try:
            self._can_shrink = self._journal.shrink()
        except Unavailable as error:
            self._can_shrink = False
            log.error("cannot shrink the journal, retrying later: %s", error)


def _open_socket(state_dir: str) -> socket.socket:
    """Open the listening Unix socket, accessible to Steward's user only."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Long state directories exceed sun_path; the link in /proc does not.
    fd = os.open(state_dir, os.O_PATH | os.O_DIRECTORY)
    try:
        path = f"/proc/self/fd/{fd}/{JOURNAL_SOCKET}"
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
