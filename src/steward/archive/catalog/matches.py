"""Term matching: decide exactly whether search terms occur in a script, and in which lines.

The trigram index knows which groups of three letters a script contains, not where. It proposes
scripts; :class:`TermMatcher` checks each one. Letters are folded by ``str.casefold``, which maps
each letter separately: a text that is part of another remains so after folding, so no hit is
missed.
"""

import re
from collections.abc import Sequence

from steward.archive.requests import HitLine
from steward.core.errors import UsageError

MAX_TERM_LENGTH = 1000
MAX_TERMS = 20
_MAX_TRIGRAMS = 16
_MAX_SPANS = 10_000
_MAX_LINE_LETTERS = 200
_TRIGRAM_LENGTH = 3


class SearchError(UsageError):
    """Error: the search terms are invalid."""


def decode_script_text(data: bytes) -> str:
    """Decode a script; bytes that are not UTF-8 become U+FFFD."""
    return data.decode("utf-8", "replace")


def fold_for_index(text: str) -> str:
    """Convert text to its indexed form: folded, and without NUL, at which the index would stop."""
    # The two line ends let even the last letters begin a group of three.
    return text.casefold().replace("\0", " ") + "\n\n"


class TermMatcher:
    """Matcher of search terms in scripts.

    Args:
        terms: The terms, verbatim.
        case: Whether matching is case-sensitive.
        words: Whether a term must match whole words.

    Attributes:
        terms: The texts, with U+FFFD for what cannot be decoded.
        words: As above.

    Raises:
        SearchError: There is no term, there are too many, or one is empty or too long.
    """

    def __init__(self, terms: Sequence[str], *, case: bool = False, words: bool = False) -> None:
        if not terms or len(terms) > MAX_TERMS:
            raise SearchError(f"cannot search for {len(terms)} texts: give 1 to {MAX_TERMS}", terms)
        for term in terms:
            if not term or len(term) > MAX_TERM_LENGTH:
                raise SearchError(
                    f"invalid search text {term[:40]!r}: give 1 to {MAX_TERM_LENGTH} characters",
                    term,
                )
        self._case = case
        self.words = words
        # Scripts contain U+FFFD for undecodable bytes, so terms must, too.
        decoded = [
            term.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for term in terms
        ]
        self.terms = tuple(decoded)
        # For the index lookup, as in ``fold_for_index``; a NUL in a term is checked by the patterns
        # below.
        self._index_terms = [term.casefold().replace("\0", " ") for term in decoded]
        self._terms = decoded if case else [term.casefold() for term in decoded]
        edges = (r"(?<!\w)", r"(?!\w)") if words else ("", "")
        self._patterns = [re.compile(edges[0] + re.escape(term) + edges[1]) for term in self._terms]
        # The longest first: if two terms begin alike, the longer one is marked.
        ordered = sorted(set(self._terms), key=len, reverse=True)
        body = "|".join(map(re.escape, ordered))
        self._any_term = re.compile(f"{edges[0]}(?:{body}){edges[1]}")

    def list_trigrams(self) -> list[str]:
        """Return a sample of the groups of three letters that every matching script contains."""
        trigrams: dict[str, None] = {}
        max_per_term = max(2, _MAX_TRIGRAMS // len(self._index_terms))
        for term in self._index_terms:
            candidates = [
                term[i : i + _TRIGRAM_LENGTH] for i in range(len(term) - _TRIGRAM_LENGTH + 1)
            ]
            candidates = list(dict.fromkeys(candidates))
            if len(candidates) > max_per_term:
                last_index = len(candidates) - 1
                candidates = [
                    candidates[i * last_index // (max_per_term - 1)] for i in range(max_per_term)
                ]
            trigrams.update(dict.fromkeys(candidates))
        return list(trigrams)

    def get_longest_term(self) -> str:
        """Return the longest term, if all are too short for a group of three."""
        return max(self._index_terms, key=len)

    def matches(self, text: str) -> bool:
        """Return whether a script's text contains all terms."""
        subject = text if self._case else text.casefold()
        if self.words:
            return all(pattern.search(subject) for pattern in self._patterns)
        return all(term in subject for term in self._terms)

    def find_lines(self, text: str, limit: int) -> tuple[tuple[HitLine, ...], int]:
        """Return the first matching lines, and the number of further ones.

        Args:
            text: A script that matches.
            limit: Maximum number of lines.
        """
        subject = text if self._case else text.casefold()
        # If folding changed the length, positions differ between the two texts.
        visible = text if len(text) == len(subject) else subject
        lines: list[HitLine] = []
        number, line_start, more_lines, last_counted = 1, 0, 0, 0
        spans: list[tuple[int, int]] = []

        def finish() -> None:
            if spans:
                lines.append(_make_matching_line(visible, number, line_start, spans))
                spans.clear()

        for count, match in enumerate(self._any_term.finditer(subject)):
            if count >= _MAX_SPANS:
                break
            newlines = subject.count("\n", line_start, match.start())
            if newlines:
                finish()
                number += newlines
                line_start = subject.rfind("\n", 0, match.start()) + 1
            if len(lines) < limit:
                spans.append(match.span())
            elif number != last_counted:
                more_lines += 1
                last_counted = number
        finish()
        return tuple(lines), more_lines


def _make_matching_line(
    text: str, number: int, start: int, spans: list[tuple[int, int]]
) -> HitLine:
    """Make a matching line, shortened around its first hit."""
    end = text.find("\n", start)
    if end < 0:
        end = len(text)
    if end - start > _MAX_LINE_LETTERS:
        middle = (spans[0][0] + min(spans[0][1], end)) // 2
        start = max(start, middle - _MAX_LINE_LETTERS // 2)
        end = min(end, start + _MAX_LINE_LETTERS)
    visible_spans = [
        (max(first, start) - start, min(last, end) - start)
        for first, last in spans
        if first < end and last > start
    ]
    return HitLine(number=number, text=text[start:end], spans=tuple(visible_spans))
