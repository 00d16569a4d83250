"""Export targets of ``steward archive export``: a directory, or a tar on disk or stdout.

:func:`open_target` selects :class:`DirectoryTarget` or :class:`TarTarget` from the name or format.
Both write a ``MANIFEST.jsonl`` of lengths and checksums. A file has its final name only when it is
complete: until then :class:`PartialFile` calls it ``NAME.part``, locked against other exports; a
later export replaces what a killed one left there.
"""

import contextlib
import errno
import fcntl
import io
import os
import stat
import sys
import tarfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import SpooledTemporaryFile
from types import TracebackType
from typing import IO, Any, Protocol, Self

import msgspec

from steward.archive.export import ExportFile
from steward.cli.output import print_warning
from steward.core.errors import StewardError, UsageError
from steward.core.files import open_directory, rename_new, sync_filesystem

PARTIAL_SUFFIX = ".part"
"""Suffix of a file until it is complete."""


class PartialFile:
    """A file being written as ``NAME.part``, renamed when complete.

    Args:
        path: Final path of the file.

    Raises:
        OSError: It cannot be written, the final name exists, or another process writes it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        directory, self._name = os.path.split(os.path.abspath(path))
        self._partial_name = self._name + PARTIAL_SUFFIX
        self._directory_fd = open_directory(directory)
        weakref.finalize(self, os.close, self._directory_fd)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        # Private like its content, whatever the umask.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._partial_name, flags, 0o600, dir_fd=self._directory_fd)
        try:
            self._lock(fd)
            self.file: IO[bytes] = os.fdopen(fd, "wb")
        except BaseException:
            os.close(fd)
            raise

    def _lock(self, fd: int) -> None:
        status = os.fstat(fd)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_nlink != 1
        ):
            # In a directory that others can write, somebody may have planted the file.
            message = "a file that this export did not create has this name"
            raise FileExistsError(errno.EEXIST, message, self._path + PARTIAL_SUFFIX)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_same = os.path.samestat(status, self._stat_partial())
        except (BlockingIOError, FileNotFoundError):
            is_same = False
        if not is_same:
            message = "another export is writing to it"
            raise BlockingIOError(errno.EAGAIN, message, self._path + PARTIAL_SUFFIX)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)

    def finish(self) -> None:
        """Sync the file to disk and rename it to its final name.

        Raises:
            FileExistsError: A file of the final name exists by now.
            OSError: The file system reports a failed write.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
        rename_new(self._directory_fd, self._partial_name, self._name)
        os.fsync(self._directory_fd)

    def remove(self) -> None:
        """Delete the file before it is finished or closed."""
        os.unlink(self._partial_name, dir_fd=self._directory_fd)

    def _stat_partial(self) -> os.stat_result:
        return os.stat(self._partial_name, dir_fd=self._directory_fd, follow_symlinks=False)


MANIFEST_NAME = "MANIFEST.jsonl"
"""Name of the manifest: a line for each file, with length and SHA-256."""


class ExportError(StewardError):
    """Error: the export cannot be written."""


