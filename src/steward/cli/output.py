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
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from steward.cli.text import safe, safe_lines
from steward.core.errors import UsageError
from steward.core.printable import no_formula

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

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
            show(_drawn_table(chosen, table, style))
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


def show(*renderables: "RenderableType") -> None:
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
