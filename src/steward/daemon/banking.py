"""The bank's processes: ``bank`` keeps the ledger, ``gate`` decides, ``mybrc`` speaks to others.

Each is one of its own: a decision must not wait for a ledger on another machine,
nor a charge for a remote server that takes its time.
"""

from functools import partial
from typing import Final

from steward.core.config import Settings
from steward.core.consumers import Consumer
from steward.core.waiting import Stop
from steward.daemon.feeding import run_consumers
from steward.daemon.gate import gate_part
from steward.daemon.supervise import Beat, Part

BANK: Final = "bank"
_JOURNAL: Final = "journal"
_HANG_S: Final = 1800.0
"""A comparison with slurmdbd's records of a long time takes its time."""


def banking_parts(settings: Settings) -> list[Part]:
    """The processes of the bank, of a configuration that has one."""
    from steward.daemon.mybrc import mybrc_part, remote_part

    parts = [
        gate_part(settings),
        Part(name=BANK, run=partial(_run, settings), after=(_JOURNAL,), hang_s=_HANG_S),
    ]
    if settings.mybrc.listen:
        parts.append(mybrc_part(settings))
    if settings.bank.remote.url:
        parts.append(remote_part(settings))
    return parts


def _run(settings: Settings, stop: Stop, beat: Beat) -> None:
    run_consumers(settings, [partial(_consumer, settings)], stop, beat)


def _consumer(settings: Settings) -> Consumer:
    from steward.bank.consumer import BankConsumer

    return BankConsumer(settings)
