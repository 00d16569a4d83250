"""Checkpoints of gate.db: a thread apart from the deciding one writes and resets the WAL."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from steward.bank.gate.server import WalCheckpointer
from steward.bank.gate.store import GateStore

NOBODY_ASKED = 1000.0
"""Seconds since the last question of a plugin."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GateStore]:
    one = GateStore(str(tmp_path))
    yield one
    one.close()


def write(store: GateStore, times: int = 1) -> None:
    for _ in range(times):
        with store.transaction():
            # Unchanged values write nothing to the WAL.
            store.set_number("facts", time.monotonic_ns())


def log_of(db: Any) -> tuple[int, int]:
    _, frames, done = db.execute("PRAGMA wal_checkpoint(NOOP)").fetchone()
    return frames, done


def test_the_one_that_decides_never_commits_first_after_a_checkpoint(store: GateStore) -> None:
    one, db = WalCheckpointer(store), store.connect()
    now = NOBODY_ASKED
    for _ in range(3):
        write(store, 20)
        before, _ = log_of(db)
        one.checkpoint_if_quiet(db, now)
        frames, done = log_of(db)
        # The WAL is reset, but not by the next commit, for whose fsync a request would wait.
        assert before > 20 > frames > done == 0
        one.checkpoint_if_quiet(db, now + 100)
        assert log_of(db) == (frames, done), "there was nothing to write back"
        now += 1000
    db.close()


def test_nothing_is_done_while_plugins_ask_but_for_a_long_log(store: GateStore) -> None:
    one, db = WalCheckpointer(store), store.connect()
    store.last_request_at = NOBODY_ASKED
    write(store, 20)
    frames, _ = log_of(db)
    one.checkpoint_if_quiet(db, NOBODY_ASKED + 0.1)
    assert log_of(db) == (frames, 0)
    WalCheckpointer(store, most_frames=frames).checkpoint_if_quiet(db, NOBODY_ASKED + 0.1)
    assert log_of(db)[0] < frames
    db.close()


def test_the_log_stays_short_under_a_writer_that_never_rests(store: GateStore) -> None:
    one, db = WalCheckpointer(store, most_frames=50), store.connect()
    stop = threading.Event()

    def writes() -> None:
        while not stop.is_set():
            write(store)

    writer = threading.Thread(target=writes)
    writer.start()
    try:
        for number in range(3):
            until = time.monotonic() + 30
            while log_of(db)[0] <= 200 and time.monotonic() < until:
                time.sleep(0.001)
            last = store.read_number("log")
            one.checkpoint_if_quiet(db, NOBODY_ASKED * (number + 1))
            assert store.read_number("log") > last, "it was not begun anew"
    finally:
        stop.set()
        writer.join()
    db.close()


def test_free_pages_go_back_to_the_file_system_while_nobody_asks(store: GateStore) -> None:
    one, db = WalCheckpointer(store), store.connect()
    with closing(store.connect()) as filler:
        filler.executemany(
            "INSERT INTO note VALUES (?, ?)", ((f"n{n}", bytes(100_000)) for n in range(300))
        )
        filler.execute("DELETE FROM note WHERE name LIKE 'n%'")
    now = NOBODY_ASKED
    one.checkpoint_if_quiet(db, now)
    size = Path(store.path).stat().st_size
    assert size > 30_000_000
    store.last_request_at = now
    assert not one.free_pages_if_quiet(db, now + 0.5), "a plugin asked a moment ago"
    for _ in range(500):
        now += 10
        if not one.checkpoint_if_quiet(db, now) and not one.free_pages_if_quiet(db, now):
            break
    assert Path(store.path).stat().st_size < 6_000_000
    write(store)
    db.close()
