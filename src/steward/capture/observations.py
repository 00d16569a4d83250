"""Observations of Slurm's queue: compares polls and emits job.seen, job.state and job.end events.

:class:`QueueObserver` remembers, per raw job id, the latest run that Slurm has shown. ``observe``
returns the events for what is new: job.seen for a new run, changed facts or the first complete
record, job.state for a change of state or allocation, job.end for an end. ``find_absent`` and
``end_lost_run`` end the runs that disappeared. ``find_job_to_query`` and ``find_job_to_requery``
name the jobs whose complete record (scontrol) is to be queried.

Event keys derive from what Slurm shows, so a source that has forgotten everything only repeats
events, which the journal ignores. Memory per job is small, because a queue may hold a hundred
thousand. Used by :mod:`steward.capture.queue_polls`.
"""

import hashlib
from collections import deque
from collections.abc import Container, Iterable, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Final

import msgspec

from steward.core.events import JOB_END, JOB_SEEN, JOB_STATE, Event, JobFacts
from steward.core.records import JobRecord
from steward.slurm import FINISHED, includes_task
from steward.slurm.job_states import FORGOTTEN, LOST, RESIZING, WAITING

SNAPSHOT_SOURCE: Final = "snapshot"
"""Source name of the events."""

# Set by a submission or an administrator. Changes that the scheduler makes (times, nodes, satisfied
# dependencies, remaining array tasks) are not reported.
_REPORTED_FIELDS: Final = (
    "name",
    "uid",
    "user",
    "gid",
    "group",
    "account",
    "partition",
    "qos",
    "batch",
    "array_job_id",
    "het_job_id",
    "het_offset",
    "sluid",
    "time_limit_s",
    "reservation",
    "command",
    "work_dir",
    "comment",
    "admin_comment",
)
"""Fields of a record whose change makes a job.seen event."""
# Requests of a pending job; once it runs, these fields hold what the scheduler allocated.
_get_requested: Final = attrgetter(
    *("cpus", "nodes", "tasks", "min_memory_mib", "licenses"),
    *("tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task"),
)
"""Function that returns the requested resources of a record."""
_HELD_REASONS: Final = frozenset({"JobHeldUser", "JobHeldAdmin"})
"""Reasons of held jobs."""
_SETTLED: Final = frozenset({"RUNNING", "SUSPENDED"})
"""States that last until a command, an event or the time limit ends them."""
_MAX_PENDING_QUERIES: Final = 20_000
"""Maximum number of jobs whose complete records are to be queried."""
_MAX_KEYS_PER_RUN: Final = 32
"""Maximum number of event keys remembered per run."""


