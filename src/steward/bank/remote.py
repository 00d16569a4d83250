"""Remote banks: interface of the extensions that report SU holds and charges to one.

:class:`RemoteBank` is what an extension offers, :func:`load_remote_banks` loads them.

A job may also be charged twice: by this bank, and by a client's report through the myBRC API.
:func:`list_own_charges`, :func:`is_same_job` and :func:`cancel_reported_charges` keep the bank's
own charge and set the reported one to zero. A requeued job has one id in all runs, but a submit
time for each. Steward keeps the first one and a client may report any, so :func:`is_same_job`
compares times.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.ledger import Authorship
from steward.bank.records import Charge, Hold
from steward.core.errors import StewardError
from steward.core.events import Event
from steward.core.extensions import list_offers, load_offer

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Transaction


ENTRY_POINT_GROUP: Final = "steward.remote_bank"
"""Group of entry points. The name of each is the kind of its messages in the outbox."""


class RemoteBank(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of remote bank.

    Attributes:
        relay: Writes messages about events to the outbox. Its arguments are the transaction that
            charges the events, the events with the open SU hold of each one's job, and the time
            when this bank began.
        describe: Describes a message in the outbox in a few words.
    """

    relay: "Callable[[Transaction, Iterable[tuple[Event, Hold | None]], datetime], None]"
    describe: Callable[[bytes], str]


def load_remote_banks() -> tuple[RemoteBank, ...]:
    """Load every kind of remote bank that installed packages offer.

    Raises:
        StewardError: No installed package offers one, so reports would be lost.
    """
    banks = tuple(load_offer(ENTRY_POINT_GROUP, name) for name in list_offers(ENTRY_POINT_GROUP))
    if not banks:
        raise StewardError(
            f"[bank.remote] url: no installed package provides {ENTRY_POINT_GROUP}. Reinstall "
            "Steward",
            ENTRY_POINT_GROUP,
        )
    return banks


REPORTED_SOURCE: Final = "mybrc"
"""Source of the charges that clients report."""

_MAX_BEFORE_SUBMIT: Final = timedelta(seconds=2)
_MAX_AFTER_END: Final = timedelta(hours=1)
"""Longest time after a run in which slurmctld may still know the job and run it again."""


def list_own_charges(t: "Transaction", cluster: str, job_id: int) -> list[Charge]:
    """Return the bank's own charges under a raw job id.

    Args:
        t: The transaction that reads them.
        cluster: The cluster's name.
        job_id: The raw job id.
    """
    rows = t.charges.list_of_job(cluster, job_id)
    return [row.charge for row in rows if row.charge.source != REPORTED_SOURCE]


def is_same_job(times: Iterable[datetime | None], own_charges: Sequence[Charge]) -> bool:
    """Return whether a job is one that the bank charged.

    Args:
        times: Submit and start time of the job; None if unknown.
        own_charges: The bank's own charges under the job id.
    """
    known_times = [time for time in times if time is not None]
    return any(
        begin - _MAX_BEFORE_SUBMIT <= time <= end + _MAX_AFTER_END
        for begin, end in _list_job_spans(own_charges)
        for time in known_times
    )


def cancel_reported_charges(t: "Transaction", charge: Charge, author: Authorship) -> None:
    """Set the charges that clients reported for a job to zero, once the bank charges the job.

    Args:
        t: The transaction.
        charge: One of the bank's own charges of the job.
        author: Author of the changes, with the reason.
    """
    own_charges = list_own_charges(t, charge.cluster, charge.job_id)
    for client_charge in (
        row.charge for row in t.charges.list_of_job(charge.cluster, charge.job_id)
    ):
        if (
            client_charge.source != REPORTED_SOURCE
            or not client_charge.amount
            or client_charge.told
        ):
            continue
        start = client_charge.use.start if client_charge.use is not None else None
        if is_same_job((client_charge.first_submit, start), own_charges):
            t.charges.post(msgspec.structs.replace(client_charge, amount=0), author)


def _list_job_spans(own_charges: Sequence[Charge]) -> list[tuple[datetime, datetime]]:
    """Return first submit and last end of each job under one id, because Slurm reuses ids."""
    ends: dict[datetime, datetime] = {}
    for charge in own_charges:
        end = charge.first_submit
        if charge.use is not None and charge.use.start is not None:
            end = charge.use.start + timedelta(seconds=charge.use.seconds)
        ends[charge.first_submit] = max(ends.get(charge.first_submit, end), end)
    return list(ends.items())
