"""How events are put to use: the shape of a consumer, and the loop that feeds it.

A consumer remembers its own cursor, in the same transaction as its effect, so
that a batch is put to use once however often the process is killed. *Unavailable*
stops it and is retried for ever with back-off. *Rejected* concerns one event:
it is tried thrice, then set aside with its error, and the next event goes on.
"""

import logging
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from steward.core.errors import StewardError, Unavailable
from steward.core.events import ArchivePurge, ArchiveResend, Event, Unreadable
from steward.core.journal import JournalLink, JournalReader
from steward.core.waits import Backoff, Stop

log = logging.getLogger(__name__)

Append = Callable[[Sequence[Event]], None]
"""Appends events to the journal; returns when they are durable."""


class Rejected(StewardError):
    """This one event cannot be put to use; ``offender`` is the event.

    Args:
        what: Why not.
        event: The event.
        more: Others of the same batch, each with its own reason.
    """

    def __init__(self, what: str, event: Event, more: "Sequence[Rejected]" = ()) -> None:
        super().__init__(what, event)
        self.event = event
        self.each: Sequence[Rejected] = (self, *more)


class Consumer(Protocol):
    """One use of the events."""

    name: str
    kinds: frozenset[str]
    batch_events: int
    """How many events it is given at once at the most."""

    def cursor(self) -> int:
        """Position of the last event that was put to use; 0 at first."""
        ...

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        """Put events to use and move the cursor to ``upto``, both or neither.

        Called again with the same events after a crash, so every effect outside
        the consumer's own database must be harmless when repeated. Events that
        follow from these are appended before the cursor is committed; their
        keys are made from the events that caused them.

        Raises:
            Unavailable: Try again later; nothing of the batch counts as done.
            Rejected: The event it names cannot be put to use.
        """
        ...

    def tick(self, append: Append) -> float:
        """Do what is due by the clock; returns seconds until the next call at the latest.

        Called after every batch of events as well.

        Raises:
            Unavailable: Try again later; no further event is given until then.
            Rejected: These events were taken in, and turn out to be of no use; they are set
                aside at once. The next call tells that they were.
        """
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...


@runtime_checkable
class Holding(Consumer, Protocol):
    """A consumer that still needs events, and the bytes they tell of, behind its cursor."""

    def needed_from(self) -> int | None:
        """Position of the oldest event that it needs; None for none."""
        ...


class Link(Protocol):
    """The way to the journal's writer: ``JournalLink`` between processes."""

    def append(self, new: Sequence[Event]) -> None:
        """Append events; returns when they are durable."""
        ...

    def tell(self, *message: Any) -> None:
        """Say passed, aside or revived; no answer is waited for."""
        ...


_TRIES = 3
_NO_NEWS = sys.maxsize
_NUMBER = re.compile(r"[0-9]+")
"""Numbers change in what is the same trouble: "(after 307ms in state CONNECT)"."""


class Pace:
    """How much was put to use of late, counted in slices of time.

    Args:
        clock: Monotonic clock, in seconds.
    """

    _WINDOW_S = 60.0
    _SLICE_S = 5.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._slices: deque[tuple[float, int]] = deque()

    def add(self, events: Sequence[Event]) -> None:
        """Count events; of an order about many scripts each script."""
        count = sum(map(_weight, events))
        now = self._clock()
        if self._slices and now - self._slices[-1][0] < self._SLICE_S:
            began, before = self._slices.pop()
            self._slices.append((began, before + count))
        else:
            self._slices.append((now, count))

    def per_s(self) -> float:
        """Events a second over the last minute, or since the beginning if that is nearer."""
        now = self._clock()
        while self._slices and self._slices[0][0] <= now - self._WINDOW_S:
            self._slices.popleft()
        seconds = min(self._WINDOW_S, max(1.0, now - self._began))
        return sum(count for _, count in self._slices) / seconds


