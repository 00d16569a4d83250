"""Incoming stores: where capture writes scripts and environments until every sink has them.

A :class:`IncomingStore` is one flat directory: ``.incoming`` on the archive's file system, or
``incoming`` in the state directory if there is no such archive or it is unavailable. A file
is written once, under a name that holds cluster, job, spool time and length: writing it again
is harmless, and the name alone identifies a complete file whose event was lost in a crash.
Sinks link or read files here; trimming the journal deletes them. :class:`IncomingStores` holds all
stores of a configuration; ``make_stores`` makes it.

Capture calls ``check`` and ``write`` for the scripts and environments of a batch, then
``take_unsynced``; another thread calls ``UnsyncedFiles.sync`` and appends the job.script events
when the files are durable. The events name store and file.
"""

import errno
import hashlib
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime

import msgspec

from steward.core.config import Settings
from steward.core.errors import StewardError, Unavailable
from steward.core.events import IncomingFile, JobScript, utc_now
from steward.core.files import (
    StatusWriteError,
    find_network_type,
    read_status,
    sync_filesystem,
    write_status,
)
from steward.core.processes import kill_group

log = logging.getLogger(__name__)

ARCHIVE_DIRECTORY = ".incoming"
"""Directory of an incoming store in an archive's root."""
STATE_STORE = "state"
"""Name of the incoming store in the state directory."""
MARKER = ".steward-archive"
"""File in an archive's root: if it is missing, the archive's file system is not mounted."""

_MAX_SINGLE_SYNCS = 8
"""Most files to sync one by one; a larger batch is synced with one syncfs(2)."""

_FRESH_S = 600.0
"""Age, in seconds, up to which a count of leftovers justifies the detaching of a consumer; after
that time without a result, the count starts again, because a file system may have hung."""

COUNT_FILES = """
import os, sys
os.nice(10)
total = 0
for directory in sys.argv[1:]:
    for entry in os.scandir(directory):
        try:
            total += entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            pass
print(total)
"""
"""Program that prints the size of all files in its arguments' directories, in bytes."""

_COUNT_FILE = "incoming-count.json"
"""Status file in the state directory about a count that cannot be killed."""

_NAME = re.compile(
    r"(?P<cluster>[A-Za-z0-9_-]+)\.(?P<job>\d+)\.(?P<mtime>\d+)\.(?P<length>\d+)\.(?P<what>script|env)"
)


class StoreError(StewardError):
    """A store is misconfigured or has unexpected contents."""


class StoreUnavailable(Unavailable):
    """A store cannot be written or read now."""


class IncomingName(msgspec.Struct, frozen=True):
    """Parts of the name of an incoming file; ``length`` is in bytes."""

    cluster: str
    job_id: int
    spool_mtime_ns: int
    length: int
    what: str
    filename: str


def make_incoming_filename(
    cluster: str, job_id: int, spool_mtime_ns: int, length: int, kind: str
) -> str:
    """Make the name of an incoming file; ``kind`` is ``script`` or ``env``."""
    return f"{cluster}.{job_id}.{spool_mtime_ns}.{length}.{kind}"


def parse_incoming_filename(filename: str) -> IncomingName | None:
    """Parse the name of an incoming file; None for a foreign name."""
    match = _NAME.fullmatch(filename)
    if match is None:
        return None
    return IncomingName(
        cluster=match["cluster"],
        job_id=int(match["job"]),
        spool_mtime_ns=int(match["mtime"]),
        length=int(match["length"]),
        what=match["what"],
        filename=filename,
    )


