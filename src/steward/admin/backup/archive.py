"""What a backup says of itself: every file in it with its checksum, and where it came from.

A backup is one tar, compressed by zstd. Its last member is the manifest.
"""

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import IO, TYPE_CHECKING, Final

import msgspec

from steward.core.errors import StewardError, Unavailable, UsageError
from steward.core.files import remove_unfinished, replacing, told_by

if TYPE_CHECKING:
    from collections.abc import Collection


FORMAT: Final = 1
"""Of the whole file; one of a later format is refused."""
MANIFEST: Final = "steward-backup.json"
SUFFIX: Final = ".tar.zst"
STATE: Final = "state/"
BYTES: Final = "incoming/"
CONFIG: Final = "config/"
ARCHIVE: Final = "archive/"
JOB_LOG: Final = "joblog"


class BackupError(StewardError):
    """A backup cannot be made, or cannot be put back."""


class BackupUsage(BackupError, UsageError):
    """What is named can be no backup."""


class BackupUnavailable(Unavailable):
    """A place that is written to or read from cannot be used now."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One file in a backup.

    Attributes:
        name: In the tar: ``state/journal.db``, ``incoming/STORE/NAME``, ``config/etc/…``,
            ``archive/SINK/…``, ``joblog/…``.
        size: In bytes.
        sha256: Of its content.
    """

    name: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds.

    Attributes:
        format: See ``FORMAT``.
        steward: Version of the Steward that made it.
        host: Name of the host that it was made on.
        made_at: When the databases were as they are in it.
        running: Whether the daemon ran.
        state_dir: Where the state directory was.
        owner: Name of the user whose it was; the uid where it had no name.
        config: Path of the configuration file; "" for none.
        head: Position of the journal's last event.
        stores: For each store of waiting scripts the directory that it was.
        trees: For each tree of files that is in it (``archive/SINK``, ``joblog``) where that was.
        ledger: Where the ledger is, if not in it: a database's URL, without its password.
        missing: How many waiting scripts were purged or trimmed meanwhile.
        members: Every other file in it.
    """

    steward: str
    host: str
    made_at: datetime
    state_dir: str
    owner: str
    head: int
    format: int = FORMAT
    running: bool = False
    config: str = ""
    stores: dict[str, str] = msgspec.field(default_factory=dict)
    trees: dict[str, str] = msgspec.field(default_factory=dict)
    ledger: str = ""
    missing: int = 0
    members: tuple[Member, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Size of everything in it, unpacked."""
        return sum(member.size for member in self.members)


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
