import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_submission import wait_until

from harness.events import script_event
from harness.journal import fill
from steward.core.config import JournalSettings, Settings
from steward.core.consumers import Append, Feed, Rejected, feed_all
from steward.core.errors import Conflict, StewardError, UsageError
from steward.core.events import JOB_SCRIPT, Event
from steward.core.journal import (
    Journal,
    JournalError,
    JournalLink,
    JournalReader,
    JournalUnavailable,
)
from steward.core.journal.client import (
    FRAME_BYTES,
    JOURNAL_SOCKET,
    MAX_FRAME_BYTES,
    FrameDecoder,
    encode_frame,
    split_into_frames,
)
from steward.core.journal.control import (
    CONTROL_ACTION,
    CONTROL_SOCKET,
    ClearMissed,
    ForgetConsumer,
    HoldTrimming,
    RetryDeadLetters,
    WritePositions,
    send_command,
)
from steward.core.journal.server import JournalServer, lock_state_dir
from steward.core.journal.store import EncodedEvent
from steward.core.rpc import send_request
from steward.core.script_stores import make_stores
from steward.core.waits import Stop

MakeLink = Callable[..., JournalLink]

_SERVER = JournalServer.__module__


class Killed(BaseException):
    """Simulated SIGKILL, which no error handler may catch."""


class Running:
    """Journal server in a thread of the test's process."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = str(state_dir)
        self.start()

    def start(self, **timing: float) -> None:
        server = JournalServer(
            self.state_dir,
            JournalSettings(),
            make_stores(Settings(state_dir=self.state_dir)),
            **timing,
        )
        self.halt = Stop()
        self.is_killed = False
        self.thread = threading.Thread(target=self._run, args=(server,))
        self.thread.start()

    def _run(self, server: JournalServer) -> None:
        try:
            server.run(self.halt, self._beat)
        except Killed:
            server.close()

    def _beat(self) -> None:
        if self.is_killed:
            raise Killed

    def kill(self) -> None:
        """End the server as SIGKILL would, at its next heartbeat."""
        self.is_killed = True
        self.thread.join(10)
        assert not self.thread.is_alive()

    def end(self) -> None:
        self.halt.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    server = Running(tmp_path)
    yield server
    server.end()


@pytest.fixture
def make_link(tmp_path: Path) -> Iterator[Callable[..., JournalLink]]:
    links = []

    def make(stop: Stop | None = None) -> JournalLink:
        links.append(JournalLink(str(tmp_path), stop or Stop()))
        return links[-1]

    yield make
    for link in links:
        link.close()


def test_what_is_appended_can_be_read_at_once(running: Running, make_link: MakeLink) -> None:
    link = make_link()
    link.append([script_event(n) for n in range(700)])
    assert JournalReader(running.state_dir).count() == 700


def of_size(number: int, size: int) -> Event:
    return script_event(number, claimed_name="x" * size)


def test_more_than_a_frame_holds_goes_in_several(running: Running, make_link: MakeLink) -> None:
    # 80 MB together, where 64 MB are the most that the writer takes at once.
    make_link().append([of_size(n, 8 << 20) for n in range(10)])
    assert JournalReader(running.state_dir).count() == 10


def test_an_event_that_no_frame_holds_is_refused_at_once(
    running: Running, make_link: MakeLink
) -> None:
    link = make_link()
    with pytest.raises(JournalError, match="script:2:"):
        link.append([of_size(1, 10), of_size(2, MAX_FRAME_BYTES)])
    assert JournalReader(running.state_dir).count() == 0
    link.append([of_size(3, 10)])
    assert JournalReader(running.state_dir).count() == 1


@given(
    sizes=st.lists(st.one_of(st.integers(0, 9), st.integers(1 << 20, 6 << 20)), max_size=8),
)
def test_rows_stay_in_their_order_and_frames_are_bounded(sizes: list[int]) -> None:
    rows = [("job.script", "c1", f"k{n}\u00e9", bytes(size)) for n, size in enumerate(sizes)]
    frames = list(split_into_frames(rows))
    assert [row for some in frames for row in some] == rows
    for some in frames:
        assert len(some) == 1 or len(encode_frame(["append", 2**63, some])) <= FRAME_BYTES + 64


def test_a_subscriber_is_woken(running: Running, make_link: MakeLink) -> None:
    link = make_link()
    assert link.wait(-1, 5.0) == 0
    writer = make_link()
    writer.append([script_event(1)])
    assert link.wait(0, 5.0) == 1
    assert link.wait(1, 0.01) == 1, "nothing new: the time runs out"


def test_a_single_event_wakes_after_its_delay_and_several_at_once(
    running: Running, make_link: MakeLink
) -> None:
    link, writer = make_link(), make_link()
    writer.append([script_event(1)])
    assert link.wait(0, 0.05, events=3, delay_s=3600.0) == 0
    assert link.wait(0, 30.0, events=3, delay_s=0.05) == 1
    writer.append([script_event(2), script_event(3)])
    assert link.wait(0, 30.0, events=3, delay_s=3600.0) == 3


class Gatherer:
    """Consumer that records the number of events in each transaction."""

    name = "gatherer"
    kinds = frozenset({JOB_SCRIPT})
    batch_events = 200

    def __init__(self, gather_s: float) -> None:
        self.gather_s = gather_s
        self.batches: list[int] = []

    def cursor(self) -> int:
        return 0

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        self.batches.append(len(events))

    def tick(self, append: Append) -> float:
        return 3600.0

    def close(self) -> None:
        pass


class CountingLink(JournalLink):
    """Link that counts the wake-ups of its consumer."""

    wakes = 0

    def wait(
        self, position: int, timeout_s: float, *, events: int = 1, delay_s: float = 0.0
    ) -> int:
        head = super().wait(position, timeout_s, events=events, delay_s=delay_s)
        self.wakes += head > position
        return head


@contextmanager
def fed(gatherer: Gatherer, state_dir: str) -> Iterator[CountingLink]:
    """Feed a consumer in a thread."""
    stop = Stop()
    link = CountingLink(state_dir, stop)
    feeds = [Feed(gatherer, JournalReader(state_dir), link, longest_nap_s=3600.0)]
    thread = threading.Thread(target=feed_all, args=(feeds, link, stop, lambda: None))
    thread.start()
    try:
        yield link
    finally:
        stop.set()
        thread.join(30)
        link.close()


def test_the_first_event_and_a_full_batch_are_applied_at_once(
    running: Running, make_link: MakeLink
) -> None:
    gatherer, writer = Gatherer(gather_s=3600.0), make_link()
    with fed(gatherer, running.state_dir):
        writer.append([script_event(1)])
        wait_until(lambda: gatherer.batches == [1])
        writer.append([script_event(number) for number in range(2, 101)])
        time.sleep(0.2)
        assert gatherer.batches == [1], "they gather"
        writer.append([script_event(number) for number in range(101, 202)])
        wait_until(lambda: gatherer.batches == [1, 200])


@pytest.mark.parametrize("gather_s", [0.01, 0.5])
def test_transactions_and_wakes_grow_with_time_and_not_with_events(
    running: Running, make_link: MakeLink, gather_s: float
) -> None:
    jobs = 3000
    gatherer, writer = Gatherer(gather_s), make_link()
    with fed(gatherer, running.state_dir) as link:
        began = time.monotonic()
        for number in range(jobs):
            writer.append([script_event(number)])
        wait_until(lambda: sum(gatherer.batches) == jobs)
        most = (time.monotonic() - began) / gather_s + jobs / gatherer.batch_events + 2
        assert len(gatherer.batches) <= most
        assert link.wakes <= most


class Transactions:
    """Counter of the events in each transaction that appends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        really = Journal.append

        def append(journal: Journal, rows: Sequence[EncodedEvent]) -> int:
            self.sizes.append(len(rows))
            return really(journal, rows)

        monkeypatch.setattr(Journal, "append", append)


