"""Poll status of each cluster: a status file with the result of the last queue poll.

While slurmctld's state files show no change, the poller skips polls: the last result stays current.

The process that polls Slurm writes it (:class:`PollStatusFiles`); status pages, metrics and
commands read it, so that they need not ask Slurm themselves.
"""

import os
import re
from datetime import datetime
from typing import Final

import msgspec

from steward.core.errors import StewardError
from steward.core.files import read_status, write_status

COST_FACTOR: Final = 20
"""The poll interval is at least this many times the duration of the last poll."""
LONG_INTERVAL_S: Final = 60.0
"""Poll interval, in seconds, above which log, status and metrics report it."""
_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class PollStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one poll of a cluster's queue.

    Attributes:
        at: Start time of the poll.
        up: Whether slurmctld answered.
        message: Error text if it did not.
        version: Slurm's version ("22.05.8"); "" if never reported.
        cost_s: Duration of the last answered poll, in seconds.
        jobs: Number of jobs in that poll.
        current_at: Time at which the result was last known to be current: ``at``, or a later check
            that showed no change.
        interval_s: Time from then to the next poll or check, in seconds.
    """

    at: datetime
    current_at: datetime
    up: bool
    message: str = ""
    version: str = ""
    cost_s: float = 0.0
    jobs: int = 0
    interval_s: float = 0.0


class PollStatusFiles:
    """Poll status files, one for each cluster (``poll-CLUSTER.json``).

    Args:
        state_dir: Steward's state directory.
    """

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir

    def put(self, cluster: str, status: PollStatus) -> None:
        """Write the result of a cluster's last poll.

        Raises:
            StatusWriteError: It cannot be written.
        """
        write_status(self._path(cluster), status)

    def get(self, cluster: str) -> PollStatus | None:
        """Read the result of a cluster's last poll; None if there is none."""
        stored = read_status(self._path(cluster), PollStatus)
        return stored[0] if stored else None

    def _path(self, cluster: str) -> str:
        if _SAFE_NAME.fullmatch(cluster) is None:
            raise StewardError(
                f"invalid cluster name {cluster!r}: use up to 64 letters, digits, '_' and '-'",
                cluster,
            )
        return os.path.join(self._state_dir, f"poll-{cluster}.json")
