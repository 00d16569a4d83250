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
from steward.core.script_stores import make_stores
from steward.daemon.consumer_workers import run_consumers
from steward.daemon.source_workers import (
    CAPTURE_PROCESSES,
    make_jobcomp_workers,
    make_nodes_worker,
    make_queue_poller,
    make_sensor_workers,
    run_capture,
)
from steward.daemon.supervisor import JOURNAL, WorkerSpec
from steward.daemon.workers import run_journal

_HANG_S = 300.0


def make_controller_workers(settings: Settings) -> list[WorkerSpec]:
    """Return a controller's workers, in the order in which they start.

    Raises:
        UsageError: The configuration does not set where to forward to.
    """
    if not settings.forward.to:
        raise UsageError("this configuration is not a controller's: set 'to' in [forward]")
    # A controller has no sinks, so the state directory's store is the only one.
    archive = ArchiveSettings(environments=settings.archive.environments, sink={})
    settings = msgspec.structs.replace(settings, archive=archive)
    workers = [WorkerSpec(name=JOURNAL, run=partial(run_journal, settings), last=True)]
    for cluster, cluster_settings in settings.cluster.items():
        workers.append(
            _make_feed_worker(
                settings, f"forward.{cluster}", partial(_make_forwarder, settings, cluster)
            )
        )
        if cluster_settings.asks_slurm or cluster_settings.scheduler != "slurm":
            make_consumer = partial(_make_runs_consumer, settings, cluster)
            workers.append(_make_feed_worker(settings, f"runs.{cluster}", make_consumer))
        if cluster_settings.asks_slurm:
            make_poller = partial(make_queue_poller, settings, cluster)
            workers.append(
                _make_feed_worker(settings, f"slurm.{cluster}", make_poller, registered=False)
            )
        workers += [
            WorkerSpec(
                name=f"capture.{cluster}.{share}",
                run=partial(run_capture, settings, cluster, share),
                after=(JOURNAL,),
            )
            for share in range(CAPTURE_PROCESSES)
        ]
    workers += make_jobcomp_workers(settings)
    workers += make_sensor_workers(settings)
    if settings.nodes.listen:
        workers.append(make_nodes_worker(settings))
    if settings.gate.ask:
        from steward.daemon.consumer_workers import make_gate_worker

        workers.append(make_gate_worker(settings))
    return workers


def _make_feed_worker(
    settings: Settings,
    name: str,
    factory: "partial[Consumer]",
    *,
    registered: bool = True,
) -> WorkerSpec:
    """Return a worker that feeds one consumer."""
    run = partial(run_consumers, settings, [factory], registered=registered)
    return WorkerSpec(name=name, run=run, after=(JOURNAL,), hang_s=_HANG_S)


def _make_forwarder(settings: Settings, cluster: str) -> Consumer:
    from steward.extensions.controllers import EventForwarder

    return EventForwarder(settings, cluster, make_stores(settings))


def _make_runs_consumer(settings: Settings, cluster: str) -> Consumer:
    from steward.capture.run_store import UnfinishedRuns

    return UnfinishedRuns(settings.state_dir, cluster)
