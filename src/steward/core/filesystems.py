"""What a path's file system is, and how to make what lies on it durable.

Capture and SQLite must stay off network file systems, where a stall of the
server would stall them; both ask here.
"""

import ctypes
import errno
import os
import re
from functools import lru_cache
from typing import Literal

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
