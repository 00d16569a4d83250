"""What the end of a run is charged: the same reckoning for events, comparisons and backfills.

A run that never started costs nothing, nor does what a federation's sibling took
away. A resized job is charged piece by piece, each piece until it ended; the last
one begins where the piece before it ended.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec

from steward.bank.priced_by import as_allocated, facts_of
from steward.bank.prices import price, rate_for
from steward.bank.records import Charge, Hold, Rate, Use
from steward.bank.settings import BankSettings
from steward.bank.using import ALONE, is_whole, use_of
from steward.core.records import JobRecord
from steward.core.timestamps import micros, micros_or_0, moment
from steward.core.usage import RunFact
from steward.slurm.arrays import count_tasks
from steward.slurm.cluster_model import Picture
from steward.slurm.job_states import base_state
from steward.slurm.times import zone_called

REVOKED: Final = frozenset({"REVOKED", "REQUEUE_FED"})
"""Ends of a federated job's copies that another cluster ran."""

AGAIN: Final = frozenset({"REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
"""Ends of a run that another one follows: its hold stays."""

_SAME_S: Final = 2


class Pricing(msgspec.Struct, frozen=True, kw_only=True):
    """What a charge is reckoned by.

    Attributes:
        settings: The bank's settings.
        rates: Every rate there is.
        picture: The cluster as it was seen last; None if it was not seen yet.
        zone: IANA name of the cluster's zone; "" for the host's.
    """

    settings: BankSettings
    rates: Sequence[Rate]
    picture: Picture | None = None
    zone: str = ""


def is_charged(fact: RunFact) -> bool:
    """Whether a run, or a piece of one, is to be charged once it is over.

    What an import of another's books tells is not: a backfill charges that where it is asked to.
    """
    if fact.source or fact.record.start is None:
        return False
    return base_state(fact.record.state) not in REVOKED


def charge_of(
    cluster: str,
    fact: RunFact,
    pricing: Pricing,
    *,
    pieces: Sequence[Charge] = (),
    hold: Hold | None = None,
    held: Mapping[str, int] | None = None,
    before: Charge | None = None,
    seen_at: datetime | None = None,
    why: str = "",
) -> Charge | None:
    """What a run that is over is charged.

    What was charged already stays as it is while Slurm's record says the same, whatever
    has become of the cluster and the settings since; where the record says something else,
    it is still by the same rate, and whole nodes stay whole nodes.

    Args:
        cluster: The cluster's name.
        fact: The run, or the piece of one.
        pricing: What it is reckoned by.
        pieces: The charges of the run's former sizes.
        hold: The hold that covers it.
        held: TRES that Slurm does not count for any job, as they are known; the hold's if None.
        before: What it was charged; None for nothing yet.
        seen_at: When it was found to be over, where nobody told when it ended.
        why: Why it is charged now; what the fact says if "".

    Returns:
        The charge; None where there is nothing to be charged for.

    Raises:
        NoRate: Nothing says what it costs.
    """
    if not is_charged(fact):
        return None
    record = fact.record
    begin, end = _begin(fact, pieces), fact.piece_end or record.end or seen_at
    if begin is None or end is None:
        return None
    minimum_paid = sum(piece.amount for piece in pieces)
    facts = facts_of(fact, begin, end, minimum_paid)
    why = why or _why(fact)
    if before is not None and facts == before.facts:
        return _again(before, hold, why)
    rate = _rate(cluster, fact, pricing, before)
    if held is None and hold is not None and hold.quote is not None:
        held = hold.quote.tres
    whole = is_whole(record, rate, pricing.picture)
    if before is not None and before.facts:
        # What the job itself asked for may be known late.
        whole = before.whole or record.oversubscribe == ALONE
    use = use_of(
        *(record, rate, pricing.picture, pricing.settings),
        begin=begin,
        end=max(begin, end),
        suspended_s=max(0, (record.suspended_s or 0) - fact.suspended_before_s),
        held=held,
        amounts=as_allocated(before, facts),
        whole=whole,
    )
    if fact.piece_end is not None or pieces:
        # A run costs the minimum once, whatever its sizes were.
        least = 0 if fact.piece_end is not None else max(0, rate.minimum - minimum_paid)
        use = msgspec.structs.replace(use, least=least)
    amount, number = _amount(use, rate, pricing.zone)
    return Charge(
        cluster=cluster,
        job_id=fact.job_id,
        first_submit=fact.first_submit,
        restarts=fact.restarts,
        piece_us=micros_or_0(fact.piece_end),
        account=record.account.lower(),
        user=record.user or ("" if record.uid is None else str(record.uid)),
        partition=record.partition,
        amount=amount,
        use=use,
        rate=number,
        hold="" if hold is None else hold.id,
        shares=() if hold is None else hold.shares,
        why=why,
        # Without a picture it is not known what its nodes had: that is made good later.
        facts=facts if pricing.picture is not None else "",
        whole=whole,
    )


def _again(before: Charge, hold: Hold | None, why: str) -> Charge:
    """What was charged already, as it was."""
    if hold is None:
        return msgspec.structs.replace(before, why=why)
    return msgspec.structs.replace(before, why=why, hold=hold.id, shares=hold.shares)


def _rate(cluster: str, fact: RunFact, pricing: Pricing, before: Charge | None) -> Rate:
    """What it is charged by: what it was charged by, unless it turns out to have run elsewhere."""
    record = fact.record
    if before is not None and before.use is not None and before.partition == record.partition:
        for rate in pricing.rates:
            if rate.number == before.rate and before.use.qos == record.qos:
                return rate
    return rate_for(pricing.rates, cluster, record.partition, record.qos, fact.first_submit)


def charged_before(fact: RunFact, known: Sequence[Charge]) -> Charge | None:
    """The charge that there is of a run, or of the same piece of it, already.

    Args:
        fact: The run.
        known: What was charged under its job id.
    """
    piece_us = micros_or_0(fact.piece_end)
    begin = _begin(fact, [one for one in known if is_piece_of(one, fact)])
    alike = [one for one in known if one.restarts == fact.restarts]
    for one in alike:
        if one.piece_us == piece_us and (
            abs((one.first_submit - fact.first_submit).total_seconds()) < 1
        ):
            return one
    use = Use(tres={}, start=begin)
    for one in alike:
        if bool(one.piece_us) == bool(piece_us) and _is_same_time(one.use, use):
            return one
    return None


def _amount(use: Use, rate: Rate, zone: str) -> tuple[int, int]:
    reckoned = price(use, rate, zone_called(zone))
    return reckoned.amount, rate.number


def _why(fact: RunFact) -> str:
    if fact.correction:
        return "correction"
    return "end" if fact.piece_end is None else "piece"


def _begin(fact: RunFact, pieces: Sequence[Charge]) -> datetime | None:
    """When the size that is to be charged began: of a resized run where the last piece ended."""
    start = fact.record.start
    if start is None or fact.piece_end is not None:
        return start
    return max([start, *(moment(piece.piece_us) for piece in pieces)])


def frees(fact: RunFact, hold: Hold) -> int:
    """What of a hold a run that is over needs no more, whatever it was charged.

    Of an array's hold each task frees its part; what was cancelled before its tasks had
    records of their own frees the part of each.
    """
    record = fact.record
    if fact.piece_end is not None or not is_task(record) or is_again(fact):
        return 0
    per_task = hold.quote.per_task if hold.quote else 0
    tasks = 1 if record.array_task.isdigit() else count_tasks(record.array_task)
    return min(hold.remaining, per_task * max(1, tasks))


def is_final(fact: RunFact) -> bool:
    """Whether nothing more will be charged to the hold of a run that is over."""
    return fact.piece_end is None and not is_task(fact.record) and not is_again(fact)


def is_again(fact: RunFact) -> bool:
    """Whether the job goes back into the queue with the end of this run."""
    return base_state(fact.record.state) in AGAIN


def is_gone(fact: RunFact, before: Charge | None) -> bool:
    """Whether the job that was to go back into the queue after this run turned out to be over.

    A slurmctld that was killed forgot that it had requeued it, or it is gone altogether.

    Args:
        fact: The run.
        before: What was charged for it until now.
    """
    if before is None or before.use is None or base_state(before.use.state) not in AGAIN:
        return False
    return not is_again(fact)


def is_task(record: JobRecord) -> bool:
    """Whether it is of an array, whose tasks share a hold."""
    return bool(record.array_job_id)


def leader_of(record: JobRecord) -> int:
    """The id that a job's hold is kept under: an array's for its tasks, else its own."""
    return record.array_job_id or record.job_id


def same_as(charge: Charge, known: Sequence[Charge]) -> Charge:
    """The charge under the name that it was charged by before, where that is another.

    Of a job id that is resolved anew, when an earlier run comes to be known, the first
    submit time changes: that must not charge a run twice.

    Args:
        charge: What is to be charged.
        known: What was charged under its job id.
    """
    if any(other.key == charge.key for other in known) or charge.use is None:
        return charge
    for other in known:
        if _part(other) == _part(charge) and _is_same_time(other.use, charge.use):
            return msgspec.structs.replace(
                charge, first_submit=other.first_submit, piece_us=other.piece_us
            )
    return charge


def _part(charge: Charge) -> tuple[int, bool]:
    return charge.restarts, bool(charge.piece_us)


def _is_same_time(one: Use | None, other: Use) -> bool:
    if one is None or one.start is None or other.start is None:
        return False
    return abs((one.start - other.start).total_seconds()) <= _SAME_S


def is_piece_of(charge: Charge, fact: RunFact) -> bool:
    """Whether a charge is of a former size of this run."""
    start = fact.record.start
    if start is None or not charge.piece_us or charge.restarts != fact.restarts:
        return False
    # Of another job, that had the id before, the pieces ended before this one began.
    end = fact.piece_end or fact.record.end
    return charge.piece_us > micros(start) and (end is None or charge.piece_us <= micros(end))
