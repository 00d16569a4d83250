"""Steps of jobs, as nodes and the controller tell of them: for the tests of accounting."""

from datetime import datetime
from typing import Any

from harness.events import at, make_event, us
from steward.core.events import STEP_END, STEP_START, TASK_EXIT, Event
from steward.core.usage import StepEnd, StepStart, TasksExited, TaskUsage


def _event(kind: str, moment: datetime, body: Any, cluster: str) -> Event:
    key = f"{kind}:{body.job_id}:{body.step}:{body.node}:{body.launched_us}"
    if isinstance(body, TasksExited):
        key += ":" + ",".join(str(task.task) for task in body.tasks)
    return make_event(kind, key, body, moment, cluster=cluster, source="node")


def launched(
    job_id: int, seconds: float, step: str = "batch", node: str = "n1", **fields: Any
) -> Event:
    """step.start."""
    name: dict[str, Any] = {
        "job_id": job_id,
        "step": step,
        "node": node,
        "launched_us": us(seconds),
    }
    told: dict[str, Any] = {
        "uid": 1000,
        "tasks": 1,
        "cpus": 2,
        "memory_bytes": 1 << 30,
        "name": "prog",
        **fields,
    }
    return _event(STEP_START, at(seconds), StepStart(**name, **told), told.pop("cluster", "c1"))


def task(number: int = 0, ended: float = 0, **fields: Any) -> TaskUsage:
    """What one task used."""
    told: dict[str, Any] = {
        "pid": 100 + number,
        "status": 0,
        "user_us": 1_000_000,
        "system_us": 500_000,
    }
    return TaskUsage(task=number, ended_us=us(ended), **{**told, **fields})


def exited(
    job_id: int, seconds: float, *tasks: TaskUsage, step: str = "batch", node: str = "n1"
) -> Event:
    """task.exit."""
    body = TasksExited(
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
    """step.end."""
    body = StepEnd(
        job_id=job_id,
        step=step,
        node=node,
        launched_us=us(seconds),
        **{"tasks": 1, "max_rss_bytes": 5000, **fields},
    )
    return _event(STEP_END, at(end), body, "c1")
