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
    use_filter: UseFilter,
    after: UsePosition | None,
    thresholds: SearchThresholds,
) -> Iterator[ScriptUse]:
    """Yield the uses of a month that may be hits, newest first.

    Args:
        reader: Reader of the month.
        matcher: The search terms.
        use_filter: The filter.
        after: Only uses after this position.
        thresholds: Sizes that decide how the month is read.
    """
    trigrams = matcher.list_trigrams()
    if trigrams:
        query = " AND ".join(map(_quote_group, trigrams))
        yield from _select_by_index(reader, [query], use_filter, after, thresholds)
        return
    count, newest_uses = 0, thresholds.look_first
    for use in _select_uses(
        reader, f"use INDEXED BY {_choose_time_index(use_filter)}", use_filter, after, newest_uses
    ):
        count += 1
        after = use.position
        yield use
    if count == newest_uses:
        queries = _build_short_term_queries(
            reader, matcher.get_longest_term(), thresholds.groups_at_once
        )
        yield from _select_by_index(reader, queries, use_filter, after, thresholds)


def _select_by_index(
    reader: MonthReader,
    queries: Sequence[str],
    use_filter: UseFilter,
    after: UsePosition | None,
    thresholds: SearchThresholds,
) -> Iterator[ScriptUse]:
    """Yield the uses of scripts that the trigram index proposes, newest first."""
    if not queries:
        return
    subquery = "SELECT rowid FROM words WHERE words MATCH ?"
    scripts = " UNION ALL ".join([subquery] * len(queries))
    few_scripts = thresholds.few_scripts
    is_few = (
        _count_up_to(reader, scripts, few_scripts, queries) < few_scripts
        and _count_up_to(reader, _USES_OF.format(scripts), _FEW_USES, queries) < _FEW_USES
    )
    index = "use_script" if is_few else _choose_time_index(use_filter)
    # The unary plus keeps SQLite from looking up scripts one by one where the index by time must
    # lead.
    script = "use.script" if is_few else "+use.script"
    table = f"use INDEXED BY {index}"
    yield from _select_uses(
        reader,
        table,
        use_filter,
        after,
        -1,
        extra_condition=f"{script} IN ({scripts})",
        values=queries,
    )


def _count_up_to(reader: MonthReader, query: str, limit: int, values: Sequence[Any]) -> int:
    """Count the rows of a query, up to a limit."""
    sql = f"SELECT count(*) FROM (SELECT 1 FROM ({query}) LIMIT {limit})"  # noqa: S608 - made of constants, values are bound
    return int(next(reader.query(sql, values))[0])


def _select_uses(
    reader: MonthReader,
    table: str,
    use_filter: UseFilter,
    after: UsePosition | None,
    limit: int,
    *,
    extra_condition: str = "1",
    values: Sequence[Any] = (),
) -> Iterator[ScriptUse]:
    """Yield the uses that match the filter and a further condition, newest first."""
    conditions, filter_values = _build_use_conditions(use_filter, after)
    sql = (
        f"SELECT {USE_COLUMNS} FROM {table} WHERE {extra_condition} AND {conditions} "  # noqa: S608 - made of constants, values are bound
        f"{_NEWEST_FIRST} LIMIT {limit}"
    )
    for row in reader.query(sql, [*values, *filter_values]):
        use = ScriptUse(**dict(zip(ScriptUse.__struct_fields__, row, strict=True)))
        if use_filter.keys is None or (use.cluster, use.key) in use_filter.keys:
            yield use


def _choose_time_index(use_filter: UseFilter) -> str:
    """Return the index that yields uses in order of time."""
    return (
        "use_owner" if use_filter.owner is not None and not use_filter.owner.accounts else "use_at"
    )


def _build_short_term_queries(reader: MonthReader, term: str, max_trigrams: int) -> list[str]:
    """Build index queries for all groups of three letters that begin with a shorter term."""
    sql = "SELECT term FROM vocabulary WHERE term >= ? AND term < ?"
    trigrams = [_quote_group(row[0]) for row in reader.query(sql, (term, term + "\U0010ffff"))]
    return [
        " OR ".join(trigrams[start : start + max_trigrams])
        for start in range(0, len(trigrams), max_trigrams)
    ]


def _quote_group(trigram: str) -> str:
    return '"' + trigram.replace('"', '""') + '"'


