"""How a program that is given up is ended, with all that it started."""

import contextlib
import logging
import os
import signal
import subprocess
from typing import Final

log = logging.getLogger(__name__)

_REAP_S: Final = 5.0


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Leave nothing behind of a program, which leads a process group of its own.

    Args:
        process: The program. What hangs in the kernel, or became somebody else (sudo), is left
            behind: neither is waited for without end.
    """
    # It may have ended in this moment; of another user's, closed pipes tell it that we are gone.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            with contextlib.suppress(BrokenPipeError):  # what was not yet written goes nowhere
                pipe.close()
    try:
        process.wait(_REAP_S)
    except subprocess.TimeoutExpired:
        log.warning("pid %d (%s) cannot be ended: left behind", process.pid, process.args)
