"""Layouts of replies: columns declared once beside a reply's Struct, shown by every view.

A :class:`Column` says where a row's value comes from and in which :data:`Format` it is shown. The
terminal, CSV files and web pages draw tables from the same columns: :func:`choose_columns` selects
those that people see, :func:`format_for_programs` and :func:`write_csv` are what programs read.
``cli/output.py`` and ``web/formats.py`` hold the formats for people.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, tzinfo
from functools import lru_cache
from typing import Any, Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from steward.core.printable import escape_line, quote_formula

Format = Literal[
    "text",
    "prose",
    "code",
    "count",
    "decimal",
    "bytes",
    "time",
    "duration",
    "seconds",
    "hours",
    "percent",
    "money",
    "state",
    "node_state",
    "bar",
]
"""How a value is shown: ``hours`` are seconds of a resource, ``money`` is micro-SU, ``percent`` a
ratio, ``bar`` a ratio that is drawn for people, ``duration`` seconds on a clock (``00:05:20``),
``seconds`` seconds in words (``0.35 s``, ``5m 20s``), ``time`` an aware datetime. ``prose`` is text
that pages wrap, ``code`` a text, or several lines, to type or to copy. Numbers are aligned to the
right. A string is shown unchanged in every format but ``code`` and states."""

Show = Literal["always", "filled", "several", "pages", "requested"]
"""When people see a column that they did not name: always, if a row has a value, if rows have
different values, on pages but not on a terminal, or never. Programs get all columns."""

Link = Literal[
    "",
    "account",
    "action",
    "execution",
    "job",
    "jobs",
    "node",
    "nodes",
    "partition",
    "past",
    "rule",
    "user",
]
"""Page that a cell links to, by the object it names: ``jobs`` are those of the row's account and
user, ``nodes`` those of a partition, ``past`` is the page that shows the table, at that time."""

Value = str | Callable[[Any, Any], Any]
"""Source of a value: name of the row's attribute, or a function of row and reply."""

_LEFT_ALIGNED: Final = ("text", "prose", "code", "time", "state", "node_state", "bar")
TIME_FORMAT: Final = "%Y-%m-%dT%H:%M:%S"
"""Slurm's standard time format."""
HOUR_S: Final = 3600


class TimeBound(msgspec.Struct, frozen=True):
    """Latest possible time of an event, such as a change that was first seen then."""

    moment: datetime


class Column(msgspec.Struct, frozen=True):
    """Column of a reply's rows.

    Attributes:
        name: Heading in terminals and files, and name to choose it by (case-insensitive).
        value: Source of its value.
        format: Format of its value.
        show: When people see it by default; a function decides by the reply.
        title: Heading on pages; ``name`` if empty.
        link: Page that its cells link to; a function decides by the row.
        target: Source of the object's name in the link, if that is not the value for programs.
        max_width: Most characters of a cell on a terminal; 0 for no limit. Pages wrap the cell.
        right: Whether to align to the right; by default numbers are.
        exact: Source of the value for programs, if that differs.
        is_key: Whether it names the row: pages make it the row's heading.
        absent: Text that pages show for an unknown value.
        drop_rank: Rank for omission from a terminal's page that is too narrow: the highest goes
            first; 0 stays.
        low: Percentage below which pages warn, as a ratio: they draw a bar beside it.
    """

    name: str
    value: Value
    format: Format = "text"
    show: Show | Callable[[Any], bool] = "always"
    title: str = ""
    link: Link | Callable[[Any], Link] = ""
    target: Value | None = None
    max_width: int = 0
    right: bool | None = None
    exact: Value | None = None
    is_key: bool = False
    absent: str = ""
    drop_rank: int = 0
    low: float = 0.0

    @property
    def heading(self) -> str:
        """Heading on pages."""
        return self.title or self.name

    @property
    def is_right_aligned(self) -> bool:
        """Whether cells are aligned to the right."""
        return self.format not in _LEFT_ALIGNED if self.right is None else self.right

    @property
    def wraps(self) -> bool:
        """Whether pages break long words of its cells."""
        return self.format == "prose" or self.max_width > 0

    def find_link(self, row: Any) -> Link:
        """Return the page that a row's cell links to."""
        return self.link(row) if callable(self.link) else self.link

    def read_target(self, row: Any, reply: Any = None) -> Any:
        """Return the name of the object that a row's cell links to."""
        return (
            self.read_exact_value(row, reply)
            if self.target is None
            else _read(self.target, row, reply)
        )

    def read_value(self, row: Any, reply: Any = None) -> Any:
        """Return a row's value for people."""
        return _read(self.value, row, reply)

    def read_exact_value(self, row: Any, reply: Any = None) -> Any:
        """Return a row's value for programs."""
        return _read(self.value if self.exact is None else self.exact, row, reply)


