"""The process that decides whether a job can be paid, and does nothing else."""

import resource
from functools import partial

from steward.bank.gate.precedence import Precedence
from steward.bank.gate.server import GateServer
from steward.core.config import Settings
from steward.core.waiting import Stop
from steward.daemon.feeding import patiently
from steward.daemon.supervise import Beat, Part


def gate_part(settings: Settings) -> Part:
    """The gate's process."""
    # Whoever keeps the ledger asks it until they have ended, and it decides meanwhile.
    return Part(name="gate", run=partial(run_gate, settings), last=True)


def run_gate(settings: Settings, stop: Stop, beat: Beat) -> None:
    """Decide until the Stop is raised."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    precedence = Precedence()
    precedence.take()

    def beat_first() -> None:
        precedence.renew()
        beat()

    server = patiently(lambda: GateServer(settings), stop, beat_first)
    server.run(stop, beat_first)
