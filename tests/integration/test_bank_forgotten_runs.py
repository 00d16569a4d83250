"""Runs that a killed slurmctld had not saved: records are closed, and SU holds released."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Final

import pytest
from bank_cluster import ACCOUNTS, SHELL, BankSite, bank_site
from job_submission import state_of, wait_until

from steward.bank.money import MICRO

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
    pytest.mark.matrix,
    pytest.mark.timeout(600),
]

POLL_S: Final = 20.0
"""Interval of polls: long enough for a task to start and be requeued between two of them."""


def jobcomp_lines(site: BankSite) -> list[dict[str, Any]]:
    """Return the lines of jobcomp."""
    path = Path(site.cluster.directory) / "log/jobcomp.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def task_state(site: BankSite, task: str) -> str:
    """Return the state that squeue shows of an array's task."""
    words = ["squeue", "-h", "-j", task, "-o", "%T"]
    return str(site.cluster.run(words, check=False).stdout).strip()


def test_a_requeued_task_that_slurmctld_forgot_is_over(slurm_version: str) -> None:
    with bank_site(slurm_version, snapshot_s=POLL_S) as site:
        site.open({ACCOUNTS[0]: 1_000_000 * MICRO})
        site.start()
        first = site.submit(f"{SHELL}true\n", time="5")
        wait_until(lambda: state_of(site.cluster, first) == "COMPLETED", 60)
        wait_until(lambda: not site.held() and not site.unfinished(), 60)
        saved = Path(site.cluster.spool) / "job_state"
        wait_until(saved.exists, 30)
        before = saved.read_bytes()
        array = site.submit(f"{SHELL}sleep 60\n", array="1-3", requeue=True, time="5")
        wait_until(lambda: task_state(site, f"{array}_1") == "RUNNING", 30)
        site.as_root("scontrol", "requeue", f"{array}_1")
        wait_until(lambda: any(line["job_id"] > array for line in jobcomp_lines(site)), 30)
        wait_until(lambda: any(job.job_id > array for job in site.unfinished()), 30)
        site.cluster.kill_controller()
        saved.write_bytes(before)
        site.cluster.restart_controller()
        assert state_of(site.cluster, array) == ""
        wait_until(lambda: not site.unfinished() and not site.held(), 3 * POLL_S)
        lost = site.daemon.ask_json("accounting", "gaps")
        assert str(array) in json.dumps(lost)
        assert site.findings() == []
