"""Print command output: tables, CSV, facts, JSON, scripts and a progress line.

All CLI commands print through this module. On a terminal Rich draws colours, and output longer than
the screen goes through a pager; a pipe gets plain aligned text. Programs ask for ``--parsable2`` or
``--json``. Text that job owners chose is escaped everywhere except in JSON, which carries it
unchanged in UTF-8.

In order: formatting of counts, sizes and times (with ``TZ`` and ``SLURM_TIME_FORMAT``),
:class:`Style`, the ``print_*`` functions, Rich drawing, and :class:`ProgressLine`. Columns are
declared in layouts, see :mod:`steward.core.layouts`.
"""

import contextlib
import itertools
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import msgspec

from steward.core.errors import StewardError, UsageError
from steward.core.layouts import (
    HOUR_S,
    TIME_FORMAT,
    Column,
    TimeBound,
    choose_columns,
    find_timezone,
    format_count,
    format_for_programs,
    format_size,
    format_span,
    format_text,
    get_zone_name,
    to_zone,
    write_csv,
)
from steward.core.printable import escape_line, escape_lines
from steward.slurm.times import choose_relative_format

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


__all__ = ["decode_bytes", "escape_line", "escape_lines", "format_count", "format_size"]


def decode_bytes(data: bytes) -> str:
    r"""Decode UTF-8 bytes; invalid bytes become escapes such as ``\xff``."""
    return data.decode("utf-8", "backslashreplace")


def to_local_time(moment: datetime, zone: str = "") -> datetime:
    """Convert a time to the time zone it is displayed in.

    Args:
        moment: An aware datetime.
        zone: IANA name of the cluster's zone, "" for the system's; ``TZ`` takes precedence.
    """
    return to_zone(moment, "" if "TZ" in os.environ else zone)


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
        pattern = TIME_FORMAT
    return local_time.strftime(pattern)


def find_requested_zone() -> str:
    """Return the IANA zone of typed times from ``TZ``; "" means the cluster's zone."""
    name = os.environ.get("TZ", "").removeprefix(":")
    return name if find_timezone(name) is not None else ""


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
_BAR_WIDTH = 24
"""Width of a bar in a table, in characters."""
_PIPE_ESCAPE = "\\x7c"
"""Replaces ``|`` within a field, so that it cannot separate fields."""


TimeUnit = Literal["hours", "minutes", "seconds"]
"""Units of resource time."""
_UNIT_SECONDS: dict[TimeUnit, int] = {"hours": HOUR_S, "minutes": 60, "seconds": 1}


class Style(msgspec.Struct, frozen=True, kw_only=True):
    """Output format that the options of a command select.

    Attributes:
        json: Print the whole reply as JSON.
        parsable: Separate fields by ``|``, as ``--parsable2`` of Slurm's commands does.
        csv: Separate fields by commas, for spreadsheets.
        has_header: Whether tables begin with a line of column names.
        columns: Names of the columns to print; empty for the table's default columns.
        hours_unit: Unit of resource time.
    """

    json: bool = False
    parsable: bool = False
    csv: bool = False
    has_header: bool = True
    columns: tuple[str, ...] = ()
    hours_unit: TimeUnit = "hours"

    @property
    def is_for_programs(self) -> bool:
        """Whether a command prints its table alone, without lines and notes for people."""
        return self.csv or self.parsable or bool(self.columns)


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


def print_line(text: str) -> None:
    """Print a line, with unsafe characters escaped."""
    print(escape_unprintable(text))


def print_note(message: str) -> None:
    """Print a remark for people on stderr; silent if empty or if stdout is not a terminal."""
    if message and is_terminal():
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


def print_json_rows(
    name: str, rows: Iterable[Any], read_rest: Callable[[], Mapping[str, Any]]
) -> None:
    """Print rows as they come, then the rest of their reply, as one JSON document.

    Args:
        name: Name of the list of rows.
        rows: The rows.
        read_rest: Returns the other fields of the document, after the last row.

    Raises:
        StewardError: The rows end early, such as when the daemon restarts. No program can take the
            unfinished document for a whole one.
    """
    is_pretty = is_terminal()

    def encode(value: Any, depth: int) -> bytes:
        data = msgspec.json.encode(value)
        if not is_pretty:
            return data
        return msgspec.json.format(data, indent=2).replace(b"\n", b"\n" + b" " * depth)

    start, between, end = (b"\n  ", b"\n    ", b"\n  ]") if is_pretty else (b"", b"", b"]")
    write_bytes(b"{%b%b:%b[" % (start, msgspec.json.encode(name), b" " * is_pretty))
    separator = between
    count = 0
    try:
        for block in _split_into_blocks(rows):
            for row in block:
                sys.stdout.buffer.write(separator + encode(row, 4))
                separator = b"," + between
            count += len(block)
    except StewardError as error:
        write_bytes(b"\n")
        early = StewardError(f"the JSON ends early, after {count} rows: {error}", error.offender)
        early.exit_code = error.exit_code
        raise early from error
    write_bytes(end + b"," + encode(read_rest(), 0)[1:] + b"\n")


