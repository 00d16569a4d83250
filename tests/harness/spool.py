"""slurmctld's spool: entries, capture from it, and failing reads."""

import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from steward.capture.slurm_spool import HeldScript, SlurmSpool


@pytest.fixture(autouse=True)
def no_lease_signals() -> Iterator[None]:
    """Ignore SIGIO, which the kernel sends when a lease is broken and which would end pytest."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGIO, before)


Watch = Callable[..., SlurmSpool]


@pytest.fixture
def watch() -> Iterator[Watch]:
    open_spools = []

    def make(root: Path, **options: object) -> SlurmSpool:
        arguments: dict[str, object] = {"is_captured": lambda job_id, mtime_ns: False, **options}
        spool = SlurmSpool(str(root), **arguments)  # type: ignore[arg-type]  # the tests' own
        open_spools.append(spool)
        return spool

    yield make
    for spool in open_spools:
        spool.close()


def take(spool: SlurmSpool, count: int = 1, timeout_s: float = 5.0) -> list[HeldScript]:
    """Watch until ``count`` scripts are ready or the time is over; return them."""
    until = time.monotonic() + timeout_s
    while len(spool.ready) < count and time.monotonic() < until:
        spool.process_events()
        time.sleep(0.002)
    scripts = [entry for entry in spool.ready if isinstance(entry, HeldScript)]
    spool.ready.clear()
    return scripts


def contents(grabbed: HeldScript) -> bytes:
    data = os.pread(grabbed.script_fd, 1 << 20, 0)
    grabbed.close()
    return data


class Faults:
    """Read errors on files whose path ends in ``of``, as during a multipath failover."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = 0
        self.of = ""
        self.reads = 0
        pread = os.pread

        def fails(fd: int, count: int, offset: int) -> bytes:
            self._fail_of_open(fd)
            return pread(fd, count, offset)

        monkeypatch.setattr(os, "pread", fails)

    def _fail(self) -> None:
        self.reads += 1
        raise OSError(self.error, os.strerror(self.error))

    def _fail_of_open(self, fd: int) -> None:
        if self.error and os.readlink(f"/proc/self/fd/{fd}").endswith(self.of):
            self._fail()

    def of_opens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make open() fail, too."""
        original = os.open

        def fails(path: str, *args: int, **options: int) -> int:
            if self.error and str(path).endswith(self.of):
                os.lstat(path, **options)  # a missing file still raises ENOENT
                self._fail()
            return original(path, *args, **options)

        monkeypatch.setattr(os, "open", fails)

    def of_stats(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make fstat() fail, too."""
        original = os.fstat

        def fails(fd: int) -> os.stat_result:
            self._fail_of_open(fd)
            return original(fd)

        monkeypatch.setattr(os, "fstat", fails)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def environment_bytes(*entries: bytes, count: int | None = None) -> bytes:
    """Return the bytes of an ``environment`` file as slurmctld writes it."""
    number = len(entries) if count is None else count
    return struct.pack("=I", number) + b"".join(entry + b"\0" for entry in entries)


def make_spool(root: Path) -> Path:
    """Make an empty StateSaveLocation with its ten hash directories."""
    for number in range(10):
        (root / f"hash.{number}").mkdir(parents=True)
    return root


def submit(
    root: Path, job_id: int, script: bytes = b"#!/bin/sh\n", environment: bytes | None = None
) -> Path:
    """Write a job's files to a spool in slurmctld's order; return their directory."""
    directory = root / f"hash.{job_id % 10}" / f"job.{job_id}"
    directory.mkdir(parents=True)
    block = environment_bytes(b"HOME=/home/ada") if environment is None else environment
    (directory / "environment").write_bytes(block)
    with open(directory / "script", "wb") as out:
        out.write(script)
        out.write(b"\0")
        out.flush()
        os.fsync(out.fileno())
    return directory
