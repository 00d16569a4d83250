"""The books of one cluster for the tests of accounting's actions: a jobs.db, fed by hand."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from harness.events import NOVEMBER
from harness.site import ADA, ROOT
from steward.accounting.actions import ACTIONS
from steward.accounting.room import AccountingRoom
from steward.capture.settings import NodesSettings
from steward.core.access import Access, Asker, Standing
from steward.core.actions import Registry
from steward.core.config import Settings
from steward.core.events import (
    JOB_END,
    JOB_SCRIPT,
    NODE_GAP,
    STEP_END,
    STEP_START,
    TASK_EXIT,
    Event,
    JobFacts,
    JobScript,
)
from steward.core.records import JobRecord
from steward.core.usage import NodeGap, StepEnd, StepStart, TasksExited, TaskUsage
from steward.jobs import JobsConsumer
from steward.slurm.settings import ClusterSettings

START = NOVEMBER - timedelta(hours=2)


class BooksSite:
    """One cluster called ``alpha``, whose nodes report; it is not asked for anything."""

    def __init__(self, directory: Path, *, private: bool = True, listen: str = ":1") -> None:
        self.settings = Settings(
            state_dir=str(directory),
            cluster={"alpha": ClusterSettings(timezone="UTC", slurm=False)},
            nodes=NodesSettings(listen=listen),
        )
        self.jobs = JobsConsumer(self.settings)
        self.journal: list[Event] = []
        self._fed = 0
        standing = Standing(private_data=frozenset({"jobs"} if private else ()))
        access = Access(self.settings.access, 0, lambda cluster: standing)
        self.room = AccountingRoom(self.settings, access=access, now=lambda: NOVEMBER)
        self.registry = Registry(ACTIONS, {"accounting": lambda: self.room})

    def append(self, new: Sequence[Event]) -> None:
        for event in new:
            fields = {name: getattr(event, name) for name in event.__struct_fields__}
            self.journal.append(Event(**{**fields, "id": len(self.journal) + 1}))

    def feed(self) -> None:
        """Let jobs.db take in what is in the journal."""
        while self._fed < len(self.journal):
            upto = len(self.journal)
            wanted = [
                event for event in self.journal[self._fed : upto] if event.kind in self.jobs.kinds
            ]
            if wanted:
                self.jobs.apply(wanted, upto, self.append)
            self._fed = upto

    def tell(self, kind: str, key: str, body: object, at: datetime = START) -> None:
        """Append one event."""
        self.append(
            [
                Event(
                    kind=kind,
                    cluster="alpha",
                    key=f"{kind}:{key}",
                    at=at,
                    seen_at=NOVEMBER,
                    source="node" if kind.startswith(("step", "task", "node")) else "snapshot",
                    body=body,
                )
            ]
        )

    def run(
        self, job_id: int = 7, seconds: float = 600, who: Asker = ADA, **fields: Any
    ) -> JobRecord:
        """A run of a job that has ended, without its steps."""
        usual: dict[str, Any] = {
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
        record = JobRecord(**{**usual, **fields})
        key = f"{job_id}:{record.restarts}:{record.state}:{record.submit}"
        self.tell(JOB_END, key, JobFacts(record=record, whole=True), START)
        return record

    def launch(
        self,
        job_id: int = 7,
        *,
        step: str = "0",
        node: str = "n1",
        at: datetime = START + timedelta(seconds=1),
        cpu_s: tuple[float, ...] = (1.0,),
        ended: bool = True,
        **end: Any,
    ) -> None:
        """A step on a node, a task for each CPU time; ``end`` sets fields of its end."""
        launched_us = int(at.timestamp() * 1e6)
        name: dict[str, Any] = {
            "job_id": job_id,
            "step": step,
            "node": node,
            "launched_us": launched_us,
        }
        key = f"{job_id}.{step}.{node}.{launched_us}"
        count = len(cpu_s)
        start = StepStart(**name, uid=4001, tasks=count, cpus=4, memory_bytes=4 * 1024**3)
        self.tell(STEP_START, key, start, at)
        over = at + timedelta(seconds=500)
        tasks = tuple(
            TaskUsage(
                task=number,
                pid=100 + number,
                status=0,
                ended_us=int(over.timestamp() * 1e6),
                user_us=int(used * 1e6),
                system_us=0,
                max_rss_bytes=1024**3,
            )
            for number, used in enumerate(cpu_s)
        )
        self.tell(TASK_EXIT, key, TasksExited(**name, tasks=tasks), over)
        if ended:
            self.tell(STEP_END, key, StepEnd(**name, tasks=count, **end), over)

    def script(self, job_id: int, at: datetime) -> None:
        """A script whose job Slurm has never shown."""
        mtime_ns = int(at.timestamp()) * 10**9
        body = JobScript(job_id=job_id, spool_mtime_ns=mtime_ns)
        self.tell(JOB_SCRIPT, f"{job_id}:{mtime_ns}", body, at)

    def gap(self, why: str = "reboot", lines: int = 0, at: datetime = START) -> None:
        """A node that tells of what it has lost."""
        self.tell(NODE_GAP, f"n1:{why}:{at}", NodeGap(node="n1", why=why, lines=lines), at)

    def ask(self, action: str, asker: Asker = ROOT, **request: Any) -> Any:
        """The answer to a request."""
        self.feed()
        name = f"accounting.{action}"
        return self.registry.call(name, asker, self.registry.decode(name, request))

    def close(self) -> None:
        self.room.close()
        self.jobs.close()
