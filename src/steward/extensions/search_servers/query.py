"""From what is searched for to a query that misses none of it; the hits are proved afterwards.

A text is found as the catalogue finds it: anywhere, also inside of a word. The
server knows words, so it is asked for scripts that have every run of letters
of the text as a word (``script.letters``), or as the end or the beginning of
one where the text begins or ends within it.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from steward.archive.catalog.matching import Matcher
from steward.archive.catalog.walking import Owner, Place, Wanted
from steward.core.errors import UsageError
from steward.core.moments import micros

_LETTERS: Final = re.compile(r"[a-z]+")
_DIGITS: Final = re.compile(r"[0-9]+")
_SET: Final = re.compile(r"\[!?+\]?+[^\]]*\]")
_WILD: Final = re.compile(r"[*?]")
_WILDS: Final = re.compile(r"[*?]+")
_SHORT: Final = 3
_MOST_CLAUSES: Final = 64
_MOST_VALUES: Final = 1000
_LONGEST_VALUE: Final = 1024
_LATEST_NS: Final = 2**63 - 1

Query = dict[str, Any]


def candidates(matcher: Matcher) -> list[Query]:
    """Conditions that every script with all terms meets; none where nothing can be said."""
    clauses: dict[str, Query] = {}
    for term in matcher.terms:
        clauses.update(_of_term(term, words=matcher.words))
    return list(clauses.values())[:_MOST_CLAUSES]


def wanted_uses(wanted: Wanted) -> list[Query]:
    """Conditions for which uses are looked at.

    Raises:
        UsageError: More is named than a server should be burdened with.
    """
    found: list[Query] = []
    if wanted.owner is not None:
        found.append(_owned(wanted.owner))
    for field, chosen in (
        ("cluster", wanted.clusters),
        ("account", wanted.accounts),
        ("partition", wanted.partitions),
    ):
        if chosen:
            found.append({"terms": {field: _few(chosen, f"{field}s")}})
    if wanted.users or wanted.uids:
        users = {"terms": {"user": _few(wanted.users, "users")}}
        uids = {"terms": {"uid": _few(wanted.uids, "uids")}}
        found.append(_any_of([users, uids]))
    if wanted.names:
        found.append(_any_of([_like("name", name) for name in wanted.names]))
    if wanted.keys is not None:
        found.append({"terms": {"key": sorted({key for _, key in wanted.keys})}})
    times = {}
    if wanted.since is not None:
        times["gte"] = micros(wanted.since) * 1000
    if wanted.until is not None:
        times["lt"] = micros(wanted.until) * 1000
    if times:
        found.append({"range": {"spool_mtime_ns": times}})
    return found


NEWEST_FIRST: Final = [
    {"spool_mtime_ns": {"order": "desc", "unmapped_type": "long"}},
    {"key": {"order": "desc", "unmapped_type": "keyword"}},
    {"cluster": {"order": "desc", "unmapped_type": "keyword"}},
]


def after_of(place: Place) -> list[Any]:
    """``search_after`` for what follows a place in that order."""
    at, key, cluster = place
    digits = key.rpartition(":")[2]
    # A place tells microseconds; the key knows the rest of the time.
    ns = int(digits) if digits.isdecimal() and len(digits) < 20 else at * 1000
    return [min(ns, _LATEST_NS), key, cluster]


def _few(values: Sequence[Any], what: str) -> list[Any]:
    if len(values) > _MOST_VALUES:
        raise UsageError(
            f"{len(values)} {what} are too many to ask a sink for: give at most {_MOST_VALUES}",
            what,
        )
    # What is longer than any name would only burden the server.
    return [value for value in values if not isinstance(value, str) or len(value) <= _LONGEST_VALUE]


def _owned(owner: Owner) -> Query:
    either: list[Query] = [{"terms": {"account": list(owner.accounts)}}]
    if owner.uid is not None:
        own: list[Query] = [{"term": {"uid": owner.uid}}, {"term": {"user": owner.user}}]
        either.append({"bool": {"filter": own}})
    return _any_of(either)


def _any_of(either: list[Query]) -> Query:
    return {"bool": {"should": either, "minimum_should_match": 1}}


def _like(field: str, pattern: str) -> Query:
    """A shell's pattern, or more: hits are tried with the pattern itself.

    A server has no ``[…]``, takes a backslash for one, and makes an automaton of what it
    is given: without a ``?`` behind a ``*`` it has no more states than the pattern letters.
    """
    simple = _SET.sub("?", pattern)
    if not _WILD.search(simple):
        return {"term": {field: {"value": simple}}}
    begin, star, rest = simple.replace("\\", "\\\\").partition("*")
    value = begin + _WILDS.sub("*", star + rest)
    return {"wildcard": {field: {"value": value}}}


def _of_term(term: str, *, words: bool) -> dict[str, Query]:
    text = term.lower()
    found: dict[str, Query] = {}
    for match in _LETTERS.finditer(text):
        begin, end = match.span()
        open_left = not words if begin == 0 else text[begin - 1].isalpha()
        open_right = not words if end == len(text) else text[end].isalpha()
        if len(match[0]) >= _SHORT or not (open_left or open_right):
            found[repr((match[0], open_left, open_right))] = _word(
                "script.letters", match[0], open_left, open_right
            )
    if not found:
        # Numbers, and letters so few that nearly every script has a word with them.
        for match in _DIGITS.finditer(text):
            found[repr(match[0])] = _word("script", match[0], True, True)
    return found


def _word(field: str, text: str, open_left: bool, open_right: bool) -> Query:
    if open_left:
        return {"wildcard": {field: {"value": f"*{text}*" if open_right else f"*{text}"}}}
    return {"prefix" if open_right else "term": {field: {"value": text}}}
