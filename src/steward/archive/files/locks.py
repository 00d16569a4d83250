"""Locks of an archive tree, between processes and between Stewards.

:class:`TreeLock` is the lock between sink, mover and verification. :class:`TreeClaim` prevents two
Stewards from writing to one tree.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from steward.archive.errors import ArchiveUnavailable


class TreeLock:
    """File lock between the processes that use a tree.

    Args:
        path: Path of the lock file, created with mode 0600 if needed.
        creates: Whether to create the file. A reader may run as another user, whose file would lock
            out the writers; if there is no file, nothing was filed yet.
    """

    def __init__(self, path: str, *, creates: bool = True) -> None:
        self._path = path
        self._creates = creates
        self._fd = -1

    @contextmanager
    def acquire(self) -> "Iterator[None]":
        """Hold the lock for the body of a with statement.

        Raises:
            ArchiveUnavailable: The lock file cannot be created or read.
        """
        if self._fd < 0:
            self._open()
        if self._fd < 0:
            yield
            return
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT if self._creates else os.O_RDONLY
        try:
            self._fd = os.open(self._path, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self._creates:
                return  # nothing was filed yet
            raise ArchiveUnavailable(
                f"cannot lock {self._path}: {error.strerror}", self._path
            ) from error

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


CLAIM_FILE = ".steward-keeper"
"""File in the root of a tree with host and state directory of the Steward that writes there."""
_MAX_CLAIM_BYTES = 5000
_CLAIM_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LOCKED_ERRORS = frozenset({errno.EWOULDBLOCK, errno.EAGAIN})


class TreeClaim:
    """Claim of one state directory to a tree, so that no two Stewards write to it.

    Args:
        state_dir: The state directory.
        root: The tree's root.
    """

    def __init__(self, state_dir: str, root: str) -> None:
        self._claimant = f"{os.uname().nodename} {os.path.realpath(state_dir)}"
        self._root = root
        self._fd = -1
        self._tree_id: tuple[int, int] | None = None

    def acquire(self, root_fd: int) -> None:
        """Claim the tree until :meth:`release`; a no-op if it is claimed already.

        Args:
            root_fd: The open root.

        Raises:
            ArchiveUnavailable: A running Steward with another state directory has claimed it.
            OSError: The root cannot be used.
        """
        status = os.fstat(root_fd)
        tree_id = (status.st_dev, status.st_ino)
        if self._tree_id == tree_id:
            return
        self.release()
        if not self._is_ours(root_fd):
            self._write_claim(root_fd)
        # Read-only: a file open for writing would prevent remounting the file system read-only.
        fd = os.open(CLAIM_FILE, _CLAIM_FLAGS, dir_fd=root_fd)
        claimant = _read_claim(fd)
        # Between the two locks another process may have claimed it.
        if not _try_lock(fd, fcntl.LOCK_SH) or _read_claim(fd) != self._claimant:
            os.close(fd)
            raise self._make_claim_error(claimant)
        self._fd, self._tree_id = fd, tree_id

    def _is_ours(self, root_fd: int) -> bool:
        """Return whether the claim file names this Steward."""
        try:
            fd = os.open(CLAIM_FILE, _CLAIM_FLAGS, dir_fd=root_fd)
        except FileNotFoundError:
            return False
        try:
            return _read_claim(fd) == self._claimant
        finally:
            os.close(fd)

    def _write_claim(self, root_fd: int) -> None:
        """Write this Steward's name to the file, unless a running one has claimed the tree."""
        fd = os.open(CLAIM_FILE, os.O_RDWR | os.O_CREAT | _CLAIM_FLAGS, 0o600, dir_fd=root_fd)
        try:
            if not _try_lock(fd, fcntl.LOCK_EX):
                raise self._make_claim_error(_read_claim(fd))
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{self._claimant}\n".encode("utf-8", "surrogateescape"), 0)
        finally:
            os.close(fd)

    def check(self) -> None:
        """Check that no other Steward has claimed the tree, as far as the file is accessible.

        Raises:
            ArchiveUnavailable: Another running Steward has claimed it.
        """
        try:
            fd = os.open(
                os.path.join(self._root, CLAIM_FILE),
                os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK,
            )
        except OSError:
            return  # no tree yet, or it is inaccessible: the caller reports that later
        try:
            claimant = _read_claim(fd)
            if claimant not in {"", self._claimant} and not _try_lock(fd, fcntl.LOCK_EX):
                raise self._make_claim_error(claimant)
        finally:
            os.close(fd)

    def _make_claim_error(self, claimant: str) -> ArchiveUnavailable:
        """Make the error for a tree claimed by another Steward."""
        host, _, state_dir = claimant.partition(" ")
        details = f", on host {host} with its state in {state_dir}" if claimant else ""
        return ArchiveUnavailable(
            f"archive {self._root} is in use by another Steward{details}: choose another "
            "directory, or stop the other Steward",
            self._root,
        )

    def release(self) -> None:
        """Release the claim."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._tree_id = -1, None


def _read_claim(fd: int) -> str:
    return os.pread(fd, _MAX_CLAIM_BYTES, 0).decode("utf-8", "surrogateescape").strip()


def _try_lock(fd: int, operation: int) -> bool:
    """Take a lock; return False if another process holds it, True if locks are unsupported."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _LOCKED_ERRORS
    return True
