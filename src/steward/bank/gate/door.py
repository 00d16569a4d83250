"""Who may connect to the plugin's socket at all, by the file system's word.

Whoever is merely turned away after connecting still takes a turn of the gate's
one thread, which slurmctld waits for. So only the users that the plugin runs as
get as far as that: by owner, or by a POSIX ACL where there are several of them
or the gate is not root. The format of the attribute is that of Linux's
uapi/linux/posix_acl_xattr.h.
"""

import logging
import os
import struct
from collections.abc import Iterable
from typing import Final

log = logging.getLogger(__name__)

_ACL: Final = "system.posix_acl_access"
_HEADER: Final = struct.Struct("<I")
_ENTRY: Final = struct.Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_READ_WRITE: Final = 6
_NO_ID: Final = 0xFFFFFFFF
_OURS: Final = 0o600
_ANYBODY: Final = 0o666


def let_in(path: str, uids: Iterable[int]) -> bool:
    """Let these users connect to a socket of ours, beside us and root, and nobody else.

    Args:
        path: The socket, made just now.
        uids: Who may.

    Returns:
        Whether it could be done; where not, anybody may connect, and who it is is
        told by the kernel when they have.

    Raises:
        OSError: It is not there any more.
    """
    os.chmod(path, _OURS)
    others = sorted(set(uids) - {0, os.geteuid()})
    if not others or _given(path, others) or _listed(path, others):
        return True
    log.warning(
        "%s is open to anybody, since this file system has no ACLs: others are turned away "
        "when they have connected",
        path,
    )
    os.chmod(path, _ANYBODY)
    return False


def _given(path: str, uids: list[int]) -> bool:
    """Make it the one user's own, as root can."""
    if os.geteuid() != 0 or len(uids) > 1:
        return False
    try:
        os.chown(path, uids[0], -1)
    except OSError as error:
        log.debug("%s cannot be given to uid %d: %s", path, uids[0], error)
        return False
    return True


def _listed(path: str, uids: list[int]) -> bool:
    entries = [(_USER_OBJ, _READ_WRITE, _NO_ID)]
    entries += [(_USER, _READ_WRITE, uid) for uid in uids]
    entries += [(_GROUP_OBJ, 0, _NO_ID), (_MASK, _READ_WRITE, _NO_ID), (_OTHER, 0, _NO_ID)]
    value = _HEADER.pack(2) + b"".join(_ENTRY.pack(*entry) for entry in entries)
    try:
        os.setxattr(path, _ACL, value)
    except OSError as error:
        log.debug("%s cannot be given an ACL: %s", path, error)
        return False
    return True