class ExportTarget(Protocol):
    """Destination of an export; as a context manager it writes the manifest at its end."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def add(self, file: ExportFile) -> None:
        """Write one file.

        Raises:
            ExportError: It cannot be written, or its path is unsafe.
        """


FORMATS = ("dir", "tar", "tar.gz", "tar.xz", "tar.zst")
"""Formats of an export."""
_FORMAT_OF_SUFFIX = {
    **{f".{name}": name for name in FORMATS[1:]},
    ".tgz": "tar.gz",
    ".txz": "tar.xz",
    ".tzst": "tar.zst",
}
"""Format of each suffix of a name."""
_COMPRESSION_SUFFIXES = {".gz": "tar.gz", ".xz": "tar.xz", ".zst": "tar.zst"}
"""Suffixes without ``.tar`` that a name may have if a format is given."""
_FOREIGN_SUFFIXES = (
    *(".zip", ".7z", ".rar", ".tar", ".tgz", ".txz", ".tzst", ".tbz", ".tbz2", ".tlz", ".tar.z"),
    *(".gz", ".xz", ".zst", ".bz2", ".lz", ".lz4", ".lzma", ".lzo"),
)
"""Lower-case suffixes of file formats that nobody uses for a directory."""
_MANIFEST_MEMORY_BYTES = 4 << 20
"""Largest manifest kept in memory, in bytes; beyond that a temporary file."""


def open_target(name: str, requested_format: str = "") -> ExportTarget:
    """Return the target that a name and a format select.

    Args:
        name: A directory, a file, or ``-`` for standard output.
        requested_format: One of :data:`FORMATS`; "" derives it from the suffix: tar
            for ``-``, else a directory.

    Raises:
        UsageError: The format is unknown, does not fit standard output, or contradicts the name's
            suffix.
    """
    if requested_format and requested_format not in FORMATS:
        raise UsageError(
            f"format {requested_format!r} is unknown: use {', '.join(FORMATS)}", requested_format
        )
    implied_format = next(
        (file_format for suffix, file_format in _FORMAT_OF_SUFFIX.items() if name.endswith(suffix)),
        "",
    )
    chosen_format = requested_format or implied_format
    if name == "-":
        if chosen_format == "dir":
            raise UsageError(
                "cannot write a directory to stdout: give a directory as target, or use "
                "--format tar"
            )
        return TarTarget(name, chosen_format or "tar")
    if requested_format and requested_format != (
        implied_format or _find_tar_format(name, requested_format) or requested_format
    ):
        raise UsageError(
            f"--format is {requested_format}, but {name} has the suffix of another format: "
            "change one of them",
            name,
        )
    if not chosen_format and name.lower().endswith(_FOREIGN_SUFFIXES):
        raise UsageError(
            f"cannot derive a format from the name {name}: use the suffix "
            f"{', '.join(_FORMAT_OF_SUFFIX)}, or give --format",
            name,
        )
    return DirectoryTarget(name) if chosen_format in {"", "dir"} else TarTarget(name, chosen_format)


def _find_tar_format(name: str, requested_format: str) -> str:
    """Return the tar format of a name without ``.tar``, if a tar is requested."""
    if requested_format == "dir":
        return ""
    return next(
        (
            file_format
            for suffix, file_format in _COMPRESSION_SUFFIXES.items()
            if name.endswith(suffix)
        ),
        "",
    )


def check_path(path: str) -> str:
    """Return a relative path if it stays below its root.

    Raises:
        ExportError: It does not. The daemon sends safe paths; the client does not rely on it.
    """
    parts = path.split("/")
    if not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ExportError(f"unsafe path {path!r} from the daemon: is it of another release?", path)
    return path


def format_manifest_line(file: ExportFile) -> bytes:
    """Return a file's line in the manifest."""
    return (
        msgspec.json.encode(
            {
                "path": file.path,
                "length": len(file.data),
                "sha256": file.sha256,
                "script_key": file.script_key,
                "job": file.job,
            }
        )
        + b"\n"
    )


class DirectoryTarget:
    """Export to a directory, created if absent; a foreign file or another export in it is an error.

    The manifest is called ``MANIFEST.jsonl.part`` until all files are written; its lines list the
    complete files. An interrupted export can be repeated in the same directory: identical files are
    kept.

    Args:
        path: The directory.
    """

    def __init__(self, path: str) -> None:
        self._root = path
        self._manifest: PartialFile | None = None

    def __enter__(self) -> Self:
        try:
            os.close(open_directory(self._root, create_mode=0o700))
            self._manifest = PartialFile(os.path.join(self._root, MANIFEST_NAME))
        except OSError as error:
            raise self._make_error(error) from error
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._manifest is not None, "used as a context"
        try:
            with self._manifest.file:
                if error_type is None:
                    sync_filesystem(self._manifest.file.fileno())
                    self._manifest.finish()
        except OSError as os_error:
            raise self._make_error(os_error) from os_error
        finally:
            if os.path.exists(os.path.join(self._root, MANIFEST_NAME + PARTIAL_SUFFIX)):
                print_warning(
                    f"{self._root} is incomplete: {MANIFEST_NAME}{PARTIAL_SUFFIX} lists its files"
                )

    def add(self, file: ExportFile) -> None:
        """Write one file; see :class:`ExportTarget`."""
        assert self._manifest is not None, "used as a context"
        path = os.path.join(self._root, check_path(file.path))
        try:
            directory_fd = open_directory(os.path.dirname(path), create_mode=0o700)
            try:
                name = os.path.basename(path)
                if not _has_same_content(directory_fd, name, file.data):
                    _write_atomically(directory_fd, name, file)
            finally:
                os.close(directory_fd)
            self._manifest.file.write(format_manifest_line(file))
        except OSError as error:
            raise self._make_error(error) from error

    def _make_error(self, error: OSError) -> ExportError:
        path = error.filename or self._root
        return ExportError(f"cannot export to {path}: {error.strerror}", self._root)


