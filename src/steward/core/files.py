"""Safe file writes as root, status files, and checks for network file systems.

Three groups of functions:

* ``find_network_type`` tells whether a path is on a network file system: capture and SQLite must
  stay off these, since a stall of the server would stall them. ``sync_filesystem``,
  ``rename_new`` and ``can_access`` wrap syncfs(2), renameat2(2) and an access check as another
  user.
* ``resolve_path``, ``open_directory``, ``replace_file`` and ``remove_unfinished`` are for paths
  where others may have planted a link or file. Root opens a path one directory at a time and
  follows no symbolic link. The directory it writes in must not be writable by others, or must be
  sticky and root's, as /tmp. A file is written under a random unused name and then renamed: a
  file that had its name is replaced, never written to. Without root, a planted link leads no
  further than the caller's own rights, so the directory is opened plainly.
* ``write_status`` and ``read_status`` handle status files: small JSON files that one process
  writes atomically for others. They are not synced, because none is needed after a power loss.
"""

import contextlib
import errno
import fcntl
import io
import os
import re
import select
import stat
import threading
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import IO, Any, Final, Literal, TypeVar

import msgspec

from steward.core.errors import Unavailable

_NETWORK_TYPES = {
    "9p": "9P",
    "afs": "AFS",
    "autofs": "autofs",
    "beegfs": "BeeGFS",
    "ceph": "Ceph",
    "cifs": "CIFS",
    "coda": "Coda",
    "fuse": "FUSE",
    "gfs2": "GFS2",
    "glusterfs": "GlusterFS",
    "gpfs": "GPFS",
    "lustre": "Lustre",
    "ncpfs": "NCP",
    "nfs": "NFS",
    "nfs4": "NFS",
    "ocfs2": "OCFS2",
    "orangefs": "OrangeFS",
    "panfs": "PanFS",
    "pvfs2": "OrangeFS",
    "smb3": "SMB",
    "smbfs": "SMB",
    "wekafs": "WekaFS",
}
"""Network file systems by the kernel's type, with their usual names.

Autofs counts as a network file system: the type it mounts is unknown before the first access.
"""
_MOUNTS = "/proc/self/mountinfo"
"""The kernel's list of mounts of this process."""
_ESCAPE = re.compile(rb"\\([0-7]{3})")
"""Octal escapes in mountinfo: blanks, tabs, newlines and backslashes of a mount point."""
_MOST_LINKS = 40
"""Most symbolic links to follow in a path, as in the kernel."""
_ASKING_S = 10.0
"""Longest run of the access check as another user, in seconds."""


@lru_cache(maxsize=1)
def _load_libc() -> Any:
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def _get_libc_errno() -> int:
    import ctypes

    return ctypes.get_errno()


class _MountTable:
    """File system types by mount point of this process, for all its threads.

    The kernel takes 0.1 ms to write the list; poll(2) says within 2 µs that it has not changed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: io.FileIO | None = None
        self._poller = select.poll()
        self._types: dict[str, str] = {}

    def forget(self) -> None:
        """Forget the list in a forked child, which would share descriptor and lock."""
        self._close()
        self._lock = threading.Lock()

    def read_types(self) -> dict[str, str]:
        """Return file system types by mount point, read again only after a change.

        Raises:
            OSError: The kernel's list of mounts cannot be read.
        """
        with self._lock:
            if self._file is None or self._poller.poll(0):
                self._close()
                # First open, then read: poll(2) reports a change between the two.
                mounts = io.FileIO(_MOUNTS)
                self._poller.register(mounts, select.POLLPRI)
                self._types = _parse_mounts(mounts.readall())
                self._file = mounts
            return self._types

    def _close(self) -> None:
        if self._file is not None:
            self._poller.unregister(self._file)
            self._file.close()
            self._file = None


_mount_table = _MountTable()
os.register_at_fork(after_in_child=_mount_table.forget)


def find_network_type(path: str, *, mounts: str = "") -> str:
    """Return the name of the network file system that ``path`` is on, "" for a local one.

    A dead file server cannot block this function: it reads types from the kernel's list of
    mounts (``/proc/self/mountinfo``, see proc_pid_mountinfo(5)) and follows symbolic links only
    while they lie on local file systems. It does not detect a local file system whose disk is
    remote (iSCSI, an image on NFS), an overlay whose layers are on a network file system, or a
    FUSE file system that says it has a block device (``fuseblk``). A mount that hides an
    earlier one counts only from its own mount point upwards. A path that does not exist
    counts as lying where it would be created.

    Args:
        path: Any path; it need not exist.
        mounts: File to read in place of the kernel's list of mounts.

    Raises:
        OSError: The kernel's list of mounts cannot be read.
    """
    types = _read_mounts(mounts) if mounts else _mount_table.read_types()
    current, remaining = "/", _split_reversed(os.path.abspath(path))
    kind = _find_network_type(types, current)
    links = 0
    while remaining and not kind:
        component = remaining.pop()
        if component == "..":
            current = os.path.dirname(current)
            kind = _find_network_type(types, current)
            continue
        candidate = f"{current.rstrip('/')}/{component}"
        kind = _name_network_type(types[candidate]) if candidate in types else ""
        target = "" if kind else _read_link(candidate)
        if not target or links == _MOST_LINKS:
            current = candidate
            continue
        links += 1
        remaining += _split_reversed(target)
        if target.startswith("/"):
            current = "/"
            kind = _find_network_type(types, current)
    return kind


def _split_reversed(path: str) -> list[str]:
    """Return a path's components, last one first."""
    return [component for component in reversed(path.split("/")) if component not in ("", ".")]


