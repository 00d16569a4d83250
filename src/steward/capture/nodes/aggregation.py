"""Aggregation of SPANK lines from compute nodes into step, task, prolog and gap events.

The SPANK plugin writes one JSON object per line, with keys of a letter or two, since a node writes
one for every task. Input is hostile: root on a node may send anything, so every number has bounds,
those of what a machine can do; sums beyond them fit into no database.

``parse_node_line`` parses a line into a :class:`NodeLine`. ``aggregate_lines`` converts a batch of
lines to events, many tasks of a step to one event. ``make_gap_event`` records missing lines.
``find_flaw`` validates such events when another controller forwards them.

Event keys derive from the lines, so the journal ignores lines that are sent again. A batch that is
cut differently the second time yields events of other tasks, which together say the same.
"""

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from steward.core.events import (
    NODE_EPILOG,
    NODE_GAP,
    NODE_PROLOG,
    STEP_END,
    STEP_START,
    TASK_EXIT,
    Event,
)
from steward.core.timestamps import from_micros, to_micros
from steward.core.usage import ExitedTasks, Launch, NodeGap, NodeJob, StepEnd, StepStart, TaskUsage
from steward.jobs.job_ids import MAX_JOB_ID

MAX_LINE_BYTES: Final = 4096
"""Maximum length of a line with its newline, in bytes."""
_MIN_LINE_BYTES: Final = 56
"""Minimum length of a line in bytes: mandatory fields take more, so a flood of shorter lines is
cheap to reject.
"""
STEP_ID_PATTERN: Final = re.compile(r"(?:[0-9]{1,10}(?:\+[0-9]{1,5})?|batch|extern|interactive)")
"""Valid step ids: a number, with het component, or a named step."""
MAX_CPU_US: Final = 2**53
"""Maximum CPU time of a task, or of a step on a node, in µs: 1,024 CPUs for a hundred days."""
MAX_COUNTED_BYTES: Final = 2**56
"""Maximum memory or I/O in bytes: no node moves 64 PiB within a step."""
MAX_COUNTED_TIMES: Final = 2**48
"""Maximum page faults or context switches: a billion a second for three days are fewer."""
MAX_NODE_LINE_ID: Final = 2**32 - 1
"""Largest 32-bit number."""
EARLIEST_VALID_US: Final = 1_262_304_000_000_000
"""The year 2010: a node with an earlier clock has no valid time."""
LATEST_VALID_US: Final = 2**52
"""The year 2112: later times are invalid."""

# Parser of lines

_Job = Annotated[int, msgspec.Meta(ge=1, le=MAX_JOB_ID)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=MAX_NODE_LINE_ID)]
_Cpu = Annotated[int, msgspec.Meta(ge=0, le=MAX_CPU_US)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNTED_BYTES)]
_Times = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNTED_TIMES)]
_Time = Annotated[int, msgspec.Meta(ge=EARLIEST_VALID_US, le=LATEST_VALID_US)]
_Short = Annotated[str, msgspec.Meta(max_length=64)]
_T = TypeVar("_T", bound=msgspec.Struct)
_Key = msgspec.field
"""Short form of ``msgspec.field``, which maps a field to its key in the line."""


class NodeLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Parsed line; fields that its kind lacks have their defaults.

    Attributes:
        version: Version of the line format.
        kind: ``start``, ``smgr``, ``task``, ``end``, ``prolog`` or ``epilog``.
        at_us: Time it was written, µs since the epoch.
        job_id: Raw job id.
        node: NodeName.
        step: Step id, as Slurm writes it after the dot.
        launched_us: Launch time of the step on the node, µs since the epoch.
        lost: Number of lines lost before this one.
    """

    version: Literal[1] = _Key(name="v")
    kind: Literal["start", "smgr", "task", "end", "prolog", "epilog"] = _Key(name="k")
    at_us: _Time = _Key(name="t")
    job_id: _Job = _Key(name="j")
    node: str = _Key(name="n")
    step: str = _Key(name="s", default="")
    launched_us: _Time = _Key(name="l", default=0)
    lost: _Id = 0

    uid: _Id | None = _Key(name="u", default=None)
    gid: _Id = _Key(name="g", default=0)
    tasks: _Id = 0
    cpus: _Id = 0
    memory_bytes: _Bytes | None = _Key(name="mem", default=None)
    name: _Short = ""
    restarts: _Id | None = _Key(name="r", default=None)
    array_job_id: Annotated[int, msgspec.Meta(ge=0, le=MAX_JOB_ID)] = _Key(name="aj", default=0)
    array_task: _Short = _Key(name="at", default="")

    task: _Id = _Key(name="id", default=0)
    pid: _Id = 0
    status: _Id = _Key(name="st", default=0)
    user_us: _Cpu = _Key(name="ut", default=0)
    system_us: _Cpu = _Key(name="sy", default=0)
    max_rss_bytes: _Bytes | None = _Key(name="rss", default=None)
    minor_faults: _Times = _Key(name="minf", default=0)
    major_faults: _Times = _Key(name="majf", default=0)
    read_bytes: _Bytes = _Key(name="in", default=0)
    written_bytes: _Bytes = _Key(name="out", default=0)
    voluntary_switches: _Times = _Key(name="vsw", default=0)
    involuntary_switches: _Times = _Key(name="isw", default=0)
    includes_epilog: Literal[0, 1] = _Key(name="ep", default=0)

    peak_bytes: _Bytes | None = _Key(name="peak", default=None)
    cgroup_user_us: _Cpu | None = _Key(name="cut", default=None)
    cgroup_system_us: _Cpu | None = _Key(name="csy", default=None)
    cgroup_read_bytes: _Bytes | None = _Key(name="crd", default=None)
    cgroup_written_bytes: _Bytes | None = _Key(name="cwr", default=None)

    @property
    def ended_us(self) -> int:
        """Return the end of a task: the time that its line was written, µs since the epoch."""
        return self.at_us


def field_bounds(field: str) -> tuple[int, int]:
    """Return minimum and maximum of a numeric field in events made of such lines.

    Args:
        field: Name of the field, as in ``steward.core.usage``.
    """
    if field in ("launched_us", "ended_us"):
        return EARLIEST_VALID_US, LATEST_VALID_US
    if field.endswith("_us") or field == "lines":
        return 0, MAX_CPU_US
    if field.endswith("_bytes"):
        return 0, MAX_COUNTED_BYTES
    return 0, MAX_COUNTED_TIMES if field.endswith(("_faults", "_switches")) else MAX_NODE_LINE_ID


_decoder = msgspec.json.Decoder(NodeLine)
_STEP_KINDS: Final = ("start", "smgr", "task", "end")
"""Kinds of lines about a step."""
_KINDS_WITH_UID: Final = ("start", "prolog", "epilog")
"""Kinds of lines that must contain a uid."""
_BEGIN: Final = b'{"v":'
"""Start of a line."""


def parse_node_line(line: bytes, node: str, latest_us: int) -> NodeLine | None:
    """Parse and validate a line of a node; None if it is invalid.

    If a full disk truncated a line, the next one follows in the same line and is found.

    Args:
        line: The line without its newline.
        node: NodeName of the sender.
        latest_us: Latest valid time, µs since the epoch.
    """
    if len(line) < _MIN_LINE_BYTES:
        return None
    parsed = _decode_node_line(line)
    if parsed is None and (begin := line.rfind(_BEGIN)) > 0:
        parsed = _decode_node_line(line[begin:])
    if parsed is None or parsed.node != node or parsed.at_us > latest_us:
        return None
    if parsed.kind in _KINDS_WITH_UID and parsed.uid is None:
        return None
    if parsed.kind in _STEP_KINDS:
        is_launch_valid = EARLIEST_VALID_US <= parsed.launched_us <= latest_us
        return parsed if is_launch_valid and STEP_ID_PATTERN.fullmatch(parsed.step) else None
    return parsed


def _decode_node_line(line: bytes) -> NodeLine | None:
    """Decode a line; None if it is too long or invalid."""
    if len(line) >= MAX_LINE_BYTES:
        return None
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


# Events

NODES_SOURCE: Final = "node"
"""Source name of the events."""
NODE_KINDS: Final = frozenset({STEP_START, TASK_EXIT, STEP_END, NODE_PROLOG, NODE_EPILOG, NODE_GAP})
"""Kinds of events made from node lines."""
MAX_TASKS_PER_EVENT: Final = 2000
"""Maximum number of tasks in one event, which keeps it below the megabyte that a controller may
forward.
"""
GAP_LOST: Final = "lost"
"""Reason of a gap: lines were lost on the node."""
GAP_GARBLED: Final = "garbled"
"""Reason of a gap: lines are unreadable."""
GAP_REBOOT: Final = "reboot"
"""Reason of a gap: the node rebooted and lost its spool."""

_MAX_CLOCK_LEAD: Final = timedelta(days=1)
"""Maximum clock difference; a time further ahead is invalid."""
_LONGEST_TEXT: Final = 255
"""Maximum length of a text in an event, in characters."""
_KEY_DIGEST_DIGITS: Final = 24
"""Length of a digest in event keys, in hex digits."""
_GAP_REASONS: Final = frozenset({GAP_LOST, GAP_GARBLED, GAP_REBOOT})
"""Valid reasons of gaps."""


class AggregatedBatch(msgspec.Struct, frozen=True):
    """Events of a batch of lines.

    Attributes:
        events: Events: starts, then tasks, then ends.
        lost: Number of lines that were reported lost or are unreadable.
    """

    events: list[Event]
    lost: int


def aggregate_lines(
    cluster: str,
    node: str,
    body: bytes,
    now: datetime,
    redact_name: Callable[[str], str] = str,
) -> AggregatedBatch:
    """Convert a batch of lines to events.

    Args:
        cluster: Cluster of the node.
        node: NodeName of the sender; lines of other nodes count as garbled.
        body: The lines.
        now: Current time.
        redact_name: Removes secrets from a step's name, which its user chooses.
    """
    latest_us = to_micros(now + _MAX_CLOCK_LEAD)
    starts: list[Event] = []
    ends: list[Event] = []
    gaps: list[Event] = []
    tasks: dict[tuple[int, str, int], dict[int, NodeLine]] = {}
    garbled_lines, garbled_digest = 0, hashlib.sha256()
    lost_lines = 0
    for raw_line in io.BytesIO(body):
        line = parse_node_line(raw_line.rstrip(b"\n"), node, latest_us)
        if line is None:
            if raw_line != b"\n":
                garbled_lines += 1
                garbled_digest.update(raw_line)
            continue
        if line.lost:
            lost_lines += line.lost
            gaps.append(
                _make_line_gap(cluster, node, GAP_LOST, line.lost, _compute_digest([raw_line]), now)
            )
        if line.kind == "task":
            launch = (line.job_id, line.step, line.launched_us)
            tasks.setdefault(launch, {})[line.task] = line
        elif line.kind == "end":
            ends.append(
                _make_line_event(cluster, STEP_END, line, _convert_line(line, StepEnd), now)
            )
        elif line.kind == "start":
            starts.append(
                _make_line_event(
                    cluster, STEP_START, line, _build_step_start(line, redact_name), now
                )
            )
        elif line.kind != "smgr":  # all tasks have started; their start line had the number
            kind = NODE_PROLOG if line.kind == "prolog" else NODE_EPILOG
            starts.append(_make_line_event(cluster, kind, line, _convert_line(line, NodeJob), now))
    exit_events = [
        _make_exit_event(cluster, task_lines, now)
        for step_tasks in tasks.values()
        for task_lines in _split_tasks(step_tasks)
    ]
    if garbled_lines:
        gaps.append(
            _make_line_gap(
                cluster,
                node,
                GAP_GARBLED,
                garbled_lines,
                garbled_digest.hexdigest()[:_KEY_DIGEST_DIGITS],
                now,
            )
        )
    return AggregatedBatch([*starts, *exit_events, *ends, *gaps], lost_lines + garbled_lines)


def make_gap_event(
    cluster: str, gap: NodeGap, gap_id: str, now: datetime, at: datetime | None = None
) -> Event:
    """Build the event of a gap.

    Args:
        cluster: Cluster of the node.
        gap: What is missing.
        gap_id: Text that is equal when the same gap is reported again, and differs for another
            gap.
        now: Current time.
        at: Time of the gap; None for ``now``.
    """
    return Event(
        kind=NODE_GAP,
        cluster=cluster,
        key=f"{NODE_GAP}:{gap.node}:{gap.why}:{gap_id}",
        at=at or now,
        seen_at=now,
        source=NODES_SOURCE,
        body=gap,
    )


def find_flaw(event: Event) -> str:
    """Return why this module cannot have made an event; "" if it can."""
    body = event.body
    is_launch = isinstance(body, Launch)
    if isinstance(body, Launch | NodeJob) and not 0 < body.job_id <= MAX_JOB_ID:
        return "invalid job id"
    if is_launch and (
        STEP_ID_PATTERN.fullmatch(body.step) is None or body.launched_us < EARLIEST_VALID_US
    ):
        return "invalid step"
    if isinstance(body, NodeGap) and (
        body.why not in _GAP_REASONS or not event.key.startswith(_gap_key_prefix(body))
    ):
        return "the key does not match the gap"
    if not isinstance(body, NodeGap) and event.key != _make_key(event.kind, body, event.at):
        return "the key does not match the launch"
    tasks = body.tasks if isinstance(body, ExitedTasks) else ()
    if len(tasks) > MAX_TASKS_PER_EVENT or not all(map(_is_bounded, (body, *tasks))):
        return "too many tasks, or a value out of bounds"
    return ""


def _is_bounded(record: msgspec.Struct) -> bool:
    """Return whether all fields of a record are within their bounds."""
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, int):
            minimum, maximum = field_bounds(name)
            if not minimum <= value <= maximum:
                return False
        if isinstance(value, str) and len(value) > _LONGEST_TEXT:
            return False
        if isinstance(value, datetime) and value.tzinfo is None:
            return False
    return True


def _gap_key_prefix(gap: NodeGap) -> str:
    """Return the start of a gap's event key."""
    return f"{NODE_GAP}:{gap.node}:{gap.why}:"


