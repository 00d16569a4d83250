"""64 sbatch at a time on an account that can pay for some jobs: exactly those are admitted."""

import os
import shutil
from collections.abc import Iterator

import pytest
from bank_cluster import ACCOUNTS, BankSite, bank_site
from bank_storms import Storm

from servers.postgresql import PostgreSQL
from steward.bank.money import MICRO

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

POOR, RICH = ACCOUNTS[:2]


def storm(site: BankSite, count: int, can_pay: int) -> None:
    """Enable the bank on a site, and check that exactly the payable jobs are admitted."""
    site.open({POOR: 0, RICH: 1_000_000 * MICRO})
    site.start()
    it = Storm(site, can_pay)
    admitted = it.submit(count)
    assert len(admitted) == can_pay
    assert site.link.get_means(POOR).available == 0
    it.end(set(admitted))


@pytest.fixture
def site(slurm_version: str) -> Iterator[BankSite]:
    with bank_site(slurm_version) as site:
        yield site


@pytest.mark.matrix
def test_a_hundred_and_twenty_for_thirty(site: BankSite) -> None:
    storm(site, 120, 30)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_five_hundred_for_a_hundred(site: BankSite) -> None:
    storm(site, 500, 100)


@pytest.mark.long
@pytest.mark.database
@pytest.mark.timeout(900)
def test_five_hundred_for_a_hundred_with_postgresql(
    slurm_version: str, postgresql: PostgreSQL
) -> None:
    url = postgresql.url(postgresql.new_database())
    with bank_site(slurm_version, bank={"database": url}) as site:
        storm(site, 500, 100)
