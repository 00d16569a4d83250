"""What a run, or a piece of one, is charged for: from Slurm's record of it."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from steward.bank.records import Rate, Use
from steward.bank.settings import BankSettings
from steward.core.errors import StewardError
from steward.core.records import JobRecord
from steward.slurm import tres
from steward.slurm.cluster_model import KILL_WAIT_S, NodeShape, Picture
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
