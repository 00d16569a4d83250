"""Retention of the journal: trimmed events, detached consumers, and kept events."""

import os
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from job_submission import wait_until

from harness.events import script_event
from harness.journal import append, journal, reader, seen_event, two_sinks
from steward.archive.settings import FilesSinkSettings
from steward.core import script_stores
from steward.core.config import ArchiveSettings, Settings
from steward.core.events import ARCHIVE_PURGE, ArchivePurge, Event, IncomingFile, utc_now
from steward.core.journal import Journal, JournalReader
from steward.core.journal.server import limit_size, trim_journal
from steward.core.script_stores import (
    IncomingStores,
    LeftoverCount,
    make_incoming_filename,
    make_stores,
)

__all__ = ["journal", "reader"]


def test_trimming_waits_for_every_consumer_and_unlinks(
    journal: Journal, reader: JournalReader, tmp_path: Path
) -> None:
    stores = make_stores(Settings(state_dir=str(tmp_path)))
    name = make_incoming_filename("c1", 1, 5, 3, "script")
    kept = stores.get("state").write(name, b"abc")
    append(journal, script_event(1, mtime_ns=5, script=kept), script_event(2, script=None))
    assert trim_journal(journal, stores, keep_s=0) == 0, "nobody has seen it"
    journal.record_position("a", 2, "running", "")
    journal.record_position("b", 0, "running", "")
    assert trim_journal(journal, stores, keep_s=0) == 0
    assert stores.get("state").read(kept) == b"abc"
    journal.record_position("b", 1, "running", "")
    assert trim_journal(journal, stores, keep_s=0) == 1
    assert list(stores.get("state").iterate_names()) == []
    assert reader.has_key("c1", "script:1:5")
    assert not reader.has_event("c1", "script:1:5")
    append(journal, script_event(1, mtime_ns=5))
    assert reader.count() == 1, "a trimmed event is still known"


def test_bytes_of_a_sink_that_is_configured_no_more_do_not_stop_the_trimming(
    journal: Journal, reader: JournalReader, tmp_path: Path
) -> None:
    stores = make_stores(Settings(state_dir=str(tmp_path)))
    kept = IncomingFile(path=make_incoming_filename("c1", 1, 5, 3, "script"), length=3, sha256="")
    append(journal, script_event(1, mtime_ns=5, script=kept, store="archive.renamed"))
    journal.record_position("a", 1, "running", "")
    assert trim_journal(journal, stores, keep_s=0) == 1
    assert reader.count() == 0


def test_events_are_kept_for_their_time(journal: Journal, tmp_path: Path) -> None:
    append(journal, script_event(1, script=None))
    journal.record_position("a", 1, "running", "")
    stores = make_stores(Settings(state_dir=str(tmp_path)))
    assert trim_journal(journal, stores, keep_s=1e10) == 0


def test_what_can_be_made_anew_is_detached_when_room_runs_out(
    journal: Journal, reader: JournalReader, tmp_path: Path
) -> None:
    stores = two_sinks(tmp_path)
    kept = stores.get("state").write(make_incoming_filename("c1", 1, 5, 3, "script"), b"abc")
    append(journal, script_event(1, mtime_ns=5, script=kept), script_event(2, script=None))
    for name, position in (("archive.a", 2), ("archive.b", 1), ("catalog", 0), ("jobs", 2)):
        journal.record_position(name, position, "running", "")
    assert not limit_size(journal, stores, max_bytes=10**9)
    assert not any(consumer.detached for consumer in reader.list_consumers())
    while limit_size(journal, stores, max_bytes=1):
        pass
    found = {consumer.name: consumer for consumer in reader.list_consumers()}
    assert {name for name, one in found.items() if one.detached} == {"archive.b", "catalog"}
    assert (found["catalog"].missed, found["archive.b"].missed) == (2, 1)
    assert reader.count() == 0
    assert list(stores.get("state").iterate_names()) == []
    journal.record_position("catalog", 2, "running", "")
    caught_up = {consumer.name: consumer for consumer in reader.list_consumers()}["catalog"]
    assert (caught_up.detached, caught_up.missed) == (False, 2), "the gap stays in sight"


def script_of_bytes(job_id: int, length: int) -> Event:
    """Return a script event with this many bytes of script and of environment."""
    files = [
        IncomingFile(
            path=make_incoming_filename("c1", job_id, 5, length, kind), length=length, sha256=""
        )
        for kind in ("script", "env")
    ]
    return script_event(job_id, mtime_ns=5, script=files[0], environment=files[1])


def test_the_journal_counts_the_bytes_of_its_scripts(journal: Journal, tmp_path: Path) -> None:
    first, second = script_of_bytes(1, 1000), script_of_bytes(2, 30)
    append(journal, first, seen_event(9), first)
    assert journal.count_incoming_bytes() == 2000
    append(journal, second, first, script_event(3, script=None))
    assert journal.count_incoming_bytes() == 2060
    journal.record_position("a", 1, "running", "")
    assert trim_journal(journal, make_stores(Settings(state_dir=str(tmp_path))), keep_s=0) == 1
    append(journal, first)
    assert journal.count_incoming_bytes() == 60, "a trimmed event is counted no more"
    journal.close()
    with closing(Journal(str(tmp_path))) as again:
        assert again.count_incoming_bytes() == 60


