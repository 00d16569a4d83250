"""Status pages: problems, gaps, health checks, dead letters to retry; and Prometheus metrics.

:func:`list_problems` lists the problems of Steward itself, for this page and the home page.
"""

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
from litestar import Request, Response, get, post

from steward.admin.doctor.findings import DoctorAnswer, DoctorRequest
from steward.admin.journal import DeadAnswer, DeadRequest, RetryRequest
from steward.admin.status.requests import (
    MetricsAnswer,
    MetricsRequest,
    StatusShowAnswer,
    StatusShowRequest,
)
from steward.core.errors import PermissionRefused, UsageError
from steward.web.authentication import AuthenticatedRequest, Authenticator
from steward.web.daemon_client import DaemonClient
from steward.web.formats import format_duration_html, format_size_html
from steward.web.renderer import Renderer
from steward.web.settings import WebSettings

_LATE_AFTER_S: Final = 600.0
"""Lag beyond which a consumer is a problem, in seconds."""
_LOW_SPACE: Final = 0.05
"""Share of free disk space below which a warning appears."""


class StatusProblem(msgspec.Struct, frozen=True):
    """A problem of Steward itself.

    Attributes:
        rank: ``wrong``: work is not done, or lost; ``warning``: it has a cost.
        component: Component concerned.
        message: Description.
    """

    rank: Literal["wrong", "warning"]
    component: str
    message: str


def list_problems(reply: StatusShowAnswer) -> list[StatusProblem]:
    """Return the problems, worst first."""
    return sorted(_iterate_problems(reply), key=lambda problem: problem.rank != "wrong")


def _iterate_problems(reply: StatusShowAnswer) -> Iterator[StatusProblem]:
    """Yield the problems in a status reply."""
    if not reply.running:
        yield StatusProblem("wrong", "daemon", "not running")
    for worker in reply.workers:
        if not worker.pid:
            yield StatusProblem("wrong", f"worker {worker.name}", worker.error or "not running")
    yield from _iterate_consumer_problems(reply)
    if reply.dead_letters:
        events = "1 event" if reply.dead_letters == 1 else f"{reply.dead_letters} events"
        yield StatusProblem("wrong", "dead letters", f"consumers rejected {events}")
    for cluster in reply.clusters:
        if cluster.up is False:
            message = cluster.message or "slurmctld does not answer"
            yield StatusProblem("wrong", f"cluster {cluster.cluster}", message)
    for disk in reply.disks:
        if disk.total and disk.free < _LOW_SPACE * disk.total:
            yield StatusProblem(
                "warning", f"disk {disk.path}", f"{format_size_html(disk.free)} free"
            )
    bank = reply.bank
    if bank is not None and bank.gate != "deciding":
        message = bank.gate_reason or f"state: {bank.gate}"
        yield StatusProblem("wrong" if bank.gate == "away" else "warning", "gate", message)
    if bank is not None and bank.notices:
        yield StatusProblem("warning", "notices", f"{bank.notices} undelivered")
    refused_agents = {
        f"agent {address}": f"rejected: {reason}" for address, reason in reply.rejected.items()
    }
    for component, reason in (refused_agents | reply.unknown).items():
        yield StatusProblem("warning", component, reason)


def _iterate_consumer_problems(reply: StatusShowAnswer) -> Iterator[StatusProblem]:
    """Yield the problems of consumers and of sinks."""
    sinks = {f"archive.{item.name}" for item in reply.sinks}
    for consumer in reply.consumers:
        if consumer.name in sinks:
            continue
        if consumer.state == "detached":
            message = consumer.refill or "detached: the journal no longer keeps events for it"
            yield StatusProblem("wrong", f"consumer {consumer.name}", message)
        elif consumer.state == "waiting":
            message = consumer.detail or "waiting for a service that is unavailable"
            yield StatusProblem("warning", f"consumer {consumer.name}", message)
        elif (consumer.lag_s or 0.0) > _LATE_AFTER_S:
            message = f"lag of {format_duration_html(consumer.lag_s)}"
            yield StatusProblem("warning", f"consumer {consumer.name}", message)
    for sink in reply.sinks:
        if sink.state in ("detached", "waiting"):
            rank: Literal["wrong", "warning"] = "wrong" if sink.state == "detached" else "warning"
            yield StatusProblem(rank, f"sink {sink.name}", sink.refill or sink.detail or sink.state)


