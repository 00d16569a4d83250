"""Print command output: tables, CSV, facts, JSON, scripts and a progress line.

All CLI commands print through this module. On a terminal Rich draws colours, and output longer than
the screen goes through a pager; a pipe gets plain aligned text. Programs ask for ``--parsable2`` or
``--json``. Text that job owners chose is escaped everywhere except in JSON, which carries it
unchanged in UTF-8.

In order: formatting of counts, sizes and times (with ``TZ`` and ``SLURM_TIME_FORMAT``),
:class:`Style` and :class:`Column`, the ``print_*`` functions, Rich drawing, and
:class:`ProgressLine`.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from steward.core.errors import UsageError
from steward.core.printable import escape_line, escape_lines, quote_formula
from steward.slurm.times import choose_relative_format

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


__all__ = ["decode_bytes", "escape_line", "escape_lines", "format_count", "format_size"]


def decode_bytes(data: bytes) -> str:
    r"""Decode UTF-8 bytes; invalid bytes become escapes such as ``\xff``."""
    return data.decode("utf-8", "backslashreplace")


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


_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
"""Slurm's standard time format."""


@lru_cache(maxsize=32)
def _load_zone(name: str) -> tzinfo | None:
    """Return the time zone of an IANA name, or None if unknown."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        # This host does not know the zone: fall back to the host's own.
        return None


def to_local_time(moment: datetime, zone: str = "") -> datetime:
    """Convert a time to the time zone it is displayed in.

    Args:
        moment: An aware datetime.
        zone: IANA name of the cluster's zone, "" for the system's; ``TZ`` takes precedence.
    """
    try:
        if zone and "TZ" not in os.environ:
            return moment.astimezone(_load_zone(zone))
        return moment.astimezone()
    except (OverflowError, OSError, ValueError):
        # At the ends of the calendar the time does not exist in every zone.
        return moment


def format_time(moment: datetime | None, zone: str = "", now: datetime | None = None) -> str:
    """Format a time as Slurm's commands do; "" for None.

    Args:
        moment: An aware datetime.
        zone: As for :func:`to_local_time`.
        now: The present time, for ``SLURM_TIME_FORMAT=relative``.
    """
    if moment is None:
        return ""
    local_time = to_local_time(moment, zone)
    pattern = os.environ.get("SLURM_TIME_FORMAT", "")
    if pattern == "relative":
        pattern = choose_relative_format(local_time, to_local_time(now or datetime.now(UTC), zone))
    elif pattern in ("", "standard"):
        pattern = _TIME_FORMAT
    return local_time.strftime(pattern)


def find_requested_zone() -> str:
    """Return the IANA zone of typed times from ``TZ``; "" means the cluster's zone."""
    name = os.environ.get("TZ", "").removeprefix(":")
    return name if name and _load_zone(name) is not None else ""


_STATE_COLOURS = {
    "COMPLETED": "green",
    "RUNNING": "cyan",
    "PENDING": "yellow",
    "FAILED": "red",
    "TIMEOUT": "red",
    "NODE_FAIL": "red",
    "OUT_OF_MEMORY": "red",
    "CANCELLED": "magenta",
}
"""Rich colour of each job state in tables."""
_NEVER_WRAPPED = {"JobID", "Submit", "State"}
"""Columns that a narrow terminal must not wrap."""
_PIPE_ESCAPE = "\\x7c"
"""Replaces ``|`` within a field, so that it cannot separate fields."""


class Style(msgspec.Struct, frozen=True, kw_only=True):
    """Output format that the options of a command select.

    Attributes:
        json: Print the whole reply as JSON.
        parsable: Separate fields by ``|``, as ``--parsable2`` of Slurm's commands does.
        has_header: Whether tables begin with a line of column names.
        columns: Names of the columns to print; empty for the table's default columns.
    """

    json: bool = False
    parsable: bool = False
    has_header: bool = True
    columns: tuple[str, ...] = ()


class Column(msgspec.Struct, frozen=True):
    """A table column: its heading and how it formats a row.

    Attributes:
        name: Heading, and the name in ``--format`` (case-insensitive).
        text: Formats a row for people.
        format_plain: Formats a row for programs, if that differs.
        right: Whether to align the column to the right.
        is_default: Whether people see it by default.
        max_width: Most characters of a cell that people see; 0 for no limit. Programs get all.
    """

    name: str
    text: Callable[[Any], str]
    format_plain: Callable[[Any], str] | None = None
    right: bool = False
    is_default: bool = True
    max_width: int = 0

    def format_cell(self, row: Any) -> str:
        """Return the text of a cell for people, safe to print."""
        text = escape_unprintable(self.text(row))
        # Three dots, because not every terminal encoding has the ellipsis character.
        return f"{text[: self.max_width - 3]}..." if 0 < self.max_width < len(text) else text


