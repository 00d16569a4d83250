"""Tokens and passwords of the myBRC API: stored hashed, checked, and revoked."""

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from servers.mybrc import PASSWORD, mybrc_settings
from steward.bank.errors import BankError, BankUsage
from steward.bank.ledger import open_ledger
from steward.core.events import utc_now
from steward.extensions.mybrc.users import (
    FailedLogins,
    TokenAuthority,
    UsersFile,
    hash_password,
    hash_token,
    remove_user,
    set_user,
    verify_password,
)
from steward.extensions.mybrc.wire import ApiError

HERE = "192.0.2.1"


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[TokenAuthority]:
    settings = mybrc_settings(tmp_path, 1)
    ledger = open_ledger(settings)
    yield TokenAuthority(ledger, UsersFile(settings.mybrc.users_file), utc_now)
    ledger.close()


def refused(keeper: TokenAuthority, header: str, address: str = HERE) -> int:
    with pytest.raises(ApiError) as error:
        keeper.authenticate(header, address)
    return error.value.status


def test_a_password_is_known_by_its_hash_alone() -> None:
    kept = hash_password("s3cret")
    assert "s3cret" not in kept
    assert hash_password("s3cret") != kept
    assert verify_password("s3cret", kept)
    assert not verify_password("s3cre", kept)
    with pytest.raises(BankUsage):
        verify_password("s3cret", "s3cret")


def test_a_token_is_given_and_known_again_and_not_kept(
    keeper: TokenAuthority, tmp_path: Path
) -> None:
    token = keeper.login("plugin", PASSWORD, HERE)
    assert keeper.authenticate(f"Token {token}", HERE) == "plugin"
    assert keeper.authenticate(f"token   {token} ", HERE) == "plugin"
    for path in tmp_path.iterdir():
        assert token.encode() not in path.read_bytes()


@pytest.mark.parametrize("header", ["", "Token", "Token ", "Basic YTpi", "Bearer x", "Token x"])
def test_what_is_no_token(keeper: TokenAuthority, header: str) -> None:
    assert refused(keeper, header) == 401


def test_whoever_leaves_the_file_is_out(keeper: TokenAuthority, tmp_path: Path) -> None:
    token = keeper.login("plugin", PASSWORD, HERE)
    users = tmp_path / "users"
    kept = users.read_text()
    users.write_text("# nobody\n")
    assert refused(keeper, f"Token {token}") == 401
    users.write_text(kept)
    os.utime(users, ns=(1, 1))
    assert keeper.authenticate(f"Token {token}", HERE) == "plugin"
    users.unlink()
    assert refused(keeper, f"Token {token}") == 401


@pytest.mark.parametrize("is_removed", [True, False])
def test_tokens_end_with_the_users_entry(
    keeper: TokenAuthority, tmp_path: Path, *, is_removed: bool
) -> None:
    path = str(tmp_path / "users")
    token = keeper.login("plugin", PASSWORD, HERE)
    set_user(path, "portal", "long enough")
    assert keeper.authenticate(f"Token {token}", HERE) == "plugin"
    if is_removed:
        assert remove_user(path, "plugin")
    set_user(path, "plugin", PASSWORD)
    assert refused(keeper, f"Token {token}") == 401
    new = keeper.login("plugin", PASSWORD, HERE)
    assert keeper.authenticate(f"Token {new}", HERE) == "plugin"
    assert refused(keeper, f"Token {token}") == 401


def test_who_guesses_has_to_wait_and_others_do_not(keeper: TokenAuthority) -> None:
    token = keeper.login("plugin", PASSWORD, HERE)
    assert [refused(keeper, f"Token {n}") for n in range(11)] == [401] * 10 + [429]
    # One who has a token may be behind the same address.
    assert keeper.authenticate(f"Token {token}", HERE) == "plugin"
    with pytest.raises(ApiError) as error:
        keeper.login("plugin", PASSWORD, HERE)
    assert error.value.status == 429
    assert error.value.wait_s > 0
    assert refused(keeper, "Token x", "192.0.2.2") == 401


def test_a_wrong_password_and_an_unknown_name_are_told_alike(keeper: TokenAuthority) -> None:
    said = []
    for user in ("plugin", "nobody"):
        with pytest.raises(ApiError) as error:
            keeper.login(user, "wrong", HERE)
        said.append((error.value.status, str(error.value)))
    assert said[0] == said[1] == (400, "Unable to log in with provided credentials.")


def test_failures_are_forgotten_after_a_minute() -> None:
    now = 0.0
    failures = FailedLogins(lambda: now)
    for _ in range(10):
        failures.add(HERE)
    with pytest.raises(ApiError):
        failures.check(HERE)
    now = 61.0
    failures.check(HERE)


def test_a_token_that_has_ended_is_none(keeper: TokenAuthority, tmp_path: Path) -> None:
    ledger = open_ledger(mybrc_settings(tmp_path, 1))
    past = datetime(2020, 1, 1, tzinfo=UTC)
    digest = hash_token("old", UsersFile(str(tmp_path / "users")).load_hashes()["plugin"])
    with ledger.transaction() as t:
        t.tokens.add("plugin", digest, past, expires=past)
    assert refused(keeper, "Token old") == 401
    with ledger.transaction() as t:
        t.tokens.add("plugin", digest, past)
    ledger.close()
    assert keeper.authenticate("Token old", HERE) == "plugin"


def test_users_are_written_and_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "users"
    assert set_user(str(path), "plugin", "long enough")
    path.write_text(f"# who\n{path.read_text()}")
    path.chmod(0o640)
    assert set_user(str(path), "second", "long enough")
    assert not set_user(str(path), "plugin", "another one")
    users = UsersFile(str(path))
    assert users.check_password("plugin", "another one")
    assert not users.check_password("plugin", "long enough")
    assert users.check_password("second", "long enough")
    assert path.read_text().startswith("# who\n")
    assert path.stat().st_mode & 0o777 == 0o640
    assert remove_user(str(path), "second")
    assert not remove_user(str(path), "second")
    assert sorted(users.load_hashes()) == ["plugin"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["users"]


@pytest.mark.parametrize("user", ["", "a b", "a:b", "#a", "a\nb"])
def test_what_can_be_no_user(tmp_path: Path, user: str) -> None:
    with pytest.raises(BankUsage):
        set_user(str(tmp_path / "users"), user, "long enough")


def test_a_password_that_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(BankUsage):
        set_user(str(tmp_path / "users"), "plugin", "short")


def test_a_users_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BankError, match=f"^cannot read {tmp_path}: Is a directory$"):
        remove_user(str(tmp_path), "plugin")
