"""Search: from the months' indexes to proved hits, newest first, a page at a time.

A month's index proposes uses of scripts, newest first (``walking.py``). Each
script is looked at (``matching.py``), and who asks is looked at, before a use
is a hit, is counted, or is told of in any other way.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from steward.archive.catalog.generations import Generations
from steward.archive.catalog.matches import Matcher, SearchError
from steward.archive.catalog.month import (
    USE_COLUMNS,
    MonthReader,
    Use,
    month_of,
    month_path,
    months_in,
)
from steward.archive.requests import HitLine
from steward.core.sqlite import SqliteUnavailable
from steward.core.timestamps import micros

_USES_OF: Final = "SELECT 1 FROM use WHERE script IN ({})"
_FEW_USES: Final = 20_000
"""With fewer uses of proposed scripts than this, those are sorted; see SearchThresholds."""
_NEWEST_FIRST: Final = "ORDER BY use.at DESC, use.key DESC, use.cluster DESC"

Place = tuple[int, str, str]
"""Where a use stands in the order of all: time in microseconds, key, cluster."""


class SearchThresholds(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that decide how a search reads a month; they do not change the hits.

    Attributes:
        look_first: Newest uses that a search for a short term reads before the vocabulary.
        groups_at_once: Most groups of three letters in one query of the index.
        few_scripts: Number of proposed scripts from which a search reads uses in order of time.
            With fewer, it sorts the uses of these scripts.
    """

    look_first: int = 300
    groups_at_once: int = 250
    few_scripts: int = 2000


