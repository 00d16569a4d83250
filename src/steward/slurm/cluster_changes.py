"""Node, partition and reservation changes through ``scontrol create``, ``update`` and ``delete``.

:class:`ClusterChanges` carries out the changes; :func:`normalize_node_changes` and
:func:`normalize_partition_changes` translate key names in advance, for callers that check
permissions.

``scontrol update nodename=good,bad`` fails and yet changes ``good``. So node names are validated
before anything changes, and the result is reported for each node.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal, get_args

from steward.slurm import nodelists
from steward.slurm.cluster import ClusterQueries
from steward.slurm.cluster_records import NodeRecord
from steward.slurm.commands import COMMAND_TIMEOUT_S, CommandRunner
from steward.slurm.errors import (
    SlurmError,
    SlurmRefused,
    SlurmUnavailable,
    UnknownPartition,
    UnknownReservation,
    WrongUpdate,
)
from steward.slurm.settings import ClusterSettings
from steward.slurm.users import NameResolver

_IsDone = Callable[[NodeRecord], bool]
NodeErrors = dict[str, str]
"""Slurm's error by node name; "" for a node that has the requested state."""

NodeChange = Literal[
    "CANCEL_REBOOT",
    "DOWN",
    "DRAIN",
    "FAIL",
    "FUTURE",
    "IDLE",
    "POWER_DOWN",
    "POWER_DOWN_ASAP",
    "POWER_DOWN_FORCE",
    "POWER_UP",
    "RESUME",
    "UNDRAIN",
]
CHANGES: Final[tuple[str, ...]] = get_args(NodeChange)
_WITH_REASON: Final = frozenset({"DOWN", "DRAIN", "FAIL"})

# Slurm's keys that may be changed. Other keys are rejected: they could name another target.
_NODE_KEYS: Final = (
    *("ActiveFeatures", "AvailableFeatures", "Comment", "CpuBind", "Extra", "Gres"),
    *("InstanceId", "InstanceType", "NodeAddr", "NodeHostName", "Reason", "ResumeAfter"),
    *("State", "Topology", "Weight"),
)
_PARTITION_KEYS: Final = (
    *("AllocNodes", "AllowAccounts", "AllowGroups", "AllowQos", "Alternate", "CpuBind"),
    *("Default", "DefaultTime", "DefMemPerCPU", "DefMemPerNode", "DenyAccounts", "DenyQos"),
    *("DisableRootJobs", "Exclusive", "ExclusiveTopo", "ExclusiveUser", "GraceTime", "Hidden"),
    *("JobDefaults", "LLN", "MaxCPUsPerNode", "MaxCPUsPerSocket", "MaxMemPerCPU"),
    *("MaxMemPerNode", "MaxNodes", "MaxTime", "MinNodes", "Nodes", "OverSubscribe"),
    *("OverTimeLimit", "PowerDownOnIdle", "PreemptMode", "PriorityJobFactor", "PriorityTier"),
    *("QoS", "ReqResv", "ResumeTimeout", "RootOnly", "State", "SuspendTime", "SuspendTimeout"),
    *("Topology", "TRESBillingWeights"),
)
_RESERVATION_KEYS: Final = (
    *("Accounts", "AllowedPartitions", "BurstBuffer", "Comment", "Duration", "EndTime"),
    *("Features", "Flags", "Groups", "Licenses", "MaxStartDelay", "NodeCnt", "Nodes"),
    *("PartitionName", "QOS", "StartTime", "TRES", "Users"),
)
# Other spellings of keys, from pyslurm and Steward's records, without underscores.
_OTHER_NAMES: Final = {
    "nodestate": "State",
    "features": "AvailableFeatures",
    "featuresact": "ActiveFeatures",
    "featuresactive": "ActiveFeatures",
    "stateup": "State",
    "nodelist": "Nodes",
    "nodecnt": "NodeCnt",
    "partition": "PartitionName",
    "partitions": "AllowedPartitions",
}
_NAME: Final = re.compile(r"[^\s,=\"'\\;|&()\[\]<>]{1,127}")
_MESSAGE_PREFIX: Final = re.compile(
    r"(?:^|(?<=; ))(?:slurm_update error: (?:No error$)?|scontrol: error: )"
)
_MAX_VALUE_CHARS: Final = 4096
_MAX_REASON_CHARS: Final = 400
_UNKNOWN_RESERVATION: Final = re.compile(r"Requested reservation is invalid|Reservation \S+ not")
_UNKNOWN_PARTITION: Final = re.compile(r"Invalid partition name")
_INVALID_CHANGE: Final = re.compile(
    r"not supported|Invalid|Acceptable|Error parsing|Bad |not a valid|Duplicate reservation|"
    r"nodes are busy|Request aborted|No changes|Unable to parse",
    re.IGNORECASE,
)


