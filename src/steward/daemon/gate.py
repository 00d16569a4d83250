"""The process that decides whether a job can be paid, and does nothing else."""

import os
import resource
from functools import partial
from typing import Final

from steward.bank.gate.server import GateServer
from steward.config import Settings
from steward.daemon.feeding import patiently
from steward.daemon.supervise import Beat, Part
from steward.waiting import Stop


def gate_part(settings: Settings) -> Part:
    """The gate's process."""
    return Part(name="gate", run=partial(run_gate, settings))


def run_gate(settings: Settings, stop: Stop, beat: Beat) -> None:
    """Decide until the Stop is raised."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _go_first()
    server = patiently(lambda: GateServer(settings), stop, beat)
    server.run(stop, beat)


_NICENESS: Final = -10


def _go_first() -> None:
    """Be scheduled before what is not waited for: slurmctld waits for each answer."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    except PermissionError:
        # Only root may, or who was given the right (LimitNICE=); it then waits its turn.
        return
