"""Writes files for root where others may have planted something: by descriptors, without links.

Root walks a path one directory after the other and follows no symbolic link on it. The
directory in which it writes must be one that others cannot write to, or be sticky and
root's, as /tmp. A file is written under a random name that nothing has, and then
renamed: what lay under its name is replaced and never written to. Whoever is not root
could be led no further than their own rights go: for them the directory is opened plainly.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import IO, Any, Final, Literal, TypeVar

import msgspec

from steward.core.errors import Unavailable

_NETWORK = {
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
"""Types of file systems that wait for another machine, with the names people know them by.

What autofs mounts at the first touch is not known before, so it counts as one of them.
"""
_ESCAPE = re.compile(rb"\\([0-7]{3})")
"""Blanks, tabs, newlines and backslashes of a mount point."""
_MOST_LINKS = 40
_ASKING_S = 10.0


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def network_kind(path: str, *, mounts: str = "/proc/self/mountinfo") -> str:
    """The name of the network file system that ``path`` is on, "" if it is a local one.

    A server that is dead stops nobody here: types are taken from the kernel's list of
    mounts (``/proc/self/mountinfo``, see proc_pid_mountinfo(5)), and symbolic links are
    followed only as long as they lie on local file systems. Not seen are a local file
    system whose disk is remote (iSCSI, an image on NFS), an overlay whose layers are on a
    network file system, and a FUSE file system that says it has a block device
    (``fuseblk``); a mount that hides an earlier one counts only from its own mount point
    upwards. What does not exist counts as lying where it would be made.

    Args:
        path: Any path; it need not exist.
        mounts: File with the kernel's list of mounts.

    Raises:
        OSError: The kernel's list of mounts cannot be read.
    """
    types = _mounted(mounts)
    here, ahead = "/", _parts(os.path.abspath(path))
    links = 0
    while True:
        kind = _kind(types, here)
        if kind or not ahead:
            return kind
        part = ahead.pop()
        if part == "..":
            here = os.path.dirname(here)
            continue
        following = os.path.join(here, part)
        target = "" if _kind(types, following) else _target(following)
        if not target or links == _MOST_LINKS:
            here = following
            continue
        links += 1
        ahead += _parts(target)
        if target.startswith("/"):
            here = "/"


def _parts(path: str) -> list[str]:
    """A path's components, the last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _target(path: str) -> str:
    """What a symbolic link says; "" for anything else."""
    try:
        return os.readlink(path)
    except OSError:
        # No link, or not there, or not ours to look at: the path goes on as it is spelt.
        return ""


def _mounted(mounts: str) -> dict[str, str]:
    """Types of file systems by mount point; of several at one point the topmost."""
    with open(mounts, "rb") as lines:
        table = lines.read()
    types = {}
    for line in table.splitlines():
        fields, _, source = line.partition(b" - ")
        point = _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), fields.split(b" ", 5)[4])
        types[os.fsdecode(point)] = source.split(b" ", 1)[0].decode("ascii", "replace")
    return types


def _kind(types: dict[str, str], path: str) -> str:
    """What the mount that ``path`` lies in is called, "" if it is local."""
    while path not in types and path != "/":
        path = os.path.dirname(path)
    type_ = types.get(path, "")
    return _NETWORK.get(type_) or ("FUSE" if type_.startswith("fuse.") else "")


def sync_filesystem(fd: int) -> None:
    """Make durable all that was written to the file system that holds ``fd`` (syncfs(2)).

    Raises:
        OSError: The file system reported an error since ``fd`` was opened (Linux 5.8 or later).
    """
    if _libc().syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


RENAME_NOREPLACE = 1
"""Flag for renameat2(2)."""


def rename_new(fd: int, old: str, new: str) -> None:
    """Rename a file within an open directory, if nothing has the new name (renameat2(2)).

    File systems that do not know RENAME_NOREPLACE (NFS, many of FUSE) are asked first and
    then renamed on: between the two another process could make a file of that name.

    Args:
        fd: Descriptor of the directory.
        old: Present name of the file.
        new: New name of the file.

    Raises:
        FileExistsError: Something has the new name.
        OSError: It cannot be renamed.
    """
    arguments = (fd, os.fsencode(old), fd, os.fsencode(new), RENAME_NOREPLACE)
    if _libc().renameat2(*arguments) == 0:
        return
    number = ctypes.get_errno()
    if number not in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
        raise OSError(number, os.strerror(number), new)
    try:
        os.stat(new, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(old, new, src_dir_fd=fd, dst_dir_fd=fd)
        return
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)


def may(uid: int, way: Literal["r", "w"], path: str) -> bool | None:
    """Whether a user may read a file, or write to it; None where only root could find out.

    The kernel is asked, in a process of that user's, since groups, access control lists and
    the directories above count, too.
    """
    if uid == os.geteuid():
        mode = os.R_OK if way == "r" else os.W_OK
        return uid == 0 or os.access(path, mode, effective_ids=True)
    if uid == 0:
        return True
    if os.geteuid() != 0:
        return None
    # Only commands of people's ask; the daemon's processes need neither.
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
            ["/bin/sh", "-c", f'[ -{way} "$1" ]', "sh", path],
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


_PASS: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST_STEM: Final = 200


class UnsafePath(OSError):
    """Root does not write there: others could have planted what is there."""

    def __init__(self, what: str, path: str) -> None:
        super().__init__(errno.EPERM, what, path)


def told_by(error: OSError, path: str) -> str:
    """What an error says, with what it says it of where that is not ``path``."""
    said = error.strerror or str(error)
    where = error.filename
    return said if where in (None, path) else f"{where} {said}"


