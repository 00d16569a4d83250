"""Enforcement on queued jobs: place missing SU holds, and hold or cancel unpaid jobs.

Jobs bypass the submit plugin: requeued after their end, admitted while the gate was down, enlarged
by an operator, submitted before there was a bank. The bank's consumer calls this module for them.

- :func:`build_claim` describes a job, or the remaining tasks of an array, to the gate.
- :class:`UnpaidJobs` applies the site's rule to jobs with insufficient funds: "warn" and "credit"
  place a hold beyond the funds, "warn" with a comment on the job; "hold" and "cancel" stop it.
  The ledger remembers held jobs, so that a restart does not prevent their release.
- :class:`HoldPlacement` compares the queue with the gate's holds: ``want`` queues a job, ``turn``
  claims its hold, ``sweep`` queues all jobs that lack one. It reads what a job needs from jobs.db,
  never from an event, which may be outdated by then.
- :func:`needs_hold` tells whether a queued job lacks a sufficient hold.
"""

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from steward.bank.billing import get_hold_job_id
from steward.bank.errors import NoEstimate, NoRate
from steward.bank.estimate import Estimator, describe_record
from steward.bank.gate.admission import DEFERRED_START_US
from steward.bank.gate.client import GateClient
from steward.bank.gate.requests import CoverRequest
from steward.bank.gate.unconfirmed_changes import MOST_DESCRIPTIONS
from steward.bank.records import Hold, JobRequest, Quote
from steward.bank.settings import UnpaidRule as Rule
from steward.core.config import Settings
from steward.core.errors import Unavailable
from steward.core.records import JobRecord
from steward.core.sqlite import SqliteUnavailable
from steward.core.timestamps import to_micros, to_micros_or_zero
from steward.jobs import Job, Jobs, database_path
from steward.slurm import tres
from steward.slurm.arrays import count_tasks, remove_tasks
from steward.slurm.errors import ScrontabJob, SlurmError
from steward.slurm.job_changes import JobChanges, format_job_target
from steward.slurm.job_states import strip_state_suffix
from steward.slurm.tres import count_requested_kinds, parse_tres, strip_tres_type

if TYPE_CHECKING:
    from steward.bank.gate_sync import GateSync
    from steward.bank.ledger.ledger import Ledger


STARTED_STATES: Final = frozenset(
    {"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STAGE_OUT"}
)
"""States of jobs that have their resources."""

HELD_REASONS: Final = frozenset({"JobHeldUser", "JobHeldAdmin"})
"""Reasons of jobs that are pending until released."""

TRUNCATION_MARK: Final = "..."
"""End of a task expression that Slurm shortened."""

_LONG_INDEX: Final = 10
"""Number of digits from which a task index is not valid."""
_MINUTE_S: Final = 60

Key = tuple[str, int]
"""Cluster, and the raw job id that a hold is stored under."""


def build_claim(key: Key, jobs: Sequence[Job], *, is_ours: bool = False) -> CoverRequest | None:
    """Build the gate's claim for a job, or for all remaining tasks of an array.

    Args:
        key: Its cluster and id.
        jobs: The job, or the remaining tasks of the array, all priced like the first.
        is_ours: Whether Steward holds it in Slurm for insufficient funds.

    Returns:
        The claim; None if the job's owner is unknown.
    """
    cluster, leader = key
    of_array = [job for job in jobs if job.record.array_job_id]
    record = jobs[0].record
    if record.uid is None:
        return None
    description = describe_record(_limit_to_current_size(record))
    if of_array:
        description = msgspec.structs.replace(description, array=join_tasks(of_array))
    is_started = any(has_started(job.record) for job in jobs)
    if is_ours or is_started or not all(job.record.reason in HELD_REASONS for job in jobs):
        # A job that Steward itself holds still needs funds; of an array one task is enough.
        description = msgspec.structs.replace(description, held=False)
    return CoverRequest(
        cluster=cluster,
        job_id=leader,
        description=description,
        first_submit_us=min(to_micros(job.first_submit) for job in jobs),
        started=is_started,
    )


def _limit_to_current_size(record: JobRecord) -> JobRecord:
    """Return a resized job's record with the time limit of its current size only.

    The use of former sizes has been charged already.
    """
    if not (has_started(record) and record.resized_at and record.start and record.time_limit_s):
        return record
    used_s = max(0, int((record.resized_at - record.start).total_seconds()))
    left_s = max(_MINUTE_S, record.time_limit_s - used_s)
    return msgspec.structs.replace(record, time_limit_s=left_s)


