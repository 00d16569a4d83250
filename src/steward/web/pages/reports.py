"""Report pages: usage, capacity, wait times and waste, as tables, plots, CSV or JSON.

``REPORT_KINDS`` defines the reports: the action's request, the columns and the plotted value. The
handlers show the list, the form of a report, and its table, loaded separately because it may take a
while.
"""

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import msgspec
from litestar import Request, Response, get
from litestar.params import FromPath

from steward.core.printable import escape_line, quote_formula
from steward.reports.requests import (
    AccountsRequest,
    ClusterRequest,
    JobCountsRequest,
    PartitionUsageRequest,
    PeriodLength,
    ReportReply,
    ReportRequest,
    ReportRow,
    UsersRequest,
    WaitsRequest,
    WasteRequest,
)
from steward.web import query
from steward.web.authentication import AuthenticatedRequest
from steward.web.errors import PageNotFound
from steward.web.formats import format_duration_html, format_number_html, format_percent_html
from steward.web.rendering import Plot, Renderer

_HOUR_S: Final = 3600


class ReportColumn(msgspec.Struct, frozen=True):
    """A column of a report.

    Attributes:
        title: Heading.
        text: Formats a row for people.
        plain: Formats a row for programs.
        is_number: Whether it holds numbers.
        link: Page that a cell links to: ``users``, ``accounts``, ``partitions``; "" for none.
        is_optional: Whether to omit it if it is empty in every row.
    """

    title: str
    text: Callable[[Any], str]
    plain: Callable[[Any], str]
    is_number: bool = True
    link: str = ""
    is_optional: bool = False


class ReportKind(msgspec.Struct, frozen=True, kw_only=True):
    """Definition of a report.

    Attributes:
        name: Name in its address.
        title: Title for people.
        says: Explanation.
        request: Request type of its action.
        columns: Columns of its table.
        plot: Row attribute whose totals by period are plotted.
        of_jobs: Whether it can be filtered by account, user and partition.
    """

    name: str
    title: str
    says: str
    request: type[ReportRequest]
    columns: Sequence[ReportColumn]
    plot: str
    of_jobs: bool = True


def _make_text_column(title: str, name: str, link: str = "") -> ReportColumn:
    """Define a column of text, optionally with links."""

    def text(row: Any) -> str:
        return str(getattr(row, name))

    return ReportColumn(title, text, text, is_number=False, link=link)


def _make_count_column(title: str, name: str) -> ReportColumn:
    """Define a column of numbers."""

    def plain(row: Any) -> str:
        return str(getattr(row, name))

    return ReportColumn(title, lambda row: format_number_html(getattr(row, name)), plain)


def _make_hours_column(title: str, name: str, *, is_optional: bool = False) -> ReportColumn:
    """Define a column of resource time, converted from seconds to hours."""

    def text(row: Any) -> str:
        seconds = getattr(row, name)
        return format_number_html(None if seconds is None else seconds / _HOUR_S, 1)

    def plain(row: Any) -> str:
        seconds = getattr(row, name)
        return "" if seconds is None else f"{seconds / _HOUR_S:.3f}"

    return ReportColumn(title, text, plain, is_optional=is_optional)


def _make_share_column(title: str, part: str, whole: str) -> ReportColumn:
    """Define a column of percentages: one attribute over another."""

    def plain(row: Any) -> str:
        value, total = getattr(row, part), getattr(row, whole)
        return f"{value / total:.4f}" if value is not None and total else ""

    return ReportColumn(
        title, lambda row: format_percent_html(getattr(row, part), getattr(row, whole)), plain
    )


def _make_wait_column(title: str, name: str) -> ReportColumn:
    """Define a column of wait times."""

    def plain(row: Any) -> str:
        wait_s = getattr(row, name)
        return "" if wait_s is None else str(wait_s)

    return ReportColumn(title, lambda row: format_duration_html(getattr(row, name)), plain)


def _make_user_column() -> ReportColumn:
    """Define the column of the user name, or the uid."""

    def text(row: Any) -> str:
        return row.user or ("" if row.uid is None else str(row.uid))

    return ReportColumn("User", text, text, is_number=False, link="users")


def _make_size_column() -> ReportColumn:
    """Define the column of a range of CPU counts."""

    def text(row: Any) -> str:
        return f"{row.least_cpus}-{row.most_cpus or ''}" if row.least_cpus else ""

    return ReportColumn("CPUs", text, text, is_optional=True)


_USAGE_COLUMNS: Final = (
    _make_count_column("Jobs", "jobs"),
    _make_hours_column("CPU hours", "cpu_s"),
    _make_hours_column("GPU hours", "gpu_s", is_optional=True),
    _make_hours_column("Node hours", "node_s"),
)
_WAIT_COLUMNS: Final = (
    _make_count_column("Started", "started"),
    _make_wait_column("Median wait", "median_s"),
    _make_wait_column("90 % waited less than", "p90_s"),
    _make_wait_column("Longest wait", "longest_s"),
)