def print_table(
    columns: Sequence[Column], rows: Iterable[Any], style: Style, reply: Any = None
) -> None:
    """Print rows as a table: parsable, CSV, drawn by Rich, or aligned plain text.

    Rows are printed in blocks of :data:`BLOCK_ROWS`, as they come. The first block decides on the
    columns and their widths; a terminal repeats the header above each block, with new widths.

    Args:
        columns: All columns of the table.
        rows: The rows that the columns format.
        style: Format, header and chosen columns.
        reply: The reply that holds the rows, for columns and time zones that need it.

    Raises:
        UsageError: ``style.columns`` names an unknown column.
    """
    tables = _iterate_tables(columns, rows, style, reply)
    if is_terminal() and not style.csv and not style.parsable:
        _print_paged(_render(table.draw()) for table in tables if table.columns and table.rows)
        return
    for table in tables:
        if style.csv:
            table.print_csv()
        elif style.parsable:
            table.print_parsable()
        elif table.columns:  # without any, all are for programs; people read the lines below
            table.print_aligned()


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
    _print_paged(iter([_render(*renderables)]))


def _render(*renderables: "RenderableType") -> str:
    """Return Rich renderables as text for this terminal."""
    from rich.console import Group

    console = make_console()
    with console.capture() as capture:
        console.print(Group(*renderables))
    return capture.get()


def _print_paged(texts: Iterator[str]) -> None:
    """Print texts on a terminal, through a pager if together longer than the screen."""
    beginning = ""
    for text in texts:
        beginning += text
        if beginning.count("\n") >= make_console().size.height:
            _page_texts(itertools.chain((beginning,), texts))
            return
    sys.stdout.write(beginning)
    sys.stdout.flush()


def _page_texts(texts: Iterable[str]) -> None:
    """Show texts in $PAGER, by default less; print them if there is none."""
    import shutil
    import subprocess

    command = shlex.split(os.environ.get("PAGER", "")) or ["less"]
    program = shutil.which(command[0])
    if program is None or command[0] == "cat":
        sys.stdout.writelines(texts)
        return
    # Options of less: exit if the text fits on the screen, pass colours, do not clear.
    environment = {"LESS": "FRX", **os.environ}
    with subprocess.Popen([program, *command[1:]], stdin=subprocess.PIPE, env=environment) as pager:
        assert pager.stdin is not None, "a pipe"
        try:
            # The pager ends on its own key, perhaps before it has read everything.
            with contextlib.suppress(BrokenPipeError), pager.stdin as pipe:
                for text in texts:
                    pipe.write(_encode_output(text))
        except KeyboardInterrupt:
            # The pager owns the terminal and ends on its own key; wait for that.
            pager.wait()
            raise


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


BLOCK_ROWS: Final = 1000
"""Rows that are formatted together: output in blocks needs no memory for the whole."""


