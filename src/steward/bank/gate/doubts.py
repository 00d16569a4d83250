"""Whose questions came to nothing: jobs that were let in and that Slurm then did not have.

slurmctld does not say whether it asks for a job that stays: ``sbatch --test-only`` asks
like any other, and so does what Slurm refuses later. Each may be a job, so each is held
for until a look at the queue shows that it is none. One user who asks so in a loop would
keep everybody else's money held; from a point on they may have only a part of it held for
what Slurm has not shown yet, until a while has passed.

Kept in memory alone: a gate that begins anew doubts nobody.
"""

from typing import Final

PATIENCE_S: Final = 20.0
"""So long all that an account has free may be held for one user in vain, in seconds."""
LOOK_S: Final = 10.0
"""What is held in vain until the next look counts no more: the queue may not be to be seen."""
_MOST_S: Final = 30.0
_NEEDLESS_S: Final = 1.0


class Doubts:
    """What was held in vain, by who pays and whose questions they were.

    It is reckoned in seconds that all that was free was held, and fades: on the average one
    user holds less than half of their share in vain.

    Args:
        share: What a user in doubt may have held for jobs not shown yet, of what is free.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._vain: dict[tuple[str, int], tuple[float, int]] = {}

    def add(self, payer: str, uid: int, vain_s: float, now_us: int) -> None:
        """All that an account has free was held for nothing, for so many seconds."""
        vain_s += self._left_s(payer, uid, now_us)
        self._vain[payer, uid] = (min(vain_s, _MOST_S), now_us)

    def most(self, payer: str, uid: int, free: int, now_us: int) -> int | None:
        """How much may be held for jobs of a user that are not shown yet; None for no bound.

        Args:
            payer: Whose allocations are drawn on.
            uid: The user.
            free: What the payer has free, and what is held for such jobs of the user.
            now_us: The time, µs since the epoch.
        """
        if not self._vain or self.wait_s(payer, uid, now_us) <= 0:
            return None
        return int(max(0, free) * self._share)

    def wait_s(self, payer: str, uid: int, now_us: int) -> float:
        """When a user is trusted again, in seconds; 0 for one who is."""
        over_s = self._left_s(payer, uid, now_us) - PATIENCE_S
        return max(0.0, over_s) / self._fades

    def forget(self, now_us: int) -> None:
        """Let go of what has faded."""
        for payer, uid in list(self._vain):
            if self._left_s(payer, uid, now_us) < _NEEDLESS_S:
                del self._vain[payer, uid]

    @property
    def _fades(self) -> float:
        # Less than who is in doubt may go on holding: a loop does not win trust by itself.
        return self._share / 2

    def _left_s(self, payer: str, uid: int, now_us: int) -> float:
        vain_s, at_us = self._vain.get((payer, uid), (0.0, now_us))
        return max(0.0, vain_s - (now_us - at_us) / 1e6 * self._fades)
