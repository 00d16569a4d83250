"""What reports work with: the books of jobs, the history of nodes, and who may see what."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, tzinfo

from steward.accounting.context import AccountingRoom
from steward.accounting.sacct.sources import books
from steward.core.access import Access, Asker, Scope
from steward.core.config import Settings
from steward.core.events import utc_now
from steward.core.sqlite import SqliteUnavailable
from steward.core.timestamps import micros
from steward.jobs.line_queries import LineFilter
from steward.reports.history.reader import HistoryReader, history_of
from steward.reports.requests import Period, ReportRequest
from steward.reports.runs import Run, runs
from steward.slurm.times import zone_called


class ReportsRoom:
    """The context of the reports' actions; to be used by one thread at a time.

    Args:
        settings: The whole configuration.
        access: The decisions.
        now: The clock.
    """

    def __init__(
        self, settings: Settings, *, access: Access, now: Callable[[], datetime] = utc_now
    ) -> None:
        self.settings = settings
        self.access = access
        self.now = now
        self.books = AccountingRoom(settings, access=access, now=now)

    def clusters(self, request: ReportRequest) -> tuple[str, ...]:
        """The clusters that are meant; all where none is named.

        Raises:
            UsageError: There is no such cluster.
        """
        self.books.check_clusters(request.clusters)
        return request.clusters or self.books.clusters

    def zone(self, request: ReportRequest, clusters: Sequence[str]) -> tuple[str, tzinfo]:
        """The zone that times are typed and cut in, with its name; "" for this host's.

        Raises:
            TimeError: There is no such zone.
        """
        name = request.zone or self.books.zone(clusters[0])
        return name, zone_called(name)

    def scopes(self, asker: Asker, clusters: Iterable[str]) -> dict[str, Scope]:
        """Whose jobs are counted: everybody's for operators, else one's own and one's accounts'."""
        return {name: self._scope(asker, name) for name in clusters}

    def _scope(self, asker: Asker, cluster: str) -> Scope:
        if self.access.is_operator(asker, cluster):
            return Scope(everything=True)
        return Scope(uid=asker.uid, accounts=self.access.led(asker, cluster))

    def runs(
        self,
        request: ReportRequest,
        clusters: Sequence[str],
        scopes: dict[str, Scope] | None,
        periods: Sequence[Period],
        fields: int,
    ) -> Iterator[Run]:
        """The runs that were there in the periods.

        Args:
            request: Which accounts, users and partitions.
            clusters: The clusters.
            scopes: Whose; None for everybody's.
            periods: The periods, the first first.
            fields: How many of their fields are read.
        """
        names = tuple(user for user in request.users if not user.isdecimal())
        uids = tuple(int(user) for user in request.users if user.isdecimal() and len(user) <= 10)
        wanted = LineFilter(
            clusters=tuple(clusters),
            scopes=scopes,
            users=names,
            uids=uids,
            accounts=tuple(account.lower() for account in request.accounts),
            partitions=request.partitions,
            since_us=micros(periods[0].since),
            until_us=micros(periods[-1].until),
            # When a job might have begun is not told by everybody; what it had is counted.
            eligible_only=False,
        )
        try:
            source = books(self.books, wanted, duplicates=True)
        except SqliteUnavailable:
            # No job was ever told of here: there is nothing to report, which is no fault.
            return iter(())
        return runs(source, wanted, fields)

    def history(self) -> AbstractContextManager[HistoryReader | None]:
        """The history; None where there is none yet."""
        return history_of(self.settings.state_dir)

    def close(self) -> None:
        """Let go of all files."""
        self.books.close()