def _make_line_gap(
    cluster: str, node: str, reason: str, lines: int, gap_id: str, now: datetime
) -> Event:
    """Build the event of a gap in lines."""
    return make_gap_event(cluster, NodeGap(node=node, why=reason, lines=lines), gap_id, now)


def _make_key(kind: str, body: Any, at: datetime) -> str:
    """Build the key of a step, task, prolog or epilog event."""
    if isinstance(body, NodeJob):
        # A requeued job's Prolog runs again.
        return f"{kind}:{body.job_id}:{body.node}:{to_micros(at)}"
    prefix = f"{kind}:{body.job_id}:{body.step}:{body.node}:{body.launched_us}"
    if isinstance(body, ExitedTasks):
        task_ids = [f"{task.task}.{task.pid}".encode() for task in body.tasks]
        return f"{prefix}:{_compute_digest(task_ids)}"
    return prefix


def _compute_digest(parts: Iterable[bytes]) -> str:
    """Return a digest of byte strings, shortened."""
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:_KEY_DIGEST_DIGITS]


def _make_line_event(cluster: str, kind: str, line: NodeLine, body: Any, now: datetime) -> Event:
    """Build the event of a line."""
    at = from_micros(line.at_us)
    return Event(
        kind=kind,
        cluster=cluster,
        key=_make_key(kind, body, at),
        at=at,
        seen_at=now,
        source=NODES_SOURCE,
        body=body,
    )


