"""Where the catalogue's files lie, so that a new one can be made beside the one in use.

``state_dir/catalogue/current`` is a symbolic link to a directory ``g1``,
``g2`` …, which holds a file a month and ``cursor.db``. Reindexing fills the
next directory and moves the link. No path ever means two databases: one whose
write-ahead log was left behind under the same name would be read with it.
"""

import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from steward.archive.catalog.month import CatalogueUnavailable, damage_named
from steward.core.sqlite import Connection, open_database, transaction

_CURRENT = "current"
_GENERATION = re.compile(r"g(\d{1,9})")

_MIGRATIONS: Final = (
    """
    CREATE TABLE cursor(position INTEGER NOT NULL);
    INSERT INTO cursor VALUES(0);
    CREATE TABLE purged(
        cluster TEXT NOT NULL,
        key TEXT NOT NULL,
        event INTEGER NOT NULL,
        PRIMARY KEY(cluster, key)
    ) WITHOUT ROWID;
    """,
)

Key = tuple[str, str]
"""A script by its cluster and the key of its job.script event."""


class Progressed:
    """cursor.db of one generation: how far it has come, and what it was told to forget.

    Args:
        directory: The generation's.

    Raises:
        CatalogueUnavailable: The file is damaged.
    """

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, "cursor.db")
        with damage_named(self._path):
            self._connection: Connection = open_database(self._path, _MIGRATIONS)

    def position(self) -> int:
        """The last event that was put to use."""
        with damage_named(self._path):
            return int(self._connection.execute("SELECT position FROM cursor").fetchone()[0])

    def purged(self, keys: Sequence[Key]) -> set[Key]:
        """Which of these were purged, and are not to come back."""
        sql = "SELECT 1 FROM purged WHERE cluster = ? AND key = ?"
        with damage_named(self._path):
            return {key for key in keys if self._connection.execute(sql, key).fetchone()}

    def purged_since(self, position: int) -> list[tuple[str, str, int]]:
        """All that were purged by events after this one, with the event."""
        sql = "SELECT cluster, key, event FROM purged WHERE event > ?"
        with damage_named(self._path):
            return [tuple(row) for row in self._connection.execute(sql, (position,))]

    def advance(self, position: int, purged: Sequence[tuple[str, str, int]] = ()) -> None:
        """Note what is purged and how far we are, both or neither."""
        with damage_named(self._path), transaction(self._connection, self._path) as connection:
            connection.executemany("INSERT OR REPLACE INTO purged VALUES(?, ?, ?)", purged)
            connection.execute("UPDATE cursor SET position = max(position, ?)", (position,))

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()


class Generations:
    """The catalogue's directory.

    Args:
        directory: ``state_dir/catalogue``.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def current(self) -> str:
        """The directory in use; "" where there is none yet."""
        try:
            name = os.readlink(os.path.join(self.directory, _CURRENT))
        except FileNotFoundError:
            return ""
        return os.path.join(self.directory, name) if _GENERATION.fullmatch(name) else ""

    def ensure(self) -> str:
        """The directory in use, made where there is none yet.

        Raises:
            CatalogueUnavailable: It cannot be made now.
        """
        return self.current() or self.enter(self.make())

    def make(self) -> str:
        """A new directory, not in use yet.

        Raises:
            CatalogueUnavailable: It cannot be made now.
        """
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            path = os.path.join(self.directory, f"g{max(self._numbers(), default=0) + 1}")
            os.mkdir(path, 0o700)
        except OSError as error:
            raise _unavailable(error, self.directory) from error
        return path

    def enter(self, path: str) -> str:
        """Put a directory into use and remove all others; the caller holds the lock.

        Raises:
            CatalogueUnavailable: The link cannot be moved.
        """
        name = os.path.basename(path)
        fresh = os.path.join(self.directory, f"{_CURRENT}.new")
        try:
            if os.path.lexists(fresh):
                os.unlink(fresh)
            os.symlink(name, fresh)
            os.replace(fresh, os.path.join(self.directory, _CURRENT))
            _sync(self.directory)
        except OSError as error:
            raise _unavailable(error, self.directory) from error
        self.clear()
        return path

    def clear(self) -> None:
        """Remove directories that are not in use: an earlier one, or one left half made."""
        kept = os.path.basename(self.current())
        for number in self._numbers():
            if f"g{number}" != kept:
                import shutil  # half a megabyte that the daemon hardly ever needs

                shutil.rmtree(os.path.join(self.directory, f"g{number}"), ignore_errors=True)

    @contextmanager
    def lock(self, name: str = "lock", *, wait: bool = True) -> Iterator[None]:
        """Hold one of the catalogue's locks: ``lock`` to write, ``reindex`` to make it again.

        Args:
            name: Which.
            wait: Whether to wait for whoever holds it.

        Raises:
            CatalogueUnavailable: Somebody holds it, or it cannot be made now.
        """
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            path = os.path.join(self.directory, name)
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unavailable(error, self.directory) from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise CatalogueUnavailable(
                    f"another process holds {path}: wait until it has ended", path
                ) from error
            yield
        finally:
            os.close(fd)

    def _numbers(self) -> list[int]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        return [int(match[1]) for name in names if (match := _GENERATION.fullmatch(name))]


def _sync(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unavailable(error: OSError, path: str) -> CatalogueUnavailable:
    return CatalogueUnavailable(
        f"the catalogue in {path} cannot be used: {error.strerror}", error.filename or path
    )
