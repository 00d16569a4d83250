"""What Slurm has shown so far, and the events that follow when it shows something else.

Keys are made of what Slurm shows, so a source that has forgotten everything
repeats itself harmlessly. What is remembered of a job is small: a queue may
hold a hundred thousand.
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
from steward.slurm import FINISHED, covers
from steward.slurm.job_states import FORGOTTEN, LOST, RESIZING, WAITING

SOURCE: Final = "snapshot"

# What a submission or an administrator sets. What the scheduler changes by itself (times,
# nodes, dependencies that are met, the tasks that an array has left) makes no news.
_STATIC: Final = (
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
# What a job that waits asks for, too: once it runs, this is what the scheduler gave it.
_requested: Final = attrgetter(
    *("cpus", "nodes", "tasks", "min_memory_mib", "licenses"),
    *("tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task"),
)
_HELD: Final = frozenset({"JobHeldUser", "JobHeldAdmin"})
_MOST_WANTED: Final = 20_000
_MOST_TOLD: Final = 32


class _Run:
    """What is remembered of the latest run of a job id."""

    __slots__ = (
        *("allocation", "digest", "is_whole", "last", "name", "over", "request", "state"),
        *("is_remembered", "is_told", "states", "suspended_at", "told", "wants"),
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.digest = ""
        self.request = 0
        self.state = ""
        self.states: tuple[str, ...] = ()
        self.allocation = ""
        self.is_whole = False
        self.over = False
        self.last = b""
        self.is_remembered = False
        self.is_told = False
        self.told: tuple[str, ...] = ()
        self.suspended_at: datetime | None = None
        self.wants = False

    def news_key(self, key: str, asked: tuple[object, ...], taken_at: datetime) -> str:
        """The key of what a run has become: one of its own where it was so before.

        Args:
            key: The key of one that was first seen so.
            asked: Its present requests, see :func:`_request`.
            taken_at: When that was seen, UTC.
        """
        former = key.rpartition(":")[0] + f":{self.digest}"
        if self.request and asked and self.request != hash(asked):
            key += f":{_hashed(asked)}"
        if self.is_remembered or key in self.told or len(self.told) > _MOST_TOLD:
            return f"{key}:{int(taken_at.timestamp())}"
        self.told += (former, key)
        return key


class Observed:
    """The memory of one cluster's snapshots.

    Args:
        cluster: Its name in events.
    """

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._runs: dict[int, _Run] = {}
        self._wanted: deque[int] = deque(maxlen=_MOST_WANTED)
        self._again: deque[int] = deque(maxlen=_MOST_WANTED)

    def __contains__(self, job_id: object) -> bool:
        """Whether Slurm has shown a run of this id that is not over."""
        run = self._runs.get(job_id) if isinstance(job_id, int) else None
        return run is not None and not run.over

    def remember(self, records: Iterable[JobRecord]) -> None:
        """Take over what an earlier process was shown: runs that were not over then.

        What becomes of them is said as if this process had seen them, and what had
        happened already (a job that runs has begun to) is not said under the same key.
        """
        for record in records:
            if record.state in FINISHED or record.submit is None:
                continue
            run = self._runs[record.job_id] = _Run(run_name(record))
            run.digest, run.state = _digest(record), record.state
            run.request = hash(_request(record) or 0)
            begun = ("RUNNING",) if record.start else ()
            run.states = tuple({record.state, *begun})
            run.allocation = _allocation(record)
            run.is_whole = run.is_remembered = True
            run.suspended_at = record.suspended_at
            run.last = msgspec.msgpack.encode(record)

    def take(
        self, records: Iterable[JobRecord], taken_at: datetime, *, whole: bool = False
    ) -> list[Event]:
        """Remember what Slurm shows; the events that say what is new in it.

        Args:
            records: What it shows.
            taken_at: When, UTC.
            whole: Whether these are whole records.
        """
        events: list[Event] = []
        for record in records:
            if not self._is_ahead(record):
                self._take(record, taken_at, whole, events)
        return events

    def wanted(self) -> int | None:
        """The newest job whose whole record has not been taken; None if there is none.

        Of an array only its own record counts: its tasks were submitted with it.
        """
        while self._wanted:
            run = self._runs.get(self._wanted[-1])
            if run is not None and not run.is_whole:
                return self._wanted[-1]
            self._wanted.pop()
        return None

    def pass_over(self, job_id: int) -> None:
        """Want the whole record of a job no more: Slurm was asked for it."""
        if self._wanted and self._wanted[-1] == job_id:
            self._wanted.pop()

    def ended(self, record: JobRecord) -> None:
        """Hear from another source that a run is over: it is not lost when it goes.

        Its whole record is wanted while slurmctld still has it.
        """
        if record.state not in FINISHED:
            return
        run = self._runs.get(record.job_id)
        if run is None:
            # It came and ended between two looks.
            run = self._runs[record.job_id] = _Run(run_name(record))
            run.last = msgspec.msgpack.encode(record)
        if run.name == run_name(record):
            run.is_told = True
            if not run.over:
                self._want_again(record.job_id, run)

    def wanted_again(self) -> int | None:
        """The job whose whole record is wanted once more, the latest first; None for none.

        What changes at an end or at a suspension stands there alone.
        """
        while self._again:
            run = self._runs.get(self._again[-1])
            if run is not None and run.wants:
                return self._again[-1]
            self._again.pop()
        return None

    def pass_over_again(self, job_id: int) -> None:
        """Want it no more: Slurm was asked for it."""
        run = self._runs.get(job_id)
        if run is not None:
            run.wants = False

    def _want_again(self, job_id: int, run: _Run) -> None:
        if not run.wants:
            run.wants = True
            self._again.append(job_id)

    def absent(self, present: Container[int]) -> tuple[list[int], list[int]]:
        """Forget the finished jobs that Slurm does not hold any more, and name the others.

        Args:
            present: The raw ids that its queue shows.

        Returns:
            The jobs that are gone without an end that we have seen, and the array tasks
            that may be pending again, folded into their array's row.
        """
        gone = [job_id for job_id in self._runs if job_id not in present]
        lost, folded = [], []
        for job_id in gone:
            run = self._runs[job_id]
            if run.over or run.is_told:
                del self._runs[job_id]
            elif not self._is_folded(job_id, present):
                lost.append(job_id)
            elif run.state != "PENDING":
                folded.append(job_id)
        return lost, folded

    def _is_folded(self, job_id: int, present: Container[int]) -> bool:
        """Whether a task is among those that its array's row says are left."""
        task = self.last(job_id)
        array = task.array_job_id
        if array in (0, job_id) or array not in present or array not in self:
            return False
        row = self.last(array)
        return (
            row.state == "PENDING"
            and task.array_task.isdigit()
            and not row.array_task.isdigit()
            and covers(row.array_task, int(task.array_task))
        )

    def last(self, job_id: int) -> JobRecord:
        """The last record of a run that is not over."""
        return msgspec.msgpack.decode(self._runs[job_id].last, type=JobRecord)

    def lose(self, job_id: int, taken_at: datetime, told: Sequence[JobRecord] = ()) -> list[Event]:
        """Forget a run that went without an end.

        Args:
            job_id: Its raw id.
            taken_at: When it was found to be gone, UTC.
            told: What slurmdbd knows of this job id.

        Returns:
            Its former sizes and its end as slurmdbd tells them, else an end with the state
            ``UNKNOWN`` and no time.
        """
        last, run = self.last(job_id), self._runs.pop(job_id)
        rows = [row for row in told if row.job_id == job_id and run_name(row) == run.name]
        if any(row.state in FINISHED for row in rows):
            return [
                self._event(JOB_END, end_key(row), row, taken_at, source="sacct")
                for row in rows
                if row.state == RESIZING or row.state in FINISHED
            ]
        record = msgspec.structs.replace(
            last, state=LOST, reason="", end=None, exit_code=None, exit_signal=None
        )
        return [self._event(JOB_END, end_key(record), record, taken_at)]

    def clear(self) -> None:
        """Forget everything: all of it will be said again, under the same keys."""
        self._runs.clear()
        self._wanted.clear()
        self._again.clear()

    def _take(
        self, record: JobRecord, taken_at: datetime, whole: bool, events: list[Event]
    ) -> None:
        name, digest = run_name(record), _digest(record)
        run = self._runs.get(record.job_id)
        is_new = run is None or run.name != name
        if run is not None:
            events += self._replaced(run, record, taken_at)
        if run is None or run.name != name:
            run = self._runs[record.job_id] = _Run(name)
            if not whole and record.array_job_id in (0, record.job_id):
                self._wanted.append(record.job_id)
        asked = _request(record)
        request = hash(asked) if asked else run.request
        is_other = run.digest != "" and (digest != run.digest or run.request not in (0, request))
        is_seen = is_other or not run.digest or (whole and not run.is_whole)
        if is_seen:
            key = f"{JOB_SEEN}:{name}:{digest}"
            if is_other:
                key = run.news_key(key, asked, taken_at)
            key += ":whole" if whole else ""
            events.append(self._event(JOB_SEEN, key, record, taken_at, whole=whole))
        is_news = record.state != run.state
        if record.state in FINISHED:
            if not run.over or is_news:
                events.append(self._event(JOB_END, end_key(record), record, taken_at, whole=whole))
            elif whole and run.wants and not is_seen:
                # Its end was told already, by the few columns of the queue.
                key = f"{end_key(record)}:whole"
                events.append(self._event(JOB_END, key, record, taken_at, whole=True))
        else:
            key = _state_key(record, run, is_new, taken_at)
            if whole and record.suspended_at not in (None, run.suspended_at):
                key = _since_key(record)
            if key:
                events.append(self._event(JOB_STATE, key, record, taken_at, whole=whole))
        self._note(run, record, is_news=is_news, whole=whole)
        run.digest = digest
        run.request = request
        run.is_whole |= whole
        run.state = record.state
        if record.state not in run.states:
            run.states += (record.state,)
        run.allocation = _allocation(record)
        run.over = record.state in FINISHED
        run.last = b"" if run.over else msgspec.msgpack.encode(record)

    def _replaced(self, run: _Run, record: JobRecord, taken_at: datetime) -> list[Event]:
        """The end of a run whose id Slurm now shows for another job, or for an earlier run."""
        if self._is_of_another(run, record):
            return self.lose(record.job_id, taken_at)
        if self._is_forgotten(run, record):
            return [self._forgotten(record.job_id, taken_at)]
        return []

    def _is_ahead(self, record: JobRecord) -> bool:
        """Whether a record is of a run that is being requeued, and not of the next one yet.

        While such a job completes, Slurm shows the next run's count with the times of the one
        that was. A slurmctld that is killed then may forget the requeue: the next run never was.
        """
        if record.state != "COMPLETING" or not record.restarts or record.job_id not in self._runs:
            return False
        before = msgspec.structs.replace(record, restarts=record.restarts - 1)
        return self._runs[record.job_id].name == run_name(before)

    def _is_of_another(self, run: _Run, record: JobRecord) -> bool:
        """Whether the id of a run that is not over was given to another job since.

        A slurmctld that crashes forgets what it had not saved, the last id with it.
        """
        if run.over or run.is_told or record.restarts or record.submit is None:
            return False
        former = self.last(record.job_id).submit
        return former is not None and former < record.submit

    def _is_forgotten(self, run: _Run, record: JobRecord) -> bool:
        """Whether Slurm shows an earlier run than before: it does not know the later one.

        A slurmctld that crashes begins again with what it saved seconds before.
        """
        if run.over or run.is_told or record.submit is None:
            return False
        later = self.last(record.job_id).submit
        return later is not None and later > record.submit

    def _forgotten(self, job_id: int, taken_at: datetime) -> Event:
        last = self.last(job_id)
        record = msgspec.structs.replace(last, state=LOST, reason=FORGOTTEN, end=None)
        return self._event(JOB_END, f"{end_key(record)}:forgotten", record, taken_at)

    def _note(self, run: _Run, record: JobRecord, *, is_news: bool, whole: bool) -> None:
        """Remember what the whole record said, or that it is wanted again."""
        if whole:
            run.wants = False
            run.suspended_at = record.suspended_at
        elif is_news and (
            record.state in FINISHED
            or record.state == "SUSPENDED"
            or (record.state == "RUNNING" and run.state == "SUSPENDED")
        ):
            self._want_again(record.job_id, run)

    def _event(
        self,
        kind: str,
        key: str,
        record: JobRecord,
        taken_at: datetime,
        *,
        whole: bool = False,
        source: str = SOURCE,
    ) -> Event:
        happened = {
            JOB_SEEN: record.submit,
            JOB_STATE: record.suspended_at or (record.start if record.state == "RUNNING" else None),
            JOB_END: record.end,
        }
        return Event(
            kind=kind,
            cluster=self._cluster,
            key=key,
            at=happened[kind] or taken_at,
            seen_at=taken_at,
            source=source,
            body=JobFacts(record=record, whole=whole),
        )


