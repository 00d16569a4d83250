import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from pysqlite3 import dbapi2

from harness.documentation import run_example
from harness.events import script_event
from harness.forks import fork_child
from harness.rules import failure
from steward.core.consumers import Append, ApplyRate, DatabaseConsumer, Feed, Rejected
from steward.core.errors import Unavailable
from steward.core.events import JOB_SCRIPT, Event
from steward.core.journal import Journal, JournalReader
from steward.core.journal.store import encode_rows
from steward.core.sqlite import Database
from steward.core.storage import CURSOR, OUTBOX
from steward.daemon.single_pass import DirectLink

TICK_S = 60.0
"""Time longer than any back-off, in seconds."""


class Tally:
    """A consumer that records its events and fails when the test wants it."""

    name = "tally"
    kinds = frozenset({JOB_SCRIPT})
    batch_events = 10

    def __init__(self) -> None:
        self.position = 0
        self.jobs: list[int] = []
        self.fail: Callable[[Event], None] = lambda event: None

    def cursor(self) -> int:
        return self.position

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        for event in events:
            self.fail(event)
        self.jobs += [event.body.job_id for event in events]
        self.position = upto

    def tick(self, append: Append) -> float:
        return TICK_S

    def close(self) -> None:
        self.jobs.clear()


class Gatherer(Tally):
    """Consumer that waits some seconds for more events."""

    def __init__(self, gather_s: float) -> None:
        super().__init__()
        self.gather_s = gather_s


