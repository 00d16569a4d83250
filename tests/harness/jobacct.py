"""Runs, steps and tasks as the tests of the job log and of plugins need them."""

from datetime import datetime
from typing import Any, Final

import pytest

from harness.events import at, make_event, us
from harness.site import Clock
from steward.accounting.settings import AccountingSettings
from steward.core.config import Settings
from steward.core.consumers import Feed
from steward.core.events import (
    RUN_END,
    RUN_START,
    STEP_END,
    STEP_START,
    STEP_USAGE,
    TASK_EXIT,
    Event,
)
from steward.core.journal import Journal, JournalReader
from steward.core.journal.store import rows_of
from steward.core.records import JobRecord
from steward.core.usage import RunFact, StepEnd, StepStart, StepUsage, TasksExited, TaskUsage
from steward.daemon.once import DirectLink
from steward.extensions.jobacct_plugins.log.files import LogFiles
from steward.slurm.settings import ClusterSettings


def settings_in(state_dir: object, **accounting: Any) -> Settings:
    """A configuration with the clusters c1 (UTC) and far (Auckland)."""
    return Settings(
        state_dir=str(state_dir),
        cluster={
            "c1": ClusterSettings(slurm=False, timezone="UTC"),
            "far": ClusterSettings(slurm=False, timezone="Pacific/Auckland"),
        },
        accounting=AccountingSettings(**accounting),
    )


def event(kind: str, key: str, body: object, when: datetime, cluster: str = "c1") -> Event:
    return make_event(kind, key, body, when, cluster=cluster, source="jobs")


def run(
    job_id: int,
    kind: str = RUN_END,
    *,
    seconds: float = 10.0,
    restarts: int = 0,
    cluster: str = "c1",
    correction: bool = False,
    piece_end: datetime | None = None,
    key: str = "",
    **fields: Any,
) -> Event:
    """A run that ended at some seconds, or began ten seconds before that."""
    told: dict[str, Any] = {
        "job_id": job_id,
        "restarts": restarts,
        "submit": at(0),
        "start": at(seconds - 10),
        "state": "RUNNING" if kind == RUN_START else "COMPLETED",
        "name": f"job{job_id}",
        "user": "ada",
        "uid": 1000,
    }
    if kind == RUN_END:
        told |= {"end": at(seconds), "exit_code": 0, "exit_signal": 0}
    fact = RunFact(
        job_id=job_id,
        first_submit=at(0),
        restarts=restarts,
        record=JobRecord(**(told | fields)),
        piece_end=piece_end,
        correction=correction,
    )
    when = at(seconds if kind == RUN_END else seconds - 10)
    return event(kind, key or f"{kind}:{job_id}:{restarts}", fact, when, cluster)


def task(number: int, **fields: Any) -> TaskUsage:
    """A task that used 100 ms and 1 MiB for each number."""
    told: dict[str, Any] = {
        "task": number,
        "pid": 4000 + number,
        "status": 0,
        "ended_us": us(9),
        "user_us": 100_000,
        "system_us": 20_000,
        "max_rss_bytes": (number + 1) << 20,
    }
    return TaskUsage(**(told | fields))


def launch(job_id: int, step: str = "batch", node: str = "n1") -> dict[str, Any]:
    return {
        "job_id": job_id,
        "step": step,
        "node": node,
        "launched_us": us(1),
    }


def usage(
    job_id: int,
    step: str = "batch",
    tasks: int = 1,
    *,
    restarts: int = 0,
    node: str = "n1",
    key: str = "",
    correction: bool = False,
    **fields: Any,
) -> Event:
    """What a launch has used."""
    name = launch(job_id, step, node)
    ended_us = us(9)
    body = StepUsage(
        **name,
        first_submit=at(0),
        restarts=restarts,
        ended_us=ended_us,
        start=StepStart(**name, uid=1000, gid=100, tasks=tasks, cpus=tasks, name="sh"),
        end=StepEnd(**name, tasks=tasks),
        tasks=tuple(task(number, **fields) for number in range(tasks)),
        correction=correction,
    )
    return event(STEP_USAGE, key or f"usage:{job_id}:{restarts}:{step}:{node}", body, at(9))


def raw_events(job_id: int, step: str = "batch") -> list[Event]:
    """What a node tells of a launch."""
    name = launch(job_id, step)
    return [
        event(STEP_START, f"start:{job_id}:{step}", StepStart(**name, uid=1000), at(1)),
        event(TASK_EXIT, f"exit:{job_id}:{step}", TasksExited(**name, tasks=(task(0),)), at(9)),
        event(STEP_END, f"end:{job_id}:{step}", StepEnd(**name, tasks=1), at(9)),
    ]


class Fed:
    """A journal, and a consumer that is fed from it without a daemon.

    Args:
        settings: Whose state directory holds the journal.
    """

    def __init__(self, settings: Settings) -> None:
        self.journal = Journal(settings.state_dir)
        self.link = DirectLink(self.journal)
        self.reader = JournalReader(settings.state_dir)
        self.clock = Clock()

    def tell(self, *events: Event) -> None:
        self.journal.append(rows_of(events))

    def feed(self, consumer: Any, turns: int = 3) -> Feed:
        """Feed a consumer until it has nothing to do, or for some turns at least."""
        feed = Feed(consumer, self.reader, self.link, clock=self.clock)
        for _ in range(turns):
            self.clock.now_s += 60.0  # the back-off is over
            while feed.turn():
                pass
        return feed


class PowerCut(Exception):
    """Nothing more is done to any file."""


_STEPS: Final = ("rename", "sync_directory", "remove")


def cut_power(patch: pytest.MonkeyPatch, after: int) -> None:
    """Let so many steps of closing a day of the job log be done, and then none.

    Args:
        patch: Takes it back.
        after: How many.
    """
    left = after

    def cut(name: str) -> Any:
        whole = getattr(LogFiles, name)

        def call(self: LogFiles, *args: Any) -> Any:
            nonlocal left
            if left == 0:
                raise PowerCut
            left -= 1
            return whole(self, *args)

        return call

    for name in _STEPS:
        patch.setattr(LogFiles, name, cut(name))
