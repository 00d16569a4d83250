"""State database of a plugin's process: cursor, tries of the current batch, and hook errors.

:class:`PluginState` is written by the process, :func:`read_health` reads errors for ``steward
accounting plugins``. The position of a batch is stored before its hooks are called. This finds a
plugin that crashes its whole process: after the restart events come one at a time, and one that
ends the process three times is skipped.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from steward.core.databases import PLUGIN
from steward.core.sqlite import Database
from steward.core.storage import Cursor, Table, move_cursor


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


class _PluginCursor(Cursor, frozen=True, kw_only=True):
    """Cursor, position and tries of the current batch, and why the plugin does not run."""

    trying: int = -1
    tries: int = 0
    refusal: str = ""


_CURSOR: Final = Table(_PluginCursor, "cursor", has_one_row=True)
_FAILURES: Final = Table(HookFailure, "failure", key="hook, kind")
_ADD_FAILURE: Final = (
    _FAILURES.build_upsert(("last_s", "text")) + ", count = count + excluded.count"
)


def plugin_state_path(state_dir: str, plugin_type: str) -> str:
    """Return the path of the database of a plugin's process."""
    return PLUGIN.locate(state_dir, plugin_type.partition("/")[2])


class PluginState:
    """State database of one plugin's process.

    Args:
        path: The file.

    Raises:
        SqliteError, SqliteUnavailable: As :func:`steward.core.sqlite.open_database`.
    """

    def __init__(self, path: str) -> None:
        # NORMAL: after a power loss hooks are called again, which they must tolerate anyway.
        self.database = Database(path, (_CURSOR.schema + _FAILURES.schema,), synchronous="NORMAL")

    def was_interrupted(self) -> bool:
        """Return True if the process ended while it tried the next batch."""
        cursor = self._read_cursor()
        return cursor.trying == cursor.position

    def begin_batch(self) -> int:
        """Record a try of the next batch; return the number of its tries, this one included."""
        with self.database.transaction() as connection:
            connection.execute(
                "UPDATE cursor SET trying = position, "
                "tries = CASE WHEN trying = position THEN tries + 1 ELSE 1 END"
            )
        return self._read_cursor().tries

    def record_refusal(self, reason: str) -> None:
        """Record why the plugin does not run; "" when it runs."""
        with self.database.transaction() as connection:
            connection.execute("UPDATE cursor SET refusal = ? WHERE refusal <> ?", (reason, reason))

    def postpone_batch(self) -> None:
        """Reset the tries: the batch is postponed through no fault of the plugin."""
        with self.database.transaction() as connection:
            connection.execute("UPDATE cursor SET trying = -1, tries = 0")

    def finish_batch(self, position: int, failures: Iterable[HookFailure]) -> None:
        """Move the cursor and add the errors.

        Args:
            position: New position.
            failures: Errors since the last call.
        """
        with self.database.transaction() as connection:
            connection.executemany(_ADD_FAILURE, map(_FAILURES.encode, failures))
            move_cursor(connection, position)
            connection.execute("UPDATE cursor SET trying = -1, tries = 0")

    def _read_cursor(self) -> _PluginCursor:
        (cursor,) = _CURSOR.select(self.database)
        return cursor


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
    database = Database(plugin_state_path(state_dir, plugin_type), (), read_only=True)
    try:
        failures = _FAILURES.select(database, "ORDER BY last_s DESC")
        (cursor,) = _CURSOR.select(database)
    finally:
        database.close()
    return PluginHealth(cursor.refusal, tuple(failures))
