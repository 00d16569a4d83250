"""Parser for ``scontrol -a -o show node``, ``partition`` and ``reservation``: one record per line.

:func:`parse_nodes`, :func:`parse_partitions` and :func:`parse_reservations` return typed records;
:class:`NodeReader` parses repeated node listings faster.

The text form escapes nothing. A node's reason, comment and extra come last, so they cannot be
mistaken for its state. If they leave the end of the reason uncertain, the result says so, and
:class:`steward.slurm.cluster.ClusterQueries` asks again in an unambiguous form.
"""

import re
from datetime import datetime
from typing import Any, Final

import msgspec

from steward.slurm.node_states import UNKNOWN, format_node_state, parse_node_state
from steward.slurm.users import NameResolver
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
# User and time of a reason, at the end of its first line; further lines are indented.
_REASON_AUTHOR: Final = re.compile(rf" ?\[([^\[\]@\s]*)@({_WHEN})\](?=$| Comment=| Extra=|\s{{7}})")
_REMARK: Final = re.compile(r" (?:Comment|Extra)=")
_USER: Final = re.compile(r"(.*)\((\d{1,10})\)")
_MIB: Final = 1024 * 1024

# Field names of Slurm's own programs and of pyslurm that are not simply snake_case.
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
_OMITTED_FIELDS: Final[dict[str, Any]] = {"core_spec_cnt": None, "cpu_spec_list": None}
"""Fields that scontrol omits when empty."""
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
    """Node as Slurm shows it.

    Attributes:
        name: NodeName.
        base: Base state, without flags.
        flags: State flags, sorted.
        state: Base and flags as one text, see :func:`steward.slurm.node_states.format_node_state`.
        reason: Reason of the state, on one line; "" if none. Untrusted text.
        reason_user: User who gave the reason, as Slurm names them.
        reason_uid: Uid of that user, if it resolves here.
        reason_at: Time of the reason, UTC.
        partitions: Names of its partitions.
        cpus: Number of CPUs.
        cpus_allocated: Number of CPUs allocated to jobs.
        memory_bytes: RealMemory in bytes.
        features: Available features.
        gres: GRES as Slurm writes them; "" if none.
        boot_at: Boot time of the host, as slurmd reported it.
        slurmd_started_at: Start time of slurmd.
        address: NodeAddr.
        hostname: NodeHostName.
        version: slurmd's version; "" before it registers.
        details: All fields that Slurm shows, in snake_case; times as seconds since the epoch.
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
    """Partition as Slurm shows it.

    Attributes:
        name: PartitionName.
        state: ``UP``, ``DOWN``, ``DRAIN``, ``INACTIVE``.
        nodes: Its node list; "" if empty.
        details: All fields that Slurm shows, in snake_case.
    """

    name: str
    state: str
    nodes: str = ""
    details: dict[str, Any] = msgspec.field(default_factory=dict)


class ReservationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Reservation as Slurm shows it.

    Attributes:
        name: ReservationName.
        state: ``ACTIVE`` or ``INACTIVE``.
        nodes: Its node list; "" if empty.
        start: Start time, UTC.
        end: End time, UTC.
        users: Users who may use it.
        accounts: Accounts whose jobs may use it.
        partition: Its partition; "" if none.
        flags: Its flags.
        details: All fields that Slurm shows, in snake_case.
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
    """Reason of a node's state, with user and time.

    Attributes:
        text: The reason on one line; "" if none.
        user: User who gave it, as Slurm names them.
        uid: Uid of that user, if known.
        at: Time, UTC.
    """

    text: str = ""
    user: str = ""
    uid: int | None = None
    at: datetime | None = None


class ParsedNode(msgspec.Struct, frozen=True):
    """Parsed node record and how far to trust it.

    Attributes:
        node: The record.
        is_sure: False if text of an earlier node may have forged this record.
        has_sure_reason: Whether the end of the reason is certain.
    """

    node: NodeRecord
    is_sure: bool = True
    has_sure_reason: bool = True


class NodeReader:
    """Parser for repeated node listings that skips lines unchanged since the last one.

    Parsing ten thousand lines takes seconds, and nearly all are the same a second later. Records
    are cached, so they come without ``details``.

    Args:
        resolver: Resolves the users who gave reasons.
    """

    def __init__(self, resolver: NameResolver) -> None:
        self._resolver = resolver
        self._cache: dict[str, tuple[NodeRecord, bool, bool]] = {}

    def parse_nodes(self, out: bytes) -> list[ParsedNode]:
        """Parse a listing as :func:`parse_nodes` does."""
        cached, self._cache = self._cache, {}
        nodes: list[ParsedNode] = []
        is_sure = True
        for line in split_records(out, "NodeName="):
            entry = cached.get(line) or self._parse_line(line)
            node, has_sure_reason, is_plain = entry
            if node.reason_uid is not None or not node.reason_user:
                # An unresolved user name may resolve the next time.
                self._cache[line] = entry
            nodes.append(ParsedNode(node, is_sure, has_sure_reason))
            is_sure &= is_plain
        return nodes

    def _parse_line(self, line: str) -> tuple[NodeRecord, bool, bool]:
        """Parse a line into a record without ``details``."""
        node, has_sure_reason = _parse_node(line, self._resolver)
        return msgspec.structs.replace(node, details={}), has_sure_reason, _is_plain(line)


def _is_plain(line: str) -> bool:
    """Return True if Slurm wrote the whole line.

    Free text in it may forge the lines that follow.
    """
    return _REMARK.search(line) is None and "\n" not in line and " State=" in line


def parse_nodes(out: bytes, resolver: NameResolver) -> list[ParsedNode]:
    """Parse nodes. A name occurs twice if a comment contains a line that looks like a node.

    Args:
        out: Output of ``scontrol -a -o show node``.
        resolver: Resolves the users who gave reasons.
    """
    nodes: list[ParsedNode] = []
    is_sure = True
    for line in split_records(out, "NodeName="):
        node, has_sure_reason = _parse_node(line, resolver)
        nodes.append(ParsedNode(node, is_sure, has_sure_reason))
        is_sure &= _is_plain(line)
    return nodes


def make_powered_down_node(name: str) -> NodeRecord:
    """Return the record of a node that Slurm hides while it is powered down."""
    base, flags = UNKNOWN, ("CLOUD", "POWERED_DOWN")
    state = format_node_state(base, flags)
    return NodeRecord(
        name=name, base=base, flags=flags, state=state, details={"name": name, "state": state}
    )


def parse_partitions(out: bytes) -> dict[str, PartitionRecord]:
    """Parse ``scontrol -a -o show partition`` into records by name."""
    partitions: dict[str, PartitionRecord] = {}
    for line in split_records(out, "PartitionName="):
        fields = dict(split_fields(line))
        name = fields["PartitionName"]
        partitions[name] = PartitionRecord(
            name=name,
            state=fields.get("State", ""),
            nodes=clear_null(fields.get("Nodes", "")),
            details=convert_fields(fields, _PARTITION_NAMES),
        )
    return partitions


def parse_reservations(out: bytes) -> dict[str, ReservationRecord]:
    """Parse ``scontrol -a -o show reservation`` into records by name; {} if there are none."""
    reservations: dict[str, ReservationRecord] = {}
    for line in split_records(out, "ReservationName="):
        fields = dict(split_fields(line))
        name = fields["ReservationName"]
        reservations[name] = ReservationRecord(
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
    return reservations


def replace_reason(node: NodeRecord, reason: Reason) -> NodeRecord:
    """Return a node record with its reason replaced."""
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


def parse_sinfo_reason(user: str, at: str, text: str) -> Reason:
    """Build a reason from sinfo's ``%U``, ``%H`` and ``%E``; empty for ``none``."""
    match = _USER.fullmatch(user.strip())
    if match is None:
        return Reason()
    return Reason(join_lines(text), match[1], int(match[2]), parse_moment(at.strip()))


