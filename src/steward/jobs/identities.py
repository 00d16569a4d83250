"""Says whose each kept script is, and again when what an archive keeps of its job changes."""

import hashlib
from datetime import datetime
from typing import Final

import msgspec

from steward.core.events import JOB_IDENTITY, Event, JobIdentity
from steward.core.moments import moment
from steward.core.records import JobRecord
from steward.jobs.resolve import Resolved
from steward.jobs.tables import Group, Said

SOURCE: Final = "jobs"

# What an archive's manifest holds beside times: when one of these changes, it is said again.
_LASTING: Final = (
    "name",
    "group",
    "account",
    "partition",
    "qos",
    "batch",
    "array_job_id",
    "het_job_id",
    "time_limit_s",
    "tres_requested",
    "submit_host",
    "submit_line",
    "command",
    "work_dir",
    "stdin",
    "stdout",
    "stderr",
)

_encode = msgspec.json.Encoder().encode


def identities(group: Group, job: Resolved, record: JobRecord, now: datetime) -> list[Event]:
    """The job.identity events that are news for a job's scripts."""
    lasting = _digest(_encode([getattr(record, field) for field in _LASTING]))
    last = job.latest
    end_us = last.end_us if job.is_over else None
    events = []
    for script in job.scripts:
        row = group.scripts[script.key]
        if row.purged:
            continue
        facts = (job.first_submit_us, record.uid, record.user, end_us, lasting)
        why = _news(row.said, facts)
        if not why:
            continue
        before = row.said.chain if row.said else ""
        chain = _digest(_encode([before, facts]))
        row.said = Said(*facts, chain)
        row.is_dirty = True
        identity = JobIdentity(
            script_key=row.key,
            job_id=group.job_id,
            first_submit=moment(job.first_submit_us),
            record=record,
            why=why,
        )
        events.append(
            Event(
                kind=JOB_IDENTITY,
                cluster=group.cluster,
                key=f"identity:{row.key}:{chain}",
                at=now,
                seen_at=now,
                source=SOURCE,
                body=identity,
            )
        )
    return events


def _news(said: Said | None, facts: tuple[int, int | None, str, int | None, str]) -> str:
    """Why it must be said (again) whose a script is; "" if nothing is new."""
    first_submit_us, uid, user, end_us, lasting = facts
    if said is None or (said.first_submit_us, said.uid) != (first_submit_us, uid):
        return "bound"
    if said.user != user:
        return "renamed"
    if end_us is not None and said.end_us != end_us:
        return "ended"
    return "updated" if said.lasting != lasting else ""


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()
