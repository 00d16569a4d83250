"""Queue polls: the source that polls squeue and asks Slurm about single jobs, one per cluster.

:class:`QueuePoller` is a consumer that the daemon runs. ``tick`` polls the queue when due and
appends events (:mod:`steward.capture.observations`); ``apply`` asks for the owners of new scripts.
One poll serves all parts of Steward. It costs slurmctld locks, so the next one waits at least
``COST_FACTOR`` (20) times as long as the last one took, even if the bank waits for it. While
slurmctld's state files show that nothing changed, a poll every half minute suffices. Queries of
single jobs cost next to nothing. An unavailable Slurm is no error: it is logged once and retried.
Its helpers come first:

- :class:`UnconfirmedHolds` schedules an early poll for SU holds whose job no poll has shown yet.
  The bank places a hold whenever slurmctld asks, also for jobs that never exist
  (``sbatch --test-only``); only a poll of the whole queue can tell.
- :class:`CancelledRuns` asks slurmdbd who cancelled a job.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Final

import msgspec

from steward.capture.jobcomp import JOBCOMP_SOURCE as JOBCOMP
from steward.capture.observations import QueueObserver, format_run_name, make_end_key
from steward.core.consumers import Append
from steward.core.events import (
    CONTROLLER_STATE,
    HOLD_CONFIRMED,
    HOLD_PLACED,
    HOLD_RELEASED,
    HOLD_SETTLED,
    JOB_END,
    JOB_SCRIPT,
    QUEUE_POLLED,
    ControllerState,
    Event,
    JobFacts,
    QueuePolled,
    utc_now,
)
from steward.core.files import StatusWriteError
from steward.core.poll_status import COST_FACTOR, LONG_INTERVAL_S, PollStatus
from steward.core.rate_limits import TokenBuckets
from steward.core.records import JobRecord
from steward.core.timestamps import to_micros
from steward.core.waits import Backoff
from steward.slurm import FINISHED, MAX_COMPLETED, QueueSnapshot, Slurm, SlurmDown, SlurmError
from steward.slurm.settings import ClusterSettings
from steward.slurm.state_files import StateStamp

HOLD_KINDS: Final = frozenset({HOLD_PLACED, HOLD_CONFIRMED, HOLD_SETTLED, HOLD_RELEASED})
"""Kinds of events about SU holds."""

_HOLD_SHOWN_S: Final = 6.0
"""Age of a hold, in seconds, from which a poll tells whether its job exists. For a younger hold the
gate waits for a later poll.
"""
_HOLD_IGNORED_S: Final = 60.0
"""Age in seconds from which a placed hold is ignored."""


# SU holds without a job


class UnconfirmedHolds:
    """Schedule of early polls for SU holds whose jobs no poll has shown.

    Args:
        cluster: Cluster of the queue.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, cluster: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._due: dict[str, float] = {}

    def apply_events(self, events: Iterable[Event]) -> None:
        """Record placed holds, and drop those confirmed, settled or released."""
        now = utc_now()
        for event in events:
            if event.cluster != self._cluster or event.kind not in HOLD_KINDS:
                continue
            if event.kind != HOLD_PLACED:
                self._due.pop(event.body.hold, None)
                continue
            age_s = (now - event.at).total_seconds()
            # Older holds were polled for long ago: events are replayed after a start.
            if not event.body.job_id and 0 <= age_s < _HOLD_IGNORED_S:
                self._due[event.body.hold] = self._clock() + max(0.0, _HOLD_SHOWN_S - age_s)

    def drop_covered(self, began: float) -> None:
        """Drop holds that a complete poll has covered.

        Args:
            began: Start of the poll, on the monotonic clock.
        """
        self._due = {hold: due for hold, due in self._due.items() if due > began}

    def get_due_time(self) -> float:
        """Return when the next poll is due; infinity if no hold needs one."""
        return min(self._due.values(), default=float("inf"))


# Cancelled runs

CANCELLED: Final = "CANCELLED"
"""Slurm's state of a cancelled job."""

_FIRST_S: Final = 3.0
"""Pause before the first query, in seconds; tripled after each."""
_MAX_CANCELLER_QUERIES: Final = 5
"""Maximum number of queries per run."""
_MAX_CANCELLED: Final = 5_000
"""Maximum number of runs waiting."""


class _CancelledRun(msgspec.Struct):
    """Cancelled run with the time of its next query."""

    record: JobRecord
    due: float
    wait_s: float = _FIRST_S
    tries: int = 0


