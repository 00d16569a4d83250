"""Queue snapshots from squeue, in a text format that users cannot forge.

:func:`complete_from_json` and :func:`complete_from_text` add to JobRecords the fields that only
``scontrol show job`` has. :class:`QueueFormat` says what squeue prints and parses its rows;
:func:`parse_queue` turns the output into JobRecords.

``squeue -O 'Name:SUFFIX'`` prints a field in full and appends SUFFIX (squeue(1), ``--Format``).
Fields written by Slurm or its administrator come first and end with the unit separator. Fields
that users can fill, even with newlines and control characters, end with a separator that contains
a secret word. The word is new for each full poll and travels in SQUEUE_FORMAT2: everybody can read
arguments in /proc, but not another user's environment. So no job name can end its field or its
record, and a job's owner comes before all such text.
"""

import logging
import re
import secrets
import string
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

import msgspec

from steward.core.records import JobRecord
from steward.slurm.errors import SlurmError
from steward.slurm.job_states import FINISHED, WAITING
from steward.slurm.tres import parse_tres_amount
from steward.slurm.users import NameResolver
from steward.slurm.values import (
    parse_exit_status,
    parse_moment,
    parse_number,
    parse_seconds,
)

_MAX_EPOCH_S: Final = 2**33
_SHARED: Final = 1024
"""Number of short texts that records share."""
_LONGEST_SHARED: Final = 100
"""Longest of them, in characters."""

# Fields that scontrol may write after StdOut (Slurm 22.05 to 26.05, src/api/job_info.c).
_AFTER_STDOUT: Final = re.compile(
    r" ?\n? (?:Power|SegmentSize|Switches|BurstBuffer|BurstBufferState|OOMKillStep|CpusPerTres|"
    r"MemPerTres|TresBind|TresFreq|TresPerJob|TresPerNode|TresPerSocket|TresPerTask|MailUser|"
    r"NtasksPerTRES|SELinuxContext|ResvPorts)="
)
_HEAD: Final = re.compile(r"^JobId=([0-9]{1,10}) ", re.MULTILINE)
_FILES: Final = re.compile(r" StdErr=(.*?) StdIn=(.*?) StdOut=(.*)", re.DOTALL)


# If text of the user's repeats these words there are several matches, and none is used.
_SUSPENDED: Final = re.compile(r" SuspendTime=(\S+) SecsPreSuspend=(\d{1,10}) LastSchedEval=")
_RESIZED: Final = re.compile(r" AccrueTime=\S+ (?:ResizeTime=(\S+) )?StartTime=")


class _Number(msgspec.Struct):
    """Number in Slurm's JSON, which may be unset."""

    set: bool = False
    number: int = 0


class _Job(msgspec.Struct):
    """Job in ``scontrol show job --json``, the fields used here."""

    job_id: int
    tres_req_str: str | None  # missing before 23.11; complete_from_text then reads the field
    user_id: int = -1
    submit_line: str | None = ""
    standard_input: str | None = ""
    standard_output: str | None = ""
    standard_error: str | None = ""
    stdin_expanded: str | None = ""
    stdout_expanded: str | None = ""
    stderr_expanded: str | None = ""
    suspend_time: _Number | int | None = None
    pre_sus_time: _Number | int | None = None
    resize_time: _Number | int | None = None
    failed_node: str | None = ""
    extra: str | None = ""


class _ShowJobReply(msgspec.Struct):
    """Output of ``scontrol show job --json``."""

    jobs: list[_Job] = []


_decoder = msgspec.json.Decoder(_ShowJobReply)


