"""Write batches for jobs.db: collect the rows of resolved groups, one statement per table.

The jobs consumer puts each resolved :class:`steward.jobs.tables.JobIdGroup` into a
:class:`WriteBatch` and flushes it at the end of the batch.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from steward.core.events import JobScript
from steward.core.sqlite import Connection
from steward.core.timestamps import to_micros
from steward.jobs.compression import compress_json, decompress_json
from steward.jobs.identity import ResolvedJob, floor_to_second
from steward.jobs.retention import get_leader_id
from steward.jobs.run_merge import RunFacts, remove_private_text
from steward.jobs.tables import (
    JOBS_TABLE,
    NO_JOB,
    RUNS,
    SCRIPTS,
    JobIdGroup,
    PublishedRun,
    ScriptRow,
    StoredJob,
    StoredJobScript,
    StoredRun,
)

_NEW_JOB: Final = JOBS_TABLE.build_insert(
    "number, cluster, job_id, first_submit, verified, purged, ended, restarts, name, script_key"
)
"""Binding the NULLs of a job of which only the script is known costs more than all the rest."""
_PUT_JOB: Final = JOBS_TABLE.build_upsert()
_PUT_RUN: Final = RUNS.build_upsert()
_PUT_SCRIPT: Final = SCRIPTS.build_upsert(("job", "purged", "said", "body"))
_NOTHING: Final = PublishedRun()

_encode = msgspec.json.Encoder().encode
_decode_body = msgspec.json.Decoder(JobScript).decode


class WriteBatch:
    """Collector of rows that changed, so that each table is written by one statement.

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
        self._new_jobs: list[tuple[object, ...]] = []
        self._jobs: list[StoredJob] = []
        self._runs: list[StoredRun] = []
        self._scripts: list[StoredJobScript] = []
        self._deleted: list[tuple[int]] = []

    def put_new_script(self, cluster: str, key: str, body: JobScript) -> None:
        """Add the first event of a job id, which is a script.

        Equivalent to putting a group of only this script, but fast enough for bursts of
        submissions.
        """
        number = self._next_number
        self._next_number += 1
        submit_us = floor_to_second(body.spool_mtime_ns // 1000)
        name = body.claimed_name or None
        self._new_jobs.append((number, cluster, body.job_id, submit_us, 0, 0, 0, 0, name, key))
        self._scripts.append(
            StoredJobScript(
                key=key,
                cluster=cluster,
                job_id=body.job_id,
                spool_mtime_ns=body.spool_mtime_ns,
                job=number,
                purged=False,
                body=_pack_body(_encode(body)),
            )
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
        free_numbers = set(group.stored_jobs)
        for job, is_purged in zip(jobs, purged, strict=True):
            number = NO_JOB
            if job.record is not None or not all(script.purged for script in job.scripts):
                number = self._assign_number(group, job, free_numbers)
                self._put_job(group, job, number, is_purged)
            for run in job.runs:
                self._put_run(group, run, number)
            for script in job.scripts:
                self._put_script(group, group.scripts[script.key], number or None)
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
        execute(_NEW_JOB, self._new_jobs)
        execute(_PUT_JOB, map(JOBS_TABLE.encode, self._jobs))
        execute(_PUT_RUN, map(RUNS.encode, self._runs))
        execute(_PUT_SCRIPT, map(SCRIPTS.encode, self._scripts))
        self._reset()

    def _assign_number(self, group: JobIdGroup, job: ResolvedJob, free_numbers: set[int]) -> int:
        """Return the row number of a job: one it had before, or a new one."""
        runs = [group.stored_runs.get((run.submit_us, run.restarts)) for run in job.runs]
        old_numbers = [run.job if run else None for run in runs]
        old_numbers += [group.scripts[script.key].job for script in job.scripts]
        for number in old_numbers:
            if number is not None and number in free_numbers:
                free_numbers.remove(number)
                return number
        self._next_number += 1
        return self._next_number - 1

    def _put_job(self, group: JobIdGroup, job: ResolvedJob, number: int, is_purged: bool) -> None:
        """Add the row of a job, if it changed."""
        unpurged = [script for script in job.scripts if not script.purged]
        script_key = unpurged[-1].key if unpurged else None
        stored = group.stored_jobs.get(number)
        if job.record is None:
            body = _decode_body(decompress_json(group.scripts[job.scripts[-1].key].body))
            row = StoredJob(
                number=number,
                cluster=group.cluster,
                job_id=group.job_id,
                first_submit=job.first_submit_us,
                verified=False,
                purged=is_purged,
                ended=False,
                restarts=0,
                name=body.claimed_name or None,
                script_key=script_key,
            )
            if row != stored:
                self._jobs.append(row)
            return
        record = remove_private_text(job.record) if is_purged else job.record
        if get_leader_id(record) != record.job_id:
            script_key = None  # it runs its leader's script; its own is a stand-in
        latest = job.latest
        data = _encode(record)
        row = StoredJob(
            number=number,
            cluster=group.cluster,
            job_id=group.job_id,
            first_submit=job.first_submit_us,
            verified=True,
            purged=is_purged,
            ended=job.is_over,
            restarts=latest.restarts,
            uid=record.uid,
            user=record.user or None,
            account=record.account or None,
            partition=record.partition or None,
            name=record.name or None,
            state=record.state or None,
            submit=latest.submit_us,
            start=_to_micros(record.start),
            end_time=latest.end_us if latest.end_us >= 0 else None,
            array_job_id=record.array_job_id or None,
            array_task=record.array_task or None,
            het_job_id=record.het_job_id or None,
            het_offset=record.het_offset if record.het_job_id else None,
            original_sluid=record.original_sluid or None,
            script_key=script_key,
            record=data,
        )
        if stored is None or not _is_equal(row, stored):
            packed = compress_json(data, is_final=row.ended)
            self._jobs.append(msgspec.structs.replace(row, record=packed))

    def _put_run(self, group: JobIdGroup, run: RunFacts, number: int) -> None:
        """Add the row of a run, if it changed."""
        key = (run.submit_us, run.restarts)
        stored = group.stored_runs.get(key)
        if stored is not None and stored.job == number and key not in group.dirty_runs:
            return
        record = run.merge_record()
        row = StoredRun(
            cluster=group.cluster,
            job_id=group.job_id,
            submit=run.submit_us,
            restarts=run.restarts,
            job=number,
            sluid=record.sluid or None,
            state=record.state or None,
            start=_to_micros(record.start),
            end_time=run.end_us if run.end_us >= 0 else None,
            exit_code=record.exit_code,
            exit_signal=record.exit_signal,
            nodelist=record.nodelist or None,
            facts=_encode(run),
            told=_encode(group.published_runs.get(key, _NOTHING)),
        )
        if row != stored:
            packed = compress_json(row.facts, is_final=run.ending is not None)
            self._runs.append(msgspec.structs.replace(row, facts=packed))

    def _put_script(self, group: JobIdGroup, row: ScriptRow, number: int | None) -> None:
        """Add the row of a script, if it changed."""
        if not row.is_dirty and row.job == number:
            return
        identity = None if row.published is None else _encode(row.published)
        self._scripts.append(
            StoredJobScript(
                key=row.key,
                cluster=group.cluster,
                job_id=group.job_id,
                spool_mtime_ns=row.spool_mtime_ns,
                job=number,
                purged=row.purged,
                said=identity,
                body=_pack_body(row.body),
            )
        )


def _is_equal(row: StoredJob, stored: StoredJob) -> bool:
    """Return whether a job's row, with its record as JSON, equals the stored one."""
    if stored.record is None or row != msgspec.structs.replace(stored, record=row.record):
        return False
    return decompress_json(stored.record) == row.record


def _pack_body(body: bytes) -> bytes:
    """Compress the body of a job.script event, unless it was read from the database."""
    return compress_json(body, is_final=False) if body.startswith(b"{") else body


def _to_micros(time: datetime | None) -> int | None:
    return None if time is None else to_micros(time)
