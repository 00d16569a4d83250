"""Accounting Sites: one cluster whose jobs.db contains the runs and launches that a test adds."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from harness.events import NOVEMBER, make_event
from harness.jobs import open_jobs
from harness.site import ADA, Site
from steward.capture.settings import NodesSettings
from steward.core.access import Caller, ClusterRoles
from steward.core.events import (
    JOB_END,
    JOB_SCRIPT,
    NODE_GAP,
    STEP_END,
    STEP_START,
    TASK_EXIT,
    JobFacts,
    JobScript,
)
from steward.core.records import JobRecord
from steward.core.timestamps import to_micros
from steward.core.usage import ExitedTasks, NodeGap, StepEnd, StepStart, TaskUsage

START = NOVEMBER - timedelta(hours=2)


def make_site(directory: Path, *, listen: str = ":1") -> Site:
    """Make a Site of a cluster ``alpha`` whose Slurm is never queried."""
    site = Site(directory, clusters=("alpha",), nodes=NodesSettings(listen=listen))
    site.now = NOVEMBER
    site.standing = ClusterRoles(private_data=frozenset({"jobs"}))
    site.open(open_jobs)
    return site


def tell(site: Site, kind: str, key: str, body: object, at: datetime = START) -> None:
    """Append one event."""
    source = "node" if kind.startswith(("step", "task", "node")) else "snapshot"
    origin = {"cluster": "alpha", "source": source}
    site.append([make_event(kind, f"{kind}:{key}", body, at, seen_at=NOVEMBER, **origin)])


def add_run(
    site: Site, job_id: int = 7, seconds: float = 600, who: Caller = ADA, **fields: Any
) -> JobRecord:
    """Append a run that has ended, without its steps; return its record."""
    defaults: dict[str, Any] = {
        "job_id": job_id,
        "name": "train",
        "uid": who.uid,
        "user": who.user,
        "account": "physics",
        "partition": "long",
        "state": "COMPLETED",
        "submit": START - timedelta(minutes=1),
        "eligible": START - timedelta(minutes=1),
        "start": START,
        "end": START + timedelta(seconds=seconds),
        "time_limit_s": 1200,
        "nodes": 1,
        "cpus": 4,
        "nodelist": "n1",
        "tres_allocated": "cpu=4,mem=4G,node=1",
        "exit_code": 0,
        "exit_signal": 0,
        "submit_line": "sbatch secret.sh",
        "batch": True,
    }
    record = JobRecord(**{**defaults, **fields})
    key = f"{job_id}:{record.restarts}:{record.state}:{record.submit}"
    tell(site, JOB_END, key, JobFacts(record=record, whole=True))
    return record


def add_launch(
    site: Site,
    job_id: int = 7,
    *,
    step: str = "0",
    node: str = "n1",
    at: datetime = START + timedelta(seconds=1),
    cpu_s: tuple[float, ...] = (1.0,),
    ended: bool = True,
    **end: Any,
) -> None:
    """Append a launch with one task for each CPU time; ``end`` sets fields of its StepEnd."""
    ended_at, count = at + timedelta(seconds=500), len(cpu_s)
    name: dict[str, Any] = {
        "job_id": job_id,
        "step": step,
        "node": node,
        "launched_us": to_micros(at),
    }
    key = f"{job_id}.{step}.{node}.{to_micros(at)}"
    start = StepStart(**name, uid=4001, tasks=count, cpus=4, memory_bytes=4 * 1024**3)
    tell(site, STEP_START, key, start, at)
    tasks = tuple(
        TaskUsage(
            task=number,
            pid=100 + number,
            status=0,
            ended_us=to_micros(ended_at),
            user_us=int(used * 1e6),
            system_us=0,
            max_rss_bytes=1024**3,
        )
        for number, used in enumerate(cpu_s)
    )
    tell(site, TASK_EXIT, key, ExitedTasks(**name, tasks=tasks), ended_at)
    if ended:
        tell(site, STEP_END, key, StepEnd(**name, tasks=count, **end), ended_at)


def add_script(site: Site, job_id: int, at: datetime) -> None:
    """Append a script whose job no poll of Slurm has listed."""
    mtime_ns = to_micros(at) * 1000
    body = JobScript(job_id=job_id, spool_mtime_ns=mtime_ns)
    tell(site, JOB_SCRIPT, f"{job_id}:{mtime_ns}", body, at)


def add_gap(site: Site, why: str = "reboot", lines: int = 0, at: datetime = START) -> None:
    """Append a node.gap: a node reports lines that it lost."""
    tell(site, NODE_GAP, f"n1:{why}:{at}", NodeGap(node="n1", why=why, lines=lines), at)
