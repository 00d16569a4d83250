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
import stat
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from steward.capture.settings import HELPER_NAME
from steward.core.config import Settings
from steward.core.errors import StewardError, Unavailable, UnknownCredential, UsageError
from steward.core.principals import SENSOR
from steward.core.rpc import ActionRequest
from steward.core.rpc_server import RpcListener
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
    """

    def __init__(self, cluster: str, settings: ClusterSettings, program: str) -> None:
        self._cluster = cluster
        self._triggers = Triggers(cluster, settings)
        self._program = program
        self._last_message = ""
        self._is_cleared = False

    def sync(self) -> bool:
        """Set missing triggers and clear useless ones of Steward's; return whether that is done.

        A failure is logged once: the sensor works without triggers, only later.
        """
        if self._is_cleared:
            return True
        try:
            self._sync()
            self._is_cleared = not self._program
        except SlurmError as error:
            self._log_problem(
                f"cannot set striggers, so only periodic polls find node changes: {error}"
            )
            return False
        self._last_message = ""
        return True

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
                log.info("cluster %s: cleared strigger %d", self._cluster, trigger.id)
                SENSOR.require("slurm.trigger.unset")
                # Somebody else may have cleared it at this moment.
                with contextlib.suppress(UnknownTrigger):
                    self._triggers.clear(trigger.id)
        for event, program in programs.items():
            if event not in present:
                SENSOR.require("slurm.trigger.set")
                self._triggers.set(program, event, permanent=True)
                log.info("cluster %s: set an strigger for %s", self._cluster, event)

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


WAKE_ACTION: Final = "sensor.wake"
"""Name of the helper's request."""
_MAX_REQUEST_BYTES: Final = 16384
"""Maximum size of the helper's request, in bytes."""
_MAX_SECRET_BYTES: Final = 4096
"""Bytes read of the secret."""
_MIN_SECRET_LENGTH: Final = 16
"""Minimum length of the secret, in characters."""
_MAX_WAITING_REPORTS: Final = 4096
"""Maximum number of reports waiting for a poll."""


# Receiving reports of triggers


class _WakeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of the helper."""

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
        self._listener: RpcListener | None = None

    def start(self) -> None:
        """Start listening.

        Raises:
            OSError: The socket cannot be created.
        """
        self._listener = RpcListener(self._path, self._list_allowed_uids, _MAX_REQUEST_BYTES)
        self._thread = threading.Thread(target=self._serve, args=(self._listener,), name="wakeups")
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
        if self._listener is not None:
            self._listener.close()
        for fd in (self.fd, self._news_fd, self._end_fd):
            os.close(fd)

    def _serve(self, listener: RpcListener) -> None:
        """Run the listener's thread: accept reports until :meth:`close`."""
        poller = select.poll()
        for fd in (self._end_fd, listener.fd):
            poller.register(fd, select.POLLIN)
        while self._end_fd not in {fd for fd, _ in poller.poll(1000.0)}:
            for call in listener.receive():
                try:
                    self._queue_report(call.message)
                except StewardError as error:
                    listener.log_rejection(str(error))
                    call.reject(error)
                else:
                    call.reply({})

    def _list_allowed_uids(self) -> set[int]:
        """Return the uids that may send reports: root, this user, the secret's owner."""
        uids = {0, os.geteuid()}
        # When the daemon runs as root, the secret is SlurmUser's.
        with contextlib.suppress(OSError):
            uids.add(os.stat(self._secret_file).st_uid)
        return uids

    def _queue_report(self, message: ActionRequest) -> None:
        """Verify a request and queue its report.

        Raises:
            StewardError: The request is rejected.
        """
        if not hmac.compare_digest(message.auth.encode(), self._read_secret()):
            raise UnknownCredential(
                "the strigger program's report lacks the secret: install the program again with "
                "'steward plugins install --trigger'"
            )
        try:
            report = msgspec.convert(message.args, _WakeRequest)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"cannot decode the strigger program's report: {error}. Is the program of another "
                "version? Run 'steward plugins install --trigger'"
            ) from error
        if message.action != WAKE_ACTION or report.cluster != self._cluster:
            raise UsageError(
                f"{message.action[:64]!r} of cluster {report.cluster[:64]!r} reached the "
                f"sensor of cluster {self._cluster}: run 'steward plugins check --trigger'"
            )
        with self._lock:
            trigger = FiredTrigger(report.event[:64], report.nodes)
            has_room = len(self._fired) < _MAX_WAITING_REPORTS or trigger in self._fired
            is_first_lost = not has_room and not self._is_full
            self._is_full = self._is_full or not has_room
            if has_room:
                self._fired.add(trigger)
        if is_first_lost:
            log.warning(
                "cluster %s: %d strigger reports wait for a poll of the nodes: the sensor "
                "misses a state that ends before its report is processed (first: %s)",
                *(self._cluster, _MAX_WAITING_REPORTS, trigger.event),
            )
        with contextlib.suppress(BlockingIOError):
            os.write(self._news_fd, b"!")  # a full pipe is readable too

    def _read_secret(self) -> bytes:
        """Read the secret from its file.

        Raises:
            Unavailable: The secret is missing or unsafe.
        """
        path = self._secret_file
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise Unavailable(f"cannot read {path}: {error.strerror}", path) from error
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o077:
                raise Unavailable(
                    f"{path} must be a file of mode 0600: run 'chmod 0600 {path}'", path
                )
            secret = file.read(_MAX_SECRET_BYTES).strip()
        if len(secret) < _MIN_SECRET_LENGTH:
            raise Unavailable(
                f"the secret in {path} is shorter than {_MIN_SECRET_LENGTH} characters", path
            )
        return secret
