"""``archive watch --once``, ``archive consume --once``: take what is there now, use it, and end.

The same sources and consumers as in the daemon, in one process and without
sockets: the link to the journal's writer is the writer itself.
"""

import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from steward.archive.files.sink import FilesSink
from steward.archive.remote.sink import RemoteSink
from steward.core.config import Settings
from steward.core.consumers import Feed
from steward.core.errors import Unavailable
from steward.core.events import Event
from steward.core.incoming import stores_of
from steward.core.journal import Journal, JournalReader
from steward.core.journal.server import remove_old, take_lock
from steward.core.journal.store import Row, rows_of
from steward.core.waits import Stop
from steward.daemon.workers import capturing, consumer_makers, orphans_of, sink_makers, slurm_makers


class OnceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one pass did.

    Attributes:
        captured: Scripts that were taken from the spool, now or by a pass that was cut short,
            and messages that were taken from topics.
        waiting: Consumers that could not go on, with the reason.
    """

    captured: int
    waiting: dict[str, str] = {}


class DirectLink:
    """The way to the journal for one who holds its writer."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.waiting: dict[str, str] = {}

    def append(self, new: Iterable[Event]) -> None:
        """Append events durably."""
        self.append_rows(rows_of(new))

    def append_rows(self, rows: Sequence[Row]) -> None:
        """Append encoded events durably."""
        if rows:
            self._journal.append(rows)

    def tell(self, *message: Any) -> None:
        """Do at once what a process would be asked to do by message."""
        verb, *args = message
        if verb == "passed":
            self._journal.passed(*args)
            name, _, state, detail, *_ = args
            self.waiting.pop(name, None)
            if state != "running":
                self.waiting[name] = detail
        elif verb == "aside":
            self._journal.set_aside(*args)
        else:
            self._journal.revived(*args)


def run_once(settings: Settings, beat: Callable[[], None] = lambda: None) -> OnceReport:
    """Capture each cluster's spool and take each topic in once; feed every consumer to the end.

    Raises:
        JournalUnavailable: A daemon runs on the same state directory.
        StoreUnavailable: Nothing can be written.
        Unavailable: Something else that is needed is away.
    """
    # It comes when a writer meets a lease that is being dropped anyway; it would end us.
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    settings = msgspec.structs.replace(settings, capture_processes=1)
    lock = take_lock(settings.state_dir)
    try:
        journal = Journal(settings.state_dir)
        link = DirectLink(journal)
        reader = JournalReader(settings.state_dir)
        # Sinks first: they make the store that capture prefers.
        feeds = [Feed(make(), reader, link) for make in sink_makers(settings).values()]
        feeds += [Feed(make(), reader, link) for make in consumer_makers(settings).values()]
        captured = 0
        for cluster, of in settings.cluster.items():
            if of.remote:
                continue
            captured += _capture(settings, cluster, reader, link, beat)
            if of.asks_slurm:
                makers = slurm_makers(settings, cluster)
                feeds += [Feed(make(), reader, link, registered=False) for make in makers]
        captured += _consume(settings, reader, link, beat)
        _feed_to_the_end(feeds, beat)
        for feed in feeds:
            # Nobody will be here when their time is over.
            if isinstance(feed.consumer, FilesSink):
                feed.consumer.file_waiting()
            elif isinstance(feed.consumer, RemoteSink):
                feed.consumer.end_waits()
        _feed_to_the_end(feeds, beat)
        _remove_old(settings, journal, beat)
        for feed in feeds:
            feed.consumer.close()
        journal.close()
    finally:
        lock.close()
    return OnceReport(captured=captured, waiting=link.waiting)


def _capture(
    settings: Settings,
    cluster: str,
    reader: JournalReader,
    link: DirectLink,
    beat: Callable[[], None],
) -> int:
    stop = Stop()
    # Nobody but us can end the wait for Slurm, so there is none: what is away is an error.
    stop.set()
    with capturing(settings, cluster, 0, reader, link.append_rows, stop, beat) as capture:
        recovered = orphans_of(settings, cluster, 0, reader)
        link.append(recovered)
        capture.run_once()
        return len(recovered) + capture.captured


def _consume(
    settings: Settings, reader: JournalReader, link: DirectLink, beat: Callable[[], None]
) -> int:
    if not settings.consume:
        return 0
    from steward.daemon.source_workers import orphans_of_others, source_of

    link.append(orphans_of_others(settings, reader))
    taken = 0
    for name in settings.consume:
        source = source_of(settings, name, reader, link.append, once=True)
        source.run_once(beat)
        taken += source.taken
    return taken


def _feed_to_the_end(feeds: Sequence[Feed], beat: Callable[[], None]) -> None:
    """Turn until a whole round has found nothing to do, twice: consumers feed each other."""
    idle_rounds = 0
    while idle_rounds < 2:
        beat()
        busy = [feed.turn() for feed in feeds]
        idle_rounds = 0 if any(busy) else idle_rounds + 1


def _remove_old(settings: Settings, journal: Journal, beat: Callable[[], None]) -> None:
    try:
        stores = stores_of(settings)
        while remove_old(journal, stores, keep_s=settings.journal.keep_s):
            beat()
        while journal.shrink():
            beat()
    except Unavailable:
        # The next pass, or a daemon, trims: until then the bytes only take room.
        return
