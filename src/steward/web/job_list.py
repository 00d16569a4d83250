"""Job list page: columns, and the view (filters, order, page) that its address encodes.

``COLUMNS`` defines how a row of ``accounting.jobs`` is shown. :class:`View` parses an address,
builds addresses of changed views, and the requests for the list, the counts by state and the script
search. ``pages/jobs.py`` uses it.
"""

import shlex
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, Self, get_args

import msgspec
from litestar import Request
from markupsafe import Markup, escape

from steward.accounting.job_list_requests import JobRow, JobsRequest, JobStatesRequest
from steward.accounting.job_page.wording import exit_word
from steward.archive.requests import SearchRequest
from steward.core.errors import UsageError
from steward.core.printable import safe
from steward.jobs.queries import Order
from steward.web import query
from steward.web.formats import amount, duration, number, percent, size, state, when


class Shown(msgspec.Struct, frozen=True):
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


Cell = Callable[[JobRow, Shown], Markup | str]
"""Formats one value of a row as text or HTML."""


class Column(msgspec.Struct, frozen=True):
    """A column of the job list.

    Attributes:
        key: Name in an address.
        title: Heading.
        cell: Formats the value of a row.
        is_number: Whether to align values to the right.
        of_bank: Whether the column needs a bank.
    """

    key: str
    title: str
    cell: Cell
    is_number: bool = False
    of_bank: bool = False


def _time(value: Callable[[JobRow], datetime | None]) -> Cell:
    """Return a cell function for a time, in the cluster's zone."""
    return lambda row, shown: when(value(row), shown.zones.get(row.cluster, ""))


def _states(row: JobRow, shown: Shown) -> Markup:  # noqa: ARG001 -- a cell's shape
    """Show a job's state, or the number of array tasks by state."""
    if not row.tasks:
        return state(safe(row.state) or "UNVERIFIED" * (not row.verified) or "UNKNOWN")
    one = Markup("<span>{} {}</span>")
    parts = [one.format(number(count), state(safe(word))) for word, count in row.tasks.items()]
    return Markup('<span class="tasks">{}</span>').format(Markup(" ").join(parts))


def _limit(row: JobRow, shown: Shown) -> str:  # noqa: ARG001 -- a cell's shape
    """Show a job's time limit."""
    return duration(row.limit_s) if row.limit_s else ""


def _cost(row: JobRow, shown: Shown) -> str:
    """Show a job's charge."""
    found = shown.costs.get((row.cluster, row.job_id))
    return "" if found is None else amount(found, "", shown.decimals)


def _text(value: Callable[[JobRow], str]) -> Cell:
    """Return a cell function for text, HTML-escaped."""
    return lambda row, _: escape(safe(value(row)))


COLUMNS: Final = {
    column.key: column
    for column in (
        Column("cluster", "Cluster", _text(lambda row: row.cluster)),
        Column("name", "Name", _text(lambda row: row.name)),
        Column("user", "User", _text(lambda row: row.user or str(row.uid or ""))),
        Column("account", "Account", _text(lambda row: row.account)),
        Column("partition", "Partition", _text(lambda row: row.partition)),
        Column("qos", "QOS", _text(lambda row: row.qos)),
        Column("state", "State", _states),
        Column("reason", "Reason", _text(lambda row: row.reason)),
        Column("submit", "Submitted", _time(lambda row: row.submit)),
        Column("eligible", "Eligible", _time(lambda row: row.eligible)),
        Column("start", "Started", _time(lambda row: row.start)),
        Column("end", "Ended", _time(lambda row: row.end)),
        Column("waited", "Waited", lambda row, _: _lasted(row.waited_s), is_number=True),
        Column("elapsed", "Elapsed", lambda row, _: _lasted(row.elapsed_s), is_number=True),
        Column("limit", "Time limit", _limit, is_number=True),
        Column("nodes", "Nodes", lambda row, _: _count(row.nodes), is_number=True),
        Column("nodelist", "Node list", _text(lambda row: row.nodelist)),
        Column("cpus", "CPUs", lambda row, _: _count(row.cpus), is_number=True),
        Column("memory", "Memory", lambda row, _: _size(row.memory_bytes), is_number=True),
        Column("tres", "TRES", _text(lambda row: row.tres)),
        Column("cpu", "CPU used", lambda row, _: _share(row.cpu), is_number=True),
        Column("cputime", "CPU time", lambda row, _: _lasted(row.cpu_used_s), is_number=True),
        Column("peak", "Memory peak", lambda row, _: _size(row.peak_bytes), is_number=True),
        Column("memused", "Memory used", lambda row, _: _share(row.memory), is_number=True),
        Column(
            "exit",
            "Exit",
            lambda row, _: "" if row.tasks else exit_word(row.exit_code, row.exit_signal),
            is_number=True,
        ),
        Column("restarts", "Restarts", lambda row, _: _count(row.restarts or None), is_number=True),
        Column("cost", "Cost", _cost, is_number=True, of_bank=True),
    )
}
"""All columns except the job's own, in display order."""

