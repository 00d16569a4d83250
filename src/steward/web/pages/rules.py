"""Rules and audit pages: automation rules with their executions, and the log of actions."""

import asyncio
from typing import Any, Final

from litestar import Request, Response, get, post
from litestar.params import FromPath

from steward.automation.actions import AuditAnswer, AuditRequest
from steward.automation.audit import AuditRow
from steward.automation.rules.requests import (
    HistoryAnswer,
    HistoryRequest,
    ListAnswer,
    ListRequest,
    SwitchRequest,
)
from steward.automation.rules.store import Execution
from steward.core.errors import UsageError
from steward.web import query
from steward.web.authentication import Visit
from steward.web.errors import NoSuchPage
from steward.web.formats import pretty
from steward.web.pages.nodes import lines_of
from steward.web.rendering import Renderer

Ask = Request[Any, Any, Any]
_AT_ONCE: Final = 50
"""Rows of a page."""


@get("/rules", include_in_schema=False)
async def rules(request: Ask, visit: Visit, pages: Renderer) -> Response[Any]:
    """Show the rules and their executions."""
    filters: dict[str, Any] = {
        "rule": query.text(request, "rule"),
        "cluster": query.text(request, "cluster"),
        "status": query.text(request, "status"),
        "since": query.text(request, "since"),
    }
    wanted = HistoryRequest(
        **filters, zone=visit.zone, before=query.number(request, "before"), limit=_AT_ONCE + 1
    )
    if visit.is_part:
        history: HistoryAnswer = await visit.ask("rules.history", wanted)
        return pages.page("_executions.html", visit, **_executions(history, filters, visit))
    listed: ListAnswer
    listed, history = await asyncio.gather(
        visit.ask("rules.list", ListRequest()), visit.ask("rules.history", wanted)
    )
    return pages.page(
        "rules.html",
        visit,
        here="/rules",
        listed=listed,
        may_switch=all(role.administrator for role in visit.me.clusters),
        **_executions(history, filters, visit),
    )


def _executions(history: HistoryAnswer, filters: dict[str, str], visit: Visit) -> dict[str, Any]:
    """Return the template context of a list of executions."""
    shown = history.executions[:_AT_ONCE]
    return {
        "executions": shown,
        "more": shown[-1].id if len(history.executions) > _AT_ONCE else 0,
        "filters": filters,
        "zones": {role.cluster: role.zone for role in visit.me.clusters},
    }


@get("/rules/executions/{number:int}", include_in_schema=False)
async def execution(visit: Visit, pages: Renderer, number: FromPath[int]) -> Response[Any]:
    """Show one execution of a rule."""
    wanted = HistoryRequest(id=number, limit=1)
    answer: HistoryAnswer | None = None
    if number > 0:
        answer = await visit.ask("rules.history", wanted)
    if answer is None or not answer.executions:
        raise NoSuchPage(f"there is no execution {number}, or it was long ago")
    return _done(visit, pages, "execution.html", answer.executions[0])


@post("/rules/switch", include_in_schema=False, status_code=303)
async def switch(request: Ask, visit: Visit, pages: Renderer) -> Response[Any]:
    """Enable or disable a rule."""
    given = await request.form()
    rule, to = str(given.get("rule", "")), str(given.get("to", ""))
    if to not in ("on", "off"):
        raise UsageError("a rule is switched on or off")
    verb = "rules.enable" if to == "on" else "rules.disable"
    await visit.ask(verb, SwitchRequest(rule=rule))
    return pages.redirect("/rules", visit)


@get("/actions", include_in_schema=False)
async def audit(request: Ask, visit: Visit, pages: Renderer) -> Response[Any]:
    """Show the audit log; users other than operators see only their own actions."""
    filters: dict[str, Any] = {
        "action": query.text(request, "action"),
        "cluster": query.text(request, "cluster"),
        "since": query.text(request, "since"),
    }
    answer: AuditAnswer = await visit.ask(
        "automation.audit",
        AuditRequest(
            **filters, zone=visit.zone, before=query.number(request, "before"), limit=_AT_ONCE + 1
        ),
    )
    shown = answer.actions[:_AT_ONCE]
    return pages.either(
        "actions.html",
        visit,
        here="/rules",
        actions=shown,
        more=shown[-1].id if len(answer.actions) > _AT_ONCE else 0,
        filters=filters,
        zones={role.cluster: role.zone for role in visit.me.clusters},
    )


@get("/actions/{number:int}", include_in_schema=False)
async def action(visit: Visit, pages: Renderer, number: FromPath[int]) -> Response[Any]:
    """Show one action of the audit log."""
    answer: AuditAnswer | None = None
    if number > 0:
        answer = await visit.ask("automation.audit", AuditRequest(id=number))
    if answer is None or not answer.actions:
        raise NoSuchPage(f"there is no action {number}, or it is not yours")
    return _done(visit, pages, "action.html", answer.actions[0])


def _done(visit: Visit, pages: Renderer, template: str, one: Execution | AuditRow) -> Response[Any]:
    """Return the page of an action or execution: parameters and result."""
    role = visit.role(one.cluster)
    return pages.page(
        template,
        visit,
        here="/rules",
        one=one,
        zone=role.zone if role else "",
        lines=lines_of(one.result),
        parameters=pretty(one.parameters),
        result=pretty(one.result),
    )


ROUTES: Final = (rules, execution, switch, audit, action)
