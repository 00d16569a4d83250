"""Usage at the reference server equals the jobs' cost, also after outages."""

from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from harness import bank
from harness.jobs import record
from harness.mybrc import ReportingSite
from servers.mybrc_reference import ReferenceBank
from steward.core.events import Event


class ReferenceSite(ReportingSite):
    """Bank, and the reference server that it reports to."""

    def __init__(self, directory: Path, reference: ReferenceBank, url: str) -> None:
        super().__init__(directory, url)
        self.reference = reference


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ReferenceSite]:
    reference = ReferenceBank()
    with reference.serving() as server:
        made = ReferenceSite(tmp_path, reference, f"http://127.0.0.1:{server.server_port}/api")
        yield made
        made.close()


def one_by_one(site: ReferenceSite, events: Sequence[Event], *, is_sent: bool = True) -> None:
    for event in events:
        site.show([event], is_sent=is_sent)


@pytest.mark.parametrize("is_sent", [True, False], ids=["at once", "after an outage"])
def test_usage_is_what_jobs_cost_though_one_waited_in_the_queue(
    site: ReferenceSite, is_sent: bool
) -> None:
    site.show(bank.life(1))
    assert site.reference.usage == Decimal(2)
    one_by_one(site, bank.life(2), is_sent=is_sent)
    site.send()
    assert site.reference.usage == Decimal(4)
    assert bank.balance(site) == 1_000_000_000 - 4_000_000


def test_a_job_is_reported_when_it_runs(site: ReferenceSite) -> None:
    waits, runs, ends = bank.life(1)
    site.show([waits])
    assert site.reference.requests == []
    site.show([runs])
    ((method, body),) = site.reference.requests
    assert (method, body["amount"], body["jobstatus"]) == ("POST", "51.67", "RUNNING")
    assert {"submitdate", "startdate"} <= body.keys()
    assert site.reference.usage == Decimal("51.67")
    site.show([ends])
    assert site.reference.usage == Decimal(2)


def test_a_job_that_is_cancelled_in_the_queue_takes_nothing_from_others(
    site: ReferenceSite,
) -> None:
    site.show(bank.life(1))
    values: dict[str, Any] = {"account": "physics", "partition": "debug"}
    one_by_one(
        site,
        [
            record(2, 0, seen=0, **values),
            record(2, 0, "CANCELLED", seen=60, end=59, **values),
        ],
    )
    assert site.reference.usage == Decimal(2)


@pytest.mark.parametrize("is_sent", [True, False], ids=["at once", "after an outage"])
def test_a_job_that_is_cancelled_after_a_requeue_keeps_what_it_cost(
    site: ReferenceSite, is_sent: bool
) -> None:
    waits, runs, _ = bank.life(1)
    values: dict[str, Any] = {"account": "physics", "partition": "debug"}
    one_by_one(
        site,
        [
            waits,
            runs,
            record(1, 3600, seen=3602, restarts=1, **values),
            record(1, 3600, "CANCELLED", seen=3700, end=3699, restarts=1, **values),
        ],
        is_sent=is_sent,
    )
    site.send()
    with site.ledger.reading() as t:
        cost = sum(row.charge.amount for row in t.charges.list_of_job("c1", 1))
    assert cost > 0
    assert site.reference.usage == Decimal(cost).scaleb(-6).quantize(Decimal("0.01"))
