"""Gives an owner access to all that is kept of them, or takes it back, page by page.

An owner may have millions of files: what is still to be done is written down, so
that it is done in pieces between other work and goes on after a restart.
"""

import errno
import logging

from steward.archive.files.acl import Readers, let_enter
from steward.archive.files.layout import Layout
from steward.archive.files.records import Records, Row
from steward.archive.files.tree import InTheWay, Tree
from steward.core.sqlite import Connection

log = logging.getLogger(__name__)


def ask(connection: Connection, uid: int, user: str, *, shut: bool, moved: bool) -> None:
    """Write down, inside a transaction, that an owner's access changes.

    Args:
        connection: In a transaction.
        uid: The owner's.
        user: The owner's name at submit.
        shut: Take it back; else give it again.
        moved: In the tree that files are moved on to, not in the first.
    """
    connection.execute(
        "INSERT OR REPLACE INTO admitting VALUES (?, ?, ?, ?, -1, '', '')",
        (int(moved), uid, user, int(shut)),
    )


class Admission:
    """Does in one tree what was asked for by :func:`ask`.

    Where the layout has directories of users, these are opened or closed, and what
    is below follows; elsewhere every file is.

    Args:
        tree: The tree.
        records: The sink's database, for that tree.
        layout: The sink's layout.
    """

    def __init__(self, tree: Tree, records: Records, layout: Layout) -> None:
        self._tree = tree
        self._records = records
        self._layout = layout

    def waits(self) -> bool:
        """Whether something is left to do."""
        sql = "SELECT 1 FROM admitting WHERE moved = ? LIMIT 1"
        return bool(self._records.query(sql, int(self._records.moved)))

    def page(self, gids: tuple[int, ...], owner: tuple[int, str] | None = None) -> bool:
        """Do the next piece, of what is to be closed first.

        Args:
            gids: The groups that may read everything.
            owner: uid and name of the owner whose turn it is; None for any.

        Returns:
            Whether something is left to do.

        Raises:
            OSError: The tree cannot be changed.
        """
        found = self._records.query(
            "SELECT uid, user, shut, directory, key, cluster FROM admitting WHERE moved = ? "
            "AND (? IS NULL OR (uid = ? AND user = ?)) ORDER BY shut DESC, uid LIMIT 1",
            int(self._records.moved),
            *((None, None, None) if owner is None else (owner[0], *owner)),
        )
        if not found:
            return False
        uid, user, shut, *position = found[0]
        readers = Readers(None if shut else uid, gids)
        following: tuple[int, str, str] | None = None
        if self._tree.acls:
            one = self._directories if self._layout.user_depth else self._files
            following = one((uid, user), (position[0], position[1], position[2]), readers)
        where = (int(self._records.moved), uid, user)
        with self._records.writing() as connection:
            if following is None:
                sql = "DELETE FROM admitting WHERE moved = ? AND uid = ? AND user = ?"
                connection.execute(sql, where)
            else:
                sql = (
                    "UPDATE admitting SET directory = ?, key = ?, cluster = ? "
                    "WHERE moved = ? AND uid = ? AND user = ?"
                )
                connection.execute(sql, (*following, *where))
        return self.waits()

    def _directories(
        self, owner: tuple[int, str], after: tuple[int, str, str], readers: Readers
    ) -> tuple[int, str, str] | None:
        page_rows = self._records.page_rows
        found = self._records.query(
            "SELECT DISTINCT directory FROM script INDEXED BY script_owner "
            "WHERE uid = ? AND user = ? AND directory > ? ORDER BY directory LIMIT ?",
            *owner,
            after[0],
            page_rows,
        )
        depth = self._layout.user_depth
        paths = {
            "/".join(self._records.directory(number).split("/")[:depth]) for (number,) in found
        }
        for path in sorted(paths):
            try:
                let_enter(self._tree.directory(path), readers, others_pass=False)
            except FileNotFoundError:
                # Emptied by a purge since it was asked for, or all of it is in the other tree.
                continue
            except InTheWay as error:
                log.error("access to what uid %d has here is not changed: %s", owner[0], error)
        return (found[-1][0], "", "") if len(found) == page_rows else None

    def _files(
        self, owner: tuple[int, str], after: tuple[int, str, str], readers: Readers
    ) -> tuple[int, str, str] | None:
        page_rows = self._records.page_rows
        rows = self._records.select(
            "uid = ? AND user = ? AND (directory, key, cluster) > (?, ?, ?) "
            "ORDER BY directory, key, cluster LIMIT ?",
            *owner,
            *after,
            page_rows,
        )
        first, last = self._records.states
        for row in rows:
            if first <= row.state <= last:
                self._admit(row, readers)
        if len(rows) < page_rows:
            return None
        return rows[-1].directory, rows[-1].key, rows[-1].cluster

    def _admit(self, row: Row, readers: Readers) -> None:
        path = self._records.directory(row.directory)
        for name in (row.script_name, row.env_name):
            try:
                if name:
                    self._tree.read_access(self._tree.directory(path), name, readers)
            except FileNotFoundError:
                # Nobody reads what is gone; that it is gone, verify tells.
                continue
            except InTheWay as error:
                log.error("access to %s is not changed: %s", row.key, error)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                log.error("access to %s/%s is not changed: it is a symbolic link", path, name)
