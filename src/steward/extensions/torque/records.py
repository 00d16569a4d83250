"""Torque job files: parses ``.JB`` and ``.TA`` (XML) into job records in Slurm's terms.

:func:`parse_job_file` parses the XML so that no file can do harm. Job name, directory and
environment are the user's; Torque escapes them, but a file in the spool may be truncated, older or
foreign. DTDs and entities are rejected unread; size, depth and count are limited. Torque before 4.5
wrote a C struct in place of XML, which is rejected, too.

:func:`parse_torque_job` returns a :class:`TorqueJob`: state, times, resources and exit status
mapped to Slurm's. :func:`element_id` makes raw ids for array elements. Verified with Torque 6.1.3's
own files. Torque stores the names of user and group; their ids are looked up here, as everywhere in
Steward. Fields that Torque does not have stay empty: nothing is guessed.
"""

import re
from datetime import UTC, datetime
from typing import Final
from xml.parsers import expat

import msgspec

from steward.core.errors import StewardError
from steward.core.records import JobRecord
from steward.slurm.users import NameResolver

MAX_JOB_FILE_BYTES: Final = 24 << 20
"""Largest file to read, in bytes: an environment of 8 MiB and its escapes."""

_MAX_ELEMENTS: Final = 5000
"""Most XML elements of a job file."""
_MAX_DEPTH: Final = 6
"""Deepest nesting of XML elements."""
_PIECE: Final = 1 << 20


class TorqueRecordError(StewardError):
    """Torque file that is malformed; ``offender`` is its name."""


JobFileFields = dict[str, str]
"""Texts by path below the root: ``state``, ``attributes/euser``, ``attributes/Resource_List/…``."""


class _JobFileReader:
    """XML handler that collects the text of each element; of duplicates the first counts."""

    def __init__(self) -> None:
        self.fields: JobFileFields = {}
        self.root_name = ""
        self._path: list[str] = []
        self._texts: list[list[str]] = []
        self._count = 0

    def start_element(self, name: str, _attributes: dict[str, str]) -> None:
        self._count += 1
        if not self._path and not self.root_name:
            self.root_name = name
        self._path.append(name)
        self._texts.append([])
        if self._count > _MAX_ELEMENTS or len(self._path) > _MAX_DEPTH:
            raise ValueError("too many elements, or too deeply nested ones")

    def add_text(self, data: str) -> None:
        self._texts[-1].append(data)

    def end_element(self, _name: str) -> None:
        self.fields.setdefault("/".join(self._path[1:]), "".join(self._texts.pop()))
        self._path.pop()


def _reject_declaration(*_: object) -> int:
    """Reject document types and entities, which could expand without limit."""
    raise ValueError("a document type or an entity is declared")


def parse_job_file(data: bytes, name: str) -> JobFileFields:
    """Parse a ``.JB`` or ``.TA`` file into its texts.

    Args:
        data: The whole file.
        name: Its name, for the error.

    Raises:
        TorqueRecordError: The file is malformed or incomplete.
    """
    if len(data) > MAX_JOB_FILE_BYTES:
        raise TorqueRecordError(f"{name} is larger than {MAX_JOB_FILE_BYTES} bytes", name)
    if not data.lstrip().startswith(b"<"):
        raise TorqueRecordError(f"{name} is not XML. Did a Torque before 4.5 write it?", name)
    reader = _JobFileReader()
    parser = expat.ParserCreate("utf-8")
    parser.buffer_text = True
    parser.StartElementHandler = reader.start_element
    parser.EndElementHandler = reader.end_element
    parser.CharacterDataHandler = reader.add_text
    parser.StartDoctypeDeclHandler = _reject_declaration
    parser.EntityDeclHandler = _reject_declaration
    parser.ExternalEntityRefHandler = _reject_declaration
    try:
        for offset in range(0, len(data), _PIECE):
            parser.Parse(data[offset : offset + _PIECE], False)
        parser.Parse(b"", True)
    except (expat.ExpatError, ValueError) as error:
        raise TorqueRecordError(f"cannot read {name}: {error}", name) from error
    if reader.root_name != "job":
        raise TorqueRecordError(f"{name} contains a {reader.root_name!r}, not a job", name)
    return reader.fields


