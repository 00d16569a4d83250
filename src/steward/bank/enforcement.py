"""What the gate is asked to hold for jobs in the queue, as Slurm's records tell it."""

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from steward.bank.billing import leader_of
from steward.bank.errors import NoEstimate, NoRate
from steward.bank.estimate import Estimator, description_of
from steward.bank.gate.admission import FAR_US
from steward.bank.gate.client import GateLink
from steward.bank.gate.requests import Claim
from steward.bank.gate.unconfirmed_changes import MOST_DESCRIPTIONS
from steward.bank.records import Description, Hold, Quote
from steward.bank.settings import Unpaid as Rule
from steward.core.config import Settings
from steward.core.errors import Unavailable
from steward.core.records import JobRecord
from steward.core.sqlite import SqliteUnavailable
from steward.core.timestamps import micros, micros_or_0
from steward.jobs import Job, Jobs, database_path
from steward.slurm import tres
from steward.slurm.arrays import count_tasks, without_task
from steward.slurm.errors import ScrontabJob, SlurmError
from steward.slurm.job_changes import Changing, name_of
from steward.slurm.job_states import base_state
from steward.slurm.tres import kind_of, parse_tres, requested_kinds

if TYPE_CHECKING:
    from steward.bank.gate_sync import Live
    from steward.bank.ledger.ledger import Ledger


STARTED: Final = frozenset({"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STAGE_OUT"})
"""States of jobs that have their resources."""

HELD: Final = frozenset({"JobHeldUser", "JobHeldAdmin"})
"""Reasons of jobs that wait until they are released."""

CUT_OFF: Final = "..."
"""Ends a task expression that was too long for Slurm to show."""

_LONG_INDEX: Final = 10
_MINUTE_S: Final = 60

Key = tuple[str, int]
"""A cluster, and the raw id that a job's hold is kept under."""


def claim_of(key: Key, jobs: Sequence[Job], *, is_ours: bool = False) -> Claim | None:
    """What the gate is asked for a job, or for all tasks of an array that are left.

    Args:
        key: Its cluster and id.
        jobs: The job, or the array's tasks that are left: all of them are held for as if they
            were like the first.
        is_ours: Whether it is held because it could not be paid.

    Returns:
        The claim; None where nobody knows whose job it is.
    """
    cluster, leader = key
    of_array = [job for job in jobs if job.record.array_job_id]
    record = jobs[0].record
    if record.uid is None:
        return None
    description = description_of(_still_to_come(record))
    if of_array:
        description = msgspec.structs.replace(description, array=tasks_of(of_array))
    is_started = any(has_started(job.record) for job in jobs)
    if is_ours or is_started or not all(job.record.reason in HELD for job in jobs):
        # A job that we hold is to be paid all the same; of an array one task is enough.
        description = msgspec.structs.replace(description, held=False)
    return Claim(
        cluster=cluster,
        job_id=leader,
        description=description,
        first_submit_us=min(micros(job.first_submit) for job in jobs),
        started=is_started,
    )


def _still_to_come(record: JobRecord) -> JobRecord:
    """A resized job's record with the time that its last size may still take.

    What the former sizes used is charged already.
    """
    if not (has_started(record) and record.resized_at and record.start and record.time_limit_s):
        return record
    used_s = max(0, int((record.resized_at - record.start).total_seconds()))
    left_s = max(_MINUTE_S, record.time_limit_s - used_s)
    return msgspec.structs.replace(record, time_limit_s=left_s)


def has_started(record: JobRecord) -> bool:
    """Whether a job has its resources."""
    return base_state(record.state) in STARTED


def shape_of(job: Job) -> Description:
    """What a task asks for, whichever of its array it is."""
    record = msgspec.structs.replace(_still_to_come(job.record), admin_comment="")
    return msgspec.structs.replace(description_of(record), array="", job_id=0)


def starts_of(jobs: Sequence[Job]) -> tuple[int, ...]:
    """When those have started that run."""
    return tuple(micros_or_0(job.record.start) for job in jobs if has_started(job.record))


