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
_UNSET: Final = JobRequest(uid=-1)
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


def add_change(
    changes: PendingChanges, change: PendingChange, *, is_held_for: bool
) -> PendingChanges:
    """Append a change to the pending ones; merge successive time limits.

    Args:
        changes: The pending changes.
        change: The change that the gate decides on.
        is_held_for: Whether the job has an SU hold: the change then never delays its start, see
            :meth:`DecisionMaker.change`.
    """
    asked, job = changes.asked, change.job
    if is_held_for:
        job = msgspec.structs.replace(job, held=False, released=False, begin_us=0)
    last = asked[-1] if asked else None
    if (
        last is not None
        and last.is_of_tasks == change.is_of_tasks
        and _is_limit_change(last.job)
        and _is_limit_change(job)
    ):
        longest_min = max(last.job.time_limit_min or 0, job.time_limit_min or 0)
        asked, job = asked[:-1], set_limit(job, longest_min)
    change = msgspec.structs.replace(change, job=job)
    return msgspec.structs.replace(changes, asked=(*asked, change))


def list_descriptions(before: JobRequest, changes: PendingChanges) -> set[JobRequest]:
    """List all descriptions that a job, or a task of an array, may have.

    Of descriptions that differ only in their time limit it keeps the longest: it costs most.

    Args:
        before: The description that the hold covers.
        changes: The pending changes.
    """
    found = {before, *changes.tasks, *changes.of_tasks}
    for change in changes.asked:
        longest: dict[JobRequest, JobRequest] = {}
        for job in found.union(*(list_outcomes(job, change.job) for job in found)):
            limit_min = job.time_limit_min or 0
            # The partition decides what no limit, or 0, means.
            group = set_limit(job, 1) if limit_min > 0 else job
            if limit_min >= (longest.get(group, job).time_limit_min or 0):
                longest[group] = job
        found = set(longest.values())
        if len(found) > MOST_DESCRIPTIONS:
            break
    return found


def list_outcomes(job: JobRequest, change: JobRequest) -> list[JobRequest]:
    """List what a change may make of a job: first all of it, then what slurmctld may keep.

    slurmctld sets field after field and undoes nothing if it rejects one of them.
    """
    asked = {
        field: getattr(change, field)
        for field in JobRequest.__struct_fields__
        if field not in ("uid", "job_id") and getattr(change, field) != getattr(_UNSET, field)
    }
    outcomes, kept = [apply_update(job, change)], dict[str, Any]()
    for fields in _UPDATE_ORDER:
        kept |= {field: asked.pop(field) for field in fields if field in asked}
        if kept and asked:
            outcomes.append(apply_update(job, JobRequest(uid=change.uid, **kept)))
    return outcomes


def drop_covered(possible: Iterable[JobRequest]) -> list[JobRequest]:
    """Drop each description that another one covers."""
    found: list[JobRequest] = []
    for job in possible:
        if not any(is_at_most(job, other) for other in found):
            found = [*(other for other in found if not is_at_most(other, job)), job]
    return found


def list_shown_descriptions(before: JobRequest, changes: PendingChanges) -> set[JobRequest]:
    """List all descriptions that the queue may show: squeue shows no update of single tasks."""
    asked = tuple(change for change in changes.asked if not change.is_of_tasks)
    return list_descriptions(before, PendingChanges(tasks=changes.tasks, asked=asked))


def list_task_descriptions(before: JobRequest, changes: PendingChanges) -> set[JobRequest]:
    """List descriptions of single array tasks that squeue shows like the array."""
    if not changes.of_tasks and not any(change.is_of_tasks for change in changes.asked):
        return set()
    return list_descriptions(before, changes) - list_shown_descriptions(before, changes)


def is_covered(possible: AbstractSet[JobRequest], change: JobRequest) -> bool:
    """Return True if a change keeps a job within the descriptions that it may have already.

    The gate accepts such a change beyond MOST_DESCRIPTIONS and MOST_CHANGES, and need not store it.
    """
    return all(
        any(is_at_most(apply_update(job, change), other) for other in possible) for job in possible
    )


def is_at_most(job: JobRequest, other: JobRequest) -> bool:
    """Return True if a job requests no more than another, and is otherwise equal."""
    for field in JobRequest.__struct_fields__:
        asked, most = getattr(job, field), getattr(other, field)
        if asked == most:
            continue
        if field in _NUMERIC_FIELDS:
            if not asked or not most or not 0 < asked <= most:
                return False
        elif field in _NAMED_AMOUNT_FIELDS:
            amounts, bounds = map(_NAMED_AMOUNT_FIELDS[field], (asked, most))
            if bool(asked) != bool(amounts) or any(
                amount > bounds.get(name, 0) for name, amount in amounts.items()
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
    only = JobRequest(uid=change.uid, job_id=change.job_id, time_limit_min=change.time_limit_min)
    return change == only and (change.time_limit_min or 0) > 0
