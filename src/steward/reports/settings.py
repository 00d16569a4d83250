"""Settings of the node history: section ``[history]`` of the configuration."""

from steward.core.section import Section


class HistorySettings(Section, frozen=True, kw_only=True):
    """[history]: past states of nodes, partitions, reservations, daemons and rules.

    Attributes:
        retention_days: Days until the history is purged. The present states are never purged.
    """

    retention_days: int = 1100