def complete_from_json(records: Sequence[JobRecord], out: bytes) -> list[JobRecord]:
    """Return the records completed from ``scontrol show job --json``.

    Raises:
        SlurmError: The output is not this command's JSON.
    """
    try:
        # scontrol writes bytes that are not UTF-8 unchanged.
        reply = _decoder.decode(out.decode("utf-8", "replace"))
    except msgspec.MsgspecError as error:
        raise SlurmError(
            f"cannot parse the JSON of scontrol show job: {error}",
            ("scontrol", "show", "job", "--json"),
            out[:200].decode("utf-8", "replace"),
        ) from error
    jobs = {job.job_id: job for job in reply.jobs}
    completed = []
    for record in records:
        job = jobs.get(record.job_id)
        if job is not None and job.user_id == record.uid:
            changes: dict[str, Any] = {
                "submit_line": job.submit_line,
                "tres_requested": job.tres_req_str,
                "stdin": job.stdin_expanded or job.standard_input,
                "stdout": job.stdout_expanded or job.standard_output,
                "stderr": job.stderr_expanded or job.standard_error,
                "failed_node": job.failed_node,
                "extra": job.extra,
                "resized_at": _read_moment(job.resize_time),
            }
            changes |= _compute_suspension(
                record, _read_moment(job.suspend_time), _read_number(job.pre_sus_time)
            )
            record = _replace_fields(record, changes)  # noqa: PLW2901 # the same job, completed
        completed.append(record)
    return completed


def complete_from_text(records: Sequence[JobRecord], out: bytes) -> list[JobRecord]:
    """Return the records completed from ``scontrol -o show job``."""
    text = out.decode("utf-8", "backslashreplace")
    ids = {str(record.job_id) for record in records}
    heads = [(head.start(), head[1]) for head in _HEAD.finditer(text) if head[1] in ids]
    firsts = dict(reversed([(job_id, number) for number, (_, job_id) in enumerate(heads)]))
    completed = []
    for record in records:
        number = firsts.get(str(record.job_id))
        segment = "" if number is None else _find_segment(record, text, heads, number)
        completed.append(
            _replace_fields(
                record, _read_text_fields(record, segment) | _read_times(record, segment)
            )
        )
    return completed


def _find_segment(
    record: JobRecord, text: str, heads: Sequence[tuple[int, str]], number: int
) -> str:
    """Return the text after a job's name, up to the next record in the output.

    Args:
        record: The job.
        text: The whole output.
        heads: Position and job id of each apparent record, in order.
        number: Index of the job's own record in ``heads``.
    """
    name_field = f"JobName={record.name} "
    name_start = text.find(name_field, heads[number][0])
    if name_start < 0:
        return ""
    begin = name_start + len(name_field)
    own_id = str(record.job_id)
    following = range(bisect_left(heads, (begin, "")), len(heads))
    return text[
        begin : next(
            (heads[index][0] for index in following if heads[index][1] != own_id), len(text)
        )
    ]


def _read_times(record: JobRecord, segment: str) -> dict[str, Any]:
    """Return suspension and resize times, unless user text could have forged them."""
    times: dict[str, Any] = {}
    resized = _RESIZED.findall(segment)
    if len(resized) == 1:
        times["resized_at"] = parse_moment(resized[0])
    suspended = _SUSPENDED.findall(segment)
    if len(suspended) == 1:
        ((suspended_at, ran_before),) = suspended
        times |= _compute_suspension(record, parse_moment(suspended_at), int(ran_before))
    return times


def _compute_suspension(
    record: JobRecord, suspended_at: datetime | None, ran_before_s: int
) -> dict[str, Any]:
    """Return the last suspension or resumption time and the total time suspended before it.

    Args:
        record: The run.
        suspended_at: SuspendTime, which a resumption sets too; None if never suspended.
        ran_before_s: SecsPreSuspend: how long the run had been running by then.
    """
    if suspended_at is None or record.start is None or record.state in WAITING:
        return {}
    total_s = int((suspended_at - record.start).total_seconds()) - ran_before_s
    return {"suspended_at": suspended_at, "suspended_s": max(0, total_s)}


def _read_number(value: _Number | int | None) -> int:
    """Return a JSON number of either form; 0 if unset."""
    if isinstance(value, _Number):
        return value.number if value.set else 0
    return value or 0


def _read_moment(value: _Number | int | None) -> datetime | None:
    """Convert a JSON time to a datetime; None if unset or out of range."""
    seconds = _read_number(value)
    return datetime.fromtimestamp(seconds, UTC) if 0 < seconds < _MAX_EPOCH_S else None


