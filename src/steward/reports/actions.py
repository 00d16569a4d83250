"""Report actions: ``reports.cluster``, ``.accounts``, ``.users``, ``.waits``, ``.waste`` and more.

``cluster`` builds the capacity report from the node history and the jobs' runs. The other six
reports need jobs alone and call the functions in :mod:`steward.reports.usage`. Both read through a
:class:`ReportsContext`.

Users see their own jobs and those of accounts they coordinate; operators see all jobs. The capacity
report follows PrivateData (``usage``). Times are µs (``_us``) or seconds (``_s``) since the epoch.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final, TypeVar

import msgspec

from steward.core.access import Caller
from steward.core.actions import action, route
from steward.core.errors import PermissionRefused
from steward.core.timestamps import to_micros
from steward.reports import usage
from steward.reports.capacity import (
    Capacity,
    ReservationNodes,
    ResourceParts,
    add_full_hours,
    expand_reservation_nodes,
)
from steward.reports.context import ReportsContext
from steward.reports.history.reader import HistoryReader
from steward.reports.history.spans import OPEN_US, NodeGroupSpan, NodeSpan, ReservationSpan
from steward.reports.requests import (
    AccountsReply,
    AccountsRequest,
    ClusterReply,
    ClusterRequest,
    ClusterRow,
    JobCountsReply,
    JobCountsRequest,
    JobReportRequest,
    PartitionUsageReply,
    PartitionUsageRequest,
    Period,
    ReportReply,
    ReportRequest,
    UsersReply,
    UsersRequest,
    WaitsReply,
    WaitsRequest,
    WasteReply,
    WasteRequest,
    divide_interval,
    resolve_interval,
)
from steward.reports.runs import CAPACITY_FIELDS, Periods

_US: Final = 1_000_000
Report = TypeVar("Report", bound=ReportReply)


class ReportScope(msgspec.Struct, frozen=True):
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
        return [
            *(to_micros(period.since) for period in self.periods),
            to_micros(self.periods[-1].until),
        ]


def _resolve_scope(context: ReportsContext, request: ReportRequest) -> ReportScope:
    """Resolve clusters, time zone and periods of a request."""
    clusters = context.resolve_clusters(request)
    name, zone = context.resolve_zone(request, clusters)
    begin, end = resolve_interval(request.since, request.until, context.now(), zone)
    return ReportScope(
        clusters=clusters, zone=name, periods=divide_interval(begin, end, request.by, zone)
    )


def _report_shares(
    context: ReportsContext,
    caller: Caller,
    request: JobReportRequest,
    reply_type: type[Report],
    kinds: Sequence[usage.ShareKind],
    build_rows: Callable[[Iterable[Any]], Sequence[Any]],
) -> Report:
    """Report on jobs from the shares of some kinds, limited to jobs that the caller may see."""
    report_scope = _resolve_scope(context, request)
    scopes = context.get_scopes(caller, report_scope.clusters)
    is_all = all(scope.everything for scope in scopes.values())
    unsummed: set[str] = set()
    shares = context.iter_shares(
        *(request, report_scope.clusters, None if is_all else scopes, report_scope.periods),
        *(kinds, unsummed),
    )
    rows = tuple(build_rows(shares))
    return reply_type(
        periods=report_scope.periods,
        zone=report_scope.zone,
        is_all=is_all,
        is_default=not request.since,
        is_summed=not unsummed,
        rows=rows,
    )


@action(
    "reports.accounts",
    scope="read",
    command="report accounts",
    rows="rows",
    routes=(route("GET /reports/accounts"),),
    only_reads=True,
)
def report_accounts(
    context: ReportsContext, caller: Caller, request: AccountsRequest
) -> AccountsReply:
    """Report usage by account and user."""
    return _report_shares(
        *(context, caller, request, AccountsReply), (usage.ACCOUNT_USAGE,), usage.report_accounts
    )


@action(
    "reports.users",
    scope="read",
    command="report users",
    rows="rows",
    routes=(route("GET /reports/users"),),
    only_reads=True,
)
def report_users(context: ReportsContext, caller: Caller, request: UsersRequest) -> UsersReply:
    """Report usage by user, largest first."""
    return _report_shares(
        *(context, caller, request, UsersReply, (usage.USER_USAGE,)),
        lambda shares: usage.report_users(shares, request.top),
    )


@action(
    "reports.partitions",
    scope="read",
    command="report partitions",
    rows="rows",
    routes=(route("GET /reports/partitions"),),
    only_reads=True,
)
def report_partitions(
    context: ReportsContext, caller: Caller, request: PartitionUsageRequest
) -> PartitionUsageReply:
    """Report usage of partitions, and the wait times of their jobs."""
    kinds = (usage.PARTITION_USAGE, usage.PARTITION_WAITS)
    return _report_shares(
        *(context, caller, request, PartitionUsageReply, kinds), usage.report_partitions
    )


@action(
    "reports.waits",
    scope="read",
    command="report waits",
    rows="rows",
    routes=(route("GET /reports/waits"),),
    only_reads=True,
)
def report_waits(context: ReportsContext, caller: Caller, request: WaitsRequest) -> WaitsReply:
    """Report wait times of jobs, from eligible to start."""
    kind = usage.choose_waits(request.group, request.sizes)
    return _report_shares(
        *(context, caller, request, WaitsReply, (kind,)),
        lambda shares: usage.report_waits(shares, request.group, request.sizes),
    )


@action(
    "reports.jobs",
    scope="read",
    command="report jobs",
    rows="rows",
    routes=(route("GET /reports/jobs"),),
    only_reads=True,
)
def report_jobs(
    context: ReportsContext, caller: Caller, request: JobCountsRequest
) -> JobCountsReply:
    """Count jobs by account, size and state."""
    return _report_shares(
        *(context, caller, request, JobCountsReply, (usage.COUNTS_BY_SIZE,)),
        lambda shares: usage.report_job_counts(shares, request.sizes),
    )


@action(
    "reports.waste",
    scope="read",
    command="report waste",
    rows="rows",
    routes=(route("GET /reports/waste"),),
    only_reads=True,
)
def report_waste(context: ReportsContext, caller: Caller, request: WasteRequest) -> WasteReply:
    """Report allocated resources that ended jobs did not use.

    Used% is used over allocated CPU time. Memory% is peak over allocated memory. Time% is elapsed
    time over the time limit. Users who wasted the most CPU time come first.
    """
    return _report_shares(
        *(context, caller, request, WasteReply, (usage.WASTE,)),
        lambda shares: usage.report_waste(shares, request.top),
    )


@action(
    "reports.cluster",
    scope="read",
    command="report cluster",
    rows="rows",
    routes=(route("GET /reports/cluster"),),
    only_reads=True,
)
def report_cluster(context: ReportsContext, asker: Caller, request: ClusterRequest) -> ClusterReply:
    """Report CPU and GPU utilization of clusters, as 'sreport cluster Utilization' does.

    Raises:
        PermissionRefused: PrivateData hides the usage of a requested cluster; or, if none was
            requested, of all clusters.
        UsageError: A time or a cluster name is invalid.
    """
    report_scope = _resolve_scope(context, request)
    clusters = [
        name for name in report_scope.clusters if context.access.can_see_all(asker, name, "usage")
    ]
    if len(clusters) < len(request.clusters) or not clusters:
        raise PermissionRefused(
            "permission denied: only operators may see the usage of this cluster (PrivateData)"
        )
    rows: list[ClusterRow] = []
    unsummed: set[str] = set()
    with context.open_reader() as history:
        for name in clusters:
            rows += _build_cluster_rows(context, report_scope, name, history, unsummed)
    rows.sort(key=lambda row: (row.period, row.cluster))
    return ClusterReply(
        periods=report_scope.periods,
        zone=report_scope.zone,
        is_default=not request.since,
        is_summed=not unsummed,
        rows=tuple(rows),
        sensor=context.settings.sensor.enabled,
    )


def _build_cluster_rows(
    context: ReportsContext,
    report_scope: ReportScope,
    name: str,
    history: HistoryReader | None,
    unsummed: set[str],
) -> list[ClusterRow]:
    """Build a cluster's rows, one for each period; add it to ``unsummed`` if all runs are read."""
    bounds_us = report_scope.bounds_us
    periods = Periods(bounds_us)
    since_us, until_us = bounds_us[0], bounds_us[-1]
    begins_us = history.find_nodes_begin_us([name]) if history else None
    known_us = min(max(since_us, OPEN_US if begins_us is None else begins_us), until_us)
    known_us -= known_us % _US
    nodes = history.group_nodes_between(name, since_us, until_us) if history else []
    reservations = history.list_reservations_between(name, since_us, until_us) if history else []
    reserved = (
        _pair_reservations(history, name, reservations, since_us, until_us) if history else []
    )
    # The hour in which the history begins is split in two: capacity is known for its second part
    # only. Before that time the buckets need no full hours, because nothing is compared.
    bounds_s = add_full_hours((at_us // _US for at_us in (*bounds_us, known_us)), known_us // _US)
    capacity = Capacity(bounds_s, nodes, reserved)
    jobs = _add_runs(context, report_scope, name, capacity, known_us // _US, unsummed)
    buckets = [periods.find_period(at_s * _US) for at_s in bounds_s[:-1]]
    cpus, gpus = (
        _sum_by_period(counter.compute_parts(), buckets, periods)
        for counter in (capacity.cpus, capacity.gpus)
    )
    rows = []
    for index, (begin, end) in enumerate(pairwise(bounds_us)):
        is_known = end > known_us
        rows.append(
            ClusterRow(
                period=index,
                cluster=name,
                jobs=jobs[index],
                allocated_cpu_s=cpus[index].allocated,
                allocated_gpu_s=gpus[index].allocated,
                known_s=max(0, end - max(begin, known_us)) // _US,
                **(_list_capacity_fields(cpus[index], gpus[index]) if is_known else {}),
                **_count_nodes_at_end(nodes, end),
            )
        )
    return rows


def _add_runs(
    context: ReportsContext,
    report_scope: ReportScope,
    name: str,
    capacity: Capacity,
    known_s: int,
    unsummed: set[str],
) -> list[int]:
    """Add a cluster's runs to its capacity, from sums where it can; count them by period."""
    bounds_us, report_periods = report_scope.bounds_us, report_scope.periods
    periods = Periods(bounds_us)
    jobs = [0] * periods.count
    bounds_s = sorted({known_s, *(at_us // _US for at_us in bounds_us)})
    with context.open_capacity(name, bounds_s, report_periods) as opened:
        if opened is not None:
            sums, runs = opened
            capacity.add_sums(sums.list_rows())
            for run, is_unsummed in runs:
                if is_unsummed:
                    capacity.add_run(run, periods)
                else:
                    capacity.add_cuts(run, sums.cuts)
    if opened is not None:
        kinds = (usage.CLUSTER_USAGE,)
        for share in context.iter_shares(
            *(JobReportRequest(), (name,), None, report_periods, kinds, unsummed)
        ):
            jobs[share.period] += share.jobs
        return jobs
    unsummed.add(name)
    for run in context.iter_runs(
        JobReportRequest(), (name,), None, report_periods, CAPACITY_FIELDS
    ):
        capacity.add_run(run, periods)
        periods.count_run(run, jobs)
    return jobs


def _pair_reservations(
    history: HistoryReader,
    cluster: str,
    reservations: Sequence[ReservationSpan],
    since_us: int,
    until_us: int,
) -> list[ReservationNodes]:
    """Pair each reservation with the state spans of its nodes."""
    node_names = [expand_reservation_nodes(reservation) for reservation in reservations]
    spans: dict[str, list[NodeSpan]] = {}
    all_nodes = set().union(*node_names)
    for span in (
        history.list_nodes_between(cluster, since_us, until_us, all_nodes) if all_nodes else ()
    ):
        spans.setdefault(span.node, []).append(span)
    return [
        (reservation, [span for node in names for span in spans.get(node, ())])
        for reservation, names in zip(reservations, node_names, strict=True)
    ]


def _sum_by_period(
    parts: Sequence[ResourceParts], buckets: Sequence[int | None], periods: Periods
) -> list[ResourceParts]:
    """Sum the parts of the buckets in each period."""
    sums = [ResourceParts() for _ in range(periods.count)]
    for part, index in zip(parts, buckets, strict=True):
        if index is not None:
            sums[index].add(part)
    return sums


def _list_capacity_fields(cpus: ResourceParts, gpus: ResourceParts) -> dict[str, int]:
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


def _count_nodes_at_end(nodes: Iterable[NodeGroupSpan], end_us: int) -> dict[str, int]:
    """Count nodes, CPUs and GPUs at the end of a period."""
    groups = [group for group in nodes if group.from_us < end_us <= group.until_us]
    return {
        "cpus": sum(group.cpus for group in groups),
        "gpus": sum(group.gpus for group in groups),
        "nodes": sum(group.nodes for group in groups),
    }