def _parse_node(line: str, resolver: NameResolver) -> tuple[NodeRecord, bool]:
    """Parse a node's record; also return True if the end of its reason is certain."""
    texts = _TEXTS.search(line)
    fields = dict(split_fields(line[: texts.start()] if texts else line))
    base, flags = parse_node_state(fields.get("State", ""))
    state = format_node_state(base, flags)
    tail = line[texts.start() :] if texts else ""
    reason, has_sure_reason = _parse_reason(tail, resolver)
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
        details=_OMITTED_FIELDS
        | convert_fields(fields, _NODE_NAMES)
        | {"state": state, "cpu_load": _parse_load(fields.get("CPULoad", ""))}
        | _parse_remarks(tail),
    )
    return replace_reason(node, reason), has_sure_reason


def _parse_load(load: str) -> int | None:
    """Convert CPULoad to hundredths, as in Slurm's own record; None if slurmd reported none."""
    return round(100 * float(load)) if _LOAD.fullmatch(load) else None


def _parse_reason(tail: str, resolver: NameResolver) -> tuple[Reason, bool]:
    """Parse the reason after a node's own fields; also return True if its end is certain.

    A reason ends with its user and time. The reason or the comment after it may contain the same
    pattern.
    """
    if not tail[1:].startswith("Reason="):
        return Reason(), True
    text = tail[1:].removeprefix("Reason=")
    ends = list(_REASON_AUTHOR.finditer(text))
    if not ends:
        return Reason(join_lines(_REMARK.split(text)[0].rstrip())), True
    first_line, rest = text[: ends[0].start()], text[ends[0].end() :]
    continuation = " ".join(_REMARK.split(rest, maxsplit=1)[0].split())
    is_sure = len(ends) == 1 and not continuation and _REMARK.search(first_line) is None
    user = ends[0][1]
    reason = Reason(
        join_lines(f"{first_line} {continuation}" if continuation else first_line),
        user,
        _resolve_reason_uid(user, resolver),
        parse_moment(ends[0][2]),
    )
    return reason, is_sure


def _resolve_reason_uid(user: str, resolver: NameResolver) -> int | None:
    """Return the uid of a user as Slurm names them; Slurm prints the number if unresolved."""
    # Slurm 22.05 prints "nobody" for every unresolved uid, and nobody gives reasons.
    if user == "nobody":
        return None
    return int(user) if re.fullmatch(r"[0-9]{1,10}", user) else resolver.uid(user)


def _parse_remarks(tail: str) -> dict[str, Any]:
    """Return comment and extra, as far as their boundary is certain."""
    remarks: dict[str, Any] = {}
    parts = re.split(r" (Comment|Extra)=", tail)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        remarks[name.lower()] = join_lines(text)
    return remarks
