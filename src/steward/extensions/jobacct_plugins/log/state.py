"""What the job log's consumer keeps: its place, the length of each file, and what waits.

Place and lengths are one transaction, so that after a crash they tell which
bytes of the files count. Records of runs that have not ended wait in here.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from steward.core.sqlite import Connection, open_database, open_reader, transaction, translated

MIGRATIONS: Final = (
    """
    CREATE TABLE cursor (position INTEGER NOT NULL, location TEXT NOT NULL);
    INSERT INTO cursor VALUES (0, '');
    -- What is appended to; written_s: when last, seconds since the epoch.
    CREATE TABLE file (
        name TEXT PRIMARY KEY,
        length INTEGER NOT NULL,
        written_s INTEGER NOT NULL
    ) WITHOUT ROWID;
    -- Days that were closed; in state 1 their new files are being put into place.
    CREATE TABLE day (day TEXT PRIMARY KEY, state INTEGER NOT NULL) WITHOUT ROWID;
    -- Runs that have ended, and the day that their records belong to.
    CREATE TABLE run (
        cluster TEXT NOT NULL,
        job_id INTEGER NOT NULL,
        submit_us INTEGER NOT NULL,
        restarts INTEGER NOT NULL,
        day TEXT NOT NULL,
        PRIMARY KEY (cluster, job_id, submit_us, restarts)
    ) WITHOUT ROWID;
    CREATE INDEX run_by_day ON run (day);
    -- Records of runs that have not ended; those of another's books know no restarts (-1).
    CREATE TABLE waiting (
        number INTEGER PRIMARY KEY,
        cluster TEXT NOT NULL,
        job_id INTEGER NOT NULL,
        submit_us INTEGER NOT NULL,
        restarts INTEGER NOT NULL,
        lines BLOB NOT NULL
    );
    CREATE INDEX waiting_by_run ON waiting (cluster, job_id, submit_us, restarts);
    """,
    """
    -- Scripts that were purged: what a person wrote of their jobs is to be blanked.
    CREATE TABLE purge (
        cluster TEXT NOT NULL,
        job_id INTEGER NOT NULL,
        written_us INTEGER NOT NULL,
        noted_s INTEGER NOT NULL,
        PRIMARY KEY (cluster, job_id, written_us)
    ) WITHOUT ROWID;
    -- Days that are to be looked over for that.
    CREATE TABLE look (day TEXT PRIMARY KEY) WITHOUT ROWID;
    """,
)
CLOSED: Final = 0
SWAPPING: Final = 1

RunKey = tuple[str, int, int, int]
"""A run: cluster, job id, its own submit time in µs, restarts."""

Purge = tuple[str, int, int]
"""A purged script: cluster, job id, when it was written in µs."""

_OF_RUN: Final = "WHERE cluster = ? AND job_id = ? AND submit_us = ? AND restarts = ?"


def keeping_path(state_dir: str) -> str:
    """The database of the job log's consumer."""
    return f"{state_dir}/accounting-log.db"


class Keeping:
    """The database.

    Args:
        path: The file.
        reading: Open it for reading only.

    Raises:
        SqliteError, SqliteUnavailable: As :func:`steward.core.sqlite.open_database`.
    """

    def __init__(self, path: str, *, reading: bool = False) -> None:
        self._path = path
        # NORMAL: a power loss may take the last batches with their lengths, and the journal,
        # which is not trimmed for a while, gives them again.
        self._connection: Connection = (
            open_reader(path) if reading else open_database(path, MIGRATIONS, synchronous="NORMAL")
        )
        if not reading:
            with translated(path):
                # What is blanked is overwritten: a purge leaves no copy in a free page.
                self._connection.execute("PRAGMA secure_delete=ON")

    def _rows(self, sql: str, *values: object) -> list[Any]:
        with translated(self._path):
            return list(self._connection.execute(sql, values))

    def _value(self, sql: str, *values: object) -> Any:
        rows = self._rows(sql, *values)
        return rows[0][0] if rows else None

    def cursor(self) -> int:
        """Position of the last event that was taken in."""
        return int(self._value("SELECT position FROM cursor"))

    def location(self) -> str:
        """The directory that the lengths are of; "" at first."""
        return str(self._value("SELECT location FROM cursor"))

    def files(self) -> dict[str, tuple[int, int]]:
        """The files that are appended to: length, and when that was last (seconds)."""
        return {name: (length, at) for name, length, at in self._rows("SELECT * FROM file")}

    def days(self) -> dict[str, int]:
        """The days that were closed, with their state."""
        return dict(self._rows("SELECT * FROM day"))

    def day_of(self, run: RunKey) -> str:
        """The day that an ended run's records belong to; "" where it has not ended."""
        return self._value(f"SELECT day FROM run {_OF_RUN}", *run) or ""  # noqa: S608 - our own text

    def run_of_submit(self, cluster: str, job_id: int, submit_us: int) -> tuple[RunKey, str] | None:
        """The ended run with this submit time of its own, and its day."""
        rows = self._rows(
            "SELECT restarts, day FROM run WHERE cluster = ? AND job_id = ? AND submit_us = ?",
            *(cluster, job_id, submit_us),
        )
        return ((cluster, job_id, submit_us, rows[0][0]), rows[0][1]) if rows else None

    def waiting(self, run: RunKey) -> Iterator[bytes]:
        """The lines that wait for a run's end, in the order in which they came."""
        sql = f"SELECT lines FROM waiting {_OF_RUN} ORDER BY number"  # noqa: S608 - likewise
        with translated(self._path):
            for (lines,) in self._connection.execute(sql, run):
                yield lines

    def waiting_since(self, cluster: str, submit_us: int) -> list[int]:
        """The numbers of what waits of runs that were submitted then or later."""
        rows = self._rows(
            "SELECT number FROM waiting WHERE cluster = ? AND submit_us >= ? ORDER BY number",
            *(cluster, submit_us),
        )
        return [number for (number,) in rows]

    def waiting_lines(self, number: int) -> bytes:
        """What waits under a number."""
        return bytes(self._value("SELECT lines FROM waiting WHERE number = ?", number))

    def purges(self) -> list[Purge]:
        """The scripts that were purged lately."""
        return self._rows("SELECT cluster, job_id, written_us FROM purge")

    def looks(self) -> list[str]:
        """The days that are to be looked over for what they tell of these, the latest first."""
        return [day for (day,) in self._rows("SELECT day FROM look ORDER BY day DESC")]

    def is_superseded(self, run: RunKey) -> bool:
        """Whether a later run of the same job is known."""
        sql = (
            "SELECT 1 FROM {} WHERE cluster = ? AND job_id = ? AND submit_us >= ? AND restarts > ? "
            "LIMIT 1"
        )
        return any(self._value(sql.format(table), *run) for table in ("run", "waiting"))

    @contextmanager
    def writing(self) -> "Iterator[Writer]":
        """One transaction.

        Raises:
            SqliteUnavailable: The state directory cannot be written now.
        """
        with transaction(self._connection, self._path) as connection:
            yield Writer(connection)

    def overwrite(self) -> None:
        """Have nothing lie on in the WAL of what was blanked."""
        with translated(self._path):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


