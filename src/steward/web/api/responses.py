"""How the API says what went wrong: problem+json, RFC 9457."""

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

from steward.core.errors import Failed, StewardError
from steward.daemon.idempotency import LONGEST_KEY
from steward.daemon.requests import answer_line, error_line, item_line
from steward.reports.events import EventsAnswer, EventsRequest
from steward.web.api.endpoints import CURSOR, Endpoint, body, query
from steward.web.authentication import Visit
from steward.web.errors import WrongRequest
from steward.web.event_stream import STREAMS, watched


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong.

    Attributes:
        type: Always ``about:blank``: the status says what kind it is.
        title: The status, in words.
        status: Of HTTP.
        detail: What happened, and what to do about it.
    """

    title: str
    status: int
    detail: str
    type: str = "about:blank"


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> Response[Any]:
    """An answer that says what went wrong."""
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


Ask = Request[Any, Any, Any]
KEY: Final = "idempotency-key"
LINES: Final = "application/jsonl"
_KEY: Final = re.compile(rf"[!-~]{{1,{LONGEST_KEY}}}")
_JSON: Final = "application/json"
_PRIVATE: Final = {"Cache-Control": "private, no-cache", "Vary": "Authorization, Cookie"}
_NOT_KEPT: Final = {"Cache-Control": "no-store"}


async def answer(endpoint: Endpoint, request: Ask, visit: Visit) -> Response[Any]:
    """Do what one path is for.

    Raises:
        StewardError: It cannot be done.
    """
    reads = endpoint.method == "GET"
    given = query(endpoint, request) if reads else await body(endpoint, request)
    parts = {name: str(request.path_params[name]) for name in endpoint.names}
    try:
        asked = endpoint.request(parts, given)
    except msgspec.ValidationError as error:
        raise WrongRequest(f"the path cannot be understood: {error}") from None
    key = "" if reads else _key(request)
    if endpoint.done_by.stream:
        return await _streamed(endpoint, asked, visit)
    found = await visit.ask(endpoint.action, asked, key=key)
    return _read(endpoint, request, found) if reads else _done(endpoint, found)


def _key(request: Ask) -> str:
    """The word under which something is to be done once; "" for none."""
    key = request.headers.get(KEY)
    if key is not None and not _KEY.fullmatch(key):
        raise WrongRequest(f"{KEY.title()} has 1 to {LONGEST_KEY} letters, without blanks")
    return key or ""


def _done(endpoint: Endpoint, found: Any) -> Response[bytes]:
    return Response(
        msgspec.json.encode(found),
        status_code=endpoint.status,
        media_type=_JSON,
        headers=_NOT_KEPT,
    )


def _read(endpoint: Endpoint, request: Ask, found: Any) -> Response[bytes]:
    headers = dict(_PRIVATE)
    if endpoint.cursor is not None:
        next_page = getattr(found, endpoint.cursor[1])
        found = page_of(endpoint)(**msgspec.structs.asdict(found) | {"next": next_page})
        if next_page:
            headers["Link"] = f'<{_address(request, next_page)}>; rel="next"'
    text = msgspec.json.encode(found)
    # Weak, since what is compressed on its way is not the same bytes.
    etag = headers["ETag"] = f'W/"{hashlib.sha256(text).hexdigest()[:32]}"'
    if _is_known(request.headers.get("if-none-match", ""), etag):
        return Response(b"", status_code=304, headers=headers)
    return Response(text, media_type=_JSON, headers=headers)


def page_of(endpoint: Endpoint) -> type[msgspec.Struct]:
    """The shape of an answer that is a page: with ``next``, whatever the action calls it."""
    whole = endpoint.done_by.answer
    if endpoint.cursor is None or endpoint.cursor[1] == "next":
        return whole
    return _with_next(whole)


def _with_next(whole: type[msgspec.Struct]) -> type[msgspec.Struct]:
    if whole not in _PAGES:
        _PAGES[whole] = msgspec.defstruct(
            f"{whole.__name__}Page",
            [("next", str, "")],
            bases=(whole,),
            namespace={"__doc__": whole.__doc__},
            module=whole.__module__,
            frozen=True,
            kw_only=True,
        )
    return _PAGES[whole]


_PAGES: Final[dict[type[msgspec.Struct], type[msgspec.Struct]]] = {}


def _address(request: Ask, cursor: str) -> str:
    """Of the next page: the same query, from there on."""
    pairs = [pair for pair in request.query_params.multi_items() if pair[0] != CURSOR]
    prefix = request.app.state.pages.prefix
    path = request.url.path.removeprefix(prefix)
    return f"{prefix}{path}?{urlencode([*pairs, (CURSOR, cursor)])}"


def _is_known(shown: str, etag: str) -> bool:
    """Whether a client has this answer already, by its If-None-Match."""
    tags = [tag.strip().removeprefix("W/") for tag in shown.split(",")]
    return shown.strip() == "*" or etag.removeprefix("W/") in tags


async def _streamed(endpoint: Endpoint, asked: Any, visit: Visit) -> Response[Any]:
    """The lines of a stream, as the daemon's socket has them; the last says how it ended."""
    stream = visit.desk.stream(endpoint.action, asked, visit.secret, who=visit.who)
    # What is refused is refused with a status: so the first line is waited for.
    try:
        first = await anext(stream)
    except StopAsyncIteration:
        raise Failed("the daemon answered nothing", endpoint.action) from None

    async def lines() -> AsyncIterator[bytes]:
        found = first
        try:
            while True:
                if isinstance(found, endpoint.done_by.answer):
                    yield answer_line(found)
                    return
                yield item_line(found)
                found = await anext(stream)
        except StewardError as error:
            yield error_line(error)
        finally:
            await stream.aclose()

    return Stream(lines(), media_type=LINES, headers=_NOT_KEPT)


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
