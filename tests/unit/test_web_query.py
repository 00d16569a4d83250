"""Query parameters of addresses, and the limit on event streams."""

import pytest
from litestar.testing import RequestFactory

from steward.core.errors import UsageError
from steward.web import query
from steward.web.query import HttpRequest


def asked(text: str) -> HttpRequest:
    name, _, value = text.partition("=")
    return RequestFactory().get("/", query_params={name: value})


def test_texts_are_stripped_and_bounded() -> None:
    assert query.read_text(asked("a= b "), "a") == "b"
    assert query.read_text(asked("a=b"), "c", "d") == "d"
    with pytest.raises(UsageError, match="too long"):
        query.read_text(asked("a=" + "x" * 5000), "a")


def test_words_have_commas_between() -> None:
    assert query.read_words(asked("a=b, c,,d"), "a") == ("b", "c", "d")
    assert query.read_words(asked("a="), "a") == ()
    for text in ("a=" + "x" * 5000, "a=" + "x," * 500):
        with pytest.raises(UsageError, match="too long"):
            query.read_words(asked(text), "a")


@pytest.mark.parametrize("text", ["-1", "1.5", "x", "1e3", "\N{SUPERSCRIPT TWO}", "9" * 400])
def test_what_is_no_number_is_said(text: str) -> None:
    with pytest.raises(UsageError, match="must be a number"):
        query.read_number(asked(f"n={text}"), "n")


def test_numbers_and_switches() -> None:
    assert query.read_number(asked("n=12"), "n") == 12
    assert query.read_number(asked("n="), "n", 7) == 7
    assert query.read_switch(asked("s=1"), "s")
    assert not query.read_switch(asked("s=0"), "s")
    assert not query.read_switch(asked("s=1"), "t")