class ClusterChanges:
    """Client that changes nodes, partitions and reservations of one cluster.

    Needs SlurmUser, root or an administrator.

    Args:
        cluster: Cluster name in Steward's configuration.
        settings: Where Slurm's commands are and how to run them.
        timeout_s: Time-out of each command, in seconds.
    """

    def __init__(
        self, cluster: str, settings: ClusterSettings, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> None:
        self._cluster = cluster
        self._queries = ClusterQueries(cluster, settings, timeout_s)
        self._commands = CommandRunner(cluster, settings, timeout_s)
        self._resolver = NameResolver()

    def set_state(self, nodes: Sequence[str], state: NodeChange, reason: str = "") -> NodeErrors:
        """Set the state of nodes: down, drain, resume and so on.

        Args:
            nodes: Node names.
            state: The new state, in Slurm's word.
            reason: Reason, required for ``DOWN``, ``DRAIN`` and ``FAIL``. See :func:`clean_reason`.

        Returns:
            Slurm's error for each node, or "". A node that already has the state counts as
            changed.

        Raises:
            UnknownNode: Slurm lacks at least one node; nothing is changed.
            WrongUpdate: The state does not exist, or the reason is missing.
            SlurmRefused: Slurm denies permission; nothing is changed.
            SlurmUnavailable: slurmctld does not answer; some nodes may be changed.
        """
        if state not in CHANGES:
            raise WrongUpdate(f"cannot set the state {state!r}: use one of {', '.join(CHANGES)}")
        cleaned_reason = clean_reason(reason)
        if state in _WITH_REASON and not cleaned_reason:
            raise WrongUpdate(f"state {state} requires a reason: give one")
        arguments = [f"State={state}", *([f"Reason={cleaned_reason}"] if cleaned_reason else [])]
        return self._update(nodes, arguments, lambda node: _has_state(node, state, cleaned_reason))

    def update_nodes(self, nodes: Sequence[str], changes: Mapping[str, Any]) -> NodeErrors:
        """Change properties of nodes, such as weight, features or comment.

        Args:
            nodes: Node names.
            changes: Changes, such as ``{"weight": 10}``; keys in snake_case or in Slurm's spelling.

        Returns:
            Slurm's error for each node, as :meth:`set_state`.

        Raises:
            SlurmError: As :meth:`set_state`.
        """
        return self._update(
            nodes, _format_changes(changes, _NODE_KEYS, "a node"), lambda _node: False
        )

    def create_reservation(
        self,
        name: str,
        nodes: Sequence[str],
        *,
        start: datetime | None = None,
        end: datetime | None = None,
        duration: str = "infinite",
        users: Sequence[str] = (),
        accounts: Sequence[str] = (),
        flags: Sequence[str] = (),
    ) -> None:
        """Create a reservation of nodes.

        Args:
            name: Reservation name.
            nodes: Node names.
            start: Start time; None for now.
            end: End time; None to use ``duration``.
            duration: Minutes, ``D-HH:MM:SS`` or ``infinite``.
            users: Users who may use it; either users or accounts are required.
            accounts: Accounts whose jobs may use it.
            flags: ``MAINT``, ``IGNORE_JOBS`` and so on.

        Raises:
            UnknownNode: Slurm lacks at least one node.
            WrongUpdate: The reservation is invalid, or its name is taken.
            SlurmRefused: Slurm denies permission.
            SlurmError: The reservation failed for another reason.
        """
        self._queries.node_names(",".join(nodes))
        changes: dict[str, Any] = {
            "StartTime": "now" if start is None else _format_moment(start),
            **({"Duration": duration} if end is None else {"EndTime": _format_moment(end)}),
            "Nodes": nodelists.fold_nodelist(nodes),
            "Users": self._require_users(users),
            "Accounts": list(accounts),
            "Flags": list(flags),
        }
        given = {key: value for key, value in changes.items() if value}
        arguments = _format_changes(given, _RESERVATION_KEYS, "a reservation")
        self._run("create", "reservation", f"ReservationName={_validate_name(name)}", *arguments)

    def update_reservation(self, name: str, changes: Mapping[str, Any]) -> None:
        """Change a reservation. ``nodes`` replaces its whole node list.

        Raises:
            UnknownReservation: No reservation has this name.
            SlurmError: As :meth:`create_reservation`.
        """
        checked = dict(changes)
        for key in checked.keys() & {"users", "Users"}:
            checked[key] = self._require_users(_split_value(checked[key]))
        arguments = _format_changes(checked, _RESERVATION_KEYS, "a reservation")
        self._run("update", f"ReservationName={_validate_name(name)}", *arguments)

    def set_reservation_nodes(self, name: str, nodes: Sequence[str]) -> None:
        """Replace the node list of a reservation.

        Raises:
            SlurmError: As :meth:`update_reservation`.
        """
        self._queries.node_names(",".join(nodes))
        self.update_reservation(name, {"Nodes": nodelists.fold_nodelist(nodes)})

    def delete_reservation(self, name: str) -> None:
        """Delete a reservation.

        Raises:
            UnknownReservation: No reservation has this name.
            SlurmError: Jobs that use it prevent its deletion.
        """
        self._run("delete", f"ReservationName={_validate_name(name, strict=False)}")

    def update_partition(self, name: str, changes: Mapping[str, Any]) -> None:
        """Change the properties of a partition.

        Raises:
            UnknownPartition: No partition has this name.
            WrongUpdate: A value is invalid.
            SlurmError: Slurm does not answer, or denies permission.
        """
        arguments = _format_changes(changes, _PARTITION_KEYS, "a partition")
        self._run("update", f"PartitionName={_validate_name(name)}", *arguments)

    def _update(
        self, nodes: Sequence[str], arguments: Sequence[str], is_done: _IsDone
    ) -> NodeErrors:
        """Update nodes together; after an error, one by one."""
        names = list(dict.fromkeys(nodes))
        found_nodes = self._queries.nodes(",".join(names))
        try:
            self._run("update", f"NodeName={nodelists.fold_nodelist(found_nodes)}", *arguments)
        except (SlurmRefused, SlurmUnavailable):
            raise
        except SlurmError as error:
            # After an error some of several nodes may be changed all the same.
            return self._update_one_by_one(list(found_nodes), arguments, is_done, error)
        return dict.fromkeys(found_nodes, "")

    def _update_one_by_one(
        self, names: Sequence[str], arguments: Sequence[str], is_done: _IsDone, error: SlurmError
    ) -> NodeErrors:
        """Update each node that is not yet in the requested state; return the error of each."""
        nodes = self._queries.nodes(",".join(names))
        errors: NodeErrors = {}
        for name in names:
            errors[name] = ""
            if is_done(nodes[name]):
                continue
            try:
                if len(names) == 1:
                    raise error
                self._run("update", f"NodeName={name}", *arguments)
            except (SlurmRefused, SlurmUnavailable):
                raise
            except SlurmError as node_error:
                errors[name] = extract_message(node_error)
        return errors

    def _require_users(self, users: Sequence[str]) -> list[str]:
        """Return the users if all exist; Slurm's own error would only say that an id is invalid."""
        unknown = [user for user in users if self._resolver.uid(user.lstrip("+-")) is None]
        if unknown:
            raise WrongUpdate(f"unknown user {', '.join(map(repr, unknown))} on this host")
        return list(users)

    def _run(self, *arguments: str) -> None:
        """Run scontrol and convert its errors to specific exceptions."""
        try:
            self._commands.run("scontrol", *arguments)
        except (SlurmRefused, SlurmUnavailable):
            raise
        except SlurmError as error:
            for pattern, error_class in (
                (_UNKNOWN_RESERVATION, UnknownReservation),
                (_UNKNOWN_PARTITION, UnknownPartition),
                (_INVALID_CHANGE, WrongUpdate),
            ):
                if pattern.search(error.output):
                    message = f"cluster {self._cluster}: {extract_message(error)}"
                    raise error_class(message, error.command, error.output) from error
            raise


def clean_reason(text: str) -> str:
    """Return a reason as Slurm stores it: one line, without the quotes that ``scontrol`` strips.

    Slurm appends user and time in brackets; brackets inside the reason are kept.
    """
    line = "".join(c if c.isprintable() else " " for c in text.replace('"', "'"))
    return " ".join(line.split())[:_MAX_REASON_CHARS].rstrip()


def extract_message(error: SlurmError) -> str:
    """Return Slurm's error message without the prefix of the command."""
    return _MESSAGE_PREFIX.sub("", error.output).strip("; ") or str(error)


def _has_state(node: NodeRecord, state: NodeChange, reason: str) -> bool:
    """Return True if a node already has the requested state."""
    flags = node.flags
    if state == "DRAIN":
        return "DRAIN" in flags and node.reason == reason
    if state == "DOWN":
        return node.base == "DOWN" and node.reason == reason
    if state == "FAIL":
        return "FAIL" in flags and node.reason == reason
    if state in ("RESUME", "IDLE"):
        return node.base not in ("DOWN", "ERROR") and not {"DRAIN", "FAIL"}.intersection(flags)
    if state == "UNDRAIN":
        return "DRAIN" not in flags
    return False


def normalize_node_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested node changes under Slurm's key names.

    ``State`` may be written ``node_state``, ``state_up`` or ``NodeState``, so code that inspects a
    change must normalize its keys here first.

    Raises:
        WrongUpdate: A key is unknown, or is given twice.
    """
    return _normalize_keys(changes, _NODE_KEYS, "a node")


def normalize_partition_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested partition changes under Slurm's key names.

    Raises:
        WrongUpdate: As :func:`normalize_node_changes`.
    """
    return _normalize_keys(changes, _PARTITION_KEYS, "a partition")


def _normalize_keys(changes: Mapping[str, Any], keys: Sequence[str], target: str) -> dict[str, Any]:
    """Return values by Slurm's keys.

    Reject unknown keys, which Slurm might complete by guessing.
    """
    keys_by_name = {key.lower(): key for key in keys}
    keys_by_name = {other: key for other, key in _OTHER_NAMES.items() if key in keys} | keys_by_name
    normalized: dict[str, Any] = {}
    for name, value in changes.items():
        key = keys_by_name.get(name.replace("_", "").lower())
        if key is None:
            raise WrongUpdate(f"cannot change {name!r} of {target}: use one of {', '.join(keys)}")
        if key in normalized:
            raise WrongUpdate(f"{key} of {target} is given twice: give it once")
        normalized[key] = value
    if not normalized:
        raise WrongUpdate(f"no field of {target} given: give at least one")
    return normalized


def _format_changes(changes: Mapping[str, Any], keys: Sequence[str], target: str) -> list[str]:
    """Format changes as ``Key=value`` arguments."""
    normalized = _normalize_keys(changes, keys, target)
    return [f"{key}={_format_value(key, value)}" for key, value in normalized.items()]


def _format_value(key: str, value: Any) -> str:
    """Format a value for scontrol; reject what it could misread."""
    if key == "Reason":
        return clean_reason(str(value))
    if isinstance(value, bool):
        text = "YES" if value else "NO"
    elif isinstance(value, datetime):
        text = _format_moment(value)
    elif isinstance(value, list | tuple):
        text = ",".join(str(part) for part in value)
    else:
        text = "" if value is None else str(value)
    if len(text) > _MAX_VALUE_CHARS or not all(c.isprintable() for c in text) or '"' in text:
        raise WrongUpdate(f"invalid {key} {text[:60]!r}: give one line without quotes")
    return text


def _split_value(value: Any) -> list[str]:
    """Split a list, or a comma-separated text."""
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    return [str(part) for part in parts if part]


def _validate_name(name: str, *, strict: bool = True) -> str:
    """Return a name if Slurm accepts it; names of existing objects are checked less strictly."""
    is_valid = _NAME.fullmatch(name) if strict else name and name.isprintable() and "," not in name
    if not is_valid or name.startswith("-"):
        raise WrongUpdate(f"invalid name {name!r}")
    return name


def _format_moment(at: datetime) -> str:
    """Format a time for Slurm's commands, which run under TZ=UTC."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