def test_a_journal_of_an_earlier_schema_counts_its_scripts(
    journal: Journal, tmp_path: Path
) -> None:
    append(journal, script_of_bytes(1, 1000), seen_event(9), script_event(3, script=None))
    journal.close()
    with closing(sqlite3.connect(tmp_path / "journal.db")) as earlier:
        earlier.executescript("DROP TABLE incoming; PRAGMA user_version = 2;")
    with closing(Journal(str(tmp_path))) as upgraded:
        assert upgraded.count_incoming_bytes() == 2000


def test_the_size_limit_needs_no_look_at_the_files(
    journal: Journal, reader: JournalReader, tmp_path: Path
) -> None:
    append(journal, script_of_bytes(1, 10**9))
    journal.record_position("archive.a", 1, "running", "")
    journal.record_position("archive.b", 0, "waiting", "no broker")
    stores = two_sinks(tmp_path)
    assert not limit_size(journal, stores, max_bytes=3 * 10**9)
    leave_bytes(tmp_path, 10**9)
    with closing(count_leftovers(tmp_path, stores)) as leftovers:
        assert limit_size(journal, stores, max_bytes=3 * 10**9, leftovers=leftovers)
    assert [consumer.detached for consumer in reader.list_consumers()] == [False, True]


def leave_bytes(tmp_path: Path, size: int) -> Path:
    """Make a sparse file of no event in the store of the state directory."""
    directory = tmp_path / "incoming"
    directory.mkdir(mode=0o700, exist_ok=True)
    leftover = directory / make_incoming_filename("c1", 7, 5, size, "script")
    leftover.touch()
    os.truncate(leftover, size)
    return leftover


def count_leftovers(state_dir: Path, stores: IncomingStores) -> LeftoverCount:
    leftovers = LeftoverCount(stores, state_dir=str(state_dir))

    def has_counted() -> bool:
        leftovers.update(0)
        return leftovers.size > 0

    wait_until(has_counted)
    return leftovers


