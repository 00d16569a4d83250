"""Billing: compute the charge of a finished run from Slurm's record of it.

:func:`compute_charge` is the entry point. It finds the rate, derives the TRES and seconds to charge
(:func:`derive_use`, :func:`derive_tres`), fingerprints Slurm's record (:func:`fingerprint_run`) and
prices the use. A run that never started costs nothing, nor does a federated job's copy that another
cluster ran. A resized run is charged in pieces, one per size, each from the end of the one before.
:func:`find_charge` and :func:`match_earlier_charge` match a run with its earlier charge, so that no
run is charged twice. :func:`compute_freed` and :func:`is_final` tell what happens to the SU hold.
:func:`find_uncounted_tres` finds TRES that rates weigh but Slurm does not track.

:class:`Pricing` holds the inputs. Called by the bank's consumer, reconciliation, backfill and
``steward bank explain``.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec

from steward.bank.ledger import LedgerFinding
from steward.bank.prices import compute_price, find_rate
from steward.bank.records import Charge, Hold, Rate, ResourceUse
from steward.bank.settings import BankSettings
from steward.core.errors import StewardError
from steward.core.records import JobRecord
from steward.core.timestamps import from_micros, to_micros, to_micros_or_zero
from steward.core.usage import RunEvent
from steward.slurm import tres
from steward.slurm.arrays import count_tasks
from steward.slurm.cluster_model import KILL_WAIT_S, ClusterModel, NodeShape
from steward.slurm.job_states import strip_state_suffix
from steward.slurm.times import load_zone
from steward.slurm.tres import count_requested_kinds, parse_tres, strip_tres_type

EXCLUSIVE_NODES: Final = "NO"
"""Slurm's OverSubscribe value of a job that has its nodes to itself."""

_LIMIT_CHECK_S: Final = 75
"""A minute until slurmctld checks time limits, plus clock difference and message delay."""


def derive_use(
    record: JobRecord,
    rate: Rate,
    picture: ClusterModel | None,
    settings: BankSettings,
    *,
    begin: datetime | None = None,
    end: datetime | None = None,
    suspended_s: int | None = None,
    held: Mapping[str, int] | None = None,
    amounts: Mapping[str, int] | None = None,
    whole: bool | None = None,
) -> ResourceUse:
    """Derive the resource use to charge: TRES, start, seconds, QOS and state.

    Suspended time is not charged unless [bank] suspended says otherwise. Neither is time past the
    time limit, as far as Slurm lets jobs overrun it, unless over_limit says so. Nodes that are
    charged whole count with their configured TRES, whatever the job was allocated.

    Args:
        record: Slurm's record of the run or piece.
        rate: Its rate, which may charge whole nodes.
        picture: The cluster model; None if unknown, then nodes are not charged whole.
        settings: The settings [bank].
        begin: Start of the piece; None for the run's start.
        end: End of the piece; None for the run's end.
        suspended_s: Seconds the piece was suspended; None for those of the record.
        held: TRES of the job's hold, used for TRES that Slurm does not count for any job
            (not in AccountingStorageTRES); without a hold, the requested amount counts.
        amounts: The TRES, if charged before; None to derive them, see :func:`derive_tres`.
        whole: Whether nodes are charged whole; None to derive it, see :func:`is_charged_whole`.
    """
    start = record.start
    state = record.state.partition(" ")[0].rstrip("+").upper()
    if whole is None:
        whole = is_charged_whole(record, rate, picture)
    if amounts is None:
        amounts = derive_tres(record, picture, held or {}, whole=whole)
    if start is None:
        return ResourceUse(tres=dict(amounts), qos=record.qos, state=state)
    first, last = begin or start, end or record.end or start
    if suspended_s is None:
        suspended_s = record.suspended_s or 0
    seconds = _charged_seconds(record, settings, picture, first, last, suspended_s)
    return ResourceUse(
        tres=dict(amounts), start=first, seconds=seconds, qos=record.qos, state=state
    )


def derive_tres(
    record: JobRecord, picture: ClusterModel | None, held: Mapping[str, int], *, whole: bool
) -> dict[str, int]:
    """Return the TRES to charge for a run; its nodes' configured TRES if charged whole."""
    found = parse_tres(record.tres_allocated)
    if "cpu" not in found and record.cpus and found:
        found["cpu"] = record.cpus
    if picture is not None and record.nodelist and whole:
        for name, amount in _sum_node_tres(record.nodelist, picture).items():
            found[name] = max(found.get(name, 0), amount)
    for name, amount in tres.parse_licenses(record.licenses).items():
        found.setdefault(name, amount)
    if picture is not None and found:
        for name, amount in held.items():
            if name not in found and not picture.tracks(name):
                found[name] = amount
        _add_requested(found, record, picture)
    return found


