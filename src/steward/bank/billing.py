"""What a run, or a piece of one, is charged for: from Slurm's record of it."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec

from steward.bank.ledger import Finding
from steward.bank.prices import price, rate_for
from steward.bank.records import Charge, Hold, Rate, Use
from steward.bank.settings import BankSettings
from steward.core.errors import StewardError
from steward.core.records import JobRecord
from steward.core.timestamps import micros, micros_or_0, moment
from steward.core.usage import RunFact
from steward.slurm import tres
from steward.slurm.arrays import count_tasks
from steward.slurm.cluster_model import KILL_WAIT_S, NodeShape, Picture
from steward.slurm.job_states import base_state
from steward.slurm.times import zone_called
from steward.slurm.tres import kind_of, parse_tres, requested_kinds

ALONE: Final = "NO"
"""A record's word for a job that has its nodes to itself."""

_LOOK_S: Final = 75
"""A minute until slurmctld looks at limits, and what its clock and its messages take."""


def use_of(
    record: JobRecord,
    rate: Rate,
    picture: Picture | None,
    settings: BankSettings,
    *,
    begin: datetime | None = None,
    end: datetime | None = None,
    suspended_s: int | None = None,
    held: Mapping[str, int] | None = None,
    amounts: Mapping[str, int] | None = None,
    whole: bool | None = None,
) -> Use:
    """What is charged for.

    Suspended time is left out unless [bank] suspended says otherwise; so is time past the
    time limit, as far as Slurm lets jobs run past it, unless over_limit does. Where nodes
    are charged whole, their TRES are what is configured, whatever the job was given.

    Args:
        record: Slurm's record of the run, or of the piece.
        rate: What it is charged by: it may charge whole nodes.
        picture: The cluster; None where it is not known, then nodes are not made whole.
        settings: [bank].
        begin: When the piece began; the run's start if None.
        end: When the piece ended; the run's end if None.
        suspended_s: Seconds of the piece that it was suspended; those of the record if None.
        held: TRES of the job's hold, in place of what Slurm does not count for any job
            (AccountingStorageTRES lacks it); what nobody held is as the job asked for it.
        amounts: The TRES, where they were told before; see :func:`allocated` if None.
        whole: Whether its nodes are charged whole; see :func:`is_whole` if None.
    """
    start = record.start
    state = record.state.partition(" ")[0].rstrip("+").upper()
    if whole is None:
        whole = is_whole(record, rate, picture)
    if amounts is None:
        amounts = allocated(record, picture, held or {}, whole=whole)
    if start is None:
        return Use(tres=dict(amounts), qos=record.qos, state=state)
    first, last = begin or start, end or record.end or start
    if suspended_s is None:
        suspended_s = record.suspended_s or 0
    seconds = _seconds(record, settings, picture, first, last, suspended_s)
    return Use(tres=dict(amounts), start=first, seconds=seconds, qos=record.qos, state=state)


def allocated(
    record: JobRecord, picture: Picture | None, held: Mapping[str, int], *, whole: bool
) -> dict[str, int]:
    """The TRES that a run has, as they are charged: its nodes' own if it has them whole."""
    found = parse_tres(record.tres_allocated)
    if "cpu" not in found and record.cpus and found:
        found["cpu"] = record.cpus
    if picture is not None and record.nodelist and whole:
        for name, amount in _of_nodes(record.nodelist, picture).items():
            found[name] = max(found.get(name, 0), amount)
    for name, amount in tres.licenses(record.licenses).items():
        found.setdefault(name, amount)
    if picture is not None and found:
        for name, amount in held.items():
            if name not in found and not picture.tracks(name):
                found[name] = amount
        _add_asked(found, record, picture)
    return found


def _add_asked(found: dict[str, int], record: JobRecord, picture: Picture) -> None:
    """Count what Slurm does not, and nobody held, as the job asked for it."""
    asked = requested_kinds(record)
    known = {kind_of(name) for name in found}
    for name, amount in asked.items():
        kind = kind_of(name)
        if kind not in known and not picture.tracks(kind):
            found[kind] = found.get(kind, 0) + amount
        if name != kind and name not in found and not picture.tracks(name):
            found[name] = amount


def untracked(rate: Rate, picture: Picture) -> list[str]:
    """TRES that a rate weighs and AllocTRES cannot show: what jobs use of them is not seen."""
    return [
        name
        for name, weight in rate.weights.items()
        if weight and not name.startswith("license/") and not picture.tracks(name)
    ]


def _seconds(
    record: JobRecord,
    settings: BankSettings,
    picture: Picture | None,
    first: datetime,
    last: datetime,
    suspended_s: int,
) -> int:
    start = record.start or first
    part = settings.partition.get(record.partition)
    rule = (part.over_limit if part else None) or settings.over_limit
    if rule == "free" and record.time_limit_s is not None:
        # A suspended job's limit is put off by as long as it was suspended.
        allowed_s = record.time_limit_s + (record.suspended_s or 0)
        ran_s = (max(last, record.end or last) - start).total_seconds()
        # Users may lower a running job's limit: what ran on for longer did not run into it.
        if ran_s <= allowed_s + _grace_s(record, picture):
            last = min(last, start + timedelta(seconds=allowed_s))
    seconds = int((last - first).total_seconds())
    return max(0, seconds if settings.suspended else seconds - suspended_s)


