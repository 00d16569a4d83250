"""The part ``rules``: one process that decides what is done about events, and does it."""

from functools import partial
from typing import Final

from steward.core.config import Settings
from steward.core.consumers import Consumer
from steward.core.waiting import Stop
from steward.daemon.feeding import run_consumers
from steward.daemon.supervise import Beat, Part

RULES: Final = "rules"
_HANG_S: Final = 300.0


def rules_part(settings: Settings) -> Part:
    """The process of the rules."""
    return Part(name=RULES, run=partial(_run, settings), after=("journal",), hang_s=_HANG_S)


def _run(settings: Settings, stop: Stop, beat: Beat) -> None:
    run_consumers(settings, [partial(_consumer, settings)], stop, beat)


def _consumer(settings: Settings) -> Consumer:
    from steward.automation.rules.consumer import RulesConsumer
    from steward.automation.rules.hand import RunnersHand
    from steward.core.standings import access_of
    from steward.daemon.rooms import registry

    def hand() -> RunnersHand:
        # Each of its own: what rooms hold open is for one thread.
        return RunnersHand(settings, access_of(settings), registry(settings))

    return RulesConsumer(settings, hand)
