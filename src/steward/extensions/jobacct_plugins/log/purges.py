"""Blanking of private text in the job log for jobs whose scripts were purged.

:class:`PurgeBlanker` knows the purged scripts, learns which runs belong to them, and blanks names,
comments and the like in their records. The consumer uses it for new lines, ``parquet`` for a day
that closes, and the program below for the days that exist already:

``python -m steward.extensions.jobacct_plugins.log.purges LOCATION DAY DATABASE NAME=LENGTH…``
scans a day and prints ``has_text`` where it holds such text. It writes new versions of growing
files, under names that begin with a dot, and leaves renaming to its caller. Lines, and so files,
keep their length, padded with spaces: lengths recorded for them stay valid.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import BinaryIO, Final

import msgspec

from steward.core.errors import StewardError
from steward.core.timestamps import to_micros
from steward.extensions.jobacct_plugins.log.files import (
    LATE_SUFFIX,
    NEW_SUFFIX,
    OPEN_SUFFIX,
    PACKED_SUFFIX,
    create_log_file,
    stop_with_parent,
    sync_file,
)
from steward.extensions.jobacct_plugins.log.reader import LogSource, read_raw_lines
from steward.extensions.jobacct_plugins.log.state import LogState, PurgedScript
from steward.jobs.identity import PROMPT_US, SLACK_US
from steward.jobs.run_merge import PRIVATE_TEXT

_READ_BYTES: Final = 8 << 20
"""Most bytes of one read."""
_PRIVATE_FIELDS: Final = (("job", PRIVATE_TEXT), ("line", PRIVATE_TEXT), ("start", ("name",)))
"""Fields of a record that hold text written by a person."""


class _Ids(msgspec.Struct, frozen=True):
    array_job_id: int = 0
    het_job_id: int = 0


class _BlankHead(msgspec.Struct, frozen=True):
    cluster: str
    job_id: int
    submit: datetime
    first_submit: datetime
    job: _Ids = _Ids()


_decode_head = msgspec.json.Decoder(_BlankHead).decode
_decode_json = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class PurgeBlanker:
    """Purged scripts, and the runs that used them.

    A script was written at its job's first submission and has the job id of its array's or het
    job's leader; step records name no leader.

    Args:
        purges: The purged scripts.
    """

    def __init__(self, purges: Iterable[PurgedScript] = ()) -> None:
        self._scripts: dict[tuple[str, int], list[int]] = {}
        self._run_keys: set[tuple[str, int, int]] = set()
        self.add_purges(purges)

    def __bool__(self) -> bool:
        return bool(self._scripts)

    def add_purges(self, purges: Iterable[PurgedScript]) -> None:
        """Add purged scripts."""
        for cluster, job_id, written_us in purges:
            self._scripts.setdefault((cluster, job_id), []).append(written_us)

    def learn_run(self, line: bytes) -> None:
        """Remember the record's run if it belongs to a purged script."""
        head = _parse_head(line)
        if head is None:
            return
        leader = head.job.array_job_id or head.job.het_job_id or head.job_id
        first_us = to_micros(head.first_submit)
        for written_us in self._scripts.get((head.cluster, leader), ()):
            if -SLACK_US <= written_us - first_us <= PROMPT_US:
                self._run_keys.add(_run_key(head))

    def blank_line(self, line: bytes) -> bytes:
        """Blank a record's private text if its run is affected; the length stays the same."""
        if not self._run_keys:
            return line
        head = _parse_head(line)
        if head is None or _run_key(head) not in self._run_keys:
            return line
        record = _decode_json(line)
        has_text = False
        for field, names in _PRIVATE_FIELDS:
            part = record.get(field)
            if isinstance(part, dict):
                for name in names:
                    has_text = bool(part.pop(name, None)) or has_text
        if not has_text:
            return line
        text = line.rstrip(b"\n")
        return _encode(record).ljust(len(text)) + line[len(text) :]

    def blank_lines(self, lines: bytes) -> bytes:
        """Blank several lines, without padding."""
        line_list = lines.splitlines(keepends=True)
        for line in line_list:
            self.learn_run(line)
        blanked = ((line, self.blank_line(line)) for line in line_list)
        return b"".join(
            line_before if blanked_line is line_before else blanked_line.rstrip() + b"\n"
            for line_before, blanked_line in blanked
        )


def _parse_head(line: bytes) -> _BlankHead | None:
    """Parse the head of a line's record; None if it is invalid."""
    try:
        head = _decode_head(line)
        _run_key(head)
        to_micros(head.first_submit)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, OverflowError):
        return None
    return head


def _run_key(head: _BlankHead) -> tuple[str, int, int]:
    return head.cluster, head.job_id, to_micros(head.submit)


def read_blanked_lines(sources: list[LogSource], blanker: PurgeBlanker) -> Iterator[bytes]:
    """Yield the lines of a day's files with their private text blanked.

    Args:
        sources: The files; read twice if anything may need blanking.
        blanker: The purged scripts.
    """
    if blanker:
        for line in read_raw_lines(sources):
            blanker.learn_run(line)
    for line in read_raw_lines(sources):
        yield blanker.blank_line(line)


def _blank_day(location: str, day: str, lengths: dict[str, int], blanker: PurgeBlanker) -> bool:
    """Blank a day's growing files if they hold purged text; return True if the day holds any."""
    packed = f"{location}/{day}{PACKED_SUFFIX}"
    sources: list[LogSource] = [(packed, None)] if os.path.exists(packed) else []
    growing = [
        f"{day}{suffix}" for suffix in (OPEN_SUFFIX, LATE_SUFFIX) if f"{day}{suffix}" in lengths
    ]
    growing = [name for name in growing if os.path.exists(f"{location}/{name}")]
    sources += [(f"{location}/{name}", lengths[name]) for name in growing]
    for line in read_raw_lines(sources):
        blanker.learn_run(line)
    if not any(blanker.blank_line(line) is not line for line in read_raw_lines(sources)):
        return False
    if not os.path.exists(packed):
        for name in growing:
            with (
                open(f"{location}/{name}", "rb") as file,
                create_log_file(f"{location}/.{name}{NEW_SUFFIX}") as new_file,
            ):
                _rewrite(file, lengths[name], new_file, blanker)
                sync_file(new_file)
    return True


def _rewrite(file: BinaryIO, length: int, new_file: BinaryIO, blanker: PurgeBlanker) -> None:
    """Copy the valid bytes of a file, blanked, line by line at equal length."""
    while length and (line := file.readline(min(_READ_BYTES, length))):
        length -= len(line)
        blanked = blanker.blank_line(line)
        if len(blanked) != len(line):
            raise ValueError("the redacted record does not fit in the place of the original")
        new_file.write(blanked)


def main(arguments: list[str]) -> int:
    """Blank one day; return the exit code."""
    stop_with_parent()
    location, day, database, *parts = arguments
    lengths = {name: int(length) for name, _, length in (part.rpartition("=") for part in parts)}
    try:
        state = LogState(database, read_only=True)
        blanker = PurgeBlanker(state.list_purges())
        state.close()
        print("found" if _blank_day(location, day, lengths, blanker) else "")
    except (StewardError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
