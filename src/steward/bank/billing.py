"""Billing: compute the charge of a finished run from Slurm's record of it.

:func:`compute_charge` is the entry point. It finds the rate, derives the TRES and seconds to charge
(:func:`derive_use`, :func:`derive_tres`), fingerprints Slurm's record (:func:`fingerprint_run`) and
prices the use. A run that never started costs nothing, nor does a federated job's copy that another
cluster ran. A resized run is charged in pieces, one per size, each from the end of the one before.
:func:`find_charge` and :func:`match_earlier_charge` match a run with its earlier charge, so that no
run is charged twice. :func:`compute_freed` and :func:`ends_hold` tell what happens to the SU hold.
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
    model: ClusterModel | None,
    settings: BankSettings,
    *,
    begin: datetime | None = None,
    end: datetime | None = None,
    suspended_s: int | None = None,
    hold_tres: Mapping[str, int] | None = None,
    charged_tres: Mapping[str, int] | None = None,
    whole_nodes: bool | None = None,
) -> ResourceUse:
    """Derive the resource use to charge: TRES, start, seconds, QOS and state.

    Suspended time is not charged unless [bank] suspended says otherwise. Neither is time past the
    time limit, as far as Slurm lets jobs overrun it, unless over_limit says so. Nodes that are
    charged whole count with their configured TRES, whatever the job was allocated.

    Args:
        record: Slurm's record of the run or piece.
        rate: Its rate, which may charge whole nodes.
        model: The cluster model; None if unknown, then nodes are not charged whole.
        settings: The settings [bank].
        begin: Start of the piece; None for the run's start.
        end: End of the piece; None for the run's end.
        suspended_s: Seconds the piece was suspended; None for those of the record.
        hold_tres: TRES of the job's hold, used for TRES that Slurm does not count for any job
            (not in AccountingStorageTRES); without a hold, the requested amount counts.
        charged_tres: The TRES, if charged before; None to derive them, see :func:`derive_tres`.
        whole_nodes: Whether nodes are charged whole; None to derive it, see
            :func:`is_charged_whole`.
    """
    start = record.start
    state = record.state.partition(" ")[0].rstrip("+").upper()
    if whole_nodes is None:
        whole_nodes = is_charged_whole(record, rate, model)
    if charged_tres is None:
        charged_tres = derive_tres(record, model, hold_tres or {}, whole_nodes=whole_nodes)
    if start is None:
        return ResourceUse(tres=dict(charged_tres), qos=record.qos, state=state)
    charged_from, charged_until = begin or start, end or record.end or start
    if suspended_s is None:
        suspended_s = record.suspended_s or 0
    seconds = _compute_charged_s(record, settings, model, charged_from, charged_until, suspended_s)
    return ResourceUse(
        tres=dict(charged_tres), start=charged_from, seconds=seconds, qos=record.qos, state=state
    )


def derive_tres(
    record: JobRecord,
    model: ClusterModel | None,
    hold_tres: Mapping[str, int],
    *,
    whole_nodes: bool,
) -> dict[str, int]:
    """Return the TRES to charge for a run; its nodes' configured TRES if charged whole."""
    amounts = parse_tres(record.tres_allocated)
    if "cpu" not in amounts and record.cpus and amounts:
        amounts["cpu"] = record.cpus
    if model is not None and record.nodelist and whole_nodes:
        for name, amount in _sum_node_tres(record.nodelist, model).items():
            amounts[name] = max(amounts.get(name, 0), amount)
    for name, amount in tres.parse_licenses(record.licenses).items():
        amounts.setdefault(name, amount)
    if model is not None and amounts:
        for name, amount in hold_tres.items():
            if name not in amounts and not model.tracks(name):
                amounts[name] = amount
        _add_requested(amounts, record, model)
    return amounts


def _add_requested(amounts: dict[str, int], record: JobRecord, model: ClusterModel) -> None:
    """Add requested TRES that Slurm does not count and no hold covers."""
    requested = count_requested_kinds(record)
    known_kinds = {strip_tres_type(name) for name in amounts}
    for name, amount in requested.items():
        kind = strip_tres_type(name)
        if kind not in known_kinds and not model.tracks(kind):
            amounts[kind] = amounts.get(kind, 0) + amount
        if name != kind and name not in amounts and not model.tracks(name):
            amounts[name] = amount


