import errno
import gc
import io
import logging
import mmap
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from steward.bank.settings import BankSettings
from steward.core.config import Settings
from steward.core.errors import StewardError
from steward.core.waits import Stop
from steward.daemon.supervisor import SendHeartbeat, Supervisor, SupervisorTiming, WorkerSpec
from steward.daemon.workers import make_workers


def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


class Daemon:
    """A supervisor in a separate process, as in production."""

    def __init__(self, make: Callable[[], Supervisor], log: Path) -> None:
        self.log = log
        log.touch()
        # The supervisor collects garbage: that of thousands of tests is not its own to look at,
        # and to copy, page by page.
        gc.freeze()
        self.pid = os.fork()
        if self.pid:
            gc.unfreeze()
        else:
            code = 99
            try:
                logging.basicConfig(filename=log, level=logging.DEBUG, force=True)
                code = make().run()
            finally:
                os._exit(code)

    def kill(self) -> None:
        """Kill all processes of the supervisor."""
        try:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        except (ProcessLookupError, ChildProcessError):
            return  # it ended and was waited for

    def end(self, number: int = signal.SIGTERM) -> int:
        os.kill(self.pid, number)
        return self.wait()

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


Start = Callable[..., Daemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    daemons = []

    def begin(
        parts: Sequence[WorkerSpec],
        reload: Callable[[], Sequence[WorkerSpec]] | None = None,
        timing: SupervisorTiming | None = None,
    ) -> Daemon:
        daemons.append(Daemon(lambda: Supervisor(parts, reload, timing=timing), tmp_path / "log"))
        return daemons[-1]

    yield begin
    for daemon in daemons:
        daemon.kill()


def writes_its_pid(path: Path) -> Callable[[Stop, SendHeartbeat], None]:
    def run(stop: Stop, beat: SendHeartbeat) -> None:
        with open(path, "a") as out:
            out.write(f"{os.getpid()}\n")
        while not stop.is_set():
            beat()
            stop.wait(0.05)
        with open(path, "a") as out:
            out.write("stopped\n")

    return run


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_parts_run_and_are_stopped_the_last_one_last(tmp_path: Path, start: Start) -> None:
    order = tmp_path / "order"

    def run(name: str) -> Callable[[Stop, SendHeartbeat], None]:
        def part(stop: Stop, beat: SendHeartbeat) -> None:
            with open(order, "a") as out:
                out.write(f"+{name}\n")
            beat()  # the next part is started when this is heard
            stop.wait(60)
            with open(order, "a") as out:
                out.write(f"-{name}\n")

        return part

    parts = [
        WorkerSpec(name="journal", run=run("journal"), last=True),
        WorkerSpec(name="sink", run=run("sink"), after=("journal",)),
        WorkerSpec(name="capture", run=run("capture"), after=("sink",)),
    ]
    # A busy machine may take longer than the daemon waits.
    daemon = start(parts, timing=SupervisorTiming(after_s=60.0, stop_s=60.0))
    until(lambda: len(lines(order)) == 3)
    assert lines(order) == ["+journal", "+sink", "+capture"]
    assert daemon.end() == 0
    assert lines(order)[-1] == "-journal"


def test_who_is_asked_until_the_end_ends_last(tmp_path: Path) -> None:
    parts = make_workers(Settings(state_dir=str(tmp_path), bank=BankSettings(enabled=True)))
    assert {part.name for part in parts if part.last} == {"journal", "gate"}


def test_a_part_that_dies_is_started_again_alone(tmp_path: Path, start: Start) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    parts = [
        WorkerSpec(name="one", run=writes_its_pid(one)),
        WorkerSpec(name="two", run=writes_its_pid(two)),
    ]
    daemon = start(parts)
    until(lambda: bool(lines(one)) and bool(lines(two)))
    os.kill(int(lines(one)[0]), signal.SIGKILL)
    until(lambda: len(lines(one)) == 2)
    assert len(lines(two)) == 1
    assert daemon.end() == 0
    assert "worker one was ended by signal 9" in daemon.log.read_text()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "Resource temp"),
        (MemoryError(), "MemoryError()"),
        (RuntimeError("a hook refuses"), "RuntimeError('a hook refuses')"),
    ],
)
def test_a_fork_that_fails_is_tried_again_and_ends_nobody_else(
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    why: str,
) -> None:
    """A process limit is reached while a worker must restart."""
    one, two, full = tmp_path / "one", tmp_path / "two", tmp_path / "full"
    fork, tests = os.fork, os.getpid()

    def fails() -> int:
        if os.getpid() != tests and full.exists():
            raise error
        return fork()

    monkeypatch.setattr(os, "fork", fails)
    parts = [
        WorkerSpec(name="one", run=writes_its_pid(one)),
        WorkerSpec(name="two", run=writes_its_pid(two)),
    ]
    daemon = start(parts)
    until(lambda: bool(lines(one)) and bool(lines(two)))
    full.touch()
    os.kill(int(lines(one)[0]), signal.SIGKILL)
    until(lambda: daemon.log.read_text().count(f"worker one could not be started: {why}") >= 2)
    assert alive(int(lines(two)[0]))
    blocked = Path(f"/proc/{daemon.pid}/status").read_text().split("SigBlk:")[1].split()[0]
    assert int(blocked, 16) == 0, "signals reach the supervisor"
    full.unlink()
    until(lambda: len(lines(one)) == 2)
    assert len(lines(two)) == 1
    assert daemon.end() == 0


