"""Taking hold of a file that a scheduler may still be writing, or be about to remove.

An open descriptor keeps the bytes whatever is unlinked; a read lease tells
whether a writer still has the file open. Both are the same for every scheduler.
"""

import errno
import fcntl
import os
from typing import Final

OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""How a spool's file is opened: no link out of it, and no wait for a pipe's other end."""

NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""No descriptor is left, of this process's or of the machine's."""
FOREIGN: Final = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENOTDIR})
"""Errors of opening what no scheduler made: a link, a socket, a file in place of a directory.

After every other error the file may be read later: a path fails over, a server is away."""
MOST_ENVIRONMENT_BYTES: Final = 8 << 20
"""An environment beyond this is not kept: one user's job must not stop capture for all.

Redacting one of this size may take 5 s, and five times its size in memory. Linux starts
no program with more than 6 MiB of arguments and environment (fs/exec.c), no job either.
"""
MOST_SCRIPT_BYTES: Final = 48 << 20
"""A script beyond this is not kept. Slurm's own limit (max_script_size) is 4 MB unless it is
set, Torque has none. With an environment it fits into one frame between two hosts."""
ENVIRONMENT_MISSING: Final = "environment-missing"
ENVIRONMENT_TOO_LARGE: Final = "environment-too-large"
ENVIRONMENT_UNREADABLE: Final = "environment-unreadable"
SCRIPT_TOO_LARGE: Final = "script-too-large"
_USUAL_BYTES = 1 << 15


def is_written(fd: int, *, remote: bool = False) -> bool | None:
    """Whether no writer has the file open: the kernel grants a read lease only then.

    The lease is dropped at once: while it is held, a writer's open(2) would wait.

    Args:
        fd: The file, opened for reading.
        remote: Whether it is on a network file system: NFSv4 refuses a lease on every
            file that it holds no delegation for.

    Returns:
        None where leases do not work, or a file of another user's needs CAP_LEASE.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return False if error.errno == errno.EAGAIN and not remote else None
    return True


def is_unlinked(fd: int) -> bool:
    """Whether a file has no name any more, so that open descriptors alone have its bytes."""
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError:
        return False  # its file system cannot tell now


def read_whole(fd: int, most: int = MOST_SCRIPT_BYTES) -> bytes | None:
    """All of a file, from its beginning, whatever was read of it before; None if it is too large.

    Args:
        fd: The file.
        most: Its largest size, in bytes.
    """
    data = os.pread(fd, _USUAL_BYTES, 0)
    if len(data) < _USUAL_BYTES:
        return data
    size = os.fstat(fd).st_size
    if size > most:
        return None
    # At one go: pieces and what they are joined to would take twice the memory.
    data = os.pread(fd, size + 1, 0)
    if len(data) == size:
        return data
    return _grown(fd, data, most)


def _grown(fd: int, data: bytes, most: int) -> bytes | None:
    """The rest, too, of a file that was written to while it was read."""
    whole = bytearray(data)
    while piece := os.pread(fd, 1 << 20, len(whole)):
        whole += piece
        if len(whole) > most:
            return None
    return bytes(whole)
