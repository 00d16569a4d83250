"""Job operations that change jobs: cancel, hold, release, requeue, suspend, resume.

Steward acts with the rights of SlurmUser, so this module itself restricts owners to what Slurm
would let them do; for example, an owner cannot release an administrator's or the bank's hold.
Release, resume and requeue ask the bank's gate first. A job that was held before a requeue stays
held: a requeue is no way around a hold.

The requeue comes first, because it has several steps: with excluded nodes a job is marked in its
comment, requeued held, given its excluded nodes, then released. The others follow. Selecting
jobs and tasks is in :mod:`steward.automation.operations.jobs`.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

from steward.automation.errors import OperationForbidden
from steward.automation.job_holds import (
    format_requeue_mark,
    has_admin_hold,
    has_slurm_hold,
    is_held_pending,
    is_requeue_unfinished,
)
from steward.automation.node_reasons import is_replaceable_by
from steward.automation.operation import OperationContext, Parameters, operation
from steward.automation.operations.jobs import (
    JobIds,
    JobTarget,
    change_jobs,
    look_up_jobs,
    query_records,
    read_steward_comment,
    request_grant,
    select_targets,
    sign_job_reason,
    validate_job_ids,
)
from steward.core.actions import described
from steward.core.records import JobRecord
from steward.slurm import FINISHED, WAITING


class RequeueParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.job.requeue."""

    jobids: JobIds
    exclude: Annotated[str, described("Nodes to exclude from their next run; none if empty.")] = ""


def _is_requeued(context: OperationContext, parameters: RequeueParameters) -> bool | None:
    """Check after an interruption whether a requeue took effect; None if unknown."""
    records = [
        item
        for name in validate_job_ids(parameters.jobids)
        for item in query_records(context, name)
    ]
    if any(_is_requeue_pending(context, record) for record in records):
        return False
    if not records or any(record.state in FINISHED for record in records):
        return None
    if not parameters.exclude.strip():
        return True if all(record.state in WAITING for record in records) else None
    from steward.slurm.nodelists import expand_nodelist

    excluded = set(context.machine.node_names(parameters.exclude))
    details = context.machine.job_details(validate_job_ids(parameters.jobids))
    node_lists = [item.get("exc_nodes") or "" for rows in details.values() for item in rows]
    return True if all(excluded <= set(expand_nodelist(nodes)) for nodes in node_lists) else None


@operation("slurm.job.requeue", role="owner", check=_is_requeued)
def requeue_jobs(context: OperationContext, parameters: RequeueParameters) -> dict[str, Any]:
    """Requeue jobs, optionally excluding nodes.

    Returns:
        State of each job before the change, and whether it was changed.
    """
    jobs = look_up_jobs(context, parameters.jobids)
    excluded = context.machine.node_names(parameters.exclude) if parameters.exclude.strip() else []
    targets_by_job = {
        name: select_targets(
            name,
            records,
            lambda record: _needs_requeue(context, record, excluded),
            allow_whole=not excluded,
        )
        for name, records in jobs.items()
    }
    return change_jobs(
        context, jobs, targets_by_job, lambda target: _requeue_target(context, target, excluded)
    )


def _needs_requeue(context: OperationContext, record: JobRecord, excluded: Sequence[str]) -> bool:
    """Return whether a job needs a requeue: it started, excludes nodes, or was interrupted."""
    is_waiting = record.state in WAITING
    return bool(excluded) or not is_waiting or _is_requeue_pending(context, record)


def _requeue_target(context: OperationContext, target: JobTarget, excluded: Sequence[str]) -> bool:
    """Requeue one target, after the gate has admitted its next run."""
    is_waiting = all(record.state in WAITING for record in target.records)
    request_grant(context, target, starts_job=True, is_requeue=not is_waiting)
    if is_waiting:
        done = not excluded or context.jobs.exclude_nodes(target.name, excluded)
        is_ours = any(_is_requeue_pending(context, record) for record in target.records)
        return (not is_ours or _release_requeued(context, target, is_marked=True)) and done
    if not excluded:
        return context.jobs.requeue(target.name)
    if any(map(has_slurm_hold, target.records)):
        # The job is held, so it cannot start before its nodes are excluded, and the hold's owner
        # stays.
        return context.jobs.requeue(target.name) and context.jobs.exclude_nodes(
            target.name, excluded
        )
    return _requeue_excluding(context, target, excluded)


