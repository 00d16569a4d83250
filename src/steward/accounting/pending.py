"""Why a job waits, in words: a table of Slurm's reasons.

squeue prints one word (``QOSMaxCpuPerUserLimit``). Some two hundred of them say
which limit was reached, and are made of parts (whose limit, of what kind, on
what), so they are taken apart here; each of the others has a sentence of its own.
"""

import re
from typing import Final

import msgspec

EXPLANATIONS: Final = {
    "None": "Slurm's scheduler has not looked at it yet.",
    "WaitingForScheduling": "Slurm's scheduler has not looked at it yet.",
    "SchedDefer": "Slurm is set to start no job at its submit; the scheduler looks at it soon.",
    "Priority": "Jobs of a higher priority wait for the same nodes and go first.",
    "Resources": "It is next, as soon as the nodes that it asked for are free.",
    "Dependency": "It waits for another job, as it asked to.",
    "DependencyNeverSatisfied": (
        "The job that it waits for ended otherwise than it asked for: it will never start."
    ),
    "BeginTime": "The time before which it is not to begin has not come.",
    "JobHeldUser": "Its owner holds it: 'scontrol release' lets it go.",
    "JobHeldAdmin": "An administrator holds it: ask them why.",
    "JobHoldMaxRequeue": "It was requeued so often that Slurm holds it: 'scontrol release' lets it "
    "go again.",
    "JobArrayTaskLimit": "As many tasks of its array run as its '%' allows at a time.",
    "Licenses": "A licence that it asked for is in use.",
    "Reservation": "The reservation that it asked for has not begun, or is full.",
    "ReservationDeleted": "The reservation that it asked for was removed: it will not start.",
    "ReservationInvalid": "The reservation that it asked for does not let it in.",
    "ReqNodeNotAvail": "A node that it needs is down, drained, reserved or in use.",
    "NodeDown": "A node that it needs is down.",
    "FrontEndDown": "No front-end node is up to start it.",
    "BadConstraints": "No node has what it asked for: it will not start as it is.",
    "PartitionDown": "Its partition is down and starts no job.",
    "PartitionInactive": "Its partition is inactive and starts no job.",
    "PartitionConfig": "It asks for more than its partition gives, or for what that does not let.",
    "PartitionNodeLimit": "It asks for more nodes than its partition gives a job, or than are up.",
    "PartitionTimeLimit": "Its time limit is longer than its partition's.",
    "AccountNotAllowed": "Its partition does not let its account in.",
    "QOSNotAllowed": "Its partition or its association does not let its QOS in.",
    "InvalidAccount": "Its account is not known, or not open to its owner any more.",
    "InvalidQOS": "Its QOS is not known, or not open to its owner any more.",
    "AccountingPolicy": "A limit of its association or QOS does not let it start.",
    "QOSUsageThreshold": "Its association's fair share is below what its QOS asks for.",
    "AssociationJobLimit": "Its association runs as many jobs as it may.",
    "AssociationResourceLimit": "Its association uses as much as it may.",
    "AssociationTimeLimit": "Its association has used the time that it may.",
    "QOSJobLimit": "Its QOS runs as many jobs as it may.",
    "QOSResourceLimit": "Its QOS is used as much as it may be.",
    "QOSTimeLimit": "Its QOS has used the time that it may.",
    "MaxMemPerLimit": "It asks for more memory on a node, or for a CPU, than is allowed.",
    "MaxPoweredUpNodes": "As many nodes are powered up as the site allows.",
    "MpiPortsBusy": "The ports that its MPI needs are in use.",
    "NvidiaImexChannels": "The IMEX channels that it needs are in use.",
    "PowerNotAvail": "There is not enough electric power for it now.",
    "PowerReserved": "A reservation keeps the electric power that it needs.",
    "BurstBufferResources": "The burst buffer has no room for it now.",
    "BurstBufferStageIn": "Its data are being brought to the burst buffer.",
    "BurstBufferOperation": "The burst buffer failed at something: an administrator has to look.",
    "Cleaning": "Its former run is still being cleaned up.",
    "Prolog": "Its PrologSlurmctld still runs.",
    "DeadLine": "It cannot end before its deadline any more.",
    "FedJobLock": "Another cluster of the federation decides whether it starts there.",
    "OutOfMemory": "It ran out of memory.",
    "InactiveLimit": "Its srun or salloc did not answer any more.",
    "TimeLimit": "It reached its time limit.",
    "NonZeroExitCode": "It failed: its exit code was not 0.",
    "RaisedSignal": "It ended by a signal.",
    "JobLaunchFailure": "It could not be started on its nodes, and waits for an administrator.",
    "SystemFailure": "Slurm, a file system or the network failed, and it waits for another try.",
    "BlockMaxError": "The block of nodes that it asked for had too many errors.",
    "BlockFreeAction": "The block of nodes that it asked for is being freed.",
    "InvalidReason": "Slurm gives no valid reason.",
    "InvaildReason": "Slurm gives no valid reason.",
}

