"""Journals: real ones, Sites that append to one, and events for them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pysqlite3 import dbapi2

from harness.events import make_event
from harness.site import Site
from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings, Settings
from steward.core.consumers import Consumer, Feed
from steward.core.events import JOB_SEEN, Event, JobFacts
from steward.core.journal import Journal, JournalReader
from steward.core.journal.store import encode_rows
from steward.core.records import JobRecord
from steward.core.script_stores import IncomingStores, make_stores
from steward.daemon.single_pass import DirectLink
from steward.extensions.kafka.settings import KafkaSinkSettings


class JournaledSite(Site):
    """A Site that appends to a real journal and feeds consumers from it, as the daemon does.

    Attributes:
        writer: The journal's writer.
        reader: A reader of the journal.
        feeds: The feed of each open consumer, by name.
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
        self.writer.append(encode_rows(new))

    def feed(self, *events: Event) -> list[Event]:
        """Append events without applying them; :meth:`run` applies them."""
        self.append(events)
        return []

    def refilled(self, consumer: str, since_s: int) -> None:
        self.writer.clear_missed(consumer, since_s)

    def feed_one(self, consumer: Consumer, turns: int = 3) -> Feed:
        """Feed one consumer, open here or not, until it is idle; at least ``turns`` turns."""
        feed = Feed(consumer, self.reader, self.link, clock=self.clock)
        self._turn(feed, turns)
        return feed

    def _turn(self, feed: Feed, turns: int) -> None:
        for _ in range(turns):
            self.clock.now_s += 60.0  # ends every back-off and makes every tick due
            while feed.run_turn():
                pass

    def run(self, *names: str, turns: int = 3) -> None:
        """Feed the named consumers, or all, until they are idle; at least ``turns`` turns."""
        for _ in range(turns):
            for name in names or self.feeds:
                self._turn(self.feeds[name], 1)


def seen_event(job_id: int) -> Event:
    return make_event(JOB_SEEN, f"seen:{job_id}", JobFacts(record=JobRecord(job_id=job_id)))


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(str(tmp_path))


@pytest.fixture
def reader(journal: Journal, tmp_path: Path) -> JournalReader:
    return JournalReader(str(tmp_path))


def two_sinks(tmp_path: Path) -> IncomingStores:
    """Return the stores of a files sink ``a`` and a Kafka sink ``b``."""
    archive = ArchiveSettings(
        sink={"a": FilesSinkSettings(path=str(tmp_path / "a")), "b": KafkaSinkSettings()}
    )
    return make_stores(Settings(state_dir=str(tmp_path), archive=archive))


def append(journal: Journal, *events: Event) -> int:
    return journal.append(encode_rows(events))


def fill(journal: Journal, megabytes: int) -> None:
    """Append large events to a journal and delete all of them."""
    count = megabytes * 16
    for first in range(0, count, 256):
        rows = [
            ("job.seen", "c1", f"large:{number}", os.urandom(1 << 16))
            for number in range(first, min(first + 256, count))
        ]
        journal.append(rows)
    with tables(journal) as db:
        db.execute("DELETE FROM event")


@contextmanager
def tables(journal: Journal) -> Iterator[Any]:
    """Open a second connection to a journal's file, with one transaction."""
    with closing(dbapi2.connect(journal.path)) as db, db:
        yield db
