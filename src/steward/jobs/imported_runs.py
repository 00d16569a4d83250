"""Imported runs for other consumers than jobs: run events, without the text of purged jobs.

The jobs consumer appends no events about runs that only an import knows. Other consumers read these
from jobs.imported: :func:`read_import` unpacks it, :func:`make_run_events` makes run.start and
run.end of it, as the jobs consumer does for observed runs; :func:`read_run_events` does both.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Final

import msgspec

from steward.core.consumers import Rejected
from steward.core.events import Event, EventError, JobFacts
from steward.core.imported import unpack_event
from steward.core.records import JobRecord, UsageLine
from steward.core.sqlite import (
    SqliteMissing,
    SqliteUnavailable,
    open_reader,
    translate_errors,
)
from steward.core.timestamps import to_micros_or_zero
from steward.jobs.event_intake import add_event, make_run_key
from steward.jobs.identity import PROMPT_US, resolve_jobs
from steward.jobs.retention import get_leader_id
from steward.jobs.run_events import RunEventMaker
from steward.jobs.run_merge import PRIVATE_TEXT, remove_private_text
from steward.jobs.run_views import build_run_views
from steward.jobs.tables import JobIdGroup, database_path, load_groups

_STEP_TEXT: Final = {
    field: text for field, text in PRIVATE_TEXT.items() if field in UsageLine.__struct_fields__
}
_encode: Final = msgspec.json.Encoder().encode


def read_import(event: Event, state_dir: str) -> list[Event]:
    """Unpack a jobs.imported event; remove the private text of jobs whose script was purged.

    Args:
        event: The event.
        state_dir: Directory of jobs.db, which knows the purged scripts.

    Raises:
        Rejected: The event cannot be unpacked.
        SqliteUnavailable: jobs.db cannot be read now.
    """
    try:
        parts = list(unpack_event(event))
    except EventError as error:
        raise Rejected(str(error), event) from error
    records = [part.body.record for part in parts if isinstance(part.body, JobFacts)]
    purged = _find_purged(state_dir, event.cluster, records)
    return [_blank_text(part, purged) for part in parts] if purged else parts


def read_run_events(event: Event, state_dir: str) -> Iterator[Event]:
    """Yield run.start and run.end of the runs that a jobs.imported event brings.

    The run of a continued event is none: the event before brought it. The first runs of jobs
    come from jobs.db, if another event brought them. Raises as :func:`read_import`.
    """
    if not event.body.is_continued:
        parts = read_import(event, state_dir)
        yield from make_run_events(parts, _load_known_runs(event, parts, state_dir))


def _load_known_runs(event: Event, parts: Sequence[Event], state_dir: str) -> dict[int, JobIdGroup]:
    """Load what jobs.db has about the jobs whose later runs a jobs.imported event brings."""
    records = (part.body.record for part in parts if isinstance(part.body, JobFacts))
    job_ids = {record.job_id for record in records if record.restarts}
    path = database_path(state_dir)
    try:
        connection = open_reader(path, migrated=True) if job_ids else None
    except SqliteMissing:
        connection = None
    if connection is None:
        return {}
    with closing(connection), translate_errors(path):
        (position,) = connection.execute("SELECT position FROM cursor").fetchone()
        if position < event.id - 1:
            raise SqliteUnavailable(
                f"cannot read earlier runs of imported jobs: {path} has applied the journal up to "
                f"event {position}, not up to event {event.id}. The consumer retries"
            )
        return load_groups(connection, event.cluster, job_ids)


def _find_purged(
    state_dir: str, cluster: str, records: Sequence[JobRecord]
) -> set[tuple[int, int]]:
    """Return job id and submit time (µs) of the runs whose script was purged."""
    try:
        path = database_path(state_dir)
        connection = open_reader(path, migrated=True)
    except SqliteMissing:
        return set()
    leaders = {get_leader_id(record) for record in records}
    with closing(connection), translate_errors(path):
        rows = connection.execute(
            "SELECT job_id, spool_mtime_ns / 1000, purged FROM script WHERE cluster = ? "
            "AND job_id IN (SELECT value FROM json_each(?)) ORDER BY spool_mtime_ns",
            (cluster, _encode(sorted(leaders)).decode()),
        ).fetchall()
    scripts: dict[int, list[tuple[int, bool]]] = {}
    for job_id, written_us, is_purged in rows:
        scripts.setdefault(job_id, []).append((written_us, bool(is_purged)))
    runs = set()
    for record in records:
        submit_us = to_micros_or_zero(record.submit)
        flags = [
            is_purged
            for written_us, is_purged in scripts.get(get_leader_id(record), ())
            if written_us <= submit_us + PROMPT_US
        ]
        if flags and flags[-1]:
            runs.add((record.job_id, submit_us))
    return runs


def _blank_text(part: Event, purged: set[tuple[int, int]]) -> Event:
    """Remove the private text of a run or step if its script was purged."""
    body = part.body
    if isinstance(body, JobFacts):
        record = body.record
        if (record.job_id, to_micros_or_zero(record.submit)) not in purged:
            return part
        changed = msgspec.structs.replace(body, record=remove_private_text(record))
    else:
        if (body.job_id, to_micros_or_zero(body.submit)) not in purged:
            return part
        line = msgspec.structs.replace(body.line, **_STEP_TEXT)
        changed = msgspec.structs.replace(body, line=line)
    return msgspec.structs.replace(part, body=changed)


def make_run_events(
    parts: Iterable[Event], known: Mapping[int, JobIdGroup] | None = None
) -> Iterator[Event]:
    """Yield run.start and run.end of the runs in an unpacked jobs.imported event.

    Args:
        parts: Its events; those of steps are ignored.
        known: Other runs and the scripts of its job ids, by job id.
    """
    groups: dict[int, JobIdGroup] = {}
    makers: dict[int, RunEventMaker] = {}
    for part in parts:
        if isinstance(part.body, JobFacts):
            job_id = part.body.record.job_id
            if job_id not in groups:
                group = groups[job_id] = JobIdGroup(part.cluster, job_id)
                if known and job_id in known:
                    group.runs, group.scripts = known[job_id].runs, known[job_id].scripts
                makers[job_id] = RunEventMaker(group, part.seen_at)
            group, key = groups[job_id], make_run_key(part)
            if key not in group.dirty_runs:
                group.runs.pop(key, None)
            add_event(group, part, 0)
    for job_id, group in groups.items():
        imported = set(group.dirty_runs)
        for job in resolve_jobs(list(group.runs.values()), list(group.scripts.values())):
            for view in build_run_views(job):
                if view.key in imported:
                    makers[job_id].add_run(view, [])
        yield from makers[job_id].events
