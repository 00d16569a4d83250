"""Has the gate run as soon as there is something to answer: slurmctld holds locks so long.

Niceness does not bring that about: the kernel counts it within a session or a
cgroup alone, and the programs that make a host busy have others. So the gate
has a session of its own, which stands beside all others as if it were one
program, and, where it may, real-time scheduling. What it runs at a stretch is
bounded then: a gate that has gone mad must not take a processor from the host.
"""

import contextlib
import logging
import os
import resource
import signal
import time
from typing import Final

log = logging.getLogger(__name__)

_NICENESS: Final = -10
_PRIORITY: Final = 1
"""The least that there is, which is before all that has none."""
_STRETCH_S: Final = 0.2
"""So long it goes first without waiting for anything, as when it reads 100,000 holds."""
_MAD_S: Final = 10
"""After so long the kernel ends it, and the supervisor starts it anew."""
_AGAIN_S: Final = 1.0
_FIRST: Final = os.SCHED_RR | os.SCHED_RESET_ON_FORK
_USUAL: Final = os.SCHED_OTHER | os.SCHED_RESET_ON_FORK


class Precedence:
    """Of this process's main thread.

    Args:
        again_s: How long it goes without, at the least, after a stretch that was too long.
    """

    def __init__(self, again_s: float = _AGAIN_S) -> None:
        self._again_s = again_s
        self._again_at = 0.0
        self._is_there = False
        self._may = True

    def take(self) -> None:
        """Have it, as far as the process may."""
        with contextlib.suppress(PermissionError):
            os.setsid()  # refused to who leads a group: it has been started by itself
        with contextlib.suppress(PermissionError):
            # Counts where there is nothing better; root may, or who was given LimitNICE=.
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
        signal.signal(signal.SIGXCPU, self._step_back)
        self.renew()

    def renew(self) -> None:
        """Have it again, where a long stretch of work has lost it."""
        if self._is_there or not self._may or time.monotonic() < self._again_at:
            return
        _bound()
        self._is_there = self._may = go_first()
        if not self._may:
            log.info(
                "the gate may not be scheduled before others (LimitRTPRIO=): on a busy host "
                "slurmctld may wait for it"
            )

    def _step_back(self, *_: object) -> None:
        os.sched_setscheduler(0, _USUAL, os.sched_param(0))
        self._is_there = False
        self._again_at = time.monotonic() + self._again_s


def _bound() -> None:
    """Have the kernel tell after a long stretch. It adds a second each time that it does."""
    _, most = resource.getrlimit(resource.RLIMIT_RTTIME)
    mad_us = _MAD_S * 1_000_000
    hard = mad_us if most == resource.RLIM_INFINITY else min(most, mad_us)
    resource.setrlimit(resource.RLIMIT_RTTIME, (min(hard, int(_STRETCH_S * 1_000_000)), hard))


def go_first() -> bool:
    """Have the thread that calls scheduled before what is not waited for; whether it may be.

    Threads and processes that it starts are not.
    """
    try:
        os.sched_setscheduler(0, _FIRST, os.sched_param(_PRIORITY))
    except OSError as error:
        log.debug("no real-time scheduling: %s", error)
        return False
    return True
