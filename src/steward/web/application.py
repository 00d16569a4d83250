"""ASGI application of ``steward web``: routes, limits, error pages, security headers and server.

:func:`build_application` combines pages, API and static files. A request passes these steps: strip
the path prefix, check the path and the rate limit (``count``), authenticate if the handler takes a
``auth``, run the handler, which asks the daemon, and add the security headers. Errors become HTML
pages, or problem+json below /api/ (:func:`status_of` gives the status). :func:`run_web` fetches the
settings from the daemon and serves until SIGTERM.
"""

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

from steward.admin.credentials.requests import SettingsAnswer, SettingsRequest
from steward.core.errors import (
    Conflict,
    NotFound,
    PermissionRefused,
    StewardError,
    Unavailable,
    UnknownCredential,
    UsageError,
)
from steward.core.http_server import ServerConfig, open_http_listener, serve_http
from steward.core.munge import SCHEME
from steward.core.processes import refuse_core_dumps
from steward.core.rpc import LONGEST_REQUEST
from steward.core.waits import Backoff, Stop
from steward.web.api import ROUTES as API
from steward.web.api.responses import make_problem_response
from steward.web.authentication import AuthenticatedRequest, Authenticator, RateLimiter
from steward.web.daemon_client import DaemonClient, DaemonUnavailable
from steward.web.errors import (
    LoginRequired,
    MalformedRequest,
    PageNotFound,
    RateLimitExceeded,
    RequestTooLarge,
    UnsupportedMediaType,
    WebError,
)
from steward.web.node_map import NodeCache
from steward.web.pages import ROUTES as PAGES
from steward.web.renderer import SECURITY_HEADERS, STATIC_DIRECTORY, Renderer
from steward.web.settings import WebSettings

log = logging.getLogger(__name__)

API_PATH: Final = "/api/"
_LARGEST_BODY: Final = LONGEST_REQUEST
_LARGEST_FORM: Final = 64 << 10
"""Largest body of a page's form, in bytes."""
_LONGEST_PATH_PART: Final = 255
"""Longest part of a path in bytes: the limit of file names."""
_YEAR_S: Final = 365 * 86400
_PUBLIC_PATHS: Final = ("/static/", "/healthz")
"""Path prefixes that need no login and are exempt from the rate limit."""

HttpRequest = Request[Any, Any, Any]


def build_application(
    settings: WebSettings, client: DaemonClient, extra_handlers: Sequence[Any] = ()
) -> ASGIApp:
    """Return the ASGI application with pages and API.

    Args:
        settings: Settings of the section [web].
        client: Client of the daemon.
        extra_handlers: Further handlers.
    """
    prefix = settings.path
    pages = Renderer(prefix)
    known_nodes = NodeCache()
    limiter = RateLimiter(settings.requests_per_minute)
    authenticator = Authenticator(settings, client, limiter)

    async def auth(request: HttpRequest) -> AuthenticatedRequest:
        return await authenticator.authenticate(request)

    async def count(request: HttpRequest) -> None:
        _check_path(request.url.path)
        if not request.url.path.removeprefix(prefix).startswith(_PUBLIC_PATHS):
            parameters = request.route_handler.parsed_fn_signature.parameters
            authenticator.count(request, needs_user="auth" in parameters)

    async def close(_: Litestar) -> None:
        client.close()

    static = create_static_files_router(
        path="/static",
        directories=[STATIC_DIRECTORY],
        cache_control=CacheControlHeader(max_age=_YEAR_S, immutable=True, public=True),
    )
    app = Litestar(
        route_handlers=[
            static,
            Router(path="/", route_handlers=PAGES, request_max_body_size=_LARGEST_FORM),
            *API,
            *extra_handlers,
        ],
        dependencies={
            "auth": Provide(auth),
            "pages": Provide(lambda: pages, sync_to_thread=False),
            "known_nodes": Provide(lambda: known_nodes, sync_to_thread=False),
        },
        state=State(
            {"web": settings, "client": client, "authenticator": authenticator, "pages": pages}
        ),
        before_request=count,
        on_shutdown=[close],
        compression_config=CompressionConfig(
            backend="gzip", gzip_compress_level=4, exclude="/stream"
        ),
        exception_handlers={
            StewardError: _make_steward_error_response,
            HTTPException: _make_http_error_response,
            Exception: _make_internal_error_response,
        },
        openapi_config=None,
        request_max_body_size=_LARGEST_BODY,
        logging_config=None,
        debug=False,
    )
    # Outermost, so that its own error responses are guarded and paths have no prefix.
    return _add_security_headers(_strip_prefix(prefix, app))


def _check_path(path: str) -> None:
    """Reject a path that no file name could match, before files are looked up.

    Raises:
        PageNotFound: A part of the path is too long or holds a NUL.
    """
    decoded = unquote_to_bytes(path)
    if b"\0" in decoded or any(len(part) > _LONGEST_PATH_PART for part in decoded.split(b"/")):
        raise PageNotFound("page not found")


