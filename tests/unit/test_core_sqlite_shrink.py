"""Databases give free pages back to the file system while their process is idle."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pysqlite3 import dbapi2 as sqlite3

from harness.events import script_event
from steward.core import sqlite
from steward.core.consumers import Append, Feed, feed_all
from steward.core.events import JOB_SCRIPT, Event
from steward.core.sqlite import Database, open_database, open_reader, transaction
from steward.core.waits import Stop

SCHEMA = (
    "CREATE TABLE cursor (position INTEGER); CREATE TABLE t (id INTEGER PRIMARY KEY, x BLOB)",
)
MIB = 1 << 20


def fill(connection: Any, megabytes: int) -> None:
    """Insert rows of 64 KiB."""
    with transaction(connection):
        connection.executemany(
            "INSERT INTO t (x) VALUES (?)", ((os.urandom(1 << 16),) for _ in range(megabytes * 16))
        )


def purge(connection: Any, *, every: int = 0) -> None:
    """Delete all rows, or all but one of ``every``, which leaves scattered pages."""
    with transaction(connection):
        connection.execute(f"DELETE FROM t WHERE {f'id % {every}' if every else '1'}")


def count_pages(connection: Any) -> int:
    return int(connection.execute("PRAGMA page_count").fetchone()[0])


def measure(path: str) -> int:
    """Return the size of a database with its WAL."""
    return os.path.getsize(path) + os.path.getsize(f"{path}-wal")


def test_every_new_database_can_shrink(tmp_path: Path) -> None:
    for name in ("jobs.db", "gate.db", "ledger.db"):
        with closing(open_database(str(tmp_path / name), SCHEMA)) as connection:
            assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,), name


def test_a_database_created_without_auto_vacuum_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "jobs.db")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA auto_vacuum=NONE")
        connection.execute("CREATE TABLE former (x)")
    with closing(open_database(path, SCHEMA)) as connection:
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (0,)
        fill(connection, 20)
        purge(connection)
        assert not sqlite.shrink_databases()


def test_a_purged_database_is_small_again_after_idle_time(tmp_path: Path) -> None:
    path = str(tmp_path / "jobs.db")
    with closing(open_database(path, SCHEMA)) as connection:
        fill(connection, 50)
        purge(connection, every=50)
        assert os.path.getsize(path) > 50 * MIB
        slices = 0
        while sqlite.shrink_databases():
            slices += 1
        assert slices > 40, "a slice is bounded"
        assert os.path.getsize(path) < 8 * MIB
        assert measure(path) < 32 * MIB
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (16,)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,), "it is FULL again"
        assert connection.execute("PRAGMA busy_timeout").fetchone() == (10_000,)
        size = os.path.getsize(path)
        assert not sqlite.shrink_databases(), "the spare pages stay"
        assert os.path.getsize(path) == size


def test_a_database_with_little_free_space_stays_as_it_is(tmp_path: Path) -> None:
    with closing(open_database(str(tmp_path / "jobs.db"), SCHEMA)) as connection:
        fill(connection, 3)
        purge(connection)
        pages = count_pages(connection)
        assert not sqlite.shrink_databases()
        assert count_pages(connection) == pages


def test_a_transaction_or_another_writer_prevents_a_slice(tmp_path: Path) -> None:
    path = str(tmp_path / "rules.db")
    with closing(open_database(path, SCHEMA)) as connection:
        fill(connection, 16)
        purge(connection)
        with closing(open_database(path, SCHEMA, shrinks=False)) as other, transaction(other):
            assert not sqlite.shrink_databases(), "it does not wait for the other writer"
        with transaction(connection):
            assert not sqlite.shrink_databases()
        assert sqlite.shrink_databases()


def test_only_the_thread_that_opened_a_database_shrinks_it(tmp_path: Path) -> None:
    results: list[bool] = []
    with closing(open_database(str(tmp_path / "jobs.db"), SCHEMA)) as connection:
        fill(connection, 16)
        purge(connection)
        thread = threading.Thread(target=lambda: results.append(sqlite.shrink_databases()))
        thread.start()
        thread.join(30)
        assert results == [False]
        assert sqlite.shrink_databases()
    assert not sqlite.shrink_databases(), "a closed database is forgotten"


def test_a_reader_bounds_the_log(tmp_path: Path) -> None:
    path = str(tmp_path / "jobs.db")
    with closing(open_database(path, SCHEMA)) as connection:
        fill(connection, 50)
        purge(connection, every=50)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        with closing(open_reader(path)) as reading:
            reading.execute("BEGIN")
            assert reading.execute("SELECT count(*) FROM t").fetchone() == (16,)
            for _ in range(3):
                while sqlite.shrink_databases():
                    pass
            assert os.path.getsize(f"{path}-wal") < 8 * MIB
            assert os.path.getsize(path) > 50 * MIB
        while sqlite.shrink_databases():
            pass
        assert os.path.getsize(path) < 8 * MIB


class Recorder:
    """Consumer with a database to shrink, which records the pages at each batch."""

    name = "recorder"
    kinds = frozenset({JOB_SCRIPT})
    batch_events = 500

    def __init__(self, path: str) -> None:
        self.database = Database(path, SCHEMA)
        fill(self.database.connection, 50)
        purge(self.database.connection)
        self.batches: list[int] = []

    def cursor(self) -> int:
        return 0

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        del upto, append
        self.batches += [count_pages(self.database.connection)] * len(events)

    def tick(self, append: Append) -> float:
        del append
        return 60.0

    def close(self) -> None:
        self.database.close()


class SteppedJournal:
    """Reader and link of a journal: an event arrives after every second slice."""

    def __init__(self, stop: Stop) -> None:
        self._stop, self.head, self.timeouts = stop, 0, []  # type: tuple[Stop, int, list[float]]

    def read(self, position: int, kinds: Any, limit: int) -> tuple[list[Event], int]:
        del kinds, limit
        return [script_event(1)] * (self.head - position), self.head

    def list_retries(self, name: str) -> list[Event]:
        del name
        return []

    def append(self, events: Sequence[Event]) -> None:
        del events

    def send_message(self, *message: Any) -> None:
        del message

    def wait(
        self, position: int, timeout_s: float, *, events: int = 1, delay_s: float = 0.0
    ) -> int:
        assert position == self.head, "every event is applied before the next slice"
        self.timeouts.append(timeout_s)
        if timeout_s > sqlite.SLICE_S:
            self._stop.set()
        elif len(self.timeouts) % 2 == 0:
            self.head += 1
        return self.head


def test_an_event_waits_for_one_slice_at_most(tmp_path: Path) -> None:
    stop = Stop()
    journal = SteppedJournal(stop)
    consumer = Recorder(str(tmp_path / "jobs.db"))
    feeds = [Feed(consumer, journal, journal)]  # type: ignore[arg-type]
    feed_all(feeds, journal, stop, lambda: None)  # type: ignore[arg-type]
    slices = len(journal.timeouts) - 1
    assert set(journal.timeouts[:-1]) == {sqlite.SLICE_S}
    assert len(consumer.batches) == journal.head == slices // 2 > 16
    steps = [before - after for before, after in pairwise(consumer.batches)]
    assert max(steps) <= 2 * 257, "two slices, each with a pointer map, lie between two events"
    assert os.path.getsize(consumer.database.path) < 8 * MIB


CHURN = """
import os, sys
from random import Random
from steward.core.sqlite import open_database, shrink_databases, transaction
chance = Random(int(sys.argv[2]))
connection = open_database(sys.argv[1], ("",))
while True:
    with transaction(connection):
        connection.executemany(
            "INSERT INTO t (x) VALUES (?)", [(chance.randbytes(4000),) for _ in range(4000)]
        )
        connection.execute("UPDATE cursor SET position = position + 1")
    with transaction(connection):
        connection.execute("DELETE FROM t WHERE id % 50")
        connection.execute("UPDATE cursor SET position = position + 1")
    print(connection.execute("SELECT position FROM cursor").fetchone()[0], flush=True)
    while shrink_databases():
        pass
