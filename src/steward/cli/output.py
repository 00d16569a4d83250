"""The one way to print: tables, facts and scripts, for people, pipes and programs.

On a terminal Rich draws, and what is longer than the screen goes through a
pager. In a pipe the same comes as plain aligned text. Programs ask for
``--parsable2`` or ``--json``. Text that jobs' owners chose is made safe in all
of them but JSON, which carries it whole and is UTF-8 wherever it goes.
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
from steward.core.printable import no_formula, safe, safe_lines
from steward.slurm.times import relative_form

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


__all__ = ["decode", "number", "safe", "safe_lines", "size"]


def decode(data: bytes) -> str:
    r"""Bytes as text; what is not UTF-8 becomes escapes such as ``\xff``."""
    return data.decode("utf-8", "backslashreplace")


def number(count: int, what: str) -> str:
    """So many of something: ``1 script``, ``2 scripts``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def size(count: int | None) -> str:
    """A size for people: ``812``, ``1.2K``, ``3.4M``; "" for None."""
    if count is None:
        return ""
    amount = float(count)
    for unit in ("", "K", "M", "G", "T"):
        if amount < 999.5 or unit == "T":
            return f"{count}" if not unit else f"{amount:.1f}{unit}"
        amount /= 1024
    raise AssertionError("the loop ends at its last unit")


_STANDARD = "%Y-%m-%dT%H:%M:%S"


@lru_cache(maxsize=32)
def _zone(name: str) -> tzinfo | None:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        # A zone that this host does not know: its own is the next best.
        return None


def local(moment: datetime, zone: str = "") -> datetime:
    """A moment in the zone that it is to be shown in.

    Args:
        moment: Aware.
        zone: IANA name of the cluster's zone, "" for the system's; TZ comes before it.
    """
    try:
        if zone and "TZ" not in os.environ:
            return moment.astimezone(_zone(zone))
        return moment.astimezone()
    except (OverflowError, OSError, ValueError):
        # At the ends of the calendar there is no such moment in every zone.
        return moment


def show_time(moment: datetime | None, zone: str = "", now: datetime | None = None) -> str:
    """A time as text; "" for None.

    Args:
        moment: Aware.
        zone: As for :func:`local`.
        now: The present moment, for ``SLURM_TIME_FORMAT=relative``.
    """
    if moment is None:
        return ""
    here = local(moment, zone)
    form = os.environ.get("SLURM_TIME_FORMAT", "")
    if form == "relative":
        form = relative_form(here, local(now or datetime.now(UTC), zone))
    elif form in ("", "standard"):
        form = _STANDARD
    return here.strftime(form)


def zone_to_ask_in() -> str:
    """The IANA zone that typed times are meant in, by TZ; "" for the cluster's."""
    name = os.environ.get("TZ", "").removeprefix(":")
    return name if name and _zone(name) is not None else ""


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
_NEVER_WRAPPED = {"JobID", "Submit", "State"}
_PIPE_ESCAPE = "\\x7c"


class Style(msgspec.Struct, frozen=True, kw_only=True):
    """How to print.

    Attributes:
        json: The whole answer as JSON.
        parsable: Fields separated by ``|``, as ``--parsable2`` of Slurm's commands.
        header: Whether tables begin with a line of names.
        columns: Names of the columns to print; the table's own choice if empty.
    """

    json: bool = False
    parsable: bool = False
    header: bool = True
    columns: tuple[str, ...] = ()


class Column(msgspec.Struct, frozen=True):
    """A column of a table.

    Attributes:
        name: Its heading, and what ``--format`` calls it, in any case.
        text: What it shows of a row, for people.
        plain: What it shows for programs, if that differs.
        right: Whether it is aligned to the right.
        usual: Whether people are shown it without asking.
        widest: How many letters of it people are shown; 0 for all. Programs get all.
    """

    name: str
    text: Callable[[Any], str]
    plain: Callable[[Any], str] | None = None
    right: bool = False
    usual: bool = True
    widest: int = 0

    def cell(self, row: Any) -> str:
        """What people are shown of a row, safe to print."""
        text = printable(self.text(row))
        # In ASCII: not every terminal's encoding has the one letter for it.
        return f"{text[: self.widest - 3]}..." if 0 < self.widest < len(text) else text


