"""Job lists: order, pages, arrays as one row, and visibility."""

from collections.abc import Iterator
from datetime import timedelta
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from harness import accounting
from harness.accounting import START
from harness.site import ADA, BELA, ROOT, Site
from steward.accounting.job_list_requests import JobsAnswer
from steward.core.errors import UsageError
from steward.jobs import JobFilter, Jobs


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = accounting.make_site(tmp_path)
    yield made
    made.close()


@pytest.fixture
def queue(site: Site) -> Site:
    """Add ten jobs of ada a minute apart, one of bela, and an array of ada's among them."""
    for number in range(10):
        later = timedelta(minutes=number)
        accounting.add_run(
            site, 100 + number, submit=START + later, state="FAILED" if number == 3 else "COMPLETED"
        )
    accounting.add_run(
        site, 200, who=BELA, submit=START + timedelta(minutes=4), account="chemistry"
    )
    for task in range(6):
        waits: dict[str, Any] = {"start": None, "end": None, "nodelist": ""}
        accounting.add_run(
            site,
            300 + task,
            array_job_id=300,
            array_task=str(task) if task else "6-9%2",
            submit=START + timedelta(minutes=4),
            state="FAILED" if task in (2, 4) else "COMPLETED" if task else "PENDING",
            **({} if task else waits),
        )
    site.feed()
    return site


def labels(answer: JobsAnswer) -> list[str]:
    return [row.job for row in answer.jobs]


def every(site: Site, limit: int, **asked: Any) -> list[str]:
    """Return all rows, read page by page."""
    found: list[str] = []
    page = ""
    while True:
        answer = site.ask("accounting.jobs", limit=limit, page=page, **asked)
        assert len(answer.jobs) == limit or not answer.next
        found += labels(answer)
        page = answer.next
        if not page:
            return found


def test_the_latest_is_first_and_an_array_one_row(queue: Site) -> None:
    answer = queue.ask("accounting.jobs")
    newest = [*("109", "108", "107", "106", "105"), "300", "200", "104"]
    assert labels(answer) == [*newest, "103", "102", "101", "100"]
    array = answer.jobs[5]
    assert array.tasks == {"FAILED": 2, "COMPLETED": 3, "PENDING": 4}
    assert (array.array_job_id, array.elapsed_s, array.cpu) == (300, None, None)
    assert labels(queue.ask("accounting.jobs", order="submit")) == labels(answer)[::-1]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("order", ["-submit", "submit", "-end", "end"])
@pytest.mark.parametrize("arrays", ["together", "apart"])
def test_pages_tell_every_row_once(queue: Site, limit: int, order: str, arrays: str) -> None:
    found = every(queue, limit, order=order, arrays=arrays)
    assert len(found) == len(set(found))
    whole = every(queue, 1000, order=order, arrays=arrays)
    assert found == whole
    ended = 10 + 1 + 5
    is_one_row = arrays == "together" and order.endswith("submit")
    assert len(whole) == (12 if is_one_row else ended + order.endswith("submit"))


def test_an_array_is_told_where_one_of_its_tasks_is_meant(queue: Site) -> None:
    assert every(queue, 1, states=("FAILED",)) == ["300", "103"]
    assert every(queue, 1, states=("FAILED",), arrays="apart") == ["300_4", "300_2", "103"]
    assert every(queue, 2, jobs=("300",), arrays="apart", order="submit") == [
        *("300_[6-9%2]", "300_1", "300_2", "300_3", "300_4", "300_5")
    ]
    assert every(queue, 50, names=("train",), states=("PENDING",)) == ["300"]


def test_what_a_job_was_given_and_used(site: Site) -> None:
    accounting.add_run(site)
    accounting.add_launch(site, cpu_s=(1000.0, 200.0), peak_bytes=1024**3)
    accounting.add_run(site, 8, state="RUNNING", end=None, exit_code=None, time_limit_s=None)
    accounting.add_run(
        site, 9, state="PENDING", reason="Priority", start=None, end=None, nodelist=""
    )
    site.feed()
    waiting, running, over = site.ask("accounting.jobs").jobs
    assert (over.cpus, over.memory_bytes, over.nodes) == (4, 4 * 1024**3, 1)
    assert (over.elapsed_s, over.waited_s, over.limit_s) == (600, 60, 1200)
    assert over.cpu_used_s == 1200
    assert over.cpu == pytest.approx(0.5)
    assert (over.peak_bytes, over.memory) == (1024**3, 0.25)
    # A running job has no efficiency yet, and a pending one no times.
    assert (running.elapsed_s, running.cpu, running.end, running.limit_s) == (
        7200,
        None,
        None,
        None,
    )
    assert (waiting.elapsed_s, waiting.start, waiting.waited_s) == (None, None, 7260)
    assert waiting.reason == "Priority"


def test_nobody_is_shown_more_than_they_may_see(queue: Site) -> None:
    assert every(queue, 50, jobs=("200",)) == ["200"]
    assert labels(queue.ask("accounting.jobs", BELA)) == ["200"]
    assert labels(queue.ask("accounting.jobs", BELA, users=("ada",))) == []
    assert queue.ask("accounting.job_states", BELA).states == {"COMPLETED": 1}
    assert queue.ask("accounting.job_states", ADA).total == 16
    assert queue.ask("accounting.job_states", ROOT, states=("FAILED",)).states == {"FAILED": 3}


@pytest.mark.parametrize(
    "asked",
    [
        {"page": "x"},
        {"page": "W10"},
        {"page": "é" * 10},
        {"page": "A" * 200_000},
        {"page": "WzFlMzAwLDEsMV0"},
        {"states": ("NO_SUCH",)},
        {"since": "yesterday at noon"},
        {"limit": 0},
        {"limit": 100_000},
        {"jobs": ("seven",)},
    ],
)
def test_what_cannot_be_understood_is_said(queue: Site, asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        queue.ask("accounting.jobs", **asked)


@pytest.mark.parametrize("order", ["-submit", "submit", "-end", "end"])
@pytest.mark.parametrize(
    "wanted",
    [
        JobFilter(),
        JobFilter(users=("ada",)),
        JobFilter(accounts=("physics",)),
        JobFilter(states=("FAILED",)),
        JobFilter(names=("train",)),
        JobFilter(users=("ada",), states=("COMPLETED",), names=("train",)),
    ],
)
def test_an_index_gives_the_order(queue: Site, wanted: JobFilter, order: Any) -> None:
    plan = queue.context("accounting").jobs.explain_page(wanted, order)
    assert "USING INDEX" in plan
    if order.endswith("submit"):
        assert "TEMP B-TREE" not in plan, plan


def test_a_list_of_a_person_is_found_by_their_index(queue: Site) -> None:
    wanted = JobFilter(users=("ada",), states=("COMPLETED",), names=("train",))
    assert "job_by_user" in queue.context("accounting").jobs.explain_page(wanted, "-submit")


def test_few_are_looked_at_to_count_them(queue: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Jobs, "count_states", partialmethod(Jobs.count_states, limit=4))
    told = queue.ask("accounting.job_states", users=("ada",))
    assert (told.total, told.is_all) == (4, False)
    # If an index can count all jobs, all are counted.
    whole: list[dict[str, Any]] = [{}, {"clusters": ("alpha",)}, {"partitions": ("long",)}]
    for asked in whole:
        told = queue.ask("accounting.job_states", **asked)
        assert (told.total, told.is_all) == (17, True)
    assert queue.ask("accounting.job_states", BELA).is_all
