"""How a process of the daemon waits for what it needs, and feeds its consumers."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from steward.core.config import Settings
from steward.core.consumers import Consumer, Feed, feed_all
from steward.core.errors import Unavailable
from steward.core.journal import JournalLink, JournalReader
from steward.core.sqlite import SqliteUnavailable
from steward.core.waiting import Backoff, Stop
from steward.daemon.supervise import Beat

log = logging.getLogger(__name__)

T = TypeVar("T")
MakeConsumer = Callable[[], Consumer]


def run_consumers(
    settings: Settings,
    makers: Sequence[MakeConsumer],
    stop: Stop,
    beat: Beat,
    *,
    registered: bool = True,
) -> None:
    """A process that feeds consumers."""
    link = JournalLink(settings.state_dir, stop, subscribe=True)
    reader = patiently(lambda: JournalReader(settings.state_dir), stop, beat)
    feeds = []
    for make in makers:
        consumer = patiently(make, stop, beat)
        feeds.append(Feed(consumer, reader, link, registered=registered))
    feed_all(feeds, link, stop, beat)


def patiently(make: Callable[[], T], stop: Stop, beat: Beat) -> T:
    """What ``make`` makes, as soon as what it needs is there; the Stop ends the waiting."""
    backoff = Backoff(0.02, 5.0)
    said = ""
    while True:
        try:
            return make()
        except Unavailable as error:
            if stop.is_set():
                raise
            # In the first moments the journal's process has not made its file yet.
            if str(error) != said and not isinstance(error, SqliteUnavailable):
                said = str(error)
                log.error("waiting: %s", error)
            stop.wait(backoff.next_s())
            beat()
            if stop.is_set():
                raise
