"""Program that runs inside a sandbox: it queries and changes its cluster, and prints JSON.

``cluster_calls.py SETTINGS OBJECT METHOD ARGUMENTS``; SETTINGS is a ClusterSettings as JSON,
ARGUMENTS a list and an object as JSON.
"""

import sys
from typing import Any

import msgspec

from steward.slurm import ClusterChanges, ClusterQueries, SlurmError, Triggers
from steward.slurm.job_changes import JobChanges
from steward.slurm.settings import ClusterSettings


def main(settings: str, what: str, method: str, arguments: str) -> None:
    """Call one method."""
    cluster = msgspec.json.decode(settings, type=ClusterSettings)
    kinds: dict[str, Any] = {
        "machine": ClusterQueries,
        "changing": ClusterChanges,
        "triggers": Triggers,
        "jobs": JobChanges,
    }
    positional, named = msgspec.json.decode(arguments)
    answer: Any
    try:
        answer = getattr(kinds[what]("sandbox", cluster), method)(*positional, **named)
    except SlurmError as error:
        answer = {"error": type(error).__name__, "what": str(error), "said": error.output}
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