def is_terminal() -> bool:
    """Return True if standard output is a terminal."""
    return sys.stdout.isatty()


def escape_unprintable(text: str) -> str:
    r"""Return safe text, with ``\u6f22`` for characters that the output's encoding lacks.

    The result is as wide as it will appear.
    """
    text = escape_line(text)
    return text if text.isascii() else _encode_output(text).decode(sys.stdout.encoding)


def _encode_output(text: str) -> bytes:
    """Encode text for standard output; characters it lacks become escapes."""
    return text.encode(sys.stdout.encoding, "backslashreplace")


def print_note(message: str) -> None:
    """Print a remark for people on stderr; silent if stdout is not a terminal."""
    if is_terminal():
        print(message, file=sys.stderr)


def print_warning(message: str) -> None:
    """Print a warning on stderr, for people and logs alike."""
    sys.stdout.flush()
    print(f"steward: {escape_line(message)}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a value (a reply, or an item of one) as one JSON document."""
    data = msgspec.json.encode(value)
    if is_terminal():
        data = msgspec.json.format(data, indent=2)
    write_bytes(data + b"\n")


def write_bytes(data: bytes) -> None:
    """Write bytes unchanged to standard output."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def print_table(columns: Sequence[Column], rows: Iterable[Any], style: Style) -> None:
    """Print rows as a table: parsable, drawn by Rich, or aligned plain text.

    Args:
        columns: All columns of the table.
        rows: The rows that the columns format.
        style: Format, header and chosen columns.

    Raises:
        UsageError: ``style.columns`` names an unknown column.
    """
    chosen_columns = _choose_columns(columns, style)
    if style.parsable:
        _print_parsable(chosen_columns, rows, style)
    elif is_terminal():
        row_list = list(rows)
        if row_list:
            print_renderables(_draw_table(chosen_columns, row_list, style))
    else:
        _print_aligned(chosen_columns, rows, style)


def print_csv(columns: Sequence[Column], rows: Iterable[Any], style: Style) -> None:
    """Print rows as CSV, with all columns unless some are chosen.

    Args:
        columns: All columns of the table.
        rows: The rows that the columns format.
        style: Header and chosen columns.

    Raises:
        UsageError: ``style.columns`` names an unknown column.
    """
    import csv
    import io

    chosen_columns = _choose_columns(columns, style) if style.columns else columns
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    if style.has_header:
        writer.writerow([column.name for column in chosen_columns])
    for row in rows:
        cells = [(column.format_plain or column.text)(row) for column in chosen_columns]
        writer.writerow([quote_formula(cell) for cell in cells])
    write_bytes(buffer.getvalue().encode())


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one pair a line; pairs without a value are omitted."""
    for name, value in _align_facts(facts):
        print(f"{name}  {value}")


def draw_facts(facts: Iterable[tuple[str, str]]) -> "list[RenderableType]":
    """Draw names and values like :func:`print_facts`, for :func:`print_renderables`."""
    from rich.text import Text

    return [
        Text(f"{name}  ", style="dim").append(value, style="default not dim")
        for name, value in _align_facts(facts)
    ]


def _align_facts(facts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Right-align the names of facts that have a value."""
    rows = [(name, escape_unprintable(value)) for name, value in facts if value]
    width = max((len(name) for name, _ in rows), default=0)
    return [(f"{name:>{width}}", value) for name, value in rows]


def make_console() -> "Console":
    """Return a Rich console on standard output, without markup or highlighting."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def print_renderables(*renderables: "RenderableType") -> None:
    """Print Rich renderables on a terminal, through a pager if longer than the screen."""
    from rich.console import Group

    console = make_console()
    with console.capture() as capture:
        console.print(Group(*renderables))
    rendered_text = capture.get()
    if rendered_text.count("\n") < console.size.height:
        sys.stdout.write(rendered_text)
        sys.stdout.flush()
    else:
        _page_text(rendered_text)


def _page_text(text: str) -> None:
    """Show text in $PAGER, by default less; print it if there is none."""
    command = shlex.split(os.environ.get("PAGER", "")) or ["less"]
    program = shutil.which(command[0])
    if program is None or command[0] == "cat":
        sys.stdout.write(text)
        return
    # Options of less: exit if the text fits on the screen, pass colours, do not clear.
    environment = {"LESS": "FRX", **os.environ}
    with subprocess.Popen([program, *command[1:]], stdin=subprocess.PIPE, env=environment) as pager:
        try:
            pager.communicate(_encode_output(text))
        except KeyboardInterrupt:
            # The pager owns the terminal and ends on its own key; wait for that.
            pager.wait()


def draw_script(text: str) -> "RenderableType":
    """Draw a script with line numbers, highlighted by the language of its first line."""
    from rich.syntax import Syntax

    escaped = escape_lines(text).removesuffix("\n")
    syntax = Syntax(
        escaped,
        _guess_language(escaped),
        theme="ansi_dark",
        background_color="default",
        line_numbers=True,
        word_wrap=True,
    )
    for number, line in enumerate(escaped.split("\n"), start=1):
        # Comments to a shell, but directives to Slurm (and Torque).
        if line.startswith(("#SBATCH", "#PBS")):
            syntax.stylize_range("bold cyan not dim", (number, 0), (number, len(line)))
    return syntax


def _guess_language(text: str) -> str:
    """Guess the language of a script from its first line; bash by default."""
    first_line = text.partition("\n")[0]
    for marker, language in (
        ("python", "python"),
        ("perl", "perl"),
        ("Rscript", "r"),
        ("lua", "lua"),
    ):
        if first_line.startswith("#!") and marker in first_line:
            return language
    return "bash"


def _choose_columns(columns: Sequence[Column], style: Style) -> list[Column]:
    """Return the requested columns, or the default ones."""
    if not style.columns:
        return [column for column in columns if column.is_default or style.parsable]
    columns_by_name = {column.name.lower(): column for column in columns}
    unknown_names = [name for name in style.columns if name.lower() not in columns_by_name]
    if unknown_names:
        names = ", ".join(column.name for column in columns)
        raise UsageError(
            f"there is no column {unknown_names[0]!r}: the columns are {names}", unknown_names
        )
    return [columns_by_name[name.lower()] for name in style.columns]


def _print_parsable(columns: Sequence[Column], rows: Iterable[Any], style: Style) -> None:
    """Print a table with fields separated by ``|``."""
    lines = []
    if style.has_header:
        lines.append("|".join(column.name for column in columns))
    for row in rows:
        fields = ((column.format_plain or column.text)(row) for column in columns)
        lines.append(
            "|".join(escape_unprintable(field).replace("|", _PIPE_ESCAPE) for field in fields)
        )
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _print_aligned(columns: Sequence[Column], rows: Iterable[Any], style: Style) -> None:
    """Print a table as plain text with aligned columns."""
    cell_rows = [[column.format_cell(row) for column in columns] for row in rows]
    if style.has_header:
        cell_rows.insert(0, [column.name for column in columns])
    widths = [
        max((len(row_cells[index]) for row_cells in cell_rows), default=0)
        for index in range(len(columns))
    ]
    for row_cells in cell_rows:
        padded = [
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(row_cells, widths, columns, strict=True)
        ]
        sys.stdout.write("  ".join(padded).rstrip() + "\n")


def _draw_table(columns: Sequence[Column], rows: list[Any], style: Style) -> "RenderableType":
    """Draw a table with Rich."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None,
        show_header=style.has_header,
        header_style="bold underline",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    cell_texts = {column.name: [column.format_cell(row) for row in rows] for column in columns}
    # Omit columns that are empty in every row, unless the user asked for them.
    visible = [column for column in columns if style.columns or any(cell_texts[column.name])]
    for column in visible:
        table.add_column(
            column.name,
            justify="right" if column.right else "left",
            no_wrap=column.name in _NEVER_WRAPPED,
            overflow="fold",
        )
    for index in range(len(rows)):
        cells = []
        for column in visible:
            cell = cell_texts[column.name][index]
            colour = _STATE_COLOURS.get(cell.partition(" ")[0]) if column.name == "State" else None
            cells.append(Text(cell, style=colour or ""))
        table.add_row(*cells)
    return table


_BAR_INTERVAL_S = 0.1
"""Interval between updates of the progress line, in seconds."""


class ProgressLine:
    """Progress line on stderr of a terminal; erased at the end."""

    def __init__(self) -> None:
        self._is_enabled = sys.stderr.isatty()
        self._count = 0
        self._drawn_at = 0.0
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._width:
            sys.stderr.write(f"\r{'':{self._width}}\r")
            sys.stderr.flush()

    def step(self, noun: str) -> None:
        """Count one more item as done.

        Args:
            noun: Name of the items, in the plural.
        """
        self._count += 1
        self.show(self._count, None, noun)

    def show(self, done_count: int, total: int | None, noun: str) -> None:
        """Show how many items are done, at most once in 0.1 s.

        Args:
            done_count: Number of items done.
            total: Number of all items; None if unknown.
            noun: Name of the items, in the plural.
        """
        now = time.monotonic()
        if not self._is_enabled or now - self._drawn_at < _BAR_INTERVAL_S:
            return
        self._drawn_at = now
        share = f" of {total} ({100 * done_count // total} %)" if total else ""
        line = f"{done_count}{share} {noun}"
        sys.stderr.write(f"\r{line:{self._width}}")
        sys.stderr.flush()
        self._width = len(line)
