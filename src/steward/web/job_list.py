"""Job list page: columns, and the view (filters, order, page) that its address encodes.

``COLUMNS`` are those of the reply to ``accounting.jobs``, and the charge. :class:`JobListView`
parses an address, builds addresses of changed views, and the requests for the list, the counts by
state and the script search. ``pages/jobs.py`` uses it.
"""

import shlex
from collections.abc import Mapping
from typing import Any, Final, Self, get_args

import msgspec
from litestar import Request

from steward.accounting.job_list_requests import JobRow, JobsAnswer, JobsRequest, JobStatesRequest
from steward.archive.requests import SearchRequest
from steward.core.errors import UsageError
from steward.core.layouts import Column
from steward.jobs.queries import Order
from steward.web import query
from steward.web.formats import format_amount_html

COST_COLUMN: Final = Column("Cost", lambda *_: "", "money", show="requested")
"""Column of charges; the page replaces its value, which is not in the reply."""
COLUMNS: Final = {
    column.name.lower(): column for column in (*JobsAnswer.layout, COST_COLUMN) if not column.is_key
}
"""All columns except the job's own, by key in an address, in display order."""
JOB_COLUMN: Final = next(column for column in JobsAnswer.layout if column.is_key)
"""The job's own column, always shown first."""
DEFAULT_COLUMNS: Final = tuple(key for key, column in COLUMNS.items() if column.show == "always")
"""Keys of the default columns."""


def make_cost_column(costs: Mapping[tuple[str, int], int], decimals: int) -> Column:
    """Return the column of charges.

    Args:
        costs: Charge of a job in micro-SU, by cluster and raw job id.
        decimals: Number of decimals shown.
    """

    def format_cost(row: JobRow, _: object) -> str:
        cost = costs.get((row.cluster, row.job_id))
        return "" if cost is None else format_amount_html(cost, "", decimals)

    return msgspec.structs.replace(COST_COLUMN, value=format_cost)


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
            raise UsageError(
                f"unknown order {order[:60]!r}: use one of {', '.join(_ORDERS)}", order
            )
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

    def choose_columns(self, *, several_clusters: bool, has_bank: bool) -> tuple[Column, ...]:
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
            if key in chosen_keys and (has_bank or column is not COST_COLUMN)
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