def _requeue_excluding(
    context: OperationContext, target: JobTarget, excluded: Sequence[str]
) -> bool:
    """Requeue a job held while its nodes are excluded, so that it cannot restart there at once."""
    # A comment by somebody else, such as the bank, stays.
    is_marked = all(
        not read_steward_comment(record) or _is_requeue_pending(context, record)
        for record in target.records
    )
    if is_marked:
        # The comment tells whoever finds the job held after a crash that it may be released.
        context.jobs.comment(target.name, sign_job_reason(context, format_requeue_mark(excluded)))
    done = False
    try:
        if context.jobs.requeue(target.name, hold=True):
            done = context.jobs.exclude_nodes(target.name, excluded)
    finally:
        is_released = _release_requeued(context, target, is_marked=is_marked)
    return is_released and done


def _release_requeued(context: OperationContext, target: JobTarget, *, is_marked: bool) -> bool:
    """Release a job that Steward's requeue holds, and clear Steward's comment."""
    records = target.query_current(context)
    # An administrator may have held it meanwhile. While slurmctld cleans up the ended run, Slurm
    # 22.05 shows a user's hold, or no pending job.
    if records and all(has_slurm_hold(record) and not has_admin_hold(record) for record in records):
        return context.jobs.release(target.name, clear_reason=is_marked)
    return not is_marked or context.jobs.comment(target.name, "")


def _is_requeue_pending(context: OperationContext, record: JobRecord) -> bool:
    """Return whether a requeue by the same speaker was interrupted."""
    return is_requeue_unfinished(read_steward_comment(record), context.speaker)


# Cancel, hold, release, suspend, resume

JobReason = Annotated[
    str, described("Reason; the job's user sees it, with the name of the caller.")
]


class JobChangeParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.job.suspend, slurm.job.resume and slurm.job.release."""

    jobids: JobIds


class JobReasonParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of slurm.job.cancel and slurm.job.hold."""

    jobids: JobIds
    reason: JobReason = ""


def _make_check(
    predicate: Callable[[list[JobRecord]], bool],
) -> Callable[[OperationContext, Any], bool | None]:
    """Make an operation's ``check`` from a predicate on a job's records."""

    def check(context: OperationContext, parameters: Any) -> bool | None:
        return all(
            predicate(query_records(context, name)) for name in validate_job_ids(parameters.jobids)
        )

    return check


def _have_all_ended(records: Iterable[JobRecord]) -> bool:
    """Return whether all records have ended."""
    return all(record.state in FINISHED for record in records)


@operation("slurm.job.cancel", role="owner", check=_make_check(_have_all_ended))
def cancel_jobs(context: OperationContext, parameters: JobReasonParameters) -> dict[str, Any]:
    """Cancel jobs, running or pending.

    Returns:
        State of each job before the change, and whether it was changed.
    """
    jobs = look_up_jobs(context, parameters.jobids)
    targets_by_job = {
        # scancel reports nothing about tasks that have ended.
        name: [] if _have_all_ended(records) else [JobTarget(name, tuple(records))]
        for name, records in jobs.items()
    }
    comment = sign_job_reason(context, parameters.reason)
    return change_jobs(
        context, jobs, targets_by_job, lambda target: context.jobs.cancel(target.name, comment)
    )


@operation(
    "slurm.job.hold",
    role="owner",
    check=_make_check(lambda records: all(map(is_held_pending, records))),
)
def hold_jobs(context: OperationContext, parameters: JobReasonParameters) -> dict[str, Any]:
    """Hold jobs: they do not start until they are released.

    Returns:
        State of each job before the change, and whether it was changed.
    """
    jobs = look_up_jobs(context, parameters.jobids)
    by_user = not context.is_operator()
    # A user's hold is not enough for an operator: the owner could release it.
    is_held = has_slurm_hold if by_user else has_admin_hold
    targets_by_job = {
        name: _select_to_hold(name, records, is_held) for name, records in jobs.items()
    }
    if by_user:
        for target in itertools.chain(*targets_by_job.values()):
            _require_no_admin_hold(target)
    comment = sign_job_reason(context, parameters.reason)
    return change_jobs(
        *(context, jobs, targets_by_job),
        lambda target: context.jobs.hold(target.name, comment, by_user=by_user),
    )


