"""History context: opens history.db and the job records, and checks what a user may see.

:class:`HistoryContext` is the context of the ``history.*`` actions in ``reports.history.actions``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, tzinfo

from steward.accounting.context import AccountingContext
from steward.core.access import Access, Caller
from steward.core.config import Settings
from steward.core.errors import PermissionRefused
from steward.core.events import BANK_THRESHOLD, CONTROLLER_STATE, Event, utc_now
from steward.reports.events import PRIVATE_DATA_WORDS, EventsContext
from steward.reports.history.consumer import HISTORY_KINDS
from steward.reports.history.reader import HistoryReader, VisibleEvents, open_history
from steward.slurm.times import load_zone, parse_time


class HistoryContext:
    """Context of the history actions. Not thread-safe: use one instance per thread.

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
        self._events = EventsContext(settings, access, now)

    def open_reader(self) -> AbstractContextManager[HistoryReader | None]:
        """Open the history for reading; None if there is none yet."""
        return open_history(self.settings.state_dir)

    @property
    def clusters(self) -> tuple[str, ...]:
        """Return every known cluster, the configured ones first."""
        return self.books.clusters

    def resolve_cluster(self, name: str) -> str:
        """Return the requested cluster, or the main cluster if the name is empty.

        Raises:
            UsageError: The cluster does not exist.
        """
        if not name:
            return self.books.main_cluster
        self.books.check_clusters([name])
        return name

    def list_node_clusters(self, asker: Caller, cluster: str) -> list[str]:
        """Return the clusters whose nodes the user may see: the requested one, or all of these.

        Raises:
            PermissionRefused: The requested cluster hides its nodes from this user.
            UsageError: The cluster does not exist.
        """
        if not cluster:
            return [name for name in self.clusters if self.access.can_see_nodes(asker, name)]
        if not self.access.can_see_nodes(asker, self.resolve_cluster(cluster)):
            raise PermissionRefused(
                "permission denied: only operators may see the nodes of this cluster (PrivateData)"
            )
        return [cluster]

    def has_sensor(self, clusters: list[str] | tuple[str, ...] = ()) -> bool:
        """Return whether any of these clusters (default: all) has a sensor for node states."""
        # Remote hosts run their own sensors and forward the states.
        settings_by_cluster = self.settings.cluster
        names = clusters or self.clusters
        is_remote = any(
            settings_by_cluster[name].remote for name in names if name in settings_by_cluster
        )
        return self.settings.sensor.enabled or is_remote

    def get_visible_events(self, asker: Caller, cluster: str) -> VisibleEvents:
        """Return which events of a cluster's history the user may see."""
        access = self.access
        if access.is_operator(asker, cluster):
            return VisibleEvents(frozenset(HISTORY_KINDS))
        kinds = {
            kind
            for kind, keyword in PRIVATE_DATA_WORDS.items()
            if access.can_see_all(asker, cluster, keyword)
        }
        accounts = access.list_led(asker, cluster)
        return VisibleEvents(frozenset({CONTROLLER_STATE, *kinds}), {BANK_THRESHOLD: accounts})

    def make_visibility_check(self, asker: Caller) -> Callable[[Event], bool]:
        """Make a filter for events that the user may see, with the rules of ``events.list``."""
        return lambda event: self._events.can_see(asker, event)

    def get_zone(self, name: str, cluster: str = "") -> tzinfo:
        """Return the time zone for parsing times: the named one, or the cluster's.

        Raises:
            TimeError: The zone does not exist.
        """
        return load_zone(name or self.books.get_zone(cluster or self.books.main_cluster))

    def parse(self, text: str, zone: tzinfo) -> datetime | None:
        """Parse a time; return None for an empty text.

        Raises:
            TimeError: The text is not a valid time.
        """
        return parse_time(text, self.now(), zone) if text else None

    def close(self) -> None:
        """Close all files."""
        self.books.close()
