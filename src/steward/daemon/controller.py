"""Workers of ``steward controller``: only the sources of a slurmctld host, and the forwarder.

Nothing is archived, indexed or queried here, and no socket is open except the gate's, if there is a
bank elsewhere. Captured data stays in the state directory until the Steward that this host reports
to confirms that it is durable there.
"""

from functools import partial

import msgspec

from steward.core.config import ArchiveSettings, Settings
from steward.core.consumers import Consumer
from steward.core.errors import UsageError
from steward.core.incoming import stores_of
from steward.daemon.consumer_workers import run_consumers
from steward.daemon.source_workers import lines_parts, sensor_parts
from steward.daemon.supervisor import Part
from steward.daemon.workers import JOURNAL, nodes_part, run_capture, run_journal, snapshots_of

_HANG_S = 300.0


def controller_parts(settings: Settings) -> list[Part]:
    """Return a controller's workers, in the order in which they start.

    Raises:
        UsageError: The configuration does not set where to forward to.
    """
    if not settings.forward.to:
        raise UsageError("the configuration is no controller's: set 'to' in [forward]")
    # A controller has no sinks, so the state directory's store is the only one.
    archive = ArchiveSettings(environments=settings.archive.environments, sink={})
    settings = msgspec.structs.replace(settings, archive=archive)
    parts = [Part(name=JOURNAL, run=partial(run_journal, settings), last=True)]
    for cluster, of in settings.cluster.items():
        parts.append(_feeding(settings, f"forward.{cluster}", partial(_forward, settings, cluster)))
        if of.asks_slurm or of.scheduler != "slurm":
            runs = partial(_runs, settings, cluster)
            parts.append(_feeding(settings, f"runs.{cluster}", runs))
        if of.asks_slurm:
            look = partial(snapshots_of, settings, cluster)
            parts.append(_feeding(settings, f"slurm.{cluster}", look, registered=False))
        parts += [
            Part(
                name=f"capture.{cluster}.{share}",
                run=partial(run_capture, settings, cluster, share),
                after=(JOURNAL,),
            )
            for share in range(settings.capture_processes)
        ]
    parts += lines_parts(settings)
    parts += sensor_parts(settings)
    if settings.nodes.listen:
        parts.append(nodes_part(settings))
    if settings.gate.ask:
        from steward.daemon.consumer_workers import gate_part

        parts.append(gate_part(settings))
    return parts


def _feeding(
    settings: Settings,
    name: str,
    make: "partial[Consumer]",
    *,
    registered: bool = True,
) -> Part:
    """Return a worker that feeds one consumer."""
    run = partial(run_consumers, settings, [make], registered=registered)
    return Part(name=name, run=run, after=(JOURNAL,), hang_s=_HANG_S)


def _forward(settings: Settings, cluster: str) -> Consumer:
    from steward.extensions.controllers import Forward

    return Forward(settings, cluster, stores_of(settings))


def _runs(settings: Settings, cluster: str) -> Consumer:
    from steward.capture.unfinished_runs import Runs

    return Runs(settings.state_dir, cluster)
