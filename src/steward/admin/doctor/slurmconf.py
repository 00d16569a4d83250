"""Checks of settings of slurm.conf that decide what can be known of a job's usage."""

from collections.abc import Iterator
from typing import Final

from steward.admin.doctor.findings import Finding, ok, warning
from steward.admin.doctor.ground import Asked, Ground, each_cluster

_LOOKED_AT: Final = "ProctrackType, JobAcctGatherType, TaskEpilog"
_NOT_CONTAINED: Final = ("proctrack/pgid", "proctrack/linuxproc")


def _usage(ground: Ground, one: Asked) -> Iterator[Finding]:
    shown, tells = one.shown, bool(ground.settings.nodes.listen)
    strange = False
    tracked = shown.get("ProctrackType", "")
    if tells and tracked in _NOT_CONTAINED:
        strange = True
        yield warning(
            _LOOKED_AT,
            f"{tracked} has no control groups: processes that leave their task are nobody's",
            "slurm.conf: ProctrackType=proctrack/cgroup",
        )
    gathered = shown.get("JobAcctGatherType", "")
    if not tells and gathered in ("", "jobacct_gather/none"):
        strange = True
        yield warning(
            _LOOKED_AT,
            "neither Slurm nor Steward's agents tell what jobs use",
            "slurm.conf: JobAcctGatherType=jobacct_gather/cgroup",
            "or docs/accounting.md: the SPANK plugin, and the agent",
        )
    epilog = shown.get("TaskEpilog", "")
    if tells and epilog:
        strange = True
        yield warning(
            _LOOKED_AT,
            f"TaskEpilog is {epilog}: its CPU time counts to the task, and is marked so",
            "use Epilog, where it need not run within the task",
        )
    if not strange:
        yield ok(_LOOKED_AT, f"{tracked}, {gathered or 'jobacct_gather/none'}")


usage = each_cluster(_LOOKED_AT, _usage)
