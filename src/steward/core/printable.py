"""Text that others chose, made fit to print: job names, node reasons, scripts.

A control character could move the cursor, change the window's title or forge
a line; a bidirectional override could show a name backwards. They are printed
as escapes, to people and to programs alike; only JSON carries them as they are.
"""

import re

_ODD = re.compile(r"[^\x20-\x7e]")
_ODD_IN_LINES = re.compile(r"[^\x20-\x7e\n\t]")


def safe(text: str) -> str:
    r"""The text on one line, what cannot be printed as escapes (``\n``, ``\x1b``)."""
    return text if text.isascii() and text.isprintable() else _ODD.sub(_escape, text)


def safe_lines(text: str) -> str:
    """As :func:`safe`, but newlines and tabs stay."""
    return _ODD_IN_LINES.sub(_escape, text)


def no_formula(cell: str) -> str:
    """A text that no spreadsheet computes: who submits a job may choose some of these."""
    is_number = cell.replace("-", "", 1).replace(".", "", 1).isdecimal()
    return f"'{cell}" if cell[:1] in "=+-@\t\r" and cell and not is_number else cell


def _escape(match: re.Match[str]) -> str:
    letter = match[0]
    if letter.isprintable():
        return letter
    return letter.encode("unicode_escape").decode("ascii")
