"""Responses of the HTTP API: JSON replies, problem+json errors (RFC 9457), pages and event stream.

:func:`answer_endpoint` runs an endpoint's action: reads get an ETag and a ``Link`` to the next
page, changes honour ``Idempotency-Key``, streams are sent as JSON lines. :func:`events_stream`
sends events as server-sent events.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from litestar import Request, Response, get
from litestar.response import Stream

from steward.core.errors import InternalFailure, StewardError
from steward.core.rpc import encode_answer_line, encode_error_line, encode_item_line
from steward.daemon.idempotency import LONGEST_KEY
from steward.reports.events import EventsReply, EventsRequest
from steward.web.api.endpoints import CURSOR, Endpoint, read_json_body, read_query
from steward.web.authentication import AuthenticatedRequest
from steward.web.errors import MalformedRequest
from steward.web.event_stream import STREAM_LIMITER, release_stream


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Error response of the API, as RFC 9457 (problem+json) defines it.

    Attributes:
        type: Always ``about:blank``: the status identifies the kind of error.
        title: Name of the HTTP status.
        status: HTTP status.
        detail: What failed and what to do.
    """

    title: str
    status: int
    detail: str
    type: str = "about:blank"


def make_problem_response(
    status: int, detail: str, headers: dict[str, str] | None = None
) -> Response[Any]:
    """Return an error response in problem+json."""
    try:
        title = HTTPStatus(status).phrase
    except ValueError:
        title = "Error"
    return Response(
        Problem(title=title, status=status, detail=detail),
        status_code=status,
        media_type="application/problem+json",
        headers=headers,
    )


HttpRequest = Request[Any, Any, Any]
KEY: Final = "idempotency-key"
"""Header of the idempotency key."""
LINES: Final = "application/jsonl"
"""Media type of streams."""
_KEY: Final = re.compile(rf"[!-~]{{1,{LONGEST_KEY}}}")
_JSON: Final = "application/json"
_PRIVATE: Final = {"Cache-Control": "private, no-cache", "Vary": "Authorization, Cookie"}
"""Headers of reads: cached only by the client, and revalidated."""
_NOT_KEPT: Final = {"Cache-Control": "no-store"}
"""Headers of changes: never cached."""


async def answer_endpoint(
    endpoint: Endpoint, request: HttpRequest, auth: AuthenticatedRequest
) -> Response[Any]:
    """Run the action of an endpoint and return its response.

    Raises:
        StewardError: The action failed or rejected the request.
    """
    is_read = endpoint.method == "GET"
    fields = read_query(endpoint, request) if is_read else await read_json_body(endpoint, request)
    path_texts = {name: str(request.path_params[name]) for name in endpoint.names}
    try:
        action_request = endpoint.build_request(path_texts, fields)
    except msgspec.ValidationError as error:
        raise MalformedRequest(f"cannot decode the path: {error}") from None
    key = "" if is_read else _read_key(request)
    if endpoint.definition.stream:
        return await _make_stream_response(endpoint, action_request, auth)
    reply = await auth.call_action(endpoint.action, action_request, key=key)
    return (
        _make_read_response(endpoint, request, reply)
        if is_read
        else _make_change_response(endpoint, reply)
    )


def _read_key(request: HttpRequest) -> str:
    """Return the request's idempotency key, or ""."""
    key = request.headers.get(KEY)
    if key is not None and not _KEY.fullmatch(key):
        raise MalformedRequest(
            f"invalid {KEY.title()}: use 1 to {LONGEST_KEY} characters without blanks"
        )
    return key or ""


def _make_change_response(endpoint: Endpoint, reply: Any) -> Response[bytes]:
    """Return the response of a change."""
    return Response(
        msgspec.json.encode(reply),
        status_code=endpoint.status,
        media_type=_JSON,
        headers=_NOT_KEPT,
    )


def _make_read_response(endpoint: Endpoint, request: HttpRequest, reply: Any) -> Response[bytes]:
    """Return the response of a read, with ETag and the link to the next page."""
    headers = dict(_PRIVATE)
    if endpoint.cursor is not None:
        next_page = getattr(reply, endpoint.cursor[1])
        reply = find_page_type(endpoint)(**msgspec.structs.asdict(reply) | {"next": next_page})
        if next_page:
            headers["Link"] = f'<{_make_next_address(request, next_page)}>; rel="next"'
    body = msgspec.json.encode(reply)
    # A weak tag, because compression on the way changes the bytes.
    etag = headers["ETag"] = f'W/"{hashlib.sha256(body).hexdigest()[:32]}"'
    if _matches_etag(request.headers.get("if-none-match", ""), etag):
        return Response(b"", status_code=304, headers=headers)
    return Response(body, media_type=_JSON, headers=headers)


def find_page_type(endpoint: Endpoint) -> type[msgspec.Struct]:
    """Return the Struct of a page of results: its cursor is always called ``next``."""
    reply_type = endpoint.definition.answer
    if endpoint.cursor is None or endpoint.cursor[1] == "next":
        return reply_type
    return _define_page_type(reply_type)


