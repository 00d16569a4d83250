"""Charges that clients of an API told of, beside the bank's own of the same jobs.

A job that Slurm put back into its queue has a submit time for each of its runs, of
which Steward keeps the first and a client may tell any; its number is the same.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.ledger import By
from steward.bank.records import Charge

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Transaction

TOLD: Final = "mybrc"
"""The source of charges that clients told."""

_BEFORE: Final = timedelta(seconds=2)
_AFTER: Final = timedelta(hours=1)
"""So long after a run slurmctld may still know its job, and run it again."""


def own_charges(t: "Transaction", cluster: str, job_id: int) -> list[Charge]:
    """Return the charges under a raw job id that are the bank's own.

    Args:
        t: The transaction that they are read in.
        cluster: The cluster's name.
        job_id: The raw job id.
    """
    rows = t.charges.of_job(cluster, job_id)
    return [row.charge for row in rows if row.charge.source != TOLD]


def is_same_job(times: Iterable[datetime | None], own: Sequence[Charge]) -> bool:
    """Whether a job is one that was charged.

    Args:
        times: When it was submitted and started, as far as that is known.
        own: What was charged under the job's number.
    """
    known = [at for at in times if at is not None]
    return any(begin - _BEFORE <= at <= end + _AFTER for begin, end in _spans(own) for at in known)


def take_back(t: "Transaction", charge: Charge, by: By) -> None:
    """Take back what clients told of a job, now that it is charged.

    Args:
        t: The transaction.
        charge: One of the job's own.
        by: Who does it.
    """
    own = own_charges(t, charge.cluster, charge.job_id)
    for told in (row.charge for row in t.charges.of_job(charge.cluster, charge.job_id)):
        if told.source != TOLD or not told.amount or told.told:
            continue
        start = told.use.start if told.use is not None else None
        if is_same_job((told.first_submit, start), own):
            t.charges.charge(msgspec.structs.replace(told, amount=0), by)


def _spans(own: Sequence[Charge]) -> list[tuple[datetime, datetime]]:
    """From when until when each job was known; a number is given out again after long."""
    found: dict[datetime, datetime] = {}
    for one in own:
        end = one.first_submit
        if one.use is not None and one.use.start is not None:
            end = one.use.start + timedelta(seconds=one.use.seconds)
        found[one.first_submit] = max(found.get(one.first_submit, end), end)
    return list(found.items())
