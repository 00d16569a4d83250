"""Login pages: log in with the link of ``steward login``, and log out."""

from typing import Any, Final

from litestar import Request, Response, get, post
from litestar.datastructures import Cookie
from litestar.params import FromPath

from steward.admin.credentials.requests import (
    CloseRequest,
    OpenAnswer,
    OpenRequest,
    PeekAnswer,
    PeekRequest,
)
from steward.web.authentication import AuthenticatedRequest, Authenticator
from steward.web.daemon_client import DaemonClient
from steward.web.errors import CsrfError
from steward.web.renderer import Renderer
from steward.web.settings import SESSION_S, WebSettings

HttpRequest = Request[Any, Any, Any]
_LARGEST_FORM_BYTES: Final = 4 << 10
"""Largest size of the login form, which needs no session, in bytes."""


@get("/login", include_in_schema=False, sync_to_thread=False)
def how_to(pages: Renderer) -> Response[Any]:
    """Explain how to log in."""
    return pages.render_page("login_needed.html", text="A login link is required.")


@get("/login/{secret:str}", include_in_schema=False)
async def login(request: HttpRequest, pages: Renderer, secret: FromPath[str]) -> Response[Any]:
    """Ask the user to confirm a login link, so that link scanners do not consume it."""
    client: DaemonClient = request.app.state.client
    reply: PeekAnswer = await client.call_action("credentials.peek", PeekRequest(secret=secret))
    return pages.render_page("login.html", user=reply.user, secret=secret)


@post("/login", include_in_schema=False, status_code=303, request_max_body_size=_LARGEST_FORM_BYTES)
async def log_in(request: HttpRequest, pages: Renderer) -> Response[Any]:
    """Exchange a login link, once, for a session."""
    # No session exists yet to check a CSRF token against; reject other sites by the header.
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise CsrfError("rejected: the request comes from a page of another site")
    client: DaemonClient = request.app.state.client
    secret = str((await request.form()).get("secret", ""))
    reply: OpenAnswer = await client.call_action("credentials.open", OpenRequest(secret=secret))
    response = pages.make_redirect("/")
    settings: WebSettings = request.app.state.web
    response.set_cookie(_make_session_cookie(settings, pages, reply.secret, int(SESSION_S)))
    return response


@post("/logout", include_in_schema=False, status_code=303)
async def log_out(
    request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer
) -> Response[Any]:
    """End the session."""
    client: DaemonClient = request.app.state.client
    authenticator: Authenticator = request.app.state.authenticator
    await client.call_action("credentials.close", CloseRequest(secret=auth.secret))
    authenticator.drop_session(auth.secret)
    response = pages.render_page("login_needed.html", text="You are logged out.")
    response.set_cookie(_make_session_cookie(request.app.state.web, pages, "", 0))
    return response


def _make_session_cookie(
    settings: WebSettings, pages: Renderer, value: str, max_age_s: int
) -> Cookie:
    """Return the session cookie: HttpOnly, SameSite=Lax, below the path prefix."""
    return Cookie(
        key=settings.cookie,
        value=value,
        path=pages.prefix or "/",
        max_age=max_age_s,
        httponly=True,
        secure=settings.is_secure,
        samesite="lax",
    )


ROUTES: Final = (how_to, login, log_in, log_out)
