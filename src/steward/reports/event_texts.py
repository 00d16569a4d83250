"""Event descriptions: turn an event into short texts for the command line and the web pages.

:func:`describe_event` returns an :class:`EventDescription` with subject ("partition main"), change
("IDLE -> DOWN"), reason and source. It accepts events from the journal and events decoded from a
reply, whose body is plain values. ``EVENT_LAYOUT`` shows the texts in a table.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steward.core.events import (
    BANK_THRESHOLD,
    BODIES,
    NODE_STATE,
    RULE_EXECUTION,
    BankThreshold,
    ControllerState,
    JobFacts,
    NodeState,
    PartitionState,
    ReservationState,
    RuleExecution,
)
from steward.core.layouts import Column, Layout, Link

if TYPE_CHECKING:
    from steward.reports.events import EventItem


class EventDescription(msgspec.Struct, frozen=True, kw_only=True):
    """An event described in short texts.

    Attributes:
        subject: The object concerned: ``n1``, ``partition main``, ``rule node-down``.
        what: The change: ``IDLE -> DOWN``.
        why: The reason; "" if unknown.
        source: What triggered the check, or who reported the event.
        failed: Whether a node went from working to failing.
        name: Bare name of the subject: a node, partition, reservation, daemon, account or rule, or
            a job's id; "" for other events.
    """

    subject: str
    what: str = ""
    why: str = ""
    source: str = ""
    failed: bool = False
    name: str = ""


def describe_event(event: "EventItem") -> EventDescription:
    """Describe an event in short texts."""
    body = _decode_event_body(event)
    subject, name = _describe_subject(event.kind, body)
    return EventDescription(
        subject=subject,
        what=_describe_change(body),
        why=_describe_reason(body),
        source=getattr(body, "source", event.source),
        failed=getattr(body, "failed", False),
        name=name,
    )


def _decode_event_body(event: "EventItem") -> Any:
    """Return the event's body as its Struct; replies carry it as plain values."""
    kind = BODIES.get(event.kind)
    if kind is None or isinstance(event.body, kind):
        return event.body
    return msgspec.convert(event.body, kind)


def _describe_subject(kind: str, body: Any) -> tuple[str, str]:
    if isinstance(body, NodeState):
        return body.node, body.node
    if isinstance(body, PartitionState):
        return f"partition {body.partition}", body.partition
    if isinstance(body, ReservationState):
        return f"reservation {body.reservation}", body.reservation
    if isinstance(body, ControllerState):
        return body.daemon, body.daemon
    if isinstance(body, BankThreshold):
        return f"account {body.account}", body.account
    if isinstance(body, RuleExecution):
        return f"rule {body.rule}", body.rule
    if isinstance(body, JobFacts):
        return f"job {body.record.job_id}", str(body.record.job_id)
    return kind, ""


def _describe_change(body: Any) -> str:
    if isinstance(body, NodeState | PartitionState | ReservationState):
        is_same = body.old_state in ("", body.state)
        return body.state if is_same else f"{body.old_state} -> {body.state}"
    if isinstance(body, ControllerState):
        if body.reconfigured:
            return "reconfigured"
        return "restarted" if body.restarted else ("up" if body.up else "down")
    if isinstance(body, BankThreshold):
        return f"{body.value}% used" if body.kind == "used" else f"ends in {body.value} days"
    if isinstance(body, RuleExecution):
        return f"{body.action} {body.status}"
    return str(body.record.state) if isinstance(body, JobFacts) else ""


def _describe_reason(body: Any) -> str:
    if isinstance(body, NodeState):
        author = f" [{body.reason_user}]" if body.reason_user else ""
        return f"{body.reason}{author}" if body.reason else ""
    if isinstance(body, RuleExecution | ControllerState):
        return body.message
    return ""


def _read_text(name: str) -> Callable[[Any, Any], Any]:
    """Return a value source for an attribute of an event's description."""
    return lambda event, _: getattr(describe_event(event), name)


_TIME: Final = Column("Time", "at", "time")
_WHAT: Final = Column("Event", _read_text("what"), "prose")
_WHY: Final = Column("Reason", _read_text("why"), max_width=60)
_FAILED: Final = Column(
    "Failed",
    lambda event, _: "failed" if describe_event(event).failed else None,
    "state",
    show="pages",
    exact=lambda event, _: describe_event(event).failed or None,
)
_SUBJECT_LINKS: Final[dict[str, Link]] = {
    NODE_STATE: "node",
    RULE_EXECUTION: "rule",
    BANK_THRESHOLD: "account",
}
"""Pages of the subjects of events, by kind of event."""
EVENT_LAYOUT: Final[Layout] = (
    Column("ID", "id", "count", show="requested"),
    _TIME,
    Column("Cluster", "cluster"),
    Column("Kind", "kind", show="requested"),
    Column(
        "Subject",
        _read_text("subject"),
        "prose",
        link=lambda event: _SUBJECT_LINKS.get(event.kind, ""),
        target=_read_text("name"),
        is_key=True,
    ),
    _WHAT,
    _WHY,
    Column("Source", _read_text("source")),
    _FAILED,
)
"""Columns of a list of events."""
NODE_EVENT_LAYOUT: Final[Layout] = (
    _TIME,
    Column("Cluster", "cluster", show="requested"),
    Column("Node", _read_text("subject")),
    _WHAT,
    _WHY,
    _FAILED,
)
"""Columns of the events of nodes."""