def _grace_s(record: JobRecord, picture: Picture | None) -> int:
    """How long past its limit Slurm ends a job at the latest.

    That is OverTimeLimit, up to a minute until slurmctld looks (it does so each half), and
    KillWait: see slurm.conf(5). Where OverTimeLimit is UNLIMITED Slurm ends none, so that
    what ran on for longer than the rest was meant to, and none of it is free.
    """
    if picture is None:
        return _LOOK_S + KILL_WAIT_S
    part = picture.partitions.get(record.partition)
    over_s = part.over_time_s if part is not None else 0
    return (over_s or 0) + _LOOK_S + picture.kill_wait_s


def is_whole(record: JobRecord, rate: Rate, picture: Picture | None) -> bool:
    """Whether a run's nodes are charged whole, by its rate, its request and the cluster."""
    if picture is None:
        return False
    part = picture.partitions.get(record.partition)
    return (
        rate.whole_nodes
        or record.oversubscribe == ALONE
        or picture.linear
        or (part is not None and part.exclusive)
    )


def _of_nodes(nodelist: str, picture: Picture) -> dict[str, int]:
    """What the nodes of a list have altogether, as far as they are known."""
    from steward.slurm.nodelists import expand

    shapes = _by_node(picture)
    found: dict[str, int] = {}
    try:
        names = expand(nodelist)
    except StewardError:
        # Of a list that cannot be read the allocation's own TRES are what is known.
        return {}
    for name in names:
        shape = shapes.get(name)
        if shape is None:
            continue
        for of, amount in shape.whole.items():
            found[of] = found.get(of, 0) + amount
    return found


_nodes: Final[dict[str, tuple[Picture, dict[str, NodeShape]]]] = {}
"""Of each cluster the picture that was asked of last, with the shapes of its nodes."""


def _by_node(picture: Picture) -> dict[str, NodeShape]:
    """The shape of each node."""
    known = _nodes.get(picture.cluster)
    if known is None or known[0] is not picture:
        from steward.slurm.nodelists import expand

        shapes = {
            name: shape for shape in picture.shapes if shape.nodes for name in expand(shape.nodes)
        }
        known = _nodes[picture.cluster] = picture, shapes
    return known[1]


_BYTES: Final = 9


def facts_of(fact: RunFact, begin: datetime, end: datetime, paid: int) -> str:
    """Two digests with a dot between: of what the run was given, and of everything else.

    Args:
        fact: The run, or the piece of one.
        begin: When what is charged for began.
        end: When it ended.
        paid: What the run's former sizes cost, micro-SU.
    """
    record = fact.record
    given = (
        sorted(parse_tres(record.tres_allocated).items()),
        record.cpus or 0,
        record.nodelist,
        record.licenses,
        record.oversubscribe,
    )
    other = (
        micros_or_0(record.start),
        micros(begin),
        micros(end),
        record.suspended_s or 0,
        record.time_limit_s,
        base_state(record.state),
        record.account.lower(),
        record.user,
        record.partition,
        record.qos,
        paid,
        *([fact.suspended_before_s] if fact.suspended_before_s else []),
    )
    return f"{_digest(given)}.{_digest(other)}"


def as_allocated(before: Charge | None, facts: str) -> dict[str, int] | None:
    """The TRES that were charged before, if the record says the same of them; else None."""
    if before is None or before.use is None or not before.facts:
        return None
    return before.use.tres if before.facts.partition(".")[0] == facts.partition(".")[0] else None


def _digest(of: tuple[object, ...]) -> str:
    return hashlib.blake2b(repr(of).encode(), digest_size=_BYTES).hexdigest()


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


class Uncounted(msgspec.Struct, frozen=True):
    """A TRES that rates weigh, and no job's AllocTRES shows.

    Attributes:
        cluster: The cluster.
        name: The TRES.
        what: What that means, and what to do.
        is_mended: Whether slurm.conf can have it counted.
    """

    cluster: str
    name: str
    what: str
    is_mended: bool


def uncounted(rates: Iterable[Rate], picture: Picture) -> list[Uncounted]:
    """What rates of a cluster weigh that Slurm does not count there."""
    names = {
        name
        for rate in rates
        if rate.cluster in ("", picture.cluster) and not rate.free
        for name in untracked(rate, picture)
    }
    return [_said(name, picture) for name in sorted(names)]


def not_counted(clusters: Iterable[Pricing]) -> list[Finding]:
    """What of that slurm.conf can mend, as findings of the proof."""
    return [
        Finding(kind="not-counted", what=one.what, where=f"{one.cluster}/{one.name}")
        for pricing in clusters
        if pricing.picture is not None
        for one in uncounted(pricing.rates, pricing.picture)
        if one.is_mended
    ]


def _said(name: str, picture: Picture) -> Uncounted:
    is_gres = name.startswith("gres/")
    charged = "are charged what they asked for of it" if is_gres else "are charged nothing for it"
    is_mended = picture.accounting or not is_gres
    todo = (
        "name it in AccountingStorageTRES" if is_mended else "it counts GRES only with a slurmdbd"
    )
    what = f"Slurm of cluster {picture.cluster} does not count {name}: jobs {charged}; {todo}"
    return Uncounted(picture.cluster, name, what, is_mended)
