"""Report pages: usage, capacity, wait times and waste, as tables, plots, CSV or JSON.

``KINDS`` defines the reports: the action's request, the columns and the plotted value. The handlers
show the list, the form of a report, and its table, loaded separately because it may take a while.
"""

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import msgspec
from litestar import Request, Response, get
from litestar.params import FromPath

from steward.core.printable import no_formula, safe
from steward.reports.requests import (
    AccountsRequest,
    By,
    ClusterRequest,
    JobsRequest,
    PartitionsRequest,
    ReportAnswer,
    ReportRequest,
    Row,
    UsersRequest,
    WaitsRequest,
    WasteRequest,
)
from steward.web import query
from steward.web.authentication import Visit
from steward.web.errors import NoSuchPage
from steward.web.formats import duration, number, percent
from steward.web.rendering import Plot, Renderer

_HOUR_S: Final = 3600


class Column(msgspec.Struct, frozen=True):
    """A column of a report.

    Attributes:
        title: Heading.
        text: Formats a row for people.
        plain: Formats a row for programs.
        is_number: Whether it holds numbers.
        link: Page that a cell links to: ``users``, ``accounts``, ``partitions``; "" for none.
        is_odd: Whether to omit it if it is empty in every row.
    """

    title: str
    text: Callable[[Any], str]
    plain: Callable[[Any], str]
    is_number: bool = True
    link: str = ""
    is_odd: bool = False


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Definition of a report.

    Attributes:
        name: Name in its address.
        title: Title for people.
        says: Explanation.
        request: Request type of its action.
        columns: Columns of its table.
        plot: Row attribute that is plotted by period, or by row if there is one period.
        of_jobs: Whether it can be filtered by account, user and partition.
    """

    name: str
    title: str
    says: str
    request: type[ReportRequest]
    columns: Sequence[Column]
    plot: str
    of_jobs: bool = True


def _word(title: str, name: str, link: str = "") -> Column:
    """Define a column of text, optionally with links."""

    def text(row: Any) -> str:
        return str(getattr(row, name))

    return Column(title, text, text, is_number=False, link=link)


def _count(title: str, name: str) -> Column:
    """Define a column of numbers."""

    def plain(row: Any) -> str:
        return str(getattr(row, name))

    return Column(title, lambda row: number(getattr(row, name)), plain)


def _hours(title: str, name: str, *, is_odd: bool = False) -> Column:
    """Define a column of resource time, converted from seconds to hours."""

    def text(row: Any) -> str:
        seconds = getattr(row, name)
        return number(None if seconds is None else seconds / _HOUR_S, 1)

    def plain(row: Any) -> str:
        seconds = getattr(row, name)
        return "" if seconds is None else f"{seconds / _HOUR_S:.3f}"

    return Column(title, text, plain, is_odd=is_odd)


def _share(title: str, part: str, whole: str) -> Column:
    """Define a column of percentages: one attribute over another."""

    def plain(row: Any) -> str:
        of, all_of = getattr(row, part), getattr(row, whole)
        return f"{of / all_of:.4f}" if of is not None and all_of else ""

    return Column(title, lambda row: percent(getattr(row, part), getattr(row, whole)), plain)


def _wait(title: str, name: str) -> Column:
    """Define a column of wait times."""

    def plain(row: Any) -> str:
        found = getattr(row, name)
        return "" if found is None else str(found)

    return Column(title, lambda row: duration(getattr(row, name)), plain)


def _user() -> Column:
    """Define the column of the user name, or the uid."""

    def text(row: Any) -> str:
        return row.user or ("" if row.uid is None else str(row.uid))

    return Column("User", text, text, is_number=False, link="users")


def _size() -> Column:
    """Define the column of a range of CPU counts."""

    def text(row: Any) -> str:
        return f"{row.least_cpus}-{row.most_cpus or ''}" if row.least_cpus else ""

    return Column("CPUs", text, text, is_odd=True)


_USED: Final = (
    _count("Jobs", "jobs"),
    _hours("CPU hours", "cpu_s"),
    _hours("GPU hours", "gpu_s", is_odd=True),
    _hours("Node hours", "node_s"),
)
_WAITED: Final = (
    _count("Started", "started"),
    _wait("Median wait", "median_s"),
    _wait("90 % waited less than", "p90_s"),
    _wait("Longest wait", "longest_s"),
)

KINDS: Final[dict[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind(
            name="cluster",
            title="What the cluster did",
            says="What its CPUs and GPUs did, in hours, as 'sreport cluster Utilization' tells it.",
            request=ClusterRequest,
            columns=(
                _count("Jobs", "jobs"),
                _hours("Allocated", "allocated_cpu_s"),
                _hours("Down", "down_cpu_s"),
                _hours("Planned down", "planned_down_cpu_s"),
                _hours("Idle", "idle_cpu_s"),
                _hours("Planned", "planned_cpu_s"),
                _hours("Reported", "reported_cpu_s"),
                _share("Used", "allocated_cpu_s", "reported_cpu_s"),
                _hours("GPUs allocated", "allocated_gpu_s", is_odd=True),
                _hours("GPUs idle", "idle_gpu_s", is_odd=True),
                _share("GPUs used", "allocated_gpu_s", "reported_gpu_s"),
            ),
            plot="allocated_cpu_s",
            of_jobs=False,
        ),
        Kind(
            name="accounts",
            title="Who used what",
            says="Each account in all, then its users.",
            request=AccountsRequest,
            columns=(_word("Account", "account", "accounts"), _user(), *_USED),
            plot="cpu_s",
        ),
        Kind(
            name="users",
            title="Who used most",
            says="Users, the ones who used most first.",
            request=UsersRequest,
            columns=(
                _user(),
                *_USED,
                _count("Completed", "completed"),
                _count("Failed", "failed"),
            ),
            plot="cpu_s",
        ),
        Kind(
            name="partitions",
            title="Partitions",
            says="What was used of each, and how long jobs waited for it.",
            request=PartitionsRequest,
            columns=(_word("Partition", "partition", "partitions"), *_USED, *_WAITED),
            plot="cpu_s",
        ),
        Kind(
            name="waits",
            title="How long jobs waited",
            says="From when they might have begun until they did.",
            request=WaitsRequest,
            columns=(_word("Partition", "partition", "partitions"), _size(), *_WAITED),
            plot="median_s",
        ),
        Kind(
            name="jobs",
            title="Jobs by state and size",
            says="How many there were, by account, size and the state in which they ended.",
            request=JobsRequest,
            columns=(
                _word("Account", "account", "accounts"),
                _size(),
                _word("State", "state"),
                _count("Jobs", "jobs"),
                _hours("CPU hours", "cpu_s"),
                _hours("GPU hours", "gpu_s", is_odd=True),
            ),
            plot="jobs",
        ),
        Kind(
            name="waste",
            title="Asked for and not used",
            says="Of jobs that ended: how much of their CPUs, memory and time limit they used.",
            request=WasteRequest,
            columns=(
                _word("Account", "account", "accounts"),
                _user(),
                _count("Jobs", "jobs"),
                _hours("CPU hours", "cpu_s"),
                _share("CPUs used", "used_cpu_s", "cpu_s"),
                _share("Memory used", "used_memory_byte_s", "memory_byte_s"),
                _share("Time limit used", "elapsed_s", "limit_s"),
            ),
            plot="cpu_s",
        ),
    )
}
"""Reports by name, in display order."""


def shown_columns(kind: Kind, rows: Sequence[Any]) -> list[Column]:
    """Return the columns of a table without the empty optional ones."""
    nothing = ("", "0.0", number(None))
    return [
        column
        for column in kind.columns
        if not column.is_odd or any(column.text(row) not in nothing for row in rows)
    ]


Ask = Request[Any, Any, Any]
_MOST_ROWS: Final = 500
"""Most rows shown of a report."""
_MOST_BARS: Final = 40
"""Most bars of a plot."""
_BY: Final = ("", "day", "week", "month")


@get("/reports", include_in_schema=False)
async def reports(visit: Visit, pages: Renderer) -> Response[Any]:
    """List the reports."""
    return pages.page("reports.html", visit, here="/reports", kinds=KINDS)


@get("/reports/{name:str}", include_in_schema=False)
async def report(request: Ask, visit: Visit, pages: Renderer, name: FromPath[str]) -> Response[Any]:
    """Show a report's form; its table loads separately, since it may take a while."""
    kind = _kind(name)
    return pages.page("report.html", visit, **_asked(request, kind))


@get("/reports/{name:str}/table", include_in_schema=False)
async def table(request: Ask, visit: Visit, pages: Renderer, name: FromPath[str]) -> Response[Any]:
    """Return a report's table and plot, or a download of it."""
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
    """Return a report by name, or fail."""
    if name not in KINDS:
        raise NoSuchPage(f"there is no report {name[:60]!r}, but {', '.join(KINDS)}")
    return KINDS[name]


def _asked(request: Ask, kind: Kind) -> dict[str, Any]:
    """Read the form of a report, with defaults."""
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
    """Build the request of a report."""
    fields = asked["asked"]
    return kind.request(**{**fields, "by": cast("By", fields["by"])})


def _plot(kind: Kind, answer: ReportAnswer, rows: Sequence[Row]) -> Plot | None:
    """Plot the totals of periods over time; None if there is only one period."""
    if len(answer.periods) < 2:
        return None
    sums = [0.0] * len(answer.periods)
    for row in rows:
        # An account's total row precedes its users' rows: count only the total.
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
    """Return a report as a CSV or JSON file."""
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
