"""GRES and licenses that a job asked for, where its TRES do not say: from its own words.

Slurm counts GRES in a job's TRES only where AccountingStorageTRES names them, and
there only with a slurmdbd. What was asked for per job, node, socket and task is
shown in every cluster.
"""

from typing import Final

from steward.core.records import JobRecord
from steward.slurm import tres

_COUNTED: Final = ("gres/", "license/")


def kind_of(name: str) -> str:
    """A TRES' name without its type: ``gres/gpu`` of ``gres/gpu:a100``."""
    return name.partition(":")[0]


def asked_for(record: JobRecord, sockets: int = 1) -> dict[str, int]:
    """What a job asked for, under the names that it used.

    Args:
        record: The job as the queue shows it.
        sockets: Of a node, as far as they are known: a record does not tell how many of them
            the job takes.
    """
    nodes, tasks = max(1, record.nodes or 1), max(1, record.tasks or 1)
    found: dict[str, int] = {}
    for text, many in (
        (record.tres_per_job, 1),
        (record.tres_per_node, nodes),
        (record.tres_per_socket, sockets * nodes),
        (record.tres_per_task, tasks),
    ):
        for name, amount in tres.requested_gres(text).items() if text else ():
            if name.startswith(_COUNTED):
                # The same ones, said twice: as the job's and as a task's.
                found[name] = max(found.get(name, 0), amount * many)
    return found


def without(text: str, kinds: set[str]) -> str:
    """A request without what is known of these kinds already."""
    if not text or not kinds:
        return text
    kept = [part for part in text.split(",") if not kinds.intersection(_kinds(part))]
    return ",".join(kept)


def _kinds(part: str) -> set[str]:
    return {kind_of(name) for name in tres.requested_gres(part)}
