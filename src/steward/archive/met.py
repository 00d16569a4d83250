"""What long work has met already, kept on disk as it grows: a million names need little memory."""

from types import TracebackType
from typing import Self

from steward.core.sqlite import open_scratch, translated

_TABLE = "CREATE TABLE met (name TEXT PRIMARY KEY) WITHOUT ROWID;"


class Met:
    """A set of names to which is only added; used as a context."""

    def __init__(self) -> None:
        self._connection = open_scratch(_TABLE)
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def __len__(self) -> int:
        return self._count

    def __contains__(self, name: str) -> bool:
        """Whether a name was added."""
        with translated("a temporary file"):
            found = self._connection.execute("SELECT 1 FROM met WHERE name = ?", (name,))
            return bool(found.fetchall())

    def add(self, name: str) -> bool:
        """Whether a name is new; from now on it is not.

        Raises:
            SqliteUnavailable: The disk for temporary files is full.
        """
        with translated("a temporary file"):
            done = self._connection.execute("INSERT OR IGNORE INTO met VALUES (?)", (name,))
        is_new = bool(done.rowcount == 1)
        self._count += is_new
        return is_new
