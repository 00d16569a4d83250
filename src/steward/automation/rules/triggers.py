"""Trigger types of rules, and the conversion of journal events to triggers.

:data:`TRIGGER_TYPES` lists the types with their fields; ``make_trigger`` converts an event to a
:class:`Trigger`. A payload is plain JSON with times in ISO form, UTC. It holds the fields of the
event's body, cluster and time, and derived fields that are easier to compare.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from steward.core.events import (
    BANK_THRESHOLD,
    CONTROLLER_STATE,
    JOB_STATE,
    NODE_STATE,
    PARTITION_STATE,
    RESERVATION_STATE,
    RUN_END,
    BankThreshold,
    ControllerState,
    Event,
    JobFacts,
    NodeState,
    PartitionState,
    ReservationState,
)
from steward.core.records import JobRecord
from steward.core.usage import RunEvent
from steward.slurm.job_states import FINISHED, strip_state_suffix

Payload = dict[str, Any]

FAILURE_WINDOWS: Final = (("failures_1h", 3600), ("failures_1d", 86400), ("failures_7d", 7 * 86400))
"""Payload fields that count a node's failures, this one included, with their period in seconds."""

CountFailures = Callable[[Event], Mapping[str, int]]
"""Return how often an event's node has failed, for each of :data:`FAILURE_WINDOWS`."""


class TriggerType(msgspec.Struct, frozen=True, kw_only=True):
    """Type of trigger.

    Attributes:
        name: Name in rules.
        help: When it fires, for people.
        fields: Fields of its payload.
        subject_fields: Fields by which executions are de-duplicated.
        dispatched: Fields that the slurm pack's sensor dispatches to StackStorm; empty if it has no
            such trigger.
    """

    name: str
    help: str
    fields: frozenset[str]
    subject_fields: tuple[str, ...]
    dispatched: frozenset[str] = frozenset()


class Trigger(msgspec.Struct, frozen=True, kw_only=True):
    """Event in the form that rules see.

    Attributes:
        type: Name of the type.
        payload: Fields and values.
    """

    type: str
    payload: Payload


def _make_type(
    name: str,
    description: str,
    body: type[msgspec.Struct],
    subject: tuple[str, ...],
    *extra_fields: str,
    dispatched: frozenset[str] = frozenset(),
) -> TriggerType:
    """Declare a trigger type from the Struct of its events' body and additional fields."""
    fields = {field.name for field in msgspec.structs.fields(body)}
    return TriggerType(
        name=name,
        help=description,
        fields=frozenset({*fields, *extra_fields, "cluster", "at"}),
        subject_fields=("cluster", *subject),
        dispatched=dispatched,
    )


TRIGGER_TYPES: Final[dict[str, TriggerType]] = {
    one.name: one
    for one in (
        _make_type(
            "slurm.node.state",
            "A node's state, flags or reason changed, or the node was added or removed.",
            NodeState,
            ("node",),
            *("base", "flags", "drained", *(name for name, _ in FAILURE_WINDOWS)),
            dispatched=frozenset(
                {
                    *("cluster", "node", "state", "old_state", "reason", "reason_uid", "source"),
                    *("at", "failed", "partitions"),
                }
            ),
        ),
        _make_type(
            "slurm.job.state",
            "A job started, was suspended or resumed, or a run of it ended.",
            JobRecord,
            ("job_id", "restarts", "state"),
            "final",
        ),
        _make_type(
            "slurm.partition.state", "A partition's state changed.", PartitionState, ("partition",)
        ),
        _make_type(
            "slurm.reservation.state",
            "A reservation was created, began, ended or was deleted.",
            ReservationState,
            ("reservation",),
        ),
        _make_type(
            "slurm.controller.state",
            "slurmctld or slurmdbd stopped answering, answers again or restarted, or "
            "slurmctld reloaded its configuration.",
            ControllerState,
            ("daemon",),
        ),
        _make_type(
            "bank.threshold",
            "An allocation reached a percentage of use, or a number of days before its end.",
            BankThreshold,
            ("account", "allocation", "kind"),
        ),
    )
}
"""All trigger types, by name."""

TRIGGER_TYPE_BY_KIND: Final = {
    NODE_STATE: "slurm.node.state",
    JOB_STATE: "slurm.job.state",
    RUN_END: "slurm.job.state",
    PARTITION_STATE: "slurm.partition.state",
    RESERVATION_STATE: "slurm.reservation.state",
    CONTROLLER_STATE: "slurm.controller.state",
    BANK_THRESHOLD: "bank.threshold",
}
"""Type of trigger for each kind of event that rules handle."""

TRIGGER_KINDS: Final = frozenset(TRIGGER_TYPE_BY_KIND)
"""Kinds of events that rules handle."""


def make_trigger(event: Event, count_failures: CountFailures) -> Trigger | None:
    """Convert an event to a trigger; None if rules do not handle it.

    Args:
        event: The event.
        count_failures: Counts the failures of its node.
    """
    if event.kind == NODE_STATE:
        if event.body.resized:
            return None
        return _make_payload_trigger(event, event.body, _node_fields(event, count_failures))
    if event.kind in (JOB_STATE, RUN_END):
        record = _select_record(event)
        return None if record is None else _make_job_trigger(event, record)
    return _make_payload_trigger(event, event.body, {})


def _node_fields(event: Event, count_failures: CountFailures) -> Payload:
    """Derive additional payload fields of a node event."""
    body: NodeState = event.body
    base, _, flags = body.state.partition("+")
    old_state = body.old_state
    return {
        "base": base,
        "flags": flags.split("+") if flags else [],
        "drained": _has_drained(body.state) and bool(old_state) and not _has_drained(old_state),
        **count_failures(event),
    }


def _has_drained(state: str) -> bool:
    """Return whether a node is drained and its last job has left it."""
    base, _, flags = state.partition("+")
    flag_names = flags.split("+")
    return "DRAIN" in flag_names and "COMPLETING" not in flag_names and base in ("IDLE", "DOWN")


def _select_record(event: Event) -> JobRecord | None:
    """Return the job record to report; None if another event reports the same, or will."""
    body: JobFacts | RunEvent = event.body
    if isinstance(body, RunEvent):
        is_first = not body.correction and body.piece_end is None and not body.source
        return body.record if is_first else None
    # The end of a run is reported once, by run.end, whichever source knew it first.
    return None if strip_state_suffix(body.record.state) in FINISHED else body.record


def _make_job_trigger(event: Event, record: JobRecord) -> Trigger:
    """Make the trigger of a job event."""
    fields = {field: getattr(record, field) for field in record.__struct_fields__}
    extra_fields = {"final": event.kind == RUN_END, "state": strip_state_suffix(record.state)}
    return _make_payload_trigger(event, fields, extra_fields)


def _make_payload_trigger(event: Event, body: Any, extra_fields: Payload) -> Trigger:
    """Make a trigger from an event, the given body and additional fields."""
    payload: Payload = msgspec.to_builtins(body)
    payload |= {"cluster": event.cluster, "at": msgspec.to_builtins(event.at), **extra_fields}
    return Trigger(type=TRIGGER_TYPE_BY_KIND[event.kind], payload=payload)


def read_subject(trigger: Trigger) -> tuple[Any, ...]:
    """Return a trigger's subject: the values of its type's subject fields."""
    return tuple(trigger.payload.get(name) for name in TRIGGER_TYPES[trigger.type].subject_fields)
