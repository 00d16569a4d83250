"""What the processes have in common that make files of the job log beside the daemon."""

import ctypes
import os
import signal
from typing import Any, Final

MODE: Final = 0o600
"""Of the log's files."""

_PR_SET_PDEATHSIG: Final = 1


def stop_with_parent() -> None:
    """Let this process end with the daemon, and its files be for us alone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.umask(0o077)


def created(path: str) -> Any:
    """A new file, open for writing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, MODE), "wb")


def sync(file: Any) -> None:
    """Have all of a file on disk."""
    file.flush()
    os.fsync(file.fileno())
