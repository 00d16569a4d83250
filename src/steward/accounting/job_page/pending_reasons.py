"""Pending reasons: explain in words why Slurm does not start a job.

:func:`explain_reason` translates Slurm's reason; :func:`explain_waiting` adds what is behind it:
limits, dependencies, the reservation, the expected start. :func:`apply_new_state` updates a page
whose job has started meanwhile.

squeue prints one word, such as ``QOSMaxCpuPerUserLimit``. Some two hundred of them name a limit
and are composed of parts (whose limit, of which kind, on what), so they are parsed; each other one
has a sentence in :data:`EXPLANATIONS`.
"""

import logging
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Final

import msgspec

from steward.accounting.job_page.job_efficiency import rate_efficiency
from steward.accounting.job_page.requests import PageAnswer, RunPart, Waiting
from steward.core.records import JobRecord
from steward.core.timestamps import to_micros
from steward.slurm import WAITING, PendingJobs, PendingStatus, SlurmError
from steward.slurm.job_changes import read_comment

EXPLANATIONS: Final = {
    "None": "The scheduler has not considered the job yet.",
    "WaitingForScheduling": "The scheduler has not considered the job yet.",
    "SchedDefer": "Slurm defers scheduling at submission; the scheduler considers the job soon.",
    "Priority": "Jobs with a higher priority wait for the same nodes.",
    "Resources": "The job starts next, when its requested resources are free.",
    "Dependency": "The job waits for another job that it depends on.",
    "DependencyNeverSatisfied": (
        "The dependency can no longer be satisfied: the job will never start."
    ),
    "BeginTime": "The begin time of the job is in the future.",
    "JobHeldUser": "The job's owner holds it. Release it with 'scontrol release'.",
    "JobHeldAdmin": "An administrator holds the job. Ask for the reason.",
    "JobHoldMaxRequeue": (
        "Slurm holds the job after too many requeues. Release it with 'scontrol release'."
    ),
    "JobArrayTaskLimit": "The array runs the maximum number of tasks that its '%' allows.",
    "Licenses": "A requested license is in use.",
    "Reservation": "The requested reservation has not begun or is full.",
    "ReservationDeleted": "The requested reservation was deleted: the job will not start.",
    "ReservationInvalid": "The requested reservation does not admit the job.",
    "ReqNodeNotAvail": "A required node is down, drained, reserved or in use.",
    "NodeDown": "A required node is down.",
    "FrontEndDown": "No front-end node is up.",
    "BadConstraints": "No node satisfies the request: the job will not start unchanged.",
    "PartitionDown": "The partition is down and starts no jobs.",
    "PartitionInactive": "The partition is inactive and starts no jobs.",
    "PartitionConfig": (
        "The request exceeds a limit of the partition, or the partition does not admit the job."
    ),
    "PartitionNodeLimit": "The job requests more nodes than the partition allows, or than are up.",
    "PartitionTimeLimit": "The time limit of the job exceeds that of the partition.",
    "AccountNotAllowed": "The partition does not allow the job's account.",
    "QOSNotAllowed": "The partition or the association does not allow the job's QOS.",
    "InvalidAccount": "The account is unknown, or the job's owner may no longer use it.",
    "InvalidQOS": "The QOS is unknown, or the job's owner may no longer use it.",
    "AccountingPolicy": "A limit of the association or QOS prevents the start.",
    "QOSUsageThreshold": "The fair share of the association is below the threshold of the QOS.",
    "AssociationJobLimit": "The association runs its maximum number of jobs.",
    "AssociationResourceLimit": "The association uses its maximum of a resource.",
    "AssociationTimeLimit": "The association has used its time.",
    "QOSJobLimit": "The QOS runs its maximum number of jobs.",
    "QOSResourceLimit": "The QOS uses its maximum of a resource.",
    "QOSTimeLimit": "The QOS has used its time.",
    "MaxMemPerLimit": "The job requests more memory per node or CPU than allowed.",
    "MaxPoweredUpNodes": "The maximum number of nodes is powered up.",
    "MpiPortsBusy": "The required MPI ports are in use.",
    "NvidiaImexChannels": "The required IMEX channels are in use.",
    "PowerNotAvail": "Not enough electric power is available.",
    "PowerReserved": "A reservation holds the required electric power.",
    "BurstBufferResources": "The burst buffer has not enough space.",
    "BurstBufferStageIn": "Slurm is staging the job's data into the burst buffer.",
    "BurstBufferOperation": "A burst buffer operation failed. Ask an administrator.",
    "Cleaning": "Slurm is cleaning up the previous run of the job.",
    "Prolog": "PrologSlurmctld is running.",
    "DeadLine": "The job cannot end before its deadline.",
    "FedJobLock": "Another cluster of the federation decides about the start.",
    "OutOfMemory": "The job ran out of memory.",
    "InactiveLimit": "The srun or salloc of the job stopped answering.",
    "TimeLimit": "The job reached its time limit.",
    "NonZeroExitCode": "The job failed with a non-zero exit code.",
    "RaisedSignal": "A signal ended the job.",
    "JobLaunchFailure": "The job could not be launched on its nodes. Ask an administrator.",
    "SystemFailure": "Slurm, a file system or the network failed; the job waits for a retry.",
    "BlockMaxError": "The requested block of nodes had too many errors.",
    "BlockFreeAction": "Slurm is freeing the requested block of nodes.",
    "InvalidReason": "Slurm reports no valid reason.",
    "InvaildReason": "Slurm reports no valid reason.",
}

