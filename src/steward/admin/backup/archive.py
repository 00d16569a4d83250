"""Backup file format: a tar with a manifest of checksums, compressed by zstd.

The manifest (:class:`BackupManifest`) is the last member. ``create_backup_file`` opens a new
backup, which :class:`BackupWriter` fills; ``verify_backup`` verifies one against its manifest;
``read_members`` and ``read_member`` read members.

The user who restores a backup may have root's rights: readers reject a member whose name or type
leads out of the backup's directories (``is_safe_member``), and every file has its checksum. Still,
whoever can write backups can have anything restored: keep them as safe as their contents.
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
from steward.core.files import describe_os_error, remove_unfinished, replace_file

if TYPE_CHECKING:
    from collections.abc import Collection


FORMAT_VERSION: Final = 1
"""Version of the file format; a later one is rejected."""
MANIFEST_NAME: Final = "steward-backup.json"
"""Name of the manifest in the tar."""
SUFFIX: Final = ".tar.zst"
"""File name suffix of a backup."""
STATE_PREFIX: Final = "state/"
"""Prefix of members from the state directory."""
INCOMING_PREFIX: Final = "incoming/"
"""Prefix of incoming scripts and environments, followed by the store's name."""
CONFIG_PREFIX: Final = "config/"
"""Prefix of the configuration and the files that it names."""
ARCHIVE_PREFIX: Final = "archive/"
"""Prefix of files of files sinks, followed by the sink's name."""
JOB_LOG_TREE: Final = "joblog"
"""Directory of the job log in the tar."""


class BackupError(StewardError):
    """A backup cannot be made, or cannot be restored."""


class BackupUsage(BackupError, UsageError):
    """The given name cannot be a backup's."""


class BackupUnavailable(Unavailable):
    """A file or directory cannot be read or written now."""


class BackupMember(msgspec.Struct, frozen=True, kw_only=True):
    """One file in a backup.

    Attributes:
        name: Name in the tar: ``state/journal.db``, ``incoming/STORE/NAME``, ``config/etc/…``,
            ``archive/SINK/…``, ``joblog/…``.
        size: Size in bytes.
        sha256: Hex digest of its content.
    """

    name: str
    size: int
    sha256: str


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Manifest of a backup: its origin and contents.

    Attributes:
        format: See ``FORMAT_VERSION``.
        steward: Version of the Steward that made it.
        host: Name of the host that it was made on.
        made_at: Time of the databases' state.
        running: Whether the daemon ran.
        state_dir: Path of the state directory.
        owner: Name of its owner; the uid if it had no name.
        config: Path of the configuration file; "" for none.
        head: Position of the journal's last event.
        stores: Directory of each incoming store.
        trees: Directory of each included tree of files (``archive/SINK``, ``joblog``).
        ledger: URL of a ledger outside the backup, without its password; "" for none.
        missing: Number of incoming files that were purged or trimmed meanwhile.
        members: Every other file in it.
    """

    steward: str
    host: str
    made_at: datetime
    state_dir: str
    owner: str
    head: int
    format: int = FORMAT_VERSION
    running: bool = False
    config: str = ""
    stores: dict[str, str] = msgspec.field(default_factory=dict)
    trees: dict[str, str] = msgspec.field(default_factory=dict)
    ledger: str = ""
    missing: int = 0
    members: tuple[BackupMember, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Unpacked size of all members, in bytes."""
        return sum(member.size for member in self.members)


_COMPRESSION_LEVEL: Final = 3
"""Compression level of zstd."""
_ACL_NAMES: Final = ("system.posix_acl_access", "system.posix_acl_default")
ACL_HEADER_PREFIX: Final = "STEWARD."
"""Prefix of an ACL's name in a member's headers."""


