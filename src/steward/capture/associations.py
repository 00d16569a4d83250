"""Associations source: polls a cluster's Slurm for users, roles and accounts, for access checks.

:class:`AssociationsPoller` queries once a minute and stores the answer in the process's
``ClusterRolesFiles``, which decides who may see and do what. It is registered as a consumer only to
be called by the consumers' clock.
"""

import logging
from collections.abc import Callable, Sequence

from steward.core.access import ClusterRoles, ClusterRolesFiles
from steward.core.consumers import Append
from steward.core.errors import StewardError
from steward.core.events import Event
from steward.core.waits import Backoff

log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 60.0
"""Interval of queries, in seconds."""
_MAX_BACKOFF_S = 600.0
"""Maximum pause after failures, in seconds."""


class AssociationsPoller:
    """Poller of one cluster's users and associations; a consumer that takes no events.

    Args:
        cluster: Name of the cluster.
        query: Queries the cluster's Slurm.
        roles_files: Where the answer is stored.
    """

    kinds: frozenset[str] = frozenset()
    batch_events = 1

    def __init__(
        self, cluster: str, query: Callable[[], ClusterRoles], roles_files: ClusterRolesFiles
    ) -> None:
        self.name = f"roles.{cluster}"
        self._cluster = cluster
        self._query = query
        self._roles_files = roles_files
        self._backoff = Backoff(_POLL_INTERVAL_S, _MAX_BACKOFF_S)
        self._last_error = ""

    def cursor(self) -> int:
        """Return 0: the source has no position."""
        return 0

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        """Do nothing: the source takes no events."""

    def tick(self, append: Append) -> float:  # noqa: ARG002 - a consumer's signature
        """Query Slurm and store the answer; return seconds until the next query."""
        try:
            self._roles_files.put(self._cluster, self._query())
        except StewardError as error:
            # The last answer stays valid for a while; queue polls report that Slurm itself is
            # unavailable.
            if str(error) != self._last_error:
                self._last_error = str(error)
                log.warning("cannot read the associations of %s: %s", self._cluster, error)
            return self._backoff.next_s()
        self._last_error = ""
        self._backoff.reset()
        return _POLL_INTERVAL_S

    def close(self) -> None:
        """Do nothing: the source holds no resources."""
