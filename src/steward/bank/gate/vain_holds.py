"""Vain holds: SU held for submits that Slurm then rejected, limited per payer and user.

A user can submit jobs that pass the gate and that Slurm rejects afterwards; each holds SU until the
next poll. :class:`VainHolds` records that time and limits what such a user may hold at once.
"""

from typing import Final

MOST_TRUSTED_VAIN_S: Final = 20.0
"""Vain time, at all of an account's available SU, beyond which a user is in doubt, in seconds."""
MOST_COUNTED_VAIN_S: Final = 10.0
"""Longest time that a void hold counts, in seconds: a user is not to blame for failed polls."""
_MOST_VAIN_S: Final = 30.0
"""Upper bound of a user's recorded vain time, in seconds."""
_LEAST_VAIN_S: Final = 1.0
"""Vain time below which a record is dropped, in seconds."""


class VainHolds:
    """Record of SU held in vain, per payer and user: holds whose jobs Slurm never showed.

    slurmctld does not say whether the job will stay: ``sbatch --test-only`` asks like any other, as
    does a job that Slurm rejects later. Each gets a hold until a poll shows that there is no job. A
    user who submits so in a loop would block everybody's SU; once in doubt they may hold only a
    part, until the record has decayed. The record is in memory only: a restarted gate trusts all.

    The unit is seconds for which all available SU were held. The record decays over time, so that
    on average one user holds less than half of their share in vain.

    Attributes:
        share: Part of an account's available SU that a user in doubt may hold for unseen jobs.
    """

    def __init__(self) -> None:
        self.share = 0.1
        self._records: dict[tuple[str, int], tuple[float, int]] = {}

    def add(self, payer: str, uid: int, vain_s: float, now_us: int) -> None:
        """Record that all available SU of a payer were held in vain for this many seconds."""
        vain_s += self._get_vain_s(payer, uid, now_us)
        self._records[payer, uid] = (min(vain_s, _MOST_VAIN_S), now_us)

    def get_limit(self, payer: str, uid: int, available: int, now_us: int) -> int | None:
        """Return how much may be held for a user's unseen jobs, micro-SU; None for no bound.

        ``available`` is the payer's available SU plus the holds for the user's unseen jobs, micro-
        SU.
        """
        if not self._records or self.get_wait_s(payer, uid, now_us) <= 0:
            return None
        return int(max(0, available) * self.share)

    def get_wait_s(self, payer: str, uid: int, now_us: int) -> float:
        """Return the seconds until a user is trusted again; 0 for a trusted user."""
        over_s = self._get_vain_s(payer, uid, now_us) - MOST_TRUSTED_VAIN_S
        return max(0.0, over_s) / self._decay_rate

    def drop_decayed(self, now_us: int) -> None:
        """Drop records that have decayed."""
        for payer, uid in list(self._records):
            if self._get_vain_s(payer, uid, now_us) < _LEAST_VAIN_S:
                del self._records[payer, uid]

    @property
    def _decay_rate(self) -> float:
        # Slower than a user in doubt can hold SU: a submit loop never regains trust.
        return self.share / 2

    def _get_vain_s(self, payer: str, uid: int, now_us: int) -> float:
        vain_s, at_us = self._records.get((payer, uid), (0.0, now_us))
        return max(0.0, vain_s - (now_us - at_us) / 1e6 * self._decay_rate)
