"""Answers to the submit plugin: the gate's decision, or the outage policy if it may not decide.

`PluginAnswerer` answers one request with the help of:

- `CpuLimits`: CPU time that each user's requests may take;
- `UserNameCache`: user names by uid, resolved in a thread;
- `DecisionRight`: whether this gate may decide (balances known, lease held, holds complete);
- `AnswerCounters`: counters for the gate's status.

`decode_plugin_request` and `encode_answer` convert JSON lines. `server.py` calls
`PluginAnswerer.answer` for all pending requests within one transaction of gate.db. It rejects texts
that are too long and users without CPU time left; it applies the outage policy if this gate may not
decide, or if the ledger has been unavailable for too long and the policy is ``deny`` (with
``allow`` it decides leniently). Otherwise `HoldKeeper.submit` or `HoldKeeper.modify` decides.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from steward.bank.estimate.request_limits import OPTION_OF_FIELD, Budget
from steward.bank.gate.holds import HoldKeeper, OverdrawError
from steward.bank.gate.requests import VERSION, AnswerCounts, PluginReply, PluginRequest
from steward.core.config import Settings
from steward.core.sqlite import SqliteError, SqliteUnavailable, translate_errors
from steward.slurm.users import NameResolver

REQUEST_NS: Final = 5_000_000
"""CPU time that one request may take, in ns."""
USER_NS: Final = 100_000_000
"""CPU time that one user may take in each second, in ns: a tenth of the gate."""


class CpuLimits:
    """CPU time that each user took in the current second.

    slurmctld holds its locks while it waits. One request gets `REQUEST_NS`; the components of a
    heterogeneous job share one such budget. A user who took `USER_NS` is rejected until the next
    second.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second = 0
        self._taken_ns: dict[int, int] = {}
        self._het_ns: dict[int, int] = {}

    def is_exceeded(self, uid: int) -> bool:
        """Return True if a user took all CPU time of this second."""
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._taken_ns.clear()
            self._het_ns.clear()
        return self._taken_ns.get(uid, 0) >= USER_NS

    def budget(self, uid: int, *, is_het: bool) -> Budget:
        """Return the CPU budget of a request; het components share one budget."""
        taken_ns = self._het_ns.get(uid, 0) if is_het else 0
        return Budget(max(0, REQUEST_NS - taken_ns))

    def add(self, uid: int, ns: int, *, is_het: bool) -> None:
        """Count the CPU time of a user's request."""
        self._taken_ns[uid] = self._taken_ns.get(uid, 0) + ns
        if is_het:
            self._het_ns[uid] = self._het_ns.get(uid, 0) + ns


_KEEP_NAME_S: Final = 600.0
"""Time for which a resolved name is kept, in seconds."""
_RETRY_NAME_S: Final = 5.0
"""Time for which an unresolved name is kept, in seconds. Short: a directory service that is briefly
unavailable must not cause long rejections."""
_MOST_CACHED_NAMES: Final = 100_000
"""Maximum number of cached names."""


class UserNameCache:
    """User names by uid, resolved in a thread beside the deciding one.

    A slow directory service (LDAP) must not stop the gate: a decision waits for the thread only
    briefly, and a name that arrives later serves the next job.

    Args:
        wait_s: Longest time that a decision waits for a name, in seconds.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, *, wait_s: float = 0.02, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wait_s = wait_s
        self._clock = clock
        self._known: dict[int, tuple[str, float]] = {}
        self._wanted: queue.SimpleQueue[tuple[int, threading.Event]] = queue.SimpleQueue()
        self._asked: dict[int, threading.Event] = {}
        self._thread: threading.Thread | None = None

    def user(self, uid: int) -> str:
        """Return a user's name; "" if it does not resolve, or not soon enough."""
        known = self._known.get(uid)
        if known is not None and self._clock() < known[1]:
            return known[0]
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask, name="names", daemon=True)
            self._thread.start()
        event = self._asked.get(uid)
        if event is None:
            if len(self._known) >= _MOST_CACHED_NAMES:
                self._known.clear()
            event = self._asked[uid] = threading.Event()
            self._wanted.put((uid, event))
            event.wait(self._wait_s)
        found = self._known.get(uid)
        return found[0] if found is not None else ""

    def _ask(self) -> None:
        """Resolve requested uids, in the thread."""
        people = NameResolver()
        while True:
            uid, event = self._wanted.get()
            name = people.user(uid)
            people.forget()
            lasts_s = _KEEP_NAME_S if name else _RETRY_NAME_S
            known = self._known.get(uid)
            if not name and known is not None:
                name = known[0]  # a known name is kept as long as Steward runs
            self._known[uid] = (name, self._clock() + lasts_s)
            self._asked.pop(uid, None)
            event.set()


