"""Rate limits of web requests, by user and address."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.web.authentication import RateLimiter
from steward.web.errors import RateLimitExceeded


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def taken(rate: RateLimiter, who: str, most: int = 10_000) -> int:
    """Return the number of requests that pass before one is rejected."""
    for number in range(most):
        try:
            rate.count_request(who)
        except RateLimitExceeded:
            return number
    return most


def test_a_burst_passes_and_then_as_much_as_time_allows() -> None:
    clock = Clock()
    rate = RateLimiter(60, clock)
    assert taken(rate, "ada") == 10
    clock.now += 1
    assert taken(rate, "ada") == 1
    clock.now += 3600
    assert taken(rate, "ada") == 10


def test_one_does_not_stop_another() -> None:
    rate = RateLimiter(60, Clock())
    taken(rate, "ada")
    assert taken(rate, "grace") == 10


def test_it_is_said_when_to_come_again() -> None:
    clock = Clock()
    rate = RateLimiter(30, clock)
    taken(rate, "ada")
    with pytest.raises(RateLimitExceeded) as caught:
        rate.count_request("ada")
    assert 0 < caught.value.wait_s <= 2
    clock.now += caught.value.wait_s
    rate.count_request("ada")


def test_who_asks_for_too_much_is_not_kept_out_for_asking() -> None:
    clock = Clock()
    rate = RateLimiter(60, clock)
    passed = 0
    for _ in range(1000):
        clock.now += 0.1
        passed += taken(rate, "ada", 1)
    assert 100 <= passed <= 111


@given(
    per_minute=st.integers(1, 10_000),
    pauses=st.lists(st.floats(0, 100), max_size=50),
)
def test_never_more_than_a_burst_and_what_time_brings(per_minute: int, pauses: list[float]) -> None:
    clock = Clock()
    rate = RateLimiter(per_minute, clock)
    passed = sum(
        taken(rate, "ada", 1)
        for pause in pauses
        if clock.__dict__.update(now=clock.now + pause) is None
    )
    burst = max(1.0, per_minute / 6)
    assert passed <= burst + sum(pauses) * per_minute / 60 + 1


def test_who_looks_is_told_as_who_takes_and_is_not_counted() -> None:
    clock = Clock()
    rate = RateLimiter(30, clock)
    rate.check("ada")
    assert taken(rate, "ada") == 5
    with pytest.raises(RateLimitExceeded) as looked:
        rate.check("ada")
    with pytest.raises(RateLimitExceeded) as took:
        rate.count_request("ada")
    assert looked.value.wait_s == took.value.wait_s
    clock.now += looked.value.wait_s
    rate.check("ada")
    rate.check("ada")
    assert taken(rate, "ada") == 1


def test_who_asked_last_is_forgotten_last() -> None:
    rate = RateLimiter(60, Clock())
    taken(rate, "ada")
    for number in range(19_999):
        rate.count_request(str(number))
    assert taken(rate, "ada") == 0
    for number in range(19_999):
        rate.count_request(f"another {number}")
    assert taken(rate, "ada") == 0


def test_many_who_ask_once_are_forgotten_not_kept() -> None:
    rate = RateLimiter(60, Clock())
    for number in range(30_000):
        rate.count_request(str(number))
    assert taken(rate, "29999") == 9
    assert taken(rate, "0") == 10
