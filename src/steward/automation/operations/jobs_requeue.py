"""slurm.job.requeue: jobs run again, away from some nodes if need be.

Where nodes are excluded a job is held meanwhile, and released afterwards. What was
held before stays so: a requeue is nobody's way around a hold.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from steward.automation.holding import (
    is_half_requeued,
    is_kept,
    is_kept_by_admin,
    requeue_text,
)
from steward.automation.operation import Doing, Operation, Parameters
from steward.automation.operations.job_targets import (
    Target,
    changed,
    grant,
    jobs_asked,
    records_of,
    said_of,
    targets,
    why_text,
)
from steward.automation.operations.jobs import JobIds, checked
from steward.core.records import JobRecord
from steward.slurm import FINISHED, WAITING


class JobsRequeue(Parameters, frozen=True, kw_only=True):
    """slurm.job.requeue."""

    jobids: JobIds
    exclude: Annotated[
        str, msgspec.Meta(description="Nodes that they must not run on again; none if empty.")
    ] = ""


def requeue(doing: Doing, asked: JobsRequeue) -> dict[str, Any]:
    """Put jobs into the queue again, away from some nodes if need be."""
    jobs = jobs_asked(doing, asked.jobids)
    excluded = doing.machine.node_names(asked.exclude) if asked.exclude.strip() else []
    left = {
        name: targets(name, records, lambda one: _has_to(doing, one, excluded), whole=not excluded)
        for name, records in jobs.items()
    }
    return changed(doing, jobs, left, lambda target: _again(doing, target, excluded))


def _has_to(doing: Doing, record: JobRecord, excluded: Sequence[str]) -> bool:
    waits = record.state in WAITING
    return bool(excluded) or not waits or _is_half(doing, record)


def _again(doing: Doing, target: Target, excluded: Sequence[str]) -> bool:
    is_waiting = all(record.state in WAITING for record in target.records)
    grant(doing, target, released=True, is_requeue=not is_waiting)
    if is_waiting:
        done = not excluded or doing.jobs.exclude(target.name, excluded)
        is_ours = any(_is_half(doing, record) for record in target.records)
        return (not is_ours or _release(doing, target, is_marked=True)) and done
    if not excluded:
        return doing.jobs.requeue(target.name)
    if any(map(is_kept, target.records)):
        # It does not start, so there is time; and whose hold it is does not change either.
        return doing.jobs.requeue(target.name) and doing.jobs.exclude(target.name, excluded)
    return _away(doing, target, excluded)


def _away(doing: Doing, target: Target, excluded: Sequence[str]) -> bool:
    """Requeue a job, held while its nodes are changed: it might start on the same ones at once."""
    # What the bank says of it, say, stays.
    is_marked = all(not said_of(one) or _is_half(doing, one) for one in target.records)
    if is_marked:
        # So that whoever finds it held after a crash knows that it may be released.
        doing.jobs.comment(target.name, why_text(doing, requeue_text(excluded)))
    done = False
    try:
        if doing.jobs.requeue(target.name, hold=True):
            done = doing.jobs.exclude(target.name, excluded)
    finally:
        is_free = _release(doing, target, is_marked=is_marked)
    return is_free and done


def _release(doing: Doing, target: Target, *, is_marked: bool) -> bool:
    """Release what a requeue of ours holds, and take away what was said of it."""
    records = target.now(doing)
    # An administrator may have held it meanwhile. While the run that was ended is cleared
    # away Slurm 22.05 shows a user's hold, or no waiting job.
    if records and all(is_kept(one) and not is_kept_by_admin(one) for one in records):
        return doing.jobs.release(target.name, is_told=is_marked)
    return not is_marked or doing.jobs.comment(target.name, "")


def _is_half(doing: Doing, record: JobRecord) -> bool:
    return is_half_requeued(said_of(record), doing.speaker)


def _is_requeued(doing: Doing, asked: JobsRequeue) -> bool | None:
    records = [one for name in checked(asked.jobids) for one in records_of(doing, name)]
    if any(_is_half(doing, record) for record in records):
        return False
    if not records or any(record.state in FINISHED for record in records):
        return None
    if not asked.exclude.strip():
        return True if all(record.state in WAITING for record in records) else None
    from steward.slurm.nodelists import expand

    excluded = set(doing.machine.node_names(asked.exclude))
    details = doing.machine.job_details(checked(asked.jobids))
    shown = [one.get("exc_nodes") or "" for found in details.values() for one in found]
    return True if all(excluded <= set(expand(nodes)) for nodes in shown) else None


OPERATION: Final = Operation(
    ref="slurm.job.requeue",
    help="Put jobs into the queue again.",
    gives="For each job its state before, and whether it was changed.",
    parameters=JobsRequeue,
    run=requeue,
    right="owner",
    changes=True,
    check=_is_requeued,
)