def _read_text_fields(record: JobRecord, segment: str) -> dict[str, Any]:
    """Read the requested TRES, submit line and files, where no user text can have forged them."""
    command = f" Command={record.command or '(null)'} "
    work_dir = f" WorkDir={record.work_dir}"
    command_start, work_dir_start = segment.find(command), segment.rfind(work_dir)
    if command_start < 0 or work_dir_start < 0:
        return {}
    requested = set(re.findall(r" ReqTRES=(\S+)", segment[:command_start]))
    line = segment[command_start + len(command) - 1 : work_dir_start]
    extras: dict[str, Any] = {
        "tres_requested": requested.pop() if len(requested) == 1 else "",
        "submit_line": line.removeprefix(" SubmitLine=") if line.startswith(" SubmitLine=") else "",
    }
    files = _FILES.search(segment, work_dir_start)
    if files:
        next_field = _AFTER_STDOUT.search(files[3])
        stdout = files[3][: next_field.start()] if next_field else files[3]
        names = (files[2], stdout.rstrip("\n").rstrip(" "), files[1])
        extras |= dict(zip(("stdin", "stdout", "stderr"), names, strict=True))
    return extras


def _replace_fields(record: JobRecord, extras: dict[str, Any]) -> JobRecord:
    """Return a record with these fields replaced, apart from empty values."""
    changes: dict[str, Any] = {
        field: value for field, value in extras.items() if value not in ("", None, "(null)")
    }
    changes |= _count_requested(changes.get("tres_requested", ""))
    return msgspec.structs.replace(record, **changes) if changes else record


def _count_requested(tres: str) -> dict[str, int]:
    """Return requested CPUs and nodes from TRES such as ``cpu=4,mem=8G,node=2,billing=4``."""
    counts = dict(part.partition("=")[::2] for part in tres.split(","))
    requested = {
        "requested_cpus": parse_number(counts.get("cpu", "")),
        "requested_nodes": parse_number(counts.get("node", "")),
    }
    return {field: count for field, count in requested.items() if count}


log = logging.getLogger(__name__)

Version = tuple[int, int, int]

# Field names of squeue -O, the same in Slurm 22.05 to 26.05.
_TRUSTED_FIELDS: Final = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "HetJobID",
    "HetJobOffset",
    "UserID",
    "GroupID",
    "State",
    "BatchFlag",
    "RestartCnt",
    "SubmitTime",
    "EligibleTime",
    "StartTime",
    "EndTime",
    "TimeLimit",
    "NumNodes",
    "NumCPUs",
    "NumTasks",
    "exit_code",
    "DerivedEC",
    "NodeList",
    "tres-alloc",
    "OverSubscribe",
    "MinMemory",
)
_OPTIONAL_FIELDS: Final = ("SLUID", "Exclusive")
"""Fields requested only if this squeue lists them, oldest version first."""
# Fields for one job only. They change constantly, so in the queue every row would look changed.
_SINGLE_JOB_TRUSTED_FIELDS: Final = (
    "TimeUsed",
    "PriorityLong",
    "BatchHost",
    "Origin",
    "SiblingsActive",
)
# Text that users can influence: accounts and QOS if no slurmdbd checks them, the submit host as
# the client claims it, and reasons that quote a plugin's input.
_UNTRUSTED_FIELDS: Final = (
    "Partition",
    "Reservation",
    "Dependency",
    "Reason",
    "Account",
    "QOS",
    "AllocNodes",
    "Name",
    "Comment",
    "admin_comment",
    "Command",
    "WorkDir",
    "STDIN",
    "STDOUT",
    "STDERR",
    "WCKey",
    "Feature",
    "Licenses",
    "tres-per-job",
    "tres-per-node",
    "tres-per-socket",
    "tres-per-task",
    "cpus-per-tres",
    "mem-per-tres",
)
_WIDTHS: Final = {"Dependency": 512}
"""Widths in bytes of fields that may be very long in the whole queue.

Slurm limits all other text that users set to some thousand bytes (22.05 to 26.05). squeue pads
shorter values: at 20,000 jobs, 512 bytes cost 0.1 s. A job that is queried alone is shown in full.
"""
MAX_FIELD_BYTES: Final = 8192
"""Maximum length of any field of the whole queue, in bytes.

More than Slurm accepts at submission.
"""
_SINGLE_JOB_UNTRUSTED_FIELDS: Final = ("Container", "system_comment")
_PLACEHOLDERS: Final = frozenset({"(null)", "N/A", "NA", "n/a"})
_UNIT_SEPARATOR: Final = "\x1f"
_LETTERS: Final = 12


class QueueSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of the queue from one squeue.

    Attributes:
        records: The jobs; with a previous queue, only those that changed since.
        rows: Hash of each row by raw job id, to detect changes at the next poll.
        taken_at: Start of squeue, UTC.
        cost_s: Run time of squeue, in seconds.
        passed_over: Number of rows that could not be parsed.
    """

    records: tuple[JobRecord, ...]
    rows: dict[int, int]
    taken_at: datetime
    cost_s: float
    passed_over: int = 0


class QueueFormat:
    """Format of a squeue query, and parser of its output.

    Args:
        available: Field names that this squeue lists, in lower case; others are not requested.
        secret: The secret word, to read recorded output; "" makes a new one.
        is_single_job: The query is for one job, for which more fields are requested.
        dependency_bytes: Bytes of a dependency to show, at most :data:`MAX_FIELD_BYTES`; 0 for all
            of it (one job) or for what polls need (whole queue).
    """

    def __init__(
        self,
        available: Collection[str] = (),
        secret: str = "",
        *,
        is_single_job: bool = False,
        dependency_bytes: int = 0,
    ) -> None:
        self._slurm_fields = [
            *_TRUSTED_FIELDS,
            *(name for name in _OPTIONAL_FIELDS if name.lower() in available),
        ]
        self._slurm_fields += _SINGLE_JOB_TRUSTED_FIELDS if is_single_job else ()
        self._user_fields = (
            (*_UNTRUSTED_FIELDS, *_SINGLE_JOB_UNTRUSTED_FIELDS)
            if is_single_job
            else _UNTRUSTED_FIELDS
        )
        secret = secret or "".join(secrets.choice(string.ascii_letters) for _ in range(_LETTERS))
        self._text_end = (_UNIT_SEPARATOR + secret).encode()
        fields = [f"{name}:{_UNIT_SEPARATOR}" for name in self._slurm_fields]
        is_whole = is_single_job and not dependency_bytes
        self._max_field_bytes = None if is_whole else MAX_FIELD_BYTES
        self._widths = {} if is_whole else _WIDTHS
        if dependency_bytes:
            self._widths = {**_WIDTHS, "Dependency": min(dependency_bytes, MAX_FIELD_BYTES)}
        fields += [
            f"{name}:{self._widths.get(name, '')}{_UNIT_SEPARATOR}{secret}"
            for name in self._user_fields
        ]
        self.format_text = ",".join(fields)
        """Value of SQUEUE_FORMAT2."""

    def split_rows(self, out: bytes) -> Iterator[bytes]:
        """Yield the rows of squeue's output; the last may be incomplete if the output is."""
        row_end = self._text_end + b"\n"
        begin = next_begin = 0
        while (end := out.find(row_end, next_begin)) >= 0:
            next_begin = end + len(row_end)
            row = out[begin : next_begin - 1]
            # A text that begins with a newline is no end of a row.
            if row.count(self._text_end) >= len(self._user_fields):
                yield row
                begin = next_begin
        if begin < len(out):
            yield out[begin:]

    def parse_job_id(self, row: bytes) -> int:
        """Return the raw job id of a row.

        Raises:
            ValueError: The row does not begin with a job id.
        """
        return int(row[: row.index(b"\x1f")])

    def parse_record(self, row: bytes, resolver: NameResolver) -> JobRecord:
        """Parse a row into a record.

        Raises:
            ValueError: The row does not match this format.
        """
        *slurm_parts, rest = row.split(b"\x1f", len(self._slurm_fields))
        if len(slurm_parts) != len(self._slurm_fields):
            raise ValueError(f"{len(slurm_parts)} of {len(self._slurm_fields)} fields of Slurm")
        slurm_texts = b"\x1f".join(slurm_parts).decode("ascii").split(_UNIT_SEPARATOR)
        if len(rest) > MAX_FIELD_BYTES:
            parts = rest.split(self._text_end)
            rest = self._text_end.join(part[: self._max_field_bytes] for part in parts)
        # Decoded at once: separators are ASCII, so no invalid bytes extend over one.
        text_parts = rest.decode("utf-8", "backslashreplace").split(self._text_end.decode())
        if len(text_parts) != len(self._user_fields) + 1 or text_parts[-1]:
            raise ValueError(f"{len(text_parts) - 1} of {len(self._user_fields)} fields of users")
        values = dict(zip(self._slurm_fields, slurm_texts, strict=False))
        fields = dict(zip(self._user_fields, text_parts, strict=False))
        for name in self._widths:
            fields[name] = fields[name].rstrip(" ")
        texts = {name: "" if text == "(null)" else text for name, text in fields.items()}
        return _build_record(values, texts, resolver)


