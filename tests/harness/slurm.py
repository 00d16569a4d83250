"""Stand-ins for the commands that show and change a machine, and what they print of a node."""

import stat
from pathlib import Path
from typing import Final

from steward.slurm import Machine
from steward.slurm.settings import ClusterSettings

LINE: Final = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=1  CPUAlloc=2 CPUEfctv=4 CPUTot=4 CPULoad=0.57 "
    "AvailableFeatures=a,b ActiveFeatures=a Gres=gpu:2(S:0) NodeAddr=10.0.0.1 NodeHostName=h1 "
    "Port=17001 Version=24.11.5 OS=Linux 6.1 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=4096 "
    "AllocMem=0 FreeMem=N/A Sockets=4 Boards=1 State=DOWN+DRAIN+NOT_RESPONDING "
    "ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=main,debug  "
    "BootTime=2026-11-22T02:09:42 SlurmdStartTime=None LastBusyTime=2026-11-22T06:16:42 "
    "ResumeAfterTime=None CfgTRES=cpu=4,mem=4G,billing=4 AllocTRES= CurrentWatts=0 AveWatts=0"
)


class Stage:
    """Stand-ins that print what a test writes for their arguments, and fail where it says so."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "log").touch()
        for program in ("scontrol", "sinfo", "sacctmgr", "squeue"):
            path = root / program
            path.write_text(
                f'#!/bin/sh\necho "{program} $*" >> {root}/log\n'
                f'file="{root}/{program} $(echo "$*" | tr / _)"\n'
                'test -e "$file" || { echo "unasked for: $*" >&2; exit 3; }\n'
                '. "$file"\n'
            )
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        self.answer("squeue --version", "slurm-wlm 24.11.5\n")
        self.machine = Machine("c1", ClusterSettings(slurm_bin=str(root)))

    def answer(self, command: str, out: str, code: int = 0) -> None:
        (self.root / (command + ".out")).write_text(out)
        (self.root / command).write_text(f"cat '{self.root}/{command}.out'; exit {code}\n")

    def nodes(self, *lines: str) -> None:
        self.answer("scontrol -a -o show node", "\n".join(lines) + "\n")

    def asked(self) -> list[str]:
        return (self.root / "log").read_text().splitlines()