def test_a_part_that_cannot_begin_ends_itself_alone(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker fails before its work begins, and must not continue as a second supervisor."""
    two = tmp_path / "two"

    def fails(supervisor: int) -> None:
        if not two.exists():
            raise RuntimeError("no thread can be asked")

    monkeypatch.setattr("steward.daemon.supervisor.exit_with_parent", fails)
    daemon = start([WorkerSpec(name="two", run=writes_its_pid(two))])
    until(lambda: daemon.log.read_text().count("worker two ended with code 1") >= 2)
    two.touch()
    until(lambda: len(lines(two)) == 1)
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
    assert children == lines(two)
    assert daemon.end() == 0


def test_a_part_starts_though_the_output_cannot_be_flushed(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, tests = tmp_path / "one", os.getpid()

    class Full(io.StringIO):
        def flush(self) -> None:
            if os.getpid() != tests:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sys.stdout", Full())
    daemon = start([WorkerSpec(name="one", run=writes_its_pid(one))])
    until(lambda: bool(lines(one)))
    assert daemon.end() == 0


def test_a_part_that_hangs_is_ended_and_started_again(tmp_path: Path, start: Start) -> None:
    pids = tmp_path / "pids"

    def hang(stop: Stop, beat: SendHeartbeat) -> None:
        beat()
        with open(pids, "a") as out:
            out.write(f"{os.getpid()}\n")
        time.sleep(3600)

    parts = [WorkerSpec(name="stuck", run=hang, hang_s=2.0)]  # a busy machine may need one to fork
    daemon = start(parts, timing=SupervisorTiming(tick_s=0.1))
    until(lambda: len(lines(pids)) >= 2)
    daemon.end(signal.SIGKILL)
    assert "worker stuck sent no heartbeat" in daemon.log.read_text()


def test_what_a_part_had_started_ends_with_it(tmp_path: Path, start: Start) -> None:
    def fall(stop: Stop, beat: SendHeartbeat) -> None:
        command = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(tmp_path / "commands", "a") as out:
            out.write(f"{command.pid}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    other = tmp_path / "other"
    daemon = start(
        [WorkerSpec(name="one", run=fall), WorkerSpec(name="two", run=writes_its_pid(other))]
    )
    until(lambda: len(lines(tmp_path / "commands")) >= 2 and bool(lines(other)))
    until(lambda: not alive(int(lines(tmp_path / "commands")[0])))
    assert len(lines(other)) == 1
    assert daemon.end() == 0
    until(lambda: not any(alive(int(pid)) for pid in lines(tmp_path / "commands")))


def test_killing_the_supervisor_ends_its_parts(tmp_path: Path, start: Start) -> None:
    pids = tmp_path / "pids"
    daemon = start([WorkerSpec(name="one", run=writes_its_pid(pids))])
    until(lambda: bool(lines(pids)))
    daemon.end(signal.SIGKILL)
    until(lambda: not alive(int(lines(pids)[0])))


def test_a_deaf_part_does_not_hold_up_the_end(tmp_path: Path, start: Start) -> None:
    pids = tmp_path / "pids"

    def deaf(stop: Stop, beat: SendHeartbeat) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        beat()
        with open(pids, "a") as out:
            out.write(f"{os.getpid()}\n")
        time.sleep(3600)

    daemon = start([WorkerSpec(name="deaf", run=deaf)], timing=SupervisorTiming(stop_s=0.5))
    until(lambda: bool(lines(pids)))
    assert daemon.end() == 0
    assert not alive(int(lines(pids)[0]))


def test_hangup_brings_the_new_parts_or_keeps_the_present_ones(
    tmp_path: Path, start: Start
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    switch = tmp_path / "switch"

    def reload() -> list[WorkerSpec]:
        if not switch.exists():
            raise StewardError("line 3: unknown key")
        return [WorkerSpec(name="new", run=writes_its_pid(new))]

    parts = [WorkerSpec(name="old", run=writes_its_pid(old))]
    daemon = start(parts, reload)
    until(lambda: bool(lines(old)))
    os.kill(daemon.pid, signal.SIGHUP)
    until(lambda: "line 3: unknown key" in daemon.log.read_text())
    assert len(lines(old)) == 1
    switch.touch()
    os.kill(daemon.pid, signal.SIGHUP)
    until(lambda: bool(lines(new)))
    assert lines(old)[-1] == "stopped"
    assert daemon.end() == 0


def test_a_reload_to_more_workers_than_can_be_started_leaves_the_supervisor_alive(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, full = tmp_path / "old", tmp_path / "new", tmp_path / "full"
    fork, tests = os.fork, os.getpid()

    def fails() -> int:
        if os.getpid() != tests and full.exists():
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    def reload() -> list[WorkerSpec]:
        if full.exists():
            return [WorkerSpec(name=f"new{n}", run=writes_its_pid(new)) for n in range(600)]
        return [WorkerSpec(name="new", run=writes_its_pid(new))]

    monkeypatch.setattr(os, "fork", fails)
    daemon = start([WorkerSpec(name="old", run=writes_its_pid(old))], reload)
    until(lambda: bool(lines(old)))
    full.touch()
    os.kill(daemon.pid, signal.SIGHUP)
    until(lambda: "worker new599 could not be started: Resource temp" in daemon.log.read_text())
    full.unlink()
    os.kill(daemon.pid, signal.SIGHUP)
    until(lambda: bool(lines(new)))
    assert daemon.end() == 0


def test_an_unexpected_error_of_a_reload_keeps_the_present_workers(
    tmp_path: Path, start: Start
) -> None:
    def reload() -> list[WorkerSpec]:
        raise RuntimeError("can't start new thread")

    one = tmp_path / "one"
    daemon = start([WorkerSpec(name="one", run=writes_its_pid(one))], reload)
    until(lambda: bool(lines(one)))
    os.kill(daemon.pid, signal.SIGHUP)
    until(lambda: "can't start new thread" in daemon.log.read_text())
    assert len(lines(one)) == 1
    assert daemon.end() == 0


def test_an_error_while_a_reload_replaces_the_workers_starts_the_present_ones_again(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, full, map_memory = tmp_path / "one", tmp_path / "full", mmap.mmap

    def fails(*args: int) -> mmap.mmap:
        if full.exists():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return map_memory(*args)

    monkeypatch.setattr("steward.daemon.supervisor.mmap.mmap", fails)
    parts = [WorkerSpec(name="one", run=writes_its_pid(one))]
    daemon = start(parts, lambda: parts)
    until(lambda: bool(lines(one)))
    full.touch()
    os.kill(daemon.pid, signal.SIGHUP)
    until(lambda: "keeping the present one: OSError(12" in daemon.log.read_text())
    until(lambda: lines(one)[1:2] == ["stopped"] and len(lines(one)) == 3)
    full.unlink()
    os.kill(daemon.pid, signal.SIGHUP)
    until(lambda: len(lines(one)) == 5)
    assert daemon.end() == 0


def test_a_worker_that_a_reload_cannot_end_starts_again_when_it_ends(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker hangs on a dead mount: a second one would write to its database too."""
    stuck, free = tmp_path / "stuck", tmp_path / "free"
    tests, real = os.getpid(), {"kill": os.kill, "killpg": os.killpg}

    def spare_stuck(name: str) -> Callable[[int, int], None]:
        def kill(pid: int, number: int) -> None:
            if os.getpid() == tests or str(pid) not in lines(stuck):
                real[name](pid, number)

        return kill

    for name in real:
        monkeypatch.setattr(os, name, spare_stuck(name))
    parts = [
        WorkerSpec(name="stuck", run=writes_its_pid(stuck)),
        WorkerSpec(name="free", run=writes_its_pid(free)),
    ]
    daemon = start(parts, lambda: parts, SupervisorTiming(stop_s=0.2))
    until(lambda: bool(lines(stuck)) and bool(lines(free)))
    os.kill(daemon.pid, signal.SIGHUP)
    until(lambda: len(lines(free)) == 3)
    time.sleep(0.3)
    assert len(lines(stuck)) == 1
    os.kill(int(lines(stuck)[0]), signal.SIGKILL)
    until(lambda: len(lines(stuck)) == 2)
    os.kill(daemon.pid, signal.SIGTERM)
    os.kill(int(lines(stuck)[1]), signal.SIGKILL)
    assert daemon.wait() == 0


def test_the_service_manager_is_told(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(15)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        heard: list[str] = []

        def listen() -> None:
            while "STOPPING=1" not in heard:
                heard.extend(manager.recv(4096).decode().split("\n"))

        thread = threading.Thread(target=listen)
        thread.start()
        parts = [WorkerSpec(name="one", run=writes_its_pid(tmp_path / "pids"))]
        daemon = start(parts)
        until(lambda: "READY=1" in heard and "WATCHDOG=1" in heard)
        assert daemon.end() == 0
        thread.join(15)
        assert "STOPPING=1" in heard


def test_an_error_of_a_part_is_one_line_of_the_log(tmp_path: Path, start: Start) -> None:
    def fail(stop: Stop, beat: SendHeartbeat) -> None:
        raise StewardError("state_dir is on fire: put it out")

    daemon = start([WorkerSpec(name="one", run=fail)])
    until(lambda: "one: state_dir is on fire: put it out" in daemon.log.read_text())
    assert daemon.end() == 0
    assert "Traceback" not in daemon.log.read_text()
