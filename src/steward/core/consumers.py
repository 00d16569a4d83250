"""Consumers: their interface, and the loop that feeds them events from the journal.

A :class:`Consumer` commits its own cursor in the same transaction as its effect, so that a
batch is applied once however often the process is killed. :class:`Feed` reads the journal for
one consumer and ``feed_all`` runs the feeds of a process. Each turn of a feed calls the
consumer's ``tick`` when due, applies dead letters that are marked for a retry, applies the next
batch, and reports position and rate (:class:`ApplyRate`) to the journal's writer.
:class:`DatabaseConsumer` is the base class of consumers with a SQLite database of their own.

*Unavailable* stops a consumer and is retried indefinitely with back-off. *Rejected* concerns one
event: after three attempts it becomes a dead letter with its error, and the next event follows.
An unexpected exception counts as a rejection of the event that causes it.
"""

import logging
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

import msgspec

from steward.core.errors import StewardError, Unavailable
from steward.core.events import (
    ArchivePurge,
    ArchiveResend,
    Event,
    UnreadableBody,
    decode_unsent_event,
    encode_event,
)
from steward.core.journal import JournalLink, JournalReader
from steward.core.sqlite import SLICE_S, Database, shrink_databases
from steward.core.storage import OUTBOX, OutboxBatch, move_cursor, read_cursor
from steward.core.waits import Backoff, Stop

log = logging.getLogger(__name__)

Append = Callable[[Sequence[Event]], None]
"""Append events to the journal; returns when they are durable."""


class Rejected(StewardError):
    """A consumer cannot apply this one event; ``offender`` is the event.

    Args:
        reason: The reason.
        event: The event.
        others: Rejections of other events of the same batch.
    """

    def __init__(self, reason: str, event: Event, others: "Sequence[Rejected]" = ()) -> None:
        super().__init__(reason, event)
        self.event = event
        self.rejections: Sequence[Rejected] = (self, *others)


class Consumer(Protocol):
    """Interface of a consumer: what applies events of certain kinds to a projection or sink."""

    name: str
    kinds: frozenset[str]
    batch_events: int
    """Largest number of events in one call of :meth:`apply`."""

    def cursor(self) -> int:
        """Return the position of the last applied event; 0 at first."""
        ...

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        """Apply events and move the cursor to ``upto``, both or neither.

        Called again with the same events after a crash, so every effect outside the
        consumer's own database must be harmless when repeated. Events that follow from
        these are committed with the cursor and appended afterwards; their keys derive from
        the events that caused them.

        Raises:
            Unavailable: Try again later; nothing of the batch counts as done.
            Rejected: The event it names cannot be applied.
        """
        ...

    def tick(self, append: Append) -> float:
        """Do timed work; return the seconds until the next call at the latest.

        Also called after every batch of events.

        Raises:
            Unavailable: Try again later; no further event is given until then.
            Rejected: Events accepted earlier cannot be applied after all; they become dead
                letters at once. The next call of tick confirms that.
        """
        ...

    def close(self) -> None:
        """Close files and connections."""
        ...


@runtime_checkable
class RetainingConsumer(Consumer, Protocol):
    """A consumer that still needs events behind its cursor, and the bytes they refer to."""

    def get_oldest_needed(self) -> int | None:
        """Return the position of the oldest event that it needs; None for none."""
        ...


@runtime_checkable
class GatheringConsumer(Consumer, Protocol):
    """A consumer that gathers events while they come fast; the first after a rest goes at once."""

    gather_s: float
    """Shortest time from one transaction to the next, in seconds; a full batch never waits."""


class _StoredEvent(msgspec.Struct, frozen=True, array_like=True):
    """Event of a batch in the outbox."""

    kind: str
    cluster: str
    key: str
    data: msgspec.Raw


_encode_batch: Final = msgspec.json.Encoder().encode
_decode_batch: Final = msgspec.json.Decoder(list[_StoredEvent]).decode
_PURGE_INTERVAL_S: Final = 3600.0
"""Interval of purges, in seconds."""