MAX_TORQUE_ID: Final = 99_999_999
"""Torque's highest job id (pbs_ifl.h, PBS_SEQNUMTOP): eight digits."""

_ELEMENT_BASE: Final = 10**15
_ELEMENTS: Final = 10**7
_JOB_ID: Final = re.compile(r"([1-9][0-9]{0,7})(\[([0-9]{0,7})\])?(?:\..*)?", re.DOTALL)
_HAS_SCRIPT: Final = 0x20
"""Bit of server_flags: the job has a script."""
_SECONDS: Final = re.compile(r"(?:(?:(\d{1,6}):)?(\d{1,9}):)?(\d{1,9}):(\d{1,9})|(\d{1,12})")
"""Walltime: seconds, or up to days:hours:minutes:seconds."""
_PPN: Final = re.compile(r"(?:^|:)ppn=(\d{1,6})(?=:|\Z)")
_INDICES: Final = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_MAX_ATTRIBUTE_LENGTH: Final = 1 << 18
"""Longest attribute that is used, in characters."""
_MAX_TIME_S: Final = 32_503_680_000
"""Latest plausible time: the year 3000."""

_STATES_BY_LETTER: Final = {
    "T": "PENDING",
    "Q": "PENDING",
    "H": "PENDING",
    "W": "PENDING",
    "R": "RUNNING",
    "S": "SUSPENDED",
    "E": "COMPLETING",
    "C": "",
}
"""Slurm's state for each of Torque's job_state letters."""
_LETTERS_BY_NUMBER: Final = {"0": "T", "1": "Q", "2": "H", "3": "W", "4": "R", "5": "E", "6": "C"}
"""Letter for each of Torque's numeric states."""
_HOLD_REASONS: Final = ((1, "JobHeldUser"), (2, "JobHeldAdmin"), (8, "JobArrayTaskLimit"))
"""Bits of Hold_Types, with Slurm's reasons."""
# exit_status when Torque itself ended or never began the job (Administrator Guide, "Job exit
# status"); the other negative values mean that the job could not be started.
_LIMIT_STATES: Final = {-10: "OUT_OF_MEMORY", -11: "TIMEOUT", -12: "TIMEOUT"}
_SIGNAL_BASE: Final = 256
"""exit_status of a job that signal N ended is this plus N."""
_MAX_SIGNAL: Final = 64


class TorqueJob(msgspec.Struct, frozen=True, kw_only=True):
    """Content of one job file.

    Attributes:
        record: The job in Slurm's terms, not redacted.
        changed_s: Torque's own time of the job's last change, seconds since the epoch.
        has_script: Whether Torque holds a script for it; an interactive job has none.
        variables: Its Variable_List, raw; None where there is none.
    """

    record: JobRecord
    changed_s: int
    has_script: bool
    variables: str | None


def element_id(array_job_id: int, index: int) -> int:
    """Return the raw id that Steward uses for an array element, which has none in Torque.

    A 1, the array's id with eight digits and the index with seven: 1022[3] is 1000010220000003.
    Torque's own ids have eight digits, so none can be the same, and no two elements share one; it
    fits the 53 bits that JSON carries unharmed.

    Raises:
        TorqueRecordError: Torque has no such ids.
    """
    if not (0 < array_job_id <= MAX_TORQUE_ID and 0 <= index < _ELEMENTS):
        raise TorqueRecordError(
            f"invalid array index {array_job_id}[{index}]: Torque has no such job", index
        )
    return _ELEMENT_BASE + array_job_id * _ELEMENTS + index