def _add_requested(found: dict[str, int], record: JobRecord, picture: ClusterModel) -> None:
    """Add requested TRES that Slurm does not count and no hold covers."""
    asked = count_requested_kinds(record)
    known = {strip_tres_type(name) for name in found}
    for name, amount in asked.items():
        kind = strip_tres_type(name)
        if kind not in known and not picture.tracks(kind):
            found[kind] = found.get(kind, 0) + amount
        if name != kind and name not in found and not picture.tracks(name):
            found[name] = amount


def list_untracked_tres(rate: Rate, picture: ClusterModel) -> list[str]:
    """List TRES that a rate weighs but AllocTRES lacks: jobs' use of them is invisible."""
    return [
        name
        for name, weight in rate.weights.items()
        if weight and not name.startswith("license/") and not picture.tracks(name)
    ]


def _charged_seconds(
    record: JobRecord,
    settings: BankSettings,
    picture: ClusterModel | None,
    first: datetime,
    last: datetime,
    suspended_s: int,
) -> int:
    """Return the seconds to charge; suspended time and overrun count only as configured."""
    start = record.start or first
    part = settings.partition.get(record.partition)
    rule = (part.over_limit if part else None) or settings.over_limit
    if rule == "free" and record.time_limit_s is not None:
        # Slurm extends the time limit of a suspended job by the suspended time.
        allowed_s = record.time_limit_s + (record.suspended_s or 0)
        ran_s = (max(last, record.end or last) - start).total_seconds()
        # Users may lower a running job's limit: a longer run did not overrun the old limit.
        if ran_s <= allowed_s + _grace_s(record, picture):
            last = min(last, start + timedelta(seconds=allowed_s))
    seconds = int((last - first).total_seconds())
    return max(0, seconds if settings.suspended else seconds - suspended_s)


def _grace_s(record: JobRecord, picture: ClusterModel | None) -> int:
    """Return how many seconds past its limit Slurm ends a job at the latest.

    This is OverTimeLimit, plus up to a minute until slurmctld checks (it does every 30 s), plus
    KillWait: see slurm.conf(5). With OverTimeLimit UNLIMITED Slurm ends no job. A run that went
    on for longer than the other two was then meant to, and none of that time is free.
    """
    if picture is None:
        return _LIMIT_CHECK_S + KILL_WAIT_S
    part = picture.partitions.get(record.partition)
    over_s = part.over_time_s if part is not None else 0
    return (over_s or 0) + _LIMIT_CHECK_S + picture.kill_wait_s


def is_charged_whole(record: JobRecord, rate: Rate, picture: ClusterModel | None) -> bool:
    """Return True if a run's nodes are charged whole, by rate, request or cluster settings."""
    if picture is None:
        return False
    part = picture.partitions.get(record.partition)
    return (
        rate.whole_nodes
        or record.oversubscribe == EXCLUSIVE_NODES
        or picture.linear
        or (part is not None and part.exclusive)
    )


def _sum_node_tres(nodelist: str, picture: ClusterModel) -> dict[str, int]:
    """Sum the configured TRES of the nodes in a list, as far as known."""
    from steward.slurm.nodelists import expand_nodelist

    shapes = _shapes_by_node(picture)
    found: dict[str, int] = {}
    try:
        names = expand_nodelist(nodelist)
    except StewardError:
        # For an unreadable node list, only the allocation's own TRES are known.
        return {}
    for name in names:
        shape = shapes.get(name)
        if shape is None:
            continue
        for of, amount in shape.whole.items():
            found[of] = found.get(of, 0) + amount
    return found


_node_shapes: Final[dict[str, tuple[ClusterModel, dict[str, NodeShape]]]] = {}
"""By cluster: the model used last, with the shape of each of its nodes (a cache)."""


def _shapes_by_node(picture: ClusterModel) -> dict[str, NodeShape]:
    """Return the shape of each node, by name."""
    known = _node_shapes.get(picture.cluster)
    if known is None or known[0] is not picture:
        from steward.slurm.nodelists import expand_nodelist

        shapes = {
            name: shape
            for shape in picture.shapes
            if shape.nodes
            for name in expand_nodelist(shape.nodes)
        }
        known = _node_shapes[picture.cluster] = picture, shapes
    return known[1]


