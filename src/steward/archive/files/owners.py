"""Which directory is whose: a user's directory belongs to one (uid, name) pair for ever.

A name that another uid takes over gets a directory of its own. When a uid resolves to
another name than was kept at submit, its access is taken back until it is the same
again: the account is somebody else's by now. A uid that resolves to no name may
only mean that the name service is away: that must last, and must not concern most.
"""

import errno
import logging
import pwd
import time
from collections.abc import Callable, Iterable, Iterator

from steward.archive.files.index import Records, Row, insert_new
from steward.archive.files.layout import Layout, encode_user
from steward.archive.files.permissions import Readers, let_enter
from steward.archive.files.tree import InTheWay, Tree
from steward.core.sqlite import Connection


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


log = logging.getLogger(__name__)

# A name service that answers slowly must not hold up what else is to be done.
_ASK_AT_MOST_S = 2.0

Owner = tuple[str, int, str]
"""(scope, uid, name at submit); the name is "" for a uid that does not resolve."""

Change = tuple[int, str, bool]
"""(uid, name at submit, whether to shut): whose access must change now."""


def user_name(uid: int) -> str:
    """The name that a uid resolves to now, "" for none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return ""


class Owners:
    """The owners of a sink's directories.

    Args:
        records: The sink's database.
        resolve: What a uid's name is now.
        is_plain: Whether the tree's layout is another program's, see :func:`encode_user`.
    """

    def __init__(
        self,
        records: Records,
        resolve: Callable[[int], str] = user_name,
        *,
        is_plain: bool = False,
    ) -> None:
        self._is_plain = is_plain
        self._records = records
        self._resolve = resolve
        self._directories: dict[Owner, str] = {}
        self._new: dict[Owner, str] = {}
        self._shut: set[tuple[int, str]] = set()
        self._names: dict[int, tuple[str, ...]] = {}
        self._left: list[int] = []
        self._now: dict[int, str] = {}
        self._missed: frozenset[int] = frozenset()
        self._is_away = False
        self.reload()
        self._read_names()

    def reload(self) -> None:
        """Learn anew whose access was taken back: the sink decides, its mover follows."""
        found = self._records.query("SELECT uid, user FROM owner WHERE shut = 1")
        self._shut = {(int(uid), str(user)) for uid, user in found}

    def directory(self, owner: Owner, foreign: Callable[[str], bool]) -> str:
        """The name of an owner's directory; a new one is saved by :meth:`save`.

        Args:
            owner: Whose.
            foreign: Tells whether a directory of that name is there and is another uid's
                (this database may be younger than the tree).
        """
        found = self._directories.get(owner)
        if found is None:
            found = self._known(owner) or self._choose(owner, foreign)
            self._directories[owner] = found
        return found

    def _known(self, owner: Owner) -> str:
        sql = "SELECT directory FROM owner WHERE scope = ? AND uid = ? AND user = ?"
        found = self._records.query(sql, *owner)
        return str(found[0][0]) if found else ""

    def _choose(self, owner: Owner, foreign: Callable[[str], bool]) -> str:
        scope, uid, user = owner
        first = encode_user(user, is_plain=self._is_plain) if user else str(uid)
        for name in _candidates(uid, first):
            sql = "SELECT 1 FROM owner WHERE scope = ? AND directory = ?"
            taken = self._records.query(sql, scope, name) or any(
                (scope, name) == (other[0], directory) for other, directory in self._new.items()
            )
            if not taken and not foreign(name):
                self._new[owner] = name
                if user and name != first:
                    log.warning(
                        "user %r was another uid before: uid %d gets the directory %s",
                        user,
                        uid,
                        name,
                    )
                return name
        raise AssertionError("candidates never end")

    def reader(self, uid: int | None, user: str) -> int | None:
        """The uid to let in; None if unknown, unresolved, or somebody else's by now."""
        if uid is None or not user or (uid, user) in self._shut:
            return None
        return uid

    def _read_names(self) -> None:
        names: dict[int, tuple[str, ...]] = {}
        sql = "SELECT DISTINCT uid, user FROM owner WHERE user != '' ORDER BY uid"
        for uid, user in self._records.query(sql):
            names[uid] = (*names.get(uid, ()), user)
        self._names = names

    def _open(self, uid: int, names: Iterable[str]) -> list[str]:
        return [name for name in names if (uid, name) not in self._shut]

    def check(self) -> list[Change] | None:
        """Ask for the name of every known owner's uid.

        Returns:
            Whose access must change; None where not all were asked yet: call again.
        """
        if not self._left:
            self._read_names()
            self._left, self._now = list(self._names), {}
        until = time.monotonic() + _ASK_AT_MOST_S
        while self._left and time.monotonic() < until:
            uid = self._left.pop()
            self._now[uid] = self._resolve(uid)
        return None if self._left else self._compared()

    def _compared(self) -> list[Change]:
        changes: list[Change] = []
        for uid, now in self._now.items():
            changes += self._differing(uid, now, self._names.get(uid, ()))
        opened = {uid for uid in self._now if self._open(uid, self._names.get(uid, ()))}
        missing = frozenset(uid for uid in opened if not self._now[uid])
        is_away = len(missing) > 1 and 2 * len(missing) > len(opened)
        if is_away and not self._is_away:
            log.error(
                "%d of %d owners have no name any more: the name service seems to be away, "
                "nobody's files are closed; ask 'getent passwd'",
                len(missing),
                len(opened),
            )
        self._is_away = is_away
        if is_away:
            missing = frozenset()
        for uid in sorted(missing & self._missed):
            changes += [(uid, name, True) for name in self._open(uid, self._names[uid])]
        self._missed = missing
        return changes

    def _differing(self, uid: int, now: str, names: Iterable[str]) -> list[Change]:
        """Whose access must change as a uid has the name ``now``; nothing for no name."""
        return [
            (uid, name, name != now)
            for name in names
            if now and (name != now) != ((uid, name) in self._shut)
        ]

    def conflicting(self, identities: Iterable[tuple[int, str]]) -> list[Change]:
        """Whose access must change as uids are met under another name than is known.

        Args:
            identities: uid and name, as jobs have them.
        """
        met: dict[int, list[str]] = {}
        for uid, user in identities:
            names = met.setdefault(uid, list(self._names.get(uid, ())))
            if user and user not in names:
                names.append(user)
        changes: list[Change] = []
        for uid, names in met.items():
            if len(names) > 1 and len(self._open(uid, names)) > 1:
                changes += self._differing(uid, self._resolve(uid), names)
        return changes

    def mark(self, uid: int, user: str, *, shut: bool) -> None:
        """Remember that an owner's access is taken back or given again, and ask for it."""
        with self._records.writing() as connection:
            connection.execute(
                "UPDATE owner SET shut = ? WHERE uid = ? AND user = ?", (int(shut), uid, user)
            )
            ask(connection, uid, user, shut=shut, moved=False)
        if shut:
            self._shut.add((uid, user))
            log.warning(
                "uid %d is not %r any more: its archived files are closed until it is", uid, user
            )
        else:
            self._shut.discard((uid, user))
            log.info("uid %d is %r again: its archived files are open to it", uid, user)

    def save(self, connection: Connection) -> None:
        """Write new owners, inside a transaction."""
        insert_new(
            connection,
            "INSERT OR IGNORE INTO owner (scope, uid, user, directory, shut) "
            "VALUES (?, ?, ?, ?, ?)",
            [
                (*owner, directory, int(owner[1:] in self._shut))
                for owner, directory in self._new.items()
            ],
        )

    def saved(self) -> None:
        """The transaction was committed."""
        for _, uid, user in self._new:
            known = self._names.get(uid, ())
            if user and user not in known:
                self._names[uid] = (*known, user)
        self._new.clear()

    def forget_new(self) -> None:
        """The batch failed: what was never saved is chosen again."""
        for owner in self._new:
            self._directories.pop(owner, None)
        self._new.clear()


def _candidates(uid: int, first: str) -> Iterator[str]:
    yield first
    yield f"{first}.{uid}"
    number = 2
    while True:
        yield f"{first}.{uid}~{number}"
        number += 1
