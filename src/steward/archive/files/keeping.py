"""Keeps two Stewards out of one tree: whose it is stands in a file there, locked while it lives.

Two that did not know of each other would both write into its manifests. The lock is
flock(2)'s, shared among the processes of one state directory; the kernel drops it when
its holders die. Where a file system has no such locks, nobody is kept out.
"""

import errno
import fcntl
import os

from steward.archive.errors import ArchiveUnavailable

KEEPER = ".steward-keeper"
"""A file in the root of a tree: host and state directory of the Steward that keeps it."""
_LONGEST = 5000
_LOOK = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_HELD = frozenset({errno.EWOULDBLOCK, errno.EAGAIN})


class Keeper:
    """The claim of one state directory to a tree.

    Args:
        state_dir: The state directory.
        root: The tree's root.
    """

    def __init__(self, state_dir: str, root: str) -> None:
        self._name = f"{os.uname().nodename} {os.path.realpath(state_dir)}"
        self._root = root
        self._fd = -1
        self._of: tuple[int, int] | None = None

    def hold(self, root_fd: int) -> None:
        """Keep the tree from now on; nothing is done where it is kept already.

        Args:
            root_fd: The open root.

        Raises:
            ArchiveUnavailable: A Steward of another state directory keeps it, and lives.
            OSError: The root cannot be used.
        """
        status = os.fstat(root_fd)
        of = (status.st_dev, status.st_ino)
        if self._of == of:
            return
        self.release()
        if not self._is_named(root_fd):
            self._name_it(root_fd)
        # For reading: a file held open for writing keeps a disk from being made read-only.
        fd = os.open(KEEPER, _LOOK, dir_fd=root_fd)
        named = _read(fd)
        # Between the two locks somebody else may have had it.
        if not _locks(fd, fcntl.LOCK_SH) or _read(fd) != self._name:
            os.close(fd)
            raise self._refused(named)
        self._fd, self._of = fd, of

    def _is_named(self, root_fd: int) -> bool:
        try:
            fd = os.open(KEEPER, _LOOK, dir_fd=root_fd)
        except FileNotFoundError:
            return False
        try:
            return _read(fd) == self._name
        finally:
            os.close(fd)

    def _name_it(self, root_fd: int) -> None:
        """Make the file say that the tree is ours, if nobody who lives is against it."""
        fd = os.open(KEEPER, os.O_RDWR | os.O_CREAT | _LOOK, 0o600, dir_fd=root_fd)
        try:
            if not _locks(fd, fcntl.LOCK_EX):
                raise self._refused(_read(fd))
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{self._name}\n".encode("utf-8", "surrogateescape"), 0)
        finally:
            os.close(fd)

    def look(self) -> None:
        """Make sure that nobody else keeps the tree now, as far as may be read.

        Raises:
            ArchiveUnavailable: Somebody else does.
        """
        try:
            fd = os.open(
                os.path.join(self._root, KEEPER),
                os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK,
            )
        except OSError:
            return  # no tree yet, or none of ours: what then goes on says what is wrong
        try:
            named = _read(fd)
            if named not in {"", self._name} and not _locks(fd, fcntl.LOCK_EX):
                raise self._refused(named)
        finally:
            os.close(fd)

    def _refused(self, named: str) -> ArchiveUnavailable:
        host, _, state_dir = named.partition(" ")
        where = f", on host {host} with its state in {state_dir}" if named else ""
        return ArchiveUnavailable(
            f"archive {self._root} is kept by another Steward that runs{where}: "
            "give another directory, or stop that one",
            self._root,
        )

    def release(self) -> None:
        """Keep it no longer."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._of = -1, None


def _read(fd: int) -> str:
    return os.pread(fd, _LONGEST, 0).decode("utf-8", "surrogateescape").strip()


def _locks(fd: int, how: int) -> bool:
    """Whether nobody holds what stands against this lock; it is taken where there are locks."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _HELD
    return True
