"""Tickets: valid for one user, for a minute, and impossible to forge."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.admin.credentials.munge_authentication import (
    TICKET_LIFE,
    TICKET_PREFIX,
    make_ticket,
    verify_ticket,
)
from steward.core.errors import UnknownCredential

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)


@given(st.integers(0, 2**32 - 1), st.text(min_size=1))
def test_it_is_whose_it_was_made_for(uid: int, user: str) -> None:
    assert verify_ticket(make_ticket(uid, user, NOW), NOW) == (uid, user)


def test_it_is_over_with_its_minute() -> None:
    made = make_ticket(1000, "ada", NOW)
    with pytest.raises(UnknownCredential, match="expired after a minute"):
        verify_ticket(made, NOW + TICKET_LIFE)


@given(st.text())
def test_what_somebody_made_up_is_none(text: str) -> None:
    with pytest.raises(UnknownCredential):
        verify_ticket(TICKET_PREFIX + text, NOW)


@given(st.integers(0, 200), st.characters(codec="utf-8"))
def test_one_that_was_changed_is_none(place: int, letter: str) -> None:
    made = make_ticket(1000, "ada", NOW)
    place %= len(made)
    changed = made[:place] + letter + made[place + 1 :]
    if changed == made:
        return
    with pytest.raises(UnknownCredential):
        verify_ticket(changed, NOW)