class IncomingStore:
    """One directory of incoming files.

    Args:
        name: Name in events: ``state``, or ``archive.<sink>``.
        directory: The directory; :meth:`prepare` creates it with mode 0700.
        marker: File that must exist for the store to be used; "" for none.
    """

    def __init__(self, name: str, directory: str, marker: str = "") -> None:
        self.name = name
        self.directory = directory
        self._marker = marker
        self._fd = -1
        self._unsynced: list[int] = []
        self._has_more_unsynced = False

    def prepare(self) -> None:
        """Open the directory; create it if its parent exists.

        Capture must never wait for a file server: an archive on a network file
        system receives its bytes through the state directory's store, by copy.

        Raises:
            StoreUnavailable: The marker is missing or the directory cannot be used.
            StoreError: The directory is on a network file system.
        """
        self.close()
        self._refuse_network()
        try:
            if self._marker:
                os.stat(self._marker)
            try:
                os.mkdir(self.directory, 0o700)
            except FileExistsError:
                os.chmod(self.directory, 0o700)
            self._fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise self._make_unavailable(error) from error

    def check(self) -> None:
        """Check that the directory is still the one that was opened; reopen a replaced one.

        Raises:
            StoreUnavailable: The file system was unmounted, or the directory is gone or unusable.
            StoreError: The directory is on a network file system (by now).
        """
        if self._fd < 0:
            self.prepare()
            return
        self._refuse_network()
        try:
            if self._marker:
                os.stat(self._marker)
            current = os.stat(self.directory)
            opened = os.fstat(self._fd)
        except OSError as error:
            self.close()
            raise self._make_unavailable(error) from error
        if (current.st_dev, current.st_ino) != (opened.st_dev, opened.st_ino):
            self.prepare()

    def _is_remote(self) -> bool:
        """Return whether the store is on a network file system, without access to its server.

        Raises:
            StoreUnavailable: The kernel's list of mounts cannot be read.
        """
        try:
            return bool(self._marker and find_network_type(self.directory))
        except OSError as error:
            raise StoreUnavailable(
                f"cannot determine the file system of {self.directory}: {error}", self.directory
            ) from error

    def _refuse_network(self) -> None:
        if self._is_remote():
            # Closing does not contact the server: this descriptor was opened on a local disk.
            self.close()
            raise StoreError(
                f"{self.directory} is on a network file system, where capture does not write: "
                "choose a local directory",
                self.directory,
            )

    def write(self, filename: str, data: bytes) -> IncomingFile:
        """Write bytes once; the same bytes under the same name are a harmless repeat.

        Durable only after :meth:`sync`.

        Raises:
            StoreUnavailable: The disk is full, read-only or gone.
        """
        if self._fd < 0:
            self.prepare()
        try:
            self._write(filename, data)
        except OSError as error:
            raise self._make_unavailable(error) from error
        return IncomingFile(
            path=filename, length=len(data), sha256=hashlib.sha256(data).hexdigest()
        )

    def _write(self, filename: str, data: bytes) -> None:
        """Write a file, or find it complete from before; replace a truncated one."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(filename, flags, 0o600, dir_fd=self._fd)
        except FileExistsError:
            if self._has_content(filename, data):
                # Written before, but perhaps not durable: the sync may be what failed.
                read_flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                self._sync_later(os.open(filename, read_flags, dir_fd=self._fd))
                return
            # Truncated by a crash. Nothing links to it yet, since its event was never sent.
            os.unlink(filename, dir_fd=self._fd)
            fd = os.open(filename, flags, 0o600, dir_fd=self._fd)
        try:
            written = os.write(fd, data)
            while written < len(data):
                written += os.write(fd, memoryview(data)[written:])
        except OSError:
            os.close(fd)
            os.unlink(filename, dir_fd=self._fd)
            raise
        self._sync_later(fd)

    def _sync_later(self, fd: int) -> None:
        if len(self._unsynced) < _MAX_SINGLE_SYNCS:
            self._unsynced.append(fd)
        else:
            self._has_more_unsynced = True
            os.close(fd)

    def _has_content(self, filename: str, data: bytes) -> bool:
        fd = os.open(filename, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            return os.fstat(fd).st_size == len(data) and _read_all(fd) == data
        finally:
            os.close(fd)

    def take_unsynced(self) -> "UnsyncedFiles":
        """Return the files written since the last call, for another thread to sync."""
        batch = UnsyncedFiles(self, self._fd, self._unsynced, self._has_more_unsynced)
        self._unsynced, self._has_more_unsynced = [], False
        return batch

    def sync(self) -> None:
        """Make all written files durable.

        Raises:
            StoreUnavailable: The file system reported an error.
        """
        self.take_unsynced().sync()

    def get_path(self, file: IncomingFile) -> str:
        """Return the absolute path of an incoming file.

        Raises:
            StoreError: The name is not that of an incoming file.
        """
        if parse_incoming_filename(file.path) is None:
            raise StoreError(f"{file.path!r} is not the name of a captured file", file)
        return os.path.join(self.directory, file.path)

    def open(self, file: IncomingFile) -> int:
        """Open an incoming file for reading; the caller closes the descriptor.

        Raises:
            FileNotFoundError: The file is not here (any more).
            StoreUnavailable: The store cannot be read now.
        """
        path = self.get_path(file)
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            if self._marker and not os.path.exists(self._marker):
                missing = FileNotFoundError(errno.ENOENT, "the file system is gone", self._marker)
                raise self._make_unavailable(missing) from None
            raise
        except OSError as error:
            raise self._make_unavailable(error) from error

    def read(self, file: IncomingFile) -> bytes:
        """Read an incoming file; raises as :meth:`open` does."""
        fd = self.open(file)
        try:
            return _read_all(fd)
        except OSError as error:
            raise self._make_unavailable(error) from error
        finally:
            os.close(fd)

    def unlink(self, filenames: Iterable[str]) -> None:
        """Delete incoming files that every sink has passed; missing ones are ignored.

        Raises:
            StoreUnavailable: The store cannot be written now.
        """
        if self._fd < 0:
            self.prepare()
        for filename in filenames:
            try:
                os.unlink(filename, dir_fd=self._fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._make_unavailable(error) from error

    def iterate_names(self) -> Iterator[IncomingName]:
        """Yield the names of incoming files; foreign files are skipped.

        A store on a network file system yields none: capture never writes there.

        Raises:
            StoreUnavailable: The directory cannot be listed.
        """
        if self._is_remote():
            return
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    name = parse_incoming_filename(entry.name)
                    if name is not None:
                        yield name
        except OSError as error:
            raise self._make_unavailable(error) from error

    def find_local_directory(self) -> str:
        """Return the directory; "" if it is missing, or on a network file system."""
        try:
            is_usable = not self._is_remote() and os.path.isdir(self.directory)
        except StoreUnavailable:
            return ""
        return self.directory if is_usable else ""

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory and unsynced files."""
        for fd in self._unsynced:
            os.close(fd)
        self._unsynced, self._has_more_unsynced = [], False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _make_unavailable(self, error: OSError) -> StoreUnavailable:
        if self._marker and error.errno == errno.ENOENT and not os.path.exists(self._marker):
            root = os.path.dirname(self._marker)
            return StoreUnavailable(
                f"archive {root} has no {MARKER}: is its file system mounted?", self.directory
            )
        return StoreUnavailable(f"cannot use {self.directory}: {error.strerror}", self.directory)