def parse_torque_job(data: bytes, name: str, names: NameResolver | None = None) -> TorqueJob:
    """Parse a ``.JB`` or ``.TA`` file into a job.

    Args:
        data: The whole file.
        name: Its name, for the error.
        names: Resolves names to ids; None leaves ids out.

    Raises:
        TorqueRecordError: The file is malformed or incomplete.
    """
    fields = parse_job_file(data, name)
    id_match = _JOB_ID.fullmatch(fields.get("jobid", ""))
    if id_match is None:
        raise TorqueRecordError(f"{name} has no valid Torque job id", name)
    torque_id, is_array, index = int(id_match[1]), id_match[2] is not None, id_match[3]
    attributes = _JobAttributes(fields)
    submit = _parse_time(attributes["ctime"])
    if submit is None:
        raise TorqueRecordError(f"{name} has no submit time (ctime)", name)
    has_script = bool(_parse_whole(fields.get("server_flags", "")) & _HAS_SCRIPT)
    array_task = index or (attributes["job_array_request"] if is_array else "")
    record = JobRecord(
        job_id=element_id(torque_id, int(index)) if index else torque_id,
        name=attributes["Job_Name"],
        account=attributes["Account_Name"],
        partition=attributes["queue"] or fields.get("queue", ""),
        batch=has_script and not attributes["interactive"],
        array_job_id=torque_id if is_array else 0,
        array_task=str(int(index)) if index else array_task,
        submit=submit,
        eligible=_parse_time(attributes["etime"]),
        time_limit_s=_parse_walltime(attributes["Resource_List/walltime"]),
        dependency=attributes["depend"],
        submit_host=attributes["submit_host"],
        submit_line=f"qsub {attributes['submit_args']}".rstrip(),
        work_dir=attributes["init_work_dir"],
        stdout=_strip_host(attributes["Output_Path"]),
        stderr=_strip_host(attributes["Error_Path"]),
    )
    changes = _resource_fields(attributes) | _run_fields(fields, attributes)
    if names is not None:
        changes |= _resolve_ids(attributes, names)
    return TorqueJob(
        record=msgspec.structs.replace(record, **changes),
        changed_s=_parse_whole(attributes["mtime"]),
        has_script=has_script,
        variables=fields.get("attributes/Variable_List"),
    )


class _JobAttributes:
    """Attributes of a job; an unset or oversized one reads as empty.

    An oversized one is not cut, because part of a secret does not look like one.
    """

    def __init__(self, fields: JobFileFields) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> str:
        text = self._fields.get(f"attributes/{name}", "")
        return text if len(text) <= _MAX_ATTRIBUTE_LENGTH else ""


def _resolve_ids(attributes: _JobAttributes, names: NameResolver) -> dict[str, object]:
    """Resolve the ids of the user that the job runs as, and the names of these ids."""
    uid = names.uid(attributes["euser"])
    gid = names.gid(attributes["egroup"])
    return {
        "uid": uid,
        "user": "" if uid is None else names.user(uid),
        "gid": gid,
        "group": "" if gid is None else names.group(gid),
    }


def _run_fields(fields: JobFileFields, attributes: _JobAttributes) -> dict[str, object]:
    """Return state, reason, times of the run, and exit status."""
    letter = attributes["job_state"] or _LETTERS_BY_NUMBER.get(fields.get("state", ""), "")
    state = _STATES_BY_LETTER.get(letter, "PENDING")
    start_count = _parse_whole(attributes["start_count"])
    # For a job that waits for a restart, the times are those of its former run.
    is_started = state not in ("", "PENDING") or bool(attributes["exec_host"])
    start = _parse_time(attributes["start_time"]) or _parse_time(fields.get("start_time", ""))
    changes: dict[str, object] = {
        "restarts": max(0, start_count - 1) if is_started else start_count,
        "state": state,
        "reason": _pending_reason(letter, attributes) if state == "PENDING" else "",
        "start": start if is_started else None,
    }
    if state:
        return changes
    return (
        changes
        | {"end": _parse_time(attributes["comp_time"])}
        | _end_fields(attributes["exit_status"])
    )


