"""Reads what ``scontrol -a -o show node|partition|reservation`` writes, one record a line.

The text form escapes nothing. A node's reason, comment and extra come last, so that
nothing in them can pass for its state; where they make the end of the reason doubtful the
answer says so, and :class:`steward.slurm.cluster.Machine` asks in a form that cannot be
misread.
"""

import re
from datetime import datetime
from typing import Any, Final

import msgspec

from steward.slurm.node_states import UNKNOWN, format_node_state, parse_node_state
from steward.slurm.users import People
from steward.slurm.values import (
    clear_null,
    convert_fields,
    join_lines,
    parse_moment,
    parse_number,
    split_fields,
    split_list,
    split_records,
    to_epoch,
)

_TEXTS: Final = re.compile(r"\s(Reason|Comment|Extra)=")
_WHEN: Final = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d|Unknown|None"
# Who gave the reason, and when: behind its first line. Further lines, indented, may follow.
_GIVEN: Final = re.compile(rf" ?\[([^\[\]@\s]*)@({_WHEN})\](?=$| Comment=| Extra=|\s{{7}})")
_AFTER: Final = re.compile(r" (?:Comment|Extra)=")
_USER: Final = re.compile(r"(.*)\((\d{1,10})\)")
_MIB: Final = 1024 * 1024

# Slurm's words where its own programs, and pyslurm, call the same thing otherwise.
_NODE_NAMES: Final = {
    "NodeName": "name",
    "CPUAlloc": "alloc_cpus",
    "CPUEfctv": "effective_cpus",
    "CPUTot": "cpus",
    "CPULoad": "cpu_load",
    "CoresPerSocket": "cores",
    "CoreSpecCount": "core_spec_cnt",
    "CPUSpecList": "cpu_spec_list",
    "AvailableFeatures": "features",
    "ActiveFeatures": "features_active",
    "NodeHostName": "node_hostname",
    "OS": "os",
    "AllocMem": "alloc_mem",
    "ThreadsPerCore": "threads",
    "MCS_label": "mcs_label",
    "CfgTRES": "tres_fmt_str",
    "AllocTRES": "tres_used",
    "LastBusyTime": "last_busy",
    "ReservationName": "reservation",
}
_ALWAYS: Final[dict[str, Any]] = {"core_spec_cnt": None, "cpu_spec_list": None}
"""Fields that scontrol leaves out where they are empty."""
_LOAD: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_PARTITION_NAMES: Final = {
    "PartitionName": "name",
    "QoS": "qos_char",
    "TRES": "tres_fmt_str",
    "TRESBillingWeights": "billing_weights_str",
    "TotalCPUs": "total_cpus",
    "LLN": "lln",
}
_RESERVATION_NAMES: Final = {
    "ReservationName": "name",
    "Nodes": "node_list",
    "NodeCnt": "node_cnt",
    "CoreCnt": "core_cnt",
    "PartitionName": "partition",
    "TRES": "tres_str",
    "QOS": "qos",
}


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm shows of a node.

    Attributes:
        name: NodeName.
        base: Its state without flags.
        flags: Its state's flags, in the alphabet's order.
        state: Both in one form, see :func:`steward.slurm.node_states.format_node_state`.
        reason: Why it is as it is, "" for none; hostile text on one line.
        reason_user: Who said so, by Slurm.
        reason_uid: The same, where the name is known here.
        reason_at: When, UTC.
        partitions: The partitions that it is in.
        cpus: How many it has.
        cpus_allocated: How many jobs have.
        memory_bytes: What it has for jobs.
        features: Its available features.
        gres: As Slurm writes them; "" for none.
        boot_at: When the host booted, as its slurmd said.
        slurmd_started_at: When slurmd started.
        address: NodeAddr.
        hostname: NodeHostName.
        version: slurmd's version; "" before it has registered.
        details: Everything that Slurm shows, in snake_case; times as seconds since the epoch.
    """

    name: str
    base: str
    flags: tuple[str, ...] = ()
    state: str = ""
    reason: str = ""
    reason_user: str = ""
    reason_uid: int | None = None
    reason_at: datetime | None = None
    partitions: tuple[str, ...] = ()
    cpus: int = 0
    cpus_allocated: int = 0
    memory_bytes: int = 0
    features: tuple[str, ...] = ()
    gres: str = ""
    boot_at: datetime | None = None
    slurmd_started_at: datetime | None = None
    address: str = ""
    hostname: str = ""
    version: str = ""
    details: dict[str, Any] = msgspec.field(default_factory=dict)


class PartitionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm shows of a partition.

    Attributes:
        name: PartitionName.
        state: ``UP``, ``DOWN``, ``DRAIN``, ``INACTIVE``.
        nodes: Its node list; "" for none.
        details: Everything that Slurm shows.
    """

    name: str
    state: str
    nodes: str = ""
    details: dict[str, Any] = msgspec.field(default_factory=dict)


class ReservationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm shows of a reservation.

    Attributes:
        name: ReservationName.
        state: ``ACTIVE`` or ``INACTIVE``.
        nodes: Its node list; "" for none.
        start: When it begins, UTC.
        end: When it ends, UTC.
        users: Whose it is, among others.
        accounts: Under which accounts it may be used.
        partition: The partition that it is of; "" for none.
        flags: Its flags.
        details: Everything that Slurm shows.
    """

    name: str
    state: str
    nodes: str = ""
    start: datetime | None = None
    end: datetime | None = None
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    partition: str = ""
    flags: tuple[str, ...] = ()
    details: dict[str, Any] = msgspec.field(default_factory=dict)


class Reason(msgspec.Struct, frozen=True):
    """Why a node is as it is, who said so, and when.

    Attributes:
        text: On one line; "" for none.
        user: By Slurm's name for them.
        uid: The same, where it is known.
        at: When, UTC.
    """

    text: str = ""
    user: str = ""
    uid: int | None = None
    at: datetime | None = None


class Shown(msgspec.Struct, frozen=True):
    """A record of a text, and how far that can be trusted.

    Attributes:
        node: What it says.
        is_sure: Whether no text of a node before it can have written it.
        has_sure_reason: Whether it is clear where its reason ends.
    """

    node: NodeRecord
    is_sure: bool = True
    has_sure_reason: bool = True


class NodeReader:
    """Reads the same nodes again and again: a line that was there the last time is known.

    Ten thousand lines take seconds to read; nearly all of them are those of a second ago.
    The records come without ``details``, for they are kept.

    Args:
        people: Who looks up who gave the reasons.
    """

    def __init__(self, people: People) -> None:
        self._people = people
        self._known: dict[str, tuple[NodeRecord, bool, bool]] = {}

    def nodes(self, out: bytes) -> list[Shown]:
        """As :func:`nodes`."""
        before, self._known = self._known, {}
        found: list[Shown] = []
        is_sure = True
        for line in split_records(out, "NodeName="):
            read = before.get(line) or self._read(line)
            node, has_sure_reason, is_plain = read
            if node.reason_uid is not None or not node.reason_user:
                # Else the user's name may be known the next time.
                self._known[line] = read
            found.append(Shown(node, is_sure, has_sure_reason))
            is_sure &= is_plain
        return found

    def _read(self, line: str) -> tuple[NodeRecord, bool, bool]:
        node, has_sure_reason = _node(line, self._people)
        return msgspec.structs.replace(node, details={}), has_sure_reason, _is_plain(line)


def _is_plain(line: str) -> bool:
    """Whether all of a line is Slurm's own; where it is not, it may speak of all that follow."""
    return _AFTER.search(line) is None and "\n" not in line and " State=" in line


def nodes(out: bytes, people: People) -> list[Shown]:
    """The nodes that a text shows; a name may be there twice if somebody's comment says so.

    Args:
        out: What ``scontrol -a -o show node`` wrote.
        people: Who looks up who gave the reasons.
    """
    found: list[Shown] = []
    is_sure = True
    for line in split_records(out, "NodeName="):
        node, has_sure_reason = _node(line, people)
        found.append(Shown(node, is_sure, has_sure_reason))
        is_sure &= _is_plain(line)
    return found


def powered_down(name: str) -> NodeRecord:
    """A node that Slurm does not show while it is off: nothing else is known of it."""
    base, flags = UNKNOWN, ("CLOUD", "POWERED_DOWN")
    state = format_node_state(base, flags)
    return NodeRecord(
        name=name, base=base, flags=flags, state=state, details={"name": name, "state": state}
    )


def partitions(out: bytes) -> dict[str, PartitionRecord]:
    """The partitions that ``scontrol -a -o show partition`` wrote."""
    found: dict[str, PartitionRecord] = {}
    for line in split_records(out, "PartitionName="):
        fields = dict(split_fields(line))
        name = fields["PartitionName"]
        found[name] = PartitionRecord(
            name=name,
            state=fields.get("State", ""),
            nodes=clear_null(fields.get("Nodes", "")),
            details=convert_fields(fields, _PARTITION_NAMES),
        )
    return found


