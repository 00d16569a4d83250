"""Rows of styled text, and what pages are drawn with: bars, lines of time, tables.

A row is a list of pieces, each a text and Rich's name of its style, so that the
same page goes to a terminal in colours, and plain into a pipe or a mail. Texts
that others chose are made safe where they become pieces.
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
Row = list[Piece]

_NARROWEST, _WIDEST = 60, 110
_USUAL: Final = 80


class Pens(msgspec.Struct, frozen=True, kw_only=True):
    """The signs that are drawn with.

    Attributes:
        width: Columns of a page.
        full: A part of a bar that is used.
        empty: A part of it that is not.
        edge: Where a line of time has a mark.
        held: A time that a job could not have started in.
        waited: A time that it waited.
        ran: A time that it ran.
        suspended: A time that it was suspended.
        note: What stands before a remark.
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


def pens() -> Pens:
    """What the standard output can show: ASCII alone where no person or no Unicode is there."""
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
    """A row of one piece, of text that somebody may have chosen."""
    return [(safe(value), style)]


def wrapped(value: str, width: int, mark: Piece = ("  ", "")) -> list[Row]:
    """Rows of a long text, after a mark that the others are indented by."""
    import textwrap

    lines = textwrap.wrap(safe(value), width - len(mark[0]), break_on_hyphens=False)
    begins = [mark, *[(" " * len(mark[0]), "")] * len(lines)]
    return [[begin, (line, "")] for begin, line in zip(begins, lines, strict=False)]


def heading(title: str) -> list[Row]:
    """A heading, with an empty row before it."""
    return [[], [(title, "bold")]]


def bar(share: float | None, width: int, with_: Pens, style: str) -> Row:
    """A bar that is filled to a share; what is beyond 1 fills it."""
    filled = 0 if share is None else round(max(0.0, min(1.0, share)) * width)
    if share and not filled:
        # Little is not nothing.
        filled = 1
    return [
        ("[", "dim"),
        (with_.full * filled, style),
        (with_.empty * (width - filled), "dim"),
        ("]", "dim"),
    ]


class Span(msgspec.Struct, frozen=True):
    """A part of a line of time.

    Attributes:
        seconds: How long it lasted.
        sign: What it is drawn with.
        style: Its colour.
        label: What it was: "waited 5 s".
    """

    seconds: float
    sign: str
    style: str
    label: str


def line_of_time(spans: Sequence[Span], with_: Pens, indent: str = "  ") -> list[Row]:
    """Spans one after the other, as long as they lasted, and what each is.

    What lasted is seen, however short beside the others it was.
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
    """The spans without those whose label was there before, or that have none."""
    return list({span.label: span for span in spans if span.label}.values())


def _shared_out(parts: Sequence[float], room: int) -> list[int]:
    """Whole columns for each part, by size, one at least."""
    total = sum(parts)
    widths = [max(1, int(part / total * room)) for part in parts]
    widths[max(range(len(parts)), key=parts.__getitem__)] += max(0, room - sum(widths))
    return widths


class Head(msgspec.Struct, frozen=True):
    """A column of a table.

    Attributes:
        name: Its heading.
        right: Whether it is aligned to the right.
        spare: Where there is no room for all columns, the one with the highest goes first;
            0 for one that stays.
    """

    name: str
    right: bool = True
    spare: int = 0


def table(
    heads: Sequence[Head], rows: Iterable[Sequence[Piece]], most: int, indent: str = "  "
) -> list[Row]:
    """Rows below their headings, aligned; columns in which nothing stands are left out.

    Args:
        heads: The columns.
        rows: Their cells.
        most: How many letters a row has room for, unless columns that stay need more.
        indent: What rows begin with.
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
    """How many letters a row has."""
    return sum(len(value) for value, _ in row)


def plain(rows: Iterable[Row]) -> str:
    """Rows without their styles, each on a line of its own."""
    return "".join("".join(value for value, _ in row).rstrip() + "\n" for row in rows)


def drawn(rows: Iterable[Row]) -> "list[RenderableType]":
    """Rows for ``output.show``."""
    from rich.text import Text

    return [Text.assemble(*row, no_wrap=True, overflow="fold") for row in rows]
