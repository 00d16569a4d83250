"""A Site whose journal is a real one: it can be away, be trimmed, and keep dead letters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.site import Site
from steward.core.consumers import Consumer, Feed
from steward.core.events import Event
from steward.core.journal import Journal, JournalReader
from steward.core.journal.store import rows_of
from steward.daemon.once import DirectLink


class JournaledSite(Site):
    """Appends to a journal in its state directory, and feeds consumers from it as a daemon does.

    Attributes:
        writer: The journal.
        reader: The same, for reading.
        feeds: A feed of each open consumer, by name.
    """

    def __init__(self, directory: Path, **sections: Any) -> None:
        self.feeds: dict[str, Feed] = {}
        super().__init__(directory, **sections)
        self.writer = Journal(self.settings.state_dir)
        self.reader = JournalReader(self.settings.state_dir)
        self.link = DirectLink(self.writer)

    def add(self, consumer: Consumer) -> None:
        super().add(consumer)
        self.feeds[consumer.name] = Feed(consumer, self.reader, self.link, clock=self.clock)

    def append(self, new: Sequence[Event]) -> None:
        self.writer.append(rows_of(new))

    def refilled(self, consumer: str, since_s: int) -> None:
        self.writer.refilled(consumer, since_s)

    def run(self, *names: str, turns: int = 3) -> None:
        """Feed these consumers, or all, until they have nothing to do, for some turns at least."""
        for _ in range(turns):
            self.clock.now_s += 60.0  # every back-off is over, and every tick due
            for name in names or self.feeds:
                while self.feeds[name].turn():
                    pass
