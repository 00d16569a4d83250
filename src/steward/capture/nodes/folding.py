"""What a node sends becomes events: of a step's tasks on a node one, however many they are.

Keys are made of what the lines say, so that lines which are sent again are
passed over. A batch that is cut differently the second time gives events of
other tasks, which together say the same.
"""

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from steward.capture.nodes.lines import OLDEST_US, STEP, NodeLine, bounds_of, read_line
from steward.core.events import (
    NODE_EPILOG,
    NODE_GAP,
    NODE_PROLOG,
    STEP_END,
    STEP_START,
    TASK_EXIT,
    Event,
)
from steward.core.moments import micros, moment
from steward.core.usage import Launch, NodeGap, NodeJob, StepEnd, StepStart, TasksExited, TaskUsage
from steward.jobs.names import MAX_JOB_ID

SOURCE: Final = "node"
KINDS: Final = frozenset({STEP_START, TASK_EXIT, STEP_END, NODE_PROLOG, NODE_EPILOG, NODE_GAP})
MOST_TASKS: Final = 2000
"""Of one event: it then has less than the megabyte that a controller may forward."""
LOST: Final = "lost"
GARBLED: Final = "garbled"
REBOOT: Final = "reboot"

_AHEAD: Final = timedelta(days=1)
"""Clocks that differ by more are no clocks."""
_LONGEST_TEXT: Final = 255
_DIGITS: Final = 24
_WHY: Final = frozenset({LOST, GARBLED, REBOOT})


class Folded(msgspec.Struct, frozen=True):
    """What a batch says.

    Attributes:
        events: Its events, starts before tasks before ends.
        lost: Lines that it says were lost, or that cannot be read.
    """

    events: list[Event]
    lost: int


def fold(
    cluster: str,
    node: str,
    body: bytes,
    now: datetime,
    redact_name: Callable[[str], str] = str,
) -> Folded:
    """The events of a batch of lines.

    Args:
        cluster: The node's cluster.
        node: NodeName of the sender: lines of others are garbled ones.
        body: The lines.
        now: Time of day.
        redact_name: Takes secrets out of a step's name, which is its user's to choose.
    """
    latest_us = micros(now + _AHEAD)
    starts: list[Event] = []
    ends: list[Event] = []
    gaps: list[Event] = []
    tasks: dict[tuple[int, str, int], dict[int, NodeLine]] = {}
    garbled, odd = 0, hashlib.sha256()
    lost = 0
    for text in io.BytesIO(body):
        line = read_line(text.rstrip(b"\n"), node, latest_us)
        if line is None:
            if text != b"\n":
                garbled += 1
                odd.update(text)
            continue
        if line.lost:
            lost += line.lost
            gaps.append(_gap(cluster, node, LOST, line.lost, _short_digest([text]), now))
        if line.kind == "task":
            launch = (line.job, line.step, line.launched_us)
            tasks.setdefault(launch, {})[line.task] = line
        elif line.kind == "end":
            ends.append(_event(cluster, STEP_END, line, _end_of(line), now))
        elif line.kind == "start":
            starts.append(_event(cluster, STEP_START, line, _start_of(line, redact_name), now))
        elif line.kind != "smgr":  # that all tasks of a step were begun: its start said how many
            kind = NODE_PROLOG if line.kind == "prolog" else NODE_EPILOG
            starts.append(_event(cluster, kind, line, _job_of(line), now))
    exits = [_exit(cluster, some, now) for of in tasks.values() for some in _cut(of)]
    if garbled:
        gaps.append(_gap(cluster, node, GARBLED, garbled, odd.hexdigest()[:_DIGITS], now))
    return Folded([*starts, *exits, *ends, *gaps], lost + garbled)


def gap_event(
    cluster: str, gap: NodeGap, told_by: str, now: datetime, at: datetime | None = None
) -> Event:
    """The event of a gap.

    Args:
        cluster: The node's cluster.
        gap: What is missing.
        told_by: What is the same when the gap is told again, and differs for another one.
        now: Time of day.
        at: When it came about; ``now`` where nobody knows.
    """
    return Event(
        kind=NODE_GAP,
        cluster=cluster,
        key=f"{NODE_GAP}:{gap.node}:{gap.why}:{told_by}",
        at=at or now,
        seen_at=now,
        source=SOURCE,
        body=gap,
    )