def list_untracked_tres(rate: Rate, model: ClusterModel) -> list[str]:
    """List TRES that a rate weighs but AllocTRES lacks: jobs' use of them is invisible."""
    return [
        name
        for name, weight in rate.weights.items()
        if weight and not name.startswith("license/") and not model.tracks(name)
    ]


def _compute_charged_s(
    record: JobRecord,
    settings: BankSettings,
    model: ClusterModel | None,
    charged_from: datetime,
    charged_until: datetime,
    suspended_s: int,
) -> int:
    """Return the seconds to charge; suspended time and overrun count only as configured."""
    start = record.start or charged_from
    partition = settings.partition.get(record.partition)
    over_limit = (partition.over_limit if partition else None) or settings.over_limit
    if over_limit == "free" and record.time_limit_s is not None:
        # Slurm extends the time limit of a suspended job by the suspended time.
        allowed_s = record.time_limit_s + (record.suspended_s or 0)
        ran_s = (max(charged_until, record.end or charged_until) - start).total_seconds()
        # Users may lower a running job's limit: a longer run did not overrun the old limit.
        if ran_s <= allowed_s + _compute_grace_s(record, model):
            charged_until = min(charged_until, start + timedelta(seconds=allowed_s))
    seconds = int((charged_until - charged_from).total_seconds())
    return max(0, seconds if settings.suspended else seconds - suspended_s)


def _compute_grace_s(record: JobRecord, model: ClusterModel | None) -> int:
    """Return how many seconds past its limit Slurm ends a job at the latest.

    This is OverTimeLimit, plus up to a minute until slurmctld checks (it does every 30 s), plus
    KillWait: see slurm.conf(5). With OverTimeLimit UNLIMITED Slurm ends no job. A run that went
    on for longer than the other two was then meant to, and none of that time is free.
    """
    if model is None:
        return _LIMIT_CHECK_S + KILL_WAIT_S
    partition = model.partitions.get(record.partition)
    over_s = partition.over_time_s if partition is not None else 0
    return (over_s or 0) + _LIMIT_CHECK_S + model.kill_wait_s


def is_charged_whole(record: JobRecord, rate: Rate, model: ClusterModel | None) -> bool:
    """Return True if a run's nodes are charged whole, by rate, request or cluster settings."""
    if model is None:
        return False
    partition = model.partitions.get(record.partition)
    return (
        rate.whole_nodes
        or record.oversubscribe == EXCLUSIVE_NODES
        or model.linear
        or (partition is not None and partition.exclusive)
    )


def _sum_node_tres(nodelist: str, model: ClusterModel) -> dict[str, int]:
    """Sum the configured TRES of the nodes in a list, as far as known."""
    from steward.slurm.nodelists import expand_nodelist

    shapes = _map_node_shapes(model)
    amounts: dict[str, int] = {}
    try:
        node_names = expand_nodelist(nodelist)
    except StewardError:
        # For an unreadable node list, only the allocation's own TRES are known.
        return {}
    for node_name in node_names:
        shape = shapes.get(node_name)
        if shape is None:
            continue
        for tres_name, amount in shape.whole.items():
            amounts[tres_name] = amounts.get(tres_name, 0) + amount
    return amounts


_node_shapes: Final[dict[str, tuple[ClusterModel, dict[str, NodeShape]]]] = {}
"""By cluster: the model used last, with the shape of each of its nodes (a cache)."""


def _map_node_shapes(model: ClusterModel) -> dict[str, NodeShape]:
    """Return the shape of each node, by name."""
    cached = _node_shapes.get(model.cluster)
    if cached is None or cached[0] is not model:
        from steward.slurm.nodelists import expand_nodelist

        shapes = {
            name: shape
            for shape in model.shapes
            if shape.nodes
            for name in expand_nodelist(shape.nodes)
        }
        cached = _node_shapes[model.cluster] = model, shapes
    return cached[1]


_DIGEST_BYTES: Final = 9
"""Length of each digest in a fingerprint, in bytes."""


def fingerprint_run(run: RunEvent, begin: datetime, end: datetime, pieces_amount: int) -> str:
    """Fingerprint a run: digest of its allocation, dot, digest of everything else.

    Args:
        run: The run or piece.
        begin: Start of the charged time.
        end: End of the charged time.
        pieces_amount: Charges of the run's former sizes, in micro-SU.
    """
    record = run.record
    allocated = (
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
        pieces_amount,
        *([run.suspended_before_s] if run.suspended_before_s else []),
    )
    return f"{_hash_values(allocated)}.{_hash_values(other)}"