def _weight(event: Event) -> int:
    if isinstance(event.body, ArchiveResend):
        return len(event.body.scripts)
    return len(event.body.script_keys) if isinstance(event.body, ArchivePurge) else 1


class Feed:
    """Feeds one consumer from the journal.

    Args:
        consumer: Who is fed.
        reader: The journal, for reading.
        link: The way to the journal's writer.
        registered: Whether the journal waits for this consumer before it trims.
        clock: Monotonic clock, in seconds.
        longest_nap_s: Longest time until the next turn, in seconds.
    """

    def __init__(
        self,
        consumer: Consumer,
        reader: JournalReader,
        link: Link,
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
        self._holding = consumer if isinstance(consumer, Holding) else None
        self._told = -1
        self._rejected: list[Rejected] = []
        self._reviving: set[int] = set()
        self.position = consumer.cursor()
        self._tries: dict[int, int] = {}
        self._backoff = Backoff()
        self._again_at = 0.0
        self._tick_at = 0.0
        self._waiting_for = ""
        self._pace = Pace(clock)
        self._error = ""
        self._error_at = 0
        self._tell("running", "")

    def turn(self) -> bool:
        """Put the next batch to use, if there is one and nothing is away.

        Returns:
            Whether there was something to do: call again at once.
        """
        now = self._clock()
        if now < self._again_at:
            return False
        try:
            is_busy = False
            if now >= self._tick_at:
                wait_s = self._tick()
                self._tick_at = now + wait_s
                is_busy = not wait_s
                if self._holding and self._told != self._passed():
                    self._tell("running", "")
                self._revive()
            worked = self._replay() | self._next() | is_busy
        except Unavailable as error:
            self._wait_for(error)
            return False
        if self._waiting_for:
            log.info("%s goes on after: %s", self.consumer.name, self._waiting_for)
            self._waiting_for = ""
            self._tell("running", "")
        self._again_at = 0.0
        self._backoff.reset()
        return worked

    @property
    def looks_beyond(self) -> int:
        """The position beyond which there is news for it: none while what it needs is away."""
        return _NO_NEWS if self._again_at else self.position

    def due_s(self) -> float:
        """Seconds until :meth:`turn` is to be called even if nothing is appended."""
        due = self._again_at or self._tick_at
        return max(0.0, min(due - self._clock(), self._longest_nap_s))

    def _tick(self) -> float:
        while self._rejected:
            # Before the consumer is called again, which tells it that they were set aside.
            event = self._rejected[0].event
            self._set_aside(event, str(self._rejected[0]))
            self._reviving.discard(event.id)
            del self._rejected[0]
        try:
            return self.consumer.tick(self._link.append)
        except Rejected as error:
            self._rejected = list(error.each)
            return 0.0

    def _next(self) -> bool:
        consumer = self.consumer
        events, upto = self._reader.read(self.position, consumer.kinds, consumer.batch_events)
        if upto <= self.position:
            return False
        if events:
            self._apply(events, upto)
            self._pace.add(events)
            self._tick_at = 0.0
        # Where all the news was for others the cursor itself is not moved, to spare the
        # write: after a restart the same foreign events are looked past again.
        self.position = upto
        self._tell("running", "")
        return bool(events)

    def _apply(self, events: Sequence[Event], upto: int) -> None:
        good = [event for event in events if not isinstance(event.body, Unreadable)]
        for event in events:
            if isinstance(event.body, Unreadable):
                self._set_aside(event, event.body.error)
        while True:
            try:
                self.consumer.apply(good, upto, self._link.append)
            except Rejected as error:
                done = {one.event.id for one in error.each if self._count(one.event, str(one))}
                good = [event for event in good if event.id not in done]
            except Unavailable:
                raise
            except Exception:
                # A fault of ours. It must not stop the events behind it, so the culprit is
                # found by feeding them one at a time; alone, it counts as rejected.
                log.exception("%s failed on a batch of %d", self.consumer.name, len(good))
                if len(good) <= 1:
                    if not good:
                        raise
                    if self._count(good[0], "an internal error, see the log"):
                        good = []
                    continue
                self._one_by_one(good)
                return
            else:
                return

    def _one_by_one(self, events: Sequence[Event]) -> None:
        for event in events:
            self._apply([event], event.id)

    def _count(self, event: Event, error: str) -> bool:
        """Note a failed try; whether it was the last and the event is set aside."""
        tries = self._tries.get(event.id, 0) + 1
        if tries < _TRIES:
            self._tries[event.id] = tries
            return False
        self._tries.pop(event.id, None)
        self._set_aside(event, error)
        return True

    def _set_aside(self, event: Event, error: str) -> None:
        log.error(
            "%s sets event %d aside: %s; 'steward journal dead' lists it",
            self.consumer.name,
            event.id,
            error,
        )
        self._note(error)
        if self._registered:
            self._link.tell("aside", self.consumer.name, event.id, error)

    def _replay(self) -> bool:
        if not self._registered:
            return False
        letters = self._reader.replays(self.consumer.name)
        for event in letters:
            if event.id in self._reviving:
                continue
            if isinstance(event.body, Unreadable):
                self._set_aside(event, event.body.error)
                continue
            try:
                self.consumer.apply([event], self.position, self._link.append)
                self._tick_at = 0.0
            except Rejected as error:
                self._set_aside(event, str(error))
            except Unavailable:
                raise
            except Exception:
                # A fault of ours: asked for again at every start, it would end every start.
                log.exception("%s failed on event %d", self.consumer.name, event.id)
                self._set_aside(event, "an internal error, see the log")
            else:
                self._pace.add([event])
                self._reviving.add(event.id)
        if self._holding is None:
            self._revive()
        return False

    def _revive(self) -> None:
        """Let go of dead letters that were put to use after all.

        One that was only taken in may be refused again, and would then be nowhere.
        """
        if not self._reviving or self._rejected:
            return
        needed = self._holding.needed_from() if self._holding else None
        for event_id in [one for one in self._reviving if needed is None or one < needed]:
            self._link.tell("revived", self.consumer.name, event_id)
            self._reviving.discard(event_id)

    def _wait_for(self, error: Unavailable) -> None:
        wait_s = self._backoff.next_s()
        self._again_at = self._clock() + wait_s
        if _NUMBER.sub("0", str(error)) != _NUMBER.sub("0", self._waiting_for):
            self._waiting_for = str(error)
            log.error("%s waits: %s", self.consumer.name, error)
        self._note(str(error))
        self._tell("waiting", str(error))

    def _tell(self, state: str, detail: str) -> None:
        if self._registered:
            self._told = self._passed()
            self._link.tell(
                *("passed", self.consumer.name, self._told, state, detail),
                *(self._pace.per_s(), self._error, self._error_at),
            )

    def _note(self, error: str) -> None:
        """Remember what went wrong last, to be told with where the consumer stands."""
        self._error = error
        self._error_at = int(time.time())

    def _passed(self) -> int:
        """Up to where the journal may trim."""
        needed = self._holding.needed_from() if self._holding else None
        return self.position if needed is None else min(self.position, needed - 1)


def feed_all(
    feeds: Sequence[Feed], link: JournalLink, stop: Stop, beat: Callable[[], None]
) -> None:
    """Feed consumers in turn until the Stop is raised.

    Args:
        feeds: The consumers of this process.
        link: A subscribed link, which says when there is something new.
        stop: Ends the loop.
        beat: Called at every turn, to show that the process lives.
    """
    while not stop.is_set():
        beat()
        busy = False
        for feed in feeds:
            busy = feed.turn() or busy
        if not busy and not stop.is_set():
            seen = min(feed.looks_beyond for feed in feeds)
            link.wait(seen, min(feed.due_s() for feed in feeds))
    for feed in feeds:
        feed.consumer.close()
