"""Databases as they all were within a few milliseconds, copied at leisure afterwards.

Each is opened and a read transaction begun, one after the other; from then on
SQLite shows it as it was, whoever writes. What is copied is proved to be sound.
"""

import os
from collections.abc import Iterable
from typing import Self

from pysqlite3 import dbapi2

from steward.admin.backup.manifest import BackupError
from steward.core.sqlite import Connection, open_reader, translated


class Looks:
    """Databases that are being looked at; to be closed in the end.

    Args:
        root: The state directory.
        paths: The databases below it, in the order in which they are to be looked at.

    Raises:
        SqliteUnavailable, SqliteError: One of them cannot be read.
    """

    def __init__(self, root: str, paths: Iterable[str]) -> None:
        self._open: dict[str, Connection] = {}
        try:
            # Opening takes longest: what is seen begins with the transactions.
            for path in paths:
                self._open[path] = open_reader(os.path.join(root, path))
            for path, connection in self._open.items():
                with translated(path):
                    connection.execute("BEGIN")
                    connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def copy(self, path: str, to: str) -> None:
        """Write one of them down as it was, and look at it no more.

        Args:
            path: Which.
            to: The file, which is not there yet.

        Raises:
            BackupError: It is damaged.
            SqliteUnavailable: It cannot be read or written now.
        """
        connection = self._open.pop(path)
        os.close(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        target: Connection = dbapi2.connect(to, isolation_level=None)
        try:
            with translated(to):
                connection.backup(target)
                # One file, with no log beside it.
                target.execute("PRAGMA journal_mode=DELETE")
                found = target.execute("PRAGMA quick_check(1)").fetchone()[0]
        finally:
            target.close()
            connection.close()
        if found != "ok":
            raise BackupError(
                f"{path} is damaged, and a copy of it would be of no use: {found}", path
            )

    def close(self) -> None:
        """Look at none of them any more."""
        for connection in self._open.values():
            connection.close()
        self._open.clear()
