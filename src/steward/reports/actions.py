"""Report actions: ``reports.cluster``, ``.accounts``, ``.users``, ``.waits``, ``.waste`` and more.

``cluster`` builds the capacity report from the node history and the jobs' runs. The other six
reports need jobs alone: ``_on_jobs`` makes their handlers from the functions in
:mod:`steward.reports.usage`. Both read through a :class:`ReportsRoom`.

Users see their own jobs and those of accounts they coordinate; operators see all jobs. The capacity
report follows PrivateData (``usage``). Times are µs (``_us``) or seconds (``_s``) since the epoch.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec

from steward.core.access import Asker
from steward.core.actions import Action
from steward.core.errors import Refused, UsageError
from steward.core.timestamps import micros
from steward.reports import usage
from steward.reports.capacity import Capacity, Parts, Reserved, hours, names_of
from steward.reports.context import ReportsRoom
from steward.reports.history.reader import HistoryReader
from steward.reports.history.spans import OPEN_US, NodesAlike, NodeSpan, ReservationSpan
from steward.reports.requests import (
    AccountsAnswer,
    AccountsRequest,
    ClusterAnswer,
    ClusterRequest,
    ClusterRow,
    JobsAnswer,
    JobsRequest,
    PartitionsAnswer,
    PartitionsRequest,
    Period,
    ReportRequest,
    UsersAnswer,
    UsersRequest,
    WaitsAnswer,
    WaitsRequest,
    WasteAnswer,
    WasteRequest,
    asked,
    cut,
)
from steward.reports.runs import ALL, OF_CAPACITY, WITHOUT_USED, Periods, Run

_US: Final = 1_000_000
Rows = Callable[[Iterable[Run], Periods, Any], Sequence[Any]]


class Asked(msgspec.Struct, frozen=True):
    """The resolved clusters, time zone and periods of a report request.

    Attributes:
        clusters: Names of the clusters to report on.
        zone: IANA name of the time zone.
        periods: The periods, in order of time.
        bounds_us: Start of each period and end of the last, µs since the epoch.
    """

    clusters: tuple[str, ...]
    zone: str
    periods: tuple[Period, ...]

    @property
    def bounds_us(self) -> list[int]:
        """Return the start of each period and the end of the last, µs since the epoch."""
        return [*(micros(one.since) for one in self.periods), micros(self.periods[-1].until)]


def _understood(room: ReportsRoom, request: ReportRequest) -> Asked:
    """Resolve clusters, time zone and periods of a request."""
    clusters = room.clusters(request)
    name, zone = room.zone(request, clusters)
    begin, end = asked(request.since, request.until, room.now(), zone)
    return Asked(clusters=clusters, zone=name, periods=cut(begin, end, request.by, zone))


def _on_jobs(answer: type[Any], rows: Rows) -> Callable[[ReportsRoom, Asker, Any], Any]:
    """Make the handler of a report on jobs, limited to the jobs the user may see."""

    def run(room: ReportsRoom, asker: Asker, request: Any) -> Any:
        wanted = _understood(room, request)
        scopes = room.scopes(asker, wanted.clusters)
        is_all = all(scope.everything for scope in scopes.values())
        found = room.runs(
            *(request, wanted.clusters, None if is_all else scopes, wanted.periods),
            ALL if answer is WasteAnswer else WITHOUT_USED,
        )
        return answer(
            periods=wanted.periods,
            zone=wanted.zone,
            is_all=is_all,
            rows=tuple(rows(found, Periods(wanted.bounds_us), request)),
        )

    return run


def cluster(room: ReportsRoom, asker: Asker, request: ClusterRequest) -> ClusterAnswer:
    """Report how each cluster's CPU and GPU time was spent: allocated, down, planned or idle.

    Raises:
        Refused: PrivateData hides the usage of a requested cluster, or of every cluster.
        UsageError: A time or a cluster name is invalid, or a filter on jobs was given.
    """
    if request.accounts or request.users or request.partitions:
        raise UsageError("a cluster's capacity is nobody's alone: ask for 'reports.accounts'")
    wanted = _understood(room, request)
    shown = [name for name in wanted.clusters if room.access.may_see_all(asker, name, "usage")]
    if len(shown) < len(request.clusters) or not shown:
        raise Refused("usage of this cluster is shown to operators alone (PrivateData)")
    rows: list[ClusterRow] = []
    with room.history() as history:
        for name in shown:
            found = room.runs(request, (name,), None, wanted.periods, OF_CAPACITY)
            rows += _of_cluster(name, found, Periods(wanted.bounds_us), wanted.bounds_us, history)
    rows.sort(key=lambda row: (row.period, row.cluster))
    return ClusterAnswer(
        periods=wanted.periods,
        zone=wanted.zone,
        rows=tuple(rows),
        sensor=room.settings.sensor.enabled,
    )


def _of_cluster(
    name: str,
    runs: Iterable[Run],
    periods: Periods,
    bounds_us: list[int],
    history: HistoryReader | None,
) -> list[ClusterRow]:
    """Build a cluster's rows, one for each period."""
    since_us, until_us = bounds_us[0], bounds_us[-1]
    begins_us = history.nodes_begin_us([name]) if history else None
    known_us = min(max(since_us, OPEN_US if begins_us is None else begins_us), until_us)
    known_us -= known_us % _US
    nodes = history.alike_between(name, since_us, until_us) if history else []
    reservations = history.reservations_between(name, since_us, until_us) if history else []
    reserved = _reserved(history, name, reservations, since_us, until_us) if history else []
    # The hour in which the history begins is split in two: capacity is known for its second part
    # only. Before that time the buckets need no full hours, because nothing is compared.
    bounds_s = hours((at_us // _US for at_us in (*bounds_us, known_us)), known_us // _US)
    capacity = Capacity(bounds_s, nodes, reserved)
    jobs = [0] * periods.count
    for run in runs:
        capacity.add(run, periods)
        periods.tally(run, jobs)
    buckets = [periods.of(at_s * _US) for at_s in bounds_s[:-1]]
    cpus, gpus = (_by_period(of.parts(), buckets, periods) for of in (capacity.cpus, capacity.gpus))
    rows = []
    for number, (begin, end) in enumerate(pairwise(bounds_us)):
        is_known = end > known_us
        rows.append(
            ClusterRow(
                period=number,
                cluster=name,
                jobs=jobs[number],
                allocated_cpu_s=cpus[number].allocated,
                allocated_gpu_s=gpus[number].allocated,
                known_s=max(0, end - max(begin, known_us)) // _US,
                **(_known(cpus[number], gpus[number]) if is_known else {}),
                **_at_the_end(nodes, end),
            )
        )
    return rows


def _reserved(
    history: HistoryReader,
    cluster: str,
    reservations: Sequence[ReservationSpan],
    since_us: int,
    until_us: int,
) -> list[Reserved]:
    """Pair each reservation with the state spans of its nodes."""
    named = [names_of(one) for one in reservations]
    spans: dict[str, list[NodeSpan]] = {}
    every = set().union(*named)
    for span in history.nodes_between(cluster, since_us, until_us, every) if every else ():
        spans.setdefault(span.node, []).append(span)
    return [
        (one, [span for node in names for span in spans.get(node, ())])
        for one, names in zip(reservations, named, strict=True)
    ]


def _by_period(
    parts: Sequence[Parts], buckets: Sequence[int | None], periods: Periods
) -> list[Parts]:
    """Sum the parts of the buckets in each period."""
    found = [Parts() for _ in range(periods.count)]
    for one, number in zip(parts, buckets, strict=True):
        if number is not None:
            found[number].add(one)
    return found


def _known(cpus: Parts, gpus: Parts) -> dict[str, int]:
    """Return the capacity fields of a row."""
    return {
        "down_cpu_s": cpus.down,
        "planned_down_cpu_s": cpus.planned_down,
        "planned_cpu_s": cpus.planned,
        "idle_cpu_s": cpus.idle,
        "reported_cpu_s": cpus.reported,
        "down_gpu_s": gpus.down,
        "planned_down_gpu_s": gpus.planned_down,
        "idle_gpu_s": gpus.idle,
        "reported_gpu_s": gpus.reported,
    }


def _at_the_end(nodes: Iterable[NodesAlike], end_us: int) -> dict[str, int]:
    """Count nodes, CPUs and GPUs at the end of a period."""
    there = [alike for alike in nodes if alike.from_us < end_us <= alike.until_us]
    return {
        "cpus": sum(alike.cpus for alike in there),
        "gpus": sum(alike.gpus for alike in there),
        "nodes": sum(alike.nodes for alike in there),
    }


def _actions() -> Iterable[Action]:
    on_jobs: tuple[tuple[str, str, type, type, Rows], ...] = (
        (
            *("accounts", "Who used what, by account and user."),
            *(AccountsRequest, AccountsAnswer),
            lambda runs, periods, _request: usage.accounts(runs, periods),
        ),
        (
            *("users", "Who used most."),
            *(UsersRequest, UsersAnswer),
            lambda runs, periods, request: usage.users(runs, periods, request.top),
        ),
        (
            *("partitions", "What was used of partitions, and how long jobs waited."),
            *(PartitionsRequest, PartitionsAnswer),
            lambda runs, periods, _request: usage.partitions(runs, periods),
        ),
        (
            *("waits", "How long jobs waited."),
            *(WaitsRequest, WaitsAnswer),
            lambda runs, periods, one: usage.waits(runs, periods, one.group, one.sizes),
        ),
        (
            *("jobs", "How many jobs there were, by account, size and state."),
            *(JobsRequest, JobsAnswer),
            lambda runs, periods, request: usage.jobs(runs, periods, request.sizes),
        ),
        (
            *("waste", "What was asked for and not used."),
            *(WasteRequest, WasteAnswer),
            lambda runs, periods, request: usage.waste(runs, periods, request.top),
        ),
    )
    yield Action(
        name="reports.cluster",
        help="What a cluster's CPUs and GPUs did.",
        request=ClusterRequest,
        answer=ClusterAnswer,
        run=cluster,
        only_reads=True,
    )
    for name, text, request, answer, rows in on_jobs:
        yield Action(
            name=f"reports.{name}",
            help=text,
            request=request,
            answer=answer,
            run=_on_jobs(answer, rows),
            only_reads=True,
        )


ACTIONS = tuple(_actions())
