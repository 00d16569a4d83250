"""Accounting plugins: which hook is called when, and that one harms nobody but itself."""

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jobacct_site import NOON, Fed, at, event, raw_events, run, settings_in, usage

from steward.accounting.none import NonePlugin
from steward.accounting.plugins import (
    Job,
    JobAcctPlugin,
    Message,
    PluginError,
    Rusage,
    Step,
    consumer,
    parse_parameters,
)
from steward.accounting.plugins.api import ParameterError, number_of
from steward.accounting.plugins.consumer import Around, PluginConsumer, location_of
from steward.accounting.plugins.loading import class_of, known_types, third_parties, types_of
from steward.accounting.plugins.state import failures_of
from steward.errors import Unavailable
from steward.events import (
    PLUGIN_MESSAGE,
    RUN_END,
    RUN_START,
    RUN_SUSPEND,
    Event,
)
from steward.usage import PluginMessage, StepUsage
from steward.waiting import Stop

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
        found = failures_of(self.settings.state_dir, TYPE)
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


def test_hooks_come_in_their_order_with_what_they_are_promised(scene: Scene) -> None:
    suspended = run(7, RUN_SUSPEND, state="SUSPENDED")
    scene.run(run(7, RUN_START), usage(7, "0", 2), suspended, run(7, RUN_END))
    assert scene.hooks() == [
        *("init", "node_init", "job_start", "launched", "smgr", "task_exit", "task_exit"),
        *("terminated", "job_suspend", "job_complete", "fini"),
    ]
    assert scene.plugin.calls[0][1:] == (
        location_of(scene.settings),
        scene.settings.accounting.parameters,
    )
    (ended,) = scene.of("job_complete")
    assert (ended.label, ended.cluster, ended.record.exit_code) == ("7", "c1", 0)
    assert scene.of("job_suspend")[0].record.state == "SUSPENDED"
    first, second = [call[1:] for call in scene.plugin.calls if call[0] == "task_exit"]
    step, pid, status, rusage = first
    assert (step.step, step.node, step.uid, step.gid, step.name) == ("0", "n1", 1000, 100, "sh")
    assert (step.task, step.at, pid, status) == (0, at(9), 4000, 0)
    assert (rusage.ru_utime, rusage.ru_stime, rusage.ru_maxrss) == (0.1, 0.02, 1024)
    assert set(resource.getrusage(resource.RUSAGE_SELF).__match_args__) <= set(dir(rusage))
    ids = [
        call[1].event_id
        for call in scene.plugin.calls
        if len(call) > 1 and call[1:] != () and hasattr(call[1], "event_id")
    ]
    assert len(set(ids)) == len(ids)
    assert (step.first_submit, step.restarts) == (at(0), 0)
    assert second[0].event_id == "c1/usage:7:0:0:n1#1"
    (launched,), (terminated,) = scene.of("launched"), scene.of("terminated")
    assert (launched.at, launched.launched, terminated.at) == (at(1), at(1), at(9))
    assert (terminated.end.tasks, terminated.withdrawn) == (2, False)


def test_what_a_node_tells_reaches_no_hook_before_the_books_know_whose_it_is(
    scene: Scene,
) -> None:
    scene.run(*raw_events(4242))
    assert scene.hooks() == ["init", "node_init", "fini"]


def test_a_step_that_is_told_again_or_taken_back_says_so(scene: Scene) -> None:
    first, again = usage(7), usage(7, key="again", correction=True)
    body: StepUsage = again.body
    gone = msgspec.structs.replace(body, withdrawn=True, start=None, tasks=(), end=None)
    scene.run(first, again, msgspec.structs.replace(again, key="gone", body=gone))
    of_step = ["launched", "smgr", "task_exit", "terminated"]
    assert scene.hooks()[2:-1] == [*of_step, *of_step, "terminated"]
    steps = [call[1] for call in scene.plugin.calls[2:-1]]
    assert [step.correction for step in steps] == [False] * 4 + [True] * 5
    assert [step.withdrawn for step in steps] == [False] * 8 + [True]
    assert len({step.event_id for step in steps}) == 9


def test_of_a_step_whose_begin_and_end_were_lost_the_tasks_are_told(scene: Scene) -> None:
    event = usage(7, tasks=2)
    body = msgspec.structs.replace(event.body, start=None, end=None, ended_us=None)
    scene.run(msgspec.structs.replace(event, body=body))
    assert scene.hooks()[2:-1] == ["task_exit", "task_exit", "terminated"]
    assert [step.uid for step in scene.of("task_exit")] == [None, None]
    assert scene.of("terminated")[0].end is None


def test_a_step_of_many_tasks_goes_on_where_it_had_to_wait(scene: Scene) -> None:
    def deed(_: object, hook: str, *args: Any) -> None:
        if hook == "task_exit" and args[0].task == 3 and len(scene.of("task_exit")) < 6:
            raise Unavailable("the disk is full")

    scene.do(deed)
    scene.fed.tell(usage(7, tasks=5))
    made = scene.make()
    scene.fed.feed(made, turns=6)
    made.close()
    assert [step.task for step in scene.of("task_exit")] == [0, 1, 2, 3, 3, 3, 4]
    assert len(scene.of("launched")) == len(scene.of("terminated")) == 1