class Writer:
    """What can be written in one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def advance(self, position: int) -> None:
        """Move the cursor; a replayed event may come with a position passed long ago."""
        self._connection.execute("UPDATE cursor SET position = max(position, ?)", (position,))

    def move_to(self, location: str) -> None:
        """Another directory is written to: what is known of files was of the former."""
        self._connection.execute("UPDATE cursor SET location = ?", (location,))
        self._connection.execute("DELETE FROM file")
        self._connection.execute("DELETE FROM day")

    def wait(self, run: RunKey, lines: bytes) -> None:
        """Keep lines until a run ends."""
        self._connection.execute(
            "INSERT INTO waiting (cluster, job_id, submit_us, restarts, lines) "
            "VALUES (?, ?, ?, ?, ?)",
            (*run, lines),
        )

    def end(self, run: RunKey, day: str) -> None:
        """A run has ended; nothing waits for that any more."""
        self._connection.execute("INSERT OR REPLACE INTO run VALUES (?, ?, ?, ?, ?)", (*run, day))
        for one in (run, (*run[:3], -1)):
            self._connection.execute(f"DELETE FROM waiting {_OF_RUN}", one)  # noqa: S608 - ours

    def wrote(self, name: str, length: int, written_s: int) -> None:
        """A file is so long now."""
        self._connection.execute(
            "INSERT OR REPLACE INTO file VALUES (?, ?, ?)", (name, length, written_s)
        )

    def set_day(self, day: str, state: int) -> None:
        """A day is being closed, or is closed."""
        self._connection.execute("INSERT OR REPLACE INTO day VALUES (?, ?)", (day, state))

    def forget_files(self, names: Iterable[str]) -> None:
        """These files are not there any more."""
        self._connection.executemany("DELETE FROM file WHERE name = ?", [(one,) for one in names])

    def forget_day(self, day: str) -> None:
        """A day is not in the log any more."""
        self._connection.execute("DELETE FROM day WHERE day = ?", (day,))
        self._connection.execute("DELETE FROM run WHERE day = ?", (day,))

    def purge(self, purges: Iterable[Purge], noted_s: int, days: Iterable[str]) -> None:
        """Scripts were purged, and days are to be looked over for what they tell of them."""
        self._connection.executemany(
            "INSERT OR REPLACE INTO purge VALUES (?, ?, ?, ?)",
            [(*purge, noted_s) for purge in purges],
        )
        self._connection.executemany(
            "INSERT OR REPLACE INTO look VALUES (?)", [(day,) for day in days]
        )

    def wait_anew(self, number: int, lines: bytes) -> None:
        """Other lines wait in the place of some."""
        self._connection.execute("UPDATE waiting SET lines = ? WHERE number = ?", (lines, number))

    def looked(self, day: str) -> None:
        """A day was looked over."""
        self._connection.execute("DELETE FROM look WHERE day = ?", (day,))

    def forget_purges(self, before_s: int) -> None:
        """Purges that all days were looked over for need not be known any more."""
        self._connection.execute(
            "DELETE FROM purge WHERE noted_s < ? AND NOT EXISTS (SELECT 1 FROM look)", (before_s,)
        )

    def forget_runs(self, before: str) -> None:
        """Runs that ended before this day need not be known any more."""
        self._connection.execute("DELETE FROM run WHERE day < ?", (before,))
