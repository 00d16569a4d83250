"""Job list page: columns, and the view (filters, order, page) that its address encodes.

``COLUMNS`` defines how a row of ``accounting.jobs`` is shown. :class:`JobListView` parses an
address, builds addresses of changed views, and the requests for the list, the counts by state and
the script search. ``pages/jobs.py`` uses it.
"""

import shlex
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, Self, get_args

import msgspec
from litestar import Request
from markupsafe import Markup, escape

from steward.accounting.job_list_requests import JobRow, JobsRequest, JobStatesRequest
from steward.accounting.job_page.phrases import describe_exit
from steward.archive.requests import SearchRequest
from steward.core.errors import UsageError
from steward.core.printable import escape_line
from steward.jobs.queries import Order
from steward.web import query
from steward.web.formats import (
    format_amount_html,
    format_duration_html,
    format_number_html,
    format_percent_html,
    format_size_html,
    format_state_html,
    format_time_html,
)


class CellContext(msgspec.Struct, frozen=True):
    """Data beside a row that cells need: time zones and charges.

    Attributes:
        zones: Time zone of each cluster.
        costs: Charge of a job in micro-SU, by cluster and raw job id.
        unit: Name of the bank's unit.
        decimals: Number of decimals shown.
    """

    zones: dict[str, str]
    costs: dict[tuple[str, int], int] = {}
    unit: str = ""
    decimals: int = 2


JobCell = Callable[[JobRow, CellContext], Markup | str]
"""Formats one value of a row as text or HTML."""


class JobColumn(msgspec.Struct, frozen=True):
    """A column of the job list.

    Attributes:
        key: Name in an address.
        title: Heading.
        cell: Formats the value of a row.
        is_number: Whether to align values to the right.
        needs_bank: Whether the column needs a bank.
    """

    key: str
    title: str
    cell: JobCell
    is_number: bool = False
    needs_bank: bool = False


def _make_time_cell(get_time: Callable[[JobRow], datetime | None]) -> JobCell:
    """Return a cell function for a time, in the cluster's zone."""
    return lambda row, context: format_time_html(get_time(row), context.zones.get(row.cluster, ""))


def _make_state_cell(row: JobRow, context: CellContext) -> Markup:  # noqa: ARG001 -- a cell's shape
    """Show a job's state, or the number of array tasks by state."""
    if not row.tasks:
        return format_state_html(
            escape_line(row.state) or "UNVERIFIED" * (not row.verified) or "UNKNOWN"
        )
    template = Markup("<span>{} {}</span>")
    parts = [
        template.format(format_number_html(count), format_state_html(escape_line(state)))
        for state, count in row.tasks.items()
    ]
    return Markup('<span class="tasks">{}</span>').format(Markup(" ").join(parts))


def _make_limit_cell(row: JobRow, context: CellContext) -> str:  # noqa: ARG001 -- a cell's shape
    """Show a job's time limit."""
    return format_duration_html(row.limit_s) if row.limit_s else ""


def _make_cost_cell(row: JobRow, context: CellContext) -> str:
    """Show a job's charge."""
    cost = context.costs.get((row.cluster, row.job_id))
    return "" if cost is None else format_amount_html(cost, "", context.decimals)


def _make_text_cell(get_text: Callable[[JobRow], str]) -> JobCell:
    """Return a cell function for text, HTML-escaped."""
    return lambda row, _: escape(escape_line(get_text(row)))