def _read_link(path: str) -> str:
    """Return the target of a symbolic link; "" for anything else."""
    try:
        return os.readlink(path)
    except OSError:
        # No link, absent or not readable for us: the path goes on as it is spelled.
        return ""


def _read_mounts(mounts: str) -> dict[str, str]:
    """Return file system types by mount point; the topmost if several share a mount point."""
    with open(mounts, "rb") as lines:
        return _parse_mounts(lines.read())


def _parse_mounts(table: bytes) -> dict[str, str]:
    """Parse proc_pid_mountinfo(5)."""
    types = {}
    for line in table.splitlines():
        fields, _, source = line.partition(b" - ")
        point = _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), fields.split(b" ", 5)[4])
        types[os.fsdecode(point)] = source.split(b" ", 1)[0].decode("ascii", "replace")
    return types


def _find_network_type(types: dict[str, str], path: str) -> str:
    """Return the name of the network file system that ``path`` lies in, "" if it is local."""
    while path not in types and path != "/":
        path = os.path.dirname(path)
    return _name_network_type(types.get(path, ""))


def _name_network_type(type_: str) -> str:
    """Return the usual name of a network file system by the kernel's type; "" for a local one."""
    return _NETWORK_TYPES.get(type_) or ("FUSE" if type_.startswith("fuse.") else "")


def sync_filesystem(fd: int) -> None:
    """Flush all data written to the file system that holds ``fd`` to disk (syncfs(2)).

    Raises:
        OSError: The file system reported an error since ``fd`` was opened (Linux 5.8 or later).
    """
    if _load_libc().syncfs(fd) != 0:
        number = _get_libc_errno()
        raise OSError(number, os.strerror(number))


RENAME_NOREPLACE = 1
"""Flag for renameat2(2): fail if the new name exists."""


def rename_new(fd: int, old: str, new: str) -> None:
    """Rename a file within an open directory, unless the new name exists (renameat2(2)).

    On file systems without RENAME_NOREPLACE (NFS, many of FUSE) it checks the name and then
    renames: between the two another process could create a file of that name.

    Args:
        fd: Descriptor of the directory.
        old: Present name of the file.
        new: New name of the file.

    Raises:
        FileExistsError: Something has the new name.
        OSError: It cannot be renamed.
    """
    arguments = (fd, os.fsencode(old), fd, os.fsencode(new), RENAME_NOREPLACE)
    if _load_libc().renameat2(*arguments) == 0:
        return
    number = _get_libc_errno()
    if number not in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
        raise OSError(number, os.strerror(number), new)
    try:
        os.stat(new, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(old, new, src_dir_fd=fd, dst_dir_fd=fd)
        return
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)


