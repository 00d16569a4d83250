"""What a credential for a request is made over: it fits that request, and none that differs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.munge.requests import difference, statement

TEXTS = ("POST", "/api/v1/ask/bank.deposit", '{"account":"physics"}', "steward.example.org")
ASKED = (TEXTS[0], TEXTS[1], TEXTS[2].encode(), TEXTS[3])


def test_it_is_the_request_and_where_it_goes() -> None:
    text = statement(*ASKED).decode()
    assert text.startswith("steward api 1\nPOST /api/v1/ask/bank.deposit\n")
    assert text.endswith("\nsteward.example.org\n")


@pytest.mark.parametrize(
    "origin", ["Steward.Example.org", "steward.example.org:443", "steward.example.org:80"]
)
def test_the_same_address_in_other_words_is_the_same(origin: str) -> None:
    assert statement(*ASKED[:3], origin) == statement(*ASKED)


@given(
    place=st.integers(0, 3),
    other=st.text(st.characters(codec="utf-8", exclude_characters="\n"), min_size=1),
)
def test_of_another_request_it_says_so(place: int, other: str) -> None:
    method, target, body, origin = (
        (other if place == number else part) for number, part in enumerate(TEXTS)
    )
    made = statement(method, target, body.encode(), origin)
    assert bool(difference(made, statement(*ASKED))) == (made != statement(*ASKED))


@given(st.binary())
def test_whatever_a_credential_holds_is_compared(made: bytes) -> None:
    assert difference(made, statement(*ASKED))


def test_an_address_that_differs_is_named() -> None:
    made = statement(*ASKED[:3], "evil.example.org")
    said = difference(made, statement(*ASKED))
    assert "'evil.example.org'" in said
    assert "'steward.example.org'" in said