def is_terminal() -> bool:
    """Whether a person reads what is printed."""
    return sys.stdout.isatty()


def printable(text: str) -> str:
    r"""Safe text, with ``\u6f22`` for what the output's encoding lacks: as wide as it will be."""
    text = safe(text)
    return text if text.isascii() else _encoded(text).decode(sys.stdout.encoding)


def _encoded(text: str) -> bytes:
    return text.encode(sys.stdout.encoding, "backslashreplace")


def note(message: str) -> None:
    """Tell a person something beside the output; a pipe or program is told nothing."""
    if is_terminal():
        print(message, file=sys.stderr)


def warn(message: str) -> None:
    """Say on stderr, to people and logs alike, what was not as it should be."""
    sys.stdout.flush()
    print(f"steward: {safe(message)}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a value, an answer or an item of one, as one JSON document."""
    data = msgspec.json.encode(value)
    if is_terminal():
        data = msgspec.json.format(data, indent=2)
    write(data + b"\n")


def write(data: bytes) -> None:
    """Write bytes to the standard output, just as they are."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def print_table(columns: Sequence[Column], rows: Iterable[Any], style: Style) -> None:
    """Print rows as a table.

    Args:
        columns: All columns that there are.
        rows: What they show.
        style: How.

    Raises:
        UsageError: ``style.columns`` names a column that there is not.
    """
    chosen = _choose(columns, style)
    if style.parsable:
        _print_parsable(chosen, rows, style)
    elif is_terminal():
        table = list(rows)
        if table:
            print_all(_drawn_table(chosen, table, style))
    else:
        _print_aligned(chosen, rows, style)


def print_csv(columns: Sequence[Column], rows: Iterable[Any], style: Style) -> None:
    """Print rows as a table with commas, all columns of it where none are chosen.

    Args:
        columns: All columns that there are.
        rows: What they show.
        style: Whether with a heading, and which columns.

    Raises:
        UsageError: ``style.columns`` names a column that there is not.
    """
    import csv
    import io

    chosen = _choose(columns, style) if style.columns else columns
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    if style.header:
        writer.writerow([column.name for column in chosen])
    for row in rows:
        cells = [(column.plain or column.text)(row) for column in chosen]
        writer.writerow([no_formula(cell) for cell in cells])
    write(text.getvalue().encode())


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names and values below each other, those without a value left out."""
    for name, value in _aligned(facts):
        print(f"{name}  {value}")


def drawn_facts(facts: Iterable[tuple[str, str]]) -> "list[RenderableType]":
    """As :func:`print_facts`, for :func:`show`."""
    from rich.text import Text

    return [
        Text(f"{name}  ", style="dim").append(value, style="default not dim")
        for name, value in _aligned(facts)
    ]


def _aligned(facts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    rows = [(name, printable(value)) for name, value in facts if value]
    width = max((len(name) for name, _ in rows), default=0)
    return [(f"{name:>{width}}", value) for name, value in rows]


def console() -> "Console":
    """Rich's console on the standard output."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def print_all(*renderables: "RenderableType") -> None:
    """Show something on a terminal, through a pager where it is longer than the screen."""
    from rich.console import Group

    target = console()
    with target.capture() as capture:
        target.print(Group(*renderables))
    rendered = capture.get()
    if rendered.count("\n") < target.size.height:
        sys.stdout.write(rendered)
        sys.stdout.flush()
    else:
        _page(rendered)


def _page(text: str) -> None:
    words = shlex.split(os.environ.get("PAGER", "")) or ["less"]
    program = shutil.which(words[0])
    if program is None or words[0] == "cat":
        sys.stdout.write(text)
        return
    # less: leave where all fits on the screen, let colours through, do not clear.
    environment = {"LESS": "FRX", **os.environ}
    with subprocess.Popen([program, *words[1:]], stdin=subprocess.PIPE, env=environment) as pager:
        try:
            pager.communicate(_encoded(text))
        except KeyboardInterrupt:
            # The pager has the terminal and ends by its own key; only then are we done.
            pager.wait()


def drawn_script(text: str) -> "RenderableType":
    """A script, highlighted by what its first line says it is, with line numbers."""
    from rich.syntax import Syntax

    shown = safe_lines(text).removesuffix("\n")
    drawn = Syntax(
        shown,
        _language(shown),
        theme="ansi_dark",
        background_color="default",
        line_numbers=True,
        word_wrap=True,
    )
    for number, line in enumerate(shown.split("\n"), start=1):
        # To a shell they are comments, to Slurm (and Torque) they are what matters.
        if line.startswith(("#SBATCH", "#PBS")):
            drawn.stylize_range("bold cyan not dim", (number, 0), (number, len(line)))
    return drawn


def _language(text: str) -> str:
    first = text.partition("\n")[0]
    for sign, language in (
        ("python", "python"),
        ("perl", "perl"),
        ("Rscript", "r"),
        ("lua", "lua"),
    ):
        if first.startswith("#!") and sign in first:
            return language
    return "bash"


def _choose(columns: Sequence[Column], style: Style) -> list[Column]:
    if not style.columns:
        return [column for column in columns if column.usual or style.parsable]
    by_name = {column.name.lower(): column for column in columns}
    unknown = [name for name in style.columns if name.lower() not in by_name]
    if unknown:
        names = ", ".join(column.name for column in columns)
        raise UsageError(f"there is no column {unknown[0]!r}: the columns are {names}", unknown)
    return [by_name[name.lower()] for name in style.columns]


def _print_parsable(columns: Sequence[Column], rows: Iterable[Any], style: Style) -> None:
    lines = []
    if style.header:
        lines.append("|".join(column.name for column in columns))
    for row in rows:
        fields = ((column.plain or column.text)(row) for column in columns)
        lines.append("|".join(printable(field).replace("|", _PIPE_ESCAPE) for field in fields))
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _print_aligned(columns: Sequence[Column], rows: Iterable[Any], style: Style) -> None:
    cells = [[column.cell(row) for column in columns] for row in rows]
    if style.header:
        cells.insert(0, [column.name for column in columns])
    widths = [max((len(line[index]) for line in cells), default=0) for index in range(len(columns))]
    for line in cells:
        padded = [
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ]
        sys.stdout.write("  ".join(padded).rstrip() + "\n")


def _drawn_table(columns: Sequence[Column], rows: list[Any], style: Style) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None,
        show_header=style.header,
        header_style="bold underline",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    texts = {column.name: [column.cell(row) for row in rows] for column in columns}
    # What no row has to say is left out, unless somebody asked for it.
    shown = [column for column in columns if style.columns or any(texts[column.name])]
    for column in shown:
        table.add_column(
            column.name,
            justify="right" if column.right else "left",
            no_wrap=column.name in _NEVER_WRAPPED,
            overflow="fold",
        )
    for index in range(len(rows)):
        cells = []
        for column in shown:
            cell = texts[column.name][index]
            colour = _STATE_COLOURS.get(cell.partition(" ")[0]) if column.name == "State" else None
            cells.append(Text(cell, style=colour or ""))
        table.add_row(*cells)
    return table


_EVERY_S = 0.1


class Bar:
    """One line that says how far the work is, and vanishes at the end."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._count = 0
        self._drawn_at = 0.0
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._width:
            sys.stderr.write(f"\r{'':{self._width}}\r")
            sys.stderr.flush()

    def step(self, what: str) -> None:
        """One more is done.

        Args:
            what: Of what, in the plural.
        """
        self._count += 1
        self.show(self._count, None, what)

    def show(self, done: int, total: int | None, what: str) -> None:
        """So many are done.

        Args:
            done: How many.
            total: Of how many; None where that is not known.
            what: Of what, in the plural.
        """
        now = time.monotonic()
        if not self._is_shown or now - self._drawn_at < _EVERY_S:
            return
        self._drawn_at = now
        share = f" of {total} ({100 * done // total} %)" if total else ""
        line = f"{done}{share} {what}"
        sys.stderr.write(f"\r{line:{self._width}}")
        sys.stderr.flush()
        self._width = len(line)
