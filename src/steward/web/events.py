"""Events for pages: as rows of a table, and as they happen."""

from collections.abc import Iterable
from typing import Final

import msgspec

from steward.admin.credentials.errors import NotKnown
from steward.core.errors import Refused, Unavailable
from steward.reports.descriptions import EventWords, words
from steward.reports.events import EventsAnswer, EventsRequest, EventTold
from steward.reports.history.shapes import EventsRequest as PastRequest
from steward.web.visit import Visit

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
