"""Modes observe, enforce and off on a running cluster, with jobs in the queue."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from bank_cluster import ACCOUNTS, SHELL, BankSite, bank_site
from job_submission import wait_until

from steward.bank.ledger import open_ledger
from steward.bank.money import MICRO
from steward.bank.records import Rate
from steward.core.events import utc_now

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

POOR, RICH = ACCOUNTS[:2]
HOURLY = (Rate(weights={"cpu": MICRO}),)

JOBS: Sequence[Sequence[str]] = (
    # Two jobs that the account can pay, one that it cannot, then some that do and do not fit.
    ("--time=60",),
    ("--time=120", "-n2"),
    ("--time=10:00:00", "-n8"),
    ("--time=600", "-n1", "--partition=main,debug"),
    ("--array=0-3", "--time=20:00:00"),
    ("--time=60", f"--account={RICH}"),
    ("--time=1-00:00:00",),
    ("--time=50:00:00", f"--account={RICH}"),
)
"""Options of the submitted jobs, the same each time."""


@pytest.fixture
def site(slurm_version: str) -> Iterator[BankSite]:
    with bank_site(slurm_version) as site:
        yield site


def submit_all(site: BankSite) -> dict[str, bool]:
    """Submit the jobs, which stay pending; return by name which of them were admitted."""
    found = {}
    for number, words in enumerate(JOBS):
        name = f"job{number}"
        done = site.tries(f"{SHELL}sleep 60\n", *words, f"--job-name={name}", "--begin=now+40")
        found[name] = done.returncode == 0
        if done.returncode:
            assert "SU" in done.stderr, done.stderr
    return found


def cancel_all(site: BankSite) -> None:
    site.as_root("scancel", "--user", site.user)
    wait_until(lambda: not site.held(), 60)


def refused(site: BankSite, since: datetime, until: datetime | None = None) -> Counter[int]:
    """Return the amounts of rejections, real or observed, from the ledger."""
    ledger = open_ledger(site.settings)
    try:
        with ledger.reading() as t:
            rows: list[Any] = list(t.rejections.list_since(since, until))
    finally:
        ledger.close()
    return Counter(row.amount for row in rows)


def test_observe_gate_off(site: BankSite) -> None:
    site.open({POOR: 10 * MICRO, RICH: 60 * MICRO}, mode="observe", rates=HOURLY)
    site.start()
    began = utc_now() - timedelta(seconds=1)
    assert all(submit_all(site).values())
    named = site.daemon.ask_json("bank", "would-reject", "--since", began.strftime("%FT%TZ"))
    print(named)
    wait_until(lambda: bool(refused(site, began)), 30)
    cancel_all(site)
    observed = utc_now()

    site.bank("mode", "enforce")
    wait_until(lambda: site.tries(f"{SHELL}true\n", "--time=9-0").returncode != 0, 30)
    # Jobs admitted so far run with SU holds: they must not block others.
    wait_until(lambda: not site.held(), 60)
    enforced = utc_now()
    let_in = submit_all(site)
    assert not all(let_in.values())
    turned_away = sum(1 for is_in in let_in.values() if not is_in)
    wait_until(lambda: refused(site, enforced).total() == turned_away, 30)
    # The gate reports in order, so that all its observed rejections have arrived, too.
    assert refused(site, enforced) == refused(site, began, observed)

    site.bank("mode", "off")
    wait_until(lambda: site.tries(f"{SHELL}true\n", "--time=9-0").returncode == 0, 30)
    assert all(submit_all(site).values())
    cancel_all(site)
    assert site.findings() == []
