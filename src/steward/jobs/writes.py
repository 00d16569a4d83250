"""Write batches for jobs.db: collect the rows of resolved groups, one statement per table.

The jobs consumer puts each resolved :class:`steward.jobs.tables.JobIdGroup` into a
:class:`WriteBatch` and flushes it at the end of the batch.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from steward.core.events import JobScript
from steward.core.sqlite import Connection
from steward.core.timestamps import to_micros
from steward.jobs.identity import ResolvedJob, floor_to_second
from steward.jobs.retention import get_leader_id
from steward.jobs.run_merge import RunFacts, remove_private_text
from steward.jobs.tables import NO_JOB, JobIdGroup, PublishedRun, ScriptRow, pack_run

_JOB_COLUMNS: Final = [
    "number",
    "cluster",
    "job_id",
    "first_submit",
    "verified",
    "purged",
    "ended",
    "restarts",
    "uid",
    "user",
    "account",
    "partition",
    "name",
    "state",
    "submit",
    "start",
    "end_time",
    "array_job_id",
    "array_task",
    "het_job_id",
    "het_offset",
    "original_sluid",
    "script_key",
    "record",
]
_NEW_JOB: Final = """
    INSERT INTO job (number, cluster, job_id, first_submit, verified, purged, ended, restarts,
                     name, script_key)
    VALUES (?, ?, ?, ?, 0, 0, 0, 0, ?, ?)
"""
_NEW_SCRIPT: Final = """
    INSERT INTO script (key, cluster, job_id, spool_mtime_ns, job, purged, body)
    VALUES (?, ?, ?, ?, ?, 0, ?)
"""
_PUT_JOB: Final = (
    f"INSERT INTO job ({', '.join(_JOB_COLUMNS)}) "  # noqa: S608 -- our own column names
    f"VALUES ({', '.join('?' * len(_JOB_COLUMNS))}) ON CONFLICT (number) DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in _JOB_COLUMNS[1:])
)
_PUT_RUN: Final = """
    INSERT INTO run (cluster, job_id, submit, restarts, job, sluid, state, start, end_time,
                     exit_code, exit_signal, nodelist, facts, told)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (cluster, job_id, submit, restarts) DO UPDATE SET
        job = excluded.job, sluid = excluded.sluid, state = excluded.state,
        start = excluded.start, end_time = excluded.end_time, exit_code = excluded.exit_code,
        exit_signal = excluded.exit_signal, nodelist = excluded.nodelist, facts = excluded.facts,
        told = excluded.told
"""
_PUT_SCRIPT: Final = """
    INSERT INTO script (key, cluster, job_id, spool_mtime_ns, job, purged, said, body)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (key, cluster) DO UPDATE SET
        job = excluded.job, purged = excluded.purged, said = excluded.said, body = excluded.body
