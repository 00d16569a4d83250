"""Event intake of the jobs consumer: validate an event and add it to its job id's group.

:func:`validate_event` rejects events that must not reach jobs.db. :func:`add_event` puts a valid
event into the :class:`steward.jobs.tables.JobIdGroup` of its job id (:func:`get_job_id`);
:func:`make_launch_key` and :func:`make_run_key` say which launch or run it concerns.
"""

from typing import Final

import msgspec

from steward.core.consumers import Rejected
from steward.core.events import JOB_SEEN, ArchivePurge, Event, JobFacts, JobScript, MissedJobs
from steward.core.records import JobRecord
from steward.core.timestamps import to_micros
from steward.core.usage import AccountedStep, AccountingExpiry, ExitedTasks, Launch, NodeGap
from steward.jobs.job_ids import MAX_JOB_ID, MAX_RAW_ID
from steward.jobs.launches import LaunchKey, LaunchRow
from steward.jobs.run_merge import RunFacts
from steward.jobs.tables import JobIdGroup, ScriptRow
from steward.slurm.job_states import strip_state_suffix

_MAX_INT64: Final = 2**63 - 1

_LONGEST: Final = 256
"""Longest accepted name of a node or step, in characters."""

_HALTS: Final = frozenset({"RUNNING", "SUSPENDED"})
"""States in which a time of suspension means that a run was just suspended or resumed."""

_encode = msgspec.json.Encoder().encode


def validate_event(event: Event) -> None:
    """Reject an event that must not reach the database, before anything is written."""
    body = event.body
    if isinstance(body, JobScript):
        is_valid = 0 < body.job_id <= MAX_JOB_ID and abs(body.spool_mtime_ns) <= _MAX_INT64
    elif isinstance(body, JobFacts):
        record = body.record
        is_valid = 0 < record.job_id <= MAX_RAW_ID and 0 <= record.restarts <= MAX_JOB_ID
        is_valid = is_valid and (record.submit is not None or event.kind == JOB_SEEN)
        is_valid = is_valid and all(
            number is None or 0 <= number <= MAX_JOB_ID
            for number in (record.uid, record.array_job_id, record.het_job_id, record.het_offset)
        )
    elif isinstance(body, Launch):
        is_valid = _is_valid_launch(body)
    elif isinstance(body, AccountedStep):
        is_valid = 0 < body.job_id <= MAX_RAW_ID and 0 < len(body.line.step) <= _LONGEST
    else:
        is_valid = isinstance(body, ArchivePurge | AccountingExpiry | NodeGap | MissedJobs)
    if not is_valid:
        raise Rejected(f"{event.kind} {event.key!r} has no usable body", event)


def _is_valid_launch(body: Launch) -> bool:
    """Return True if the ids and names of a launch are in range."""
    is_valid = 0 < body.job_id <= MAX_RAW_ID and abs(body.launched_us) <= _MAX_INT64
    is_valid = is_valid and 0 < len(body.step) <= _LONGEST and 0 < len(body.node) <= _LONGEST
    if is_valid and isinstance(body, ExitedTasks):
        return all(abs(task.task) <= MAX_RAW_ID for task in body.tasks)
    return is_valid


def get_job_id(event: Event) -> int:
    """Return the job id of an event."""
    body = event.body
    return int(body.record.job_id if isinstance(body, JobFacts) else body.job_id)


def make_launch_key(body: Launch) -> LaunchKey:
    """Return the key of a launch within its job id: step, node and launch time."""
    return body.step, body.node, body.launched_us


def make_run_key(event: Event) -> tuple[int, int]:
    """Return the key of a record's run within its job id: submit time (µs) and restart count."""
    record: JobRecord = event.body.record
    # Imported archive trees lack submit times; the event's time is the closest value.
    submit = record.submit or event.at
    return to_micros(submit.replace(microsecond=0)), record.restarts


def add_event(group: JobIdGroup, event: Event, now_us: int) -> None:
    """Add an event to the group of its job id.

    Args:
        group: Everything known about the job id; for a launch, all launches of its step.
        event: Any event but those that :func:`steward.jobs.launches.put_accounted` stores.
        now_us: Present time, µs since the epoch.
    """
    body = event.body
    if isinstance(body, JobScript):
        _add_script(group, event)
    elif isinstance(body, JobFacts):
        _add_record(group, event)
    elif isinstance(body, Launch):
        key = make_launch_key(body)
        group.launches.setdefault(key, LaunchRow(key)).add_report(event, now_us)
    else:
        group.needs_rebuild = True


def _add_script(group: JobIdGroup, event: Event) -> None:
    """Add a job.script event to the group."""
    # A purged script keeps its row, so that it is not stored again.
    if event.key not in group.scripts:
        body: JobScript = event.body
        group.scripts[event.key] = ScriptRow(
            event.key, body.spool_mtime_ns, False, _encode(body), is_dirty=True
        )


def _add_record(group: JobIdGroup, event: Event) -> None:
    """Add an observation of a run to the group."""
    record: JobRecord = event.body.record
    key = make_run_key(event)
    run = group.runs.get(key)
    if run is None:
        run = group.runs[key] = RunFacts(*key)
    run.add(event)
    group.dirty_runs.add(key)
    if record.suspended_at is not None and strip_state_suffix(record.state) in _HALTS:
        group.suspensions.append((key, to_micros(record.suspended_at), record))
