"""What the process of a plugin keeps: its place, and what went wrong.

The place of a batch that is being tried is written down before its hooks are
called. A plugin that takes its whole process with it is so found out: at the
next start events come one at a time, and the one that ends it thrice is passed over.
"""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from steward.core.sqlite import Connection, open_database, open_reader, transaction, translated

MIGRATIONS: Final = (
    """
    CREATE TABLE cursor (
        position INTEGER NOT NULL,
        trying INTEGER NOT NULL,
        tries INTEGER NOT NULL
    );
    INSERT INTO cursor VALUES (0, -1, 0);
    CREATE TABLE launch (
        cluster TEXT NOT NULL,
        job_id INTEGER NOT NULL,
        step TEXT NOT NULL,
        node TEXT NOT NULL,
        launched_us INTEGER NOT NULL,
        kept_s INTEGER NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (cluster, job_id, step, node, launched_us)
    ) WITHOUT ROWID;
    CREATE TABLE failure (
        hook TEXT NOT NULL,
        kind TEXT NOT NULL,
        count INTEGER NOT NULL,
        first_s INTEGER NOT NULL,
        last_s INTEGER NOT NULL,
        text TEXT NOT NULL,
        PRIMARY KEY (hook, kind)
    ) WITHOUT ROWID;
    """,
    # Launches are told of as a whole now.
    "DROP TABLE launch;",
    "ALTER TABLE cursor ADD COLUMN refusal TEXT NOT NULL DEFAULT '';",
)


class Failure(msgspec.Struct, frozen=True):
    """A kind of error of a plugin.

    Attributes:
        hook: In which hook; ``*`` where the whole process ended.
        kind: The exception's class; ``crash`` where the process ended, ``time-out``.
        count: How often.
        first_s: When first, seconds since the epoch.
        last_s: When last.
        text: What it said last.
    """

    hook: str
    kind: str
    count: int
    first_s: int
    last_s: int
    text: str


def state_path(state_dir: str, plugin_type: str) -> str:
    """The database of a plugin's process."""
    return f"{state_dir}/accounting-{plugin_type.partition('/')[2]}.db"


class PluginState:
    """The database of one plugin's process.

    Args:
        path: The file.

    Raises:
        SqliteError, SqliteUnavailable: As :func:`steward.core.sqlite.open_database`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        # NORMAL: what a power loss takes is called again, which hooks have to bear anyway.
        self._connection: Connection = open_database(path, MIGRATIONS, synchronous="NORMAL")

    def cursor(self) -> int:
        """Position of the last event that was put to use; 0 at first."""
        return int(self._row("SELECT position FROM cursor")[0])

    def was_cut_short(self) -> bool:
        """Whether the process ended while it tried what comes next."""
        trying, position = self._row("SELECT trying, position FROM cursor")
        return bool(trying == position)

    def begin(self) -> int:
        """Note that what comes next is tried now; how often it was, this time included."""
        with transaction(self._connection, self._path) as connection:
            connection.execute(
                "UPDATE cursor SET trying = position, "
                "tries = CASE WHEN trying = position THEN tries + 1 ELSE 1 END"
            )
        return int(self._row("SELECT tries FROM cursor")[0])

    def note_refusal(self, why: str) -> None:
        """Note why the plugin does not run; "" when it runs."""
        with transaction(self._connection, self._path) as connection:
            connection.execute("UPDATE cursor SET refusal = ? WHERE refusal <> ?", (why, why))

    def give_up(self) -> None:
        """What was tried is tried again later, and it was not the plugin's fault."""
        with transaction(self._connection, self._path) as connection:
            connection.execute("UPDATE cursor SET trying = -1, tries = 0")

    def done(self, position: int, failures: Iterable[Failure]) -> None:
        """Move the cursor, with what is to be remembered.

        Args:
            position: Where to; a replayed event may come with one that was passed long ago.
            failures: What went wrong, counted since the last call.
        """
        with transaction(self._connection, self._path) as connection:
            self._count(connection, failures)
            connection.execute(
                "UPDATE cursor SET position = max(position, ?), trying = -1, tries = 0", (position,)
            )

    def _count(self, connection: Connection, failures: Iterable[Failure]) -> None:
        connection.executemany(
            "INSERT INTO failure VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (hook, kind) DO UPDATE SET "
            "count = count + excluded.count, last_s = excluded.last_s, text = excluded.text",
            [msgspec.structs.astuple(one) for one in failures],
        )

    def _row(self, sql: str) -> Any:
        with translated(self._path):
            return self._connection.execute(sql).fetchone()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


class Health(msgspec.Struct, frozen=True):
    """What a plugin's process noted of it.

    Attributes:
        refusal: Why it does not run; "" when it runs.
        failures: What went wrong in its hooks, the latest first.
    """

    refusal: str = ""
    failures: tuple[Failure, ...] = ()


def read_health(state_dir: str, plugin_type: str) -> Health:
    """Read what a plugin's process noted.

    Raises:
        SqliteUnavailable: It has not run yet, or its database cannot be read now.
    """
    path = state_path(state_dir, plugin_type)
    connection = open_reader(path)
    try:
        with translated(path):
            rows = connection.execute("SELECT * FROM failure ORDER BY last_s DESC").fetchall()
            (refusal,) = connection.execute("SELECT refusal FROM cursor").fetchone()
    finally:
        connection.close()
    return Health(refusal, tuple(Failure(*row) for row in rows))
