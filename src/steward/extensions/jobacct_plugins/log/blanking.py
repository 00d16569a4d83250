"""Takes what a person wrote of jobs out of the job log, when the jobs' scripts are purged.

``python -m steward.extensions.jobacct_plugins.log.blanking LOCATION DAY DATABASE NAME=LENGTH…``
looks a
day over and says ``found`` where there is such text. Of files that grow it makes new ones,
whose names begin with a dot, and puts nothing into place. Their lines, and so the files,
stay as long as they were, with spaces: the lengths that are known of them go on to hold.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import BinaryIO, Final

import msgspec

from steward.core.errors import StewardError
from steward.core.timestamps import micros
from steward.extensions.jobacct_plugins.log.files import (
    LATE,
    NEW,
    OPEN,
    PACKED,
    created,
    stop_with_parent,
    sync,
)
from steward.extensions.jobacct_plugins.log.reader import Source, records_of
from steward.extensions.jobacct_plugins.log.state import Keeping, Purge
from steward.jobs.identity import PROMPT_US, SLACK_US
from steward.jobs.run_merge import PRIVATE

_BLOCK: Final = 8 << 20
_HELD: Final = (("job", PRIVATE), ("line", PRIVATE), ("start", ("name",)))
"""Where a record holds what a person wrote."""


class _Ids(msgspec.Struct, frozen=True):
    array_job_id: int = 0
    het_job_id: int = 0


class _Head(msgspec.Struct, frozen=True):
    cluster: str
    job_id: int
    submit: datetime
    first_submit: datetime
    job: _Ids = _Ids()


_head_of = msgspec.json.Decoder(_Head).decode
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Blanking:
    """Knows the purged scripts, and learns which runs were of them.

    A script was written when its job was submitted first, and is kept under the id of its
    array's or het job's leader; what is told of the steps names no leader.

    Args:
        purges: The scripts.
    """

    def __init__(self, purges: Iterable[Purge] = ()) -> None:
        self._scripts: dict[tuple[str, int], list[int]] = {}
        self._runs: set[tuple[str, int, int]] = set()
        self.add(purges)

    def __bool__(self) -> bool:
        return bool(self._scripts)

    def add(self, purges: Iterable[Purge]) -> None:
        """Add scripts."""
        for cluster, job_id, written_us in purges:
            self._scripts.setdefault((cluster, job_id), []).append(written_us)

    def learn(self, line: bytes) -> None:
        """See whether a record is of a run of these scripts."""
        head = _read(line)
        if head is None:
            return
        leader = head.job.array_job_id or head.job.het_job_id or head.job_id
        first_us = micros(head.first_submit)
        for written_us in self._scripts.get((head.cluster, leader), ()):
            if -SLACK_US <= written_us - first_us <= PROMPT_US:
                self._runs.add(_run(head))

    def blank(self, line: bytes) -> bytes:
        """A record without what a person wrote, if it is of such a run; as long as it was."""
        if not self._runs:
            return line
        head = _read(line)
        if head is None or _run(head) not in self._runs:
            return line
        record = _decode(line)
        found = False
        for holder, names in _HELD:
            inner = record.get(holder)
            if isinstance(inner, dict):
                for name in names:
                    found = bool(inner.pop(name, None)) or found
        if not found:
            return line
        text = line.rstrip(b"\n")
        return _encode(record).ljust(len(text)) + line[len(text) :]

    def blank_all(self, lines: bytes) -> bytes:
        """The same of some lines, without spaces in the place of what was there."""
        kept = lines.splitlines(keepends=True)
        for line in kept:
            self.learn(line)
        blanked = ((line, self.blank(line)) for line in kept)
        return b"".join(old if new is old else new.rstrip() + b"\n" for old, new in blanked)


def _read(line: bytes) -> _Head | None:
    try:
        head = _head_of(line)
        _run(head)
        micros(head.first_submit)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, OverflowError):
        return None
    return head


def _run(head: _Head) -> tuple[str, int, int]:
    return head.cluster, head.job_id, micros(head.submit)


def blanked_lines(sources: list[Source], blanking: Blanking) -> Iterator[bytes]:
    """The lines of files that belong together, without what is to be blanked in them.

    Args:
        sources: The files, which are read twice if anything may have to be.
        blanking: Knows what.
    """
    if blanking:
        for line in records_of(sources):
            blanking.learn(line)
    for line in records_of(sources):
        yield blanking.blank(line)


def _look_over(location: str, day: str, lengths: dict[str, int], blanking: Blanking) -> bool:
    """Whether a day holds what is to be blanked; if so, its growing files are made anew."""
    packed = f"{location}/{day}{PACKED}"
    sources: list[Source] = [(packed, None)] if os.path.exists(packed) else []
    growing = [f"{day}{kind}" for kind in (OPEN, LATE) if f"{day}{kind}" in lengths]
    growing = [name for name in growing if os.path.exists(f"{location}/{name}")]
    sources += [(f"{location}/{name}", lengths[name]) for name in growing]
    for line in records_of(sources):
        blanking.learn(line)
    if not any(blanking.blank(line) is not line for line in records_of(sources)):
        return False
    if not os.path.exists(packed):
        for name in growing:
            with (
                open(f"{location}/{name}", "rb") as file,
                created(f"{location}/.{name}{NEW}") as new,
            ):
                _rewrite(file, lengths[name], new, blanking)
                sync(new)
    return True


def _rewrite(file: BinaryIO, length: int, new: BinaryIO, blanking: Blanking) -> None:
    while length and (piece := file.readline(min(_BLOCK, length))):
        length -= len(piece)
        blanked = blanking.blank(piece)
        if len(blanked) != len(piece):
            raise ValueError("a record cannot be written again in the place that it has")
        new.write(blanked)


def main(arguments: list[str]) -> int:
    """Look a day over; the exit code."""
    stop_with_parent()
    location, day, database, *parts = arguments
    lengths = {name: int(length) for name, _, length in (part.rpartition("=") for part in parts)}
    try:
        keeping = Keeping(database, reading=True)
        blanking = Blanking(keeping.purges())
        keeping.close()
        print("found" if _look_over(location, day, lengths, blanking) else "")
    except (StewardError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