def tasks_of(jobs: Sequence[Job]) -> str:
    """The tasks of an array that are left, as one expression; ``%`` of the row that waits."""
    limits = {job.record.array_task.partition("%")[2] for job in jobs} - {""}
    shown = {job.record.array_task.partition("%")[0] for job in jobs} - {""}
    # The row that waits may still name tasks that have rows of their own by now.
    single = {int(one) for one in shown if one.isdecimal() and len(one) < _LONG_INDEX}
    waiting = sorted(without_task(one, single) for one in shown if not one.isdecimal())
    parts = [*map(str, sorted(single)), *filter(None, waiting)]
    text = ",".join(parts).replace(CUT_OFF, "").strip(",") or "0"
    return f"{text}%{min(limits)}" if limits else text


log = logging.getLogger(__name__)

PREFIX: Final = "steward: "
"""Before every reason that a job's user reads, so that it is known who speaks."""

_STRANDED: Final = "its account has no allocation that can pay it now"
_WAITING: Final = frozenset({"PENDING", "REQUEUED"})

Verb = Literal["hold", "release", "cancel", "comment"]


class Kept(msgspec.Struct):
    """A job that is held in Slurm because it cannot be paid.

    Attributes:
        jobs: Its names, as Slurm's commands take them, and whether Slurm was told.
        why: The reason that its user reads.
        is_stranded: Whether its hold is open, and only lost the allocation that was to pay it.
    """

    jobs: dict[str, bool]
    why: str
    is_stranded: bool = False