class CancelledRuns:
    """Cancelled runs of a cluster of which slurmdbd is to say who cancelled them.

    slurmctld does not show it, and slurmdbd may learn it seconds after the end. So each run is
    queried some seconds later, several times at growing intervals, then dropped.

    Args:
        cluster: Name of the cluster in events.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, cluster: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._runs: deque[_CancelledRun] = deque(maxlen=_MAX_CANCELLED)
        self._names: dict[str, None] = {}

    def add(self, events: Sequence[Event]) -> None:
        """Add the cancelled runs among these events."""
        for event in events:
            if event.kind != JOB_END or event.source == "sacct":
                continue
            record: JobRecord = event.body.record
            name = format_run_name(record)
            if record.state == CANCELLED and record.cancelled_by is None:
                if name not in self._names:
                    self._runs.append(_CancelledRun(record, self._clock() + _FIRST_S))
                self._names[name] = None
                if len(self._names) > _MAX_CANCELLED:
                    del self._names[next(iter(self._names))]

    def get_due_job(self) -> int | None:
        """Return the job to query now, or None."""
        if self._runs and self._runs[0].due <= self._clock():
            return self._runs[0].record.job_id
        return None

    def clear(self) -> None:
        """Drop all runs: there is no slurmdbd to query."""
        self._runs.clear()

    def process_records(self, records: Sequence[JobRecord]) -> list[Event]:
        """Return events from slurmdbd's records of the job that was due."""
        run = self._runs.popleft()
        for record in records:
            # Before Slurm 23.02 slurmdbd stores no restart count.
            is_same_job = record.job_id == run.record.job_id and record.submit == run.record.submit
            if is_same_job and record.cancelled_by is not None:
                return [self._build_end_event(run.record, record)]
        run.tries += 1
        if run.tries < _MAX_CANCELLER_QUERIES:
            run.wait_s *= 3
            run.due = self._clock() + run.wait_s
            self._runs.append(run)
        return []

    def _build_end_event(self, observed: JobRecord, accounted: JobRecord) -> Event:
        """Build the end event that says who cancelled a run."""
        # Copy the known record, because the last observation of an end wins, and add only what
        # nobody else knows: slurmdbd formats TRES and similar fields differently.
        record = msgspec.structs.replace(
            observed,
            state=CANCELLED,
            suspended_s=max(observed.suspended_s or 0, accounted.suspended_s or 0),
            exit_code=accounted.exit_code,
            exit_signal=accounted.exit_signal,
            cancelled_by=accounted.cancelled_by,
        )
        now = utc_now()
        return Event(
            kind=JOB_END,
            cluster=self._cluster,
            key=f"{make_end_key(record)}:by",
            at=record.end or now,
            seen_at=now,
            source="sacct",
            body=JobFacts(record=record),
        )


# Rate limit and poller

log = logging.getLogger(__name__)

_MAX_QUERIES_AT_ONCE: Final = 8
"""Single-job queries allowed at once."""
_ASKS_PER_S: Final = 4.0
"""Single-job queries allowed per second."""
_START_SLACK: Final = timedelta(seconds=60)
"""Time before this process's start from which events may be missing in the journal it first read.
"""
_CHUNK: Final = 500
"""Maximum number of events per append."""
_MAX_POLL_BACKOFF_S: Final = 60.0
"""Maximum pause after failed polls, in seconds."""
_DOWN_S: Final = 5.0
"""Minimum pause while slurmctld is down, in seconds."""
_UNCHANGED_POLL_S: Final = 30.0
"""Interval of polls while slurmctld's state files do not change, in seconds: so late a slurmctld
that was killed on an idle cluster counts as down.
"""
_QUEUE_POLLED_INTERVAL_S: Final = 5.0
"""Minimum interval of queue.polled events, in seconds."""
# Half of the allowance is reserved for new scripts, whose owners somebody waits for.
_RESERVE: Final = _MAX_QUERIES_AT_ONCE / 2
"""Single-job queries kept for new scripts."""


