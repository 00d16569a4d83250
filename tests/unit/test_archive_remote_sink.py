"""Consumer of remote sinks: the documents that it sends, when, how often and in which version."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from harness import archive
from harness.events import NOVEMBER_NS
from harness.sinks import RemoteSite
from steward.archive.remote.destination import ArchivedDocument, RefusedDocument
from steward.archive.remote.records import (
    MAX_DELETED_ROWS,
    RemoteRecords,
    RemoteRecordsWriter,
)
from steward.core.errors import Unavailable

Make = Callable[..., RemoteSite]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def call(**sink: Any) -> RemoteSite:
        return RemoteSite(tmp_path, **sink)

    return call


def test_a_script_is_sent_when_it_is_known_whose_it_is(make: Make) -> None:
    site = make(identity_wait_s=3600.0)
    script = site.submit(7, b"#!/bin/sh\necho 7\n")
    site.turn()
    assert site.elsewhere.sent == []
    assert site.passed() == 0, "the journal keeps event and bytes until then"
    site.identify(script)
    site.turn()
    (sent,) = site.elsewhere.sent
    assert (sent.id, site.elsewhere.users()) == (f"alpha/7:{NOVEMBER_NS + 7}", ["ada"])
    assert (sent.script, sent.environment) == (b"#!/bin/sh\necho 7\n", archive.ENVIRONMENT)
    assert site.passed() == 2


def test_it_is_sent_without_an_owner_when_it_has_waited_long_enough(make: Make) -> None:
    site = make(identity_wait_s=0.01)
    script = site.submit(7)
    site.turn()
    site.feeds["archive.there"].run_turn()
    while not site.elsewhere.sent:
        site.turn(1)
    site.identify(script)
    site.turn()
    first, second = site.elsewhere.sent
    assert site.elsewhere.users() == ["", "ada"]
    assert (first.corrects, second.corrects) == (False, True)
    assert first.id == second.id
    assert second.version > first.version
    assert second.script == first.script


def test_nobody_waits_for_a_cluster_that_tells_no_owners(make: Make) -> None:
    site = make(slurm=False, identity_wait_s=3600.0)
    site.submit(7)
    site.turn()
    assert site.elsewhere.users() == [""]


def test_a_correction_goes_without_the_bytes_once_they_have_left_the_store(make: Make) -> None:
    site = make()
    script = site.submit(7)
    site.identify(script)
    site.turn()
    archive.trim(site, "state")
    site.identify(script, "ada-2", "renamed")
    site.turn()
    first, second = site.elsewhere.sent
    assert not first.partial
    assert second.partial
    assert site.elsewhere.users()[1] == "ada-2"
    assert second.script is None
    assert second.version > first.version


def test_bytes_lost_before_they_were_ever_sent_are_told_of(make: Make) -> None:
    site = make()
    script = site.submit(7)
    archive.trim(site, "state")
    site.identify(script)
    other = site.submit(8)
    site.identify(other)
    site.turn()
    assert [sent.id for sent in site.elsewhere.sent] == [f"alpha/8:{NOVEMBER_NS + 8}"]
    (letter,) = site.reader.list_dead_letters()
    assert letter.id == 1
    assert "nor in an archive" in letter.error
    assert site.passed() == 4, "it holds up nobody"


def test_what_the_other_end_refuses_is_set_aside_and_can_be_replayed(make: Make) -> None:
    site = make()
    site.elsewhere.refuses = {1, 3}
    for job_id in (1, 2, 3):
        site.identify(site.submit(job_id))
    site.turn()
    assert [letter.error for letter in site.reader.list_dead_letters()] == [
        "job 1 is not taken",
        "job 3 is not taken",
    ]
    assert site.passed() == 6
    site.elsewhere.refuses = set()
    site.writer.mark_for_retry("archive.there")
    site.turn()
    assert site.reader.list_dead_letters() == []
    assert min(sent.id for sent in site.elsewhere.sent) == f"alpha/1:{NOVEMBER_NS + 1}"
    assert len(site.elsewhere.sent) == 3


def test_a_refusal_that_the_journal_has_not_heard_of_is_said_again(make: Make) -> None:
    site = make()
    site.elsewhere.refuses = {1}
    site.identify(site.submit(1))
    while not site.elsewhere.batches:
        site.feeds["archive.there"].run_turn()
    assert site.reader.list_dead_letters() == []
    site.reopen()
    site.turn()
    assert [letter.error for letter in site.reader.list_dead_letters()] == ["job 1 is not taken"]


def test_while_the_other_end_is_away_the_backlog_stays_in_the_journal(make: Make) -> None:
    site = make(slurm=False)
    site.elsewhere.is_away = True
    site.append([site.submit(job_id, environment=None, append=False) for job_id in range(1, 1201)])
    site.turn()
    assert site.sink.cursor() <= 500, "no more than a batch is taken in"
    assert site.passed() == 0
    site.elsewhere.is_away = False
    site.turn()
    ids = [int(sent.id.split("/")[1].split(":")[0]) for sent in site.elsewhere.sent]
    assert ids == list(range(1, 1201)), "in order, each once"
    assert site.passed() == 1200


def test_batches_are_bounded_by_their_bytes(make: Make) -> None:
    site = make(slurm=False)
    for job_id in range(1, 6):
        site.submit(job_id, bytes(600_000), environment=None)
    site.turn()
    assert site.elsewhere.batches == [1] * 5


def test_a_purge_is_sent_and_nothing_brings_the_script_back(make: Make) -> None:
    site = make()
    script = site.submit(7)
    site.identify(script)
    site.turn()
    site.purge(script)
    site.turn()
    site.identify(script, why="ended")
    site.turn()
    assert [sent.deleted for sent in site.elsewhere.sent] == [False, True]
    first, second = site.elsewhere.sent
    assert second.script is None
    assert second.version > first.version, "the other end keeps the highest version"


def test_a_purge_that_came_before_its_script_counts(make: Make) -> None:
    site = make()
    script = site.submit(7, b"secret", append=False)
    site.purge(script)
    site.append([script])
    site.identify(script)
    site.turn()
    assert [(sent.deleted, sent.script) for sent in site.elsewhere.sent] == [(True, None)]


def test_a_purge_of_another_sink_is_none_of_its_business(make: Make) -> None:
    site = make()
    script = site.submit(7)
    site.identify(script)
    site.purge(script, sink="files")
    site.turn()
    assert [sent.deleted for sent in site.elsewhere.sent] == [False]


def test_a_purge_overtakes_a_script_that_was_not_sent_yet(make: Make) -> None:
    site = make(identity_wait_s=3600.0)
    script = site.submit(7, b"secret")
    site.purge(script)
    site.turn()
    assert [(sent.deleted, sent.script) for sent in site.elsewhere.sent] == [(True, None)]


def test_a_script_is_sent_again_when_it_is_asked_for(make: Make) -> None:
    site = make()
    script = site.submit(7)
    site.identify(script)
    site.turn()
    site.resend(script, sink="files")
    site.turn()
    assert len(site.elsewhere.sent) == 1
    site.resend(script)
    site.turn()
    first, second = site.elsewhere.sent
    assert second.script == first.script
    assert second.version > first.version
    assert not second.corrects, "whatever the other end has by now"


def test_a_script_from_before_the_sink_was_there_is_not_corrected(make: Make) -> None:
    site = make()
    script = site.submit(7, mtime_ns=10**9)
    site.trim()
    site.identify(script)
    site.turn()
    assert site.elsewhere.sent == []
    assert site.reader.list_dead_letters() == []


def test_kills_between_any_two_steps_lose_nothing(make: Make) -> None:
    seed = Random().randrange(2**32)
    print(f"seed {seed}")
    chance = Random(seed)
    site = make(identity_wait_s=3600.0)
    scripts = []
    for job_id in range(1, 101):
        scripts.append(site.submit(job_id, environment=None))
        if chance.random() < 0.5:
            site.identify(scripts.pop(chance.randrange(len(scripts))))
        if chance.random() < 0.1:
            site.elsewhere.is_away = chance.random() < 0.5
        if chance.random() < 0.2:
            site.reopen()
        site.turn(1)
    site.elsewhere.is_away = False
    for script in scripts:
        site.identify(script)
    site.reopen()
    site.turn()
    assert {sent.id for sent in site.elsewhere.sent} == {
        f"alpha/{job_id}:{NOVEMBER_NS + job_id}" for job_id in range(1, 101)
    }
    assert set(site.elsewhere.users()) == {"ada"}
    assert site.sink.get_oldest_needed() is None
    assert site.passed() == site.reader.head()


def test_retention_is_left_to_the_other_end(make: Make) -> None:
    site = make(retention_days=30)
    site.turn()
    assert len(site.elsewhere.expired) == 1, "not in each turn"


def test_retention_comes_each_hour_though_each_minute_has_documents_to_forget(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make(retention_days=30)
    now = 10_000.0
    monkeypatch.setattr("steward.archive.remote.sink.time.monotonic", lambda: now)
    deleted, calls = [1], list[int]()

    def delete_old(_: object, before_ns: int) -> int:
        calls.append(before_ns)
        return deleted[0]

    monkeypatch.setattr(RemoteRecordsWriter, "delete_old", delete_old)

    def tick_for(minutes: int) -> tuple[int, int]:
        nonlocal now
        calls.clear()
        site.elsewhere.expired.clear()
        for _ in range(minutes):
            site.sink.tick(lambda _: None)
            now += 60.1
        return len(calls), len(site.elsewhere.expired)

    assert tick_for(60) == (1, 1)
    deleted[0] = MAX_DELETED_ROWS
    assert tick_for(120) == (120, 2)


def test_what_retention_has_dropped_does_not_come_back(make: Make) -> None:
    site = make(retention_days=10_000)
    script = site.submit(7)
    old = site.submit(8, mtime_ns=10**9)
    site.identify(script)
    site.identify(old)
    site.purge(old)
    site.turn()
    assert [(sent.id.split(":")[0], sent.deleted) for sent in site.elsewhere.sent] == [
        ("alpha/7", False),
        ("alpha/8", True),
    ]
    assert site.passed() == site.reader.head()


def test_what_is_refused_again_is_a_dead_letter_again(make: Make) -> None:
    site = make()
    site.elsewhere.refuses = {1}
    script = site.submit(1)
    site.identify(script)
    site.turn()
    site.writer.trim([event for event in site.writer.list_trimmable(9) if event.id == 2])
    for _ in range(2):
        site.writer.mark_for_retry("archive.there")
        site.turn()
        (letter,) = site.reader.list_dead_letters()
        assert not letter.retry
    site.reopen()
    site.elsewhere.refuses = set()
    site.writer.mark_for_retry("archive.there")
    site.turn()
    assert site.reader.list_dead_letters() == []
    assert site.elsewhere.users() == ["ada"]


def test_a_letter_stays_until_what_it_tells_of_is_delivered(make: Make) -> None:
    site = make()
    site.elsewhere.refuses = {1}
    site.identify(site.submit(1))
    site.turn()
    site.elsewhere.refuses = set()
    site.elsewhere.is_away = True
    site.writer.mark_for_retry("archive.there")
    site.turn()
    assert len(site.reader.list_dead_letters()) == 1
    site.reopen()
    site.elsewhere.is_away = False
    site.turn()
    assert site.reader.list_dead_letters() == []
    assert len(site.elsewhere.sent) >= 1


def test_a_purge_that_comes_with_a_refusal_is_not_forgotten(make: Make) -> None:
    site = make()
    script = site.submit(1)
    site.identify(script)
    site.turn()
    send = site.elsewhere.send

    def purge_meanwhile(documents: Sequence[ArchivedDocument]) -> list[RefusedDocument]:
        refusals = send(documents)
        if refusals:
            site.purge(script)
            site.elsewhere.refuses = set()
        return refusals

    site.elsewhere.send = purge_meanwhile  # type: ignore[method-assign]
    site.elsewhere.refuses = {1}
    site.identify(script, why="ended")
    site.turn()
    assert [sent.deleted for sent in site.elsewhere.sent] == [False, True]


def test_what_was_set_aside_keeps_its_owner_for_as_long_as_it_takes(make: Make) -> None:
    site = make()
    site.elsewhere.refuses = {1}
    site.identify(site.submit(1))
    site.identify(site.submit(2))
    site.turn()
    records = RemoteRecords(f"{site.settings.state_dir}/archive-there.db")
    with closing(records), records.writing() as writer:
        assert writer.delete_old(before_ns=2**62) == 1
    site.elsewhere.refuses = set()
    site.writer.mark_for_retry("archive.there")
    site.turn()
    assert site.elsewhere.users() == ["ada", "ada"]


def test_retention_that_fails_holds_up_nothing(make: Make, caplog: Any) -> None:
    site = make(retention_days=10_000)

    def expire(before: object) -> None:
        raise Unavailable("an old index is read-only")

    site.elsewhere.expire = expire  # type: ignore[method-assign]
    site.identify(site.submit(1))
    site.turn()
    assert len(site.elsewhere.sent) == 1
    assert "cannot expire old documents, retrying later: an old index is read-only" in caplog.text


def test_the_end_of_a_wait_is_due_at_once(make: Make) -> None:
    site = make(identity_wait_s=3600.0)
    site.submit(7)
    site.turn(1)
    assert 3500.0 < site.sink.end_waits(3600.0) <= 3600.0
    assert site.sink.end_waits() == 0.0
    site.turn()
    assert site.elsewhere.users() == [""]