def _build_use_conditions(
    use_filter: UseFilter, after: UsePosition | None
) -> tuple[str, list[Any]]:
    """Build the WHERE condition of a filter, and its bound values."""
    conditions: list[str] = ["1"]
    values: list[Any] = []

    def add(condition: str, *bound: Any) -> None:
        conditions.append(condition)
        values.extend(bound)

    owner = use_filter.owner
    if owner is not None:
        owner_condition = "use.uid = ? AND use.user = ?"
        if owner.accounts:
            alternatives = f"({owner_condition} OR {_make_in_condition('account')})"
            add(alternatives, owner.uid, owner.user, _encode_list(owner.accounts))
        else:
            add(owner_condition, owner.uid, owner.user)
    for column in ("cluster", "account", "partition"):
        names = getattr(use_filter, column + "s")
        if names:
            add(_make_in_condition(column), _encode_list(names))
    if use_filter.users or use_filter.uids:
        alternatives = f"({_make_in_condition('user')} OR {_make_in_condition('uid')})"
        add(alternatives, _encode_list(use_filter.users), _encode_list(use_filter.uids))
    if use_filter.names:
        # A shell's [!a] is SQLite's [^a].
        globs = [name.replace("[!", "[^") for name in use_filter.names]
        add("EXISTS (SELECT 1 FROM json_each(?) WHERE use.name GLOB value)", _encode_list(globs))
    if use_filter.since is not None:
        add("use.at >= ?", to_micros(use_filter.since))
    if use_filter.until is not None:
        add("use.at < ?", to_micros(use_filter.until))
    if after is not None:
        add("(use.at, use.key, use.cluster) < (?, ?, ?)", *after)
    return " AND ".join(conditions), values


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
    timeout_s: float,
) -> HitPage:
    """Collect the next page of hits, for :meth:`CatalogSearcher.find_page`."""
    deadline = time.monotonic() + timeout_s
    hits: list[ScriptHit] = []
    position: UsePosition | None = after
    for use, text in uses:
        if text:
            if len(hits) == limit:
                return HitPage(hits, position, complete=True)
            hits.append(ScriptHit(use, *matcher.find_lines(text, lines)))
        position = use.position
        if time.monotonic() > deadline:
            return HitPage(hits, position, complete=False)
    return HitPage(hits, None, complete=True)


def count_hits(uses: CheckedUses, *, timeout_s: float) -> int | None:
    """Count all hits, for :meth:`CatalogSearcher.count`; None if the time limit was reached."""
    deadline = time.monotonic() + timeout_s
    hits = 0
    for _, text in uses:
        hits += bool(text)
        if time.monotonic() > deadline:
            return None
    return hits


class CatalogSearcher:
    """Search access to the catalog. Not thread-safe.

    Args:
        directory: ``state_dir/catalog``.
        thresholds: Sizes that decide how a search reads a month. Defaults if None.
    """

    def __init__(self, directory: str, *, thresholds: SearchThresholds | None = None) -> None:
        self._thresholds = thresholds or SearchThresholds()
        self._generations = CatalogGenerations(directory)
        self._directory = ""
        self._readers: dict[str, MonthReader] = {}

    def find_page(
        self,
        matcher: TermMatcher,
        use_filter: UseFilter,
        is_allowed: Callable[[ScriptUse], bool],
        *,
        limit: int,
        lines: int = 3,
        after: UsePosition | None = None,
        timeout_s: float = 5.0,
    ) -> HitPage:
        """Return the next page of hits, newest first.

        Args:
            matcher: The search terms.
            use_filter: The filter.
            is_allowed: Returns whether the user may know of a use.
            limit: Maximum number of hits.
            lines: Maximum number of matching lines of each hit.
            after: ``HitPage.after`` of the previous page.
            timeout_s: Time limit in seconds; a partial page is returned then.
        """
        uses = self._iterate_uses(matcher, use_filter, is_allowed, after)
        return collect_page(
            uses, matcher, limit=limit, lines=lines, after=after, timeout_s=timeout_s
        )

    def count(
        self,
        matcher: TermMatcher,
        use_filter: UseFilter,
        is_allowed: Callable[[ScriptUse], bool],
        *,
        timeout_s: float = 60.0,
    ) -> int | None:
        """Count all hits; None if the time limit was reached."""
        return count_hits(
            self._iterate_uses(matcher, use_filter, is_allowed, None), timeout_s=timeout_s
        )

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _iterate_uses(
        self,
        matcher: TermMatcher,
        use_filter: UseFilter,
        is_allowed: Callable[[ScriptUse], bool],
        after: UsePosition | None,
    ) -> CheckedUses:
        """Yield proposed uses, newest first, with the script's text; "" if it is not a hit."""
        for month in self._list_months(use_filter, after):
            reader = self._open_reader(month)
            # Check a script used by many jobs once, and keep only the latest text in memory.
            is_match: dict[int, bool] = {}
            latest: tuple[int, str] = (0, "")
            for use in propose_uses(reader, matcher, use_filter, after, self._thresholds):
                if is_match.get(use.script) is False or not is_allowed(use):
                    yield use, ""
                    continue
                if latest[0] != use.script:
                    latest = (use.script, reader.read_text(use.script))
                if use.script not in is_match:
                    is_match[use.script] = matcher.matches(latest[1])
                yield use, latest[1] if is_match[use.script] else ""

    def _list_months(self, use_filter: UseFilter, after: UsePosition | None) -> list[str]:
        """Return the months to search, newest first."""
        directory = self._generations.get_current()
        if directory != self._directory:
            self.close()
            self._directory = directory
        months = list_months(directory) if directory else []
        latest = get_month(after[0]) if after else "9999-99"
        if use_filter.until is not None:
            latest = min(latest, get_month(to_micros(use_filter.until)))
        earliest = get_month(to_micros(use_filter.since)) if use_filter.since else ""
        return [month for month in reversed(months) if earliest <= month <= latest]

    def _open_reader(self, month: str) -> MonthReader:
        """Return a month's reader; at most 24 stay open."""
        path = make_month_path(self._directory, month)
        reader = self._readers.pop(path, None)
        if reader is None:
            try:
                reader = MonthReader(path)
            except SqliteUnavailable as error:
                if self._generations.get_current() == self._directory:
                    raise
                raise SearchError(
                    "the catalog was rebuilt during the search: search again"
                ) from error
        self._readers[path] = reader
        while len(self._readers) > _MAX_OPEN_MONTHS:
            self._readers.pop(next(iter(self._readers))).close()
        return reader
