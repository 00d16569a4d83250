"""Jobs that are to be changed: whose they are, their tasks, and what became of each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from steward.automation.errors import DoneInPart
from steward.automation.operation import Doing
from steward.automation.operations.jobs import checked
from steward.automation.reasons import ours
from steward.bank.errors import BankRefused
from steward.core.records import JobRecord
from steward.jobs.names import JobName, parse
from steward.slurm import WAITING, SlurmError, UnknownJob

_GONE: Final = "it has ended, or is not in a state in which that can be done"


class Target(msgspec.Struct, frozen=True):
    """What one command changes.

    Attributes:
        name: As Slurm's commands take it: ``12``, ``12_3``, ``12_[4-9]``.
        records: What it was when it was looked at.
    """

    name: str
    records: tuple[JobRecord, ...]

    def now(self, doing: Doing) -> list[JobRecord]:
        """What it is now; [] if it is gone."""
        known = {one.job_id for one in self.records}
        return [one for one in doing.slurm.job(self.records[0].job_id) if one.job_id in known]


def jobs_asked(doing: Doing, jobids: Iterable[int | str]) -> dict[str, list[JobRecord]]:
    """The jobs' records, by the names that they were given.

    Raises:
        UnknownJob: Slurm does not know one of them.
        NotYours: The asker may not change one of them.
    """
    found: dict[str, list[JobRecord]] = {}
    for name in checked(jobids):
        records = records_of(doing, name)
        if not records:
            raise UnknownJob(f"Slurm of {doing.cluster} knows no job {name} (any more)", (), name)
        for record in records:
            doing.needs("owner", record.uid)
        found[name] = records
    return found


def records_of(doing: Doing, name: str) -> list[JobRecord]:
    """The records of a job, a task or a component as they are now; [] if it is gone."""
    parsed = parse(name)
    records = _unfolded(doing, parsed.job_id, doing.slurm.job(parsed.job_id))
    return [one for one in records if _is_meant(one, parsed)]


def _unfolded(doing: Doing, job_id: int, records: list[JobRecord]) -> list[JobRecord]:
    """The records of a job, those apart that Slurm shows as one.

    Of an array's waiting tasks some may be held by an administrator: squeue shows them in
    the array's row, with one priority and all reasons.
    """
    if not any(one.array_job_id and one.state in WAITING and "," in one.reason for one in records):
        return records
    together: dict[int, list[JobRecord]] = {}
    for one in doing.slurm.job(job_id, apart=True):
        together.setdefault(one.job_id, []).append(one)
    return [
        msgspec.structs.replace(same[0], array_task=",".join(one.array_task for one in same))
        for same in together.values()
    ]


def targets(
    name: str,
    records: Sequence[JobRecord],
    is_left: Callable[[JobRecord], bool],
    *,
    whole: bool = True,
) -> list[Target]:
    """What has to be changed of a job.

    Of an array in several states these are its tasks: a command on all of them changes
    some, and fails for others.

    Args:
        name: The job's.
        records: What it is.
        is_left: Whether one of them has to be changed.
        whole: Whether one command may change them all, where all have to be.
    """
    left = [record for record in records if is_left(record)]
    is_torn = len(records) > 1 and all(one.array_job_id for one in records)
    if not left or not is_torn or (whole and len(left) == len(records)):
        return [Target(name, tuple(records))] if left else []
    found = [Target(_name_of(record), (record,)) for record in left]
    if any("..." in target.name for target in found):
        # Slurm does not say which tasks a long row has: no command can name them alone.
        return [Target(name, tuple(records))]
    return found


def _name_of(record: JobRecord) -> str:
    from steward.slurm.changing import name_of

    tasks = record.array_task.partition("%")[0]
    return name_of(record) if tasks.isdigit() else f"{record.array_job_id}_[{tasks}]"


def changed(
    doing: Doing,
    before: Mapping[str, list[JobRecord]],
    left: Mapping[str, Sequence[Target]],
    change: Callable[[Target], bool],
) -> dict[str, Any]:
    """Change jobs one by one, and say of each what became of it.

    Args:
        doing: What it is done with.
        before: The jobs as they were.
        left: What is to be changed of each, see :func:`targets`.
        change: Does it; whether it was there to be changed.

    Raises:
        DoneInPart: Slurm did not let some be changed.
    """
    result: dict[str, Any] = {}
    failed: list[str] = []
    for name, records in before.items():
        line: dict[str, Any] = {"state": _states(records), "changed": False}
        result[name] = line
        if not left[name]:
            line["message"] = "there is nothing to be changed"
        elif doing.dry_run:
            line["would_change"] = True
        else:
            said = {one.name: _done(doing, one, change) for one in left[name]}
            line["changed"] = not all(said.values())
            wrong = {target: why for target, why in said.items() if why}
            if wrong:
                line["message"] = _told(name, wrong, len(said))
                failed.append(name)
    if failed:
        more = f" ({len(failed)} of {len(before)})" if len(before) > 1 else ""
        message = f"job {failed[0]}: {result[failed[0]]['message']}{more}"
        raise DoneInPart(message, result)
    return result


def said_of(record: JobRecord) -> str:
    """What Steward says of a job to its user, the bank or an action of ours; "" for nothing."""
    from steward.slurm.changing import read_comment

    return read_comment(record.admin_comment)


def why_text(doing: Doing, reason: str) -> str:
    """A reason as it is said to a job's user; "" for none."""
    # As the bank says it, too: so what was said is found again, and taken away.
    return f"steward: {ours(reason, doing.speaker)}" if reason.strip() else ""


def _told(name: str, wrong: Mapping[str, str], count: int) -> str:
    target, why = next(iter(wrong.items()))
    if target == name:
        return why
    more = f" ({len(wrong)} of {count} tasks)" if count > 1 else ""
    return f"{target}: {why}{more}"


def _is_meant(record: JobRecord, name: JobName) -> bool:
    if name.offset is not None:
        return record.het_job_id == name.job_id and record.het_offset == name.offset
    if name.task is None:
        return True
    if record.array_job_id != name.job_id:
        return False
    from steward.slurm import covers

    return record.array_task == str(name.task) or covers(record.array_task, name.task)


def _done(doing: Doing, target: Target, change: Callable[[Target], bool]) -> str:
    """Change a job; why it was not, "" where it was."""
    doing.begin()
    try:
        return "" if change(target) else _GONE
    except (SlurmError, BankRefused) as error:
        return str(error)


def grant(doing: Doing, target: Target, *, released: bool, is_requeue: bool = False) -> None:
    """Have the gate decide on what a change of these jobs may cost, as the asker's.

    Args:
        doing: What is done, and for whom.
        target: The jobs.
        released: Whether the change lets them start.
        is_requeue: Whether it is for their next run.

    Raises:
        BankRefused: The gate rejects it.
    """
    record = target.records[0]
    restarts = max(one.restarts for one in target.records) + is_requeue
    job_id = record.array_job_id or record.job_id
    doing.grant(target.name, job_id, restarts=restarts, released=released)


def _states(records: Iterable[JobRecord]) -> str:
    return ",".join(dict.fromkeys(record.state for record in records))