def _end_fields(exit_status: str) -> dict[str, object]:
    """Map Torque's exit_status of a complete job to state, reason and exit code."""
    if not exit_status:
        return {"state": "CANCELLED"}  # deleted before it began
    try:
        status = int(exit_status[:20])
    except ValueError:
        return {"state": "FAILED"}
    if status < 0:
        state = _LIMIT_STATES.get(status, "FAILED")
        return {"state": state, "reason": "" if state != "FAILED" else "JobLaunchFailure"}
    if status < _SIGNAL_BASE:
        return {
            "state": "FAILED" if status else "COMPLETED",
            "exit_code": status,
            "exit_signal": 0,
        }
    signal = status - _SIGNAL_BASE
    if signal > _MAX_SIGNAL:
        return {"state": "FAILED"}
    return {"state": "FAILED", "exit_code": 0, "exit_signal": signal}


def _pending_reason(letter: str, attributes: _JobAttributes) -> str:
    """Return the reason why the job is pending; "" where Torque has none."""
    if letter == "W":
        return "BeginTime"
    if letter != "H":
        return ""
    hold_types = _parse_whole(attributes["Hold_Types"])
    for bit, reason in _HOLD_REASONS:
        if hold_types & bit:
            return reason
    return "Dependency" if attributes["depend"] else "JobHeldAdmin"


def _resource_fields(attributes: _JobAttributes) -> dict[str, object]:
    """Return nodes and CPUs: allocated ones where it runs or ran, else the requested ones."""
    hosts = attributes["exec_host"]
    if hosts:
        names: dict[str, None] = {}
        cpus = 0
        for slot in hosts.split("+"):
            name, _, indices = slot.partition("/")
            names[name] = None
            cpus += _count_slots(indices)
        return {"nodelist": ",".join(names), "nodes": len(names), "cpus": cpus}
    nodes = _parse_whole(attributes["Resource_List/nodect"]) or None
    return {"nodes": nodes, "cpus": _compute_requested_cpus(attributes, nodes)}


def _count_slots(indices: str) -> int:
    """Count the cores in "0", "0-3" or "0-3,8"."""
    count = 0
    for part in indices.split(","):
        match = _INDICES.fullmatch(part)
        if match:
            count += max(0, int(match[2] or match[1]) - int(match[1])) + 1
    return count or 1


def _compute_requested_cpus(attributes: _JobAttributes, nodes: int | None) -> int | None:
    """Compute the requested cores from ``procs`` and ``nodes``."""
    procs = _parse_whole(attributes["Resource_List/procs"])
    nodes_request = attributes["Resource_List/nodes"]
    if not nodes_request:
        return procs or nodes
    cpus = procs
    for part in nodes_request.split("+"):
        # "2:ppn=4", or a node's name in place of a count.
        count = _parse_whole(part.partition(":")[0]) or 1
        ppn = _PPN.search(part)
        cpus += count * (int(ppn[1]) if ppn else 1)
    return cpus


def _parse_walltime(text: str) -> int | None:
    """Parse a walltime: "300", "05:00", "00:05:00", "1:00:05:00"; None if invalid."""
    match = _SECONDS.fullmatch(text)
    if match is None:
        return None
    if match[5]:
        return int(match[5])
    days, hours, minutes, seconds = (int(part or 0) for part in match.group(1, 2, 3, 4))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _strip_host(text: str) -> str:
    """Return the path in "host:/path"."""
    host, colon, path = text.partition(":")
    return path if colon and "/" not in host else text


def _parse_time(text: str) -> datetime | None:
    """Parse a time in seconds since the epoch; None if invalid or 0."""
    seconds = _parse_whole(text)
    return datetime.fromtimestamp(seconds, UTC) if 0 < seconds < _MAX_TIME_S else None


def _parse_whole(text: str) -> int:
    """Parse a whole number; 0 for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else 0
