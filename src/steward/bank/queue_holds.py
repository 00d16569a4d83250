"""Queue holds: compare queued jobs with the gate's SU holds, and place or shrink them.

Jobs bypass the submit plugin: requeued after their end, admitted while the gate was down, enlarged
by an operator, submitted before there was a bank. The bank's consumer calls :class:`HoldPlacement`
for them: ``queue_job`` queues a job, ``place_queued`` claims its hold, ``sweep`` queues all jobs
whose hold is missing or whose size in the queue has changed. It reads what a job needs from
jobs.db, never from an event, which may be outdated by then. :func:`needs_hold` tells whether a
queued job lacks a sufficient hold; :class:`UnpaidJobs` handles those that cannot pay.
"""

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.billing import get_hold_job_id
from steward.bank.enforcement import (
    STARTED_STATES,
    Key,
    UnpaidJobs,
    build_claim,
    describe_task,
    find_deferred_request,
    has_started,
    is_hold_too_large,
    is_truncated,
    is_waiting_on_purpose,
    list_start_times,
)
from steward.bank.errors import NoEstimate, NoRate
from steward.bank.estimate import Estimator
from steward.bank.gate.client import GateClient
from steward.bank.gate.possible_changes import MOST_DESCRIPTIONS
from steward.bank.records import Hold, JobRequest, Quote
from steward.core.config import Settings
from steward.core.records import JobRecord
from steward.core.sqlite import SqliteUnavailable
from steward.core.timestamps import to_micros, to_micros_or_zero
from steward.jobs import Job, Jobs, database_path
from steward.slurm import tres
from steward.slurm.job_states import strip_state_suffix
from steward.slurm.tres import count_requested_kinds, parse_tres, strip_tres_type

if TYPE_CHECKING:
    from steward.bank.gate_sync import GateSync

log = logging.getLogger(__name__)

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
"""Pause of a job whose hold suffices."""
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

    @property
    def has_queued(self) -> bool:
        """Whether jobs are queued for the next turn."""
        return bool(self._queued)

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
                deferred = find_deferred_request(jobs, now)
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
            is_changed = (cluster, leader) in self._maybe_smaller and not is_truncated(jobs)
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
            reply = self._link.place_hold(claim)
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
        """Order jobs or tasks by price, highest first; single tasks may be changed."""
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

        costliest = max(shapes.values(), key=cost)
        return [costliest, *(job for job in ordered if job is not costliest)]

    def _hold_for_running(self, key: Key, jobs: Sequence[Job]) -> None:
        """Place a hold for running jobs regardless of funds, since they will be charged.

        Without it, others would be admitted against the same SU meanwhile. Pending tasks of an
        array get no hold: they must not start.
        """
        started = [job for job in jobs if has_started(job.record)]
        claim = build_claim(key, started) if started else None
        if claim is not None:
            self._link.place_hold(msgspec.structs.replace(claim, mode_credit=True))

    def _pause(
        self, key: Key, jobs: Sequence[Job], now: datetime, duration: timedelta, *, has_hold: bool
    ) -> None:
        """Skip a job for a while, because the gate's answer would be the same."""
        deferred = find_deferred_request(jobs, now)
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
            self._link.release(hold.id, "its job has ended")

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
