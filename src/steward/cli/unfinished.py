"""A file that has its name only when it is whole: until then it is called ``NAME.part``.

Whoever finds NAME may rely on it. What an export that was killed has left under
``NAME.part`` is written anew by the next one; one that still runs has locked it.
"""

import errno
import fcntl
import os
import stat
import weakref
from typing import IO

from steward.core.files import open_directory, rename_new

SUFFIX = ".part"


class Unfinished:
    """One such file, opened for writing.

    Args:
        path: The name that it is to have.

    Raises:
        OSError: It cannot be written, there is a file of that name, or another process is
            about to make one.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        directory, self._name = os.path.split(os.path.abspath(path))
        self._part = self._name + SUFFIX
        self._directory = open_directory(directory)
        weakref.finalize(self, os.close, self._directory)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        # As private as what is written to it, whatever the umask.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._part, flags, 0o600, dir_fd=self._directory)
        try:
            self._take(fd)
            self.file: IO[bytes] = os.fdopen(fd, "wb")
        except BaseException:
            os.close(fd)
            raise

    def _take(self, fd: int) -> None:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            # In a directory that others write to, too, it may have been put there for us.
            what = "somebody else's file is in the way"
            raise FileExistsError(errno.EEXIST, what, self._path + SUFFIX)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_same = os.path.samestat(found, self._found())
        except (BlockingIOError, FileNotFoundError):
            is_same = False
        if not is_same:
            what = "another export writes to it"
            raise BlockingIOError(errno.EAGAIN, what, self._path + SUFFIX)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)

    def finish(self) -> None:
        """Make it durable and give it its name.

        Raises:
            FileExistsError: There is a file of that name by now.
            OSError: The file system reports that something was not written.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
        rename_new(self._directory, self._part, self._name)
        os.fsync(self._directory)

    def remove(self) -> None:
        """Remove it, before it is finished or closed."""
        os.unlink(self._part, dir_fd=self._directory)

    def _found(self) -> os.stat_result:
        return os.stat(self._part, dir_fd=self._directory, follow_symlinks=False)
