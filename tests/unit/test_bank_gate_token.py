"""Tokens: the gate finds them in any text, verifies them, and nobody can forge them."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.bank.errors import BankError
from steward.bank.gate import token

SECRET = bytes(range(32))
accounts = st.text(min_size=0, max_size=40)


@given(
    account=accounts,
    amount=st.integers(0, 2**62),
    expires=st.integers(0, 10**11),
    cluster=st.text(max_size=20),
    uid=st.integers(0, 2**32 - 1),
    before=st.text(max_size=30),
    after=st.text(max_size=30),
)
def test_it_is_found_within_other_text(
    account: str, amount: int, expires: int, cluster: str, uid: int, before: str, after: str
) -> None:
    made = token.make_token(SECRET, token.make_hold_id(), amount, expires, account, cluster, uid)
    found = token.find_genuine_token(f"{before} {made} {after}", SECRET, cluster, uid)
    assert found is not None
    assert (found.account, found.amount, found.expires_s) == (account, amount, expires)
    assert token.remove_tokens(made) == ""
    assert token.find_genuine_token(made, SECRET, cluster, uid + 1) is None
    assert token.find_genuine_token(made, SECRET, cluster + "x", uid) is None
    assert token.find_genuine_token(made, bytes(32), cluster, uid) is None


def test_tokens_of_jobs_in_the_queue_stay_genuine() -> None:
    made = token.make_token(SECRET, "a" * 16, 123_456, 1_800_000_000, "chem", "c", 1000)
    assert made == (
        "steward=1.aaaaaaaaaaaaaaaa.123456.1800000000.mnugk3i.uj5seegnjdipoh6y2eobglxldm"
    )


def test_an_id_is_of_all_letters_and_no_other_has_it() -> None:
    made = {token.make_hold_id() for _ in range(2000)}
    assert len(made) == 2000
    assert {len(one) for one in made} == {16}
    # The chance that one of 32 is missing from 32,000 is negligible.
    assert set("".join(made)) == set("abcdefghijklmnopqrstuvwxyz234567")


@given(st.text(max_size=400))
def test_any_text_can_be_searched(text: str) -> None:
    assert token.find_genuine_token(text, SECRET, "c", 1) is None
    assert token.find_genuine_token(f"steward=1.{text}", SECRET, "c", 1) is None


@given(st.integers(0, 200), st.characters(codec="ascii"))
def test_no_changed_token_is_genuine(where: int, put: str) -> None:
    made = token.make_token(SECRET, "a" * 16, 123_456, 1_800_000_000, "chem", "c", 1000)
    where %= len(made)
    changed = made[:where] + put + made[where + 1 :]
    if changed != made:
        found = token.find_genuine_token(changed, SECRET, "c", 1000)
        assert found is None


def test_the_secret_is_made_once_and_is_ours_alone(tmp_path: Path) -> None:
    first = token.load_secret(str(tmp_path))
    assert token.load_secret(str(tmp_path)) == first
    assert len(first) == token.SECRET_BYTES
    assert stat.S_IMODE(os.stat(tmp_path / "gate.key").st_mode) == 0o600
    assert os.listdir(tmp_path) == ["gate.key"]
    token.store_secret(str(tmp_path), SECRET, is_first=True)
    assert token.load_secret(str(tmp_path)) == first
    token.store_secret(str(tmp_path), SECRET)
    assert token.load_secret(str(tmp_path)) == SECRET


def test_a_broken_secret_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "gate.key").write_text("not a key\n")
    with pytest.raises(BankError, match="restore the file"):
        token.load_secret(str(tmp_path))
