"""Events page: past events with filters, newest first, and a live stream of new rows.

The stream uses server-sent events; ``web/event_stream.py`` polls the daemon and limits the streams
of each user.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from litestar import Request, Response, get
from litestar.response import ServerSentEvent, ServerSentEventMessage

from steward.reports.history.consumer import HISTORY_KINDS
from steward.reports.history.requests import HistoryEventsReply, HistoryEventsRequest
from steward.web import query
from steward.web.authentication import AuthenticatedRequest
from steward.web.event_stream import (
    POLL_INTERVAL_S,
    STREAM_LIMITER,
    fetch_new_events,
    release_stream,
)
from steward.web.renderer import Renderer

HttpRequest = Request[Any, Any, Any]
_LONGEST_S: Final = 1800.0
"""Longest duration of a stream, in seconds; the browser then reconnects."""
_HEARTBEAT_S: Final = 15.0
"""Silence after which a heartbeat is sent, in seconds."""
_RETRY_MS: Final = 3000
"""Time after which a browser reconnects, in milliseconds."""
_LONGEST_ID: Final = 16


@get("/events", include_in_schema=False)
async def events(
    request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer
) -> Response[Any]:
    """Show past events, newest first."""
    history_request = _read_filters(request)
    reply: HistoryEventsReply = await auth.call_action("history.events", history_request)
    filters: dict[str, Any] = {
        "kinds": history_request.kinds,
        "clusters": history_request.clusters,
        "nodes": history_request.nodes,
        "failed": "1" if history_request.failed else "",
        "since": history_request.since,
        "until": history_request.until,
    }
    context: dict[str, Any] = {
        "rows": reply.events,
        "layout": reply.layout,
        "older": reply.older,
        "filters": filters,
    }
    if auth.is_part:
        return pages.render_page("_events.html", auth, **context)
    is_live = not (history_request.before or history_request.until)
    return pages.render_page(
        "events.html",
        auth,
        here="/events",
        kinds=HISTORY_KINDS,
        answer=reply,
        live=pages.make_address("/events/stream", **filters, after=reply.position)
        if is_live
        else "",
        **context,
    )


@get("/events/stream", include_in_schema=False, middleware=[release_stream])
async def stream(
    request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer
) -> ServerSentEvent:
    """Stream new events as rows of the page's table."""
    history_request = _read_filters(request)
    last_id = request.headers.get("last-event-id", "")
    is_number = last_id.isascii() and last_id.isdigit() and len(last_id) <= _LONGEST_ID
    position = int(last_id) if is_number else query.read_number(request, "after")
    STREAM_LIMITER.reserve(request.scope, auth.me.uid)
    # Ask once before the stream begins, so that an invalid filter gets an HTTP status.
    await auth.call_action("history.events", history_request)
    return ServerSentEvent(_make_stream_rows(auth, pages, history_request, position))


async def _make_stream_rows(
    auth: AuthenticatedRequest, pages: Renderer, filters: HistoryEventsRequest, position: int
) -> AsyncIterator[ServerSentEventMessage]:
    """Yield new events as rows, and heartbeats, until the stream's time is over."""
    deadline = time.monotonic() + _LONGEST_S
    last_sent = time.monotonic()
    yield ServerSentEventMessage(comment="here", retry=_RETRY_MS)
    while time.monotonic() < deadline:
        new_events = await fetch_new_events(auth, filters, position)
        if new_events.is_over:
            yield ServerSentEventMessage(event="over", data="over")
            return
        for event in new_events.events:
            text = pages.render_text(
                "_events.html", auth, rows=(event,), layout=HistoryEventsReply.layout, older=""
            )
            yield ServerSentEventMessage(event="row", data=text.strip(), id=event.id)
        if new_events.events:
            last_sent = time.monotonic()
        elif time.monotonic() - last_sent >= _HEARTBEAT_S:
            last_sent = time.monotonic()
            # Send the position too, so that a client that reconnects need not start far back.
            yield ServerSentEventMessage(event="still", data="", id=new_events.position)
        position = new_events.position
        await asyncio.sleep(POLL_INTERVAL_S)


def _read_filters(request: HttpRequest) -> HistoryEventsRequest:
    """Read the filters of the events page."""
    return HistoryEventsRequest(
        kinds=query.read_words(request, "kinds"),
        clusters=query.read_words(request, "clusters"),
        nodes=query.read_text(request, "nodes"),
        failed=query.read_switch(request, "failed"),
        since=query.read_text(request, "since"),
        until=query.read_text(request, "until"),
        before=query.read_text(request, "before"),
    )


ROUTES: Final = (events, stream)
