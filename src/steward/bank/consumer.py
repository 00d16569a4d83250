"""Bank consumer of journal events: charge finished runs, settle holds, update the gate.

:class:`BankConsumer` reads the journal in ``steward serve``. ``apply`` confirms jobs to the gate,
charges finished runs and queues jobs that lack an SU hold. ``tick`` pushes changes of the ledger to
the gate, places the queued holds, compares one due cluster (holds with the queue, charges with
Slurm's records), reports complete polls to the gate, and runs scheduled work.

Charges, their settlements and the cursor are one ledger transaction. Reports to the
gate before it (a job was observed, a poll was complete) may be repeated; settlements after it are
numbered, so the gate applies each once.

While neither ledger nor gate has written and no event comes, ``tick`` does nothing for up to half a
minute but compare marks of both databases and of slurmctld's state files.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from steward.bank.billing import (
    compute_charge,
    compute_freed,
    ends_hold,
    find_charge,
    get_hold_job_id,
    is_charged,
    is_piece_of,
    is_requeue_lost,
    match_earlier_charge,
)
from steward.bank.enforcement import STARTED_STATES, UnpaidJobs
from steward.bank.errors import NoRate
from steward.bank.gate.client import GateClient
from steward.bank.gate.requests import ShownJob
from steward.bank.gate_sync import GateSync
from steward.bank.ledger import Authorship, open_ledger
from steward.bank.queue_holds import HoldPlacement, group_by_hold, needs_hold
from steward.bank.reconciliation import RegularReconciliation, mark_unpriced
from steward.bank.records import Hold
from steward.bank.remote import cancel_reported_charges, list_own_charges, load_remote_banks
from steward.bank.schedule import BANK_AUTHOR, ScheduledWork
from steward.core.config import Settings
from steward.core.consumers import Append
from steward.core.events import (
    CONTROLLER_STATE,
    JOB_SEEN,
    JOB_STATE,
    JOBS_IMPORTED,
    QUEUE_POLLED,
    RUN_END,
    RUN_START,
    Event,
    utc_now,
)
from steward.core.records import JobRecord
from steward.core.timestamps import from_micros, to_micros, to_micros_or_zero
from steward.core.usage import RunEvent
from steward.jobs.imported_runs import read_run_events
from steward.slurm.job_states import FINISHED, strip_state_suffix

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger, Transaction


log = logging.getLogger(__name__)

_TICK_S: Final = 1.0
_ACTIVE_S: Final = 3.0
"""Time after an event of a job in which each tick is complete, in seconds."""
IDLE_S: Final = 30.0
"""Longest time between two complete ticks while nothing changes, in seconds."""
"""Interval of ticks, in seconds."""
_START_MARK: Final = "began"
"""Name of the ledger's note with the time when the bank first started."""
_BATCH: Final = 200
"""Maximum number of events applied in one transaction."""

Key = tuple[str, int]
"""Cluster, and the raw job id that a hold is stored under."""

JobKey = tuple[str, int, int]
"""Cluster, the job id its hold is stored under, and first submit time in microseconds."""

_JobEvent = tuple[Event, JobKey, Hold | None]
"""Event, the job it is about, and the job's open hold."""


class _PendingPoll(NamedTuple):
    """Poll of a whole queue that was not reported to the gate yet.

    Attributes:
        began: Start of the poll.
        last_event: Id of the last event before it that jobs.db applies; 0 for none.
        is_covered: Whether holds of changed jobs were updated since.
    """

    began: datetime
    last_event: int
    is_covered: bool = False


