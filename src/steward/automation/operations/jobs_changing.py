"""Operations that change jobs: cancel, hold, release, requeue, suspend, resume.

Owners may do to their jobs what Slurm lets them do, and no more: Steward's own
rights are those of SlurmUser, so what an owner may not end (an administrator's
hold, one of the bank's) is looked at here.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final

import msgspec

from steward.automation.errors import DoneInPart, NotYours
from steward.automation.operation import Doing, Operation, Parameters
from steward.automation.operations.jobs import JobIds, checked
from steward.automation.reasons import is_ours, ours
from steward.jobs.names import JobName, parse
from steward.records import JobRecord
from steward.slurm import FINISHED, WAITING, SlurmError, UnknownJob

Why = Annotated[
    str, msgspec.Meta(description="Why; the job's user sees it, with who says so behind it.")
]
_HELD_BY_ADMIN: Final = "JobHeldAdmin"
_HELD: Final = frozenset({_HELD_BY_ADMIN, "JobHeldUser"})
_GONE: Final = "it has ended, or is not in a state in which that can be done"


class JobsChange(Parameters, frozen=True, kw_only=True):
    """slurm.job.suspend, slurm.job.resume, slurm.job.release."""

    jobids: JobIds


class JobsWhy(Parameters, frozen=True, kw_only=True):
    """slurm.job.cancel, slurm.job.hold."""

    jobids: JobIds
    reason: Why = ""


class JobsRequeue(Parameters, frozen=True, kw_only=True):
    """slurm.job.requeue."""

    jobids: JobIds
    exclude: Annotated[
        str, msgspec.Meta(description="Nodes that they must not run on again; none if empty.")
    ] = ""


def cancel(doing: Doing, asked: JobsWhy) -> dict[str, Any]:
    """End jobs, whether they run or wait."""
    jobs = _jobs(doing, asked.jobids)
    left = [name for name, records in jobs.items() if not _all_over(records)]
    why = _why(doing, asked.reason)
    return _changed(doing, jobs, left, lambda name: doing.jobs.cancel(name, why))


def hold(doing: Doing, asked: JobsWhy) -> dict[str, Any]:
    """Keep jobs from starting; an owner's hold is one that the owner may end."""
    jobs = _jobs(doing, asked.jobids)
    left = [name for name, records in jobs.items() if not all(map(_is_held, records))]
    why = _why(doing, asked.reason)
    by_user = not doing.is_operator()
    return _changed(doing, jobs, left, lambda name: doing.jobs.hold(name, why, by_user=by_user))


def release(doing: Doing, asked: JobsChange) -> dict[str, Any]:
    """Let held jobs start."""
    jobs = _jobs(doing, asked.jobids)
    left = [name for name, records in jobs.items() if any(map(_is_held, records))]
    for name in left:
        _need_releasable(doing, name, jobs[name])
    return _changed(
        *(doing, jobs, left),
        # What is said of them still is ours, or overridden.
        lambda name: doing.jobs.release(name, is_told=any(map(_said, jobs[name]))),
    )


def requeue(doing: Doing, asked: JobsRequeue) -> dict[str, Any]:
    """Put jobs into the queue again, away from some nodes if need be."""
    jobs = _jobs(doing, asked.jobids)
    excluded = doing.machine.node_names(asked.exclude) if asked.exclude.strip() else []

    def again(name: str) -> bool:
        if not excluded:
            return doing.jobs.requeue(name)
        # Held while its nodes are changed: it might be started on the same ones at once.
        waits = all(record.state in WAITING for record in jobs[name])
        if not waits and not doing.jobs.requeue(name, hold=True):
            return False
        done = doing.jobs.exclude(name, excluded)
        return (waits or doing.jobs.release(name)) and done

    left = [
        name
        for name, records in jobs.items()
        if excluded or not all(record.state in WAITING for record in records)
    ]
    return _changed(doing, jobs, left, again)


def suspend(doing: Doing, asked: JobsChange) -> dict[str, Any]:
    """Stop running jobs for a while, their nodes free for others."""
    jobs = _jobs(doing, asked.jobids)
    left = [name for name, records in jobs.items() if any(r.state == "RUNNING" for r in records)]
    return _changed(doing, jobs, left, doing.jobs.suspend)


def resume(doing: Doing, asked: JobsChange) -> dict[str, Any]:
    """Let suspended jobs go on."""
    jobs = _jobs(doing, asked.jobids)
    left = [name for name, records in jobs.items() if any(r.state == "SUSPENDED" for r in records)]
    return _changed(doing, jobs, left, doing.jobs.resume)


