"""The queue in a text form that cannot be forged: one squeue for all jobs, or for one.

``squeue -O 'Name:SUFFIX'`` prints a field in full and appends SUFFIX (squeue(1),
``--Format``). Fields that only Slurm or its administrator writes come first and
end with the unit separator. Every field that a user can fill, with newlines and
control characters too, ends with a separator that holds a secret word, made
anew for each full look and handed over in SQUEUE_FORMAT2: arguments can be read
by everybody in /proc, another's environment cannot. So no job name can end its
field, let alone its record, and who a job belongs to stands before all of it.
"""

import logging
import re
import secrets
import string
import sys
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from steward.core.records import JobRecord
from steward.slurm.errors import SlurmError
from steward.slurm.job_states import FINISHED, WAITING
from steward.slurm.tres import amount_of_tres
from steward.slurm.users import People
from steward.slurm.values import (
    decode_text,
    parse_exit_status,
    parse_moment,
    parse_number,
    parse_seconds,
)

_LATEST: Final = 2**33

# What scontrol writes behind StdOut (slurm 22.05 to 26.05, src/api/job_info.c).
_AFTER_STDOUT: Final = re.compile(
    r" ?\n? (?:Power|SegmentSize|Switches|BurstBuffer|BurstBufferState|OOMKillStep|CpusPerTres|"
    r"MemPerTres|TresBind|TresFreq|TresPerJob|TresPerNode|TresPerSocket|TresPerTask|MailUser|"
    r"NtasksPerTRES|SELinuxContext|ResvPorts)="
)
_HEAD: Final = re.compile(r"^JobId=([0-9]{1,10}) ", re.MULTILINE)
_FILES: Final = re.compile(r" StdErr=(.*?) StdIn=(.*?) StdOut=(.*)", re.DOTALL)


# Where a text of the user's holds the same words there are several of these, and none counts.
_SUSPENDED: Final = re.compile(r" SuspendTime=(\S+) SecsPreSuspend=(\d{1,10}) LastSchedEval=")
_RESIZED: Final = re.compile(r" AccrueTime=\S+ (?:ResizeTime=(\S+) )?StartTime=")


class _Number(msgspec.Struct):
    set: bool = False
    number: int = 0


class _Job(msgspec.Struct):
    job_id: int
    tres_req_str: str | None  # scontrol before 23.11 has none, and then its text says more
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


class _Answer(msgspec.Struct):
    jobs: list[_Job] = []


_decoder = msgspec.json.Decoder(_Answer)


def completed_by_json(records: Sequence[JobRecord], out: bytes) -> list[JobRecord]:
    """The records with what ``scontrol show job --json`` adds.

    Raises:
        SlurmError: The output is not what this command writes.
    """
    try:
        # Bytes that are not UTF-8 stand in it as they are.
        answer = _decoder.decode(out.decode("utf-8", "replace"))
    except msgspec.MsgspecError as error:
        raise SlurmError(
            f"the JSON of scontrol show job is not understood: {error}",
            ("scontrol", "show", "job", "--json"),
            out[:200].decode("utf-8", "replace"),
        ) from error
    jobs = {job.job_id: job for job in answer.jobs}
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
                "resized_at": _moment(job.resize_time),
            }
            changes |= _suspended(record, _moment(job.suspend_time), _number(job.pre_sus_time))
            record = _with(record, changes)  # noqa: PLW2901 # the same job, told in full
        completed.append(record)
    return completed


def completed_by_text(records: Sequence[JobRecord], out: bytes) -> list[JobRecord]:
    """The records with what ``scontrol -o show job`` adds."""
    text = out.decode("utf-8", "backslashreplace")
    ids = {str(record.job_id) for record in records}
    heads = [(head.start(), head[1]) for head in _HEAD.finditer(text) if head[1] in ids]
    firsts = dict(reversed([(job_id, number) for number, (_, job_id) in enumerate(heads)]))
    completed = []
    for record in records:
        number = firsts.get(str(record.job_id))
        segment = "" if number is None else _segment(record, text, heads, number)
        completed.append(_with(record, _extras(record, segment) | _times(record, segment)))
    return completed


def _segment(record: JobRecord, text: str, heads: Sequence[tuple[int, str]], number: int) -> str:
    """What stands behind the job's name, up to the next record of the same answer.

    Args:
        record: The job.
        text: The answer.
        heads: Where in it what looks like a record begins, and its job id, in order.
        number: Which of them is the job's.
    """
    named = f"JobName={record.name} "
    name = text.find(named, heads[number][0])
    if name < 0:
        return ""
    begin = name + len(named)
    own = str(record.job_id)
    behind = range(bisect_left(heads, (begin, "")), len(heads))
    return text[begin : next((heads[one][0] for one in behind if heads[one][1] != own), len(text))]