class BankConsumer:
    """Consumer that charges runs and keeps the gate up to date.

    It implements ``steward.core.consumers.Consumer``.

    Args:
        settings: The whole configuration.
        clock: Returns the current time.
        link: Client of the gate; None to make one from the settings.
        idle_s: Longest time between two complete ticks while nothing changes, in seconds.

    Raises:
        LedgerUnavailable: The ledger's database cannot be used now.
        StewardError: No installed extension supports the remote bank of [bank.remote].
    """

    name = "bank"
    kinds = frozenset(
        {CONTROLLER_STATE, JOB_SEEN, JOB_STATE, JOBS_IMPORTED, QUEUE_POLLED, RUN_START, RUN_END}
    )
    batch_events = _BATCH

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], datetime] = utc_now,
        link: GateClient | None = None,
        *,
        idle_s: float = 0.0,
    ) -> None:
        self._settings = settings
        self._clock = clock
        # Each complete tick shows the gate that the ledger is there.
        self._idle_s = min(idle_s, settings.bank.without_ledger_s / 4, settings.bank.reconcile_s)
        self._link = link or GateClient(settings.state_dir)
        self._ledger: Ledger = open_ledger(settings, clock)
        self._gate_sync = GateSync(settings, self._ledger, self._link)
        self._unpaid_jobs = UnpaidJobs(settings, self._ledger, self._link)
        self._hold_placement = HoldPlacement(
            settings, self._link, self._gate_sync, self._unpaid_jobs
        )
        self._scheduled_work = ScheduledWork(settings, self._ledger, self._link)
        self._reconciliation = RegularReconciliation(
            settings, self._ledger, self._gate_sync.pricing
        )
        self._remote_banks = load_remote_banks() if settings.bank.remote.url else ()
        self._cursor_name = name_cursor(settings)
        self._bank_started = self._read_start_time()
        self._swept_at: dict[str, datetime] = {}
        self._pending_polls: dict[str, _PendingPoll] = {}
        self._last_event = 0
        self._logged: set[str] = set()
        self._is_busy = False
        self._marks: tuple[object, ...] = ()
        self._active_until = self._complete_due = 0.0
        self._has_unfunded = False

    def _read_start_time(self) -> datetime:
        """Return when the bank first started; only a backfill charges runs that ended before."""
        with self._ledger.transaction() as t:
            mark = t.read_mark(_START_MARK)
            if not mark:
                mark = str(to_micros(self._clock()))
                t.set_mark(_START_MARK, mark)
        return from_micros(int(mark))

    def cursor(self) -> int:
        """Return the position of the last event applied; 0 at first."""
        with self._ledger.reading() as t:
            return t.read_cursor(self._cursor_name)

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:  # noqa: ARG002 - a consumer's shape
        """Confirm observed jobs to the gate, and charge finished runs.

        Raises:
            Unavailable: The ledger or the gate is unavailable.
        """
        self._complete_due = 0.0
        if any(event.kind != QUEUE_POLLED for event in events):
            self._active_until = time.monotonic() + _ACTIVE_S
        self._gate_sync.refresh()
        is_full = len(events) >= self.batch_events
        events = list(self._unpack_imports(events))
        for event in events:
            if event.kind == CONTROLLER_STATE and event.body.up:
                # Licenses, GRES and weights may have changed with the restart.
                self._gate_sync.expire_model(event.cluster)
        confirmed = self._confirm(
            [event for event in events if event.kind not in (CONTROLLER_STATE, QUEUE_POLLED)]
        )
        for event in events:
            if event.kind == QUEUE_POLLED:
                # Keep the oldest pending poll: with a slow jobs.db newer ones would replace it for
                # ever.
                self._pending_polls.setdefault(
                    event.cluster, _PendingPoll(event.body.began, self._last_event)
                )
            elif event.kind in (JOB_SEEN, JOB_STATE):
                self._last_event = event.id
        with self._ledger.transaction() as t:
            for event, _job, hold in confirmed:
                if _is_own_end(event):
                    self._charge_run(t, event, hold)
            for remote in self._remote_banks:
                remote.relay(
                    t, [(event, hold) for event, _job, hold in confirmed], self._bank_started
                )
            t.move_cursor(self._cursor_name, upto)
        self._update_placement(confirmed)
        self._is_busy = is_full

    def _unpack_imports(self, events: Sequence[Event]) -> Iterator[Event]:
        """Yield the events; of imports the ends of runs that are not charged yet.

        Runs that ended before the bank started are a backfill's.

        Raises:
            Rejected: An import cannot be unpacked.
            SqliteUnavailable: jobs.db cannot be read now.
        """
        for event in events:
            if event.kind != JOBS_IMPORTED:
                yield event
            elif event.at >= self._bank_started:
                for run in read_run_events(event, self._settings.state_dir):
                    if run.kind == RUN_END and not self._has_charge(run):
                        body = msgspec.structs.replace(run.body, source="")
                        yield msgspec.structs.replace(run, body=body)

    def _has_charge(self, run: Event) -> bool:
        """Return whether a run was charged, by Steward's own record of it."""
        with self._ledger.reading() as t:
            charges = list_own_charges(t, run.cluster, run.body.job_id)
        return find_charge(run.body, charges) is not None

    def _confirm(self, events: Sequence[Event]) -> list[_JobEvent]:
        """Confirm the jobs of events to the gate; return the events with their open holds.

        Each job is looked up by its own first submit time, also if Slurm reused its id.
        """
        shown: dict[JobKey, ShownJob] = {}
        jobs = _identify_jobs(events)
        for event, job in zip(events, jobs, strict=True):
            record = _get_record(event)
            if record.uid is None:
                continue
            before = shown.get(job)
            is_started = (
                event.kind in (RUN_START, RUN_END)
                or strip_state_suffix(record.state) in STARTED_STATES
            )
            shown[job] = ShownJob(
                cluster=job[0],
                job_id=job[1],
                uid=record.uid,
                admin_comment=record.admin_comment or (before.admin_comment if before else ""),
                started=is_started or (before.started if before else False),
                restarts=max(record.restarts, before.restarts if before else 0),
            )
        # The newest job of an id comes last, because it covers changes that carry no token.
        order = sorted(shown)
        replies = self._link.confirm_jobs([shown[job] for job in order]) if order else []
        holds = dict(zip(order, replies, strict=True))
        return [(event, job, holds.get(job)) for event, job in zip(events, jobs, strict=True)]

    def _charge_run(self, t: "Transaction", event: Event, hold: Hold | None) -> None:
        """Charge a finished run, and settle its hold."""
        fact: RunEvent = event.body
        key, amount, is_first = "", 0, not fact.correction
        if is_charged(fact) and (fact.record.end or event.at) >= self._bank_started:
            charges = list_own_charges(t, event.cluster, fact.job_id)
            before = find_charge(fact, charges)
            try:
                charge = compute_charge(
                    *(event.cluster, fact, self._gate_sync.pricing(event.cluster)),
                    pieces=[piece for piece in charges if is_piece_of(piece, fact)],
                    hold=hold,
                    earlier=before,
                    seen_at=event.at,
                )
            except NoRate as error:
                self._record_unpriced(t, event, error)
                charge = None
            if charge is not None:
                charge = match_earlier_charge(charge, charges)
                posted = t.charges.post(charge, Authorship(who=BANK_AUTHOR, why=charge.why))
                cancel_reported_charges(
                    t,
                    charge,
                    Authorship(
                        who=BANK_AUTHOR, why="reported by a client, and charged by the bank"
                    ),
                )
                key, amount = charge.key, posted.added
                is_first = posted.first or is_requeue_lost(fact, before)
        if hold is None or not is_first:
            return
        freed, final = compute_freed(fact, hold), ends_hold(fact)
        if amount or freed or final:
            t.settlements.add(hold.id, key, max(0, amount), frees=freed, final=final)

    def _record_unpriced(self, t: "Transaction", event: Event, error: NoRate) -> None:
        """Record a run without a rate; it is charged as soon as a rate exists."""
        mark_unpriced(t, event.cluster, event.at)
        if str(error) not in self._logged:
            self._logged.add(str(error))
            log.error("cannot charge a run of job %d yet: %s", event.body.job_id, error)

    def _update_placement(self, confirmed: Sequence[_JobEvent]) -> None:
        """Queue jobs that lack a hold for placement, and forget finished jobs."""
        ended: dict[JobKey, int] = {}
        settled: dict[str, JobKey] = {}
        for event, job, hold in confirmed:
            if _is_own_end(event) and ends_hold(event.body):
                ended[job] = max(ended.get(job, 0), event.body.restarts)
                if hold is not None:
                    settled[hold.id] = job
        now = self._clock()
        waiting: set[Key] = set()
        for event, job, hold in confirmed:
            record = _get_record(event)
            is_next = job in ended and record.restarts > ended[job]
            if is_next or job not in ended:
                waiting.add(job[:2])
            if event.kind == RUN_END or strip_state_suffix(record.state) in FINISHED:
                continue
            # Without another hold for the id, the gate returned the settled one of the former job.
            own_hold = hold if hold is not None and settled.get(hold.id, job) == job else None
            if event.kind == JOB_STATE and own_hold is not None:
                self._hold_placement.note_change(job[0], own_hold, record, now)
            if is_next or (job not in ended and needs_hold(record, own_hold, now)):
                self._hold_placement.queue_job(*job[:2])
        for key in {job[:2] for job in ended} - waiting:
            self._hold_placement.drop(*key)
            self._unpaid_jobs.forget(*key)

    def tick(self, append: Append) -> float:
        """Do work due by the clock: update the gate, place holds, reconcile.

        Raises:
            Unavailable: The ledger, the gate or the journal is unavailable.
        """
        if self._is_idle():
            return _TICK_S
        # If this tick fails, the next one is complete, too.
        self._complete_due = 0.0
        now = self._clock()
        books = self._gate_sync.push()
        if books.accounts:
            # A deposit may have come in, so recheck the jobs held for insufficient funds.
            self._queue_held_jobs()
        self._scheduled_work.copy_gate_facts(append)
        has_more, is_ready = False, self._hold_placement.is_ready()
        if is_ready:
            has_more = self._hold_placement.place_queued(now)
            if not self._is_busy:
                self._compare_due_cluster(now)
            has_more = has_more or self._report_polls(now)
        self._scheduled_work.run_due_work(now, append)
        self._is_busy = False
        is_done = is_ready and not (has_more or self._hold_placement.has_queued)
        if is_done and not (self._pending_polls or self._has_unfunded):
            self._complete_due = time.monotonic() + self._idle_s
        return 0.0 if has_more else _TICK_S

    def _is_idle(self) -> bool:
        """Return whether nothing has changed since the last complete tick.

        Raises:
            LedgerUnavailable: The ledger is unavailable.
        """
        if not self._idle_s:
            return False
        self._gate_sync.query_models()
        now = time.monotonic()
        marks = (self._ledger.read_change_mark(), self._link.read_change_mark())
        if marks != self._marks or None in marks:
            self._marks = marks
            return False
        return self._active_until <= now < self._complete_due

    def _report_polls(self, now: datetime) -> bool:
        """Report complete polls to the gate, so that it voids holds of missing jobs.

        Return True if jobs need holds first. This waits until jobs.db has applied the poll and its
        jobs are confirmed and have their holds: SU held for a change must not become available
        before the changed job's own hold includes them.
        """
        is_wanted = False
        for cluster, poll in list(self._pending_polls.items()):
            if not self._hold_placement.has_read(poll.last_event):
                continue
            if not poll.is_covered and self._hold_placement.queue_changed(cluster, now):
                self._pending_polls[cluster] = poll._replace(is_covered=True)
                is_wanted = True
                continue
            self._link.report_poll(cluster, poll.began)
            del self._pending_polls[cluster]
            # From now on the gate treats the poll as the outcome of the changes.
            is_wanted = self._hold_placement.queue_changed(cluster, now) or is_wanted
        return is_wanted

    def _compare_due_cluster(self, now: datetime) -> None:
        """Compare holds with the queue for one due cluster, and reconcile its charges."""
        lingering = self._link.list_lingering()
        self._has_unfunded = self._hold_stranded_jobs() or bool(lingering)
        self._hold_placement.move_holds(lingering, now)
        every_s = self._settings.bank.reconcile_s
        for cluster in self._settings.cluster:
            last = self._swept_at.get(cluster)
            if last is not None and (now - last).total_seconds() < every_s:
                continue
            self._swept_at[cluster] = now
            self._hold_placement.sweep(cluster, now)
            self._reconciliation.turn(cluster, self._bank_started, now, self._gate_sync.rules.seq)
            return

    def _queue_held_jobs(self) -> None:
        """Queue the jobs held for insufficient funds for a new check."""
        for cluster in self._settings.cluster:
            for leader in self._unpaid_jobs.list_held(cluster):
                self._hold_placement.queue_job(cluster, leader)

    def _hold_stranded_jobs(self) -> bool:
        """Hold jobs in Slurm whose allocation ended, and release those that can be paid again.

        Returns:
            Whether there are holds that no allocation can pay.
        """
        holds = self._link.list_stranded()
        jobs = {}
        for cluster in {hold.cluster for hold in holds if hold.cluster}:
            leaders = {hold.job_id for hold in holds if hold.cluster == cluster}
            for leader, of_one in group_by_hold(
                self._hold_placement.list_jobs(cluster, leaders)
            ).items():
                jobs[cluster, leader] = of_one
        self._unpaid_jobs.hold_stranded(holds, jobs)
        return bool(holds)

    def close(self) -> None:
        """Close the ledger, and give up the lease of the gate."""
        self._hold_placement.close()
        self._reconciliation.close()
        self._gate_sync.close()
        self._ledger.close()