def can_access(uid: int, access: Literal["r", "w"], path: str) -> bool | None:
    """Return whether a user may read ("r") or write ("w") a file; None if only root can tell.

    The kernel decides, in a process of that user, because groups, access control lists and
    parent directories count too.
    """
    if uid == os.geteuid():
        mode = os.R_OK if access == "r" else os.W_OK
        return uid == 0 or os.access(path, mode, effective_ids=True)
    if uid == 0:
        return True
    if os.geteuid() != 0:
        return None
    # Imported here because only commands of people call this; the daemon needs neither.
    import pwd
    import subprocess

    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        gid, groups = uid, []
    else:
        gid, groups = entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid)
    try:
        result = subprocess.run(
            ["/bin/sh", "-c", f'[ -{access} "$1" ]', "sh", path],
            user=uid,
            group=gid,
            extra_groups=groups,
            cwd="/",
            timeout=_ASKING_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.returncode == 0


def resolve_path(path: str) -> str:
    """Resolve the symbolic links of a path; as root, only links that root made.

    Without root, a planted link leads no further than the caller's own rights, so the path stays
    as it is.

    Raises:
        UnsafePath: The caller is root, and another user made a link on the way.
        OSError: A link cannot be read, or there are too many.
    """
    path = os.path.abspath(path)
    if os.geteuid() != 0:
        return path
    current, remaining, links = "/", _split_reversed(path), 0
    while remaining:
        component = remaining.pop()
        candidate = os.path.join(current, component)
        if component == "..":
            current = os.path.dirname(current)
            continue
        try:
            info = os.lstat(candidate)
        except FileNotFoundError:
            return os.path.join(candidate, *reversed(remaining))
        if not stat.S_ISLNK(info.st_mode):
            current = candidate
            continue
        if info.st_uid != 0:
            message = f"is a symbolic link of uid {info.st_uid}, which root does not follow"
            raise UnsafePath(f"{message}: remove it", candidate)
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(candidate)
        remaining += _split_reversed(target)
        current = "/" if target.startswith("/") else current
    return current


_PASS: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to open a directory on the way, without following links."""
_READ: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""Flags to open the target directory."""
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to create a file that must not exist."""
_LONGEST_STEM: Final = 200
"""Bytes of a file's name that its temporary name contains."""


class UnsafePath(OSError):
    """Root refuses to write to a path where others could have planted a link or file."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(errno.EPERM, message, path)


def describe_os_error(error: OSError, path: str) -> str:
    """Return an OSError's text, with its file name if that is not ``path``."""
    message = error.strerror or str(error)
    filename = error.filename
    return message if filename in (None, path) else f"{filename} {message}"


def open_directory(
    path: str, *, create_mode: int | None = None, trusted: Collection[int] = (), checks: bool = True
) -> int:
    """Open a directory for writing files in it, and return its descriptor.

    All checks are made only if the caller is root.

    Args:
        path: The directory.
        create_mode: Mode for creating it and missing parents; None to create nothing.
        trusted: Uids that may own the directory, besides root.
        checks: Whether it must be safe: owned by root or a trusted uid, and not writable by others
            unless it is sticky.

    Raises:
        UnsafePath: The caller is root, and a link is on the way, or the directory is not safe.
        OSError: It cannot be opened or created.
    """
    path = os.path.abspath(path)
    if os.geteuid() != 0:
        if create_mode is not None:
            os.makedirs(path, mode=create_mode, exist_ok=True)
        return os.open(path, _READ)
    current_fd = os.open("/", _PASS)
    current_path = ""
    try:
        for component in [component for component in path.split("/") if component]:
            child_fd = _enter_directory(
                current_fd, component, f"{current_path}/{component}", create_mode, trusted
            )
            os.close(current_fd)
            current_fd, current_path = child_fd, f"{current_path}/{component}"
        if checks:
            _require_safe_owner(os.fstat(current_fd), path, trusted)
        return os.open(".", _READ, dir_fd=current_fd)
    finally:
        os.close(current_fd)


def _enter_directory(
    parent: int, name: str, path: str, create_mode: int | None, trusted: Collection[int]
) -> int:
    """Open a directory's child directory, which must not be a link; create it if wanted."""
    try:
        return os.open(name, _PASS, dir_fd=parent)
    except FileNotFoundError:
        if create_mode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        _require_safe_owner(os.fstat(parent), os.path.dirname(path), trusted)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, create_mode, dir_fd=parent)
        return os.open(name, _PASS, dir_fd=parent)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise UnsafePath(
                "is a symbolic link, which root does not follow: name its target directory",
                path,
            ) from None
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None


