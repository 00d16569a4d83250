"""Escape untrusted text for terminals and spreadsheets: job names, node reasons, scripts.

A control character could move the cursor, change the window's title or forge a line; a
bidirectional override could show a name backwards. Output for people and for programs shows
such characters as escapes; only JSON carries them unchanged.
"""

import re

_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
_UNPRINTABLE_IN_LINES = re.compile(r"[^\x20-\x7e\n\t]")


def escape_line(text: str) -> str:
    r"""Return text on one line, with unprintable characters as escapes (``\n``, ``\x1b``)."""
    return text if text.isascii() and text.isprintable() else _UNPRINTABLE.sub(_escape, text)


def escape_lines(text: str) -> str:
    """Escape text as :func:`escape_line`, but keep newlines and tabs."""
    return _UNPRINTABLE_IN_LINES.sub(_escape, text)


def quote_formula(cell: str) -> str:
    """Quote a cell that a spreadsheet would compute as a formula; users choose job names."""
    is_number = cell.replace("-", "", 1).replace(".", "", 1).isdecimal()
    return f"'{cell}" if cell[:1] in "=+-@\t\r" and cell and not is_number else cell


def _escape(match: re.Match[str]) -> str:
    letter = match[0]
    if letter.isprintable():
        return letter
    return letter.encode("unicode_escape").decode("ascii")