def name_cursor(settings: Settings) -> str:
    """Return the name of the cursor in the ledger.

    A PostgreSQL ledger may serve several Stewards, each with its own journal.
    """
    if not settings.bank.database.startswith("postgresql"):
        return BANK_AUTHOR
    import socket

    return f"{BANK_AUTHOR}@{socket.gethostname()}:{settings.state_dir}"


def _get_record(event: Event) -> JobRecord:
    record: JobRecord = event.body.record
    return record


def _is_own_end(event: Event) -> bool:
    """Return True for the end of a run reported by Steward's own sources."""
    return event.kind == RUN_END and not event.body.source


def _identify_jobs(events: Sequence[Event]) -> list[JobKey]:
    """Return the job of each event.

    Observations of a later run lack the first submit time: they belong to the newest job of
    the id among the events.
    """
    newest: dict[Key, int] = {}
    known: list[tuple[Key, int]] = []
    for event in events:
        record = _get_record(event)
        key = event.cluster, get_hold_job_id(record)
        first = event.body.first_submit if isinstance(event.body, RunEvent) else None
        if first is None and not record.restarts:
            first = record.submit
        first_us = to_micros_or_zero(first)
        newest[key] = max(newest.get(key, 0), first_us)
        known.append((key, first_us))
    return [(*key, first_us or newest[key]) for key, first_us in known]
