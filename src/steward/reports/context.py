"""Report context: reads jobs and node history for report actions, and checks permissions.

:class:`ReportsContext` resolves clusters, time zones and the jobs a user may see, reads runs from
the job records (through the accounting context) and opens the node history.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, tzinfo
from itertools import islice
from typing import Any, Final

from steward.accounting.context import AccountingContext
from steward.core.access import Access, Caller, VisibleJobs
from steward.core.config import Settings
from steward.core.events import utc_now
from steward.core.sqlite import SqliteMissing
from steward.core.timestamps import to_micros
from steward.jobs.capacity_sums import CapacitySums
from steward.jobs.day_sum_queries import DaySums
from steward.jobs.line_queries import LineFilter
from steward.jobs.line_sources import DatabaseSource, open_line_source
from steward.jobs.lines import FullRunKey
from steward.reports.history.reader import HistoryReader, open_history
from steward.reports.requests import JobReportRequest, Period, ReportRequest
from steward.reports.runs import CAPACITY_FIELDS, Periods, RunPieces, read_runs
from steward.reports.usage import ShareKind, cut_edges
from steward.slurm.times import load_zone

_BATCH_RUNS: Final = 1000
"""Runs held in memory while their usage is split into periods."""


class ReportsContext:
    """Context of the report actions. Not thread-safe: use one instance per thread.

    Args:
        settings: The whole configuration.
        access: Decides who may see what.
        now: Returns the current time.
    """

    def __init__(
        self, settings: Settings, *, access: Access, now: Callable[[], datetime] = utc_now
    ) -> None:
        self.settings = settings
        self.access = access
        self.now = now
        self.books = AccountingContext(settings, access=access, now=now)

    def resolve_clusters(self, request: ReportRequest) -> tuple[str, ...]:
        """Return the requested clusters, or all if the request names none.

        Raises:
            UsageError: A cluster does not exist.
        """
        self.books.check_clusters(request.clusters)
        return request.clusters or self.books.clusters

    def resolve_zone(self, request: ReportRequest, clusters: Sequence[str]) -> tuple[str, tzinfo]:
        """Return name and time zone of the report: the requested one, or the first cluster's.

        The name "" is this host's zone.

        Raises:
            TimeError: The zone does not exist.
        """
        name = request.zone or self.books.get_zone(clusters[0])
        return name, load_zone(name)

    def get_scopes(self, asker: Caller, clusters: Iterable[str]) -> dict[str, VisibleJobs]:
        """Return the jobs to count, by cluster: all for operators, else those the user may see."""
        return {name: self._get_scope(asker, name) for name in clusters}

    def _get_scope(self, asker: Caller, cluster: str) -> VisibleJobs:
        if self.access.is_operator(asker, cluster):
            return VisibleJobs(everything=True)
        return VisibleJobs(uid=asker.uid, accounts=self.access.list_led(asker, cluster))

    def iter_runs(
        self,
        request: JobReportRequest,
        clusters: Sequence[str],
        scopes: dict[str, VisibleJobs] | None,
        periods: Sequence[Period],
        fields: int,
    ) -> Iterator[RunPieces]:
        """Yield the runs that ran or waited in the periods.

        Args:
            request: Filters by account, user and partition.
            clusters: The clusters to read.
            scopes: Visible jobs per cluster; None for all jobs.
            periods: The periods, in order of time.
            fields: Number of fields to read of each piece; see :mod:`steward.reports.runs`.
        """
        line_filter = _make_filter(request, clusters, scopes, periods)
        try:
            source = open_line_source(self.settings, line_filter, duplicates=True)
        except SqliteMissing:
            # No job was recorded yet: an empty report, not an error.
            return iter(())
        return read_runs(source, line_filter, fields)

    @contextmanager
    def open_capacity(
        self, cluster: str, bounds_s: Sequence[int], periods: Sequence[Period]
    ) -> Iterator[tuple[CapacitySums, Iterator[tuple[RunPieces, bool]]] | None]:
        """Open the sums for a capacity report, with the runs to read besides; None without sums.

        Args:
            cluster: Cluster name.
            bounds_s: Bounds of the report, in order, seconds since the epoch.
            periods: The periods, in order of time.

        Yields:
            The sums; and each run, with whether the sums lack it, or only cut quarters of it.
        """
        line_filter = _make_filter(JobReportRequest(), (cluster,), None, periods)
        try:
            source = open_line_source(self.settings, line_filter, duplicates=True)
        except SqliteMissing:
            yield None
            return
        if not isinstance(source, DatabaseSource):
            yield None
            return
        with source.open_capacity_sums(cluster, bounds_s) as sums:
            if sums is None:
                yield None
                return
            irregular = sums.list_irregular()
            runs = read_runs(source.limit_to(sums.select_jobs()), line_filter, CAPACITY_FIELDS)
            yield sums, ((run, not _is_regular(run, irregular)) for run in runs)

    def iter_shares(
        self,
        request: JobReportRequest,
        clusters: Sequence[str],
        scopes: dict[str, VisibleJobs] | None,
        periods: Sequence[Period],
        kinds: Sequence[ShareKind],
        unsummed: set[str],
    ) -> Iterator[Any]:
        """Yield the shares of the runs that ran or waited in the periods.

        Args:
            request: Filters by account, user and partition.
            clusters: The clusters to read.
            scopes: Visible jobs per cluster; None for all jobs.
            periods: The periods, in order of time.
            kinds: Kinds of shares to yield.
            unsummed: Receives the clusters of which every run was read instead of sums.
        """
        bounds_us = [*(to_micros(x.since) for x in periods), to_micros(periods[-1].until)]
        for cluster in clusters:
            line_filter = _make_filter(request, (cluster,), scopes, periods)
            try:
                source = open_line_source(self.settings, line_filter, duplicates=True)
            except SqliteMissing:
                unsummed.add(cluster)
                return
            can_sum = all(kind.can_sum(line_filter) for kind in kinds)
            if can_sum and isinstance(source, DatabaseSource):
                with source.open_sums(cluster, bounds_us) as sums:
                    if sums is not None:
                        yield from _read_with_sums(source, sums, line_filter, kinds)
                        continue
            unsummed.add(cluster)
            runs = read_runs(source, line_filter, max(kind.fields for kind in kinds))
            every = Periods(bounds_us)
            while batch := list(islice(runs, _BATCH_RUNS)):
                for kind in kinds:
                    yield from kind.share_runs(batch, every)

    def open_reader(self) -> AbstractContextManager[HistoryReader | None]:
        """Open the node history; None if there is none yet."""
        return open_history(self.settings.state_dir)

    def close(self) -> None:
        """Close all files."""
        self.books.close()


def _make_filter(
    request: JobReportRequest,
    clusters: Sequence[str],
    scopes: dict[str, VisibleJobs] | None,
    periods: Sequence[Period],
) -> LineFilter:
    """Return the filter of the lines of runs that ran or waited in the periods."""
    names = tuple(user for user in request.users if not user.isdecimal())
    uids = tuple(int(user) for user in request.users if user.isdecimal() and len(user) <= 10)
    return LineFilter(
        clusters=tuple(clusters),
        scopes=scopes,
        users=names,
        uids=uids,
        accounts=tuple(account.lower() for account in request.accounts),
        partitions=request.partitions,
        since_us=to_micros(periods[0].since),
        until_us=to_micros(periods[-1].until),
        # Some sources do not report when a job became eligible; its usage counts all the same.
        eligible_only=False,
    )


def _read_with_sums(
    source: DatabaseSource, sums: DaySums, line_filter: LineFilter, kinds: Sequence[ShareKind]
) -> Iterator[Any]:
    """Yield the shares of whole days from sums, and all others from lines."""
    for kind in kinds:
        yield from sums.list_shares(kind.share, kind.cube, line_filter, kind.columns)
    irregular = sums.list_irregular()
    every, edges = Periods(sums.bounds_us), cut_edges(sums)
    fields = max(kind.fields for kind in kinds)
    runs = read_runs(source.limit_to(sums.select_jobs()), line_filter, fields)
    while batch := list(islice(runs, _BATCH_RUNS)):
        regular: list[RunPieces] = []
        unsummed: list[RunPieces] = []
        for run in batch:
            (regular if _is_regular(run, irregular) else unsummed).append(run)
        for kind in kinds:
            yield from kind.share_rounded(unsummed, every)
            yield from kind.share_rounded(regular, edges)


def _is_regular(run: RunPieces, irregular: Container[FullRunKey]) -> bool:
    """Return whether sums include a run."""
    last = run[-1]
    key = (last.job_id, last.submit_us, last.restarts)
    return len(run) == 1 and last.is_run and bool(last.end_us) and key not in irregular
