"""Torque spools: replayed recordings, and spools that a test writes."""

import grp
import os
import pwd
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.jobs import Books
from steward.capture.spool import CaptureLimits, SpoolCapture
from steward.capture.spool_entries import SpoolPlan
from steward.core.config import RedactSettings
from steward.core.events import JOB_SCRIPT, Event, decode_event
from steward.core.redaction import Redactor
from steward.core.script_stores import IncomingStore
from steward.extensions.torque.spool import TorqueSpool, TorqueTiming
from steward.jobs import Job, JobFilter, Jobs

RECORDINGS = Path(__file__).parents[1] / "fixtures" / "torque"
BIG = b"#!/bin/sh\n" + b": filler, filler, filler\n" * 6000 + b"exit 0 # end\n"
BIG = BIG + b"#" * (150_028 - len(BIG)) if len(BIG) < 150_028 else BIG[:150_028]
PIECE = 65536
_TIME = re.compile(rb"\b1795[0-9]{6}\b")
_SINCE_SUBMIT_S = 30
_LINE = re.compile(r"\s*([0-9.]+) ([A-Z_,]+)\s+server_priv/jobs/(\S+)")
# Time of the log (s) until which a moment's files have the contents that Torque wrote.
_MOMENTS = {
    "flat": {"queued": 9.5, "running": 20.0, "completed": 41.0},
    "subdirs": {"queued": 9.5, "running": 17.0, "completed": 39.5},
}


class Step(NamedTuple):
    """One line of a recording's log of file operations."""

    at_s: float
    what: str
    path: str


class Player:
    """Replays one recording into ``server_priv``.

    Args:
        kind: ``flat`` or ``subdirs``.
        root: The directory ``server_priv``, which the Player creates.
    """

    def __init__(self, kind: str, root: Path) -> None:
        self.kind = kind
        self.jobs = root / "jobs"
        for name in ("", *"0123456789"):
            (self.jobs / name).mkdir(parents=True, exist_ok=True)
        self._source = RECORDINGS / kind
        self._user = pwd.getpwuid(0).pw_name.encode()
        self._group = grp.getgrgid(0).gr_name.encode()
        # Shift the recording's times: its first job was submitted shortly before now.
        first = self._source / "queued" / ("1021.vm.JB" if kind == "flat" else "1/2031.vm.JB")
        submitted = re.search(rb"<ctime[^>]*>([0-9]+)", first.read_bytes())
        assert submitted is not None
        self._shift_s = int(time.time()) - _SINCE_SUBMIT_S - int(submitted[1])
        self._open: dict[str, int] = {}
        self._pieces: dict[str, int] = {}
        self._saves: dict[str, int] = {}

    def steps(self) -> Iterator[Step]:
        """Yield the steps of the log, in order."""
        for line in (self._source / "events.log").read_text().splitlines():
            match = _LINE.match(line)
            if match:
                yield Step(float(match[1]), match[2].split(",")[0], match[3])

    def play(
        self, upto: str = "completed", after_each: Callable[[Step], None] = lambda step: None
    ) -> None:
        """Replay the steps until a moment of the recording; "" for all steps, with the purge."""
        until = _MOMENTS[self.kind][upto] if upto else float("inf")
        for step in self.steps():
            if step.at_s > until:
                break
            self._do(step)
            after_each(step)

    def snapshot(self, moment: str, jobs: Path) -> None:
        """Write the files of a moment to another directory of jobs, with shifted times."""
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
        """Return a recorded file with shifted times and a user of this machine."""
        data = path.read_bytes()
        if path.suffix == ".SC":
            return data
        # Replace the recording's user by one that exists on this machine.
        for tag, name in ((b"euser", self._user), (b"egroup", self._group)):
            data = re.sub(rb"(<%s [^>]*>)tester<" % tag, rb"\g<1>" + name + b"<", data)
        return _TIME.sub(lambda match: b"%d" % (int(match[0]) + self._shift_s), data)

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
            # The first save has neither qtime nor etime.
            data = re.sub(rb"\s*<[qe]time [^\n]*", b"", data)
        return data


class TorqueCapture:
    """Capture of a Torque spool: bytes go to a store, events to jobs.db."""

    def __init__(
        self,
        directory: Path,
        root: Path,
        *,
        timing: TorqueTiming | None = None,
        limits: CaptureLimits | None = None,
        **plan: object,
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        (directory / "kept").mkdir()
        self.store = IncomingStore("state", str(directory / "kept" / "incoming"))
        self.events: list[Event] = []
        self.spool = TorqueSpool(
            SpoolPlan(
                cluster="c1",
                root=str(root),
                **{"known": lambda job_id, mtime_ns: False, **plan},  # type: ignore[arg-type]
            ),
            timing=timing,
        )
        self.capture = SpoolCapture(
            "c1",
            self.spool,
            [self.store],
            Redactor(RedactSettings()),
            lambda rows: self.events.extend(decode_event(0, *row) for row in rows),
            limits=limits,
        )

    def finish(self) -> "TorqueCapture":
        """Capture all entries that are still due, and end."""
        until = time.monotonic() + 20
        self.capture.run_turn()
        while (self.spool.due_s() < 1.0 or self.spool.ready) and time.monotonic() < until:
            time.sleep(0.01)
            self.capture.run_turn()
        assert self.capture.finish()
        return self

    def jobs(self) -> dict[str, Job]:
        """Apply all events to a new jobs.db, each key once; return its jobs by label."""
        shutil.rmtree(self.directory / "db", ignore_errors=True)
        first = {event.key: event for event in reversed(self.events)}
        events = [event for event in self.events if first[event.key] is event]
        (self.directory / "db").mkdir()
        books = Books(self.directory / "db")
        books.take(*events)
        jobs = Jobs(books.path)
        try:
            return {job.label: job for job in jobs.list(JobFilter())}
        finally:
            jobs.close()

    def scripts(self) -> dict[int, Event]:
        return {event.body.job_id: event for event in self.events if event.kind == JOB_SCRIPT}

    def bytes_of(self, job_id: int, what: str = "script") -> bytes:
        return self.store.read(getattr(self.scripts()[job_id].body, what))

    def environment(self, job_id: int) -> list[bytes]:
        return self.bytes_of(job_id, "environment")[4:].split(b"\0")


class Spool:
    """A Torque spool that the test writes."""

    def __init__(self, root: Path) -> None:
        self.jobs = root / "jobs"
        self.jobs.mkdir(parents=True)
        player = Player("flat", root.parent / "unused")
        self._record = player.read(RECORDINGS / "flat" / "queued" / "1027.vm.JB")

    def save(self, name: str, data: bytes | None = None, **changes: str) -> None:
        if data is None:
            data = self._record.replace(b"1027", name.partition(".")[0].encode())
            for tag, text in changes.items():
                start = data.index(f"<{tag}".encode())
                begin = data.index(b">", start) + 1
                end = data.index(b"</", begin)
                data = data[:begin] + text.encode() + data[end:]
        saving, path = self.jobs / f"{name}.JC", self.jobs / f"{name}.JB"
        saving.write_bytes(data)
        path.unlink(missing_ok=True)
        os.link(saving, path)
        saving.unlink()

    def script(self, name: str, data: bytes) -> None:
        with open(self.jobs / f"{name}.SC", "ab") as file:
            file.write(data)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")


@pytest.fixture
def site(tmp_path: Path, spool: Spool) -> TorqueCapture:
    site = TorqueCapture(tmp_path / "site", spool.jobs.parent)
    site.spool.process_events()
    return site


def wait_for(site: TorqueCapture, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        site.capture.run_turn()
        time.sleep(0.01)
