"""Reads a backup to its end, and says whether it is whole.

Whoever restores it may have root's rights: a member whose name or kind leads out
of the places that a backup has is refused, and every file has its checksum. Who
can write backups can have anything restored all the same: they are to be kept as
safe as what is in them.
"""

import hashlib
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Final

import msgspec

from steward.admin.backup.manifest import (
    ARCHIVE,
    BYTES,
    CONFIG,
    FORMAT,
    JOB_LOG,
    MANIFEST,
    STATE,
    BackupError,
    BackupUnavailable,
    Manifest,
    Member,
)

_CHUNK: Final = 1 << 20
_MOST_MANIFEST: Final = 1 << 30
_PREFIXES: Final = (STATE, BYTES, CONFIG, ARCHIVE, f"{JOB_LOG}/")

Take = Callable[[tarfile.TarInfo, IO[bytes] | None], None]
"""Is given each member, and what reads it, if it is a file."""


def check(path: str) -> Manifest:
    """Read a backup through; what it holds.

    Raises:
        BackupError: It is damaged, cut off, no backup, or of a later format.
        BackupUnavailable: It cannot be read.
    """
    found: dict[str, Member] = {}
    manifest: Manifest | None = None

    def take(info: tarfile.TarInfo, file: IO[bytes] | None) -> None:
        nonlocal manifest
        if manifest is not None:
            raise BackupError(f"{path} goes on behind its manifest: it is damaged", path)
        if info.name == MANIFEST:
            manifest = _manifest(path, info, file)
        elif file is not None:
            if info.name in found:
                raise BackupError(f"{path} holds {info.name} twice: it is damaged", path)
            found[info.name] = summed(info, file, lambda _: None)

    each(path, take)
    if manifest is None:
        raise BackupError(f"{path} has no end: it was cut off, or is no backup of Steward's", path)
    said = {member.name: member for member in manifest.members}
    for name in sorted(said.keys() | found.keys()):
        if said.get(name) != found.get(name):
            raise BackupError(f"{path} is damaged: {name} is not what it was", path)
    return manifest


def each(path: str, take: Take) -> None:
    """Give each member of a backup to somebody, in its order.

    Raises:
        BackupError: It is damaged, or a name leads out of it.
        BackupUnavailable: It cannot be read.
    """
    with _opened(path) as tar:
        for info in tar:
            if info.name != MANIFEST and not is_safe(info):
                raise BackupError(f"{path} holds {info.name!r}: no backup of ours does", path)
            take(info, tar.extractfile(info) if info.isreg() else None)


def content(path: str, name: str) -> bytes:
    """What one member of a backup holds.

    Raises:
        BackupError, BackupUnavailable: As :func:`each`; or there is no such member.
    """
    found: list[bytes] = []

    def take(info: tarfile.TarInfo, file: IO[bytes] | None) -> None:
        if info.name == name and file is not None:
            found.append(file.read())

    each(path, take)
    if not found:
        raise BackupError(f"{path} holds no {name}", name)
    return found[0]


def summed(info: tarfile.TarInfo, file: IO[bytes], write: Callable[[bytes], object]) -> Member:
    """Pass a member's content on, and sum it up."""
    digest = hashlib.sha256()
    while data := file.read(_CHUNK):
        digest.update(data)
        write(data)
    return Member(name=info.name, size=info.size, sha256=digest.hexdigest())


def is_safe(info: tarfile.TarInfo) -> bool:
    """Whether a member is of a kind that we write, under a name that stays where it belongs."""
    parts = info.name.split("/")
    is_tree = info.isdir() and info.name == JOB_LOG
    if not is_tree and not info.name.startswith(_PREFIXES):
        return False
    if any(part in ("", ".", "..") for part in parts) or "\0" in info.name:
        return False
    if info.issym():
        return info.name.startswith(STATE) and "/" not in info.linkname and info.linkname != ".."
    return info.isreg() or info.isdir()


@contextmanager
def _opened(path: str) -> Iterator[tarfile.TarFile]:
    import zstandard

    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with (
            os.fdopen(fd, "rb") as file,
            zstandard.ZstdDecompressor().stream_reader(file) as unpacked,
            tarfile.open(fileobj=unpacked, mode="r|") as tar,
        ):
            yield tar
    except (zstandard.ZstdError, tarfile.TarError, EOFError) as error:
        # Both libraries name bytes, of which nobody knows what they are.
        raise BackupError(
            f"{path} is damaged, or no backup: it cannot be unpacked", path
        ) from error
    except OSError as error:
        why = error.strerror or error
        raise BackupUnavailable(f"{path} cannot be read: {why}", path) from error


def _manifest(path: str, info: tarfile.TarInfo, file: IO[bytes] | None) -> Manifest:
    data = file.read() if file is not None and info.size < _MOST_MANIFEST else b""
    try:
        version = msgspec.json.decode(data, type=_Format).format
        if version > FORMAT:
            raise BackupError(
                f"{path} was made by a later Steward (format {version}, this one knows {FORMAT}): "
                "install that version",
                path,
            )
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise BackupError(f"{path} is damaged: its manifest cannot be read: {error}") from error


class _Format(msgspec.Struct, frozen=True):
    format: int