def _times(record: JobRecord, segment: str) -> dict[str, Any]:
    """What became of a run under way, where nobody can have written it but Slurm."""
    times: dict[str, Any] = {}
    resized = _RESIZED.findall(segment)
    if len(resized) == 1:
        times["resized_at"] = parse_moment(resized[0])
    suspended = _SUSPENDED.findall(segment)
    if len(suspended) == 1:
        ((at, before),) = suspended
        times |= _suspended(record, parse_moment(at), int(before))
    return times


def _suspended(record: JobRecord, at: datetime | None, ran_before_s: int) -> dict[str, Any]:
    """When a run was suspended or resumed last, and how long it had been suspended by then.

    Args:
        record: The run.
        at: SuspendTime, which is the time of a resumption as well; None for never.
        ran_before_s: SecsPreSuspend, how long it had run by then.
    """
    if at is None or record.start is None or record.state in WAITING:
        return {}
    total_s = int((at - record.start).total_seconds()) - ran_before_s
    return {"suspended_at": at, "suspended_s": max(0, total_s)}


def _number(value: _Number | int | None) -> int:
    if isinstance(value, _Number):
        return value.number if value.set else 0
    return value or 0


def _moment(value: _Number | int | None) -> datetime | None:
    seconds = _number(value)
    return datetime.fromtimestamp(seconds, UTC) if 0 < seconds < _LATEST else None


def _extras(record: JobRecord, segment: str) -> dict[str, Any]:
    command = f" Command={record.command or '(null)'} "
    work_dir = f" WorkDir={record.work_dir}"
    middle, tail = segment.find(command), segment.rfind(work_dir)
    if middle < 0 or tail < 0:
        return {}
    requested = set(re.findall(r" ReqTRES=(\S+)", segment[:middle]))
    line = segment[middle + len(command) - 1 : tail]
    extras: dict[str, Any] = {
        "tres_requested": requested.pop() if len(requested) == 1 else "",
        "submit_line": line.removeprefix(" SubmitLine=") if line.startswith(" SubmitLine=") else "",
    }
    files = _FILES.search(segment, tail)
    if files:
        cut = _AFTER_STDOUT.search(files[3])
        out = files[3][: cut.start()] if cut else files[3]
        names = (files[2], out.rstrip("\n").rstrip(" "), files[1])
        extras |= dict(zip(("stdin", "stdout", "stderr"), names, strict=True))
    return extras


def _with(record: JobRecord, extras: dict[str, Any]) -> JobRecord:
    changes: dict[str, Any] = {
        field: value for field, value in extras.items() if value not in ("", None, "(null)")
    }
    changes |= _requested(changes.get("tres_requested", ""))
    return msgspec.structs.replace(record, **changes) if changes else record


def _requested(tres: str) -> dict[str, int]:
    """How many CPUs and nodes a job asked for: ``cpu=4,mem=8G,node=2,billing=4``."""
    counts = dict(part.partition("=")[::2] for part in tres.split(","))
    found = {
        "requested_cpus": parse_number(counts.get("cpu", "")),
        "requested_nodes": parse_number(counts.get("node", "")),
    }
    return {field: count for field, count in found.items() if count}


log = logging.getLogger(__name__)

Version = tuple[int, int, int]

