"""Scripts with their words in colour, and what was looked for in them."""

import functools
import re
from typing import TYPE_CHECKING, Final

from markupsafe import Markup, escape

from steward.archive.answers import HitLine
from steward.core.printable import safe, safe_lines

if TYPE_CHECKING:
    from pygments.lexer import Lexer

MOST_LETTERS: Final = 40_000
MOST_LINES: Final = 1500
"""So much of a script is shown in colour; the rest is a file to be taken home."""

_LANGUAGES: Final = (
    (re.compile(r"\b(ba|da|k|z)?sh\b"), "bash"),
    (re.compile(r"\bt?csh\b"), "tcsh"),
    (re.compile(r"\bpython[0-9.]*\b"), "python"),
    (re.compile(r"\bperl\b"), "perl"),
    (re.compile(r"\bRscript\b"), "r"),
    (re.compile(r"\bjulia\b"), "julia"),
)
_DIRECTIVE: Final = re.compile(r"#(SBATCH|PBS|BSUB|DW|BB)\b")


def highlighted(script: str) -> Markup:
    """A script's lines, each an element with its number, words marked by their kind."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter

    shown = safe_lines(beginning(script))
    # What Pygments gives is escaped, and a line's elements end with it.
    marked = highlight(shown, _lexer(_language(shown)), HtmlFormatter(nowrap=True))
    plain = shown.split("\n")
    lines = []
    for number, line in enumerate(marked.removesuffix("\n").split("\n")):
        is_directive = number < len(plain) and _DIRECTIVE.match(plain[number])
        kind = "line directive" if is_directive else "line"
        lines.append(f'<span class="{kind}" id="L{number + 1}">{line}\n</span>')
    return Markup("".join(lines))  # noqa: S704 -- escaped by Pygments


def beginning(script: str) -> str:
    """As much of a script as is shown."""
    return "".join(script[:MOST_LETTERS].splitlines(keepends=True)[:MOST_LINES])


def marked(line: HitLine) -> Markup:
    """A line in which something was found, with what was found marked."""
    parts = [Markup()]
    place = 0
    for begin, end in sorted(line.spans):
        if begin < place or end <= begin:
            continue
        parts.append(escape(safe(line.text[place:begin])))
        parts.append(Markup("<mark>{}</mark>").format(safe(line.text[begin:end])))
        place = end
    parts.append(escape(safe(line.text[place:])))
    return Markup("").join(parts)


def _language(script: str) -> str:
    first = script.partition("\n")[0]
    if not first.startswith("#!"):
        return "bash"
    return next((name for found, name in _LANGUAGES if found.search(first)), "text")


@functools.cache
def _lexer(name: str) -> "Lexer":
    from pygments.lexers import get_lexer_by_name

    return get_lexer_by_name(name, stripnl=False, ensurenl=True)