def test_an_append_to_an_idle_journal_is_committed_at_once(
    running: Running, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{_SERVER}._GATHER_S", 3600.0)
    monkeypatch.setattr(f"{_SERVER}._RECENT_S", 0.0)
    transactions = Transactions(monkeypatch)
    links = [make_link() for _ in range(3)]
    for number in range(9):
        links[number % 3].append([script_event(number)])
    assert transactions.sizes == [1] * 9


def test_the_only_client_that_appends_waits_for_no_other(
    running: Running, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{_SERVER}._GATHER_S", 3600.0)
    monkeypatch.setattr(f"{_SERVER}._RECENT_S", 3600.0)
    link, reader = make_link(), make_link()
    for number in range(1, 10):
        link.append([script_event(number)])
        assert reader.wait(number - 1, 30.0) == number


def test_the_appends_of_busy_clients_share_a_transaction(
    running: Running, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, rounds = 4, 50
    monkeypatch.setattr(f"{_SERVER}._GATHER_S", 3600.0)
    links = [make_link() for _ in range(clients)]
    monkeypatch.setattr(f"{_SERVER}._RECENT_S", 0.0)
    for number, link in enumerate(links):
        link.append([script_event(number)])
    monkeypatch.setattr(f"{_SERVER}._RECENT_S", 3600.0)
    transactions = Transactions(monkeypatch)

    def append(client: int) -> None:
        for turn in range(1, rounds + 1):
            links[client].append([script_event(turn * clients + client)])

    threads = [threading.Thread(target=append, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert transactions.sizes == [clients] * rounds


def test_a_busy_client_that_stays_away_delays_a_small_append_for_the_time_to_gather(
    running: Running, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{_SERVER}._GATHER_S", 0.2)
    monkeypatch.setattr(f"{_SERVER}._RECENT_S", 3600.0)
    first, second = make_link(), make_link()
    first.append([script_event(1)])
    began = time.monotonic()
    second.append([script_event(2)])
    assert time.monotonic() - began >= 0.2
    monkeypatch.setattr(f"{_SERVER}._GATHER_S", 3600.0)
    second.append([script_event(number) for number in range(3, 100)])


def test_appends_that_gather_are_committed_by_a_stop(
    running: Running, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{_SERVER}._GATHER_S", 3600.0)
    monkeypatch.setattr(f"{_SERVER}._RECENT_S", 3600.0)
    first, second = make_link(), make_link()
    first.append([script_event(1)])
    with ThreadPoolExecutor(1) as threads:
        append = threads.submit(second.append, [script_event(2)])
        time.sleep(0.1)
        assert not append.done(), "it gathers"
        running.halt.set()
        append.result(30.0)
    with closing(Journal(running.state_dir)) as journal:
        assert journal.head() == 2


class Picky:
    """A consumer that rejects everything until the test allows it."""

    name = "picky"
    kinds = frozenset({JOB_SCRIPT})
    batch_events = 10

    def __init__(self) -> None:
        self.position = 0
        self.accepts = False
        self.took = threading.Event()

    def cursor(self) -> int:
        return self.position

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        if events and not self.accepts:
            raise Rejected("not this one", events[0])
        if events:
            self.took.set()
        self.position = upto

    def tick(self, append: Append) -> float:
        return 3600.0

    def close(self) -> None:
        pass


def test_a_replay_wakes_the_consumer(running: Running, make_link: MakeLink) -> None:
    stop, picky, reader = Stop(), Picky(), JournalReader(running.state_dir)
    make_link().append([script_event(1)])
    link = make_link(stop)
    feeds = [Feed(picky, JournalReader(running.state_dir), link, longest_nap_s=3600.0)]
    thread = threading.Thread(target=feed_all, args=(feeds, link, stop, lambda: None))
    thread.start()
    try:
        until = time.monotonic() + 30
        while not reader.list_dead_letters("picky") and time.monotonic() < until:
            time.sleep(0.01)
        picky.accepts = True
        assert send_command(running.state_dir, RetryDeadLetters("picky")) == 1
        assert picky.took.wait(30)
    finally:
        stop.set()
        thread.join(30)


def test_appending_outlives_a_restart_of_the_writer(running: Running, make_link: MakeLink) -> None:
    link = make_link()
    link.append([script_event(1)])
    running.end()
    done = threading.Event()

    def append() -> None:
        link.append([script_event(2)])
        done.set()

    thread = threading.Thread(target=append)
    thread.start()
    assert not done.wait(0.3)
    running.start()
    assert done.wait(10)
    thread.join()
    assert JournalReader(running.state_dir).count() == 2


def test_stop_ends_the_wait_for_a_writer(make_link: MakeLink) -> None:
    stop = Stop()
    stop.set()
    with pytest.raises(JournalUnavailable, match="Is 'steward serve' running"):
        make_link(stop).append([script_event(1)])


def forgotten_when_gone(state_dir: str) -> bool:
    """The server notices a closed connection a moment later."""
    for _ in range(100):
        try:
            return send_command(state_dir, ForgetConsumer("a")) == 0
        except Conflict:
            time.sleep(0.02)
    return False


def test_standings_and_dead_letters_travel(running: Running, make_link: MakeLink) -> None:
    link = make_link()
    link.append([script_event(1)])
    link.send_message("passed", "a", 1, "running", "")
    link.send_message("aside", "a", 1, "bad")
    send_command(running.state_dir, WritePositions())
    reader = JournalReader(running.state_dir)
    assert reader.list_consumers()[0].dead_letters == 1
    assert send_command(running.state_dir, RetryDeadLetters("a", 1)) == 1
    link.send_message("revived", "a", 1)
    with pytest.raises(Conflict, match="is running"):
        send_command(running.state_dir, ForgetConsumer("a"))
    link.close()
    assert forgotten_when_gone(running.state_dir)
    assert reader.list_consumers() == []
    with pytest.raises(StewardError, match="unknown consumer"):
        send_command(running.state_dir, ForgetConsumer("a"))
    with pytest.raises(StewardError, match="unknown consumer"):
        send_command(running.state_dir, RetryDeadLetters("a"))
    for wrong in (RetryDeadLetters("a", 2**63), ClearMissed("a", 2**63), ClearMissed("a", -1)):
        with pytest.raises(UsageError, match="cannot decode the command"):
            send_command(running.state_dir, wrong)
    control = os.path.join(running.state_dir, CONTROL_SOCKET)
    with pytest.raises(UsageError, match=r"unknown action 'archive\.list': the journal"):
        send_request(control, "archive.list", WritePositions(), int, timeout_s=5)
    with pytest.raises(UsageError, match="cannot decode the command"):
        send_request(
            os.path.join(running.state_dir, CONTROL_SOCKET),
            CONTROL_ACTION,
            {"type": "explode"},
            int,
            timeout_s=5,
        )


def test_a_standing_that_a_writer_took_with_it_is_told_to_the_next(
    running: Running, make_link: MakeLink
) -> None:
    running.end()
    running.start(trim_every_s=0.1, flush_every_s=3600.0)
    link = make_link()
    send_command(running.state_dir, WritePositions())  # the first append is written at once
    link.send_message("passed", "a", 0, "running", "")
    send_command(running.state_dir, HoldTrimming(0))  # it has applied the earlier appends
    running.kill()
    assert JournalReader(running.state_dir).list_consumers() == []
    running.start()
    assert link.wait(0, 5.0) == 1, "it looks again when the connection has ended"
    link.wait(1, 0.01)  # it connects again
    send_command(running.state_dir, WritePositions())
    assert [of.name for of in JournalReader(running.state_dir).list_consumers()] == ["a"]


def test_news_that_is_none_does_not_prolong_the_wait(make_link: MakeLink, running: Running) -> None:
    link = make_link()
    writer = make_link()
    done = threading.Event()

    def append() -> None:
        job_id = 0
        while not done.wait(0.05):
            job_id += 1
            writer.append([script_event(job_id)])

    thread = threading.Thread(target=append)
    thread.start()
    began = time.monotonic()
    assert link.wait(1000, 0.3) < 1000
    took_s = time.monotonic() - began
    done.set()
    thread.join()
    assert took_s < 5.0


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff" + b"x" * 10,
        struct.pack("<I", 3) + b"abc",
        encode_frame(["append"]),
        encode_frame(["passed", 1]),
        encode_frame(["append", 1, 7]),
        encode_frame(["explode", 1, []]),
    ],
)
def test_garbage_ends_only_the_connection_it_came_by(
    running: Running, make_link: MakeLink, garbage: bytes
) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(5)
        peer.connect(os.path.join(running.state_dir, JOURNAL_SOCKET))
        peer.sendall(garbage)
        assert peer.recv(100) == b""
    link = make_link()
    link.append([script_event(1)])


def test_two_writers_are_one_too_many(running: Running) -> None:
    with pytest.raises(JournalUnavailable, match="another Steward uses"):
        lock_state_dir(running.state_dir, wait_s=0.05)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be led by others' links")
def test_root_makes_no_lock_where_a_link_of_another_user_leads(tmp_path: Path) -> None:
    lock_state_dir(str(tmp_path))
    (lock,) = tmp_path.iterdir()
    lock.unlink()
    lock.symlink_to(tmp_path / "victim")
    os.chown(lock, 4001, 4002, follow_symlinks=False)
    with pytest.raises(JournalUnavailable, match="is a symbolic link of uid 4001"):
        lock_state_dir(str(tmp_path), wait_s=0.05)
    assert not (tmp_path / "victim").exists()


def test_frames_are_cut_wherever_the_stream_is() -> None:
    frames = FrameDecoder()
    data = encode_frame(["a", 1]) + encode_frame(["b", 2])
    assert [m for i in range(len(data)) for m in frames.feed(data[i : i + 1])] == [
        ["a", 1],
        ["b", 2],
    ]


def test_what_is_set_aside_is_never_lost_to_a_writer_that_is_away(
    running: Running, make_link: MakeLink, tmp_path: Path
) -> None:
    link = make_link()
    link.append([script_event(1)])
    running.end()
    with pytest.raises(JournalUnavailable):
        link.send_message("aside", "a", 1, "bad")
    running.start()
    link.send_message("aside", "a", 1, "bad")
    reader = JournalReader(str(tmp_path))
    assert [letter.error for letter in reader.list_dead_letters()] == ["bad"]
    reader.close()


def test_a_file_with_room_shrinks_between_commits(tmp_path: Path, make_link: MakeLink) -> None:
    journal = Journal(str(tmp_path))
    fill(journal, 32)
    journal.close()
    full = os.path.getsize(journal.path)
    server = Running(tmp_path)
    try:
        link = make_link()
        count = 0
        until = time.monotonic() + 120
        while os.path.getsize(journal.path) > full - (12 << 20):
            assert time.monotonic() < until
            count += 1
            link.append([of_size(count, 100)])
            time.sleep(0.2)  # a client that appends without a pause goes first
    finally:
        server.end()
    assert JournalReader(str(tmp_path)).count() == count
