"""Credentials of requests: bound to one request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.core.errors import UsageError
from steward.core.munge import (
    build_statement,
    build_statement_from_digest,
    describe_difference,
    hash_body,
)

TEXTS = ("POST", "/api/v1/ask/bank.deposit", '{"account":"physics"}', "steward.example.org")
ASKED = (TEXTS[0], TEXTS[1], TEXTS[2].encode(), TEXTS[3])


def test_it_is_the_request_and_where_it_goes() -> None:
    text = build_statement(*ASKED).decode()
    assert text.startswith("steward api 1\nPOST /api/v1/ask/bank.deposit\n")
    assert text.endswith("\nsteward.example.org\n")


@pytest.mark.parametrize(
    "origin", ["Steward.Example.org", "steward.example.org:443", "steward.example.org:80"]
)
def test_the_same_address_in_other_words_is_the_same(origin: str) -> None:
    assert build_statement(*ASKED[:3], origin) == build_statement(*ASKED)


@given(
    place=st.integers(0, 3),
    other=st.text(st.characters(codec="utf-8", exclude_characters="\n"), min_size=1),
)
def test_of_another_request_it_says_so(place: int, other: str) -> None:
    method, target, body, origin = (
        (other if place == number else part) for number, part in enumerate(TEXTS)
    )
    made = build_statement(method, target, body.encode(), origin)
    assert bool(describe_difference(made, build_statement(*ASKED))) == (
        made != build_statement(*ASKED)
    )


@given(st.binary())
def test_whatever_a_credential_holds_is_compared(made: bytes) -> None:
    assert describe_difference(made, build_statement(*ASKED))


def test_an_address_that_differs_is_named() -> None:
    made = build_statement(*ASKED[:3], "evil.example.org")
    said = describe_difference(made, build_statement(*ASKED))
    assert "'evil.example.org'" in said
    assert "'steward.example.org'" in said


def test_by_its_digest_it_is_the_same() -> None:
    method, target, body, origin = ASKED
    assert build_statement_from_digest(method, target, hash_body(body), origin) == build_statement(
        *ASKED
    )


@pytest.mark.parametrize(
    ("method", "target", "shown"),
    [
        ("POST", "/api/v1/me\n", hash_body(b"")),
        ("POST /api/v1/me\n0\nelsewhere\n", "/", hash_body(b"")),
        ("POST", "/api/v1/me /", hash_body(b"")),
        ("POST", "steward", hash_body(b"")),
        ("POST", "/api/v1/me", f"{hash_body(b'')}\n"),
        ("POST", "/api/v1/me", hash_body(b"").upper()),
        ("POST", "/api/v1/me", ""),
        ("post", "/api/v1/me", hash_body(b"")),
        ("", "/api/v1/me", hash_body(b"")),
    ],
)
def test_what_is_no_request_has_no_statement(method: str, target: str, shown: str) -> None:
    with pytest.raises(UsageError, match="not an HTTP request"):
        build_statement_from_digest(method, target, shown, "steward.example.org")