def _build_step_start(line: NodeLine, redact_name: Callable[[str], str]) -> StepStart:
    """Build the body of a step.start event."""
    body = _convert_line(line, StepStart)
    return msgspec.structs.replace(body, name=redact_name(line.name))


def _convert_line(line: NodeLine, body: type[_T]) -> _T:
    """Convert a line to a body whose fields are among the line's."""
    return msgspec.convert(line, body, from_attributes=True, strict=False)


def _split_tasks(tasks: dict[int, NodeLine]) -> Iterator[list[NodeLine]]:
    """Split a step's tasks into lists short enough for one event."""
    ordered = [tasks[task] for task in sorted(tasks)]
    for begin in range(0, len(ordered), MAX_TASKS_PER_EVENT):
        yield ordered[begin : begin + MAX_TASKS_PER_EVENT]


def _make_exit_event(cluster: str, lines: list[NodeLine], now: datetime) -> Event:
    """Build one event for several exited tasks of a step."""
    first = lines[0]
    body = ExitedTasks(
        job_id=first.job_id,
        step=first.step,
        node=first.node,
        launched_us=first.launched_us,
        tasks=tuple(_convert_line(line, TaskUsage) for line in lines),
    )
    last = max(lines, key=lambda line: line.at_us)
    return _make_line_event(cluster, TASK_EXIT, last, body, now)
