"""What is told of states: of nodes, partitions, reservations and daemons, and of rules that ran."""

import os
from datetime import datetime
from typing import Any, Literal

import msgspec

Noticed = Literal["trigger", "reconcile", "start"]
"""What made us look: a wake-up of slurmctld's, the clock or slurmctld's start, or our own."""


class NodesNow(msgspec.Struct, frozen=True, kw_only=True):
    """``nodes-CLUSTER.json``: the nodes' states at the sensor's last poll.

    The sensor leaves it for those that show nodes, since no event tells that jobs come and go.

    Attributes:
        states: The nodes' names, by state.
        silent_since: When that poll was, if slurmctld has answered none since; None while it
            answers.
    """

    states: dict[str, tuple[str, ...]]
    silent_since: datetime | None = None


def nodes_now_path(state_dir: str, cluster: str) -> str:
    """The file of a cluster's :class:`NodesNow`."""
    return os.path.join(state_dir, f"nodes-{cluster}.json")


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """node.state: a node's state, flags or reason changed.

    Attributes:
        node: Its NodeName.
        state: As Slurm shows it, base first and then the flags in the alphabet's order:
            ``IDLE``, ``DOWN+DRAIN+NOT_RESPONDING``; ``REMOVED`` for a node that is not
            there any more.
        old_state: What it was before; "" for a node that is new.
        reason: Why, as Slurm shows it; "" for none.
        reason_uid: Who gave the reason; None where nobody did or the name is unknown.
        reason_user: The same by name.
        reason_at: When it was given, UTC.
        old_reason: What the reason was before.
        source: What made us look.
        failed: Whether it went from working to failing; not so of nodes that save power, are
            planned, being maintained, rebooted on demand, or drained by somebody, nor while
            one that was resumed has not answered yet.
        recovered: Whether it takes jobs again, for the first time since it failed, whoever
            drained it meanwhile; not so of one that was drained and resumed without a failure,
            nor while power saving has one off, or boots it.
        partitions: The partitions that it is in.
        cpus: How many CPUs it has; 0, as of the next two, where that was not told.
        memory_bytes: Its memory for jobs.
        gpus: How many GPUs it has; 0 for none.
        resized: Whether only what it has for jobs changed, or was told for the first time;
            rules are not told of that.
    """

    node: str
    state: str
    old_state: str = ""
    reason: str = ""
    reason_uid: int | None = None
    reason_user: str = ""
    reason_at: datetime | None = None
    old_reason: str = ""
    source: Noticed = "reconcile"
    failed: bool = False
    recovered: bool = False
    partitions: tuple[str, ...] = ()
    cpus: int = 0
    memory_bytes: int = 0
    gpus: int = 0
    resized: bool = False


class PartitionState(msgspec.Struct, frozen=True, kw_only=True):
    """partition.state: a partition's state changed.

    Attributes:
        partition: Its name.
        state: ``UP``, ``DOWN``, ``DRAIN``, ``INACTIVE``, or ``REMOVED``.
        old_state: What it was before; "" for one that is new.
        source: What made us look.
    """

    partition: str
    state: str
    old_state: str = ""
    source: Noticed = "reconcile"


class ReservationState(msgspec.Struct, frozen=True, kw_only=True):
    """reservation.state: a reservation was made, began, ended or was taken away.

    Attributes:
        reservation: Its name.
        state: ``INACTIVE``, ``ACTIVE``, or ``REMOVED``.
        old_state: What it was before; "" for one that is new.
        nodes: Its node list.
        start: When it begins, UTC.
        end: When it ends, UTC.
        users: Whose it is.
        flags: Its flags.
        source: What made us look.
    """

    reservation: str
    state: str
    old_state: str = ""
    nodes: str = ""
    start: datetime | None = None
    end: datetime | None = None
    users: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    source: Noticed = "reconcile"


class RuleExecution(msgspec.Struct, frozen=True, kw_only=True):
    """rule.execution: a rule's action ended, or was not run and why.

    Attributes:
        execution: Its id in the history.
        rule: The rule's name.
        event: Key of the event that it ran for.
        action: The action's name.
        status: How it ended.
        parameters: The action's, as rendered.
        message: What it said, one line.
    """

    execution: int
    rule: str
    event: str
    action: str
    status: Literal["succeeded", "failed", "timeout", "unknown", "dry-run", "held-back"]
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    message: str = ""
