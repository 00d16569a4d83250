"""Numbers beyond the range of databases: every request with one is rejected in one line."""

import asyncio
import functools
import types
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from litestar.testing import RequestFactory

from harness.bank import config_of, make_shared_site
from harness.socket import serving
from steward.client import Client
from steward.client.sockets import ask_socket
from steward.core.actions import (
    MAX_INTEGER,
    MIN_INTEGER,
    Action,
    ActionError,
    Registry,
    find_annotation,
    has_valid_integers,
)
from steward.core.errors import NotFound, Unavailable, UsageError
from steward.core.journal import Journal
from steward.daemon.registry import ACTIONS
from steward.web.api.endpoints import ACTION_ENDPOINTS, read_json_body

BY_BODY = {one.action: one for one in ACTION_ENDPOINTS}
HUGE = st.integers(MAX_INTEGER + 1, 10**400) | st.integers(-(10**400), MIN_INTEGER - 1)
Make = Callable[[int], Any]
REGISTRY = Registry(tuple(ACTIONS.values()))
"""Registry without contexts: an action that needs one fails with another error."""


def holding(kind: Any) -> Iterator[Make]:
    """Yield functions that make a value of a type with a number, one for each place in it."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in (int, float):
        yield lambda number: number
    elif kind is Any:
        yield lambda number: [{"deep": [number]}]
    elif origin is Annotated:
        yield from holding(inner[0])
    elif origin in (Union, types.UnionType):
        for one in inner:
            yield from holding(one)
    elif origin is tuple:
        yield from (_wrapped(make, lambda value: [value]) for make in holding(inner[0]))
    elif origin is dict:
        yield from (_wrapped(make, lambda value: {"x": value}) for make in holding(inner[1]))
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field, make in of_struct(kind):
            yield _wrapped(make, functools.partial(_with, least(kind), field))


def _wrapped(make: Make, wrap: Callable[[Any], Any]) -> Make:
    return lambda number: wrap(make(number))


def _with(others: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    return {**others, field: value}


def of_struct(kind: type[msgspec.Struct]) -> Iterator[tuple[str, Make]]:
    """Yield the fields of a Struct that can hold a number, with the functions that fill them."""
    for field in msgspec.structs.fields(kind):
        for make in holding(field.type):
            yield field.encode_name, make


def least(kind: Any) -> Any:
    """Return a value of a type with only the required fields."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return inner[0]
    if origin is Annotated:
        return least(inner[0])
    if origin in (Union, types.UnionType):
        return None if type(None) in inner else least(inner[0])
    if origin is dict:
        return {}
    if origin is tuple:
        return []
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        required = (field for field in msgspec.structs.fields(kind) if field.required)
        return {field.encode_name: least(field.type) for field in required}
    plain = {str: "x", bool: False, int: 1, float: 1.0}
    return plain[kind] if kind in plain else {datetime: "2026-01-01T00:00Z", timedelta: "P1D"}[kind]


PLACES = [(one, field, make) for one in ACTIONS.values() for field, make in of_struct(one.request)]


def test_there_are_numbers_in_what_is_asked() -> None:
    """Without such fields the tests below would have no cases."""
    assert {action.name for action, _, _ in PLACES} >= {
        *("bank.holds", "bank.deposit", "bank.rate_create", "bank.charged", "automation.run"),
        *("credentials.token_create", "journal.retry", "rules.test", "accounting.jobs"),
    }


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0].name}-{place[1]}")
def test_a_number_that_can_be_is_read(place: tuple[Action, str, Make]) -> None:
    """Otherwise the tests below could reject the request for another reason."""
    action, field, make = place
    args = {**least(action.request), field: make(1)}
    assert isinstance(REGISTRY.decode(action.name, args), action.request)


@hypothesis_settings(max_examples=300, deadline=None)
@given(place=st.sampled_from(PLACES), number=HUGE)
def test_a_number_that_is_too_large_is_refused_by_its_name(
    place: tuple[Action, str, Make], number: int
) -> None:
    action, field, make = place
    with pytest.raises(ActionError) as refused:
        REGISTRY.decode(action.name, {**least(action.request), field: make(number)})
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{action.name}: ")
    assert field in line


@given(number=st.integers(), depth=st.integers(0, 5000))
def test_however_deep_a_number_is_it_is_found(number: int, depth: int) -> None:
    value: Any = number
    for level in range(depth):
        value = [value] if level % 2 else {"x": value}
    assert has_valid_integers(value) == (MIN_INTEGER <= number <= MAX_INTEGER)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("daemon") / "s.sock")
    with serving(path, asked=REGISTRY):
        yield path


@hypothesis_settings(max_examples=50, deadline=None)
@given(place=st.sampled_from(PLACES), number=HUGE)
def test_who_asks_the_daemon_is_told_what_was_wrong(
    daemon: str, place: tuple[Action, str, Make], number: int
) -> None:
    action, field, make = place
    with pytest.raises(UsageError) as refused:
        list(ask_socket(daemon, action, {**least(action.request), field: make(number)}))
    assert str(refused.value).startswith(f"{action.name}: ")
    assert field in str(refused.value)


def test_whoever_asks_in_a_program_of_theirs_is_told_before_it_is_asked() -> None:
    with pytest.raises(ActionError, match=r"bank\.holds: the number in 'job_id' is too large"):
        Client(socket="/nowhere").ask("bank.holds", job_id=10**20)


@hypothesis_settings(max_examples=100, deadline=None)
@given(place=st.sampled_from([one for one in PLACES if one[0].name in BY_BODY]), number=HUGE)
def test_who_asks_the_api_is_told_before_it_is_asked(
    place: tuple[Action, str, Make], number: int
) -> None:
    action, field, make = place
    asked = {**least(action.request), field: make(number)}
    request = RequestFactory().post("/", data=asked)
    with pytest.raises(UsageError, match=r"too large|Expected|out of range"):
        asyncio.run(read_json_body(BY_BODY[action.name], request))


OTHER_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("job", "left", "right"), "7"),
    **dict.fromkeys(("account", "source"), "physics"),
    "target": "optics",
    "terms": ["x"],
    "note": "x",
}
"""Values of other fields with which an action checks its numbers."""
NEEDS_OBJECT = {"bank.allocation_change", "journal.retry"}
"""Actions whose number names an object that the test does not have."""


def bounds_of(action: Action) -> Iterator[tuple[str, Any]]:
    """Yield each number field of an action's request with each bound that it declares."""
    for field in msgspec.structs.fields(action.request):
        meta = find_annotation(field.type)
        for bound in (meta.ge, meta.le) if meta is not None else ():
            if bound is not None:
                yield field.name, bound


def test_an_action_accepts_each_bound_that_it_declares(tmp_path: Path) -> None:
    make_shared_site(tmp_path).ledger.close()
    Journal(str(tmp_path / "state")).close()
    client = Client(config=str(config_of(tmp_path)))
    places = [
        (action, *place)
        for name, action in ACTIONS.items()
        if name not in NEEDS_OBJECT
        for place in bounds_of(action)
    ]
    assert {action.name for action, *_ in places} >= {"archive.list", "accounting.jobs"}
    for action, field, bound in places:
        given = {name for name in OTHER_FIELDS if name in action.request.__struct_fields__}
        fields = {**least(action.request), **{name: OTHER_FIELDS[name] for name in given}}
        try:
            client.ask(action.name, **{**fields, field: bound})
        except UsageError as error:
            pytest.fail(f"{action.name} rejects {field} = {bound}: {error}")
        except (NotFound, Unavailable):
            pass