_BYTES: Final = 9
"""Length of each digest in a fingerprint, in bytes."""


def fingerprint_run(fact: RunEvent, begin: datetime, end: datetime, paid: int) -> str:
    """Fingerprint a run: digest of its allocation, dot, digest of everything else.

    Args:
        fact: The run or piece.
        begin: Start of the charged time.
        end: End of the charged time.
        paid: Charges of the run's former sizes, in micro-SU.
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
        to_micros_or_zero(record.start),
        to_micros(begin),
        to_micros(end),
        record.suspended_s or 0,
        record.time_limit_s,
        strip_state_suffix(record.state),
        record.account.lower(),
        record.user,
        record.partition,
        record.qos,
        paid,
        *([fact.suspended_before_s] if fact.suspended_before_s else []),
    )
    return f"{_hash_values(given)}.{_hash_values(other)}"


def get_unchanged_tres(before: Charge | None, facts: str) -> dict[str, int] | None:
    """Return the TRES charged before if the record's allocation is unchanged, else None."""
    if before is None or before.use is None or not before.facts:
        return None
    return before.use.tres if before.facts.partition(".")[0] == facts.partition(".")[0] else None


def _hash_values(of: tuple[object, ...]) -> str:
    return hashlib.blake2b(repr(of).encode(), digest_size=_BYTES).hexdigest()


REVOKED_STATES: Final = frozenset({"REVOKED", "REQUEUE_FED"})
"""End states of federated jobs' copies that another cluster ran."""

