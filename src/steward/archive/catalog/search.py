"""Catalog search: from the monthly indexes to exact hits, newest first, page by page.

:func:`propose_uses` lets a month's index propose uses, newest first. :class:`CatalogSearcher`
checks for each whether the user may know of it and whether the script contains all terms
(:class:`TermMatcher`), before the use is a hit or is counted. :class:`UseFilter` is the filter,
:class:`HitPage` the result. :class:`SearchThresholds` decides how a month is read.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from steward.archive.catalog.generations import CatalogGenerations
from steward.archive.catalog.matches import SearchError, TermMatcher
from steward.archive.catalog.month import (
    USE_COLUMNS,
    MonthReader,
    ScriptUse,
    get_month,
    list_months,
    make_month_path,
)
from steward.archive.requests import HitLine
from steward.core.sqlite import SqliteUnavailable
from steward.core.timestamps import to_micros

_USES_OF: Final = "SELECT 1 FROM use WHERE script IN ({})"
_FEW_USES: Final = 20_000
"""With fewer uses of the proposed scripts, a search sorts these uses; see SearchThresholds."""
_NEWEST_FIRST: Final = "ORDER BY use.at DESC, use.key DESC, use.cluster DESC"

UsePosition = tuple[int, str, str]
"""Sort position of a use: time in microseconds, key, cluster."""


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


class OwnerFilter(msgspec.Struct, frozen=True):
    """Owner filter: scripts of this uid and name at submit, or of these accounts."""

    uid: int | None
    user: str
    accounts: tuple[str, ...] = ()


class UseFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of uses; empty fields do not restrict.

    Attributes:
        owner: Owner filter; None for all owners.
        clusters: Cluster names.
        users: User names at submit.
        uids: Uids; a use must match one of ``users`` or of ``uids``.
        accounts: Accounts.
        partitions: Partitions.
        names: Job names as shell patterns.
        keys: Only these uses, by cluster and key; None for all.
        since: Earliest spool time, inclusive.
        until: Latest spool time, exclusive.
    """

    owner: OwnerFilter | None = None
    clusters: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    uids: tuple[int, ...] = ()
    accounts: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    keys: frozenset[tuple[str, str]] | None = None
    since: datetime | None = None
    until: datetime | None = None


def propose_uses(
    reader: MonthReader,
    matcher: TermMatcher,
    wanted: UseFilter,
    after: UsePosition | None,
    thresholds: SearchThresholds,
) -> Iterator[ScriptUse]:
    """Yield the uses of a month that may be hits, newest first.

    Args:
        reader: Reader of the month.
        matcher: The search terms.
        wanted: The filter.
        after: Only uses after this position.
        thresholds: Sizes that decide how the month is read.
    """
    groups = matcher.groups()
    if groups:
        question = " AND ".join(map(_quote_group, groups))
        yield from _select_by_index(reader, [question], wanted, after, thresholds)
        return
    seen, look_first = 0, thresholds.look_first
    for use in _select_uses(
        reader, f"use INDEXED BY {_choose_time_index(wanted)}", wanted, after, look_first
    ):
        seen += 1
        after = use.place
        yield use
    if seen == look_first:
        questions = _build_short_term_queries(
            reader, matcher.short_part(), thresholds.groups_at_once
        )
        yield from _select_by_index(reader, questions, wanted, after, thresholds)


def _select_by_index(
    reader: MonthReader,
    questions: Sequence[str],
    wanted: UseFilter,
    after: UsePosition | None,
    thresholds: SearchThresholds,
) -> Iterator[ScriptUse]:
    """Yield the uses of scripts that the trigram index proposes, newest first."""
    if not questions:
        return
    one = "SELECT rowid FROM words WHERE words MATCH ?"
    scripts = " UNION ALL ".join([one] * len(questions))
    few_scripts = thresholds.few_scripts
    is_few = (
        _count_up_to(reader, scripts, few_scripts, questions) < few_scripts
        and _count_up_to(reader, _USES_OF.format(scripts), _FEW_USES, questions) < _FEW_USES
    )
    index = "use_script" if is_few else _choose_time_index(wanted)
    # The unary plus keeps SQLite from looking up scripts one by one where the index by time must
    # lead.
    script = "use.script" if is_few else "+use.script"
    table = f"use INDEXED BY {index}"
    yield from _select_uses(
        reader, table, wanted, after, -1, also=f"{script} IN ({scripts})", values=questions
    )


def _count_up_to(reader: MonthReader, question: str, limit: int, values: Sequence[Any]) -> int:
    """Count the rows of a query, up to a limit."""
    sql = f"SELECT count(*) FROM (SELECT 1 FROM ({question}) LIMIT {limit})"  # noqa: S608 - made of constants, values are bound
    return int(next(reader.rows(sql, values))[0])


