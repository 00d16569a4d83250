"""Unfinished runs of a cluster, stored by a controller that has no jobs.db (SQLite).

After a restart a controller must notice which jobs ended meanwhile, so the consumer
:class:`UnfinishedRuns` keeps the latest record of each unfinished run in ``runs-CLUSTER.db``, and
nothing else: its size is that of the queue. At a start ``read_unfinished_runs`` reads it and
``catch_up_runs`` adds journal events not applied yet, for :mod:`steward.capture.queue_polls`.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from steward.core.consumers import DatabaseConsumer
from steward.core.databases import UNFINISHED_RUNS
from steward.core.events import JOB_END, JOB_SEEN, JOB_STATE, Event, JobFacts
from steward.core.journal import JournalReader
from steward.core.records import JobRecord
from steward.core.sqlite import Database
from steward.core.storage import CURSOR, OnConflict, Table, read_cursor
from steward.slurm import FINISHED

_MAX_EVENTS_BEHIND: Final = 200_000
"""Maximum number of events read at a start. A new database is further behind, for minutes."""
# RESIZING ends a former size of a job that goes on, REQUEUED a former run of a pending job.
_CONTINUING_STATES: Final = frozenset({"RESIZING", "REQUEUED"})
"""End states after which a job goes on."""


class _Run(msgspec.Struct, frozen=True):
    """Latest record of an unfinished run."""

    job_id: int
    record: JobRecord


_RUNS: Final = Table(_Run, "run", key="job_id")


def runs_database_path(state_dir: str, cluster: str) -> str:
    """Return the path of a cluster's database of unfinished runs."""
    return UNFINISHED_RUNS.locate(state_dir, cluster)


class UnfinishedRuns(DatabaseConsumer):
    """Consumer that keeps ``runs-CLUSTER.db``; see ``steward.core.consumers.Consumer``.

    Its events come from this host's queue polls, which are in order, and from jobcomp lines, which
    report an end sooner.

    Args:
        state_dir: The directory that holds the database.
        cluster: Cluster of the runs.

    Raises:
        SqliteError: The database cannot be used.
        SqliteUnavailable: It cannot be opened now.
    """

    kinds = frozenset({JOB_SEEN, JOB_STATE, JOB_END})

    def __init__(self, state_dir: str, cluster: str) -> None:
        self.name = f"runs.{cluster}"
        self._cluster = cluster
        path = runs_database_path(state_dir, cluster)
        # A power loss may undo the last batches along with the cursor: they are applied again.
        super().__init__(Database(path, (CURSOR.schema + _RUNS.schema,), synchronous="NORMAL"))

    def _apply_events(self, events: Sequence[Event]) -> Sequence[Event]:
        """Store runs that began, and delete those that ended."""
        for job_id, record in collect_latest_records(events, self._cluster).items():
            if record is None:
                self._connection.execute("DELETE FROM run WHERE job_id = ?", (job_id,))
            else:
                is_former = record.state in _CONTINUING_STATES
                on_conflict: OnConflict = "ignore" if is_former else "replace"
                _RUNS.insert(self._connection, _Run(job_id, record), on_conflict)
        return ()


def collect_latest_records(events: Iterable[Event], cluster: str) -> dict[int, JobRecord | None]:
    """Return the latest record of each raw job id in events; None if the run is over.

    A record with an end state after which the job goes on is older than what is known otherwise.
    """
    records: dict[int, JobRecord | None] = {}
    for event in events:
        if event.cluster != cluster:
            continue
        body: JobFacts = event.body
        record = body.record
        if event.kind == JOB_END and record.state in _CONTINUING_STATES:
            records.setdefault(record.job_id, record)
            continue
        is_over = event.kind == JOB_END or record.state in FINISHED
        records[record.job_id] = None if is_over else record
    return records


def catch_up_runs(
    records: Iterable[JobRecord], reader: JournalReader, cluster: str, position: int
) -> list[JobRecord]:
    """Add journal events after a position to known records of unfinished runs.

    The consumer may be some events behind. After a crash of slurmctld only the journal still has
    the runs that slurmctld forgot.

    Args:
        records: Records up to the position.
        reader: Reader of the journal.
        cluster: Cluster of the runs.
        position: Position up to which events are included.

    Raises:
        SqliteUnavailable: The journal cannot be read now.
    """
    runs: dict[int, JobRecord] = {record.job_id: record for record in records}
    if reader.head() - position > _MAX_EVENTS_BEHIND:
        return list(runs.values())
    while True:
        events, upto = reader.read(position, UnfinishedRuns.kinds, UnfinishedRuns.batch_events)
        for job_id, record in collect_latest_records(events, cluster).items():
            if record is None:
                runs.pop(job_id, None)
            elif record.state in _CONTINUING_STATES:
                runs.setdefault(job_id, record)
            else:
                runs[job_id] = record
        if upto == position:
            return list(runs.values())
        position = upto


def read_unfinished_runs(state_dir: str, cluster: str) -> tuple[list[JobRecord], int]:
    """Read the latest record of each unfinished run, and the position of the last event applied.

    Raises:
        SqliteUnavailable: The database cannot be read now.
    """
    path = runs_database_path(state_dir, cluster)
    if not os.path.exists(path):
        # First start: nothing is known yet, so nothing can have ended meanwhile.
        return [], 0
    database = Database(path, (), read_only=True)
    try:
        position = read_cursor(database)
        return [run.record for run in _RUNS.select(database)], position
    finally:
        database.close()
