"""Charges of many jobs at once: permissions, and reused job ids."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import bank
from harness.events import NOON
from harness.site import ADA, BELA, COORDINATOR, NOBODY, OWNER, ROOT, Site
from steward.bank.actions.reports import fetch_holds
from steward.bank.errors import BankUsage
from steward.bank.money import MICRO
from steward.core.access import Caller


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = bank.make_shared_site(tmp_path)
    yield made
    made.close()


def told(site: Site, asker: Caller, *jobs: int) -> dict[int, int]:
    asked = [{"cluster": "c1", "job_id": job} for job in jobs]
    answer = site.ask("bank.charged", asker, jobs=asked)
    return {one.job_id: one.amount // MICRO for one in answer.jobs}


def test_each_is_told_to_who_may_know_it(site: Site) -> None:
    bank.charge(site, 1, hours=2)
    bank.charge(site, 2, hours=3, user="bela", account="chemistry")
    for asker, known in (
        (ROOT, {1: 2, 2: 3}),
        (OWNER, {1: 2}),
        (COORDINATOR, {2: 3}),
        (ADA, {1: 2}),
        (BELA, {2: 3}),
        (NOBODY, {}),
    ):
        assert told(site, asker, 1, 2, 3) == known, asker


def test_of_an_id_that_was_used_again_the_job_that_is_meant(site: Site) -> None:
    later = NOON + timedelta(days=400)
    bank.charge(site, 1, hours=2)
    bank.charge(site, 1, hours=5, start=later)
    assert told(site, ADA, 1) == {1: 7}
    for start, hours in ((NOON, 2), (later, 5)):
        first = (start - timedelta(minutes=1)).isoformat()
        answer = site.ask(
            "bank.charged", ADA, jobs=[{"cluster": "c1", "job_id": 1, "first_submit": first}]
        )
        assert [one.amount for one in answer.jobs] == [hours * MICRO]


def test_a_running_job_is_explained_without_a_model_that_can_be_decoded(site: Site) -> None:
    bank.feed(site, bank.life(5, user="ada")[:2])
    with site.ledger.transaction() as t:
        t.set_mark("picture:c1", '{"cluster": 5}')
    with pytest.raises(BankUsage, match=r"job 5 on c1 has no charges yet: it is running"):
        site.ask("bank.explain", job="5")


def test_every_hold_is_fetched_however_many_there_are() -> None:
    ids = [f"{number:06}" for number in range(100_500)]

    def list_page(*, after: str, limit: int, **_filter: object) -> list[SimpleNamespace]:
        start = ids.index(after) + 1 if after else 0
        return [SimpleNamespace(id=one) for one in ids[start : start + limit]]

    context: Any = SimpleNamespace(gate=SimpleNamespace(list_holds=list_page))
    assert len(fetch_holds(context)) == len(ids)
