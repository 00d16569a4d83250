"""Man page source: escaping, macros, and the Markdown of the documentation."""

from collections.abc import Iterator, Sequence
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

_ESCAPES: Final = str.maketrans(
    {
        "\\": r"\e",
        "-": r"\-",
        "…": "...",
        "→": r"\(->",
        "≥": r"\(>=",
        "≤": r"\(<=",
    }
)
_MEANINGS: Final = ("", "meaning", "means")
"""Headings of columns that need not be named."""


def escaped(text: str) -> str:
    """Escape text for troff."""
    text = text.translate(_ESCAPES)
    return "".join(one if ord(one) < 128 else rf"\[u{ord(one):04X}]" for one in text)


def line(text: str) -> str:
    """Return text as a separate line, which is no request even if it begins with a dot."""
    return rf"\&{text}" if text.startswith((".", "'")) else text


def bold(text: str) -> str:
    """Return text in bold, for words to type."""
    return rf"\fB{escaped(text)}\fR"


def italic(text: str) -> str:
    """Return text in italics, for placeholders."""
    return rf"\fI{escaped(text)}\fR"


def quoted(text: str) -> str:
    """Return an argument of a macro."""
    return '"' + escaped(text).replace('"', r"\(dq") + '"'


def head(name: str, section: int, version: str, date: str) -> str:
    """Return the first line of a page."""
    steward = quoted(f"Steward {version}")
    return f'.TH {quoted(name.upper())} {section} "{date}" {steward} {quoted("Steward manual")}'


def verbatim(text: str) -> list[str]:
    """Return text that keeps its lines."""
    lines = [line(escaped(one)) or r"\&" for one in text.splitlines()]
    return [".PP", ".RS 4", ".nf", *lines, ".fi", ".RE"]


def of_markdown(text: str) -> list[str]:
    """Return the lines of a page of Markdown, without its first heading."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    return list(_Pages(tokens).lines())


class _Pages:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._is_begun = False

    def lines(self) -> Iterator[str]:
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            self._at += 1
            yield from self._of(token)

    def _of(self, token: Token) -> Iterator[str]:
        if token.type == "heading_open":
            yield from self._heading(token)
        elif token.type == "paragraph_open":
            if not self._is_begun:
                yield ".PP"
            self._is_begun = False
        elif token.type == "inline":
            yield from _folded(_inline(token))
        elif token.type in ("fence", "code_block"):
            yield from verbatim(token.content)
        elif token.type in ("bullet_list_open", "ordered_list_open"):
            self._depth += 1
            if self._depth > 1:
                yield ".RS 4"
        elif token.type in ("bullet_list_close", "ordered_list_close"):
            self._depth -= 1
            if self._depth:
                yield ".RE"
        elif token.type == "list_item_open":
            mark = f"{token.info}." if token.info else r"\(bu"
            yield f".IP {mark} 4" if token.info else r".IP \(bu 2"
            self._is_begun = True
        elif token.type == "table_open":
            yield from self._table()

    def _heading(self, token: Token) -> Iterator[str]:
        inline = self._tokens[self._at]
        self._at += 2
        plain = "".join(child.content for child in inline.children or ())
        if token.tag == "h2":
            yield f".SH {quoted(plain)}"
        elif token.tag != "h1":
            yield f".SS {quoted(plain)}"

    def _table(self) -> Iterator[str]:
        """Yield each row as an item, with its first cell as the name."""
        rows: list[list[str]] = []
        while self._tokens[self._at].type != "table_close":
            token = self._tokens[self._at]
            if token.type == "tr_open":
                rows.append([])
            elif token.type == "inline":
                rows[-1].append(_inline(token))
            self._at += 1
        self._at += 1
        heading = rows[0]
        for row in rows[1:]:
            yield ".TP"
            yield line(row[0])
            yield from _folded(_cells(heading, row))


def _cells(heading: Sequence[str], row: Sequence[str]) -> str:
    """Return the cells after the first, with the meaning before the others."""
    cells = [(title, cell) for title, cell in zip(heading[1:], row[1:], strict=False) if cell]
    plain = [cell for title, cell in cells if title in _MEANINGS]
    named = [
        f"{title[:1].upper()}{title[1:]}: {cell}" for title, cell in cells if title not in _MEANINGS
    ]
    return " ".join(cell if cell.endswith(".") else f"{cell}." for cell in (*plain, *named))


def _inline(token: Token) -> str:
    parts = []
    for child in token.children or ():
        if child.type == "text":
            parts.append(escaped(child.content))
        elif child.type == "code_inline":
            parts.append(bold(child.content))
        elif child.type == "softbreak":
            parts.append("\n")
        elif child.type in ("strong_open", "em_open"):
            parts.append(r"\fB" if child.type == "strong_open" else r"\fI")
        elif child.type in ("strong_close", "em_close"):
            parts.append(r"\fR")
    return "".join(parts)


def _folded(text: str) -> Iterator[str]:
    yield from (line(one) for one in text.split("\n"))