class Unpaid:
    """Applies the rule, and takes it back.

    Args:
        settings: The whole configuration.
        ledger: Remembers which jobs are held.
        link: The way to the gate.
        changing: Changes jobs of a cluster, by its name.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: "Ledger",
        link: GateLink,
        changing: Mapping[str, Changing] | None = None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._link = link
        self._changing = changing or {
            name: Changing(name, of)
            for name, of in settings.cluster.items()
            if of.asks_slurm and not of.remote
        }
        self._kept: dict[str, dict[str, Kept]] = {}
        self._warned: set[Key] = set()
        self._is_off = False

    def rule(self, partition: str) -> Rule:
        """What the site says of jobs for a partition; of several the first one's rule."""
        for name in partition.split(","):
            of = self._settings.bank.partition.get(name)
            if of is not None and of.unpaid is not None:
                return of.unpaid
        return self._settings.bank.unpaid

    def apply(self, key: Key, jobs: Sequence[Job], claim: Claim, why: str) -> bool:
        """Do what the rule says to a job that cannot be paid; nothing while the gate is off.

        Returns:
            Whether it is done; False where slurmctld is away, so that it is to be tried again.

        Raises:
            Unavailable: The ledger or the gate is away.
        """
        if self.is_off():
            return True
        record = jobs[0].record
        rule = self.rule(record.partition)
        waiting = [job for job in jobs if base_state(job.record.state) in _WAITING]
        line = next(iter(why.splitlines()), "it cannot be paid").removeprefix("Steward: ")
        self._warn(key, rule, line)
        if rule in ("warn", "credit"):
            self._link.cover(msgspec.structs.replace(claim, mode_credit=True))
        if rule == "cancel":
            tried = [
                self._try(key[0], "cancel", name_of(job.record), PREFIX + line) for job in jobs
            ]
            return all(tried)
        if rule == "warn":
            for job in jobs:
                self._try(key[0], "comment", name_of(job.record), PREFIX + line)
        elif rule == "hold" and waiting:
            self._hold(key, [name_of(job.record) for job in waiting], line, is_stranded=False)
        return True

    def is_off(self) -> bool:
        """Whether an administrator has switched the gate off: jobs may then be unpaid."""
        is_off = os.path.lexists(self._settings.gate.off_switch)
        if is_off != self._is_off:
            self._is_off = is_off
            text = "%s is there: nothing is done to jobs that cannot be paid"
            log.warning(text if is_off else "%s is gone", self._settings.gate.off_switch)
        return is_off

    def paid(self, key: Key) -> None:
        """Let a job go that was held, now that it can be paid.

        Raises:
            LedgerUnavailable: The ledger is away.
        """
        self._warned.discard(key)
        kept = self._of(key[0]).get(str(key[1]))
        if kept is not None and not kept.is_stranded:
            self._release(key, kept)

    def held(self, cluster: str) -> list[int]:
        """Leaders of the jobs that are held because they cannot be paid."""
        return [int(name) for name, kept in self._of(cluster).items() if not kept.is_stranded]

    def strand(self, holds: Sequence[Hold], jobs: Mapping[Key, Sequence[Job]]) -> None:
        """Hold the jobs whose allocation ended, and let those go that another one pays now.

        Args:
            holds: Those that no allocation can pay now.
            jobs: Jobs in the queue, by cluster and leader.

        Raises:
            LedgerUnavailable: The ledger is away.
        """
        stranded = {(hold.cluster, hold.job_id) for hold in holds if hold.job_id}
        for key in stranded:
            waiting = [job for job in jobs.get(key, ()) if base_state(job.record.state) in _WAITING]
            if waiting and str(key[1]) not in self._of(key[0]) and not self.is_off():
                self._warn(key, "hold", _STRANDED)
                names = [name_of(job.record) for job in waiting]
                self._hold(key, names, _STRANDED, is_stranded=True)
        for cluster in self._changing:
            for name, kept in list(self._of(cluster).items()):
                key = (cluster, int(name))
                if kept.is_stranded and key not in stranded:
                    self._release(key, kept)

    def forget(self, cluster: str, leader: int) -> None:
        """The job is over: nothing is to be released any more.

        Raises:
            LedgerUnavailable: The ledger is away.
        """
        self._warned.discard((cluster, leader))
        if self._of(cluster).pop(str(leader), None) is not None:
            self._store(cluster)

    def forget_gone(self, cluster: str, waiting: Collection[int]) -> None:
        """Forget the jobs that are in the queue no more: their ids may be others' one day.

        Args:
            cluster: The cluster's name.
            waiting: Leaders of all jobs that are not over.

        Raises:
            LedgerUnavailable: The ledger is away.
        """
        of_cluster = self._of(cluster)
        gone = [name for name in of_cluster if int(name) not in waiting]
        for name in gone:
            self._warned.discard((cluster, int(name)))
            del of_cluster[name]
        if gone:
            self._store(cluster)

    def _hold(self, key: Key, names: list[str], why: str, *, is_stranded: bool) -> None:
        of_cluster = self._of(key[0])
        kept = of_cluster.setdefault(str(key[1]), Kept({}, why, is_stranded))
        todo = [name for name in names if not kept.jobs.get(name)]
        if not todo:
            return
        # Remembered first: a job that is held and forgotten would wait for ever.
        kept.jobs |= dict.fromkeys(todo, False)
        self._store(key[0])
        for name in todo:
            kept.jobs[name] = self._try(key[0], "hold", name, PREFIX + why)
        self._store(key[0])

    def _release(self, key: Key, kept: Kept) -> None:
        left = [name for name in kept.jobs if not self._try(key[0], "release", name)]
        if left:
            # slurmctld is away: they are let go when it is back.
            kept.jobs = dict.fromkeys(left, True)
            return
        log.info("cluster %s: job %s can be paid now, and is released", *key)
        del self._of(key[0])[str(key[1])]
        self._store(key[0])

    def _try(self, cluster: str, verb: Verb, *words: str) -> bool:
        """Change something in Slurm; whether Slurm could say anything of it.

        What cannot be held, a job of scrontab, is cancelled.
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

    def _of(self, cluster: str) -> dict[str, Kept]:
        if cluster not in self._kept:
            with self._ledger.reading() as t:
                text = t.mark(_mark(cluster))
            self._kept[cluster] = msgspec.json.decode(text or "{}", type=dict[str, Kept])
        return self._kept[cluster]

    def _store(self, cluster: str) -> None:
        with self._ledger.transaction() as t:
            t.set_mark(_mark(cluster), msgspec.json.encode(self._kept[cluster]).decode())


def _mark(cluster: str) -> str:
    return f"unpaid:{cluster}"


_AT_ONCE: Final = 200
_TRIES: Final = 30
_LAST: Final = 2**63
_OVER_GRACE: Final = timedelta(seconds=30)
_MINUTE: Final = timedelta(minutes=1)
_CHANGED: Final = timedelta(seconds=30)
_LESS: Final = timedelta(minutes=3)
_LONG: Final = timedelta(minutes=10)
_SLACK_US: Final = 2_000_000
_PAGE: Final = 1000


class _Rest(msgspec.Struct, frozen=True):
    """Until when a job that was looked at need not be looked at again."""

    rules: int
    until: datetime
    has_hold: bool
    asks: tuple[object, ...]

    def is_over(
        self, live: "Live", has_hold: bool, asks: tuple[object, ...], now: datetime
    ) -> bool:
        """Whether it is time, or something has changed since."""
        return (
            now >= self.until
            or self.rules != live.rules.seq
            or self.has_hold != has_hold
            or self.asks != asks
        )


class Covering:
    """Sees that jobs are covered.

    Args:
        settings: The whole configuration.
        link: The way to the gate.
        live: Knows the rules.
        unpaid: Applies the rule to jobs that cannot be paid.
    """

    def __init__(self, settings: Settings, link: GateLink, live: "Live", unpaid: "Unpaid") -> None:
        self._settings = settings
        self._link = link
        self._live = live
        self._unpaid = unpaid
        self._wanted: dict[Key, int] = {}
        self._resting: dict[Key, _Rest] = {}
        self._parted: dict[str, Hold] = {}
        self._less: dict[Key, datetime] = {}
        self._jobs: Jobs | None = None
        self._said: set[str] = set()

    def want(self, cluster: str, leader: int) -> None:
        """Look at a job at the next turn."""
        self._wanted.setdefault((cluster, leader), 0)

    def note_change(self, cluster: str, hold: Hold, record: JobRecord, now: datetime) -> None:
        """A job that has never started may ask for less now than is held for it."""
        has_run = hold.started or record.restarts or base_state(record.state) in STARTED
        if hold.amount and not has_run:
            self._less[cluster, hold.job_id] = now

    def want_changed(self, cluster: str, now: datetime) -> bool:
        """Look at the jobs with changes that no poll has shown; whether there are any.

        Raises:
            Unavailable: The gate is away.
        """
        changed = self._link.holds(cluster=cluster, limit=_LAST, changed=True)
        for hold in changed:
            self.want(cluster, hold.job_id)
            if not hold.started:
                self._less[cluster, hold.job_id] = now
        return bool(changed)

    def has_read(self, event: int) -> bool:
        """Whether jobs.db has taken in an event of the journal, by its id.

        Raises:
            SqliteUnavailable: jobs.db is away.
        """
        return self._open().cursor() >= event

    def drop(self, cluster: str, leader: int) -> None:
        """Forget that: the job is over."""
        self._wanted.pop((cluster, leader), None)

    def turn(self, now: datetime) -> bool:
        """Cover the jobs that were asked for; whether there are more.

        Raises:
            Unavailable: The gate or jobs.db is away.
        """
        batch = list(self._wanted)[:_AT_ONCE]
        by_cluster: dict[str, set[int]] = {}
        for cluster, leader in batch:
            by_cluster.setdefault(cluster, set()).add(leader)
        for cluster, leaders in by_cluster.items():
            found = grouped(self.queue(cluster, leaders))
            for leader in leaders:
                key = (cluster, leader)
                if leader in found:
                    self._cover(key, found[leader], now)
                    self._wanted.pop(key, None)
                elif self._wanted[key] >= _TRIES:
                    # It was over before anybody looked, or is none of jobs.db's.
                    del self._wanted[key]
                else:
                    # jobs.db is behind the journal by a moment.
                    self._wanted[key] += 1
        return any(not tries for tries in self._wanted.values())

    def sweep(self, cluster: str, now: datetime) -> None:
        """Compare all open holds of a cluster with all jobs that are not over.

        Raises:
            Unavailable: The gate or jobs.db is away.
        """
        holds = self._holds(cluster)
        waiting = grouped(self.queue(cluster))
        # An array's tasks end one by one, and none of them tells that it was the last.
        self._unpaid.forget_gone(cluster, waiting.keys())
        for leader, jobs in waiting.items():
            if any(needs(job.record, holds.get(leader), now) for job in jobs):
                rest = self._resting.get((cluster, leader))
                asks = put_off(jobs, now)
                if rest is None or rest.is_over(self._live, leader in holds, asks, now):
                    self.want(cluster, leader)
        self._less = {key: since for key, since in self._less.items() if now < since + _LESS}
        for leader, hold in holds.items():
            jobs = waiting.get(leader, [])
            if not jobs:
                self._release_if_over(cluster, leader, hold, now)
                continue
            is_changed = (cluster, leader) in self._less and not _is_cut_off(jobs)
            if is_changed or is_too_large(hold, jobs, self._settings.bank.arrays):
                self._cover((cluster, leader), jobs, now, is_exact=True)
        self._resting = {
            key: rest for key, rest in self._resting.items() if now < rest.until + _MINUTE
        }

    def move(self, holds: Sequence[Hold], now: datetime) -> None:
        """Have the tasks of arrays that have not started paid by the allocations there are now.

        Args:
            holds: Those of arrays that are on an allocation that has ended.
            now: The present moment.

        Raises:
            Unavailable: The gate or jobs.db is away.
        """
        changed = [hold for hold in holds if self._parted.get(hold.id) != hold]
        for cluster in {hold.cluster for hold in changed}:
            leaders = [hold.job_id for hold in changed if hold.cluster == cluster]
            for leader, jobs in grouped(self.queue(cluster, leaders)).items():
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
        ordered = self._dearest_first(key[0], jobs)
        claim = claim_of(key, ordered, is_ours=key[1] in self._unpaid.held(key[0]))
        if claim is None:
            return
        if others := tuple(dict.fromkeys(map(shape_of, ordered)))[1:]:
            claim = msgspec.structs.replace(claim, tasks=others[: MOST_DESCRIPTIONS + 1])
        if is_exact:
            claim = msgspec.structs.replace(claim, is_exact=True)
        if is_moved:
            claim = msgspec.structs.replace(claim, starts=starts_of(jobs))
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
        """A job, or an array's tasks, of which single ones may have been changed."""
        ordered = sorted(jobs, key=lambda job: (not has_started(job.record), job.job_id))
        shapes: dict[Description, Job] = {}
        for job in ordered:
            shapes.setdefault(shape_of(job), job)
        pricing = self._live.pricing(cluster)
        if len(shapes) == 1 or pricing.picture is None:
            return ordered
        estimator = Estimator(pricing.picture, pricing.rates, pricing.settings)
        first_submit = min(job.first_submit for job in jobs)

        def cost(job: Job) -> int:
            try:
                return estimator.quote(shape_of(job), first_submit).amount
            except (NoRate, NoEstimate):
                return _LAST  # the gate says so, and why

        dearest = max(shapes.values(), key=cost)
        return [dearest, *(job for job in ordered if job is not dearest)]

    def _owe(self, key: Key, jobs: Sequence[Job]) -> None:
        """Hold for what runs already, whatever the account has, since it will be charged.

        Nothing else keeps others from being let in against the same money meanwhile. For an
        array's tasks that wait nothing is held: they are not to start.
        """
        started = [job for job in jobs if has_started(job.record)]
        claim = claim_of(key, started) if started else None
        if claim is not None:
            self._link.cover(msgspec.structs.replace(claim, mode_credit=True))

    def _rest(
        self, key: Key, jobs: Sequence[Job], now: datetime, span: timedelta, *, has_hold: bool
    ) -> None:
        """Do not ask the same again for a while: the answer would be the same."""
        asks = put_off(jobs, now)
        before = self._resting.get(key)
        if asks and (before is None or before.asks != asks):
            # The gate takes the queue's word only a while after a change.
            span = min(span, _CHANGED)
        self._resting[key] = _Rest(self._live.rules.seq, now + span, has_hold, asks)

    def _release_if_over(self, cluster: str, leader: int, hold: Hold, now: datetime) -> None:
        """Give back what is held for a job that ended without anybody telling the gate."""
        if not hold.confirmed:
            return
        ends = [micros_or_0(fact.record.end) for fact in self._open().run_facts(cluster, [leader])]
        over_us = max(ends, default=0)
        is_known = bool(ends) or bool(self._open().find(str(leader), cluster))
        is_told = over_us >= hold.created_us - _SLACK_US
        is_old = hold.created_us < micros(now - _OVER_GRACE)
        if is_known and (is_told or is_old):
            self._link.release(hold.id, "its job is over")

    def _holds(self, cluster: str) -> dict[int, Hold]:
        found: dict[int, Hold] = {}
        after = ""
        while True:
            page = self._link.holds(cluster=cluster, after=after, limit=_PAGE)
            found |= {hold.job_id: hold for hold in page if hold.job_id}
            if len(page) < _PAGE:
                return found
            after = page[-1].id

    def queue(self, cluster: str, leaders: Iterable[int] | None = None) -> list[Job]:
        """A cluster's jobs that are not over; of some ids, or all of them.

        Raises:
            SqliteUnavailable: jobs.db is away.
        """
        return self._open().unfinished_jobs(cluster, leaders)

    def _open(self) -> Jobs:
        if self._jobs is None:
            self._jobs = Jobs(database_path(self._settings.state_dir))
        return self._jobs

    def is_ready(self) -> bool:
        """Whether there is a jobs.db yet."""
        try:
            self._open()
        except SqliteUnavailable:
            return False
        return True

    def close(self) -> None:
        """Let go of jobs.db."""
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None


