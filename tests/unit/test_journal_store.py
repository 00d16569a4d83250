import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from builders import script_event

from steward.config import ArchiveSettings, FilesSinkSettings, KafkaSinkSettings, Settings
from steward.events import (
    ARCHIVE_PURGE,
    ARCHIVE_RESEND,
    JOB_SCRIPT,
    JOB_SEEN,
    ArchivePurge,
    ArchiveResend,
    Event,
    JobFacts,
    Kept,
    Resent,
    Unreadable,
    utc_now,
)
from steward.incoming import Stores, kept_filename, stores_of
from steward.journal import Backlog, Journal, JournalError, JournalReader
from steward.journal.store import rows_of
from steward.journal.trimming import bound, trim
from steward.records import JobRecord
from steward.sqlite import SqliteError, SqliteUnavailable


def seen_event(job_id: int) -> Event:
    base = script_event(job_id)
    facts = JobFacts(record=JobRecord(job_id=job_id))
    return Event(
        kind=JOB_SEEN,
        cluster="c1",
        key=f"seen:{job_id}",
        at=base.at,
        seen_at=base.seen_at,
        source="test",
        body=facts,
    )


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(str(tmp_path))


@pytest.fixture
def reader(journal: Journal, tmp_path: Path) -> JournalReader:
    return JournalReader(str(tmp_path))


def two_sinks(tmp_path: Path) -> Stores:
    """The stores where sink ``a`` is of files and sink ``b`` is not."""
    archive = ArchiveSettings(
        sink={"a": FilesSinkSettings(path=str(tmp_path / "a")), "b": KafkaSinkSettings()}
    )
    return stores_of(Settings(state_dir=str(tmp_path), archive=archive))


def append(journal: Journal, *events: Event) -> int:
    return journal.append(rows_of(events))


def test_events_come_back_as_they_were(journal: Journal, reader: JournalReader) -> None:
    event = script_event(5, claimed_name="a\nb\udc80".encode("utf-8", "replace").decode())
    assert append(journal, event) == 1
    (read,), upto = reader.read(0, [JOB_SCRIPT], 10)
    assert upto == 1
    assert read.id == 1
    assert (read.key, read.at, read.body) == (event.key, event.at, event.body)


def test_a_repeat_is_passed_over(journal: Journal, reader: JournalReader) -> None:
    append(journal, script_event(1), script_event(1))
    append(journal, script_event(1), script_event(2))
    events, _ = reader.read(0, [JOB_SCRIPT], 10)
    assert [event.body.job_id for event in events] == [1, 2]


def test_reading_is_by_kind_and_by_batch(journal: Journal, reader: JournalReader) -> None:
    append(journal, *(script_event(n) for n in range(5)), seen_event(9))
    events, upto = reader.read(0, [JOB_SCRIPT], 2)
    assert (len(events), upto) == (2, 2)
    events, upto = reader.read(2, [JOB_SCRIPT], 10)
    assert (len(events), upto) == (3, 6)
    assert reader.read(6, [JOB_SCRIPT], 10) == ([], 6)


def test_an_unreadable_row_says_so(journal: Journal, reader: JournalReader) -> None:
    journal.append([(JOB_SCRIPT, "c1", "k", b'{"nonsense":1}')])
    (event,), _ = reader.read(0, [JOB_SCRIPT], 10)
    assert isinstance(event.body, Unreadable)


def test_positions_are_never_used_again(journal: Journal, tmp_path: Path) -> None:
    append(journal, script_event(1, script=None))
    journal.passed("a", 1, "running", "")
    assert trim(journal, stores_of(Settings(state_dir=str(tmp_path))), keep_s=0) == 1
    assert journal.head() == 1
    assert append(journal, script_event(2)) == 2


def test_trimming_waits_for_every_consumer_and_unlinks(
    journal: Journal, reader: JournalReader, tmp_path: Path
) -> None:
    stores = stores_of(Settings(state_dir=str(tmp_path)))
    name = kept_filename("c1", 1, 5, 3, "script")
    kept = stores.get("state").write(name, b"abc")
    append(journal, script_event(1, mtime_ns=5, script=kept), script_event(2, script=None))
    assert trim(journal, stores, keep_s=0) == 0, "nobody has seen it"
    journal.passed("a", 2, "running", "")
    journal.passed("b", 0, "running", "")
    assert trim(journal, stores, keep_s=0) == 0
    assert stores.get("state").read(kept) == b"abc"
    journal.passed("b", 1, "running", "")
    assert trim(journal, stores, keep_s=0) == 1
    assert list(stores.get("state").names()) == []
    assert reader.known("c1", "script:1:5")
    assert not reader.present("c1", "script:1:5")
    append(journal, script_event(1, mtime_ns=5))
    assert reader.count() == 1, "a trimmed event is still known"


