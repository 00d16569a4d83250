"""Takes over what others' books hold: slurmdbd's, a file that sacct wrote, another's job log."""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Any, Final, Protocol

import msgspec

from steward.accounting.errors import AccountingError
from steward.accounting.job_log import PassedOver, job_log
from steward.core.consumers import Append
from steward.core.events import JOB_END, STEP_ACCOUNTED, Event, JobFacts, utc_now
from steward.core.records import JobRecord, Line
from steward.core.timestamps import micros, moment
from steward.core.usage import StepAccounted
from steward.jobs.run_merge import IMPORTED
from steward.slurm.job_states import FINISHED, base_state
from steward.slurm.sacct import NAMED, Row, job_from_row, rows_of_file, step_from_row
from steward.slurm.users import People

_MOST: Final = 64


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """An import that was cut short, or is over.

    Attributes:
        name: What was imported, and from when on.
        done: How far it is: of slurmdbd the day, ``2026-11-20``; of a file its bytes or lines.
    """

    name: str
    done: str


def places_path(state_dir: str) -> str:
    """The file that keeps them."""
    return f"{state_dir}/imports.json"


def load_place(path: str, name: str) -> str:
    """How far an import of this name has come; "" if it has not begun.

    Raises:
        AccountingError: The file cannot be read.
    """
    return next((place.done for place in _all(path) if place.name == name), "")


def save_place(path: str, place: Place) -> None:
    """Note how far an import has come; of those that are longest ago, some are forgotten.

    Raises:
        AccountingError: The file cannot be written.
    """
    others = [other for other in _all(path) if other.name != place.name]
    data = msgspec.json.encode([*others, place][-_MOST:])
    try:
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(f"{path}.new", path)
    except OSError as error:
        raise AccountingError(f"{path} cannot be written: {error.strerror}", path) from error


def _all(path: str) -> list[Place]:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=list[Place])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise AccountingError(
            f"{path} cannot be read: {error}; without it imports begin anew, which does no harm",
            path,
        ) from error


