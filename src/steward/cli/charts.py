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
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from steward.core.printable import escape_line

if TYPE_CHECKING:
    from rich.console import RenderableType


StyledText = tuple[str, str]
"""A text and the name of its Rich style."""
StyledRow = list[StyledText]
"""A line of the page."""

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


class TableHeading(msgspec.Struct, frozen=True):
    """Heading of a table column.

    Attributes:
        name: Text of the heading.
        right: Whether to align the column to the right.
        drop_rank: Rank for omission from a table that is too wide: the highest goes first; 0 stays.
    """

    name: str
    right: bool = True
    drop_rank: int = 0


def make_layout_table(
    headings: Sequence[TableHeading],
    rows: Iterable[Sequence[StyledText]],
    max_width: int,
    indent: str = "  ",
) -> list[StyledRow]:
    """Return an aligned table of rows below headings; empty columns are omitted.

    Args:
        headings: The columns.
        rows: Their cells.
        max_width: Largest width of a row in characters, unless columns that stay need more.
        indent: Text at the beginning of each row.
    """
    cells = [[(escape_line(value), style) for value, style in row] for row in rows]
    visible = [index for index in range(len(headings)) if any(row[index][0] for row in cells)]
    widths = {
        index: max(len(headings[index].name), *(len(row[index][0]) for row in cells))
        for index in visible
    }
    while sum(widths[index] + 2 for index in visible) > max_width - len(indent) + 2:
        dropped_index = max(visible, key=lambda index: headings[index].drop_rank)
        if not headings[dropped_index].drop_rank:
            break
        visible.remove(dropped_index)
    lines = [[(headings[index].name, "dim") for index in visible]]
    lines += [[row[index] for index in visible] for row in cells]
    drawn_rows: list[StyledRow] = []
    for line in lines:
        row: StyledRow = [(indent, "")]
        for index, (value, style) in zip(visible, line, strict=True):
            width = widths[index]
            padded = value.rjust(width) if headings[index].right else value.ljust(width)
            row += [(padded, style), ("  ", "")]
        drawn_rows.append(row)
    return drawn_rows


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
