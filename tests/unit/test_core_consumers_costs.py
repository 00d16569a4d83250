"""Costs of streaming: transactions and wake-ups with time, statements and system calls a batch."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from harness import archive
from harness.events import script_event
from harness.jobs import open_jobs
from harness.site import Site
from steward.archive.catalog.consumer import CatalogConsumer
from steward.archive.files.sink import FilesSink
from steward.core.consumers import Append, Consumer, Feed, feed_all
from steward.core.events import JOB_SCRIPT, Event
from steward.core.journal import Journal, JournalLink, JournalReader
from steward.core.journal.store import encode_rows
from steward.core.waits import Stop
from steward.jobs import JobsConsumer
from steward.reports.history.consumer import HistoryConsumer

JOBS, RATE = 3000, 300


class ScheduledLink(JournalLink):
    """Journal to which a job comes every 3.3 ms of simulated time; its waits pass the time."""

    def __init__(self, state_dir: str, stop: Stop) -> None:
        super().__init__(state_dir, stop)
        self.stop = stop
        self.journal = Journal(state_dir)
        self.now = 0.0
        self.head = 0
        self.wakes = 0

    def send_message(self, *message: Any) -> None:
        pass

    def wait(
        self, position: int, timeout_s: float, *, events: int = 1, delay_s: float = 0.0
    ) -> int:
        if position == JOBS:
            self.stop.set()
            return self.head
        self.wakes += 1
        due = max((position + 1) / RATE, self.now + delay_s)
        full = (position + events) / RATE
        self.now = min(max(self.now, min(due, full)), self.now + timeout_s)
        arrived = min(JOBS, int(self.now * RATE + 1e-6))
        new = range(self.head + 1, arrived + 1)
        self.journal.append(encode_rows(script_event(number) for number in new))
        self.head = max(self.head, arrived)
        return self.head


class Recorder:
    """Consumer that applies a batch at once, with another consumer's limits."""

    kinds = frozenset({JOB_SCRIPT})

    def __init__(self, limits: type[Any]) -> None:
        self.name = "recorder"
        self.batch_events: int = limits.batch_events
        self.gather_s: float = limits.gather_s
        self.batches: list[int] = []

    def cursor(self) -> int:
        return 0

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        self.batches.append(len(events))

    def tick(self, append: Append) -> float:
        return 3600.0

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("limits", "most"),
    [(FilesSink, 1001), (JobsConsumer, 201), (CatalogConsumer, 21), (HistoryConsumer, 21)],
)
def test_a_stream_takes_one_transaction_and_one_wake_in_the_gathering_time(
    tmp_path: Path, limits: type[Any], most: int
) -> None:
    stop = Stop()
    link = ScheduledLink(str(tmp_path), stop)
    recorder = Recorder(limits)
    reader = JournalReader(str(tmp_path))
    feed = Feed(recorder, reader, link, clock=lambda: link.now, longest_nap_s=3600.0)
    feed_all([feed], link, stop, lambda: None)
    assert sum(recorder.batches) == JOBS
    assert recorder.batches[0] == 1, "an idle consumer applies the first event at once"
    assert len(recorder.batches) <= most
    assert link.wakes <= most + 1


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count the calls of functions written in C, by name."""
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            counts[argument.__name__] += 1

    sys.setprofile(count)
    try:
        yield counts
    finally:
        sys.setprofile(None)


def apply_counted(
    site: Site, consumer: Consumer, first: int, jobs: int, **script: Any
) -> Counter[str]:
    """Return the calls for one batch of new scripts, in a turn of the consumer's feed."""
    journal = Journal(str(site.state))
    feed = Feed(consumer, JournalReader(str(site.state)), ScheduledLink(str(site.state), Stop()))
    feed.run_turn()
    scripts = [
        archive.script(site, number, b"echo %d" % number, **script)
        for number in range(first, first + jobs)
    ]
    journal.append(encode_rows(scripts))
    with counted_calls() as counts:
        assert feed.run_turn()
    journal.close()
    return counts


def count_statements(calls: Counter[str]) -> int:
    return calls["execute"] + calls["executemany"]


def test_statements_and_system_calls_of_the_files_sink(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, slurm=False)
    sink = archive.sink_of(site)
    # After its first events, the sink need not expect files from before a crash.
    apply_counted(site, sink, 1000, sink.batch_events)
    few = apply_counted(site, sink, 10, 3)
    many = apply_counted(site, sink, 100, 30)
    assert count_statements(few) == count_statements(many) <= 9
    assert (few["link"], many["link"]) == (6, 60)
    for name, most in {"open": 2, "stat": 4, "fstat": 3, "flock": 2, "write": 1}.items():
        assert few[name] == many[name] <= most, name


def test_statements_of_the_jobs_consumer(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    site.open(open_jobs)
    jobs = site.consumer(JobsConsumer)
    few = apply_counted(site, jobs, 10, 3)
    many = apply_counted(site, jobs, 100, 30)
    assert count_statements(few) == count_statements(many) <= 16


def test_statements_of_the_catalog(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    catalog = archive.open_catalog(site)
    apply_counted(site, catalog, 1, 1)
    few = apply_counted(site, catalog, 10, 3)
    many = apply_counted(site, catalog, 100, 30)
    # Each new script has two rows of its own: its bytes and its words.
    assert count_statements(few) - 6 == count_statements(many) - 60 <= 16
    catalog.close()
