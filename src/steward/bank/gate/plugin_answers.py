"""Answers to the submit plugin: the gate's decision, or the outage policy if it may not decide.

`PluginAnswerer` answers one request with the help of:

- `CpuLimits` (`cpu_limits.py`): CPU time that each user's requests may take;
- `UserNameCache` (`user_names.py`): user names by uid, resolved in a thread;
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
import time
from typing import Final

import msgspec

from steward.bank.estimate.request_limits import OPTION_OF_FIELD
from steward.bank.gate.cpu_limits import CpuLimits
from steward.bank.gate.holds import HoldKeeper, OverdrawError
from steward.bank.gate.requests import VERSION, AnswerCounts, PluginReply, PluginRequest
from steward.bank.gate.user_names import (
    UserNameCache,
)
from steward.core.config import Settings
from steward.core.sqlite import SqliteError, SqliteUnavailable, translate_errors

log = logging.getLogger(__name__)

_NO_SUBMITS: Final = (
    "Steward: rejected: the bank does not answer, and its outage policy rejects new jobs. Try "
    "again later"
)
_NO_CHANGES: Final = (
    "Steward: rejected: the bank does not answer, and its outage policy rejects changes "
    "of jobs. Try again later"
)
_UNDECIDABLE: Final = (
    "Steward: rejected: the bank cannot price this job. Request resources in another form, "
    "or tell an administrator"
)
_TOO_LONG: Final = "Steward: rejected: {} is longer than Slurm accepts. Shorten it"
_TOO_OFTEN: Final = (
    "Steward: rejected: your requests take too much of the gate's time. Submit fewer jobs at "
    "once, or shorter lists, and try again in a second"
)
_LOG_AGAIN_S: Final = 60.0
"""Time between two log messages about the same condition, in seconds."""


class DecisionRight:
    """The right of this gate to decide: it knows the balances, and no other gate decides.

    Args:
        settings: The configuration.
    """

    def __init__(self, settings: Settings) -> None:
        self._max_absence_s = settings.bank.without_ledger_s
        self._needs_lease = settings.bank.database.startswith("postgresql")
        self._asks_remote = bool(settings.gate.ask)
        self._books_at = 0.0
        self._lease_until = 0.0
        self.books_at_us = 0
        self.asked_at_us = 0
        """When a plugin last asked, as last written to the database."""
        self.fence = 0
        self.is_ready = False
        """Whether all holds are known."""

    def record_ledger_contact(self) -> None:
        """Record that the ledger was heard from."""
        self._books_at = time.monotonic()
        self.books_at_us = time.time_ns() // 1000

    @property
    def has_books(self) -> bool:
        """Return True if the ledger was heard from since this gate began."""
        return bool(self._books_at)

    def apply_lease(self, fence: int, valid_s: float) -> bool:
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
        return not self._asks_remote

    def explain_refusal(self) -> str:
        """Return why the gate may not decide, apart from the ledger's absence; "" if it may."""
        if not self.has_lease:
            return "another gate holds the lease to decide"
        if not self.is_ready:
            return "not all holds are restored yet"
        return ""

    @property
    def is_ledger_overdue(self) -> bool:
        """Return True if the ledger has been unavailable for too long."""
        return not self._books_at or time.monotonic() - self._books_at > self._max_absence_s


