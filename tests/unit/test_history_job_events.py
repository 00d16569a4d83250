"""What happened to a job's nodes while it ran there, for those who may see the job."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from harness.accounting import START, BooksSite
from harness.events import NOVEMBER
from harness.history import NOON, Told
from harness.site import ADA, BELA, ROOT
from steward.core.errors import StewardError
from steward.reports.history.actions import job_events
from steward.reports.history.consumer import HistoryConsumer
from steward.reports.history.room import HistoryRoom
from steward.reports.history.shapes import JobEventsRequest


class Site:
    def __init__(self, directory: Path) -> None:
        self.books = BooksSite(directory)
        self.history = HistoryConsumer(self.books.settings)
        self.room = HistoryRoom(
            self.books.settings, access=self.books.room.access, now=lambda: NOVEMBER
        )
        told = Told()

        def event(seconds: float, node: str, state: str) -> Any:
            when = (START - NOON + timedelta(seconds=seconds)).total_seconds()
            return told.node(when, node, state, cluster="alpha")

        events = [
            event(-10, "n1", "IDLE+DRAIN"),
            event(100, "n1", "MIXED"),
            event(200, "n3", "DOWN"),
            event(300, "n2", "DOWN"),
            event(600, "n1", "IDLE"),
            event(7000, "n4", "DOWN"),
        ]
        self.history.apply(events, events[-1].id, lambda _new: None)

    def told(self, asker: Any, job: str, **request: Any) -> list[tuple[str, str]]:
        self.books.feed()
        answer = job_events(self.room, asker, JobEventsRequest(job=job, **request))
        return [(one.body.node, one.body.state) for one in answer.events]

    def close(self) -> None:
        self.history.close()
        self.room.close()
        self.books.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def test_only_its_nodes_and_only_while_it_ran(site: Site) -> None:
    site.books.run(nodelist="n[1-2]", nodes=2)
    assert site.told(ROOT, "7") == [("n1", "MIXED"), ("n2", "DOWN")]
    assert site.told(ROOT, "7", limit=1) == [("n1", "MIXED")]


def test_each_run_has_its_own_nodes(site: Site) -> None:
    site.books.run(nodelist="n1", state="NODE_FAIL")
    again = START + timedelta(seconds=6900)
    site.books.run(nodelist="n4", restarts=1, submit=again, start=again, end=NOVEMBER)
    assert site.told(ROOT, "7") == [("n1", "MIXED"), ("n4", "DOWN")]


def test_of_a_job_that_runs_until_now(site: Site) -> None:
    site.books.run(nodelist="n4", state="RUNNING", end=None)
    assert site.told(ADA, "7", cluster="alpha") == [("n4", "DOWN")]


def test_whose_job_it_is_not_is_told_as_of_no_job(site: Site) -> None:
    site.books.run()
    assert site.told(ADA, "7") == [("n1", "MIXED")]
    errors = []
    for asker, job in ((BELA, "7"), (BELA, "8")):
        with pytest.raises(StewardError) as raised:
            site.told(asker, job)
        errors.append(str(raised.value).replace(job, "JOB"))
    assert errors[0] == errors[1]
