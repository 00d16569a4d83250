"""Events in words, for people: on the command line and on pages."""

from typing import Any

import msgspec

from steward.core.events import (
    BODIES,
    BankThreshold,
    ControllerState,
    JobFacts,
    NodeState,
    PartitionState,
    ReservationState,
    RuleExecution,
)
from steward.reports.events import EventTold


class EventWords(msgspec.Struct, frozen=True, kw_only=True):
    """An event in words.

    Attributes:
        subject: What it is about: ``n1``, ``partition main``, ``rule node-down``.
        what: What happened: ``IDLE -> DOWN``.
        why: Why; "" where that is not known.
        source: What made us look, or who told of it.
        failed: Whether a node went from working to failing.
        name: The bare name of what it is about: of a node, partition, rule, account.
    """

    subject: str
    what: str = ""
    why: str = ""
    source: str = ""
    failed: bool = False
    name: str = ""


def words(event: EventTold) -> EventWords:
    """An event in words."""
    body = _body(event)
    subject, name = _subject(event.kind, body)
    return EventWords(
        subject=subject,
        what=_what(body),
        why=_why(body),
        source=getattr(body, "source", event.source),
        failed=getattr(body, "failed", False),
        name=name,
    )


def _body(event: EventTold) -> Any:
    """The body as what it is; one that came over the socket is plain values yet."""
    kind = BODIES.get(event.kind)
    if kind is None or isinstance(event.body, kind):
        return event.body
    return msgspec.convert(event.body, kind)


def _subject(kind: str, body: Any) -> tuple[str, str]:
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


def _what(body: Any) -> str:
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


def _why(body: Any) -> str:
    if isinstance(body, NodeState):
        who = f" [{body.reason_user}]" if body.reason_user else ""
        return f"{body.reason}{who}" if body.reason else ""
    if isinstance(body, RuleExecution | ControllerState):
        return body.message
    return ""