REPORT_KINDS: Final[dict[str, ReportKind]] = {
    kind.name: kind
    for kind in (
        ReportKind(
            name="cluster",
            title="What the cluster did",
            says="What its CPUs and GPUs did, in hours, as 'sreport cluster Utilization' tells it.",
            request=ClusterRequest,
            columns=(
                _make_count_column("Jobs", "jobs"),
                _make_hours_column("Allocated", "allocated_cpu_s"),
                _make_hours_column("Down", "down_cpu_s"),
                _make_hours_column("Planned down", "planned_down_cpu_s"),
                _make_hours_column("Idle", "idle_cpu_s"),
                _make_hours_column("Planned", "planned_cpu_s"),
                _make_hours_column("Reported", "reported_cpu_s"),
                _make_share_column("Used", "allocated_cpu_s", "reported_cpu_s"),
                _make_hours_column("GPUs allocated", "allocated_gpu_s", is_optional=True),
                _make_hours_column("GPUs idle", "idle_gpu_s", is_optional=True),
                _make_share_column("GPUs used", "allocated_gpu_s", "reported_gpu_s"),
            ),
            plot="allocated_cpu_s",
            of_jobs=False,
        ),
        ReportKind(
            name="accounts",
            title="Who used what",
            says="Each account in all, then its users.",
            request=AccountsRequest,
            columns=(
                _make_text_column("Account", "account", "accounts"),
                _make_user_column(),
                *_USAGE_COLUMNS,
            ),
            plot="cpu_s",
        ),
        ReportKind(
            name="users",
            title="Who used most",
            says="Users, the ones who used most first.",
            request=UsersRequest,
            columns=(
                _make_user_column(),
                *_USAGE_COLUMNS,
                _make_count_column("Completed", "completed"),
                _make_count_column("Failed", "failed"),
            ),
            plot="cpu_s",
        ),
        ReportKind(
            name="partitions",
            title="Partitions",
            says="What was used of each, and how long jobs waited for it.",
            request=PartitionUsageRequest,
            columns=(
                _make_text_column("Partition", "partition", "partitions"),
                *_USAGE_COLUMNS,
                *_WAIT_COLUMNS,
            ),
            plot="cpu_s",
        ),
        ReportKind(
            name="waits",
            title="How long jobs waited",
            says="From when they might have begun until they did.",
            request=WaitsRequest,
            columns=(
                _make_text_column("Partition", "partition", "partitions"),
                _make_size_column(),
                *_WAIT_COLUMNS,
            ),
            plot="median_s",
        ),
        ReportKind(
            name="jobs",
            title="Jobs by state and size",
            says="How many there were, by account, size and the state in which they ended.",
            request=JobCountsRequest,
            columns=(
                _make_text_column("Account", "account", "accounts"),
                _make_size_column(),
                _make_text_column("State", "state"),
                _make_count_column("Jobs", "jobs"),
                _make_hours_column("CPU hours", "cpu_s"),
                _make_hours_column("GPU hours", "gpu_s", is_optional=True),
            ),
            plot="jobs",
        ),
        ReportKind(
            name="waste",
            title="Asked for and not used",
            says="Of jobs that ended: how much of their CPUs, memory and time limit they used.",
            request=WasteRequest,
            columns=(
                _make_text_column("Account", "account", "accounts"),
                _make_user_column(),
                _make_count_column("Jobs", "jobs"),
                _make_hours_column("CPU hours", "cpu_s"),
                _make_share_column("CPUs used", "used_cpu_s", "cpu_s"),
                _make_share_column("Memory used", "used_memory_byte_s", "memory_byte_s"),
                _make_share_column("Time limit used", "elapsed_s", "limit_s"),
            ),
            plot="cpu_s",
        ),
    )
}
"""Reports by name, in display order."""


def select_columns(kind: ReportKind, rows: Sequence[Any]) -> list[ReportColumn]:
    """Return the columns of a table without the empty optional ones."""
    empty_texts = ("", "0.0", format_number_html(None))
    return [
        column
        for column in kind.columns
        if not column.is_optional or any(column.text(row) not in empty_texts for row in rows)
    ]


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
    columns = select_columns(kind, rows)
    file_format = query.read_text(request, "form")
    if file_format in ("csv", "json"):
        return _download_report(reply, kind, columns, file_format)
    return pages.render_page_or_part(
        "report_table.html",
        auth,
        **context,
        answer=reply,
        rows=rows[:_MOST_ROWS],
        more=max(0, len(rows) - _MOST_ROWS),
        columns=columns,
        several=len({row.cluster for row in rows}) > 1,
        plot=_plot_report(kind, reply, rows),
    )


def _find_report(name: str) -> ReportKind:
    """Return a report by name, or fail."""
    if name not in REPORT_KINDS:
        raise PageNotFound(f"there is no report {name[:60]!r}, but {', '.join(REPORT_KINDS)}")
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
    return kind.request(**{**fields, "by": cast("PeriodLength", fields["by"])})


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


def _download_report(
    reply: ReportReply, kind: ReportKind, columns: Sequence[ReportColumn], file_format: str
) -> Response[Any]:
    """Return a report as a CSV or JSON file."""
    headers = {"Content-Disposition": f'attachment; filename="report-{kind.name}.{file_format}"'}
    if file_format == "json":
        return Response(msgspec.json.encode(reply), media_type="application/json", headers=headers)
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(["Period", "Cluster", *(column.title for column in columns)])
    for row in reply.rows:
        cells = [reply.periods[row.period].label or "all", row.cluster]
        cells += [column.plain(row) for column in columns]
        writer.writerow([quote_formula(escape_line(cell)) for cell in cells])
    return Response(buffer.getvalue(), media_type="text/csv", headers=headers)


ROUTES: Final = (reports, report, table)
