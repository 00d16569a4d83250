"""Measurement of a daemon's memory and descriptors over time."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE = os.sysconf("SC_PAGE_SIZE")


class Sample(NamedTuple):
    """One measurement of a process.

    Attributes:
        at_s: Time of the measurement, by the monotonic clock.
        rss: Resident memory, in bytes.
        fds: Number of open descriptors, without directories.
        directories: Number of open directories: a files sink keeps those that it used last.
    """

    at_s: float
    rss: int
    fds: int
    directories: int


class Growth:
    """Measures all processes of a sandbox's Steward, repeatedly.

    Args:
        sandbox: Directory of the sandbox, which is in the environment of its processes.
    """

    def __init__(self, sandbox: str) -> None:
        self._mark = f"STEWARD_SANDBOX={sandbox}".encode()
        self._samples: dict[tuple[int, str], list[Sample]] = {}
        self._looks = 0

    def look(self) -> None:
        """Measure again."""
        self._looks += 1
        for pid, name in self._processes():
            try:
                rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
                open_ones = list(Path(f"/proc/{pid}/fd").iterdir())
            except OSError:
                continue  # it has ended
            directories = sum(one.is_dir() for one in open_ones)
            fds = len(open_ones) - directories
            sample = Sample(time.monotonic(), rss, fds, directories)
            self._samples.setdefault((pid, name), []).append(sample)

    def begin(self) -> None:
        """Discard the measurements so far."""
        self._samples.clear()
        self._looks = 0

    def lasting(self) -> dict[str, list[Sample]]:
        """Return the measurements of each process that ran at every measurement."""
        return {
            f"{name} ({pid})": samples
            for (pid, name), samples in sorted(self._samples.items())
            if len(samples) == self._looks
        }

    def _processes(self) -> Iterator[tuple[int, str]]:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                name = (entry / "comm").read_text().strip()
                if not name.startswith("steward"):
                    continue
                if self._mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name), name
            except OSError:
                continue  # it has ended


def slope(points: list[tuple[float, float]]) -> float:
    """Return the slope of a least-squares fit, per second."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    over = sum((x - mean_x) * (y - mean_y) for x, y in points)
    under = sum((x - mean_x) ** 2 for x, _ in points)
    return over / under if under else 0.0
