"""What a job may write at the most: the gate decides on all jobs in turn, and none may hold it up.

A submit plugin sees a job before slurmctld has looked at the lengths of its texts,
and reading them takes a time that grows with them, once for each of its partitions.
"""

from collections.abc import Sequence
from typing import Final

from steward.bank.errors import NoEstimate
from steward.bank.records import Description

LONGEST: Final = 4096
"""Of most texts, in characters; slurmctld itself takes a quarter of it."""
_LONGEST_ARRAY: Final = 64 * 1024
_LONGEST_LIST: Final = 64
"""Of TRES and licenses, in parts."""
_MOST_CHOICES: Final = 64

_TEXTS: Final = (
    ("account", "--account"),
    ("partition", "--partition"),
    ("qos", "--qos"),
    ("reservation", "--reservation"),
    ("features", "--constraint"),
    ("licenses", "--licenses"),
    ("tres_per_job", "--gpus"),
    ("tres_per_node", "--gres"),
    ("tres_per_socket", "--gpus-per-socket"),
    ("tres_per_task", "--tres-per-task"),
    ("cpus_per_tres", "--cpus-per-gpu"),
    ("mem_per_tres", "--mem-per-gpu"),
)
_LISTS: Final = frozenset(name for name, _ in _TEXTS[5:])


def refuse_endless(job: Description) -> None:
    """Refuse what no job needs to say, before anything of it is read.

    Raises:
        NoEstimate: One of its texts is too long.
    """
    for name, option in _TEXTS:
        text = getattr(job, name)
        if not text:
            continue
        if len(text) > LONGEST or (name in _LISTS and text.count(",") >= _LONGEST_LIST):
            raise NoEstimate(f"{option} is longer than any that Slurm takes", text[:80])
    if len(job.array) > _LONGEST_ARRAY:
        raise NoEstimate("--array is longer than any that can be read", job.array[:80])


def choices(names: str, option: str) -> Sequence[str]:
    """The partitions, or QOS, of a list, each once.

    Raises:
        NoEstimate: They are more than a cluster has.
    """
    found = tuple(dict.fromkeys(filter(None, (name.strip() for name in names.split(",")))))
    if len(found) > _MOST_CHOICES:
        raise NoEstimate(f"{option} names more than {_MOST_CHOICES}", names[:80])
    return found