def test_bytes_of_a_sink_that_is_configured_no_more_do_not_stop_the_trimming(
    journal: Journal, reader: JournalReader, tmp_path: Path
) -> None:
    stores = stores_of(Settings(state_dir=str(tmp_path)))
    kept = Kept(path=kept_filename("c1", 1, 5, 3, "script"), length=3, sha256="")
    append(journal, script_event(1, mtime_ns=5, script=kept, store="archive.renamed"))
    journal.passed("a", 1, "running", "")
    assert trim(journal, stores, keep_s=0) == 1
    assert reader.count() == 0


def test_events_are_kept_for_their_time(journal: Journal, tmp_path: Path) -> None:
    append(journal, script_event(1, script=None))
    journal.passed("a", 1, "running", "")
    stores = stores_of(Settings(state_dir=str(tmp_path)))
    assert trim(journal, stores, keep_s=1e10) == 0


def test_what_can_be_made_anew_is_detached_when_room_runs_out(
    journal: Journal, reader: JournalReader, tmp_path: Path
) -> None:
    stores = two_sinks(tmp_path)
    kept = stores.get("state").write(kept_filename("c1", 1, 5, 3, "script"), b"abc")
    append(journal, script_event(1, mtime_ns=5, script=kept), script_event(2, script=None))
    for name, position in (("archive.a", 2), ("archive.b", 1), ("catalogue", 0), ("jobs", 2)):
        journal.passed(name, position, "running", "")
    assert not bound(journal, stores, max_bytes=10**9)
    assert not any(consumer.detached for consumer in reader.consumers())
    while bound(journal, stores, max_bytes=1):
        pass
    found = {consumer.name: consumer for consumer in reader.consumers()}
    assert {name for name, one in found.items() if one.detached} == {"archive.b", "catalogue"}
    assert (found["catalogue"].missed, found["archive.b"].missed) == (2, 1)
    assert reader.count() == 0
    assert list(stores.get("state").names()) == []
    journal.passed("catalogue", 2, "running", "")
    caught_up = {consumer.name: consumer for consumer in reader.consumers()}["catalogue"]
    assert (caught_up.detached, caught_up.missed) == (False, 2), "the gap stays in sight"


