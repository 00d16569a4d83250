"""What accounting's actions work with: jobs.db, the job log's place, and who may see what.

Everything is opened when it is first needed, read-only. An action asks for
nobody's lines past :meth:`AccountingRoom.scopes`.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from steward.accounting.errors import AccountingUsage
from steward.core.access import Access, Asker, Scope
from steward.core.config import Settings
from steward.core.events import Event, utc_now

if TYPE_CHECKING:
    from steward.jobs import Jobs


class AccountingRoom:
    """The context of accounting's actions; to be used by one thread at a time.

    Args:
        settings: The whole configuration.
        access: The decisions.
        order: Appends events to the journal; without it nothing can be changed here.
        now: The clock.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        access: Access,
        order: Callable[[Sequence[Event]], None] | None = None,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.settings = settings
        self.access = access
        self.order = order
        self.now = now
        self._jobs: Jobs | None = None
        self._clusters: tuple[str, ...] | None = None

    @property
    def jobs(self) -> "Jobs":
        """jobs.db.

        Raises:
            SqliteUnavailable: There is none yet.
        """
        from steward.jobs import Jobs, database_path

        if self._jobs is None:
            self._jobs = Jobs(database_path(self.settings.state_dir))
        return self._jobs

    @property
    def clusters(self) -> tuple[str, ...]:
        """Every cluster that there may be jobs of, the configuration's first; at least one."""
        from steward.jobs.queries import clusters_of

        if self._clusters is None:
            self._clusters = tuple(clusters_of(self.settings))
        return self._clusters

    @property
    def main_cluster(self) -> str:
        """The cluster that is meant where none is named: the configuration's first."""
        return next(iter(self.settings.cluster), "") or self.clusters[0]

    def check_clusters(self, names: Iterable[str]) -> None:
        """Look whether these clusters exist.

        Raises:
            AccountingUsage: One does not.
        """
        for name in names:
            if name not in self.clusters:
                known = ", ".join(self.clusters)
                raise AccountingUsage(f"cluster {name!r} is unknown: there are {known}", name)

    def zone(self, cluster: str) -> str:
        """IANA name of a cluster's zone; "" for the system's."""
        known = self.settings.cluster.get(cluster)
        return known.timezone if known else ""

    def is_operator(self, asker: Asker) -> bool:
        """Whether the asker is an operator of every cluster."""
        # Whoever is one of a cluster that there is not is one by name, or Steward itself.
        return self.access.is_operator(asker, "") or all(
            self.access.is_operator(asker, name) for name in self.clusters
        )

    def scopes(self, asker: Asker) -> dict[str, Scope] | None:
        """Whose lines the asker may see, by cluster; None for everything."""
        if self.is_operator(asker):
            # Clusters that were taken out of the configuration are theirs, too.
            return None
        return {name: self.access.scope(asker, name) for name in self.clusters}

    def close(self) -> None:
        """Let go of all files."""
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None
