"""Writes files for root where others may have planted something: by descriptors, without links.

Root walks a path one directory after the other and follows no symbolic link on it. The
directory in which it writes must be one that others cannot write to, or be sticky and
root's, as /tmp. A file is written under a random name that nothing has, and then
renamed: what lay under its name is replaced and never written to. Whoever is not root
could be led no further than their own rights go: for them the directory is opened plainly.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator
from typing import IO, Final

from steward.core.filesystems import rename_new

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
