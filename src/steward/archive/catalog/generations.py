"""Catalog generations: directories of the search index; a rebuild leaves the current one alone.

``state_dir/catalog/current`` is a symbolic link to a directory ``g1``, ``g2`` and so on, which
holds one file per month and ``cursor.db``. A rebuild fills the next directory and moves the link. A
path never names two databases in turn: SQLite would read a new one with the write-ahead log left by
the old.

:class:`CatalogGenerations` manages the directories and locks; :class:`CatalogCursor` is cursor.db.
"""

import fcntl
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from steward.archive.catalog.month import CatalogUnavailable, find_keys, translate_damage
from steward.core.sqlite import Database
from steward.core.storage import CURSOR, move_cursor, read_cursor

_CURRENT = "current"
_GENERATION = re.compile(r"g(\d{1,9})")

_MIGRATIONS: Final = (
    f"""
    {CURSOR.schema}
    CREATE TABLE purged(
        cluster TEXT NOT NULL,
        key TEXT NOT NULL,
        event INTEGER NOT NULL,
        PRIMARY KEY(cluster, key)
    ) WITHOUT ROWID;
    """,
)

CatalogKey = tuple[str, str]
"""Identity of a script: cluster and key of its job.script event."""


class CatalogCursor:
    """Cursor and purged scripts of one generation, in cursor.db.

    Args:
        directory: Directory of the generation.

    Raises:
        CatalogUnavailable: The file is damaged.
    """

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, "cursor.db")
        with translate_damage(self._path):
            self._database = Database(self._path, _MIGRATIONS)

    def load_position(self) -> int:
        """Return the position of the last applied event."""
        with translate_damage(self._path):
            return read_cursor(self._database)

    def find_purged(self, keys: Collection[CatalogKey]) -> set[CatalogKey]:
        """Return which of these scripts were purged and must not be indexed again."""
        with translate_damage(self._path):
            return find_keys(self._database.connection, "purged", keys)

    def list_purged_since(self, position: int) -> list[tuple[str, str, int]]:
        """Return all scripts purged by events after a position, with the event."""
        sql = "SELECT cluster, key, event FROM purged WHERE event > ?"
        with translate_damage(self._path):
            return self._database.fetch(sql, position)

    def advance(self, position: int, purged: Sequence[tuple[str, str, int]] = ()) -> None:
        """Store purged scripts and the cursor in one transaction."""
        with translate_damage(self._path), self._database.transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO purged VALUES(?, ?, ?)", purged)
            move_cursor(connection, position)

    def close(self) -> None:
        """Close the database."""
        self._database.close()


class CatalogGenerations:
    """Directory of the catalog's generations.

    Args:
        directory: ``state_dir/catalog``.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def get_current(self) -> str:
        """Return the current directory; "" if there is none yet."""
        try:
            name = os.readlink(os.path.join(self.directory, _CURRENT))
        except FileNotFoundError:
            return ""
        return os.path.join(self.directory, name) if _GENERATION.fullmatch(name) else ""

    def ensure_current(self) -> str:
        """Return the current directory; create the first one if needed.

        Raises:
            CatalogUnavailable: It cannot be created now.
        """
        return self.get_current() or self.make_current(self.create())

    def create(self) -> str:
        """Create a new directory that is not current yet.

        Raises:
            CatalogUnavailable: It cannot be created now.
        """
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            path = os.path.join(self.directory, f"g{max(self._list_numbers(), default=0) + 1}")
            os.mkdir(path, 0o700)
        except OSError as error:
            raise _make_catalog_unavailable(error, self.directory) from error
        return path

    def make_current(self, path: str) -> str:
        """Make a directory current and remove all others; the caller holds the lock.

        Raises:
            CatalogUnavailable: The link cannot be moved.
        """
        name = os.path.basename(path)
        new_link = os.path.join(self.directory, f"{_CURRENT}.new")
        try:
            if os.path.lexists(new_link):
                os.unlink(new_link)
            os.symlink(name, new_link)
            os.replace(new_link, os.path.join(self.directory, _CURRENT))
            _sync_directory(self.directory)
        except OSError as error:
            raise _make_catalog_unavailable(error, self.directory) from error
        self.remove_others()
        return path

    def remove_others(self) -> None:
        """Remove directories that are not current: older or incomplete ones."""
        current_name = os.path.basename(self.get_current())
        for number in self._list_numbers():
            if f"g{number}" != current_name:
                import shutil  # half a megabyte that the daemon hardly ever needs

                shutil.rmtree(os.path.join(self.directory, f"g{number}"), ignore_errors=True)

    @contextmanager
    def lock(self, name: str = "lock", *, wait: bool = True) -> Iterator[None]:
        """Hold a lock of the catalog: ``lock`` to write, ``reindex`` to rebuild.

        Args:
            name: Name of the lock.
            wait: Whether to wait until the lock is free.

        Raises:
            CatalogUnavailable: Another process holds it, or it cannot be created now.
        """
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            path = os.path.join(self.directory, name)
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _make_catalog_unavailable(error, self.directory) from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise CatalogUnavailable(
                    f"another process has locked {path}: wait until it ends", path
                ) from error
            yield
        finally:
            os.close(fd)

    def _list_numbers(self) -> list[int]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        return [int(match[1]) for name in names if (match := _GENERATION.fullmatch(name))]


def _sync_directory(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_catalog_unavailable(error: OSError, path: str) -> CatalogUnavailable:
    return CatalogUnavailable(
        f"cannot use the catalog in {path}: {error.strerror}", error.filename or path
    )
