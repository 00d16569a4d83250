"""Job operations that change jobs: cancel, hold, release, requeue, suspend, resume.

Steward acts with the rights of SlurmUser, so this module itself restricts owners to what Slurm
would let them do; for example, an owner cannot release an administrator's or the bank's hold.
Release, resume and requeue ask the bank's gate first.

The requeue comes first, because it has several steps: with excluded nodes a job is marked in its
comment, requeued held, given its excluded nodes, then released. The others follow, then
:data:`OPERATIONS`. Selecting jobs and tasks is in :mod:`steward.automation.operations.jobs`.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final

import msgspec

from steward.automation.errors import NotYours
from steward.automation.job_holds import (
    is_half_requeued,
    is_held,
    is_kept,
    is_kept_by_admin,
    requeue_text,
)
from steward.automation.node_reasons import is_ours
from steward.automation.operation import Doing, Operation, Parameters
from steward.automation.operations.jobs import (
    JobIds,
    Target,
    changed,
    checked,
    grant,
    jobs_asked,
    records_of,
    said_of,
    targets,
    why_text,
)
from steward.core.records import JobRecord
from steward.slurm import FINISHED, WAITING


class JobsRequeue(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.job.requeue."""

    jobids: JobIds
    exclude: Annotated[
        str, msgspec.Meta(description="Nodes that they must not run on again; none if empty.")
    ] = ""


def requeue(doing: Doing, asked: JobsRequeue) -> dict[str, Any]:
    """Requeue jobs, optionally with nodes to exclude from their next run."""
    jobs = jobs_asked(doing, asked.jobids)
    excluded = doing.machine.node_names(asked.exclude) if asked.exclude.strip() else []
    left = {
        name: targets(name, records, lambda one: _has_to(doing, one, excluded), whole=not excluded)
        for name, records in jobs.items()
    }
    return changed(doing, jobs, left, lambda target: _again(doing, target, excluded))


def _has_to(doing: Doing, record: JobRecord, excluded: Sequence[str]) -> bool:
    """Return whether a job still needs the requeue: it runs, or nodes are to be excluded."""
    waits = record.state in WAITING
    return bool(excluded) or not waits or _is_half(doing, record)


def _again(doing: Doing, target: Target, excluded: Sequence[str]) -> bool:
    """Requeue one target, after the gate has admitted its next run."""
    is_waiting = all(record.state in WAITING for record in target.records)
    grant(doing, target, released=True, is_requeue=not is_waiting)
    if is_waiting:
        done = not excluded or doing.jobs.exclude(target.name, excluded)
        is_ours = any(_is_half(doing, record) for record in target.records)
        return (not is_ours or _release_requeued(doing, target, is_marked=True)) and done
    if not excluded:
        return doing.jobs.requeue(target.name)
    if any(map(is_kept, target.records)):
        # The job is held, so it cannot start before its nodes are excluded, and the hold's owner
        # stays.
        return doing.jobs.requeue(target.name) and doing.jobs.exclude(target.name, excluded)
    return _away(doing, target, excluded)


def _away(doing: Doing, target: Target, excluded: Sequence[str]) -> bool:
    """Requeue a job held while its nodes are excluded, so that it cannot restart there at once."""
    # A comment by somebody else, such as the bank, stays.
    is_marked = all(not said_of(one) or _is_half(doing, one) for one in target.records)
    if is_marked:
        # The comment tells whoever finds the job held after a crash that it may be released.
        doing.jobs.comment(target.name, why_text(doing, requeue_text(excluded)))
    done = False
    try:
        if doing.jobs.requeue(target.name, hold=True):
            done = doing.jobs.exclude(target.name, excluded)
    finally:
        is_free = _release_requeued(doing, target, is_marked=is_marked)
    return is_free and done


def _release_requeued(doing: Doing, target: Target, *, is_marked: bool) -> bool:
    """Release a job that Steward's requeue holds, and clear Steward's comment."""
    records = target.now(doing)
    # An administrator may have held it meanwhile. While slurmctld cleans up the ended run, Slurm
    # 22.05 shows a user's hold, or no pending job.
    if records and all(is_kept(one) and not is_kept_by_admin(one) for one in records):
        return doing.jobs.release(target.name, is_told=is_marked)
    return not is_marked or doing.jobs.comment(target.name, "")


def _is_half(doing: Doing, record: JobRecord) -> bool:
    """Return whether a requeue by the same speaker was interrupted."""
    return is_half_requeued(said_of(record), doing.speaker)


def _is_requeued(doing: Doing, asked: JobsRequeue) -> bool | None:
    """Check after an interruption whether a requeue took effect; None if unknown."""
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


# Cancel, hold, release, suspend, resume

Why = Annotated[
    str, msgspec.Meta(description="Why; the job's user sees it, with who says so behind it.")
]


