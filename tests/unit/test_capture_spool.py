import errno
import os
import select
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from harness.spool import Faults, environment_bytes, faults, make_spool, no_lease_signals, submit
from steward.capture.slurm_spool import HeldScript, SlurmSpool
from steward.capture.spool import BatchCommitter, CaptureBatch, CaptureLimits, SpoolCapture
from steward.capture.spool_entries import MOST_SCRIPT_BYTES
from steward.core.config import RedactSettings
from steward.core.events import JOB_MISSED, Event, decode_event
from steward.core.journal import JournalUnavailable
from steward.core.journal.store import EncodedEvent
from steward.core.redaction import Redactor
from steward.core.script_stores import MARKER, IncomingStore, StoreUnavailable, UnsyncedFiles
from steward.core.waits import Stop

__all__ = ["faults", "no_lease_signals"]


class Bench:
    """Capture with a real spool and real stores; it appends events to a list."""

    def __init__(self, root: Path) -> None:
        self.spool = make_spool(root / "spool")
        self.archive = root / "archive"
        self.archive.mkdir()
        (self.archive / MARKER).touch()
        self.state = root / "state"
        self.state.mkdir()
        self.rows: list[EncodedEvent] = []
        self.stores = [
            IncomingStore(
                "archive.files", str(self.archive / ".incoming"), str(self.archive / MARKER)
            ),
            IncomingStore("state", str(self.state / "incoming")),
        ]

    def append(self, rows: Sequence[EncodedEvent]) -> None:
        self.rows.extend(rows)

    def capture(
        self,
        append: Callable[[Sequence[EncodedEvent]], None] | None = None,
        *,
        environments: bool = True,
        limits: CaptureLimits | None = None,
        rescan_s: float = 2.0,
    ) -> SpoolCapture:
        self.watched = SlurmSpool(
            str(self.spool), is_captured=lambda job_id, mtime_ns: False, rescan_s=rescan_s
        )
        return SpoolCapture(
            "c1",
            self.watched,
            self.stores,
            Redactor(RedactSettings()),
            append or self.append,
            keep_environments=environments,
            limits=limits,
        )

    def is_held(self, job_id: int) -> bool:
        """Return whether a descriptor of a job's script is open, under any path."""
        return any(f"/job.{job_id}/script" in path for path in open_files())

    @property
    def events(self) -> list[Event]:
        return [decode_event(0, *row) for row in self.rows]


def open_files() -> list[str]:
    return [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]


def unread(caplog: pytest.LogCaptureFixture) -> int:
    """Return the number of scripts that were reported as unreadable."""
    return caplog.text.count("from the spool yet")


