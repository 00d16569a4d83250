"""The second gate: every job in the queue has a hold, or its account's rule is applied to it.

Jobs come past the submit plugin in many ways: requeued after their end, let
through while the gate was away, made larger by an operator, submitted before
there was a bank. What they need is told by jobs.db, never by one event: when a
job is looked at here, what the event said may be long past.
"""

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.claims import (
    CUT_OFF,
    HELD,
    STARTED,
    Key,
    claim_of,
    has_started,
    shape_of,
    starts_of,
    tasks_of,
)
from steward.bank.errors import NoEstimate, NoRate
from steward.bank.estimate import Estimator
from steward.bank.gate.deciding import FAR_US
from steward.bank.gate.link import GateLink
from steward.bank.gate.pending_changes import MOST_DESCRIPTIONS
from steward.bank.records import Description, Hold, Quote
from steward.bank.settling import leader_of
from steward.bank.unpaid import Unpaid
from steward.core.config import Settings
from steward.core.records import JobRecord
from steward.core.sqlite import SqliteUnavailable
from steward.core.timestamps import micros, micros_or_0
from steward.jobs import Job, Jobs, database_path
from steward.slurm import tres
from steward.slurm.arrays import count_tasks
from steward.slurm.job_states import base_state
from steward.slurm.tres import kind_of, parse_tres, requested_kinds

if TYPE_CHECKING:
    from steward.bank.live import Live

log = logging.getLogger(__name__)

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
