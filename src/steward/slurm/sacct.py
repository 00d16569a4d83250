"""sacct output: parse rows of jobs and steps, from sacct itself or from a file.

:func:`parse_job_row` and :func:`parse_step_row` make a JobRecord and a UsageLine of a row.
:class:`SacctHistory` runs sacct for a period; :func:`read_sacct_file` reads a file that ``sacct
-P`` wrote, for imports.

A row is a mapping from column names in lower case to text. Sizes may have units and times may be
in a local zone, because files come from any sacct command line.
"""

import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Any, BinaryIO, Final

from steward.core.records import JobRecord, RunFields, UsageLine
from steward.slurm import tres
from steward.slurm.commands import CommandRunner
from steward.slurm.errors import SlurmError
from steward.slurm.users import NameResolver
from steward.slurm.values import parse_exit_status, parse_moment, parse_number, parse_seconds

SacctRow = Mapping[str, str]
"""Row of sacct: text by column name in lower case."""

SACCT_NAME: Final = re.compile(r"(\d{1,10})(?:_(?:\[(.+)\]|(\d{1,10}))|\+(\d{1,10}))?(?:\.(.+))?")
"""Job or step name of sacct: 12, 12_3, 12_[4-9], 12+1, 12.batch, 12_3.0."""

_CLOCK: Final = re.compile(r"(?:(\d{1,6})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,2})(?:\.(\d{1,6}))?")
_SIZE: Final = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)([KMGTPE]?)")
_UNITS: Final = {"": 1, **{unit: 1024 ** (n + 1) for n, unit in enumerate("KMGTPE")}}
_PLACEHOLDERS: Final = frozenset({"", "None", "Unknown", "None assigned", "(null)"})
_US: Final = 1_000_000
_CACHED: Final = 4096
"""Number of values of each kind that are parsed once: most repeat from row to row."""
_LONGEST_NUMBER: Final = 40
"""Longest time, duration or number, in characters."""
_LONGEST_CACHED: Final = 400
"""Longest text in a cache, in characters."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EMPTY_RECORD: Final = JobRecord(job_id=0)


def parse_job_row(row: SacctRow, resolver: NameResolver, zone: tzinfo = UTC) -> JobRecord | None:
    """Return the record of a job, or None if the row lacks a job id or submit time.

    Args:
        row: Row of a job, not of a step.
        resolver: Resolves names.
        zone: Time zone of the row.
    """
    name_match = SACCT_NAME.fullmatch(row.get("jobid", "")) or SACCT_NAME.fullmatch(
        row.get("jobidraw", "")
    )
    raw_id = row.get("jobidraw") or (
        name_match[1] if name_match and not name_match[2] and not name_match[3] else ""
    )
    submit = parse_sacct_time(row.get("submit", ""), zone)
    if name_match is None or not raw_id.isdigit() or submit is None:
        return None
    is_array, is_het = "_" in name_match[0], name_match[4] is not None
    state, canceller = _split_state(row)
    status = parse_exit_status(row.get("exitcode", ""))
    derived_status = parse_exit_status(row.get("derivedexitcode", ""))
    limit_min = _parse_count(row.get("timelimitraw", ""))
    return JobRecord(
        job_id=int(raw_id),
        state=state,
        cancelled_by=canceller,
        array_job_id=int(name_match[1]) if is_array else 0,
        array_task=(name_match[2] or name_match[3]) if is_array else "",
        het_job_id=int(name_match[1]) if is_het else 0,
        het_offset=int(name_match[4]) if is_het else 0,
        restarts=_parse_count(row.get("restarts", "")) or 0,
        submit=submit,
        eligible=parse_sacct_time(row.get("eligible", ""), zone),
        start=parse_sacct_time(row.get("start", ""), zone),
        end=parse_sacct_time(row.get("end", ""), zone),
        suspended_s=_parse_whole_seconds(row.get("suspended", "")),
        time_limit_s=parse_seconds(row.get("timelimit", ""))
        if limit_min is None
        else limit_min * 60,
        nodes=_parse_count(row.get("nnodes", "")),
        cpus=_parse_count(row.get("ncpus", row.get("alloccpus", ""))),
        requested_cpus=_parse_count(row.get("reqcpus", "")),
        requested_nodes=_parse_count(row.get("reqnodes", "")),
        priority=_parse_count(row.get("priority", "")),
        exit_code=status[0] if status else None,
        exit_signal=status[1] if status else None,
        derived_exit_code=derived_status[0] if derived_status else None,
        derived_exit_signal=derived_status[1] if derived_status else None,
        **_read_owner(row, resolver),
        **_read_text_columns(row),
    )


def parse_step_row(
    row: SacctRow, job: JobRecord, cluster: str, zone: tzinfo = UTC
) -> UsageLine | None:
    """Return the accounting line of a step, or None if the row's name is not a step's.

    Args:
        row: Row of a step.
        job: Record of the job, whose row precedes.
        cluster: Cluster name.
        zone: Time zone of the row.
    """
    name_match = SACCT_NAME.fullmatch(row.get("jobid", "")) or SACCT_NAME.fullmatch(
        row.get("jobidraw", "")
    )
    if name_match is None or name_match[5] is None:
        return None
    state, canceller = _split_state(row)
    status = parse_exit_status(row.get("exitcode", ""))
    return UsageLine(
        cluster=cluster,
        job_id=job.job_id,
        label="",
        step=name_match[5][:40],
        name=_clean_text(row, "jobname"),
        state=state,
        cancelled_by=canceller,
        exit_code=status[0] if status else None,
        exit_signal=status[1] if status else None,
        start_us=_moment_to_micros(parse_sacct_time(row.get("start", ""), zone)),
        end_us=_moment_to_micros(parse_sacct_time(row.get("end", ""), zone)),
        suspended_s=_parse_whole_seconds(row.get("suspended", "")) or 0,
        nodes=_parse_count(row.get("nnodes", "")) or 0,
        cpus=_parse_count(row.get("ncpus", row.get("alloccpus", ""))) or 0,
        nodelist=_clean_text(row, "nodelist"),
        tres_allocated=_shorten_sizes(_clean_text(row, "alloctres")),
        tasks=_parse_count(row.get("ntasks", "")) or 0,
        container=_clean_text(row, "container"),
        submit_line=_clean_text(row, "submitline"),
        source="slurmdbd",
        **_read_usage(row),
    )


def parse_sacct_time(raw: str, zone: tzinfo) -> datetime | None:
    """Parse a time of sacct: ISO 8601 in ``zone``, or seconds since the epoch."""
    return _parse_time(raw, zone) if len(raw) <= _LONGEST_NUMBER else None


@lru_cache(_CACHED)
def _parse_time(raw: str, zone: tzinfo) -> datetime | None:
    if raw.isascii() and raw.isdigit() and len(raw) <= 11:
        return datetime.fromtimestamp(int(raw), UTC) if int(raw) else None
    moment = parse_moment(raw)
    return None if moment is None else moment.replace(tzinfo=zone).astimezone(UTC)


def parse_clock_us(raw: str) -> int | None:
    """Parse a duration of sacct into µs: "1-02:03:04", "00:00.017"; None if malformed."""
    return _parse_clock(raw) if 0 < len(raw) <= _LONGEST_NUMBER else None


def _parse_count(raw: str) -> int | None:
    """Parse a count: "4", "0", "1-4" (the minimum); None if not a number."""
    return _parse_number(raw) if 0 < len(raw) <= _LONGEST_NUMBER else None


_parse_number: Final = lru_cache(_CACHED)(parse_number)


@lru_cache(_CACHED)
def _parse_clock(raw: str) -> int | None:
    parts = _CLOCK.fullmatch(raw)
    if parts is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups()[:4])
    total_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return total_s * _US + int((parts[5] or "").ljust(6, "0"))


def parse_size(raw: str) -> int | None:
    """Parse a size into bytes: "3268608", "1632K", "0.01M"; None if malformed."""
    if raw.isascii() and raw.isdigit() and len(raw) <= 18:
        return int(raw)
    parts = _SIZE.fullmatch(raw) if raw else None
    return None if parts is None else int(float(parts[1]) * _UNITS[parts[2]])


_COLUMN_NAMES: Final = {
    "name": "jobname",
    "tres_requested": "reqtres",
    "tres_allocated": "alloctres",
    "job_flags": "flags",
}
"""Columns of sacct that have another name than the record field they fill, by that field."""
_PARSED_FIELDS: Final = frozenset({"user", "group", "state", "array_task", "oversubscribe"})
"""Text fields that are not a column as it is."""
_TEXT_COLUMNS: Final = {
    _COLUMN_NAMES.get(field, field.replace("_", "")): field
    for field in RunFields.__struct_fields__
    if getattr(_EMPTY_RECORD, field) == "" and field not in _PARSED_FIELDS
}
"""Text columns, and the record fields they fill."""

_MAXIMA: Final = {"max_rss": "mem", "max_pages": "pages", "max_read": "fs/disk"}
_COLUMNS: Final = {"max_rss": "maxrss", "max_pages": "maxpages", "max_read": "maxdiskread"}
_RAW_TEXT_COLUMNS: Final = frozenset({"jobname", "sluid", "stdin", "stdout", "stderr"})
"""Text columns in which "None" or "Unknown" may be a real value."""


def _clean_text(row: SacctRow, column: str) -> str:
    """Return a text column, or "" for sacct's placeholders."""
    text = row.get(column, "")
    if column in _RAW_TEXT_COLUMNS:
        return text
    return "" if text in _PLACEHOLDERS else text