# Names of fields in squeue's -O, the same in 22.05 to 26.05.
_SAFE: Final = (
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
_OFFERED: Final = ("SLUID", "Exclusive")
"""Fields that are asked for where squeue offers them, in the order of their versions."""
# Of one job alone: these change by themselves, so that in the queue every row would be news.
_SAFE_OF_ONE: Final = (
    "TimeUsed",
    "PriorityLong",
    "BatchHost",
    "Origin",
    "SiblingsActive",
)
# Accounts and QOS are as the user wrote them where no slurmdbd checks them, the submit
# host is what the client says, and a reason may quote what a plugin was given.
_HOSTILE: Final = (
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
"""Of fields of the whole queue that may be very long: of all other texts that users can set Slurm
takes some thousand bytes, 22.05 to 26.05. squeue pads what is shorter: at 20,000 jobs 512 bytes
cost 0.1 s. A job that is asked for singly is shown whole."""
LONGEST_READ: Final = 8192
"""Of any field of the whole queue, in bytes: more than Slurm takes at submission."""
_HOSTILE_OF_ONE: Final = ("Container", "system_comment")
_NOBODY: Final = frozenset({"(null)", "N/A", "NA", "n/a"})
_UNIT: Final = "\x1f"
_LETTERS: Final = 12


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """What one squeue showed.

    Attributes:
        records: The jobs; where a former queue was given, only those that changed since.
        rows: For each raw job id the hash of its row, for the next look.
        taken_at: When squeue was started, UTC.
        cost_s: How long squeue took, in seconds.
        passed_over: How many rows could not be understood.
    """

    records: tuple[JobRecord, ...]
    rows: dict[int, int]
    taken_at: datetime
    cost_s: float
    passed_over: int = 0


class QueueFormat:
    """What squeue is asked for, and how its answer is read.

    Args:
        offered: Names of the fields that squeue offers, in lower case: what it does not offer is
            not asked for.
        word: The secret word, for reading what was recorded; a new one if empty.
        of_one: Whether it is for one job, of which there may be more to ask.
        dependency_bytes: How much of a dependency is shown, at most :data:`LONGEST_READ`; if 0,
            all of it for one job, and of a whole queue what polls need.
    """

    def __init__(
        self,
        offered: Collection[str] = (),
        word: str = "",
        *,
        of_one: bool = False,
        dependency_bytes: int = 0,
    ) -> None:
        self._safe = [*_SAFE, *(name for name in _OFFERED if name.lower() in offered)]
        self._safe += _SAFE_OF_ONE if of_one else ()
        self._hostile = (*_HOSTILE, *_HOSTILE_OF_ONE) if of_one else _HOSTILE
        word = word or "".join(secrets.choice(string.ascii_letters) for _ in range(_LETTERS))
        self._end = (_UNIT + word).encode()
        fields = [f"{name}:{_UNIT}" for name in self._safe]
        is_whole = of_one and not dependency_bytes
        self._longest = None if is_whole else LONGEST_READ
        self._widths = {} if is_whole else _WIDTHS
        if dependency_bytes:
            self._widths = {**_WIDTHS, "Dependency": min(dependency_bytes, LONGEST_READ)}
        fields += [f"{name}:{self._widths.get(name, '')}{_UNIT}{word}" for name in self._hostile]
        self.variable = ",".join(fields)
        """The value of SQUEUE_FORMAT2."""

    def rows(self, out: bytes) -> Iterator[bytes]:
        """The rows of squeue's output; the last is cut short where the output is."""
        begin = 0
        while True:
            end = begin
            for _ in self._hostile:
                end = out.find(self._end, end)
                if end < 0:
                    if begin < len(out):
                        yield out[begin:]
                    return
                end += len(self._end)
            yield out[begin:end]
            begin = end + 1  # the newline

    def job_id(self, row: bytes) -> int:
        """The raw job id of a row.

        Raises:
            ValueError: The row does not begin with one.
        """
        return int(row[: row.index(b"\x1f")])

    def record(self, row: bytes, people: People) -> JobRecord:
        """What a row says.

        Raises:
            ValueError: The row is not of this format.
        """
        *safe, rest = row.split(b"\x1f", len(self._safe))
        if len(safe) != len(self._safe):
            raise ValueError(f"{len(safe)} fields before the first text")
        hostile = rest.split(self._end)
        if len(hostile) != len(self._hostile) + 1 or hostile[-1]:
            raise ValueError(f"{len(hostile) - 1} fields of text")
        shown = dict(zip(self._safe, (field.decode("ascii") for field in safe), strict=True))
        fields = dict(zip(self._hostile, (one[: self._longest] for one in hostile), strict=False))
        for name in self._widths:
            fields[name] = fields[name].rstrip(b" ")
        words = {name: decode_text(field) for name, field in fields.items()}
        return _record(shown, words, people)


def parse_queue(
    form: QueueFormat, out: bytes, people: People, previous: Mapping[int, int]
) -> tuple[tuple[JobRecord, ...], dict[int, int], int]:
    """The records of squeue's output that are not as in ``previous``.

    Args:
        form: What squeue was asked for; of ``previous`` too, or hashes never agree.
        out: What it wrote.
        people: Who looks names up.
        previous: Hashes by job id of the former queue.

    Returns:
        The records, the hashes by job id, and how many rows were not understood.
    """
    records: list[JobRecord] = []
    rows: dict[int, int] = {}
    strange = 0
    for row in form.rows(out):
        try:
            job_id = form.job_id(row)
            digest = hash(row)
            if previous.get(job_id) != digest:
                records.append(form.record(row, people))
            rows[job_id] = digest
        except ValueError as error:
            strange += 1
            log.error("a row of squeue is not understood: %s: %r", error, row[:200])
    return tuple(records), rows, strange


def _record(shown: dict[str, str], words: dict[str, str], people: People) -> JobRecord:
    job_id, uid, gid = int(shown["JobID"]), int(shown["UserID"]), int(shown["GroupID"])
    state = sys.intern(shown["State"])
    is_array = shown["ArrayTaskID"] not in ("", "N/A")
    het_job_id = parse_number(shown["HetJobID"]) or 0
    restarts = parse_number(shown["RestartCnt"]) or 0
    sluid = shown.get("SLUID", "")
    is_over = state in FINISHED
    status = parse_exit_status(shown["exit_code"]) if is_over else None
    derived = parse_exit_status(shown["DerivedEC"]) if is_over else None
    start = None if state in WAITING else parse_moment(shown["StartTime"])
    end = parse_moment(shown["EndTime"]) if is_over else None
    tres = shown["tres-alloc"]
    return JobRecord(
        job_id=job_id,
        name=words["Name"],
        uid=uid,
        user=people.user(uid),
        gid=gid,
        group=people.group(gid),
        account=words["Account"],
        partition=words["Partition"],
        qos=words["QOS"],
        state=state,
        reason="" if words["Reason"] == "None" else words["Reason"],
        batch=shown["BatchFlag"] == "1",
        array_job_id=int(shown["ArrayJobID"]) if is_array else 0,
        array_task=shown["ArrayTaskID"] if is_array else "",
        het_job_id=het_job_id,
        het_offset=parse_number(shown["HetJobOffset"]) or 0 if het_job_id else 0,
        sluid=sluid,
        # A job's first run gives it its lasting id; of later runs squeue does not tell it.
        original_sluid=sluid if restarts == 0 else "",
        restarts=restarts,
        submit=parse_moment(shown["SubmitTime"]),
        eligible=parse_moment(shown["EligibleTime"]),
        # Expected times are guesses of the scheduler, no facts.
        start=start,
        end=end,
        time_limit_s=parse_seconds(shown["TimeLimit"]),
        nodes=parse_number(shown["NumNodes"]),
        cpus=parse_number(shown["NumCPUs"]),
        tasks=parse_number(shown["NumTasks"]),
        min_memory_mib=amount_of_tres("mem", shown["MinMemory"]),
        # Before a job starts, Slurm puts what it asks for here.
        tres_requested=tres if state == "PENDING" and tres != "(null)" else "",
        tres_allocated="" if state in WAITING or tres == "(null)" else tres,
        nodelist=shown["NodeList"],
        dependency=words["Dependency"],
        reservation=words["Reservation"],
        submit_host=words["AllocNodes"],
        command=words["Command"],
        work_dir=words["WorkDir"],
        stdin=words["STDIN"],
        stdout=words["STDOUT"],
        stderr=words["STDERR"],
        comment=words["Comment"],
        admin_comment=words["admin_comment"],
        exit_code=status[0] if status else None,
        exit_signal=status[1] if status else None,
        derived_exit_code=derived[0] if derived else None,
        derived_exit_signal=derived[1] if derived else None,
        suspended_s=_suspended_s(start, end, shown.get("TimeUsed", "")),
        priority=parse_number(shown.get("PriorityLong", "")),
        wckey=words["WCKey"],
        constraints=words["Feature"],
        licenses=words["Licenses"],
        container=words.get("Container", ""),
        batch_host=_said(shown.get("BatchHost", "")),
        system_comment=words.get("system_comment", ""),
        federation_origin=_said(shown.get("Origin", "")),
        federation_siblings=_said(shown.get("SiblingsActive", "")),
        oversubscribe=_shared(shown["OverSubscribe"], shown.get("Exclusive")),
        tres_per_job=_said(words["tres-per-job"]),
        tres_per_node=_said(words["tres-per-node"]),
        tres_per_socket=_said(words["tres-per-socket"]),
        tres_per_task=_said(words["tres-per-task"]),
        cpus_per_tres=_said(words["cpus-per-tres"]),
        mem_per_tres=_said(words["mem-per-tres"]),
    )


def _shared(oversubscribe: str, exclusive: str | None) -> str:
    """Who else may be on its nodes, as versions before 26.05 say it.

    From then on ``NO`` is also said of jobs that share nodes, but not CPUs, and another
    field tells of those that have nodes to themselves.
    """
    if exclusive is None:
        return sys.intern(_said(oversubscribe))
    if exclusive == "NO":
        return "YES" if oversubscribe == "YES" else "OK"
    return "NO" if exclusive == "NODE" else sys.intern(_said(exclusive))


def _suspended_s(start: datetime | None, end: datetime | None, used: str) -> int | None:
    """How long a run that is over was suspended, which Slurm counts as not used; None for never."""
    used_s = parse_seconds(used)
    if start is None or end is None or used_s is None:
        return None
    suspended_s = int((end - start).total_seconds()) - used_s
    return suspended_s if suspended_s > 0 else None


def _said(name: str) -> str:
    return "" if name in _NOBODY else name
