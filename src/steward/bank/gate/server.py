"""Process of the gate: one thread serves all sockets with epoll, and decides.

Its parts:

- `ClusterNames` adds the cluster's name to requests that lack it: Lua is not told the name;
- `RealTimePriority` gives the process real-time priority, as slurmctld waits for its answers;
- `WalCheckpointer` is a thread that writes the WAL of gate.db back in quiet moments;
- `GateServer` runs the main loop: it serves the control socket at once, and the plugin socket as
  soon as all holds are known (after a lost database or a reboot, rebuilt from the jobs' tokens) or
  another gate decides. All requests that arrived meanwhile are decided in one transaction and
  answered after its commit, so under load requests share a commit, without a timer.

Plugin requests go to `plugin_answers.py`, calls of Steward's processes to `calls.py`. With [gate]
``ask``, a gate without the lease forwards plugin requests to the gate named there.
"""

import contextlib
import gc
import logging
import os
import pwd
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.errors import GateUnavailable
from steward.bank.gate import plugin_conf, token
from steward.bank.gate.calls import GateOperations
from steward.bank.gate.connections import GatePeer, unix_listener
from steward.bank.gate.holds import HoldKeeper
from steward.bank.gate.plugin_answers import (
    DecisionRight,
    PluginAnswerer,
    decode_plugin_request,
    encode_answer,
)
from steward.bank.gate.policy import GateRules
from steward.bank.gate.requests import (
    CONTROL_SOCKET,
    GATE_ERRORS,
    LONGEST_CALL,
    LONGEST_REQUEST,
    PluginReply,
    PluginRequest,
)
from steward.bank.gate.store import GateStore
from steward.bank.gate.sync import HoldRecovery, HoldSync
from steward.bank.settings import MAX_GATE_TIMEOUT_MS
from steward.core.access import ClusterRolesFiles
from steward.core.config import Settings
from steward.core.errors import StewardError
from steward.core.rpc import RawRequest
from steward.core.rpc_server import RpcListener, get_peer_uid
from steward.core.sqlite import (
    Connection,
    SqliteError,
    SqliteUnavailable,
    free_slice,
    transaction,
    translate_errors,
)
from steward.core.waits import Stop

if TYPE_CHECKING:
    from steward.bank.gate.http_client import RemoteGate


class ClusterNames:
    """Fill in the cluster's name in plugin requests without one.

    Args:
        names: The configured clusters.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)
        self._logged_at = -_LOG_AGAIN_S

    def add_name(self, request: PluginRequest) -> PluginRequest:
        """Return the request with its cluster's name; unchanged if it is ambiguous."""
        if request.cluster:
            return request
        if len(self._names) == 1:
            return msgspec.structs.replace(request, cluster=self._names[0])
        now = time.monotonic()
        if now - self._logged_at >= _LOG_AGAIN_S:
            self._logged_at = now
            log.error(
                "slurmctld's job_submit.lua names no cluster, and the configuration has %s: the "
                'outage policy applies. Put steward_gate_cluster = "NAME" before its dofile, or '
                "run 'steward plugins install --job-submit-lua' with --cluster NAME",
                ", ".join(self._names),
            )
        return request


_NICENESS: Final = -10
_PRIORITY: Final = 1
"""Real-time priority: the lowest, which still precedes all ordinary processes."""
_LONGEST_STRETCH_S: Final = 0.2
"""Longest time that the gate runs at real-time priority without waiting, in seconds; reading
100,000 holds takes that long."""
_KILL_AFTER_S: Final = 10
"""CPU time without a wait after which the kernel kills the gate, in seconds; the supervisor
restarts it."""
_RETRY_S: Final = 1.0
_REAL_TIME: Final = os.SCHED_RR | os.SCHED_RESET_ON_FORK
_NORMAL_PRIORITY: Final = os.SCHED_OTHER | os.SCHED_RESET_ON_FORK


def lower_niceness() -> None:
    """Give this process its own session and a low nice value, as far as permitted.

    Then it gets a processor within milliseconds beside Steward's other workers, but takes none from
    other services. Permitted to root, or with LimitNICE= in the service.
    """
    with contextlib.suppress(PermissionError):
        os.setsid()  # fails for a group leader, which was started alone
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)