def _define_page_type(reply_type: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Define, once, a reply type whose cursor is called ``next``."""
    if reply_type not in _PAGES:
        _PAGES[reply_type] = msgspec.defstruct(
            f"{reply_type.__name__}Page",
            [("next", str, "")],
            bases=(reply_type,),
            namespace={"__doc__": reply_type.__doc__},
            module=reply_type.__module__,
            frozen=True,
            kw_only=True,
        )
    return _PAGES[reply_type]


_PAGES: Final[dict[type[msgspec.Struct], type[msgspec.Struct]]] = {}


def _make_next_address(request: HttpRequest, cursor: str) -> str:
    """Return the address of the next page: the same query from the cursor on."""
    pairs = [pair for pair in request.query_params.multi_items() if pair[0] != CURSOR]
    prefix = request.app.state.pages.prefix
    path = request.url.path.removeprefix(prefix)
    return f"{prefix}{path}?{urlencode([*pairs, (CURSOR, cursor)])}"


def _matches_etag(header: str, etag: str) -> bool:
    """Return True if the client already has this reply, by its If-None-Match header."""
    tags = [tag.strip().removeprefix("W/") for tag in header.split(",")]
    return header.strip() == "*" or etag.removeprefix("W/") in tags


async def _make_stream_response(
    endpoint: Endpoint, action_request: Any, auth: AuthenticatedRequest
) -> Response[Any]:
    """Return a stream as JSON lines; the last line reports how it ended."""
    stream = auth.client.stream(endpoint.action, action_request, auth.secret, user=auth.who)
    # Wait for the first line, so that a rejection is sent with an HTTP status.
    try:
        first_item = await anext(stream)
    except StopAsyncIteration:
        raise InternalFailure("the daemon sent no reply", endpoint.action) from None

    async def lines() -> AsyncIterator[bytes]:
        item = first_item
        try:
            while True:
                if isinstance(item, endpoint.definition.answer):
                    yield encode_answer_line(item)
                    return
                yield encode_item_line(item)
                item = await anext(stream)
        except StewardError as error:
            yield encode_error_line(error)
        finally:
            await stream.aclose()

    return Stream(lines(), media_type=LINES, headers=_NOT_KEPT)


MEDIA: Final = "text/event-stream"
STREAM: Final = Endpoint(
    method="GET",
    path="/events/stream",
    action="events.list",
    help="Stream new events as server-sent events; continue after Last-Event-ID.",
)
_ROUND_S: Final = 1.0
"""Interval between polls for new events, in seconds."""
_KEEPALIVE_ROUNDS: Final = 15
"""Rounds without an event after which a comment is sent to keep the connection alive."""
_LONGEST_STREAM_S: Final = 1800.0
"""Longest duration of a stream, in seconds; the client then reconnects and authenticates again."""
_RECONNECT_S: Final = 10.0
"""Time after which a disconnected client reconnects, in seconds."""
_EVENTS_PER_ROUND: Final = 500
"""Most events of one poll."""


@get("/api/v1/events/stream", include_in_schema=False, middleware=[release_stream])
async def events_stream(request: HttpRequest, auth: AuthenticatedRequest) -> Stream:
    """Stream events as they happen."""
    events_request: EventsRequest = EventsRequest(**read_query(STREAM, request))
    last_id = request.headers.get("last-event-id", "")
    if last_id:
        if not (last_id.isascii() and last_id.isdecimal() and len(last_id) < 19):
            raise MalformedRequest("invalid Last-Event-ID: omit it to start with new events")
        events_request = msgspec.structs.replace(events_request, after=int(last_id))
    STREAM_LIMITER.reserve(request.scope, auth.me.uid)
    # Fetch the first reply here, so that a rejection is sent with an HTTP status.
    first_reply: EventsReply = await auth.call_action("events.list", events_request)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return Stream(
        _send_events(auth, events_request, first_reply), media_type=MEDIA, headers=headers
    )


async def _send_events(
    auth: AuthenticatedRequest, request: EventsRequest, reply: EventsReply
) -> AsyncIterator[bytes]:
    """Yield events as server-sent events until the stream's time is over."""
    deadline = asyncio.get_running_loop().time() + _LONGEST_STREAM_S
    silent_rounds = 0
    try:
        yield f"retry: {int(_RECONNECT_S * 1000)}\n\n".encode()
        while asyncio.get_running_loop().time() < deadline:
            for event in reply.events:
                data = msgspec.json.encode(event).decode()
                yield f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n".encode()
            silent_rounds = 0 if reply.events else silent_rounds + 1
            if silent_rounds % _KEEPALIVE_ROUNDS == 0:
                yield f"id: {reply.position}\n: still here\n\n".encode()
            await asyncio.sleep(_ROUND_S)
            request = msgspec.structs.replace(
                request, after=reply.position, limit=_EVENTS_PER_ROUND
            )
            reply = await auth.call_action("events.list", request)
    except StewardError:
        # The client reconnects; it then gets the error, or the stream continues.
        return
