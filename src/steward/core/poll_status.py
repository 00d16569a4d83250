"""How each cluster's Slurm was last looked at: kept for whoever shows how Steward stands.

The process that asks Slurm writes it; nobody else asks for its sake.
"""

import os
import re
from datetime import datetime
from typing import Final

import msgspec

from steward.core.errors import StewardError
from steward.core.files import read_status, write_status

COST_FACTOR: Final = 20
"""A poll of slurmctld takes at most this part of the time."""
LONG_INTERVAL_S: Final = 60.0
"""A longer wait for the next poll of the queue is told in log, status and metrics."""
_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a cluster's queue.

    Attributes:
        at: When it was begun.
        up: Whether slurmctld answered.
        message: What it said where it did not.
        version: Slurm's version ("22.05.8"); "" where it was never told.
        cost_s: How long the last look that was answered took, in seconds.
        jobs: How many jobs that one showed.
        interval_s: How long it is to the next one, in seconds.
    """

    at: datetime
    up: bool
    message: str = ""
    version: str = ""
    cost_s: float = 0.0
    jobs: int = 0
    interval_s: float = 0.0


class Looks:
    """The last look at each cluster, one file each.

    Args:
        state_dir: Steward's state directory.
    """

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir

    def put(self, cluster: str, look: Look) -> None:
        """Keep the last look.

        Raises:
            NotLeft: It cannot be written.
        """
        write_status(self._path(cluster), look)

    def get(self, cluster: str) -> Look | None:
        """The last look; None where none was kept."""
        found = read_status(self._path(cluster), Look)
        return found[0] if found else None

    def _path(self, cluster: str) -> str:
        if _SAFE_NAME.fullmatch(cluster) is None:
            raise StewardError(f"{cluster!r} is not a cluster's name", cluster)
        return os.path.join(self._state_dir, f"look-{cluster}.json")
