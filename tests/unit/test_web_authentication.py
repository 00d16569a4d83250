"""Authentication of web requests, and the forms' CSRF tokens."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from litestar.testing import RequestFactory

from steward.admin.credentials.requests import CallerAnswer
from steward.web.authentication import (
    AuthenticatedRequest,
    Authenticator,
    RateLimiter,
    is_csrf_valid,
)
from steward.web.daemon_client import DaemonClient
from steward.web.errors import LoginRequired, RateLimitExceeded
from steward.web.settings import WebSettings

HEX = "0123456789abcdef"


def auth(secret: str) -> AuthenticatedRequest:
    me = CallerAnswer(
        uid=1, user="ada", how="session", clusters=(), bank=True, sensor=True, rules=True
    )
    return AuthenticatedRequest(how="cookie", secret=secret, me=me, client=DaemonClient("/nowhere"))


@given(st.text())
def test_a_pages_token_proves_its_session(secret: str) -> None:
    mine = auth(secret)
    assert is_csrf_valid(secret, mine.csrf)
    assert mine.csrf != mine.csrf


@given(st.text(), st.text())
def test_anothers_token_proves_nothing(secret: str, other: str) -> None:
    if secret != other:
        assert not is_csrf_valid(secret, auth(other).csrf)


@given(
    st.text(),
    st.one_of(st.text(), st.text(HEX), st.binary(min_size=32, max_size=32).map(bytes.hex)),
)
def test_what_was_made_up_proves_nothing(secret: str, shown: str) -> None:
    assert not is_csrf_valid(secret, shown)


@given(st.text(), st.integers(0, 63), st.sampled_from(HEX))
def test_a_token_that_was_changed_proves_nothing(secret: str, at: int, letter: str) -> None:
    token = auth(secret).csrf
    changed = token[:at] + letter + token[at + 1 :]
    assert is_csrf_valid(secret, changed) == (changed == token)


def asked(peer: str = "10.0.0.9", **headers: str) -> Any:
    request = RequestFactory().get(
        "/", headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    request.scope["client"] = (peer, 1234)
    return request


def doorkeeper(**web: Any) -> Authenticator:
    settings = WebSettings(**web)
    per_minute = settings.requests_per_minute if "requests_per_minute" in web else 10**6
    return Authenticator(settings, DaemonClient("/nowhere"), RateLimiter(per_minute))


def test_a_token_comes_before_a_cookie() -> None:
    request = asked(authorization="bearer stt_1", cookie="steward_session=sts_1")
    assert doorkeeper().find_credential(request) == ("token", "stt_1")
    assert doorkeeper().find_credential(asked(cookie="steward_session=sts_1")) == (
        "cookie",
        "sts_1",
    )


@pytest.mark.parametrize(
    "header", ["", "Basic eDp5", "Bearer", "Bearer  ", "Bearer \xa0", "Bearer \t", "stt_1"]
)
def test_nobody_is_told_to_log_in(header: str) -> None:
    with pytest.raises(LoginRequired, match="steward login"):
        doorkeeper().find_credential(asked(authorization=header))


def test_a_proxys_word_is_taken_from_the_proxy_alone() -> None:
    trusting = doorkeeper(proxy_header="X-Remote-User", trusted_proxies=("10.0.0.1",))
    assert trusting.find_credential(asked("10.0.0.1", x_remote_user="ada")) == ("proxy", "ada")
    for keeper, peer in ((trusting, "10.0.0.2"), (doorkeeper(), "127.0.0.1")):
        with pytest.raises(LoginRequired):
            keeper.find_credential(asked(peer, x_remote_user="ada"))
    with pytest.raises(LoginRequired):
        trusting.find_credential(asked("10.0.0.1", x_remote_user="  "))


def test_requests_through_a_proxy_count_for_who_is_behind_it() -> None:
    keeper = doorkeeper(requests_per_minute=6, shared_from=("10.0.2.0/24",))
    for _ in range(30):
        with contextlib.suppress(RateLimitExceeded):
            keeper.count(
                asked("127.0.0.1", x_forwarded_for="192.0.2.1, 192.0.2.7"), needs_user=True
            )
    with pytest.raises(RateLimitExceeded):
        keeper.count(asked("127.0.0.1", x_forwarded_for="192.0.2.7"), needs_user=True)
    keeper.count(asked("127.0.0.1", x_forwarded_for="192.0.2.8"), needs_user=True)
    # Nobody else's word is taken.
    keeper.count(asked("10.0.0.1", x_forwarded_for="192.0.2.7"), needs_user=True)
    with pytest.raises(RateLimitExceeded):
        keeper.count(asked("10.0.0.1", x_forwarded_for="192.0.2.9"), needs_user=True)
    for _ in range(10):
        keeper.count(asked("10.0.2.1"), needs_user=True)