class UnsyncedFiles:
    """Files written to a store and not yet durable; owns their descriptors."""

    def __init__(
        self, store: IncomingStore, directory_fd: int, fds: list[int], has_more: bool
    ) -> None:
        self._store = store
        self._fds = fds
        self._directory_fd = os.dup(directory_fd) if fds else -1
        self._has_more = has_more

    def sync(self) -> None:
        """Make the files durable, many of them by one syncfs(2).

        Raises:
            StoreUnavailable: The file system reported an error.
        """
        if not self._fds:
            return
        try:
            if self._has_more:
                sync_filesystem(self._directory_fd)
            else:
                for fd in self._fds:
                    os.fsync(fd)
                os.fsync(self._directory_fd)
        except OSError as error:
            raise StoreUnavailable(
                f"cannot sync {self._store.directory}: {error.strerror}", self._store.directory
            ) from error
        finally:
            for fd in (*self._fds, self._directory_fd):
                os.close(fd)
            self._fds = []


class IncomingStores:
    """All stores of a configuration, by their name in events."""

    def __init__(self, stores: Iterable[IncomingStore]) -> None:
        self._by_name = {store.name: store for store in stores}

    def __iter__(self) -> Iterator[IncomingStore]:
        """Yield the stores, the preferred one first."""
        return iter(self._by_name.values())

    def get(self, name: str) -> IncomingStore:
        """Return the store that an event names.

        Raises:
            StoreError: The configuration has no such store (any more).
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise StoreError(
                f"no store named {name!r}: was its sink removed from the configuration?", name
            ) from None

    def find_usable(self) -> IncomingStore:
        """Return the first store that can be written now.

        Raises:
            StoreUnavailable: None of them can.
        """
        reasons = []
        for store in self:
            try:
                store.check()
            except StewardError as error:
                reasons.append(str(error))
            else:
                return store
        raise StoreUnavailable("; ".join(reasons) or "no archive is configured")

    def open(self, body: JobScript, file: IncomingFile) -> int:
        """Open a file of this event for reading; raises as :meth:`IncomingStore.open`."""
        return self.get(body.store).open(file)

    def read(self, body: JobScript, file: IncomingFile) -> bytes:
        """Read a file of this event; raises as :meth:`IncomingStore.read`."""
        return self.get(body.store).read(file)


class HungCount(msgspec.Struct, frozen=True, kw_only=True):
    """Count of incoming files that hangs in the kernel.

    Attributes:
        pid: Its process, which cannot be killed.
        since: Time at which that was found.
        directories: Directories whose files it counts.
    """

    pid: int
    since: datetime
    directories: tuple[str, ...] = ()


def read_hung_count(state_dir: str) -> HungCount | None:
    """Read the status file of a count that hangs; None if there is none."""
    status = read_status(os.path.join(state_dir, _COUNT_FILE), HungCount)
    return None if status is None else status[0]


class LeftoverCount:
    """Bytes in the stores that no event of the journal names, such as a failed deletion's.

    A child process counts all files, at the first call and then daily: with files by the hundred
    thousand, reading the directory takes seconds. Files that capture is just writing count too. A
    child that cannot be killed has no successor before it has ended: a status file names it.

    Args:
        stores: Stores whose files are counted.
        state_dir: Directory of the status file.
        every_s: Time between two counts, in seconds.
    """

    def __init__(self, stores: IncomingStores, *, state_dir: str, every_s: float = 86400.0) -> None:
        self.size = 0
        self._stores = stores
        self._status_path = os.path.join(state_dir, _COUNT_FILE)
        self._is_hung = False
        self._every_s = every_s
        self._due_at = 0.0
        self._started_at = self._counted_at = -math.inf
        self._known_bytes = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._remove_status()

    def update(self, known_bytes: int) -> None:
        """Start a count that is due, or use the result of one that has ended; never wait.

        Args:
            known_bytes: Size of the files that events of the journal name, in bytes.
        """
        now = time.monotonic()
        if self._is_hung:
            assert self._process is not None
            if self._process.poll() is not None:
                self._process = None
                self._is_hung = False
                self._due_at = 0.0
                self._remove_status()
        elif self._process is not None and self._process.poll() is not None:
            # Files that came or went during the count are no leftovers.
            known_bytes = max(known_bytes, self._known_bytes)
            with self._process as process:
                assert process.stdout is not None
                output = process.stdout.read(100)
            self._process = None
            if process.returncode == 0:
                self.size = max(0, int(output) - known_bytes)
                self._counted_at = now
            else:
                log.warning("cannot count the files in %s", ", ".join(self._list_directories()))
        elif now >= self._due_at:
            if self._process is not None:
                log.warning("the count of files in %s hangs", ", ".join(self._list_directories()))
                kill_group(self._process, reap_s=1.0)
                if self._process.poll() is None:
                    self._report_hang(self._process.pid)
                    return
            self._due_at = now + self._every_s
            self._started_at = now
            self._known_bytes = known_bytes
            self._start()

    def refresh(self) -> bool:
        """Let :meth:`update` count again if the last result is old; return whether it is old.

        A count that fails or hangs has no result, so the last one becomes ever older.
        """
        now = time.monotonic()
        if now - self._counted_at < _FRESH_S:
            return False
        if now - self._started_at >= _FRESH_S:
            self._due_at = 0.0
        return True

    def close(self) -> None:
        """End a running count."""
        if self._process is not None:
            kill_group(self._process, reap_s=1.0)
            self._process = None

    def _report_hang(self, pid: int) -> None:
        """Write the status file about a child that cannot be killed."""
        self._is_hung = True
        directories = tuple(self._list_directories())
        try:
            write_status(
                self._status_path, HungCount(pid=pid, since=utc_now(), directories=directories)
            )
        except StatusWriteError as error:
            log.warning("cannot report the count that hangs: %s", error)

    def _remove_status(self) -> None:
        with suppress(OSError):  # there is none
            os.unlink(self._status_path)

    def _list_directories(self) -> list[str]:
        return list(filter(None, (store.find_local_directory() for store in self._stores)))

    def _start(self) -> None:
        directories = self._list_directories()
        if not directories:
            return
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", COUNT_FILES, *directories],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            log.warning("cannot count the files in %s: %s", ", ".join(directories), error)


def make_stores(settings: Settings) -> IncomingStores:
    """Make the stores of a configuration, the preferred one first."""
    stores = []
    for name in settings.files_sinks():
        root = settings.sink_path(name)
        directory = os.path.join(root, ARCHIVE_DIRECTORY)
        stores.append(IncomingStore(f"archive.{name}", directory, os.path.join(root, MARKER)))
    stores.append(IncomingStore(STATE_STORE, os.path.join(settings.state_dir, "incoming")))
    return IncomingStores(stores)


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    chunks = [os.read(fd, size + 1)]
    # All bytes, and no more: the end of the file.
    while chunks[-1] and len(chunks[0]) != size:
        chunks.append(os.read(fd, 1 << 20))
    return b"".join(chunks)
