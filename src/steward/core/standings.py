"""What each cluster's Slurm last said of who stands where, kept for the processes that decide.

One process asks Slurm, now and then; the processes that answer requests read
what it wrote, so that no request waits for Slurm. What is too old is not used:
who is unknown sees no more than their own.
"""

import os
import re
import time
from collections.abc import Callable

from steward.core.access import Access, Standing
from steward.core.config import Settings
from steward.core.errors import StewardError, Unavailable
from steward.core.leaving import NotLeft, leave, left

OLDEST_S = 86400.0
"""Seconds after which a standing is not believed any more."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class StandingsUnavailable(Unavailable):
    """The standings cannot be written now."""


class Standings:
    """The standings of all clusters, one file each.

    Args:
        state_dir: Steward's state directory.
    """

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir

    def put(self, cluster: str, standing: Standing) -> None:
        """Keep what a cluster's Slurm says now.

        Raises:
            StandingsUnavailable: It cannot be written.
        """
        try:
            leave(self._path(cluster), standing)
        except NotLeft as error:
            raise StandingsUnavailable(str(error), error.offender) from error

    def get(self, cluster: str) -> Standing | None:
        """What a cluster's Slurm last said; None if that is unknown or too long ago."""
        try:
            found = left(self._path(cluster), Standing)
        except StewardError:
            return None  # no cluster of ours: nothing is granted
        # Not asked yet: nothing is known, and nothing is granted.
        return found[0] if found and time.time() - found[1] < OLDEST_S else None

    def version(self, cluster: str) -> tuple[int, int]:
        """Tell one file of a cluster's standing from the next, without reading it.

        Returns:
            Its inode and modification time in ns, both 0 where there is none.
        """
        try:
            of = os.stat(self._path(cluster))
        except OSError:
            return 0, 0
        return of.st_ino, of.st_mtime_ns

    def _path(self, cluster: str) -> str:
        if _SAFE_NAME.fullmatch(cluster) is None:
            raise StewardError(f"{cluster!r} is not a cluster's name", cluster)
        return os.path.join(self._state_dir, f"standing-{cluster}.json")


def access_of(
    settings: Settings, led: Callable[[str, frozenset[str]], frozenset[str]] | None = None
) -> Access:
    """Who may see what, by the configuration and by what Slurm last said.

    Args:
        settings: The configuration.
        led: Which of the bank's accounts somebody leads, as :class:`Access` takes it.
    """
    try:
        own_uid = os.stat(settings.state_dir).st_uid
    except OSError:
        # Nothing is there to be seen yet, by anyone.
        own_uid = os.geteuid()
    return Access(settings.access, own_uid, Standings(settings.state_dir).get, led)