def _strip_prefix(prefix: str, app: ASGIApp) -> ASGIApp:
    """Wrap an application to strip the path prefix, unless the proxy in front did so."""
    prefix_bytes = prefix.encode()

    async def below(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        raw_path = scope.get("raw_path", path.encode())
        # Compare the raw path: percent-encoded, the same prefix is longer than its decoded length.
        if prefix and (raw_path == prefix_bytes or raw_path.startswith(prefix_bytes + b"/")):
            scope["path"] = path[len(prefix) :] or "/"
            scope["raw_path"] = raw_path[len(prefix_bytes) :] or b"/"
        await app(scope, receive, send)

    return below


def _add_security_headers(app: ASGIApp) -> ASGIApp:
    """Wrap an application to add the security headers to every response."""
    security_headers = [
        (name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()
    ]

    async def add_headers(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *security_headers]
            await send(message)

        await app(scope, receive, send_guarded)

    return add_headers


def status_of(error: StewardError) -> int:
    """Return the HTTP status for an error of Steward."""
    statuses = (
        (LoginRequired, 401),
        (UnknownCredential, 401),
        (RateLimitExceeded, 429),
        (PageNotFound, 404),
        (NotFound, 404),
        (Conflict, 409),
        (PermissionRefused, 403),
        (Unavailable, 503),
        (RequestTooLarge, 413),
        (UnsupportedMediaType, 415),
        (UsageError, 400),
    )
    return next((status for error_class, status in statuses if isinstance(error, error_class)), 500)


def _make_steward_error_response(request: HttpRequest, error: StewardError) -> Response[Any]:
    """Return the response for an error of Steward."""
    status, headers = status_of(error), {}
    if status == 400 and _is_api(request) and not isinstance(error, MalformedRequest):
        # The shape is right, so 422: the content is wrong.
        status = 422
    if isinstance(error, RateLimitExceeded):
        headers["Retry-After"] = str(math.ceil(error.wait_s))
    if status == 401 and _is_api(request):
        headers["WWW-Authenticate"] = f"Bearer, {SCHEME}"
    return _make_error_response(request, status, str(error), headers=headers)


def _make_http_error_response(request: HttpRequest, error: HTTPException) -> Response[Any]:
    """Return the response for an HTTP error raised by Litestar."""
    text = "page not found" if error.status_code == 404 else str(error.detail)
    return _make_error_response(request, error.status_code, text, headers=error.headers)


def _make_internal_error_response(request: HttpRequest, error: Exception) -> Response[Any]:
    """Log an unexpected error and return status 500."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _make_error_response(request, 500, "internal error: see the log of 'steward web'")


def _make_error_response(
    request: HttpRequest,
    status: int,
    text: str,
    *,
    headers: dict[str, str] | None = None,
) -> Response[Any]:
    """Return an error as HTML page, or as problem+json below /api/."""
    if _is_api(request):
        return make_problem_response(status, text, headers)
    pages: Renderer = request.app.state.pages
    if status == 401:
        return pages.render_page("login_needed.html", status=401, text=text)
    return pages.render_page("error.html", status=status, headers=headers, code=status, text=text)


def _is_api(request: HttpRequest) -> bool:
    """Return True if a request is for the API."""
    prefix: str = request.app.state.pages.prefix
    return request.url.path.removeprefix(prefix).startswith(API_PATH)


def run_web(
    socket: str, *, override: Callable[[WebSettings], WebSettings] = lambda web: web
) -> None:
    """Serve pages and API until SIGTERM or SIGINT.

    Args:
        socket: Path of the daemon's socket.
        override: Applies command-line options to the settings of [web].

    Raises:
        WebError: [web] sets no address to listen on.
        StewardError: The daemon rejects this user, or the address is in use.
    """
    refuse_core_dumps()
    stop = Stop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: stop.set())
    settings = _fetch_settings(socket, stop)
    if settings is None:
        return
    settings = override(settings)
    if not settings.listen:
        raise WebError("web pages are disabled: set 'listen' in [web], and reload the daemon")
    if os.geteuid() == 0:
        log.warning("the web pages run as root: run them as %s, see user in [web]", settings.user)
    config = ServerConfig(
        name="browsers and clients of the API",
        section="[web]",
        listen=settings.listen,
        tls=settings.tls,
        shared=(*settings.trusted_proxies, *settings.shared_from),
    )
    app = build_application(settings, DaemonClient(socket))
    # Freeze imported objects: otherwise the garbage collector scans them whenever a page has made
    # thousands of objects, which takes as long as the page.
    gc.collect()
    gc.freeze()
    serve_http(config, app, open_http_listener(config), stop, lambda: None)


def _fetch_settings(socket: str, stop: Stop) -> WebSettings | None:
    """Return [web] as soon as the daemon answers, or None if told to stop before."""
    backoff = Backoff(0.2, 5.0)
    has_warned = False
    while not stop.is_set():
        try:
            reply: SettingsAnswer = asyncio.run(
                DaemonClient(socket).call_action("credentials.settings", SettingsRequest())
            )
        except DaemonUnavailable as error:
            if not has_warned:
                log.warning("waiting for the daemon: %s", error)
                has_warned = True
            stop.wait(backoff.next_s())
        else:
            return reply.web
    return None