_THINGS: Final = {
    "cpu": ("CPUs", "cpu"),
    "mem": ("memory", "mem"),
    "memory": ("memory", "mem"),
    "node": ("nodes", "node"),
    "energy": ("energy", "energy"),
    "gres": ("GRES, such as GPUs", "gres"),
    "license": ("licenses", "license"),
    "bb": ("burst buffer", "bb"),
    "billing": ("billing", "billing"),
    "jobs": ("running jobs", ""),
    "submitjobs": ("jobs queued and running", ""),
    "submitjob": ("jobs queued and running", ""),
    "wall": ("total time of jobs", ""),
    "wallduration": ("time limit", ""),
    "unknown": ("a resource", ""),
}
_LIMIT: Final = re.compile(
    r"(?P<whose>Assoc|QOS|)(?P<kind>Grp|Max|Min)"
    r"(?P<thing>Cpu|CPU|Mem|Memory|Node|Energy|GRES|License|BB|Billing|Jobs|SubmitJobs?|"
    r"Wall|WallDuration|Unknown)"
    r"(?P<minutes>RunMinutes|Minutes|RunMins)?"
    r"(?P<per>PerJob|PerNode|PerUser|PerAccount)?(?:NotSatisfied)?(?:Limit)?"
)
_OWNERS: Final = {"Assoc": "the association", "QOS": "the QOS", "": "the QOS"}
_PER: Final = {
    "PerJob": "of one job",
    "PerNode": "on one node",
    "PerUser": "of one user",
    "PerAccount": "of one account",
}


class ReasonLimit(msgspec.Struct, frozen=True, kw_only=True):
    """Limit of an association or QOS that a reason names.

    Attributes:
        whose: ``assoc`` or ``qos``.
        name: Name in sacctmgr and ``scontrol show assoc_mgr``: GrpTRES, MaxJobsPU …
        tres: The limited TRES: ``cpu``, ``mem`` …; "" for other limits.
    """

    whose: str
    name: str
    tres: str = ""


class PendingReason(msgspec.Struct, frozen=True, kw_only=True):
    """Pending reason with its explanation.

    Attributes:
        code: Slurm's word.
        words: Explanation, one sentence; "" for an unknown word.
        detail: Slurm's addition after a comma, such as the unavailable nodes.
        limit: The limit behind it; None if it is not a limit of an association or QOS.
    """

    code: str
    words: str
    detail: str = ""
    limit: ReasonLimit | None = None


def explain_reason(text: str) -> PendingReason:
    """Explain a pending reason.

    Args:
        text: Reason as squeue prints it, such as ``ReqNodeNotAvail, UnavailableNodes:n1``.
    """
    code, _, detail = text.partition(",")
    code = code.strip().strip("()")
    detail = detail.strip()
    if code in EXPLANATIONS:
        return PendingReason(code=code, words=EXPLANATIONS[code], detail=detail)
    match = _LIMIT.fullmatch(code)
    if match:
        return PendingReason(
            code=code, words=_build_sentence(match), detail=detail, limit=_build_limit(match)
        )
    # Plugins and administrators may write anything here, so it is quoted, not explained.
    return PendingReason(code=code, words="", detail=detail)


