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
    remaining_s = max(_MINUTE_S, record.time_limit_s - used_s)
    return msgspec.structs.replace(record, time_limit_s=remaining_s)


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
    single = {int(task) for task in shown if task.isdecimal() and len(task) < _LONG_INDEX}
    waiting = sorted(remove_tasks(task, single) for task in shown if not task.isdecimal())
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
        job_changes: Mapping[str, JobChanges] | None = None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._link = link
        self._job_changes = job_changes or {
            name: JobChanges(name, cluster_settings)
            for name, cluster_settings in settings.cluster.items()
            if cluster_settings.asks_slurm and not cluster_settings.remote
        }
        self._held_jobs: dict[str, dict[str, HeldJob]] = {}
        self._warned: set[Key] = set()
        self._is_off = False

    def get_rule(self, partition: str) -> Rule:
        """Return the site's rule for a partition; of several partitions, the first rule found."""
        for name in partition.split(","):
            partition_settings = self._settings.bank.partition.get(name)
            if partition_settings is not None and partition_settings.unpaid is not None:
                return partition_settings.unpaid
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
        rule = self.get_rule(record.partition)
        waiting = [job for job in jobs if strip_state_suffix(job.record.state) in _WAITING]
        reason = next(iter(why.splitlines()), "it cannot be paid").removeprefix("Steward: ")
        self._warn(key, rule, reason)
        if rule in ("warn", "credit"):
            self._link.cover_job(msgspec.structs.replace(claim, mode_credit=True))
        if rule == "cancel":
            results = [
                self._change_job(
                    key[0], "cancel", format_job_target(job.record), MESSAGE_PREFIX + reason
                )
                for job in jobs
            ]
            return all(results)
        if rule == "warn":
            for job in jobs:
                self._change_job(
                    key[0], "comment", format_job_target(job.record), MESSAGE_PREFIX + reason
                )
        elif rule == "hold" and waiting:
            self._hold(
                key, [format_job_target(job.record) for job in waiting], reason, is_stranded=False
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

    def release_if_held(self, key: Key) -> None:
        """Release a job that was held, now that it can be paid.

        Raises:
            LedgerUnavailable: The ledger is unavailable.
        """
        self._warned.discard(key)
        held_job = self._of(key[0]).get(str(key[1]))
        if held_job is not None and not held_job.is_stranded:
            self._release(key, held_job)

    def list_held(self, cluster: str) -> list[int]:
        """Return the ids of jobs held for insufficient funds."""
        return [
            int(name) for name, held_job in self._of(cluster).items() if not held_job.is_stranded
        ]

    def hold_stranded(self, holds: Sequence[Hold], jobs: Mapping[Key, Sequence[Job]]) -> None:
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
        for cluster in self._job_changes:
            for name, held_job in list(self._of(cluster).items()):
                key = (cluster, int(name))
                if held_job.is_stranded and key not in stranded:
                    self._release(key, held_job)

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
        held_job = of_cluster.setdefault(str(key[1]), HeldJob({}, why, is_stranded))
        unheld = [name for name in names if not held_job.jobs.get(name)]
        if not unheld:
            return
        # Store first: a job that is held but not recorded would be pending for ever.
        held_job.jobs |= dict.fromkeys(unheld, False)
        self._store(key[0])
        for name in unheld:
            held_job.jobs[name] = self._change_job(key[0], "hold", name, MESSAGE_PREFIX + why)
        self._store(key[0])

    def _release(self, key: Key, held_job: HeldJob) -> None:
        """Release held jobs in Slurm; those that fail stay stored for a retry."""
        failed = [name for name in held_job.jobs if not self._change_job(key[0], "release", name)]
        if failed:
            # slurmctld is unavailable: they are released when it is back.
            held_job.jobs = dict.fromkeys(failed, True)
            return
        log.info("cluster %s: job %s can be paid now, and is released", *key)
        del self._of(key[0])[str(key[1])]
        self._store(key[0])

    def _change_job(self, cluster: str, verb: Verb, *words: str) -> bool:
        """Change a job in Slurm; return False only if slurmctld is unavailable.

        A scrontab job cannot be held, so it is cancelled.
        """
        slurm = self._job_changes.get(cluster)
        if slurm is None:
            return True
        try:
            getattr(slurm, verb)(*words)
        except ScrontabJob as error:
            log.warning("%s", error)
            return verb != "hold" or self._change_job(cluster, "cancel", *words)
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
        if cluster not in self._held_jobs:
            with self._ledger.reading() as t:
                text = t.read_mark(_unpaid_mark(cluster))
            self._held_jobs[cluster] = msgspec.json.decode(text or "{}", type=dict[str, HeldJob])
        return self._held_jobs[cluster]

    def _store(self, cluster: str) -> None:
        with self._ledger.transaction() as t:
            t.set_mark(
                _unpaid_mark(cluster), msgspec.json.encode(self._held_jobs[cluster]).decode()
            )


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
        self._gate_sync = live
        self._unpaid = unpaid
        self._queued: dict[Key, int] = {}
        self._paused: dict[Key, _Pause] = {}
        self._split_holds: dict[str, Hold] = {}
        self._maybe_smaller: dict[Key, datetime] = {}
        self._jobs: Jobs | None = None
        self._logged: set[str] = set()

    def queue_job(self, cluster: str, leader: int) -> None:
        """Queue a job for the next turn."""
        self._queued.setdefault((cluster, leader), 0)

    def note_change(self, cluster: str, hold: Hold, record: JobRecord, now: datetime) -> None:
        """Note that a job which never started may now need less than its hold."""
        has_run = (
            hold.started or record.restarts or strip_state_suffix(record.state) in STARTED_STATES
        )
        if hold.amount and not has_run:
            self._maybe_smaller[cluster, hold.job_id] = now

    def queue_changed(self, cluster: str, now: datetime) -> bool:
        """Queue the jobs whose changes no poll has shown yet; return True if there are any.

        Raises:
            Unavailable: The gate is unavailable.
        """
        changed = self._link.list_holds(cluster=cluster, limit=_NO_LIMIT, changed=True)
        for hold in changed:
            self.queue_job(cluster, hold.job_id)
            if not hold.started:
                self._maybe_smaller[cluster, hold.job_id] = now
        return bool(changed)

    def has_read(self, event: int) -> bool:
        """Return True if jobs.db has applied a journal event, by its id.

        Raises:
            SqliteUnavailable: jobs.db is unavailable.
        """
        return self._open_jobs().cursor() >= event

    def drop(self, cluster: str, leader: int) -> None:
        """Remove a finished job from the queue for the next turn."""
        self._queued.pop((cluster, leader), None)

    def place_queued(self, now: datetime) -> bool:
        """Place holds for the queued jobs; return True if more are waiting.

        Raises:
            Unavailable: The gate or jobs.db is unavailable.
        """
        batch = list(self._queued)[:_TURN_BATCH]
        by_cluster: dict[str, set[int]] = {}
        for cluster, leader in batch:
            by_cluster.setdefault(cluster, set()).add(leader)
        for cluster, leaders in by_cluster.items():
            jobs_by_leader = group_by_hold(self.list_jobs(cluster, leaders))
            for leader in leaders:
                key = (cluster, leader)
                if leader in jobs_by_leader:
                    self._claim_hold(key, jobs_by_leader[leader], now)
                    self._queued.pop(key, None)
                elif self._queued[key] >= _MAX_TRIES:
                    # It ended before this turn, or jobs.db does not know it.
                    del self._queued[key]
                else:
                    # jobs.db is a moment behind the journal.
                    self._queued[key] += 1
        return any(not tries for tries in self._queued.values())

    def sweep(self, cluster: str, now: datetime) -> None:
        """Compare all open holds of a cluster with all its unfinished jobs.

        Raises:
            Unavailable: The gate or jobs.db is unavailable.
        """
        holds = self._list_holds(cluster)
        waiting = group_by_hold(self.list_jobs(cluster))
        # Tasks of an array end one by one, and no event marks the last one.
        self._unpaid.forget_gone(cluster, waiting.keys())
        for leader, jobs in waiting.items():
            if any(needs_hold(job.record, holds.get(leader), now) for job in jobs):
                pause = self._paused.get((cluster, leader))
                deferred = deferred_request(jobs, now)
                if pause is None or pause.is_over(self._gate_sync, leader in holds, deferred, now):
                    self.queue_job(cluster, leader)
        self._maybe_smaller = {
            key: since for key, since in self._maybe_smaller.items() if now < since + _LESS
        }
        for leader, hold in holds.items():
            jobs = waiting.get(leader, [])
            if not jobs:
                self._release_if_over(cluster, leader, hold, now)
                continue
            is_changed = (cluster, leader) in self._maybe_smaller and not _is_truncated(jobs)
            if is_changed or is_hold_too_large(hold, jobs, self._settings.bank.arrays):
                self._claim_hold((cluster, leader), jobs, now, is_exact=True)
        self._paused = {
            key: pause for key, pause in self._paused.items() if now < pause.until + _MINUTE
        }

    def move_holds(self, holds: Sequence[Hold], now: datetime) -> None:
        """Move holds of arrays' pending tasks to the allocations that are active now.

        Args:
            holds: Holds of arrays on an allocation that has ended.
            now: The current time.

        Raises:
            Unavailable: The gate or jobs.db is unavailable.
        """
        changed = [hold for hold in holds if self._split_holds.get(hold.id) != hold]
        for cluster in {hold.cluster for hold in changed}:
            leaders = [hold.job_id for hold in changed if hold.cluster == cluster]
            for leader, jobs in group_by_hold(self.list_jobs(cluster, leaders)).items():
                self._claim_hold((cluster, leader), jobs, now, is_moved=True)
        self._split_holds = {hold.id: hold for hold in self._link.list_lingering()} if holds else {}

    def _claim_hold(
        self,
        key: Key,
        jobs: Sequence[Job],
        now: datetime,
        *,
        is_exact: bool = False,
        is_moved: bool = False,
    ) -> None:
        """Claim a hold for a job; apply the rule if it has insufficient funds."""
        ordered = self._sort_by_cost(key[0], jobs)
        claim = build_claim(key, ordered, is_ours=key[1] in self._unpaid.list_held(key[0]))
        if claim is None:
            return
        if others := tuple(dict.fromkeys(map(describe_task, ordered)))[1:]:
            claim = msgspec.structs.replace(claim, tasks=others[: MOST_DESCRIPTIONS + 1])
        if is_exact:
            claim = msgspec.structs.replace(claim, is_exact=True)
        if is_moved:
            claim = msgspec.structs.replace(claim, starts=list_start_times(jobs))
        try:
            reply = self._link.cover_job(claim)
        except (NoRate, NoEstimate) as error:
            if str(error) not in self._logged:
                log.error("cluster %s: %s", key[0], error)
                self._logged.add(str(error))
            self._pause(key, jobs, now, _MINUTE, has_hold=False)
            return
        has_hold = reply.hold is not None
        if reply.is_paid:
            self._unpaid.release_if_held(key)
            self._pause(key, jobs, now, _LONG, has_hold=has_hold)
        elif not is_exact:
            if self._unpaid.apply(key, jobs, claim, reply.why):
                self._hold_for_running(key, ordered)
            self._pause(key, jobs, now, _MINUTE, has_hold=has_hold)

    def _sort_by_cost(self, cluster: str, jobs: Sequence[Job]) -> Sequence[Job]:
        """Order jobs or tasks so that the dearest comes first; single tasks may be changed."""
        ordered = sorted(jobs, key=lambda job: (not has_started(job.record), job.job_id))
        shapes: dict[JobRequest, Job] = {}
        for job in ordered:
            shapes.setdefault(describe_task(job), job)
        pricing = self._gate_sync.pricing(cluster)
        if len(shapes) == 1 or pricing.model is None:
            return ordered
        estimator = Estimator(pricing.model, pricing.rates, pricing.settings)
        first_submit = min(job.first_submit for job in jobs)

        def cost(job: Job) -> int:
            try:
                return estimator.quote(describe_task(job), first_submit).amount
            except (NoRate, NoEstimate):
                return _NO_LIMIT  # first, so that the gate rejects the claim and gives the reason

        dearest = max(shapes.values(), key=cost)
        return [dearest, *(job for job in ordered if job is not dearest)]

    def _hold_for_running(self, key: Key, jobs: Sequence[Job]) -> None:
        """Place a hold for running jobs regardless of funds, since they will be charged.

        Without it, others would be admitted against the same SU meanwhile. Pending tasks of an
        array get no hold: they must not start.
        """
        started = [job for job in jobs if has_started(job.record)]
        claim = build_claim(key, started) if started else None
        if claim is not None:
            self._link.cover_job(msgspec.structs.replace(claim, mode_credit=True))

    def _pause(
        self, key: Key, jobs: Sequence[Job], now: datetime, duration: timedelta, *, has_hold: bool
    ) -> None:
        """Skip a job for a while, because the gate's answer would be the same."""
        deferred = deferred_request(jobs, now)
        before = self._paused.get(key)
        if deferred and (before is None or before.asks != deferred):
            # For a while after a change, the gate ignores what the queue shows.
            duration = min(duration, _CHANGED)
        self._paused[key] = _Pause(self._gate_sync.rules.seq, now + duration, has_hold, deferred)

    def _release_if_over(self, cluster: str, leader: int, hold: Hold, now: datetime) -> None:
        """Release the hold of a job that ended without a report to the gate."""
        if not hold.confirmed:
            return
        ends = [
            to_micros_or_zero(fact.record.end)
            for fact in self._open_jobs().list_run_events(cluster, [leader])
        ]
        over_us = max(ends, default=0)
        is_known = bool(ends) or bool(self._open_jobs().find(str(leader), cluster))
        is_reported = over_us >= hold.created_us - _SLACK_US
        is_old = hold.created_us < to_micros(now - _OVER_GRACE)
        if is_known and (is_reported or is_old):
            self._link.release(hold.id, "its job is over")

    def _list_holds(self, cluster: str) -> dict[int, Hold]:
        """Return a cluster's open holds by job id."""
        holds: dict[int, Hold] = {}
        after = ""
        while True:
            page = self._link.list_holds(cluster=cluster, after=after, limit=_HOLDS_PAGE)
            holds |= {hold.job_id: hold for hold in page if hold.job_id}
            if len(page) < _HOLDS_PAGE:
                return holds
            after = page[-1].id

    def list_jobs(self, cluster: str, leaders: Iterable[int] | None = None) -> list[Job]:
        """List a cluster's unfinished jobs: those with the given ids, or all.

        Raises:
            SqliteUnavailable: jobs.db is unavailable.
        """
        return self._open_jobs().list_unfinished_jobs(cluster, leaders)

    def _open_jobs(self) -> Jobs:
        if self._jobs is None:
            self._jobs = Jobs(database_path(self._settings.state_dir))
        return self._jobs

    def is_ready(self) -> bool:
        """Return True if jobs.db exists."""
        try:
            self._open_jobs()
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
    groups: dict[int, list[Job]] = {}
    for job in jobs:
        groups.setdefault(get_hold_job_id(job.record), []).append(job)
    for leader, group in groups.items():
        newest: dict[int, Job] = {}
        for job in group:
            before = newest.get(job.job_id)
            if before is None or job.first_submit > before.first_submit:
                newest[job.job_id] = job
        groups[leader] = list(newest.values())
    return groups


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
    if any(
        requested > quote.tres[name] for name, requested in counted.items() if quote.tres.get(name)
    ):
        return True
    requested = count_requested_kinds(record)
    extras = tres.parse_licenses(record.licenses) | {
        n: count for n, count in requested.items() if ":" in n
    }
    extras |= {name: amount for name, amount in shown.items() if name.startswith("bb/")}
    for amounts in (shown, requested):
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
