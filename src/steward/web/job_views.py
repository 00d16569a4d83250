"""A view of jobs is its address: filters, order and columns, all behind the question mark."""

import shlex
from typing import Any, Final, Self, get_args

import msgspec
from litestar import Request

from steward.accounting.listing.shapes import JobsRequest, JobStatesRequest
from steward.archive.answers import SearchRequest
from steward.core.errors import UsageError
from steward.jobs.listing import Order
from steward.web import query
from steward.web.job_columns import COLUMNS, USUAL, Column

ROWS: Final = 50
MOST_ROWS: Final = 1000
_ORDERS: Final = get_args(Order)
_LISTS: Final = ("clusters", "users", "accounts", "partitions", "states", "jobs")
_TEXTS: Final = ("since", "until")


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked at, and how.

    Attributes:
        text: What must stand in scripts: words, or several in quotes; "" for any job.
        case: Whether upper and lower case differ in it.
        words: Whether each must stand as a whole word.
        columns: Keys of the columns; none for the usual ones.
        apart: Whether the tasks of arrays are rows of their own.
        page: Where it begins, as an answer gave it; "" for the beginning.
        rows: How many rows it has: what somebody had come to when they went on.
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
        """The view that an address names.

        Raises:
            UsageError: It cannot be understood.
        """
        order = query.text(request, "order", "-submit")
        if order not in _ORDERS:
            raise UsageError(f"jobs are ordered by {', '.join(_ORDERS)}, not {order[:60]!r}", order)
        # A job's name may hold commas.
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
        """What stands behind the question mark; ``changes`` are of this view's attributes.

        What is as usual is left out, so that an address is as short as it can be.
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
        """The columns, in the order in which they always stand.

        Args:
            several_clusters: Whether there are several, so that it is shown which.
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
        """What the daemon is asked for its rows."""
        return JobsRequest(
            **self._selection(),
            order=self.order,
            arrays="apart" if self.apart else "together",
            limit=self.rows,
            page=self.page,
        )

    def counted(self) -> JobStatesRequest:
        """What it is asked for how many there are."""
        return JobStatesRequest(**self._selection())

    def searched(self) -> SearchRequest:
        """What it is asked for scripts that hold the text."""
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
    """The words of a text, those in quotes together; all of it where a quote stays open."""
    try:
        found = shlex.split(text)
    except ValueError:
        found = []
    return tuple(filter(None, found)) or (text,)