def _build_sentence(match: re.Match[str]) -> str:
    """Build the explanation of a limit from the parts of its name."""
    thing, _ = _THINGS[match["thing"].lower()]
    owner, per = _OWNERS[match["whose"]], match["per"] or ""
    if match["minutes"]:
        prefix = (
            "time of running jobs times " if match["minutes"].startswith("Run") else "time times "
        )
        thing = prefix + thing
    if match["kind"] == "Min":
        return f"The request is below the minimum of {owner}: {thing}."
    if match["kind"] == "Grp":
        return f"The jobs of {owner} together use their maximum: {thing}."
    if per in ("PerJob", "PerNode") or match["thing"] == "WallDuration":
        suffix = " on a node" if per == "PerNode" else ""
        return f"The request exceeds the maximum of {owner} for one job{suffix}: {thing}."
    subject = {"PerUser": "The job's owner uses", "PerAccount": "The account uses"}.get(per)
    if subject is None:
        return f"The job's owner uses the maximum that {owner} allows: {thing}."
    return f"{subject} the maximum that {owner} allows: {thing}."


def _build_limit(match: re.Match[str]) -> ReasonLimit:
    """Build the limit's name, as sacctmgr calls it, from the parts of the reason."""
    whose = "assoc" if match["whose"] == "Assoc" else "qos"
    thing = match["thing"].lower()
    kind, per = match["kind"], match["per"] or ""
    suffix = {"PerJob": "PJ", "PerNode": "PN", "PerUser": "PU", "PerAccount": "PA"}.get(per, "")
    if thing in ("jobs", "submitjobs", "submitjob", "wall", "wallduration"):
        stem = {"jobs": "Jobs", "wall": "Wall", "wallduration": "WallPJ"}.get(thing, "SubmitJobs")
        plain = "" if whose == "assoc" or kind == "Grp" or stem == "WallPJ" else suffix
        return ReasonLimit(whose=whose, name=f"{kind}{stem}{plain}")
    minutes = {"Minutes": "Mins", "RunMinutes": "RunMins", "RunMins": "RunMins"}
    name = f"{kind}TRES{minutes.get(match['minutes'] or '', '')}"
    if kind == "Max" or kind == "Min":
        name += suffix if not (kind == "Min" and not suffix) else "PJ"
    return ReasonLimit(whose=whose, name=name, tres=_THINGS[thing][1])


log = logging.getLogger(__name__)

