"""The parts ``sensor.CLUSTER``: each watches the states of one cluster.

Each is a process of its own: nothing that takes long is before a look, and a slurmctld that
hangs holds up nobody else.
"""

from typing import Final

from steward.core.config import Settings
from steward.core.journal import JournalLink
from steward.core.waiting import Stop
from steward.daemon.supervise import Beat, Part

_JOURNAL: Final = ("journal",)
_HANG_S: Final = 600.0
"""Several commands that take as long as they may, one after the other, are no hang."""


def sensor_parts(settings: Settings) -> list[Part]:
    """The processes that watch states; none where [sensor] is not enabled."""
    if not settings.sensor.enabled:
        return []
    return [
        _watching(settings, cluster)
        for cluster, of in settings.cluster.items()
        if of.asks_slurm and not of.remote
    ]


def _watching(settings: Settings, cluster: str) -> Part:
    def run(stop: Stop, beat: Beat) -> None:
        from steward.capture.states import running

        link = JournalLink(settings.state_dir, stop)
        try:
            running.run(settings, cluster, link.append, stop, beat)
        finally:
            link.close()

    return Part(name=f"sensor.{cluster}", run=run, after=_JOURNAL, hang_s=_HANG_S)
