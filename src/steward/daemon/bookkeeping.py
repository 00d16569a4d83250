"""The parts ``accounting.log`` and ``accounting.plugins.NAME``: the job log, and plugins.

Each third party's plugin has a process of its own, so that one which hangs, ends
its process or uses up its memory holds up nobody else.
"""

import os
from collections.abc import Sequence
from typing import Final

from steward.core.config import Settings
from steward.core.events import Event
from steward.core.journal import JournalLink
from steward.core.journal.store import rows_of
from steward.core.waiting import Stop
from steward.daemon.feeding import run_consumers
from steward.daemon.supervise import Beat, Part
from steward.extensions.jobacct_plugins import (
    LOG,
    Around,
    LogConsumer,
    PluginConsumer,
    consumer_name,
    third_parties,
    types_of,
)

_JOURNAL: Final = ("journal",)
_NICENESS: Final = 10
"""None of it is waited for."""
_CLOSING_HANG_S: Final = 3600.0
_HANG_S: Final = 60.0


def accounting_parts(settings: Settings) -> list[Part]:
    """The processes of accounting that a configuration asks for."""
    parts = []
    if LOG in types_of(settings.accounting.type):
        parts.append(_log(settings))
    return [*parts, *(_plugin(settings, one) for one in third_parties(settings.accounting.type))]


def _log(settings: Settings) -> Part:
    def run(stop: Stop, beat: Beat) -> None:
        os.nice(_NICENESS)
        run_consumers(settings, [lambda: LogConsumer(settings)], stop, beat)

    return Part(name=LogConsumer.name, run=run, after=_JOURNAL, hang_s=_CLOSING_HANG_S)


def _plugin(settings: Settings, plugin_type: str) -> Part:
    def run(stop: Stop, beat: Beat) -> None:
        os.nice(_NICENESS)
        around = Around(append=Appending(settings.state_dir).append, stop=stop, beat=beat)
        run_consumers(settings, [lambda: PluginConsumer(settings, plugin_type, around)], stop, beat)

    # The alarm within the process comes first.
    hang_s = _HANG_S + 2 * settings.accounting.hook_timeout_s
    return Part(name=consumer_name(plugin_type), run=run, after=_JOURNAL, hang_s=hang_s)


class Appending:
    """Appends to the journal without waiting for it to come back.

    Args:
        state_dir: The directory that holds it.
    """

    def __init__(self, state_dir: str) -> None:
        self._link = JournalLink(state_dir, Stop())

    def append(self, new: Sequence[Event]) -> None:
        """Append events durably.

        Raises:
            JournalUnavailable: The journal's writer is away.
        """
        self._link.ask("append", *rows_of(new))