def _jobs(doing: Doing, jobids: Iterable[int | str]) -> dict[str, list[JobRecord]]:
    """The jobs' records, by the names that they were given.

    Raises:
        UnknownJob: Slurm does not know one of them.
        NotYours: The asker may not change one of them.
    """
    found: dict[str, list[JobRecord]] = {}
    for name in checked(jobids):
        parsed = parse(name)
        records = [one for one in doing.slurm.job(parsed.job_id) if _is_meant(one, parsed)]
        if not records:
            raise UnknownJob(f"Slurm of {doing.cluster} knows no job {name} (any more)", (), name)
        for record in records:
            doing.needs("owner", record.uid)
        found[name] = records
    return found


def _is_meant(record: JobRecord, name: JobName) -> bool:
    if name.offset is not None:
        return record.het_job_id == name.job_id and record.het_offset == name.offset
    if name.task is None:
        return True
    if record.array_job_id != name.job_id:
        return False
    from steward.slurm import covers

    return record.array_task == str(name.task) or covers(record.array_task, name.task)


def _changed(
    doing: Doing,
    before: Mapping[str, list[JobRecord]],
    left: Iterable[str],
    change: Callable[[str], bool],
) -> dict[str, Any]:
    """Change jobs one by one, and say of each what became of it.

    Raises:
        DoneInPart: Slurm did not let some be changed.
    """
    names = set(left)
    result: dict[str, Any] = {}
    failed: list[str] = []
    for name, records in before.items():
        line: dict[str, Any] = {"state": _states(records), "changed": False}
        result[name] = line
        if name not in names:
            line["message"] = "there is nothing to be changed"
        elif doing.dry_run:
            line["would_change"] = True
        else:
            said = _done(doing, name, change)
            line["changed"] = not said
            if said:
                line["message"] = said
                failed.append(name)
    if failed:
        more = f" ({len(failed)} of {len(before)})" if len(before) > 1 else ""
        message = f"job {failed[0]}: {result[failed[0]]['message']}{more}"
        raise DoneInPart(message, result)
    return result


def _done(doing: Doing, name: str, change: Callable[[str], bool]) -> str:
    """Change a job; why it was not, "" where it was."""
    doing.begin()
    try:
        return "" if change(name) else _GONE
    except SlurmError as error:
        return str(error)


def _need_releasable(doing: Doing, name: str, records: list[JobRecord]) -> None:
    for record in records:
        if record.reason == _HELD_BY_ADMIN and not doing.is_operator():
            raise NotYours(f"job {name} is held by an administrator, who alone releases it", name)
        said = _said(record)
        if said and not doing.force and not is_ours(said, doing.speaker):
            raise NotYours(
                f"job {name} is held because {said!r}: --force releases it all the same", name
            )


def _said(record: JobRecord) -> str:
    """What Steward says of a job to its user, the bank or an action of ours; "" for nothing."""
    from steward.slurm.changing import told

    return told(record.system_comment, record.admin_comment)


def _why(doing: Doing, reason: str) -> str:
    # As the bank says it, too: so what was said is found again, and taken away.
    return f"steward: {ours(reason, doing.speaker)}" if reason.strip() else ""


def _is_held(record: JobRecord) -> bool:
    return record.state in WAITING and record.reason in _HELD


def _all_over(records: Iterable[JobRecord]) -> bool:
    return all(record.state in FINISHED for record in records)


def _states(records: Iterable[JobRecord]) -> str:
    return ",".join(dict.fromkeys(record.state for record in records))


def _check(is_so: Callable[[list[JobRecord]], bool]) -> Callable[[Doing, Any], bool | None]:
    def check(doing: Doing, asked: Any) -> bool | None:
        return all(
            is_so(doing.slurm.job(parse(name).job_id)) for name in checked(asked.jobids)
        )  # fmt: skip

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
        check=_check(lambda records: all(map(_is_held, records))),
    ),
    Operation(
        ref="slurm.job.release",
        help="Let held jobs start.",
        gives="For each job its state before, and whether it was changed.",
        parameters=JobsChange,
        run=release,
        right="owner",
        changes=True,
        check=_check(lambda records: not any(map(_is_held, records))),
    ),
    Operation(
        ref="slurm.job.requeue",
        help="Put jobs into the queue again.",
        gives="For each job its state before, and whether it was changed.",
        parameters=JobsRequeue,
        run=requeue,
        right="owner",
        changes=True,
    ),
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
