"""Catalog rebuilt from the files: it misses nothing, and brings no purged script back."""

import os
import pwd
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from harness import archive
from harness.events import NOVEMBER
from harness.site import ADA, BELA, ROOT, Site
from steward.archive.catalog.consumer import CatalogConsumer
from steward.archive.catalog.generations import CatalogGenerations
from steward.archive.catalog.month import CatalogUnavailable, ScriptUse, list_months
from steward.archive.catalog.rebuild import CatalogBuilder, CatalogRebuild
from steward.archive.contents import make_script_contents
from steward.archive.files.permissions import read_acl_readers
from steward.archive.requests import Progress, ReindexReply
from steward.core.access import Caller
from steward.core.errors import PermissionRefused
from steward.core.script_stores import IncomingStores
from steward.core.timestamps import to_micros
from steward.jobs import JobsConsumer


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = archive.make_library(tmp_path)
    yield made
    made.close()


def found(site: Site, who: Any = ROOT, *terms: str) -> list[int]:
    answer = site.ask("archive.search", who, terms=list(terms) or ["text"])
    return [hit.job.job_id for hit in answer.hits]


def three_jobs(site: Site) -> None:
    archive.add_job(site, 1, b"text one", who=ADA, ago=timedelta(days=40))
    archive.add_job(site, 2, b"text one", who=BELA)
    archive.add_job(site, 3, b"text three", who=ADA)
    archive.trim(site)


def test_with_manifests_all_is_as_before(site: Site) -> None:
    three_jobs(site)
    before = site.ask("archive.search", ADA, terms=["text"])
    site.context("archive").searcher.close()
    shutil.rmtree(site.state / "catalog")
    os.unlink(site.state / "jobs.db")
    site.context("archive").close()
    items, answer = site.stream("archive.reindex", ROOT)
    assert all(isinstance(item, Progress) for item in items)
    assert answer == ReindexReply(scripts=3, distinct=3, months=("2026-10", "2026-11"))
    site.consumer(JobsConsumer).close()
    site.reopen()
    after = site.ask("archive.search", ADA, terms=["text"])
    assert [hit.job.job_id for hit in after.hits] == [hit.job.job_id for hit in before.hits]
    assert after.hits[0].job.account == "physics"
    assert after.hits[0].job.name == "run"
    assert found(site) == [3, 2, 1] or found(site) == [2, 3, 1]
    assert found(site, BELA) == [2]


def test_only_operators_may_and_only_one_at_a_time(site: Site) -> None:
    three_jobs(site)
    with pytest.raises(PermissionRefused):
        site.ask("archive.reindex", ADA)
    with pytest.raises(PermissionRefused):
        site.ask("archive.verify", ADA)
    first = CatalogRebuild(site.settings, "files").run()
    next(first)
    with pytest.raises(CatalogUnavailable, match="another process"):
        list(CatalogRebuild(site.settings, "files").run())
    list(first)
    assert sorted(found(site)) == [1, 2, 3]


def test_the_daemon_goes_on_meanwhile_and_nothing_is_missed(site: Site) -> None:
    three_jobs(site)
    run = CatalogRebuild(site.settings, "files").run()
    next(run)
    # While the new one is filled: a script comes, one is purged, and one is not filed yet.
    archive.add_job(site, 4, b"text four")
    site.ask("archive.erase", ROOT, jobs=["3"], yes=True)
    site.feed()
    site.append([archive.script_at(site, 5, b"text five", NOVEMBER)])
    news = site.journal[-1:]
    site.consumer(CatalogConsumer).apply(news, len(site.journal), site.append)
    assert isinstance(list(run)[-1], ReindexReply)
    assert sorted(found(site)) == [1, 2, 4, 5]
    # The writer follows into the new catalog, with its cursor.
    assert site.consumer(CatalogConsumer).cursor() == len(site.journal)
    archive.add_job(site, 6, b"text six")
    assert sorted(found(site)) == [1, 2, 4, 5, 6]
    # Purged scripts stay purged even if their event comes again.
    site.consumer(CatalogConsumer).apply(
        [event for event in site.journal if event.key.startswith("script:3:")],
        len(site.journal),
        site.append,
    )
    assert sorted(found(site)) == [1, 2, 4, 5, 6]


