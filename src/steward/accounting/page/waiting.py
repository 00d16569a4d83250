"""What a waiting job waits for: Slurm's reason in words, and what is behind it."""

import logging
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Final

import msgspec

from steward.accounting.page.formulas import efficiency
from steward.accounting.page.shapes import PageAnswer, RunPart, Waiting
from steward.accounting.pending import Limit, Reason, explain
from steward.core.moments import micros
from steward.core.records import JobRecord
from steward.slurm import WAITING, Outlook, Pending, SlurmError
from steward.slurm.changing import read_comment

log = logging.getLogger(__name__)

_DEPENDENCY: Final = re.compile(r"(\w+):([0-9]+)(?:_(?:\*|[0-9]+))?(?:\+[0-9]+)?(?:\((\w+)\))?")
_AFTER: Final = {
    "after": "has started",
    "afterany": "has ended",
    "afterok": "has ended well",
    "afternotok": "has failed",
    "aftercorr": "has ended well, task by task",
    "afterburstbuffer": "has staged out its data",
}
_SETTINGS: Final = {
    "PartitionTimeLimit": ("MaxTime", "DefaultTime"),
    "PartitionNodeLimit": ("MaxNodes", "MinNodes", "TotalNodes", "State"),
    "PartitionDown": ("State",),
    "PartitionInactive": ("State",),
    "PartitionConfig": ("MaxTime", "MaxNodes", "MaxCPUsPerNode", "MaxMemPerNode", "State"),
    "AccountNotAllowed": ("AllowAccounts", "DenyAccounts"),
    "QOSNotAllowed": ("AllowQos", "DenyQos"),
    "MaxMemPerLimit": ("MaxMemPerNode", "MaxMemPerCPU"),
}
"""What of its partition is told of a reason that has to do with it."""
_MOST_BEHIND: Final = 20

StateOf = Callable[[int], str]
"""The state of another job by its raw id; "" where that is not known, or not for the asker."""


def waiting(
    record: JobRecord, pending: Pending | None, state_of: StateOf, *, may_read: bool = True
) -> Waiting | Outlook:
    """Why a job waits; how it stands where Slurm says that it does not wait any more.

    Args:
        record: The latest that is known of it.
        pending: Asks its cluster's Slurm; None where that cannot be asked.
        state_of: Tells of jobs that it depends on.
        may_read: Whether the asker may read the job's comments.
    """
    outlook: Outlook | None = None
    trouble = ""
    behind: list[str] = []
    if pending is not None:
        try:
            outlook = pending.outlook(record.job_id)
        except SlurmError as error:
            trouble = "Slurm does not answer"
            log.info("job %d: %s", record.job_id, error)
        else:
            trouble = "" if outlook is not None else "Slurm does not know it any more"
    if outlook is not None and outlook.state not in WAITING:
        return outlook
    reason = explain(outlook.reason if outlook is not None else record.reason)
    behind += _held_up_by(record, reason, state_of)
    held = ""
    if reason.code == "JobHeldAdmin" and may_read:
        held = _why_held(record, None if trouble else pending)
        if held:
            behind.append("it is let go by itself when its account can pay for it")
    if pending is not None and not trouble:
        try:
            behind += _limits(record, reason, pending)
        except SlurmError as error:
            # Who may see limits is Slurm's to say; the reason stands without them.
            log.info("job %d: %s", record.job_id, error)
    return Waiting(
        reason=reason.code,
        words=f"The bank holds it: {held}." if held else reason.words,
        behind=tuple(behind[:_MOST_BEHIND]),
        expected_start=outlook.expected_start if outlook is not None else None,
        expected_nodes=outlook.expected_nodes if outlook is not None else "",
        priority=outlook.priority if outlook is not None else record.priority,
        asked=outlook is not None,
        trouble=trouble,
    )


def _why_held(record: JobRecord, pending: Pending | None) -> str:
    """What Steward said when it held the job; "" where somebody else did."""
    if pending is not None:
        try:
            return pending.why_held(record.job_id).rstrip(".")
        except SlurmError as error:
            log.info("job %d: %s", record.job_id, error)
    return read_comment(record.admin_comment).rstrip(".")