def _read(value: Value, row: Any, reply: Any) -> Any:
    return getattr(row, value) if isinstance(value, str) else value(row, reply)


Layout = tuple[Column, ...]
"""Columns of a reply's rows, in display order."""


def read_ratio(part: str, whole: str) -> Callable[[Any, Any], float | None]:
    """Return a value source for one attribute over another; None if unknown or over zero."""

    def read(row: Any, _: Any) -> float | None:
        amount, total = getattr(row, part), getattr(row, whole)
        return amount / total if amount is not None and total else None

    return read


def read_user(row: Any, _: Any = None) -> str:
    """Return a row's user name, or the uid if it resolved to none."""
    return row.user or ("" if row.uid is None else str(row.uid))


def describe_scope(
    reply: Any,
    columns: Iterable[Column],
    format_time: Callable[[datetime, str], str],
    hours_unit: str = "hours",
    escape: Callable[[str], str] = escape_line,
) -> str:
    """Describe period and unit of a reply's rows; "" if they have neither.

    Args:
        reply: The reply, with the attributes ``period``, ``zone`` and ``unit`` if it has them.
        columns: Columns of the rows.
        format_time: Formats a time in the zone of that name.
        hours_unit: Unit of resource time.
        escape: Escapes the name of the bank's unit.
    """
    parts = []
    if period := getattr(reply, "period", None):
        begin, end = (format_time(moment, get_zone_name(None, reply)) for moment in period)
        parts.append(f"at {end}" if begin == end else f"from {begin} to {end}")
    formats = {column.format for column in columns}
    units = {"hours": hours_unit, "money": getattr(reply, "unit", "")}
    parts += [f"in {escape(units[name])}" for name in units if name in formats and units[name]]
    text = ", ".join(parts)
    return text[:1].upper() + text[1:]


def choose_columns(
    columns: Iterable[Column],
    rows: Sequence[Any],
    reply: Any,
    *,
    on_page: bool = False,
    names: Sequence[str] = (),
) -> list[Column]:
    """Return the named columns, or those that people see by default on a page or a terminal."""
    if names:
        columns_by_name = {column.name: column for column in columns}
        return [columns_by_name[name] for name in names]
    shown = ("always", "pages") if on_page else ("always",)
    return [column for column in columns if column.show in shown or _is_filled(column, rows, reply)]


def _is_filled(column: Column, rows: Sequence[Any], reply: Any) -> bool:
    """Return whether the reply or the rows have what a column is shown for."""
    if callable(column.show):
        return column.show(reply)
    if column.show == "filled":
        return any(column.read_value(row, reply) for row in rows)
    if column.show == "several":
        values = [column.read_value(row, reply) for row in rows]
        return any(value != values[0] for value in values)
    return False


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 script``, ``2 scripts``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_size(count: int | None) -> str:
    """Format a size in bytes for people: ``812``, ``1.2K``, ``3.4M``; "" for None."""
    if count is None:
        return ""
    amount = float(count)
    for unit in ("", "K", "M", "G", "T"):
        if amount < 999.5 or unit == "T":
            return f"{count}" if not unit else f"{amount:.1f}{unit}"
        amount /= 1024
    raise AssertionError("the loop ends at its last unit")