class _ObservedRun:
    """Facts remembered of the latest run of a job id."""

    __slots__ = (
        *("allocation", "digest", "encoded_record", "is_end_reported", "is_over", "is_remembered"),
        *("is_whole", "name", "needs_requery", "reported_keys", "request_hash", "state", "states"),
        "suspended_at",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.digest = ""
        self.request_hash = 0
        self.state = ""
        self.states: tuple[str, ...] = ()
        self.allocation = ""
        self.is_whole = False
        self.is_over = False
        self.encoded_record = b""
        self.is_remembered = False
        self.is_end_reported = False
        self.reported_keys: tuple[str, ...] = ()
        self.suspended_at: datetime | None = None
        self.needs_requery = False

    def make_news_key(
        self, key: str, request_fields: tuple[object, ...], taken_at: datetime
    ) -> str:
        """Return the event key of a changed run; unique if the run had the same facts before.

        Args:
            key: Key for the first observation of these facts.
            request_fields: Current request, see :func:`_extract_request`.
            taken_at: Time of the observation, UTC.
        """
        former = key.rpartition(":")[0] + f":{self.digest}"
        if self.request_hash and request_fields and self.request_hash != hash(request_fields):
            key += f":{_digest_facts(request_fields)}"
        is_full = len(self.reported_keys) > _MAX_KEYS_PER_RUN
        if self.is_remembered or is_full or key in self.reported_keys:
            return f"{key}:{int(taken_at.timestamp())}"
        self.reported_keys += (former, key)
        return key


class QueueObserver:
    """Memory of one cluster's queue polls.

    Args:
        cluster: Name of the cluster in events.
    """

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._runs: dict[int, _ObservedRun] = {}
        self._to_query: deque[int] = deque(maxlen=_MAX_PENDING_QUERIES)
        self._to_requery: deque[int] = deque(maxlen=_MAX_PENDING_QUERIES)

    def __contains__(self, job_id: object) -> bool:
        """Return whether Slurm has shown an unfinished run of this id."""
        run = self._runs.get(job_id) if isinstance(job_id, int) else None
        return run is not None and not run.is_over

    def is_settled(self) -> bool:
        """Return whether slurmctld saves each change of the queue: no job waits, starts or ends.

        It does not save the reasons and priorities of pending jobs.
        """
        return all(
            run.is_over or run.is_end_reported or run.state in _SETTLED
            for run in self._runs.values()
        )

    def remember(self, records: Iterable[JobRecord]) -> None:
        """Restore unfinished runs known from an earlier process.

        Their further changes are reported as if this process had seen them; what had already
        happened (a running job has started) is not reported under the same key.
        """
        for record in records:
            if record.state in FINISHED or record.submit is None:
                continue
            run = self._runs[record.job_id] = _ObservedRun(format_run_name(record))
            run.digest, run.state = _digest_record(record), record.state
            run.request_hash = hash(_extract_request(record) or 0)
            begun = ("RUNNING",) if record.start else ()
            run.states = tuple({record.state, *begun})
            run.allocation = _digest_allocation(record)
            run.is_whole = run.is_remembered = True
            run.suspended_at = record.suspended_at
            run.encoded_record = msgspec.msgpack.encode(record)

    def observe(
        self, records: Iterable[JobRecord], taken_at: datetime, *, whole: bool = False
    ) -> list[Event]:
        """Remember what Slurm shows and return events for what is new.

        Args:
            records: Records of a poll.
            taken_at: Time of the poll, UTC.
            whole: Whether the records are complete (scontrol), not the queue's columns.
        """
        events: list[Event] = []
        for record in records:
            if not self._is_requeueing(record):
                self._observe_record(record, taken_at, whole, events)
        return events

    def find_job_to_query(self) -> int | None:
        """Return the newest job whose complete record is still to be queried, or None.

        For an array only its own record counts: its tasks were submitted with it.
        """
        while self._to_query:
            run = self._runs.get(self._to_query[-1])
            if run is not None and not run.is_whole:
                return self._to_query[-1]
            self._to_query.pop()
        return None

    def drop_query(self, job_id: int) -> None:
        """Drop a job from the list of complete records to query."""
        if self._to_query and self._to_query[-1] == job_id:
            self._to_query.pop()

    def record_end(self, record: JobRecord) -> None:
        """Record that another source reported the end of a run, or of one that goes on.

        A finished run does not count as lost; its complete record is queried while slurmctld still
        has it. A requeued or resized run counts as lost unless the queue shows it.
        """
        run, name = self._runs.get(record.job_id), format_run_name(record)
        if run is None or _is_replaced(run, record):
            # The run started and ended between two polls.
            run = self._runs[record.job_id] = _ObservedRun(name)
            run.encoded_record = msgspec.msgpack.encode(record)
        if run.name == name and record.state in FINISHED:
            run.is_end_reported = True
            if not run.is_over:
                self._mark_for_requery(record.job_id, run)

    def find_job_to_requery(self) -> int | None:
        """Return the job whose complete record is to be queried again, newest first, or None.

        Changes at an end or a suspension appear only there.
        """
        while self._to_requery:
            run = self._runs.get(self._to_requery[-1])
            if run is not None and run.needs_requery:
                return self._to_requery[-1]
            self._to_requery.pop()
        return None

    def drop_requery(self, job_id: int) -> None:
        """Drop a job from the list of records to query again."""
        run = self._runs.get(job_id)
        if run is not None:
            run.needs_requery = False

    def _mark_for_requery(self, job_id: int, run: _ObservedRun) -> None:
        """Mark a run whose complete record is to be queried again."""
        if not run.needs_requery:
            run.needs_requery = True
            self._to_requery.append(job_id)

    def find_absent(self, present: Container[int]) -> tuple[list[int], list[int]]:
        """Forget finished jobs that Slurm no longer has, and list unfinished ones that are missing.

        Args:
            present: Raw ids in the queue.

        Returns:
            The jobs that are gone although no end was observed, and the array tasks that may be
            pending again, folded into their array's row.
        """
        gone_ids = [job_id for job_id in self._runs if job_id not in present]
        lost, folded = [], []
        for job_id in gone_ids:
            run = self._runs[job_id]
            if run.is_over or run.is_end_reported:
                del self._runs[job_id]
            elif not self._is_folded(job_id, present):
                lost.append(job_id)
            elif run.state != "PENDING":
                folded.append(job_id)
        return lost, folded

    def _is_folded(self, job_id: int, present: Container[int]) -> bool:
        """Return whether a task is among those that its array's row still lists."""
        task = self.get_last_record(job_id)
        array = task.array_job_id
        if array in (0, job_id) or array not in present or array not in self:
            return False
        row = self.get_last_record(array)
        return (
            row.state == "PENDING"
            and task.array_task.isdigit()
            and not row.array_task.isdigit()
            and includes_task(row.array_task, int(task.array_task))
        )

    def get_last_record(self, job_id: int) -> JobRecord:
        """Return the last record of an unfinished run."""
        return msgspec.msgpack.decode(self._runs[job_id].encoded_record, type=JobRecord)

    def end_lost_run(
        self, job_id: int, taken_at: datetime, accounted: Sequence[JobRecord] = ()
    ) -> list[Event]:
        """Forget a run that disappeared without an end, and return its end event.

        Args:
            job_id: Raw job id.
            taken_at: Time when it was found missing, UTC.
            accounted: Records of this job id in slurmdbd.

        Returns:
            Its former sizes and its end as slurmdbd tells them, else an end with the state
            ``UNKNOWN`` and no time.
        """
        last, run = self.get_last_record(job_id), self._runs.pop(job_id)
        rows = [
            row for row in accounted if row.job_id == job_id and format_run_name(row) == run.name
        ]
        if any(row.state in FINISHED for row in rows):
            return [
                self._build_event(JOB_END, make_end_key(row), row, taken_at, source="sacct")
                for row in rows
                if row.state == RESIZING or row.state in FINISHED
            ]
        record = msgspec.structs.replace(
            last, state=LOST, reason="", end=None, exit_code=None, exit_signal=None
        )
        # A run that came back, from a state saved before, can be lost again.
        key = f"{make_end_key(record)}:{int(taken_at.timestamp())}"
        return [self._build_event(JOB_END, key, record, taken_at)]

    def clear(self) -> None:
        """Forget everything; it will be reported again under the same keys."""
        self._runs.clear()
        self._to_query.clear()
        self._to_requery.clear()

    def _observe_record(
        self, record: JobRecord, taken_at: datetime, whole: bool, events: list[Event]
    ) -> None:
        """Process one record: append its events, then remember it."""
        name, digest = format_run_name(record), _digest_record(record)
        run = self._runs.get(record.job_id)
        is_new = run is None or run.name != name
        if run is not None:
            events += self._end_replaced(run, record, taken_at)
        if run is None or run.name != name:
            run = self._runs[record.job_id] = _ObservedRun(name)
            if not whole and record.array_job_id in (0, record.job_id):
                self._to_query.append(record.job_id)
        request_fields = _extract_request(record)
        request_hash = hash(request_fields) if request_fields else run.request_hash
        has_changed = run.digest != "" and (
            digest != run.digest or run.request_hash not in (0, request_hash)
        )
        is_seen = has_changed or not run.digest or (whole and not run.is_whole)
        if is_seen:
            key = f"{JOB_SEEN}:{name}:{digest}"
            if has_changed:
                key = run.make_news_key(key, request_fields, taken_at)
            key += ":whole" if whole else ""
            events.append(self._build_event(JOB_SEEN, key, record, taken_at, whole=whole))
        is_new_state = record.state != run.state
        if record.state in FINISHED:
            if not run.is_over or is_new_state:
                events.append(
                    self._build_event(JOB_END, make_end_key(record), record, taken_at, whole=whole)
                )
            elif whole and run.needs_requery and not is_seen:
                # The queue's few columns reported its end before.
                key = f"{make_end_key(record)}:whole"
                events.append(self._build_event(JOB_END, key, record, taken_at, whole=True))
        else:
            key = _make_state_key(record, run, is_new, taken_at)
            if whole and record.suspended_at not in (None, run.suspended_at):
                key = _make_since_key(record)
            if key:
                events.append(self._build_event(JOB_STATE, key, record, taken_at, whole=whole))
        self._note_record(run, record, is_new_state=is_new_state, whole=whole)
        run.digest = digest
        run.request_hash = request_hash
        run.is_whole |= whole
        run.state = record.state
        if record.state not in run.states:
            run.states += (record.state,)
        run.allocation = _digest_allocation(record)
        run.is_over = record.state in FINISHED
        run.encoded_record = b"" if run.is_over else msgspec.msgpack.encode(record)

    def _end_replaced(
        self, run: _ObservedRun, record: JobRecord, taken_at: datetime
    ) -> list[Event]:
        """End a run whose id Slurm now shows for another job or an earlier run."""
        if self._is_id_reused(run, record):
            return self.end_lost_run(record.job_id, taken_at)
        if self._is_run_forgotten(run, record):
            return [self._build_forgotten_event(record.job_id, taken_at)]
        return []

    def _is_requeueing(self, record: JobRecord) -> bool:
        """Return whether a record belongs to a requeue in progress rather than to the next run.

        While such a job completes, Slurm shows the next run's count with the times of the previous
        one. A slurmctld that is killed then may forget the requeue: the next run never existed.
        """
        if record.state != "COMPLETING" or not record.restarts or record.job_id not in self._runs:
            return False
        before = msgspec.structs.replace(record, restarts=record.restarts - 1)
        return self._runs[record.job_id].name == format_run_name(before)

    def _is_id_reused(self, run: _ObservedRun, record: JobRecord) -> bool:
        """Return whether an unfinished run's id was given to another job since.

        A slurmctld that crashes forgets what it had not saved, the last job id included.
        """
        if run.is_over or run.is_end_reported or record.restarts or record.submit is None:
            return False
        former = self.get_last_record(record.job_id).submit
        return former is not None and former < record.submit

    def _is_run_forgotten(self, run: _ObservedRun, record: JobRecord) -> bool:
        """Return whether Slurm shows an earlier run than before and does not know the later one.

        A slurmctld that crashes restarts with what it saved seconds before.
        """
        if run.is_over or run.is_end_reported or record.submit is None:
            return False
        later = self.get_last_record(record.job_id).submit
        return later is not None and later > record.submit

    def _build_forgotten_event(self, job_id: int, taken_at: datetime) -> Event:
        """Build the end event of a run that slurmctld forgot in a crash."""
        last = self.get_last_record(job_id)
        record = msgspec.structs.replace(last, state=LOST, reason=FORGOTTEN, end=None)
        return self._build_event(JOB_END, f"{make_end_key(record)}:forgotten", record, taken_at)

    def _note_record(
        self, run: _ObservedRun, record: JobRecord, *, is_new_state: bool, whole: bool
    ) -> None:
        """Remember facts of a complete record, or that one must be queried again."""
        if whole:
            run.needs_requery = False
            run.suspended_at = record.suspended_at
        elif is_new_state and (
            record.state in FINISHED
            or record.state == "SUSPENDED"
            or (record.state == "RUNNING" and run.state == "SUSPENDED")
        ):
            self._mark_for_requery(record.job_id, run)

    def _build_event(
        self,
        kind: str,
        key: str,
        record: JobRecord,
        taken_at: datetime,
        *,
        whole: bool = False,
        source: str = SNAPSHOT_SOURCE,
    ) -> Event:
        """Build an event about a record, dated by its kind."""
        times = {
            JOB_SEEN: record.submit,
            JOB_STATE: record.suspended_at or (record.start if record.state == "RUNNING" else None),
            JOB_END: record.end,
        }
        return Event(
            kind=kind,
            cluster=self._cluster,
            key=key,
            at=times[kind] or taken_at,
            seen_at=taken_at,
            source=source,
            body=JobFacts(record=record, whole=whole),
        )


def format_run_name(record: JobRecord) -> str:
    """Return the unique name of a run within its cluster, used in event keys."""
    submit = int(record.submit.timestamp()) if record.submit else 0
    return f"{record.job_id}:{submit}:{record.restarts}"


def _is_replaced(run: _ObservedRun, record: JobRecord) -> bool:
    """Return whether a record belongs to a later run; an unfinished job gets only its own runs."""
    submit = int(record.submit.timestamp()) if record.submit else 0
    is_other_job = record.restarts == 0 and not (run.is_over or run.is_end_reported)
    return submit > int(run.name.split(":")[1]) and not is_other_job


def make_end_key(record: JobRecord) -> str:
    """Return the key of a run's end event."""
    end = int(record.end.timestamp()) if record.end else 0
    return f"{JOB_END}:{format_run_name(record)}:{record.state}:{end}"


def _make_state_key(record: JobRecord, run: _ObservedRun, is_new: bool, taken_at: datetime) -> str:
    """Return the key of the job.state event that follows; "" if none does."""
    key = f"{JOB_STATE}:{run.name}:{record.state}"
    if is_new:
        # job.seen reports this one; other states may have come between polls.
        return "" if record.state == "PENDING" and record.restarts == 0 else key
    if record.state != run.state:
        # Running again after a suspension is a different fact from running first.
        is_repeated = record.state in run.states
        return f"{key}:{int(taken_at.timestamp())}" if is_repeated else key
    allocation = _digest_allocation(record)
    return f"{key}:{allocation}" if allocation != run.allocation else ""


def _make_since_key(record: JobRecord) -> str:
    """Return the key of a job.state event that says since when a job is suspended or resumed."""
    at = int(record.suspended_at.timestamp()) if record.suspended_at else 0
    return f"{JOB_STATE}:{format_run_name(record)}:{record.state}:since:{at}"


def _digest_allocation(record: JobRecord) -> str:
    """Return a digest of a running job's allocation, which can be resized."""
    if record.state != "RUNNING":
        return ""
    text = f"{record.nodelist}\0{record.tres_allocated}"
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _digest_record(record: JobRecord) -> str:
    """Return a digest of a record's static facts."""
    facts = [getattr(record, field) for field in _REPORTED_FIELDS]
    # The remaining tasks of an array ("3-9%2") change without a user; a task's index does not.
    facts.append(record.array_task if record.array_task.isdigit() else "")
    if record.reason in _HELD_REASONS:
        # A hold was set; its release makes the job chargeable.
        facts.append("held")
    return _digest_facts(facts)


def _digest_facts(facts: Sequence[object]) -> str:
    """Return a digest of facts."""
    return hashlib.blake2b(msgspec.msgpack.encode(facts), digest_size=8).hexdigest()


def _extract_request(record: JobRecord) -> tuple[object, ...]:
    """Return the request of a pending job; empty for other states."""
    if record.state not in WAITING:
        return ()
    # An administrator can change the TRES weights of all jobs at once.
    tres, _, weighted = record.tres_requested.partition("billing=")
    at_once = record.array_task.partition("%")[2]
    return (tres, weighted.lstrip("0123456789."), at_once, *_get_requested(record))