def until(is_so: Callable[[], bool], turn: Callable[[], None]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end, "it did not come about"
        turn()
        time.sleep(0.005)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def read(bench: Bench, event: Event, what: str) -> bytes:
    store = {store.name: store for store in bench.stores}[event.body.store]
    return store.read(getattr(event.body, what))


def test_a_script_is_kept_byte_for_byte_less_the_one_nul(bench: Bench) -> None:
    script = bytes(range(256)) + b"\0\0"
    submit(bench.spool, 1, script, environment_bytes(b"A=\xff", b"MY_TOKEN=hunter2"))
    bench.capture().run_once()
    (event,) = bench.events
    assert read(bench, event, "script") == script
    assert b"hunter2" not in read(bench, event, "environment")
    assert event.body.redacted == ("MY_TOKEN",)
    assert event.body.flags == ()
    mtime_ns = (bench.spool / "hash.1/job.1/script").stat().st_mtime_ns
    assert event.key == f"script:1:{mtime_ns}"


@pytest.mark.parametrize(
    ("script", "environment", "flags"),
    [
        (b"no nul", environment_bytes(), ("script-no-nul",)),
        (b"\0", None, ("environment-missing",)),
        (b"\0", environment_bytes(b"A=1")[:-2], ("environment-short",)),
        (b"\0", environment_bytes(b"A=1", count=9), ("environment-count",)),
        (b"", b"", ("script-no-nul", "environment-short")),
    ],
)
def test_what_is_odd_is_kept_and_flagged(
    bench: Bench, script: bytes, environment: bytes | None, flags: tuple[str, ...]
) -> None:
    directory = submit(bench.spool, 1)
    (directory / "script").write_bytes(script)
    if environment is None:
        (directory / "environment").unlink()
    else:
        (directory / "environment").write_bytes(environment)
    bench.capture().run_once()
    assert bench.events[0].body.flags == flags


def test_one_pass_takes_scripts_where_leases_do_not_work(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "no leases on this file system")

    monkeypatch.setattr("steward.capture.spool_entries.fcntl.fcntl", refuse)
    submit(bench.spool, 1)
    bench.capture().run_once()
    assert len(bench.events) == 1


def test_environments_may_be_left_out(bench: Bench) -> None:
    submit(bench.spool, 1, environment=environment_bytes(b"A=1"))
    bench.capture(environments=False).run_once()
    assert bench.events[0].body.environment is None
    assert not list(bench.archive.rglob("*.env"))


def test_an_archive_that_is_away_is_replaced_by_the_state_directory(bench: Bench) -> None:
    (bench.archive / MARKER).unlink()
    submit(bench.spool, 1)
    bench.capture().run_once()
    assert bench.events[0].body.store == "state"


def test_nothing_to_write_to_is_an_error_of_its_own(bench: Bench) -> None:
    (bench.archive / MARKER).unlink()
    shutil.rmtree(bench.state)
    submit(bench.spool, 1)
    with pytest.raises(StoreUnavailable, match="is its file system mounted"):
        bench.capture().run_once()


def run(capture: SpoolCapture) -> tuple[Stop, threading.Thread]:
    stop = Stop()
    thread = threading.Thread(target=capture.run, args=(stop, lambda: None))
    thread.start()
    return stop, thread


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.01)


def test_scripts_are_held_while_nothing_can_be_written_and_kept_afterwards(bench: Bench) -> None:
    (bench.archive / MARKER).unlink()
    shutil.rmtree(bench.state)
    stop, thread = run(bench.capture(limits=CaptureLimits(retry_store_s=0.1)))
    directory = submit(bench.spool, 1, b"patience")
    time.sleep(0.5)
    shutil.rmtree(directory)
    assert bench.rows == []
    bench.state.mkdir()
    wait_for(lambda: len(bench.rows) == 1)
    assert read(bench, bench.events[0], "script") == b"patience"
    stop.set()
    thread.join(10)


def test_the_archive_is_used_again_when_it_is_back(bench: Bench) -> None:
    (bench.archive / MARKER).unlink()
    stop, thread = run(bench.capture(limits=CaptureLimits(retry_store_s=0.05)))
    submit(bench.spool, 1)
    wait_for(lambda: len(bench.rows) == 1)
    (bench.archive / MARKER).touch()
    time.sleep(0.1)
    submit(bench.spool, 2)
    wait_for(lambda: len(bench.rows) == 2)
    assert [event.body.store for event in bench.events] == ["state", "archive.files"]
    stop.set()
    thread.join(10)


def test_a_journal_that_refuses_is_tried_again(bench: Bench) -> None:
    failures = 3

    def append(rows: Sequence[EncodedEvent]) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise JournalUnavailable("disk full")
        bench.append(rows)

    stop, thread = run(bench.capture(append))
    directory = submit(bench.spool, 1, b"again")
    time.sleep(0.2)
    shutil.rmtree(directory)
    wait_for(lambda: len(bench.rows) == 1, timeout_s=30)
    assert read(bench, bench.events[0], "script") == b"again"
    stop.set()
    thread.join(10)


def test_a_journal_that_is_away_costs_no_descriptors(bench: Bench) -> None:
    back = threading.Event()

    def append(rows: Sequence[EncodedEvent]) -> None:
        back.wait(20)
        bench.append(rows)

    before = len(os.listdir("/proc/self/fd"))
    stop, thread = run(bench.capture(append))
    for job_id in range(1, 301):
        submit(bench.spool, job_id)
        if job_id % 50 == 0:
            time.sleep(0.05)
    wait_for(lambda: len(os.listdir("/proc/self/fd")) < before + 40)
    assert len(list(bench.archive.rglob("*.script"))) == 300
    back.set()
    wait_for(lambda: len(bench.rows) == 300)
    stop.set()
    thread.join(10)


