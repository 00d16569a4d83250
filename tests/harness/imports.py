"""Imported runs and steps, and the jobs.imported event that an import packs them into."""

from typing import Any

from harness.events import at, us
from steward.core.events import Event
from steward.core.imported import make_imported_run, make_imported_step, pack_events
from steward.core.records import JobRecord, UsageLine


def imported_run(job_id: int, submit: float = 0, end: float = 20, **fields: Any) -> Event:
    """Return the job.end of an imported run; times are seconds after noon."""
    record = JobRecord(
        job_id=job_id,
        **{
            "submit": at(submit),
            "start": at(submit + 2),
            "end": at(end),
            "state": "COMPLETED",
            "uid": 1000,
            "user": "ada",
            "name": f"job{job_id}",
            "nodelist": "n1",
            "tres_allocated": "cpu=2,mem=1G,node=1",
            "cpus": 2,
            "nodes": 1,
            "exit_code": 0,
            "exit_signal": 0,
            **fields,
        },
    )
    return make_imported_run(record, "c1", "slurmdbd", at(500))


def imported_step(run: Event, step: str = "batch", **fields: Any) -> Event:
    """Return the step.accounted of a step of that run."""
    values: dict[str, Any] = {
        "name": step,
        "state": "COMPLETED",
        "start_us": us(2),
        "end_us": us(20),
        "user_us": 7,
        "source": "slurmdbd",
        **fields,
    }
    line = UsageLine(cluster="c1", job_id=run.body.record.job_id, label="", step=step, **values)
    return make_imported_step(run, line)


def imported_job(job_id: int, **fields: Any) -> list[Event]:
    """Return the events of an imported run and its two steps."""
    run = imported_run(job_id, **fields)
    return [run, imported_step(run), imported_step(run, "extern")]


def imported(*events: Event, is_continued: bool = False) -> Event:
    """Return the jobs.imported of these events."""
    return pack_events(events, is_continued=is_continued)
