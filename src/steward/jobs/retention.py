"""Retention in jobs.db: purge scripts and private text, and expire old jobs.

:func:`purge_scripts` and :class:`LeaderScripts` apply archive.purge: they remove scripts and the
text that people wrote. Ids, times and the uid stay for accounting. A purged script keeps a row with
its job id and time: it separates the jobs of a reused id, and blocks the private text if Slurm
reports it again. If a purge arrives before its script, as it may from a Kafka topic, the row is
made then, so the script finds its place taken.

:func:`expire_jobs` deletes jobs that ended before a time (accounting.expire);
:func:`drop_expired_events` drops late events of such jobs.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final

import msgspec

from steward.core.events import Event, JobFacts, JobScript
from steward.core.records import JobRecord
from steward.core.sqlite import Connection
from steward.core.timestamps import to_micros
from steward.jobs.day_sums import track_lines
from steward.jobs.event_intake import make_run_key
from steward.jobs.identity import PROMPT_US, ResolvedJob
from steward.jobs.job_ids import MAX_JOB_ID
from steward.jobs.run_merge import IMPORTED
from steward.jobs.tables import (
    EXPIRED,
    EXPIRIES,
    NO_JOB,
    Expiry,
    JobIdGroup,
    PublishedRun,
    ScriptRow,
    load_groups,
)
from steward.slurm.job_states import FINISHED, strip_state_suffix

_KEY: Final = re.compile(r"script:([1-9][0-9]{0,9}):(0|[1-9][0-9]{0,18})")
"""Format of ``steward.core.events.make_script_key``."""

_CHUNK: Final = 500
"""Number of jobs deleted between two updates of the day sums."""
_encode = msgspec.json.Encoder().encode
_PUT_EXPIRY: Final = EXPIRIES.build_upsert(()) + "before = max(before, excluded.before)"


def get_leader_id(record: JobRecord) -> int:
    """Return the id of the job whose script a job runs: its array's, het leader's, or its own."""
    return record.array_job_id or record.het_job_id or record.job_id


def purge_scripts(
    connection: Connection, cluster: str, keys: Sequence[str], limit: int
) -> Iterator[list[JobIdGroup]]:
    """Mark scripts as purged in their groups.

    Args:
        connection: Connection to jobs.db, inside a transaction.
        cluster: Cluster name.
        keys: Keys of job.script events; malformed keys are skipped.
        limit: Maximum number of groups in memory at a time.

    Yields:
        Groups to resolve and write again: first those of the scripts, then those of the
        tasks and components that run them.
    """
    rows = connection.execute(
        "SELECT key, job_id, spool_mtime_ns FROM script WHERE cluster = ? "
        "AND key IN (SELECT value FROM json_each(?))",
        (cluster, _encode(list(keys)).decode()),
    )
    parsed_keys = {key: parsed for key in keys if (parsed := parse_script_key(key)) is not None}
    parsed_keys |= {key: (job_id, mtime_ns) for key, job_id, mtime_ns in rows}
    job_ids = list({job_id for job_id, _ in parsed_keys.values()})
    groups = load_groups(connection, cluster, job_ids)
    for key, (job_id, mtime_ns) in parsed_keys.items():
        scripts = groups[job_id].scripts
        body = _encode(JobScript(job_id=job_id, spool_mtime_ns=mtime_ns))
        row = scripts.setdefault(key, ScriptRow(key, mtime_ns))
        row.purged, row.is_dirty, row.published, row.body = True, True, None, body
    yield list(groups.values())
    parts = _list_parts(connection, cluster, job_ids)
    for start in range(0, len(parts), limit):
        yield list(load_groups(connection, cluster, parts[start : start + limit]).values())


def parse_script_key(key: str) -> tuple[int, int] | None:
    """Parse a script's key into job id and spool time (ns); None if malformed."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    job_id, mtime_ns = int(match[1]), int(match[2])
    return (job_id, mtime_ns) if job_id <= MAX_JOB_ID and mtime_ns < 2**63 else None


def _list_parts(connection: Connection, cluster: str, leaders: Sequence[int]) -> list[int]:
    """Return the ids of the array tasks and het components of these leaders."""
    ids = _encode(list(leaders)).decode()
    rows = connection.execute(
        "SELECT job_id FROM job WHERE cluster = :cluster AND job_id <> array_job_id "
        "AND array_job_id IN (SELECT value FROM json_each(:ids)) UNION "
        "SELECT job_id FROM job WHERE cluster = :cluster AND job_id <> het_job_id "
        "AND het_job_id IN (SELECT value FROM json_each(:ids))",
        {"cluster": cluster, "ids": ids},
    )
    return [job_id for (job_id,) in rows]


class LeaderScripts:
    """Lookup of purged scripts; array tasks and het components have their leader's script.

    Args:
        connection: Connection to jobs.db.
        cluster: Cluster name.
    """

    def __init__(self, connection: Connection, cluster: str) -> None:
        self._connection = connection
        self._cluster = cluster
        self._scripts: dict[int, list[tuple[int, bool]]] = {}

    def load(self, records: Iterable[JobRecord | None]) -> None:
        """Read the scripts of the leaders of these jobs in one query."""
        leaders = {
            leader
            for record in records
            if record is not None and (leader := get_leader_id(record)) != record.job_id
        }
        if not leaders:
            return
        rows = self._connection.execute(
            "SELECT job_id, spool_mtime_ns / 1000, purged FROM script WHERE cluster = ? "
            "AND job_id IN (SELECT value FROM json_each(?)) ORDER BY spool_mtime_ns",
            (self._cluster, _encode(list(leaders)).decode()),
        )
        for job_id, mtime_us, purged in rows:
            self._scripts.setdefault(job_id, []).append((mtime_us, bool(purged)))

    def is_purged(self, job: ResolvedJob) -> bool:
        """Return True if the script that a job ran was purged."""
        if any(script.purged for script in job.scripts):
            return True
        if job.record is None:
            return False
        scripts = self._scripts.get(get_leader_id(job.record), ())
        purged_flags = [
            purged for at_us, purged in scripts if at_us <= job.first_submit_us + PROMPT_US
        ]
        return bool(purged_flags) and purged_flags[-1]


