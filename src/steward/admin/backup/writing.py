"""Writes the tar of a backup, member by member, with each one's checksum."""

import hashlib
import io
import os
import tarfile
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Final

import msgspec

from steward.admin.backup.manifest import MANIFEST, BackupError, BackupUnavailable, Manifest, Member
from steward.core.files import remove_unfinished, replacing, told_by

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_LEVEL: Final = 3
_ACLS: Final = ("system.posix_acl_access", "system.posix_acl_default")
ACL_KEY: Final = "STEWARD."
"""Before an ACL's name in a member's headers."""


class Writer:
    """A backup in the making; see :func:`writing`.

    Args:
        tar: Open for streaming.
    """

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self.members: list[Member] = []

    def add(self, name: str, path: str) -> None:
        """Add a file as it is; raises FileNotFoundError where there is none."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.add_open(name, fd)

    def add_open(self, name: str, fd: int) -> None:
        """Add what an open file holds now, without what is appended meanwhile, and close it."""
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            info = _info(name, found)
            info.pax_headers = _acls(fd)
            reading = _Reading(file, found.st_size)
            self._tar.addfile(info, reading)
        self.members.append(Member(name=name, size=info.size, sha256=reading.digest()))

    def add_directory(self, name: str, path: str) -> None:
        """Add a directory by itself, for what its mode and ACL are."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            info = _info(name, os.fstat(fd))
            info.type, info.size = tarfile.DIRTYPE, 0
            info.pax_headers = _acls(fd)
            self._tar.addfile(info)
        finally:
            os.close(fd)

    def add_link(self, name: str, target: str) -> None:
        """Add a symbolic link."""
        info = tarfile.TarInfo(name)
        info.type, info.linkname = tarfile.SYMTYPE, target
        self._tar.addfile(info)

    def end(self, manifest: Manifest) -> Manifest:
        """Add the manifest, which is the last; what it says."""
        said = msgspec.structs.replace(manifest, members=tuple(self.members))
        data = msgspec.json.format(msgspec.json.encode(said), indent=1) + b"\n"
        info = tarfile.TarInfo(MANIFEST)
        info.size, info.mode = len(data), 0o600
        info.mtime = int(said.made_at.timestamp())
        self._tar.addfile(info, io.BytesIO(data))
        return said


@contextmanager
def writing(path: str, trusted: "Collection[int]" = ()) -> "Iterator[Writer]":
    """A backup that is there as a whole, under its name, or not at all.

    Args:
        path: What it is to be called; nothing is there yet.
        trusted: Users whose directory it may be in, beside root's.

    Raises:
        BackupError: Something is there.
        BackupUnavailable: It cannot be written.
    """
    import zstandard

    if os.path.lexists(path):
        raise BackupError(f"{path} is there already", path)
    try:
        remove_unfinished(path, trusted=trusted)
        with replacing(path, 0o600, is_new=True, trusted=trusted) as file:
            packer = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
            with (
                packer.stream_writer(file, closefd=False) as packed,
                tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
            ):
                yield Writer(tar)
    except FileExistsError:
        raise BackupError(f"{path} is there already", path) from None
    except OSError as error:
        raise BackupUnavailable(
            f"{path} cannot be written: {told_by(error, path)}", path
        ) from error


class _Reading(io.RawIOBase):
    """Reads a file up to a size, and sums it up on its way."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        super().__init__()
        self._file = file
        self._left = size
        self._sum = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._file.read(wanted)
        self._left -= len(data)
        self._sum.update(data)
        return data

    def digest(self) -> str:
        return self._sum.hexdigest()


def _info(name: str, found: os.stat_result) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = found.st_size
    info.mode = found.st_mode & 0o7777
    info.mtime = int(found.st_mtime)
    info.uid, info.gid = found.st_uid, found.st_gid
    return info


def _acls(fd: int) -> dict[str, str]:
    """The POSIX ACLs of an open file, by their names."""
    found = {}
    for name in _ACLS:
        try:
            found[f"{ACL_KEY}{name}"] = os.getxattr(fd, name).hex()
        except OSError:
            continue  # it has none, or its file system knows none
    return found
