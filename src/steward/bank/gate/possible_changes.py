"""Pending changes of a job: descriptions it may have, since Slurm may have rejected any change.

slurmctld asks the gate before it checks an update, and never reports the result. `add_change`
appends a change; the `list_...` functions enumerate the descriptions that the job, or its array
tasks, may have now; `drop_covered`, `is_covered` and `is_at_most` compare descriptions. Until a
poll shows which description is true, the gate holds SU for the most expensive one. Used by
`holds.py`. See docs/decisions/0046-pending-changes.md.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any, Final

import msgspec

from steward.bank.estimate import apply_update
from steward.bank.gate.requests import PendingChange, PendingChanges
from steward.bank.records import GRES_FIELDS, JobRequest
from steward.slurm import tres
from steward.slurm.tres import parse_requested_gres

MOST_DESCRIPTIONS: Final = 16
"""Maximum number of descriptions of one job before the gate rejects further changes."""
MOST_CHANGES: Final = 8
"""Maximum number of pending changes of one job."""
_UNSET_REQUEST: Final = JobRequest(uid=-1)
_UPDATE_ORDER: Final = (
    *(("account", "partition", "qos", "reservation"), ("min_cpus", "max_cpus"), ("pn_min_cpus",)),
    *(("cpus_per_task",), ("min_nodes", "max_nodes"), ("num_tasks",)),
    *(("time_limit_min", "time_min_min"), ("pn_min_memory_mib", "mem_per_cpu_mib")),
)
"""Fields in the order in which slurmctld sets them; it sets all others later."""
_NUMERIC_FIELDS: Final = frozenset(
    {"time_limit_min", "num_tasks", "min_cpus", "max_cpus", "min_nodes", "max_nodes"}
    | {"pn_min_cpus", "pn_min_memory_mib", "mem_per_cpu_mib"}
)
"""Numeric requests: a larger number never makes a job cheaper."""
_NAMED_AMOUNT_FIELDS: Final = {
    "licenses": tres.parse_licenses,
    **dict.fromkeys(GRES_FIELDS, parse_requested_gres),
}
"""Requests of amounts by name, with their parsers: a larger amount never makes a job cheaper."""


def add_change(changes: PendingChanges, change: PendingChange, *, has_hold: bool) -> PendingChanges:
    """Append a change to the pending ones; merge successive time limits.

    Args:
        changes: The pending changes.
        change: The change that the gate decides on.
        has_hold: Whether the job has an SU hold: the change then never delays its start, see
            :meth:`DecisionMaker.decide_change`.
    """
    pending, job = changes.asked, change.job
    if has_hold:
        job = msgspec.structs.replace(job, held=False, released=False, begin_us=0)
    last_change = pending[-1] if pending else None
    if (
        last_change is not None
        and last_change.is_of_tasks == change.is_of_tasks
        and _is_limit_change(last_change.job)
        and _is_limit_change(job)
    ):
        longest_min = max(last_change.job.time_limit_min or 0, job.time_limit_min or 0)
        pending, job = pending[:-1], set_limit(job, longest_min)
    change = msgspec.structs.replace(change, job=job)
    return msgspec.structs.replace(changes, asked=(*pending, change))


def list_descriptions(description: JobRequest, changes: PendingChanges) -> set[JobRequest]:
    """List all descriptions that a job, or a task of an array, may have.

    Of descriptions that differ only in their time limit it keeps the longest: it costs most.

    Args:
        description: The description that the hold covers.
        changes: The pending changes.
    """
    descriptions = {description, *changes.tasks, *changes.of_tasks}
    for change in changes.asked:
        longest: dict[JobRequest, JobRequest] = {}
        for job in descriptions.union(*(list_outcomes(job, change.job) for job in descriptions)):
            limit_min = job.time_limit_min or 0
            # The partition decides what no limit, or 0, means.
            group = set_limit(job, 1) if limit_min > 0 else job
            if limit_min >= (longest.get(group, job).time_limit_min or 0):
                longest[group] = job
        descriptions = set(longest.values())
        if len(descriptions) > MOST_DESCRIPTIONS:
            break
    return descriptions


def list_outcomes(job: JobRequest, change: JobRequest) -> list[JobRequest]:
    """List what a change may make of a job: first all of it, then what slurmctld may keep.

    slurmctld sets field after field and undoes nothing if it rejects one of them.
    """
    remaining = {
        field: getattr(change, field)
        for field in JobRequest.__struct_fields__
        if field not in ("uid", "job_id")
        and getattr(change, field) != getattr(_UNSET_REQUEST, field)
    }
    outcomes, applied = [apply_update(job, change)], dict[str, Any]()
    for fields in _UPDATE_ORDER:
        applied |= {field: remaining.pop(field) for field in fields if field in remaining}
        if applied and remaining:
            outcomes.append(apply_update(job, JobRequest(uid=change.uid, **applied)))
    return outcomes


def drop_covered(descriptions: Iterable[JobRequest]) -> list[JobRequest]:
    """Drop each description that another one covers."""
    uncovered: list[JobRequest] = []
    for job in descriptions:
        if not any(is_at_most(job, other) for other in uncovered):
            uncovered = [*(other for other in uncovered if not is_at_most(other, job)), job]
    return uncovered


def list_shown_descriptions(description: JobRequest, changes: PendingChanges) -> set[JobRequest]:
    """List all descriptions that the queue may show: squeue shows no update of single tasks."""
    shown_changes = tuple(change for change in changes.asked if not change.is_of_tasks)
    return list_descriptions(description, PendingChanges(tasks=changes.tasks, asked=shown_changes))


def list_task_descriptions(description: JobRequest, changes: PendingChanges) -> set[JobRequest]:
    """List descriptions of single array tasks that squeue shows like the array."""
    if not changes.of_tasks and not any(change.is_of_tasks for change in changes.asked):
        return set()
    return list_descriptions(description, changes) - list_shown_descriptions(description, changes)


def is_covered(descriptions: AbstractSet[JobRequest], change: JobRequest) -> bool:
    """Return True if a change keeps a job within the descriptions that it may have already.

    The gate accepts such a change beyond MOST_DESCRIPTIONS and MOST_CHANGES, and need not store it.
    """
    return all(
        any(is_at_most(apply_update(job, change), other) for other in descriptions)
        for job in descriptions
    )


def is_at_most(job: JobRequest, other: JobRequest) -> bool:
    """Return True if a job requests no more than another, and is otherwise equal."""
    for field in JobRequest.__struct_fields__:
        value, limit = getattr(job, field), getattr(other, field)
        if value == limit:
            continue
        if field in _NUMERIC_FIELDS:
            if not value or not limit or not 0 < value <= limit:
                return False
        elif field in _NAMED_AMOUNT_FIELDS:
            amounts, limits = map(_NAMED_AMOUNT_FIELDS[field], (value, limit))
            if bool(value) != bool(amounts) or any(
                amount > limits.get(name, 0) for name, amount in amounts.items()
            ):
                return False
        else:
            return False
    return True


def set_limit(job: JobRequest, limit_min: int | None) -> JobRequest:
    """Return the job with another time limit."""
    return msgspec.structs.replace(job, time_limit_min=limit_min)


def _is_limit_change(change: JobRequest) -> bool:
    """Return True if a change sets the time limit alone."""
    limit_change = JobRequest(
        uid=change.uid, job_id=change.job_id, time_limit_min=change.time_limit_min
    )
    return change == limit_change and (change.time_limit_min or 0) > 0