USUAL: Final = (
    *("name", "user", "account", "partition", "state", "submit"),
    *("elapsed", "cpus", "cpu", "peak"),
)
"""Default columns."""


def _lasted(seconds: float | None) -> str:
    """Format seconds as a duration; "" for None."""
    return "" if seconds is None else duration(seconds)


def _count(value: int | None) -> str:
    return "" if value is None else number(value)


def _size(value: int | None) -> str:
    return "" if value is None else size(value)


def _share(value: float | None) -> str:
    """Format a share as a percentage; "" for None."""
    return "" if value is None else percent(value)


ROWS: Final = 50
"""Rows of a page by default."""
MOST_ROWS: Final = 1000
"""Most rows of a page."""
_ORDERS: Final = get_args(Order)
_LISTS: Final = ("clusters", "users", "accounts", "partitions", "states", "jobs")
_TEXTS: Final = ("since", "until")


class View(msgspec.Struct, frozen=True, kw_only=True):
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
    rows: int = ROWS

    @classmethod
    def of(cls, request: Request[Any, Any, Any]) -> Self:
        """Parse the view from the address of a request.

        Raises:
            UsageError: The query is invalid.
        """
        order = query.text(request, "order", "-submit")
        if order not in _ORDERS:
            raise UsageError(f"jobs are ordered by {', '.join(_ORDERS)}, not {order[:60]!r}", order)
        # Job names may contain commas.
        names = tuple(
            str(name).strip() for name in request.query_params.getall("names", []) if name
        )
        given: dict[str, Any] = {name: query.words(request, name) for name in _LISTS}
        given |= {name: query.text(request, name) for name in (*_TEXTS, "text")}
        return cls(
            **given,
            names=tuple(filter(None, names)),
            case=query.switch(request, "case"),
            words=query.switch(request, "words"),
            order=msgspec.convert(order, Order),
            columns=tuple(key for key in query.words(request, "columns") if key in COLUMNS),
            apart=query.text(request, "arrays") == "apart",
            page=str(request.query_params.get("page", "")),
            rows=max(1, min(query.number(request, "rows", ROWS), MOST_ROWS)),
        )

    def query(self, **changes: Any) -> dict[str, Any]:
        """Return the query parameters of this view with changed attributes.

        Defaults are omitted to keep addresses short.
        """
        view = msgspec.structs.replace(self, **changes)
        found: dict[str, Any] = {name: ",".join(getattr(view, name)) for name in _LISTS}
        found |= {name: getattr(view, name) for name in (*_TEXTS, "names", "text", "page")}
        found["order"] = view.order if view.order != "-submit" else ""
        found["columns"] = ",".join(view.columns) if view.columns != USUAL else ""
        found["case"] = "1" if view.case else ""
        found["words"] = "1" if view.words else ""
        found["arrays"] = "apart" if view.apart else ""
        found["rows"] = view.rows if view.rows != ROWS else ""
        return found

    def shown(self, *, several_clusters: bool, bank: bool) -> tuple[Column, ...]:
        """Return the columns to show, in display order.

        Args:
            several_clusters: Whether there are several clusters, so that the cluster is shown.
            bank: Whether there is a bank.
        """
        chosen = set(self.columns or USUAL)
        if several_clusters and not self.columns:
            chosen.add("cluster")
        return tuple(
            column
            for key, column in COLUMNS.items()
            if key in chosen and (bank or not column.of_bank)
        )

    def listed(self) -> JobsRequest:
        """Return the request for the rows of this view."""
        return JobsRequest(
            **self._selection(),
            order=self.order,
            arrays="apart" if self.apart else "together",
            limit=self.rows,
            page=self.page,
        )

    def counted(self) -> JobStatesRequest:
        """Return the request for the number of jobs in each state."""
        return JobStatesRequest(**self._selection())

    def searched(self) -> SearchRequest:
        """Return the request for a search in scripts."""
        return SearchRequest(
            **self._selection(),
            terms=terms_of(self.text),
            case=self.case,
            words=self.words,
            limit=min(self.rows, ROWS),
            page=self.page,
        )

    def _selection(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_LISTS, *_TEXTS, "names")}


def terms_of(text: str) -> tuple[str, ...]:
    """Split a text into search terms; quoted phrases stay whole.

    An unclosed quote makes the whole text one term.
    """
    try:
        found = shlex.split(text)
    except ValueError:
        found = []
    return tuple(filter(None, found)) or (text,)