def test_a_script_that_was_written_before_is_synced_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    (store, _) = bench.stores
    store.write("c1.1.5.3.script", b"abc")
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    store.close()  # its process was killed before it could sync
    kept = store.write("c1.1.5.3.script", b"abc")
    store.sync()
    assert os.stat(store.get_path(kept)).st_ino in synced


def test_descriptors_are_given_back(bench: Bench) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for job_id in range(1, 301):
        submit(bench.spool, job_id)
    bench.capture().run_once()
    for store in bench.stores:
        store.close()
    assert len(bench.rows) == 300
    assert len(os.listdir("/proc/self/fd")) == before


def test_jobs_that_vanished_are_logged_and_told_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    capture = bench.capture()
    capture.run_turn()
    for job_id in range(1, 1101):
        shutil.rmtree(submit(bench.spool, job_id))
    until(lambda: len(bench.rows) >= 2, capture.run_turn)
    assert capture.finish()
    told = [event.body.job_ids for event in bench.events if event.kind == JOB_MISSED]
    assert max(map(len, told)) <= 1000
    assert sorted(job_id for ids in told for job_id in ids) == list(range(1, 1101))
    assert "scripts of c1 are lost" in caplog.text
    assert " more" in caplog.text


def test_stop_finishes_what_is_in_hand(bench: Bench) -> None:
    for job_id in range(1, 201):
        submit(bench.spool, job_id)
    capture = bench.capture()
    capture.run_turn()
    capture.finish()
    assert len(bench.rows) == 200


def test_what_comes_while_the_journal_is_busy_gathers(bench: Bench) -> None:
    busy, entered = threading.Event(), threading.Event()
    batches: list[int] = []

    def append(rows: Sequence[EncodedEvent]) -> None:
        batches.append(len(rows))
        entered.set()
        assert busy.wait(30)

    capture = bench.capture(append, limits=CaptureLimits(gather_s=3600.0))
    submit(bench.spool, 1)
    capture.run_turn()
    assert entered.wait(30)
    kept = []
    for number in range(2, 12):
        submit(bench.spool, number)
        capture.run_turn()
        kept.append(capture.captured)
    busy.set()
    assert capture.finish()
    assert kept == list(range(2, 12))
    assert batches[0] == 1
    assert batches == [1, 10]


def test_what_gathered_is_committed_as_soon_as_the_journal_has_answered(bench: Bench) -> None:
    busy, entered = threading.Event(), threading.Event()
    batches: list[int] = []

    def append(rows: Sequence[EncodedEvent]) -> None:
        batches.append(len(rows))
        entered.set()
        assert busy.wait(30)

    capture = bench.capture(append, limits=CaptureLimits(gather_s=3600.0))
    stop, thread = run(capture)
    submit(bench.spool, 1)
    assert entered.wait(30)
    for number in range(2, 12):
        submit(bench.spool, number)
    wait_for(lambda: capture.captured == 11)
    busy.set()
    wait_for(lambda: batches == [1, 10])
    stop.set()
    thread.join(10)


def test_batches_that_come_alone_are_committed_at_once_by_one_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    really = UnsyncedFiles.sync

    def sync(unsynced: UnsyncedFiles) -> None:
        threads.append(threading.current_thread().name)
        really(unsynced)

    monkeypatch.setattr(UnsyncedFiles, "sync", sync)

    def append(rows: Sequence[EncodedEvent]) -> None:
        threads.append(threading.current_thread().name)
        bench.append(rows)

    committer = BatchCommitter(append)
    (store, _) = bench.stores
    for number in range(20):
        directory = submit(bench.spool, number + 1)
        held = HeldScript(number + 1, 5, os.open(directory / "script", os.O_RDONLY), -1)
        store.write(f"c1.{number}.5.3.script", b"abc")
        row = ("job.script", "c1", f"script:{number}:5", b"{}")
        committer.put(CaptureBatch([row], [held], [store.take_unsynced()]))
        wait_for(lambda: not committer.pending_batches)
        assert len(bench.rows) == number + 1
        assert not bench.is_held(number + 1)
    assert threads == ["committer"] * 40
    assert not select.select([committer.fd], [], [], 0)[0], "the main thread need not wake"
    assert committer.finish(10.0)


