"""Directory owners: which user each directory belongs to, and who may read it now.

:func:`queue_access_change` queues a change of access; :class:`AccessUpdater` applies it to the
tree, page by page.

:class:`DirectoryOwners` assigns directories and compares uids with the name service. A user's
directory belongs to one (uid, name) pair forever; if another uid takes the name, it gets a new
directory. If a uid resolves to another name than at submit, its access is revoked until the names
match again, because the account belongs to another person by now. A uid without a name may only
mean that the name service is unavailable: access is revoked only if the name is missing in two
checks in a row, and never for more than half of the owners at once.
"""

import errno
import logging
import pwd
import time
from collections.abc import Callable, Iterable, Iterator

from steward.archive.files.index import FileRow, FilesRecords, insert_unique
from steward.archive.files.layout import ArchiveLayout, encode_user
from steward.archive.files.permissions import FileReaders, grant_directory_access
from steward.archive.files.tree import ArchiveTree, PathBlocked
from steward.core.sqlite import Connection


def queue_access_change(
    connection: Connection, uid: int, user: str, *, revoke: bool, moved: bool
) -> None:
    """Queue a change of an owner's access, inside a transaction.

    Args:
        connection: Connection in a transaction.
        uid: Uid of the owner.
        user: Name of the owner at submit.
        revoke: True to revoke access, False to grant it again.
        moved: True for the second tree (``move_to``), False for the first.
    """
    connection.execute(
        "INSERT OR REPLACE INTO admitting VALUES (?, ?, ?, ?, -1, '', '')",
        (int(moved), uid, user, int(revoke)),
    )


class AccessUpdater:
    """Worker that applies queued changes of access to one tree.

    If the layout has directories of users, their permissions change and apply to all below;
    otherwise the permissions of every file change.

    Args:
        tree: The tree.
        records: Database of the sink, for that tree.
        layout: Layout of the sink.
    """

    def __init__(self, tree: ArchiveTree, records: FilesRecords, layout: ArchiveLayout) -> None:
        self._tree = tree
        self._records = records
        self._layout = layout

    def has_queued_changes(self) -> bool:
        """Return whether changes are queued."""
        sql = "SELECT 1 FROM admitting WHERE moved = ? LIMIT 1"
        return bool(self._records.query(sql, int(self._records.moved)))

    def apply_page(self, gids: tuple[int, ...], owner: tuple[int, str] | None = None) -> bool:
        """Apply the next part of the queue; revocations come first.

        Args:
            gids: The groups that may read everything.
            owner: Uid and name of the owner to process; None for any.

        Returns:
            Whether changes are left in the queue.

        Raises:
            OSError: The permissions cannot be changed.
        """
        rows = self._records.query(
            "SELECT uid, user, shut, directory, key, cluster FROM admitting WHERE moved = ? "
            "AND (? IS NULL OR (uid = ? AND user = ?)) ORDER BY shut DESC, uid LIMIT 1",
            int(self._records.moved),
            *((None, None, None) if owner is None else (owner[0], *owner)),
        )
        if not rows:
            return False
        uid, user, is_revoked, *position = rows[0]
        readers = FileReaders(None if is_revoked else uid, gids)
        next_position: tuple[int, str, str] | None = None
        if self._tree.has_acls:
            update_page = (
                self._update_directories if self._layout.user_depth else self._update_files
            )
            next_position = update_page(
                (uid, user), (position[0], position[1], position[2]), readers
            )
        owner_key = (int(self._records.moved), uid, user)
        with self._records.writing() as connection:
            if next_position is None:
                sql = "DELETE FROM admitting WHERE moved = ? AND uid = ? AND user = ?"
                connection.execute(sql, owner_key)
            else:
                sql = (
                    "UPDATE admitting SET directory = ?, key = ?, cluster = ? "
                    "WHERE moved = ? AND uid = ? AND user = ?"
                )
                connection.execute(sql, (*next_position, *owner_key))
        return self.has_queued_changes()

    def _update_directories(
        self, owner: tuple[int, str], position: tuple[int, str, str], readers: FileReaders
    ) -> tuple[int, str, str] | None:
        """Change the user directories of one page of scripts; return the next position."""
        page_rows = self._records.page_rows
        rows = self._records.query(
            "SELECT DISTINCT directory FROM script INDEXED BY script_owner "
            "WHERE uid = ? AND user = ? AND directory > ? ORDER BY directory LIMIT ?",
            *owner,
            position[0],
            page_rows,
        )
        depth = self._layout.user_depth
        paths = {
            "/".join(self._records.get_directory_path(number).split("/")[:depth])
            for (number,) in rows
        }
        for path in sorted(paths):
            try:
                grant_directory_access(
                    self._tree.get_directory_fd(path), readers, others_pass=False
                )
            except FileNotFoundError:
                # A purge emptied it since, or all of it is in the other tree.
                continue
            except PathBlocked as error:
                log.error("cannot change access to the files of uid %d: %s", owner[0], error)
        return (rows[-1][0], "", "") if len(rows) == page_rows else None

    def _update_files(
        self, owner: tuple[int, str], position: tuple[int, str, str], readers: FileReaders
    ) -> tuple[int, str, str] | None:
        """Change the files of one page of scripts; return the next position."""
        page_rows = self._records.page_rows
        rows = self._records.select_rows(
            "uid = ? AND user = ? AND (directory, key, cluster) > (?, ?, ?) "
            "ORDER BY directory, key, cluster LIMIT ?",
            *owner,
            *position,
            page_rows,
        )
        first, last = self._records.states
        for row in rows:
            if first <= row.state <= last:
                self._set_file_access(row, readers)
        if len(rows) < page_rows:
            return None
        return rows[-1].directory, rows[-1].key, rows[-1].cluster

    def _set_file_access(self, row: FileRow, readers: FileReaders) -> None:
        path = self._records.get_directory_path(row.directory)
        for name in (row.script_name, row.env_name):
            try:
                if name:
                    self._tree.grant_access(self._tree.get_directory_fd(path), name, readers)
            except FileNotFoundError:
                # A missing file needs no permissions; verify reports it.
                continue
            except PathBlocked as error:
                log.error("cannot change access to %s: %s", row.key, error)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                log.error("cannot change access to %s/%s: it is a symbolic link", path, name)