log = logging.getLogger(__name__)

_NO_SUBMITS: Final = (
    "Steward: the bank cannot be asked now, and jobs are not let in meanwhile: try again later"
)
_NO_CHANGES: Final = (
    "Steward: the bank cannot be asked now, and jobs are not changed meanwhile: try again later"
)
_UNDECIDABLE: Final = (
    "Steward: the bank cannot tell what this job may cost: ask for it in other words, or tell "
    "those who run the cluster"
)
_TOO_LONG: Final = (
    "Steward: {} is longer than any that Slurm takes, and cannot be priced: shorten it"
)
_TOO_OFTEN: Final = (
    "Steward: your jobs take too much of the bank's time: submit fewer at once, or with shorter "
    "lists, and try again in a second"
)
_LOG_AGAIN_S: Final = 60.0
"""Time between two log messages about the same condition, in seconds."""


class DecisionRight:
    """The right of this gate to decide: it knows the balances, and no other gate decides.

    Args:
        settings: The configuration.
    """

    def __init__(self, settings: Settings) -> None:
        self._lasts_s = settings.bank.without_ledger_s
        self._needs_lease = settings.bank.database.startswith("postgresql")
        self._asks = bool(settings.gate.ask)
        self._books_at = 0.0
        self._lease_until = 0.0
        self.books_at_us = 0
        self.asked_at_us = 0
        """When a plugin last asked, as last written to the database."""
        self.fence = 0
        self.is_ready = False
        """Whether all holds are known."""

    def heard(self) -> None:
        """Record that the ledger was heard from."""
        self._books_at = time.monotonic()
        self.books_at_us = time.time_ns() // 1000

    @property
    def has_books(self) -> bool:
        """Return True if the ledger was heard from since this gate began."""
        return bool(self._books_at)

    def lease(self, fence: int, valid_s: float) -> bool:
        """Grant or revoke the lease; return True if it is new here.

        A lease with a lower fence than the last one is ignored.
        """
        if fence < self.fence:
            return False
        is_new = fence != self.fence or time.monotonic() >= self._lease_until
        self.fence = fence
        self._lease_until = time.monotonic() + valid_s if valid_s > 0 else 0.0
        return is_new and valid_s > 0

    @property
    def has_lease(self) -> bool:
        """Return True if no other gate decides."""
        if self._needs_lease:
            return time.monotonic() < self._lease_until
        return not self._asks

    def why_not(self) -> str:
        """Return why the gate may not decide, apart from the ledger's absence; "" if it may."""
        if not self.has_lease:
            return "another gate has the right to decide"
        if not self.is_ready:
            return "the holds are not all known yet"
        return ""

    @property
    def is_alone(self) -> bool:
        """Return True if the ledger has been unavailable for too long."""
        return not self._books_at or time.monotonic() - self._books_at > self._lasts_s


class AnswerCounters:
    """Counters of answers; see ``requests.AnswerCounts``."""

    __slots__ = ("allowed", "by_policy", "refused", "slowest_us", "spent_us")

    def __init__(self) -> None:
        self.allowed = self.refused = self.by_policy = 0
        self.spent_us = self.slowest_us = 0

    def add(self, said: list[PluginReply], took_us: int) -> None:
        """Count answers that were given together; each took this long, in µs."""
        allowed = sum(one.ok for one in said)
        self.allowed += allowed
        self.refused += len(said) - allowed
        self.spent_us += took_us * len(said)
        self.slowest_us = max(self.slowest_us, took_us)

    def tally(self) -> AnswerCounts:
        """Return the counts."""
        return AnswerCounts(
            allowed=self.allowed,
            refused=self.refused,
            by_policy=self.by_policy,
            spent_us=self.spent_us,
            slowest_us=self.slowest_us,
        )


