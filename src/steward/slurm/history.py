"""Rows of sacct in bulk: a time's jobs and steps out of slurmdbd, or out of a file.

sacct has no way to write a separator that its rows cannot hold. Its own rows
are asked for with one that is made for the occasion, and begin and end with
what Slurm alone writes. In a file the separator is what it is: a row with
more or fewer columns than the heading is passed over, and counted.
"""

import re
import secrets
import tempfile
from collections.abc import Iterator
from datetime import datetime
from typing import BinaryIO, Final

from steward.slurm.commands import Commands
from steward.slurm.errors import SlurmError
from steward.slurm.history_rows import Row

FIELDS: Final = (
    # What Slurm alone writes stands first and last.
    *("JobIDRaw", "JobID", "UID", "GID", "State", "ExitCode", "DerivedExitCode", "Submit"),
    *("Eligible", "Start", "End", "Suspended", "TimelimitRaw", "NNodes", "NCPUS", "ReqCPUS"),
    *("ReqNodes", "ReqTRES", "AllocTRES", "NodeList", "NTasks", "Restarts", "SLUID"),
    *("OriginalSLUID", "UserCPU", "SystemCPU", "MinCPU", "MinCPUNode", "MinCPUTask", "AveCPU"),
    *("MaxRSSNode", "MaxRSSTask", "AveRSS", "MaxPagesNode", "MaxPagesTask", "AvePages"),
    *("MaxDiskReadNode", "MaxDiskReadTask", "MaxDiskWriteNode", "MaxDiskWriteTask"),
    *("TRESUsageInMax", "TRESUsageInTot", "TRESUsageInAve"),
    *("TRESUsageOutMax", "TRESUsageOutTot", "TRESUsageOutAve", "Priority", "Flags", "FailedNode"),
    *("User", "Group", "Account", "Partition", "QOS", "WCKey", "Reservation", "Constraints"),
    *("Licenses", "Container", "Reason", "JobName", "WorkDir", "StdIn", "StdOut", "StdErr"),
    *("SubmitLine", "Comment", "AdminComment", "SystemComment", "Extra", "DBIndex"),
)
NEEDED: Final = ("jobid", "submit", "end", "state")
"""Columns without which a file tells nothing that could be put into books."""

_TIMEOUT_S: Final = 1800.0
_CHUNK: Final = 1 << 20
_LONGEST_ROW: Final = 4 << 20
_WORD: Final = re.compile(r"[A-Za-z]{1,40}")


class History:
    """A cluster's slurmdbd, asked for all that it knows of a time.

    Args:
        commands: How sacct is run.
        cluster: ClusterName in slurm.conf.
    """

    def __init__(self, commands: Commands, cluster: str) -> None:
        self._commands = commands
        self._cluster = cluster
        self._fields: list[str] = []
        self.passed_over = 0

    def rows(self, since: datetime, until: datetime, *, steps: bool = True) -> Iterator[Row]:
        """Jobs that were eligible or ran between two times, all runs of them, and their steps.

        Memory is bounded on our side, whatever the time holds; times are UTC.

        Args:
            since: Beginning of the time.
            until: Its end.
            steps: Whether steps are wanted too.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        separator = f"<{secrets.token_hex(12)}>"
        fields = self._known_fields()
        with tempfile.TemporaryFile() as file:
            self._commands.run_into(
                file,
                "sacct",
                *("-n", "-P", "-a", "-D", "--noconvert", "-M", self._cluster),
                *(() if steps else ("-X",)),
                *("-S", _slurm_time(since), "-E", _slurm_time(until)),
                *("--delimiter", separator, "-o", ",".join(fields)),
                timeout_s=_TIMEOUT_S,
            )
            file.seek(0)
            names = [name.lower() for name in fields]
            for parts in _records(file, separator.encode(), len(names)):
                if parts is None:
                    self.passed_over += 1
                else:
                    yield dict(zip(names, map(_text, parts), strict=True))

    def _known_fields(self) -> list[str]:
        if not self._fields:
            # Any version's sacct says what it knows.
            known = set(self._commands.run("sacct", "--helpformat").decode("ascii").split())
            self._fields = [name for name in FIELDS if name in known]
        return self._fields


def rows_of_file(file: BinaryIO, delimiter: str = "|") -> Iterator[tuple[Row | None, int]]:
    """The rows of a file that ``sacct -P`` wrote, with its heading.

    Args:
        file: Open for reading, at its start.
        delimiter: What stands between columns.

    Yields:
        Each row, None for one that is none, and how many bytes of the file are behind it.

    Raises:
        SlurmError: The heading is none, or lacks a column that is needed.
    """
    separator = delimiter.encode()
    heading = file.readline(_LONGEST_ROW)
    names = [_text(part).lower() for part in heading.rstrip(b"\r\n").split(separator)]
    is_closed = not names[-1]
    if is_closed:
        names.pop()  # sacct -p ends each row with a delimiter, as sacct -P does not
    missing = [name for name in NEEDED if name not in names and f"{name}raw" not in names]
    if missing or not all(_WORD.fullmatch(name) for name in names):
        raise SlurmError(
            "this is no output of sacct -P with a heading and the columns JobID, JobIDRaw, Submit, "
            "Start, End, State: write it with sacct -P -a -D -o ALL",
            ("sacct",),
            heading[:200].decode("utf-8", "backslashreplace"),
        )
    place = len(heading)
    while line := file.readline(_LONGEST_ROW):
        place += len(line)
        parts = line.rstrip(b"\r\n").split(separator)
        if is_closed and not parts[-1]:
            parts.pop()
        is_row = len(parts) == len(names)
        yield dict(zip(names, map(_text, parts), strict=True)) if is_row else None, place


def _records(file: BinaryIO, separator: bytes, columns: int) -> Iterator[list[bytes] | None]:
    """Rows between separators; a text may hold line ends, the first and last column may not."""
    parts: list[bytes] = []
    left = b""
    while True:
        chunk = file.read(_CHUNK)
        *whole, left = (left + chunk).split(separator)
        for part in whole:
            if len(parts) == columns - 1:
                last, end, first = part.partition(b"\n")
                yield [*parts, last] if end and last.isdigit() else None
                parts = [first]
            else:
                parts.append(part)
        if not chunk:
            break
        if len(left) > _LONGEST_ROW:
            left = left[-len(separator) :]
    if len(parts) == columns - 1:
        yield [*parts, left.rstrip(b"\n")]
    elif parts or left.strip():
        yield None


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def _slurm_time(moment: datetime) -> str:
    """A time as Slurm's commands take it under TZ=UTC."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S")
