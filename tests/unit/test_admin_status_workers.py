"""Detection of a running daemon by its lock."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from job_submission import wait_until

from harness.site import ROOT
from steward.admin.doctor.context import make_check_context
from steward.admin.doctor.host_checks import check_workers
from steward.admin.status.requests import StatusShowRequest
from steward.admin.status.workers import DaemonStatus, WorkerLine, read_daemon_status
from steward.core.config import Settings
from steward.core.files import write_status
from steward.daemon.contexts import make_registry
from steward.slurm.settings import ClusterSettings

SUPERVISOR = """
import os, resource, sys, time
from steward.core.files import StatusWriteError
from steward.admin.status.workers import DaemonStatusWriter, WorkerLine, read_daemon_status

place = sys.argv[1]
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
leaving = DaemonStatusWriter(place)
print("ready", flush=True)
for line in sys.stdin:
    said = "done"
    match line.strip():
        case "put":
            try:
                leaving.write([WorkerLine(name="journal", pid=os.getpid())])
            except StatusWriteError as error:
                said = str(error)
        case "fill":  # as on a full disk: files can be made, and not written
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
        case "clear":
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        case "look":
            found = read_daemon_status(place)
            open(f"{place}/daemon.lock", "rb").close()
            said = found.workers[0].name if found else "nothing"
        case "part":
            pid = os.fork()
            if pid == 0:
                time.sleep(600)
                os._exit(0)
            said = str(pid)
    print(said, flush=True)
"""


class Held:
    """A supervisor in a separate process, which the test controls."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        assert self._line() == "ready"

    def do(self, word: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def supervisor(place: Path) -> Iterator[Held]:
    words = [sys.executable, "-c", SUPERVISOR, str(place)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Held(process)
        finally:
            process.kill()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    with supervisor(tmp_path) as one:
        yield one


def test_a_daemon_that_can_write_nothing_runs_nonetheless(tmp_path: Path, held: Held) -> None:
    # The status file of the former daemon does not count for this one.
    stale = DaemonStatus(version="0", since=datetime.now(UTC), workers=(WorkerLine(name="old"),))
    write_status(str(tmp_path / "daemon.json"), stale)
    assert read_daemon_status(str(tmp_path)) is None
    held.do("fill")
    assert "cannot write" in held.do("put")
    assert read_daemon_status(str(tmp_path)) == DaemonStatus()

    settings = Settings(state_dir=str(tmp_path), cluster={"c1": ClusterSettings(slurm=False)})
    rooms = make_registry(settings)
    shown = rooms.call("status.show", ROOT, StatusShowRequest())
    assert shown.running
    assert shown.workers == ()
    assert "no status file" in shown.unknown["workers"]

    (finding,) = check_workers(make_check_context(settings, lambda: rooms, ROOT, asks_slurm=False))
    assert finding.status == "warning"
    assert "runs" in finding.finding

    held.do("clear")
    assert held.do("put") == "done"
    found = read_daemon_status(str(tmp_path))
    assert found is not None
    assert found.is_known
    assert [one.pid for one in found.workers] == [held.process.pid]
    assert "workers" not in rooms.call("status.show", ROOT, StatusShowRequest()).unknown


def test_a_look_from_within_lets_go_of_nothing(tmp_path: Path, held: Held) -> None:
    assert held.do("put") == "done"
    assert held.do("look") == "journal"
    assert read_daemon_status(str(tmp_path)) is not None
    with supervisor(tmp_path) as other:
        assert "another process of Steward has locked" in other.do("put")
    assert read_daemon_status(str(tmp_path)) is not None


def test_a_part_that_is_stuck_holds_nothing(tmp_path: Path, held: Held) -> None:
    assert held.do("put") == "done"
    part = int(held.do("part"))
    try:
        held.process.kill()
        wait_until(lambda: read_daemon_status(str(tmp_path)) is None)
        os.kill(part, 0)
        with supervisor(tmp_path) as other:
            assert other.do("put") == "done"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(part, signal.SIGKILL)