def _read_text_columns(row: SacctRow) -> dict[str, Any]:
    """Return the record fields that hold text."""
    texts = {field: _clean_text(row, column) for column, field in _TEXT_COLUMNS.items()}
    # SacctHistory runs sacct with --noconvert, because it would round sizes.
    return texts | {
        field: _shorten_sizes(texts[field]) for field in ("tres_requested", "tres_allocated")
    }


def _shorten_sizes(text: str) -> str:
    """Convert the sizes in a TRES text to Slurm's usual form."""
    shorten = _shorten_cached if len(text) <= _LONGEST_CACHED else tres.shorten_sizes
    return shorten(text)


_shorten_cached: Final = lru_cache(_CACHED)(tres.shorten_sizes)


def _split_state(row: SacctRow) -> tuple[str, int | None]:
    """Return the state, and the uid that cancelled the job."""
    state, _, rest = row.get("state", "").partition(" ")
    canceller = rest.removeprefix("by ")
    return state.rstrip("+").upper(), _parse_count(canceller) if canceller else None


def _read_owner(row: SacctRow, resolver: NameResolver) -> dict[str, Any]:
    """Return uid, user, gid and group of a row."""
    uid, gid = _parse_count(row.get("uid", "")), _parse_count(row.get("gid", ""))
    if uid is None and row.get("user"):
        uid = resolver.uid(row["user"])
    if gid is None and row.get("group"):
        gid = resolver.gid(row["group"])
    return {
        "uid": uid,
        "user": "" if uid is None else resolver.user(uid) or _read_name(row, "user", uid),
        "gid": gid,
        "group": "" if gid is None else resolver.group(gid) or _read_name(row, "group", gid),
    }