class BackupWriter:
    """Writer of a new backup; see :func:`create_backup_file`.

    Args:
        tar: Tar file, open for streaming.
    """

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self.members: list[BackupMember] = []

    def add_file(self, name: str, path: str) -> None:
        """Add a file; raises FileNotFoundError if it does not exist."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.add_open_file(name, fd)

    def add_open_file(self, name: str, fd: int) -> None:
        """Add the present content of an open file, without later appends, and close it."""
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            info = _make_tar_info(name, status)
            info.pax_headers = _read_acls(fd)
            reader = _DigestingReader(file, status.st_size)
            self._tar.addfile(info, reader)
        self.members.append(BackupMember(name=name, size=info.size, sha256=reader.get_hexdigest()))

    def add_directory(self, name: str, path: str) -> None:
        """Add a directory entry, with its mode and ACL."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            info = _make_tar_info(name, os.fstat(fd))
            info.type, info.size = tarfile.DIRTYPE, 0
            info.pax_headers = _read_acls(fd)
            self._tar.addfile(info)
        finally:
            os.close(fd)

    def add_link(self, name: str, target: str) -> None:
        """Add a symbolic link."""
        info = tarfile.TarInfo(name)
        info.type, info.linkname = tarfile.SYMTYPE, target
        self._tar.addfile(info)

    def finish(self, manifest: BackupManifest) -> BackupManifest:
        """Add the manifest as the last member; return it complete."""
        full_manifest = msgspec.structs.replace(manifest, members=tuple(self.members))
        data = msgspec.json.format(msgspec.json.encode(full_manifest), indent=1) + b"\n"
        info = tarfile.TarInfo(MANIFEST_NAME)
        info.size, info.mode = len(data), 0o600
        info.mtime = int(full_manifest.made_at.timestamp())
        self._tar.addfile(info, io.BytesIO(data))
        return full_manifest


@contextmanager
def create_backup_file(path: str, trusted_uids: "Collection[int]" = ()) -> "Iterator[BackupWriter]":
    """Create a backup atomically and yield its writer: the file exists whole, or not at all.

    Args:
        path: Name of the backup, which must not exist.
        trusted_uids: Uids that may own the directory, besides root.

    Raises:
        BackupError: A file of that name exists.
        BackupUnavailable: It cannot be written.
    """
    import zstandard

    if os.path.lexists(path):
        raise BackupError(f"{path} exists already: choose another name", path)
    try:
        remove_unfinished(path, trusted=trusted_uids)
        with replace_file(path, 0o600, is_new=True, trusted=trusted_uids) as file:
            compressor = zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL, write_checksum=True)
            with (
                compressor.stream_writer(file, closefd=False) as stream,
                tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar,
            ):
                yield BackupWriter(tar)
    except FileExistsError:
        raise BackupError(f"{path} exists already: choose another name", path) from None
    except OSError as error:
        raise BackupUnavailable(
            f"cannot write {path}: {describe_os_error(error, path)}", path
        ) from error


class _DigestingReader(io.RawIOBase):
    """Reader of a file up to a size, which computes its SHA-256."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        super().__init__()
        self._file = file
        self._remaining = size
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        count = self._remaining if size < 0 else min(size, self._remaining)
        data = self._file.read(count)
        self._remaining -= len(data)
        self._hash.update(data)
        return data

    def get_hexdigest(self) -> str:
        return self._hash.hexdigest()


def _make_tar_info(name: str, status: os.stat_result) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = status.st_size
    info.mode = status.st_mode & 0o7777
    info.mtime = int(status.st_mtime)
    info.uid, info.gid = status.st_uid, status.st_gid
    return info


def _read_acls(fd: int) -> dict[str, str]:
    """Return the POSIX ACLs of an open file, by name."""
    acls = {}
    for name in _ACL_NAMES:
        try:
            acls[f"{ACL_HEADER_PREFIX}{name}"] = os.getxattr(fd, name).hex()
        except OSError:
            continue  # it has none, or its file system knows none
    return acls


_CHUNK_BYTES: Final = 1 << 20
"""Bytes read at once."""
_MAX_MANIFEST_BYTES: Final = 1 << 30
"""Largest manifest, in bytes."""
_MEMBER_PREFIXES: Final = (
    STATE_PREFIX,
    INCOMING_PREFIX,
    CONFIG_PREFIX,
    ARCHIVE_PREFIX,
    f"{JOB_LOG_TREE}/",
)

MemberCallback = Callable[[tarfile.TarInfo, IO[bytes] | None], None]
"""Callback for each member, with a reader if it is a file."""


def verify_backup(path: str) -> BackupManifest:
    """Verify a backup against its manifest, and return that.

    Raises:
        BackupError: It is damaged, cut off, no backup, or of a later format.
        BackupUnavailable: It cannot be read.
    """
    members: dict[str, BackupMember] = {}
    manifest: BackupManifest | None = None

    def take(info: tarfile.TarInfo, file: IO[bytes] | None) -> None:
        nonlocal manifest
        if manifest is not None:
            raise BackupError(f"{path} is damaged: data after the manifest", path)
        if info.name == MANIFEST_NAME:
            manifest = _decode_manifest(path, info, file)
        elif file is not None:
            if info.name in members:
                raise BackupError(f"{path} is damaged: it contains {info.name} twice", path)
            members[info.name] = copy_member(info, file, lambda _: None)

    read_members(path, take)
    if manifest is None:
        raise BackupError(f"{path} is incomplete, or not a backup of Steward", path)
    expected_members = {member.name: member for member in manifest.members}
    for name in sorted(expected_members.keys() | members.keys()):
        if expected_members.get(name) != members.get(name):
            raise BackupError(f"{path} is damaged: the checksum of {name} differs", path)
    return manifest


def read_members(path: str, callback: MemberCallback) -> None:
    """Call a function for each member of a backup, in order.

    Raises:
        BackupError: It is damaged, or a name leads out of it.
        BackupUnavailable: It cannot be read.
        OSError: The function failed.
    """
    with _open_tar(path) as tar:
        for info in tar:
            if info.name != MANIFEST_NAME and not is_safe_member(info):
                raise BackupError(
                    f"{path} is not a backup of Steward: it contains {info.name!r}", path
                )
            callback(info, tar.extractfile(info) if info.isreg() else None)


def read_member(path: str, name: str) -> bytes:
    """Return the content of one member of a backup.

    Raises:
        BackupError, BackupUnavailable: As :func:`read_members`; or there is no such member.
    """
    contents: list[bytes] = []

    def take(info: tarfile.TarInfo, file: IO[bytes] | None) -> None:
        if info.name == name and file is not None:
            contents.append(file.read())

    read_members(path, take)
    if not contents:
        raise BackupError(f"{path} lacks {name}", name)
    return contents[0]


def copy_member(
    info: tarfile.TarInfo, file: IO[bytes], write: Callable[[bytes], object]
) -> BackupMember:
    """Copy a member's content to ``write``, and return its size and checksum."""
    digest = hashlib.sha256()
    while data := file.read(_CHUNK_BYTES):
        digest.update(data)
        write(data)
    return BackupMember(name=info.name, size=info.size, sha256=digest.hexdigest())