class PluginAnswerer:
    """Answers requests of submit plugins by decision or by outage policy.

    Args:
        keeper: The gate's state.
        right: Whether this gate may decide.
        names: User names by uid. If None, the gate resolves them on this host.
        limits: CPU time that each user has taken. If None, it starts at 0.
    """

    def __init__(
        self,
        keeper: HoldKeeper,
        right: DecisionRight,
        *,
        names: UserNameCache | None = None,
        limits: CpuLimits | None = None,
    ) -> None:
        self._keeper = keeper
        self._right = right
        self._names = names or UserNameCache()
        self._limits = limits or CpuLimits()
        self.counting = AnswerCounters()
        self._said: dict[str, float] = {}

    def user(self, cluster: str, uid: int) -> str:
        """Return a user's name from the cluster's model, or as this host resolves it."""
        return self._keeper.ground.user_of(cluster, uid) or self._names.user(uid)

    def answer(self, ask: PluginRequest, now_us: int, read_ns: int = 0) -> PluginReply:
        """Decide within a transaction of the store, and within the sender's CPU budget.

        Args:
            ask: The request.
            now_us: The time, µs since the epoch.
            read_ns: CPU time that reading it took.

        Raises:
            SqliteUnavailable: As :meth:`_answer`.
            SqliteError: As :meth:`_answer`.
        """
        uid, is_het = ask.by, ask.job.het
        is_exceeded = self._limits.is_exceeded(uid) and not self._is_slurms(uid)
        began_ns = time.thread_time_ns()
        try:
            if ask.oversize:
                return self._too_long(ask)
            if is_exceeded:
                self._say_exceeded(ask.cluster, uid)
                return self._refused(ask, _TOO_OFTEN)
            with self._keeper.ground.limited(self._limits.budget(uid, is_het=is_het)):
                return self._answer(ask, now_us)
        finally:
            self._limits.add(uid, read_ns + time.thread_time_ns() - began_ns, is_het=is_het)

    def _is_slurms(self, uid: int) -> bool:
        """Return True for root and SlurmUser, who act for all users, and for an unknown sender."""
        return uid in (-1, 0, os.geteuid())

    def _say_exceeded(self, cluster: str, uid: int) -> None:
        """Log that a user exceeds the CPU limit, at most once a minute."""
        if self._is_news(f"cpu {uid}"):
            log.warning(
                "cluster %s: uid %d takes more than a tenth of the gate, and is refused until "
                "the next second",
                *(cluster, uid),
            )

    def _too_long(self, ask: PluginRequest) -> PluginReply:
        """Reject a request whose texts the plugin had to cut, whatever the policy."""
        if ask.by == 0:
            return PluginReply(v=VERSION, ok=True, id=ask.id)
        what = OPTION_OF_FIELD.get(ask.oversize, ask.oversize[:80])
        said = self._refused(ask, _TOO_LONG.format(what))
        if not said.ok:
            log.warning(
                "cluster %s: refused a %s by uid %d (job %d): %s is too long",
                *(ask.cluster, ask.op, ask.by, ask.job.job_id, what),
            )
        return said

    def _answer(self, ask: PluginRequest, now_us: int) -> PluginReply:
        """Decide, within a transaction of the store.

        A user wrote the request: if it triggers an unforeseen error, the gate rejects only this
        request.

        Raises:
            SqliteUnavailable: The database cannot be written now.
            SqliteError: The same, or the request failed after a part was written, so that the
                transaction must be rolled back.
        """
        why = self._right.why_not() or self._why_not(ask.cluster)
        if why:
            self._say(why, ask.cluster)
            return self.by_policy(ask)
        is_lenient = False
        if self._right.is_alone:
            self._say("the ledger is away for too long", ask.cluster)
            if self._keeper.ground.policy(ask.cluster, ask.job.partition) == "deny":
                return self.by_policy(ask)
            is_lenient = True
        store = self._keeper.store
        before = store.writes
        try:
            with translate_errors(store.path):
                return self._decided(ask, now_us, is_lenient=is_lenient)
        except (SqliteError, SqliteUnavailable):
            raise
        except OverdrawError as error:
            log.critical("%s", error)
            failed: Exception = error
        except Exception as error:
            self.say_strange(ask.cluster, error)
            failed = error
        if store.writes != before:
            raise SqliteError(f"a request failed half way: {failed!r}", store.path) from failed
        return self._refused(ask, _UNDECIDABLE)

    def _decided(self, ask: PluginRequest, now_us: int, *, is_lenient: bool) -> PluginReply:
        """Let the keeper decide on a submit or a change."""
        if ask.op == "modify":
            self._name(ask)
            sender = self.user(ask.cluster, ask.by) if ask.by > 0 else ""
            return self._keeper.modify(ask, sender, now_us, is_lenient=is_lenient)
        user = self.user(ask.cluster, ask.job.uid)
        return self._keeper.submit(ask, user, now_us, is_lenient=is_lenient)

    def _name(self, ask: PluginRequest) -> None:
        """Look up the user of a job that was accepted before the name was known."""
        hold = self._keeper.purses.by_job.get((ask.cluster, ask.job.job_id))
        if hold is not None and not hold.user and hold.uid >= 0:
            hold.user = self.user(ask.cluster, hold.uid)

    def _refused(self, ask: PluginRequest, say: str) -> PluginReply:
        """Reject a faulty request in mode ``gate``; accept it otherwise, or if exempt."""
        ground, job = self._keeper.ground, ask.job
        partition, account, user = self._about(ask)
        mode = ground.mode(ask.cluster, partition, account)
        is_ok = mode != "gate" or ground.is_exempt(ask.cluster, job.uid, user)
        return PluginReply(v=VERSION, ok=is_ok, say="" if is_ok else say, id=ask.id)

    def say_strange(self, cluster: str, error: BaseException) -> None:
        """Log, once in a while, an unforeseen error in a request."""
        if self._is_news(type(error).__name__):
            log.error("cluster %s: a request cannot be decided on", cluster, exc_info=error)

    def _about(self, ask: PluginRequest) -> tuple[str, str, str]:
        """Return partition, account and user of a request, as far as they are known."""
        job = ask.job
        hold = self._keeper.purses.by_job.get((ask.cluster, job.job_id)) if job.job_id else None
        if ask.op == "modify" and hold is not None:
            quote = self._keeper.store.covered(hold)[0]
            return job.partition or (quote.partition if quote else ""), hold.account, hold.user
        user = self.user(ask.cluster, job.uid)
        return job.partition, self._keeper.ground.account_of(ask.cluster, job, user), user

    def by_policy(self, ask: PluginRequest) -> PluginReply:
        """Answer by the outage policy."""
        if ask.oversize:
            return self._too_long(ask)
        self.counting.by_policy += 1
        ground = self._keeper.ground
        if ask.op == "submit":
            is_ok = ground.policy(ask.cluster, ask.job.partition) == "allow"
            return PluginReply(v=VERSION, ok=is_ok, say="" if is_ok else _NO_SUBMITS, id=ask.id)
        is_ok = ground.policy(ask.cluster, self._about(ask)[0]) == "allow" or (
            # The plugin's own policy accepts root and SlurmUser, too.
            ask.by >= 0 and ground.is_exempt(ask.cluster, ask.by, self.user(ask.cluster, ask.by))
        )
        return PluginReply(v=VERSION, ok=is_ok, say="" if is_ok else _NO_CHANGES, id=ask.id)

    def _why_not(self, cluster: str) -> str:
        if self._keeper.ground.estimator(cluster) is None:
            return "it has not been told what the cluster looks like, or what jobs cost"
        return ""

    def _say(self, why: str, cluster: str) -> None:
        if self._is_news(why):
            log.warning("jobs of cluster %s are answered by the policy: %s", cluster, why)

    def _is_news(self, what: str) -> bool:
        """Return True if a condition was not logged within the last minute: jobs are many."""
        now = time.monotonic()
        if now - self._said.get(what, -_LOG_AGAIN_S) < _LOG_AGAIN_S:
            return False
        self._said[what] = now
        return True


_decode_submit = msgspec.json.Decoder(PluginRequest).decode
_encode_said = msgspec.json.Encoder().encode


def decode_plugin_request(line: bytes) -> PluginRequest | None:
    """Decode a plugin's request; return None if it is malformed or of another version."""
    try:
        ask = _decode_submit(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # The plugin then applies its policy: it knows more about the job than this line says.
        log.warning("a request of the submit plugin cannot be read: %s", error)
        return None
    if ask.v != VERSION:
        log.warning("the submit plugin speaks version %d, the gate %d", ask.v, VERSION)
        return None
    return ask


def encode_answer(said: PluginReply) -> bytes:
    """Encode an answer as a line."""
    return _encode_said(said) + b"\n"
