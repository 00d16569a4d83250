"""Journal store: append, read, and statistics of events and consumers."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from harness.events import script_event
from harness.imports import imported, imported_run, imported_step
from harness.journal import append, fill, journal, reader, seen_event, tables, two_sinks
from steward.core import sqlite
from steward.core.config import Settings
from steward.core.events import (
    ARCHIVE_PURGE,
    ARCHIVE_RESEND,
    JOB_SCRIPT,
    JOBS_IMPORTED,
    ArchivePurge,
    ArchiveResend,
    IncomingFile,
    ResentScript,
    UnreadableBody,
)
from steward.core.journal import Backlog, Journal, JournalError, JournalReader
from steward.core.journal.server import trim_journal
from steward.core.script_stores import make_stores
from steward.core.sqlite import SqliteError, SqliteUnavailable

__all__ = ["journal", "reader"]


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


def test_a_read_counts_imports_unpacked(journal: Journal, reader: JournalReader) -> None:
    for number in range(1, 4):
        run = imported_run(number)
        text = str(number) * 1_500_000
        steps = [imported_step(run, name, submit_line=text + name) for name in ("0", "1")]
        assert append(journal, imported(run, *steps))
    assert os.path.getsize(journal.path) < 1 << 20
    events, upto = reader.read(0, [JOBS_IMPORTED], 10)
    assert (len(events), upto) == (2, 2)
    events, upto = reader.read(upto, [JOBS_IMPORTED], 10)
    assert (len(events), upto) == (1, 3)


def test_an_unreadable_row_says_so(journal: Journal, reader: JournalReader) -> None:
    journal.append([(JOB_SCRIPT, "c1", "k", b'{"nonsense":1}')])
    (event,), _ = reader.read(0, [JOB_SCRIPT], 10)
    assert isinstance(event.body, UnreadableBody)


def test_positions_are_never_used_again(journal: Journal, tmp_path: Path) -> None:
    append(journal, script_event(1, script=None))
    journal.record_position("a", 1, "running", "")
    assert trim_journal(journal, make_stores(Settings(state_dir=str(tmp_path))), keep_s=0) == 1
    assert journal.head() == 1
    assert append(journal, script_event(2)) == 2


def test_dead_letters_are_listed_replayed_and_revived(
    journal: Journal, reader: JournalReader
) -> None:
    append(journal, script_event(1))
    journal.record_position("a", 0, "running", "")
    journal.add_dead_letter("a", 1, "no room")
    (letter,) = reader.list_dead_letters()
    assert (letter.consumer, letter.id, letter.error, letter.retry) == ("a", 1, "no room", False)
    assert reader.list_retries("a") == []
    assert journal.mark_for_retry("a") == 1
    assert [event.key for event in reader.list_retries("a")] == [script_event(1).key]
    journal.add_dead_letter("a", 1, "still no room")
    assert reader.list_retries("a") == []
    assert reader.list_dead_letters("a")[0].error == "still no room"
    journal.delete_dead_letter("a", 1)
    assert reader.list_dead_letters() == []


@pytest.mark.parametrize("how", ["retry", "trim"])
@pytest.mark.parametrize("sink", ["", "a", "b"])
def test_no_dead_letter_holds_what_was_purged(
    journal: Journal, reader: JournalReader, tmp_path: Path, how: str, sink: str
) -> None:
    scripts = [script_event(n, script=None) for n in (1, 2, 3)]
    resent = tuple(ResentScript(script_key=one.key, script=one.body) for one in scripts[:2])
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
    journal.record_position("archive.a", head, "running", "")
    for event_id in (1, 2, 3, 5):
        journal.add_dead_letter("archive.a", event_id, "no")
    if how == "trim":
        # Dead letters stay until the purge, which removes them with the others.
        assert trim_journal(journal, two_sinks(tmp_path), keep_s=0) == head - 2
    journal.mark_for_retry("archive.a")
    left = {
        letter.id: [one.script_key for one in letter.body.scripts]
        for letter in reader.list_retries("archive.a")
        if letter.kind == ARCHIVE_RESEND
    }
    both = [one.key for one in scripts[:2]]
    others = {letter.id for letter in reader.list_retries("archive.a")} - set(left)
    if sink == "b":
        assert (others, left) == ({1, 2}, {3: both, 5: both})
    else:
        assert (others, left) == ({2}, {3: both[1:], 5: both})


def test_forgetting_an_unknown_consumer_says_how_to_find_one(journal: Journal) -> None:
    with pytest.raises(JournalError, match="steward journal status"):
        journal.remove_consumer("nobody")


def test_status_tells_who_is_behind(journal: Journal, reader: JournalReader) -> None:
    append(journal, script_event(1), script_event(2))
    journal.record_position("a", 1, "waiting", "mount gone")
    (status,) = reader.list_consumers()
    assert (status.position, status.lag, status.state, status.detail) == (
        1, 1, "waiting", "mount gone",
    )  # fmt: skip
    journal.remove_consumer("a")
    assert reader.list_consumers() == []


def test_the_last_error_is_remembered_and_a_rate_only_for_a_while(
    journal: Journal, reader: JournalReader
) -> None:
    journal.record_position("a", 0, "waiting", "mount gone", 2.5, "mount gone", 1_700_000_000)
    journal.record_position("a", 0, "running", "", 7.0)
    (status,) = reader.list_consumers()
    assert (status.error, status.error_at, status.rate) == ("mount gone", 1_700_000_000, 7.0)
    with tables(journal) as db:
        db.execute("UPDATE consumer SET told = told - 120")
    assert reader.list_consumers()[0].rate == 0, "nothing was told for a minute: nothing is done"


def test_a_backlog_is_counted_in_scripts(journal: Journal, reader: JournalReader) -> None:
    resent = tuple(
        ResentScript(script_key=script_event(n).key, script=script_event(n).body) for n in (1, 2, 3)
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
    found = reader.count_backlog("a", 0, kinds)
    assert (found.events, found.scripts) == (5, 5)
    assert found.oldest == script_event(1).seen_at
    found = reader.count_backlog("a", 3, kinds)
    assert (found.events, found.scripts) == (3, 3)
    assert reader.count_backlog("a", 6, kinds) == Backlog(events=0, scripts=0)


def test_a_reader_needs_a_journal(tmp_path: Path) -> None:
    with pytest.raises(SqliteUnavailable, match="start the daemon once"):
        JournalReader(str(tmp_path))


def test_a_journal_of_a_newer_steward_is_left_alone(journal: Journal, tmp_path: Path) -> None:
    journal.close()
    with closing(sqlite3.connect(tmp_path / "journal.db")) as db, db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(SqliteError, match="newer Steward"):
        Journal(str(tmp_path))


def test_the_file_is_its_users_alone(journal: Journal, tmp_path: Path) -> None:
    append(journal, script_event(1, script=IncomingFile(path="x", length=1, sha256="")))
    modes = {path.name: path.stat().st_mode & 0o077 for path in tmp_path.iterdir()}
    assert set(modes.values()) == {0}, modes


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


def test_the_file_gives_room_back_step_by_step(journal: Journal, reader: JournalReader) -> None:
    fill(journal, 48)
    full = os.path.getsize(journal.path)
    assert full > 48 << 20
    steps = 0
    before = full
    while journal.shrink():
        steps += 1
        with tables(journal) as db:
            size = 4096 * db.execute("PRAGMA page_count").fetchone()[0]
        assert before - size <= 2 << 20, "a step is bounded"
        before = size
    assert steps > 16
    left = os.path.getsize(journal.path)
    assert left <= 6 << 20
    assert os.path.getsize(f"{journal.path}-wal") <= 20 << 20
    assert not journal.shrink(), "what is spare stays"
    assert os.path.getsize(journal.path) == left
    append(journal, script_event(1))
    assert reader.count() == 1


def test_the_file_stays_as_it_is_for_a_reader(journal: Journal, reader: JournalReader) -> None:
    fill(journal, 32)
    full = os.path.getsize(journal.path)
    reading = sqlite.open_reader(journal.path)
    reading.execute("BEGIN")
    reading.execute("SELECT count(*) FROM event").fetchone()
    log = os.path.getsize(f"{journal.path}-wal")
    for _ in range(3):
        while journal.shrink():
            pass
    assert os.path.getsize(f"{journal.path}-wal") <= log + (8 << 20), "the log would grow instead"
    assert os.path.getsize(journal.path) >= full
    reading.close()
    while journal.shrink():
        pass
    assert os.path.getsize(journal.path) < full


def test_keys_are_forgotten_some_at_a_time(journal: Journal) -> None:
    with tables(journal) as db:
        db.executemany(
            "INSERT INTO remembered (cluster, key, trimmed_at) VALUES ('c1', ?, ?)",
            [(f"key:{number}", number) for number in range(15_000)],
        )
    assert journal.forget_old_keys(14_000)
    assert remembered(journal) == (5000, 10_000)
    assert not journal.forget_old_keys(14_000)
    assert remembered(journal) == (1000, 14_000)


def remembered(journal: Journal) -> tuple[int, int]:
    """Return the number of remembered keys, and when the oldest of their events was trimmed."""
    with tables(journal) as db:
        count, oldest = db.execute("SELECT count(*), min(trimmed_at) FROM remembered").fetchone()
    return count, oldest
