"""Job holds in Slurm: is a job held, and may its owner release it?

Steward changes jobs with the rights of SlurmUser, so it must itself prevent that somebody releases
through it a hold that Slurm would not let them release. The predicates read a :class:`JobRecord` of
squeue or scontrol: priority 0 means held, the reason says by whom. ``requeue_text`` and
``is_half_requeued`` write and recognize the mark of a requeue in progress.
"""

from collections.abc import Iterable
from typing import Final

from steward.automation.node_reasons import is_ours
from steward.core.records import JobRecord
from steward.slurm import WAITING

_BY_ADMIN: Final = "jobheldadmin"
"""Slurm's reason for a hold by an administrator."""
_BY_USER: Final = "jobhelduser"
"""Slurm's reason for a hold by the job's owner."""
# Slurm treats both as the user's own holds, whoever requested the requeue.
_REQUEUED: Final = frozenset({"job requeued in held state", "launch failed requeued held"})
_OWN: Final = _REQUEUED | {_BY_USER}
"""Reasons of holds that the owner may release."""
_REQUEUE: Final = "requeued away from "
"""Start of the comment that marks a requeue in progress."""


def is_kept(record: JobRecord) -> bool:
    """Return whether a job, pending or once requeued, cannot start until somebody releases it."""
    if record.priority is not None:
        # For arrays Slurm also shows reasons that no longer apply, so the priority decides.
        return record.priority == 0
    return not _whys(record).isdisjoint(_OWN | {_BY_ADMIN})


def is_held(record: JobRecord) -> bool:
    """Return whether a job is pending and held."""
    return record.state in WAITING and is_kept(record)


def is_kept_by_admin(record: JobRecord) -> bool:
    """Return whether a job is held by an administrator, so that its owner cannot release it."""
    whys = _whys(record)
    return is_kept(record) and (_BY_ADMIN in whys or whys.isdisjoint(_OWN))


def requeue_text(nodes: Iterable[str]) -> str:
    """Return the comment that marks a job from before its requeue until its release."""
    from steward.slurm.nodelists import fold

    return _REQUEUE + fold(list(nodes)).replace("[", "").replace("]", "")


def is_half_requeued(said: str, speaker: str) -> bool:
    """Return whether a comment marks an unfinished requeue that this speaker started."""
    return said.startswith(_REQUEUE) and is_ours(said, speaker)


def _whys(record: JobRecord) -> frozenset[str]:
    """Split a job's reasons, in lower case."""
    # scontrol writes underscores where squeue writes blanks.
    return frozenset(record.reason.replace("_", " ").lower().split(","))
