"""Closes a day of the job log: its records compressed, and its lines in Parquet.

The work is done by a process of its own (``packing.py``), which ends and gives
its memory back. Its files are put into place in two steps that can be done
again: the day is marked, then files are renamed and removed, then the mark goes.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from steward.extensions.jobacct_plugins.log.days import Calendar
from steward.extensions.jobacct_plugins.log.files import LogFiles
from steward.extensions.jobacct_plugins.log.keeping import CLOSED, SWAPPING, Keeping
from steward.extensions.jobacct_plugins.log.places import LATE, NEW, OPEN, PACKED, PARQUET

log = logging.getLogger(__name__)

_IDLE: Final = timedelta(hours=1)
"""A day that is still written to, as by an import, is not closed each minute."""
_AGAIN_S: Final = 3600.0
_LONGEST_S: Final = 3000.0


class Closing:
    """Closes days.

    Args:
        files: The log's files.
        keeping: Knows their lengths.
        keeping_path: Where that is.
        calendar: Knows when days are over.
        idle: For how long nothing was to be written to a day that is closed.
    """

    def __init__(
        self,
        files: LogFiles,
        keeping: Keeping,
        keeping_path: str,
        calendar: Calendar,
        idle: timedelta = _IDLE,
    ) -> None:
        self._files = files
        self._keeping = keeping
        self._keeping_path = keeping_path
        self._calendar = calendar
        self._idle = idle
        self._again_at: dict[str, float] = {}

    def due(self, now: datetime, after: timedelta) -> list[str]:
        """The days that are to be closed, the oldest first.

        Args:
            now: The present time.
            after: How long after its end a day is closed.
        """
        days: dict[str, int] = {}
        for name, (_, written_s) in self._keeping.files().items():
            day = name.partition(".")[0]
            days[day] = max(days.get(day, 0), written_s)
        return sorted(
            day
            for day, written_s in days.items()
            if self._calendar.end_of(day) + after <= now
            and written_s + self._idle.total_seconds() <= now.timestamp()
            and time.monotonic() >= self._again_at.get(day, 0.0)
        )

    def close_day(self, day: str, lengths: Mapping[str, int]) -> bool:
        """Close a day, or close it again; whether that worked.

        Args:
            day: Which.
            lengths: How long its files are.

        Raises:
            LogUnavailable: The log's directory cannot be written now.
            SqliteUnavailable: The state directory cannot be written now.
        """
        began = time.monotonic()
        if self._work("packing", day, lengths) is None:
            log.error("the job log's day %s stays open for now", day)
            return False
        with self._keeping.writing() as writer:
            writer.set_day(day, SWAPPING)
        self._swap(day)
        log.info("closed the job log's day %s in %.1f s", day, time.monotonic() - began)
        return True

    def blank_day(self, day: str, lengths: Mapping[str, int]) -> bool:
        """Take out of a day what a person wrote of jobs whose scripts were purged.

        Args:
            day: Which.
            lengths: How long its files are.

        Returns:
            Whether that was done, or there was nothing to do.

        Raises:
            LogUnavailable, SqliteUnavailable: As :meth:`close_day`.
        """
        if time.monotonic() < self._again_at.get(day, 0.0):
            return False
        said = self._work("blanking", day, lengths)
        if said is None:
            log.error("the job log's day %s may still tell of what was purged", day)
            return False
        if not said:
            return True
        if os.path.exists(self._files.path(f"{day}{PACKED}")):
            return self.close_day(day, lengths)
        for kind in (OPEN, LATE):
            # Each is as long as the one before it: whichever is there, its known length holds.
            self._files.rename(f".{day}{kind}{NEW}", f"{day}{kind}")
        self._files.sync_directory()
        return True

    def _work(self, what: str, day: str, lengths: Mapping[str, int]) -> str | None:
        """Have a process work on a day; what it said, None where it failed."""
        parts = [
            f"{name}={lengths[name]}"
            for kind in (OPEN, LATE)
            if (name := f"{day}{kind}") in lengths
        ]
        command = [
            *(sys.executable, "-m", f"steward.extensions.jobacct_plugins.log.{what}"),
            *(self._files.location, day, self._keeping_path, *parts),
        ]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
                timeout=_LONGEST_S,
            )
        except (subprocess.SubprocessError, OSError) as error:
            said = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip()
            why = said.splitlines()[-1] if said else str(error)
            log.error("%s the job log's day %s: %s", what, day, why)
            self._again_at[day] = time.monotonic() + _AGAIN_S
            return None
        return done.stdout.decode(errors="replace").strip()

    def finish(self) -> None:
        """Take up what was interrupted, and remove what came to nothing.

        Raises:
            LogUnavailable: The log's directory cannot be written now.
        """
        for day, state in self._keeping.days().items():
            if state == SWAPPING:
                self._swap(day)
        self._files.remove_unfinished()

    def remove(self, day: str) -> None:
        """Remove all files of a day."""
        for kind in (OPEN, LATE, PACKED, PARQUET):
            self._files.remove(f"{day}{kind}")

    def _swap(self, day: str) -> None:
        for kind in (PACKED, PARQUET):
            self._files.rename(f".{day}{kind}{NEW}", f"{day}{kind}")
        self._files.sync_directory()
        for kind in (OPEN, LATE):
            self._files.remove(f"{day}{kind}")
        with self._keeping.writing() as writer:
            writer.set_day(day, CLOSED)
            writer.forget_files([f"{day}{OPEN}", f"{day}{LATE}"])
