"""Formatting of values for web pages: times, durations, sizes, amounts, states and scripts.

``FILTERS`` are the template filters. Also: pretty-printed JSON, scripts highlighted by Pygments,
and search hits with marked matches. Results with markup are ``Markup``; templates escape all
others.
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec
from markupsafe import Markup, escape

from steward.accounting.job_page.notes import format_duration
from steward.archive.requests import HitLine
from steward.bank import money
from steward.bank.money import Unit
from steward.core import layouts
from steward.core.layouts import Column, TimeBound, to_zone
from steward.core.printable import escape_line, escape_lines
from steward.web.node_map import render_node_state

if TYPE_CHECKING:
    from pygments.lexer import Lexer


_DASH: Final = "\N{EN DASH}"
"""Shown for an unknown value."""
_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_time_html(
    moment: datetime | None, zone: str = "", pattern: str = "%Y-%m-%d %H:%M:%S"
) -> Markup | str:
    """Format a time in a zone as a <time> element that also holds the UTC time."""
    if moment is None:
        return _DASH
    local_time = to_zone(moment, zone)
    utc_text = moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        utc_text, local_time.strftime("%Y-%m-%d %H:%M:%S %Z"), local_time.strftime(pattern)
    )


def format_duration_html(seconds: float | timedelta | None) -> str:
    """Format a duration as Slurm does: ``1-02:03:04``."""
    if seconds is None:
        return _DASH
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    sign, total_s = "-" if seconds < 0 else "", abs(round(seconds))
    days, rest_s = divmod(total_s, 86400)
    clock = f"{rest_s // 3600:02}:{rest_s // 60 % 60:02}:{rest_s % 60:02}"
    return f"{sign}{days}-{clock}" if days else f"{sign}{clock}"


def format_size_html(size: float | None) -> str:
    """Format a size in bytes: ``1.2 GiB``."""
    if size is None:
        return _DASH
    scaled = float(size)
    for unit in _SIZES:
        if abs(scaled) < 1000 or unit == _SIZES[-1]:
            return f"{size:.0f} B" if unit == "B" else f"{scaled:.1f} {unit}"
        scaled /= 1024
    raise AssertionError("the loop ends at its last unit")


def format_number_html(value: float | None, decimals: int = 0) -> str:
    """Format a number with thin spaces between thousands."""
    if value is None:
        return _DASH
    return f"{value:,.{decimals}f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def format_percent_html(part: float | None, whole: float | None = 1.0) -> str:
    """Format a part of a whole as a percentage."""
    if part is None or not whole:
        return _DASH
    return f"{100 * part / whole:.0f}\N{NARROW NO-BREAK SPACE}%"


def format_amount_html(value: int | None, unit: str = "", decimals: int = 2) -> str:
    """Format an amount in micro-SU, with the unit's name if given."""
    return _DASH if value is None else money.format_money(value, Unit(unit, decimals)).strip()


def format_state_html(state: str | dict[str, int]) -> Markup:
    """Return a state in its colour, or the states of an array's tasks with their counts."""
    if isinstance(state, dict):
        template = Markup("<span>{} {}</span>")
        parts = [
            template.format(format_number_html(count), format_state_html(name))
            for name, count in state.items()
        ]
        return Markup('<span class="tasks">{}</span>').format(Markup(" ").join(parts))
    state = escape_line(state)
    base = state.split(" ", maxsplit=1)[0].split("+", maxsplit=1)[0].upper()
    return Markup('<span class="state state-{}">{}</span>').format(
        "".join(char for char in base.lower() if char.isalnum()), escape(state)
    )


def format_cell(column: Column, row: Any, reply: Any) -> Markup | str:
    """Format a cell of a reply's table; "" for an unknown value. Templates escape the result.

    Args:
        column: The column.
        row: The row.
        reply: The reply that the row is part of; it has the zone and the bank's decimals.
    """
    value = column.read_value(row, reply)
    if value is None and column.absent:
        return Markup('<em class="faint">{}</em>').format(column.absent)
    if value is None and column.format == "money":
        return _DASH
    if value in (None, "", ()):
        return ""
    if isinstance(value, str) and column.format not in _MARKED:
        return escape_line(value)
    match column.format:
        case "time":
            moment = value.moment if isinstance(value, TimeBound) else value
            shown = format_time_html(moment, layouts.get_zone_name(row, reply))
            return Markup("before {}").format(shown) if isinstance(value, TimeBound) else shown
        case "money":
            text = format_amount_html(value, "", getattr(reply, "decimals", 2))
            return Markup('<span class="debt">{}</span>').format(text) if value < 0 else text
        case "bar":
            return _draw_meter(column, value)
        case "percent" if column.low:
            return Markup("{} {}").format(_draw_meter(column, value), format_percent_html(value))
        case name:
            return _CELL_FORMATS[name](value)


def _format_code(value: str | Iterable[str]) -> Markup:
    """Return a text, or lines of text, to copy."""
    if isinstance(value, str):
        return Markup("<code>{}</code>").format(escape_line(value))
    return Markup('<pre tabindex="0">{}</pre>').format("\n".join(map(escape_line, value)))


def _format_words(value: Any) -> str:
    return escape_line(layouts.format_text(value, ", "))


