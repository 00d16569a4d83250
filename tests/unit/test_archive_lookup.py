"""Job lists and searches: results, and permissions."""

import base64
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from harness import archive
from harness.events import NOVEMBER
from harness.site import ADA, BELA, ROOT, Site
from steward.archive.context import JobNotFound
from steward.archive.selection import PageError, iterate_jobs
from steward.core.access import Caller, ClusterRoles
from steward.core.actions import ActionError
from steward.core.config import ArchiveSettings
from steward.core.errors import Unavailable, UsageError
from steward.extensions.search_servers.settings import OpenSearchSinkSettings
from steward.jobs import JobFilter
from steward.slurm.job_states import StateError
from steward.slurm.settings import ClusterSettings
from steward.slurm.times import TimeError


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = archive.make_library(tmp_path)
    yield made
    made.close()


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Site]:
    made = archive.make_library(tmp_path)
    made.standing = ClusterRoles(private_data=frozenset({"jobs"}))
    yield made
    made.close()


# ---------------------------------------------------------------- list


def test_a_list_is_of_the_last_seven_days_and_says_so(site: Site) -> None:
    archive.add_job(site, 1, ago=timedelta(days=8))
    archive.add_job(site, 2, ago=timedelta(days=6))
    archive.add_job(site, 3, None, submit_line="salloc -n 4")
    answer = site.ask("archive.list", ADA)
    assert [line.job_id for line in answer.jobs] == [3, 2]
    assert answer.default_days == 7
    assert answer.since == NOVEMBER - timedelta(days=7)
    assert [line.kind for line in answer.jobs] == ["interactive", "batch"]
    assert answer.jobs[0].submit_line == "salloc -n 4"
    assert answer.zones == {"alpha": "UTC"}
    all_time = site.ask("archive.list", ADA, since="2026-01-01")
    assert [line.job_id for line in all_time.jobs] == [3, 2, 1]
    assert all_time.default_days == 0
    assert [line.script_bytes for line in all_time.jobs] == [None, 19, 19]
    named = site.ask("archive.list", ADA, jobs=["1"])
    assert [line.job_id for line in named.jobs] == [1]


def test_a_list_obeys_its_filters(site: Site) -> None:
    archive.add_job(site, 1, name="md", account="chem")
    archive.add_job(site, 2, name="post", state="FAILED", who=BELA)
    archive.add_job(site, 3, name="md-2", partition="gpu")

    def listed(**request: object) -> list[int]:
        return [line.job_id for line in site.ask("archive.list", ADA, **request).jobs]

    assert listed(users=["bela"]) == [2]
    assert listed(users=["4001"]) == [3, 1]
    assert listed(accounts=["Chem"]) == [1]
    assert listed(names=["md*"]) == [3, 1]
    assert listed(states=["f"]) == [2]
    assert listed(partitions=["gpu"]) == [3]
    with pytest.raises(UsageError, match="unknown cluster 'beta': use one of alpha"):
        listed(clusters=["beta"])
    assert listed(names=["\udcff"], users=["\udcff"], accounts=["\udcff"]) == []
    assert listed(until="now-30minutes") == [3, 2, 1]
    assert listed(until="now-2hours") == []


def test_pages_of_a_list_follow_each_other(site: Site) -> None:
    for job_id in range(1, 8):
        archive.add_job(site, job_id, None, feed=False)
    site.feed()
    found: list[int] = []
    page = ""
    while True:
        answer = site.ask("archive.list", ADA, limit=3, page=page)
        found += [line.job_id for line in answer.jobs]
        page = answer.next
        if not page:
            break
        assert len(answer.jobs) == 3
    assert sorted(found) == [1, 2, 3, 4, 5, 6, 7]
    assert len(found) == 7


def page_of(value: object) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(value)).decode()