def test_events_of_hooks_that_do_nothing_are_not_even_read(scene: Scene) -> None:
    class Ends(JobAcctPlugin):
        plugin_type = TYPE

        def slurmctld_jobacct_job_complete(self, job: Job) -> None:
            pass

    scene.plugin = Ends  # type: ignore[assignment]
    made = scene.make()
    made.tick(lambda _: None)
    assert made.kinds == {RUN_END}
    made.close()


@pytest.mark.parametrize(
    "error", [ValueError("oh"), SystemExit(3), KeyboardInterrupt(), RecursionError(), Exception()]
)
def test_a_hook_that_raises_harms_no_other(
    scene: Scene, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def deed(_: object, hook: str, *args: Any) -> None:
        if hook in ("job_start", "fini"):
            raise error

    scene.do(deed)
    scene.run(*(run(job_id, RUN_START) for job_id in range(1, 6)), run(1))
    assert scene.hooks().count("job_start") == 5
    assert scene.hooks()[-2:] == ["job_complete", "fini"]
    assert scene.failures() == {("slurmctld_jobacct_job_start", type(error).__name__): 5}
    told = [line for line in caplog.messages if "job_start failed" in line]
    assert len(told) == 1


def test_a_hook_that_hangs_is_ended(scene: Scene) -> None:
    def deed(_: object, hook: str, *args: Any) -> None:
        if hook == "job_start" and args[0].job_id == 1:
            time.sleep(60)
        if hook == "job_start" and args[0].job_id == 2:
            while True:
                try:
                    while True:
                        pass
                except Exception:
                    pass

    scene.do(deed)
    scene.run(*(run(job_id, RUN_START) for job_id in (1, 2, 3)))
    assert [job.job_id for job in scene.of("job_start")] == [1, 2, 3]
    assert scene.failures() == {("slurmctld_jobacct_job_start", "time-out"): 2}


def test_unavailable_means_later_and_calls_nothing_else_again(scene: Scene) -> None:
    tries: list[int] = []

    def deed(_: object, hook: str, *args: Any) -> None:
        if hook == "job_start" and args[0].job_id == 2:
            tries.append(2)
            if len(tries) < 3:
                raise Unavailable("the disk is full")

    scene.do(deed)
    scene.fed.tell(*(run(job_id, RUN_START) for job_id in (1, 2, 3)))
    made = scene.make()
    scene.fed.feed(made, turns=6)
    made.close()
    assert [job.job_id for job in scene.of("job_start")] == [1, 2, 2, 2, 3]
    assert scene.failures() == {}


def test_a_plugin_that_cannot_start_waits_and_says_why(scene: Scene) -> None:
    starts: list[str] = []

    def deed(_: object, hook: str, *args: Any) -> None:
        if hook == "init":
            starts.append(hook)
            if len(starts) == 1:
                raise OSError("no such directory")

    scene.do(deed)
    scene.fed.tell(run(1))
    made = scene.make()
    feed = scene.fed.feed(made, turns=1)
    assert "no such directory" in scene.fed.link.waiting["accounting.plugins.mine"]
    assert scene.of("job_complete") == []
    feed._again_at = 0.0
    feed.turn()
    assert len(scene.of("job_complete")) == 1
    made.close()


def test_one_that_ends_its_process_is_found_out(scene: Scene) -> None:
    def deed(_: object, hook: str, *args: Any) -> None:
        if hook == "job_start":
            with open(calls, "a") as file:
                file.write(f"{args[0].job_id}\n")
            if args[0].job_id == 20:
                os._exit(9)

    calls = f"{scene.settings.state_dir}/calls"
    scene.do(deed)
    scene.fed.tell(*(run(job_id, RUN_START) for job_id in range(1, 41)))
    for _ in range(6):
        pid = os.fork()
        if not pid:
            made = scene.make()
            Fed(scene.settings).feed(made)
            made.close()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:
            break
    assert code == 0
    told = [int(line) for line in Path(calls).read_text().split()]
    assert set(told) == set(range(1, 41))
    assert told.count(20) == 4  # once with its whole batch, thrice alone
    assert told[-20:] == list(range(21, 41))
    assert max(told.count(job_id) for job_id in range(1, 41) if job_id != 20) == 2
    assert scene.failures() == {("*", "crash"): 1}


def _messages(scene: Scene) -> list[bytes]:
    """The messages that are in the journal."""
    events, _ = scene.fed._reader.read(0, frozenset({PLUGIN_MESSAGE}), 100)
    return [one.body.data for one in events]


def test_messages_are_recorded_before_they_are_processed(scene: Scene) -> None:
    recorded: list[bytes] = []

    def deed(plugin: Recording, hook: str, *args: Any) -> None:
        if hook == "task_exit":
            plugin.send("controller", b"up")
            recorded.extend(_messages(scene))
        if hook == "message" and args[0].data == b"up":
            plugin.send("controller", b"echo")
        if hook == "launched":
            plugin.send("mynode", b"stay")
        if hook == "job_start":
            plugin.send("mynode", b"here")

    scene.do(deed)
    scene.run(run(7, RUN_START), usage(7))
    told = [(one.sender, one.to, one.data) for one in scene.of("message")]
    assert told == [
        ("controller", "controller", b"here"),
        ("n1", "n1", b"stay"),
        ("n1", "controller", b"up"),
        ("controller", "controller", b"echo"),
    ]
    assert b"up" in recorded
    # Called again, a hook sends the same message under the same key.
    before = len(told)
    made = scene.make()
    made.tick(lambda _: None)
    reader = scene.fed._reader
    events, upto = reader.read(0, made.kinds, 100)
    made.apply([one for one in events if one.kind != PLUGIN_MESSAGE], upto, lambda _: None)
    scene.fed.feed(made)
    made.close()
    assert len(scene.of("message")) == before


def test_a_message_that_cannot_be_recorded_is_tried_as_often_as_is_said(scene: Scene) -> None:
    def deed(plugin: Recording, hook: str, *args: Any) -> None:
        if hook == "job_start":
            plugin.send("controller", b"x")

    scene.do(deed)
    scene.is_away = True
    made = scene.make()
    scene.fed.tell(run(1, RUN_START))
    scene.fed.feed(made, turns=2)
    assert len(scene.of("job_start")) == 2
    assert scene.failures() == {}
    scene.is_away = False
    scene.fed.feed(made, turns=2)
    assert [one.data for one in scene.of("message")] == [b"x"]
    made.close()


@pytest.mark.parametrize(
    ("to", "data"), [("everybody", b"x"), ("controller", "text"), ("mynode", bytes(2 << 20))]
)
def test_what_cannot_be_sent_is_the_plugin_s_error(scene: Scene, to: Any, data: Any) -> None:
    scene.do(lambda plugin, hook, *_: hook == "job_start" and plugin.send(to, data))
    scene.run(run(1, RUN_START))
    assert scene.failures() == {("slurmctld_jobacct_job_start", "PluginError"): 1}
    with pytest.raises(PluginError):
        JobAcctPlugin().send("controller", b"x")


def test_messages_of_other_plugins_are_not_its_own(scene: Scene) -> None:
    body = PluginMessage(plugin_type="jobacct/other", to="controller", sender="n1", data=b"")
    scene.run(event(PLUGIN_MESSAGE, "m", body, NOON))
    assert scene.of("message") == []


def test_what_does_nothing_does_nothing() -> None:
    plugin = NonePlugin()
    assert plugin.plugin_type == "jobacct/none"
    plugin.slurmctld_jobacct_init("", "")
    plugin.slurmctld_jobacct_fini()


def test_types_are_found_among_entry_points() -> None:
    assert {"jobacct/none", "jobacct/log"} <= known_types().keys()
    assert class_of("jobacct/none") is NonePlugin
    assert types_of("jobacct/log, jobacct/x,jobacct/log") == ("jobacct/log", "jobacct/x")
    assert third_parties("jobacct/log,jobacct/none,jobacct/x") == ("jobacct/x",)
    with pytest.raises(PluginError, match=r"jobacct/nothing.*jobacct/none"):
        class_of("jobacct/nothing")


def test_what_is_no_plugin_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    from steward.accounting.plugins import loading

    class Entry:
        value = "m:C"

        def __init__(self, found: object) -> None:
            self._found = found

        def load(self) -> object:
            if isinstance(self._found, BaseException):
                raise self._found
            return self._found

    class Wrong(JobAcctPlugin):
        plugin_type = "jobacct/wrong"

    class Later(JobAcctPlugin):
        plugin_type = TYPE
        api_version = 9

    for found, why in [
        (SystemExit(1), "cannot be imported"),
        (int, "no class"),
        (Wrong, "registered as"),
        (Later, "version 9"),
    ]:
        monkeypatch.setattr(loading, "entry_of", lambda _, found=found: Entry(found))
        with pytest.raises(PluginError, match=why):
            class_of(TYPE)


def test_parameters_are_as_slurm_has_them() -> None:
    assert parse_parameters("Frequency=30, MaxSendRetries=3,,x=a=b") == {
        "Frequency": "30",
        "MaxSendRetries": "3",
        "x": "a=b",
    }
    assert number_of("frequency=30", "Frequency", 1) == 30
    assert number_of("", "Frequency", 1) == 1
    for wrong in ("a", "=1", "a=1,A=2"):
        with pytest.raises(ParameterError):
            parse_parameters(wrong)
    for wrong in ("a=", "a=-1", "a=1.5", "a=²"):
        with pytest.raises(ParameterError):
            number_of(wrong, "a", 1)