log = logging.getLogger(__name__)

# A slow name service must not delay other work.
_MAX_RESOLVE_S = 2.0

DirectoryOwner = tuple[str, int, str]
"""(scope, uid, name at submit); the name is "" for a uid that does not resolve."""

AccessChange = tuple[int, str, bool]
"""Change of access: (uid, name at submit, True to revoke)."""


def resolve_user_name(uid: int) -> str:
    """Return the present name of a uid; "" for none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return ""


class DirectoryOwners:
    """Owners of a sink's directories, and whose access is revoked.

    Args:
        records: Database of the sink.
        resolve: Returns the present name of a uid.
        is_plain: Whether the layout is that of another program, see :func:`encode_user`.
    """

    def __init__(
        self,
        records: FilesRecords,
        resolve: Callable[[int], str] = resolve_user_name,
        *,
        is_plain: bool = False,
    ) -> None:
        self._is_plain = is_plain
        self._records = records
        self._resolve = resolve
        self._directories: dict[DirectoryOwner, str] = {}
        self._new_owners: dict[DirectoryOwner, str] = {}
        self._revoked: set[tuple[int, str]] = set()
        self._names_by_uid: dict[int, tuple[str, ...]] = {}
        self._unresolved: list[int] = []
        self._resolved: dict[int, str] = {}
        self._missing_uids: frozenset[int] = frozenset()
        self._is_name_service_down = False
        self.reload()
        self._read_names()

    def reload(self) -> None:
        """Read again whose access is revoked: the sink decides, and its mover follows."""
        rows = self._records.query("SELECT uid, user FROM owner WHERE shut = 1")
        self._revoked = {(int(uid), str(user)) for uid, user in rows}

    def get_directory(self, owner: DirectoryOwner, is_foreign: Callable[[str], bool]) -> str:
        """Return the name of an owner's directory; :meth:`save` stores a new one.

        Args:
            owner: The owner.
            is_foreign: Returns whether a directory of that name exists and belongs to another uid
                (this database may be younger than the tree).
        """
        directory = self._directories.get(owner)
        if directory is None:
            directory = self._find_saved(owner) or self._choose_name(owner, is_foreign)
            self._directories[owner] = directory
        return directory

    def _find_saved(self, owner: DirectoryOwner) -> str:
        sql = "SELECT directory FROM owner WHERE scope = ? AND uid = ? AND user = ?"
        rows = self._records.query(sql, *owner)
        return str(rows[0][0]) if rows else ""

    def _choose_name(self, owner: DirectoryOwner, is_foreign: Callable[[str], bool]) -> str:
        """Choose a free directory name for a new owner."""
        scope, uid, user = owner
        base_name = encode_user(user, is_plain=self._is_plain) if user else str(uid)
        for name in _generate_directory_names(uid, base_name):
            sql = "SELECT 1 FROM owner WHERE scope = ? AND directory = ?"
            is_taken = self._records.query(sql, scope, name) or any(
                (scope, name) == (other[0], directory)
                for other, directory in self._new_owners.items()
            )
            if not is_taken and not is_foreign(name):
                self._new_owners[owner] = name
                if user and name != base_name:
                    log.warning(
                        "user %r had another uid before: files of uid %d go to directory %s",
                        user,
                        uid,
                        name,
                    )
                return name
        raise AssertionError("candidates never end")

    def get_reader_uid(self, uid: int | None, user: str) -> int | None:
        """Return the uid to admit; None if it is unknown, unresolved or revoked."""
        if uid is None or not user or (uid, user) in self._revoked:
            return None
        return uid

    def _read_names(self) -> None:
        names: dict[int, tuple[str, ...]] = {}
        sql = "SELECT DISTINCT uid, user FROM owner WHERE user != '' ORDER BY uid"
        for uid, user in self._records.query(sql):
            names[uid] = (*names.get(uid, ()), user)
        self._names_by_uid = names

    def _list_admitted(self, uid: int, names: Iterable[str]) -> list[str]:
        """Return the names of a uid whose access is not revoked."""
        return [name for name in names if (uid, name) not in self._revoked]

    def check(self) -> list[AccessChange] | None:
        """Resolve the uid of every known owner, within a time limit per call.

        Returns:
            The changes of access; None if not all uids are resolved yet: call again.
        """
        if not self._unresolved:
            self._read_names()
            self._unresolved, self._resolved = list(self._names_by_uid), {}
        deadline_s = time.monotonic() + _MAX_RESOLVE_S
        while self._unresolved and time.monotonic() < deadline_s:
            uid = self._unresolved.pop()
            self._resolved[uid] = self._resolve(uid)
        return None if self._unresolved else self._compare_names()

    def _compare_names(self) -> list[AccessChange]:
        """Return the changes of access after all uids were resolved."""
        changes: list[AccessChange] = []
        for uid, current_name in self._resolved.items():
            changes += self._find_changes(uid, current_name, self._names_by_uid.get(uid, ()))
        admitted = {
            uid
            for uid in self._resolved
            if self._list_admitted(uid, self._names_by_uid.get(uid, ()))
        }
        missing = frozenset(uid for uid in admitted if not self._resolved[uid])
        is_service_down = len(missing) > 1 and 2 * len(missing) > len(admitted)
        if is_service_down and not self._is_name_service_down:
            log.error(
                "%d of %d owners have no user name: the name service may be unavailable, so "
                "permissions stay unchanged; check 'getent passwd'",
                len(missing),
                len(admitted),
            )
        self._is_name_service_down = is_service_down
        if is_service_down:
            missing = frozenset()
        for uid in sorted(missing & self._missing_uids):
            changes += [
                (uid, name, True) for name in self._list_admitted(uid, self._names_by_uid[uid])
            ]
        self._missing_uids = missing
        return changes

    def _find_changes(
        self, uid: int, current_name: str, names: Iterable[str]
    ) -> list[AccessChange]:
        """Return the changes of access if a uid is now named ``current_name``; none if nameless."""
        return [
            (uid, name, name != current_name)
            for name in names
            if current_name and (name != current_name) != ((uid, name) in self._revoked)
        ]

    def find_conflicts(self, identities: Iterable[tuple[int, str]]) -> list[AccessChange]:
        """Return the changes of access if jobs show a uid under a new name.

        Args:
            identities: Uid and name, from jobs.
        """
        names_by_uid: dict[int, list[str]] = {}
        for uid, user in identities:
            names = names_by_uid.setdefault(uid, list(self._names_by_uid.get(uid, ())))
            if user and user not in names:
                names.append(user)
        changes: list[AccessChange] = []
        for uid, names in names_by_uid.items():
            if len(names) > 1 and len(self._list_admitted(uid, names)) > 1:
                changes += self._find_changes(uid, self._resolve(uid), names)
        return changes

    def set_access(self, uid: int, user: str, *, revoke: bool) -> None:
        """Record that an owner's access is revoked or granted, and queue the change."""
        with self._records.writing() as connection:
            connection.execute(
                "UPDATE owner SET shut = ? WHERE uid = ? AND user = ?", (int(revoke), uid, user)
            )
            queue_access_change(connection, uid, user, revoke=revoke, moved=False)
        if revoke:
            self._revoked.add((uid, user))
            log.warning(
                "uid %d no longer belongs to user %r: Steward removed its access to archived "
                "files, until it belongs to that user again",
                uid,
                user,
            )
        else:
            self._revoked.discard((uid, user))
            log.info("uid %d is %r again: access to its archived files is restored", uid, user)

    def save(self, connection: Connection) -> None:
        """Insert new owners, inside a transaction."""
        insert_unique(
            connection,
            "INSERT OR IGNORE INTO owner (scope, uid, user, directory, shut) "
            "VALUES (?, ?, ?, ?, ?)",
            [
                (*owner, directory, int(owner[1:] in self._revoked))
                for owner, directory in self._new_owners.items()
            ],
        )

    def confirm_saved(self) -> None:
        """Accept new owners after the commit."""
        for _, uid, user in self._new_owners:
            names = self._names_by_uid.get(uid, ())
            if user and user not in names:
                self._names_by_uid[uid] = (*names, user)
        self._new_owners.clear()

    def discard_new(self) -> None:
        """Drop unsaved owners of a failed batch; their directories are chosen again."""
        for owner in self._new_owners:
            self._directories.pop(owner, None)
        self._new_owners.clear()


def _generate_directory_names(uid: int, base_name: str) -> Iterator[str]:
    """Yield directory names for a user: name, name.uid, name.uid~2 and so on."""
    yield base_name
    yield f"{base_name}.{uid}"
    number = 2
    while True:
        yield f"{base_name}.{uid}~{number}"
        number += 1
