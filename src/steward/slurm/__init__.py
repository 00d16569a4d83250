"""Slurm interface: the only package that runs Slurm's commands and knows their formats.

It re-exports the classes and functions that other packages use, each loaded on first use.
"""

from typing import TYPE_CHECKING

from steward.core.extensions import lazy_exports

if TYPE_CHECKING:
    from steward.slurm.accounting import StoredScript
    from steward.slurm.arrays import covers
    from steward.slurm.client import MOST_WHOLE, Slurm
    from steward.slurm.cluster import Machine, Ping
    from steward.slurm.cluster_changes import MachineChanging
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
    from steward.slurm.job_states import FINISHED, WAITING, ended_state
    from steward.slurm.nodelists import NodeListError
    from steward.slurm.pending_jobs import Outlook, Pending
    from steward.slurm.queue import Queue
    from steward.slurm.triggers import TriggerRecord, Triggers
else:
    # Loaded on first use: many modules need only the names of states and never run a command.
    __getattr__ = lazy_exports(
        __name__,
        accounting=("StoredScript",),
        arrays=("covers",),
        client=("MOST_WHOLE", "Slurm"),
        errors=(
            *("SlurmDown", "SlurmError", "SlurmMissing", "SlurmRefused", "SlurmUnavailable"),
            *("UnknownJob", "UnknownNode", "UnknownPartition", "UnknownReservation"),
            *("EventNeverFires", "UnknownEvent", "UnknownTrigger", "WrongUpdate"),
        ),
        cluster=("Machine", "Ping"),
        cluster_changes=("MachineChanging",),
        cluster_records=("NodeRecord", "PartitionRecord", "ReservationRecord"),
        nodelists=("NodeListError",),
        pending_jobs=("Outlook", "Pending"),
        queue=("Queue",),
        job_states=("FINISHED", "WAITING", "ended_state"),
        triggers=("TriggerRecord", "Triggers"),
    )

__all__ = [
    "FINISHED",
    "MOST_WHOLE",
    "WAITING",
    "EventNeverFires",
    "Machine",
    "MachineChanging",
    "NodeListError",
    "NodeRecord",
    "Outlook",
    "PartitionRecord",
    "Pending",
    "Ping",
    "Queue",
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
    "covers",
    "ended_state",
]
