"""``steward agent`` and its receiver: real processes and a real munged, killed at random.

``STEWARD_AGENT_SEED`` repeats the instants of an earlier run, ``STEWARD_AGENT_PYTHON`` is the
Python of the agents.
"""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

import msgspec
import pytest
from agents import AGENT, NODE, events_of, hearing, lines, put, run_agent, tasks_of
from controllers import (
    Controller,
    MakeMunged,
    controller_settings,
    make_munged,
    said,
    serve_settings,
)
from job_submission import wait_until
from spool_daemon import Daemon, chance_of

from servers.server import free_port
from steward.agent import agent
from steward.capture.nodes.node_reports import NodeReportsReader
from steward.capture.settings import NodesSettings
from steward.core.config import Settings
from steward.core.events import TASK_EXIT, Event
from steward.slurm.settings import ClusterSettings

__all__ = ["make_munged"]


def test_a_days_backlog_comes_in_pieces(tmp_path: Path, make_munged: MakeMunged) -> None:
    munged, port = make_munged(), free_port()
    settings = hearing(tmp_path, port, munged)
    put(tmp_path / "lines", lines(range(100_000)))
    with Daemon(settings, tmp_path) as daemon:
        said(daemon, "listening for nodes")
        began = time.monotonic()
        done = run_agent(tmp_path / "lines", port, munged.socket)
        assert (done.returncode, done.stderr) == (0, "")
        print(f"100,000 lines in {time.monotonic() - began:.1f} s")
        assert sorted(tasks_of(settings)) == list(range(100_000))
        daemon.stop()
    (node,) = NodeReportsReader(settings.state_dir).read_reports()
    assert (node.node, node.cluster) == (NODE, "c1")
    assert node.sequence == agent.Place(str(tmp_path / "lines" / f"{NODE}.place")).sequence
    assert len([e for e in events_of(settings) if e.kind == TASK_EXIT]) < 250


def write_on(spool: Path, total: int, chance: Random, over: threading.Event) -> None:
    for number in range(total):
        put(spool, lines(range(number, number + 1)))
        if chance.random() < 0.2:
            time.sleep(chance.uniform(0.0, 0.02))
    over.set()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kills", "total"), [(15, 2000), pytest.param(150, 20_000, marks=pytest.mark.long)]
)
def test_kills_at_random_lose_nothing(
    tmp_path: Path, make_munged: MakeMunged, kills: int, total: int
) -> None:
    """The agent is killed at random, and Steward at times, while lines are written."""
    chance = chance_of("STEWARD_AGENT_SEED")
    munged, port = make_munged(), free_port()
    settings = hearing(tmp_path, port, munged)
    spool = tmp_path / "lines"
    put(spool, b"")
    over = threading.Event()
    writer = threading.Thread(target=write_on, args=(spool, total, Random(chance.random()), over))
    words = [*AGENT, "--spool", str(spool), "--to", f"127.0.0.1:{port}"]
    words += ["--munge-socket", munged.socket, "--limit", "1", "--rotate-bytes", "20000"]
    with Daemon(settings, tmp_path) as daemon:
        writer.start()
        killed = 0
        while killed < kills or not over.is_set():
            running = subprocess.Popen(
                [*words, "--resident", "--every", "0.01"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            time.sleep(chance.uniform(0.0, 0.5))
            running.send_signal(signal.SIGKILL)
            running.wait(30)
            killed += 1
            if chance.random() < 0.1:
                daemon.kill()
                daemon.start()
        writer.join()
        said(daemon, "listening for nodes")
        wait_until(lambda: run_agent(spool, port, munged.socket).returncode == 0, 60.0)
        found = tasks_of(settings)
    print(f"{killed} kills, {len(found)} tasks told of {total}", file=sys.stderr)
    assert sorted(set(found)) == list(range(total))
    keys = [event.key for event in events_of(settings)]
    assert len(keys) == len(set(keys))
    assert {event.kind for event in events_of(settings)} == {TASK_EXIT}


def test_by_way_of_a_controller(tmp_path: Path, make_munged: MakeMunged) -> None:
    munged, port, nodes_port = make_munged(), free_port(), free_port()
    of = ClusterSettings(munge_socket=munged.socket, controllers=("127.0.0.1",))
    serve = serve_settings(tmp_path / "serve", port, {"c1": of})
    settings = msgspec.structs.replace(
        controller_settings(tmp_path / "ctl", port, tmp_path / "spool", munged.socket),
        nodes=NodesSettings(listen=f"127.0.0.1:{nodes_port}"),
    )
    put(tmp_path / "lines", lines(range(3000)) + b"garbage\n")
    with (
        Daemon(serve, tmp_path / "serve") as steward,
        Controller(settings, tmp_path / "ctl") as ctl,
    ):
        said(ctl, "listening for nodes")
        assert run_agent(tmp_path / "lines", nodes_port, munged.socket).returncode == 0
        steward.wait(lambda: len(set(tasks_of(serve))) == 3000)
        steward.wait(lambda: any(event.body.why == "garbled" for event in gaps_of(serve)))
        ctl.wait(ctl.is_forwarded)


def gaps_of(settings: Settings) -> list[Event]:
    return [event for event in events_of(settings) if event.kind == "node.gap"]