class RealTimePriority:
    """Real-time scheduling of this process's main thread: slurmctld holds locks while it waits.

    Niceness alone does not help: the kernel compares it only within a session or cgroup, and the
    programs that keep a host busy run in others. So the gate gets its own session, which the kernel
    weighs against all others like one program, and real-time scheduling where permitted. Its
    stretches of work are limited then: a runaway gate must not take a processor from the host.

    Args:
        again_s: Minimum time without real-time priority after a stretch that was too long, in
            seconds.
    """

    def __init__(self, again_s: float = _RETRY_S) -> None:
        self._again_s = again_s
        self._again_at = 0.0
        self._is_active = False
        self._is_permitted = True

    def acquire(self) -> None:
        """Get real-time priority and a low nice value, as far as permitted."""
        lower_niceness()
        signal.signal(signal.SIGXCPU, self._step_back)
        self.renew()

    def renew(self) -> None:
        """Get real-time priority again after a long stretch of work lost it."""
        if self._is_active or not self._is_permitted or time.monotonic() < self._again_at:
            return
        _limit_cpu_time()
        self._is_active = self._is_permitted = set_real_time_priority()
        if not self._is_permitted:
            log.info(
                "no real-time priority for the gate: on a busy host, slurmctld may wait for it. "
                "Set LimitRTPRIO= in the service"
            )

    def _step_back(self, *_: object) -> None:
        os.sched_setscheduler(0, _NORMAL_PRIORITY, os.sched_param(0))
        self._is_active = False
        self._again_at = time.monotonic() + self._again_s


def _limit_cpu_time() -> None:
    """Limit CPU time without a wait; each SIGXCPU from the kernel extends the limit by a second."""
    _, max_us = resource.getrlimit(resource.RLIMIT_RTTIME)
    kill_us = _KILL_AFTER_S * 1_000_000
    hard_us = kill_us if max_us == resource.RLIM_INFINITY else min(max_us, kill_us)
    resource.setrlimit(
        resource.RLIMIT_RTTIME, (min(hard_us, int(_LONGEST_STRETCH_S * 1_000_000)), hard_us)
    )


def set_real_time_priority() -> bool:
    """Give the calling thread real-time priority; return False if not permitted.

    Its threads and child processes do not inherit it.
    """
    try:
        os.sched_setscheduler(0, _REAL_TIME, os.sched_param(_PRIORITY))
    except OSError as error:
        log.debug("cannot set real-time priority: %s", error)
        return False
    return True


_CHECK_EVERY_S: Final = 0.25
"""Interval at which a WAL that is to be written back is checked, in seconds."""
_IDLE_CHECK_EVERY_S: Final = 1.0
"""Interval at which another WAL is checked, in seconds."""
_AT_MOST_EVERY_S: Final = 2.0
"""Minimum time between two checkpoints, in seconds."""
_QUIET_S: Final = 1.0
"""Time without requests before a checkpoint of a short WAL, in seconds."""
_MOST_ATTEMPTS: Final = 5
"""Maximum number of attempts to write everything back while more arrives."""
_WAL_NOTE: Final = "log"