def is_safe_member(info: tarfile.TarInfo) -> bool:
    """Return whether a member's type and name are ones that we write, inside the backup's trees."""
    parts = info.name.split("/")
    is_job_log_root = info.isdir() and info.name == JOB_LOG_TREE
    if not is_job_log_root and not info.name.startswith(_MEMBER_PREFIXES):
        return False
    if any(part in ("", ".", "..") for part in parts) or "\0" in info.name:
        return False
    if info.issym():
        return (
            info.name.startswith(STATE_PREFIX)
            and "/" not in info.linkname
            and info.linkname != ".."
        )
    return info.isreg() or info.isdir()


@contextmanager
def _open_tar(path: str) -> Iterator[tarfile.TarFile]:
    """Open a backup's tar for streaming; translate errors."""
    import zstandard

    try:
        with (
            _BackupFile(path) as file,
            zstandard.ZstdDecompressor().stream_reader(file) as stream,
            tarfile.open(fileobj=stream, mode="r|") as tar,
        ):
            yield tar
    except (zstandard.ZstdError, tarfile.TarError, EOFError) as error:
        # The libraries' messages name byte offsets, which help nobody.
        raise BackupError(f"cannot unpack {path}: damaged, or not a backup", path) from error


class _BackupFile(io.FileIO):
    """File of a backup. Its errors are BackupUnavailable; an OSError comes from another file."""

    def __init__(self, path: str) -> None:
        with _translate_read_errors(path):
            super().__init__(path)
        self._path = path

    def read(self, size: int | None = -1, /) -> bytes:
        with _translate_read_errors(self._path):
            return super().read(size)


@contextmanager
def _translate_read_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BackupUnavailable(f"cannot read {path}: {error.strerror or error}", path) from error


def _decode_manifest(path: str, info: tarfile.TarInfo, file: IO[bytes] | None) -> BackupManifest:
    """Decode a manifest after checking its format version."""
    data = file.read() if file is not None and info.size < _MAX_MANIFEST_BYTES else b""
    try:
        version = msgspec.json.decode(data, type=_Format).format
        if version > FORMAT_VERSION:
            raise BackupError(
                f"{path} was written by a newer Steward (format {version}, this one supports "
                f"{FORMAT_VERSION}): install that version",
                path,
            )
        return msgspec.json.decode(data, type=BackupManifest)
    except msgspec.MsgspecError as error:
        raise BackupError(f"{path} is damaged: cannot read its manifest: {error}") from error


class _Format(msgspec.Struct, frozen=True):
    format: int
