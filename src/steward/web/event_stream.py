"""How many watch events as they happen: each keeps a connection, so that nobody may keep many."""

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec
from litestar.types import ASGIApp, Receive, Scope, Send

from steward.admin.credentials.errors import NotKnown
from steward.core.errors import Refused, Unavailable
from steward.reports.event_texts import EventWords, words
from steward.reports.events import EventsAnswer, EventsRequest, EventTold
from steward.reports.history.requests import EventsRequest as PastRequest
from steward.web.authentication import Visit
from steward.web.errors import TooMany

_AGAIN_S: Final = 10.0
_PLACE: Final = "steward.place"
"""Where a request's state holds how its place is left."""


class Streams:
    """Counts those who watch, so that nobody keeps others out.

    Args:
        each: How many streams one user may have.
        most: How many there may be altogether.
    """

    def __init__(self, each: int, most: int) -> None:
        self._each = each
        self._most = most
        self._open: Counter[int] = Counter()

    def take(self, scope: Scope, uid: int) -> None:
        """A place for one more, until the request has been answered; see :func:`watched`.

        Args:
            scope: Of the request.
            uid: Whose it is.

        Raises:
            TooMany: They have as many as they may, or there are too many altogether.
        """
        if self._open[uid] >= self._each:
            raise TooMany("you watch events too often at once: close one of them", _AGAIN_S)
        if self._open.total() >= self._most:
            raise TooMany("too many watch events at once: come again in a moment", _AGAIN_S)
        self._open[uid] += 1
        scope.setdefault("state", {})[_PLACE] = functools.partial(self._leave, uid)

    def _leave(self, uid: int) -> None:
        self._open[uid] -= 1
        if not self._open[uid]:
            del self._open[uid]


STREAMS: Final = Streams(each=4, most=64)
"""Those of this process, of pages and API alike."""


def watched(app: ASGIApp) -> ASGIApp:
    """What takes places: each is left when its answer is over, however that ends.

    The answer's own generator would not do: whoever goes away before it has begun, or while
    it waits to be read, leaves it as it stands until it is collected.
    """

    # Of the module and not of the places: Litestar makes copies of what a handler is given.
    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            leave = scope.get("state", {}).pop(_PLACE, None)
            if leave is not None:
                leave()

    return answered


EVERY_S: Final = 1.5
"""How often it is asked for each viewer whether something has happened."""
_AT_ONCE: Final = 100


class EventRow(msgspec.Struct, frozen=True):
    """An event as a table shows it.

    Attributes:
        event: What happened.
        told: The same in words.
        zone: Where its times are shown.
    """

    event: EventTold
    told: EventWords
    zone: str


def rows_of(visit: Visit, events: Iterable[EventTold]) -> list[EventRow]:
    """Events as a table shows them to somebody."""
    zones = {role.cluster: role.zone for role in visit.me.clusters}
    return [EventRow(event, words(event), zones.get(event.cluster, "")) for event in events]


class News(msgspec.Struct, frozen=True):
    """What happened since the last time, which may be nothing.

    Attributes:
        rows: The events, oldest first.
        position: Where to go on from.
        is_over: Whether the watching is over: nobody is logged in any more.
    """

    rows: list[EventRow]
    position: int
    is_over: bool = False


async def news(visit: Visit, request: PastRequest, position: int) -> News:
    """What has happened behind a position, of what was asked for.

    Whoever's session has ended, or who may see this no more, is told that it is over; that
    the daemon is away is nothing new.
    """
    wanted = EventsRequest(
        kinds=request.kinds,
        clusters=request.clusters,
        nodes=request.nodes,
        failed=request.failed,
        after=position,
        limit=_AT_ONCE,
    )
    try:
        answer: EventsAnswer = await visit.ask("events.list", wanted)
    except Unavailable:
        # It is being started anew: what happens meanwhile is told when it is there again.
        return News([], position)
    except (NotKnown, Refused):
        return News([], position, is_over=True)
    return News(rows_of(visit, answer.events), answer.position)
