"""State files of slurmctld: detect without a query that the cluster has not changed.

slurmctld rewrites the files of jobs, nodes, partitions, reservations and triggers in
StateSaveLocation when it changes them: at once, or five seconds after its last save
(``SAVE_MAX_WAIT`` in slurmctld/state_save.c), and all of them every five minutes
(``PERIODIC_CHECKPOINT``). So if none was written for six seconds, each later change shows at once.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from steward.core.files import find_network_type
from steward.slurm.errors import SlurmError
from steward.slurm.settings import ClusterSettings

StateStamp = tuple[tuple[str, int, int], ...]
"""Name, inode and modification time of each state file; a new slurmctld has not written all."""

_NAMES: Final = ("job_state", "node_state", "part_state", "resv_state", "trigger_state")
_LONGEST_DELAY_NS: Final = 6_000_000_000
"""Longest delay of a save after the one before it, in nanoseconds, with a second to spare."""
_LONGEST_REST_NS: Final = 400_000_000_000
"""Age of the newest file, in nanoseconds, from which slurmctld does not write here."""


class StateFiles:
    """State files of one cluster's slurmctld, if they are on this host.

    Args:
        settings: Settings of the cluster.
        find_directory: Queries Slurm for StateSaveLocation, if the settings do not name it.
    """

    def __init__(self, settings: ClusterSettings, find_directory: Callable[[], str]) -> None:
        self._directory = settings.spool
        # With a prefix Slurm's paths may be those of another root directory.
        self._can_find = not settings.slurm_prefix
        self._find_directory = find_directory

    def read_stamp(self) -> StateStamp | None:
        """Return a stamp that differs after every change of the cluster that slurmctld saves.

        Returns:
            None if a change may not show: the files are not on a local file system of this host,
            or were written a moment ago, or too long ago.
        """
        try:
            if not self._directory and self._can_find:
                self._directory = self._find_directory()
                self._can_find = False
            if not self._directory or find_network_type(self._directory):
                return None
            files = []
            for name in _NAMES:
                with suppress(FileNotFoundError):
                    status = os.stat(f"{self._directory}/{name}")
                    files.append((name, status.st_ino, status.st_mtime_ns))
        except (OSError, SlurmError):
            return None
        age_ns = time.time_ns() - max((mtime_ns for _, _, mtime_ns in files), default=0)
        if not _LONGEST_DELAY_NS <= age_ns <= _LONGEST_REST_NS:
            return None
        return tuple(files)