class Owner(msgspec.Struct, frozen=True):
    """Whose scripts are looked at: of this uid and name at submit, or of these accounts."""

    uid: int | None
    user: str
    accounts: tuple[str, ...] = ()


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which uses are looked at; what is empty does not restrict.

    Attributes:
        owner: Whose; None for everybody's.
        clusters: Names of clusters.
        users: User names at submit.
        uids: Their uids: a use needs one of ``users`` or of ``uids``.
        accounts: Accounts.
        partitions: Partitions.
        names: Job names as shell patterns.
        keys: Only these uses, by cluster and key; None for all.
        since: Spooled at this time or later.
        until: Spooled before this time.
    """

    owner: Owner | None = None
    clusters: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    uids: tuple[int, ...] = ()
    accounts: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    keys: frozenset[tuple[str, str]] | None = None
    since: datetime | None = None
    until: datetime | None = None


def proposed(
    reader: MonthReader,
    matcher: Matcher,
    wanted: Wanted,
    after: Place | None,
    thresholds: SearchThresholds,
) -> Iterator[Use]:
    """The uses of a month that may be hits, newest first.

    Args:
        reader: The month.
        matcher: What is searched for.
        wanted: Which uses.
        after: Only what follows this one.
        thresholds: Sizes that decide how the month is read.
    """
    groups = matcher.groups()
    if groups:
        question = " AND ".join(map(_quoted, groups))
        yield from _by_index(reader, [question], wanted, after, thresholds)
        return
    seen, look_first = 0, thresholds.look_first
    for use in _select(reader, f"use INDEXED BY {_order(wanted)}", wanted, after, look_first):
        seen += 1
        after = use.place
        yield use
    if seen == look_first:
        questions = _short(reader, matcher.short_part(), thresholds.groups_at_once)
        yield from _by_index(reader, questions, wanted, after, thresholds)


def _by_index(
    reader: MonthReader,
    questions: Sequence[str],
    wanted: Wanted,
    after: Place | None,
    thresholds: SearchThresholds,
) -> Iterator[Use]:
    if not questions:
        return
    one = "SELECT rowid FROM words WHERE words MATCH ?"
    scripts = " UNION ALL ".join([one] * len(questions))
    few_scripts = thresholds.few_scripts
    is_few = (
        _counted(reader, scripts, few_scripts, questions) < few_scripts
        and _counted(reader, _USES_OF.format(scripts), _FEW_USES, questions) < _FEW_USES
    )
    index = "use_script" if is_few else _order(wanted)
    # The plus keeps SQLite from looking up scripts one by one where time is to lead.
    script = "use.script" if is_few else "+use.script"
    table = f"use INDEXED BY {index}"
    yield from _select(
        reader, table, wanted, after, -1, also=f"{script} IN ({scripts})", values=questions
    )


def _counted(reader: MonthReader, question: str, limit: int, values: Sequence[Any]) -> int:
    sql = f"SELECT count(*) FROM (SELECT 1 FROM ({question}) LIMIT {limit})"  # noqa: S608 - made of constants, values are bound
    return int(next(reader.rows(sql, values))[0])


def _select(
    reader: MonthReader,
    table: str,
    wanted: Wanted,
    after: Place | None,
    limit: int,
    *,
    also: str = "1",
    values: Sequence[Any] = (),
) -> Iterator[Use]:
    conditions, more = _conditions(wanted, after)
    sql = (
        f"SELECT {USE_COLUMNS} FROM {table} WHERE {also} AND {conditions} "  # noqa: S608 - made of constants, values are bound
        f"{_NEWEST_FIRST} LIMIT {limit}"
    )
    for row in reader.rows(sql, [*values, *more]):
        use = Use(**dict(zip(Use.__struct_fields__, row, strict=True)))
        if wanted.keys is None or (use.cluster, use.key) in wanted.keys:
            yield use


def _order(wanted: Wanted) -> str:
    """The index that gives uses in the order of time."""
    return "use_owner" if wanted.owner is not None and not wanted.owner.accounts else "use_at"


def _short(reader: MonthReader, term: str, at_once: int) -> list[str]:
    """Questions for all groups of three letters that begin with a shorter term."""
    sql = "SELECT term FROM vocabulary WHERE term >= ? AND term < ?"
    groups = [_quoted(row[0]) for row in reader.rows(sql, (term, term + "\U0010ffff"))]
    return [
        " OR ".join(groups[first : first + at_once]) for first in range(0, len(groups), at_once)
    ]


def _quoted(group: str) -> str:
    return '"' + group.replace('"', '""') + '"'


def _conditions(wanted: Wanted, after: Place | None) -> tuple[str, list[Any]]:
    found: list[str] = ["1"]
    values: list[Any] = []

    def add(condition: str, *bound: Any) -> None:
        found.append(condition)
        values.extend(bound)

    owner = wanted.owner
    if owner is not None:
        own = "use.uid = ? AND use.user = ?"
        if owner.accounts:
            either = f"({own} OR {_among('account')})"
            add(either, owner.uid, owner.user, _listed(owner.accounts))
        else:
            add(own, owner.uid, owner.user)
    for column in ("cluster", "account", "partition"):
        chosen = getattr(wanted, column + "s")
        if chosen:
            add(_among(column), _listed(chosen))
    if wanted.users or wanted.uids:
        either = f"({_among('user')} OR {_among('uid')})"
        add(either, _listed(wanted.users), _listed(wanted.uids))
    if wanted.names:
        # A shell's [!a] is SQLite's [^a].
        globs = [name.replace("[!", "[^") for name in wanted.names]
        add("EXISTS (SELECT 1 FROM json_each(?) WHERE use.name GLOB value)", _listed(globs))
    if wanted.since is not None:
        add("use.at >= ?", micros(wanted.since))
    if wanted.until is not None:
        add("use.at < ?", micros(wanted.until))
    if after is not None:
        add("(use.at, use.key, use.cluster) < (?, ?, ?)", *after)
    return " AND ".join(found), values


def _among(column: str) -> str:
    return f"use.{column} IN (SELECT value FROM json_each(?))"  # noqa: S608 -- our own columns


def _listed(values: Sequence[Any]) -> str:
    """Values as the one that is bound: a statement that grew with them could be too large."""
    return msgspec.json.encode(values).decode()


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
