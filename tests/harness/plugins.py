"""An accounting plugin that remembers its calls, fed from a journal without a daemon."""

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.jobacct import Fed, settings_in
from steward.core.errors import Unavailable
from steward.core.events import (
    Event,
)
from steward.core.waiting import Stop
from steward.extensions.jobacct_plugins import (
    Job,
    JobAcctPlugin,
    Message,
    Rusage,
    Step,
    consumer,
)
from steward.extensions.jobacct_plugins.consumer import Around, PluginConsumer
from steward.extensions.jobacct_plugins.state import read_health

TYPE = "jobacct/mine"


class Recording(JobAcctPlugin):
    """Remembers its calls; what a test wants of it beside that is in ``deed``."""

    plugin_name = "a plugin of the tests"
    plugin_type = TYPE
    calls: list[tuple[Any, ...]]
    deed: Callable[..., object]

    def _call(self, hook: str, *args: Any) -> None:
        type(self).calls.append((hook, *args))
        type(self).deed(self, hook, *args)

    def slurmctld_jobacct_init(self, location: str, parameters: str) -> None:
        self._call("init", location, parameters)

    def slurmctld_jobacct_job_start(self, job: Job) -> None:
        self._call("job_start", job)

    def slurmctld_jobacct_job_complete(self, job: Job) -> None:
        self._call("job_complete", job)

    def slurmctld_jobacct_job_suspend(self, job: Job) -> None:
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


class Scene:
    """One plugin, fed from a journal without a daemon."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plugin: type[Recording] = type("Mine", (Recording,), {"calls": []})
        self.do(lambda *_: None)
        monkeypatch.setattr(consumer, "class_of", lambda _: self.plugin)
        self.settings = settings_in(
            tmp_path,
            type=TYPE,
            parameters="Frequency=30,MaxSendRetries=1,MaxSendRetryDelay=0",
            hook_timeout_s=0.2,
        )
        self.fed = Fed(self.settings)
        self.is_away = False
        self.beats = 0

    def do(self, deed: Callable[..., object]) -> None:
        """What the plugin does in its hooks: called with the plugin, the hook, its arguments."""
        self.plugin.deed = deed

    def make(self) -> PluginConsumer:
        around = Around(append=self._append, stop=Stop(), beat=self._beat)
        return PluginConsumer(self.settings, TYPE, around)

    def run(self, *events: Event) -> None:
        """Let the plugin run over these events, from its start to its end."""
        self.fed.tell(*events)
        made = self.make()
        self.fed.feed(made)
        made.close()

    def hooks(self) -> list[str]:
        return [call[0] for call in self.plugin.calls]

    def of(self, hook: str) -> list[Any]:
        """The first arguments of a hook's calls."""
        return [call[1] for call in self.plugin.calls if call[0] == hook]

    def failures(self) -> dict[tuple[str, str], int]:
        found = read_health(self.settings.state_dir, TYPE).failures
        return {(one.hook, one.kind): one.count for one in found}

    def _append(self, new: Sequence[Event]) -> None:
        if self.is_away:
            raise Unavailable("the journal is away")
        self.fed.tell(*new)

    def _beat(self) -> None:
        self.beats += 1


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    before = signal.getsignal(signal.SIGALRM)
    yield Scene(tmp_path, monkeypatch)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)
