"""slurmctld fails over to its backup during a storm: the gate admits only jobs that are paid."""

import os
import shutil
import threading

import pytest
from bank_cluster import ACCOUNTS, BankSite, bank_site
from bank_storms import Storm
from job_submission import wait_until

from servers.postgresql import PostgreSQL
from steward.bank.money import MICRO

pytestmark = [
    pytest.mark.long,
    pytest.mark.database,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

POOR, RICH = ACCOUNTS[:2]
CAN_PAY = 100


def test_the_controller_fails_over_in_the_middle(
    slurm_version: str, postgresql: PostgreSQL
) -> None:
    database = {"database": postgresql.url(postgresql.new_database())}
    with bank_site(
        slurm_version,
        bank=database,
        backup=True,
        extra=("SlurmctldTimeout=5",),
    ) as site:
        site.open({POOR: 0, RICH: 1_000_000 * MICRO})
        site.start()
        storm = Storm(site, CAN_PAY)
        # slurmctld saves its state every 5 s: wait for that before the kill.
        first = storm.submit(20)
        assert len(first) == 20
        wait_until(lambda: _is_saved(site.cluster.spool, first), 30)
        admitted: list[int] = []
        submitting = threading.Thread(target=lambda: admitted.extend(storm.submit(240)))
        submitting.start()
        wait_until(lambda: site.link.get_status().holds >= 40, 60)
        site.cluster.kill_controller()
        site.cluster.take_over(timeout_s=120)
        submitting.join(600)
        assert not submitting.is_alive()

        # The killed slurmctld forgot the jobs of the last seconds; their holds are released, and
        # others are admitted until the account can pay no further job.
        def is_full() -> bool:
            storm.submit(64)
            return len(_live(site)) >= CAN_PAY

        wait_until(is_full, 120)
        assert len(_live(site)) == CAN_PAY
        assert not storm.submit(64)
        assert site.link.get_means(POOR).available == 0
        storm.end(_live(site))


def _live(site: BankSite) -> set[int]:
    words = ["squeue", "-h", "-A", POOR, "-t", "PD,R,CG,CF", "-o", "%A"]
    return {int(word) for word in site.cluster.run(words).stdout.split()}


def _is_saved(spool: str, jobs: list[int]) -> bool:
    """Return whether slurmctld's job state file is newer than the last job."""
    last = f"{spool}/hash.{jobs[-1] % 10}/job.{jobs[-1]}"
    return os.stat(f"{spool}/job_state").st_mtime > os.stat(last).st_mtime
