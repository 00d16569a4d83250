"""A gate in a process of its own, as ``steward serve`` runs it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from harness.gate import picture, rules
from steward.bank.gate.link import GateLink, connect
from steward.bank.gate.server import GateServer
from steward.bank.gate.shapes import GateState
from steward.bank.records import AccountBooks, Books, Description
from steward.core.config import Settings
from steward.core.errors import Unavailable
from steward.core.waiting import Stop

PATIENCE_S = 30.0
_RUN = """
import signal, sys
import msgspec
from steward.core.config import Settings
from steward.daemon.gate import run_gate
from steward.core.waiting import Stop
stop = Stop()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
run_gate(msgspec.json.decode(sys.argv[1], type=Settings), stop, lambda: None)
"""


class RunningGate:
    """Started at once; :meth:`kill` and :meth:`start` at will."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.link = GateLink(settings.state_dir)
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        given = msgspec.json.encode(self.settings).decode()
        self.process = subprocess.Popen([sys.executable, "-c", _RUN, given])
        self.wait(lambda: self.state() is not None)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(PATIENCE_S)
            self.process = None

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def state(self) -> GateState | None:
        try:
            return self.link.state()
        except Unavailable:
            return None

    def tell(self, *accounts: AccountBooks, mode: str = "gate", seq: int = 1) -> None:
        """All that a gate must be told; waits until it decides."""
        self.link.books(Books(seq=seq, accounts=accounts, whole=True))
        self.link.rules(rules(mode))
        self.link.picture(picture())
        self.wait_open()

    def wait_open(self) -> None:
        path = self.settings.gate.socket
        self.wait(lambda: bool((state := self.state()) and state.deciding))
        self.wait(lambda: os.path.exists(path))

    def wait(self, is_so: Any) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_so():
            assert self.is_running(), "the gate has ended"
            assert time.monotonic() < until, "the gate does not come so far"
            time.sleep(0.01)

    def ask(self, job: Description, op: str = "submit", cluster: str = "c") -> dict[str, Any]:
        body = json.loads(msgspec.json.encode(job))
        answer = self.say(
            json.dumps({"v": 1, "op": op, "cluster": cluster, "job": body}).encode() + b"\n"
        )
        return dict(json.loads(answer))

    def say(self, data: bytes) -> bytes:
        """Send something to the plugin's socket; what comes back, b"" for nothing."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE_S)
            connect(connection, self.settings.gate.socket)
            connection.sendall(data)
            answer = b""
            while not answer.endswith(b"\n"):
                more = connection.recv(65536)
                if not more:
                    break
                answer += more
            return answer


class GateThread(RunningGate):
    """The same in a thread of this process: patches reach it, and it can be made to pause."""

    def start(self) -> None:
        self._end = Stop()
        self._goes_on, self._pauses = threading.Event(), threading.Event()
        self._goes_on.set()
        server = GateServer(self.settings)
        self._thread = threading.Thread(target=server.run, args=(self._end, self._beat))
        self._thread.start()
        self.wait(lambda: self.state() is not None)

    def _beat(self) -> None:
        if not self._goes_on.is_set():
            self._pauses.set()
            self._goes_on.wait(PATIENCE_S)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is asked within waits until the end, and is then decided on at once."""
        self._pauses.clear()
        self._goes_on.clear()
        assert self._pauses.wait(PATIENCE_S), "the gate does not beat"
        try:
            yield
        finally:
            self._goes_on.set()

    def kill(self, number: int = signal.SIGKILL) -> None:
        self._end.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the gate goes on"

    def is_running(self) -> bool:
        return self._thread.is_alive()


@contextmanager
def running(settings: Settings) -> Iterator[RunningGate]:
    gate = RunningGate(settings)
    try:
        yield gate
    finally:
        gate.kill()


@contextmanager
def running_here(settings: Settings) -> Iterator[GateThread]:
    gate = GateThread(settings)
    try:
        yield gate
    finally:
        gate.kill()


def state_dir(tmp_path: Path) -> Path:
    made = tmp_path / "state"
    made.mkdir(exist_ok=True)
    return made
