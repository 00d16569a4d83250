"""Job log records: one JSON object on each line, with the id of the event it comes from.

:func:`encode_log_lines` encodes events as lines; :data:`decode_record` and :data:`decode_head`
decode them. :class:`RunRecords` merges a run's records into the lines that sacct shows.

A record holds the data of its event. One with ``correction`` replaces an earlier record of its run;
one with ``withdrawn`` removes it. Readers apply both.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import msgspec

from steward.core.events import RUN_END, RUN_START, RUN_SUSPEND, STEP_ACCOUNTED, STEP_USAGE, Event
from steward.core.records import JobRecord, UsageLine
from steward.core.timestamps import from_micros, to_micros
from steward.core.usage import AccountedStep, RunEvent, StepEnd, StepStart, StepUsage, TaskUsage
from steward.jobs.lines import rank_step
from steward.jobs.usage import add_steps, adopt_step_line, build_run_line, build_step_line
from steward.slurm.job_states import strip_state_suffix

RECORD_VERSION: Final = 1
"""Version of the record format; new versions only add fields."""


class JobLogRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="record"
):
    """Fields that every record has.

    Attributes:
        v: Version of the record format.
        event: Id of the event, ``CLUSTER/KEY``; duplicates of one event share it.
        cluster: The cluster's name.
        job_id: The raw job id.
        submit: Submit time of this run; identifies it together with cluster, job_id and restarts.
        restarts: How often the job had been requeued.
        first_submit: With cluster and job_id, the job's identity, as it was known then.
        at: Time of the event, UTC.
    """

    v: int
    event: str
    cluster: str
    job_id: int
    submit: datetime
    restarts: int
    first_submit: datetime
    at: datetime


class JobStart(JobLogRecord, frozen=True, kw_only=True, omit_defaults=True, tag="JOB_START"):
    """Start of a run."""

    job: JobRecord
    correction: bool = False
    source: str = ""


class JobSuspend(JobLogRecord, frozen=True, kw_only=True, omit_defaults=True, tag="JOB_SUSPEND"):
    """Suspension or resumption of a run, as ``job.state`` says."""

    job: JobRecord
    correction: bool = False
    source: str = ""


class JobTerminated(
    JobLogRecord, frozen=True, kw_only=True, omit_defaults=True, tag="JOB_TERMINATED"
):
    """End of a run; with ``piece_end``, of a former size of a resized job."""

    job: JobRecord
    piece_end: datetime | None = None
    correction: bool = False
    source: str = ""


class JobStep(JobLogRecord, frozen=True, kw_only=True, omit_defaults=True, tag="JOB_STEP"):
    """End of a step on a node; its tasks follow as records of their own.

    Attributes:
        step: Step name, as Slurm writes it behind the dot.
        node: NodeName.
        launched_us: Launch time, µs since the epoch.
        ended_us: End on this node, µs; None where that was lost.
        start: Report of the node at the start.
        end: Report of the node at the end.
        tasks: Number of known tasks.
        correction: Whether it replaces an earlier record of this launch.
        withdrawn: Whether the launch turned out to belong to another run: its earlier record
            and its tasks are void, and this record holds nothing else.
    """

    step: str
    node: str
    launched_us: int
    ended_us: int | None = None
    start: StepStart | None = None
    end: StepEnd | None = None
    tasks: int = 0
    correction: bool = False
    withdrawn: bool = False


class JobTask(JobLogRecord, frozen=True, kw_only=True, omit_defaults=True, tag="JOB_TASK"):
    """End of one task of a step."""

    step: str
    node: str
    launched_us: int
    task: TaskUsage


class JobAccounted(
    JobLogRecord, frozen=True, kw_only=True, omit_defaults=True, tag="JOB_ACCOUNTED"
):
    """Step as imported from other accounting records; Steward's own records take precedence."""

    line: UsageLine


AnyJobLogRecord = JobStart | JobSuspend | JobTerminated | JobStep | JobTask | JobAccounted
"""Any line of the log."""


class RecordHead(msgspec.Struct, frozen=True):
    """Fields that identify a record's run, for a reader that only scans lines."""

    record: str
    cluster: str
    job_id: int
    submit: datetime
    restarts: int
    at: datetime


