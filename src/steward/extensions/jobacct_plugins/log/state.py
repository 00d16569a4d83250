"""State database of the job log's consumer: cursor, file lengths, days, and lines that wait.

Cursor and lengths change in one transaction, so after a crash the lengths limit the valid bytes of
the files. Records of runs that have not ended wait in table ``waiting``. :class:`LogState`
reads, :class:`LogStateWriter` writes within one transaction. The file is ``accounting-log.db`` in
the state directory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec

from steward.core.databases import JOB_LOG
from steward.core.sqlite import Connection, Database, translate_errors
from steward.core.storage import Cursor, Index, Table


class _LogCursor(Cursor, frozen=True, kw_only=True):
    """Cursor, and the log directory that the files' lengths belong to; "" at first."""

    location: str = ""


class _GrowingFile(msgspec.Struct, frozen=True, array_like=True):
    """File that records are appended to; last at ``written_s``, seconds since the epoch."""

    name: str
    length: int
    written_s: int


class _ClosedDay(msgspec.Struct, frozen=True, array_like=True):
    """Closed day, and whether its new files are still being renamed into place."""

    day: str
    state: int


class _EndedRun(msgspec.Struct, frozen=True):
    """Run that has ended, and the day that its records belong to.

    A second row with -1 restarts says that its records were imported. The rows last as long as the
    day, so that no import writes a run again: 44 bytes each.
    """

    cluster: str
    job_id: int
    submit_us: int
    restarts: int
    day: str


class _WaitingLines(msgspec.Struct, frozen=True, kw_only=True):
    """Records of a run that has not ended; those of imported steps have -1 restarts."""

    number: int = 0
    cluster: str
    job_id: int
    submit_us: int
    restarts: int
    lines: bytes


class _Purge(msgspec.Struct, frozen=True):
    """Purged script; the private text of its job must be blanked."""

    cluster: str
    job_id: int
    written_us: int
    noted_s: int


class _ScanDay(msgspec.Struct, frozen=True):
    """Day to scan for purged text."""

    day: str


_CURSOR: Final = Table(_LogCursor, "cursor", has_one_row=True)
_FILES: Final = Table(_GrowingFile, "file", key="name")
_DAYS: Final = Table(_ClosedDay, "day", key="day")
_RUNS: Final = Table(_EndedRun, "run", key="cluster, job_id, submit_us, restarts")
_WAITING: Final = Table(
    *(_WaitingLines, "waiting"),
    key="number",
    indexes={"by_run": Index("cluster, job_id, submit_us, restarts")},
)
_PURGES: Final = Table(_Purge, "purge", key="cluster, job_id, written_us")
_SCAN_DAYS: Final = Table(_ScanDay, "look", key="day")
LOG_MIGRATIONS: Final = (
    "".join(table.schema for table in (_CURSOR, _FILES, _DAYS, _RUNS, _WAITING)),
    _PURGES.schema + _SCAN_DAYS.schema,
    "DROP INDEX IF EXISTS run_by_day;",
)
DAY_CLOSED: Final = 0
"""State of a day that is packed."""
DAY_SWAPPING: Final = 1
"""State of a day whose packed files are being renamed into place."""

RunKey = tuple[str, int, int, int]
"""Run: cluster, job id, its own submit time in µs, restarts."""
IMPORTED: Final = -1
"""Restarts in the key of an imported step's waiting lines, and of the mark of an imported run."""

PurgedScript = tuple[str, int, int]
"""Purged script: cluster, job id, time it was written in µs."""

_WHERE_RUN: Final = "WHERE cluster = ? AND job_id = ? AND submit_us = ? AND restarts = ?"


def log_state_path(state_dir: str) -> str:
    """Return the path of the consumer's database."""
    return JOB_LOG.locate(state_dir)


