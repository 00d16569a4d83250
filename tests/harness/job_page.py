"""Job pages: accounting lines and launches of jobs, and the page that shows them."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from steward.accounting.job_page.page import build_run_part
from steward.accounting.job_page.requests import PageAnswer, RunPart
from steward.cli.charts import ASCII, ChartSigns, render_plain
from steward.cli.job import layout_reply
from steward.core.records import JobRecord, UsageLine
from steward.core.usage import StepEnd, StepStart, StepUsage, TaskUsage

T = 1_790_000_000_000_000
S = 1_000_000
GIB = 1024**3
NOW = datetime.fromtimestamp(T / 1e6 + 10_000, UTC)


def run_line(seconds: float = 600, **fields: Any) -> UsageLine:
    """Return the line of a run on one node with 4 CPUs and 4 GiB, started a minute after submit."""
    defaults: dict[str, Any] = {
        "cluster": "c1",
        "job_id": 7,
        "label": "7",
        "user": "ada",
        "name": "train",
        "state": "COMPLETED",
        "submit_us": T,
        "eligible_us": T,
        "start_us": T + 60 * S,
        "end_us": T + int((60 + seconds) * S),
        "nodes": 1,
        "cpus": 4,
        "nodelist": "n1",
        "time_limit_s": 1200,
        "tres_allocated": "cpu=4,mem=4G,node=1,billing=4",
        "exit_code": 0,
        "exit_signal": 0,
    }
    return UsageLine(**{**defaults, **fields})


def step_line(run: UsageLine, step: str = "0", **fields: Any) -> UsageLine:
    """Return the line of a step that lasted as long as its run."""
    return msgspec.structs.replace(run, step=step, name="prog", time_limit_s=None, **fields)


def task(number: int = 0, *, cpu_s: float = 1.0, status: int = 0, **fields: Any) -> TaskUsage:
    """Return the usage of a task with this CPU time."""
    return TaskUsage(
        task=number,
        pid=1000 + number,
        status=status,
        ended_us=T + 600 * S,
        user_us=int(cpu_s * S),
        system_us=0,
        **fields,
    )


def launch(
    *tasks: TaskUsage,
    node: str = "n1",
    memory_bytes: int | None = 4 * GIB,
    ended: bool = True,
    **end: Any,
) -> StepUsage:
    """Return a launch of step 0; ``end`` sets fields of its StepEnd."""
    name: dict[str, Any] = {"job_id": 7, "step": "0", "node": node, "launched_us": T + 60 * S}
    return StepUsage(
        job_id=7,
        first_submit=datetime.fromtimestamp(T / 1e6, UTC),
        restarts=0,
        step="0",
        node=node,
        launched_us=T + 60 * S,
        ended_us=T + 660 * S if ended else None,
        start=StepStart(**name, uid=1000, cpus=4, tasks=len(tasks), memory_bytes=memory_bytes),
        tasks=tasks,
        end=StepEnd(**name, tasks=len(tasks), **end) if ended else None,
    )


def run_of(line: UsageLine, *launches: StepUsage) -> RunPart:
    """Return a run of the page, with one step that has these launches."""
    cpu_us = sum(task.user_us + task.system_us for launch in launches for task in launch.tasks)
    if launches:
        line = msgspec.structs.replace(line, user_us=cpu_us, system_us=0)
    steps = [(step_line(line), launches)] if launches else []
    return build_run_part(line, steps, now_us=T + 10_000 * S)


def answer_of(*runs: RunPart, **fields: Any) -> PageAnswer:
    """Return a page of these runs."""
    record = JobRecord(job_id=7, name="train", uid=1000, user="ada", state=runs[-1].line.state)
    defaults: dict[str, Any] = {"record": record, "now": NOW, "verified": True, "runs": runs}
    return PageAnswer(job="7", cluster="c1", job_id=7, **{**defaults, **fields})


def kinds(run: Any) -> list[str]:
    return [note.kind for note in run.notes]


def drawn(answer: PageAnswer, pens: ChartSigns = ASCII) -> str:
    return render_plain(layout_reply(answer, pens))