def has_started(record: JobRecord) -> bool:
    """Return True if a job has its resources."""
    return strip_state_suffix(record.state) in STARTED_STATES


def describe_task(job: Job) -> JobRequest:
    """Return a task's request, equal for all like tasks of its array."""
    record = msgspec.structs.replace(_limit_to_current_size(job.record), admin_comment="")
    return msgspec.structs.replace(describe_record(record), array="", job_id=0)


def list_start_times(jobs: Sequence[Job]) -> tuple[int, ...]:
    """Return the start times of the running jobs, in microseconds."""
    return tuple(to_micros_or_zero(job.record.start) for job in jobs if has_started(job.record))


def join_tasks(jobs: Sequence[Job]) -> str:
    """Join the remaining tasks of an array into one expression, with the ``%`` limit."""
    limits = {job.record.array_task.partition("%")[2] for job in jobs} - {""}
    shown = {job.record.array_task.partition("%")[0] for job in jobs} - {""}
    # The pending row may still list tasks that have rows of their own by now.
    single = {int(one) for one in shown if one.isdecimal() and len(one) < _LONG_INDEX}
    waiting = sorted(remove_tasks(one, single) for one in shown if not one.isdecimal())
    parts = [*map(str, sorted(single)), *filter(None, waiting)]
    text = ",".join(parts).replace(TRUNCATION_MARK, "").strip(",") or "0"
    return f"{text}%{min(limits)}" if limits else text


log = logging.getLogger(__name__)

MESSAGE_PREFIX: Final = "steward: "
"""Prefix of every message to a job's user, so that Steward is known as the sender."""

_STRANDED: Final = "its account has no allocation that can pay it now"
"""Reason shown to users whose job lost its allocation."""
_WAITING: Final = frozenset({"PENDING", "REQUEUED"})
"""States of pending jobs."""

Verb = Literal["hold", "release", "cancel", "comment"]


class HeldJob(msgspec.Struct):
    """Job held in Slurm for insufficient funds.

    Attributes:
        jobs: Its ids, as Slurm's commands take them, and whether Slurm was told.
        why: The reason shown to its user.
        is_stranded: Whether its SU hold is open and only lost its allocation.
    """

    jobs: dict[str, bool]
    why: str
    is_stranded: bool = False


