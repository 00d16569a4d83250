"""scrontab jobs, which the submit plugin sees once: every run is charged."""

import os
import shutil

import pytest
import scrontab_jobs
from bank_cluster import ACCOUNTS, CPU, bank_site
from job_submission import state_of, wait_until

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.wide,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

MINUTES = 6
"""Minutes of the SU hold of a job of five minutes, with Slurm's grace."""


def test_a_run_that_cannot_be_paid_any_more_is_cancelled(slurm_version: str) -> None:
    account = ACCOUNTS[0]
    enough = CPU * MINUTES // 60
    with bank_site(slurm_version, extra=(scrontab_jobs.ENABLED,)) as site:
        site.open({account: enough})
        site.start()
        (job,) = scrontab_jobs.each_minute(site.cluster, site.user, "sleep 1", account=account)
        # It is held for since its crontab was taken in.
        assert site.tries("#!/bin/sh\ntrue\n", "--time=5").returncode != 0
        wait_until(lambda: bool(site.charged().get(job)), 120)
        # The rest does not pay for another run, and Slurm cannot hold scrontab jobs.
        wait_until(lambda: state_of(site.cluster, job) == "CANCELLED", 60)
        wait_until(lambda: not site.holds(), 60)
        (charge,) = [charge for charge in site.charges() if charge.amount]
        assert charge.use is not None
        assert (charge.restarts, charge.use.state) == (0, "COMPLETED")
        assert site.balance(account) == enough - charge.amount
        assert site.findings() == []
