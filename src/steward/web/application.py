"""The application that ``steward web`` serves: pages, API, static files, and what guards them."""

import asyncio
import gc
import logging
import math
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from litestar import Litestar, Request, Response, Router
from litestar.config.compression import CompressionConfig
from litestar.datastructures import CacheControlHeader, State
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.static_files import create_static_files_router
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from steward.admin.credentials.errors import NotKnown
from steward.admin.credentials.requests import SettingsAnswer, SettingsRequest
from steward.core.errors import Conflict, Missing, Refused, StewardError, Unavailable, UsageError
from steward.core.http_server import Served, listen, serve
from steward.core.munge import SCHEME
from steward.core.processes import refuse_core_dumps
from steward.core.waits import Backoff, Stop
from steward.daemon.requests import LONGEST_REQUEST
from steward.web.api import ROUTES as API
from steward.web.api.responses import problem
from steward.web.authentication import Doorkeeper, Rate, Visit
from steward.web.daemon_client import DaemonAway, Desk
from steward.web.errors import (
    LoginNeeded,
    NoSuchPage,
    TooLarge,
    TooMany,
    WebError,
    WrongMedia,
    WrongRequest,
)
from steward.web.node_map import KnownNodes
from steward.web.pages import ROUTES as PAGES
from steward.web.rendering import HEADERS, STATIC, Renderer
from steward.web.settings import WebSettings

log = logging.getLogger(__name__)

API_PATH: Final = "/api/"
_LARGEST: Final = LONGEST_REQUEST
_LARGEST_FORM: Final = 64 << 10
_LONGEST_PART: Final = 255
"""Of a path, in bytes: a file's name has no more."""
_YEAR_S: Final = 365 * 86400
_UNASKED: Final = ("/static/", "/healthz")
"""What needs no login and counts for nobody."""

Ask = Request[Any, Any, Any]


def application(web: WebSettings, desk: Desk, more: Sequence[Any] = ()) -> ASGIApp:
    """The pages and the API as a server can serve them.

    Args:
        web: [web].
        desk: Where the daemon is asked.
        more: Further handlers.
    """
    prefix = web.path
    pages = Renderer(prefix)
    known_nodes = KnownNodes()
    rate = Rate(web.requests_per_minute)
    doorkeeper = Doorkeeper(web, desk, rate)

    async def visit(request: Ask) -> Visit:
        return await doorkeeper.visit(request)

    async def count(request: Ask) -> None:
        _need_path(request.url.path)
        if not request.url.path.removeprefix(prefix).startswith(_UNASKED):
            asks = request.route_handler.parsed_fn_signature.parameters
            doorkeeper.count(request, is_asked_who="visit" in asks)

    async def close(_: Litestar) -> None:
        desk.close()

    static = create_static_files_router(
        path="/static",
        directories=[STATIC],
        cache_control=CacheControlHeader(max_age=_YEAR_S, immutable=True, public=True),
    )
    app = Litestar(
        route_handlers=[
            static,
            Router(path="/", route_handlers=PAGES, request_max_body_size=_LARGEST_FORM),
            *API,
            *more,
        ],
        dependencies={
            "visit": Provide(visit),
            "pages": Provide(lambda: pages, sync_to_thread=False),
            "known_nodes": Provide(lambda: known_nodes, sync_to_thread=False),
        },
        state=State({"web": web, "desk": desk, "doorkeeper": doorkeeper, "pages": pages}),
        before_request=count,
        on_shutdown=[close],
        compression_config=CompressionConfig(
            backend="gzip", gzip_compress_level=4, exclude="/stream"
        ),
        exception_handlers={
            StewardError: _failed,
            HTTPException: _wrong,
            Exception: _broken,
        },
        openapi_config=None,
        request_max_body_size=_LARGEST,
        logging_config=None,
        debug=False,
    )
    # Outside of it: what it does not find is guarded, too, and paths are found without prefix.
    return _guarded(_below(prefix, app))


def _need_path(path: str) -> None:
    """Let pass what can be a path: no file is looked for under what cannot be a name.

    Raises:
        NoSuchPage: It cannot be one.
    """
    plain = unquote_to_bytes(path)
    if b"\0" in plain or any(len(part) > _LONGEST_PART for part in plain.split(b"/")):
        raise NoSuchPage("there is no such page")