"""


def test_a_kill_amid_a_slice_leaves_the_database_intact(tmp_path: Path) -> None:
    seed = Random().randrange(2**32)
    print(f"seed {seed}")
    chance = Random(seed)
    path = str(tmp_path / "jobs.db")
    with closing(open_database(path, SCHEMA)) as connection:
        connection.execute("INSERT INTO cursor VALUES (0)")
    for _ in range(12):
        command = [sys.executable, "-c", CHURN, path, str(chance.randrange(2**32))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                reported = int(process.stdout.readline())
                time.sleep(chance.random() * 0.1)
            finally:
                process.kill()
            reported = max([reported, *map(int, process.stdout.read().split())])
        with closing(open_database(path, SCHEMA)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            (position,) = connection.execute("SELECT position FROM cursor").fetchone()
            assert position >= reported
            if position % 2 == 0:
                query = "SELECT count(*) FROM t WHERE id % 50"
                assert connection.execute(query).fetchone() == (0,)


@pytest.mark.parametrize("spent_s", [0.0, 1.0])
def test_the_next_slice_adapts_to_the_time_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spent_s: float
) -> None:
    now = iter(range(10_000))
    with closing(open_database(str(tmp_path / "jobs.db"), SCHEMA)) as connection:
        fill(connection, 32)
        purge(connection)
        connection.slice_pages = 64
        monkeypatch.setattr("steward.core.sqlite.time.monotonic", lambda: next(now) * spent_s)
        pages = [count_pages(connection)]
        for _ in range(4):
            assert sqlite.shrink_databases()
            pages.append(count_pages(connection))
    steps = [before - after for before, after in pairwise(pages)]
    expected = [64, 32, 16, 16] if spent_s else [64, 128, 256, 256]
    assert [abs(step - want) <= 1 for step, want in zip(steps, expected, strict=True)] == [
        True
    ] * 4, steps