class UnpaidJobs:
    """Enforcement of the rule for jobs with insufficient funds.

    Args:
        settings: The whole configuration.
        ledger: Stores which jobs are held.
        link: Client of the gate.
        changing: By cluster name, the client that changes jobs in Slurm.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: "Ledger",
        link: GateClient,
        changing: Mapping[str, JobChanges] | None = None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._link = link
        self._changing = changing or {
            name: JobChanges(name, of)
            for name, of in settings.cluster.items()
            if of.asks_slurm and not of.remote
        }
        self._kept: dict[str, dict[str, HeldJob]] = {}
        self._warned: set[Key] = set()
        self._is_off = False

    def rule(self, partition: str) -> Rule:
        """Return the site's rule for a partition; of several partitions, the first rule found."""
        for name in partition.split(","):
            of = self._settings.bank.partition.get(name)
            if of is not None and of.unpaid is not None:
                return of.unpaid
        return self._settings.bank.unpaid

    def apply(self, key: Key, jobs: Sequence[Job], claim: CoverRequest, why: str) -> bool:
        """Apply the rule to a job with insufficient funds; nothing while the gate is off.

        Returns:
            Whether it is done; False if slurmctld is unavailable and a retry is needed.

        Raises:
            Unavailable: The ledger or the gate is unavailable.
        """
        if self.is_off():
            return True
        record = jobs[0].record
        rule = self.rule(record.partition)
        waiting = [job for job in jobs if strip_state_suffix(job.record.state) in _WAITING]
        line = next(iter(why.splitlines()), "it cannot be paid").removeprefix("Steward: ")
        self._warn(key, rule, line)
        if rule in ("warn", "credit"):
            self._link.cover(msgspec.structs.replace(claim, mode_credit=True))
        if rule == "cancel":
            tried = [
                self._try(key[0], "cancel", format_job_target(job.record), MESSAGE_PREFIX + line)
                for job in jobs
            ]
            return all(tried)
        if rule == "warn":
            for job in jobs:
                self._try(key[0], "comment", format_job_target(job.record), MESSAGE_PREFIX + line)
        elif rule == "hold" and waiting:
            self._hold(
                key, [format_job_target(job.record) for job in waiting], line, is_stranded=False
            )
        return True

    def is_off(self) -> bool:
        """Return True if an administrator has switched the gate off, so jobs may go unpaid."""
        is_off = os.path.lexists(self._settings.gate.off_switch)
        if is_off != self._is_off:
            self._is_off = is_off
            text = "%s is there: nothing is done to jobs that cannot be paid"
            log.warning(text if is_off else "%s is gone", self._settings.gate.off_switch)
        return is_off

    def paid(self, key: Key) -> None:
        """Release a job that was held, now that it can be paid.

        Raises:
            LedgerUnavailable: The ledger is unavailable.
        """
        self._warned.discard(key)
        kept = self._of(key[0]).get(str(key[1]))
        if kept is not None and not kept.is_stranded:
            self._release(key, kept)

    def held(self, cluster: str) -> list[int]:
        """Return the ids of jobs held for insufficient funds."""
        return [int(name) for name, kept in self._of(cluster).items() if not kept.is_stranded]

    def strand(self, holds: Sequence[Hold], jobs: Mapping[Key, Sequence[Job]]) -> None:
        """Hold jobs whose allocation ended; release those that another one can pay now.

        Args:
            holds: SU holds that no allocation can pay now.
            jobs: Jobs in the queue, by cluster and id.

        Raises:
            LedgerUnavailable: The ledger is unavailable.
        """
        stranded = {(hold.cluster, hold.job_id) for hold in holds if hold.job_id}
        for key in stranded:
            waiting = [
                job for job in jobs.get(key, ()) if strip_state_suffix(job.record.state) in _WAITING
            ]
            if waiting and str(key[1]) not in self._of(key[0]) and not self.is_off():
                self._warn(key, "hold", _STRANDED)
                names = [format_job_target(job.record) for job in waiting]
                self._hold(key, names, _STRANDED, is_stranded=True)
        for cluster in self._changing:
            for name, kept in list(self._of(cluster).items()):
                key = (cluster, int(name))
                if kept.is_stranded and key not in stranded:
                    self._release(key, kept)

    def forget(self, cluster: str, leader: int) -> None:
        """Forget a finished job, which needs no release any more.

        Raises:
            LedgerUnavailable: The ledger is unavailable.
        """
        self._warned.discard((cluster, leader))
        if self._of(cluster).pop(str(leader), None) is not None:
            self._store(cluster)

    def forget_gone(self, cluster: str, waiting: Collection[int]) -> None:
        """Forget jobs that left the queue, because Slurm may reuse their ids.

        Args:
            cluster: The cluster's name.
            waiting: Ids of all unfinished jobs.

        Raises:
            LedgerUnavailable: The ledger is unavailable.
        """
        of_cluster = self._of(cluster)
        gone = [name for name in of_cluster if int(name) not in waiting]
        for name in gone:
            self._warned.discard((cluster, int(name)))
            del of_cluster[name]
        if gone:
            self._store(cluster)

    def _hold(self, key: Key, names: list[str], why: str, *, is_stranded: bool) -> None:
        """Hold jobs in Slurm, and store which ones."""
        of_cluster = self._of(key[0])
        kept = of_cluster.setdefault(str(key[1]), HeldJob({}, why, is_stranded))
        todo = [name for name in names if not kept.jobs.get(name)]
        if not todo:
            return
        # Store first: a job that is held but not recorded would be pending for ever.
        kept.jobs |= dict.fromkeys(todo, False)
        self._store(key[0])
        for name in todo:
            kept.jobs[name] = self._try(key[0], "hold", name, MESSAGE_PREFIX + why)
        self._store(key[0])

    def _release(self, key: Key, kept: HeldJob) -> None:
        """Release held jobs in Slurm; those that fail stay stored for a retry."""
        left = [name for name in kept.jobs if not self._try(key[0], "release", name)]
        if left:
            # slurmctld is unavailable: they are released when it is back.
            kept.jobs = dict.fromkeys(left, True)
            return
        log.info("cluster %s: job %s can be paid now, and is released", *key)
        del self._of(key[0])[str(key[1])]
        self._store(key[0])

    def _try(self, cluster: str, verb: Verb, *words: str) -> bool:
        """Change a job in Slurm; return False only if slurmctld is unavailable.

        A scrontab job cannot be held, so it is cancelled.
        """
        slurm = self._changing.get(cluster)
        if slurm is None:
            return True
        try:
            getattr(slurm, verb)(*words)
        except ScrontabJob as error:
            log.warning("%s", error)
            return verb != "hold" or self._try(cluster, "cancel", *words)
        except SlurmError as error:
            log.warning("%s", error)
            return not isinstance(error, Unavailable)
        return True

    def _warn(self, key: Key, rule: str, why: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning("cluster %s: job %s cannot be paid (%s): %s", *key, rule, why)

    def _of(self, cluster: str) -> dict[str, HeldJob]:
        """Return the held jobs of a cluster by id, read from the ledger once."""
        if cluster not in self._kept:
            with self._ledger.reading() as t:
                text = t.mark(_unpaid_mark(cluster))
            self._kept[cluster] = msgspec.json.decode(text or "{}", type=dict[str, HeldJob])
        return self._kept[cluster]

    def _store(self, cluster: str) -> None:
        with self._ledger.transaction() as t:
            t.set_mark(_unpaid_mark(cluster), msgspec.json.encode(self._kept[cluster]).decode())


def _unpaid_mark(cluster: str) -> str:
    return f"unpaid:{cluster}"


_TURN_BATCH: Final = 200
"""Maximum number of jobs handled in one turn."""
_MAX_TRIES: Final = 30
"""Number of turns after which a job that jobs.db does not show is dropped."""
_NO_LIMIT: Final = 2**63
"""A number larger than any cost or count."""
_OVER_GRACE: Final = timedelta(seconds=30)
"""Age from which a hold without a running job is released."""
_MINUTE: Final = timedelta(minutes=1)
_CHANGED: Final = timedelta(seconds=30)
"""Longest pause of a job that was changed while held or deferred."""
_LESS: Final = timedelta(minutes=3)
"""Time during which sweeps recheck a job that may need less than its hold."""
_LONG: Final = timedelta(minutes=10)
"""Pause of a job that is covered."""
_SLACK_US: Final = 2_000_000
"""Tolerance between end times and hold times, in microseconds."""
_HOLDS_PAGE: Final = 1000
"""Number of holds fetched from the gate at once."""


class _Pause(msgspec.Struct, frozen=True):
    """Time until which a checked job needs no new check, and the state it depends on."""

    rules: int
    until: datetime
    has_hold: bool
    asks: tuple[object, ...]

    def is_over(
        self, live: "GateSync", has_hold: bool, asks: tuple[object, ...], now: datetime
    ) -> bool:
        """Return True if the time has passed or something relevant has changed."""
        return (
            now >= self.until
            or self.rules != live.rules.seq
            or self.has_hold != has_hold
            or self.asks != asks
        )


class HoldPlacement:
    """Placement of SU holds for queued jobs.

    Args:
        settings: The whole configuration.
        link: Client of the gate.
        live: Provides the rules and prices.
        unpaid: Applies the rule to jobs with insufficient funds.
    """

    def __init__(
        self, settings: Settings, link: GateClient, live: "GateSync", unpaid: "UnpaidJobs"
    ) -> None:
        self._settings = settings
        self._link = link
        self._live = live
        self._unpaid = unpaid
        self._wanted: dict[Key, int] = {}
        self._resting: dict[Key, _Pause] = {}
        self._parted: dict[str, Hold] = {}
        self._less: dict[Key, datetime] = {}
        self._jobs: Jobs | None = None
        self._said: set[str] = set()

    def want(self, cluster: str, leader: int) -> None:
        """Queue a job for the next turn."""
        self._wanted.setdefault((cluster, leader), 0)

    def note_change(self, cluster: str, hold: Hold, record: JobRecord, now: datetime) -> None:
        """Note that a job which never started may now need less than its hold."""
        has_run = (
            hold.started or record.restarts or strip_state_suffix(record.state) in STARTED_STATES
        )
        if hold.amount and not has_run:
            self._less[cluster, hold.job_id] = now

    def want_changed(self, cluster: str, now: datetime) -> bool:
        """Queue the jobs whose changes no poll has shown yet; return True if there are any.

        Raises:
            Unavailable: The gate is unavailable.
        """
        changed = self._link.holds(cluster=cluster, limit=_NO_LIMIT, changed=True)
        for hold in changed:
            self.want(cluster, hold.job_id)
            if not hold.started:
                self._less[cluster, hold.job_id] = now
        return bool(changed)

    def has_read(self, event: int) -> bool:
        """Return True if jobs.db has applied a journal event, by its id.

        Raises:
            SqliteUnavailable: jobs.db is unavailable.
        """
        return self._open().cursor() >= event

    def drop(self, cluster: str, leader: int) -> None:
        """Remove a finished job from the queue for the next turn."""
        self._wanted.pop((cluster, leader), None)

    def turn(self, now: datetime) -> bool:
        """Place holds for the queued jobs; return True if more are waiting.

        Raises:
            Unavailable: The gate or jobs.db is unavailable.
        """
        batch = list(self._wanted)[:_TURN_BATCH]
        by_cluster: dict[str, set[int]] = {}
        for cluster, leader in batch:
            by_cluster.setdefault(cluster, set()).add(leader)
        for cluster, leaders in by_cluster.items():
            found = group_by_hold(self.queue(cluster, leaders))
            for leader in leaders:
                key = (cluster, leader)
                if leader in found:
                    self._cover(key, found[leader], now)
                    self._wanted.pop(key, None)
                elif self._wanted[key] >= _MAX_TRIES:
                    # It ended before this turn, or jobs.db does not know it.
                    del self._wanted[key]
                else:
                    # jobs.db is a moment behind the journal.
                    self._wanted[key] += 1
        return any(not tries for tries in self._wanted.values())

    def sweep(self, cluster: str, now: datetime) -> None:
        """Compare all open holds of a cluster with all its unfinished jobs.

        Raises:
            Unavailable: The gate or jobs.db is unavailable.
        """
        holds = self._holds(cluster)
        waiting = group_by_hold(self.queue(cluster))
        # Tasks of an array end one by one, and no event marks the last one.
        self._unpaid.forget_gone(cluster, waiting.keys())
        for leader, jobs in waiting.items():
            if any(needs_hold(job.record, holds.get(leader), now) for job in jobs):
                rest = self._resting.get((cluster, leader))
                asks = deferred_request(jobs, now)
                if rest is None or rest.is_over(self._live, leader in holds, asks, now):
                    self.want(cluster, leader)
        self._less = {key: since for key, since in self._less.items() if now < since + _LESS}
        for leader, hold in holds.items():
            jobs = waiting.get(leader, [])
            if not jobs:
                self._release_if_over(cluster, leader, hold, now)
                continue
            is_changed = (cluster, leader) in self._less and not _is_truncated(jobs)
            if is_changed or is_hold_too_large(hold, jobs, self._settings.bank.arrays):
                self._cover((cluster, leader), jobs, now, is_exact=True)
        self._resting = {
            key: rest for key, rest in self._resting.items() if now < rest.until + _MINUTE
        }

    def move(self, holds: Sequence[Hold], now: datetime) -> None:
        """Move holds of arrays' pending tasks to the allocations that are active now.

        Args:
            holds: Holds of arrays on an allocation that has ended.
            now: The current time.

        Raises:
            Unavailable: The gate or jobs.db is unavailable.
        """
        changed = [hold for hold in holds if self._parted.get(hold.id) != hold]
        for cluster in {hold.cluster for hold in changed}:
            leaders = [hold.job_id for hold in changed if hold.cluster == cluster]
            for leader, jobs in group_by_hold(self.queue(cluster, leaders)).items():
                self._cover((cluster, leader), jobs, now, is_moved=True)
        self._parted = {hold.id: hold for hold in self._link.lingering()} if holds else {}

    def _cover(
        self,
        key: Key,
        jobs: Sequence[Job],
        now: datetime,
        *,
        is_exact: bool = False,
        is_moved: bool = False,
    ) -> None:
        """Claim a hold for a job; apply the rule if it has insufficient funds."""
        ordered = self._dearest_first(key[0], jobs)
        claim = build_claim(key, ordered, is_ours=key[1] in self._unpaid.held(key[0]))
        if claim is None:
            return
        if others := tuple(dict.fromkeys(map(describe_task, ordered)))[1:]:
            claim = msgspec.structs.replace(claim, tasks=others[: MOST_DESCRIPTIONS + 1])
        if is_exact:
            claim = msgspec.structs.replace(claim, is_exact=True)
        if is_moved:
            claim = msgspec.structs.replace(claim, starts=list_start_times(jobs))
        try:
            covered = self._link.cover(claim)
        except (NoRate, NoEstimate) as error:
            if str(error) not in self._said:
                log.error("cluster %s: %s", key[0], error)
                self._said.add(str(error))
            self._rest(key, jobs, now, _MINUTE, has_hold=False)
            return
        has_hold = covered.hold is not None
        if covered.is_paid:
            self._unpaid.paid(key)
            self._rest(key, jobs, now, _LONG, has_hold=has_hold)
        elif not is_exact:
            if self._unpaid.apply(key, jobs, claim, covered.why):
                self._owe(key, ordered)
            self._rest(key, jobs, now, _MINUTE, has_hold=has_hold)

    def _dearest_first(self, cluster: str, jobs: Sequence[Job]) -> Sequence[Job]:
        """Order jobs or tasks so that the dearest comes first; single tasks may be changed."""
        ordered = sorted(jobs, key=lambda job: (not has_started(job.record), job.job_id))
        shapes: dict[JobRequest, Job] = {}
        for job in ordered:
            shapes.setdefault(describe_task(job), job)
        pricing = self._live.pricing(cluster)
        if len(shapes) == 1 or pricing.picture is None:
            return ordered
        estimator = Estimator(pricing.picture, pricing.rates, pricing.settings)
        first_submit = min(job.first_submit for job in jobs)

        def cost(job: Job) -> int:
            try:
                return estimator.quote(describe_task(job), first_submit).amount
            except (NoRate, NoEstimate):
                return _NO_LIMIT  # first, so that the gate rejects the claim and gives the reason

        dearest = max(shapes.values(), key=cost)
        return [dearest, *(job for job in ordered if job is not dearest)]

    def _owe(self, key: Key, jobs: Sequence[Job]) -> None:
        """Place a hold for running jobs regardless of funds, since they will be charged.

        Without it, others would be admitted against the same SU meanwhile. Pending tasks of an
        array get no hold: they must not start.
        """
        started = [job for job in jobs if has_started(job.record)]
        claim = build_claim(key, started) if started else None
        if claim is not None:
            self._link.cover(msgspec.structs.replace(claim, mode_credit=True))

    def _rest(
        self, key: Key, jobs: Sequence[Job], now: datetime, span: timedelta, *, has_hold: bool
    ) -> None:
        """Skip a job for a while, because the gate's answer would be the same."""
        asks = deferred_request(jobs, now)
        before = self._resting.get(key)
        if asks and (before is None or before.asks != asks):
            # For a while after a change, the gate ignores what the queue shows.
            span = min(span, _CHANGED)
        self._resting[key] = _Pause(self._live.rules.seq, now + span, has_hold, asks)

    def _release_if_over(self, cluster: str, leader: int, hold: Hold, now: datetime) -> None:
        """Release the hold of a job that ended without a report to the gate."""
        if not hold.confirmed:
            return
        ends = [
            to_micros_or_zero(fact.record.end) for fact in self._open().run_facts(cluster, [leader])
        ]
        over_us = max(ends, default=0)
        is_known = bool(ends) or bool(self._open().find(str(leader), cluster))
        is_told = over_us >= hold.created_us - _SLACK_US
        is_old = hold.created_us < to_micros(now - _OVER_GRACE)
        if is_known and (is_told or is_old):
            self._link.release(hold.id, "its job is over")

    def _holds(self, cluster: str) -> dict[int, Hold]:
        """Return a cluster's open holds by job id."""
        found: dict[int, Hold] = {}
        after = ""
        while True:
            page = self._link.holds(cluster=cluster, after=after, limit=_HOLDS_PAGE)
            found |= {hold.job_id: hold for hold in page if hold.job_id}
            if len(page) < _HOLDS_PAGE:
                return found
            after = page[-1].id

    def queue(self, cluster: str, leaders: Iterable[int] | None = None) -> list[Job]:
        """List a cluster's unfinished jobs: those with the given ids, or all.

        Raises:
            SqliteUnavailable: jobs.db is unavailable.
        """
        return self._open().unfinished_jobs(cluster, leaders)

    def _open(self) -> Jobs:
        if self._jobs is None:
            self._jobs = Jobs(database_path(self._settings.state_dir))
        return self._jobs

    def is_ready(self) -> bool:
        """Return True if jobs.db exists."""
        try:
            self._open()
        except SqliteUnavailable:
            return False
        return True

    def close(self) -> None:
        """Close jobs.db."""
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None


def group_by_hold(jobs: Iterable[Job]) -> dict[int, list[Job]]:
    """Group jobs by the id their hold is stored under; of a reused id only the newest job."""
    found: dict[int, list[Job]] = {}
    for job in jobs:
        found.setdefault(get_hold_job_id(job.record), []).append(job)
    for leader, of_one in found.items():
        newest: dict[int, Job] = {}
        for job in of_one:
            before = newest.get(job.job_id)
            if before is None or job.first_submit > before.first_submit:
                newest[job.job_id] = job
        found[leader] = list(newest.values())
    return found


def needs_hold(record: JobRecord, hold: Hold | None, now: datetime) -> bool:
    """Return True if a queued job needs a check: its hold is missing or too small.

    A job that its user holds, or that begins later, needs no SU until it is eligible; but
    the gate must know its request, to decide on its release.
    """
    state = strip_state_suffix(record.state)
    if state not in STARTED_STATES and is_waiting_on_purpose(record, now):
        return hold is None or not hold.amount
    if hold is None or not hold.quote:
        return True
    if not hold.amount and hold.quote.amount:
        return True
    quote = hold.quote
    if record.account and record.account.lower() != hold.account:
        return True
    if record.partition and quote.partition not in record.partition.split(","):
        return True
    if record.time_limit_s and quote.time_s and record.time_limit_s > quote.time_s:
        return True
    if record.qos and quote.qos and quote.qos not in record.qos.split(","):
        return True
    return _is_larger(record, quote) or (state in STARTED_STATES and not hold.started)


def _is_larger(record: JobRecord, quote: Quote) -> bool:
    """Return True if it has or requests more of any TRES than the quote assumed."""
    shown = parse_tres(record.tres_allocated) or parse_tres(record.tres_requested)
    counted = {"cpu": record.cpus or 0, "node": record.nodes or 0, "mem": shown.get("mem", 0)}
    if any(asked > quote.tres[name] for name, asked in counted.items() if quote.tres.get(name)):
        return True
    asked = count_requested_kinds(record)
    extras = tres.parse_licenses(record.licenses) | {
        n: count for n, count in asked.items() if ":" in n
    }
    extras |= {name: amount for name, amount in shown.items() if name.startswith("bb/")}
    for amounts in (shown, asked):
        kinds: dict[str, int] = {}
        for name, amount in amounts.items():
            if name.startswith("gres/") and not (":" in name and strip_tres_type(name) in amounts):
                # Slurm chooses the GRES type if the job named none.
                kinds[strip_tres_type(name)] = kinds.get(strip_tres_type(name), 0) + amount
        for name, amount in kinds.items():
            extras[name] = max(extras.get(name, 0), amount)
    return any(amount > quote.tres.get(name, 0) for name, amount in extras.items())


def is_waiting_on_purpose(record: JobRecord, now: datetime) -> bool:
    """Return True if the job is held, or must not begin before a distant time."""
    if record.reason in HELD_REASONS:
        return True
    return (
        record.eligible is not None
        and to_micros(record.eligible) > to_micros(now) + DEFERRED_START_US
    )


def deferred_request(jobs: Sequence[Job], now: datetime) -> tuple[object, ...]:
    """Return the request of a job that is held or deferred; empty for any other."""
    record = jobs[0].record
    if strip_state_suffix(record.state) in STARTED_STATES or not is_waiting_on_purpose(record, now):
        return ()
    return (
        *(record.account, record.partition, record.qos, record.time_limit_s),
        *(record.cpus, record.nodes, record.tres_requested, record.eligible, len(jobs)),
    )


def is_hold_too_large(hold: Hold, jobs: Sequence[Job], policy: str) -> bool:
    """Return True if an array's hold includes tasks that were cancelled one by one."""
    if not hold.quote or hold.quote.tasks <= 1 or policy != "full":
        return False
    return (
        not _is_truncated(jobs)
        and hold.remaining > count_tasks(join_tasks(jobs)) * hold.quote.per_task
    )


def _is_truncated(jobs: Sequence[Job]) -> bool:
    """Return True if Slurm shortened the list of an array's remaining tasks."""
    return any(TRUNCATION_MARK in job.record.array_task for job in jobs)
