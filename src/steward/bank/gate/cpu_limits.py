"""CPU limits of the gate: how much CPU time requests of one user may take."""

import time
from collections.abc import Callable
from typing import Final

from steward.bank.estimate.request_limits import Budget

REQUEST_NS: Final = 5_000_000
"""CPU time that one request may take, in ns."""
USER_NS: Final = 100_000_000
"""CPU time that one user may take in each second, in ns: a tenth of the gate."""


class CpuLimits:
    """CPU time that each user took in the current second.

    slurmctld holds its locks while it waits. One request gets `REQUEST_NS`; the components of a
    heterogeneous job share one such budget. A user who took `USER_NS` is rejected until the next
    second.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second = 0
        self._taken_ns: dict[int, int] = {}
        self._het_ns: dict[int, int] = {}

    def is_exceeded(self, uid: int) -> bool:
        """Return True if a user took all CPU time of this second."""
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._taken_ns.clear()
            self._het_ns.clear()
        return self._taken_ns.get(uid, 0) >= USER_NS

    def budget(self, uid: int, *, is_het: bool) -> Budget:
        """Return the CPU budget of a request; het components share one budget."""
        taken_ns = self._het_ns.get(uid, 0) if is_het else 0
        return Budget(max(0, REQUEST_NS - taken_ns))

    def add(self, uid: int, ns: int, *, is_het: bool) -> None:
        """Count the CPU time of a user's request."""
        self._taken_ns[uid] = self._taken_ns.get(uid, 0) + ns
        if is_het:
            self._het_ns[uid] = self._het_ns.get(uid, 0) + ns