def _below(prefix: str, app: ASGIApp) -> ASGIApp:
    """Take the prefix off paths, where the proxy in front has not done so."""
    plain = prefix.encode()

    async def below(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        raw = scope.get("raw_path", path.encode())
        # As it was sent: in other letters for the same path the prefix is longer than it is.
        if prefix and (raw == plain or raw.startswith(plain + b"/")):
            scope["path"] = path[len(prefix) :] or "/"
            scope["raw_path"] = raw[len(plain) :] or b"/"
        await app(scope, receive, send)

    return below


def _guarded(app: ASGIApp) -> ASGIApp:
    """Put the headers that guard a page on every answer."""
    guards = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *guards]
            await send(message)

        await app(scope, receive, send_guarded)

    return guarded


def status_of(error: StewardError) -> int:
    """The status of HTTP that an error of Steward's is told under."""
    found = (
        (LoginNeeded, 401),
        (NotKnown, 401),
        (TooMany, 429),
        (NoSuchPage, 404),
        (Missing, 404),
        (Conflict, 409),
        (Refused, 403),
        (Unavailable, 503),
        (TooLarge, 413),
        (WrongMedia, 415),
        (UsageError, 400),
    )
    return next((status for family, status in found if isinstance(error, family)), 500)


def _failed(request: Ask, error: StewardError) -> Response[Any]:
    status, headers = status_of(error), {}
    if status == 400 and _is_api(request) and not isinstance(error, WrongRequest):
        # It is of its shape: what is wrong is what it says.
        status = 422
    if isinstance(error, TooMany):
        headers["Retry-After"] = str(math.ceil(error.wait_s))
    if status == 401 and _is_api(request):
        headers["WWW-Authenticate"] = f"Bearer, {SCHEME}"
    return _answer(request, status, str(error), headers=headers)


def _wrong(request: Ask, error: HTTPException) -> Response[Any]:
    text = "there is no such page" if error.status_code == 404 else str(error.detail)
    return _answer(request, error.status_code, text, headers=error.headers)


def _broken(request: Ask, error: Exception) -> Response[Any]:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _answer(request, 500, "the page failed: the log of 'steward web' says why")


def _answer(
    request: Ask,
    status: int,
    text: str,
    *,
    headers: dict[str, str] | None = None,
) -> Response[Any]:
    if _is_api(request):
        return problem(status, text, headers)
    pages: Renderer = request.app.state.pages
    if status == 401:
        return pages.page("login_needed.html", status=401, text=text)
    return pages.page("error.html", status=status, headers=headers, code=status, text=text)


def _is_api(request: Ask) -> bool:
    prefix: str = request.app.state.pages.prefix
    return request.url.path.removeprefix(prefix).startswith(API_PATH)


def run(socket: str, *, change: Callable[[WebSettings], WebSettings] = lambda web: web) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        socket: The daemon's.
        change: What the command line says in place of [web].

    Raises:
        WebError: [web] says that there are no pages.
        StewardError: The daemon does not let this user serve, or the address is taken.
    """
    refuse_core_dumps()
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    web = _settings(socket, stop)
    if web is None:
        return
    web = change(web)
    if not web.listen:
        raise WebError("there are no pages: set 'listen' in [web], and reload the daemon")
    if os.geteuid() == 0:
        log.warning("the pages run as root: have them run as %s, [web] user", web.user)
    served = Served(
        name="the pages' server",
        section="[web]",
        listen=web.listen,
        certificate_file=web.certificate_file,
        key_file=web.key_file,
        shared=(*web.trusted_proxies, *web.shared_from),
    )
    pages = application(web, Desk(socket))
    # What was imported stays: else it is gone through again whenever a page has made thousands
    # of objects, which takes as long as the page.
    gc.collect()
    gc.freeze()
    serve(served, pages, listen(served), stop, lambda: None)


def _settings(socket: str, stop: Stop) -> WebSettings | None:
    """What the daemon says of [web], as soon as it answers; None where we are told to stop."""
    backoff = Backoff(0.2, 5.0)
    said = False
    while not stop.is_set():
        try:
            answer: SettingsAnswer = asyncio.run(
                Desk(socket).ask("credentials.settings", SettingsRequest())
            )
        except DaemonAway as error:
            if not said:
                log.warning("waiting for the daemon: %s", error)
                said = True
            stop.wait(backoff.next_s())
        else:
            return answer.web
    return None