def _require_safe_owner(info: os.stat_result, path: str, trusted: Collection[int]) -> None:
    """Check that nobody but root and trusted users can replace a directory's entries.

    Raises:
        UnsafePath: Others can replace its entries.
    """
    if info.st_uid not in {0, *trusted}:
        raise UnsafePath(
            f"belongs to uid {info.st_uid}, who could replace files in it: as root, write to "
            "a directory that root owns",
            path,
        )
    # With an access control list the group bits are its mask.
    others = info.st_mode & (stat.S_IWOTH | (stat.S_IWGRP if info.st_gid else 0))
    if others and not info.st_mode & stat.S_ISVTX:
        raise UnsafePath(
            "is writable by others, who could replace files in it: run 'chmod go-w' on it, "
            "or write to another directory",
            path,
        )


@contextlib.contextmanager
def open_parent(path: str, *, trusted: Collection[int] = ()) -> Iterator[tuple[int, str]]:
    """Open a file's directory; yield (descriptor, file name). Raises as :func:`open_directory`."""
    directory, name = os.path.split(os.path.abspath(path))
    fd = open_directory(directory, trusted=trusted)
    try:
        yield fd, name
    finally:
        os.close(fd)


@contextlib.contextmanager
def replace_file(
    path: str,
    mode: int,
    *,
    owner: tuple[int, int] | None = None,
    is_new: bool = False,
    trusted: Collection[int] = (),
) -> Iterator[IO[bytes]]:
    """Replace a file atomically: it gets its name only when it is complete and durable.

    Args:
        path: The file.
        mode: Mode of the complete file, whatever the umask; until then only its owner may read.
        owner: Uid and gid of the file; None for those of the caller.
        is_new: Whether an existing file is an error; otherwise it is replaced.
        trusted: Uids that may own the directory, besides root.

    Raises:
        FileExistsError: ``is_new``, and something has its name.
        UnsafePath: The caller is root, and others could have planted a link or file there.
        OSError: It cannot be written.
    """
    with open_parent(path, trusted=trusted) as (directory, name):
        temporary = f".{_cut_name(name)}.{os.urandom(8).hex()}"
        descriptor = os.open(temporary, _NEW, 0o600, dir_fd=directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield file
                file.flush()
                if owner is not None:
                    os.fchown(file.fileno(), *owner)
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            if is_new:
                rename_new(directory, temporary, name)
            else:
                os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise
        os.fsync(directory)


def remove_unfinished(path: str, *, trusted: Collection[int] = ()) -> None:
    """Remove temporary files of killed writers of ``path``; files still locked by one stay.

    Raises:
        OSError: The directory cannot be used.
    """
    with open_parent(path, trusted=trusted) as (directory, name):
        pattern = re.compile(re.escape(f".{_cut_name(name)}.") + r"[0-9a-f]{16}")
        for filename in filter(pattern.fullmatch, os.listdir(directory)):
            with contextlib.suppress(OSError):
                fd = os.open(filename, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(fd).st_uid == os.geteuid():
                        os.unlink(filename, dir_fd=directory)
                finally:
                    os.close(fd)


def _cut_name(name: str) -> str:
    """Cut a file name so that the temporary name made from it stays within 255 bytes."""
    return os.fsdecode(os.fsencode(name)[:_LONGEST_STEM])


T = TypeVar("T")


class StatusWriteError(Unavailable):
    """A status file cannot be written now."""


def write_status(path: str, value: Any) -> None:
    """Write a status file as JSON, atomically replacing the old one.

    Args:
        path: The file.
        value: A Struct.

    Raises:
        StatusWriteError: It cannot be written.
    """
    temporary = f"{path}.{os.getpid()}"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(value))
        os.replace(temporary, path)
    except OSError as error:
        raise StatusWriteError(f"cannot write {path}: {error.strerror}", path) from error


def read_status(path: str, kind: type[T]) -> tuple[T, float] | None:
    """Read a status file; return its value and modification time in seconds since the epoch.

    Returns:
        None if it is absent, unreadable or of another type.
    """
    try:
        with open(path, "rb") as file:
            modified_s = os.fstat(file.fileno()).st_mtime
            return msgspec.json.decode(file.read(), type=kind), modified_s
    except (OSError, msgspec.MsgspecError):
        # No file yet, or one of another release: either way nothing is known.
        return None
