"""Plays the recording of a real Torque server: its files, by its system calls, in its order."""

import grp
import os
import pwd
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

RECORDINGS = Path(__file__).parents[1] / "fixtures" / "torque"
BIG = b"#!/bin/sh\n" + b": filler, filler, filler\n" * 6000 + b"exit 0 # end\n"
BIG = BIG + b"#" * (150_028 - len(BIG)) if len(BIG) < 150_028 else BIG[:150_028]
PIECE = 65536
_TIME = re.compile(rb"\b1795[0-9]{6}\b")
_SINCE_SUBMIT_S = 30
_LINE = re.compile(r"\s*([0-9.]+) ([A-Z_,]+)\s+server_priv/jobs/(\S+)")
# Until when (s) each moment's files are what was written.
_MOMENTS = {
    "flat": {"queued": 9.5, "running": 20.0, "completed": 41.0},
    "subdirs": {"queued": 9.5, "running": 17.0, "completed": 39.5},
}


class Step(NamedTuple):
    """One line of the log."""

    at_s: float
    what: str
    path: str


class Player:
    """Plays one recording into ``server_priv``.

    Args:
        kind: ``flat`` or ``subdirs``.
        root: The directory ``server_priv``; made.
    """

    def __init__(self, kind: str, root: Path) -> None:
        self.kind = kind
        self.jobs = root / "jobs"
        for name in ("", *"0123456789"):
            (self.jobs / name).mkdir(parents=True, exist_ok=True)
        self._source = RECORDINGS / kind
        self._user = pwd.getpwuid(0).pw_name.encode()
        self._group = grp.getgrgid(0).gr_name.encode()
        # Its times are the recording's: the first job is submitted a while before now.
        first = self._source / "queued" / ("1021.vm.JB" if kind == "flat" else "1/2031.vm.JB")
        submitted = re.search(rb"<ctime[^>]*>([0-9]+)", first.read_bytes())
        assert submitted is not None
        self._shift_s = int(time.time()) - _SINCE_SUBMIT_S - int(submitted[1])
        self._open: dict[str, int] = {}
        self._pieces: dict[str, int] = {}
        self._saves: dict[str, int] = {}

    def steps(self) -> Iterator[Step]:
        """What the log holds, in its order."""
        for line in (self._source / "events.log").read_text().splitlines():
            match = _LINE.match(line)
            if match:
                yield Step(float(match[1]), match[2].split(",")[0], match[3])

    def play(
        self, upto: str = "completed", after_each: Callable[[Step], None] = lambda step: None
    ) -> None:
        """Do what Torque did until a moment; "" for all of it, the purge too."""
        until = _MOMENTS[self.kind][upto] if upto else float("inf")
        for step in self.steps():
            if step.at_s > until:
                break
            self._do(step)
            after_each(step)

    def snapshot(self, moment: str, jobs: Path) -> None:
        """Lay what was there at a moment into another directory of jobs, with our times."""
        for name in ("", *"0123456789"):
            (jobs / name).mkdir(parents=True, exist_ok=True)
        for path in (self._source / moment).rglob("*.??"):
            if path.is_file():
                (jobs / path.relative_to(self._source / moment)).write_bytes(self.read(path))
        big = "1028.vm.SC" if self.kind == "flat" else "8/2038.vm.SC"
        (jobs / big).write_bytes(BIG)
        for path in jobs.rglob("*.SC"):
            played = self.jobs / path.relative_to(jobs)
            if played.exists():
                status = played.stat()
                os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))

    def read(self, path: Path) -> bytes:
        """A recorded file, its times and its user ours."""
        data = path.read_bytes()
        if path.suffix == ".SC":
            return data
        # Its user is the recording's: here it is one that there is.
        for tag, name in ((b"euser", self._user), (b"egroup", self._group)):
            data = re.sub(rb"(<%s [^>]*>)tester<" % tag, rb"\g<1>" + name + b"<", data)
        return _TIME.sub(lambda found: b"%d" % (int(found[0]) + self._shift_s), data)

    def _do(self, step: Step) -> None:
        path, suffix = str(self.jobs / step.path), step.path[-3:]
        if step.what == "CREATE":
            saved = path[:-3] + ".JC"
            if suffix in (".JB", ".TA") and os.path.exists(saved):
                os.link(saved, path)
            else:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                self._open[path] = os.open(path, flags, 0o600)
        elif step.what == "MODIFY":
            if path not in self._open:
                self._open[path] = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.write(self._open[path], self._data(step, path))
        elif step.what == "CLOSE_WRITE":
            os.close(self._open.pop(path))
        else:
            assert step.what == "DELETE", step
            os.unlink(path)

    def _data(self, step: Step, path: str) -> bytes:
        if step.path.endswith(".SC"):
            number = self._pieces.get(path, 0)
            self._pieces[path] = number + 1
            return self._script(step.path)[number * PIECE : (number + 1) * PIECE]
        return self._record(step)

    def _script(self, path: str) -> bytes:
        recorded = self._source / "queued" / path
        return recorded.read_bytes() if recorded.exists() else BIG

    def _record(self, step: Step) -> bytes:
        moments = _MOMENTS[self.kind]
        moment = next((name for name, until in moments.items() if step.at_s <= until), "completed")
        base = step.path[:-3]
        for suffix in (".JB", ".TA"):
            recorded = self._source / moment / (base + suffix)
            if recorded.exists():
                break
        data = self.read(recorded)
        self._saves[base] = self._saves.get(base, 0) + 1
        if self._saves[base] == 1:
            # The first save has neither time yet.
            data = re.sub(rb"\s*<[qe]time [^\n]*", b"", data)
        return data