class Entry(msgspec.Struct):
    """An entry whose close fails, as on FUSE."""

    closed: int = 0

    def close(self) -> None:
        self.closed += 1
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_an_entry_without_files_or_whose_close_fails_ends_no_thread(bench: Bench) -> None:
    committer = BatchCommitter(bench.append)
    (store, _) = bench.stores
    entries = [Entry() for _ in range(4)]
    for number, entry in enumerate(entries):
        if number % 2:
            store.write(f"c1.{number}.5.3.script", b"abc")
        row = ("job.script", "c1", f"script:{number}:5", b"{}")
        unsynced = [store.take_unsynced()] if number % 2 else []
        committer.put(CaptureBatch([row], [entry], unsynced))  # type: ignore[list-item]
        wait_for(lambda: not committer.pending_batches)
    assert [entry.closed for entry in entries] == [1] * 4
    assert len(bench.rows) == 4
    assert committer.finish(10.0)


def test_capture_shows_that_it_lives_at_every_script(bench: Bench) -> None:
    for job_id in range(1, 41):
        submit(bench.spool, job_id)
    stop = Stop()
    capture = bench.capture()
    beaten_at: list[int] = []

    def beat() -> None:
        beaten_at.append(capture.captured)
        if capture.captured == 40:
            stop.set()

    capture.run(stop, beat)
    assert sorted(set(beaten_at)) == list(range(41))


def test_a_batch_goes_when_it_has_many_bytes(bench: Bench) -> None:
    for job_id in range(1, 9):
        submit(bench.spool, job_id, b"x" * 60_000)
    batches: list[int] = []
    limits = CaptureLimits(batch_bytes=100_000)
    bench.capture(lambda rows: batches.append(len(rows)), limits=limits).run_once()
    assert batches == [2, 2, 2, 2]


def test_an_environment_that_no_program_could_start_with_is_left_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steward.capture.slurm_spool.MOST_ENVIRONMENT_BYTES", 100_000)
    submit(bench.spool, 1, b"mine", environment_bytes(b"A=" + b"x" * 100_000))
    submit(bench.spool, 2, b"yours", environment_bytes(b"A=" + b"x" * 99_000))
    bench.capture().run_once()
    large, usual = sorted(bench.events, key=lambda event: event.body.job_id)
    assert read(bench, large, "script") == b"mine"
    assert (large.body.environment, large.body.flags) == (None, ("environment-too-large",))
    assert len(read(bench, usual, "environment")) > 99_000


def test_a_script_too_large_to_be_kept_is_said_to_be(bench: Bench) -> None:
    directory = submit(bench.spool, 1, b"x", environment_bytes(b"A=1"))
    os.truncate(directory / "script", MOST_SCRIPT_BYTES + 1)
    submit(bench.spool, 2, b"y" * 99_000, environment_bytes(b"A=1"))
    bench.capture().run_once()
    large, usual = sorted(bench.events, key=lambda event: event.body.job_id)
    body = large.body
    assert (body.script, body.environment, body.flags) == (None, None, ("script-too-large",))
    assert read(bench, usual, "script") == b"y" * 99_000


def test_a_store_that_cannot_sync_costs_no_descriptors_of_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = BatchCommitter(bench.append)
    for store in bench.stores:
        store.write("c1.1.5.3.script", b"abc")
    first = bench.stores[0].directory
    really = os.fsync

    def fsync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(first):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    unsynced = [store.take_unsynced() for store in bench.stores]
    committer.put(CaptureBatch([], [], unsynced))
    assert committer.finish(10.0)
    assert not committer.failed.empty(), "the batch has failed"
    ours = tuple(store.directory for store in bench.stores)
    assert not [path for path in open_files() if path.startswith(ours) and path.endswith(".script")]


