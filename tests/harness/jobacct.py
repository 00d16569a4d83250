"""Job logs and jobacct plugins: Sites that feed them, and events of runs, steps and tasks."""

import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from harness.events import at, make_event, us
from harness.journal import JournaledSite
from steward.accounting.settings import AccountingSettings
from steward.core.errors import Unavailable
from steward.core.events import (
    RUN_END,
    RUN_START,
    STEP_END,
    STEP_START,
    STEP_USAGE,
    TASK_EXIT,
    Event,
)
from steward.core.records import JobRecord, UsageLine
from steward.core.usage import ExitedTasks, RunEvent, StepEnd, StepStart, StepUsage, TaskUsage
from steward.core.waits import Stop
from steward.extensions.jobacct_plugins import (
    JobAcctPlugin,
    JobRun,
    Message,
    Rusage,
    Step,
    consumer,
)
from steward.extensions.jobacct_plugins.consumer import PluginConsumer, PluginHost
from steward.extensions.jobacct_plugins.log.consumer import LogConsumer
from steward.extensions.jobacct_plugins.log.files import LogFiles
from steward.extensions.jobacct_plugins.log.reader import read_lines
from steward.extensions.jobacct_plugins.state import read_health
from steward.slurm.settings import ClusterSettings


class LogSite(JournaledSite):
    """A Site of ``c1`` (UTC) and ``far`` (Auckland) with a job log, an hour after noon."""

    def __init__(self, directory: Path, **accounting: Any) -> None:
        clusters = {
            "c1": ClusterSettings(slurm=False, timezone="UTC"),
            "far": ClusterSettings(slurm=False, timezone="Pacific/Auckland"),
        }
        settings = AccountingSettings(**accounting)
        super().__init__(directory, clusters=clusters, accounting=settings)
        self.location = self.state / "joblog"
        self.now = at(3600)

    def open_log(self) -> LogConsumer:
        return LogConsumer(self.settings, now=lambda: self.now)

    def write(self, *events: Event) -> None:
        """Append events and apply all new events to the job log."""
        self.append(events)
        consumer = self.open_log()
        self.feed_one(consumer)
        while not consumer.tick(lambda _: None):
            pass
        consumer.close()

    def close_days(self) -> None:
        """Advance the clock by ten days, so that the job log closes all days."""
        self.now += timedelta(days=10)
        self.write()

    def names(self) -> list[str]:
        return sorted(path.name for path in self.location.iterdir())

    def lines(self) -> list[UsageLine]:
        return list(read_lines(str(self.location)))


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
    """Return a run's end, ``seconds`` after noon, or its start ten seconds earlier."""
    values: dict[str, Any] = {
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
        values |= {"end": at(seconds), "exit_code": 0, "exit_signal": 0}
    fact = RunEvent(
        job_id=job_id,
        first_submit=at(0),
        restarts=restarts,
        record=JobRecord(**(values | fields)),
        piece_end=piece_end,
        correction=correction,
    )
    when = at(seconds if kind == RUN_END else seconds - 10)
    return event(kind, key or f"{kind}:{job_id}:{restarts}", fact, when, cluster)


def task(number: int, **fields: Any) -> TaskUsage:
    """Return the usage of a task: 120 ms of CPU, and 1 MiB times its number plus one."""
    values: dict[str, Any] = {
        "task": number,
        "pid": 4000 + number,
        "status": 0,
        "ended_us": us(9),
        "user_us": 100_000,
        "system_us": 20_000,
        "max_rss_bytes": (number + 1) << 20,
    }
    return TaskUsage(**(values | fields))


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
    """Return the step.usage of a launch."""
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
    """Return the events that a node reports about a launch."""
    name = launch(job_id, step)
    return [
        event(STEP_START, f"start:{job_id}:{step}", StepStart(**name, uid=1000), at(1)),
        event(TASK_EXIT, f"exit:{job_id}:{step}", ExitedTasks(**name, tasks=(task(0),)), at(9)),
        event(STEP_END, f"end:{job_id}:{step}", StepEnd(**name, tasks=1), at(9)),
    ]


class PowerCut(Exception):
    """A power failure: no file changes any more."""


_STEPS: Final = ("rename_file", "sync_directory", "remove_file")


def cut_power(patch: pytest.MonkeyPatch, after: int) -> None:
    """Raise PowerCut after some steps of closing a day of the job log.

    Args:
        patch: Undoes the patch after the test.
        after: Number of steps that succeed.
    """
    remaining = after

    def cut(name: str) -> Any:
        original = getattr(LogFiles, name)

        def call(self: LogFiles, *args: Any) -> Any:
            nonlocal remaining
            if remaining == 0:
                raise PowerCut
            remaining -= 1
            return original(self, *args)

        return call

    for name in _STEPS:
        patch.setattr(LogFiles, name, cut(name))


TYPE = "jobacct/mine"


class Recording(JobAcctPlugin):
    """A plugin that records its calls; ``deed`` is the test's own hook."""

    plugin_name = "a plugin of the tests"
    plugin_type = TYPE
    calls: list[tuple[Any, ...]]
    deed: Callable[..., object]

    def _call(self, hook: str, *args: Any) -> None:
        type(self).calls.append((hook, *args))
        type(self).deed(self, hook, *args)

    def slurmctld_jobacct_init(self, location: str, parameters: str) -> None:
        self._call("init", location, parameters)

    def slurmctld_jobacct_job_start(self, job: JobRun) -> None:
        self._call("job_start", job)

    def slurmctld_jobacct_job_complete(self, job: JobRun) -> None:
        self._call("job_complete", job)

    def slurmctld_jobacct_job_suspend(self, job: JobRun) -> None:
        self._call("job_suspend", job)

    def slurmctld_jobacct_fini(self) -> None:
        self._call("fini")

    def slurmd_jobacct_init(self, parameters: str) -> None:
        self._call("node_init", parameters)

    def slurmd_jobacct_jobstep_launched(self, step: Step) -> None:
        self._call("launched", step)

    def slurmd_jobacct_smgr(self, step: Step) -> None:
        self._call("smgr", step)

    def slurmd_jobacct_task_exit(self, step: Step, pid: int, status: int, rusage: Rusage) -> None:
        self._call("task_exit", step, pid, status, rusage)

    def slurmd_jobacct_jobstep_terminated(self, step: Step) -> None:
        self._call("terminated", step)

    def slurm_jobacct_process_message(self, message: Message) -> None:
        self._call("message", message)


class Scene(LogSite):
    """A Site that feeds one plugin from a journal, without a daemon."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plugin: type[Recording] = type("Mine", (Recording,), {"calls": []})
        self.do(lambda *_: None)
        monkeypatch.setattr(consumer, "load_plugin_class", lambda _: self.plugin)
        parameters = "Frequency=30,MaxSendRetries=1,MaxSendRetryDelay=0"
        super().__init__(directory, type=TYPE, parameters=parameters, hook_timeout_s=0.2)
        self.is_away = False
        self.beats = 0

    def do(self, deed: Callable[..., object]) -> None:
        """Set what the plugin calls in each hook: with the plugin, the hook and its arguments."""
        self.plugin.deed = deed

    def make(self) -> PluginConsumer:
        around = PluginHost(append=self._append, stop=Stop(), beat=self._beat)
        return PluginConsumer(self.settings, TYPE, around)

    def take(self, *events: Event) -> None:
        """Append events, start the plugin, feed it and end it."""
        self.append(events)
        consumer = self.make()
        self.feed_one(consumer)
        consumer.close()

    def hooks(self) -> list[str]:
        return [call[0] for call in self.plugin.calls]

    def of(self, hook: str) -> list[Any]:
        """Return the first argument of each call of a hook."""
        return [call[1] for call in self.plugin.calls if call[0] == hook]

    def failures(self) -> dict[tuple[str, str], int]:
        failures = read_health(self.settings.state_dir, TYPE).failures
        return {(failure.hook, failure.kind): failure.count for failure in failures}

    def _append(self, new: Sequence[Event]) -> None:
        if self.is_away:
            raise Unavailable("the journal is away")
        self.append(new)

    def _beat(self) -> None:
        self.beats += 1


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    before = signal.getsignal(signal.SIGALRM)
    yield Scene(tmp_path, monkeypatch)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)
