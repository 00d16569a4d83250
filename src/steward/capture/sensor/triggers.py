"""Sensor triggers: keeps Steward's permanent triggers set in slurmctld, and receives their reports.

:class:`StewardTriggers` sets one trigger per event, restores lost ones and clears useless ones.
slurmctld saves triggers some seconds after they were set and loses them if it is killed before, so
they are checked every minute and after each restart. Triggers only wake the sensor; without them it
polls at its interval.

:class:`WakeupListener` listens on a Unix socket, in a thread, for the program that the triggers
start (:mod:`steward.capture.sensor.trigger_helper`) and collects :class:`FiredTrigger` reports. The
thread replies at once, however long a poll takes. A report only causes a poll, at a limited rate,
so a forger gains little; still it accepts only root, SlurmUser and Steward's own user, with the
secret.
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
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from steward.capture.settings import HELPER_NAME
from steward.core.config import Settings
from steward.core.listeners import open_unix_listener
from steward.core.principals import SENSOR
from steward.slurm import SlurmError
from steward.slurm.errors import UnknownTrigger
from steward.slurm.settings import ClusterSettings
from steward.slurm.triggers import TriggerRecord, Triggers

log = logging.getLogger(__name__)

TRIGGER_EVENTS: Final = (
    *("down", "up", "drained", "draining", "resume", "fail", "reconfig"),
    *("primary_slurmctld_resumed_operation", "primary_slurmctld_resumed_control"),
    *("primary_slurmdbd_failure", "primary_slurmdbd_resumed_operation"),
)
"""Trigger events that justify a poll. Not ``idle``: a permanent trigger for it fires at every turn
of slurmctld, whether anything changed or not.
"""


# Keeping triggers set


class StewardTriggers:
    """Keeper of Steward's triggers on one cluster.

    Args:
        cluster: Name of the cluster.
        settings: How to run its commands.
        program: Command line of the triggers without the event; "" to have no triggers.
        helper: Path of the helper program, the first word of the command line.
    """

    def __init__(self, cluster: str, settings: ClusterSettings, program: str, helper: str) -> None:
        self._cluster = cluster
        self._triggers = Triggers(cluster, settings)
        self._program = program
        self._helper = helper
        self._last_message = ""
        self._is_cleared = False

    def sync(self) -> None:
        """Set missing triggers and clear useless ones of Steward's.

        A failure is logged once: the sensor works without triggers, only later.
        """
        if self._is_cleared:
            return
        try:
            self._sync()
            self._is_cleared = not self._program
        except SlurmError as error:
            self._log_problem(
                f"cannot keep the triggers set, nodes are looked at by the clock alone: {error}"
            )
        else:
            self._last_message = ""

    def _sync(self) -> None:
        """Compare slurmctld's triggers with the wanted ones; clear and set the differences."""
        programs = {event: f"{self._program} {event}" for event in self._list_events()}
        present: set[str] = set()
        for trigger in self._triggers.list_all():
            if not self._is_ours(trigger):
                continue
            if self._is_current(trigger, programs) and trigger.event not in present:
                present.add(trigger.event)
            else:
                log.info("cluster %s: trigger %d is cleared", self._cluster, trigger.id)
                SENSOR.require("slurm.trigger.unset")
                # Somebody else may have cleared it at this moment.
                with contextlib.suppress(UnknownTrigger):
                    self._triggers.clear(trigger.id)
        for event, program in programs.items():
            if event not in present:
                SENSOR.require("slurm.trigger.set")
                self._triggers.set(program, event, permanent=True)
                log.info("cluster %s: a trigger is set for %s", self._cluster, event)

    def _list_events(self) -> Sequence[str]:
        """Return the events that this version of Slurm can fire."""
        if not self._program:
            return ()
        reasons = self._triggers.list_events()
        return [event for event in TRIGGER_EVENTS if reasons.get(event) == ""]

    def _is_ours(self, trigger: TriggerRecord) -> bool:
        """Return whether Steward set a trigger for this cluster, wherever its helper was then."""
        words = trigger.program.split()
        return (
            len(words) >= 6
            and os.path.basename(words[0]) == HELPER_NAME
            and words[1] == "--socket"
            and words[5] == self._cluster
        )

    def _is_current(self, trigger: TriggerRecord, programs: dict[str, str]) -> bool:
        """Return whether a trigger is permanent and has the right program."""
        return (
            trigger.permanent
            and not trigger.offset_s
            and programs.get(trigger.event) == " ".join(trigger.program.split())
        )

    def _log_problem(self, message: str) -> None:
        """Log a problem, once while it stays the same."""
        if message != self._last_message:
            self._last_message = message
            log.warning("cluster %s: %s", self._cluster, message)


