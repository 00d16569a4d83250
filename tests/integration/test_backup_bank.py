"""Restoration of the bank from a backup made while jobs were submitted, with real Slurm."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import expected_costs
import pytest
from bank_cluster import ACCOUNTS, SHELL, BankSite, bank_site
from job_submission import wait_until
from sandbox_daemon import STEWARD

from steward.bank.money import MICRO

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
    pytest.mark.wide,
    pytest.mark.timeout(900),
]


@pytest.fixture
def site(slurm_version: str) -> Iterator[BankSite]:
    with bank_site(slurm_version) as site:
        yield site


def test_no_job_is_free_and_none_is_paid_twice(site: BankSite) -> None:
    deposit = 1_000_000 * MICRO
    site.open({ACCOUNTS[0]: deposit, ACCOUNTS[1]: 0})
    site.start()
    go = Path(f"{site.cluster.directory}/go")
    waits = f"{SHELL}while [ ! -e {go} ]; do sleep 0.3; done\n"
    jobs = [site.submit(f"{SHELL}sleep 0.5\n", time="5") for _ in range(5)]
    before = [site.submit(waits, time="10") for _ in range(3)]
    wait_until(lambda: set(jobs) <= set(site.charged()), 60)

    stormed: list[int] = []
    storming = threading.Thread(
        target=lambda: stormed.extend(site.storm(40, f"{SHELL}sleep 0.2\n", "--time=5", at_once=4))
    )
    storming.start()
    wait_until(lambda: len(site.charged()) >= len(jobs) + 5, 120)
    saved = Path(site.cluster.directory).parent / "saved.tar.zst"
    config = ("--config", str(site.daemon.config))
    site.daemon.cluster.run([STEWARD, "backup", str(saved), *config], timeout_s=120)
    storming.join(300)
    assert not storming.is_alive()
    # Only Slurm knows these jobs when the state is restored.
    after = [site.submit(waits, time="10") for _ in range(3)]
    wait_until(lambda: set(after) <= {hold.job_id for hold in site.holds()}, 60)

    site.kill_daemon()
    shutil.rmtree(site.daemon.state)
    site.daemon.cluster.run([STEWARD, "restore", str(saved), *config], timeout_s=120)
    site.daemon.start()
    site.until_gate()
    wait_until(lambda: {*before, *after} <= {hold.job_id for hold in site.holds()}, 60)
    go.touch()
    site.until_idle(300)
    site.until_charged([*jobs, *before, *stormed, *after], 180)
    expected = expected_costs.costs(expected_costs.by_slurmctld(site))
    charged = site.charged()
    assert {job: charged[job] for job in expected} == expected
    assert charged.keys() >= {*jobs, *before, *stormed, *after}
    assert len(site.charges()) == len(charged), "each ran once, and is charged once"
    assert site.balance() == deposit - sum(charged.values())
    assert site.findings() == []
    assert "steward_gate_deciding 1.0" in site.daemon.ask("metrics").stdout