def _split_into_blocks(rows: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield rows in blocks; one empty block if there are none."""
    remaining = iter(rows)
    yield list(itertools.islice(remaining, BLOCK_ROWS))
    while block := list(itertools.islice(remaining, BLOCK_ROWS)):
        yield block


def _iterate_tables(
    columns: Sequence[Column], rows: Iterable[Any], style: Style, reply: Any
) -> "Iterator[_Table]":
    """Yield a table block by block; the first block has the header."""
    blocks = _split_into_blocks(rows)
    first_rows = next(blocks)
    known_rows = rows if isinstance(rows, Sequence) else first_rows
    table = _Table(columns, first_rows, style, reply, known_rows)
    yield table
    for block in blocks:
        table.rows, table.has_header = block, False
        yield table


class _Table:
    """Rows of a table with the columns that a style selects.

    ``known_rows`` decide which columns a terminal shows: all rows, or the first of a stream.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: list[Any],
        style: Style,
        reply: Any,
        known_rows: Sequence[Any],
    ) -> None:
        self.rows = rows
        self.has_header = style.has_header
        self._widths: list[int] = []
        self._style = style
        self._reply = reply
        if style.columns:
            self.columns = _find_columns(columns, style.columns)
        elif style.parsable or style.csv:
            self.columns = list(columns)
        else:
            self.columns = choose_columns(columns, known_rows, reply)

    def list_exact_cells(self) -> Iterator[list[str]]:
        """Yield the cells of each row for programs."""
        for row in self.rows:
            yield [self._format_exact(column, row) for column in self.columns]

    def _format_exact(self, column: Column, row: Any) -> str:
        value = column.read_exact_value(row, self._reply)
        if isinstance(value, datetime):
            # As Slurm's commands write times, without the offset.
            return self._format_time(value, row)
        unit_s = _UNIT_SECONDS[self._style.hours_unit]
        return format_for_programs(column, row, self._reply, hours_unit_s=unit_s)

    def _format_time(self, value: datetime | TimeBound, row: Any) -> str:
        zone = get_zone_name(row, self._reply)
        if isinstance(value, TimeBound):
            return f"<{format_time(value.moment, zone)}"
        return format_time(value, zone)

    def _format(self, column: Column, row: Any) -> str:
        """Return the text of a cell for people, safe to print."""
        value = column.read_value(row, self._reply)
        if value is None:
            return "-" if column.format == "money" else ""
        text = escape_unprintable(
            value if isinstance(value, str) else self._format_value(column, value, row)
        )
        width = column.max_width
        # Three dots, because not every terminal encoding has the ellipsis character.
        return f"{text[: width - 3]}..." if 0 < width < len(text) else text

    def _format_value(self, column: Column, value: Any, row: Any) -> str:
        match column.format:
            case "time":
                return self._format_time(value, row)
            case "bytes":
                return format_size(value)
            case "duration":
                return format_span(round(value))
            case "seconds":
                from steward.accounting.job_page.notes import format_duration

                return format_duration(value)
            case "money":
                from steward.bank.money import Unit, format_money

                unit = Unit("", getattr(self._reply, "decimals", 2))
                return format_money(value, unit).strip()
            case "hours" if self._style.hours_unit != "seconds":
                return f"{value / _UNIT_SECONDS[self._style.hours_unit]:.1f}"
            case "percent":
                return f"{100 * value:.1f}"
            case "decimal":
                return f"{value:.1f}"
            case "bar":
                from steward.cli.charts import choose_signs, draw_bar, render_plain

                return render_plain([draw_bar(value, _BAR_WIDTH, choose_signs(), "")]).strip()
            case _:
                return format_text(value)

    def print_csv(self) -> None:
        """Print the rows as CSV, with all columns unless some are chosen."""
        text = write_csv(self.columns, self.list_exact_cells(), header=self.has_header)
        write_bytes(text.encode())

    def print_parsable(self) -> None:
        """Print a table with fields separated by ``|``."""
        lines = ["|".join(column.name for column in self.columns)] * self.has_header
        lines += (
            "|".join(escape_unprintable(cell).replace("|", _PIPE_ESCAPE) for cell in cells)
            for cells in self.list_exact_cells()
        )
        sys.stdout.write("".join(f"{line}\n" for line in lines))

    def print_aligned(self) -> None:
        """Print a table as plain text with aligned columns."""
        cell_rows = [[self._format(column, row) for column in self.columns] for row in self.rows]
        if self.has_header:
            cell_rows.insert(0, [column.name for column in self.columns])
        self._widths = self._widths or [
            max((len(row_cells[index]) for row_cells in cell_rows), default=0)
            for index in range(len(self.columns))
        ]
        for row_cells in cell_rows:
            padded = [
                cell.rjust(width) if column.is_right_aligned else cell.ljust(width)
                for cell, width, column in zip(row_cells, self._widths, self.columns, strict=True)
            ]
            sys.stdout.write("  ".join(padded).rstrip() + "\n")

    def draw(self) -> "RenderableType":
        """Draw a table with Rich."""
        from rich.table import Table
        from rich.text import Text

        table = Table(
            box=None,
            show_header=self._style.has_header,
            header_style="bold underline",
            pad_edge=False,
            padding=(0, 2, 0, 0),
        )
        cells_by_name = {
            column.name: [self._format(column, row) for row in self.rows] for column in self.columns
        }
        # Omit columns that are empty in every row, unless the user asked for them.
        visible = [
            column
            for column in self.columns
            if self._style.columns or any(cells_by_name[column.name])
        ]
        for column in visible:
            table.add_column(
                column.name,
                justify="right" if column.is_right_aligned else "left",
                no_wrap=column.name in _NEVER_WRAPPED,
                overflow="fold",
            )
        for index in range(len(self.rows)):
            cells = []
            for column in visible:
                cell = cells_by_name[column.name][index]
                colour = (
                    _STATE_COLOURS.get(cell.partition(" ")[0]) if column.name == "State" else None
                )
                cells.append(Text(cell, style=colour or ""))
            table.add_row(*cells)
        return table


def _find_columns(columns: Sequence[Column], names: Sequence[str]) -> list[Column]:
    """Return the requested columns."""
    columns_by_name = {column.name.lower(): column for column in columns}
    unknown_names = [name for name in names if name.lower() not in columns_by_name]
    if unknown_names:
        known_names = ", ".join(column.name for column in columns)
        raise UsageError(
            f"unknown column {unknown_names[0]!r}: the columns are {known_names}", unknown_names
        )
    return [columns_by_name[name.lower()] for name in names]


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
        self.end()

    def end(self) -> None:
        """Erase the line, and show no more progress."""
        self._is_enabled = False
        if self._width:
            sys.stderr.write(f"\r{'':{self._width}}\r")
            sys.stderr.flush()
            self._width = 0

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
