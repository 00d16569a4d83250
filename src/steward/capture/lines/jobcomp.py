"""Lines of native/jobcomp.lua: each is one run of a job that ended, or a piece of a resized one.

The fields are those that Slurm gives Lua, under Slurm's names and in Slurm's
numbers. Who wrote them is slurmctld, but job names, comments and the like are
anybody's, so a line is taken for what its types allow and for nothing else.
"""

import hashlib
from datetime import UTC, datetime
from typing import Final

import msgspec

from steward.capture.observed import end_key
from steward.core.errors import StewardError
from steward.core.events import JOB_END, Event, JobFacts
from steward.core.records import JobRecord
from steward.slurm import ended_state
from steward.slurm.people import People

SOURCE: Final = "jobcomp"

_NO_VALUE: Final = 0xFFFF_FFF0
"""From here on Slurm's 32-bit numbers are none (NO_VAL, INFINITE)."""
_LATEST: Final = 2**33  # a time in the year 2242
_MOST_ID: Final = 2**32 - 1


class LineError(StewardError):
    """A line that is none of ours; ``offender`` is its beginning."""


class _Line(msgspec.Struct, frozen=True):
    """A line, as far as it is put to use."""

    v: int
    k: str
    t: int
    job_id: int
    job_state: int
    lost: int = 0
    cut: tuple[str, ...] = ()
    user_id: int | None = None
    group_id: int | None = None
    restart_cnt: int = 0
    submit_time: int = 0
    start_time: int = 0
    end_time: int = 0
    exit_code: int | None = None
    derived_ec: int | None = None
    array_job_id: int = 0
    array_task_id: int = _MOST_ID
    het_job_id: int = 0
    het_job_offset: int = 0
    total_nodes: int = 0
    total_cpus: int = 0
    min_nodes: int = 0
    min_cpus: int = 0
    time_limit: int = _MOST_ID
    priority: int | None = None
    nodes: str = ""
    tres_fmt_alloc_str: str = ""
    tres_fmt_req_str: str = ""
    sluid: str = ""
    original_sluid: str = ""
    origin_cluster: str = ""
    account: str = ""
    partition: str = ""
    qos: str = ""
    wckey: str = ""
    resv_name: str = ""
    name: str = ""
    batch_host: str = ""
    alloc_node: str = ""
    work_dir: str = ""
    admin_comment: str = ""
    std_in: str = ""
    std_out: str = ""
    std_err: str = ""
    features: str = ""
    licenses: str = ""
    container: str = ""
    curr_dependency: str = ""


_BEGIN: Final = b'{"v":'
"""Of a line; within one it is nowhere, because texts have their quotes escaped."""

_decoder = msgspec.json.Decoder(_Line)


class Told(msgspec.Struct, frozen=True):
    """What a line says.

    Attributes:
        record: The run, or the piece of it.
        at: When slurmctld said so, UTC; whole seconds.
        lost: How many lines before this one it could not write.
    """

    record: JobRecord
    at: datetime
    lost: int = 0


def told(line: bytes, people: People) -> Told:
    """What a line says.

    Args:
        line: Without its newline.
        people: Who looks names up.

    Raises:
        LineError: It is no line of jobcomp.lua's, or of a job that there cannot be.
    """
    try:
        said = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LineError(f"a line that is none of jobcomp.lua's: {error}", line[:200]) from error
    state = ended_state(said.job_state)
    at, submit = _moment(said.t), _moment(said.submit_time)
    if said.v != 1 or said.k != "job" or not state or at is None:
        raise LineError("a line of another version of jobcomp.lua", line[:200])
    if not 0 < said.job_id < _NO_VALUE or submit is None or said.restart_cnt < 0:
        raise LineError("a line of a job that there cannot be", line[:200])
    return Told(_record(said, state, submit, people), at, max(0, said.lost))


def told_behind(line: bytes, people: People) -> Told | None:
    """What the whole line says that stands behind one that was torn; None if none does.

    Args:
        line: What :func:`told` refused.
        people: Who looks names up.
    """
    begin = line.rfind(_BEGIN)
    if begin <= 0:
        return None
    try:
        return told(line[begin:], people)
    except LineError:
        return None


