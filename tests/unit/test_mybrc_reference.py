"""Usage at the reference server equals the jobs' cost, also after outages."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from harness.bank import BankSite
from harness.events import NOON
from harness.jobs import record
from servers.mybrc_reference import ReferenceBank
from steward.bank.reconciling import reconcile
from steward.bank.records import Hold
from steward.bank.settings import BankSettings
from steward.core.events import Event
from steward.core.waiting import Stop
from steward.extensions.mybrc.passing import Passing
from steward.extensions.mybrc.relaying import relay
from steward.extensions.mybrc.settings import RemoteBankSettings

HELD = 51_670_000
BEGAN = NOON - timedelta(hours=1)


def _hold(job_id: int) -> Hold:
    return Hold(id="h", cluster="c1", job_id=job_id, account="physics", amount=HELD, created_us=1)


class Site(BankSite):
    """A bank, and the reference server that it reports to."""

    def __init__(self, directory: Path, reference: ReferenceBank, url: str) -> None:
        directory.joinpath("token").write_text("Token x\n")
        remote = RemoteBankSettings(url=url, token_file=str(directory / "token"), timeout_s=20.0)
        super().__init__(directory / "here", bank=BankSettings(enabled=True, remote=remote))
        self.reference = reference
        self.began(BEGAN)
        self._passing = Passing(self.settings, self.ledger, lambda: self.now)

    def show(self, events: Sequence[Event], *, is_sent: bool = True) -> None:
        """Slurm shows a job, with a hold on it; the bank charges and reports."""
        said = self.feed(events)
        reconcile(self.settings, self.ledger, None, "c1", BEGAN, is_dry=False, now=self.now)
        shown = [*self.journal[-len(events) :], *said]
        told = [(event, _hold(event.body.record.job_id)) for event in shown]
        with self.ledger.transaction() as t:
            relay(t, told, BEGAN)
        if is_sent:
            self.send()

    def send(self) -> None:
        """Send what waits."""
        self._passing.send_once(Stop(), lambda: None)

    def close(self) -> None:
        self._passing.close()
        super().close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    reference = ReferenceBank()
    with reference.serving() as server:
        made = Site(tmp_path, reference, f"http://127.0.0.1:{server.server_port}/api")
        yield made
        made.close()


def one_by_one(site: Site, events: Sequence[Event], *, is_sent: bool = True) -> None:
    for event in events:
        site.show([event], is_sent=is_sent)


@pytest.mark.parametrize("is_sent", [True, False], ids=["at once", "after an outage"])
def test_usage_is_what_jobs_cost_though_one_waited_in_the_queue(site: Site, is_sent: bool) -> None:
    site.show(site.life(1))
    assert site.reference.usage == Decimal(2)
    one_by_one(site, site.life(2), is_sent=is_sent)
    site.send()
    assert site.reference.usage == Decimal(4)
    assert site.balance() == 1_000_000_000 - 4_000_000


def test_a_job_is_reported_when_it_runs(site: Site) -> None:
    waits, runs, ends = site.life(1)
    site.show([waits])
    assert site.reference.requests == []
    site.show([runs])
    ((method, body),) = site.reference.requests
    assert (method, body["amount"], body["jobstatus"]) == ("POST", "51.67", "RUNNING")
    assert {"submitdate", "startdate"} <= body.keys()
    assert site.reference.usage == Decimal("51.67")
    site.show([ends])
    assert site.reference.usage == Decimal(2)


def test_a_job_that_is_cancelled_in_the_queue_takes_nothing_from_others(site: Site) -> None:
    site.show(site.life(1))
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
    site: Site, is_sent: bool
) -> None:
    waits, runs, _ = site.life(1)
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
        cost = sum(row.charge.amount for row in t.charges.of_job("c1", 1))
    assert cost > 0
    assert site.reference.usage == Decimal(cost).scaleb(-6).quantize(Decimal("0.01"))