_DEPENDENCY: Final = re.compile(r"(\w+):([0-9]+)(?:_(?:\*|[0-9]+))?(?:\+[0-9]+)?(?:\((\w+)\))?")
_AFTER: Final = {
    "after": "has started",
    "afterany": "has ended",
    "afterok": "has completed",
    "afternotok": "has failed",
    "aftercorr": "has completed, task by task",
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
"""Settings of the partition shown with each reason that concerns it."""
_MOST_BEHIND: Final = 20

GetState = Callable[[int], str]
"""Returns the state of another job by raw id; "" if unknown or not visible to the requester."""


def explain_waiting(
    record: JobRecord, pending: PendingJobs | None, state_of: GetState, *, may_read: bool = True
) -> Waiting | PendingStatus:
    """Return why a job is pending, or its new state if Slurm says that it no longer is.

    Args:
        record: Latest known record of the job.
        pending: Client for the cluster's Slurm; None if it cannot be queried.
        state_of: Returns the states of jobs that it depends on.
        may_read: Whether the requester may read the job's comments.
    """
    status: PendingStatus | None = None
    problem = ""
    details: list[str] = []
    if pending is not None:
        try:
            status = pending.query_status(record.job_id)
        except SlurmError as error:
            problem = "Slurm does not answer"
            log.info("job %d: %s", record.job_id, error)
        else:
            problem = "" if status is not None else "Slurm no longer knows the job"
    if status is not None and status.state not in WAITING:
        return status
    reason = explain_reason(status.reason if status is not None else record.reason)
    details += _list_job_details(record, reason, state_of)
    hold_reason = ""
    if reason.code == "JobHeldAdmin" and may_read:
        hold_reason = _get_hold_reason(record, None if problem else pending)
        if hold_reason:
            details.append("the bank releases it when its account can pay")
    if pending is not None and not problem:
        try:
            details += _list_limits(record, reason, pending)
        except SlurmError as error:
            # Slurm decides who may see limits; the reason is shown without them.
            log.info("job %d: %s", record.job_id, error)
    return Waiting(
        reason=reason.code,
        explanation=f"The bank holds it: {hold_reason}." if hold_reason else reason.words,
        details=tuple(details[:_MOST_BEHIND]),
        expected_start=status.expected_start if status is not None else None,
        expected_nodes=status.expected_nodes if status is not None else "",
        priority=status.priority if status is not None else record.priority,
        queried=status is not None,
        error=problem,
    )


def _get_hold_reason(record: JobRecord, pending: PendingJobs | None) -> str:
    """Return the reason Steward gave when it held the job; "" if somebody else held it."""
    if pending is not None:
        try:
            return pending.read_hold_reason(record.job_id).rstrip(".")
        except SlurmError as error:
            log.info("job %d: %s", record.job_id, error)
    return read_comment(record.admin_comment).rstrip(".")


def apply_new_state(page: PageAnswer, status: PendingStatus) -> PageAnswer:
    """Update the page of a job that is pending in jobs.db but no longer according to Slurm."""
    start = status.expected_start if status.state == "RUNNING" else None
    record = msgspec.structs.replace(page.record, state=status.state, reason="")
    runs = page.runs
    if start is not None:
        nodes = status.expected_nodes
        record = msgspec.structs.replace(record, start=start, nodelist=nodes)
        last = runs[-1:]
        runs = (*runs[:-1], *(_start_run(run, start, nodes, page.now) for run in last))
    return msgspec.structs.replace(page, record=record, runs=runs, ahead=True)


def _start_run(run: RunPart, start: datetime, nodelist: str, now: datetime) -> RunPart:
    """Return a run's part with the state RUNNING."""
    line = msgspec.structs.replace(
        run.line, state="RUNNING", reason="", start_us=to_micros(start), nodelist=nodelist
    )
    return msgspec.structs.replace(
        run, line=line, efficiency=rate_efficiency(line, (), to_micros(now))
    )


def _list_job_details(
    record: JobRecord, reason: PendingReason, state_of: GetState
) -> Iterator[str]:
    """Yield what the job's own record tells about its reason."""
    if reason.detail:
        yield reason.detail
    if record.dependency and reason.code in ("Dependency", "DependencyNeverSatisfied"):
        yield from _explain_dependencies(record.dependency, state_of)
    if reason.code == "JobArrayTaskLimit" and "%" in record.array_task:
        yield f"{record.array_task.rpartition('%')[2]} tasks at a time"
    if reason.code == "Licenses" and record.licenses:
        yield f"requested {record.licenses}"
    if reason.code in ("Resources", "BadConstraints"):
        if record.tres_requested:
            yield f"requested {record.tres_requested}"
        if record.constraints:
            yield f"on nodes with {record.constraints}"


def _explain_dependencies(text: str, state_of: GetState) -> Iterator[str]:
    """Yield one phrase for each job that a dependency names."""
    if "singleton" in text:
        yield "--dependency=singleton: one job of this name and owner at a time"
    for kind, job, outcome in _DEPENDENCY.findall(text):
        condition = _AFTER.get(kind, f"satisfies {kind!r}")
        state = state_of(int(job))
        state_text = f" (it is {state})" if state else ""
        failure_text = "; this will never happen" if outcome == "failed" else ""
        yield f"until job {job} {condition}{state_text}{failure_text}"


def _list_limits(record: JobRecord, reason: PendingReason, pending: PendingJobs) -> Iterator[str]:
    """Yield what Slurm tells about the limit, partition or reservation behind a reason."""
    if reason.limit is not None:
        limits = pending.read_limits(
            user=record.user, uid=record.uid, account=record.account, qos=record.qos
        )
        owner = record.account if reason.limit.whose == "assoc" else record.qos
        owner_kind = "association" if reason.limit.whose == "assoc" else "QOS"
        for name, value in _select_limit(limits.get(reason.limit.whose, {}), reason.limit):
            yield f"{owner_kind} {owner}: {name}={value} (usage in brackets)"
    setting_names = _SETTINGS.get(reason.code, ())
    if setting_names:
        for partition in record.partition.split(","):
            values = pending.partition(partition)
            settings = [f"{name}={values[name]}" for name in setting_names if name in values]
            if settings:
                yield f"partition {partition}: {' '.join(settings)}"
    if reason.code.startswith("Reservation") and record.reservation:
        values = pending.read_reservation(record.reservation)
        settings = [f"{name}={values[name]}" for name in ("StartTime", "EndTime") if name in values]
        if settings:
            yield f"reservation {record.reservation}: {' '.join(settings)} (UTC)"


def _select_limit(limits: dict[str, str], limit: ReasonLimit) -> Iterator[tuple[str, str]]:
    """Yield the limit that a reason names, restricted to its TRES if it names one."""
    value = limits.get(limit.name)
    if value is None:
        return
    parts = [part for part in value.split(",") if part.partition("=")[0] == limit.tres]
    yield limit.name, ",".join(parts) if limit.tres and parts else value