class WalCheckpointer(threading.Thread):
    """Thread that checkpoints the WAL of gate.db beside the deciding thread.

    The deciding thread must never do that: on a shared disk an fsync may take a second. In SQLite,
    the first commit after a complete checkpoint restarts the WAL, with an fsync of its header. So
    this thread makes that commit, with a note of its own, and checkpoints only while no plugin has
    asked for a moment. The longer the WAL, the shorter that moment.

    Args:
        store: The database; this thread opens its own connection.
        most_frames: Length of the log, in frames of 4 KiB, at which a checkpoint no longer waits
            for a quiet moment.
    """

    def __init__(self, store: "GateStore", *, most_frames: int = 16_384) -> None:
        super().__init__(name="checkpoints", daemon=True)
        self._store = store
        self._most_frames = most_frames
        self._stopping = threading.Event()
        self._own_frames = 0
        self._not_before = 0.0

    def run(self) -> None:
        """Check the WAL periodically until :meth:`stop`."""
        # The deciding thread waits while this one holds the interpreter lock, so this one needs
        # priority, too.
        set_real_time_priority()
        try:
            db = self._store.connect()
        except (SqliteUnavailable, SqliteError) as error:
            log.error(
                "cannot checkpoint gate.db: its write-ahead log grows until the gate restarts: %s",
                error,
            )
            return
        has_frames = True
        while not self._stopping.wait(_CHECK_EVERY_S if has_frames else _IDLE_CHECK_EVERY_S):
            try:
                with translate_errors(self._store.path):
                    has_frames = self.checkpoint_if_quiet(db, time.monotonic())
                    if not has_frames:
                        has_frames = self.free_pages_if_quiet(db, time.monotonic())
            except (SqliteUnavailable, SqliteError) as error:
                # The log only grows meanwhile; the writer reports errors that matter.
                log.debug("no checkpoint: %s", error)
        db.close()

    def checkpoint_if_quiet(self, db: Connection, now: float) -> bool:
        """Checkpoint and restart the WAL, if there is something to write and the gate is quiet.

        Returns:
            Whether there was something to write.
        """
        frames, _ = _get_wal_length(db)
        if frames <= self._own_frames:
            return False
        if now < self._not_before:
            return True
        if now - self._store.last_request_at < _QUIET_S * (1 - frames / self._most_frames):
            return True
        self._not_before = now + _AT_MOST_EVERY_S
        for _ in range(_MOST_ATTEMPTS):
            db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if self._restart_wal(db):
                return True
        if frames > self._most_frames:
            with self._store.write_lock:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                self._commit(db)
        return True

    def free_pages_if_quiet(self, db: Connection, now: float) -> bool:
        """Free one slice of unused pages while no plugin asks; the next checkpoint cuts the file.

        A request that comes meanwhile waits for the slice, a few milliseconds.

        Returns:
            Whether pages were freed.
        """
        if now - self._store.last_request_at < _QUIET_S:
            return False
        with self._store.write_lock:
            return free_slice(db)

    def _restart_wal(self, db: Connection) -> bool:
        """Commit first after a checkpoint, which restarts the WAL; return False if too late."""
        with self._store.write_lock:
            frames, written_back = _get_wal_length(db)
            if frames != written_back:
                return False
            self._commit(db)
            return True

    def _commit(self, db: Connection) -> None:
        """Write a note, as the first commit after a checkpoint; SQLite then restarts the WAL."""
        with transaction(db, self._store.path):
            at = b"%d" % time.time_ns()
            db.execute("INSERT OR REPLACE INTO note VALUES (?, ?)", (_WAL_NOTE, at))
        self._own_frames, _ = _get_wal_length(db)

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        self._stopping.set()
        self.join(5.0)


def _get_wal_length(db: Connection) -> tuple[int, int]:
    """Return the WAL's length in frames, and how many of them are written back."""
    _, frames, written_back = db.execute("PRAGMA wal_checkpoint(NOOP)").fetchone()
    return int(frames), int(written_back)


log = logging.getLogger(__name__)

_REQUEST_S: Final = MAX_GATE_TIMEOUT_MS / 1000
"""Time-out for a plugin's complete request, and then for its reply, in seconds."""
_TICK_S: Final = 1.0
_REMAKE_S: Final = 2.0
"""Interval of attempts to rebuild missing holds, in seconds."""
_REMAKE_MOST_S: Final = 60.0
"""Time after which the gate opens without the clusters that do not answer, in seconds."""
_STANDINGS_S: Final = 60.0
"""Longest interval between two reads of the users' roles, in seconds."""
_MOST_PEERS: Final = 2000
"""Maximum number of connections; beyond it the oldest is dropped."""
_NOTE_ASKED_US: Final = 60_000_000
"""Interval at which the time of the last plugin request is written down, in µs."""
_ACCEPT_AT_ONCE: Final = 128
_LOG_AGAIN_S: Final = 60.0