class DatabaseConsumer:
    """Base class of consumers with a database: cursor, outbox, purge; see :class:`Consumer`.

    A consumer that makes events stores them in table ``outbox``, in the transaction that applies
    the events they follow from and moves the cursor. It appends them to the journal afterwards, in
    :meth:`tick` if the journal or the process fails first. Appending an event twice is harmless,
    because the journal ignores a known key.

    Args:
        database: The database, which has the table ``cursor``.
    """

    name: str
    kinds: frozenset[str]
    batch_events: int = 500
    gather_s: float = 0.0
    has_outbox: ClassVar[bool] = False
    """Whether the consumer makes events, and its database has the table ``outbox``."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection = database.connection
        self._purge_at = 0.0
        batches = OUTBOX.select(database, "ORDER BY number") if self.has_outbox else ()
        self._unsent = [
            decode_unsent_event(stored.kind, stored.cluster, stored.key, bytes(stored.data))
            for batch in batches
            for stored in _decode_batch(batch.events)
        ]

    def cursor(self) -> int:
        """Return the position of the last applied event; 0 at first."""
        return read_cursor(self._database)

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        """Apply events and move the cursor in one transaction, then append the events they cause.

        Raises:
            Unavailable: The database or the journal cannot be written now.
            Rejected: The event it names cannot be applied.
        """
        self._send_events(append)
        with self._open_transaction() as new_events:
            new_events.extend(self._apply_events(events))
            move_cursor(self._connection, upto)
        # The batch is applied: an error would have the feed apply it again. The next tick, which
        # follows at once, raises it.
        with suppress(Exception):
            self._send_events(append)

    def tick(self, append: Append) -> float:
        """Append events left in the outbox and purge; return seconds until the next purge.

        Raises:
            Unavailable: The database or the journal cannot be written now.
        """
        self._send_events(append)
        now = time.monotonic()
        if now >= self._purge_at:
            self._purge_at = now + (1.0 if self._purge() else _PURGE_INTERVAL_S)
        return self._purge_at - now

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def _apply_events(self, events: Sequence[Event]) -> Sequence[Event]:  # noqa: ARG002 - see above
        """Apply events inside a transaction; return events that follow from them."""
        return ()

    def _purge(self) -> bool:
        """Delete a limited number of old rows; return True if more remain."""
        return False

    @contextmanager
    def _open_transaction(self) -> Iterator[list[Event]]:
        """Run a transaction; store events that are added to the list in the outbox."""
        new_events: list[Event] = []
        with self._database.transaction() as connection:
            yield new_events
            if new_events:
                batch = [
                    _StoredEvent(event.kind, event.cluster, event.key, msgspec.Raw(data))
                    for event in new_events
                    for data in (encode_event(event),)
                ]
                OUTBOX.insert(connection, OutboxBatch(events=_encode_batch(batch)))
        self._unsent += new_events

    def _send_events(self, append: Append) -> None:
        """Append the stored events to the journal, then delete them."""
        if not self._unsent:
            return
        append(self._unsent)
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM outbox")
        self._unsent = []


class WriterLink(Protocol):
    """Interface to the journal's writer: ``JournalLink`` between processes."""

    def append(self, events: Sequence[Event]) -> None:
        """Append events; returns when they are durable."""
        ...

    def send_message(self, *message: Any) -> None:
        """Send a "passed", "aside" (dead letter) or "revived" message; wait for no answer."""
        ...


_MAX_ATTEMPTS = 3
"""Attempts to apply an event before it becomes a dead letter."""
_END_OF_JOURNAL = sys.maxsize
"""Position beyond which no event matters, for a consumer that waits to retry."""
_LETTERS_EVERY_S = 1.0
"""Time after which a busy consumer looks for dead letters to retry, in seconds."""
_DIGITS = re.compile(r"[0-9]+")
"""Numbers that vary within the same problem: "(after 307ms in state CONNECT)"."""