COLUMNS: Final = {
    column.key: column
    for column in (
        JobColumn("cluster", "Cluster", _make_text_cell(lambda row: row.cluster)),
        JobColumn("name", "Name", _make_text_cell(lambda row: row.name)),
        JobColumn("user", "User", _make_text_cell(lambda row: row.user or str(row.uid or ""))),
        JobColumn("account", "Account", _make_text_cell(lambda row: row.account)),
        JobColumn("partition", "Partition", _make_text_cell(lambda row: row.partition)),
        JobColumn("qos", "QOS", _make_text_cell(lambda row: row.qos)),
        JobColumn("state", "State", _make_state_cell),
        JobColumn("reason", "Reason", _make_text_cell(lambda row: row.reason)),
        JobColumn("submit", "Submitted", _make_time_cell(lambda row: row.submit)),
        JobColumn("eligible", "Eligible", _make_time_cell(lambda row: row.eligible)),
        JobColumn("start", "Started", _make_time_cell(lambda row: row.start)),
        JobColumn("end", "Ended", _make_time_cell(lambda row: row.end)),
        JobColumn("waited", "Waited", lambda row, _: _format_elapsed(row.waited_s), is_number=True),
        JobColumn(
            "elapsed", "Elapsed", lambda row, _: _format_elapsed(row.elapsed_s), is_number=True
        ),
        JobColumn("limit", "Time limit", _make_limit_cell, is_number=True),
        JobColumn(
            "nodes", "Nodes", lambda row, _: _format_count_or_empty(row.nodes), is_number=True
        ),
        JobColumn("nodelist", "Node list", _make_text_cell(lambda row: row.nodelist)),
        JobColumn("cpus", "CPUs", lambda row, _: _format_count_or_empty(row.cpus), is_number=True),
        JobColumn(
            "memory", "Memory", lambda row, _: _format_memory(row.memory_bytes), is_number=True
        ),
        JobColumn("tres", "TRES", _make_text_cell(lambda row: row.tres)),
        JobColumn(
            "cpu", "CPU used", lambda row, _: _format_share_or_empty(row.cpu), is_number=True
        ),
        JobColumn(
            "cputime", "CPU time", lambda row, _: _format_elapsed(row.cpu_used_s), is_number=True
        ),
        JobColumn(
            "peak", "Memory peak", lambda row, _: _format_memory(row.peak_bytes), is_number=True
        ),
        JobColumn(
            "memused",
            "Memory used",
            lambda row, _: _format_share_or_empty(row.memory),
            is_number=True,
        ),
        JobColumn(
            "exit",
            "Exit",
            lambda row, _: "" if row.tasks else describe_exit(row.exit_code, row.exit_signal),
            is_number=True,
        ),
        JobColumn(
            "restarts",
            "Restarts",
            lambda row, _: _format_count_or_empty(row.restarts or None),
            is_number=True,
        ),
        JobColumn("cost", "Cost", _make_cost_cell, is_number=True, needs_bank=True),
    )
}
"""All columns except the job's own, in display order."""

DEFAULT_COLUMNS: Final = (
    *("name", "user", "account", "partition", "state", "submit"),
    *("elapsed", "cpus", "cpu", "peak"),
)
"""Default columns."""


def _format_elapsed(seconds: float | None) -> str:
    """Format seconds as a duration; "" for None."""
    return "" if seconds is None else format_duration_html(seconds)


def _format_count_or_empty(value: int | None) -> str:
    return "" if value is None else format_number_html(value)


def _format_memory(value: int | None) -> str:
    return "" if value is None else format_size_html(value)


def _format_share_or_empty(value: float | None) -> str:
    """Format a share as a percentage; "" for None."""
    return "" if value is None else format_percent_html(value)


DEFAULT_ROWS: Final = 50
"""Rows of a page by default."""
MOST_ROWS: Final = 1000
"""Most rows of a page."""
_ORDERS: Final = get_args(Order)
_LISTS: Final = ("clusters", "users", "accounts", "partitions", "states", "jobs")
_TEXTS: Final = ("since", "until")


