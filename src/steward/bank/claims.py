"""What the gate is asked to hold for jobs in the queue, as Slurm's records tell it."""

from collections.abc import Sequence
from typing import Final

import msgspec

from steward.bank.estimate import description_of
from steward.bank.gate.shapes import Claim
from steward.bank.records import Description
from steward.core.records import JobRecord
from steward.core.timestamps import micros, micros_or_0
from steward.jobs import Job
from steward.slurm.arrays import without_task
from steward.slurm.job_states import base_state

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