def parse_queue(
    queue_format: QueueFormat, out: bytes, resolver: NameResolver, previous: Mapping[int, int]
) -> tuple[tuple[JobRecord, ...], dict[int, int], int]:
    """Parse squeue's output into the records that changed since ``previous``.

    Args:
        queue_format: The format of this output and of ``previous``; with another one no hash
            matches.
        out: squeue's output.
        resolver: Resolves uids and gids.
        previous: Row hashes by job id, from the last queue.

    Returns:
        The changed records, row hashes by job id, and the number of malformed rows.
    """
    records: list[JobRecord] = []
    rows: dict[int, int] = {}
    malformed_count = 0
    for row in queue_format.split_rows(out):
        try:
            job_id = queue_format.parse_job_id(row)
            digest = hash(row)
            if previous.get(job_id) != digest:
                records.append(queue_format.parse_record(row, resolver))
            rows[job_id] = digest
        except ValueError as error:
            malformed_count += 1
            log.error("cannot parse a row of squeue: %s: %r", error, row[:200])
    return tuple(records), rows, malformed_count


def _build_record(
    values: dict[str, str], texts: dict[str, str], resolver: NameResolver
) -> JobRecord:
    """Build a record from the fields of a row: ``values`` from Slurm, ``texts`` from users."""
    job_id, uid, gid = int(values["JobID"]), int(values["UserID"]), int(values["GroupID"])
    state = _share(values["State"])
    is_array = values["ArrayTaskID"] not in ("", "N/A")
    het_job_id = parse_number(values["HetJobID"]) or 0
    restarts = parse_number(values["RestartCnt"]) or 0
    sluid = values.get("SLUID", "")
    has_ended = state in FINISHED
    status = parse_exit_status(values["exit_code"]) if has_ended else None
    derived_status = parse_exit_status(values["DerivedEC"]) if has_ended else None
    start = None if state in WAITING else parse_moment(values["StartTime"])
    end = parse_moment(values["EndTime"]) if has_ended else None
    tres = values["tres-alloc"]
    return JobRecord(
        job_id=job_id,
        name=texts["Name"],
        uid=uid,
        user=resolver.user(uid),
        gid=gid,
        group=resolver.group(gid),
        account=_share(texts["Account"]),
        partition=_share(texts["Partition"]),
        qos=_share(texts["QOS"]),
        state=state,
        reason="" if texts["Reason"] == "None" else texts["Reason"],
        batch=values["BatchFlag"] == "1",
        array_job_id=int(values["ArrayJobID"]) if is_array else 0,
        array_task=values["ArrayTaskID"] if is_array else "",
        het_job_id=het_job_id,
        het_offset=parse_number(values["HetJobOffset"]) or 0 if het_job_id else 0,
        sluid=sluid,
        # The SLUID of a job's first run is its permanent id; squeue does not show it for later
        # runs.
        original_sluid=sluid if restarts == 0 else "",
        restarts=restarts,
        submit=parse_moment(values["SubmitTime"]),
        eligible=parse_moment(values["EligibleTime"]),
        # Expected times are the scheduler's estimates, not facts.
        start=start,
        end=end,
        time_limit_s=parse_seconds(values["TimeLimit"]),
        nodes=parse_number(values["NumNodes"]),
        cpus=parse_number(values["NumCPUs"]),
        tasks=parse_number(values["NumTasks"]),
        min_memory_mib=parse_tres_amount("mem", values["MinMemory"]),
        # Before a job starts, this field holds its requested TRES.
        tres_requested=tres if state == "PENDING" and tres != "(null)" else "",
        tres_allocated="" if state in WAITING or tres == "(null)" else tres,
        nodelist=values["NodeList"],
        dependency=texts["Dependency"],
        reservation=texts["Reservation"],
        submit_host=_share(texts["AllocNodes"]),
        command=texts["Command"],
        work_dir=texts["WorkDir"],
        stdin=texts["STDIN"],
        stdout=texts["STDOUT"],
        stderr=texts["STDERR"],
        comment=texts["Comment"],
        admin_comment=texts["admin_comment"],
        exit_code=status[0] if status else None,
        exit_signal=status[1] if status else None,
        derived_exit_code=derived_status[0] if derived_status else None,
        derived_exit_signal=derived_status[1] if derived_status else None,
        suspended_s=_compute_suspended_s(start, end, values.get("TimeUsed", "")),
        priority=parse_number(values.get("PriorityLong", "")),
        wckey=texts["WCKey"],
        constraints=_share(texts["Feature"]),
        licenses=texts["Licenses"],
        container=texts.get("Container", ""),
        batch_host=_clear_placeholder(values.get("BatchHost", "")),
        system_comment=texts.get("system_comment", ""),
        federation_origin=_clear_placeholder(values.get("Origin", "")),
        federation_siblings=_clear_placeholder(values.get("SiblingsActive", "")),
        oversubscribe=_normalize_oversubscribe(values["OverSubscribe"], values.get("Exclusive")),
        tres_per_job=_clear_placeholder(texts["tres-per-job"]),
        tres_per_node=_clear_placeholder(texts["tres-per-node"]),
        tres_per_socket=_clear_placeholder(texts["tres-per-socket"]),
        tres_per_task=_clear_placeholder(texts["tres-per-task"]),
        cpus_per_tres=_clear_placeholder(texts["cpus-per-tres"]),
        mem_per_tres=_clear_placeholder(texts["mem-per-tres"]),
    )