def _draw_meter(column: Column, share: float) -> Markup:
    """Return a ratio as a bar."""
    return Markup(
        '<meter min="0" max="1" low="{}" value="{:.3f}" aria-label="{}">{}</meter>'
    ).format(column.low, min(max(share, 0.0), 1.0), column.heading, format_percent_html(share))


def format_scope_html(reply: Any, columns: Sequence[Column]) -> Markup:
    """Return period and unit of a reply's rows, for the caption of their table."""
    scope = layouts.describe_scope(reply, columns, format_time_html, escape=escape)
    return Markup(scope)  # noqa: S704 -- its times are markup, the rest is escaped


def _find_key(columns: Sequence[Column]) -> str:
    """Return the name of the column that names the rows."""
    return next((column.name for column in columns if column.is_key), columns[0].name)


FILTERS: Final = {
    "when": format_time_html,
    "duration": format_duration_html,
    "size": format_size_html,
    "number": format_number_html,
    "percent": format_percent_html,
    "amount": format_amount_html,
    "state": format_state_html,
    "node_state": render_node_state,
    "printable": escape_line,
    "cell": format_cell,
    "columns": functools.partial(layouts.choose_columns, on_page=True),
    "key": _find_key,
    "scope": format_scope_html,
}
"""Template filters by name."""


_MARKED: Final = ("state", "node_state", "code")
"""Formats that mark up a string."""
_CELL_FORMATS: Final[dict[str, Callable[[Any], Markup | str]]] = {
    "text": _format_words,
    "prose": _format_words,
    "code": _format_code,
    "count": format_number_html,
    "decimal": lambda value: format_number_html(value, 1),
    "hours": lambda value: format_number_html(value / layouts.HOUR_S, 1),
    "bytes": format_size_html,
    "duration": format_duration_html,
    "seconds": format_duration,
    "percent": format_percent_html,
    "state": format_state_html,
    "node_state": render_node_state,
}
"""Functions of the formats that need the value alone."""

_LONGEST_JSON: Final = 20_000
"""Most characters of JSON shown."""


def format_json_html(value: Any) -> str:
    """Format a value as indented JSON, truncated if very long; "" if empty."""
    if value is None or value in ({}, []):
        return ""
    text = msgspec.json.format(msgspec.json.encode(value)).decode()
    return text if len(text) <= _LONGEST_JSON else f"{text[:_LONGEST_JSON]}\n[…]"


MOST_LETTERS: Final = 40_000
MOST_LINES: Final = 1500
"""Limits of the highlighted part of a script; the full script is a download."""

_LANGUAGES: Final = (
    (re.compile(r"\b(ba|da|k|z)?sh\b"), "bash"),
    (re.compile(r"\bt?csh\b"), "tcsh"),
    (re.compile(r"\bpython[0-9.]*\b"), "python"),
    (re.compile(r"\bperl\b"), "perl"),
    (re.compile(r"\bRscript\b"), "r"),
    (re.compile(r"\bjulia\b"), "julia"),
)
_DIRECTIVE: Final = re.compile(r"#(SBATCH|PBS|BSUB|DW|BB)\b")
"""Lines with directives of a batch or burst-buffer system."""


def highlight_script(script: str) -> Markup:
    """Highlight a script: one element a line, with its line number."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter

    escaped = escape_lines(truncate_script(script))
    # The output of Pygments is escaped, and none of its elements spans lines.
    highlighted = highlight(
        escaped, _load_lexer(_detect_language(escaped)), HtmlFormatter(nowrap=True)
    )
    plain_lines = escaped.split("\n")
    lines = []
    for number, line in enumerate(highlighted.removesuffix("\n").split("\n")):
        is_directive = number < len(plain_lines) and _DIRECTIVE.match(plain_lines[number])
        css_class = "line directive" if is_directive else "line"
        lines.append(f'<span class="{css_class}" id="L{number + 1}">{line}\n</span>')
    return Markup("".join(lines))  # noqa: S704 -- escaped by Pygments


def truncate_script(script: str) -> str:
    """Return the part of a script that pages show."""
    return "".join(script[:MOST_LETTERS].splitlines(keepends=True)[:MOST_LINES])


def mark_matches(line: HitLine) -> Markup:
    """Return a line of a search hit with the matches marked."""
    parts = [Markup()]
    position = 0
    for begin, end in sorted(line.spans):
        if begin < position or end <= begin:
            continue
        parts.append(escape(escape_line(line.text[position:begin])))
        parts.append(Markup("<mark>{}</mark>").format(escape_line(line.text[begin:end])))
        position = end
    parts.append(escape(escape_line(line.text[position:])))
    return Markup("").join(parts)


def _detect_language(script: str) -> str:
    """Return the Pygments name of a script's language, by its first line."""
    first_line = script.partition("\n")[0]
    if not first_line.startswith("#!"):
        return "bash"
    return next((name for pattern, name in _LANGUAGES if pattern.search(first_line)), "text")


@functools.cache
def _load_lexer(name: str) -> "Lexer":
    """Load a Pygments lexer."""
    from pygments.lexers import get_lexer_by_name

    return get_lexer_by_name(name, stripnl=False, ensurenl=True)
