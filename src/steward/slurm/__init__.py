"""Slurm interface: the only package that runs Slurm's commands and knows their formats.

- ``commands`` runs every program; ``errors`` has the exceptions.
- ``client`` (jobs, configuration), ``cluster`` (nodes, partitions, reservations), ``accounting``
  (slurmdbd), ``pending_jobs`` and ``triggers`` query Slurm.
- ``job_changes`` and ``cluster_changes`` change jobs, nodes, partitions and reservations.
- ``queue``, ``sacct``, ``cluster_records``, ``cluster_model``, ``job_details`` and ``environment``
  parse output and files; ``values``, ``tres``, ``arrays`` and ``nodelists`` parse single fields.

The package re-exports the classes and functions that others use, each loaded on first use.
"""

from typing import TYPE_CHECKING

from steward.core.extensions import make_lazy_getattr

if TYPE_CHECKING:
    from steward.slurm.arrays import includes_task
    from steward.slurm.client import MAX_COMPLETED, Slurm
    from steward.slurm.cluster import ClusterQueries, Ping
    from steward.slurm.cluster_changes import ClusterChanges
    from steward.slurm.cluster_records import NodeRecord, PartitionRecord, ReservationRecord
    from steward.slurm.errors import (
        EventNeverFires,
        SlurmDown,
        SlurmError,
        SlurmMissing,
        SlurmRefused,
        SlurmUnavailable,
        UnknownEvent,
        UnknownJob,
        UnknownNode,
        UnknownPartition,
        UnknownReservation,
        UnknownTrigger,
        WrongUpdate,
    )
    from steward.slurm.job_states import FINISHED, WAITING, decode_ended_state
    from steward.slurm.nodelists import NodeListError
    from steward.slurm.pending_jobs import PendingJobs, PendingStatus
    from steward.slurm.queue import QueueSnapshot
    from steward.slurm.slurmdbd import StoredScript
    from steward.slurm.triggers import TriggerRecord, Triggers
else:
    # Loaded on first use: many modules need only the names of states and never run a command.
    __getattr__ = make_lazy_getattr(
        __name__,
        slurmdbd=("StoredScript",),
        arrays=("includes_task",),
        client=("MAX_COMPLETED", "Slurm"),
        errors=(
            *("SlurmDown", "SlurmError", "SlurmMissing", "SlurmRefused", "SlurmUnavailable"),
            *("UnknownJob", "UnknownNode", "UnknownPartition", "UnknownReservation"),
            *("EventNeverFires", "UnknownEvent", "UnknownTrigger", "WrongUpdate"),
        ),
        cluster=("ClusterQueries", "Ping"),
        cluster_changes=("ClusterChanges",),
        cluster_records=("NodeRecord", "PartitionRecord", "ReservationRecord"),
        nodelists=("NodeListError",),
        pending_jobs=("PendingStatus", "PendingJobs"),
        queue=("QueueSnapshot",),
        job_states=("FINISHED", "WAITING", "decode_ended_state"),
        triggers=("TriggerRecord", "Triggers"),
    )

__all__ = [
    "FINISHED",
    "MAX_COMPLETED",
    "WAITING",
    "ClusterChanges",
    "ClusterQueries",
    "EventNeverFires",
    "NodeListError",
    "NodeRecord",
    "PartitionRecord",
    "PendingJobs",
    "PendingStatus",
    "Ping",
    "QueueSnapshot",
    "ReservationRecord",
    "Slurm",
    "SlurmDown",
    "SlurmError",
    "SlurmMissing",
    "SlurmRefused",
    "SlurmUnavailable",
    "StoredScript",
    "TriggerRecord",
    "Triggers",
    "UnknownEvent",
    "UnknownJob",
    "UnknownNode",
    "UnknownPartition",
    "UnknownReservation",
    "UnknownTrigger",
    "WrongUpdate",
    "decode_ended_state",
    "includes_task",
]
