"""Context of the accounting actions: jobs.db, cluster names and zones, and permissions.

Files are opened read-only on first use. An action shows nobody more than
:meth:`AccountingContext.get_scopes` permits.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from steward.core.access import Access, Caller, VisibleJobs
from steward.core.config import Settings
from steward.core.events import Event, utc_now

if TYPE_CHECKING:
    from steward.jobs import Jobs


class AccountingContext:
    """Context of accounting's actions. Use it from one thread at a time.

    Args:
        settings: The whole configuration.
        access: Permission checks.
        append: Appends events to the journal; None if this process may not change anything.
        now: Returns the present time.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        access: Access,
        append: Callable[[Sequence[Event]], None] | None = None,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.settings = settings
        self.access = access
        self.order = append
        self.now = now
        self._jobs: Jobs | None = None
        self._clusters: tuple[str, ...] | None = None

    @property
    def jobs(self) -> "Jobs":
        """Queries on jobs.db.

        Raises:
            SqliteUnavailable: jobs.db does not exist yet.
        """
        from steward.jobs import Jobs, database_path

        if self._jobs is None:
            self._jobs = Jobs(database_path(self.settings.state_dir))
        return self._jobs

    @property
    def clusters(self) -> tuple[str, ...]:
        """Clusters that may have jobs, the configured ones first; at least one."""
        from steward.jobs.queries import list_clusters

        if self._clusters is None:
            self._clusters = tuple(list_clusters(self.settings))
        return self._clusters

    @property
    def main_cluster(self) -> str:
        """Default cluster: the first in the configuration."""
        return next(iter(self.settings.cluster), "") or self.clusters[0]

    def check_clusters(self, names: Iterable[str]) -> None:
        """Check that these clusters exist.

        Raises:
            UsageError: A cluster does not exist.
        """
        from steward.jobs.queries import check_clusters

        check_clusters(names, self.clusters)

    def get_zone(self, cluster: str) -> str:
        """Return the IANA name of a cluster's time zone; "" for the system's."""
        cluster_settings = self.settings.cluster.get(cluster)
        return cluster_settings.timezone if cluster_settings else ""

    def is_operator(self, asker: Caller) -> bool:
        """Return True if the requester is an operator of every cluster."""
        # An operator of an unknown cluster is one by configured name, or Steward itself.
        return self.access.is_operator(asker, "") or all(
            self.access.is_operator(asker, name) for name in self.clusters
        )

    def get_scopes(self, asker: Caller) -> dict[str, VisibleJobs] | None:
        """Return what the requester may see, by cluster; None for everything."""
        if self.is_operator(asker):
            # Operators also see clusters that were removed from the configuration.
            return None
        return {name: self.access.get_job_scope(asker, name) for name in self.clusters}

    def close(self) -> None:
        """Close all files."""
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None