class QueuePoller:
    """Poller of one cluster's queue.

    It consumes job.script events to query owners of new scripts, and job.end events to query
    complete records while slurmctld still has them. Its cursor is only in memory: the queue shows
    forgotten scripts again.

    Args:
        cluster: Name of the cluster.
        settings: Settings of the cluster.
        slurm: Client of its Slurm; created from the settings if None.
        unfinished: Returns the latest records of unfinished runs, to notice those that ended or
            disappeared meanwhile.
        redact: Removes secrets from texts that users wrote into a record.
        report_polls: Whether complete polls are reported as queue.polled events.
        on_poll: Called with the outcome of each poll, and after each skipped one.
        read_stamp: Returns a stamp that differs after every change; None if a change may not show.
        clock: Monotonic clock, in seconds.
    """

    kinds = frozenset({JOB_SCRIPT, JOB_END}) | HOLD_KINDS
    batch_events = 200

    def __init__(
        self,
        cluster: str,
        settings: ClusterSettings,
        slurm: Slurm | None = None,
        unfinished: Callable[[], Iterable[JobRecord]] = tuple,
        redact: Callable[[JobRecord], JobRecord] = lambda record: record,
        *,
        report_polls: bool = False,
        on_poll: Callable[[PollStatus], None] = lambda _: None,
        read_stamp: Callable[[], StateStamp | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = f"snapshots.{cluster}"
        self.cost_s = 0.0
        """Duration of the last poll, in seconds."""
        self._cluster = cluster
        self._clock = clock
        self._interval_s = settings.snapshot_interval_s
        self._slurm = slurm or Slurm(cluster, settings)
        self._observer = QueueObserver(cluster)
        self._cancelled = CancelledRuns(cluster, clock)
        self._unfinished = unfinished
        self._redact = redact
        self._on_poll = on_poll
        self._read_stamp = read_stamp
        self._polled_stamp: StateStamp | None = None
        now = utc_now()
        self._status = PollStatus(at=now, current_at=now, up=False)
        self._reported_at = 0.0 if report_polls else float("inf")
        self._rows: dict[int, int] | None = None
        self._lost: list[int] = []
        self._folded: list[int] = []
        self._script_job_ids: set[int] = set()
        self._position = 0
        self._unconfirmed = UnconfirmedHolds(cluster, clock)
        self._poll_started = self._poll_due = 0.0
        self._recent_since = now - _START_SLACK
        self._is_up: bool | None = None
        self._last_message = ""
        self._is_slow = False
        self._backoff = Backoff(max(1.0, self._interval_s), _MAX_POLL_BACKOFF_S)
        self._query_limit = TokenBuckets(_ASKS_PER_S, _MAX_QUERIES_AT_ONCE, clock)

    def cursor(self) -> int:
        """Return the position of the last event processed; kept in memory only."""
        return self._position

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        """Query the jobs of new scripts while they are few; the next poll finds the others.

        Raises:
            Unavailable: The journal does not accept events now.
        """
        cluster_events = [event for event in events if event.cluster == self._cluster]
        self._unconfirmed.apply_events(cluster_events)
        self._script_job_ids.update(
            event.body.job_id
            for event in cluster_events
            if event.kind == JOB_SCRIPT and event.body.job_id not in self._observer
        )
        ends = [
            event for event in cluster_events if event.kind == JOB_END and event.source == JOBCOMP
        ]
        for event in ends:
            # The first poll restores the unfinished runs that older events report.
            if event.body.record.state in FINISHED or event.seen_at >= self._recent_since:
                self._observer.record_end(event.body.record)
        self._cancelled.add(ends)
        if self._is_up and len(self._script_job_ids) <= _MAX_QUERIES_AT_ONCE:
            self._query_script_jobs(append)
        self._position = upto

    def tick(self, append: Append) -> float:
        """Poll the queue when due, and query single jobs as far as the rate limit allows.

        Raises:
            Unavailable: The journal does not accept events now.
        """
        if self._clock() >= self._next_poll_at():
            stamp = self._read_stamp()
            if self._is_unchanged(stamp):
                self._poll_due = self._clock() + self._interval_s
                self._report_unchanged()
            else:
                self._poll_queue(stamp, append)
        if self._is_up:
            self._end_lost_jobs(append)
            self._query_folded_tasks(append)
            self._requery_records(append)
            self._query_records(append)
            self._query_cancellers(append)
        wait_s = self._next_poll_at() - self._clock()
        if self._is_up and self._is_busy():
            wait_s = min(wait_s, 1.0)
        return max(0.0, wait_s)

    def _next_poll_at(self) -> float:
        """Return when to poll next: at the interval, or sooner if the bank waits for it."""
        if not self._is_up or self._reported_at == float("inf"):
            return self._poll_due
        soonest = self._poll_started + max(_QUEUE_POLLED_INTERVAL_S, COST_FACTOR * self.cost_s)
        return min(self._poll_due, max(soonest, self._unconfirmed.get_due_time()))

    def _is_unchanged(self, stamp: StateStamp | None) -> bool:
        """Return whether a poll would show what the last one showed.

        Args:
            stamp: Stamp of slurmctld's state files now.
        """
        now = self._clock()
        return bool(
            stamp is not None
            and stamp == self._polled_stamp
            and self._is_up
            and not (self._script_job_ids or self._is_busy())
            and now < min(self._poll_started + _UNCHANGED_POLL_S, self._unconfirmed.get_due_time())
            and self._observer.is_settled()
        )

    def _is_busy(self) -> bool:
        """Return whether single-job queries are pending."""
        return bool(
            self._lost
            or self._folded
            or self._cancelled.get_due_job() is not None
            or self._observer.find_job_to_requery() is not None
            or self._observer.find_job_to_query() is not None
        )

    def close(self) -> None:
        """Do nothing: the source holds no resources."""

    def _poll_queue(self, stamp: StateStamp | None, append: Append) -> None:
        """Poll the queue and append events for what is new.

        Args:
            stamp: Stamp of slurmctld's state files before this poll.
            append: Appends events durably.
        """
        self._polled_stamp = None
        began = self._poll_started = self._clock()
        try:
            queue = self._slurm.queue(self._rows)
        except SlurmError as error:
            wait_s = self._backoff.next_s()
            if isinstance(error, SlurmDown):
                # A daemon that is down cannot be burdened, and scripts wait for their owners
                # meanwhile.
                wait_s = min(wait_s, max(self._interval_s, _DOWN_S))
            self._poll_due = self._clock() + wait_s
            self._report_outcome(up=False, message=str(error))
            self._report_availability(up=False, message=str(error), append=append)
            return
        self._backoff.reset()
        self.cost_s = queue.cost_s
        self._poll_due = began + max(self._interval_s, COST_FACTOR * queue.cost_s)
        self._log_slow_polls()
        self._report_outcome(up=True, jobs=len(queue.rows))
        self._report_availability(up=True, message="", append=append)
        if self._rows is None:
            self._observer.remember(self._unfinished())
        self._append(
            self._observer.observe(self._redact_all(queue.records), queue.taken_at), append
        )
        self._rows = queue.rows
        # If a row could not be parsed, its job only seems to be gone: the next poll decides.
        self._lost, self._folded = [], []
        if not queue.passed_over:
            self._lost, self._folded = self._observer.find_absent(queue.rows)
            self._append_poll_event(queue, append)
            self._polled_stamp = stamp
        # slurmctld does not know jobs outside its queue, and will not know them later.
        self._script_job_ids.clear()

    def _log_slow_polls(self) -> None:
        """Log, once per change, that polls are so slow that their interval became long."""
        interval_s = self._poll_due - self._poll_started
        is_slow = interval_s > max(LONG_INTERVAL_S, self._interval_s)
        if is_slow and not self._is_slow:
            log.warning(
                "cluster %s: squeue took %.1f s, so the next poll of the queue is in %.0f s; "
                "until then holds are not confirmed and jobs with insufficient funds are not "
                "found. Is slurmctld busy, or does a job have a very long text?",
                *(self._cluster, self.cost_s, interval_s),
            )
        elif self._is_slow and not is_slow:
            log.info("cluster %s: polls of the queue are %.0f s apart", self._cluster, interval_s)
        self._is_slow = is_slow

    def _report_outcome(self, *, up: bool, jobs: int = 0, message: str = "") -> None:
        """Report the outcome of a poll."""
        now = utc_now()
        self._status = PollStatus(
            at=now,
            current_at=now,
            up=up,
            message=message,
            version=self._slurm.known_version,
            cost_s=self.cost_s,
            jobs=jobs,
            interval_s=max(0.0, self._poll_due - self._poll_started),
        )
        self._send_status()

    def _report_unchanged(self) -> None:
        """Report that the last poll's result is still current."""
        self._status = msgspec.structs.replace(
            self._status, current_at=utc_now(), interval_s=self._interval_s
        )
        self._send_status()

    def _send_status(self) -> None:
        """Pass the poll status to ``on_poll``."""
        try:
            self._on_poll(self._status)
        except StatusWriteError as error:
            log.debug("cluster %s: %s", self._cluster, error)  # the status file is only for people

    def _append_poll_event(self, queue: QueueSnapshot, append: Append) -> None:
        """Append queue.polled: a job not reported by now was not in the queue when the poll began.

        At most one every few seconds, because each is an event.
        """
        now = self._clock()
        if now < self._reported_at + _QUEUE_POLLED_INTERVAL_S:
            return
        began = queue.taken_at
        event = Event(
            kind=QUEUE_POLLED,
            cluster=self._cluster,
            key=f"{QUEUE_POLLED}:{to_micros(began)}",
            at=began,
            seen_at=utc_now(),
            source="snapshot",
            body=QueuePolled(began=began, cost_s=queue.cost_s),
        )
        self._append([event], append)
        self._unconfirmed.drop_covered(self._poll_started)
        self._reported_at = now

    def _query_script_jobs(self, append: Append) -> None:
        """Query the jobs of new scripts."""
        for job_id in sorted(self._script_job_ids):
            if not self._query_limit.take() or not self._query_job(job_id, append):
                return
            if job_id in self._observer:
                self._script_job_ids.discard(job_id)

    def _query_records(self, append: Append) -> None:
        """Query complete records, newest jobs first."""
        while (job_id := self._observer.find_job_to_query()) is not None:
            if not self._query_limit.take(reserve=_RESERVE) or not self._query_job(job_id, append):
                return
            self._observer.drop_query(job_id)

    def _requery_records(self, append: Append) -> None:
        """Query complete records of jobs that ended, were suspended or resumed."""
        while (job_id := self._observer.find_job_to_requery()) is not None:
            if not self._query_limit.take(reserve=_RESERVE) or not self._query_job(job_id, append):
                return
            self._observer.drop_requery(job_id)

    def _query_cancellers(self, append: Append) -> None:
        """Query slurmdbd for who cancelled runs."""
        while (job_id := self._cancelled.get_due_job()) is not None:
            try:
                if not self._slurm.has_accounting():
                    self._cancelled.clear()
                    return
                if not self._query_limit.take(reserve=_RESERVE):
                    return
                records = self._slurm.query_accounting_end(job_id)
            except SlurmError as error:
                log.debug("cluster %s: %s", self._cluster, error)
                records = []  # retried later, up to 5 times
            self._append(self._cancelled.process_records(records), append)

    def _query_folded_tasks(self, append: Append) -> None:
        """Query requeued array tasks, which the queue shows only in their array's row."""
        while self._folded:
            if not self._query_limit.take(reserve=_RESERVE) or not self._query_job(
                self._folded[-1], append
            ):
                return
            self._folded.pop()

    def _query_job(self, job_id: int, append: Append) -> bool:
        """Query one job; return whether Slurm answered."""
        try:
            records = self._slurm.job(job_id)
        except SlurmError as error:
            # The next poll detects and logs this too.
            log.debug("cluster %s: %s", self._cluster, error)
            return False
        # An id that is in use again belongs to another run.
        job_ids = {record.job_id for record in records}
        self._lost = [lost for lost in self._lost if lost not in job_ids]
        is_whole = len(records) <= MAX_COMPLETED
        self._append(
            self._observer.observe(self._redact_all(records), utc_now(), whole=is_whole), append
        )
        return True

    def _end_lost_jobs(self, append: Append) -> None:
        """End jobs that disappeared without an end.

        slurmctld has just shown that it no longer has them, so only slurmdbd may know more.
        """
        while self._lost:
            records: Sequence[JobRecord] = ()
            try:
                if self._slurm.has_accounting():
                    if not self._query_limit.take(reserve=_RESERVE):
                        return
                    records = self._slurm.query_accounting(self._lost[-1])
            except SlurmError as error:
                log.debug("cluster %s: %s", self._cluster, error)
                return  # retried at the next tick: the end can wait for slurmdbd
            events = self._observer.end_lost_run(
                self._lost.pop(), utc_now(), self._redact_all(records)
            )
            self._append(events, append)

    def _redact_all(self, records: Iterable[JobRecord]) -> list[JobRecord]:
        """Redact records."""
        return [self._redact(record) for record in records]

    def _append(self, events: Sequence[Event], append: Append) -> None:
        """Append events; on failure forget everything, so that it is reported again."""
        try:
            for begin in range(0, len(events), _CHUNK):
                append(events[begin : begin + _CHUNK])
            self._cancelled.add(events)
        except BaseException:
            # If an append failed, everything is reported again under the same keys.
            self._observer.clear()
            self._rows = None
            self._lost, self._folded = [], []
            self._poll_due = 0.0
            raise

    def _report_availability(self, *, up: bool, message: str, append: Append) -> None:
        """Log and report, once per change, that slurmctld started or stopped answering."""
        if up == self._is_up and message == self._last_message:
            return
        if not up:
            log.warning("%s", message)
        elif self._is_up is False:
            log.info("cluster %s: Slurm answers again", self._cluster)
        if up != self._is_up:
            now = utc_now()
            key = f"{CONTROLLER_STATE}:{'up' if up else 'down'}:{int(now.timestamp())}"
            state = ControllerState(up=up, message=message)
            append(
                [
                    Event(
                        kind=CONTROLLER_STATE,
                        cluster=self._cluster,
                        key=key,
                        at=now,
                        seen_at=now,
                        source="snapshot",
                        body=state,
                    )
                ]
            )
        self._is_up, self._last_message = up, message