def format_span(seconds: int | None) -> str:
    """Format a duration as Slurm does: ``01:02:03``, ``1-00:00:00``; "" for None."""
    if seconds is None:
        return ""
    minutes, second = divmod(max(seconds, 0), 60)
    hours, minute = divmod(minutes, 60)
    if hours < 24:
        return f"{hours:02}:{minute:02}:{second:02}"
    return f"{hours // 24}-{hours % 24:02}:{minute:02}:{second:02}"


@lru_cache(maxsize=32)
def find_timezone(name: str) -> tzinfo | None:
    """Return the time zone of an IANA name; None (the host's own) if "" or unknown here."""
    try:
        return ZoneInfo(name) if name else None
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None


def get_zone_name(row: Any, reply: Any) -> str:
    """Return the IANA name of the zone of a row's times: its cluster's, or the reply's."""
    zones: Mapping[str, str] = getattr(reply, "zones", None) or {}
    return zones.get(getattr(row, "cluster", "")) or str(getattr(reply, "zone", ""))


def to_zone(moment: datetime, zone: str) -> datetime:
    """Convert a time to a zone; unchanged at the ends of the calendar, where no zone has it."""
    try:
        return moment.astimezone(find_timezone(zone))
    except (OverflowError, OSError, ValueError):
        return moment


@lru_cache(maxsize=4096)
def _format_exact_time(moment: datetime, zone: str) -> str:
    """Format a time for programs, with the offset from UTC: clocks repeat an hour in autumn."""
    return to_zone(moment, zone).isoformat(timespec="seconds")


def format_text(value: Any, separator: str = ",") -> str:
    """Format a value without a format of its own: lists, yes or no, counts by name."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return separator.join(map(str, value))
    if isinstance(value, dict):
        return " ".join(f"{count} {name}" for name, count in value.items())
    return str(value)


def format_exact_money(amount: int) -> str:
    """Format an amount in micro-SU for programs, in SU: ``-1250.500000``."""
    whole, fraction = divmod(abs(amount), 1_000_000)
    return f"{'-' if amount < 0 else ''}{whole}.{fraction:06}"


def format_for_programs(
    column: Column, row: Any, reply: Any = None, *, hours_unit_s: int = HOUR_S
) -> str:
    """Format a cell for programs: unabridged, "" for an unknown value, times with their offset.

    Args:
        column: The column.
        row: The row.
        reply: The reply that the row is part of.
        hours_unit_s: Unit of resource time in place of the hour, in seconds.
    """
    value = column.read_exact_value(row, reply)
    if value is None or isinstance(value, str):
        return value or ""
    match column.format:
        case "time":
            moment = value.moment if isinstance(value, TimeBound) else value
            return _format_exact_time(moment, get_zone_name(row, reply))
        case "hours":
            return str(value) if hours_unit_s == 1 else f"{value / hours_unit_s:.3f}"
        case "percent":
            return f"{100 * value:.2f}"
        case "bar":
            return ""
        case "decimal":
            return f"{value:.1f}"
        case "duration" | "seconds":
            return f"{round(value, 6)}"
        case "money":
            return format_exact_money(value)
        case _:
            return format_text(value)


def write_csv(
    columns: Sequence[Column], cell_rows: Iterable[Iterable[str]], *, header: bool
) -> str:
    """Write CSV that is safe to open in a spreadsheet.

    Args:
        columns: Columns, for the header.
        cell_rows: The cells of each row, see :func:`format_for_programs`.
        header: Whether the first line holds the columns' names.
    """
    import csv
    import io

    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    if header:
        writer.writerow([column.name for column in columns])
    for cells in cell_rows:
        writer.writerow([quote_formula(escape_line(cell)) for cell in cells])
    return buffer.getvalue()
