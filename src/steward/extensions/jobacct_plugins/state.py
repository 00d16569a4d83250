"""State database of a plugin's process: cursor, tries of the current batch, and hook errors.

:class:`PluginState` is written by the process, :func:`read_health` reads errors for ``steward
accounting plugins``. The position of a batch is stored before its hooks are called. This finds a
plugin that crashes its whole process: after the restart events come one at a time, and one that
ends the process three times is skipped.
"""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from steward.core.sqlite import (
    Connection,
    open_database,
    open_reader,
    transaction,
    translate_errors,
)

PLUGIN_MIGRATIONS: Final = (
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
    # A launch is one event since this version.
    "DROP TABLE launch;",
    "ALTER TABLE cursor ADD COLUMN refusal TEXT NOT NULL DEFAULT '';",
)


class HookFailure(msgspec.Struct, frozen=True):
    """Errors of one kind in one hook of a plugin.

    Attributes:
        hook: The hook; ``*`` where the whole process ended.
        kind: The exception's class; ``crash`` where the process ended, ``time-out``.
        count: How often.
        first_s: Time of the first, seconds since the epoch.
        last_s: Time of the last.
        text: Text of the last.
    """

    hook: str
    kind: str
    count: int
    first_s: int
    last_s: int
    text: str


def plugin_state_path(state_dir: str, plugin_type: str) -> str:
    """Return the path of the database of a plugin's process."""
    return f"{state_dir}/accounting-{plugin_type.partition('/')[2]}.db"


class PluginState:
    """State database of one plugin's process.

    Args:
        path: The file.

    Raises:
        SqliteError, SqliteUnavailable: As :func:`steward.core.sqlite.open_database`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        # NORMAL: after a power loss hooks are called again, which they must tolerate anyway.
        self._connection: Connection = open_database(path, PLUGIN_MIGRATIONS, synchronous="NORMAL")

    def read_cursor(self) -> int:
        """Return the position of the last applied event; 0 at first."""
        return int(self._select_row("SELECT position FROM cursor")[0])

    def was_interrupted(self) -> bool:
        """Return True if the process ended while it tried the next batch."""
        tried_position, position = self._select_row("SELECT trying, position FROM cursor")
        return bool(tried_position == position)

    def begin_batch(self) -> int:
        """Record a try of the next batch; return the number of its tries, this one included."""
        with transaction(self._connection, self._path) as connection:
            connection.execute(
                "UPDATE cursor SET trying = position, "
                "tries = CASE WHEN trying = position THEN tries + 1 ELSE 1 END"
            )
        return int(self._select_row("SELECT tries FROM cursor")[0])

    def record_refusal(self, reason: str) -> None:
        """Record why the plugin does not run; "" when it runs."""
        with transaction(self._connection, self._path) as connection:
            connection.execute("UPDATE cursor SET refusal = ? WHERE refusal <> ?", (reason, reason))

    def postpone_batch(self) -> None:
        """Reset the tries: the batch is postponed through no fault of the plugin."""
        with transaction(self._connection, self._path) as connection:
            connection.execute("UPDATE cursor SET trying = -1, tries = 0")

    def finish_batch(self, position: int, failures: Iterable[HookFailure]) -> None:
        """Move the cursor and add the errors.

        Args:
            position: New position; a replayed event may come with an older one, which is ignored.
            failures: Errors since the last call.
        """
        with transaction(self._connection, self._path) as connection:
            self._add_failures(connection, failures)
            connection.execute(
                "UPDATE cursor SET position = max(position, ?), trying = -1, tries = 0", (position,)
            )

    def _add_failures(self, connection: Connection, failures: Iterable[HookFailure]) -> None:
        connection.executemany(
            "INSERT INTO failure VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (hook, kind) DO UPDATE SET "
            "count = count + excluded.count, last_s = excluded.last_s, text = excluded.text",
            [msgspec.structs.astuple(failure) for failure in failures],
        )

    def _select_row(self, sql: str) -> Any:
        with translate_errors(self._path):
            return self._connection.execute(sql).fetchone()

    def close(self) -> None:
        """Close the database."""
        self._connection.close()


class PluginHealth(msgspec.Struct, frozen=True):
    """Health of a plugin, as its process recorded it.

    Attributes:
        refusal: Why it does not run; "" when it runs.
        failures: Errors of its hooks, the latest first.
    """

    refusal: str = ""
    failures: tuple[HookFailure, ...] = ()


def read_health(state_dir: str, plugin_type: str) -> PluginHealth:
    """Read a plugin's health from its database.

    Raises:
        SqliteUnavailable: It has not run yet, or its database cannot be read now.
    """
    path = plugin_state_path(state_dir, plugin_type)
    connection = open_reader(path)
    try:
        with translate_errors(path):
            rows = connection.execute("SELECT * FROM failure ORDER BY last_s DESC").fetchall()
            (refusal,) = connection.execute("SELECT refusal FROM cursor").fetchone()
    finally:
        connection.close()
    return PluginHealth(refusal, tuple(HookFailure(*row) for row in rows))
