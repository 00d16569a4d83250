"""What squeue does not show of a job: submit line, requested TRES, files with patterns filled in.

``scontrol show job --json`` (where this scontrol has it, and it shows what was
requested) escapes every text. ``scontrol -o show job`` does not: a job name or a comment can hold
`` UserId=root(0)`` and newlines. So from its text only these extras are taken,
and each is looked for behind values that squeue has told safely: what a user
writes into one text can at the worst change another text of the same job.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from steward.core.records import JobRecord
from steward.slurm import values
from steward.slurm.errors import SlurmError
from steward.slurm.states import WAITING

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
        times["resized_at"] = values.moment(resized[0])
    suspended = _SUSPENDED.findall(segment)
    if len(suspended) == 1:
        ((at, before),) = suspended
        times |= _suspended(record, values.moment(at), int(before))
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
        "requested_cpus": values.number(counts.get("cpu", "")),
        "requested_nodes": values.number(counts.get("node", "")),
    }
    return {field: count for field, count in found.items() if count}