def test_a_script_that_could_not_be_synced_is_not_taken_for_durable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tuple(store.directory for store in bench.stores)
    really = os.fsync

    def fsync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(ours):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    submit(bench.spool, 1)
    with pytest.raises(StoreUnavailable, match="cannot make all scripts durable"):
        bench.capture().run_once()
    assert bench.events == []


def missed(bench: Bench) -> list[int]:
    """Return the jobs that were reported as lost."""
    told = [event.body.job_ids for event in bench.events if event.kind == JOB_MISSED]
    return sorted(job_id for job_ids in told for job_id in job_ids)


SCRIPT_ERRORS = [
    *(errno.EIO, errno.ESTALE, errno.ENOMEM),
    *(errno.EREMOTEIO, errno.ENOTCONN, errno.EHOSTDOWN, errno.EACCES),
]


@pytest.mark.parametrize("error", SCRIPT_ERRORS)
def test_a_read_that_fails_is_tried_again_also_of_what_was_removed(
    bench: Bench, faults: Faults, error: int
) -> None:
    faults.error, faults.of = error, ""
    capture = bench.capture()
    for job_id in range(1, 21):
        submit(bench.spool, job_id)
    until(lambda: faults.reads >= 40, capture.run_turn)
    shutil.rmtree(bench.spool)
    assert bench.events == []
    faults.error = 0
    until(lambda: capture.captured == 20, capture.run_turn)
    assert capture.finish()
    assert len(bench.events) == 20


def test_what_cannot_be_read_for_long_is_found_by_a_rescan(bench: Bench, faults: Faults) -> None:
    faults.error, faults.of = errno.EIO, ""
    before = len(os.listdir("/proc/self/fd"))
    capture = bench.capture(
        limits=CaptureLimits(hold_unread_s=0.3, first_rescan_s=0.1, longest_rescan_s=0.2)
    )
    submit(bench.spool, 1)
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 1.5, capture.run_turn)
    assert bench.events == []
    assert len(os.listdir("/proc/self/fd")) < before + 40, "its descriptors are not held for ever"
    faults.error = 0
    until(lambda: capture.captured == 1, capture.run_turn)
    assert capture.finish()


def test_a_script_whose_environment_cannot_be_read_is_kept_without_it(
    bench: Bench, faults: Faults
) -> None:
    faults.error, faults.of = errno.EIO, "environment"
    capture = bench.capture(limits=CaptureLimits(hold_unread_s=0.3))
    submit(bench.spool, 1)
    until(lambda: capture.captured == 1, capture.run_turn)
    assert capture.finish()
    (event,) = bench.events
    assert "environment-unreadable" in event.body.flags
    assert read(bench, event, "script")


def test_a_pipe_in_place_of_an_environment_loses_no_script(bench: Bench) -> None:
    submit(bench.spool, 1)
    path = next(bench.spool.glob("hash.*/job.1/environment"))
    path.unlink()
    os.mkfifo(path)
    capture = bench.capture()
    capture.run_once()
    (event,) = bench.events
    assert "environment-unreadable" in event.body.flags


def test_what_was_removed_is_held_as_long_as_it_cannot_be_read(
    bench: Bench, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """No rescan finds it, and meanwhile other scripts are rescanned for."""
    faults.error, faults.of = errno.EIO, ""
    capture = bench.capture(
        limits=CaptureLimits(hold_unread_s=0.3, first_rescan_s=0.1, longest_rescan_s=0.2)
    )
    removed = submit(bench.spool, 1)
    until(lambda: unread(caplog) == 1, capture.run_turn)
    shutil.rmtree(removed)
    submit(bench.spool, 2)
    until(lambda: unread(caplog) >= 2 and not bench.is_held(2), capture.run_turn)
    until(lambda: bench.is_held(2), capture.run_turn)
    assert bench.is_held(1)
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 1.0, capture.run_turn)
    assert missed(bench) == []
    faults.error = 0
    until(lambda: capture.captured == 2, capture.run_turn)
    assert capture.finish()
    assert missed(bench) == []