def flaw_of(event: Event) -> str:
    """Why an event of one of these kinds cannot be one that this module made; "" if it can."""
    body = event.body
    launch = isinstance(body, Launch)
    if isinstance(body, Launch | NodeJob) and not 0 < body.job_id <= MAX_JOB_ID:
        return "its job id is none"
    if launch and (STEP.fullmatch(body.step) is None or body.launched_us < OLDEST_US):
        return "its step is none"
    if isinstance(body, NodeGap) and (
        body.why not in _WHY or not event.key.startswith(_stem(body))
    ):
        return "its key is not that of its gap"
    if not isinstance(body, NodeGap) and event.key != _key(event.kind, body, event.at):
        return "its key is not that of its launch"
    tasks = body.tasks if isinstance(body, TasksExited) else ()
    if len(tasks) > MOST_TASKS or not all(map(_is_bounded, (body, *tasks))):
        return "it holds what no node can tell"
    return ""


def _is_bounded(record: msgspec.Struct) -> bool:
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, int):
            least, most = bounds_of(name)
            if not least <= value <= most:
                return False
        if isinstance(value, str) and len(value) > _LONGEST_TEXT:
            return False
        if isinstance(value, datetime) and value.tzinfo is None:
            return False
    return True


def _stem(gap: NodeGap) -> str:
    return f"{NODE_GAP}:{gap.node}:{gap.why}:"


def _gap(cluster: str, node: str, why: str, lines: int, told_by: str, now: datetime) -> Event:
    return gap_event(cluster, NodeGap(node=node, why=why, lines=lines), told_by, now)


def _key(kind: str, body: Any, at: datetime) -> str:
    if isinstance(body, NodeJob):
        # A job's Prolog runs again when it is requeued.
        return f"{kind}:{body.job_id}:{body.node}:{micros(at)}"
    launch = f"{kind}:{body.job_id}:{body.step}:{body.node}:{body.launched_us}"
    if isinstance(body, TasksExited):
        ids = [f"{task.task}.{task.pid}".encode() for task in body.tasks]
        return f"{launch}:{_short_digest(ids)}"
    return launch


def _short_digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:_DIGITS]


def _event(cluster: str, kind: str, line: NodeLine, body: Any, now: datetime) -> Event:
    at = moment(line.at_us)
    return Event(
        kind=kind,
        cluster=cluster,
        key=_key(kind, body, at),
        at=at,
        seen_at=now,
        source=SOURCE,
        body=body,
    )


def _start_of(line: NodeLine, redact_name: Callable[[str], str]) -> StepStart:
    return StepStart(
        job_id=line.job,
        step=line.step,
        node=line.node,
        launched_us=line.launched_us,
        uid=line.uid or 0,
        gid=line.gid,
        tasks=line.tasks,
        cpus=line.cpus,
        memory_bytes=line.memory_bytes,
        name=redact_name(line.name),
        restarts=line.restarts,
        array_job_id=line.array_job,
        array_task=line.array_task,
    )


def _end_of(line: NodeLine) -> StepEnd:
    return StepEnd(
        job_id=line.job,
        step=line.step,
        node=line.node,
        launched_us=line.launched_us,
        tasks=line.tasks,
        max_rss_bytes=line.max_rss_bytes,
        peak_bytes=line.peak_bytes,
        cgroup_user_us=line.cgroup_user_us,
        cgroup_system_us=line.cgroup_system_us,
        cgroup_read_bytes=line.cgroup_read_bytes,
        cgroup_written_bytes=line.cgroup_written_bytes,
        lost=line.lost,
    )


def _job_of(line: NodeLine) -> NodeJob:
    return NodeJob(job_id=line.job, node=line.node, uid=line.uid or 0, gid=line.gid)


def _cut(tasks: dict[int, NodeLine]) -> Iterator[list[NodeLine]]:
    ordered = [tasks[task] for task in sorted(tasks)]
    for begin in range(0, len(ordered), MOST_TASKS):
        yield ordered[begin : begin + MOST_TASKS]


def _exit(cluster: str, lines: list[NodeLine], now: datetime) -> Event:
    first = lines[0]
    body = TasksExited(
        job_id=first.job,
        step=first.step,
        node=first.node,
        launched_us=first.launched_us,
        tasks=tuple(map(_task_of, lines)),
    )
    last = max(lines, key=lambda line: line.at_us)
    return _event(cluster, TASK_EXIT, last, body, now)


def _task_of(line: NodeLine) -> TaskUsage:
    return TaskUsage(
        task=line.task,
        pid=line.pid,
        status=line.status,
        ended_us=line.at_us,
        user_us=line.user_us,
        system_us=line.system_us,
        max_rss_bytes=line.max_rss_bytes,
        minor_faults=line.minor_faults,
        major_faults=line.major_faults,
        read_bytes=line.read_bytes,
        written_bytes=line.written_bytes,
        voluntary_switches=line.voluntary_switches,
        involuntary_switches=line.involuntary_switches,
        includes_epilog=bool(line.epilog),
    )
