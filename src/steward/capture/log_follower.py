"""Log follower: reads lines that another program appends to a file, across rotations.

The writer opens the file for each line, so a renamed file grows a moment longer: the follower reads
it until it has been quiet for some seconds before it moves on to the successor. It detects a file
that was copied and truncated in place by its first bytes.

:class:`ReadPosition` is a stored position, :class:`LineBatch` what is read in one step.
:class:`LogFollower` is the entry point: ``process_events`` processes inotify events,
``read_batches`` yields new lines. Used by :mod:`steward.capture.jobcomp`.
"""

import contextlib
import errno
import hashlib
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec
from inotify_simple import INotify, flags

from steward.core.files import find_network_type

log = logging.getLogger(__name__)

_MASK: Final = (
    flags.CREATE
    | flags.MODIFY
    | flags.CLOSE_WRITE
    | flags.MOVED_TO
    | flags.MOVED_FROM
    | flags.DELETE_SELF
    | flags.MOVE_SELF
    | flags.ONLYDIR
)
"""Inotify events of the directory that matter."""
_UNWATCHED_MASK: Final = flags.DELETE_SELF | flags.MOVE_SELF | flags.UNMOUNT | flags.IGNORED
"""Inotify events after which the directory is no longer watched."""
_HEAD_BYTES: Final = 256
"""Number of first bytes that identify a file."""
_CHUNK: Final = 256 * 1024
"""Bytes per read, several times the longest possible line."""
_QUIET_S: Final = 5.0
"""Time after its last line for which a renamed file is read, in seconds."""
_RECHECK_S: Final = 60.0
"""Interval of checks on a local file system, in seconds."""
_NETWORK_RECHECK_S: Final = 2.0
"""Interval of checks on a network file system, where inotify misses other hosts' writes."""
_COMPRESSED_SUFFIXES: Final = (".gz", ".xz", ".bz2", ".zst")
"""Suffixes of compressed files, which are not read."""


class ReadPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Read position in a file.

    Attributes:
        inode: Inode of the file.
        offset: Number of bytes processed.
        head: Digest of the file's first ``head_length`` bytes.
        head_length: At most 256, and at most ``offset``.
        written_ns: Modification time of the file when read, ns since the epoch.
    """

    inode: int
    offset: int
    head: str = ""
    head_length: int = 0
    written_ns: int = 0


class LineBatch(msgspec.Struct, frozen=True):
    """Lines read in one step.

    Attributes:
        lines: Lines without newlines, none empty.
        garbled: Number of pieces of text skipped because they cannot be lines.
        begin: Inode and offset where the batch starts, for reports.
        position: Position to store once the batch has been processed.
    """

    lines: list[bytes]
    garbled: int
    begin: tuple[int, int]
    position: ReadPosition


class _File:
    """Open file with its read position."""

    def __init__(self, fd: int, offset: int = 0) -> None:
        self.fd = fd
        status = os.fstat(fd)
        self.inode, self.written_ns = status.st_ino, status.st_mtime_ns
        self.offset = min(offset, status.st_size)
        self.is_skipping = False
        self.head = b""
        self.size = -1
        self.changed_at = 0.0

    def read_lines(self) -> tuple[list[bytes], int]:
        """Read the next whole lines; also return how many pieces were skipped."""
        garbled = 0
        while True:
            status = os.fstat(self.fd)
            if status.st_size != self.size:
                self.size, self.changed_at = status.st_size, time.monotonic()
            if status.st_size <= self.offset:
                return [], garbled
            data = os.pread(self.fd, _CHUNK, self.offset)
            end = data.rfind(b"\n") + 1
            if not end and len(data) < _CHUNK:
                return [], garbled  # the writer has not finished the line
            self.written_ns = status.st_mtime_ns
            begin = 0
            if self.is_skipping and end:
                begin = data.index(b"\n") + 1
            elif not end and not self.is_skipping:
                garbled += 1
            self.is_skipping = not end
            if len(self.head) < _HEAD_BYTES:
                self.head = os.pread(self.fd, _HEAD_BYTES, 0)
            self.offset += end or len(data)
            lines = [line for line in data[begin:end].split(b"\n") if line]
            if lines:
                return lines, garbled

    def get_position(self) -> ReadPosition:
        """Return the present read position."""
        head = self.head[: self.offset]
        return ReadPosition(
            inode=self.inode,
            offset=self.offset,
            head=_digest_head(head),
            head_length=len(head),
            written_ns=self.written_ns,
        )

    def was_truncated(self) -> bool:
        """Return whether the file was truncated since it was read, even if it has grown again."""
        if os.fstat(self.fd).st_size < self.offset:
            return True
        head = self.head[: self.offset]
        return bool(head) and os.pread(self.fd, len(head), 0) != head

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


class LogFollower:
    """Follower of one file and its rotated predecessors.

    Args:
        path: The file; neither it nor its directory need exist yet.
        position: Position up to which it was processed before; None if never.
        quiet_s: How long to read a renamed file after its last line, in seconds.
        reattach_s: Time between two attempts to watch a missing directory, in seconds.
    """

    def __init__(
        self,
        path: str,
        position: ReadPosition | None,
        *,
        quiet_s: float = _QUIET_S,
        reattach_s: float = 1.0,
    ) -> None:
        self.path = path
        self._reattach_s = reattach_s
        self._directory, self._name = os.path.split(path)
        self._quiet_s = quiet_s
        self._position = position
        self._files: deque[_File] = deque()
        self._inotify = INotify(nonblocking=True)
        self._wd = -1
        self._attach_at = 0.0
        self._is_network = False
        self._problem = ""

    @property
    def fd(self) -> int:
        """Descriptor that is readable when :meth:`process_events` has something to process."""
        return int(self._inotify.fileno())

    @property
    def problem(self) -> str:
        """Reason why the file cannot be followed now; "" if it can."""
        return self._problem

    def due_s(self) -> float:
        """Return seconds until :meth:`process_events` is due even without inotify events."""
        if self._wd < 0:
            return max(0.0, self._attach_at - time.monotonic())
        if len(self._files) > 1:
            return self._quiet_s
        return _NETWORK_RECHECK_S if self._is_network else _RECHECK_S

    def process_events(self) -> None:
        """Process inotify events and open new files, for :meth:`read_batches`."""
        for event in self._inotify.read(timeout=0):
            if event.wd == self._wd and event.mask & _UNWATCHED_MASK:
                self._detach()
        if self._wd < 0 and time.monotonic() >= self._attach_at:
            self._attach()
        if self._wd < 0:
            return
        try:
            self._open_current()
        except FileNotFoundError:
            # Not created yet, or between two files; a file may have come and been renamed
            # meanwhile.
            self._open_missed()
        except OSError as error:
            self._log_problem(f"cannot read {self.path}: {error.strerror}")
        else:
            self._log_problem("")

    def read_batches(self) -> Iterator[LineBatch]:
        """Yield appended lines in batches, the oldest file's first."""
        for file in list(self._files):
            if file.was_truncated():
                self._restart_file(file)
        for file in list(self._files):
            while True:
                begin = (file.inode, file.offset)
                lines, garbled = file.read_lines()
                if not lines and not garbled:
                    break
                # The position stays in the oldest file while it may grow: after a crash, lines of
                # later files are read again.
                yield LineBatch(lines, garbled, begin, self._files[0].get_position())
        self._close_read()

    def close(self) -> None:
        """Close all files."""
        while self._files:
            self._files.popleft().close()
        self._inotify.close()

    def _attach(self) -> None:
        """Watch the directory; retry later if it is missing."""
        try:
            self._wd = self._inotify.add_watch(self._directory or ".", _MASK)
            self._is_network = bool(find_network_type(self._directory or "."))
        except OSError as error:
            self._wd = -1
            self._attach_at = time.monotonic() + self._reattach_s
            self._log_problem(f"cannot watch {self._directory}: {error.strerror}")
            return
        if not self._files:
            self._reopen_last()

    def _detach(self) -> None:
        """Stop watching the directory."""
        if self._wd >= 0:
            with contextlib.suppress(OSError):  # usually removed along with its directory
                self._inotify.rm_watch(self._wd)
        self._wd = -1
        self._attach_at = 0.0

    def _log_problem(self, message: str) -> None:
        """Log a problem, or its end, once."""
        if message and message != self._problem:
            log.error("%s", message)
        elif self._problem and not message:
            log.info("following %s", self.path)
        self._problem = message

    def _open_current(self) -> None:
        """Open the file if it is new, and files renamed before it appeared."""
        status = os.stat(self.path, follow_symlinks=False)
        if self._files and self._files[-1].inode == status.st_ino:
            return
        successor = _File(_open_regular(self.path))
        if self._files:
            self._files[-1].changed_at = time.monotonic()
        self._open_missed(successor.inode)
        self._files.append(successor)

    def _open_missed(self, current: int = 0) -> None:
        """Open files that appeared and were renamed between two calls."""
        if not self._files:
            return
        since_ns = os.fstat(self._files[-1].fd).st_mtime_ns
        opened = {current, *(file.inode for file in self._files)}
        for name, inode, ns in self._list_siblings():
            if inode not in opened and ns >= since_ns:
                self._open_file(name, 0)

    def _close_read(self) -> None:
        """Close renamed files that were read to their end and have been quiet."""
        while len(self._files) > 1:
            file = self._files[0]
            has_rest = file.size > file.offset and not file.is_skipping
            # An unterminated last line gets twice the time.
            if time.monotonic() < file.changed_at + self._quiet_s * (2 if has_rest else 1):
                return
            if has_rest:
                log.warning("%s: the last line of a rotated file is incomplete", self.path)
            self._files.popleft().close()

    def _reopen_last(self) -> None:
        """Open the file that was read last and its successors, after a restart."""
        position, self._position = self._position, None
        if position is None:
            return
        siblings = self._list_siblings()
        same_inode = [name for name, inode, _ns in siblings if inode == position.inode]
        others = [name for name, _inode, _ns in siblings if name not in same_inode]
        last_read = next(
            (name for name in (*same_inode, *others) if self._has_head(name, position)), None
        )
        if last_read is None:
            log.warning(
                "%s: the file that Steward read last is gone; missed job ends come from queue "
                "polls and slurmdbd",
                self.path,
            )
        since_ns = next(
            (ns for name, _inode, ns in siblings if name == last_read), position.written_ns
        )
        for name, _inode, ns in siblings:
            if name == last_read:
                self._open_file(name, position.offset)
            elif ns >= since_ns and name != self._name:
                self._open_file(name, 0)

    def _restart_file(self, file: _File) -> None:
        """Restart a file that was copied and truncated; read the rest from its copy first."""
        position = file.get_position()
        log.info("%s was truncated: reading it from the beginning", self.path)
        for name, inode, _ns in self._list_siblings():
            if inode != file.inode and self._has_head(name, position):
                self._open_file(name, position.offset, first=True)
                break
        file.offset, file.head, file.is_skipping = 0, b"", False

    def _list_siblings(self) -> list[tuple[str, int, int]]:
        """List name, inode and mtime of the file and its rotated versions, oldest first."""
        siblings = []
        with os.scandir(self._directory or ".") as entries:
            for entry in entries:
                suffix = entry.name.removeprefix(self._name)
                is_ours = entry.name == self._name or (
                    entry.name.startswith(self._name) and suffix[:1] in (".", "-")
                )
                if (
                    is_ours
                    and not suffix.endswith(_COMPRESSED_SUFFIXES)
                    and entry.is_file(follow_symlinks=False)
                ):
                    status = entry.stat(follow_symlinks=False)
                    siblings.append((entry.name, status.st_ino, status.st_mtime_ns))
        return sorted(siblings, key=lambda sibling: (sibling[0] == self._name, sibling[2]))

    def _has_head(self, name: str, position: ReadPosition) -> bool:
        """Return whether a file begins with the bytes of a stored position."""
        try:
            fd = _open_regular(os.path.join(self._directory, name))
        except OSError:
            return False
        try:
            status = os.fstat(fd)
            if not position.head_length:
                return status.st_ino == position.inode
            head = os.pread(fd, position.head_length, 0)
            return status.st_size >= position.offset and _digest_head(head) == position.head
        finally:
            os.close(fd)

    def _open_file(self, name: str, offset: int, *, first: bool = False) -> None:
        """Open a file and add it to those being read."""
        try:
            file = _File(_open_regular(os.path.join(self._directory, name)), offset)
        except OSError as error:
            log.warning("cannot open %s: %s", name, error.strerror)
            return
        if offset:
            file.head = os.pread(file.fd, _HEAD_BYTES, 0)
        if first:
            self._files.appendleft(file)
        else:
            self._files.append(file)


def _open_regular(path: str) -> int:
    """Open a regular file; reject links and pipes.

    Raises:
        OSError: It cannot be opened, or is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def _digest_head(head: bytes) -> str:
    """Return a digest of a file's first bytes; "" if there are none."""
    return hashlib.blake2b(head, digest_size=16).hexdigest() if head else ""
