"""Starts ``steward archive watch`` on a spool and reads from outside what it does and costs.

Nothing here asks Steward: processes are read in /proc, progress in its databases.
"""

import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec
from pysqlite3 import dbapi2

import observing

_TICKS = os.sysconf("SC_CLK_TCK")
_READY_S = _ENDED_S = 120.0
_WAL_COUNTER = struct.Struct("=8xI")
"""Head of SQLite's ``-shm`` file: the counter that every write transaction increments."""

Costs = dict[str, tuple[float, float]]
"""For each process, by name, the user and the system CPU seconds that it has used."""


class Activity(msgspec.Struct):
    """CPU and wake-ups of each process, and transactions of each database.

    Attributes:
        cpu: CPU seconds of each process, by name.
        wakes: Number of times that each process left a wait, by name.
        transactions: Number of write transactions on each database, by its path.
    """

    cpu: dict[str, float]
    wakes: dict[str, int]
    transactions: dict[str, int]


class Watch:
    """One running ``archive watch``.

    Args:
        where: An empty directory; spool, archive and log are made in it.
    """

    def __init__(self, where: Path) -> None:
        self.spool = where / "spool"
        self.archive = where / "archive"
        self.state = where / "state"
        self.log = where / "log"
        self.spool.mkdir()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "steward", "archive", "watch", "--no-slurm"),
                    *("--cluster", "c1", "--spool", str(self.spool)),
                    *("--archive", str(self.archive), "--state", str(self.state)),
                ],
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self._until(lambda: b"ready" in self.log.read_bytes(), "it is not ready")
        self._journal = _reader(self.state / "journal.db")
        self._sink = _reader(self.state / "archive-files.db")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()
        self._sink.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_ENDED_S)
        finally:
            self._process.kill()
            self._process.wait()

    def _until(self, ready: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + _READY_S
        while not ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{complaint}:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.01)

    def processes(self) -> list[int]:
        """The ids of all its processes."""
        found = [self._process.pid]
        for pid in found:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            found += map(int, children.split())
        return found

    def cpu(self) -> Costs:
        """What each process has used so far."""
        costs: Costs = {}
        for pid in self.processes():
            name, text = _read_stat(pid)
            fields = text[text.rindex(")") + 2 :].split()
            user_s, system_s = (int(field) / _TICKS for field in fields[11:13])
            before = costs.get(name, (0.0, 0.0))
            costs[name] = (before[0] + user_s, before[1] + system_s)
        return costs

    def activity(self) -> Activity:
        """What each process and each database has done so far."""
        wakes: dict[str, int] = {}
        for pid in self.processes():
            name, _ = _read_stat(pid)
            for status in Path(f"/proc/{pid}/task").glob("*/status"):
                _, _, text = status.read_text().partition("\nvoluntary_ctxt_switches:")
                wakes[name] = wakes.get(name, 0) + int(text.split()[0])
        transactions = {
            str(path.relative_to(self.state)).removesuffix(".db-shm"): _WAL_COUNTER.unpack_from(
                path.read_bytes()
            )[0]
            for path in self.state.rglob("*.db-shm")
        }
        cpu = {name: sum(cost) for name, cost in self.cpu().items()}
        return Activity(cpu, wakes, transactions)

    def pss_bytes(self) -> int:
        """Proportional set size of all its processes together."""
        total = 0
        for pid in self.processes():
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            line = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
            total += int(line.split()[1]) * 1024
        return total

    def wait_archived(self, events: int, timeout_s: float) -> bool:
        """Wait until the journal holds so many events and the files sink has passed them all."""
        deadline = time.monotonic() + timeout_s
        while True:
            head, passed = self.progress()
            if head >= events and passed >= head:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)

    def progress(self) -> tuple[int, int]:
        """The journal's last position, and up to which the files sink has come."""
        head = "SELECT ifnull(max(seq), 0) FROM sqlite_sequence WHERE name = 'event'"
        (at,) = self._journal.execute(head).fetchone()
        (passed,) = self._sink.execute("SELECT position FROM cursor").fetchone()
        return int(at), int(passed)

    def wait_idle(self) -> None:
        """Wait until none of its processes uses any CPU time worth the name."""
        before = sum(sum(cost) for cost in self.cpu().values())
        while True:
            time.sleep(1.0)
            now = sum(sum(cost) for cost in self.cpu().values())
            if now - before <= 0.05:
                return
            before = now

    @contextmanager
    def observed(self) -> Iterator[dict[int, int]]:
        """When each script appeared in the archive, ns of CLOCK_MONOTONIC, by job id.

        A process that does nothing else waits for inotify; the figures are there at the end.
        """
        seen: dict[int, int] = {}
        with tempfile.TemporaryFile() as told:
            observer = subprocess.Popen(
                [sys.executable, observing.__file__, str(self.archive)],
                stdin=subprocess.PIPE,
                stdout=told,
            )
            assert observer.stdin is not None
            try:
                yield seen
                observer.stdin.close()
                observer.wait(_ENDED_S)
            finally:
                observer.kill()
                observer.wait()
            told.seek(0)
            for line in told:
                job_id, seen_ns = line.split()
                seen.setdefault(int(job_id), int(seen_ns))

    def archived(self) -> dict[int, dict[str, Path]]:
        """The archived files by job id and suffix."""
        found: dict[int, dict[str, Path]] = {}
        for directory, names, files in os.walk(self.archive):
            names[:] = [name for name in names if not name.startswith(".")]
            for name in files:
                stem, _, suffix = name.rpartition(".")
                if suffix in ("sh", "env"):
                    found.setdefault(int(stem.split("-")[0]), {})[suffix] = Path(directory, name)
        return found


def _read_stat(pid: int) -> tuple[str, str]:
    """The name of a process, and its line in /proc."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.index("(") + 1 : text.rindex(")")].removeprefix("steward "), text


def _reader(path: Path) -> "dbapi2.Connection":
    connection = dbapi2.connect(str(path), timeout=10.0, isolation_level=None)
    connection.execute("PRAGMA query_only=ON")
    return connection