def _select_uses(
    reader: MonthReader,
    table: str,
    wanted: UseFilter,
    after: UsePosition | None,
    limit: int,
    *,
    also: str = "1",
    values: Sequence[Any] = (),
) -> Iterator[ScriptUse]:
    """Yield the uses that match the filter and a further condition, newest first."""
    conditions, more = _build_use_conditions(wanted, after)
    sql = (
        f"SELECT {USE_COLUMNS} FROM {table} WHERE {also} AND {conditions} "  # noqa: S608 - made of constants, values are bound
        f"{_NEWEST_FIRST} LIMIT {limit}"
    )
    for row in reader.rows(sql, [*values, *more]):
        use = ScriptUse(**dict(zip(ScriptUse.__struct_fields__, row, strict=True)))
        if wanted.keys is None or (use.cluster, use.key) in wanted.keys:
            yield use


def _choose_time_index(wanted: UseFilter) -> str:
    """Return the index that yields uses in order of time."""
    return "use_owner" if wanted.owner is not None and not wanted.owner.accounts else "use_at"


def _build_short_term_queries(reader: MonthReader, term: str, at_once: int) -> list[str]:
    """Build index queries for all groups of three letters that begin with a shorter term."""
    sql = "SELECT term FROM vocabulary WHERE term >= ? AND term < ?"
    groups = [_quote_group(row[0]) for row in reader.rows(sql, (term, term + "\U0010ffff"))]
    return [
        " OR ".join(groups[first : first + at_once]) for first in range(0, len(groups), at_once)
    ]


def _quote_group(group: str) -> str:
    return '"' + group.replace('"', '""') + '"'


def _build_use_conditions(wanted: UseFilter, after: UsePosition | None) -> tuple[str, list[Any]]:
    """Build the WHERE condition of a filter, and its bound values."""
    found: list[str] = ["1"]
    values: list[Any] = []

    def add(condition: str, *bound: Any) -> None:
        found.append(condition)
        values.extend(bound)

    owner = wanted.owner
    if owner is not None:
        own = "use.uid = ? AND use.user = ?"
        if owner.accounts:
            either = f"({own} OR {_make_in_condition('account')})"
            add(either, owner.uid, owner.user, _encode_list(owner.accounts))
        else:
            add(own, owner.uid, owner.user)
    for column in ("cluster", "account", "partition"):
        chosen = getattr(wanted, column + "s")
        if chosen:
            add(_make_in_condition(column), _encode_list(chosen))
    if wanted.users or wanted.uids:
        either = f"({_make_in_condition('user')} OR {_make_in_condition('uid')})"
        add(either, _encode_list(wanted.users), _encode_list(wanted.uids))
    if wanted.names:
        # A shell's [!a] is SQLite's [^a].
        globs = [name.replace("[!", "[^") for name in wanted.names]
        add("EXISTS (SELECT 1 FROM json_each(?) WHERE use.name GLOB value)", _encode_list(globs))
    if wanted.since is not None:
        add("use.at >= ?", to_micros(wanted.since))
    if wanted.until is not None:
        add("use.at < ?", to_micros(wanted.until))
    if after is not None:
        add("(use.at, use.key, use.cluster) < (?, ?, ?)", *after)
    return " AND ".join(found), values


def _make_in_condition(column: str) -> str:
    return f"use.{column} IN (SELECT value FROM json_each(?))"  # noqa: S608 -- our own columns


def _encode_list(values: Sequence[Any]) -> str:
    """Encode values as JSON for one bound parameter: a statement with many could be too large."""
    return msgspec.json.encode(values).decode()


_MAX_OPEN_MONTHS: Final = 24


class ScriptHit(msgspec.Struct, frozen=True):
    """Hit of a search: a use and its matching lines.

    Attributes:
        use: The use.
        lines: The first matching lines.
        more_lines: Number of further matching lines.
    """

    use: ScriptUse
    lines: tuple[HitLine, ...]
    more_lines: int


class HitPage(msgspec.Struct, frozen=True):
    """Page of hits.

    Attributes:
        hits: The hits, newest first.
        after: Position to continue from; None if there is no next page.
        complete: False if the time limit was reached before the page was full.
    """

    hits: list[ScriptHit]
    after: UsePosition | None
    complete: bool


CheckedUses = Iterator[tuple[ScriptUse, str]]
"""Checked uses, newest first, each with its script's text; "" if it is not a hit."""


