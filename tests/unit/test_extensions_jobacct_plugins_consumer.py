"""Failing accounting plugins: each fails alone, and is reported."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from harness.forks import fork_child
from harness.jobacct import TYPE, LogSite, Scene, run, scene
from steward.core.errors import Unavailable
from steward.core.events import (
    RUN_START,
)
from steward.extensions.jobacct_plugins.state import read_health

__all__ = ["scene"]


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
    scene.take(*(run(job_id, RUN_START) for job_id in range(1, 6)), run(1))
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
    scene.take(*(run(job_id, RUN_START) for job_id in (1, 2, 3)))
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
    scene.append([*(run(job_id, RUN_START) for job_id in (1, 2, 3))])
    made = scene.make()
    scene.feed_one(made, turns=6)
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
    scene.append([run(1)])
    made = scene.make()
    feed = scene.feed_one(made, turns=1)
    assert "no such directory" in scene.link.waiting["accounting.plugins.mine"]
    assert scene.of("job_complete") == []
    refusal = read_health(scene.settings.state_dir, TYPE).refusal
    assert "slurmctld_jobacct_init: OSError: no such directory" in refusal
    scene.clock.now_s += 60.0
    feed.run_turn()
    assert len(scene.of("job_complete")) == 1
    assert read_health(scene.settings.state_dir, TYPE).refusal == ""
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
    scene.append([*(run(job_id, RUN_START) for job_id in range(1, 41))])
    scene.writer.close()  # the child is the journal's one writer

    def consume() -> None:
        made = scene.make()
        LogSite(scene.directory).feed_one(made)
        made.close()

    for _ in range(6):
        code = os.waitstatus_to_exitcode(os.waitpid(fork_child(consume), 0)[1])
        if code == 0:
            break
    assert code == 0
    told = [int(line) for line in Path(calls).read_text().split()]
    assert set(told) == set(range(1, 41))
    assert told.count(20) == 4  # once with its whole batch, thrice alone
    assert told[-20:] == list(range(21, 41))
    assert max(told.count(job_id) for job_id in range(1, 41) if job_id != 20) == 2
    assert scene.failures() == {("*", "crash"): 1}
