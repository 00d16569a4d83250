"""64 sbatch at a time against an account that can pay for some of their jobs: just those get in."""

import os
import shutil
from collections.abc import Iterator

import pytest
from bank_storms import Storm
from banking import ACCOUNTS, BankSite, bank_site

from servers.postgresql import PostgreSQL
from steward.bank.money import MICRO

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

POOR, RICH = ACCOUNTS[:2]
PATIENT = {"timeout_ms": 1000}
"""Ten times the plugin's own limit of 100 ms.

Here 64 sbatch, slurmctld, the nodes and the daemon share a few cores, so that an answer may wait
longer for a core than the gate takes to decide. A single time-out would have the policy let in
all for ten seconds, which is right at a site, but what is counted here is what the gate decides.
"""


def storm(site: BankSite, count: int, can_pay: int) -> None:
    """Open the bank on a site, and see that just those get in that can be paid for."""
    site.open({POOR: 0, RICH: 1_000_000 * MICRO})
    site.start()
    it = Storm(site, can_pay)
    admitted = it.submit(count)
    assert len(admitted) == can_pay
    assert site.link.means(POOR).available == 0
    it.end(set(admitted))


@pytest.fixture
def site(slurm_version: str) -> Iterator[BankSite]:
    with bank_site(slurm_version, gate=PATIENT) as site:
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
    with bank_site(slurm_version, bank={"database": url}, gate=PATIENT) as site:
        storm(site, 500, 100)
