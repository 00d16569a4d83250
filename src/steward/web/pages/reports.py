"""Reports: what a cluster did, who used it, how long jobs waited, what was wasted."""

import csv
import io
from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec
from litestar import Request, Response, get
from litestar.params import FromPath

from steward.core.printable import no_formula, safe
from steward.reports.shapes import By, ReportAnswer, Row
from steward.web import query
from steward.web.errors import NoSuchPage
from steward.web.rendering import Plot, Renderer
from steward.web.report_kinds import KINDS, Column, Kind, shown_columns
from steward.web.visit import Visit

Ask = Request[Any, Any, Any]
_MOST_ROWS: Final = 500
_MOST_BARS: Final = 40
_BY: Final = ("", "day", "week", "month")


@get("/reports", include_in_schema=False)
async def reports(visit: Visit, pages: Renderer) -> Response[Any]:
    """The reports that there are."""
    return pages.page("reports.html", visit, here="/reports", kinds=KINDS)


@get("/reports/{name:str}", include_in_schema=False)
async def report(request: Ask, visit: Visit, pages: Renderer, name: FromPath[str]) -> Response[Any]:
    """One of them: what it is asked; its table follows, since that may take a while."""
    kind = _kind(name)
    return pages.page("report.html", visit, **_asked(request, kind))


@get("/reports/{name:str}/table", include_in_schema=False)
async def table(request: Ask, visit: Visit, pages: Renderer, name: FromPath[str]) -> Response[Any]:
    """Its table and its plot, or the same to be downloaded."""
    kind = _kind(name)
    asked = _asked(request, kind)
    answer: ReportAnswer = await visit.ask(f"reports.{name}", _wanted(asked, kind))
    rows = answer.rows
    columns = shown_columns(kind, rows)
    form = query.text(request, "form")
    if form in ("csv", "json"):
        return _download(answer, kind, columns, form)
    return pages.either(
        "report_table.html",
        visit,
        **asked,
        answer=answer,
        rows=rows[:_MOST_ROWS],
        more=max(0, len(rows) - _MOST_ROWS),
        columns=columns,
        several=len({row.cluster for row in rows}) > 1,
        plot=_plot(kind, answer, rows),
    )


def _kind(name: str) -> Kind:
    if name not in KINDS:
        raise NoSuchPage(f"there is no report {name[:60]!r}, but {', '.join(KINDS)}")
    return KINDS[name]


def _asked(request: Ask, kind: Kind) -> dict[str, Any]:
    by = query.text(request, "by")
    since = query.text(request, "since") or "now-30days"
    fields = {
        "since": since,
        "until": query.text(request, "until") or "now",
        "by": by if by in _BY else "",
        "clusters": query.words(request, "clusters"),
    }
    if kind.of_jobs:
        fields |= {name: query.words(request, name) for name in ("accounts", "users", "partitions")}
    return {"here": "/reports", "kind": kind, "asked": fields, "kinds": KINDS, "offered": _BY}


def _wanted(asked: dict[str, Any], kind: Kind) -> Any:
    fields = asked["asked"]
    return kind.request(**{**fields, "by": cast("By", fields["by"])})


def _plot(kind: Kind, answer: ReportAnswer, rows: Sequence[Row]) -> Plot | None:
    """The sums of periods over time; None where there is but one."""
    if len(answer.periods) < 2:
        return None
    sums = [0.0] * len(answer.periods)
    for row in rows:
        # An account's sum stands before its users'.
        if getattr(row, "uid", None) is not None and kind.name == "accounts":
            continue
        sums[row.period] += getattr(row, kind.plot) or 0
    unit = "h" if kind.plot.endswith("_s") else ""
    scale = 3600 if unit else 1
    return Plot(
        title=kind.title,
        x=[one.since.timestamp() for one in answer.periods],
        series=[(kind.plot.removesuffix("_s").replace("_", " "), [one / scale for one in sums])],
        unit=unit,
        zone=answer.zone,
        bars=True,
    )


def _download(
    answer: ReportAnswer, kind: Kind, columns: Sequence[Column], form: str
) -> Response[Any]:
    headers = {"Content-Disposition": f'attachment; filename="report-{kind.name}.{form}"'}
    if form == "json":
        return Response(msgspec.json.encode(answer), media_type="application/json", headers=headers)
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["Period", "Cluster", *(column.title for column in columns)])
    for row in answer.rows:
        cells = [answer.periods[row.period].label or "all", row.cluster]
        cells += [column.plain(row) for column in columns]
        writer.writerow([no_formula(safe(cell)) for cell in cells])
    return Response(out.getvalue(), media_type="text/csv", headers=headers)


ROUTES: Final = (reports, report, table)