def grouped(jobs: Iterable[Job]) -> dict[int, list[Job]]:
    """Jobs by the id that their hold is kept under; of an id that was used again the newest."""
    found: dict[int, list[Job]] = {}
    for job in jobs:
        found.setdefault(leader_of(job.record), []).append(job)
    for leader, of_one in found.items():
        newest: dict[int, Job] = {}
        for job in of_one:
            before = newest.get(job.job_id)
            if before is None or job.first_submit > before.first_submit:
                newest[job.job_id] = job
        found[leader] = list(newest.values())
    return found


def needs(record: JobRecord, hold: Hold | None, now: datetime) -> bool:
    """Whether a job in the queue is to be looked at: its hold is missing, or of something less.

    A job that its user holds, or that begins later, is held nothing for until it is eligible;
    but the gate is to know what it asks for, to decide on its release.
    """
    state = base_state(record.state)
    if state not in STARTED and is_waiting_on_purpose(record, now):
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
    return _is_larger(record, quote) or (state in STARTED and not hold.started)


def _is_larger(record: JobRecord, quote: Quote) -> bool:
    """Whether it has, or asks for, more of anything than was reckoned with."""
    shown = parse_tres(record.tres_allocated) or parse_tres(record.tres_requested)
    counted = {"cpu": record.cpus or 0, "node": record.nodes or 0, "mem": shown.get("mem", 0)}
    if any(asked > quote.tres[name] for name, asked in counted.items() if quote.tres.get(name)):
        return True
    asked = requested_kinds(record)
    extras = tres.licenses(record.licenses) | {n: count for n, count in asked.items() if ":" in n}
    extras |= {name: amount for name, amount in shown.items() if name.startswith("bb/")}
    for amounts in (shown, asked):
        kinds: dict[str, int] = {}
        for name, amount in amounts.items():
            if name.startswith("gres/") and not (":" in name and kind_of(name) in amounts):
                # Which type it gets is Slurm's choice, if it named none.
                kinds[kind_of(name)] = kinds.get(kind_of(name), 0) + amount
        for name, amount in kinds.items():
            extras[name] = max(extras.get(name, 0), amount)
    return any(amount > quote.tres.get(name, 0) for name, amount in extras.items())