def _read_name(row: SacctRow, column: str, number: int) -> str:
    """Return the user or group name in a row whose number this host cannot resolve.

    User is the association's name, which slurmdbd keeps. Group, and User where slurmdbd has no
    association, is what sacct's own host resolved: "nobody", or the number.
    """
    name = _clean_text(row, column)
    return "" if name in (str(number), "nobody", "nogroup") else name


def _read_usage(row: SacctRow) -> dict[str, Any]:
    """Return a step's resource usage; without samples only its CPU time is known."""
    usage: dict[str, Any] = {
        "user_us": parse_clock_us(row.get("usercpu", "")),
        "system_us": parse_clock_us(row.get("systemcpu", "")),
        "min_cpu_us": parse_clock_us(row.get("mincpu", "")),
        "min_cpu_node": _clean_text(row, "mincpunode"),
        "min_cpu_task": _parse_count(row.get("mincputask", "")),
        "ave_cpu_us": parse_clock_us(row.get("avecpu", "")),
        "ave_rss_bytes": parse_size(row.get("averss", "")),
        "ave_pages": parse_size(row.get("avepages", "")),
    }
    for field, name in _MAXIMA.items():
        column = _COLUMNS[field]
        value = _get_tres_amount(row, "tresusageinmax", name)
        usage[f"{field}_bytes" if field != "max_pages" else field] = parse_size(
            row.get(column, "") if value is None else value
        )
        usage[f"{field}_node"] = _clean_text(row, f"{column}node")
        usage[f"{field}_task"] = _parse_count(row.get(f"{column}task", ""))
    for field, column, fallback in _DISK_COLUMNS:
        value = _get_tres_amount(row, column, "fs/disk")
        usage[field] = parse_size(row.get(fallback, "") if value is None else value)
    usage["max_written_node"] = _clean_text(row, "maxdiskwritenode")
    usage["max_written_task"] = _parse_count(row.get("maxdiskwritetask", ""))
    return usage


