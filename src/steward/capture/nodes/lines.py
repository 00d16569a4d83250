"""The lines that the SPANK plugin writes on compute nodes, read: each is hostile input.

One JSON object a line, keys of a letter or two, since a node writes one for
every task. A root user of a node may send anything, so every number has bounds,
those of what a machine can do: a sum of what is beyond them fits no database.
"""

import re
from typing import Annotated, Final, Literal

import msgspec

from steward.jobs.names import MAX_JOB_ID

LARGEST_LINE: Final = 4096
"""Of a line with its newline, in bytes."""
_SHORTEST_LINE: Final = 56
"""What a line cannot be without takes more: so a flood of shorter ones costs little."""
STEP: Final = re.compile(r"(?:[0-9]{1,10}(?:\+[0-9]{1,5})?|batch|extern|interactive)")
MOST_US: Final = 2**53
"""CPU time of a task or of a step on a node, µs: that of 1,024 CPUs in a hundred days."""
MOST_BYTES: Final = 2**56
"""Memory, or what was read or written: no node moves 64 PiB within a step."""
MOST_TIMES: Final = 2**48
"""Page faults or context switches: a billion a second for three days are less."""
MOST_ID: Final = 2**32 - 1
OLDEST_US: Final = 1_262_304_000_000_000
"""The year 2010: a node with an earlier clock has none."""
YOUNGEST_US: Final = 2**52
"""The year 2112."""

_Job = Annotated[int, msgspec.Meta(ge=1, le=MAX_JOB_ID)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=MOST_ID)]
_Cpu = Annotated[int, msgspec.Meta(ge=0, le=MOST_US)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)]
_Times = Annotated[int, msgspec.Meta(ge=0, le=MOST_TIMES)]
_Time = Annotated[int, msgspec.Meta(ge=OLDEST_US, le=YOUNGEST_US)]
_Short = Annotated[str, msgspec.Meta(max_length=64)]
_Key = msgspec.field


class NodeLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One line; what a kind does not say has its default.

    Attributes:
        version: Of the shape of lines.
        kind: ``start``, ``smgr``, ``task``, ``end``, ``prolog`` or ``epilog``.
        at_us: When it was written, µs since the epoch.
        job: The raw job id.
        node: NodeName.
        step: As Slurm writes it behind the dot.
        launched_us: When the step was launched there, µs since the epoch.
        lost: Lines that were lost before this one.
    """

    version: Literal[1] = _Key(name="v")
    kind: Literal["start", "smgr", "task", "end", "prolog", "epilog"] = _Key(name="k")
    at_us: _Time = _Key(name="t")
    job: _Job = _Key(name="j")
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
    array_job: Annotated[int, msgspec.Meta(ge=0, le=MAX_JOB_ID)] = _Key(name="aj", default=0)
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
    epilog: Literal[0, 1] = _Key(name="ep", default=0)

    peak_bytes: _Bytes | None = _Key(name="peak", default=None)
    cgroup_user_us: _Cpu | None = _Key(name="cut", default=None)
    cgroup_system_us: _Cpu | None = _Key(name="csy", default=None)
    cgroup_read_bytes: _Bytes | None = _Key(name="crd", default=None)
    cgroup_written_bytes: _Bytes | None = _Key(name="cwr", default=None)


def bounds_of(name: str) -> tuple[int, int]:
    """The least and the most that a number of an event made of such lines can be.

    Args:
        name: Of the field, as ``steward.core.usage`` has it.
    """
    if name in ("launched_us", "ended_us"):
        return OLDEST_US, YOUNGEST_US
    if name.endswith("_us") or name == "lines":
        return 0, MOST_US
    if name.endswith("_bytes"):
        return 0, MOST_BYTES
    return 0, MOST_TIMES if name.endswith(("_faults", "_switches")) else MOST_ID


_decoder = msgspec.json.Decoder(NodeLine)
_OF_STEPS: Final = ("start", "smgr", "task", "end")
_OF_USERS: Final = ("start", "prolog", "epilog")
_BEGIN: Final = b'{"v":'


def read_line(line: bytes, node: str, latest_us: int) -> NodeLine | None:
    """A line's facts; None for what is no line of this node's.

    Where a full disk cut a line short the next one stands right behind it, and is found.

    Args:
        line: Without its newline.
        node: NodeName of the one that sent it.
        latest_us: No line can be younger, µs since the epoch.
    """
    if len(line) < _SHORTEST_LINE:
        return None
    found = _decoded(line)
    if found is None and (begin := line.rfind(_BEGIN)) > 0:
        found = _decoded(line[begin:])
    if found is None or found.node != node or found.at_us > latest_us:
        return None
    if found.kind in _OF_USERS and found.uid is None:
        return None
    if found.kind in _OF_STEPS:
        known = OLDEST_US <= found.launched_us <= latest_us
        return found if known and STEP.fullmatch(found.step) else None
    return found


def _decoded(line: bytes) -> NodeLine | None:
    if len(line) >= LARGEST_LINE:
        return None
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
