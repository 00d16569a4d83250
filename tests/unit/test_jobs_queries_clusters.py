"""Clusters known only from remote sources: visibility, with and without local clusters."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pysqlite3 import dbapi2

from harness import archive
from harness.events import NOON
from harness.site import ADA, BELA, ROOT, Site
from steward.admin.journal import StatusRequest
from steward.core.access import Access, Caller, ClusterRoles
from steward.core.actions import Registry
from steward.core.config import AccessSettings
from steward.core.databases import JOURNAL
from steward.core.errors import PermissionRefused, UsageError
from steward.core.events import JOB_SEEN, Event, JobFacts
from steward.core.journal import Journal
from steward.core.records import JobRecord
from steward.core.sqlite import SqliteUnavailable
from steward.daemon.contexts import make_registry
from steward.daemon.source_workers import list_unfinished
from steward.jobs import Jobs, JobsConsumer, database_path
from steward.jobs.queries import list_clusters

OPERA = Caller(uid=4009, user="opera")


def seen(cluster: str, job_id: int, asker: Caller) -> Event:
    record = JobRecord(
        job_id=job_id, uid=asker.uid, user=asker.user, submit=NOON, name="x", state="RUNNING"
    )
    return Event(
        kind=JOB_SEEN,
        cluster=cluster,
        key=f"{cluster}:{job_id}",
        at=NOON,
        seen_at=NOON,
        source="kafka",
        body=JobFacts(record=record, whole=True),
    )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Make a Site of cluster alpha, which ``opera`` administers, and of beta, from a topic."""
    site = archive.make_library(tmp_path)

    def standing(cluster: str) -> ClusterRoles | None:
        return ClusterRoles(admins=frozenset({"opera"})) if cluster == "alpha" else None

    site.context("archive").access = Access(site.settings.access, 0, standing)
    site.append([seen("alpha", 1, ADA), seen("beta", 2, ADA), seen("beta", 3, BELA)])
    site.feed()
    return site


def listed(site: Site, asker: Caller) -> set[tuple[str, int]]:
    jobs = site.ask("archive.list", asker, since="2020-01-01").jobs
    return {(line.cluster, line.job_id) for line in jobs}


def test_every_cluster_that_is_known_counts(site: Site) -> None:
    assert list_clusters(site.settings) == ["alpha", "beta"]
    assert list_clusters(msgspec.structs.replace(site.settings, cluster={})) == ["alpha", "beta"]
    jobs = Jobs(database_path(site.settings.state_dir))
    assert jobs.read_clusters() == ["alpha", "beta"]
    jobs.close()


def test_where_nothing_is_known_the_decision_is_still_made(tmp_path: Path) -> None:
    site = archive.make_library(tmp_path)
    empty = msgspec.structs.replace(site.settings, cluster={}, state_dir=str(tmp_path / "none"))
    assert list_clusters(empty) == [""]


def test_the_configured_clusters_count_where_the_database_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = archive.make_library(tmp_path)
    state = tmp_path / "damaged"
    state.mkdir(mode=0o700)
    settings = msgspec.structs.replace(site.settings, state_dir=str(state))
    path = Path(database_path(str(state)))
    path.write_bytes(b"no database at all" * 100)
    for _ in range(3):
        assert list_clusters(settings) == list(settings.cluster)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{path}: file is not a database" in record.message
    caplog.clear()
    damaged = path.read_bytes()
    whole = msgspec.structs.replace(settings, state_dir=str(tmp_path / "whole"))
    (tmp_path / "whole").mkdir(mode=0o700)
    JobsConsumer(whole).close()
    shutil.copy(database_path(whole.state_dir), path)
    assert list_clusters(settings) == list(settings.cluster)
    assert not caplog.records
    path.write_bytes(damaged)
    list_clusters(settings)
    assert len(caplog.records) == 1, "a new outage is a new line"
    registry = make_registry(settings)
    request = registry.decode("doctor.run", {"only": ["state"]})
    reply = registry.call("doctor.run", ROOT, request)
    assert [finding.checked for finding in reply.findings if finding.status == "wrong"] == [
        str(path)
    ]


def test_a_database_that_cannot_be_read_now_is_not_taken_for_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = archive.make_library(tmp_path)
    JobsConsumer(site.settings).close()
    Journal(site.settings.state_dir).close()
    fail: list[str] = []

    def connect(name: str, *args: Any, **named: Any) -> Any:
        if name in fail:
            raise dbapi2.OperationalError("unable to open database file")
        return open_connection(name, *args, **named)

    open_connection = dbapi2.connect
    monkeypatch.setattr(dbapi2, "connect", connect)
    assert list_unfinished(site.settings, "alpha") == []
    for path in (database_path(site.settings.state_dir), JOURNAL.locate(site.settings.state_dir)):
        fail[:] = [path]
        with pytest.raises(SqliteUnavailable):
            list_unfinished(site.settings, "alpha")


def test_owners_see_their_jobs_of_a_cluster_that_others_tell_of(site: Site) -> None:
    assert listed(site, ADA) == {("alpha", 1), ("beta", 2)}
    assert listed(site, BELA) == {("alpha", 1), ("beta", 3)}
    assert listed(site, ROOT) == {("alpha", 1), ("beta", 2), ("beta", 3)}


def test_an_administrator_of_our_cluster_is_none_of_another(site: Site) -> None:
    assert listed(site, OPERA) == {("alpha", 1)}
    with pytest.raises(PermissionRefused):
        site.ask("archive.verify", OPERA)


def test_without_clusters_of_our_own_the_journal_is_still_the_operators(
    site: Site,
) -> None:
    settings = msgspec.structs.replace(
        site.settings, cluster={}, access=AccessSettings(operators=("opera",))
    )
    rooms: Registry = make_registry(settings)
    with pytest.raises(PermissionRefused):
        rooms.call("journal.status", ADA, StatusRequest())


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("accounting.gaps", {"clusters": ["nowhere"]}),
        ("accounting.jobs", {"clusters": ["nowhere"]}),
        ("accounting.job_states", {"clusters": ["nowhere"]}),
        ("archive.list", {"clusters": ["nowhere"]}),
        ("archive.search", {"terms": ["x"], "clusters": ["nowhere"]}),
        ("archive.secrets", {"clusters": ["nowhere"]}),
        ("automation.audit", {"cluster": "nowhere"}),
        ("bank.holds", {"cluster": "nowhere"}),
        ("rules.history", {"cluster": "nowhere"}),
    ],
)
def test_lists_of_a_cluster_that_is_unknown_name_the_known_ones(
    site: Site, action: str, fields: dict[str, Any]
) -> None:
    registry = make_registry(site.settings)
    with pytest.raises(UsageError, match=r"unknown cluster 'nowhere': use one of alpha, beta$"):
        registry.call(action, ROOT, registry.decode(action, fields))
