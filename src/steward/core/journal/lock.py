"""One Steward a state directory: the lock that the journal's writer holds."""

import errno
import fcntl
import os
import time

from steward.core.journal.store import JournalUnavailable

_LOCK = "journal.lock"
_WAIT_S = 10.0


class StateLock:
    """The held lock; closing it lets it go, as does the process's end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        """Let the lock go."""
        os.close(self._fd)


def take_lock(state_dir: str, wait_s: float = _WAIT_S) -> StateLock:
    """Take the state directory's lock, waiting a little for a predecessor that is ending.

    Raises:
        JournalUnavailable: Another Steward holds it, or the directory cannot be used.
    """
    path = os.path.join(state_dir, _LOCK)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalUnavailable(f"cannot use {path}: {error.strerror}", path) from error
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                os.close(fd)
                raise JournalUnavailable(f"cannot lock {path}: {error.strerror}", path) from error
            if time.monotonic() > until:
                os.close(fd)
                raise JournalUnavailable(
                    f"another steward is running on {state_dir}: stop it, or use another state_dir",
                    path,
                ) from error
            time.sleep(0.02)
        else:
            return StateLock(fd)
