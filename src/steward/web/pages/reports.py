"""Report pages: usage, capacity, wait times and waste, as tables, plots, CSV or JSON.

``REPORT_KINDS`` lists the reports; all of a report derives from its action. The
handlers show the list, the form of a report, and its table, loaded separately because it may take a
while.
"""

from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec
from litestar import Request, Response, get
from litestar.params import FromPath

from steward.core.actions import Action
from steward.daemon.registry import import_actions
from steward.reports.requests import JobReportRequest, PeriodLength, ReportReply, ReportRow
from steward.web import query
from steward.web.authentication import AuthenticatedRequest
from steward.web.errors import PageNotFound
from steward.web.renderer import Plot, Renderer, download_reply


class ReportKind(msgspec.Struct, frozen=True):
    """A report on the pages."""

    action: Action

    @property
    def name(self) -> str:
        """Return its name in addresses."""
        return self.action.name.removeprefix("reports.")

    @property
    def answer(self) -> type[ReportReply]:
        """Return the type of its reply."""
        return cast("type[ReportReply]", self.action.answer)

    @property
    def title(self) -> str:
        """Return its title."""
        return self.answer.title

    @property
    def description(self) -> str:
        """Return a description of the report, in one line."""
        return self.action.help

    @property
    def of_jobs(self) -> bool:
        """Whether it can be filtered by account, user and partition."""
        return issubclass(self.action.request, JobReportRequest)

    @property
    def plot(self) -> str:
        """Return the row attribute whose totals by period are plotted."""
        return self.answer.plotted


REPORT_KINDS: Final = {
    kind.name: kind for kind in map(ReportKind, import_actions("reports").values())
}
"""Reports by name."""


HttpRequest = Request[Any, Any, Any]
_MOST_ROWS: Final = 500
"""Most rows shown of a report."""
_PERIODS: Final = ("", "day", "week", "month")


@get("/reports", include_in_schema=False)
async def reports(auth: AuthenticatedRequest, pages: Renderer) -> Response[Any]:
    """List the reports."""
    return pages.render_page("reports.html", auth, here="/reports", kinds=REPORT_KINDS)


@get("/reports/{name:str}", include_in_schema=False)
async def report(
    request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer, name: FromPath[str]
) -> Response[Any]:
    """Show a report's form; its table loads separately, since it may take a while."""
    kind = _find_report(name)
    return pages.render_page("report.html", auth, **_read_form(request, kind))


@get("/reports/{name:str}/table", include_in_schema=False)
async def table(
    request: HttpRequest, auth: AuthenticatedRequest, pages: Renderer, name: FromPath[str]
) -> Response[Any]:
    """Return a report's table and plot, or a download of it."""
    kind = _find_report(name)
    context = _read_form(request, kind)
    reply: ReportReply = await auth.call_action(
        f"reports.{name}", _make_report_request(context, kind)
    )
    rows = reply.rows
    file_format = query.read_text(request, "form")
    if file_format in ("csv", "json"):
        return download_reply(reply, rows, f"report-{name}", file_format)
    return pages.render_page_or_part(
        "report_table.html",
        auth,
        **context,
        answer=reply,
        rows=rows[:_MOST_ROWS],
        more=max(0, len(rows) - _MOST_ROWS),
        plot=_plot_report(kind, reply, rows),
    )


def _find_report(name: str) -> ReportKind:
    """Return a report by name, or fail."""
    if name not in REPORT_KINDS:
        raise PageNotFound(f"unknown report {name[:60]!r}: use one of {', '.join(REPORT_KINDS)}")
    return REPORT_KINDS[name]


def _read_form(request: HttpRequest, kind: ReportKind) -> dict[str, Any]:
    """Read the form of a report, with defaults."""
    by = query.read_text(request, "by")
    since = query.read_text(request, "since") or "now-30days"
    fields = {
        "since": since,
        "until": query.read_text(request, "until") or "now",
        "by": by if by in _PERIODS else "",
        "clusters": query.read_words(request, "clusters"),
    }
    if kind.of_jobs:
        fields |= {
            name: query.read_words(request, name) for name in ("accounts", "users", "partitions")
        }
    return {
        "here": "/reports",
        "kind": kind,
        "asked": fields,
        "kinds": REPORT_KINDS,
        "offered": _PERIODS,
    }


def _make_report_request(context: dict[str, Any], kind: ReportKind) -> Any:
    """Build the request of a report."""
    fields = context["asked"]
    return kind.action.request(**{**fields, "by": cast("PeriodLength", fields["by"])})


def _plot_report(kind: ReportKind, reply: ReportReply, rows: Sequence[ReportRow]) -> Plot | None:
    """Plot the totals of periods over time; None if there is only one period."""
    if len(reply.periods) < 2:
        return None
    totals = [0.0] * len(reply.periods)
    for row in rows:
        # An account's total row precedes its users' rows: count only the total.
        if getattr(row, "uid", None) is not None and kind.name == "accounts":
            continue
        totals[row.period] += getattr(row, kind.plot) or 0
    unit = "h" if kind.plot.endswith("_s") else ""
    scale = 3600 if unit else 1
    return Plot(
        title=kind.title,
        x=[item.since.timestamp() for item in reply.periods],
        series=[
            (kind.plot.removesuffix("_s").replace("_", " "), [item / scale for item in totals])
        ],
        unit=unit,
        zone=reply.zone,
        bars=True,
    )


ROUTES: Final = (reports, report, table)