def _has_same_content(directory_fd: int, name: str, data: bytes) -> bool:
    """Return True if an interrupted export already wrote this file.

    Raises:
        FileExistsError: A different file has this name.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=directory_fd)
    except FileNotFoundError:
        return False
    with os.fdopen(fd, "rb") as existing_file:
        if os.fstat(existing_file.fileno()).st_size != len(data) or existing_file.read() != data:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
    return True


def _write_atomically(directory_fd: int, name: str, file: ExportFile) -> None:
    """Write a file atomically, replacing the rest of an earlier attempt."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name + PARTIAL_SUFFIX, dir_fd=directory_fd)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name + PARTIAL_SUFFIX, flags, 0o600, dir_fd=directory_fd), "wb") as out:
        out.write(file.data)
        out.flush()
        modified_s = file.modified.timestamp()
        os.utime(out.fileno(), (modified_s, modified_s))
    os.rename(name + PARTIAL_SUFFIX, name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)


class TarTarget:
    """Export to a tar, written as a stream; the same files give the same bytes.

    A file is called ``NAME.part`` until it is complete, and deleted if the export fails.

    Args:
        path: The file, or ``-`` for standard output.
        kind: ``tar``, ``tar.gz``, ``tar.xz`` or ``tar.zst``.
    """

    def __init__(self, path: str, tar_format: str) -> None:
        self._path = path
        self._format = tar_format
        self._exit_stack = ExitStack()
        self._tar: tarfile.TarFile | None = None
        self._partial_file: PartialFile | None = None
        self._manifest: IO[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            # A tar member needs its size first, and the manifest of a million jobs would fill
            # memory.
            self._manifest = self._exit_stack.enter_context(
                SpooledTemporaryFile(max_size=_MANIFEST_MEMORY_BYTES)
            )
            if self._path == "-":
                out: IO[bytes] = sys.stdout.buffer
            else:
                self._partial_file = PartialFile(self._path)
                out = self._exit_stack.enter_context(self._partial_file.file)
                self._exit_stack.push(self._finish_file)
            compressed = self._exit_stack.enter_context(_open_compressor(self._format, out))
            self._tar = self._exit_stack.enter_context(tarfile.open(mode="w|", fileobj=compressed))
        except BaseException as error:
            self._exit_stack.__exit__(type(error), error, error.__traceback__)
            if isinstance(error, OSError):
                raise self._make_error(error) from error
            raise
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error_type is None:
                assert self._manifest is not None, "used as a context"
                with self._exit_stack:
                    size = self._manifest.tell()
                    self._manifest.seek(0)
                    self._add_member(MANIFEST_NAME, self._manifest, size, 0)
            else:
                # Without the final blocks of a tar, so that it does not look complete in a pipe.
                self._exit_stack.__exit__(error_type, error, trace)
        except BrokenPipeError:
            raise
        except OSError as os_error:
            raise self._make_error(os_error) from os_error

    def _finish_file(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Rename a complete file to its final name, or delete an incomplete one."""
        assert self._partial_file is not None, "only called for a file"
        try:
            if error_type is None:
                self._partial_file.finish()
        except BaseException:
            self._partial_file.remove()
            raise
        if error_type is not None:
            self._partial_file.remove()

    def add(self, file: ExportFile) -> None:
        """Write one file; see :class:`ExportTarget`."""
        assert self._manifest is not None, "used as a context"
        data = io.BytesIO(file.data)
        modified_s = int(file.modified.timestamp())
        self._add_member(check_path(file.path), data, len(file.data), modified_s)
        self._manifest.write(format_manifest_line(file))

    def _add_member(self, name: str, data: IO[bytes], size: int, modified_s: int) -> None:
        assert self._tar is not None, "used as a context"
        # Reproducible: TarInfo's default owner is 0 without a name, whoever exports.
        info = tarfile.TarInfo(name)
        info.size = size
        info.mode = 0o600
        info.mtime = modified_s
        try:
            self._tar.addfile(info, data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._make_error(error) from error

    def _make_error(self, error: OSError) -> ExportError:
        path = error.filename or self._path
        return ExportError(f"cannot write {path}: {error.strerror or error}", self._path)


@contextmanager
def _open_compressor(tar_format: str, out: IO[bytes]) -> Iterator[IO[bytes]]:
    """Return a stream that compresses into ``out`` and leaves ``out`` open."""
    compressed: Any
    if tar_format == "tar.gz":
        import gzip

        # Without name and time, so that the bytes do not depend on when it was written.
        compressed = gzip.GzipFile(filename="", mode="wb", fileobj=out, mtime=0)
    elif tar_format == "tar.xz":
        import lzma

        compressed = lzma.LZMAFile(out, "wb")  # noqa: SIM115 - closed below
    elif tar_format == "tar.zst":
        import zstandard

        compressed = zstandard.ZstdCompressor().stream_writer(out, closefd=False)
    else:
        yield out
        return
    with compressed:
        yield compressed
