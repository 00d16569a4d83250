"""Which jobs are kept from starting, and whose hold that is: what an owner may end, and what not.

Steward changes jobs with the rights of SlurmUser, so it must itself see to it that
nobody ends by it what Slurm would not let them end.
"""

from collections.abc import Iterable
from typing import Final

from steward.automation.node_reasons import is_ours
from steward.core.records import JobRecord
from steward.slurm import WAITING

_BY_ADMIN: Final = "jobheldadmin"
_BY_USER: Final = "jobhelduser"
# Slurm counts both as its user's holds, whoever asked for the requeue.
_REQUEUED: Final = frozenset({"job requeued in held state", "launch failed requeued held"})
_OWN: Final = _REQUEUED | {_BY_USER}
_REQUEUE: Final = "requeued away from "


def is_kept(record: JobRecord) -> bool:
    """Whether a job, if it has to wait (again), does not start before somebody releases it."""
    if record.priority is not None:
        # Of an array Slurm shows reasons that were, too.
        return record.priority == 0
    return not _whys(record).isdisjoint(_OWN | {_BY_ADMIN})


def is_held(record: JobRecord) -> bool:
    """Whether a job waits, and is kept from starting."""
    return record.state in WAITING and is_kept(record)


def is_kept_by_admin(record: JobRecord) -> bool:
    """Whether its owner cannot end what keeps a job from starting: an administrator's hold."""
    whys = _whys(record)
    return is_kept(record) and (_BY_ADMIN in whys or whys.isdisjoint(_OWN))


def requeue_text(nodes: Iterable[str]) -> str:
    """What is said of a job from before its requeue until it is released again."""
    from steward.slurm.nodelists import fold

    return _REQUEUE + fold(list(nodes)).replace("[", "").replace("]", "")


def is_half_requeued(said: str, speaker: str) -> bool:
    """Whether what is said of a job tells of a requeue of the speaker's that has not ended."""
    return said.startswith(_REQUEUE) and is_ours(said, speaker)


def _whys(record: JobRecord) -> frozenset[str]:
    # scontrol has underscores where squeue has blanks.
    return frozenset(record.reason.replace("_", " ").lower().split(","))