def test_what_waits_for_its_identity_is_taken_over(site: Site) -> None:
    three_jobs(site)
    site.append([archive.script_at(site, 7, b"text seven", NOVEMBER)])
    site.feed()
    list(CatalogRebuild(site.settings, "files").run())
    assert sorted(found(site)) == [1, 2, 3, 7]


def test_damage_is_healed(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    three_jobs(site)
    site.context("archive").searcher.close()
    site.consumer(CatalogConsumer).close()
    current = Path(CatalogGenerations(str(site.state / "catalog")).get_current())
    for name in ("2026-11.db", "cursor.db"):
        (current / name).write_bytes(b"no database at all " * 500)
    with pytest.raises(CatalogUnavailable, match="reindex"):
        found(site)
    list(CatalogRebuild(site.settings, "files").run())
    assert "2026-11 of the old catalog is skipped" in caplog.text
    assert sorted(found(site)) == [1, 2, 3]
    site.consumer(CatalogConsumer).apply(site.journal[:1], len(site.journal), site.append)
    assert sorted(found(site)) == [1, 2, 3]


def test_files_that_are_gone_or_changed_are_indexed_as_they_are(site: Site) -> None:
    three_jobs(site)
    paths = {job: Path(site.ask("archive.show", ROOT, job=str(job)).script.path) for job in (1, 2)}
    paths[1].unlink()
    paths[2].write_bytes(b"text that was changed")
    shutil.rmtree(site.state / "catalog")
    list(CatalogRebuild(site.settings, "files").run())
    assert sorted(found(site)) == [2, 3]
    assert found(site, ROOT, "was changed") == [2]


@pytest.mark.parametrize("layout", ["job_archive", "sarchive", "sliced"])
def test_without_manifests_the_sinks_database_says_the_rest(tmp_path: Path, layout: str) -> None:
    site = archive.make_library(tmp_path, layout=layout)
    three_jobs(site)
    shutil.rmtree(site.state / "catalog")
    list(CatalogRebuild(site.settings, "files").run())
    assert sorted(found(site)) == [1, 2, 3]
    assert found(site, BELA) == [2]
    site.close()


@pytest.mark.parametrize("layout", ["job_archive", "sarchive", "sliced"])
def test_without_anything_else_the_files_say_what_they_can(tmp_path: Path, layout: str) -> None:
    site = archive.make_library(tmp_path, layout=layout)
    three_jobs(site)
    shutil.rmtree(site.state / "catalog")
    for path in site.state.glob("archive-files.db*"):
        path.unlink()
    list(CatalogRebuild(site.settings, "files").run())
    assert sorted(found(site)) == [1, 2, 3]
    # These users are invented: a name alone gives no access.
    assert found(site, ADA) == []
    site.close()


def test_a_reindexing_that_is_left_off_leaves_the_old_one(site: Site) -> None:
    three_jobs(site)
    run = CatalogRebuild(site.settings, "files").run()
    next(run)
    run.close()
    assert sorted(found(site)) == [1, 2, 3]
    assert len(list((site.state / "catalog").glob("g*"))) == 1


def test_an_acl_says_whose_a_file_is_if_the_name_still_fits(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give somebody else's file a reader")
    there = pwd.getpwnam("daemon")
    daemon = Caller(uid=there.pw_uid, user="daemon")
    former = Caller(uid=there.pw_uid, user="former")
    site = archive.make_library(tmp_path, layout="job_archive")
    archive.add_job(site, 1, b"text one", who=daemon)
    archive.add_job(site, 2, b"text two", who=former)
    archive.trim(site)
    path = site.ask("archive.show", ROOT, job="1").script.path
    fd = os.open(path, os.O_RDONLY)
    try:
        has_acl = read_acl_readers(fd).uid == there.pw_uid
    finally:
        os.close(fd)
    if not has_acl:
        pytest.skip("the file system has no POSIX ACLs")
    shutil.rmtree(site.state / "catalog")
    for database in site.state.glob("archive-files.db*"):
        database.unlink()
    list(CatalogRebuild(site.settings, "files").run())
    assert found(site, daemon) == [1]
    assert found(site, former) == []
    assert sorted(found(site)) == [1, 2]
    site.close()


def test_what_was_filed_long_ago_is_read_from_there(site: Site) -> None:
    three_jobs(site)
    site.consumer(CatalogConsumer).close()
    shutil.rmtree(site.state / "catalog")
    catalog = CatalogConsumer(
        str(site.state / "catalog"), make_script_contents(site.settings, IncomingStores([]))
    )
    events = [event for event in site.journal if event.kind in catalog.kinds]
    catalog.apply(events, len(site.journal), site.append)
    catalog.close()
    assert sorted(found(site)) == [1, 2, 3]


def test_the_files_count_for_more_than_the_old_catalog(site: Site) -> None:
    three_jobs(site)
    Path(site.ask("archive.show", ROOT, job="3").script.path).write_bytes(b"text that was changed")
    *_, reply = CatalogRebuild(site.settings, "files").run()
    assert isinstance(reply, ReindexReply)
    # Scripts one and changed: each month has its own.
    assert (reply.scripts, reply.distinct) == (3, 3)
    assert found(site, ROOT, "was changed") == [3]
    assert found(site, ROOT, "three") == []


@pytest.mark.parametrize("layout", ["job_archive", "default"])
def test_names_of_jobs_are_those_of_their_files(tmp_path: Path, layout: str) -> None:
    site = archive.make_library(tmp_path, layout=layout)
    archive.add_job(site, 1, b"text one", name="md")
    archive.add_job(site, 2, b"text two", name="post")
    archive.trim(site)
    shutil.rmtree(site.state / "catalog")
    list(CatalogRebuild(site.settings, "files").run())
    os.unlink(site.state / "jobs.db")
    site.consumer(JobsConsumer).close()
    site.reopen()
    answer = site.ask("archive.search", ROOT, terms=["text"], names=["md"])
    assert [(hit.job.job_id, hit.job.name) for hit in answer.hits] == [(1, "md")]
    site.close()


def test_a_path_without_a_cluster_belongs_to_the_only_one(tmp_path: Path) -> None:
    site = archive.make_library(tmp_path, layout="job_archive")
    three_jobs(site)
    shutil.rmtree(site.state / "catalog")
    for path in site.state.glob("archive-files.db*"):
        path.unlink()
    list(CatalogRebuild(site.settings, "files").run())
    answer = site.ask("archive.search", ROOT, terms=["text"])
    assert [hit.job.cluster for hit in answer.hits] == ["alpha"] * 3
    site.close()


def test_a_rebuild_leaves_no_file_open(tmp_path: Path) -> None:
    site = archive.make_library(tmp_path, layout="job_archive")
    three_jobs(site)
    archive.sink_of(site).close()
    site.consumer(CatalogConsumer).close()
    before = archive.list_open_files(site.state)
    rebuild = CatalogRebuild(site.settings, "files")
    list(rebuild.run())
    assert archive.list_open_files(site.state) == before
    site.close()


def test_a_rebuild_of_many_scripts_and_months_stores_all(tmp_path: Path) -> None:
    generations = CatalogGenerations(str(tmp_path / "catalog"))
    builder = CatalogBuilder(generations.create())
    for number in range(1100):
        at = NOVEMBER + timedelta(days=31 * (number % 14))
        use = ScriptUse(
            cluster="alpha", key=f"script:{number}:1", job_id=number, at=to_micros(at), name="run"
        )
        builder.add(use, b"text %d" % number)
    assert builder.finish(7, []) == (1100, 1100)
    assert len(list_months(builder.directory)) == 14
