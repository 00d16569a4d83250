"""The parts ``jobcomp.CLUSTER``: each follows the lines that a slurmctld on this host writes."""

from typing import Final

from steward.core.config import Settings
from steward.core.journal import JournalLink
from steward.core.waiting import Stop
from steward.daemon.supervise import Beat, Part

_JOURNAL: Final = ("journal",)
_HANG_S: Final = 300.0
"""Appending waits for the journal, which may be away for long."""


def lines_parts(settings: Settings) -> list[Part]:
    """The processes that follow the clusters' ``jobcomp_lines``."""
    return [
        _following(settings, cluster)
        for cluster, of in settings.cluster.items()
        if of.jobcomp_lines and of.asks_slurm and not of.remote
    ]


def _following(settings: Settings, cluster: str) -> Part:
    def run(stop: Stop, beat: Beat) -> None:
        from steward.capture.lines.source import JobcompLines, Places
        from steward.core.redaction import redactor_of

        link = JournalLink(settings.state_dir, stop)
        places = Places(settings.state_dir, cluster)
        path = settings.cluster[cluster].jobcomp_lines
        redact = redactor_of(settings).record
        lines = JobcompLines(cluster, path, places, link.append, redact)
        try:
            lines.run(stop, beat)
        finally:
            lines.close()
            places.close()

    return Part(name=f"jobcomp.{cluster}", run=run, after=_JOURNAL, hang_s=_HANG_S)
