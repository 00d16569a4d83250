"""The runs that have not ended, as a controller remembers them where there is no jobs.db.

A controller that is started again has to notice which jobs ended meanwhile, so
it keeps the latest record of each run that is not over, and nothing else: what
it takes up is as large as the queue.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from steward.core.consumers import Append
from steward.core.events import JOB_END, JOB_SEEN, JOB_STATE, Event, JobFacts
from steward.core.journal import JournalReader
from steward.core.records import JobRecord
from steward.core.sqlite import open_database, open_reader, transaction, translated
from steward.slurm import FINISHED

_MIGRATIONS: Final = (
    """
CREATE TABLE cursor (position INTEGER NOT NULL);
INSERT INTO cursor VALUES (0);
CREATE TABLE run (
    job_id INTEGER PRIMARY KEY,
    record BLOB NOT NULL
);
""",
)

_MOST_BEHIND: Final = 200_000
"""Events that are read at a start. A database that is made anew is further behind, for minutes."""
# A former size of a job that runs on, and a former run of one that waits again.
_GOES_ON: Final = frozenset({"RESIZING", "REQUEUED"})

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JobRecord).decode


def path_of(state_dir: str, cluster: str) -> str:
    """Where a cluster's runs are kept."""
    return os.path.join(state_dir, f"runs-{cluster}.db")


class Runs:
    """Keeps ``runs-CLUSTER.db``; see ``steward.core.consumers.Consumer``.

    Its sources are this host's snapshots, whose events are in order, and lines of jobcomp,
    which tell an end sooner.

    Args:
        state_dir: The directory that holds the database.
        cluster: Whose runs.

    Raises:
        SqliteError: The database cannot be used.
        SqliteUnavailable: It cannot be used now.
    """

    kinds = frozenset({JOB_SEEN, JOB_STATE, JOB_END})
    batch_events = 500

    def __init__(self, state_dir: str, cluster: str) -> None:
        self.name = f"runs.{cluster}"
        self._cluster = cluster
        self._path = path_of(state_dir, cluster)
        # A power loss may take the last batches together with the cursor: they are read again.
        self._database = open_database(self._path, _MIGRATIONS, synchronous="NORMAL")

    def cursor(self) -> int:
        """Position of the last event that was taken in; 0 at first."""
        with translated(self._path):
            (position,) = self._database.execute("SELECT position FROM cursor").fetchone()
        return int(position)

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:  # noqa: ARG002 -- a Consumer's signature
        """Remember what began, forget what ended, and move the cursor to ``upto``.

        Raises:
            SqliteUnavailable: The database cannot be written now.
        """
        with transaction(self._database, self._path) as database:
            for job_id, record in latest(events, self._cluster).items():
                if record is None:
                    database.execute("DELETE FROM run WHERE job_id = ?", (job_id,))
                else:
                    database.execute(
                        "INSERT OR REPLACE INTO run (job_id, record) VALUES (?, ?)",
                        (job_id, _encode(record)),
                    )
            database.execute("UPDATE cursor SET position = ?", (upto,))

    def tick(self, append: Append) -> float:  # noqa: ARG002 -- a Consumer's signature
        """Nothing is due by the clock."""
        return 3600.0

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()


def latest(events: Iterable[Event], cluster: str) -> dict[int, JobRecord | None]:
    """What events say of a cluster's runs: the latest record by raw job id, None if it is over."""
    found: dict[int, JobRecord | None] = {}
    for event in events:
        if event.cluster != cluster:
            continue
        body: JobFacts = event.body
        record = body.record
        if event.kind == JOB_END and record.state in _GOES_ON:
            continue
        is_over = event.kind == JOB_END or record.state in FINISHED
        found[record.job_id] = None if is_over else record
    return found


def caught_up(
    known: Iterable[JobRecord], reader: JournalReader, cluster: str, position: int
) -> list[JobRecord]:
    """The records of the runs that are not over, with what the journal has told since.

    Whoever keeps them may be some events behind, and what slurmctld forgot in the same crash
    is shown by nobody again.

    Args:
        known: The records up to a position.
        reader: The journal.
        cluster: Whose runs.
        position: Up to which events are taken in.

    Raises:
        SqliteUnavailable: The journal cannot be read now.
    """
    runs: dict[int, JobRecord] = {record.job_id: record for record in known}
    if reader.head() - position > _MOST_BEHIND:
        return list(runs.values())
    while True:
        events, upto = reader.read(position, Runs.kinds, Runs.batch_events)
        for job_id, record in latest(events, cluster).items():
            if record is None:
                runs.pop(job_id, None)
            else:
                runs[job_id] = record
        if upto == position:
            return list(runs.values())
        position = upto


def unfinished(state_dir: str, cluster: str) -> tuple[list[JobRecord], int]:
    """The latest record of each run that is not over, and up to which event it was taken in.

    Raises:
        SqliteUnavailable: The database cannot be read now.
    """
    path = path_of(state_dir, cluster)
    if not os.path.exists(path):
        # The first start: nothing is known yet, so nothing can have ended meanwhile.
        return [], 0
    database = open_reader(path)
    try:
        with translated(path):
            (position,) = database.execute("SELECT position FROM cursor").fetchone()
            rows = database.execute("SELECT record FROM run").fetchall()
        return [_decode(record) for (record,) in rows], int(position)
    finally:
        database.close()