class JobsChange(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.job.suspend, slurm.job.resume and slurm.job.release."""

    jobids: JobIds


class JobsWhy(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.job.cancel and slurm.job.hold."""

    jobids: JobIds
    reason: Why = ""


def cancel(doing: Doing, asked: JobsWhy) -> dict[str, Any]:
    """Cancel jobs, running or pending."""
    jobs = jobs_asked(doing, asked.jobids)
    left = {
        # scancel reports nothing about tasks that have ended.
        name: [] if _all_over(records) else [Target(name, tuple(records))]
        for name, records in jobs.items()
    }
    why = why_text(doing, asked.reason)
    return changed(doing, jobs, left, lambda target: doing.jobs.cancel(target.name, why))


def hold(doing: Doing, asked: JobsWhy) -> dict[str, Any]:
    """Hold jobs; an owner's hold is one that the owner can release."""
    jobs = jobs_asked(doing, asked.jobids)
    by_user = not doing.is_operator()
    # A user's hold is not enough for an operator: the owner could release it.
    is_kept_well = is_kept if by_user else is_kept_by_admin
    left = {name: _to_be_held(name, records, is_kept_well) for name, records in jobs.items()}
    if by_user:
        for target in itertools.chain(*left.values()):
            _need_no_admins(target)
    why = why_text(doing, asked.reason)
    return changed(
        *(doing, jobs, left),
        lambda target: doing.jobs.hold(target.name, why, by_user=by_user),
    )


def release(doing: Doing, asked: JobsChange) -> dict[str, Any]:
    """Release held jobs."""
    jobs = jobs_asked(doing, asked.jobids)
    left = {name: targets(name, records, _is_to_be_freed) for name, records in jobs.items()}
    for name, found in left.items():
        if found:
            _need_releasable(doing, name, jobs[name])
    return changed(doing, jobs, left, lambda target: _release(doing, target))


def suspend(doing: Doing, asked: JobsChange) -> dict[str, Any]:
    """Suspend running jobs; their nodes are free for others meanwhile."""
    return _in_state(doing, asked, "RUNNING", lambda target: doing.jobs.suspend(target.name))


def resume(doing: Doing, asked: JobsChange) -> dict[str, Any]:
    """Resume suspended jobs."""
    return _in_state(doing, asked, "SUSPENDED", lambda target: _resume(doing, target))


def _in_state(
    doing: Doing, asked: JobsChange, state: str, change: Callable[[Target], bool]
) -> dict[str, Any]:
    """Apply a change to the jobs that are in a state."""
    jobs = jobs_asked(doing, asked.jobids)
    left = {
        name: targets(name, records, lambda one: one.state == state)
        for name, records in jobs.items()
    }
    return changed(doing, jobs, left, change)


def _release(doing: Doing, target: Target) -> bool:
    """Release one target, after the gate has admitted its start."""
    grant(doing, target, released=True)
    # Any comment left on them is Steward's or overridden by force.
    return doing.jobs.release(target.name, is_told=any(map(said_of, target.records)))


def _resume(doing: Doing, target: Target) -> bool:
    """Resume one target, after the gate has admitted it."""
    grant(doing, target, released=False)
    return doing.jobs.resume(target.name)


def _need_no_admins(target: Target) -> None:
    """Reject an owner's hold that would replace an administrator's."""
    for record in target.records:
        if is_kept_by_admin(record):
            raise NotYours(
                f"of job {target.name} something is held by an administrator: name the rest singly",
                target.name,
            )


def _need_releasable(doing: Doing, name: str, records: list[JobRecord]) -> None:
    """Raise NotYours if the caller may not release one of the job's holds."""
    for record in filter(is_kept, records):
        if is_kept_by_admin(record) and not doing.is_operator():
            raise NotYours(f"job {name} is held by an administrator, who alone releases it", name)
        said = said_of(record)
        if not said or is_ours(said, doing.speaker):
            continue
        if not doing.is_operator():
            raise NotYours(f"job {name} is held because {said!r}: an operator releases it", name)
        if not doing.force:
            raise NotYours(
                f"job {name} is held because {said!r}: --force releases it all the same", name
            )


def _to_be_held(
    name: str, records: list[JobRecord], is_kept_well: Callable[[JobRecord], bool]
) -> list[Target]:
    """Select the records that are still to be held."""
    waiting = [one for one in records if one.state in WAITING]
    # For an array, hold the pending tasks if there are any.
    meant = waiting if all(one.array_job_id for one in records) and waiting else records
    return targets(name, records, lambda one: one in meant and not is_kept_well(one))


def _is_to_be_freed(record: JobRecord) -> bool:
    """Return whether a job is held and has not ended."""
    return is_kept(record) and record.state not in FINISHED


def _all_over(records: Iterable[JobRecord]) -> bool:
    """Return whether all records have ended."""
    return all(record.state in FINISHED for record in records)


def _check(is_so: Callable[[list[JobRecord]], bool]) -> Callable[[Doing, Any], bool | None]:
    """Make an operation's ``check`` from a predicate on a job's records."""

    def check(doing: Doing, asked: Any) -> bool | None:
        return all(is_so(records_of(doing, name)) for name in checked(asked.jobids))

    return check


OPERATIONS: Final = (
    Operation(
        ref="slurm.job.cancel",
        help="End jobs, whether they run or wait.",
        gives="For each job its state before, and whether it was changed.",
        parameters=JobsWhy,
        run=cancel,
        right="owner",
        changes=True,
        check=_check(_all_over),
    ),
    Operation(
        ref="slurm.job.hold",
        help="Keep jobs from starting.",
        gives="For each job its state before, and whether it was changed.",
        parameters=JobsWhy,
        run=hold,
        right="owner",
        changes=True,
        check=_check(lambda records: all(map(is_held, records))),
    ),
    Operation(
        ref="slurm.job.release",
        help="Let held jobs start.",
        gives="For each job its state before, and whether it was changed.",
        parameters=JobsChange,
        run=release,
        right="owner",
        changes=True,
        check=_check(lambda records: not any(map(is_held, records))),
    ),
    OPERATION,
    Operation(
        ref="slurm.job.suspend",
        help="Stop running jobs for a while.",
        gives="For each job its state before, and whether it was changed.",
        parameters=JobsChange,
        run=suspend,
        right="operator",
        changes=True,
        check=_check(lambda records: all(r.state == "SUSPENDED" for r in records)),
    ),
    Operation(
        ref="slurm.job.resume",
        help="Let suspended jobs go on.",
        gives="For each job its state before, and whether it was changed.",
        parameters=JobsChange,
        run=resume,
        right="operator",
        changes=True,
        check=_check(lambda records: not any(r.state == "SUSPENDED" for r in records)),
    ),
)