_ENDED: Final = """
    FROM job WHERE job.cluster = ? AND job.ended = 1
    AND coalesce(job.end_time, job.submit, job.first_submit) < ?
    AND EXISTS (SELECT 1 FROM run WHERE run.cluster = job.cluster AND run.job_id = job.job_id
                AND run.job = job.number AND coalesce(run.told, x'') <> ?)
"""
_EXPIRED_MARK: Final = msgspec.json.encode(PublishedRun(lines_digest=EXPIRED))


def count_expirable(connection: Connection, cluster: str, before: datetime) -> int:
    """Count the jobs of a cluster that :func:`expire_jobs` would delete."""
    (count,) = connection.execute(
        f"SELECT count(*) {_ENDED}",
        (cluster, to_micros(before), _EXPIRED_MARK),
    ).fetchone()
    return int(count)


def drop_expired_events(
    connection: Connection, cluster: str, group: JobIdGroup, events: Sequence[Event]
) -> Sequence[Event]:
    """Return the events that do not concern expired runs, or runs that would be expired by now.

    A late event would otherwise recreate the run and publish everything about it again. Imported
    events are kept, because somebody asked for them; so are events of known runs.

    Args:
        connection: Connection to jobs.db.
        cluster: Cluster name.
        group: Everything known about the job id.
        events: New events of the job id.
    """
    ends = {
        make_run_key(event): event.body.record.end
        for event in events
        if isinstance(event.body, JobFacts) and _is_end_report(event, group)
    }
    unknown = {key: to_micros(end) for key, end in ends.items() if key not in group.runs and end}
    if not unknown:
        return events
    (before_us,) = connection.execute(
        "SELECT coalesce(max(before), 0) FROM expired WHERE cluster = ?", (cluster,)
    ).fetchone()
    expired_keys = {key for key, end_us in unknown.items() if end_us < before_us}
    return [
        event
        for event in events
        if not isinstance(event.body, JobFacts)
        or event.source == IMPORTED
        or make_run_key(event) not in expired_keys
    ]


def _is_end_report(event: Event, group: JobIdGroup) -> bool:
    """Return True if an event reports the final end of a run."""
    if event.source == IMPORTED or event.body.record.end is None:
        return False
    state = strip_state_suffix(event.body.record.state)
    # If other runs of a requeued job are known, it goes on.
    return state in FINISHED or (state == "REQUEUED" and not group.runs)


def expire_jobs(connection: Connection, cluster: str, before: datetime) -> int:
    """Delete jobs that ended before a time, inside a transaction; return their number.

    A job with a script keeps its row and its runs, marked :data:`EXPIRED`, but loses lines and
    launches. Gaps, missed jobs and unattributed launches from before the time are deleted too.
    """
    # Queries for earlier lines must also read the closed days of the job log.
    connection.execute(_PUT_EXPIRY, EXPIRIES.encode(Expiry(cluster, before)))
    jobs = connection.execute(
        f"SELECT job.number, job.job_id, job.script_key IS NOT NULL {_ENDED}",
        (cluster, to_micros(before), _EXPIRED_MARK),
    ).fetchall()
    for start in range(0, len(jobs), _CHUNK):
        chunk = jobs[start : start + _CHUNK]
        with track_lines(connection, cluster, {job_id for _, job_id, _ in chunk}):
            for number, job_id, has_script in chunk:
                _expire_job(connection, cluster, number, job_id, has_script=bool(has_script))
    connection.execute(
        "DELETE FROM run WHERE cluster = ? AND job = ? AND submit < ?",
        (cluster, NO_JOB, to_micros(before)),
    )
    connection.execute("DELETE FROM gap WHERE cluster = ? AND at < ?", (cluster, to_micros(before)))
    connection.execute(
        "DELETE FROM missed WHERE cluster = ? AND at < ?", (cluster, to_micros(before))
    )
    connection.execute(
        "DELETE FROM launch WHERE cluster = ? AND submit IS NULL AND launched < ?",
        (cluster, to_micros(before)),
    )
    return len(jobs)


def _expire_job(
    connection: Connection, cluster: str, number: int, job_id: int, *, has_script: bool
) -> None:
    """Delete the lines and launches of a job, and its rows if it has no script."""
    runs = connection.execute(
        "SELECT number, submit, restarts FROM run WHERE cluster = ? AND job_id = ? AND job = ?",
        (cluster, job_id, number),
    ).fetchall()
    for run_number, submit_us, restarts in runs:
        key = (cluster, job_id, submit_us)
        for table, column in (("line", "submit_us"), ("launch", "submit")):
            connection.execute(
                f"DELETE FROM {table} WHERE cluster = ? AND job_id = ? "  # noqa: S608 -- our own names
                f"AND {column} = ? AND restarts = ?",
                (*key, restarts),
            )
        connection.execute(
            "DELETE FROM accounted WHERE cluster = ? AND job_id = ? AND submit = ?", key
        )
        if has_script:
            connection.execute(
                "UPDATE run SET told = ? WHERE number = ?", (_EXPIRED_MARK, run_number)
            )
        else:
            connection.execute("DELETE FROM run WHERE number = ?", (run_number,))
    if not has_script:
        connection.execute("DELETE FROM job WHERE number = ?", (number,))
