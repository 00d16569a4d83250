"""File permissions by POSIX ACLs: who except Steward may read archive files and directories.

:func:`grant_read_access` and :func:`grant_directory_access` write ACLs with os.setxattr,
:func:`read_acl_readers` reads them, and :func:`resolve_group_ids` resolves the groups that may read
everything. The format of the attributes ``system.posix_acl_access`` and ``_default`` is that of
Linux's uapi/linux/posix_acl_xattr.h: a 32-bit version (2), then entries of tag, permissions and id,
little-endian, ordered by tag and id. Writing it directly saves a process (setfacl) per file. On a
file system without POSIX ACLs only Steward may read: never wider.
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

# Errors of a file system without POSIX ACLs, or of one that squashes root.
_NO_ACL_ERRORS = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EINVAL})


class FileReaders(msgspec.Struct, frozen=True):
    """Owner and groups who may read beside Steward.

    Attributes:
        uid: Uid of the owner; None for no one.
        gids: Group ids.
    """

    uid: int | None = None
    gids: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there is any reader."""
        return self.uid is not None or bool(self.gids)


@lru_cache(maxsize=4096)
def encode_acl(readers: FileReaders, owner_bits: int, reader_bits: int) -> bytes:
    """Encode an ACL as the value of an extended attribute.

    Args:
        readers: Owner and groups.
        owner_bits: Permissions of the file's owner, Steward (r 4, w 2, x 1).
        reader_bits: Permissions of the readers.
    """
    entries = [(_USER_OBJ, owner_bits, _NO_ID)]
    if readers.uid is not None:
        entries.append((_USER, reader_bits, readers.uid))
    entries.append((_GROUP_OBJ, 0, _NO_ID))
    entries.extend((_GROUP, reader_bits, gid) for gid in sorted(set(readers.gids)))
    entries.extend(((_MASK, reader_bits, _NO_ID), (_OTHER, 0, _NO_ID)))
    return _HEADER.pack(2) + b"".join([_ENTRY.pack(*entry) for entry in entries])


def decode_acl(value: bytes) -> FileReaders:
    """Decode the users and groups with read permission from an attribute's value.

    Raises:
        ArchiveError: The format of the value is unknown.
    """
    if len(value) < 4 or _HEADER.unpack_from(value)[0] != 2 or (len(value) - 4) % 8:
        raise ArchiveError(
            "cannot read the access control list: unknown format; Steward supports version 2"
        )
    uid = None
    gids = []
    for tag, permissions, identifier in _ENTRY.iter_unpack(value[4:]):
        if tag == _USER and permissions & _READ:
            uid = identifier
        elif tag == _GROUP and permissions & _READ:
            gids.append(identifier)
    return FileReaders(uid, tuple(gids))


def supports_acls(fd: int) -> bool:
    """Return whether the file system of directory ``fd`` supports POSIX ACLs that Steward may set.

    Raises:
        OSError: The ACL of the directory cannot be read.
    """
    try:
        os.getxattr(fd, ACCESS)
    except OSError as error:
        if error.errno == errno.ENODATA:
            return True
        if error.errno in _NO_ACL_ERRORS:
            return False
        raise
    return True


def read_acl_readers(fd: int) -> FileReaders:
    """Return the readers that the ACL of an open file or directory admits.

    Raises:
        OSError: The ACL cannot be read.
    """
    try:
        return decode_acl(os.getxattr(fd, ACCESS))
    except OSError as error:
        if error.errno == errno.ENODATA or error.errno in _NO_ACL_ERRORS:
            return FileReaders()
        raise


def grant_read_access(fd: int, readers: FileReaders) -> bool:
    """Let readers, and no one else, read the open regular file ``fd``.

    Returns:
        True on success; False without ACL support: then only Steward may read the file.

    Raises:
        OSError: A disk or network error.
    """
    if not readers:
        _make_private(fd, 0o600)
        return True
    return _set_acl(fd, ACCESS, _encode_file_acl(readers), 0o600)


def grant_directory_access(fd: int, readers: FileReaders, *, others_pass: bool) -> bool:
    """Let readers list the open directory ``fd``, and inherit read access to what it will hold.

    Args:
        fd: The directory.
        readers: Who may list it; also the default for new entries.
        others_pass: Whether everyone may pass through it to entries that they may read.

    Returns:
        True on success; False without ACL support: then only Steward may enter.

    Raises:
        OSError: A disk or network error.
    """
    if not readers:
        _remove_acl(fd, DEFAULT)
        _remove_acl(fd, ACCESS)
        os.fchmod(fd, 0o711 if others_pass else 0o700)
        return True
    access = encode_acl(readers, _READ | _WRITE | _SEARCH, _READ | _SEARCH)
    if not _set_acl(fd, DEFAULT, access, 0o700):
        return False
    if others_pass:
        # The last entry is that of others.
        access = access[:-8] + _ENTRY.pack(_OTHER, _SEARCH, _NO_ID)
    return _set_acl(fd, ACCESS, access, 0o700)


def _encode_file_acl(readers: FileReaders) -> bytes:
    return encode_acl(readers, _READ | _WRITE, _READ)


def _set_acl(fd: int, attribute: str, value: bytes, private_mode: int) -> bool:
    try:
        os.setxattr(fd, attribute, value)
    except OSError as error:
        if error.errno not in _NO_ACL_ERRORS:
            raise
        _make_private(fd, private_mode)
        return False
    return True


def _make_private(fd: int, mode: int) -> None:
    _remove_acl(fd, ACCESS)
    os.fchmod(fd, mode)


def _remove_acl(fd: int, attribute: str) -> None:
    try:
        os.removexattr(fd, attribute)
    except OSError as error:
        if error.errno != errno.ENODATA and error.errno not in _NO_ACL_ERRORS:
            raise


def resolve_group_ids(names: tuple[str, ...]) -> tuple[int, ...]:
    """Resolve the names of the groups that may read every file; unknown ones cause a warning."""
    gids = set()
    for name in names:
        try:
            gids.add(grp.getgrnam(name).gr_gid)
        except (KeyError, ValueError):
            log.warning("unknown group %r: it gets no access to the archive", name)
    return tuple(sorted(gids))
