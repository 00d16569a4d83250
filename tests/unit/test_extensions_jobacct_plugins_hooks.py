"""Accounting plugins: hooks, their order and their arguments."""

import resource
from typing import Any

import msgspec
import pytest

from harness.events import NOON, at
from harness.jobacct import TYPE, Recording, Scene, event, raw_events, run, scene, usage
from steward.core.errors import Unavailable
from steward.core.events import (
    CONTROLLER_STATE,
    JOBS_IMPORTED,
    PLUGIN_MESSAGE,
    RUN_END,
    RUN_START,
    RUN_SUSPEND,
    STEP_LAUNCH,
    ControllerState,
    Event,
)
from steward.core.usage import PluginMessage, StepUsage
from steward.extensions.jobacct_plugins import (
    JobAcctPlugin,
    JobRun,
    PluginError,
)
from steward.jobs.line_sources import locate_job_log

__all__ = ["scene"]


def test_hooks_come_in_their_order_with_what_they_are_promised(scene: Scene) -> None:
    suspended = run(7, RUN_SUSPEND, state="SUSPENDED")
    scene.take(run(7, RUN_START), usage(7, "0", 2), suspended, run(7, RUN_END))
    assert scene.hooks() == [
        *("init", "node_init", "job_start", "launched", "smgr", "task_exit", "task_exit"),
        *("terminated", "job_suspend", "job_complete", "fini"),
    ]
    assert scene.plugin.calls[0][1:] == (
        locate_job_log(scene.settings),
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
    scene.take(*raw_events(4242))
    assert scene.hooks() == ["init", "node_init", "fini"]


def test_a_step_that_is_told_again_or_taken_back_says_so(scene: Scene) -> None:
    first, again = usage(7), usage(7, key="again", correction=True)
    body: StepUsage = again.body
    gone = msgspec.structs.replace(body, withdrawn=True, start=None, tasks=(), end=None)
    scene.take(first, again, msgspec.structs.replace(again, key="gone", body=gone))
    of_step = ["launched", "smgr", "task_exit", "terminated"]
    assert scene.hooks()[2:-1] == [*of_step, *of_step, "terminated"]
    steps = [call[1] for call in scene.plugin.calls[2:-1]]
    assert [step.correction for step in steps] == [False] * 4 + [True] * 5
    assert [step.withdrawn for step in steps] == [False] * 8 + [True]
    assert len({step.event_id for step in steps}) == 9


def begun(**fields: Any) -> Event:
    """Return the start of the launch whose end ``usage(7)`` reports."""
    body = msgspec.structs.replace(usage(7).body, ended_us=None, tasks=(), end=None, **fields)
    return event(STEP_LAUNCH, f"launch:{fields}", body, at(1))


def test_the_hooks_of_a_step_that_begins_come_while_it_runs(scene: Scene) -> None:
    scene.append([run(7, RUN_START), begun()])
    made = scene.make()
    scene.feed_one(made)
    assert scene.hooks()[2:] == ["job_start", "launched", "smgr"]
    over = usage(7)
    scene.append(
        [msgspec.structs.replace(over, body=msgspec.structs.replace(over.body, announced=True))]
    )
    scene.feed_one(made)
    made.close()
    assert scene.hooks()[5:-1] == ["task_exit", "terminated"]
    assert (scene.of("launched")[0].uid, scene.of("launched")[0].at) == (1000, at(1))


def test_a_begin_that_is_taken_back_says_so(scene: Scene) -> None:
    scene.take(begun(), begun(withdrawn=True, start=None, correction=True))
    assert scene.hooks()[2:-1] == ["launched", "smgr", "terminated"]
    (gone,) = scene.of("terminated")
    assert (gone.withdrawn, gone.smgr_status) == (True, None)


@pytest.mark.parametrize(
    ("statuses", "status"), [((0, 256, 512), 512), ((0, 9, 512), 9), ((0,), 0), ((), None)]
)
def test_the_end_of_a_step_has_the_status_of_its_tasks_together(
    scene: Scene, statuses: tuple[int, ...], status: int | None
) -> None:
    over = usage(7, tasks=len(statuses))
    tasks = tuple(
        msgspec.structs.replace(task, status=code)
        for task, code in zip(over.body.tasks, statuses, strict=True)
    )
    scene.take(msgspec.structs.replace(over, body=msgspec.structs.replace(over.body, tasks=tasks)))
    assert scene.of("terminated")[0].smgr_status == status


def test_slurmctld_that_starts_or_reads_its_configuration_calls_init(scene: Scene) -> None:
    states = [
        ControllerState(up=False),
        ControllerState(up=True, restarted=True),
        ControllerState(up=True, daemon="slurmdbd"),
        ControllerState(up=True, reconfigured=True),
    ]
    scene.take(*(event(CONTROLLER_STATE, f"c{n}", one, at(n)) for n, one in enumerate(states)))
    assert scene.hooks() == [*("init", "node_init") * 3, "fini"]
    assert len({call[1:] for call in scene.plugin.calls if call[0] == "init"}) == 1


def test_of_a_step_whose_begin_and_end_were_lost_the_tasks_are_told(scene: Scene) -> None:
    event = usage(7, tasks=2)
    body = msgspec.structs.replace(event.body, start=None, end=None, ended_us=None)
    scene.take(msgspec.structs.replace(event, body=body))
    assert scene.hooks()[2:-1] == ["task_exit", "task_exit", "terminated"]
    assert [step.uid for step in scene.of("task_exit")] == [None, None]
    assert scene.of("terminated")[0].end is None


def test_a_step_of_many_tasks_goes_on_where_it_had_to_wait(scene: Scene) -> None:
    def deed(_: object, hook: str, *args: Any) -> None:
        if hook == "task_exit" and args[0].task == 3 and len(scene.of("task_exit")) < 6:
            raise Unavailable("the disk is full")

    scene.do(deed)
    scene.append([usage(7, tasks=5)])
    made = scene.make()
    scene.feed_one(made, turns=6)
    made.close()
    assert [step.task for step in scene.of("task_exit")] == [0, 1, 2, 3, 3, 3, 4]
    assert len(scene.of("launched")) == len(scene.of("terminated")) == 1


def test_events_of_hooks_that_do_nothing_are_not_even_read(scene: Scene) -> None:
    class Ends(JobAcctPlugin):
        plugin_type = TYPE

        def slurmctld_jobacct_job_complete(self, job: JobRun) -> None:
            pass

    scene.plugin = Ends  # type: ignore[assignment]
    made = scene.make()
    made.tick(lambda _: None)
    assert made.kinds == {RUN_END, JOBS_IMPORTED}
    made.close()


def _messages(scene: Scene) -> list[bytes]:
    """Return the messages in the journal."""
    events, _ = scene.reader.read(0, frozenset({PLUGIN_MESSAGE}), 100)
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
    scene.take(run(7, RUN_START), usage(7))
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
    reader = scene.reader
    events, upto = reader.read(0, made.kinds, 100)
    made.apply([one for one in events if one.kind != PLUGIN_MESSAGE], upto, lambda _: None)
    scene.feed_one(made)
    made.close()
    assert len(scene.of("message")) == before


def test_a_message_that_cannot_be_recorded_is_tried_as_often_as_is_said(scene: Scene) -> None:
    def deed(plugin: Recording, hook: str, *args: Any) -> None:
        if hook == "job_start":
            plugin.send("controller", b"x")

    scene.do(deed)
    scene.is_away = True
    made = scene.make()
    scene.append([run(1, RUN_START)])
    scene.feed_one(made, turns=2)
    assert len(scene.of("job_start")) == 2
    assert scene.failures() == {}
    scene.is_away = False
    scene.feed_one(made, turns=2)
    assert [one.data for one in scene.of("message")] == [b"x"]
    made.close()


@pytest.mark.parametrize(
    ("to", "data"), [("everybody", b"x"), ("controller", "text"), ("mynode", bytes(2 << 20))]
)
def test_what_cannot_be_sent_is_the_plugin_s_error(scene: Scene, to: Any, data: Any) -> None:
    scene.do(lambda plugin, hook, *_: hook == "job_start" and plugin.send(to, data))
    scene.take(run(1, RUN_START))
    assert scene.failures() == {("slurmctld_jobacct_job_start", "PluginError"): 1}
    with pytest.raises(PluginError):
        JobAcctPlugin().send("controller", b"x")


def test_messages_of_other_plugins_are_not_its_own(scene: Scene) -> None:
    body = PluginMessage(plugin_type="jobacct/other", to="controller", sender="n1", data=b"")
    scene.take(event(PLUGIN_MESSAGE, "m", body, NOON))
    assert scene.of("message") == []
