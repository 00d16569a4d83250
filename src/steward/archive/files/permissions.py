"""POSIX access control lists, written with os.setxattr: who but Steward may read a file.

The format of the attributes ``system.posix_acl_access`` and ``_default`` is that
of Linux's uapi/linux/posix_acl_xattr.h: a 32-bit version (2), then entries of
tag, permissions and id, little-endian, in the order of tags and ids. Writing it
ourselves spares a process (setfacl) per file. Where a file system has no POSIX
ACLs, files are Steward's alone: never wider.
"""

import errno
import grp
import logging
import os
import struct
from functools import lru_cache
from typing import Final

import msgspec

from steward.archive.errors import ArchiveError

log = logging.getLogger(__name__)

ACCESS: Final = "system.posix_acl_access"
DEFAULT: Final = "system.posix_acl_default"

_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_READ, _WRITE, _SEARCH = 4, 2, 1
_NO_ID = 0xFFFFFFFF
_HEADER = struct.Struct("<I")
_ENTRY = struct.Struct("<HHI")

# What a file system without POSIX ACLs, or one that squashes root, answers.
_NOT_HERE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EINVAL})


class Readers(msgspec.Struct, frozen=True):
    """Who may read beside Steward.

    Attributes:
        uid: The owner; None for nobody.
        gids: Groups.
    """

    uid: int | None = None
    gids: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anybody."""
        return self.uid is not None or bool(self.gids)


@lru_cache(maxsize=4096)
def encode(readers: Readers, own: int, theirs: int) -> bytes:
    """The attribute's value.

    Args:
        readers: Who is named.
        own: Permissions of the file's owner, Steward (r 4, w 2, x 1).
        theirs: Permissions of each of the readers.
    """
    entries = [(_USER_OBJ, own, _NO_ID)]
    if readers.uid is not None:
        entries.append((_USER, theirs, readers.uid))
    entries.append((_GROUP_OBJ, 0, _NO_ID))
    entries.extend((_GROUP, theirs, gid) for gid in sorted(set(readers.gids)))
    entries.extend(((_MASK, theirs, _NO_ID), (_OTHER, 0, _NO_ID)))
    return _HEADER.pack(2) + b"".join([_ENTRY.pack(*entry) for entry in entries])


def decode(value: bytes) -> Readers:
    """The users' and groups' names in an attribute, of those that may read at all.

    Raises:
        ArchiveError: The value is not of the known format.
    """
    if len(value) < 4 or _HEADER.unpack_from(value)[0] != 2 or (len(value) - 4) % 8:
        raise ArchiveError("an ACL is not of version 2: the kernel is newer than this Steward")
    uid = None
    gids = []
    for tag, permissions, identifier in _ENTRY.iter_unpack(value[4:]):
        if tag == _USER and permissions & _READ:
            uid = identifier
        elif tag == _GROUP and permissions & _READ:
            gids.append(identifier)
    return Readers(uid, tuple(gids))


def supported(fd: int) -> bool:
    """Whether the file system of the open directory ``fd`` has POSIX ACLs that we may set.

    Raises:
        OSError: The directory cannot be asked.
    """
    try:
        os.getxattr(fd, ACCESS)
    except OSError as error:
        if error.errno == errno.ENODATA:
            return True
        if error.errno in _NOT_HERE:
            return False
        raise
    return True


def readers_of(fd: int) -> Readers:
    """Whom the open file or directory ``fd`` lets in by its ACL.

    Raises:
        OSError: It cannot be asked.
    """
    try:
        return decode(os.getxattr(fd, ACCESS))
    except OSError as error:
        if error.errno == errno.ENODATA or error.errno in _NOT_HERE:
            return Readers()
        raise


def let_read(fd: int, readers: Readers) -> bool:
    """Let readers read the open regular file ``fd``; others have nothing.

    Returns:
        Whether it could be done; where not, the file is Steward's alone.

    Raises:
        OSError: A disk or network error.
    """
    if not readers:
        _private(fd, 0o600)
        return True
    return _set(fd, ACCESS, _file_acl(readers), 0o600)


def let_enter(fd: int, readers: Readers, *, others_pass: bool) -> bool:
    """Let readers list the open directory ``fd``, and what is made in it later be read.

    Args:
        fd: The directory.
        readers: Who may list it; they are the default for what is made in it.
        others_pass: Whether anybody may pass through it to what they may read below it.

    Returns:
        Whether it could be done; where not, the directory is Steward's alone.

    Raises:
        OSError: A disk or network error.
    """
    if not readers:
        _drop(fd, DEFAULT)
        _drop(fd, ACCESS)
        os.fchmod(fd, 0o711 if others_pass else 0o700)
        return True
    access = encode(readers, _READ | _WRITE | _SEARCH, _READ | _SEARCH)
    if not _set(fd, DEFAULT, access, 0o700):
        return False
    if others_pass:
        # The last entry is that of others.
        access = access[:-8] + _ENTRY.pack(_OTHER, _SEARCH, _NO_ID)
    return _set(fd, ACCESS, access, 0o700)


def _file_acl(readers: Readers) -> bytes:
    return encode(readers, _READ | _WRITE, _READ)


def _set(fd: int, attribute: str, value: bytes, private_mode: int) -> bool:
    try:
        os.setxattr(fd, attribute, value)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        _private(fd, private_mode)
        return False
    return True


def _private(fd: int, mode: int) -> None:
    _drop(fd, ACCESS)
    os.fchmod(fd, mode)


def _drop(fd: int, attribute: str) -> None:
    try:
        os.removexattr(fd, attribute)
    except OSError as error:
        if error.errno != errno.ENODATA and error.errno not in _NOT_HERE:
            raise


def group_ids(names: tuple[str, ...], groups_file: str = "") -> tuple[int, ...]:
    """The ids of the groups that may read every file.

    The file is job_archive's (its option -c): one group a line; a group that does
    not exist is passed over. Ours says so in the log, passes over blank lines
    and those that begin with "#", and a file that cannot be read is an error:
    job_archive ran on without any group.

    Raises:
        ArchiveError: The file of groups cannot be read.
    """
    wanted = list(names)
    if groups_file:
        try:
            with open(groups_file, encoding="utf-8", errors="surrogateescape") as lines:
                wanted.extend(line.strip() for line in lines)
        except OSError as error:
            raise ArchiveError(
                f"groups_file {groups_file} cannot be read: {error.strerror}", groups_file
            ) from error
    found = set()
    for name in wanted:
        if not name or name.startswith("#"):
            continue
        try:
            found.add(grp.getgrnam(name).gr_gid)
        except (KeyError, ValueError):
            log.warning("group %r does not exist: it is given no access to the archive", name)
    return tuple(sorted(found))
