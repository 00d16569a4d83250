"""Events and their times."""

from datetime import UTC, datetime, timedelta
from typing import Any

from steward.core.events import JOB_SCRIPT, Event, IncomingFile, JobScript, make_script_key
from steward.core.timestamps import to_micros

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
NOON_US = 1_772_366_400 * 10**6
NOON_NS = NOON_US * 1000
NOVEMBER = datetime(2026, 11, 21, 12, tzinfo=UTC)
"""Noon of another day, for tests that name dates in options."""
NOVEMBER_NS = 1_795_262_400 * 10**9


def at(seconds: float) -> datetime:
    """Return the time this many seconds after noon."""
    return NOON + timedelta(seconds=seconds)


def us(seconds: float) -> int:
    """Return the time this many seconds after noon, in microseconds since the epoch."""
    return to_micros(at(seconds))


def make_event(
    kind: str,
    key: str,
    body: Any,
    when: datetime = NOON,
    *,
    cluster: str = "c1",
    source: str = "test",
    seen_at: datetime | None = None,
) -> Event:
    """Return an event; ``seen_at`` defaults to the time when it happened."""
    return Event(
        kind=kind,
        cluster=cluster,
        key=key,
        at=when,
        seen_at=seen_at or when,
        source=source,
        body=body,
    )


def script_event(
    job_id: int = 1,
    *,
    mtime_ns: int = NOON_NS,
    cluster: str = "c1",
    source: str = "test",
    **body: Any,
) -> Event:
    """Return the job.script of a spool entry; ``body`` sets fields of its JobScript."""
    fields: dict[str, Any] = {
        "script": IncomingFile(
            path=f"{cluster}.{job_id}.{mtime_ns}.3.script", length=3, sha256="00"
        ),
        "store": "state",
        **body,
    }
    return make_event(
        JOB_SCRIPT,
        make_script_key(job_id, mtime_ns),
        JobScript(job_id=job_id, spool_mtime_ns=mtime_ns, **fields),
        datetime.fromtimestamp(mtime_ns / 1e9, UTC),
        cluster=cluster,
        source=source,
        seen_at=NOON,
    )
