"""Program that runs inside a sandbox, where its users' names resolve: it queries Slurm.

``slurm_calls.py SETTINGS QUESTION [ARGUMENT [TIMEOUT]]``; SETTINGS is a ClusterSettings as JSON.

The program prints JSON.
"""

import sys
import time
from typing import Any

import msgspec

from steward.capture.queue_polls import QueuePoller
from steward.core.events import Event
from steward.slurm import Slurm, SlurmError
from steward.slurm.commands import COMMAND_TIMEOUT_S
from steward.slurm.settings import ClusterSettings


def main(
    settings: str, question: str, argument: str = "0", timeout_s: str = str(COMMAND_TIMEOUT_S)
) -> None:
    """Answer one question."""
    cluster = msgspec.json.decode(settings, type=ClusterSettings)
    slurm = Slurm("sandbox", cluster, float(timeout_s))
    answers: dict[str, Any] = {
        "version": slurm.version,
        "config": slurm.config,
        "offered": lambda: sorted(slurm.list_fields(argument)),
        "queue": lambda: slurm.queue().records,
        "job": lambda: slurm.job(int(argument)),
        "picture": slurm.read_model,
        "standing": lambda: slurm.read_roles().private_data,
        "snapshots": lambda: watch(QueuePoller("sandbox", cluster, slurm), float(argument)),
    }
    try:
        answer = answers[question]()
    except SlurmError as error:
        answer = {"error": type(error).__name__, "said": error.output}
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")


def watch(snapshots: QueuePoller, seconds: float) -> None:
    """Print one event a line for this many seconds, and then null."""

    def append(events: "list[Event]") -> None:
        for event in events:
            sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
        sys.stdout.buffer.flush()

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(min(snapshots.tick(append), max(0.0, until - time.monotonic())))  # type: ignore[arg-type] # a list is a sequence of events


if __name__ == "__main__":
    main(*sys.argv[1:])
