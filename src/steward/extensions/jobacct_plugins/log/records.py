"""The records of the job log: one JSON object a line, with the id of the event behind it.

What they hold is what the events held; a record that says ``correction`` says
again, better, what an earlier one of its run said, and takes its place for
whoever reads the log; one that says ``withdrawn`` takes that back.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import msgspec

from steward.core.events import RUN_END, RUN_START, RUN_SUSPEND, STEP_ACCOUNTED, STEP_USAGE, Event
from steward.core.lines import Line
from steward.core.records import JobRecord
from steward.core.usage import RunFact, StepAccounted, StepEnd, StepStart, StepUsage, TaskUsage

VERSION: Final = 1
"""Of the shape of records; fields are only ever added."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="record"):
    """What every record has.

    Attributes:
        v: Version of its shape.
        event: Id of the event, ``CLUSTER/KEY``; the same where one was written twice.
        cluster: The cluster's name.
        job_id: The raw job id.
        submit: When this run was submitted: with cluster, job_id and restarts, its name.
        restarts: How often the job had been requeued.
        first_submit: With cluster and job_id, the job's identity, as it was known then.
        at: When it happened, UTC.
    """

    v: int
    event: str
    cluster: str
    job_id: int
    submit: datetime
    restarts: int
    first_submit: datetime
    at: datetime


class JobStart(Record, frozen=True, kw_only=True, omit_defaults=True, tag="JOB_START"):
    """A run has started."""

    job: JobRecord
    correction: bool = False
    source: str = ""


class JobSuspend(Record, frozen=True, kw_only=True, omit_defaults=True, tag="JOB_SUSPEND"):
    """A run was suspended, or goes on, as ``job.state`` says."""

    job: JobRecord
    correction: bool = False
    source: str = ""


class JobTerminated(Record, frozen=True, kw_only=True, omit_defaults=True, tag="JOB_TERMINATED"):
    """A run is over; with ``piece_end``, a former size of a resized job is."""

    job: JobRecord
    piece_end: datetime | None = None
    correction: bool = False
    source: str = ""


class JobStep(Record, frozen=True, kw_only=True, omit_defaults=True, tag="JOB_STEP"):
    """A step is over on a node; its tasks are records of their own that follow.

    Attributes:
        step: As Slurm writes it behind the dot.
        node: NodeName.
        launched_us: When it was launched, µs since the epoch.
        ended_us: When it ended there, µs; None where that was lost.
        start: What the node said when it began.
        end: What the node said when it ended.
        tasks: How many tasks are known.
        correction: Whether an earlier record of this launch is to be forgotten.
        withdrawn: Whether the launch turned out to be none of this run's: its earlier record
            and its tasks are to be forgotten, and this one says nothing else.
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


class JobTask(Record, frozen=True, kw_only=True, omit_defaults=True, tag="JOB_TASK"):
    """A task of a step ended."""

    step: str
    node: str
    launched_us: int
    task: TaskUsage


class JobAccounted(Record, frozen=True, kw_only=True, omit_defaults=True, tag="JOB_ACCOUNTED"):
    """Another's books tell of a step; records of our own go before."""

    line: Line


AnyRecord = JobStart | JobSuspend | JobTerminated | JobStep | JobTask | JobAccounted
"""One line of the log."""


class Head(msgspec.Struct, frozen=True):
    """What tells whose a record is, for who only looks a line over."""

    record: str
    cluster: str
    job_id: int
    submit: datetime
    restarts: int
    at: datetime


_encode = msgspec.json.Encoder().encode
record_of = msgspec.json.Decoder(AnyRecord).decode
"""The record that a line holds; raises ``msgspec.MsgspecError``."""

head_of = msgspec.json.Decoder(Head).decode
"""The head of the record that a line holds; raises ``msgspec.MsgspecError``."""


def submit_of(body: RunFact | StepUsage | StepAccounted) -> datetime:
    """The run's own submit time, in whole seconds, as Slurm has them."""
    if isinstance(body, RunFact):
        submit = body.record.submit or body.first_submit
    elif isinstance(body, StepUsage):
        submit = body.submit or body.first_submit
    else:
        submit = body.submit
    return submit.replace(microsecond=0)


def lines_of(event: Event) -> bytes:
    """The lines of the log that an event of a run becomes, each with its newline."""
    return b"".join(_encode(record) + b"\n" for record in _records(event))


def _records(event: Event) -> Iterator[Record]:
    body = event.body
    head: dict[str, Any] = {
        "v": VERSION,
        "event": f"{event.cluster}/{event.key}",
        "cluster": event.cluster,
        "job_id": body.job_id,
        "submit": submit_of(body),
        "at": event.at,
    }
    if isinstance(body, StepAccounted):
        yield JobAccounted(**head, restarts=0, first_submit=body.submit, line=body.line)
        return
    head |= {"restarts": body.restarts, "first_submit": body.first_submit}
    if isinstance(body, StepUsage):
        yield from _step(head, body)
    else:
        yield _run(head, event.kind, body)


def _run(head: dict[str, Any], kind: str, fact: RunFact) -> Record:
    told = {
        **head,
        "job": fact.record,
        "correction": fact.correction,
        "source": fact.source,
    }
    if kind == RUN_END:
        return JobTerminated(**told, piece_end=fact.piece_end)
    return {RUN_START: JobStart, RUN_SUSPEND: JobSuspend}[kind](**told)


def _step(head: dict[str, Any], usage: StepUsage) -> Iterator[Record]:
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
        of_task: dict[str, Any] = {**head, "event": f"{head['event']}#{task.task}"}
        yield JobTask(**of_task, **launch, task=task)


KINDS: Final = frozenset({RUN_START, RUN_SUSPEND, RUN_END, STEP_USAGE, STEP_ACCOUNTED})
"""The kinds of events that the log is made of."""
