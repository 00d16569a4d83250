"""Step events of nodes and the controller, and the jobs.db that stores them."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from harness.events import at, make_event, us
from harness.jobs import Books, record
from steward.core.config import Settings
from steward.core.events import STEP_END, STEP_START, TASK_EXIT, Event
from steward.core.records import UsageLine
from steward.core.usage import ExitedTasks, StepEnd, StepStart, TaskUsage
from steward.jobs import Jobs, JobsConsumer


def _event(kind: str, moment: datetime, body: Any, cluster: str) -> Event:
    key = f"{kind}:{body.job_id}:{body.step}:{body.node}:{body.launched_us}"
    if isinstance(body, ExitedTasks):
        key += ":" + ",".join(str(task.task) for task in body.tasks)
    return make_event(kind, key, body, moment, cluster=cluster, source="node")


def launched(
    job_id: int, seconds: float, step: str = "batch", node: str = "n1", **fields: Any
) -> Event:
    """Return a step.start."""
    name: dict[str, Any] = {
        "job_id": job_id,
        "step": step,
        "node": node,
        "launched_us": us(seconds),
    }
    values: dict[str, Any] = {
        "uid": 1000,
        "tasks": 1,
        "cpus": 2,
        "memory_bytes": 1 << 30,
        "name": "prog",
        **fields,
    }
    return _event(STEP_START, at(seconds), StepStart(**name, **values), values.pop("cluster", "c1"))


def task(number: int = 0, ended: float = 0, **fields: Any) -> TaskUsage:
    """Return the usage of one task."""
    values: dict[str, Any] = {
        "pid": 100 + number,
        "status": 0,
        "user_us": 1_000_000,
        "system_us": 500_000,
    }
    return TaskUsage(task=number, ended_us=us(ended), **{**values, **fields})


def exited(
    job_id: int, seconds: float, *tasks: TaskUsage, step: str = "batch", node: str = "n1"
) -> Event:
    """Return a task.exit."""
    body = ExitedTasks(
        job_id=job_id, step=step, node=node, launched_us=us(seconds), tasks=tasks or (task(),)
    )
    return _event(TASK_EXIT, at(seconds + 1), body, "c1")


def ended(
    job_id: int,
    seconds: float,
    end: float,
    step: str = "batch",
    node: str = "n1",
    **fields: Any,
) -> Event:
    """Return a step.end."""
    body = StepEnd(
        job_id=job_id,
        step=step,
        node=node,
        launched_us=us(seconds),
        **{"tasks": 1, "max_rss_bytes": 5000, **fields},
    )
    return _event(STEP_END, at(end), body, "c1")


class Clocked(Books):
    """Books with a clock that the test moves."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.consumer.close()
        self.now = at(0)
        self.consumer = JobsConsumer(Settings(state_dir=str(directory)), lambda: self.now)

    def tick(self, seconds: float) -> float:
        self.now = at(seconds)
        while not (wait_s := self.consumer.tick(self.said.extend)):
            pass
        return wait_s

    def told(self, kind: str) -> list[Event]:
        return [event for event in self.said if event.kind == kind]


@pytest.fixture
def books(tmp_path: Path) -> Clocked:
    return Clocked(tmp_path)


def lines_of(books: Books, job: str = "7") -> list[UsageLine]:
    jobs = Jobs(books.path)
    lines = jobs.list_lines(jobs.find(job)[0])
    jobs.close()
    return list(lines)


def lines(books: Books, job: str = "7") -> dict[str, UsageLine]:
    return {
        f"{line.restarts}{f'/{line.piece_us}' if line.piece_us else ''}:{line.step}": line
        for line in lines_of(books, job)
    }


def running(job_id: int = 7, submit: float = 0, **fields: Any) -> Event:
    values = {"start": at(submit + 2), "nodelist": "n[1-3]", "seen": submit + 3, **fields}
    return record(job_id, submit, "RUNNING", **values)


def done(job_id: int = 7, submit: float = 0, end: float = 20, **fields: Any) -> Event:
    values = {"start": at(submit + 2), "nodelist": "n[1-3]", "exit_code": 0, "exit_signal": 0}
    state = fields.pop("state", "COMPLETED")
    return record(job_id, submit, state, seen=end + 1, end=end, **{**values, **fields})


STEP = [
    launched(7, 3, "0"),
    exited(7, 3, task(ended=9, max_rss_bytes=4000), step="0"),
    ended(7, 3, 10, "0", peak_bytes=7000),
]


@st.composite
def histories(draw: Any) -> list[Event]:
    """Generate events of jobs with one id: requeued, on several nodes, some events lost."""
    events: list[Event] = []
    submit = 0
    for _job in range(draw(st.integers(1, 2))):
        for restarts in range(draw(st.integers(1, 2))):
            nodes = draw(st.sampled_from(["n1", "n[1-2]"]))
            fields = {"restarts": restarts, "nodelist": nodes}
            facts = [record(7, submit, restarts=restarts), running(7, submit, **fields)]
            facts += [
                done(7, submit, submit + 50, source=source, **fields)
                for source in ("snapshot", "jobcomp")
            ]
            for step in draw(st.lists(st.sampled_from(["batch", "0", "1"]), unique=True)):
                for node in ("n1", "n2"):
                    begin = submit + 3 + draw(st.integers(0, 40))
                    reported = draw(st.sampled_from([None, restarts]))
                    facts.append(launched(7, begin, step, node, restarts=reported))
                    tasks = [task(number, begin + 1) for number in range(draw(st.integers(1, 12)))]
                    facts += [exited(7, begin, usage, step=step, node=node) for usage in tasks]
                    facts.append(ended(7, begin, begin + 2, step, node, tasks=len(tasks)))
            events += draw(st.lists(st.sampled_from(facts), unique_by=lambda e: (e.key, e.source)))
            submit += 100
        submit += 500
    return events