def test_a_sink_of_files_is_not_let_go_of_for_one_that_gives_nothing_back(
    journal: Journal, reader: JournalReader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append(journal, script_event(1, script=None))
    journal.passed("archive.a", 0, "waiting", "disk full")
    journal.passed("archive.b", 1, "running", "")
    assert not bound(journal, two_sinks(tmp_path), max_bytes=1)
    assert not any(consumer.detached for consumer in reader.consumers())
    assert "consumer archive.a needs them" in caplog.text


def test_who_is_detached_is_told_what_makes_up_for_it(
    journal: Journal, reader: JournalReader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append(journal, seen_event(9), script_event(2, script=None), script_event(1, script=None))
    journal.passed("archive.a", 3, "running", "")
    journal.passed("archive.b", 0, "waiting", "no broker")
    while bound(journal, two_sinks(tmp_path), max_bytes=1):
        pass
    assert "'steward archive resend --sink b'" in caplog.text
    (_, there) = reader.consumers()
    first_s = int(script_event(1).at.timestamp())
    assert there.missed == 3
    assert first_s - 600 <= there.missed_from < first_s
    journal.refilled("archive.b", there.missed_from + 1)
    assert reader.consumers()[1].missed == 3, "that does not reach back far enough"
    journal.refilled("archive.b", there.missed_from)
    assert (reader.consumers()[1].missed, reader.consumers()[1].missed_from) == (0, 0)


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
    journal.passed("archive.a", 2, "running", "")
    journal.passed("archive.b", 0, "waiting", "no broker")
    while bound(journal, two_sinks(tmp_path), max_bytes=1):
        pass
    assert reader.count() == 0
    assert [(one.consumer, one.replay) for one in reader.dead()] == [("archive.b", True)]
    (replayed,) = reader.replays("archive.b")
    assert replayed.body == order.body


@pytest.mark.parametrize("name", ["archive.only", "jobs"])
def test_what_nobody_else_has_is_never_let_go_of(
    journal: Journal,
    reader: JournalReader,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    stores = stores_of(Settings(state_dir=str(tmp_path)))
    kept = stores.get("state").write(kept_filename("c1", 1, 5, 3, "script"), b"abc")
    append(journal, script_event(1, mtime_ns=5, script=kept))
    journal.passed(name, 0, "waiting", "disk full")
    assert not bound(journal, stores, max_bytes=1)
    assert not reader.consumers()[0].detached
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
    journal.passed("archive.files", 2, "running", "")
    assert trim(journal, stores_of(settings), keep_s=0) == 2
    assert reader.count() == 0


def test_dead_letters_are_listed_replayed_and_revived(
    journal: Journal, reader: JournalReader
) -> None:
    append(journal, script_event(1))
    journal.passed("a", 0, "running", "")
    journal.set_aside("a", 1, "no room")
    (letter,) = reader.dead()
    assert (letter.consumer, letter.id, letter.error, letter.replay) == ("a", 1, "no room", False)
    assert reader.replays("a") == []
    assert journal.replay("a") == 1
    assert [event.key for event in reader.replays("a")] == [script_event(1).key]
    journal.set_aside("a", 1, "still no room")
    assert reader.replays("a") == []
    assert reader.dead("a")[0].error == "still no room"
    journal.revived("a", 1)
    assert reader.dead() == []


@pytest.mark.parametrize("how", ["replay", "trim"])
@pytest.mark.parametrize("sink", ["", "a", "b"])
def test_no_dead_letter_holds_what_was_purged(
    journal: Journal, reader: JournalReader, tmp_path: Path, how: str, sink: str
) -> None:
    scripts = [script_event(n, script=None) for n in (1, 2, 3)]
    resent = tuple(Resent(script_key=one.key, script=one.body) for one in scripts[:2])
    order = msgspec.structs.replace(
        seen_event(9),
        kind=ARCHIVE_RESEND,
        key="resend:1",
        body=ArchiveResend(sink="a", scripts=resent),
    )
    purge = msgspec.structs.replace(
        seen_event(9),
        kind=ARCHIVE_PURGE,
        key="purge:1",
        body=ArchivePurge(script_keys=(scripts[0].key, scripts[2].key), sink=sink),
    )
    later = msgspec.structs.replace(order, key="resend:2")
    head = append(journal, *scripts[:2], order, purge, later)
    journal.passed("archive.a", head, "running", "")
    for event_id in (1, 2, 3, 5):
        journal.set_aside("archive.a", event_id, "no")
    if how == "trim":
        # What was set aside stays until the purge, which goes with the others, lets it go.
        assert trim(journal, two_sinks(tmp_path), keep_s=0) == head - 2
    journal.replay("archive.a")
    left = {
        letter.id: [one.script_key for one in letter.body.scripts]
        for letter in reader.replays("archive.a")
        if letter.kind == ARCHIVE_RESEND
    }
    both = [one.key for one in scripts[:2]]
    others = {letter.id for letter in reader.replays("archive.a")} - set(left)
    if sink == "b":
        assert (others, left) == ({1, 2}, {3: both, 5: both})
    else:
        assert (others, left) == ({2}, {3: both[1:], 5: both})


def test_forgetting_an_unknown_consumer_says_how_to_find_one(journal: Journal) -> None:
    with pytest.raises(JournalError, match="steward journal status"):
        journal.forget("nobody")


def test_status_tells_who_is_behind(journal: Journal, reader: JournalReader) -> None:
    append(journal, script_event(1), script_event(2))
    journal.passed("a", 1, "waiting", "mount gone")
    (status,) = reader.consumers()
    assert (status.position, status.behind, status.state, status.detail) == (
        1, 1, "waiting", "mount gone",
    )  # fmt: skip
    journal.forget("a")
    assert reader.consumers() == []


def test_the_last_error_is_remembered_and_a_rate_only_for_a_while(
    journal: Journal, reader: JournalReader
) -> None:
    journal.passed("a", 0, "waiting", "mount gone", 2.5, "mount gone", 1_700_000_000)
    journal.passed("a", 0, "running", "", 7.0)
    (status,) = reader.consumers()
    assert (status.error, status.error_at, status.rate) == ("mount gone", 1_700_000_000, 7.0)
    journal._db.execute("UPDATE consumer SET told = told - 120")
    assert reader.consumers()[0].rate == 0, "nothing was told for a minute: nothing is done"


def test_a_backlog_is_counted_in_scripts(journal: Journal, reader: JournalReader) -> None:
    resent = tuple(
        Resent(script_key=script_event(n).key, script=script_event(n).body) for n in (1, 2, 3)
    )
    orders = [
        msgspec.structs.replace(
            seen_event(n),
            kind=ARCHIVE_RESEND,
            key=f"resend:{sink}",
            body=ArchiveResend(sink=sink, scripts=resent),
        )
        for n, sink in enumerate(("a", "b"))
    ]
    append(journal, script_event(1), seen_event(4), script_event(2), *orders)
    journal.append([(ARCHIVE_RESEND, "c1", "bad", b"{nonsense")])
    kinds = {JOB_SCRIPT, ARCHIVE_RESEND}
    found = reader.backlog("a", 0, kinds)
    assert (found.events, found.scripts) == (5, 5)
    assert found.oldest == script_event(1).seen_at
    found = reader.backlog("a", 3, kinds)
    assert (found.events, found.scripts) == (3, 3)
    assert reader.backlog("a", 6, kinds) == Backlog(events=0, scripts=0)


def test_a_reader_needs_a_journal(tmp_path: Path) -> None:
    with pytest.raises(SqliteUnavailable, match="has the daemon run"):
        JournalReader(str(tmp_path))


def test_a_journal_of_a_newer_steward_is_left_alone(journal: Journal, tmp_path: Path) -> None:
    journal.close()
    with sqlite3.connect(tmp_path / "journal.db") as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(SqliteError, match="newer Steward"):
        Journal(str(tmp_path))


def test_the_file_is_its_users_alone(journal: Journal, tmp_path: Path) -> None:
    append(journal, script_event(1, script=Kept(path="x", length=1, sha256="")))
    modes = {path.name: path.stat().st_mode & 0o077 for path in tmp_path.iterdir()}
    assert set(modes.values()) == {0}, modes


def test_a_script_that_was_set_aside_keeps_its_event_and_its_bytes(
    journal: Journal, reader: JournalReader, tmp_path: Path
) -> None:
    stores = two_sinks(tmp_path)
    store = stores.get("state")
    events = []
    for job_id in (1, 2):
        name = kept_filename("c1", job_id, 5, 3, "script")
        events.append(script_event(job_id, mtime_ns=5, script=store.write(name, b"abc")))
    append(journal, *events)
    journal.passed("archive.b", 2, "running", "")
    journal.set_aside("archive.b", 1, "too large")
    assert trim(journal, stores, keep_s=0) == 1
    assert store.read(events[0].body.script) == b"abc"
    with pytest.raises(FileNotFoundError):
        store.read(events[1].body.script)
    assert bound(journal, stores, max_bytes=1) is False, "nobody else has it"
    journal.revived("archive.b", 1)
    assert trim(journal, stores, keep_s=0) == 1
    with pytest.raises(FileNotFoundError):
        store.read(events[0].body.script)


def test_where_a_sink_of_files_has_it_room_is_made(journal: Journal, tmp_path: Path) -> None:
    append(journal, script_event(1, script=None))
    for name in ("archive.a", "archive.b"):
        journal.passed(name, 1, "running", "")
    journal.set_aside("archive.b", 1, "too large")
    assert bound(journal, two_sinks(tmp_path), max_bytes=1)
    assert journal.trimmable(10, dead=True) == []


def test_a_clock_that_was_ahead_does_not_stop_trimming(journal: Journal, tmp_path: Path) -> None:
    ahead = msgspec.structs.replace(
        script_event(1, script=None), seen_at=datetime(2999, 1, 1, tzinfo=UTC)
    )
    recent = msgspec.structs.replace(script_event(2, script=None), seen_at=utc_now())
    append(journal, ahead, recent)
    journal.passed("archive.a", 2, "running", "")
    assert trim(journal, two_sinks(tmp_path), keep_s=3600) == 1
    assert [event.body.job_id for event in journal.trimmable(10)] == [2]


def test_large_events_are_read_a_few_at_a_time(journal: Journal, reader: JournalReader) -> None:
    append(journal, *(script_event(n, claimed_name="x" * 1_000_000) for n in range(1, 13)))
    found: list[int] = []
    position = 0
    while position < 12:
        events, upto = reader.read(position, [JOB_SCRIPT], 500)
        assert 1 <= len(events) < 12
        assert upto == events[-1].id or upto == 12
        found += [event.body.job_id for event in events]
        position = upto
    assert found == list(range(1, 13))
