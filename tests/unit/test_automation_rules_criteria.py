"""Operators of criteria: they return what StackStorm's do, for any input."""

import fnmatch
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.automation.rules.criteria import (
    find_failed_criterion,
    list_operators,
    look_up,
    matches_criterion,
    normalize_operator,
)
from steward.automation.rules.model import Criterion

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
SIMPLE = sorted(set(list_operators()) - {"search"})


def answer(operator: str, value: Any, pattern: Any) -> bool:
    long = normalize_operator(operator)
    assert long is not None
    return matches_criterion(
        Criterion(key="trigger.x", path=("x",), type=long), value, pattern, NOW
    )


@pytest.mark.parametrize(
    ("operator", "value", "pattern", "expected"),
    [
        ("equals", "a", "a", True),
        ("eq", 3, 3, True),
        ("equals", "3", 3, False),
        ("equals", None, None, False),
        ("nequals", None, "a", True),
        ("neq", "a", "a", False),
        ("iequals", "IDLE", "idle", True),
        ("ieq", 3, "a", False),
        ("contains", "DOWN+DRAIN", "DRAIN", True),
        ("contains", ["a", "b"], "b", True),
        ("contains", None, "b", False),
        ("ncontains", ["a"], "b", True),
        ("ncontains", None, "b", False),
        ("icontains", "Not Responding", "not resp", True),
        ("incontains", "Not Responding", "disk", True),
        ("startswith", "gpu7", "gpu", True),
        ("istartswith", "GPU7", "gpu", True),
        ("endswith", "n1", "1", True),
        ("iendswith", "nA", "a", True),
        ("lessthan", 2, 3, True),
        ("lt", "2", 3, False),
        ("greaterthan", 3, 2, True),
        ("gt", None, 2, False),
        ("matchwildcard", "gpu7", "gpu*", True),
        ("matchregex", "gpu7", "pu", False),
        ("matchregex", "a\nb", "a.b", True),
        ("regex", "gpu7", "pu", True),
        ("regex", "GPU7", "pu", False),
        ("iregex", "GPU7", "pu", True),
        ("exists", "", None, True),
        ("exists", None, None, False),
        ("nexists", None, None, True),
        ("inside", "a", ["a", "b"], True),
        ("in", "a", "cat", True),
        ("ninside", "c", ["a", "b"], True),
        ("nin", "a", ["a"], False),
        ("timediff_lt", (NOW - timedelta(seconds=5)).isoformat(), 10, True),
        ("td_gt", "2026-11-22T11:00:00Z", 10, True),
        ("td_gt", "2026-11-22T11:59:55", 10, False),
        ("timediff_gt", "yesterday", 10, False),
        ("timediff_gt", None, 10, False),
    ],
)
def test_operators(operator: str, value: Any, pattern: Any, expected: bool) -> None:
    assert answer(operator, value, pattern) is expected


@given(st.sampled_from(SIMPLE), PLAIN, PLAIN)
def test_nothing_but_yes_or_no_comes_of_anything(operator: str, value: Any, pattern: Any) -> None:
    if normalize_operator(operator) in ("timediff_lt", "timediff_gt"):
        pattern = 5
    assert answer(operator, value, pattern) in (True, False)


@given(PLAIN, PLAIN)
def test_what_says_no_says_the_opposite_of_what_says_yes(value: Any, pattern: Any) -> None:
    if pattern is None:
        return
    assert answer("equals", value, pattern) is not answer("nequals", value, pattern)
    assert answer("exists", value, None) is not answer("nexists", value, None)


@given(st.text(max_size=30), st.text(max_size=5))
def test_text_is_compared_as_python_does(value: str, pattern: str) -> None:
    assert answer("contains", value, pattern) is (pattern in value)
    assert answer("ncontains", value, pattern) is (pattern not in value)
    assert answer("startswith", value, pattern) is value.startswith(pattern)
    assert answer("iendswith", value, pattern) is value.lower().endswith(pattern.lower())
    assert answer("matchwildcard", value, pattern) is fnmatch.fnmatchcase(value, pattern)
    assert answer("regex", value, re.escape(pattern)) is (pattern in value)


@given(st.lists(st.integers(-3, 3), max_size=5), st.integers(-3, 3))
def test_search_looks_at_each_item(items: list[int], bound: int) -> None:
    inner = (
        Criterion(key="item.n", path=("n",), type="greaterthan", pattern=bound),
        Criterion(key="item.n#2", path=("n",), type="lessthan", pattern=3),
    )
    payload = [{"n": number} for number in items]

    def search(condition: str) -> bool:
        one = Criterion(key="", path=(), type="search", condition=condition, inner=inner)
        return matches_criterion(one, payload, None, NOW)

    above, below = [n > bound for n in items], [n < 3 for n in items]
    both = [a and b for a, b in zip(above, below, strict=True)]
    either = [a or b for a, b in zip(above, below, strict=True)]
    assert search("any") is search("any2all") is any(both)
    assert search("all") is search("all2all") is all(both)
    assert search("any2any") is any(either)
    assert search("all2any") is all(either)


def test_the_first_that_does_not_hold_is_told() -> None:
    criteria = (
        Criterion(key="trigger.a", path=("a",), type="equals", pattern=1),
        Criterion(
            key="trigger.b",
            path=("b",),
            type="equals",
            pattern="{{ trigger.a }}x",
            is_template=True,
        ),
    )
    assert find_failed_criterion(criteria, {"a": 1, "b": "1x"}, NOW) is None
    found = find_failed_criterion(criteria, {"a": 1, "b": "2x"}, NOW)
    assert found is not None
    assert (found.key, found.pattern, found.value) == ("trigger.b", "1x", "2x")


@given(PLAIN, st.lists(st.text(max_size=3) | st.integers(-5, 5), max_size=4))
def test_any_path_leads_to_a_value_of_the_payload_or_to_none(
    payload: Any, path: list[str | int]
) -> None:
    value = look_up(payload, path)
    assert value is None or any(value is inner for _, inner in walk_values(payload))


@given(PLAIN)
def test_every_value_is_found_by_its_path(payload: Any) -> None:
    for path, value in walk_values(payload):
        assert look_up(payload, path) is value


def walk_values(payload: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield a payload and all values inside it, each with its path."""
    yield path, payload
    if isinstance(payload, list):
        inner: Iterable[tuple[Any, Any]] = enumerate(payload)
    else:
        inner = payload.items() if isinstance(payload, dict) else ()
    for step, value in inner:
        yield from walk_values(value, (*path, step))


def test_looking_up() -> None:
    payload = {"a": {"b-c": [{"d": 1}]}}
    assert look_up(payload, ("a", "b-c", 0, "d")) == 1
    assert look_up(payload, ("a", "b-c", 1)) is None
    assert look_up(payload, ()) == payload
