"""Job holds in Slurm: is a job held, and may its owner release it?

Steward changes jobs with the rights of SlurmUser, so it must itself prevent that somebody releases
through it a hold that Slurm would not let them release. The predicates read a :class:`JobRecord` of
squeue or scontrol: priority 0 means held, the reason tells who holds the job.
``format_requeue_mark`` and ``is_requeue_unfinished`` write and recognize the comment that marks a
requeue in progress.
"""

from collections.abc import Iterable
from typing import Final

from steward.automation.node_reasons import is_replaceable_by
from steward.core.records import JobRecord
from steward.slurm import WAITING

_ADMIN_HOLD_REASON: Final = "jobheldadmin"
"""Slurm's reason for a hold by an administrator."""
_USER_HOLD_REASON: Final = "jobhelduser"
"""Slurm's reason for a hold by the job's owner."""
# Slurm treats both as the user's own holds, whoever requested the requeue.
_REQUEUE_HOLD_REASONS: Final = frozenset(
    {"job requeued in held state", "launch failed requeued held"}
)
_USER_HOLDS: Final = _REQUEUE_HOLD_REASONS | {_USER_HOLD_REASON}
"""Reasons of holds that the owner may release."""
_REQUEUE_MARK_PREFIX: Final = "requeued away from "
"""Start of the comment that marks a requeue in progress."""


def has_slurm_hold(record: JobRecord) -> bool:
    """Return whether a job, pending or once requeued, cannot start until somebody releases it."""
    if record.priority is not None:
        # For arrays Slurm also shows reasons that no longer apply, so the priority decides.
        return record.priority == 0
    return not _split_reasons(record).isdisjoint(_USER_HOLDS | {_ADMIN_HOLD_REASON})


def is_held_pending(record: JobRecord) -> bool:
    """Return whether a job is pending and held."""
    return record.state in WAITING and has_slurm_hold(record)


def has_admin_hold(record: JobRecord) -> bool:
    """Return whether a job is held by an administrator, so that its owner cannot release it."""
    reasons = _split_reasons(record)
    return has_slurm_hold(record) and (
        _ADMIN_HOLD_REASON in reasons or reasons.isdisjoint(_USER_HOLDS)
    )


def format_requeue_mark(nodes: Iterable[str]) -> str:
    """Return the comment that marks a job from before its requeue until its release."""
    from steward.slurm.nodelists import fold_nodelist

    return _REQUEUE_MARK_PREFIX + fold_nodelist(list(nodes)).replace("[", "").replace("]", "")


def is_requeue_unfinished(comment: str, speaker: str) -> bool:
    """Return whether a comment marks an unfinished requeue that this speaker started."""
    return comment.startswith(_REQUEUE_MARK_PREFIX) and is_replaceable_by(comment, speaker)


def _split_reasons(record: JobRecord) -> frozenset[str]:
    """Split a job's reasons, in lower case."""
    # scontrol writes underscores where squeue writes blanks.
    return frozenset(record.reason.replace("_", " ").lower().split(","))
