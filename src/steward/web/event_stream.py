"""Live event streams of pages and API: limits on concurrent streams, and polling for new events.

:class:`StreamLimiter` bounds the streams of each user, because each holds a connection; the
middleware :func:`release_stream` releases them. ``pages/events.py`` and ``api/responses.py`` call
``STREAM_LIMITER.reserve`` before they stream. :func:`fetch_new_events` polls the daemon for the
events after a position.
"""

import functools
from collections import Counter
from typing import Final

import msgspec
from litestar.types import ASGIApp, Receive, Scope, Send

from steward.core.errors import PermissionRefused, Unavailable, UnknownCredential
from steward.reports.events import EventItem, EventsReply, EventsRequest
from steward.reports.history.requests import HistoryEventsRequest
from steward.web.authentication import AuthenticatedRequest
from steward.web.errors import RateLimitExceeded

_RETRY_AFTER_S: Final = 10.0
"""Retry-After of a rejected stream, in seconds."""
_STREAM_KEY: Final = "steward.place"
"""Key in a request's state that holds the function to release its stream."""


class StreamLimiter:
    """Counter of open event streams, for each user and in total.

    Args:
        per_user: Largest number of streams of one user.
        total: Largest number of all streams.
    """

    def __init__(self, per_user: int, total: int) -> None:
        self._per_user = per_user
        self._total = total
        self._open_streams: Counter[int] = Counter()

    def reserve(self, scope: Scope, uid: int) -> None:
        """Reserve a stream until the response ends; see :func:`release_stream`.

        Args:
            scope: ASGI scope of the request.
            uid: User of the request.

        Raises:
            RateLimitExceeded: The user, or all users together, have too many streams.
        """
        if self._open_streams[uid] >= self._per_user:
            raise RateLimitExceeded(
                "too many event streams of this user: close one of them", _RETRY_AFTER_S
            )
        if self._open_streams.total() >= self._total:
            raise RateLimitExceeded("too many event streams: try again in a moment", _RETRY_AFTER_S)
        self._open_streams[uid] += 1
        scope.setdefault("state", {})[_STREAM_KEY] = functools.partial(self._release, uid)

    def _release(self, uid: int) -> None:
        self._open_streams[uid] -= 1
        if not self._open_streams[uid]:
            del self._open_streams[uid]


STREAM_LIMITER: Final = StreamLimiter(per_user=4, total=64)
"""Streams of this process, for pages and API alike."""


def release_stream(app: ASGIApp) -> ASGIApp:
    """Release a request's stream when its response ends, however it ends (ASGI middleware).

    The response's generator cannot do this: when a client disconnects before it starts, or while it
    waits to be read, it is left suspended until it is collected.
    """

    # A module function, not a method of StreamLimiter: Litestar copies what a handler is given.
    async def serve_and_release(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            release = scope.get("state", {}).pop(_STREAM_KEY, None)
            if release is not None:
                release()

    return serve_and_release


POLL_INTERVAL_S: Final = 1.5
"""Interval between polls of the daemon for each viewer, in seconds."""
_EVENTS_PER_POLL: Final = 100
"""Most events of one poll."""


class NewEvents(msgspec.Struct, frozen=True):
    """Events since the last poll, possibly none.

    Attributes:
        events: The events, oldest first.
        position: Position to continue from.
        is_over: Whether the stream ends because the session ended.
    """

    events: tuple[EventItem, ...]
    position: int
    is_over: bool = False


async def fetch_new_events(
    auth: AuthenticatedRequest, filters: HistoryEventsRequest, position: int
) -> NewEvents:
    """Return the events after a position that match a filter.

    ``is_over`` is set if the session has expired or lost access. While the daemon is unavailable,
    there are no events.
    """
    events_request = EventsRequest(
        kinds=filters.kinds,
        clusters=filters.clusters,
        nodes=filters.nodes,
        failed=filters.failed,
        after=position,
        limit=_EVENTS_PER_POLL,
    )
    try:
        reply: EventsReply = await auth.call_action("events.list", events_request)
    except Unavailable:
        # The daemon restarts: its events follow once it is back.
        return NewEvents((), position)
    except (UnknownCredential, PermissionRefused):
        return NewEvents((), position, is_over=True)
    return NewEvents(reply.events, reply.position)