_THINGS: Final = {
    "cpu": ("CPUs", "cpu"),
    "mem": ("memory", "mem"),
    "memory": ("memory", "mem"),
    "node": ("nodes", "node"),
    "energy": ("energy", "energy"),
    "gres": ("GRES (GPUs and the like)", "gres"),
    "license": ("licences", "license"),
    "bb": ("burst buffer", "bb"),
    "billing": ("billing", "billing"),
    "jobs": ("running jobs", ""),
    "submitjobs": ("jobs queued and running", ""),
    "submitjob": ("jobs queued and running", ""),
    "wall": ("time of jobs, added up", ""),
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
_OWNERS: Final = {"Assoc": "its association", "QOS": "its QOS", "": "its QOS"}
_PER: Final = {
    "PerJob": "of one job",
    "PerNode": "on one node",
    "PerUser": "of one user",
    "PerAccount": "of one account",
}


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """The limit that a reason names.

    Attributes:
        whose: ``assoc`` or ``qos``.
        name: As sacctmgr and ``scontrol show assoc_mgr`` call it: GrpTRES, MaxJobsPU …
        tres: Of a limit on TRES which one: ``cpu``, ``mem`` …; "" for another.
    """

    whose: str
    name: str
    tres: str = ""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """A reason, explained.

    Attributes:
        code: Slurm's word.
        words: A sentence.
        detail: What Slurm adds behind a comma: the nodes that are not available.
        limit: The limit behind it; None where it is none of an association or QOS.
    """

    code: str
    words: str
    detail: str = ""
    limit: Limit | None = None


def explain(text: str) -> Reason:
    """What a reason means.

    Args:
        text: As squeue prints it, ``ReqNodeNotAvail, UnavailableNodes:n1`` too.
    """
    code, _, detail = text.partition(",")
    code = code.strip().strip("()")
    detail = detail.strip()
    if code in EXPLANATIONS:
        return Reason(code=code, words=EXPLANATIONS[code], detail=detail)
    match = _LIMIT.fullmatch(code)
    if match:
        return Reason(code=code, words=_sentence(match), detail=detail, limit=_limit(match))
    # A plugin or an administrator may write anything here: it is quoted, not explained.
    return Reason(code=code, words="", detail=detail)


def _sentence(match: re.Match[str]) -> str:
    thing, _ = _THINGS[match["thing"].lower()]
    owner, per = _OWNERS[match["whose"]], match["per"] or ""
    if match["minutes"]:
        of = "time of running jobs times " if match["minutes"].startswith("Run") else "time times "
        thing = of + thing
    if match["kind"] == "Min":
        return f"It asks for less than the least that {owner} wants: {thing}."
    if match["kind"] == "Grp":
        return f"All jobs of {owner} together use what they may: {thing}."
    if per in ("PerJob", "PerNode") or match["thing"] == "WallDuration":
        where = " on a node" if per == "PerNode" else ""
        return f"It asks for more than {owner} lets one job have{where}: {thing}."
    who = {"PerUser": "Its owner uses", "PerAccount": "Its account uses"}.get(per)
    if who is None:
        return f"Its owner has as much as {owner} lets one have: {thing}."
    return f"{who} as much as {owner} lets one have: {thing}."


def _limit(match: re.Match[str]) -> Limit:
    whose = "assoc" if match["whose"] == "Assoc" else "qos"
    thing = match["thing"].lower()
    kind, per = match["kind"], match["per"] or ""
    suffix = {"PerJob": "PJ", "PerNode": "PN", "PerUser": "PU", "PerAccount": "PA"}.get(per, "")
    if thing in ("jobs", "submitjobs", "submitjob", "wall", "wallduration"):
        stem = {"jobs": "Jobs", "wall": "Wall", "wallduration": "WallPJ"}.get(thing, "SubmitJobs")
        plain = "" if whose == "assoc" or kind == "Grp" or stem == "WallPJ" else suffix
        return Limit(whose=whose, name=f"{kind}{stem}{plain}")
    minutes = {"Minutes": "Mins", "RunMinutes": "RunMins", "RunMins": "RunMins"}
    name = f"{kind}TRES{minutes.get(match['minutes'] or '', '')}"
    if kind == "Max" or kind == "Min":
        name += suffix if not (kind == "Min" and not suffix) else "PJ"
    return Limit(whose=whose, name=name, tres=_THINGS[thing][1])