HttpRequest = Request[Any, Any, Any]
_MOST_LETTERS: Final = 200
"""Most dead letters shown."""
_PROXY_HEADERS: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
"""Headers that a proxy adds to requests it forwards."""


@get("/status", include_in_schema=False)
async def status(auth: AuthenticatedRequest, pages: Renderer) -> Response[Any]:
    """Show the status of Steward."""
    reply: StatusShowAnswer = await auth.call_action("status.show", StatusShowRequest(gaps=False))
    dead_reply = DeadAnswer(letters=())
    if reply.dead_letters:
        dead_reply = await auth.call_action("journal.dead", DeadRequest())
    return pages.render_page(
        "steward.html",
        auth,
        here="/status",
        answer=reply,
        problems=list_problems(reply),
        letters=dead_reply.letters[:_MOST_LETTERS],
        more_letters=max(0, len(dead_reply.letters) - _MOST_LETTERS),
        dead=dead_reply,
        zone=auth.zone,
    )


@get("/status/gaps", include_in_schema=False)
async def gaps(auth: AuthenticatedRequest, pages: Renderer) -> Response[Any]:
    """Show the known gaps in the records, which take a while to compute."""
    reply: StatusShowAnswer = await auth.call_action("status.show", StatusShowRequest(gaps=True))
    return pages.render_page_or_part(
        "gaps.html",
        auth,
        here="/status",
        gaps=reply.gaps,
        why=reply.unknown.get("gaps", ""),
        zone=auth.zone,
    )


@get("/status/doctor", include_in_schema=False)
async def doctor(auth: AuthenticatedRequest, pages: Renderer) -> Response[Any]:
    """Run the health checks, which take some seconds."""
    reply: DoctorAnswer = await auth.call_action("doctor.run", DoctorRequest())
    return pages.render_page_or_part(
        "doctor.html",
        auth,
        here="/status",
        answer=reply,
        zone=auth.zone,
    )


@post("/status/retry", include_in_schema=False, status_code=303)
async def retry(request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer) -> Response[Any]:
    """Retry dead letters."""
    form = await request.form()
    consumer, number = str(form.get("consumer", "")), str(form.get("id", ""))
    if not consumer or (number and not (number.isascii() and number.isdigit())):
        raise UsageError("missing consumer or invalid event number: choose a dead letter")
    await auth.call_action(
        "journal.retry", RetryRequest(consumer=consumer, id=int(number) if number else None)
    )
    return pages.make_redirect("/status", auth)


@get("/metrics", include_in_schema=False)
async def metrics(request: HttpRequest) -> Response[str]:
    """Return Prometheus metrics: all with an operator's token, else a part for some addresses.

    Without a token they show nothing about users or accounts.
    """
    settings: WebSettings = request.app.state.web
    client: DaemonClient = request.app.state.client
    authenticator: Authenticator = request.app.state.authenticator
    token = authenticator.read_token(request)
    peer = request.client.host if request.client else ""
    # Behind a proxy the peer address does not identify the client.
    is_forwarded = any(
        name in request.headers for name in (*_PROXY_HEADERS, settings.proxy_header) if name
    )
    if not token and (peer not in settings.metrics_from or is_forwarded):
        raise PermissionRefused(
            "permission denied: metrics require an operator's token, or a direct request from an "
            "address in 'metrics_from' of [web]"
        )
    reply: MetricsAnswer = await client.call_action("status.metrics", MetricsRequest(), token)
    return Response(
        reply.text,
        media_type=reply.content_type,
        headers={"Cache-Control": "no-store"},
    )


ROUTES: Final = (status, gaps, doctor, retry, metrics)
