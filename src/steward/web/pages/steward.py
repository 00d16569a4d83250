"""Steward itself, for those who look after it: how it stands, what it could not do, its figures."""

from typing import Any, Final

from litestar import Request, Response, get, post

from steward.admin.doctor.room import DoctorAnswer, DoctorRequest
from steward.admin.journal import DeadAnswer, DeadRequest, ReplayRequest
from steward.admin.status.shapes import (
    MetricsAnswer,
    MetricsRequest,
    StatusShowAnswer,
    StatusShowRequest,
)
from steward.core.errors import Refused, UsageError
from steward.web.desk import Desk
from steward.web.rendering import Renderer
from steward.web.settings import WebSettings
from steward.web.troubles import troubles
from steward.web.visit import Doorkeeper, Visit

Ask = Request[Any, Any, Any]
_MOST_LETTERS: Final = 200
_PASSED_ON: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
"""Headers that a proxy puts on what it passes on."""


@get("/status", include_in_schema=False)
async def status(visit: Visit, pages: Renderer) -> Response[Any]:
    """How Steward itself stands."""
    answer: StatusShowAnswer = await visit.ask("status.show", StatusShowRequest(gaps=False))
    letters = DeadAnswer(letters=())
    if answer.dead_letters:
        letters = await visit.ask("journal.dead", DeadRequest())
    return pages.page(
        "steward.html",
        visit,
        here="/status",
        answer=answer,
        troubles=troubles(answer),
        letters=letters.letters[:_MOST_LETTERS],
        more_letters=max(0, len(letters.letters) - _MOST_LETTERS),
        is_sink={f"archive.{one.name}" for one in answer.sinks},
        zone=visit.zone,
    )


@get("/status/gaps", include_in_schema=False)
async def gaps(visit: Visit, pages: Renderer) -> Response[Any]:
    """What is missing in the books, which takes a while to find out."""
    answer: StatusShowAnswer = await visit.ask("status.show", StatusShowRequest(gaps=True))
    return pages.either(
        "gaps.html",
        visit,
        here="/status",
        gaps=answer.gaps,
        why=answer.unknown.get("gaps", ""),
        zone=visit.zone,
    )


@get("/status/doctor", include_in_schema=False)
async def doctor(visit: Visit, pages: Renderer) -> Response[Any]:
    """What the doctor finds, which takes some seconds."""
    answer: DoctorAnswer = await visit.ask("doctor.run", DoctorRequest())
    return pages.either(
        "doctor.html",
        visit,
        here="/status",
        answer=answer,
        zone=visit.zone,
    )


@post("/status/replay", include_in_schema=False, status_code=303)
async def replay(request: Ask, visit: Visit, pages: Renderer) -> Response[Any]:
    """Have what was set aside tried again."""
    given = await request.form()
    consumer, number = str(given.get("consumer", "")), str(given.get("id", ""))
    if not consumer or (number and not (number.isascii() and number.isdigit())):
        raise UsageError("say of which consumer, and which event or all")
    await visit.ask(
        "journal.replay", ReplayRequest(consumer=consumer, id=int(number) if number else None)
    )
    return pages.redirect("/status", visit)


@get("/metrics", include_in_schema=False)
async def metrics(request: Ask) -> Response[str]:
    """Figures for Prometheus: with an operator's token all, else for certain addresses.

    Without a token they show nothing about users or accounts.
    """
    web: WebSettings = request.app.state.web
    desk: Desk = request.app.state.desk
    doorkeeper: Doorkeeper = request.app.state.doorkeeper
    token = doorkeeper.token(request)
    peer = request.client.host if request.client else ""
    # A proxy's address says nothing of whom it asks for.
    is_passed_on = any(name in request.headers for name in (*_PASSED_ON, web.proxy_header) if name)
    if not token and (peer not in web.metrics_from or is_passed_on):
        raise Refused(
            "figures are for the addresses in [web] metrics_from, and for an operator's token"
        )
    answer: MetricsAnswer = await desk.ask("status.metrics", MetricsRequest(), token)
    return Response(
        answer.text,
        media_type=answer.content_type,
        headers={"Cache-Control": "no-store"},
    )


ROUTES: Final = (status, gaps, doctor, replay, metrics)
