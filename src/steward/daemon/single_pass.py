"""One pass without a daemon: ``archive watch --once`` and ``archive consume --once``.

`run_once` captures each spool and reads each topic once, feeds every consumer until it is done, and
exits. Sources and consumers are the daemon's, in one process and without sockets: `DirectLink`
stands for the connection to the journal's writer.
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
from steward.core.journal import Journal, JournalReader
from steward.core.journal.server import lock_state_dir, remove_expired
from steward.core.journal.store import EncodedEvent, encode_rows
from steward.core.script_stores import make_stores
from steward.core.sqlite import shrink_databases
from steward.core.waits import Stop
from steward.daemon.consumer_workers import get_consumer_factories, get_sink_factories
from steward.daemon.source_workers import get_slurm_factories, open_capture, recover_orphans


class OnceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one pass.

    Attributes:
        captured: Scripts captured from the spool, now or by an interrupted pass, and messages read
            from topics.
        waiting: Consumers that could not continue, with the reason.
    """

    captured: int
    waiting: dict[str, str] = {}


class DirectLink:
    """Connection to the journal for the process that is its writer."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.waiting: dict[str, str] = {}

    def append(self, events: Iterable[Event]) -> None:
        """Append events durably."""
        self.append_rows(encode_rows(events))

    def append_rows(self, rows: Sequence[EncodedEvent]) -> None:
        """Append encoded events durably."""
        if rows:
            self._journal.append(rows)

    def send_message(self, *message: Any) -> None:
        """Apply a message that would otherwise be sent to the journal's process."""
        verb, *args = message
        if verb == "passed":
            self._journal.record_position(*args)
            name, _, state, detail, *_ = args
            self.waiting.pop(name, None)
            if state != "running":
                self.waiting[name] = detail
        elif verb == "aside":
            self._journal.add_dead_letter(*args)
        else:
            self._journal.delete_dead_letter(*args)


def run_once(settings: Settings, send_heartbeat: Callable[[], None] = lambda: None) -> OnceReport:
    """Capture each spool and read each topic once; feed every consumer to the end.

    Raises:
        JournalUnavailable: A daemon runs on the same state directory.
        StoreUnavailable: Nothing can be written.
        Unavailable: Another resource, such as Slurm or a broker, is unavailable.
    """
    # SIGIO arrives when a writer meets a lease that is being dropped anyway; by default it kills.
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    lock = lock_state_dir(settings.state_dir)
    try:
        journal = Journal(settings.state_dir)
        link = DirectLink(journal)
        reader = JournalReader(settings.state_dir)
        # Sinks first: they make the store that capture prefers.
        feeds = [Feed(factory(), reader, link) for factory in get_sink_factories(settings).values()]
        feeds += [
            Feed(factory(), reader, link) for factory in get_consumer_factories(settings).values()
        ]
        captured = 0
        for cluster, cluster_settings in settings.cluster.items():
            if cluster_settings.remote:
                continue
            captured += _capture(settings, cluster, reader, link, send_heartbeat)
            if cluster_settings.asks_slurm:
                factories = get_slurm_factories(settings, cluster)
                feeds += [Feed(factory(), reader, link, registered=False) for factory in factories]
        captured += _consume(settings, reader, link, send_heartbeat)
        _feed_to_the_end(feeds, send_heartbeat)
        for feed in feeds:
            # The process will be gone when their delays end.
            if isinstance(feed.consumer, FilesSink):
                feed.consumer.file_waiting()
            elif isinstance(feed.consumer, RemoteSink):
                feed.consumer.end_waits()
        _feed_to_the_end(feeds, send_heartbeat)
        _remove_old(settings, journal, send_heartbeat)
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
    send_heartbeat: Callable[[], None],
) -> int:
    """Capture a cluster's spool once; return the number of scripts."""
    stop = Stop()
    # Nothing else can end a wait for Slurm, so do not wait: an absent Slurm is an error.
    stop.set()
    with open_capture(
        settings, cluster, 0, 1, reader, link.append_rows, stop, send_heartbeat
    ) as capture:
        recovered = recover_orphans(settings, cluster, 0, 1, reader)
        link.append(recovered)
        capture.run_once()
        return len(recovered) + capture.captured


def _consume(
    settings: Settings, reader: JournalReader, link: DirectLink, send_heartbeat: Callable[[], None]
) -> int:
    """Read each Kafka topic once; return the number of messages."""
    if not settings.consume:
        return 0
    from steward.daemon.source_workers import make_kafka_source, recover_foreign_orphans

    link.append(recover_foreign_orphans(settings, reader))
    count = 0
    for name in settings.consume:
        source = make_kafka_source(settings, name, reader, link.append, once=True)
        source.run_once(send_heartbeat)
        count += source.imported_count
    return count


def _feed_to_the_end(feeds: Sequence[Feed], send_heartbeat: Callable[[], None]) -> None:
    """Feed consumers until two full rounds find nothing to do: consumers feed each other."""
    idle_rounds = 0
    while idle_rounds < 2:
        send_heartbeat()
        busy = [feed.run_turn() for feed in feeds]
        idle_rounds = 0 if any(busy) else idle_rounds + 1


def _remove_old(settings: Settings, journal: Journal, send_heartbeat: Callable[[], None]) -> None:
    """Trim the journal, and shrink all open databases."""
    try:
        stores = make_stores(settings)
        while remove_expired(journal, stores, keep_s=settings.journal.keep_s):
            send_heartbeat()
    except Unavailable:
        # The next pass, or a daemon, trims; until then the data only takes space.
        return
    while shrink_databases():
        send_heartbeat()
