"""What the history's actions work with: history.db, the books of jobs, and who may see what."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, tzinfo

from steward.accounting.context import AccountingRoom
from steward.core.access import Access, Asker
from steward.core.config import Settings
from steward.core.errors import Refused
from steward.core.events import BANK_THRESHOLD, CONTROLLER_STATE, Event, utc_now
from steward.reports.events import PRIVATE, EventsRoom
from steward.reports.history.consumer import KEPT
from steward.reports.history.reader import HistoryReader, Visible, history_of
from steward.slurm.times import parse_time, zone_called


class HistoryRoom:
    """The context of the history's actions; to be used by one thread at a time.

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
        self._events = EventsRoom(settings.state_dir, access, now)

    def reader(self) -> AbstractContextManager[HistoryReader | None]:
        """The history; None where there is none yet."""
        return history_of(self.settings.state_dir)

    @property
    def clusters(self) -> tuple[str, ...]:
        """Every cluster that something may be known of, the configuration's first."""
        return self.books.clusters

    def cluster_asked(self, name: str) -> str:
        """The cluster that is meant; the first where none is named.

        Raises:
            UsageError: There is no such cluster.
        """
        if not name:
            return self.books.main_cluster
        self.books.check_clusters([name])
        return name

    def nodes_seen(self, asker: Asker, cluster: str) -> list[str]:
        """The clusters whose nodes the asker may see: the one that is named, or of all some.

        Raises:
            Refused: The one that is named is none of them.
            UsageError: There is no such cluster.
        """
        if not cluster:
            return [name for name in self.clusters if self.access.may_see_nodes(asker, name)]
        if not self.access.may_see_nodes(asker, self.cluster_asked(cluster)):
            raise Refused("nodes of this cluster are shown to operators alone (PrivateData)")
        return [cluster]

    def has_sensor(self, clusters: list[str] | tuple[str, ...] = ()) -> bool:
        """Whether the states of some cluster's nodes are told at all."""
        # What other hosts forward is told by sensors of their own.
        of = self.settings.cluster
        named = clusters or self.clusters
        is_remote = any(of[name].remote for name in named if name in of)
        return self.settings.sensor.enabled or is_remote

    def visible(self, asker: Asker, cluster: str) -> Visible:
        """What the asker may see of a cluster's history."""
        access = self.access
        if access.is_operator(asker, cluster):
            return Visible(frozenset(KEPT))
        kinds = {kind for kind, word in PRIVATE.items() if access.may_see_all(asker, cluster, word)}
        accounts = access.led(asker, cluster)
        return Visible(frozenset({CONTROLLER_STATE, *kinds}), {BANK_THRESHOLD: accounts})

    def shows(self, asker: Asker) -> Callable[[Event], bool]:
        """Decides whether an event may be told to the asker, as for events.list."""
        return lambda event: self._events.shows(asker, event)

    def zone(self, name: str, cluster: str = "") -> tzinfo:
        """The zone that times are typed in.

        Raises:
            TimeError: There is no such zone.
        """
        return zone_called(name or self.books.zone(cluster or self.books.main_cluster))

    def time(self, text: str, zone: tzinfo) -> datetime | None:
        """A time that was typed; None for none.

        Raises:
            TimeError: It cannot be understood.
        """
        return parse_time(text, self.now(), zone) if text else None

    def close(self) -> None:
        """Let go of all files."""
        self.books.close()
