"""The settings of the history of states."""

from steward.core.section import Section


class HistorySettings(Section, frozen=True, kw_only=True):
    """[history]: what became of nodes, partitions, reservations, daemons and rules.

    Attributes:
        retention_days: How long it is kept, in days; how things stand now is kept longer.
    """

    retention_days: int = 1100