def collect_page(
    uses: CheckedUses,
    matcher: TermMatcher,
    *,
    limit: int,
    lines: int,
    after: UsePosition | None,
    longest_s: float,
) -> HitPage:
    """Collect the next page of hits, for :meth:`CatalogSearcher.page`."""
    deadline = time.monotonic() + longest_s
    hits: list[ScriptHit] = []
    last: UsePosition | None = after
    for use, text in uses:
        if text:
            if len(hits) == limit:
                return HitPage(hits, last, complete=True)
            hits.append(ScriptHit(use, *matcher.lines(text, lines)))
        last = use.place
        if time.monotonic() > deadline:
            return HitPage(hits, last, complete=False)
    return HitPage(hits, None, complete=True)


def count_hits(uses: CheckedUses, *, longest_s: float) -> int | None:
    """Count all hits, for :meth:`CatalogSearcher.count`; None if the time limit was reached."""
    deadline = time.monotonic() + longest_s
    hits = 0
    for _, text in uses:
        hits += bool(text)
        if time.monotonic() > deadline:
            return None
    return hits


class CatalogSearcher:
    """Search access to the catalog. Not thread-safe.

    Args:
        directory: ``state_dir/catalogue``.
        thresholds: Sizes that decide how a search reads a month. Defaults if None.
    """

    def __init__(self, directory: str, *, thresholds: SearchThresholds | None = None) -> None:
        self._thresholds = thresholds or SearchThresholds()
        self._generations = CatalogGenerations(directory)
        self._directory = ""
        self._open: dict[str, MonthReader] = {}

    def page(
        self,
        matcher: TermMatcher,
        wanted: UseFilter,
        allowed: Callable[[ScriptUse], bool],
        *,
        limit: int,
        lines: int = 3,
        after: UsePosition | None = None,
        longest_s: float = 5.0,
    ) -> HitPage:
        """Return the next page of hits, newest first.

        Args:
            matcher: The search terms.
            wanted: The filter.
            allowed: Returns whether the user may know of a use.
            limit: Maximum number of hits.
            lines: Maximum number of matching lines of each hit.
            after: ``HitPage.after`` of the previous page.
            longest_s: Time limit in seconds; a partial page is returned then.
        """
        uses = self._uses(matcher, wanted, allowed, after)
        return collect_page(
            uses, matcher, limit=limit, lines=lines, after=after, longest_s=longest_s
        )

    def count(
        self,
        matcher: TermMatcher,
        wanted: UseFilter,
        allowed: Callable[[ScriptUse], bool],
        *,
        longest_s: float = 60.0,
    ) -> int | None:
        """Count all hits; None if the time limit was reached."""
        return count_hits(self._uses(matcher, wanted, allowed, None), longest_s=longest_s)

    def close(self) -> None:
        """Close all files."""
        for month in self._open.values():
            month.close()
        self._open.clear()

    def _uses(
        self,
        matcher: TermMatcher,
        wanted: UseFilter,
        allowed: Callable[[ScriptUse], bool],
        after: UsePosition | None,
    ) -> CheckedUses:
        """Yield proposed uses, newest first, with the script's text; "" if it is not a hit."""
        for month in self._months(wanted, after):
            reader = self._reader(month)
            # Check a script used by many jobs once, and keep only the latest text in memory.
            proved: dict[int, bool] = {}
            recent: tuple[int, str] = (0, "")
            for use in propose_uses(reader, matcher, wanted, after, self._thresholds):
                if proved.get(use.script) is False or not allowed(use):
                    yield use, ""
                    continue
                if recent[0] != use.script:
                    recent = (use.script, reader.text(use.script))
                if use.script not in proved:
                    proved[use.script] = matcher.matches(recent[1])
                yield use, recent[1] if proved[use.script] else ""

    def _months(self, wanted: UseFilter, after: UsePosition | None) -> list[str]:
        """Return the months to search, newest first."""
        directory = self._generations.current()
        if directory != self._directory:
            self.close()
            self._directory = directory
        months = list_months(directory) if directory else []
        latest = get_month(after[0]) if after else "9999-99"
        if wanted.until is not None:
            latest = min(latest, get_month(to_micros(wanted.until)))
        earliest = get_month(to_micros(wanted.since)) if wanted.since else ""
        return [month for month in reversed(months) if earliest <= month <= latest]

    def _reader(self, month: str) -> MonthReader:
        """Return a month's reader; at most 24 stay open."""
        path = make_month_path(self._directory, month)
        reader = self._open.pop(path, None)
        if reader is None:
            try:
                reader = MonthReader(path)
            except SqliteUnavailable as error:
                if self._generations.current() == self._directory:
                    raise
                raise SearchError("the catalogue was made anew just now: search again") from error
        self._open[path] = reader
        while len(self._open) > _MAX_OPEN_MONTHS:
            self._open.pop(next(iter(self._open))).close()
        return reader