"""


_NOTHING: Final = PublishedRun()

_encode = msgspec.json.Encoder().encode
_decode_body = msgspec.json.Decoder(JobScript).decode


class WriteBatch:
    """Collector of rows, so that each table is written by one statement.

    Args:
        connection: Connection to jobs.db, inside a transaction.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        (max_number,) = connection.execute("SELECT coalesce(max(number), 0) FROM job").fetchone()
        self._next_number: int = max_number + 1
        self._reset()

    def _reset(self) -> None:
        """Start a new batch."""
        self._new_jobs: list[tuple[Any, ...]] = []
        self._new_scripts: list[tuple[Any, ...]] = []
        self._jobs: list[tuple[Any, ...]] = []
        self._runs: list[tuple[Any, ...]] = []
        self._scripts: list[tuple[Any, ...]] = []
        self._deleted: list[tuple[int]] = []

    def put_new_script(self, cluster: str, key: str, body: JobScript) -> None:
        """Add the first event of a job id, which is a script.

        Equivalent to putting a group of only this script, but fast enough for bursts of
        submissions.
        """
        number = self._next_number
        self._next_number += 1
        name = body.claimed_name or None
        submit_us = floor_to_second(body.spool_mtime_ns // 1000)
        self._new_jobs.append((number, cluster, body.job_id, submit_us, name, key))
        self._new_scripts.append(
            (key, cluster, body.job_id, body.spool_mtime_ns, number, _encode(body))
        )

    def put_group(
        self, group: JobIdGroup, jobs: Sequence[ResolvedJob], purged: Sequence[bool]
    ) -> None:
        """Add one resolved group.

        Args:
            group: The group that ``jobs`` was resolved from.
            jobs: Its jobs.
            purged: For each job, whether its private text must be removed.
        """
        free_numbers = set(group.job_numbers)
        for job, is_purged in zip(jobs, purged, strict=True):
            number = None
            if job.record is not None or not all(script.purged for script in job.scripts):
                number = self._assign_number(group, job, free_numbers)
                self._put_job(group, job, number, is_purged)
            for run in job.runs:
                self._put_run(group, run, number)
            for script in job.scripts:
                self._put_script(group, group.scripts[script.key], number)
        for run in group.runs.values():
            if run.is_forgotten:
                # Otherwise the next batch would take the stored run for a pending one. And a purge
                # could not find the text of a run without a job.
                run.blank_private_text()
                self._put_run(group, run, NO_JOB)
        self._deleted += [(number,) for number in free_numbers]

    def flush(self) -> None:
        """Write all rows to the database."""
        execute = self._connection.executemany
        if self._deleted:
            execute("DELETE FROM job WHERE number = ?", self._deleted)
        if self._new_jobs:
            execute(_NEW_JOB, self._new_jobs)
            execute(_NEW_SCRIPT, self._new_scripts)
        if self._jobs:
            execute(_PUT_JOB, self._jobs)
        if self._runs:
            execute(_PUT_RUN, self._runs)
        if self._scripts:
            execute(_PUT_SCRIPT, self._scripts)
        self._reset()

    def _assign_number(self, group: JobIdGroup, job: ResolvedJob, free_numbers: set[int]) -> int:
        """Return the row number of a job: one it had before, or a new one."""
        old_numbers = [group.run_jobs.get((run.submit_us, run.restarts)) for run in job.runs]
        old_numbers += [group.scripts[script.key].job for script in job.scripts]
        for number in old_numbers:
            if number is not None and number in free_numbers:
                free_numbers.remove(number)
                return number
        self._next_number += 1
        return self._next_number - 1

    def _put_job(self, group: JobIdGroup, job: ResolvedJob, number: int, is_purged: bool) -> None:
        """Add the row of a job."""
        unpurged = [script for script in job.scripts if not script.purged]
        script_key = unpurged[-1].key if unpurged else None
        if job.record is None:
            claimed_name = _decode_body(group.scripts[job.scripts[-1].key].body).claimed_name
            self._jobs.append(
                (number, group.cluster, group.job_id, job.first_submit_us, 0, is_purged, 0, 0)
                + (None,) * 4
                + (claimed_name or None,)
                + (None,) * 9
                + (script_key, None)
            )
            return
        record = remove_private_text(job.record) if is_purged else job.record
        if get_leader_id(record) != record.job_id:
            script_key = None  # it runs its leader's script; its own is a stand-in
        latest = job.latest
        self._jobs.append(
            (
                number,
                group.cluster,
                group.job_id,
                job.first_submit_us,
                1,
                is_purged,
                job.is_over,
                latest.restarts,
                record.uid,
                record.user or None,
                record.account or None,
                record.partition or None,
                record.name or None,
                record.state or None,
                latest.submit_us,
                _to_micros(record.start),
                latest.end_us if latest.end_us >= 0 else None,
                record.array_job_id or None,
                record.array_task or None,
                record.het_job_id or None,
                record.het_offset if record.het_job_id else None,
                record.original_sluid or None,
                script_key,
                _encode(record),
            )
        )

    def _put_run(self, group: JobIdGroup, run: RunFacts, number: int | None) -> None:
        """Add the row of a run, if it changed."""
        key = (run.submit_us, run.restarts)
        if key not in group.dirty_runs and group.run_jobs.get(key) == number:
            return
        record = run.merge_record()
        self._runs.append(
            (
                group.cluster,
                group.job_id,
                run.submit_us,
                run.restarts,
                number,
                record.sluid or None,
                record.state or None,
                _to_micros(record.start),
                run.end_us if run.end_us >= 0 else None,
                record.exit_code,
                record.exit_signal,
                record.nodelist or None,
                pack_run(run),
                _encode(group.published_runs.get(key, _NOTHING)),
            )
        )

    def _put_script(self, group: JobIdGroup, row: ScriptRow, number: int | None) -> None:
        """Add the row of a script, if it changed."""
        if not row.is_dirty and row.job == number:
            return
        identity = None if row.published is None else _encode(row.published)
        self._scripts.append(
            (
                row.key,
                group.cluster,
                group.job_id,
                row.spool_mtime_ns,
                number,
                row.purged,
                identity,
                row.body,
            )
        )


def _to_micros(time: datetime | None) -> int | None:
    return None if time is None else to_micros(time)
