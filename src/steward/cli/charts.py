"""Text charts for the terminal: rows of styled text, bars, timelines and tables.

A row is a list of pieces, each a text and the name of a Rich style. The same page therefore prints
in colour on a terminal and plain in a pipe or a mail. Text that users chose is escaped when it
becomes a piece.

The job page, reports and node pages of the CLI use it. :class:`Pens` selects Unicode or ASCII
signs; :func:`drawn` converts rows for Rich, :func:`plain` to text.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from steward.core.printable import safe

if TYPE_CHECKING:
    from rich.console import RenderableType


Piece = tuple[str, str]
"""A text and the name of its Rich style."""
Row = list[Piece]
"""A line of the page."""

_NARROWEST, _WIDEST = 60, 110
_USUAL: Final = 80
"""Width of a page without a terminal, in columns."""


class Pens(msgspec.Struct, frozen=True, kw_only=True):
    """Characters and width of the charts, by what the output can show.

    Attributes:
        width: Columns of a page.
        full: Used part of a bar.
        empty: Unused part of a bar.
        edge: Mark between the spans of a timeline.
        held: Time in which a job could not have started.
        waited: Time in which the job was waiting.
        ran: Time in which the job ran.
        suspended: Time in which the job was suspended.
        note: Sign before a remark.
    """

    width: int = _USUAL
    full: str = "#"
    empty: str = "-"
    edge: str = "|"
    held: str = "."
    waited: str = "-"
    ran: str = "="
    suspended: str = "~"
    note: str = "*"


ASCII: Final = Pens()
"""Characters for a pipe, a mail or a terminal without UTF-8."""


def pens() -> Pens:
    """Return the characters that standard output can show.

    Only ASCII if it is not a terminal, or its encoding is not UTF-8. The width is 60 to 110
    columns.
    """
    width = _USUAL
    if not sys.stdout.isatty():
        return ASCII
    with contextlib.suppress(OSError):
        width = os.get_terminal_size(sys.stdout.fileno()).columns or _USUAL
    width = max(_NARROWEST, min(_WIDEST, width))
    is_dumb = os.environ.get("TERM", "") in ("", "dumb")
    if is_dumb or (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        return Pens(width=width)
    return Pens(
        width=width,
        full="█",
        empty="░",
        edge="│",
        held="·",
        waited="╌",
        ran="━",
        suspended="┄",
        note="▸",
    )


def text(value: str, style: str = "") -> Row:
    """Return a row of one piece, with unsafe characters escaped."""
    return [(safe(value), style)]


def wrapped(value: str, width: int, mark: Piece = ("  ", "")) -> list[Row]:
    """Wrap a long text into rows; the first begins with the mark, the others are indented by it."""
    import textwrap

    lines = textwrap.wrap(safe(value), width - len(mark[0]), break_on_hyphens=False)
    begins = [mark, *[(" " * len(mark[0]), "")] * len(lines)]
    return [[begin, (line, "")] for begin, line in zip(begins, lines, strict=False)]


def heading(title: str) -> list[Row]:
    """Return a heading, with an empty row before it."""
    return [[], [(title, "bold")]]


def bar(share: float | None, width: int, with_: Pens, style: str) -> Row:
    """Return a bar filled to a share between 0 and 1; a larger share fills it."""
    filled = 0 if share is None else round(max(0.0, min(1.0, share)) * width)
    if share and not filled:
        # Show at least one sign for a small share above 0.
        filled = 1
    return [
        ("[", "dim"),
        (with_.full * filled, style),
        (with_.empty * (width - filled), "dim"),
        ("]", "dim"),
    ]


class Span(msgspec.Struct, frozen=True):
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


def line_of_time(spans: Sequence[Span], with_: Pens, indent: str = "  ") -> list[Row]:
    """Return a timeline: spans in proportion to their duration, and a legend.

    Every span is at least one column wide, however short it was.
    """
    shown = [span for span in spans if span.seconds > 0]
    if not shown:
        return []
    room = with_.width - len(indent) - len(shown) - 1
    widths = _shared_out([span.seconds for span in shown], room)
    drawn: Row = [(indent, ""), (with_.edge, "dim")]
    for span, width in zip(shown, widths, strict=True):
        drawn += [(span.sign * width, span.style), (with_.edge, "dim")]
    rows = [drawn]
    row: Row = [(indent, "")]
    for span in _distinct(shown):
        pieces: Row = [(f"{span.sign} ", span.style), (span.label, ""), ("   ", "")]
        if width_of(row) + width_of(pieces) - 3 > with_.width and len(row) > 1:
            rows.append(row)
            row = [(indent, "")]
        row += pieces
    return [*rows, row]


def _distinct(spans: Sequence[Span]) -> list[Span]:
    """Return the labelled spans, one for each label."""
    return list({span.label: span for span in spans if span.label}.values())


def _shared_out(parts: Sequence[float], room: int) -> list[int]:
    """Distribute columns among parts in proportion, at least one each."""
    total = sum(parts)
    widths = [max(1, int(part / total * room)) for part in parts]
    widths[max(range(len(parts)), key=parts.__getitem__)] += max(0, room - sum(widths))
    return widths


class Head(msgspec.Struct, frozen=True):
    """Heading of a table column.

    Attributes:
        name: Text of the heading.
        right: Whether to align the column to the right.
        spare: Rank for omission: if the table is too wide, the highest goes first; 0 always stays.
    """

    name: str
    right: bool = True
    spare: int = 0


def table(
    heads: Sequence[Head], rows: Iterable[Sequence[Piece]], most: int, indent: str = "  "
) -> list[Row]:
    """Return an aligned table of rows below headings; empty columns are omitted.

    Args:
        heads: The columns.
        rows: Their cells.
        most: Largest width of a row in characters, unless columns that stay need more.
        indent: Text at the beginning of each row.
    """
    cells = [[(safe(value), style) for value, style in row] for row in rows]
    used = [index for index in range(len(heads)) if any(row[index][0] for row in cells)]
    widths = {
        index: max(len(heads[index].name), *(len(row[index][0]) for row in cells)) for index in used
    }
    while sum(widths[index] + 2 for index in used) > most - len(indent) + 2:
        least = max(used, key=lambda index: heads[index].spare)
        if not heads[least].spare:
            break
        used.remove(least)
    lines = [[(heads[index].name, "dim") for index in used]]
    lines += [[row[index] for index in used] for row in cells]
    drawn: list[Row] = []
    for line in lines:
        row: Row = [(indent, "")]
        for index, (value, style) in zip(used, line, strict=True):
            width = widths[index]
            padded = value.rjust(width) if heads[index].right else value.ljust(width)
            row += [(padded, style), ("  ", "")]
        drawn.append(row)
    return drawn


def width_of(row: Row) -> int:
    """Return the number of characters in a row."""
    return sum(len(value) for value, _ in row)


def plain(rows: Iterable[Row]) -> str:
    """Return rows as text without styles, one a line."""
    return "".join("".join(value for value, _ in row).rstrip() + "\n" for row in rows)


def drawn(rows: Iterable[Row]) -> "list[RenderableType]":
    """Convert rows to Rich texts, for ``output.print_all``."""
    from rich.text import Text

    return [Text.assemble(*row, no_wrap=True, overflow="fold") for row in rows]