def test_what_was_removed_and_held_no_more_is_told_to_be_lost(bench: Bench, faults: Faults) -> None:
    faults.error, faults.of = errno.EIO, ""
    capture = bench.capture(limits=CaptureLimits(max_unreadable=5, missed_every_s=0.0))
    directories = [submit(bench.spool, job_id) for job_id in range(1, 21)]
    bench.watched.process_events()  # opens them
    assert len(bench.watched.ready) == 20
    for directory in directories:
        shutil.rmtree(directory)
    until(lambda: len(missed(bench)) == 15, capture.run_turn)
    faults.error = 0
    until(lambda: capture.captured == 5, capture.run_turn)
    assert capture.finish()
    kept = [event.body.job_id for event in bench.events if event.kind != JOB_MISSED]
    assert sorted(kept + missed(bench)) == list(range(1, 21))


def test_what_is_removed_before_a_rescan_finds_it_is_told_to_be_lost(
    bench: Bench, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.error, faults.of = errno.EIO, ""
    capture = bench.capture(
        limits=CaptureLimits(hold_unread_s=0.0, first_rescan_s=0.5, longest_rescan_s=0.5)
    )
    gone = submit(bench.spool, 1)
    submit(bench.spool, 2)
    until(lambda: unread(caplog) >= 2 and not bench.is_held(1), capture.run_turn)
    shutil.rmtree(gone)
    until(lambda: missed(bench) == [1], capture.run_turn)
    faults.error = 0
    until(lambda: capture.captured == 1, capture.run_turn)
    assert capture.finish()
    assert missed(bench) == [1]


def test_what_was_removed_and_cannot_be_read_at_the_end_is_told_to_be_lost(
    bench: Bench, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.error, faults.of = errno.EIO, ""
    before = len(os.listdir("/proc/self/fd"))
    capture = bench.capture()
    submit(bench.spool, 2)
    until(lambda: faults.reads > 3, capture.run_turn)
    gone = submit(bench.spool, 1)
    until(lambda: unread(caplog) == 2, capture.run_turn)
    shutil.rmtree(gone)
    # It can be read again, and not be kept: its descriptors, now among the ready ones, are
    # closed once. The other waits for its next try.
    (bench.archive / MARKER).unlink()
    shutil.rmtree(bench.state)
    faults.of = "job.2/script"
    until(lambda: "cannot write captured scripts to" in caplog.text, capture.run_turn)
    assert bench.watched.ready
    assert not capture.finish()
    assert missed(bench) == [1]
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("is_over", [True, False])
def test_an_environment_that_cannot_be_opened_costs_no_script(
    bench: Bench, faults: Faults, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    faults.error, faults.of = errno.EIO, "/environment"
    faults.of_opens(monkeypatch)
    capture = bench.capture(limits=CaptureLimits(hold_unread_s=60.0 if is_over else 0.3))
    submit(bench.spool, 1)
    until(lambda: faults.reads > 2, capture.run_turn)
    if is_over:
        faults.error = 0
    until(lambda: capture.captured == 1, capture.run_turn)
    assert capture.finish()
    (event,) = bench.events
    assert bool(event.body.environment) == is_over
    assert ("environment-unreadable" in event.body.flags) != is_over


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ENOTCONN])
@pytest.mark.parametrize("call", ["of_opens", "of_stats"])
def test_a_script_that_cannot_be_opened_is_found_or_told_to_be_lost(
    bench: Bench, faults: Faults, monkeypatch: pytest.MonkeyPatch, error: int, call: str
) -> None:
    faults.error, faults.of = error, "job.1/script"
    getattr(faults, call)(monkeypatch)
    capture = bench.capture(rescan_s=0.05)
    submit(bench.spool, 1)
    submit(bench.spool, 11)
    until(lambda: faults.reads > 2 and capture.captured == 1, capture.run_turn)
    faults.of = "job.21/script"
    gone = submit(bench.spool, 21)
    until(lambda: capture.captured == 2, capture.run_turn)
    reads = faults.reads
    until(lambda: faults.reads > reads, capture.run_turn)
    shutil.rmtree(gone)
    until(lambda: missed(bench) == [21], capture.run_turn)
    assert capture.finish()
    assert missed(bench) == [21]