class JobListView(msgspec.Struct, frozen=True, kw_only=True):
    """Filters, order, columns and page of a job list, as its address encodes them.

    Attributes:
        text: Text to find in scripts: words, or phrases in quotes; "" to list jobs.
        case: Whether the search distinguishes upper and lower case.
        words: Whether only whole words match.
        columns: Keys of the columns; empty for the default ones.
        apart: Whether array tasks are separate rows.
        page: Cursor of the page, from a reply; "" for the first page.
        rows: Number of rows: as many as the user had loaded before leaving the page.
    """

    clusters: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    since: str = ""
    until: str = ""
    text: str = ""
    case: bool = False
    words: bool = False
    order: Order = "-submit"
    columns: tuple[str, ...] = ()
    apart: bool = False
    page: str = ""
    rows: int = DEFAULT_ROWS

    @classmethod
    def parse(cls, request: Request[Any, Any, Any]) -> Self:
        """Parse the view from the address of a request.

        Raises:
            UsageError: The query is invalid.
        """
        order = query.read_text(request, "order", "-submit")
        if order not in _ORDERS:
            raise UsageError(f"jobs are ordered by {', '.join(_ORDERS)}, not {order[:60]!r}", order)
        # Job names may contain commas.
        names = tuple(
            str(name).strip() for name in request.query_params.getall("names", []) if name
        )
        fields: dict[str, Any] = {name: query.read_words(request, name) for name in _LISTS}
        fields |= {name: query.read_text(request, name) for name in (*_TEXTS, "text")}
        return cls(
            **fields,
            names=tuple(filter(None, names)),
            case=query.read_switch(request, "case"),
            words=query.read_switch(request, "words"),
            order=msgspec.convert(order, Order),
            columns=tuple(key for key in query.read_words(request, "columns") if key in COLUMNS),
            apart=query.read_text(request, "arrays") == "apart",
            page=str(request.query_params.get("page", "")),
            rows=max(1, min(query.read_number(request, "rows", DEFAULT_ROWS), MOST_ROWS)),
        )

    def query(self, **changes: Any) -> dict[str, Any]:
        """Return the query parameters of this view with changed attributes.

        Defaults are omitted to keep addresses short.
        """
        view = msgspec.structs.replace(self, **changes)
        parameters: dict[str, Any] = {name: ",".join(getattr(view, name)) for name in _LISTS}
        parameters |= {name: getattr(view, name) for name in (*_TEXTS, "names", "text", "page")}
        parameters["order"] = view.order if view.order != "-submit" else ""
        parameters["columns"] = ",".join(view.columns) if view.columns != DEFAULT_COLUMNS else ""
        parameters["case"] = "1" if view.case else ""
        parameters["words"] = "1" if view.words else ""
        parameters["arrays"] = "apart" if view.apart else ""
        parameters["rows"] = view.rows if view.rows != DEFAULT_ROWS else ""
        return parameters

    def choose_columns(self, *, several_clusters: bool, has_bank: bool) -> tuple[JobColumn, ...]:
        """Return the columns to show, in display order.

        Args:
            several_clusters: Whether there are several clusters, so that the cluster is shown.
            has_bank: Whether there is a bank.
        """
        chosen_keys = set(self.columns or DEFAULT_COLUMNS)
        if several_clusters and not self.columns:
            chosen_keys.add("cluster")
        return tuple(
            column
            for key, column in COLUMNS.items()
            if key in chosen_keys and (has_bank or not column.needs_bank)
        )

    def make_jobs_request(self) -> JobsRequest:
        """Return the request for the rows of this view."""
        return JobsRequest(
            **self._select_fields(),
            order=self.order,
            arrays="apart" if self.apart else "together",
            limit=self.rows,
            page=self.page,
        )

    def make_counts_request(self) -> JobStatesRequest:
        """Return the request for the number of jobs in each state."""
        return JobStatesRequest(**self._select_fields())

    def make_search_request(self) -> SearchRequest:
        """Return the request for a search in scripts."""
        return SearchRequest(
            **self._select_fields(),
            terms=split_terms(self.text),
            case=self.case,
            words=self.words,
            limit=min(self.rows, DEFAULT_ROWS),
            page=self.page,
        )

    def _select_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_LISTS, *_TEXTS, "names")}


def split_terms(text: str) -> tuple[str, ...]:
    """Split a text into search terms; quoted phrases stay whole.

    An unclosed quote makes the whole text one term.
    """
    try:
        terms = shlex.split(text)
    except ValueError:
        terms = []
    return tuple(filter(None, terms)) or (text,)
