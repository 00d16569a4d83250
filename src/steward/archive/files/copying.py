"""How bytes are copied to where they belong: a file appears whole and durable, or not at all.

It is written under a name of its own and then gets its real one by link(2), which
never takes another file's place. Where a file system has no links (FAT, exFAT,
some FUSE and network file systems) it is renamed with RENAME_NOREPLACE.
"""

import contextlib
import errno
import hashlib
import os
from typing import TYPE_CHECKING, Final

import msgspec

from steward.archive.errors import ArchiveError
from steward.archive.files.packing import Damaged, blocks, open_plain, pack, read_plain
from steward.core.filesystems import rename_new

if TYPE_CHECKING:
    from io import BufferedReader

NO_LINK: Final = frozenset({errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
"""File systems answer so where a file can have no further link."""


class Gone(ArchiveError):
    """The bytes to be placed are not there (any more), or are not what they were."""


class Source(msgspec.Struct, frozen=True):
    """Where bytes are now.

    Attributes:
        fd: The open directory that they are in.
        name: Their file's name in it.
        sha: SHA-256 of the plain bytes.
        link: Whether to link; to copy otherwise.
        packed: Whether they are to be compressed where they are put.
        otherwise: Where the same bytes are, for the case that there can be no link to these.
    """

    fd: int
    name: str
    sha: bytes
    link: bool = True
    packed: bool = False
    otherwise: "Source | None" = None


def temporary_name(source: Source) -> str:
    """A file's name while it is written: the same for every try."""
    return f".copy.{source.name}"


def remove_temporary(source: Source, fd: int) -> None:
    """Remove what an earlier try may have left under that name."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary_name(source), dir_fd=fd)


def is_unsettled(fd: int, name: str, source: Source) -> bool:
    """Whether a file is there that a crash may have kept from becoming durable."""
    try:
        mark = os.stat(temporary_name(source), dir_fd=fd, follow_symlinks=False)
        there = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (mark.st_dev, mark.st_ino) == (there.st_dev, there.st_ino)


def copy(source: Source, fd: int, name: str, *, settled: bool = True) -> None:
    """Copy bytes to a new file that appears whole, durable and 0600, or not at all.

    Args:
        source: The bytes.
        fd: The open directory.
        name: The new file's name.
        settled: Without it the file is not durable yet, and its temporary name stays: what
            has two names after a crash is not to be relied on.

    Raises:
        FileExistsError: There is a file of that name.
        Gone: The bytes are not what they were.
        OSError: They cannot be read or written.
    """
    temporary = temporary_name(source)
    # What a crash leaves behind may be a file's second name by now, and is never written to.
    remove_temporary(source, fd)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open_plain(source.fd, source.name) as incoming:
        outgoing = os.open(temporary, flags, 0o600, dir_fd=fd)
        try:
            found = _pump(incoming, outgoing, source)
            # Where there is no manifest the file's own time says when the job came.
            there = os.fstat(incoming.fileno())
            os.utime(outgoing, ns=(there.st_atime_ns, there.st_mtime_ns))
            if settled:
                os.fsync(outgoing)
        finally:
            os.close(outgoing)
    if found != source.sha:
        os.unlink(temporary, dir_fd=fd)
        raise Gone(f"the bytes of {source.name} are not what they were: see verify", source)
    try:
        marked = appear(fd, temporary, name, settled=settled)
    except BaseException:
        remove_temporary(source, fd)
        raise
    if settled and marked:
        os.unlink(temporary, dir_fd=fd)


def appear(fd: int, temporary: str, name: str, *, settled: bool = True) -> bool:
    """Give a file its name, never in place of another file.

    Args:
        fd: The open directory.
        temporary: The name that it has.
        name: The name that it gets.
        settled: Whether it is durable already. Where there are no links it is made so.

    Returns:
        Whether it has both names now.

    Raises:
        FileExistsError: There is a file of that name.
        OSError: It cannot be done.
    """
    try:
        os.link(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        if not settled:
            # Without a second name nothing would tell that it is not.
            _sync(fd, temporary)
        rename_new(fd, temporary, name)
        return False
    return True


def _sync(fd: int, name: str) -> None:
    opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _pump(incoming: "BufferedReader", outgoing: int, source: Source) -> bytes:
    """Write the plain bytes, or compress them; gives their SHA-256."""
    sha = hashlib.sha256()
    try:
        if source.packed:
            # In one piece, as capture has had them: a frame that tells its size needs no window.
            data = read_plain(incoming, source.name)
            sha.update(data)
            _write(outgoing, pack(data))
        else:
            for block in blocks(incoming, source.name):
                sha.update(block)
                _write(outgoing, block)
    except Damaged as error:
        raise Gone(f"{error}: see verify", source) from error
    return sha.digest()


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
