"""What of the bank's events a myBRC server elsewhere is told of: running jobs, and ends of runs.

The hold of a pending job is not sent: the server counts jobs from their start time on.

Of a run that the bank does not charge, since it ended before there was a bank or
another's books tell of it, nothing is said: the server may know what it cost. Nor of
one that nothing says the price of yet: its hold stays there until it is charged.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.claims import has_started
from steward.bank.records import Hold
from steward.bank.remote import RemoteBank
from steward.bank.settling import REVOKED, charged_before, is_charged
from steward.bank.told_charges import own_charges
from steward.core.events import QUEUE_LOOKED, RUN_END, RUN_START, Event
from steward.core.records import JobRecord
from steward.core.usage import RunFact
from steward.extensions.mybrc.outgoing import Told, describe, told_change, told_hold
from steward.slurm.states import base_state

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Transaction


def relay(
    t: "Transaction",
    events: Iterable[tuple[Event, Hold | None]],
    began: datetime,
) -> None:
    """Put into the outbox what events mean for the server elsewhere.

    Args:
        t: The transaction that charges them.
        events: The events, each with its job's open hold.
        began: When the bank was first started.
    """
    for event, hold in events:
        if event.kind == QUEUE_LOOKED or not _is_ours(event, began):
            continue
        told = _told(event)
        if told is None:
            continue
        record: JobRecord = event.body.record
        if event.kind == RUN_END:
            _end(t, event.cluster, event.body, told)
        elif hold is not None and not record.array_job_id and _is_running(event):
            told_hold(t, told, hold.amount)


def _end(t: "Transaction", cluster: str, fact: RunFact, told: Told) -> None:
    """Have the end of a run told, under the name that its charge has."""
    if not is_charged(fact):
        told_change(t, told)
        return
    charge = charged_before(fact, own_charges(t, cluster, fact.job_id))
    if charge is not None:
        told_change(t, msgspec.structs.replace(told, first_submit=charge.first_submit))


def _is_running(event: Event) -> bool:
    # Slurm gives pending jobs a start time, too: the one that it expects.
    return event.kind == RUN_START or has_started(event.body.record)


def _is_ours(event: Event, began: datetime) -> bool:
    """Whether it is the bank's to say what that costs."""
    if event.kind != RUN_END:
        return True
    record: JobRecord = event.body.record
    if event.body.source or (record.end or event.at) < began:
        return False
    # A job that a federation ran elsewhere has the same number there.
    return base_state(record.state) not in REVOKED


def _told(event: Event) -> Told | None:
    record, fact = event.body.record, event.body
    first = fact.first_submit if isinstance(fact, RunFact) else record.submit
    if first is None or record.uid is None or (record.restarts and first is record.submit):
        return None
    return Told(
        cluster=event.cluster,
        job_id=record.job_id,
        first_submit=first,
        account=record.account.lower(),
        uid=record.uid,
        partition=record.partition,
        qos=record.qos,
        state=record.state,
        start=record.start,
        end=record.end,
        cpus=record.cpus or 0,
    )


REMOTE_BANK: Final = RemoteBank(relay=relay, describe=describe)
"""What tells a myBRC server."""