class LogState:
    """State database of the job log's consumer.

    Args:
        path: The file.
        read_only: Open it for reading only.

    Raises:
        SqliteError, SqliteUnavailable: As :func:`steward.core.sqlite.open_database`.
    """

    def __init__(self, path: str, *, read_only: bool = False) -> None:
        # NORMAL: a power loss may take the last batches together with their lengths; the journal,
        # which is not trimmed for a while, delivers them again.
        self.database = Database(path, LOG_MIGRATIONS, read_only=read_only, synchronous="NORMAL")
        if not read_only:
            # Overwrite blanked text: a purge leaves no copy in a free page.
            self.database.fetch("PRAGMA secure_delete=ON")

    def read_location(self) -> str:
        """Return the log directory that the lengths belong to; "" at first."""
        return str(self.database.fetch_value("SELECT location FROM cursor"))

    def read_files(self) -> dict[str, tuple[int, int]]:
        """Return the growing files: length, and time of the last append in seconds."""
        return {file.name: (file.length, file.written_s) for file in _FILES.select(self.database)}

    def read_days(self) -> dict[str, int]:
        """Return the closed days with their state."""
        return {day.day: day.state for day in _DAYS.select(self.database)}

    def find_day(self, run: RunKey) -> str:
        """Return the day that holds an ended run's records; "" while the run has not ended."""
        return self.database.fetch_value(f"SELECT day FROM run {_WHERE_RUN}", *run) or ""  # noqa: S608 - our own text

    def find_run(self, cluster: str, job_id: int, submit_us: int) -> tuple[RunKey, str] | None:
        """Find the ended run with this submit time of its own; return it with its day."""
        rows = self.database.fetch(
            "SELECT restarts, day FROM run WHERE cluster = ? AND job_id = ? AND submit_us = ? "
            "AND restarts >= 0",
            *(cluster, job_id, submit_us),
        )
        return ((cluster, job_id, submit_us, rows[0][0]), rows[0][1]) if rows else None

    def find_days(self, cluster: str, job_ids: Iterable[int]) -> dict[RunKey, str]:
        """Return the days of the ended runs of some jobs, and the marks of imported ones."""
        rows = self.database.fetch(
            "SELECT job_id, submit_us, restarts, day FROM run WHERE cluster = ? "
            "AND job_id IN (SELECT value FROM json_each(?))",
            *(cluster, msgspec.json.encode(sorted(job_ids)).decode()),
        )
        return {(cluster, *key): day for *key, day in rows}

    def read_waiting(self, run: RunKey) -> Iterator[bytes]:
        """Yield the lines that wait for a run's end, in order of arrival."""
        sql = f"SELECT lines FROM waiting {_WHERE_RUN} ORDER BY number"  # noqa: S608 - likewise
        with translate_errors(self.database.path):
            for (lines,) in self.database.connection.execute(sql, run):
                yield lines

    def list_waiting_since(self, cluster: str, submit_us: int) -> list[int]:
        """Return the numbers of waiting lines of runs submitted at this time or later."""
        rows = self.database.fetch(
            "SELECT number FROM waiting WHERE cluster = ? AND submit_us >= ? ORDER BY number",
            *(cluster, submit_us),
        )
        return [number for (number,) in rows]

    def read_waiting_lines(self, number: int) -> bytes:
        """Return the waiting lines with a number."""
        return bytes(
            self.database.fetch_value("SELECT lines FROM waiting WHERE number = ?", number)
        )

    def list_purges(self) -> list[PurgedScript]:
        """Return the recently purged scripts."""
        return self.database.fetch("SELECT cluster, job_id, written_us FROM purge")

    def list_scan_days(self) -> list[str]:
        """Return the days still to scan for purged text, the latest first."""
        return [day for (day,) in self.database.fetch("SELECT day FROM look ORDER BY day DESC")]

    def is_superseded(self, run: RunKey) -> bool:
        """Return True if a later run of the same job is known."""
        sql = (
            "SELECT 1 FROM {} WHERE cluster = ? AND job_id = ? AND submit_us >= ? AND restarts > ? "
            "LIMIT 1"
        )
        return any(
            self.database.fetch_value(sql.format(table), *run) for table in ("run", "waiting")
        )

    @contextmanager
    def open_writer(self) -> "Iterator[LogStateWriter]":
        """Open a transaction for writing.

        Raises:
            SqliteUnavailable: The state directory cannot be written now.
        """
        with self.database.transaction() as connection:
            yield LogStateWriter(connection)

    def truncate_wal(self) -> None:
        """Truncate the WAL, so that it keeps no copy of blanked text."""
        self.database.fetch("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the database."""
        self.database.close()


class LogStateWriter:
    """Writer of the state database, within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def set_location(self, location: str) -> None:
        """Change to another log directory and drop the records of the former one's files."""
        self._connection.execute("UPDATE cursor SET location = ?", (location,))
        self._connection.execute("DELETE FROM file")
        self._connection.execute("DELETE FROM day")

    def wait(self, run: RunKey, lines: bytes) -> None:
        """Store lines until their run ends."""
        cluster, job_id, submit_us, restarts = run
        waiting = _WaitingLines(
            cluster=cluster, job_id=job_id, submit_us=submit_us, restarts=restarts, lines=lines
        )
        _WAITING.insert(self._connection, waiting)

    def end_runs(self, days: Mapping[RunKey, str]) -> None:
        """Record the ends of runs with their days, and drop their waiting lines."""
        _RUNS.insert_all(
            self._connection, [_EndedRun(*run, day) for run, day in days.items()], "replace"
        )
        waiting = {(*run[:3], restarts) for run in days for restarts in (run[3], IMPORTED)}
        self._connection.executemany(f"DELETE FROM waiting {_WHERE_RUN}", sorted(waiting))  # noqa: S608 - ours

    def set_file_length(self, name: str, length: int, written_s: int) -> None:
        """Record a file's new length."""
        _FILES.insert(self._connection, _GrowingFile(name, length, written_s), "replace")

    def set_day(self, day: str, state: int) -> None:
        """Set a day's state: being closed, or closed."""
        _DAYS.insert(self._connection, _ClosedDay(day, state), "replace")

    def forget_files(self, names: Iterable[str]) -> None:
        """Drop files that no longer exist."""
        self._connection.executemany("DELETE FROM file WHERE name = ?", [(name,) for name in names])

    def forget_days(self, days: Sequence[str]) -> None:
        """Drop days that were removed from the log, with their runs."""
        values = (msgspec.json.encode(days).decode(),)
        for table in ("day", "run"):
            self._connection.execute(
                f"DELETE FROM {table} WHERE day IN (SELECT value FROM json_each(?))",  # noqa: S608 - ours
                values,
            )

    def purge(self, purges: Iterable[PurgedScript], noted_s: int, days: Iterable[str]) -> None:
        """Record purged scripts, and the days to scan for their text."""
        _PURGES.insert_all(
            self._connection, [_Purge(*purge, noted_s) for purge in purges], "replace"
        )
        _SCAN_DAYS.insert_all(self._connection, map(_ScanDay, days), "replace")

    def replace_waiting(self, number: int, lines: bytes) -> None:
        """Replace the waiting lines with a number."""
        self._connection.execute("UPDATE waiting SET lines = ? WHERE number = ?", (lines, number))

    def mark_scanned(self, day: str) -> None:
        """Mark a day as scanned for purged text."""
        self._connection.execute("DELETE FROM look WHERE day = ?", (day,))

    def forget_purges(self, before_s: int) -> None:
        """Drop old purges, unless days are still to be scanned for them."""
        self._connection.execute(
            "DELETE FROM purge WHERE noted_s < ? AND NOT EXISTS (SELECT 1 FROM look)", (before_s,)
        )