def open_directory(
    path: str, *, make: int | None = None, trusted: Collection[int] = (), checks: bool = True
) -> int:
    """Open a directory to write in it.

    Args:
        path: The directory.
        make: Mode of it and of directories above it where they are missing; None to make none.
        trusted: Users whose directory it may be, beside root's.
        checks: Whether it must be one that others cannot write to.

    Raises:
        UnsafePath: The caller is root, and a link is on the way, or others may write to it.
        OSError: It cannot be opened or made.
    """
    path = os.path.abspath(path)
    if os.geteuid() != 0:
        if make is not None:
            os.makedirs(path, mode=make, exist_ok=True)
        return os.open(path, _READ)
    here = os.open("/", _PASS)
    at = ""
    try:
        for part in [part for part in path.split("/") if part]:
            below = _enter(here, part, f"{at}/{part}", make, trusted)
            os.close(here)
            here, at = below, f"{at}/{part}"
        if checks:
            _need_ours(os.fstat(here), path, trusted)
        return os.open(".", _READ, dir_fd=here)
    finally:
        os.close(here)


def _enter(parent: int, name: str, path: str, make: int | None, trusted: Collection[int]) -> int:
    try:
        return os.open(name, _PASS, dir_fd=parent)
    except FileNotFoundError:
        if make is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        _need_ours(os.fstat(parent), os.path.dirname(path), trusted)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, make, dir_fd=parent)
        return os.open(name, _PASS, dir_fd=parent)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise UnsafePath(
                "is a symbolic link, which root does not follow: name the directory it leads to",
                path,
            ) from None
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None


def _need_ours(found: os.stat_result, path: str, trusted: Collection[int]) -> None:
    """Refuse a directory whose entries others can replace.

    Raises:
        UnsafePath: They can.
    """
    if found.st_uid not in {0, *trusted}:
        raise UnsafePath(
            f"belongs to uid {found.st_uid}, who could plant files in it: as root, write to a "
            "directory of root's",
            path,
        )
    # With an access control list these bits are its mask.
    others = found.st_mode & (stat.S_IWOTH | (stat.S_IWGRP if found.st_gid else 0))
    if others and not found.st_mode & stat.S_ISVTX:
        raise UnsafePath(
            "can be written to by others, who could plant files in it: run 'chmod go-w' on it, "
            "or write elsewhere",
            path,
        )


@contextlib.contextmanager
def directory_of(path: str, *, trusted: Collection[int] = ()) -> Iterator[tuple[int, str]]:
    """The open directory of a file, and the file's name in it; raises as :func:`open_directory`."""
    directory, name = os.path.split(os.path.abspath(path))
    fd = open_directory(directory, trusted=trusted)
    try:
        yield fd, name
    finally:
        os.close(fd)


@contextlib.contextmanager
def replacing(
    path: str,
    mode: int,
    *,
    owner: tuple[int, int] | None = None,
    is_new: bool = False,
    trusted: Collection[int] = (),
) -> Iterator[IO[bytes]]:
    """Write a file that has its name when it is whole and durable, or never.

    Args:
        path: The file.
        mode: Its mode, whatever the umask; until it is whole only its owner may read it.
        owner: Its uid and gid; those of whoever writes it if None.
        is_new: Whether nothing may have its name yet; else what has it is replaced.
        trusted: Users whose directory it may be in, beside root's.

    Raises:
        FileExistsError: ``is_new``, and something has its name.
        UnsafePath: Others could have planted what is there.
        OSError: It cannot be written.
    """
    with directory_of(path, trusted=trusted) as (directory, name):
        fresh = f".{_stem(name)}.{secrets.token_hex(8)}"
        descriptor = os.open(fresh, _NEW, 0o600, dir_fd=directory)
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
                rename_new(directory, fresh, name)
            else:
                os.rename(fresh, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(fresh, dir_fd=directory)
            raise
        os.fsync(directory)


def remove_unfinished(path: str, *, trusted: Collection[int] = ()) -> None:
    """Remove what writers of a file left that were killed; one that still writes is left alone.

    Raises:
        OSError: The directory cannot be used.
    """
    with directory_of(path, trusted=trusted) as (directory, name):
        left = re.compile(re.escape(f".{_stem(name)}.") + r"[0-9a-f]{16}")
        for one in filter(left.fullmatch, os.listdir(directory)):
            with contextlib.suppress(OSError):
                fd = os.open(one, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(fd).st_uid == os.geteuid():
                        os.unlink(one, dir_fd=directory)
                finally:
                    os.close(fd)


def _stem(name: str) -> str:
    """As much of a name as leaves room for what makes it another, within 255 bytes."""
    return os.fsdecode(os.fsencode(name)[:_LONGEST_STEM])


T = TypeVar("T")


class StatusWriteError(Unavailable):
    """A file cannot be written now."""


def write_status(path: str, value: Any) -> None:
    """Write a value down in place of what was there.

    Args:
        path: The file.
        value: A Struct.

    Raises:
        NotLeft: It cannot be written.
    """
    fresh = f"{path}.{os.getpid()}"
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(value))
        os.replace(fresh, path)
    except OSError as error:
        raise StatusWriteError(f"cannot write {path}: {error.strerror}", path) from error


def read_status(path: str, kind: type[T]) -> tuple[T, float] | None:
    """What was left there, and when, seconds since the epoch; None where nothing can be read."""
    try:
        with open(path, "rb") as file:
            at_s = os.fstat(file.fileno()).st_mtime
            return msgspec.json.decode(file.read(), type=kind), at_s
    except (OSError, msgspec.MsgspecError):
        # Nothing was left yet, or by another release: either way nothing is known.
        return None