def is_waiting_on_purpose(record: JobRecord, now: datetime) -> bool:
    """Whether it is held, or asked not to begin before a time that is far away."""
    if record.reason in HELD:
        return True
    return record.eligible is not None and micros(record.eligible) > micros(now) + FAR_US


def put_off(jobs: Sequence[Job], now: datetime) -> tuple[object, ...]:
    """What a job that waits on purpose asks for; nothing of any other."""
    record = jobs[0].record
    if base_state(record.state) in STARTED or not is_waiting_on_purpose(record, now):
        return ()
    return (
        *(record.account, record.partition, record.qos, record.time_limit_s),
        *(record.cpus, record.nodes, record.tres_requested, record.eligible, len(jobs)),
    )


def is_too_large(hold: Hold, jobs: Sequence[Job], policy: str) -> bool:
    """Whether an array's hold covers tasks that are gone: cancelled one by one."""
    if not hold.quote or hold.quote.tasks <= 1 or policy != "full":
        return False
    return (
        not _is_cut_off(jobs) and hold.remaining > count_tasks(tasks_of(jobs)) * hold.quote.per_task
    )


def _is_cut_off(jobs: Sequence[Job]) -> bool:
    """Whether an array has tasks left that Slurm does not name."""
    return any(CUT_OFF in job.record.array_task for job in jobs)
