"""Events and spools as the tests need them, made in one place."""

import os
import struct
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from steward.core.events import JOB_SCRIPT, Event, JobScript, Kept

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


class Clock:
    """Seconds that go by as a test says, and no others."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def script_event(
    job_id: int = 1, *, mtime_ns: int = 1_772_366_400_000_000_000, **body: Any
) -> Event:
    """A job.script event of cluster c1; ``body`` sets fields of its JobScript."""
    fields: dict[str, Any] = {
        "script": Kept(path=f"c1.{job_id}.{mtime_ns}.3.script", length=3, sha256="00"),
        "store": "state",
        **body,
    }
    return Event(
        kind=JOB_SCRIPT,
        cluster="c1",
        key=f"script:{job_id}:{mtime_ns}",
        at=datetime.fromtimestamp(mtime_ns / 1e9, UTC),
        seen_at=NOON,
        source="test",
        body=JobScript(job_id=job_id, spool_mtime_ns=mtime_ns, **fields),
    )


def environment_bytes(*entries: bytes, count: int | None = None) -> bytes:
    """An ``environment`` file as slurmctld writes it."""
    number = len(entries) if count is None else count
    return struct.pack("=I", number) + b"".join(entry + b"\0" for entry in entries)


def make_spool(root: Path) -> Path:
    """An empty StateSaveLocation with its ten hash directories."""
    for number in range(10):
        (root / f"hash.{number}").mkdir(parents=True)
    return root


def submit(
    root: Path, job_id: int, script: bytes = b"#!/bin/sh\n", environment: bytes | None = None
) -> Path:
    """Write a job into a spool in slurmctld's order; returns its directory."""
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
