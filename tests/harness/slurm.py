"""Scripted Slurms: as commands, as rows of squeue, as objects."""

import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from harness.events import NOON
from harness.site import Clock
from steward.capture.queue_polls import QueuePoller
from steward.core.events import (
    CONTROLLER_STATE,
    Event,
)
from steward.core.records import JobRecord
from steward.slurm import ClusterQueries, QueueSnapshot, Slurm, SlurmDown, SlurmUnavailable
from steward.slurm.queue import QueueFormat
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
    """Stand-ins for Slurm's commands, with output and exit code set by the test."""

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
        self.machine = ClusterQueries("c1", ClusterSettings(slurm_bin=str(root)))

    def answer(self, command: str, out: str, code: int = 0) -> None:
        (self.root / (command + ".out")).write_text(out)
        (self.root / command).write_text(f"cat '{self.root}/{command}.out'; exit {code}\n")

    def nodes(self, *lines: str) -> None:
        self.answer("scontrol -a -o show node", "\n".join(lines) + "\n")

    def asked(self) -> list[str]:
        return (self.root / "log").read_text().splitlines()


DEFAULTS = {
    "JobID": "1",
    "ArrayTaskID": "N/A",
    "HetJobID": "N/A",
    "HetJobOffset": "N/A",
    "UserID": "0",
    "GroupID": "0",
    "State": "RUNNING",
    "BatchFlag": "1",
    "RestartCnt": "0",
    "SubmitTime": "2026-03-01T12:00:00",
    "EligibleTime": "2026-03-01T12:00:00",
    "StartTime": "2026-03-01T12:00:05",
    "EndTime": "2026-03-01T13:00:05",
    "TimeLimit": "1:00:00",
    "NumNodes": "1",
    "NumCPUs": "1",
    "NumTasks": "1",
    "exit_code": "0",
    "DerivedEC": "0",
    "TimeUsed": "0:00",
    "PriorityLong": "1",
    "BatchHost": "n/a",
    "Origin": "NA",
    "SiblingsActive": "NA",
    "NodeList": "n1",
    "tres-alloc": "cpu=1,node=1,billing=1",
    "OverSubscribe": "OK",
    "Exclusive": "NO",
    "SLUID": "",
    "Reason": "None",
}


def squeue_row(form: QueueFormat, **shown: str | bytes) -> bytes:
    """Return one line of ``squeue`` with its newline; ``shown`` sets fields by squeue's names."""
    shown.setdefault("ArrayJobID", shown.get("JobID", DEFAULTS["JobID"]))
    line = b""
    for field in re.split(",(?=[A-Za-z_-]+:)", form.format_text):
        name, _, suffix = field.partition(":")
        value = shown.get(name, shown.get(name.replace("-", "_"), DEFAULTS.get(name, "(null)")))
        width = re.match(r"\d*", suffix)
        assert width is not None
        text = value if isinstance(value, bytes) else value.encode()
        if width[0]:
            text = text[: int(width[0])].ljust(int(width[0]))
        line += text + suffix[width.end() :].encode()
    return line + b"\n"


def record(job_id: int, **fields: object) -> JobRecord:
    values = {"name": f"job{job_id}", "uid": 1000, "state": "PENDING", "submit": NOON, **fields}
    return JobRecord(job_id=job_id, **values)  # type: ignore[arg-type] # fields of every type


class Scripted(Slurm):
    """A Slurm whose replies the test sets."""

    def __init__(self) -> None:
        super().__init__("c1", ClusterSettings())
        self.jobs: dict[int, JobRecord] = {}
        self.told: list[JobRecord] | None = None
        self.away = False
        self.down = False
        self.cost_s = 0.0
        self.asked: list[int] = []
        self.looks = 0
        self.passed_over = 0

    def queue(self, previous: Mapping[int, int] | None = None) -> QueueSnapshot:
        self.looks += 1
        if self.down:
            raise SlurmDown("cluster c1: 'squeue' failed: connect failure")
        if self.away:
            raise SlurmUnavailable("cluster c1: 'squeue' failed: Unable to contact")
        rows = {job_id: hash(str(job)) for job_id, job in self.jobs.items()}
        new = tuple(job for i, job in self.jobs.items() if (previous or {}).get(i) != rows[i])
        return QueueSnapshot(
            records=new,
            rows=rows,
            taken_at=NOON,
            cost_s=self.cost_s,
            passed_over=self.passed_over,
        )

    def job(self, job_id: int, *, apart: bool = False) -> list[JobRecord]:
        self.asked.append(job_id)
        if self.away:
            raise SlurmUnavailable("cluster c1: 'squeue' failed: Unable to contact")
        return [self.jobs[job_id]] if job_id in self.jobs else []

    def has_accounting(self) -> bool:
        return self.told is not None

    def query_accounting_end(self, job_id: int) -> list[JobRecord]:
        return self.query_accounting(job_id)

    def query_accounting(self, job_id: int) -> list[JobRecord]:
        assert self.told is not None
        return [job for job in self.told if job.job_id == job_id]


@pytest.fixture
def slurm() -> Scripted:
    return Scripted()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def snapshots(slurm: Scripted, clock: Clock) -> QueuePoller:
    return QueuePoller("c1", ClusterSettings(snapshot_interval_s=0.0), slurm, clock=clock)


@pytest.fixture
def journal() -> list[Event]:
    return []


def kinds(journal: list[Event]) -> list[str]:
    return [event.kind for event in journal if event.kind != CONTROLLER_STATE]
