"""How the files of the job log are named: one a day, and what becomes of a day when it closes.

``2026-11-21.jsonl`` is a day that still grows, ``2026-11-21.jsonl.zst`` and
``2026-11-21.parquet`` are the same day closed, ``2026-11-21.late.jsonl`` is what came after
that. Lists of days and what reads them need no database.
"""

import os
import re
from collections.abc import Iterable
from datetime import date
from typing import Final

import msgspec

from steward.extensions.jobacct_plugins.log.errors import LogError, LogUnavailable

OPEN: Final = ".jsonl"
LATE: Final = ".late.jsonl"
PACKED: Final = ".jsonl.zst"
PARQUET: Final = ".parquet"
NEW: Final = ".new"
"""Behind the name of what is being made; it is hidden by a dot before it, too."""

_NAME: Final = re.compile(r"(\d{4}-\d{2}-\d{2})(\.jsonl|\.late\.jsonl|\.jsonl\.zst|\.parquet)")


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """One day of a log, as its directory holds it.

    Attributes:
        day: The day, ``2026-11-21``.
        records: Paths of the files that hold its records, in the order in which to read them.
        parquet: Path of its lines in Parquet; "" where it was not closed yet.
        length: Size of all of its files, bytes.
    """

    day: str
    records: tuple[str, ...]
    parquet: str = ""
    length: int = 0


def day_name(day: date) -> str:
    """A day as files are named by."""
    return day.isoformat()


def days_in(location: str) -> list[Day]:
    """The days of a log, the oldest first.

    Raises:
        LogUnavailable: The directory cannot be read now.
    """
    found: dict[str, dict[str, os.DirEntry[str]]] = {}
    try:
        with os.scandir(location) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match and _is_date(match[1]) and entry.is_file(follow_symlinks=False):
                    found.setdefault(match[1], {})[match[2]] = entry
        return [_day(day, files) for day, files in sorted(found.items())]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LogUnavailable(
            f"the job log in {location} cannot be read: {error.strerror}", location
        ) from error


def _day(day: str, files: "dict[str, os.DirEntry[str]]") -> Day:
    return Day(
        day=day,
        records=tuple(files[kind].path for kind in (PACKED, OPEN, LATE) if kind in files),
        parquet=files[PARQUET].path if PARQUET in files else "",
        length=sum(entry.stat(follow_symlinks=False).st_size for entry in files.values()),
    )


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def units_of(path: str) -> Iterable[tuple[str, ...]]:
    """The files that belong together, below a log's directory or for one of its files.

    Args:
        path: A log's directory, or one file of records.

    Raises:
        LogError: It is neither.
        LogUnavailable: It cannot be read now.
    """
    if os.path.isdir(path):
        units = [day.records for day in days_in(path) if day.records]
        if not units:
            raise LogError(f"{path} holds no job log", path)
        return units
    if not os.path.exists(path):
        raise LogError(f"there is no job log {path}", path)
    return [(path,)]
