"""Bounds of what one job may write and of the CPU time that one estimate may take.

slurmctld asks before it looks at the lengths of a job's texts, and waits for the answer.
``LONGEST_TEXTS`` holds Slurm's own limits, rounded up where versions differ. The submit
plugins cut each text at the same length and name the field: see ``shapes.Submit.oversize``.
"""

import time
from collections.abc import Sequence
from typing import Final

from steward.bank.errors import NoEstimate
from steward.bank.records import Description

LONGEST: Final = 4096
"""Of most texts, in bytes; slurmctld itself takes a quarter of it."""
LONGEST_NODELIST: Final = 64 * 1024
_LONGEST_LATE: Final = 256
"""Of a text that is read although the budget is used up: names fit, long lists do not."""
_LONGEST_LIST: Final = 64
"""Of TRES and licenses, in parts."""
_MOST_CHOICES: Final = 64

OPTIONS: Final = {
    "account": "--account",
    "partition": "--partition",
    "qos": "--qos",
    "reservation": "--reservation",
    "features": "--constraint",
    "array": "--array",
    "req_nodes": "--nodelist",
    "licenses": "--licenses",
    "tres_per_job": "--gpus",
    "tres_per_node": "--gres",
    "tres_per_socket": "--gpus-per-socket",
    "tres_per_task": "--tres-per-task",
    "cpus_per_tres": "--cpus-per-gpu",
    "mem_per_tres": "--mem-per-gpu",
}
"""The texts of a description, by field, with what a user calls them."""
LONGEST_TEXTS: Final = dict.fromkeys(OPTIONS, LONGEST) | {"req_nodes": LONGEST_NODELIST}
"""Of each of them, in bytes."""
_LISTS: Final = frozenset(OPTIONS) - {
    *("account", "partition", "qos", "reservation", "array", "req_nodes")
}


class Budget:
    """CPU time of the calling thread that is left for one question.

    Args:
        ns: How much; None for no limit.
    """

    __slots__ = ("_until_ns",)

    def __init__(self, ns: int | None) -> None:
        self._until_ns = None if ns is None else time.thread_time_ns() + ns

    def is_spent(self) -> bool:
        """Whether all of it is used up."""
        return self._until_ns is not None and time.thread_time_ns() >= self._until_ns


UNLIMITED: Final = Budget(None)


def refuse_endless(job: Description, budget: Budget = UNLIMITED) -> None:
    """Refuse a text that is longer than Slurm takes, before anything of it is read.

    Args:
        job: What it asks for.
        budget: Once it is spent only short texts are read.

    Raises:
        NoEstimate: One of its texts is too long.
    """
    is_late = budget.is_spent()
    for name, option in OPTIONS.items():
        text = getattr(job, name)
        if not text:
            continue
        if is_late and len(text) > _LONGEST_LATE:
            raise NoEstimate(
                f"{option} takes too long to price: shorten it, or split the job", text[:80]
            )
        if len(text) > LONGEST_TEXTS[name] or (name in _LISTS and text.count(",") >= _LONGEST_LIST):
            raise NoEstimate(f"{option} is longer than any that Slurm takes", text[:80])


def choices(names: str, option: str) -> Sequence[str]:
    """The partitions, or QOS, of a list, each once.

    Raises:
        NoEstimate: They are more than a cluster has.
    """
    found = tuple(dict.fromkeys(filter(None, (name.strip() for name in names.split(",")))))
    if len(found) > _MOST_CHOICES:
        raise NoEstimate(f"{option} names more than {_MOST_CHOICES}", names[:80])
    return found
