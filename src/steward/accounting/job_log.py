"""The job log as accounting reads it; the extension that writes it offers how."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import msgspec

from steward.core.extensions import load_offer
from steward.core.lines import Line

_GROUP: Final = "steward.job_log"
_NAME: Final = "log"

PassedOver = Callable[[str, int, str], None]
"""Told of each line that is no record: the file, the line's number, and why."""


class LogDay(Protocol):
    """One day of a job log."""

    @property
    def day(self) -> str:
        """The day, ``2026-11-21``."""

    @property
    def parquet(self) -> str:
        """Path of its lines in Parquet; "" if the day is not closed yet."""


class JobLog(msgspec.Struct, frozen=True, kw_only=True):
    """How a job log is read.

    Attributes:
        read_lines: Yields the lines of a day's file or of a directory, each run before its steps.
        days_in: Lists the days in a directory, the oldest first.
    """

    read_lines: Callable[[str, PassedOver | None], Iterator[Line]]
    days_in: Callable[[str], Sequence[LogDay]]


def job_log() -> JobLog:
    """Load how the job log is read.

    Raises:
        StewardError: No installed package offers it.
    """
    found: JobLog = load_offer(_GROUP, _NAME)
    return found