def get_unchanged_tres(earlier: Charge | None, fingerprint: str) -> dict[str, int] | None:
    """Return the TRES charged before if the record's allocation is unchanged, else None."""
    if earlier is None or earlier.use is None or not earlier.facts:
        return None
    return (
        earlier.use.tres
        if earlier.facts.partition(".")[0] == fingerprint.partition(".")[0]
        else None
    )


def _hash_values(values: tuple[object, ...]) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=_DIGEST_BYTES).hexdigest()


REVOKED_STATES: Final = frozenset({"REVOKED", "REQUEUE_FED"})
"""End states of federated jobs' copies that another cluster ran."""

REQUEUED_STATES: Final = frozenset({"REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
"""End states of a run that another run follows: its hold stays."""

_MAX_START_DIFFERENCE_S: Final = 2
"""Largest difference of two start times of the same run, in seconds."""


class Pricing(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of charges: settings, rates, cluster model and time zone.

    Attributes:
        settings: The bank's settings.
        rates: All rates.
        model: The cluster model from the last query; None before the first.
        zone: IANA time zone of the cluster; "" for the host's.
    """

    settings: BankSettings
    rates: Sequence[Rate]
    model: ClusterModel | None = None
    zone: str = ""


def is_charged(run: RunEvent) -> bool:
    """Return True if a run or piece is to be charged once it is over.

    A run that only an import knows is not, as long as its ``source`` says so. The bank's consumer
    clears it for runs that ended since the bank started and have no charge, a backfill for older
    ones.
    """
    if run.source or run.record.start is None:
        return False
    return strip_state_suffix(run.record.state) not in REVOKED_STATES


def compute_charge(
    cluster: str,
    run: RunEvent,
    pricing: Pricing,
    *,
    pieces: Sequence[Charge] = (),
    hold: Hold | None = None,
    hold_tres: Mapping[str, int] | None = None,
    earlier: Charge | None = None,
    seen_at: datetime | None = None,
    reason: str = "",
) -> Charge | None:
    """Compute the charge of a finished run.

    An earlier charge stays unchanged while Slurm's record is unchanged, even if cluster or
    settings have changed. If the record changed, the same rate applies, and whole nodes stay
    whole nodes.

    Args:
        cluster: The cluster's name.
        run: The run or piece.
        pricing: Settings, rates and cluster model.
        pieces: Charges of the run's former sizes.
        hold: The hold that covers it.
        hold_tres: TRES that Slurm does not count for any job; None to take the hold's.
        earlier: Its earlier charge; None if not charged yet.
        seen_at: When it was found to be over, if no source reported its end.
        reason: Reason of the charge; "" to derive it from the run.

    Returns:
        The charge; None if there is nothing to charge.

    Raises:
        NoRate: No rate applies.
    """
    if not is_charged(run):
        return None
    record = run.record
    begin, end = _find_begin(run, pieces), run.piece_end or record.end or seen_at
    if begin is None or end is None:
        return None
    pieces_amount = sum(piece.amount for piece in pieces)
    fingerprint = fingerprint_run(run, begin, end, pieces_amount)
    reason = reason or _derive_reason(run)
    if earlier is not None and fingerprint == earlier.facts:
        return _keep_charge(earlier, hold, reason)
    rate = _find_rate(cluster, run, pricing, earlier)
    if hold_tres is None and hold is not None and hold.quote is not None:
        hold_tres = hold.quote.tres
    whole_nodes = is_charged_whole(record, rate, pricing.model)
    if earlier is not None and earlier.facts:
        # Late observations may show what the job itself requested.
        whole_nodes = earlier.whole or record.oversubscribe == EXCLUSIVE_NODES
    use = derive_use(
        *(record, rate, pricing.model, pricing.settings),
        begin=begin,
        end=max(begin, end),
        suspended_s=max(0, (record.suspended_s or 0) - run.suspended_before_s),
        hold_tres=hold_tres,
        charged_tres=get_unchanged_tres(earlier, fingerprint),
        whole_nodes=whole_nodes,
    )
    if run.piece_end is not None or pieces:
        # The minimum price applies once per run, over all its sizes.
        minimum = 0 if run.piece_end is not None else max(0, rate.minimum - pieces_amount)
        use = msgspec.structs.replace(use, least=minimum)
    amount, rate_number = _price_use(use, rate, pricing.zone)
    return Charge(
        cluster=cluster,
        job_id=run.job_id,
        first_submit=run.first_submit,
        restarts=run.restarts,
        piece_us=to_micros_or_zero(run.piece_end),
        account=record.account.lower(),
        user=record.user or ("" if record.uid is None else str(record.uid)),
        partition=record.partition,
        amount=amount,
        use=use,
        rate=rate_number,
        hold="" if hold is None else hold.id,
        shares=() if hold is None else hold.shares,
        why=reason,
        # Without a cluster model the nodes' TRES are unknown: empty facts force a later recharge.
        facts=fingerprint if pricing.model is not None else "",
        whole=whole_nodes,
    )


def _keep_charge(earlier: Charge, hold: Hold | None, reason: str) -> Charge:
    """Return the earlier charge unchanged but for reason and hold."""
    if hold is None:
        return msgspec.structs.replace(earlier, why=reason)
    return msgspec.structs.replace(earlier, why=reason, hold=hold.id, shares=hold.shares)


def _find_rate(cluster: str, run: RunEvent, pricing: Pricing, earlier: Charge | None) -> Rate:
    """Return the rate of the earlier charge, unless partition or QOS changed; else look it up."""
    record = run.record
    if earlier is not None and earlier.use is not None and earlier.partition == record.partition:
        for rate in pricing.rates:
            if rate.number == earlier.rate and earlier.use.qos == record.qos:
                return rate
    return find_rate(pricing.rates, cluster, record.partition, record.qos, run.first_submit)


def find_charge(run: RunEvent, charges: Sequence[Charge]) -> Charge | None:
    """Find the existing charge of a run or of the same piece of it.

    An import may lack the restart count: of an imported run, the start decides.

    Args:
        run: The run.
        charges: Charges under its job id.
    """
    piece_us = to_micros_or_zero(run.piece_end)
    begin = _find_begin(run, [charge for charge in charges if is_piece_of(charge, run)])
    same_run = [charge for charge in charges if charge.restarts == run.restarts]
    for charge in same_run:
        if charge.piece_us == piece_us and (
            abs((charge.first_submit - run.first_submit).total_seconds()) < 1
        ):
            return charge
    use = ResourceUse(tres={}, start=begin)
    for charge in charges if run.source else same_run:
        if bool(charge.piece_us) == bool(piece_us) and _is_same_time(charge.use, use):
            return charge
    return None


def _price_use(use: ResourceUse, rate: Rate, zone: str) -> tuple[int, int]:
    price = compute_price(use, rate, load_zone(zone))
    return price.amount, rate.number


def _derive_reason(run: RunEvent) -> str:
    """Return the reason of a charge: correction, end, or piece."""
    if run.correction:
        return "correction"
    return "end" if run.piece_end is None else "piece"


def _find_begin(run: RunEvent, pieces: Sequence[Charge]) -> datetime | None:
    """Return the start of the size to charge: of a resized run, the end of the last piece."""
    start = run.record.start
    if start is None or run.piece_end is not None:
        return start
    return max([start, *(from_micros(piece.piece_us) for piece in pieces)])


def compute_freed(run: RunEvent, hold: Hold) -> int:
    """Return how much of a hold a finished run frees, whatever its charge.

    Each task of an array frees its part of the array's hold; tasks cancelled before they had
    own records free one part each.
    """
    record = run.record
    if run.piece_end is not None or not is_array_task(record) or is_requeued(run):
        return 0
    per_task = hold.quote.per_task if hold.quote else 0
    task_count = 1 if record.array_task.isdigit() else count_tasks(record.array_task)
    return min(hold.remaining, per_task * max(1, task_count))


def ends_hold(run: RunEvent) -> bool:
    """Return True if nothing more is charged to the hold of a finished run."""
    return run.piece_end is None and not is_array_task(run.record) and not is_requeued(run)


def is_requeued(run: RunEvent) -> bool:
    """Return True if the job is requeued with the end of this run."""
    return strip_state_suffix(run.record.state) in REQUEUED_STATES


def is_requeue_lost(run: RunEvent, earlier: Charge | None) -> bool:
    """Return True if a run that was to be requeued turned out to be the job's end.

    A killed slurmctld may forget that it requeued the job, or the job is gone entirely.

    Args:
        run: The run.
        earlier: Its charge so far.
    """
    if (
        earlier is None
        or earlier.use is None
        or strip_state_suffix(earlier.use.state) not in REQUEUED_STATES
    ):
        return False
    return not is_requeued(run)


def is_array_task(record: JobRecord) -> bool:
    """Return True for an array task; the tasks of an array share a hold."""
    return bool(record.array_job_id)


def get_hold_job_id(record: JobRecord) -> int:
    """Return the job id that a hold is stored under: the array's for tasks, else the job's."""
    return record.array_job_id or record.job_id


def match_earlier_charge(charge: Charge, charges: Sequence[Charge]) -> Charge:
    """Return the charge under the key of an earlier charge of the same run, if there is one.

    When an earlier run of a job id becomes known, the first submit time changes, and so does
    the key: that must not charge a run twice.

    Args:
        charge: The new charge.
        charges: Charges under its job id.
    """
    if any(earlier.key == charge.key for earlier in charges) or charge.use is None:
        return charge
    for earlier in charges:
        if _get_run_part(earlier) == _get_run_part(charge) and _is_same_time(
            earlier.use, charge.use
        ):
            return msgspec.structs.replace(
                charge, first_submit=earlier.first_submit, piece_us=earlier.piece_us
            )
    return charge


def _get_run_part(charge: Charge) -> tuple[int, bool]:
    return charge.restarts, bool(charge.piece_us)


def _is_same_time(first: ResourceUse | None, second: ResourceUse) -> bool:
    if first is None or first.start is None or second.start is None:
        return False
    return abs((first.start - second.start).total_seconds()) <= _MAX_START_DIFFERENCE_S


def is_piece_of(charge: Charge, run: RunEvent) -> bool:
    """Return True if a charge is for a former size of this run."""
    start = run.record.start
    if start is None or not charge.piece_us:
        return False
    if charge.restarts != run.restarts and not run.source:
        return False
    # A previous job with the same id has pieces that ended before this run began.
    end = run.piece_end or run.record.end
    return charge.piece_us > to_micros(start) and (end is None or charge.piece_us <= to_micros(end))


class UncountedTres(msgspec.Struct, frozen=True):
    """TRES that rates weigh but no job's AllocTRES shows.

    Attributes:
        cluster: The cluster.
        name: The TRES.
        what: Consequence and remedy.
        is_fixable: Whether a change of slurm.conf makes Slurm count it.
    """

    cluster: str
    name: str
    what: str
    is_fixable: bool


def find_uncounted_tres(rates: Iterable[Rate], model: ClusterModel) -> list[UncountedTres]:
    """List TRES that a cluster's rates weigh but its Slurm does not count.

    Of such a GRES, jobs are charged what they requested; of other TRES, nothing.
    """
    names = {
        name
        for rate in rates
        if rate.cluster in ("", model.cluster) and not rate.free
        for name in list_untracked_tres(rate, model)
    }
    return [_describe_uncounted(name, model) for name in sorted(names)]


def find_fixable_tres(pricings: Iterable[Pricing]) -> list[LedgerFinding]:
    """List uncounted TRES that slurm.conf can make Slurm count, as findings of the check."""
    return [
        LedgerFinding(
            kind="not-counted",
            finding=uncounted.what,
            object=f"{uncounted.cluster}/{uncounted.name}",
        )
        for pricing in pricings
        if pricing.model is not None
        for uncounted in find_uncounted_tres(pricing.rates, pricing.model)
        if uncounted.is_fixable
    ]


def _describe_uncounted(name: str, model: ClusterModel) -> UncountedTres:
    """Describe a TRES that Slurm does not count, with the remedy."""
    is_gres = name.startswith("gres/")
    consequence = "are charged the requested amount" if is_gres else "are not charged for it"
    is_fixable = model.accounting or not is_gres
    remedy = (
        "add it to AccountingStorageTRES"
        if is_fixable
        else "configure a slurmdbd, without which Slurm counts no GRES"
    )
    message = (
        f"Slurm of cluster {model.cluster} does not count {name}, so jobs {consequence}: {remedy}"
    )
    return UncountedTres(model.cluster, name, message, is_fixable)