def trigger_command(settings: Settings, cluster: str) -> str:
    """Return the command line of a trigger without the event; every user can read it."""
    sensor = settings.sensor
    return " ".join(
        (
            *(sensor.helper, "--socket", settings.wake_socket(cluster)),
            *("--secret", sensor.secret_file, cluster),
        )
    )


_PEERCRED: Final = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""
_BACKLOG: Final = 64
_MAX_CONNECTIONS: Final = 32
"""Maximum number of unfinished connections; beyond it the oldest is closed."""
_MESSAGE_TIMEOUT_S: Final = 5.0
"""Time limit for a message, in seconds."""
_MAX_MESSAGE_BYTES: Final = 16384
"""Maximum size of a message, in bytes."""
_MIN_SECRET_LENGTH: Final = 16
"""Minimum length of the secret, in characters."""
_LOG_INTERVAL_S: Final = 60.0
"""Minimum interval of log messages about refused reports, in seconds."""
_MAX_WAITING_REPORTS: Final = 4096
"""Maximum number of reports waiting for a poll."""
_ACCEPTED_REPLY: Final = b"ok\n"
"""Reply: the report was accepted."""
_REJECTED_REPLY: Final = b"no\n"
"""Reply: the report was rejected."""


# Receiving reports of triggers


class _HelperMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Message of the helper."""

    version: int
    secret: str
    cluster: str
    event: str
    nodes: str = ""


class FiredTrigger(NamedTuple):
    """Trigger that fired.

    Attributes:
        event: Event, for example ``drained``.
        nodes: Node list; "" if none, or for a daemon's trigger.
    """

    event: str
    nodes: str = ""


_decode: Final = msgspec.json.Decoder(_HelperMessage).decode


class _HelperConnection:
    """Connection whose message is incomplete."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""
        self.deadline = time.monotonic() + _MESSAGE_TIMEOUT_S


