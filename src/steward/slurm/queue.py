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
import secrets
import string
import sys
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import Final

import msgspec

from steward.core.records import JobRecord
from steward.slurm import values
from steward.slurm.people import People
from steward.slurm.states import FINISHED, WAITING
from steward.slurm.tres import amount_of

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
        words = {name: values.text(field) for name, field in fields.items()}
        return _record(shown, words, people)


def parse(
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
    het_job_id = values.number(shown["HetJobID"]) or 0
    restarts = values.number(shown["RestartCnt"]) or 0
    sluid = shown.get("SLUID", "")
    is_over = state in FINISHED
    status = values.exit_status(shown["exit_code"]) if is_over else None
    derived = values.exit_status(shown["DerivedEC"]) if is_over else None
    start = None if state in WAITING else values.moment(shown["StartTime"])
    end = values.moment(shown["EndTime"]) if is_over else None
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
        het_offset=values.number(shown["HetJobOffset"]) or 0 if het_job_id else 0,
        sluid=sluid,
        # A job's first run gives it its lasting id; of later runs squeue does not tell it.
        original_sluid=sluid if restarts == 0 else "",
        restarts=restarts,
        submit=values.moment(shown["SubmitTime"]),
        eligible=values.moment(shown["EligibleTime"]),
        # Expected times are guesses of the scheduler, no facts.
        start=start,
        end=end,
        time_limit_s=values.seconds(shown["TimeLimit"]),
        nodes=values.number(shown["NumNodes"]),
        cpus=values.number(shown["NumCPUs"]),
        tasks=values.number(shown["NumTasks"]),
        min_memory_mib=amount_of("mem", shown["MinMemory"]),
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
        priority=values.number(shown.get("PriorityLong", "")),
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
    used_s = values.seconds(used)
    if start is None or end is None or used_s is None:
        return None
    suspended_s = int((end - start).total_seconds()) - used_s
    return suspended_s if suspended_s > 0 else None


def _said(name: str) -> str:
    return "" if name in _NOBODY else name