def gone_on(answer: PageAnswer, now: Outlook) -> PageAnswer:
    """The page of a job that waits by the books, and by Slurm's own answer does not any more."""
    start = now.expected_start if now.state == "RUNNING" else None
    record = msgspec.structs.replace(answer.record, state=now.state, reason="")
    runs = answer.runs
    if start is not None:
        nodes = now.expected_nodes
        record = msgspec.structs.replace(record, start=start, nodelist=nodes)
        last = runs[-1:]
        runs = (*runs[:-1], *(_started(run, start, nodes, answer.now) for run in last))
    return msgspec.structs.replace(answer, record=record, runs=runs, ahead=True)


def _started(run: RunPart, start: datetime, nodelist: str, now: datetime) -> RunPart:
    line = msgspec.structs.replace(
        run.line, state="RUNNING", reason="", start_us=micros(start), nodelist=nodelist
    )
    return msgspec.structs.replace(run, line=line, efficiency=efficiency(line, (), micros(now)))


def _held_up_by(record: JobRecord, reason: Reason, state_of: StateOf) -> Iterator[str]:
    """What the job's own record says of its reason."""
    if reason.detail:
        yield reason.detail
    if record.dependency and reason.code in ("Dependency", "DependencyNeverSatisfied"):
        yield from _dependencies(record.dependency, state_of)
    if reason.code == "JobArrayTaskLimit" and "%" in record.array_task:
        yield f"{record.array_task.rpartition('%')[2]} tasks at a time"
    if reason.code == "Licenses" and record.licenses:
        yield f"asked for {record.licenses}"
    if reason.code in ("Resources", "BadConstraints"):
        if record.tres_requested:
            yield f"asked for {record.tres_requested}"
        if record.constraints:
            yield f"on nodes with {record.constraints}"


def _dependencies(text: str, state_of: StateOf) -> Iterator[str]:
    if "singleton" in text:
        yield "no other job of its owner with the same name may run beside it"
    for kind, job, standing in _DEPENDENCY.findall(text):
        until = _AFTER.get(kind, f"is done as {kind!r} asks")
        state = state_of(int(job))
        now = f" (it is {state})" if state else ""
        never = "; that will never be" if standing == "failed" else ""
        yield f"until job {job} {until}{now}{never}"


def _limits(record: JobRecord, reason: Reason, pending: Pending) -> Iterator[str]:
    """What Slurm says of the limit that is behind a reason."""
    if reason.limit is not None:
        limits = pending.limits(
            user=record.user, uid=record.uid, account=record.account, qos=record.qos
        )
        owner = record.account if reason.limit.whose == "assoc" else record.qos
        which = "association" if reason.limit.whose == "assoc" else "QOS"
        for name, value in _those_meant(limits.get(reason.limit.whose, {}), reason.limit):
            yield f"{which} {owner}: {name}={value}, in use in brackets"
    wanted = _SETTINGS.get(reason.code, ())
    if wanted:
        for partition in record.partition.split(","):
            shown = pending.partition(partition)
            told = [f"{name}={shown[name]}" for name in wanted if name in shown]
            if told:
                yield f"partition {partition}: {' '.join(told)}"
    if reason.code.startswith("Reservation") and record.reservation:
        shown = pending.reservation(record.reservation)
        told = [f"{name}={shown[name]}" for name in ("StartTime", "EndTime") if name in shown]
        if told:
            yield f"reservation {record.reservation}: {' '.join(told)} (UTC)"


def _those_meant(limits: dict[str, str], limit: Limit) -> Iterator[tuple[str, str]]:
    """The one limit that a reason names, of its TRES alone where it names one."""
    value = limits.get(limit.name)
    if value is None:
        return
    parts = [part for part in value.split(",") if part.partition("=")[0] == limit.tres]
    yield limit.name, ",".join(parts) if limit.tres and parts else value