_encode = msgspec.json.Encoder().encode
decode_record = msgspec.json.Decoder(AnyJobLogRecord).decode
"""Decode a line into a record; raises ``msgspec.MsgspecError``."""

decode_head = msgspec.json.Decoder(RecordHead).decode
"""Decode the head of a line's record; raises ``msgspec.MsgspecError``."""


def run_submit_time(body: RunEvent | StepUsage | AccountedStep) -> datetime:
    """Return the run's own submit time in whole seconds, as Slurm has it."""
    if isinstance(body, RunEvent):
        submit = body.record.submit or body.first_submit
    elif isinstance(body, StepUsage):
        submit = body.submit or body.first_submit
    else:
        submit = body.submit
    return submit.replace(microsecond=0)


def encode_log_lines(event: Event) -> bytes:
    """Encode a run's event as lines of the log, each with its newline."""
    return b"".join(_encode(record) + b"\n" for record in _convert_event(event))


def _convert_event(event: Event) -> Iterator[JobLogRecord]:
    """Yield the records of an event."""
    body = event.body
    head: dict[str, Any] = {
        "v": RECORD_VERSION,
        "event": f"{event.cluster}/{event.key}",
        "cluster": event.cluster,
        "job_id": body.job_id,
        "submit": run_submit_time(body),
        "at": event.at,
    }
    if isinstance(body, AccountedStep):
        yield JobAccounted(**head, restarts=0, first_submit=body.submit, line=body.line)
        return
    head |= {"restarts": body.restarts, "first_submit": body.first_submit}
    if isinstance(body, StepUsage):
        yield from _step_records(head, body)
    else:
        yield _run_record(head, event.kind, body)


def _run_record(head: dict[str, Any], kind: str, run_event: RunEvent) -> JobLogRecord:
    """Build the record of a run's start, suspension or end."""
    fields = {
        **head,
        "job": run_event.record,
        "correction": run_event.correction,
        "source": run_event.source,
    }
    if kind == RUN_END:
        return JobTerminated(**fields, piece_end=run_event.piece_end)
    return {RUN_START: JobStart, RUN_SUSPEND: JobSuspend}[kind](**fields)


def _step_records(head: dict[str, Any], usage: StepUsage) -> Iterator[JobLogRecord]:
    """Yield the record of a step on a node, then those of its tasks."""
    launch: dict[str, Any] = {
        "step": usage.step,
        "node": usage.node,
        "launched_us": usage.launched_us,
    }
    yield JobStep(
        **head,
        **launch,
        ended_us=usage.ended_us,
        start=usage.start,
        end=usage.end,
        tasks=len(usage.tasks),
        correction=usage.correction,
        withdrawn=usage.withdrawn,
    )
    for task in usage.tasks:
        task_head: dict[str, Any] = {**head, "event": f"{head['event']}#{task.task}"}
        yield JobTask(**task_head, **launch, task=task)


LOG_EVENT_KINDS: Final = frozenset({RUN_START, RUN_SUSPEND, RUN_END, STEP_USAGE, STEP_ACCOUNTED})
"""Kinds of events that the log is made of."""


_Launch = tuple[str, str, int]
"""Launch of a step: step, node, launch time (µs)."""