_DISK_COLUMNS: Final = (
    ("ave_read_bytes", "tresusageinave", "avediskread"),
    ("read_bytes", "tresusageintot", ""),
    ("max_written_bytes", "tresusageoutmax", "maxdiskwrite"),
    ("ave_written_bytes", "tresusageoutave", "avediskwrite"),
    ("written_bytes", "tresusageouttot", ""),
)
"""Fields with bytes of files, their TRES columns, and the columns of older versions."""


def _get_tres_amount(row: SacctRow, column: str, name: str) -> str | None:
    """Return an amount of a TRES column, or None if the column lacks it."""
    text = row.get(column)
    if not text:
        return None
    _, is_found, rest = f",{text}".partition(f",{name}=")
    return rest.partition(",")[0] if is_found else None


def _parse_whole_seconds(raw: str) -> int | None:
    """Parse a duration into whole seconds."""
    duration_us = parse_clock_us(raw)
    return None if duration_us is None else duration_us // _US


def _moment_to_micros(moment: datetime | None) -> int:
    """Convert a time to µs since the epoch; 0 for None."""
    return 0 if moment is None else int((moment - _EPOCH).total_seconds()) * _US


FIELDS: Final = (
    # Columns written only by Slurm come first and last, to keep rows unambiguous.
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
REQUIRED_COLUMNS: Final = ("jobid", "submit", "end", "state")
"""Columns without which a file cannot be imported."""

_TIMEOUT_S: Final = 1800.0
_LONGEST_MARGIN: Final = timedelta(days=1024)
"""Longest time before and after a period in which to look for any job; doubled from a day."""
_CHUNK: Final = 1 << 20
_LONGEST_ROW: Final = 4 << 20
_WORD: Final = re.compile(r"[A-Za-z]{1,40}")


class SacctHistory:
    """Client for slurmdbd's job records of a period, through sacct.

    Args:
        commands: Runs sacct.
        cluster: ClusterName in slurm.conf.

    ``passed_over`` counts the malformed rows skipped so far.
    """

    def __init__(self, commands: CommandRunner, cluster: str) -> None:
        self._commands = commands
        self._cluster = cluster
        self._fields: list[str] = []
        self.passed_over = 0

    def rows(self, since: datetime, until: datetime, *, steps: bool = True) -> Iterator[SacctRow]:
        """Yield all runs and steps of jobs that were eligible or ran in a period.

        Memory use is bounded whatever the period. Times are UTC.

        Args:
            since: Begin of the period.
            until: End of the period.
            steps: Include steps.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        separator = f"<{secrets.token_hex(12)}>"
        fields = self._list_fields()
        with tempfile.TemporaryFile() as file:
            self._commands.run_into(
                file,
                "sacct",
                *("-n", "-P", "-a", "-D", "--noconvert", "-M", self._cluster),
                *(() if steps else ("-X",)),
                *("-S", _format_sacct_time(since), "-E", _format_sacct_time(until)),
                *("--delimiter", separator, "-o", ",".join(fields)),
                timeout_s=_TIMEOUT_S,
            )
            file.seek(0)
            names = [name.lower() for name in fields]
            for parts in _split_rows(file, separator, len(names)):
                if parts is None:
                    self.passed_over += 1
                else:
                    yield dict(zip(names, parts, strict=True))

    def has_jobs_near(self, since: datetime, until: datetime) -> bool:
        """Return True if slurmdbd lists any job of a period, or of about three years around it.

        If slurmdbd's query of its database fails, sacct lists nothing and exits with 0.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        margin = timedelta(days=1)
        while margin <= _LONGEST_MARGIN:
            start = max(_EPOCH, since - margin)
            if any(True for _ in self.rows(start, until + margin, steps=False)):
                return True
            margin *= 2
        return False

    def _list_fields(self) -> list[str]:
        """Return those :data:`FIELDS` that this version of sacct lists; cached."""
        if not self._fields:
            # Every version's sacct lists its fields.
            available = set(self._commands.run("sacct", "--helpformat").decode("ascii").split())
            self._fields = [name for name in FIELDS if name in available]
            if len(self._fields) < 2:
                raise SlurmError(
                    "sacct --helpformat lists no known field: is this Slurm's sacct?", ("sacct",)
                )
        return self._fields


def read_sacct_file(file: BinaryIO, delimiter: str = "|") -> Iterator[tuple[SacctRow | None, int]]:
    """Yield the rows of a file that ``sacct -P`` wrote, including its heading.

    Args:
        file: Open for reading, at its start.
        delimiter: Separator of columns.

    Yields:
        Each row (None if malformed), and the file offset after it, in bytes.

    Raises:
        SlurmError: The heading is missing, or lacks a required column.
    """
    separator = delimiter.encode()
    heading = file.readline(_LONGEST_ROW)
    names = [_decode(part).lower() for part in heading.rstrip(b"\r\n").split(separator)]
    is_closed = not names[-1]
    if is_closed:
        names.pop()  # unlike sacct -P, sacct -p ends each row with a delimiter
    missing = [name for name in REQUIRED_COLUMNS if name not in names and f"{name}raw" not in names]
    if missing or not all(_WORD.fullmatch(name) for name in names):
        raise SlurmError(
            "not the output of sacct -P with the columns JobID, JobIDRaw, Submit, Start, End "
            "and State: write it with sacct -P -a -D -o ALL",
            ("sacct",),
            heading[:200].decode("utf-8", "backslashreplace"),
        )
    offset = len(heading)
    while line := file.readline(_LONGEST_ROW):
        offset += len(line)
        parts = line.rstrip(b"\r\n").split(separator)
        if is_closed and not parts[-1]:
            parts.pop()
        is_row = len(parts) == len(names)
        yield dict(zip(names, map(_decode, parts), strict=True)) if is_row else None, offset


def _split_rows(file: BinaryIO, separator: str, columns: int) -> Iterator[list[str] | None]:
    """Split output into rows of columns; yield None for a malformed row.

    Text columns may contain newlines, the first and last column may not.
    """
    separator_bytes = separator.encode()
    parts: list[str] = []
    rest = b""
    while True:
        chunk = file.read(_CHUNK)
        rest += chunk
        # No character is cut in two at a separator.
        text, is_cut, rest = rest.rpartition(separator_bytes)
        if is_cut:
            parts += _decode(text).split(separator)
        begin, end = 0, columns - 1
        while end < len(parts):
            last, newline, first = parts[end].partition("\n")
            is_row = newline and last.isascii() and last.isdigit()
            yield [*parts[begin:end], last] if is_row else None
            parts[end] = first
            begin, end = end, end + columns - 1
        del parts[:begin]
        if not chunk:
            break
        if len(rest) > _LONGEST_ROW:
            rest = rest[-len(separator_bytes) :]
    if len(parts) == columns - 1:
        yield [*parts, _decode(rest.rstrip(b"\n"))]
    elif parts or rest.strip():
        yield None


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def _format_sacct_time(moment: datetime) -> str:
    """Format a time for Slurm's commands, which run under TZ=UTC."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S")
