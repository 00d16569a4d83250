"""Asks a cluster's Slurm now and then who stands where, for those who decide on access."""

import logging
from collections.abc import Callable, Sequence

from steward.core.access import Standing, Standings
from steward.core.consumers import Append
from steward.core.errors import StewardError
from steward.core.events import Event
from steward.core.waits import Backoff

log = logging.getLogger(__name__)

_EVERY_S = 60.0
_LONGEST_S = 600.0


class StandingSource:
    """A source that sits among consumers for its clock alone: it takes no events.

    Args:
        cluster: The cluster's name.
        ask: Asks its Slurm.
        standings: Where the answer is kept.
    """

    kinds: frozenset[str] = frozenset()
    batch_events = 1

    def __init__(self, cluster: str, ask: Callable[[], Standing], standings: Standings) -> None:
        self.name = f"standing.{cluster}"
        self._cluster = cluster
        self._ask = ask
        self._standings = standings
        self._backoff = Backoff(_EVERY_S, _LONGEST_S)
        self._said = ""

    def cursor(self) -> int:
        """Nothing is remembered."""
        return 0

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        """No kinds are wanted, so there is nothing to do."""

    def tick(self, append: Append) -> float:  # noqa: ARG002 - a consumer's signature
        """Ask, and keep the answer; seconds until it should be asked again."""
        try:
            self._standings.put(self._cluster, self._ask())
        except StewardError as error:
            # The last answer holds for a while; snapshots say when Slurm itself is away.
            if str(error) != self._said:
                self._said = str(error)
                log.warning("who stands where on %s is not known now: %s", self._cluster, error)
            return self._backoff.next_s()
        self._said = ""
        self._backoff.reset()
        return _EVERY_S

    def close(self) -> None:
        """Nothing is held."""