def end_event(cluster: str, said: Told, record: JobRecord) -> Event:
    """The event of a line.

    Args:
        cluster: The cluster's name.
        said: The line.
        record: Its record, without secrets.
    """
    # Not the key of the same fact in a snapshot: each of them tells what the other does not.
    key = f"{end_key(record)}:{SOURCE}"
    if record.state == "RESIZING":
        # A job may be given another size twice in a second.
        held = f"{record.nodelist}\0{record.tres_allocated}\0{record.sluid}"
        key += ":" + hashlib.blake2b(held.encode(), digest_size=6).hexdigest()
    return Event(
        kind=JOB_END,
        cluster=cluster,
        key=key,
        at=record.end or said.at,
        seen_at=said.at,
        source=SOURCE,
        body=JobFacts(record=record),
    )


def _record(said: _Line, state: str, submit: datetime, people: People) -> JobRecord:
    is_array = said.array_job_id > 0
    uid, gid = _some_id(said.user_id), _some_id(said.group_id)
    cut = frozenset(said.cut)
    code, signal = _status(said.exit_code)
    derived_code, derived_signal = _status(said.derived_ec)
    is_piece = state == "RESIZING"
    requested = "" if "tres_fmt_req_str" in cut else said.tres_fmt_req_str
    return JobRecord(
        job_id=said.job_id,
        name=said.name,
        uid=uid,
        user="" if uid is None else people.user(uid),
        gid=gid,
        group="" if gid is None else people.group(gid),
        account=said.account,
        partition=said.partition,
        qos=said.qos,
        state=state,
        array_job_id=said.array_job_id if is_array else 0,
        array_task=str(said.array_task_id) if is_array and said.array_task_id < _NO_VALUE else "",
        het_job_id=max(0, said.het_job_id),
        het_offset=max(0, said.het_job_offset) if said.het_job_id > 0 else 0,
        sluid=said.sluid,
        original_sluid=said.original_sluid,
        restarts=said.restart_cnt,
        submit=submit,
        start=_moment(said.start_time),
        # The end that Slurm gives of a piece is the one that the whole job is expected to have.
        end=_moment(said.t if is_piece else said.end_time),
        time_limit_s=said.time_limit * 60 if 0 <= said.time_limit < _NO_VALUE else None,
        nodes=said.total_nodes or None,
        cpus=said.total_cpus or None,
        tres_requested=requested,
        tres_allocated="" if "tres_fmt_alloc_str" in cut else said.tres_fmt_alloc_str,
        # Half a list of nodes would name other nodes.
        nodelist="" if "nodes" in cut else said.nodes,
        dependency=said.curr_dependency,
        reservation=said.resv_name,
        submit_host=said.alloc_node,
        work_dir=said.work_dir,
        stdin=_file(said.std_in),
        stdout=_file(said.std_out),
        stderr=_file(said.std_err),
        admin_comment=said.admin_comment,
        # Of a piece they are those of nobody yet.
        exit_code=None if is_piece else code,
        exit_signal=None if is_piece else signal,
        derived_exit_code=None if is_piece else derived_code,
        derived_exit_signal=None if is_piece else derived_signal,
        requested_cpus=said.min_cpus or None,
        requested_nodes=_counted(requested, "node") or said.min_nodes or None,
        priority=None if is_piece else said.priority,
        wckey=said.wckey,
        constraints=said.features,
        licenses=said.licenses,
        container=said.container,
        batch_host=said.batch_host,
        federation_origin=said.origin_cluster,
    )


def _moment(seconds: int) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if 0 < seconds < _LATEST else None


def _some_id(number: int | None) -> int | None:
    return number if number is not None and 0 <= number <= _MOST_ID else None


def _status(raw: int | None) -> tuple[int | None, int | None]:
    """Exit code and signal of the status of wait(2)."""
    if raw is None or not 0 <= raw < _NO_VALUE:
        return None, None
    return raw >> 8 & 0xFF, raw & 0x7F


def _counted(tres: str, name: str) -> int | None:
    """How many of ``name`` a text such as ``cpu=4,node=2`` has."""
    for part in tres.split(","):
        key, _, value = part.partition("=")
        if key == name and value.isascii() and value.isdigit() and len(value) < 10:
            return int(value)
    return None


def _file(path: str) -> str:
    # Slurm gives Lua the pattern; scontrol shows what it stands for.
    return "" if "%" in path else path
