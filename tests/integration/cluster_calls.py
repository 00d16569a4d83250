"""Program that runs inside a sandbox: it queries and changes its cluster.

``cluster_calls.py SETTINGS``; SETTINGS is a ClusterSettings as JSON. Each line on standard input is
a call: object, method, arguments and named arguments, as JSON. Each line on standard output is its
answer.
"""

import sys
from typing import Any

import msgspec

from steward.slurm import ClusterChanges, ClusterQueries, SlurmError, Triggers
from steward.slurm.job_changes import JobChanges
from steward.slurm.settings import ClusterSettings

KINDS: dict[str, Any] = {
    "machine": ClusterQueries,
    "changing": ClusterChanges,
    "triggers": Triggers,
    "jobs": JobChanges,
}


def main(settings: str) -> None:
    """Answer calls until standard input ends."""
    cluster = msgspec.json.decode(settings, type=ClusterSettings)
    for line in sys.stdin.buffer:
        what, method, positional, named = msgspec.json.decode(line)
        answer: Any
        try:
            answer = getattr(KINDS[what]("sandbox", cluster), method)(*positional, **named)
        except SlurmError as error:
            answer = {"error": type(error).__name__, "what": str(error), "said": error.output}
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