class RunRecords:
    """Merged records of one run; of two records for the same thing, the later one counts."""

    def __init__(self) -> None:
        self._run_record: JobTerminated | JobStart | JobSuspend | None = None
        self._pieces: dict[datetime, JobTerminated] = {}
        self._launches: dict[_Launch, JobStep] = {}
        self._tasks: dict[_Launch, dict[int, TaskUsage]] = {}
        self._imported_steps: dict[str, JobAccounted] = {}

    def add_record(self, record: AnyJobLogRecord) -> None:
        """Add the next record of the run."""
        if isinstance(record, JobTask):
            launch_tasks = self._tasks.setdefault(_launch_key(record), {})
            launch_tasks[record.task.task] = record.task
        elif isinstance(record, JobStep) and record.withdrawn:
            self._launches.pop(_launch_key(record), None)
            self._tasks.pop(_launch_key(record), None)
        elif isinstance(record, JobStep):
            self._launches[_launch_key(record)] = record
        elif isinstance(record, JobAccounted):
            self._imported_steps[record.line.step] = record
        elif isinstance(record, JobTerminated) and record.piece_end is not None:
            self._pieces[record.piece_end] = record
        elif isinstance(record, JobTerminated) or not isinstance(self._run_record, JobTerminated):
            # A record of the start, however late it comes, does not replace the end.
            self._run_record = record

    def build_lines(self, *, is_latest: bool) -> Iterator[UsageLine]:
        """Yield lines of the run's former sizes, then of the run, each before its steps.

        Args:
            is_latest: Whether it is the job's last run.
        """
        ends = sorted(self._pieces)
        for end in ends:
            yield from self._build_piece_lines(
                self._pieces[end], _to_run_fact(self._pieces[end]), is_latest=False
            )
        if self._run_record is None:
            return
        run_event = _to_run_fact(self._run_record)
        if ends:
            # The current size began where the last former one ended.
            current = msgspec.structs.replace(run_event.record, start=ends[-1])
            run_event = msgspec.structs.replace(run_event, record=current)
        # A requeued job has another run, even if no record of it has arrived yet.
        is_latest = is_latest and strip_state_suffix(run_event.record.state) != "REQUEUED"
        yield from self._build_piece_lines(self._run_record, run_event, is_latest=is_latest)

    def _build_piece_lines(
        self, record: JobTerminated | JobStart | JobSuspend, run_event: RunEvent, *, is_latest: bool
    ) -> Iterator[UsageLine]:
        """Yield the line of the run or a former size, then the lines of its steps."""
        run_line = build_run_line(
            record.cluster, run_event, is_latest=is_latest, source=record.source
        )
        step_lines = sorted(
            self._build_step_lines(run_line), key=lambda line: (rank_step(line.step), line.step)
        )
        yield add_steps(run_line, step_lines)
        yield from step_lines

    def _build_step_lines(self, run_line: UsageLine) -> Iterator[UsageLine]:
        """Yield the lines of the steps that ran in one piece of the run."""
        usages_by_step: dict[str, list[StepUsage]] = {}
        for launch in {**self._launches, **self._tasks}:
            if self._find_piece_end(launch[2]) == run_line.piece_us:
                usage = self._build_usage(run_line, launch)
                usages_by_step.setdefault(usage.step, []).append(usage)
        for usages in usages_by_step.values():
            yield build_step_line(
                run_line, usages, is_over=isinstance(self._run_record, JobTerminated)
            )
        if run_line.piece_us:
            return
        reported_steps = {step for step, _, _ in {**self._launches, **self._tasks}}
        for step, imported in self._imported_steps.items():
            if step not in reported_steps:
                yield adopt_step_line(run_line, imported.line)

    def _find_piece_end(self, at_us: int) -> int:
        """Return the end (µs) of the piece that contains this moment; 0 for the current size."""
        ends = (to_micros(end) for end in sorted(self._pieces))
        return next((end_us for end_us in ends if at_us < end_us), 0)

    def _build_usage(self, run_line: UsageLine, launch: _Launch) -> StepUsage:
        """Build the usage of one launch from its records."""
        tasks = self._tasks.get(launch, {})
        usage = StepUsage(
            job_id=run_line.job_id,
            first_submit=from_micros(run_line.first_submit_us),
            restarts=run_line.restarts,
            step=launch[0],
            node=launch[1],
            launched_us=launch[2],
            tasks=tuple(tasks[number] for number in sorted(tasks)),
        )
        record = self._launches.get(launch)
        if record is None:
            return usage
        return msgspec.structs.replace(
            usage, ended_us=record.ended_us, start=record.start, end=record.end
        )


def _launch_key(record: JobStep | JobTask) -> _Launch:
    return record.step, record.node, record.launched_us


def _to_run_fact(record: JobTerminated | JobStart | JobSuspend) -> RunEvent:
    return RunEvent(
        job_id=record.job_id,
        first_submit=record.first_submit,
        restarts=record.restarts,
        record=record.job,
        piece_end=record.piece_end if isinstance(record, JobTerminated) else None,
    )
