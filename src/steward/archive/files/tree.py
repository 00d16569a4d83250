"""Archive directory tree: opens, creates and syncs directories without following links.

:class:`ByteSource` and :func:`copy_bytes` copy bytes into a tree.

:class:`ArchiveTree` works relative to open directories: it never resolves a path below the root as
a whole, but opens components one by one without following symbolic links. It caches open
directories, so that placing a file is a single link(2). The root has a marker file; if it is
missing, the file system is not mounted and nothing is written.
"""

import contextlib
import errno
import hashlib
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from steward.archive.errors import ArchiveError, ArchiveUnavailable
from steward.archive.files import permissions
from steward.archive.files.compression import (
    DamagedFile,
    compress_bytes,
    open_archived_file,
    read_blocks,
    read_plain,
)
from steward.archive.files.permissions import (
    FileReaders,
    grant_directory_access,
    grant_read_access,
    read_acl_readers,
)
from steward.core.files import UnsafePath, open_directory, rename_new, sync_filesystem
from steward.core.script_stores import MARKER
from steward.core.sqlite import Connection, open_scratch, translate_errors

if TYPE_CHECKING:
    from io import BufferedReader


LINK_ERRORS: Final = frozenset(
    {errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
)
"""Errors of link(2) on file systems where the file cannot have another link."""


class BytesGone(ArchiveError):
    """Error: the bytes to be placed are missing or have changed."""


class ByteSource(msgspec.Struct, frozen=True):
    """Present location of bytes.

    Attributes:
        fd: Open directory that contains the file.
        name: File name.
        sha: SHA-256 of the plain bytes.
        link: Whether to hard-link; otherwise to copy.
        compressed: Whether the placed file is compressed.
        fallback: Another source of the same bytes, if this one cannot be linked to.
    """

    fd: int
    name: str
    sha: bytes
    link: bool = True
    compressed: bool = False
    fallback: "ByteSource | None" = None


def make_temporary_name(source: ByteSource) -> str:
    """Return the name of a file while it is written: the same for every attempt."""
    return f".copy.{source.name}"


def remove_temporary(source: ByteSource, fd: int) -> None:
    """Remove the temporary file of an earlier attempt, if any."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(make_temporary_name(source), dir_fd=fd)


def may_be_incomplete(fd: int, name: str, source: ByteSource) -> bool:
    """Return whether a file exists that a crash may have kept from becoming durable."""
    try:
        temporary_status = os.stat(make_temporary_name(source), dir_fd=fd, follow_symlinks=False)
        file_status = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (temporary_status.st_dev, temporary_status.st_ino) == (
        file_status.st_dev,
        file_status.st_ino,
    )


def copy_bytes(source: ByteSource, fd: int, name: str, *, durable: bool = True) -> None:
    """Copy bytes to a new file that appears complete, durable and 0600, or not at all.

    Args:
        source: Source of the bytes.
        fd: The open directory.
        name: The new file's name.
        durable: False leaves the file not yet durable, with its temporary name as a mark: after a
            crash, a file with both names is not trusted.

    Raises:
        FileExistsError: There is a file of that name.
        BytesGone: The bytes have changed.
        OSError: They cannot be read or written.
    """
    temporary = make_temporary_name(source)
    # A temporary file left by a crash may be the second name of a file by now: never write to it.
    remove_temporary(source, fd)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open_archived_file(source.fd, source.name) as incoming:
        outgoing = os.open(temporary, flags, 0o600, dir_fd=fd)
        try:
            digest = _transfer_bytes(incoming, outgoing, source)
            # Without a manifest, the file's own time tells when the job was submitted.
            status = os.fstat(incoming.fileno())
            os.utime(outgoing, ns=(status.st_atime_ns, status.st_mtime_ns))
            if durable:
                os.fsync(outgoing)
        finally:
            os.close(outgoing)
    if digest != source.sha:
        os.unlink(temporary, dir_fd=fd)
        raise BytesGone(
            f"the content of {source.name} has changed: run 'steward archive verify'", source
        )
    try:
        has_both_names = publish_file(fd, temporary, name, durable=durable)
    except BaseException:
        remove_temporary(source, fd)
        raise
    if durable and has_both_names:
        os.unlink(temporary, dir_fd=fd)


def publish_file(fd: int, temporary: str, name: str, *, durable: bool = True) -> bool:
    """Give a file its final name, never replacing another file.

    Args:
        fd: The open directory.
        temporary: Its present name.
        name: Its final name.
        durable: Whether it is durable already. If links are impossible, it is made durable.

    Returns:
        Whether it has both names afterwards.

    Raises:
        FileExistsError: There is a file of that name.
        OSError: It cannot be linked or renamed.
    """
    try:
        os.link(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
    except OSError as error:
        if error.errno not in LINK_ERRORS:
            raise
        if not durable:
            # Without a second name nothing would mark it as not durable.
            _sync_file(fd, temporary)
        rename_new(fd, temporary, name)
        return False
    return True


def _sync_file(fd: int, name: str) -> None:
    file_fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        os.fsync(file_fd)
    finally:
        os.close(file_fd)


def _transfer_bytes(incoming: "BufferedReader", outgoing: int, source: ByteSource) -> bytes:
    """Copy or compress the plain bytes; return their SHA-256."""
    sha = hashlib.sha256()
    try:
        if source.compressed:
            # In one piece, as capture read it: a frame that records its size needs no window.
            data = read_plain(incoming, source.name)
            sha.update(data)
            _write_all_bytes(outgoing, compress_bytes(data))
        else:
            for block in read_blocks(incoming, source.name):
                sha.update(block)
                _write_all_bytes(outgoing, block)
    except DamagedFile as error:
        raise BytesGone(f"{error}: run 'steward archive verify'", source) from error
    return sha.digest()


def _write_all_bytes(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_OPEN_DIRECTORIES = 128
REOPEN_S = 10.0
"""Time after which a directory is opened anew, in seconds."""
_MAX_SINGLE_SYNCS = 8
MAX_NAMES_IN_MEMORY = 10_000

# These errors concern one path, not the archive: retrying the whole batch later would not help.
_PATH_ERRORS = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EILSEQ})


class PathBlocked(ArchiveError):
    """Error: a foreign entry is in the place of a directory or file; ``offender`` is its path."""


class DirectoryAccess(msgspec.Struct, frozen=True, kw_only=True):
    """Permissions of directories created on the way to a file.

    Attributes:
        uid: Uid of the owner; None for no one.
        gids: Groups that may read everything.
        user_depth: Depth of the first directory of the owner; 0 for none.
        others_pass: Whether everyone may pass through the directories above the owner's.
    """

    uid: int | None = None
    gids: tuple[int, ...] = ()
    user_depth: int = 0
    others_pass: bool = True

    def get_readers(self, depth: int) -> tuple[FileReaders, bool]:
        """Return readers of the directory at ``depth``, and whether everyone may pass through."""
        if self.user_depth and depth >= self.user_depth:
            return FileReaders(self.uid, self.gids), False
        return FileReaders(None, self.gids), self.others_pass


class _OpenDirectory(msgspec.Struct):
    """Open directory.

    Attributes:
        fd: Its descriptor.
        version: Device, inode and mode.
        access: Permissions that were checked last; None if none were.
        batch: Number of the last batch that found it at its path.
        valid_until: Time at which it must be opened anew, monotonic.
    """

    fd: int
    version: tuple[int, ...]
    access: DirectoryAccess | None
    batch: int
    valid_until: float


def _get_file_id(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class SortedNames:
    """File names sorted by their bytes; a temporary database holds those of a large directory."""

    def __init__(self) -> None:
        self._names: list[bytes] = []
        self._scratch: Connection | None = None

    def add(self, name: str) -> None:
        """Add a name; a repeated one counts once.

        Raises:
            SqliteUnavailable: There is no place for temporary files.
        """
        self._names.append(os.fsencode(name))
        if len(self._names) == MAX_NAMES_IN_MEMORY:
            self._spill()

    def _spill(self) -> Connection:
        if self._scratch is None:
            self._scratch = open_scratch(
                "CREATE TABLE entry (name BLOB PRIMARY KEY) WITHOUT ROWID;"
            )
        self._names.sort()
        with translate_errors("a temporary file"):
            sql = "INSERT OR IGNORE INTO entry VALUES (?)"
            self._scratch.executemany(sql, zip(self._names, strict=True))
        self._names.clear()
        return self._scratch

    def sort(self) -> Iterator[bytes]:
        """Yield the names in order."""
        if self._scratch is None:
            yield from sorted(set(self._names))
            return
        with translate_errors("a temporary file"):
            for (name,) in self._spill().execute("SELECT name FROM entry ORDER BY name"):
                yield name

    def close(self) -> None:
        """Remove the temporary database."""
        if self._scratch is not None:
            self._scratch.close()


class ArchiveTree:
    """Directory tree of archived files, with a marker at its root.

    Args:
        root: Absolute path of its root directory.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.has_acls = False
        self._fd = -1
        self._root_id = (0, 0)
        self._marker: tuple[tuple[int, ...], str] = ((), "")
        self._directories: OrderedDict[str, _OpenDirectory] = OrderedDict()
        self._batch = 0
        self._changed_directories: set[str] = set()

    @property
    def fd(self) -> int:
        """Return the open root directory; -1 if it is not open."""
        return self._fd

    def open(self, marker: str) -> str:
        """Open the root, or check that it is still the directory that was opened.

        Args:
            marker: Required id in the marker; "" if unknown: the root is then created, if its
                parent exists, and marked.

        Returns:
            The marker's id.

        Raises:
            ArchiveUnavailable: The marker is missing or belongs to another archive.
            OSError: The root cannot be used.
        """
        if self._fd >= 0 and not self._is_same_root():
            self.close()
        # A directory may have been renamed or replaced since the last batch.
        self._batch += 1
        if self._fd < 0:
            if not marker:
                self._make_root()
            try:
                self._fd = self._open_root()
            except FileNotFoundError:
                raise self._make_marker_error() from None
            self._root_id = _get_file_id(os.fstat(self._fd))
            self.has_acls = permissions.supports_acls(self._fd)
        marker_id = self._read_marker()
        if not marker_id and not marker:
            marker_id = self._write_marker()
        if not marker_id:
            self.close()
            raise self._make_marker_error()
        if marker and marker_id != marker:
            self.close()
            raise ArchiveUnavailable(
                f"{self.root} is not the archive of this sink (marker {marker_id}, not {marker}): "
                "mount the right file system, or give this sink another name",
                self.root,
            )
        return marker_id

    def open_for_reading(self) -> None:
        """Open the root without checking its marker.

        Raises:
            OSError: It cannot be read.
        """
        self.close()
        self._fd = os.open(self.root, _DIRECTORY_FLAGS & ~os.O_NOFOLLOW)

    def _open_root(self) -> int:
        """Open the root for writing; as root without following links.

        Raises:
            UnsafePath: A link is on the path, or everyone may replace entries in the directory.
        """
        fd = open_directory(self.root, checks=False)
        mode = os.fstat(fd).st_mode
        if os.geteuid() == 0 and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            os.close(fd)
            raise UnsafePath("it is writable by everybody: run 'chmod o-w' on it", self.root)
        return fd

    def _make_marker_error(self) -> ArchiveUnavailable:
        """Make the error for a missing marker."""
        return ArchiveUnavailable(
            f"archive {self.root} has no {MARKER}: is its file system mounted?", self.root
        )

    def _is_same_root(self) -> bool:
        """Return whether the root's path still names the open directory."""
        try:
            return _get_file_id(os.stat(self.root)) == self._root_id
        except FileNotFoundError:
            return False

    def _make_root(self) -> None:
        """Create the root, if missing; others may pass through it only if ACLs are supported."""
        try:
            os.mkdir(self.root, 0o700)
        except FileExistsError:
            return
        fd = os.open(self.root, _DIRECTORY_FLAGS)
        try:
            if permissions.supports_acls(fd):
                os.fchmod(fd, 0o711)
        finally:
            os.close(fd)

    def _read_marker(self) -> str:
        """Return the id in the marker file; "" if there is none."""
        try:
            status = os.stat(MARKER, dir_fd=self._fd, follow_symlinks=False)
            version = (*_get_file_id(status), status.st_mtime_ns, status.st_ctime_ns)
            if version == self._marker[0]:
                return self._marker[1]
            fd = os.open(MARKER, _READ_FLAGS, dir_fd=self._fd)
        except FileNotFoundError:
            return ""
        try:
            identifier = os.read(fd, 200).decode("ascii", "replace").strip()
        finally:
            os.close(fd)
        self._marker = (version, identifier)
        return identifier

    def _write_marker(self) -> str:
        """Create the marker file with a random id; return the id."""
        identifier = os.urandom(16).hex()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        temporary = f"{MARKER}.{os.getpid()}"
        fd = os.open(temporary, flags, 0o600, dir_fd=self._fd)
        try:
            os.write(fd, identifier.encode() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            has_both_names = publish_file(self._fd, temporary, MARKER)
        except FileExistsError:
            # Another process was faster: its id is valid.
            identifier = self._read_marker()
            has_both_names = True
        if has_both_names:
            os.unlink(temporary, dir_fd=self._fd)
        os.fsync(self._fd)
        return identifier

    def get_directory_fd(self, path: str, access: DirectoryAccess | None = None) -> int:
        """Return the open directory ``path`` below the root; "" is the root.

        Args:
            path: Safe components, joined by "/".
            access: Permissions of missing directories, which are created; None to create none.

        Raises:
            FileNotFoundError: It does not exist, and ``access`` is None.
            PathBlocked: Another kind of entry is in its place.
            OSError: It cannot be used.
        """
        if not path:
            return self._fd
        directory = self._directories.get(path)
        if directory is not None:
            # Only in the first use of a batch, since callers keep descriptors until its end.
            if directory.batch == self._batch or self._confirm(path, directory):
                self._directories.move_to_end(path)
                if access is not None and access is not directory.access:
                    self._update_access(path, directory, access)
                return directory.fd
            self._forget(path)
        parent, _, name = path.rpartition("/")
        parent_fd = self.get_directory_fd(parent, access)
        try:
            directory = self._open_child(parent, parent_fd, path, name, access)
        except OSError as error:
            if error.errno in _PATH_ERRORS:
                raise PathBlocked(
                    f"{self.root}/{path} is not a directory ({error.strerror}): move it away",
                    path,
                ) from error
            raise
        self._directories[path] = directory
        if parent in self._directories:
            # Closed first: files go to the directories that have none below them.
            self._directories.move_to_end(parent, last=False)
        if len(self._directories) > _OPEN_DIRECTORIES:
            self._close_oldest(path)
        return directory.fd

    def _close_oldest(self, path: str) -> None:
        """Close a directory that does not lead to ``path``, of an earlier batch if there is one.

        Callers hold descriptors of this batch, such as that of a file to link to ``path``.
        """
        others = [name for name in self._directories if not f"{path}/".startswith(f"{name}/")]
        earlier = (name for name in others if self._directories[name].batch != self._batch)
        self._forget(next(earlier, others[0]))

    def _confirm(self, path: str, directory: "_OpenDirectory") -> bool:
        """Return whether a directory that an earlier batch opened is still the one at its path.

        After some seconds it is opened anew, which also checks its permissions.
        """
        if time.monotonic() >= directory.valid_until:
            return False
        try:
            status = os.stat(path, dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return False
        if (*_get_file_id(status), status.st_mode) != directory.version:
            return False
        directory.batch = self._batch
        return True

    def _update_access(
        self, path: str, directory: "_OpenDirectory", access: DirectoryAccess
    ) -> None:
        """Set the permissions of an open directory if they are not those that it was opened for."""
        depth = path.count("/") + 1
        granted = directory.access
        if granted is None or granted.get_readers(depth) != access.get_readers(depth):
            self._set_access(directory.fd, path, access, created=False)
            status = os.fstat(directory.fd)
            directory.version = (*_get_file_id(status), status.st_mode)
        directory.access = access

    def _forget(self, path: str) -> None:
        """Close a directory that is open."""
        os.close(self._directories.pop(path).fd)

    def _open_child(
        self, parent: str, parent_fd: int, path: str, name: str, access: DirectoryAccess | None
    ) -> "_OpenDirectory":
        """Open a directory in its parent; create it if ``access`` is given."""
        created = False
        try:
            fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent_fd)
        except FileNotFoundError:
            if access is None:
                raise
            os.mkdir(name, 0o700, dir_fd=parent_fd)
            self._changed_directories.add(parent)
            created = True
            fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent_fd)
        try:
            if access is not None:
                self._set_access(fd, path, access, created=created)
            status = os.fstat(fd)
        except BaseException:
            os.close(fd)
            raise
        return _OpenDirectory(
            fd=fd,
            version=(*_get_file_id(status), status.st_mode),
            access=access,
            batch=self._batch,
            valid_until=time.monotonic() + REOPEN_S,
        )

    def _set_access(self, fd: int, path: str, access: DirectoryAccess, *, created: bool) -> None:
        """Set the permissions of a directory if it is new or they differ."""
        if not self.has_acls:
            return
        readers, others_pass = access.get_readers(path.count("/") + 1)
        # A crash may have come between its creation and its permissions.
        passable = bool(os.fstat(fd).st_mode & stat.S_IXOTH)
        if created or passable != others_pass or read_acl_readers(fd) != readers:
            grant_directory_access(fd, readers, others_pass=others_pass)

    def record_change(self, path: str) -> None:
        """Record that the directory ``path`` changed and must be synced."""
        self._changed_directories.add(path)

    def sync(self) -> None:
        """Make changed directories durable: a few by fsync(2) each, many by one syncfs(2).

        Raises:
            OSError: The file system reports a failed write.
        """
        if len(self._changed_directories) > _MAX_SINGLE_SYNCS:
            sync_filesystem(self._fd)
        else:
            for path in self._changed_directories:
                try:
                    os.fsync(self.get_directory_fd(path))
                except FileNotFoundError:
                    # Removed since, when its last file was purged: its parent was recorded, too.
                    continue
        self._changed_directories.clear()

    def grant_access(self, directory_fd: int, name: str, readers: FileReaders) -> None:
        """Let ``readers`` read a file.

        Raises:
            OSError: The file is missing or cannot be changed.
        """
        if not self.has_acls:
            return
        fd = os.open(name, _READ_FLAGS, dir_fd=directory_fd)
        try:
            grant_read_access(fd, readers)
        finally:
            os.close(fd)

    def read_owner_uid(self, path: str) -> int | None:
        """Return the uid that the ACL of directory ``path`` admits; None for none or no directory.

        Raises:
            OSError: Its ACL cannot be read.
        """
        try:
            return read_acl_readers(self.get_directory_fd(path)).uid
        except FileNotFoundError:
            return None

    def unlink(self, path: str, name: str) -> None:
        """Remove a file; a missing one is ignored.

        Raises:
            OSError: It cannot be removed.
        """
        try:
            os.unlink(name, dir_fd=self.get_directory_fd(path))
        except FileNotFoundError:
            return
        self._changed_directories.add(path)

    def prune(self, path: str) -> None:
        """Remove the directory ``path`` and its parents while they are empty.

        Raises:
            OSError: They cannot be removed, for a reason other than their content.
        """
        while path:
            parent, _, name = path.rpartition("/")
            try:
                os.rmdir(name, dir_fd=self.get_directory_fd(parent))
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                    return
                raise
            if path in self._directories:
                self._forget(path)
            self._changed_directories.discard(path)
            self._changed_directories.add(parent)
            path = parent

    def iterate_files(self, path: str = "") -> Iterator[tuple[str, Iterator[str]]]:
        """Yield every directory below ``path`` with the names of its files, sorted by their bytes.

        Steward's own directories at the root (".incoming") are skipped. Memory does not grow with
        the number of files in a directory.

        Raises:
            OSError: A directory cannot be listed.
            SqliteUnavailable: There is no place for temporary files.
        """
        pending = [path]
        while pending:
            current = pending.pop()
            directories = []
            try:
                fd = self.get_directory_fd(current)
            except FileNotFoundError:
                continue
            with contextlib.closing(SortedNames()) as names, os.scandir(fd) as entries:
                for entry in entries:
                    if not current and entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(f"{current}/{entry.name}" if current else entry.name)
                    else:
                        names.add(entry.name)
                yield current, map(os.fsdecode, names.sort())
            pending.extend(sorted(directories, reverse=True))

    def _close_directories(self) -> None:
        while self._directories:
            self._forget(next(iter(self._directories)))

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close every directory; :meth:`open` starts again."""
        self._close_directories()
        self._changed_directories.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
