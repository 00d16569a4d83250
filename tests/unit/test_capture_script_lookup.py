"""Captured scripts are not captured twice, and purged ones stay purged."""

from pathlib import Path

import msgspec
import pytest

from harness import archive
from harness.archive import purge
from harness.events import make_event, script_event
from harness.jobs import Books, record, script
from harness.site import Site
from harness.spool import make_spool, submit
from steward.capture.script_lookup import CapturedScripts
from steward.core.events import ARCHIVE_PURGE, ArchivePurge, make_script_key, utc_now
from steward.core.journal import Journal, JournalReader
from steward.core.journal.server import trim_journal
from steward.core.journal.store import encode_rows
from steward.core.script_stores import make_incoming_filename, make_stores
from steward.daemon.single_pass import run_once
from steward.daemon.source_workers import recover_foreign_orphans, recover_orphans
from steward.jobs import database_path
from steward.slurm.settings import ClusterSettings


@pytest.fixture
def reader(tmp_path: Path) -> JournalReader:
    (tmp_path / "journal").mkdir()
    Journal(str(tmp_path / "journal")).append(encode_rows([script_event(1)]))
    return JournalReader(str(tmp_path / "journal"))


def test_what_the_journal_has_forgotten_jobs_db_still_knows(
    tmp_path: Path, reader: JournalReader
) -> None:
    books = Books(tmp_path)
    kept, purged = script(7, 0.4), script(8, 0.4)
    books.take(kept, purged, record(7, 0), record(8, 0), purge(purged))
    known = CapturedScripts(str(books.directory), reader)
    cluster = kept.cluster
    assert known.was_captured("c1", script_event(1).key)
    assert known.was_captured(cluster, kept.key)
    assert known.was_captured(cluster, purged.key)
    assert known.can_delete_bytes(cluster, purged.key)
    assert not known.can_delete_bytes(cluster, kept.key), (
        "its event may have been lost with a journal"
    )
    assert not known.was_captured("elsewhere", kept.key)
    assert not known.was_captured(cluster, make_script_key(9, 4))
    known.close()
    assert known.was_captured(cluster, kept.key)


@pytest.mark.parametrize("content", [None, b"", b"no database at all, but long enough for one"])
def test_without_jobs_db_the_journal_alone_is_asked(
    tmp_path: Path, reader: JournalReader, content: bytes | None
) -> None:
    path = Path(database_path(str(tmp_path)))
    if content is not None:
        path.write_bytes(content)
    known = CapturedScripts(str(tmp_path), reader)
    for _ in range(2):
        assert known.was_captured("c1", script_event(1).key)
        assert not known.was_captured("c1", script_event(2).key)
    path.unlink(missing_ok=True)
    books = Books(tmp_path)
    books.take(script(7, 0.4))
    assert CapturedScripts(str(books.directory), reader).was_captured("c1", script(7, 0.4).key)


class MonthsSite(Site):
    """Spool whose jobs wait for months, captured by repeated passes."""

    def __init__(self, directory: Path) -> None:
        self.spool = make_spool(directory / "spool")
        clusters = {"c1": ClusterSettings(spool=str(self.spool), slurm=False)}
        sinks = archive.sink_settings(directory)
        super().__init__(directory, clusters=clusters, archive=sinks)

    def run(self) -> int:
        return run_once(self.settings).captured

    def files(self) -> list[str]:
        return sorted(path.name for path in archive.root_of(self).rglob("*.sh"))

    def months_pass(self) -> None:
        """Trim all events from the journal, and make it forget their keys."""
        journal = Journal(self.settings.state_dir)
        assert trim_journal(journal, self.stores, keep_s=0.0)
        journal.forget_old_keys(int(utc_now().timestamp()) + 1)
        journal.close()

    def scripts(self) -> list[str]:
        return [
            make_script_key(int(path.parent.name[4:]), path.stat().st_mtime_ns)
            for path in sorted(self.spool.rglob("script"))
        ]

    def purge(self, key: str) -> None:
        body = ArchivePurge(script_keys=(key,), asked_by="root")
        journal = Journal(self.settings.state_dir)
        journal.append(encode_rows([make_event(ARCHIVE_PURGE, f"purge:{key}", body, utc_now())]))
        journal.close()


@pytest.fixture
def site(tmp_path: Path) -> MonthsSite:
    return MonthsSite(tmp_path)


def test_a_job_that_waits_for_months_is_kept_once_and_stays_purged(site: MonthsSite) -> None:
    submit(site.spool, 1, b"#!/bin/sh\none\n")
    submit(site.spool, 2, b"#!/bin/sh\ntwo\n")
    assert site.run() == 2
    kept = site.files()
    assert len(kept) == 2
    site.months_pass()
    reader = JournalReader(site.settings.state_dir)
    assert not any(reader.has_key("c1", key) for key in site.scripts())
    assert site.run() == 0
    site.purge(site.scripts()[0])
    site.run()
    assert site.files() == kept[1:]
    site.months_pass()
    submit(site.spool, 3)
    assert site.run() == 1
    assert len(site.files()) == 2
    assert kept[0] not in site.files()


def test_bytes_that_a_crash_left_of_a_purged_script_go(site: MonthsSite) -> None:
    submit(site.spool, 1)
    site.run()
    (key,) = site.scripts()
    site.purge(key)
    site.run()
    site.months_pass()
    (store, *_) = site.stores
    mtime_ns = int(key.rpartition(":")[2])
    store.write(make_incoming_filename("c1", 1, mtime_ns, 1, "script"), b"x")
    store.sync()
    reader = JournalReader(site.settings.state_dir)
    assert recover_orphans(site.settings, "c1", 0, 1, reader) == []
    assert list(store.iterate_names()) == []


def test_bytes_that_a_crash_left_of_another_ones_purged_script_go(site: MonthsSite) -> None:
    """As above, for a cluster known only from a topic, whose keys the journal has forgotten."""
    submit(site.spool, 1)
    site.run()
    (key,) = site.scripts()
    site.purge(key)
    site.run()
    site.months_pass()
    consuming = msgspec.structs.replace(site.settings, cluster={})
    (store, *_) = make_stores(consuming)
    store.write(make_incoming_filename("c1", 1, int(key.rpartition(":")[2]), 1, "script"), b"x")
    store.sync()
    reader = JournalReader(consuming.state_dir)
    assert recover_foreign_orphans(consuming, reader) == []
    assert list(store.iterate_names()) == []
