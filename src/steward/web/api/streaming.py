"""The stream of events, as a browser's EventSource and programs take it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from litestar import Request, get
from litestar.response import Stream

from steward.core.errors import StewardError
from steward.reports.events import EventsAnswer, EventsRequest
from steward.web.api.endpoints import Endpoint
from steward.web.api.reading import query
from steward.web.errors import WrongRequest
from steward.web.streams import STREAMS, watched
from steward.web.visit import Visit

Ask = Request[Any, Any, Any]
MEDIA: Final = "text/event-stream"
STREAM: Final = Endpoint(
    method="GET",
    path="/events/stream",
    action="events.list",
    help="Tell events as they happen, as server-sent events; goes on behind Last-Event-ID.",
)
_EVERY_S: Final = 1.0
_SIGN_OF_LIFE: Final = 15
"""Rounds without an event after which something is sent, so that nobody takes it for dead."""
_LONGEST_S: Final = 1800.0
"""After this the client comes again, and is known anew."""
_AGAIN_S: Final = 10.0
_AT_A_TIME: Final = 500


@get("/api/v1/events/stream", include_in_schema=False, middleware=[watched])
async def events_stream(request: Ask, visit: Visit) -> Stream:
    """Events as they happen."""
    asked: EventsRequest = EventsRequest(**query(STREAM, request))
    last = request.headers.get("last-event-id", "")
    if last:
        if not (last.isascii() and last.isdecimal() and len(last) < 19):
            raise WrongRequest("Last-Event-ID is none of ours")
        asked = msgspec.structs.replace(asked, after=int(last))
    STREAMS.take(request.scope, visit.me.uid)
    # What is refused is refused with a status.
    first: EventsAnswer = await visit.ask("events.list", asked)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return Stream(_lines(visit, asked, first), media_type=MEDIA, headers=headers)


async def _lines(visit: Visit, asked: EventsRequest, answer: EventsAnswer) -> AsyncIterator[bytes]:
    until = asyncio.get_running_loop().time() + _LONGEST_S
    silent = 0
    try:
        yield f"retry: {int(_AGAIN_S * 1000)}\n\n".encode()
        while asyncio.get_running_loop().time() < until:
            for event in answer.events:
                data = msgspec.json.encode(event).decode()
                yield f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n".encode()
            silent = 0 if answer.events else silent + 1
            if silent % _SIGN_OF_LIFE == 0:
                yield f"id: {answer.position}\n: still here\n\n".encode()
            await asyncio.sleep(_EVERY_S)
            asked = msgspec.structs.replace(asked, after=answer.position, limit=_AT_A_TIME)
            answer = await visit.ask("events.list", asked)
    except StewardError:
        # The client comes again, and is then told why it is not let in, or goes on.
        return