class WakeupListener:
    """Listener for the helper program, in its own thread.

    Args:
        path: Path of the socket.
        secret_file: File with the helper's secret, owned by root or this user, mode 0600.
        cluster: Cluster whose triggers are accepted.
    """

    def __init__(self, path: str, secret_file: str, cluster: str) -> None:
        self._path = path
        self._secret_file = secret_file
        self._cluster = cluster
        self._fired: set[FiredTrigger] = set()
        self._is_full = False
        self._lock = threading.Lock()
        # Two pipes: one signals new reports, the other stops the thread.
        self.fd, self._news_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._end_fd, self._ending_fd = os.pipe2(os.O_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._logged_at = 0.0

    def start(self) -> None:
        """Start listening.

        Raises:
            OSError: The socket cannot be created.
        """
        listener = open_unix_listener(self._path, _BACKLOG, self._list_allowed_uids())
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="wakeups")
        self._thread.start()

    def take_fired(self) -> frozenset[FiredTrigger]:
        """Return triggers fired since the last call; ``fd`` is readable if there are any."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
        with self._lock:
            fired, self._fired = self._fired, set()
            self._is_full = False
        return frozenset(fired)

    def close(self) -> None:
        """Stop listening."""
        os.close(self._ending_fd)
        if self._thread is not None:
            self._thread.join()
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        for fd in (self.fd, self._news_fd, self._end_fd):
            os.close(fd)

    def _serve(self, listener: socket.socket) -> None:
        """Run the listener's thread: accept connections and read messages."""
        peers: dict[int, _HelperConnection] = {}
        with listener:
            while True:
                poller = select.poll()
                for fd in (self._end_fd, listener.fileno(), *peers):
                    poller.register(fd, select.POLLIN)
                ready = {fd for fd, _ in poller.poll(1000.0 if peers else None)}
                if self._end_fd in ready:
                    break
                for fd in ready & set(peers):
                    if not self._read_message(peers[fd]):
                        peers.pop(fd).connection.close()
                now = time.monotonic()
                for fd in [fd for fd, peer in peers.items() if peer.deadline < now]:
                    peers.pop(fd).connection.close()
                if listener.fileno() in ready:
                    self._accept(listener, peers)
        for peer in peers.values():
            peer.connection.close()

    def _accept(self, listener: socket.socket, peers: dict[int, _HelperConnection]) -> None:
        """Accept a connection if its uid may send reports."""
        try:
            connection, _ = listener.accept()
        except OSError as error:
            # The client left before it was accepted, or no descriptor is free for a moment.
            log.debug("cannot accept a connection on %s: %s", self._path, error)
            time.sleep(0.01)
            return
        connection.setblocking(False)
        _, uid, _ = _PEERCRED.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        )
        if uid not in self._list_allowed_uids():
            self._log_refusal(f"uid {uid} is none who may wake the sensor")
            _send_reply(connection, _REJECTED_REPLY)
            connection.close()
            return
        if len(peers) >= _MAX_CONNECTIONS:
            oldest = min(peers, key=lambda fd: peers[fd].deadline)
            peers.pop(oldest).connection.close()
        peers[connection.fileno()] = _HelperConnection(connection)

    def _list_allowed_uids(self) -> set[int]:
        """Return the uids that may send reports: root, this user, the secret's owner."""
        uids = {0, os.geteuid()}
        # When the daemon runs as root, the secret is SlurmUser's.
        with contextlib.suppress(OSError):
            uids.add(os.stat(self._secret_file).st_uid)
        return uids

    def _read_message(self, peer: _HelperConnection) -> bool:
        """Read from a client; return whether more is to come."""
        try:
            data = peer.connection.recv(_MAX_MESSAGE_BYTES)
        except OSError:
            return False  # it has disconnected; the helper tries again
        peer.received += data
        if b"\n" not in peer.received:
            return bool(data) and len(peer.received) <= _MAX_MESSAGE_BYTES
        _send_reply(
            peer.connection,
            _ACCEPTED_REPLY if self._queue_report(peer.received) else _REJECTED_REPLY,
        )
        return False

    def _queue_report(self, line: bytes) -> bool:
        """Verify a message and queue its report; return whether it was accepted."""
        try:
            message = _decode(line.partition(b"\n")[0])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._log_refusal("what was said is no wake-up")
            return False
        secret = self._read_secret()
        if not secret or not hmac.compare_digest(message.secret.encode(), secret):
            self._log_refusal("a wake-up came without the secret")
            return False
        if message.cluster != self._cluster:
            self._log_refusal(
                f"a wake-up is of cluster {message.cluster[:64]!r}, this is {self._cluster}"
            )
            return False
        with self._lock:
            trigger = FiredTrigger(message.event[:64], message.nodes)
            has_room = len(self._fired) < _MAX_WAITING_REPORTS or trigger in self._fired
            is_first_lost = not has_room and not self._is_full
            self._is_full = self._is_full or not has_room
            if has_room:
                self._fired.add(trigger)
        if is_first_lost:
            log.warning(
                "cluster %s: %d wake-ups wait for a look at the nodes: a state that passes before "
                "it is not told where its wake-up comes later (%s was the first)",
                *(self._cluster, _MAX_WAITING_REPORTS, trigger.event),
            )
        with contextlib.suppress(BlockingIOError):
            os.write(self._news_fd, b"!")  # a full pipe is readable too
        return True

    def _read_secret(self) -> bytes:
        """Read the secret from its file; empty if it is missing or unsafe."""
        try:
            fd = os.open(self._secret_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            self._log_refusal(f"{self._secret_file}: {error.strerror}")
            return b""
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o077:
                self._log_refusal(f"{self._secret_file} is open to others: give it the mode 0600")
                return b""
            secret = file.read(_MAX_MESSAGE_BYTES).strip()
        if len(secret) < _MIN_SECRET_LENGTH:
            self._log_refusal(
                f"{self._secret_file} holds no secret of {_MIN_SECRET_LENGTH} letters or more"
            )
            return b""
        return secret

    def _log_refusal(self, reason: str) -> None:
        """Log a refused report, at most once a minute."""
        now = time.monotonic()
        if now < self._logged_at + _LOG_INTERVAL_S and self._logged_at:
            return
        self._logged_at = now
        log.warning("cluster %s: a wake-up is refused on %s: %s", self._cluster, self._path, reason)


def _send_reply(connection: socket.socket, reply: bytes) -> None:
    """Send a reply."""
    # A client that does not read the reply has delivered its message.
    with contextlib.suppress(OSError):
        connection.send(reply)
