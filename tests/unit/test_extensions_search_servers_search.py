"""Queries sent to search servers find every match."""

import fnmatch
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.archive.catalog.matches import MAX_TERM_LENGTH, TermMatcher
from steward.archive.catalog.search import OwnerFilter, UseFilter
from steward.archive.remote.destination import resolve_searchable_sink
from steward.archive.settings import FilesSinkSettings
from steward.core.config import AnySinkSettings, ArchiveSettings, Settings
from steward.core.errors import UsageError
from steward.extensions.kafka.settings import KafkaSinkSettings
from steward.extensions.search_servers.search import (
    script_conditions,
    search_after_values,
    use_conditions,
)
from steward.extensions.search_servers.settings import ElasticsearchSinkSettings


def asked(*terms: str, words: bool = False) -> list[tuple[str, Any]]:
    """Return the conditions on letters, as (kind, text)."""
    found = []
    for condition in script_conditions(TermMatcher(terms, words=words)):
        ((kind, field),) = condition.items()
        ((_, value),) = field.items()
        found.append((kind, value["value"]))
    return found


def test_a_word_inside_of_a_text_is_a_word_and_one_at_its_ends_may_be_a_part() -> None:
    assert asked("gromacs") == [("wildcard", "*gromacs*")]
    assert asked("module load GROMACS/2023") == [
        *(("wildcard", "*module"), ("term", "load"), ("term", "gromacs")),
    ]
    assert asked(" gromacs") == [("prefix", "gromacs")]
    assert asked("module load", words=True) == [("term", "module"), ("term", "load")]


def test_few_letters_and_numbers_are_asked_for_only_where_nothing_else_is() -> None:
    assert asked("ab") == []
    assert asked("/2023/") == [("wildcard", "*2023*")]
    assert asked("--") == []
    assert asked("éabc") == [("wildcard", "*abc*")]


@given(st.lists(st.text(min_size=1, max_size=MAX_TERM_LENGTH), min_size=1, max_size=20))
def test_no_text_makes_a_pattern_of_its_own(terms: list[str]) -> None:
    for kind, value in asked(*terms):
        inner = value.removeprefix("*").removesuffix("*") if kind == "wildcard" else value
        assert inner.isascii()
        assert inner.isalnum()


def test_whose_scripts_and_which_is_part_of_the_question() -> None:
    since = datetime(2026, 1, 1, tzinfo=UTC)
    wanted = UseFilter(owner=OwnerFilter(7, "ada", ("chem",)), names=("a[bc]\\*",), since=since)
    owner, names, times = use_conditions(wanted)
    own = {"bool": {"filter": [{"term": {"uid": 7}}, {"term": {"user": "ada"}}]}}
    assert owner["bool"]["should"] == [{"terms": {"account": ["chem"]}}, own]
    assert names["bool"]["should"] == [{"wildcard": {"name": {"value": "a?\\\\*"}}}]
    assert times == {"range": {"spool_mtime_ns": {"gte": 1767225600 * 10**9}}}
    nobody = use_conditions(UseFilter(owner=OwnerFilter(None, "")))
    assert nobody[0]["bool"]["should"] == [{"terms": {"account": []}}]


NAMES = st.text(st.sampled_from("ab*?[]!\\"), max_size=12)


@given(NAMES, st.text(st.sampled_from("ab[]!\\"), max_size=6))
def test_a_servers_pattern_finds_all_that_the_shells_does(pattern: str, name: str) -> None:
    (condition,) = use_conditions(UseFilter(names=(pattern,)))[0]["bool"]["should"]
    ((kind, field),) = condition.items()
    value = field["name"]["value"]
    if kind == "term":
        matches = value == name
    else:
        # As servers define it: a star, a question mark, and a backslash before a literal character.
        parts = re.findall(r"\\.|.", value, re.DOTALL)
        wild = {"*": ".*", "?": "."}
        body = "".join(wild.get(part, re.escape(part[-1])) for part in parts)
        matches = re.fullmatch(body, name, re.DOTALL) is not None
        assert not re.search(r"\*\*|\*.*\?", value), "its automaton could be a large one"
    assert matches or not fnmatch.fnmatchcase(name, pattern)


@pytest.mark.parametrize(
    ("wanted", "what"),
    [
        (UseFilter(accounts=tuple(map(str, range(1001)))), "1001 accounts are too many"),
        (UseFilter(uids=tuple(range(1001))), "1001 uids"),
    ],
)
def test_a_server_is_not_burdened_with_long_lists(wanted: UseFilter, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        use_conditions(wanted)


def test_what_is_longer_than_a_name_is_not_sent() -> None:
    (terms,) = use_conditions(UseFilter(accounts=("chem", "x" * 1025)))
    assert terms == {"terms": {"account": ["chem"]}}


def test_a_page_goes_on_to_the_nanosecond() -> None:
    assert search_after_values((5, "script:1:5999", "c")) == [5999, "script:1:5999", "c"]
    assert search_after_values((5, "odd", "c")) == [5000, "odd", "c"]
    assert search_after_values((2**62, "odd", "c"))[0] == 2**63 - 1
    assert search_after_values((5, "script:1:9999999999999999999", "c"))[0] == 2**63 - 1


def test_a_sink_is_called_by_its_name_or_by_its_kind() -> None:
    search = ElasticsearchSinkSettings(urls=("http://s:9200",))
    sinks: dict[str, AnySinkSettings] = {
        "es1": search,
        "files": FilesSinkSettings(),
        "k": KafkaSinkSettings(),
    }
    settings = Settings(archive=ArchiveSettings(sink=sinks))
    assert (
        resolve_searchable_sink(settings, "es1")
        == resolve_searchable_sink(settings, "elasticsearch")
        == "es1"
    )
    for name, what in (
        ("files", "of kind 'files'"),
        ("k", "of kind 'kafka'"),
        ("opensearch", "no searchable sink 'opensearch': use one of es1"),
    ):
        with pytest.raises(UsageError, match=what):
            resolve_searchable_sink(settings, name)
    two = Settings(archive=ArchiveSettings(sink={**sinks, "es2": search}))
    with pytest.raises(UsageError, match=r"several sinks.*es1, es2"):
        resolve_searchable_sink(two, "elasticsearch")
