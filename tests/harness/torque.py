"""A Torque spool of a test's own making, and a capture of it with a store and jobs.db behind it."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.jobs import Books
from harness.torque_player import RECORDINGS, Player
from steward.capture.scheduler import SpoolPlan
from steward.capture.spool import Capture, CaptureLimits
from steward.core.config import RedactSettings
from steward.core.events import JOB_SCRIPT, Event, decode
from steward.core.incoming import Store
from steward.core.redaction import Redactor
from steward.extensions.torque.spool import TorqueSpool
from steward.extensions.torque.taking import TorqueTiming
from steward.jobs import Job, JobFilter, Jobs


class TorqueCapture:
    """A capture of a Torque spool, whose bytes end in a store and its events in jobs.db."""

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
        self.store = Store("state", str(directory / "kept" / "incoming"))
        self.events: list[Event] = []
        self.spool = TorqueSpool(
            SpoolPlan(
                cluster="c1",
                root=str(root),
                **{"known": lambda job_id, mtime_ns: False, **plan},  # type: ignore[arg-type]
            ),
            timing=timing,
        )
        self.capture = Capture(
            "c1",
            self.spool,
            [self.store],
            Redactor(RedactSettings()),
            lambda rows: self.events.extend(decode(0, *row) for row in rows),
            limits=limits,
        )

    def finish(self) -> "TorqueCapture":
        """Take in all that comes yet, and end."""
        until = time.monotonic() + 20
        self.capture.turn()
        while (self.spool.due_s() < 1.0 or self.spool.ready) and time.monotonic() < until:
            time.sleep(0.01)
            self.capture.turn()
        assert self.capture.finish()
        return self

    def jobs(self) -> dict[str, Job]:
        """What jobs.db makes of the events: each key once, as the journal keeps them."""
        shutil.rmtree(self.directory / "db", ignore_errors=True)
        first = {event.key: event for event in reversed(self.events)}
        events = [event for event in self.events if first[event.key] is event]
        (self.directory / "db").mkdir()
        books = Books(self.directory / "db")
        books.take(*events)
        found = Jobs(books.path)
        try:
            return {job.label: job for job in found.list(JobFilter())}
        finally:
            found.close()

    def scripts(self) -> dict[int, Event]:
        return {event.body.job_id: event for event in self.events if event.kind == JOB_SCRIPT}

    def bytes_of(self, job_id: int, what: str = "script") -> bytes:
        return self.store.read(getattr(self.scripts()[job_id].body, what))

    def environment(self, job_id: int) -> list[bytes]:
        return self.bytes_of(job_id, "environment")[4:].split(b"\0")


class Spool:
    """A spool of one's own making."""

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
    site.spool.look()
    return site


def wait_for(site: TorqueCapture, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        site.capture.turn()
        time.sleep(0.01)
