"""Enforcement on unpaid jobs: hold, cancel, warn or give credit when funds are insufficient.

:class:`UnpaidJobs` applies the site's rule to a queued or running job whose SU hold the gate
rejected: "warn" and "credit" place a hold beyond the funds, "warn" with a comment on the job;
"hold" and "cancel" stop it. The ledger remembers held jobs, so that a restart does not prevent
their release. :func:`build_claim` describes a job, or the remaining tasks of an array, to the gate.
``queue_holds.py`` finds the jobs that need this.
"""

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from steward.bank.estimate import describe_record
from steward.bank.gate.admission import DEFERRED_START_US
from steward.bank.gate.client import GateClient
from steward.bank.gate.requests import HoldRequest
from steward.bank.records import Hold, JobRequest
from steward.bank.settings import UnpaidRule as Rule
from steward.core.config import Settings
from steward.core.errors import Unavailable
from steward.core.logs import LogLimit
from steward.core.principals import ENFORCEMENT
from steward.core.records import JobRecord
from steward.core.timestamps import to_micros, to_micros_or_zero
from steward.jobs import Job
from steward.slurm.arrays import count_tasks, remove_tasks
from steward.slurm.errors import ScrontabJob, SlurmError
from steward.slurm.job_changes import JobChanges, format_job_target
from steward.slurm.job_states import strip_state_suffix

if TYPE_CHECKING:
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


def build_claim(key: Key, jobs: Sequence[Job], *, is_ours: bool = False) -> HoldRequest | None:
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
    return HoldRequest(
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

_STRANDED: Final = "insufficient funds: no allocation of its account can pay it"
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
        job_changes: By cluster name, the client that changes jobs in Slurm.
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
        self._log_limit = LogLimit()

    def get_rule(self, partition: str) -> Rule:
        """Return the site's rule for a partition; of several partitions, the first rule found."""
        for name in partition.split(","):
            partition_settings = self._settings.bank.partition.get(name)
            if partition_settings is not None and partition_settings.unpaid is not None:
                return partition_settings.unpaid
        return self._settings.bank.unpaid

    def apply(self, key: Key, jobs: Sequence[Job], claim: HoldRequest, why: str) -> bool:
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
        reason = next(iter(why.splitlines()), "insufficient funds")
        reason = reason.removeprefix("Steward: ").removeprefix("rejected: ")
        self._warn(key, rule, reason)
        if rule in ("warn", "credit"):
            self._link.place_hold(msgspec.structs.replace(claim, mode_credit=True))
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
        is_off = os.path.lexists(self._settings.gate_off)
        if is_off != self._is_off:
            self._is_off = is_off
            text = "%s exists: Steward does not hold or cancel jobs with insufficient funds"
            log.warning(
                text
                if is_off
                else "%s was removed: Steward holds or cancels jobs with insufficient funds again",
                self._settings.gate_off,
            )
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
        log.info("cluster %s: funds suffice for job %s, releasing it", *key)
        del self._of(key[0])[str(key[1])]
        self._store(key[0])

    def _change_job(self, cluster: str, verb: Verb, *words: str) -> bool:
        """Change a job in Slurm; return False only if slurmctld is unavailable.

        A scrontab job cannot be held, so it is cancelled.
        """
        slurm = self._job_changes.get(cluster)
        if slurm is None:
            return True
        ENFORCEMENT.require(f"slurm.job.{verb}")
        # While slurmctld is away, each turn tries each job again.
        level = self._log_limit.choose_level(logging.INFO, cluster, verb, words[0])
        log.log(
            level,
            "cluster %s: service principal '%s' runs slurm.job.%s on job %s",
            *(cluster, ENFORCEMENT.name, verb, words[0]),
        )
        try:
            getattr(slurm, verb)(*words)
        except ScrontabJob as error:
            log.warning("%s", error)
            return verb != "hold" or self._change_job(cluster, "cancel", *words)
        except SlurmError as error:
            if isinstance(error, Unavailable):
                log.log(logging.WARNING if level == logging.INFO else level, "%s", error)
                return False
            log.warning("%s", error)
        self._log_limit.reset(cluster, verb, words[0])
        return True

    def _warn(self, key: Key, rule: str, why: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning(
                "cluster %s: insufficient funds for job %s (unpaid = %s): %s", *key, rule, why
            )

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


def find_deferred_request(jobs: Sequence[Job], now: datetime) -> tuple[object, ...]:
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
        not is_truncated(jobs)
        and hold.remaining > count_tasks(join_tasks(jobs)) * hold.quote.per_task
    )


def is_truncated(jobs: Sequence[Job]) -> bool:
    """Return True if Slurm shortened the list of an array's remaining tasks."""
    return any(TRUNCATION_MARK in job.record.array_task for job in jobs)


def is_waiting_on_purpose(record: JobRecord, now: datetime) -> bool:
    """Return True if the job is held, or must not begin before a distant time."""
    if record.reason in HELD_REASONS:
        return True
    return (
        record.eligible is not None
        and to_micros(record.eligible) > to_micros(now) + DEFERRED_START_US
    )