@operation(
    "slurm.job.release",
    role="owner",
    check=_make_check(lambda records: not any(map(is_held_pending, records))),
)
def release_jobs(context: OperationContext, parameters: JobChangeParameters) -> dict[str, Any]:
    """Release held jobs.

    Returns:
        State of each job before the change, and whether it was changed.
    """
    jobs = look_up_jobs(context, parameters.jobids)
    targets_by_job = {
        name: select_targets(name, records, _needs_release) for name, records in jobs.items()
    }
    for name, targets in targets_by_job.items():
        if targets:
            _require_releasable(context, name, jobs[name])
    return change_jobs(
        context, jobs, targets_by_job, lambda target: _release_target(context, target)
    )


@operation(
    "slurm.job.suspend",
    role="operator",
    check=_make_check(lambda records: all(r.state == "SUSPENDED" for r in records)),
)
def suspend_jobs(context: OperationContext, parameters: JobChangeParameters) -> dict[str, Any]:
    """Suspend running jobs and free their nodes for others.

    Returns:
        State of each job before the change, and whether it was changed.
    """
    return _change_in_state(
        context, parameters, "RUNNING", lambda target: context.jobs.suspend(target.name)
    )


@operation(
    "slurm.job.resume",
    role="operator",
    check=_make_check(lambda records: not any(r.state == "SUSPENDED" for r in records)),
)
def resume_jobs(context: OperationContext, parameters: JobChangeParameters) -> dict[str, Any]:
    """Resume suspended jobs.

    Returns:
        State of each job before the change, and whether it was changed.
    """
    return _change_in_state(
        context, parameters, "SUSPENDED", lambda target: _resume_target(context, target)
    )


def _change_in_state(
    context: OperationContext,
    parameters: JobChangeParameters,
    state: str,
    change: Callable[[JobTarget], bool],
) -> dict[str, Any]:
    """Apply a change to the jobs that are in a state."""
    jobs = look_up_jobs(context, parameters.jobids)
    targets_by_job = {
        name: select_targets(name, records, lambda record: record.state == state)
        for name, records in jobs.items()
    }
    return change_jobs(context, jobs, targets_by_job, change)


def _release_target(context: OperationContext, target: JobTarget) -> bool:
    """Release one target, after the gate has admitted its start."""
    request_grant(context, target, starts_job=True)
    # Any comment left on them is Steward's or overridden by force.
    return context.jobs.release(
        target.name, clear_reason=any(map(read_steward_comment, target.records))
    )


def _resume_target(context: OperationContext, target: JobTarget) -> bool:
    """Resume one target, after the gate has admitted it."""
    request_grant(context, target, starts_job=False)
    return context.jobs.resume(target.name)


def _require_no_admin_hold(target: JobTarget) -> None:
    """Reject an owner's hold that would replace an administrator's."""
    for record in target.records:
        if has_admin_hold(record):
            raise OperationForbidden(
                f"an administrator holds tasks of job {target.name}: name the other tasks "
                "individually",
                target.name,
            )


def _require_releasable(context: OperationContext, name: str, records: list[JobRecord]) -> None:
    """Raise OperationForbidden if the caller may not release one of the job's holds."""
    for record in filter(has_slurm_hold, records):
        if has_admin_hold(record) and not context.is_operator():
            raise OperationForbidden(
                f"job {name} is held by an administrator: only an operator can release it",
                name,
            )
        comment = read_steward_comment(record)
        if not comment or is_replaceable_by(comment, context.speaker):
            continue
        if not context.is_operator():
            raise OperationForbidden(
                f"job {name} has a hold of Steward ({comment!r}): only an operator can release it",
                name,
            )
        if not context.force:
            raise OperationForbidden(
                f"job {name} has a hold of Steward ({comment!r}): --force releases it anyway", name
            )


def _select_to_hold(
    name: str, records: list[JobRecord], is_held: Callable[[JobRecord], bool]
) -> list[JobTarget]:
    """Select the records that are still to be held."""
    waiting = [record for record in records if record.state in WAITING]
    # For an array, hold the pending tasks if there are any.
    candidates = waiting if all(record.array_job_id for record in records) and waiting else records
    return select_targets(
        name, records, lambda record: record in candidates and not is_held(record)
    )


def _needs_release(record: JobRecord) -> bool:
    """Return whether a job is held and has not ended."""
    return has_slurm_hold(record) and record.state not in FINISHED