class AnswerCounters:
    """Counters of answers; see ``requests.AnswerCounts``."""

    __slots__ = ("admitted", "by_policy", "rejected", "slowest_us", "spent_us")

    def __init__(self) -> None:
        self.admitted = self.rejected = self.by_policy = 0
        self.spent_us = self.slowest_us = 0

    def add(self, replies: list[PluginReply], took_us: int) -> None:
        """Count answers that were given together; each took this long, in µs."""
        admitted = sum(reply.ok for reply in replies)
        self.admitted += admitted
        self.rejected += len(replies) - admitted
        self.spent_us += took_us * len(replies)
        self.slowest_us = max(self.slowest_us, took_us)

    def make_counts(self) -> AnswerCounts:
        """Return the counts."""
        return msgspec.convert(self, AnswerCounts, from_attributes=True)


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
        self.counters = AnswerCounters()
        self._logged_at: dict[str, float] = {}

    def find_user(self, cluster: str, uid: int) -> str:
        """Return a user's name from the cluster's model, or as this host resolves it."""
        return self._keeper.rules.find_user(cluster, uid) or self._names.find_user(uid)

    def answer(self, request: PluginRequest, now_us: int, read_ns: int = 0) -> PluginReply:
        """Decide within a transaction of the store, and within the sender's CPU budget.

        Args:
            request: The request.
            now_us: The time, µs since the epoch.
            read_ns: CPU time that reading it took.

        Raises:
            SqliteUnavailable: As :meth:`_answer`.
            SqliteError: As :meth:`_answer`.
        """
        uid, is_het = request.by, request.job.het
        is_exceeded = self._limits.is_exceeded(uid) and not self._is_slurms(uid)
        began_ns = time.thread_time_ns()
        try:
            if request.oversize:
                return self._reject_too_long(request)
            if is_exceeded:
                self._log_exceeded(request.cluster, uid)
                return self._reject(request, _TOO_OFTEN)
            with self._keeper.rules.limit_cpu(self._limits.budget(uid, is_het=is_het)):
                return self._answer(request, now_us)
        finally:
            self._limits.add(uid, read_ns + time.thread_time_ns() - began_ns, is_het=is_het)

    def _is_slurms(self, uid: int) -> bool:
        """Return True for root and SlurmUser, who act for all users, and for an unknown sender."""
        return uid in (-1, 0, os.geteuid())

    def _log_exceeded(self, cluster: str, uid: int) -> None:
        """Log that a user exceeds the CPU limit, at most once a minute."""
        if self._is_log_due(f"cpu {uid}"):
            log.warning(
                "cluster %s: uid %d takes more than a tenth of the gate's CPU time: the "
                "gate rejects its requests until the next second",
                *(cluster, uid),
            )

    def _reject_too_long(self, request: PluginRequest) -> PluginReply:
        """Reject a request whose texts the plugin had to cut, whatever the policy."""
        if request.by == 0:
            return PluginReply(v=VERSION, ok=True)
        option = OPTION_OF_FIELD.get(request.oversize, request.oversize[:80])
        reply = self._reject(request, _TOO_LONG.format(option))
        if not reply.ok:
            log.warning(
                "cluster %s: rejected a %s by uid %d (job %d): %s is too long",
                *(request.cluster, request.op, request.by, request.job.job_id, option),
            )
        return reply

    def _answer(self, request: PluginRequest, now_us: int) -> PluginReply:
        """Decide, within a transaction of the store.

        A user wrote the request: if it triggers an unforeseen error, the gate rejects only this
        request.

        Raises:
            SqliteUnavailable: The database cannot be written now.
            SqliteError: The same, or the request failed after a part was written, so that the
                transaction must be rolled back.
        """
        why = self._right.explain_refusal() or self._explain_refusal(request.cluster)
        if why:
            self._log_policy(why, request.cluster)
            return self.answer_by_policy(request)
        is_lenient = False
        if self._right.is_ledger_overdue:
            self._log_policy("the ledger has not answered for too long", request.cluster)
            if self._is_denied_in_outage(request):
                return self.answer_by_policy(request)
            is_lenient = True
        store = self._keeper.store
        before = store.write_count
        try:
            with translate_errors(store.path):
                return self._decide(request, now_us, is_lenient=is_lenient)
        except (SqliteError, SqliteUnavailable):
            raise
        except OverdrawError as error:
            log.critical("%s", error)
            failed: Exception = error
        except Exception as error:
            self.log_unforeseen(request.cluster, error)
            failed = error
        if store.write_count != before:
            raise SqliteError(f"a request failed: {failed!r}", store.path) from failed
        return self._reject(request, _UNDECIDABLE)

    def _decide(self, request: PluginRequest, now_us: int, *, is_lenient: bool) -> PluginReply:
        """Let the keeper decide on a submit or a change."""
        if request.op == "modify":
            self._fill_user_name(request)
            sender = self.find_user(request.cluster, request.by) if request.by > 0 else ""
            return self._keeper.modify(request, sender, now_us, is_lenient=is_lenient)
        user = self.find_user(request.cluster, request.job.uid)
        return self._keeper.submit(request, user, now_us, is_lenient=is_lenient)

    def _fill_user_name(self, request: PluginRequest) -> None:
        """Look up the user of a job that was accepted before the name was known."""
        hold = self._keeper.balances.hold_by_job.get((request.cluster, request.job.job_id))
        if hold is not None and not hold.user and hold.uid >= 0:
            hold.user = self.find_user(request.cluster, hold.uid)

    def _reject(self, request: PluginRequest, message: str) -> PluginReply:
        """Reject a faulty request in mode ``enforce``; accept it otherwise, or if exempt."""
        rules, job = self._keeper.rules, request.job
        partition, account, user = self._get_subject(request)
        mode = rules.get_mode(request.cluster, partition, account)
        is_ok = mode != "enforce" or rules.is_exempt(request.cluster, job.uid, user)
        return PluginReply(v=VERSION, ok=is_ok, say="" if is_ok else message)

    def log_unforeseen(self, cluster: str, error: BaseException) -> None:
        """Log, once in a while, an unforeseen error in a request."""
        if self._is_log_due(type(error).__name__):
            log.error("cluster %s: cannot decide on a request", cluster, exc_info=error)

    def _get_subject(self, request: PluginRequest) -> tuple[str, str, str]:
        """Return partition, account and user of a request, as far as they are known."""
        job = request.job
        hold = (
            self._keeper.balances.hold_by_job.get((request.cluster, job.job_id))
            if job.job_id
            else None
        )
        if request.op == "modify" and hold is not None:
            quote = self._keeper.store.read_covered(hold)[0]
            return job.partition or (quote.partition if quote else ""), hold.account, hold.user
        user = self.find_user(request.cluster, job.uid)
        return job.partition, self._keeper.rules.find_account(request.cluster, job, user), user

    def answer_by_policy(self, request: PluginRequest) -> PluginReply:
        """Answer by the outage policy."""
        if request.oversize:
            return self._reject_too_long(request)
        self.counters.by_policy += 1
        is_ok = not self._is_denied_in_outage(request)
        if request.op == "submit":
            return PluginReply(v=VERSION, ok=is_ok, say="" if is_ok else _NO_SUBMITS)
        is_ok = is_ok or (
            # The plugin's own policy accepts root and SlurmUser, too.
            request.by >= 0
            and self._keeper.rules.is_exempt(
                request.cluster, request.by, self.find_user(request.cluster, request.by)
            )
        )
        return PluginReply(v=VERSION, ok=is_ok, say="" if is_ok else _NO_CHANGES)

    def _is_denied_in_outage(self, request: PluginRequest) -> bool:
        partition, account, _ = self._get_subject(request)
        return self._keeper.rules.is_denied_in_outage(request.cluster, partition, account)

    def _explain_refusal(self, cluster: str) -> str:
        if self._keeper.rules.get_estimator(cluster) is None:
            return "the gate has no state or no rates of the cluster yet"
        return ""

    def _log_policy(self, why: str, cluster: str) -> None:
        if self._is_log_due(why):
            log.warning("the outage policy applies to cluster %s: %s", cluster, why)

    def _is_log_due(self, condition: str) -> bool:
        """Return True if a condition was not logged within the last minute: jobs are many."""
        now = time.monotonic()
        if now - self._logged_at.get(condition, -_LOG_AGAIN_S) < _LOG_AGAIN_S:
            return False
        self._logged_at[condition] = now
        return True


_decode_submit = msgspec.json.Decoder(PluginRequest).decode
_encode_said = msgspec.json.Encoder().encode


def decode_plugin_request(line: bytes | msgspec.Raw) -> PluginRequest | None:
    """Decode a plugin's request; return None if it is malformed or of another version."""
    try:
        request = _decode_submit(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # The plugin then applies its policy: it knows more about the job than this line says.
        log.warning("cannot decode a request of the submit plugin: %s", error)
        return None
    if request.v != VERSION:
        log.warning(
            "the submit plugin uses protocol version %d, the gate %d: update the plugin",
            request.v,
            VERSION,
        )
        return None
    return request


def encode_answer(reply: PluginReply) -> bytes:
    """Encode an answer as a line."""
    return _encode_said(reply) + b"\n"