BAD_PAGES = [
    *("x", "AAAA", "\udcff", "é", "WzFd", "=" * 7),
    page_of([2**63, "a", "b"]),
    page_of(["0001-01-01T00:00:00+14:00", 1]),
    page_of(["2026-01-01T00:00:00", 1]),
    page_of(["2026-01-01T00:00:00Z", -1]),
]


@pytest.mark.parametrize("page", BAD_PAGES)
def test_a_page_that_no_answer_gave_is_refused(site: Site, page: str) -> None:
    archive.add_job(site, 1, None)
    with pytest.raises(PageError):
        site.ask("archive.list", ADA, page=page)
    with pytest.raises(PageError):
        site.ask("archive.search", ADA, terms=["x"], page=page)


def test_what_cannot_be_asked_for_is_said(site: Site) -> None:
    archive.add_job(site, 1, None)
    with pytest.raises(StateError):
        site.ask("archive.list", ADA, states=["DEAD"])
    with pytest.raises(TimeError):
        site.ask("archive.list", ADA, since="yesterdayish")
    with pytest.raises(TimeError):
        site.ask("archive.list", ADA, since="today", zone="Mars/Olympus")
    assert site.ask("archive.list", ADA, until="0001-01-02", zone="UTC").jobs == ()
    with pytest.raises(UsageError):
        site.ask("archive.list", ADA, limit=0)
    for uid in ("9" * 30, "4294967296"):
        with pytest.raises(UsageError, match="uid"):
            site.ask("archive.list", ADA, users=[uid])
        with pytest.raises(UsageError, match="uid"):
            site.ask("archive.search", ADA, terms=["x"], users=[uid])
    for action, words in (("list", {}), ("search", {"terms": ["x"]})):
        with pytest.raises(UsageError, match="at most 1000"):
            site.ask(
                f"archive.{action}", ADA, names=[f"x{number}" for number in range(1001)], **words
            )
        with pytest.raises(UsageError, match="wildcards"):
            site.ask(f"archive.{action}", ADA, names=["*x" * 100], **words)
        site.ask(f"archive.{action}", ADA, names=["*" * 5000 + "x"], **words)
    with pytest.raises(ActionError):
        site.ask("archive.list", ADA, colour="red")


def test_of_others_jobs_the_record_is_public_but_not_the_private_text(site: Site) -> None:
    archive.add_job(site, 1, who=ADA)
    [line] = site.ask("archive.list", BELA).jobs
    assert (line.user, line.state) == ("ada", "COMPLETED")
    assert "secret-of-ada" not in msgspec.json.encode(line).decode()
    assert (line.script_key, line.script_hidden) == ("", "private")
    [own] = site.ask("archive.list", ADA).jobs
    assert own.submit_line == "sbatch secret-of-ada.sh"


def test_with_private_data_others_jobs_are_not_there(private: Site) -> None:
    archive.add_job(private, 1, who=ADA)
    assert private.ask("archive.list", BELA).jobs == ()
    assert len(private.ask("archive.list", ROOT).jobs) == 1
    with pytest.raises(JobNotFound) as unknown:
        private.ask("archive.show", BELA, job="2")
    with pytest.raises(JobNotFound) as hidden:
        private.ask("archive.show", BELA, job="1")
    # The reply does not show whether such a job exists.
    assert str(hidden.value).replace("1", "2") == str(unknown.value)


# ---------------------------------------------------------------- search


def test_search_finds_jobs_and_only_ones_own(site: Site) -> None:
    archive.add_job(site, 1, b"module load GROMACS/2023\n", who=ADA)
    archive.add_job(site, 2, b"module load GROMACS/2024\n", who=BELA, state="FAILED")
    answer = site.ask("archive.search", ADA, terms=["gromacs"], count=True)
    assert [hit.job.job_id for hit in answer.hits] == [1]
    assert answer.count == 1
    assert answer.hits[0].job.state == "COMPLETED"
    assert answer.hits[0].lines[0].text == "module load GROMACS/2023"
    assert b"2024" not in msgspec.json.encode(answer)
    everything = site.ask("archive.search", ROOT, terms=["gromacs"], count=True)
    assert [hit.job.job_id for hit in everything.hits] == [2, 1]
    assert everything.count == 2
    assert (
        site.ask("archive.search", Caller(uid=ADA.uid, user="cora"), terms=["gromacs"]).hits == ()
    )
    assert site.ask("archive.search", Caller(uid=ADA.uid, user=""), terms=["gromacs"]).hits == ()


