"""Pending changes of a job: what it may ask for after changes of which Slurm may have rejected any.

slurmctld asks the gate before it checks an update, and no answer tells what became of it. See
docs/decisions/0046-pending-changes.md.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Final

import msgspec

from steward.bank.estimate import merged
from steward.bank.gate.shapes import Change, Changes
from steward.bank.records import Description
from steward.slurm import tres

MOST_DESCRIPTIONS: Final = 16
"""Most descriptions of one job that are priced: four independent changes make as many."""
MOST_CHANGES: Final = 8
_AMOUNTS: Final = frozenset(
    {"time_limit_min", "num_tasks", "min_cpus", "max_cpus", "min_nodes", "max_nodes"}
    | {"cpus_per_task", "pn_min_cpus", "pn_min_memory_mib", "mem_per_cpu_mib"}
)
_AMOUNTS_BY_NAME: Final = {
    "licenses": tres.licenses,
    **dict.fromkeys(
        ("tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task"), tres.requested_gres
    ),
}
"""Requests that, as those above, never make a job cheaper by growing."""


def with_change(changes: Changes, change: Change, *, is_held_for: bool) -> Changes:
    """Pending changes and one more.

    Args:
        changes: Those before it.
        change: What the gate is asked for.
        is_held_for: Whether something is held for the job: then its begin is not put off, see
            :meth:`Deciding.change`.
    """
    asked, job = changes.asked, change.job
    if is_held_for:
        job = msgspec.structs.replace(job, held=False, released=False, begin_us=0)
    last = asked[-1] if asked else None
    if (
        last is not None
        and last.is_of_tasks == change.is_of_tasks
        and _is_limit(last.job)
        and _is_limit(job)
    ):
        longest_min = max(last.job.time_limit_min or 0, job.time_limit_min or 0)
        asked, job = asked[:-1], with_limit(job, longest_min)
    change = msgspec.structs.replace(change, job=job)
    return msgspec.structs.replace(changes, asked=(*asked, change))


def descriptions(before: Description, changes: Changes) -> set[Description]:
    """All that a job, or a task of an array, may be.

    Of those that differ in their time limit alone it is the longest, which costs most.

    Args:
        before: What its hold covers.
        changes: Its pending changes.
    """
    found = {before, *changes.tasks, *changes.of_tasks}
    for change in changes.asked:
        longest: dict[Description, Description] = {}
        for job in found.union(*(_after(job, change.job) for job in found)):
            limit_min = job.time_limit_min or 0
            # What no limit, or 0, stands for is the partition's to say.
            group = with_limit(job, 1) if limit_min > 0 else job
            if limit_min >= (longest.get(group, job).time_limit_min or 0):
                longest[group] = job
        found = set(longest.values())
        if len(found) > MOST_DESCRIPTIONS:
            break
    return found


def _after(job: Description, change: Description) -> tuple[Description, Description]:
    """What a change makes of a job, and what if slurmctld keeps the larger amounts alone.

    It may keep them of an update that it rejects for another part.
    """
    whole = merged(job, change)
    larger = {
        field: getattr(whole, field)
        for field in _AMOUNTS
        if (getattr(whole, field) or 0) > (getattr(job, field) or 0)
    }
    if (job.mem_per_cpu_mib is None) != (whole.mem_per_cpu_mib is None):
        larger.pop("mem_per_cpu_mib", None)
        larger.pop("pn_min_memory_mib", None)
    return whole, msgspec.structs.replace(job, **larger)


def largest(possible: Iterable[Description]) -> list[Description]:
    """The descriptions that none of the others covers."""
    found: list[Description] = []
    for job in possible:
        if not any(is_at_most(job, other) for other in found):
            found = [*(other for other in found if not is_at_most(other, job)), job]
    return found


def descriptions_shown(before: Description, changes: Changes) -> set[Description]:
    """All that the queue may show of a job: what changes of single tasks make is not shown."""
    asked = tuple(change for change in changes.asked if not change.is_of_tasks)
    return descriptions(before, Changes(tasks=changes.tasks, asked=asked))


def descriptions_of_tasks(before: Description, changes: Changes) -> set[Description]:
    """What single tasks of an array may be that the queue shows as the others."""
    if not changes.of_tasks and not any(change.is_of_tasks for change in changes.asked):
        return set()
    return descriptions(before, changes) - descriptions_shown(before, changes)


def is_covered(possible: AbstractSet[Description], change: Description) -> bool:
    """Whether a change makes of a job nothing larger than what it may be already.

    Such a change, a decrease above all, passes at the bounds above: it need not be stored.
    """
    return all(
        any(is_at_most(merged(job, change), other) for other in possible) for job in possible
    )


def is_at_most(job: Description, other: Description) -> bool:
    """Whether a job asks for no more of anything than another one, and for the same otherwise."""
    for field in Description.__struct_fields__:
        asked, most = getattr(job, field), getattr(other, field)
        if asked == most:
            continue
        if field in _AMOUNTS:
            if not asked or not most or not 0 < asked <= most:
                return False
        elif field in _AMOUNTS_BY_NAME:
            amounts, bounds = map(_AMOUNTS_BY_NAME[field], (asked, most))
            if bool(asked) != bool(amounts) or any(
                amount > bounds.get(name, 0) for name, amount in amounts.items()
            ):
                return False
        else:
            return False
    return True


def with_limit(job: Description, limit_min: int | None) -> Description:
    """The same with another time limit."""
    return msgspec.structs.replace(job, time_limit_min=limit_min)


def _is_limit(change: Description) -> bool:
    """Whether a change is of the time limit alone."""
    only = Description(uid=change.uid, job_id=change.job_id, time_limit_min=change.time_limit_min)
    return change == only and (change.time_limit_min or 0) > 0