def _share(text: str) -> str:
    """Return one object for equal short texts; interned ones would stay in memory for ever."""
    return _share_cached(text) if len(text) <= _LONGEST_SHARED else text


@lru_cache(_SHARED)
def _share_cached(text: str) -> str:
    return text


def _normalize_oversubscribe(oversubscribe: str, exclusive: str | None) -> str:
    """Return OverSubscribe in the words of Slurm before 26.05.

    Slurm 26.05 also writes ``NO`` for jobs that share nodes but not CPUs. Its new field Exclusive
    marks jobs that have nodes to themselves.
    """
    if exclusive is None:
        return _share(_clear_placeholder(oversubscribe))
    if exclusive == "NO":
        return "YES" if oversubscribe == "YES" else "OK"
    return "NO" if exclusive == "NODE" else _share(_clear_placeholder(exclusive))


def _compute_suspended_s(start: datetime | None, end: datetime | None, used: str) -> int | None:
    """Return how long an ended run was suspended, in seconds, or None if never."""
    used_s = parse_seconds(used)
    if start is None or end is None or used_s is None:
        return None
    suspended_s = int((end - start).total_seconds()) - used_s
    return suspended_s if suspended_s > 0 else None


def _clear_placeholder(name: str) -> str:
    """Return a text, or "" for squeue's placeholders."""
    return "" if name in _PLACEHOLDERS else name