class Scene:
    def __init__(self, state_dir: Path) -> None:
        self.journal = Journal(str(state_dir))
        self.reader = JournalReader(str(state_dir))
        self.tally = Tally()
        self.now = 0.0
        self.feed = self.open_feed(self.tally)

    def open_feed(self, tally: Tally) -> Feed:
        link = DirectLink(self.journal)
        return Feed(tally, self.reader, link, clock=lambda: self.now, longest_nap_s=TICK_S)

    def gather(self, seconds: float) -> None:
        """Let new events accumulate for this time."""
        self.tally = Gatherer(seconds)
        self.feed = self.open_feed(self.tally)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            if self.feed.get_wait_s() < TICK_S:
                self.now += self.feed.get_wait_s()  # the back-off is over
            self.feed.run_turn(reads=self.feed.is_due(self.reader.head()))

    def submit(self, *job_ids: int) -> None:
        self.journal.append(encode_rows(script_event(job_id) for job_id in job_ids))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_the_same_trouble_is_logged_once_though_its_numbers_change(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    said = iter(
        ["no answer (after 307ms in state CONNECT)", "no answer (after 12ms in state CONNECT)"]
    )
    trouble: list[str] = []

    def fail(event: Event) -> None:
        trouble.append(next(said, "gone for good"))
        raise Unavailable(trouble[-1])

    scene.tally.fail = fail
    scene.submit(1)
    scene.turn(3)
    assert len(trouble) == 3
    logged = [record.getMessage() for record in caplog.records]
    assert logged == [f"tally is waiting: {trouble[0]}", "tally is waiting: gone for good"]


def test_events_are_fed_in_order_and_once(scene: Scene) -> None:
    scene.submit(*range(1, 26))
    scene.turn(4)
    assert scene.tally.jobs == list(range(1, 26))
    assert scene.reader.list_consumers()[0].lag == 0


def test_what_is_away_stops_the_cursor_and_is_told(scene: Scene) -> None:
    def away(event: Event) -> None:
        raise Unavailable("the disk is full")

    scene.submit(1, 2)
    scene.tally.fail = away
    scene.turn(3)
    (status,) = scene.reader.list_consumers()
    assert (status.position, status.state, status.detail) == (0, "waiting", "the disk is full")
    scene.tally.fail = lambda event: None
    scene.turn()
    (status,) = scene.reader.list_consumers()
    assert (status.state, status.detail) == ("running", "")
    assert scene.tally.jobs == [1, 2]


def test_a_batch_that_failed_does_not_gather(scene: Scene) -> None:
    def away(event: Event) -> None:
        raise Unavailable("the disk is full")

    scene.gather(3600.0)
    scene.submit(1, 2)
    scene.tally.fail = away
    waits = []
    for _ in range(4):
        scene.turn()
        waits.append(scene.feed.get_wait_s())
        assert scene.feed.is_due(scene.reader.head()), "the retry reads it again"
        assert [status.state for status in scene.reader.list_consumers()] == ["waiting"]
    assert waits == sorted(waits)
    assert waits[0] < waits[-1], "the back-off grows"
    scene.tally.fail = lambda event: None
    scene.turn()
    assert scene.tally.jobs == [1, 2]
    assert scene.feed.get_gather_s() == 3600.0


def test_what_is_away_is_tried_when_it_is_due_and_not_at_news(scene: Scene) -> None:
    def away(event: Event) -> None:
        raise Unavailable("the disk is full")

    scene.submit(1, 2)
    scene.tally.fail = away
    scene.feed.run_turn()
    assert scene.feed.wake_position > scene.reader.head()
    assert scene.feed.get_wait_s() <= 0.2, "however late the next tick is"
    scene.tally.fail = lambda event: None
    scene.turn(2)
    assert scene.feed.wake_position == scene.reader.head() == 2
    assert scene.feed.get_wait_s() > 1.0


@pytest.mark.parametrize("how", ["rejects", "crashes"])
def test_a_bad_event_is_tried_thrice_and_never_blocks_the_next(scene: Scene, how: str) -> None:
    tries = 0

    def bad(event: Event) -> None:
        nonlocal tries
        if event.body.job_id == 2:
            tries += 1
            if how == "rejects":
                raise Rejected("no such user", event)
            raise KeyError("a fault of ours")

    scene.submit(1, 2, 3)
    scene.tally.fail = bad
    scene.turn(2)
    assert scene.tally.jobs == [1, 3]
    assert tries == (3 if how == "rejects" else 4), "a crash is first seen on the batch"
    (letter,) = scene.reader.list_dead_letters()
    assert letter.key == script_event(2).key
    assert scene.reader.list_consumers()[0].position == 3


def test_a_dead_letter_can_be_replayed(scene: Scene) -> None:
    def bad(event: Event) -> None:
        raise Rejected("not yet", event)

    scene.submit(1)
    scene.tally.fail = bad
    scene.turn()
    scene.journal.mark_for_retry("tally")
    scene.turn()
    assert scene.reader.list_dead_letters()[0].error == "not yet"
    scene.tally.fail = lambda event: None
    scene.journal.mark_for_retry("tally")
    scene.turn()
    assert scene.tally.jobs == [1]
    assert scene.reader.list_dead_letters() == []


def test_an_unreadable_event_is_set_aside(scene: Scene) -> None:
    scene.journal.append([(JOB_SCRIPT, "c1", "k", b"{}")])
    scene.submit(5)
    scene.turn()
    assert scene.tally.jobs == [5]
    assert "cannot decode event" in scene.reader.list_dead_letters()[0].error


def test_a_dead_letter_that_makes_a_consumer_fail_is_set_aside_again(scene: Scene) -> None:
    def bad(event: Event) -> None:
        if event.body.job_id == 1:
            raise KeyError("a fault of ours")

    scene.submit(1)
    scene.tally.fail = bad
    scene.turn(2)
    scene.journal.mark_for_retry("tally")
    scene.submit(2)
    scene.turn(2)
    assert scene.tally.jobs == [2]
    (letter,) = scene.reader.list_dead_letters()
    assert not letter.retry


def test_the_last_error_is_told_also_when_it_is_over(scene: Scene) -> None:
    def away(event: Event) -> None:
        raise Unavailable("the disk is full")

    scene.submit(1)
    scene.tally.fail = away
    scene.turn()
    scene.tally.fail = lambda event: None
    scene.turn(2)
    (status,) = scene.reader.list_consumers()
    assert (status.state, status.error) == ("running", "the disk is full")
    assert status.error_at > 1_700_000_000
    assert status.rate > 0


def test_a_pace_is_that_of_the_last_minute() -> None:
    now = 1000.0
    pace = ApplyRate(lambda: now)
    assert pace.compute_per_s() == 0
    pace.add([script_event(n) for n in range(30)])
    now = 1010.0
    assert pace.compute_per_s() == 3.0
    now = 1050.0
    pace.add([script_event(n) for n in range(60)])
    assert pace.compute_per_s() == pytest.approx(90 / 50)
    now = 1061.0
    assert pace.compute_per_s() == 1.0
    now = 2000.0
    assert pace.compute_per_s() == 0


class Echo(DatabaseConsumer):
    """Consumer that appends an event for each event, with another number at each attempt."""

    name = "echo"
    kinds = frozenset({JOB_SCRIPT})
    has_outbox = True
    attempts = 0
    purges = 3

    def _apply_events(self, events: Sequence[Event]) -> Sequence[Event]:
        self.attempts += 1
        return [script_event(event.body.job_id * 10 + self.attempts) for event in events]

    def _purge(self) -> bool:
        self.purges -= 1
        return self.purges > 0


def open_echo(directory: Path) -> Echo:
    return Echo(Database(str(directory / "echo.db"), (CURSOR.schema + OUTBOX.schema,)))


def test_an_event_that_was_decided_before_a_crash_is_appended_unchanged(tmp_path: Path) -> None:
    def break_off(events: Sequence[Event]) -> None:
        raise Unavailable("the journal is away")

    echo = open_echo(tmp_path)
    echo.apply([script_event(1)], 5, break_off)
    assert echo.cursor() == 5, "the batch is not applied again"
    with pytest.raises(Unavailable):
        echo.tick(break_off)
    with pytest.raises(Unavailable):
        echo.apply([script_event(9)], 6, break_off)
    assert echo.attempts == 1, "what is left goes first"
    echo.close()
    echo = open_echo(tmp_path)
    assert echo.cursor() == 5
    appended: list[Event] = []
    echo.tick(appended.extend)
    assert [event.body.job_id for event in appended] == [11]
    echo.apply([script_event(2)], 6, appended.extend)
    echo.apply([], 4, appended.extend)
    assert [event.body.job_id for event in appended] == [11, 21]
    assert echo.cursor() == 6
    echo.close()


def test_an_unsent_event_of_another_version_is_appended_and_becomes_a_dead_letter(
    scene: Scene, tmp_path: Path
) -> None:
    def break_off(events: Sequence[Event]) -> None:
        raise Unavailable("the journal is away")

    echo = open_echo(tmp_path)
    echo.apply([script_event(1), script_event(2)], 5, break_off)
    echo.close()
    with closing(dbapi2.connect(str(tmp_path / "echo.db"))) as database:
        renamed = "replace(CAST(events AS TEXT), '\"job_id\":11', '\"job\":11')"
        database.execute(f"UPDATE outbox SET events = CAST({renamed} AS BLOB)")
        database.commit()
    echo = open_echo(tmp_path)
    appended: list[Event] = []
    echo.tick(appended.extend)
    scene.journal.append(encode_rows(appended))
    assert echo.tick(break_off) > 0, "the outbox is empty"
    echo.close()
    scene.turn()
    assert scene.tally.jobs == [21]
    (letter,) = scene.reader.list_dead_letters()
    assert letter.key == script_event(11).key
    assert "cannot decode event 1 (job.script)" in letter.error


@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_consumer_killed_at_an_append_applies_its_batch_once(tmp_path: Path, dies: str) -> None:
    schema = CURSOR.schema + OUTBOX.schema + "CREATE TABLE effect (n INTEGER);"

    class Counter(Echo):
        def __init__(self) -> None:
            self.database = Database(str(tmp_path / "counter.db"), (schema,))
            super().__init__(self.database)

        def _apply_events(self, events: Sequence[Event]) -> Sequence[Event]:
            self.database.connection.execute("INSERT INTO effect VALUES (1)")
            return [script_event(10)]

    def append(events: Sequence[Event]) -> None:
        with (tmp_path / "journal").open("a") as journal:
            if dies == "after":
                journal.writelines(f"{event.key}\n" for event in events)
                journal.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    child = fork_child(lambda: Counter().apply([script_event(1)], 1, append))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    counter = Counter()
    assert counter.cursor() == 1
    appended: list[Event] = []
    counter.tick(appended.extend)
    keys = (tmp_path / "journal").read_text().split() + [event.key for event in appended]
    assert len(set(keys)) == 1
    assert counter.database.fetch_value("SELECT count(*) FROM effect") == 1
    counter.tick(appended.extend)
    assert len(appended) == 1
    counter.close()


def test_a_consumer_purges_again_soon_while_rows_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    echo = open_echo(tmp_path)
    waits = []
    for _ in range(4):
        waits.append(echo.tick(list[Event]().extend))
        now += 1.0
    assert waits == [1.0, 1.0, 3600.0, 3599.0]
    assert echo.purges == 0
    echo.close()


def test_a_consumer_that_the_documentation_adds_counts_each_event_once(tmp_path: Path) -> None:
    consumer = run_example("Add a consumer")["FailureCounter"](str(tmp_path / "site.db"))
    failures = [failure(1), failure(2, "n2", failed=False), failure(3)]
    for _ in range(2):
        events = [event for event in failures if event.id > consumer.cursor()]
        consumer.apply(events, 3, list[Event]().extend)
    database = Database(str(tmp_path / "site.db"), (), read_only=True)
    assert database.fetch("SELECT node, failures FROM failures") == [("n1", 2)]
    database.close()
    consumer.close()
