"""CPU time that users may take of the gate: slurmctld holds its locks while it waits.

One question gets ``QUESTION_NS``, the components of a heterogeneous job one share of it
together. A user who took ``USER_NS`` within a second is refused until the next second.
"""

import time
from collections.abc import Callable
from typing import Final

from steward.bank.estimate.request_limits import Budget

QUESTION_NS: Final = 5_000_000
USER_NS: Final = 100_000_000
"""In each second: a tenth of the gate."""


class CpuLimits:
    """CPU time that each user took in the present second.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second = 0
        self._taken_ns: dict[int, int] = {}
        self._het_ns: dict[int, int] = {}

    def is_exceeded(self, uid: int) -> bool:
        """Whether a user took all that is theirs in this second."""
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._taken_ns.clear()
            self._het_ns.clear()
        return self._taken_ns.get(uid, 0) >= USER_NS

    def budget(self, uid: int, *, is_het: bool) -> Budget:
        """What a user's question may take; of a component what the others have left."""
        taken_ns = self._het_ns.get(uid, 0) if is_het else 0
        return Budget(max(0, QUESTION_NS - taken_ns))

    def add(self, uid: int, ns: int, *, is_het: bool) -> None:
        """Count what a user's question took."""
        self._taken_ns[uid] = self._taken_ns.get(uid, 0) + ns
        if is_het:
            self._het_ns[uid] = self._het_ns.get(uid, 0) + ns
