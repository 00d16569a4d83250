"""Search: from the months' indexes to proved hits, newest first, a page at a time.

A month's index proposes uses of scripts, newest first (``walking.py``). Each
script is looked at (``matching.py``), and who asks is looked at, before a use
is a hit, is counted, or is told of in any other way.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from steward.archive.answers import HitLine
from steward.archive.catalog.generations import Generations
from steward.archive.catalog.matching import Matcher, SearchError
from steward.archive.catalog.month import MonthReader, Use, month_of, month_path, months_in
from steward.archive.catalog.walking import Place, SearchThresholds, Wanted, proposed
from steward.core.moments import micros
from steward.core.sqlite import SqliteUnavailable

_MOST_OPEN: Final = 24


class Found(msgspec.Struct, frozen=True):
    """A hit.

    Attributes:
        use: The use.
        lines: The first lines with a term.
        more_lines: How many further lines have one.
    """

    use: Use
    lines: tuple[HitLine, ...]
    more_lines: int


class Page(msgspec.Struct, frozen=True):
    """Some hits.

    Attributes:
        hits: The hits, newest first.
        after: Where to go on; None where nothing follows.
        complete: False where the time was over before the page was full.
    """

    hits: list[Found]
    after: Place | None
    complete: bool


Looked = Iterator[tuple[Use, str]]
"""Uses that were looked at, newest first, each with its script's text: "" where it is no hit."""


def first_page(
    uses: Looked,
    matcher: Matcher,
    *,
    limit: int,
    lines: int,
    after: Place | None,
    longest_s: float,
) -> Page:
    """The next hits, as :meth:`Searcher.page` gives them."""
    deadline = time.monotonic() + longest_s
    hits: list[Found] = []
    last: Place | None = after
    for use, text in uses:
        if text:
            if len(hits) == limit:
                return Page(hits, last, complete=True)
            hits.append(Found(use, *matcher.lines(text, lines)))
        last = use.place
        if time.monotonic() > deadline:
            return Page(hits, last, complete=False)
    return Page(hits, None, complete=True)


def counted(uses: Looked, *, longest_s: float) -> int | None:
    """The number of all hits, as :meth:`Searcher.count` gives it."""
    deadline = time.monotonic() + longest_s
    hits = 0
    for _, text in uses:
        hits += bool(text)
        if time.monotonic() > deadline:
            return None
    return hits


class Searcher:
    """The catalogue, for searching; not to be used by two threads at once.

    Args:
        directory: ``state_dir/catalogue``.
        thresholds: Sizes that decide how a search reads a month. Defaults if None.
    """

    def __init__(self, directory: str, *, thresholds: SearchThresholds | None = None) -> None:
        self._thresholds = thresholds or SearchThresholds()
        self._generations = Generations(directory)
        self._directory = ""
        self._open: dict[str, MonthReader] = {}

    def page(
        self,
        matcher: Matcher,
        wanted: Wanted,
        allowed: Callable[[Use], bool],
        *,
        limit: int,
        lines: int = 3,
        after: Place | None = None,
        longest_s: float = 5.0,
    ) -> Page:
        """The next hits, newest first.

        Args:
            matcher: What is searched for.
            wanted: Where.
            allowed: Says of a use whether who asks may know of it.
            limit: How many hits at most.
            lines: How many matching lines to show of each.
            after: ``Page.after`` of the page before.
            longest_s: When to stop even if the page is not full, in seconds.
        """
        uses = self._uses(matcher, wanted, allowed, after)
        return first_page(uses, matcher, limit=limit, lines=lines, after=after, longest_s=longest_s)

    def count(
        self,
        matcher: Matcher,
        wanted: Wanted,
        allowed: Callable[[Use], bool],
        *,
        longest_s: float = 60.0,
    ) -> int | None:
        """The number of all hits; None where counting took too long."""
        return counted(self._uses(matcher, wanted, allowed, None), longest_s=longest_s)

    def close(self) -> None:
        """Let go of all files."""
        for month in self._open.values():
            month.close()
        self._open.clear()

    def _uses(
        self,
        matcher: Matcher,
        wanted: Wanted,
        allowed: Callable[[Use], bool],
        after: Place | None,
    ) -> Looked:
        """What is proposed, newest first; the text is "" where it is no hit after all."""
        for month in self._months(wanted, after):
            reader = self._reader(month)
            # A script that many jobs ran is looked at once; its text is not kept for long.
            proved: dict[int, bool] = {}
            recent: tuple[int, str] = (0, "")
            for use in proposed(reader, matcher, wanted, after, self._thresholds):
                if proved.get(use.script) is False or not allowed(use):
                    yield use, ""
                    continue
                if recent[0] != use.script:
                    recent = (use.script, reader.text(use.script))
                if use.script not in proved:
                    proved[use.script] = matcher.matches(recent[1])
                yield use, recent[1] if proved[use.script] else ""

    def _months(self, wanted: Wanted, after: Place | None) -> list[str]:
        directory = self._generations.current()
        if directory != self._directory:
            self.close()
            self._directory = directory
        months = months_in(directory) if directory else []
        latest = month_of(after[0]) if after else "9999-99"
        if wanted.until is not None:
            latest = min(latest, month_of(micros(wanted.until)))
        earliest = month_of(micros(wanted.since)) if wanted.since else ""
        return [month for month in reversed(months) if earliest <= month <= latest]

    def _reader(self, month: str) -> MonthReader:
        path = month_path(self._directory, month)
        reader = self._open.pop(path, None)
        if reader is None:
            try:
                reader = MonthReader(path)
            except SqliteUnavailable as error:
                if self._generations.current() == self._directory:
                    raise
                raise SearchError("the catalogue was made anew just now: search again") from error
        self._open[path] = reader
        while len(self._open) > _MOST_OPEN:
            self._open.pop(next(iter(self._open))).close()
        return reader