def run_name(record: JobRecord) -> str:
    """What tells a run from all others of its cluster, in keys of events."""
    submit = int(record.submit.timestamp()) if record.submit else 0
    return f"{record.job_id}:{submit}:{record.restarts}"


def end_key(record: JobRecord) -> str:
    """The key of the event that says that a run ended so, and then."""
    end = int(record.end.timestamp()) if record.end else 0
    return f"{JOB_END}:{run_name(record)}:{record.state}:{end}"


def _state_key(record: JobRecord, run: _Run, is_new: bool, taken_at: datetime) -> str:
    """Key of the job.state that follows; "" if nothing does."""
    key = f"{JOB_STATE}:{run.name}:{record.state}"
    if is_new:
        # job.seen tells this one; any other state may have come while nobody looked.
        return "" if record.state == "PENDING" and record.restarts == 0 else key
    if record.state != run.state:
        # Running again after a suspension is another fact than running first.
        again = record.state in run.states
        return f"{key}:{int(taken_at.timestamp())}" if again else key
    allocation = _allocation(record)
    return f"{key}:{allocation}" if allocation != run.allocation else ""


def _since_key(record: JobRecord) -> str:
    """Key of a job.state that tells since when a job is suspended, or runs again."""
    at = int(record.suspended_at.timestamp()) if record.suspended_at else 0
    return f"{JOB_STATE}:{run_name(record)}:{record.state}:since:{at}"


def _allocation(record: JobRecord) -> str:
    """Digest of what a running job holds: it can be resized."""
    if record.state != "RUNNING":
        return ""
    text = f"{record.nodelist}\0{record.tres_allocated}"
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _digest(record: JobRecord) -> str:
    facts = [getattr(record, field) for field in _STATIC]
    # The tasks that an array has left ("3-9%2") change by themselves; a task's index does not.
    facts.append(record.array_task if record.array_task.isdigit() else "")
    if record.reason in _HELD:
        # Somebody keeps it from starting; whoever lets it go makes it cost something.
        facts.append("held")
    return _hashed(facts)


def _hashed(facts: Sequence[object]) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(facts), digest_size=8).hexdigest()


def _request(record: JobRecord) -> tuple[object, ...]:
    """What a job that waits asks for; nothing of any other."""
    if record.state not in WAITING:
        return ()
    # An administrator changes the weights of all jobs at once.
    tres, _, weighted = record.tres_requested.partition("billing=")
    at_once = record.array_task.partition("%")[2]
    return (tres, weighted.lstrip("0123456789."), at_once, *_requested(record))
