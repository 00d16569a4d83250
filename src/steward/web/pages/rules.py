"""Rules and audit pages: automation rules with their executions, and the log of actions."""

import asyncio
from typing import Any, Final

from litestar import Request, Response, get, post
from litestar.params import FromPath

from steward.automation.actions import AuditReply, AuditRequest
from steward.automation.audit import AuditRow
from steward.automation.rules.requests import (
    ListRulesReply,
    ListRulesRequest,
    RulesHistoryReply,
    RulesHistoryRequest,
    SwitchRuleRequest,
)
from steward.automation.rules.store import Execution
from steward.core.errors import UsageError
from steward.web import query
from steward.web.authentication import AuthenticatedRequest
from steward.web.errors import PageNotFound
from steward.web.formats import format_json_html
from steward.web.pages.nodes import RESULT_LAYOUT, list_result_lines
from steward.web.renderer import Renderer

HttpRequest = Request[Any, Any, Any]
_ROWS_PER_PAGE: Final = 50
"""Rows of a page."""


@get("/rules", include_in_schema=False)
async def rules(request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer) -> Response[Any]:
    """Show the rules and their executions."""
    filters: dict[str, Any] = {
        "rule": query.read_text(request, "rule"),
        "cluster": query.read_text(request, "cluster"),
        "status": query.read_text(request, "status"),
        "since": query.read_text(request, "since"),
    }
    history_request = RulesHistoryRequest(
        **filters,
        zone=auth.zone,
        before=query.read_number(request, "before"),
        limit=_ROWS_PER_PAGE + 1,
    )
    if auth.is_part:
        history: RulesHistoryReply = await auth.call_action("rules.history", history_request)
        return pages.render_page(
            "_executions.html", auth, **_make_execution_context(history, filters)
        )
    rules_reply: ListRulesReply
    rules_reply, history = await asyncio.gather(
        auth.call_action("rules.list", ListRulesRequest()),
        auth.call_action("rules.history", history_request),
    )
    return pages.render_page(
        "rules.html",
        auth,
        here="/rules",
        listed=rules_reply,
        may_switch=all(role.administrator for role in auth.me.clusters),
        **_make_execution_context(history, filters),
    )


def _make_execution_context(history: RulesHistoryReply, filters: dict[str, str]) -> dict[str, Any]:
    """Return the template context of a list of executions."""
    executions = history.executions[:_ROWS_PER_PAGE]
    return {
        "executions": executions,
        "history": history,
        "layout": history.layout,
        "more": executions[-1].id if len(history.executions) > _ROWS_PER_PAGE else 0,
        "filters": filters,
    }


@get("/rules/executions/{number:int}", include_in_schema=False)
async def execution(
    auth: AuthenticatedRequest, pages: Renderer, number: FromPath[int]
) -> Response[Any]:
    """Show one execution of a rule."""
    history_request = RulesHistoryRequest(id=number, limit=1)
    reply: RulesHistoryReply | None = None
    if number > 0:
        reply = await auth.call_action("rules.history", history_request)
    if reply is None or not reply.executions:
        raise PageNotFound(f"execution {number} not found: it may have been purged")
    return _make_details_page(auth, pages, "execution.html", reply.executions[0])


@post("/rules/switch", include_in_schema=False, status_code=303)
async def switch(
    request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer
) -> Response[Any]:
    """Enable or disable a rule."""
    form = await request.form()
    rule, state = str(form.get("rule", "")), str(form.get("to", ""))
    if state not in ("on", "off"):
        raise UsageError("invalid state of a rule: use 'on' or 'off'")
    action_name = "rules.enable" if state == "on" else "rules.disable"
    await auth.call_action(action_name, SwitchRuleRequest(rule=rule))
    return pages.make_redirect("/rules", auth)


@get("/actions", include_in_schema=False)
async def audit(request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer) -> Response[Any]:
    """Show the audit log; users other than operators see only their own actions."""
    filters: dict[str, Any] = {
        "action": query.read_text(request, "action"),
        "cluster": query.read_text(request, "cluster"),
        "since": query.read_text(request, "since"),
    }
    reply: AuditReply = await auth.call_action(
        "automation.audit",
        AuditRequest(
            **filters,
            zone=auth.zone,
            before=query.read_number(request, "before"),
            limit=_ROWS_PER_PAGE + 1,
        ),
    )
    rows = reply.actions[:_ROWS_PER_PAGE]
    return pages.render_page_or_part(
        "actions.html",
        auth,
        here="/rules",
        actions=rows,
        layout=reply.layout,
        more=rows[-1].id if len(reply.actions) > _ROWS_PER_PAGE else 0,
        filters=filters,
    )


@get("/actions/{number:int}", include_in_schema=False)
async def action(
    auth: AuthenticatedRequest, pages: Renderer, number: FromPath[int]
) -> Response[Any]:
    """Show one action of the audit log."""
    reply: AuditReply | None = None
    if number > 0:
        reply = await auth.call_action("automation.audit", AuditRequest(id=number))
    if reply is None or not reply.actions:
        raise PageNotFound(f"action {number} not found, or it belongs to another user")
    return _make_details_page(auth, pages, "action.html", reply.actions[0])


def _make_details_page(
    auth: AuthenticatedRequest, pages: Renderer, template: str, entry: Execution | AuditRow
) -> Response[Any]:
    """Return the page of an action or execution: parameters and result."""
    role = auth.find_role(entry.cluster)
    return pages.render_page(
        template,
        auth,
        here="/rules",
        entry=entry,
        zone=role.zone if role else "",
        lines=list_result_lines(entry.result),
        line_layout=RESULT_LAYOUT,
        parameters=format_json_html(entry.parameters),
        result=format_json_html(entry.result),
    )


ROUTES: Final = (rules, execution, switch, audit, action)
