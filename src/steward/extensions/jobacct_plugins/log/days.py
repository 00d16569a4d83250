"""Which day of the job log a moment belongs to, and when a day is over everywhere."""

from collections.abc import Mapping
from datetime import date, datetime, time, timedelta, tzinfo

from steward.extensions.jobacct_plugins.log.places import day_name
from steward.slurm.settings import ClusterSettings
from steward.slurm.times import zone_called


class Calendar:
    """Days in the zones of the clusters.

    Args:
        clusters: The settings of the clusters, by name.
    """

    def __init__(self, clusters: Mapping[str, ClusterSettings]) -> None:
        self._zones = {name: zone_called(of.timezone) for name, of in clusters.items()}
        self._other = zone_called("")

    def day_of(self, cluster: str, moment: datetime) -> str:
        """The name of the day that a moment is on, where the cluster is."""
        zone = self._zones.get(cluster, self._other)
        try:
            return day_name(moment.astimezone(zone).date())
        except OverflowError:
            # At the ends of the calendar there is no such moment in every zone.
            return day_name(moment.date())

    def end_of(self, day: str) -> datetime:
        """When a day is over in all zones."""
        after = date.fromisoformat(day) + timedelta(days=1)
        zones: set[tzinfo] = {*self._zones.values(), self._other}
        return max(datetime.combine(after, time(0), zone) for zone in zones)