def test_an_old_count_of_leftovers_is_renewed_before_a_consumer_is_detached(
    journal: Journal, reader: JournalReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(journal, script_of_bytes(1, 10**9))
    journal.record_position("archive.a", 1, "running", "")
    journal.record_position("archive.b", 0, "waiting", "no broker")
    stores = two_sinks(tmp_path)
    leftover = leave_bytes(tmp_path, 10**9)
    with closing(count_leftovers(tmp_path, stores)) as leftovers:
        counted_size = leftovers.size
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
        leftover.unlink()
        leave_bytes(tmp_path, 10**6)
        while leftovers.size == counted_size:
            assert not limit_size(journal, stores, max_bytes=3 * 10**9, leftovers=leftovers)
            leftovers.update(0)
            assert time.clock_gettime(time.CLOCK_MONOTONIC) < now + 30, "no new count"
        assert leftovers.size == 10**6
        assert not limit_size(journal, stores, max_bytes=3 * 10**9, leftovers=leftovers)
    assert not any(consumer.detached for consumer in reader.list_consumers())


def test_a_count_of_leftovers_that_hangs_detaches_no_consumer(
    journal: Journal, reader: JournalReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(journal, script_of_bytes(1, 10**9))
    journal.record_position("archive.a", 1, "running", "")
    journal.record_position("archive.b", 0, "waiting", "no broker")
    stores = two_sinks(tmp_path)
    leave_bytes(tmp_path, 10**9)
    with closing(count_leftovers(tmp_path, stores)) as leftovers:
        now = time.monotonic() + 3600
        monkeypatch.setattr(time, "monotonic", lambda: now)
        with monkeypatch.context() as patch:
            patch.setattr(script_stores, "COUNT_FILES", "import time; time.sleep(60)")
            for _ in range(60):
                assert not limit_size(journal, stores, max_bytes=3 * 10**9, leftovers=leftovers)
                leftovers.update(0)
                now += 60
        assert not any(consumer.detached for consumer in reader.list_consumers())
        now += 3600

        def is_detached() -> bool:
            is_full = limit_size(journal, stores, max_bytes=3 * 10**9, leftovers=leftovers)
            leftovers.update(0)
            return is_full

        wait_until(is_detached)
    assert [consumer.detached for consumer in reader.list_consumers()] == [False, True]


def test_a_sink_of_files_is_not_let_go_of_for_one_that_gives_nothing_back(
    journal: Journal, reader: JournalReader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append(journal, script_event(1, script=None))
    journal.record_position("archive.a", 0, "waiting", "disk full")
    journal.record_position("archive.b", 1, "running", "")
    assert not limit_size(journal, two_sinks(tmp_path), max_bytes=1)
    assert not any(consumer.detached for consumer in reader.list_consumers())
    assert "consumer archive.a needs them" in caplog.text


def test_who_is_detached_is_told_what_makes_up_for_it(
    journal: Journal, reader: JournalReader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append(journal, seen_event(9), script_event(2, script=None), script_event(1, script=None))
    journal.record_position("archive.a", 3, "running", "")
    journal.record_position("archive.b", 0, "waiting", "no broker")
    while limit_size(journal, two_sinks(tmp_path), max_bytes=1):
        pass
    assert "'steward archive resend --sink b'" in caplog.text
    (_, there) = reader.list_consumers()
    first_s = int(script_event(1).at.timestamp())
    assert there.missed == 3
    assert first_s - 600 <= there.missed_from < first_s
    journal.clear_missed("archive.b", there.missed_from + 1)
    assert reader.list_consumers()[1].missed == 3, "that does not reach back far enough"
    journal.clear_missed("archive.b", there.missed_from)
    assert (reader.list_consumers()[1].missed, reader.list_consumers()[1].missed_from) == (0, 0)


def test_an_order_to_purge_reaches_who_was_detached_when_it_came(
    journal: Journal, reader: JournalReader, tmp_path: Path
) -> None:
    order = msgspec.structs.replace(
        seen_event(1),
        kind=ARCHIVE_PURGE,
        key="purge:1",
        body=ArchivePurge(script_keys=(script_event(1).key,)),
    )
    append(journal, script_event(1, script=None), order)
    journal.record_position("archive.a", 2, "running", "")
    journal.record_position("archive.b", 0, "waiting", "no broker")
    while limit_size(journal, two_sinks(tmp_path), max_bytes=1):
        pass
    assert reader.count() == 0
    assert [(one.consumer, one.retry) for one in reader.list_dead_letters()] == [
        ("archive.b", True)
    ]
    (retried,) = reader.list_retries("archive.b")
    assert retried.body == order.body


@pytest.mark.parametrize("name", ["archive.only", "jobs"])
def test_what_nobody_else_has_is_never_let_go_of(
    journal: Journal,
    reader: JournalReader,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    stores = make_stores(Settings(state_dir=str(tmp_path)))
    kept = stores.get("state").write(make_incoming_filename("c1", 1, 5, 3, "script"), b"abc")
    append(journal, script_event(1, mtime_ns=5, script=kept))
    journal.record_position(name, 0, "waiting", "disk full")
    assert not limit_size(journal, stores, max_bytes=1)
    assert not reader.list_consumers()[0].detached
    assert stores.get("state").read(kept) == b"abc"
    assert f"consumer {name} needs them" in caplog.text


def test_a_store_that_is_away_does_not_hold_up_the_others(
    journal: Journal, reader: JournalReader, tmp_path: Path
) -> None:
    settings = Settings(
        state_dir=str(tmp_path),
        archive=ArchiveSettings(
            sink={"files": FilesSinkSettings(path=str(tmp_path / "unmounted"))}
        ),
    )
    append(journal, script_event(1, store="archive.files"), script_event(2, script=None))
    journal.record_position("archive.files", 2, "running", "")
    assert trim_journal(journal, make_stores(settings), keep_s=0) == 2
    assert reader.count() == 0


def test_a_script_that_was_set_aside_keeps_its_event_and_its_bytes(
    journal: Journal, reader: JournalReader, tmp_path: Path
) -> None:
    stores = two_sinks(tmp_path)
    store = stores.get("state")
    events = []
    for job_id in (1, 2):
        name = make_incoming_filename("c1", job_id, 5, 3, "script")
        events.append(script_event(job_id, mtime_ns=5, script=store.write(name, b"abc")))
    append(journal, *events)
    journal.record_position("archive.b", 2, "running", "")
    journal.add_dead_letter("archive.b", 1, "too large")
    assert trim_journal(journal, stores, keep_s=0) == 1
    assert store.read(events[0].body.script) == b"abc"
    with pytest.raises(FileNotFoundError):
        store.read(events[1].body.script)
    assert limit_size(journal, stores, max_bytes=1) is False, "nobody else has it"
    journal.delete_dead_letter("archive.b", 1)
    assert trim_journal(journal, stores, keep_s=0) == 1
    with pytest.raises(FileNotFoundError):
        store.read(events[0].body.script)


def test_where_a_sink_of_files_has_it_room_is_made(journal: Journal, tmp_path: Path) -> None:
    append(journal, script_event(1, script=None))
    for name in ("archive.a", "archive.b"):
        journal.record_position(name, 1, "running", "")
    journal.add_dead_letter("archive.b", 1, "too large")
    assert limit_size(journal, two_sinks(tmp_path), max_bytes=1)
    assert journal.list_trimmable(10, dead=True) == []


def test_a_clock_that_was_ahead_does_not_stop_trimming(journal: Journal, tmp_path: Path) -> None:
    ahead = msgspec.structs.replace(
        script_event(1, script=None), seen_at=datetime(2999, 1, 1, tzinfo=UTC)
    )
    recent = msgspec.structs.replace(script_event(2, script=None), seen_at=utc_now())
    append(journal, ahead, recent)
    journal.record_position("archive.a", 2, "running", "")
    assert trim_journal(journal, two_sinks(tmp_path), keep_s=3600) == 1
    assert [event.body.job_id for event in journal.list_trimmable(10)] == [2]