def test_search_obeys_filters_of_jobs_and_states(site: Site) -> None:
    archive.add_job(site, 1, b"text one", state="FAILED")
    archive.add_job(site, 2, b"text two", ago=timedelta(days=90))
    archive.add_job(site, 3, b"text two")

    def found(**request: object) -> list[int]:
        answer = site.ask("archive.search", ADA, terms=["text"], **request)
        return [hit.job.job_id for hit in answer.hits]

    assert found() == [3, 1, 2]
    assert found(states=["FAILED"]) == [1]
    assert found(jobs=["2", "3"]) == [3, 2]
    assert found(jobs=["1"], states=["CD"]) == []
    assert found(since="now-7days") == [3, 1]
    assert found(users=["ada"], accounts=["physics"], names=["r*"]) == [3, 1, 2]


def test_pages_of_hits_follow_each_other(site: Site) -> None:
    for job_id in range(1, 6):
        archive.add_job(site, job_id, b"text", ago=timedelta(hours=job_id))
    first = site.ask("archive.search", ADA, terms=["text"], limit=3)
    second = site.ask("archive.search", ADA, terms=["text"], limit=3, page=first.next)
    assert [hit.job.job_id for hit in (*first.hits, *second.hits)] == [1, 2, 3, 4, 5]
    assert second.next == ""


def test_a_job_is_a_batch_job_by_its_script_or_by_its_record(site: Site) -> None:
    archive.add_job(site, 1, batch=None)
    archive.add_job(site, 2, None, batch=True)
    archive.add_job(site, 3, None, batch=None)
    kinds = {line.job_id: line.kind for line in site.ask("archive.list", ADA).jobs}
    assert kinds == {1: "batch", 2: "batch", 3: ""}
    hidden = {line.job_id: line.script_hidden for line in site.ask("archive.list", BELA).jobs}
    assert hidden == dict.fromkeys((1, 2, 3), "private")


def test_times_without_a_zone_are_the_clusters(site: Site) -> None:
    clusters = {"alpha": ClusterSettings(slurm=True, timezone="Asia/Kathmandu")}
    site.reopen(cluster=clusters)
    archive.add_job(site, 1)
    answer = site.ask("archive.list", ADA, since="2026-10-01")
    assert answer.since.astimezone(UTC) == datetime(2026, 9, 30, 18, 15, tzinfo=UTC)


def test_jobs_are_read_page_by_page_to_the_last(site: Site) -> None:
    for job_id in range(1, 1202):
        archive.add_job(site, job_id, None, feed=False)
    site.feed()
    context = site.context("archive")
    jobs = [job.job_id for job in iterate_jobs(context, JobFilter())]
    assert sorted(jobs) == list(range(1, 1202))
    assert [job.job_id for job in iterate_jobs(context, JobFilter(), 600)] == jobs[:600]


def test_a_search_server_that_is_away_is_named_in_the_log_alone(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    # No server listens on the port of the discard service.
    server = OpenSearchSinkSettings(urls=("http://127.0.0.1:9",))
    sinks = {**site.settings.archive.sink, "server": server}
    site.reopen(archive=ArchiveSettings(sink=sinks))
    for _ in range(2):
        with pytest.raises(Unavailable, match="failed on this search"):
            site.ask("archive.search", ADA, terms=["text"], sink="server")
    assert caplog.text.count("cannot reach http://127.0.0.1:9") == 2
