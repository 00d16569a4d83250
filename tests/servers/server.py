"""Base of the test servers: a JVM with its own ports, which can be killed and restarted.

Two measures ensure that no JVM outlives the tests: the kernel kills it when the thread that
started it ends, which is one that ends with the interpreter; and `stop` ends it, at the end of a
fixture.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Self

from servers.jars import java_of

HOST: Final = "127.0.0.1"
UP_TIMEOUT_S: Final = 240.0
_TAIL: Final = 6000
# Those above are the sandboxes', which hold theirs in a way that looks free.
_PORTS: Final = range(10000, 20000)
_claims: Final[list[socket.socket]] = []
_JVM: Final = (
    *("-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
    "-XX:-UsePerfData",  # which writes to /tmp
)

# The parent-death signal is sent when the forking thread ends, and a test may restart a server in a
# thread.
_starter: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="servers")


class DidNotStart(Exception):
    """A server did not come up; the message ends with the tail of its log."""


class Server:
    """Server on loopback. Use it as a context manager, or `start` and `stop` it.

    Args:
        name: Name in versions.toml.
        directory: Directory of its data and log; created if missing.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self._log_path = directory / "log"
        self._log_from = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def command(self) -> Sequence[str]:
        """Return the command line that starts the server."""
        raise NotImplementedError

    def java(self, *words: str) -> Sequence[str]:
        """Return the command of a JVM with bounded memory, whose files are in the directory."""
        scratch = self.directory / "tmp"
        scratch.mkdir(exist_ok=True)
        return (java_of(self.name), *_JVM, f"-Djava.io.tmpdir={scratch}", *words)

    def answers(self) -> bool:
        """Return whether the server is ready; an OSError means that it is not."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the server on its data and ports, and wait until it answers.

        Raises:
            DidNotStart: It ended, or did not answer in time.
        """
        assert self._process is None, f"{self.name} runs already"
        self._log_from = self._log_path.stat().st_size if self._log_path.exists() else 0
        self._process = _starter.submit(self._spawn).result()
        deadline = time.monotonic() + UP_TIMEOUT_S
        while not self._up():
            if self._process.poll() is not None:
                said = f"{self.name} ended with {self._process.returncode}"
            elif time.monotonic() > deadline:
                said = f"{self.name} did not answer for {UP_TIMEOUT_S:.0f} s"
            else:
                time.sleep(0.05)
                continue
            self.kill()
            raise DidNotStart(f"{said}:\n{self.log()[-_TAIL:]}")

    def kill(self) -> None:
        """Kill the server with SIGKILL, and wait for its end; do nothing if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def stop(self) -> None:
        """End the server permanently, without regard for unwritten data."""
        self.kill()

    def pause(self) -> None:
        """Stop the server with SIGSTOP: it accepts connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # Each thread stops when it next leaves the kernel, which may be a moment later.
        deadline = time.monotonic() + UP_TIMEOUT_S
        while not _stands_still(self._process.pid):
            assert time.monotonic() < deadline, f"{self.name} does not stand still"
            time.sleep(0.01)

    def resume(self) -> None:
        """Continue the server after `pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def pid(self) -> int:
        """Return the process id of the JVM; 0 if it does not run."""
        return self._process.pid if self._process is not None else 0

    def log(self) -> str:
        """Return the log since the last start."""
        if not self._log_path.exists():
            return ""
        with self._log_path.open("rb") as file:
            file.seek(self._log_from)
            return file.read().decode(errors="replace")

    def _up(self) -> bool:
        with contextlib.suppress(OSError):  # it does not listen yet
            return self.answers()
        return False

    def _spawn(self) -> "subprocess.Popen[bytes]":
        kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *self.command()],
                cwd=self.directory,
                env=kept,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


def free_port() -> int:
    """Return a free port of 127.0.0.1 that no other running tests have.

    It is below the ports that the kernel gives to clients, so that a killed server finds its port
    free when it is started again.
    """
    for port in random.SystemRandom().sample(_PORTS, 200):
        if _is_free(port) and _claim(port):
            return port
    raise DidNotStart(f"no free port among {_PORTS.start} to {_PORTS.stop - 1}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _claim(port: int) -> bool:
    """Claim a port for the lifetime of this process; False if other tests have it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0steward-tests-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


def _stands_still(pid: int) -> bool:
    """Return whether every thread of a process is stopped (proc(5): state T)."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return set(states) <= {"T", "t", "Z", "X"}
