"""Events of a job's nodes while it ran, for users who may see the job."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from harness import accounting, history
from harness.accounting import START
from harness.events import NOON, NOVEMBER
from harness.site import ADA, BELA, ROOT, Site
from steward.core.access import Caller
from steward.core.errors import StewardError
from steward.core.events import Event
from steward.reports.history.consumer import HistoryConsumer


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = accounting.make_site(tmp_path)
    made.open(lambda site: HistoryConsumer(site.settings))

    def event(seconds: float, node: str, state: str) -> Event:
        when = (START - NOON + timedelta(seconds=seconds)).total_seconds()
        return history.node(when, node, state, cluster="alpha")

    made.feed(
        event(-10, "n1", "IDLE+DRAIN"),
        event(100, "n1", "MIXED"),
        event(200, "n3", "DOWN"),
        event(300, "n2", "DOWN"),
        event(600, "n1", "IDLE"),
        event(7000, "n4", "DOWN"),
    )
    yield made
    made.close()


def told(site: Site, asker: Caller, job: str, **request: Any) -> list[tuple[str, str]]:
    answer = site.ask("history.job_events", asker, job=job, **request)
    return [(one.body.node, one.body.state) for one in answer.events]


def test_only_its_nodes_and_only_while_it_ran(site: Site) -> None:
    accounting.add_run(site, nodelist="n[1-2]", nodes=2)
    assert told(site, ROOT, "7") == [("n1", "MIXED"), ("n2", "DOWN")]
    assert told(site, ROOT, "7", limit=1) == [("n1", "MIXED")]


def test_each_run_has_its_own_nodes(site: Site) -> None:
    accounting.add_run(site, nodelist="n1", state="NODE_FAIL")
    again = START + timedelta(seconds=6900)
    accounting.add_run(site, nodelist="n4", restarts=1, submit=again, start=again, end=NOVEMBER)
    assert told(site, ROOT, "7") == [("n1", "MIXED"), ("n4", "DOWN")]


def test_of_a_job_that_runs_until_now(site: Site) -> None:
    accounting.add_run(site, nodelist="n4", state="RUNNING", end=None)
    assert told(site, ADA, "7", cluster="alpha") == [("n4", "DOWN")]


def test_whose_job_it_is_not_is_told_as_of_no_job(site: Site) -> None:
    accounting.add_run(site)
    assert told(site, ADA, "7") == [("n1", "MIXED")]
    errors = []
    for asker, job in ((BELA, "7"), (BELA, "8")):
        with pytest.raises(StewardError) as raised:
            told(site, asker, job)
        errors.append(str(raised.value).replace(job, "JOB"))
    assert errors[0] == errors[1]