class ApplyRate:
    """Rate of applied events over the last minute, counted in slices of five seconds.

    Args:
        clock: Monotonic clock, in seconds.
    """

    _WINDOW_S = 60.0
    _SLICE_S = 5.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at = clock()
        self._slices: deque[tuple[float, int]] = deque()

    def add(self, events: Sequence[Event]) -> None:
        """Count events; a purge or resend counts once for each script."""
        count = sum(map(_count_scripts, events))
        now = self._clock()
        if self._slices and now - self._slices[-1][0] < self._SLICE_S:
            start, previous = self._slices.pop()
            self._slices.append((start, previous + count))
        else:
            self._slices.append((now, count))

    def compute_per_s(self) -> float:
        """Return events per second over the last minute, or since the start if that is later."""
        now = self._clock()
        while self._slices and self._slices[0][0] <= now - self._WINDOW_S:
            self._slices.popleft()
        seconds = min(self._WINDOW_S, max(1.0, now - self._started_at))
        return sum(count for _, count in self._slices) / seconds


def _count_scripts(event: Event) -> int:
    if isinstance(event.body, ArchiveResend):
        return len(event.body.scripts)
    return len(event.body.script_keys) if isinstance(event.body, ArchivePurge) else 1


class Feed:
    """Feed of one consumer: reads its events from the journal and applies them in batches.

    Args:
        consumer: The consumer.
        reader: The journal, for reading.
        link: Connection to the journal's writer.
        registered: Whether the journal waits for this consumer before it trims, and stores its
            dead letters.
        clock: Monotonic clock, in seconds.
        longest_nap_s: Longest time until the next turn, in seconds.
    """

    def __init__(
        self,
        consumer: Consumer,
        reader: JournalReader,
        link: WriterLink,
        *,
        registered: bool = True,
        clock: Callable[[], float] = time.monotonic,
        longest_nap_s: float = 5.0,
    ) -> None:
        self.consumer = consumer
        self._clock = clock
        self._reader = reader
        self._link = link
        self._registered = registered
        self._longest_nap_s = longest_nap_s
        self._retaining = consumer if isinstance(consumer, RetainingConsumer) else None
        self._gather_s = consumer.gather_s if isinstance(consumer, GatheringConsumer) else 0.0
        self._gather_until = 0.0
        self._reported_position = -1
        self._rejected: list[Rejected] = []
        self._applied_letters: set[int] = set()
        self.position = consumer.cursor()
        self._attempts: dict[int, int] = {}
        self._backoff = Backoff()
        self._retry_at = 0.0
        self._tick_at = 0.0
        self._letters_at = 0.0
        self._wait_reason = ""
        self._rate = ApplyRate(clock)
        self._error = ""
        self._error_at = 0
        self._report("running", "")

    def run_turn(self, *, reads: bool = True) -> bool:
        """Apply the next batch, if there is one and the consumer is not waiting to retry.

        Args:
            reads: Whether to read new events; False while they gather, see :meth:`is_due`.

        Returns:
            Whether there was something to do: call again at once.
        """
        now = self._clock()
        if now < self._retry_at:
            return False
        try:
            is_busy = self._tick_if_due(now)
            had_events = reads and self._apply_next()
            # A busy consumer looks for dead letters now and then, an idle one whenever it is woken.
            if now >= self._letters_at or (reads and not had_events):
                self._letters_at = now + _LETTERS_EVERY_S
                self._retry_dead_letters()
            if had_events:
                is_busy |= self._tick_if_due(now)
        except Unavailable as error:
            self._schedule_retry(error)
            return False
        if self._wait_reason:
            log.info("%s continues after: %s", self.consumer.name, self._wait_reason)
            self._wait_reason = ""
            self._report("running", "")
        self._retry_at = 0.0
        self._backoff.reset()
        return had_events or is_busy

    @property
    def wake_position(self) -> int:
        """Position beyond which new events matter to it; infinite while it waits to retry."""
        return _END_OF_JOURNAL if self._retry_at else self.position

    def is_due(self, head: int) -> bool:
        """Return whether to read events: a batch is full, or they have gathered for long enough.

        Args:
            head: Last known head of the journal.
        """
        return not self.get_gather_s() or head - self.position >= self.consumer.batch_events

    def get_gather_s(self) -> float:
        """Return the seconds for which new events still gather."""
        return max(0.0, self._gather_until - self._clock())

    def get_wait_s(self) -> float:
        """Return the seconds until :meth:`run_turn` must be called even if nothing is appended."""
        due = self._retry_at or self._tick_at
        return max(0.0, min(due - self._clock(), self._longest_nap_s))

    def _tick_if_due(self, now: float) -> bool:
        """Call the consumer's tick if it is due; return whether it has more to do at once."""
        if now < self._tick_at:
            return False
        wait_s = self._tick()
        self._tick_at = now + wait_s
        if self._retaining and self._reported_position != self._get_trim_position():
            self._report("running", "")
        self._delete_applied_letters()
        return not wait_s

    def _tick(self) -> float:
        """Record rejected events as dead letters, then call the consumer's tick."""
        while self._rejected:
            # Before the next tick, which confirms to the consumer that they are dead letters.
            event = self._rejected[0].event
            self._add_dead_letter(event, str(self._rejected[0]))
            self._applied_letters.discard(event.id)
            del self._rejected[0]
        try:
            return self.consumer.tick(self._link.append)
        except Rejected as error:
            self._rejected = list(error.rejections)
            return 0.0

    def _apply_next(self) -> bool:
        """Read and apply the next batch; return whether it contained events."""
        consumer = self.consumer
        now = self._clock()
        events, upto = self._reader.read(self.position, consumer.kinds, consumer.batch_events)
        if upto <= self.position:
            return False
        if events:
            self._apply(events, upto)
            self._rate.add(events)
            self._tick_at = 0.0
        # If all new events were of other kinds, the cursor is not written, to save the write:
        # after a restart the feed skips the same events again.
        self.position = upto
        if len(events) < consumer.batch_events:
            # Only now: a batch that failed is read again at the retry, whatever gathers.
            self._gather_until = now + self._gather_s
        self._report("running", "")
        return bool(events)

    def _apply(self, events: Sequence[Event], upto: int) -> None:
        """Apply a batch; retry without events that became dead letters."""
        applicable = [event for event in events if not isinstance(event.body, UnreadableBody)]
        for event in events:
            if isinstance(event.body, UnreadableBody):
                self._add_dead_letter(event, event.body.error)
        while True:
            try:
                self.consumer.apply(applicable, upto, self._link.append)
            except Rejected as error:
                dead_ids = {
                    rejection.event.id
                    for rejection in error.rejections
                    if self._count_failure(rejection.event, str(rejection))
                }
                applicable = [event for event in applicable if event.id not in dead_ids]
            except Unavailable:
                raise
            except Exception:
                # A bug in Steward. It must not stop the events after it, so apply them one at a
                # time to find the culprit; alone, it counts as rejected.
                log.exception(
                    "%s failed on a batch of %d events", self.consumer.name, len(applicable)
                )
                if len(applicable) <= 1:
                    if not applicable:
                        raise
                    if self._count_failure(applicable[0], "internal error: see the log"):
                        applicable = []
                    continue
                self._apply_one_by_one(applicable)
                return
            else:
                return

    def _apply_one_by_one(self, events: Sequence[Event]) -> None:
        for event in events:
            self._apply([event], event.id)

    def _count_failure(self, event: Event, error: str) -> bool:
        """Count a failed attempt; return True if it was the last and the event is a dead letter."""
        attempts = self._attempts.get(event.id, 0) + 1
        if attempts < _MAX_ATTEMPTS:
            self._attempts[event.id] = attempts
            return False
        self._attempts.pop(event.id, None)
        self._add_dead_letter(event, error)
        return True

    def _add_dead_letter(self, event: Event, error: str) -> None:
        """Log an event's rejection and store it as a dead letter."""
        log.error(
            "%s rejected event %d, now a dead letter: %s; list dead letters with 'steward "
            "journal dead'",
            self.consumer.name,
            event.id,
            error,
        )
        self._record_error(error)
        if self._registered:
            self._link.send_message("aside", self.consumer.name, event.id, error)

    def _retry_dead_letters(self) -> None:
        """Apply dead letters that are marked for a retry."""
        if not self._registered:
            return
        letters = self._reader.list_retries(self.consumer.name)
        for event in letters:
            if event.id in self._applied_letters:
                continue
            if isinstance(event.body, UnreadableBody):
                self._add_dead_letter(event, event.body.error)
                continue
            try:
                self.consumer.apply([event], self.position, self._link.append)
                self._tick_at = 0.0
            except Rejected as error:
                self._add_dead_letter(event, str(error))
            except Unavailable:
                raise
            except Exception:
                # A bug in Steward: if marked for a retry, it would break every start.
                log.exception("%s failed on event %d", self.consumer.name, event.id)
                self._add_dead_letter(event, "internal error: see the log")
            else:
                self._rate.add([event])
                self._applied_letters.add(event.id)
        if self._retaining is None:
            self._delete_applied_letters()

    def _delete_applied_letters(self) -> None:
        """Delete dead letters that were applied at last.

        One that was only accepted so far may still be rejected, and would then be lost.
        """
        if not self._applied_letters or self._rejected:
            return
        needed = self._retaining.get_oldest_needed() if self._retaining else None
        for event_id in [id_ for id_ in self._applied_letters if needed is None or id_ < needed]:
            self._link.send_message("revived", self.consumer.name, event_id)
            self._applied_letters.discard(event_id)

    def _schedule_retry(self, error: Unavailable) -> None:
        """Schedule a retry with back-off; log and report the reason once."""
        wait_s = self._backoff.next_s()
        self._retry_at = self._clock() + wait_s
        if _DIGITS.sub("0", str(error)) != _DIGITS.sub("0", self._wait_reason):
            self._wait_reason = str(error)
            log.error("%s is waiting: %s", self.consumer.name, error)
        self._record_error(str(error))
        self._report("waiting", str(error))

    def _report(self, state: str, detail: str) -> None:
        if self._registered:
            self._reported_position = self._get_trim_position()
            self._link.send_message(
                *("passed", self.consumer.name, self._reported_position, state, detail),
                *(self._rate.compute_per_s(), self._error, self._error_at),
            )

    def _record_error(self, error: str) -> None:
        """Remember the last error, which goes out with the consumer's position."""
        self._error = error
        self._error_at = int(time.time())

    def _get_trim_position(self) -> int:
        """Return the position up to which the journal may trim."""
        needed = self._retaining.get_oldest_needed() if self._retaining else None
        return self.position if needed is None else min(self.position, needed - 1)


def feed_all(
    feeds: Sequence[Feed], link: JournalLink, stop: Stop, send_heartbeat: Callable[[], None]
) -> None:
    """Feed consumers in turn until the Stop is set; while all are idle, shrink their databases.

    Args:
        feeds: Feeds of the consumers of this process.
        link: Wakes the loop when enough events were appended.
        stop: Ends the loop.
        send_heartbeat: Heartbeat, called at every turn.
    """
    head = 0
    while not stop.is_set():
        send_heartbeat()
        reads = any(feed.is_due(head) for feed in feeds)
        is_busy = False
        for feed in feeds:
            is_busy = feed.run_turn(reads=reads) or is_busy
        if not is_busy and not stop.is_set():
            is_idle = not any(feed.get_gather_s() for feed in feeds)
            shrink_s = SLICE_S if is_idle and shrink_databases() else math.inf
            head = link.wait(
                min(feed.wake_position for feed in feeds),
                min(shrink_s, *(feed.get_wait_s() for feed in feeds)),
                events=min(feed.consumer.batch_events for feed in feeds),
                delay_s=min(feed.get_gather_s() for feed in feeds),
            )
    for feed in feeds:
        feed.consumer.close()