REQUEUED_STATES: Final = frozenset({"REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
"""End states of a run that another run follows: its hold stays."""

_SAME_S: Final = 2
"""Largest difference of two start times of the same run, in seconds."""


class Pricing(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of charges: settings, rates, cluster model and time zone.

    Attributes:
        settings: The bank's settings.
        rates: All rates.
        picture: The cluster model from the last query; None before the first.
        zone: IANA time zone of the cluster; "" for the host's.
    """

    settings: BankSettings
    rates: Sequence[Rate]
    picture: ClusterModel | None = None
    zone: str = ""


def is_charged(fact: RunEvent) -> bool:
    """Return True if a run or piece is to be charged once it is over.

    Runs imported from other systems are not; a backfill charges them on request.
    """
    if fact.source or fact.record.start is None:
        return False
    return strip_state_suffix(fact.record.state) not in REVOKED_STATES


def compute_charge(
    cluster: str,
    fact: RunEvent,
    pricing: Pricing,
    *,
    pieces: Sequence[Charge] = (),
    hold: Hold | None = None,
    held: Mapping[str, int] | None = None,
    before: Charge | None = None,
    seen_at: datetime | None = None,
    why: str = "",
) -> Charge | None:
    """Compute the charge of a finished run.

    An earlier charge stays unchanged while Slurm's record is unchanged, even if cluster or
    settings have changed. If the record changed, the same rate applies, and whole nodes stay
    whole nodes.

    Args:
        cluster: The cluster's name.
        fact: The run or piece.
        pricing: Settings, rates and cluster model.
        pieces: Charges of the run's former sizes.
        hold: The hold that covers it.
        held: TRES that Slurm does not count for any job; None to take the hold's.
        before: Its earlier charge; None if not charged yet.
        seen_at: When it was found to be over, if no source reported its end.
        why: Reason of the charge; "" to derive it from the run.

    Returns:
        The charge; None if there is nothing to charge.

    Raises:
        NoRate: No rate applies.
    """
    if not is_charged(fact):
        return None
    record = fact.record
    begin, end = _find_begin(fact, pieces), fact.piece_end or record.end or seen_at
    if begin is None or end is None:
        return None
    minimum_paid = sum(piece.amount for piece in pieces)
    facts = fingerprint_run(fact, begin, end, minimum_paid)
    why = why or _derive_reason(fact)
    if before is not None and facts == before.facts:
        return _keep_charge(before, hold, why)
    rate = _find_rate(cluster, fact, pricing, before)
    if held is None and hold is not None and hold.quote is not None:
        held = hold.quote.tres
    whole = is_charged_whole(record, rate, pricing.picture)
    if before is not None and before.facts:
        # Late observations may show what the job itself requested.
        whole = before.whole or record.oversubscribe == EXCLUSIVE_NODES
    use = derive_use(
        *(record, rate, pricing.picture, pricing.settings),
        begin=begin,
        end=max(begin, end),
        suspended_s=max(0, (record.suspended_s or 0) - fact.suspended_before_s),
        held=held,
        amounts=get_unchanged_tres(before, facts),
        whole=whole,
    )
    if fact.piece_end is not None or pieces:
        # The minimum price applies once per run, over all its sizes.
        least = 0 if fact.piece_end is not None else max(0, rate.minimum - minimum_paid)
        use = msgspec.structs.replace(use, least=least)
    amount, number = _price_use(use, rate, pricing.zone)
    return Charge(
        cluster=cluster,
        job_id=fact.job_id,
        first_submit=fact.first_submit,
        restarts=fact.restarts,
        piece_us=to_micros_or_zero(fact.piece_end),
        account=record.account.lower(),
        user=record.user or ("" if record.uid is None else str(record.uid)),
        partition=record.partition,
        amount=amount,
        use=use,
        rate=number,
        hold="" if hold is None else hold.id,
        shares=() if hold is None else hold.shares,
        why=why,
        # Without a cluster model the nodes' TRES are unknown: empty facts force a later recharge.
        facts=facts if pricing.picture is not None else "",
        whole=whole,
    )


def _keep_charge(before: Charge, hold: Hold | None, why: str) -> Charge:
    """Return the earlier charge unchanged but for reason and hold."""
    if hold is None:
        return msgspec.structs.replace(before, why=why)
    return msgspec.structs.replace(before, why=why, hold=hold.id, shares=hold.shares)


def _find_rate(cluster: str, fact: RunEvent, pricing: Pricing, before: Charge | None) -> Rate:
    """Return the rate of the earlier charge, unless partition or QOS changed; else look it up."""
    record = fact.record
    if before is not None and before.use is not None and before.partition == record.partition:
        for rate in pricing.rates:
            if rate.number == before.rate and before.use.qos == record.qos:
                return rate
    return find_rate(pricing.rates, cluster, record.partition, record.qos, fact.first_submit)


def find_charge(fact: RunEvent, known: Sequence[Charge]) -> Charge | None:
    """Find the existing charge of a run or of the same piece of it.

    Args:
        fact: The run.
        known: Charges under its job id.
    """
    piece_us = to_micros_or_zero(fact.piece_end)
    begin = _find_begin(fact, [one for one in known if is_piece_of(one, fact)])
    alike = [one for one in known if one.restarts == fact.restarts]
    for one in alike:
        if one.piece_us == piece_us and (
            abs((one.first_submit - fact.first_submit).total_seconds()) < 1
        ):
            return one
    use = ResourceUse(tres={}, start=begin)
    for one in alike:
        if bool(one.piece_us) == bool(piece_us) and _is_same_time(one.use, use):
            return one
    return None


def _price_use(use: ResourceUse, rate: Rate, zone: str) -> tuple[int, int]:
    reckoned = compute_price(use, rate, load_zone(zone))
    return reckoned.amount, rate.number


def _derive_reason(fact: RunEvent) -> str:
    """Return the reason of a charge: correction, end, or piece."""
    if fact.correction:
        return "correction"
    return "end" if fact.piece_end is None else "piece"


def _find_begin(fact: RunEvent, pieces: Sequence[Charge]) -> datetime | None:
    """Return the start of the size to charge: of a resized run, the end of the last piece."""
    start = fact.record.start
    if start is None or fact.piece_end is not None:
        return start
    return max([start, *(from_micros(piece.piece_us) for piece in pieces)])


def compute_freed(fact: RunEvent, hold: Hold) -> int:
    """Return how much of a hold a finished run frees, whatever its charge.

    Each task of an array frees its part of the array's hold; tasks cancelled before they had
    own records free one part each.
    """
    record = fact.record
    if fact.piece_end is not None or not is_array_task(record) or is_requeued(fact):
        return 0
    per_task = hold.quote.per_task if hold.quote else 0
    tasks = 1 if record.array_task.isdigit() else count_tasks(record.array_task)
    return min(hold.remaining, per_task * max(1, tasks))


def is_final(fact: RunEvent) -> bool:
    """Return True if nothing more is charged to the hold of a finished run."""
    return fact.piece_end is None and not is_array_task(fact.record) and not is_requeued(fact)


def is_requeued(fact: RunEvent) -> bool:
    """Return True if the job is requeued with the end of this run."""
    return strip_state_suffix(fact.record.state) in REQUEUED_STATES


def is_requeue_lost(fact: RunEvent, before: Charge | None) -> bool:
    """Return True if a run that was to be requeued turned out to be the job's end.

    A killed slurmctld may forget that it requeued the job, or the job is gone entirely.

    Args:
        fact: The run.
        before: Its charge so far.
    """
    if (
        before is None
        or before.use is None
        or strip_state_suffix(before.use.state) not in REQUEUED_STATES
    ):
        return False
    return not is_requeued(fact)


def is_array_task(record: JobRecord) -> bool:
    """Return True for an array task; the tasks of an array share a hold."""
    return bool(record.array_job_id)


def get_hold_job_id(record: JobRecord) -> int:
    """Return the job id that a hold is stored under: the array's for tasks, else the job's."""
    return record.array_job_id or record.job_id


def match_earlier_charge(charge: Charge, known: Sequence[Charge]) -> Charge:
    """Return the charge under the key of an earlier charge of the same run, if there is one.

    When an earlier run of a job id becomes known, the first submit time changes, and so does
    the key: that must not charge a run twice.

    Args:
        charge: The new charge.
        known: Charges under its job id.
    """
    if any(other.key == charge.key for other in known) or charge.use is None:
        return charge
    for other in known:
        if _run_part(other) == _run_part(charge) and _is_same_time(other.use, charge.use):
            return msgspec.structs.replace(
                charge, first_submit=other.first_submit, piece_us=other.piece_us
            )
    return charge


def _run_part(charge: Charge) -> tuple[int, bool]:
    return charge.restarts, bool(charge.piece_us)


def _is_same_time(one: ResourceUse | None, other: ResourceUse) -> bool:
    if one is None or one.start is None or other.start is None:
        return False
    return abs((one.start - other.start).total_seconds()) <= _SAME_S


def is_piece_of(charge: Charge, fact: RunEvent) -> bool:
    """Return True if a charge is for a former size of this run."""
    start = fact.record.start
    if start is None or not charge.piece_us or charge.restarts != fact.restarts:
        return False
    # A previous job with the same id has pieces that ended before this run began.
    end = fact.piece_end or fact.record.end
    return charge.piece_us > to_micros(start) and (end is None or charge.piece_us <= to_micros(end))


class UncountedTres(msgspec.Struct, frozen=True):
    """TRES that rates weigh but no job's AllocTRES shows.

    Attributes:
        cluster: The cluster.
        name: The TRES.
        what: Consequence and remedy.
        is_mended: Whether a change of slurm.conf makes Slurm count it.
    """

    cluster: str
    name: str
    what: str
    is_mended: bool


def find_uncounted_tres(rates: Iterable[Rate], picture: ClusterModel) -> list[UncountedTres]:
    """List TRES that a cluster's rates weigh but its Slurm does not count.

    Of such a GRES, jobs are charged what they requested; of other TRES, nothing.
    """
    names = {
        name
        for rate in rates
        if rate.cluster in ("", picture.cluster) and not rate.free
        for name in list_untracked_tres(rate, picture)
    }
    return [_describe_uncounted(name, picture) for name in sorted(names)]


def find_fixable_tres(clusters: Iterable[Pricing]) -> list[LedgerFinding]:
    """List uncounted TRES that slurm.conf can make Slurm count, as findings of the check."""
    return [
        LedgerFinding(kind="not-counted", what=one.what, where=f"{one.cluster}/{one.name}")
        for pricing in clusters
        if pricing.picture is not None
        for one in find_uncounted_tres(pricing.rates, pricing.picture)
        if one.is_mended
    ]


def _describe_uncounted(name: str, picture: ClusterModel) -> UncountedTres:
    """Describe a TRES that Slurm does not count, with the remedy."""
    is_gres = name.startswith("gres/")
    charged = "are charged what they asked for of it" if is_gres else "are charged nothing for it"
    is_mended = picture.accounting or not is_gres
    todo = (
        "name it in AccountingStorageTRES" if is_mended else "it counts GRES only with a slurmdbd"
    )
    what = f"Slurm of cluster {picture.cluster} does not count {name}: jobs {charged}; {todo}"
    return UncountedTres(picture.cluster, name, what, is_mended)
