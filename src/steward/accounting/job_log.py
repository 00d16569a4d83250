"""Job log readers: the interface implemented by the extension that writes the job log.

A job log (plugin jobacct/log) is a directory with one file of records per day. Closing a day packs
its records and writes its accounting lines to a Parquet file. :func:`load_job_log` loads the
functions by their entry point; imports and ``steward sacct`` use them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import msgspec

from steward.core.extensions import load_offer
from steward.core.records import UsageLine

_GROUP: Final = "steward.job_log"
_NAME: Final = "log"

SkippedLine = Callable[[str, int, str], None]
"""Callback for each malformed line, with file, line number and reason."""


class LogDay(Protocol):
    """Day of a job log."""

    @property
    def day(self) -> str:
        """Date, such as ``2026-11-21``."""

    @property
    def parquet(self) -> str:
        """Path of the day's Parquet file; "" until the day is closed."""


class JobLog(msgspec.Struct, frozen=True, kw_only=True):
    """Functions that read a job log.

    Attributes:
        read_lines: Yields the lines of a day's file or of a directory, each run before its steps.
        days_in: Lists the days in a directory, oldest first.
    """

    read_lines: Callable[[str, SkippedLine | None], Iterator[UsageLine]]
    days_in: Callable[[str], Sequence[LogDay]]


def load_job_log() -> JobLog:
    """Load the functions that read the job log.

    Raises:
        StewardError: No installed package provides them.
    """
    offer: JobLog = load_offer(_GROUP, _NAME)
    return offer
