"""The runs that have not ended, as a controller remembers them where there is no jobs.db.

A controller that is started again has to notice which jobs ended meanwhile, so
it keeps the latest record of each run that is not over, and nothing else: what
it takes up is as large as the queue.
"""

import os
from collections.abc import Sequence
from typing import Final

import msgspec

from steward.consumers import Append
from steward.events import JOB_END, JOB_SEEN, JOB_STATE, Event, JobFacts
from steward.records import JobRecord
from steward.slurm import FINISHED
from steward.sqlite import open_database, open_reader, transaction, translated

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

# A former size of a job that runs on, and a former run of one that waits again.
_GOES_ON: Final = frozenset({"RESIZING", "REQUEUED"})

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JobRecord).decode


def path_of(state_dir: str, cluster: str) -> str:
    """Where a cluster's runs are kept."""
    return os.path.join(state_dir, f"runs-{cluster}.db")


class Runs:
    """Keeps ``runs-CLUSTER.db``; see ``steward.consumers.Consumer``.

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
            for event in events:
                if event.cluster != self._cluster:
                    continue
                body: JobFacts = event.body
                record = body.record
                if event.kind == JOB_END and record.state in _GOES_ON:
                    continue
                if event.kind == JOB_END or record.state in FINISHED:
                    database.execute("DELETE FROM run WHERE job_id = ?", (record.job_id,))
                else:
                    database.execute(
                        "INSERT OR REPLACE INTO run (job_id, record) VALUES (?, ?)",
                        (record.job_id, _encode(record)),
                    )
            database.execute("UPDATE cursor SET position = ?", (upto,))

    def tick(self, append: Append) -> float:  # noqa: ARG002 -- a Consumer's signature
        """Nothing is due by the clock."""
        return 3600.0

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()


def unfinished(state_dir: str, cluster: str) -> list[JobRecord]:
    """The latest record of each run that is not over, as far as it was taken in.

    Raises:
        SqliteUnavailable: The database cannot be read now.
    """
    path = path_of(state_dir, cluster)
    if not os.path.exists(path):
        # The first start: nothing is known yet, so nothing can have ended meanwhile.
        return []
    database = open_reader(path)
    try:
        with translated(path):
            rows = database.execute("SELECT record FROM run").fetchall()
        return [_decode(record) for (record,) in rows]
    finally:
        database.close()
