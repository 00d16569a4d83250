"""Idempotency keys: an action runs once, despite crashes."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from harness.socket import Question, registry
from steward.automation.runner import OperationOutcome
from steward.core.access import Caller
from steward.core.errors import Conflict, PermissionRefused, StewardError, Unavailable, UsageError
from steward.core.events import utc_now
from steward.core.rpc import decode_reply_line
from steward.daemon.idempotency import LONGEST_KEY, IdempotencyStore

ADA, GRACE = Caller(uid=1, user="ada"), Caller(uid=2, user="grace")
ECHO = registry().get("test.echo")


class Doing:
    """Action that counts its runs, and ends as the test sets."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.count = 0
        self.error = error

    def __call__(self) -> Any:
        self.count += 1
        if self.error is not None:
            raise self.error
        return {"count": self.count}


@pytest.fixture
def repeats(tmp_path: Path) -> IdempotencyStore:
    return IdempotencyStore(str(tmp_path))


def once(
    repeats: IdempotencyStore, doing: Doing, key: str = "k", text: str = "x", by: Caller = ADA
) -> bytes:
    return repeats.run_once(key, by, ECHO, Question(text=text), doing)


def test_asked_again_it_has_the_same_answer_and_is_not_done_again(
    repeats: IdempotencyStore,
) -> None:
    doing = Doing()
    first = once(repeats, doing)
    assert once(repeats, doing) == first
    assert doing.count == 1
    assert b'"answer":{"count":1}' in first
    assert decode_reply_line(first).ok


def test_a_key_is_for_one_request_of_one_user(repeats: IdempotencyStore) -> None:
    doing = Doing()
    once(repeats, doing)
    with pytest.raises(UsageError, match="another request"):
        once(repeats, doing, text="y")
    once(repeats, doing, by=GRACE, text="y")
    once(repeats, doing, key="l", text="y")
    assert doing.count == 3


@pytest.mark.parametrize("error", [PermissionRefused("no"), UsageError("no"), Unavailable("no")])
def test_what_changed_nothing_may_be_asked_again(
    repeats: IdempotencyStore, error: StewardError
) -> None:
    with pytest.raises(type(error)):
        once(repeats, Doing(error))
    doing = Doing()
    once(repeats, doing, text="something else")
    assert doing.count == 1


def test_what_went_wrong_in_the_middle_is_not_done_again(repeats: IdempotencyStore) -> None:
    with pytest.raises(StewardError, match="half"):
        once(repeats, Doing(StewardError("half of it is done")))
    doing = Doing()
    assert "half of it" in decode_reply_line(once(repeats, doing)).error
    assert doing.count == 0


def test_what_broke_off_is_not_done_again(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            once(IdempotencyStore(str(tmp_path)), Doing(SystemExit()))
        finally:
            os._exit(1)
    os.waitpid(pid, 0)
    doing = Doing()
    with pytest.raises(Conflict, match="was interrupted"):
        once(IdempotencyStore(str(tmp_path)), doing)
    assert doing.count == 0


def test_while_it_is_done_another_is_told_to_wait(
    repeats: IdempotencyStore, tmp_path: Path
) -> None:
    class Nested(Doing):
        def __call__(self) -> Any:
            with pytest.raises(Conflict, match="is in progress"):
                once(IdempotencyStore(str(tmp_path)), Doing())
            return super().__call__()

    doing = Nested()
    once(repeats, doing)
    assert doing.count == 1


def test_after_a_day_a_key_is_free(tmp_path: Path) -> None:
    doing, now = Doing(), utc_now()
    once(IdempotencyStore(str(tmp_path), lambda: now), doing)
    once(IdempotencyStore(str(tmp_path), lambda: now + timedelta(hours=23)), doing)
    assert doing.count == 1
    once(IdempotencyStore(str(tmp_path), lambda: now + timedelta(hours=25)), doing)
    assert doing.count == 2


def test_a_long_answer_is_not_kept_but_that_it_was_done_is(repeats: IdempotencyStore) -> None:
    class Long(Doing):
        def __call__(self) -> Any:
            super().__call__()
            return "x" * (2 << 20)

    doing = Long()
    assert len(once(repeats, doing)) > 2 << 20
    with pytest.raises(Conflict, match="is no longer stored"):
        once(repeats, doing)
    assert doing.count == 1


@pytest.mark.parametrize("key", ["x" * (LONGEST_KEY + 1), "a\nb", "\x00"])
def test_a_key_is_a_word(repeats: IdempotencyStore, key: str) -> None:
    with pytest.raises(UsageError, match="printable"):
        once(repeats, Doing(), key=key)


def test_a_stream_has_no_single_answer(repeats: IdempotencyStore) -> None:
    with pytest.raises(UsageError, match="without an idempotency key"):
        repeats.run_once("k", ADA, registry().get("test.count"), Question(), Doing())


def test_nobody_else_can_read_them(tmp_path: Path, repeats: IdempotencyStore) -> None:
    del repeats
    assert (tmp_path / "repeats.db").stat().st_mode & 0o077 == 0


def test_an_answer_that_nothing_was_changed_is_not_stored(
    repeats: IdempotencyStore, tmp_path: Path
) -> None:
    class Reading(Doing):
        def __call__(self) -> Any:
            super().__call__()
            now = utc_now()
            return OperationOutcome(
                action="slurm.script.get",
                parameters={},
                result="#!/bin/sh\nsecret",
                id=self.count - 1,
                started=now,
                ended=now,
            )

    doing = Reading()
    assert b"secret" in once(repeats, doing)
    assert not [path for path in tmp_path.iterdir() if b"secret" in path.read_bytes()]
    changed = once(repeats, doing)  # has a number in the audit log
    assert (once(repeats, doing), doing.count) == (changed, 2)