def reservations(out: bytes) -> dict[str, ReservationRecord]:
    """The reservations that ``scontrol -a -o show reservation`` wrote; {} for none."""
    found: dict[str, ReservationRecord] = {}
    for line in split_records(out, "ReservationName="):
        fields = dict(split_fields(line))
        name = fields["ReservationName"]
        found[name] = ReservationRecord(
            name=name,
            state=fields.get("State", ""),
            nodes=clear_null(fields.get("Nodes", "")),
            start=parse_moment(fields.get("StartTime", "")),
            end=parse_moment(fields.get("EndTime", "")),
            users=split_list(fields.get("Users", "")),
            accounts=split_list(fields.get("Accounts", "")),
            partition=clear_null(fields.get("PartitionName", "")),
            flags=split_list(fields.get("Flags", "")),
            details=convert_fields(fields, _RESERVATION_NAMES),
        )
    return found


def with_reason(node: NodeRecord, reason: Reason) -> NodeRecord:
    """The record with a reason, and who gave it."""
    details = {
        "reason": reason.text or None,
        "reason_time": to_epoch(reason.at),
        "reason_uid": reason.uid,
        "reason_user": reason.user or None,
    }
    return msgspec.structs.replace(
        node,
        reason=reason.text,
        reason_user=reason.user,
        reason_uid=reason.uid,
        reason_at=reason.at,
        details=node.details | details,
    )


def reason_of_sinfo(user: str, at: str, text: str) -> Reason:
    """A reason as sinfo's ``%U``, ``%H`` and ``%E`` show it; nothing for ``none``."""
    match = _USER.fullmatch(user.strip())
    if match is None:
        return Reason()
    return Reason(join_lines(text), match[1], int(match[2]), parse_moment(at.strip()))


def _node(line: str, people: People) -> tuple[NodeRecord, bool]:
    texts = _TEXTS.search(line)
    fields = dict(split_fields(line[: texts.start()] if texts else line))
    base, flags = parse_node_state(fields.get("State", ""))
    state = format_node_state(base, flags)
    tail = line[texts.start() :] if texts else ""
    reason, has_sure_reason = _reason(tail, people)
    node = NodeRecord(
        name=fields["NodeName"],
        base=base,
        flags=flags,
        state=state,
        partitions=split_list(fields.get("Partitions", "")),
        cpus=parse_number(fields.get("CPUTot", "")) or 0,
        cpus_allocated=parse_number(fields.get("CPUAlloc", "")) or 0,
        memory_bytes=(parse_number(fields.get("RealMemory", "")) or 0) * _MIB,
        features=split_list(fields.get("AvailableFeatures", "")),
        gres=clear_null(fields.get("Gres", "")),
        boot_at=parse_moment(fields.get("BootTime", "")),
        slurmd_started_at=parse_moment(fields.get("SlurmdStartTime", "")),
        address=fields.get("NodeAddr", ""),
        hostname=fields.get("NodeHostName", ""),
        version=clear_null(fields.get("Version", "")),
        details=_ALWAYS
        | convert_fields(fields, _NODE_NAMES)
        | {"state": state, "cpu_load": _hundredths(fields.get("CPULoad", ""))}
        | _remarks(tail),
    )
    return with_reason(node, reason), has_sure_reason


def _hundredths(load: str) -> int | None:
    """A load as Slurm's own record has it, in hundredths; None where slurmd told none."""
    return round(100 * float(load)) if _LOAD.fullmatch(load) else None


def _reason(tail: str, people: People) -> tuple[Reason, bool]:
    """The reason in what stands behind Slurm's own words, and whether it surely is that.

    It ends with who gave it and when; but the same may stand in the reason itself, or in
    the comment behind it.
    """
    if not tail[1:].startswith("Reason="):
        return Reason(), True
    text = tail[1:].removeprefix("Reason=")
    ends = list(_GIVEN.finditer(text))
    if not ends:
        return Reason(join_lines(_AFTER.split(text)[0].rstrip())), True
    first, after = text[: ends[0].start()], text[ends[0].end() :]
    more = " ".join(_AFTER.split(after, maxsplit=1)[0].split())
    is_sure = len(ends) == 1 and not more and _AFTER.search(first) is None
    user = ends[0][1]
    given = Reason(
        join_lines(f"{first} {more}" if more else first),
        user,
        _uid(user, people),
        parse_moment(ends[0][2]),
    )
    return given, is_sure


def _uid(user: str, people: People) -> int | None:
    """The uid of whom Slurm names; a number where it could not."""
    # 22.05 writes this for every uid that does not resolve, and nobody gives reasons.
    if user == "nobody":
        return None
    return int(user) if re.fullmatch(r"[0-9]{1,10}", user) else people.uid(user)


def _remarks(tail: str) -> dict[str, Any]:
    """Comment and extra, as far as they can be told from each other."""
    found: dict[str, Any] = {}
    parts = re.split(r" (Comment|Extra)=", tail)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        found[name.lower()] = join_lines(text)
    return found