_ENDS: Final = FINISHED | {"REQUEUED", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED"}
# A requeue makes its time the end of one run and the submit time of the next.
_SAME_SUBMIT: Final = timedelta(seconds=2)
_MOST_REMEMBERED: Final = 200_000


class _Last(msgspec.Struct, frozen=True):
    """The run of a job id that was told of last."""

    submit: datetime
    end: datetime | None
    uid: int | None
    restarts: int
    state: str


class RunCounter:
    """Counts the runs of jobs, told in the order of time: sacct shows restarts since 23.02 only."""

    def __init__(self) -> None:
        self._last: dict[int, _Last] = {}

    def counted(self, record: JobRecord) -> JobRecord:
        """The record of a run, with its restart count."""
        submit = record.submit
        if submit is None:
            return record
        last = self._last.get(record.job_id)
        restarts = record.restarts
        if not restarts and last is not None and last.uid == record.uid:
            if submit == last.submit:
                restarts = last.restarts
            elif submit > last.submit and (
                last.state == "REQUEUED"
                or (last.end is not None and abs(submit - last.end) <= _SAME_SUBMIT)
            ):
                restarts = last.restarts + 1
        if len(self._last) >= _MOST_REMEMBERED:
            # The newer half holds the jobs that are likely to have more records.
            for job_id in list(self._last)[: _MOST_REMEMBERED // 2]:
                del self._last[job_id]
        self._last.pop(record.job_id, None)
        state = base_state(record.state)
        self._last[record.job_id] = _Last(submit, record.end, record.uid, restarts, state)
        return msgspec.structs.replace(record, restarts=restarts)


class Maker:
    """Makes events of records and lines, in the order in which books tell of them.

    Args:
        cluster: The cluster whose jobs these are.
        redact: Takes secrets out of a record.
        now: The clock.
    """

    def __init__(
        self,
        cluster: str,
        redact: Callable[[JobRecord], JobRecord],
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._cluster = cluster
        self._redact = redact
        self._now = now
        self._runs = RunCounter()

    def run(self, record: JobRecord) -> Event | None:
        """The event of a run; None of one that is not over, which its own cluster tells of."""
        submit, end = record.submit, record.end
        if submit is None or end is None or base_state(record.state) not in _ENDS:
            return None
        record = self._redact(self._runs.counted(record))
        submit_s = micros(submit) // 1_000_000
        key = f"accounted:{record.job_id}:{submit_s}:{record.restarts}"
        return self._event(JOB_END, key, end, JobFacts(record=record))

    def step(self, record: JobRecord, line: Line) -> Event | None:
        """The event of a step of that run."""
        if record.submit is None or record.end is None:
            return None
        submit_s = micros(record.submit) // 1_000_000
        private = self._redact(
            JobRecord(job_id=record.job_id, name=line.name, submit_line=line.submit_line)
        )
        line = msgspec.structs.replace(line, name=private.name, submit_line=private.submit_line)
        body = StepAccounted(job_id=record.job_id, submit=record.submit, line=line)
        key = f"accounted:{record.job_id}.{line.step}:{submit_s}"
        return self._event(STEP_ACCOUNTED, key, record.end, body)

    def _event(self, kind: str, key: str, at: datetime, body: msgspec.Struct) -> Event:
        return Event(
            kind=kind,
            cluster=self._cluster,
            key=key,
            at=at,
            seen_at=self._now(),
            source=IMPORTED,
            body=body,
        )


_EVENTS_AT_ONCE: Final = 500
_DAY: Final = timedelta(days=1)

Report = Callable[[int, int | None, str], None]
"""Told how much is done, of how much (None where nobody knows), and of what."""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What an import did.

    Attributes:
        jobs: Runs of jobs that were taken over, or were before.
        steps: Their steps.
        passed_over: Rows that are none, or tell too little.
        unfinished: Jobs that are not over, which are told of where they run.
        went_on: Where it went on, if it was cut short before: a day, or bytes; "" if not.
    """

    jobs: int = 0
    steps: int = 0
    passed_over: int = 0
    unfinished: int = 0
    went_on: str = ""


class Books(Protocol):
    """Who is asked of a time: ``steward.slurm.sacct.History`` is one."""

    passed_over: int

    def rows(self, since: datetime, until: datetime) -> Iterable[Row]:
        """All that is known of it."""
        ...


class _Work:
    """What was read, and what was not appended yet."""

    def __init__(self, maker: Maker, people: People, append: Append, zone: tzinfo) -> None:
        self._maker = maker
        self._people = people
        self._append = append
        self._zone = zone
        self._events: list[Event] = []
        self._job: JobRecord | None = None
        self._is_over = False
        self.jobs = 0
        self.steps = 0
        self.passed_over = 0
        self.unfinished = 0

    def row(self, row: Row, cluster: str) -> None:
        """A row: a step's is behind its job's."""
        named = NAMED.fullmatch(row.get("jobid") or row.get("jobidraw", ""))
        if named is not None and named[5] is not None:
            line = (
                step_from_row(row, self._job, cluster, self._zone)
                if self._job is not None
                else None
            )
            self._step(line, row)
            return
        record = job_from_row(row, self._people, self._zone)
        if record is None:
            self._job = None
            self.passed_over += 1
        else:
            self.run(record)

    def run(self, record: JobRecord) -> None:
        """A run, whose steps follow."""
        self._job = record
        event = self._maker.run(record)
        self._is_over = event is not None
        if event is None:
            self.unfinished += 1
        else:
            self.jobs += 1
            self._events.append(event)

    def _step(self, line: Line | None, row: Row) -> None:
        job = self._job
        raw = row.get("jobidraw", "").partition(".")[0]
        if job is None or line is None or (raw and raw != str(job.job_id)):
            self.passed_over += 1
        elif self._is_over:
            self.step(line)

    def step(self, line: Line) -> None:
        """A step of the run that was told of last."""
        if self._job is not None and self._is_over:
            event = self._maker.step(self._job, line)
            if event is not None:
                self.steps += 1
                self._events.append(event)

    def flush(self, *, least: int = 1) -> bool:
        """Append what was made, if it is so much; returns whether it was."""
        if len(self._events) < least:
            return False
        self._append(self._events)
        self._events = []
        return True

    def taken(self, went_on: str) -> Taken:
        """What was done."""
        return Taken(
            jobs=self.jobs,
            steps=self.steps,
            passed_over=self.passed_over,
            unfinished=self.unfinished,
            went_on=went_on,
        )


def take_days(
    books: Books,
    cluster: str,
    since: datetime,
    until: datetime,
    maker: Maker,
    people: People,
    append: Append,
    places: str,
    report: Report,
) -> Taken:
    """Take over slurmdbd's history of a time, a day a question.

    Args:
        books: Who is asked.
        cluster: The cluster whose jobs these are.
        since: Beginning of the time.
        until: Its end.
        maker: Makes events.
        people: Who looks names up.
        append: Appends events to the journal.
        places: The file that keeps how far imports have come.
        report: Told of days.

    Raises:
        SlurmError: slurmdbd does not answer.
        Unavailable: Nothing can be written.
    """
    name = f"slurmdbd {cluster} {since.isoformat()}"
    done = load_place(places, name)
    # The last day again: a job that was requeued at its end goes on in the next.
    began = max(since, _begin(date.fromisoformat(done))) if done else since
    work = _Work(maker, people, append, UTC)
    total = max(1, -(-(until - since) // _DAY))
    while began < until:
        ends = min(until, _begin(began.date() + _DAY))
        for row in books.rows(began, ends):
            work.row(row, cluster)
            work.flush(least=_EVENTS_AT_ONCE)
        work.flush()
        if ends < until:
            save_place(places, Place(name=name, done=began.date().isoformat()))
        report(min(total, (ends - since) // _DAY), total, f"days, {work.jobs} jobs")
        began = ends
    # It is over: the same time asked for again is asked again, which does no harm.
    save_place(places, Place(name=name, done=""))
    work.passed_over += books.passed_over
    return work.taken(done)


def take_table(
    path: str,
    cluster: str,
    maker: Maker,
    people: People,
    append: Append,
    places: str,
    report: Report,
    *,
    zone: tzinfo = UTC,
    delimiter: str = "|",
    times: tuple[datetime | None, datetime | None] = (None, None),
) -> Taken:
    """Take over a file that ``sacct -P`` wrote.

    Args:
        path: The file.
        cluster: The cluster whose jobs these are.
        maker: Makes events.
        people: Who looks names up.
        append: Appends events to the journal.
        places: The file that keeps how far imports have come.
        report: Told of bytes.
        zone: What the times in it are in.
        delimiter: What stands between columns.
        times: Only jobs that ended from the first on, and before the second.

    Raises:
        AccountingError: The file cannot be read.
        SlurmError: It is no output of sacct.
        Unavailable: Nothing can be written.
    """
    work = _Work(maker, people, append, zone)
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            name = f"file {cluster} {path} {status.st_size} {status.st_mtime_ns}"
            done = load_place(places, name)
            is_wanted = False
            before = 0
            for row, place in rows_of_file(file, delimiter):
                if row is None:
                    work.passed_over += 1
                    continue
                is_job = "." not in (row.get("jobid") or row.get("jobidraw", ""))
                if is_job:
                    if work.flush(least=_EVENTS_AT_ONCE):
                        save_place(places, Place(name=name, done=str(before)))
                    report(place, status.st_size, "bytes")
                    is_wanted = place > int(done or 0) and _is_within(row, zone, times)
                if is_wanted:
                    work.row(row, cluster)
                before = place
            work.flush()
            save_place(places, Place(name=name, done=""))
    except OSError as error:
        raise AccountingError(f"{path} cannot be read: {error.strerror}", path) from error
    return work.taken(done)


def take_log(
    path: str,
    cluster: str,
    maker: Maker,
    append: Append,
    report: Report,
    *,
    times: tuple[datetime | None, datetime | None] = (None, None),
) -> Taken:
    """Take over another Steward's job log.

    Args:
        path: Its directory, or a day of it.
        cluster: The cluster whose jobs these are; lines of others are passed over.
        maker: Makes events.
        append: Appends events to the journal.
        report: Told of lines.
        times: Only jobs that ended from the first on, and before the second.

    Raises:
        AccountingError: It cannot be read.
        Unavailable: Nothing can be written.
    """
    work = _Work(maker, People(), append, UTC)
    garbled = 0

    def passed_over(_path: str, _number: int, _why: str) -> None:
        nonlocal garbled
        garbled += 1

    is_wanted = False
    for number, line in enumerate(_lines(path, passed_over), start=1):
        if line.step == "":
            work.flush(least=_EVENTS_AT_ONCE)
            report(number, None, "lines")
            ended = moment(line.end_us) if line.end_us else None
            is_wanted = line.cluster == cluster and not line.piece_us and _in_time(ended, times)
            if is_wanted:
                work.run(_record(line))
        elif is_wanted:
            work.step(msgspec.structs.replace(line, source="slurmdbd"))
    work.flush()
    work.passed_over += garbled
    return work.taken("")


def is_table(path: str) -> bool:
    """Whether a file begins as sacct's output does; a directory and a JSON line do not.

    Raises:
        AccountingError: It cannot be read.
    """
    try:
        if stat.S_ISDIR(os.stat(path).st_mode) or path.endswith((".zst", ".parquet")):
            return False
        with open(path, "rb") as file:
            return not file.read(64).lstrip().startswith(b"{")
    except OSError as error:
        raise AccountingError(f"{path} cannot be read: {error.strerror}", path) from error


def _lines(path: str, passed_over: PassedOver) -> Iterator[Line]:
    yield from job_log().read_lines(path, passed_over)


def _begin(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


def _is_within(row: Row, zone: tzinfo, times: tuple[datetime | None, datetime | None]) -> bool:
    if times == (None, None):
        return True
    record = job_from_row(row, People(), zone)
    return record is not None and _in_time(record.end, times)


def _in_time(end: datetime | None, times: tuple[datetime | None, datetime | None]) -> bool:
    since, until = times
    if end is None:
        return False
    return (since is None or end >= since) and (until is None or end < until)


_OF_RECORD: Final = frozenset(JobRecord.__struct_fields__)
_SAME: Final = tuple(
    field
    for field in Line.__struct_fields__
    if field in _OF_RECORD and not field.endswith("_us") and field != "job_id"
)
"""What a line of a run calls as a record does."""


def _record(line: Line) -> JobRecord:
    fields: dict[str, Any] = {field: getattr(line, field) for field in _SAME}
    for name in ("submit", "eligible", "start", "end"):
        value_us = getattr(line, f"{name}_us")
        fields[name] = moment(value_us) if value_us else None
    return JobRecord(job_id=line.job_id, job_flags=line.flags, **fields)


__all__ = [
    "Maker",
    "Place",
    "Report",
    "RunCounter",
    "Taken",
    "is_table",
    "places_path",
    "take_days",
    "take_log",
    "take_table",
]