class GateServer:
    """Server of the plugin socket and of the socket for Steward's own processes.

    Args:
        settings: The configuration.

    Raises:
        GateUnavailable: The key of the tokens cannot be read.
        SqliteError: gate.db cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store = GateStore(settings.state_dir)
        self._rules = GateRules(settings)
        self._keeper = HoldKeeper(self._store, self._rules, token.load_secret(settings.state_dir))
        self._right = DecisionRight(settings)
        self._hold_sync = HoldSync(self._keeper)
        self._answerer = PluginAnswerer(self._keeper, self._right)
        self._calls = GateOperations(
            settings.state_dir,
            self._keeper,
            self._hold_sync,
            self._answerer,
            self._right,
            self._start_recovery,
            self._decide_requests,
        )
        self._checkpoints = WalCheckpointer(self._store)
        self._epoll = select.epoll()
        self._peers: dict[int, GatePeer] = {}
        self._listeners: dict[int, tuple[socket.socket, Callable[[socket.socket], None]]] = {}
        self._control: RpcListener | None = None
        self._pending: list[tuple[GatePeer, PluginRequest, int]] = []
        """Pending requests: the peer, the request, and the CPU time that reading it took, in ns."""
        self._plugin_uids = _get_plugin_uids(settings)
        self._rules.slurm_uids = self._plugin_uids
        self._logged_at, self._rejected_count = -_LOG_AGAIN_S, 0
        self._clusters = ClusterNames(settings.cluster)
        self._remote_gate: RemoteGate | None = None
        self._recovery: HoldRecovery | None = None
        self._began_at = time.monotonic()
        self._tick_at = self._recover_at = self._roles_at = 0.0
        self._role_versions: dict[str, tuple[int, int]] = {}
        if not self._store.is_of_this_boot():
            self._start_recovery()
        if self._keeper.balances.position:
            # The last balances are known; the ledger's permitted absence starts now.
            self._right.record_ledger_contact()

    def run(self, stop: Stop, beat: Callable[[], None]) -> None:
        """Serve until the Stop is raised.

        Raises:
            GateUnavailable: A socket cannot be made.
        """
        plugin_conf.write_plugin_conf(self._keeper.rules)
        self._checkpoints.start()
        with ExitStack() as sockets:
            path = os.path.join(self._settings.state_dir, CONTROL_SOCKET)
            try:
                self._control = RpcListener(
                    path, max_bytes=LONGEST_CALL, request_type=RawRequest, own=GATE_ERRORS
                )
            except OSError as error:
                raise GateUnavailable(f"cannot listen on {path}: {error.strerror}", path) from error
            sockets.callback(self._control.close)
            self._epoll.register(self._control.fd, select.EPOLLIN)
            if self._settings.gate.ask:
                self._connect_remote_gate()
            self._epoll.register(stop.fd, select.EPOLLIN)
            is_open = False
            gc.collect()
            gc.freeze()
            # Nothing here creates reference cycles; a collection would scan 100,000 holds.
            gc.disable()
            while not stop.is_set():
                beat()
                self._run_once(stop)
                if not is_open and self._can_open():
                    path = self._settings.gate_socket
                    self._make_socket_directory(path)
                    plugin = sockets.enter_context(unix_listener(path, self._plugin_uids))
                    self._listen(plugin, self._accept_plugin)
                    is_open = True
                    log.info("the gate listens at %s", path)
        self.close()

    def _make_socket_directory(self, path: str) -> None:
        try:
            plugin_conf.make_shared_directory(os.path.dirname(path))
        except OSError as error:
            raise GateUnavailable(f"cannot listen on {path}: {error.strerror}", path) from error

    def close(self) -> None:
        """Close all sockets and the database."""
        gc.enable()
        for peer in list(self._peers.values()):
            self._drop(peer)
        if self._remote_gate is not None:
            self._remote_gate.close()
        self._checkpoints.stop()
        self._epoll.close()
        self._store.close()

    # Waiting

    def _run_once(self, stop: Stop) -> None:
        """Wait for events and handle them: one pass of the main loop."""
        wait_s = max(0.0, self._tick_at - time.monotonic())
        if self._remote_gate is not None:
            wait_s = min(wait_s, self._remote_gate.get_wait_s())
        for fd, mask in self._epoll.poll(wait_s):
            peer = self._peers.get(fd)
            if peer is not None:
                self._serve_peer(peer, mask)
            elif self._control is not None and fd == self._control.fd:
                self._serve_calls(self._control)
            elif fd in self._listeners:
                self._accept(*self._listeners[fd])
            elif self._remote_gate is not None and fd != stop.fd:
                self._remote_gate.receive()
        if self._pending:
            self._decide()
        if self._remote_gate is not None:
            self._remote_gate.send()
        if self._recovery is not None and not self._recovery.is_tried:
            self._recover_holds()
        if time.monotonic() >= self._tick_at:
            self._tick()

    def _tick(self) -> None:
        """Do the periodic work of each second: time-outs, expiry, roles, recovery."""
        now = time.monotonic()
        self._tick_at = now + _TICK_S
        for peer in [peer for peer in self._peers.values() if peer.deadline < now]:
            self._drop(peer)
        if self._control is not None:
            self._serve_calls(self._control)  # drops silent peers, too
        try:
            with self._store.transaction():
                self._hold_sync.tick(time.time_ns() // 1000)
        except (SqliteUnavailable, SqliteError) as error:
            log.error("gate.db: %s", error)
            self._keeper.load()
        self._reload_roles(now)
        if now >= self._recover_at:
            self._recover_at = now + _REMAKE_S
            self._recover_holds()

    def _reload_roles(self, now: float) -> None:
        """Reload the roles of users when a file changes, and every minute, since each file expires.

        At the daemon's first start the files are written after the gate has begun.
        """
        is_due = now >= self._roles_at
        if is_due:
            self._roles_at = now + _STANDINGS_S
        roles_files = ClusterRolesFiles(self._settings.state_dir)
        for cluster in self._settings.cluster:
            version = roles_files.get_version(cluster)
            if is_due or version != self._role_versions.get(cluster):
                self._role_versions[cluster] = version
                self._rules.put_roles(cluster, roles_files.get(cluster))

    def _listen(
        self, listener: socket.socket, on_connection: Callable[[socket.socket], None]
    ) -> None:
        self._listeners[listener.fileno()] = (listener, on_connection)
        self._epoll.register(listener, select.EPOLLIN)

    def _accept(
        self, listener: socket.socket, on_connection: Callable[[socket.socket], None]
    ) -> None:
        """Accept pending connections of a listener."""
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                connection, _address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("the gate cannot accept a connection: %s", error)
                return
            if len(self._peers) >= _MOST_PEERS:
                # Drop the oldest silent connection: a flood must not shut others out.
                self._drop(next(iter(self._peers.values())))
            on_connection(connection)

    def _accept_plugin(self, connection: socket.socket) -> None:
        """Admit a connection to the plugin socket, if its uid may ask."""
        uid = get_peer_uid(connection)
        if uid not in self._plugin_uids:
            connection.close()
            self._rejected_count += 1
            now = time.monotonic()
            if now - self._logged_at >= _LOG_AGAIN_S:
                log.warning(
                    "uid %d may not use the gate; rejected %d connections",
                    uid,
                    self._rejected_count,
                )
                self._logged_at, self._rejected_count = now, 0
            return
        self._add_peer(GatePeer(connection, max_line=LONGEST_REQUEST, timeout_s=_REQUEST_S))

    def _add_peer(self, peer: GatePeer) -> None:
        self._peers[peer.fd] = peer
        self._serve_peer(peer, select.EPOLLIN)
        if peer.is_reading:
            self._watch(peer, select.EPOLLIN)

    def _serve_peer(self, peer: GatePeer, mask: int) -> None:
        """Handle readable or writable events of a peer."""
        if mask & select.EPOLLOUT:
            self._send(peer, b"")
        if mask & ~select.EPOLLOUT and not peer.is_ended:
            line = peer.read_line()
            if line is not None:
                began_ns = time.thread_time_ns()
                request = decode_plugin_request(line)
                if request is None:
                    peer.is_ended = True
                else:
                    read_ns = time.thread_time_ns() - began_ns
                    self._pending.append((peer, self._clusters.add_name(request), read_ns))
        if peer.is_ended and peer.fd in self._peers:
            self._drop(peer)

    def _serve_calls(self, control: RpcListener) -> None:
        """Answer the calls of Steward's own processes that have come."""
        for call in control.receive():
            try:
                call.reply(self._calls.run(call.message.action, call.message.args))
            except StewardError as error:
                call.reject(error)

    def _send(self, peer: GatePeer, data: bytes) -> None:
        peer.send(data)
        if peer.is_ended:
            self._drop(peer)
        else:
            self._watch(peer, select.EPOLLIN | (select.EPOLLOUT if peer.out else 0))

    def _watch(self, peer: GatePeer, mask: int) -> None:
        """Wait for events of a peer. Most peers need none: their line has come with them."""
        if peer.is_watched:
            self._epoll.modify(peer.fd, mask)
        else:
            self._epoll.register(peer.fd, mask)
            peer.is_watched = True

    def _drop(self, peer: GatePeer) -> None:
        self._peers.pop(peer.fd, None)
        if peer.is_watched and peer.socket.fileno() >= 0:
            self._epoll.unregister(peer.fd)
        peer.close()

    # Deciding

    def _decide(self) -> None:
        """Decide on all pending requests in one transaction, then answer them."""
        requests = []
        for pending in self._pending:
            # Nobody would use the hold of a plugin that has left.
            if pending[0].has_left():
                self._drop(pending[0])
            else:
                requests.append(pending)
        self._pending = []
        if not requests:
            return
        self._store.last_request_at = time.monotonic()
        if self._remote_gate is not None and not self._right.has_lease:
            self._right.asked_at_us = time.time_ns() // 1000
            for peer, request, _ in requests:
                self._watch(peer, select.EPOLLIN)
                self._remote_gate.forward(peer, request)
            return
        try:
            with self._store.transaction():
                replies = self._decide_requests(
                    [(request, read_ns) for _, request, read_ns in requests],
                    time.time_ns() // 1000,
                )
        except (SqliteUnavailable, SqliteError) as error:
            # slurmctld waits, and the state in memory must match the database.
            log.error("the gate cannot decide, so the outage policy applies: %s", error)
            self._keeper.load()
            replies = [self._answerer.answer_by_policy(request) for _, request, _ in requests]
        for (peer, _, _), reply in zip(requests, replies, strict=True):
            if not peer.is_ended:
                self._send(peer, encode_answer(reply))
        took_us = int((time.monotonic() - self._store.last_request_at) * 1e6)
        self._answerer.counters.add(replies, took_us)

    def _decide_requests(
        self, requests: list[tuple[PluginRequest, int]], now_us: int
    ) -> list[PluginReply]:
        """Decide on requests, each with the CPU time that reading it took, in ns.

        Call it within a transaction of the store.
        """
        if requests and now_us - self._right.asked_at_us > _NOTE_ASKED_US:
            self._right.asked_at_us = now_us
            self._store.set_number("asked_us", now_us)
        if now_us >= self._hold_sync.next_change_us:
            # Move holds to the next allocation before other jobs can use it.
            self._hold_sync.tick(now_us)
        return [
            self._answerer.answer(self._clusters.add_name(request), now_us, read_ns)
            for request, read_ns in requests
        ]

    # Readiness

    def _can_open(self) -> bool:
        """Return True if plugins may connect: all holds are known, or another gate decides."""
        if self._remote_gate is not None or not self._right.has_lease:
            return True
        return self._right.is_ready

    def _start_recovery(self) -> None:
        """Rebuild missing holds from Slurm's queue before anything is decided."""
        self._recovery = HoldRecovery(self._settings)
        self._right.is_ready = False
        self._began_at = time.monotonic()
        self._recover_at = 0.0

    def _recover_holds(self) -> None:
        """Rebuild missing holds; then mark the gate as ready."""
        if self._right.is_ready or not self._right.has_lease:
            return
        if self._recovery is not None:
            if not self._right.has_books:
                return  # the paying allocations are not known yet
            self._recovery.run(self._keeper, time.time_ns() // 1000)
            waiting = self._recovery.waiting
            if waiting and time.monotonic() - self._began_at < _REMAKE_MOST_S:
                return
            if waiting:
                log.error(
                    "holds of cluster %s may be missing until a poll of its queue",
                    ", ".join(sorted(waiting)),
                )
        self._recovery = None
        self._right.is_ready = True
        self._store.record_boot()

    # Another gate

    def _connect_remote_gate(self) -> None:
        from steward.bank.gate.http_client import RemoteGate

        self._remote_gate = RemoteGate(self._settings.gate, self._deliver_reply)
        self._epoll.register(self._remote_gate.fd, select.EPOLLIN)

    def _deliver_reply(
        self, peer: GatePeer, request: PluginRequest, reply: PluginReply | None
    ) -> None:
        """Pass on another gate's reply, or apply the outage policy if none came in time."""
        if not peer.is_ended:
            self._send(peer, encode_answer(reply or self._answerer.answer_by_policy(request)))


def _get_plugin_uids(settings: Settings) -> frozenset[int]:
    """Return the uids that may use the plugin socket: root, Steward's user, ``plugin_users``."""
    uids = {0, os.geteuid()}
    for user in settings.gate.plugin_users:
        try:
            uids.add(pwd.getpwnam(user).pw_uid)
        except KeyError:
            log.debug("plugin_users: unknown user %s on this host", user)
    return frozenset(uids)
