"""Text charts for the terminal: rows of styled text, bars, timelines and tables.

A row is a list of pieces, each a text and the name of a Rich style. The same page therefore prints
in colour on a terminal and plain in a pipe or a mail. Text that users chose is escaped when it
becomes a piece.

The job page, reports and node pages of the CLI use it. :class:`ChartSigns` selects Unicode or ASCII
signs; :func:`render_rich` converts rows for Rich, :func:`render_plain` to text.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steward.accounting.job_page.notes import format_duration, format_size
from steward.core.layouts import Column, choose_columns, format_text
from steward.core.printable import escape_line

if TYPE_CHECKING:
    from rich.console import RenderableType


StyledText = tuple[str, str]
"""A text and the name of its Rich style."""
StyledRow = list[StyledText]
"""A line of the page."""

_INDENT: Final = "  "
"""Text at the beginning of each row of a table."""
_NARROWEST, _WIDEST = 60, 110
_DEFAULT_WIDTH: Final = 80
"""Width of a page without a terminal, in columns."""


class ChartSigns(msgspec.Struct, frozen=True, kw_only=True):
    """Characters and width of the charts, by what the output can show.

    Attributes:
        width: Columns of a page.
        full: Used part of a bar.
        empty: Unused part of a bar.
        separator: Mark between the spans of a timeline.
        held: Time in which a job could not have started.
        waiting: Time in which the job was waiting.
        running: Time in which the job ran.
        suspended: Time in which the job was suspended.
        note: Sign before a remark.
    """

    width: int = _DEFAULT_WIDTH
    full: str = "#"
    empty: str = "-"
    separator: str = "|"
    held: str = "."
    waiting: str = "-"
    running: str = "="
    suspended: str = "~"
    note: str = "*"


ASCII: Final = ChartSigns()
"""Characters for a pipe, a mail or a terminal without UTF-8."""


def choose_signs() -> ChartSigns:
    """Return the characters that standard output can show.

    Only ASCII if it is not a terminal, its encoding is not UTF-8, or ``TERM`` is empty or "dumb".
    The width is 60 to 110 columns on a terminal, else the default of 80.
    """
    width = _DEFAULT_WIDTH
    if not sys.stdout.isatty():
        return ASCII
    with contextlib.suppress(OSError):
        width = os.get_terminal_size(sys.stdout.fileno()).columns or _DEFAULT_WIDTH
    width = max(_NARROWEST, min(_WIDEST, width))
    is_dumb = os.environ.get("TERM", "") in ("", "dumb")
    if is_dumb or (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        return ChartSigns(width=width)
    return ChartSigns(
        width=width,
        full="█",
        empty="░",
        separator="│",
        held="·",
        waiting="╌",
        running="━",
        suspended="┄",
        note="▸",
    )


def make_text_row(text: str, style: str = "") -> StyledRow:
    """Return a row of one piece, with unsafe characters escaped."""
    return [(escape_line(text), style)]


def wrap_text(text: str, width: int, mark: StyledText = ("  ", "")) -> list[StyledRow]:
    """Wrap a long text into rows; the first begins with the mark, the others are indented by it."""
    import textwrap

    lines = textwrap.wrap(escape_line(text), width - len(mark[0]), break_on_hyphens=False)
    prefixes = [mark, *[(" " * len(mark[0]), "")] * len(lines)]
    return [[prefix, (line, "")] for prefix, line in zip(prefixes, lines, strict=False)]


def make_heading(title: str) -> list[StyledRow]:
    """Return a heading, with an empty row before it."""
    return [[], [(title, "bold")]]


def draw_bar(share: float | None, width: int, signs: ChartSigns, style: str) -> StyledRow:
    """Return a bar filled to a share between 0 and 1; a larger share fills it."""
    filled_width = 0 if share is None else round(max(0.0, min(1.0, share)) * width)
    if share and not filled_width:
        # Show at least one sign for a small share above 0.
        filled_width = 1
    return [
        ("[", "dim"),
        (signs.full * filled_width, style),
        (signs.empty * (width - filled_width), "dim"),
        ("]", "dim"),
    ]


class TimelineSpan(msgspec.Struct, frozen=True):
    """A span of time on a timeline.

    Attributes:
        seconds: Duration in seconds.
        sign: Character that draws it.
        style: Rich style, such as a colour.
        label: Text of the legend: "waited 5 s".
    """

    seconds: float
    sign: str
    style: str
    label: str


def draw_timeline(
    spans: Sequence[TimelineSpan], signs: ChartSigns, indent: str = "  "
) -> list[StyledRow]:
    """Return a timeline: spans in proportion to their duration, and a legend.

    Every span is at least one column wide, however short it was.
    """
    visible = [span for span in spans if span.seconds > 0]
    if not visible:
        return []
    available = signs.width - len(indent) - len(visible) - 1
    widths = _distribute_columns([span.seconds for span in visible], available)
    timeline: StyledRow = [(indent, ""), (signs.separator, "dim")]
    for span, width in zip(visible, widths, strict=True):
        timeline += [(span.sign * width, span.style), (signs.separator, "dim")]
    rows = [timeline]
    legend_row: StyledRow = [(indent, "")]
    for span in _select_distinct(visible):
        label_parts: StyledRow = [(f"{span.sign} ", span.style), (span.label, ""), ("   ", "")]
        if (
            measure_row(legend_row) + measure_row(label_parts) - 3 > signs.width
            and len(legend_row) > 1
        ):
            rows.append(legend_row)
            legend_row = [(indent, "")]
        legend_row += label_parts
    return [*rows, legend_row]


def _select_distinct(spans: Sequence[TimelineSpan]) -> list[TimelineSpan]:
    """Return the labelled spans, one for each label."""
    return list({span.label: span for span in spans if span.label}.values())


def _distribute_columns(parts: Sequence[float], available: int) -> list[int]:
    """Distribute columns among parts in proportion, at least one each."""
    total = sum(parts)
    widths = [max(1, int(part / total * available)) for part in parts]
    widths[max(range(len(parts)), key=parts.__getitem__)] += max(0, available - sum(widths))
    return widths


def make_layout_table(
    columns: Iterable[Column],
    rows: Sequence[Any],
    reply: Any,
    max_width: int,
    styles: Mapping[str, Callable[[Any], str]],
) -> list[StyledRow]:
    """Return an aligned table of rows below headings; empty columns are omitted.

    Args:
        columns: Columns of a layout.
        rows: The rows.
        reply: The reply that they are part of.
        max_width: Largest width of a row in characters, unless columns that stay need more.
        styles: Functions that choose the Rich style of a row's cell, by column.
    """
    visible = []
    for column in choose_columns(columns, rows, reply):
        cells = [_format_cell(column, row, reply) for row in rows]
        if any(cells):
            visible.append((column, cells, max(map(len, (column.name, *cells)))))
    while sum(width + 2 for _, _, width in visible) > max_width - len(_INDENT) + 2:
        dropped = max(visible, key=lambda entry: entry[0].drop_rank)
        if not dropped[0].drop_rank:
            break
        visible.remove(dropped)
    drawn_rows: list[StyledRow] = [[(_INDENT, "")] for _ in range(len(rows) + 1)]
    for column, cells, width in visible:
        choose_style = styles.get(column.name, lambda _: "")
        cell_styles = ["dim", *map(choose_style, rows)]
        for drawn, text, style in zip(drawn_rows, (column.name, *cells), cell_styles, strict=True):
            padded = text.rjust(width) if column.is_right_aligned else text.ljust(width)
            drawn += [(padded, style), ("  ", "")]
    return drawn_rows


def _format_cell(column: Column, row: Any, reply: Any) -> str:
    """Format a cell of a page: sizes and durations in words, percentages without decimals."""
    value = column.read_value(row, reply)
    if value is None or isinstance(value, str):
        return escape_line(value or "")
    match column.format:
        case "percent":
            return f"{value:.0%}"
        case "bytes":
            return format_size(value)
        case "seconds":
            return format_duration(value)
        case _:
            return escape_line(format_text(value))


def measure_row(row: StyledRow) -> int:
    """Return the number of characters in a row."""
    return sum(len(value) for value, _ in row)


def render_plain(rows: Iterable[StyledRow]) -> str:
    """Return rows as text without styles, one a line."""
    return "".join("".join(value for value, _ in row).rstrip() + "\n" for row in rows)


def render_rich(rows: Iterable[StyledRow]) -> "list[RenderableType]":
    """Convert rows to Rich texts, for ``output.print_renderables``."""
    from rich.text import Text

    return [Text.assemble(*row, no_wrap=True, overflow="fold") for row in rows]
