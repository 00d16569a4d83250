"""Two clusters with one account and one gate: together they run what the account can pay."""

import os
import shutil
import threading

import msgspec
import pytest
from bank_cluster import ACCOUNTS, BankSite, bank_site
from bank_storms import Storm

from steward.bank.money import MICRO
from steward.core.config.reader import LoadedConfig, render_config

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

POOR, RICH = ACCOUNTS[:2]


def joined(first: BankSite, second: BankSite) -> None:
    """Add the second cluster to the first one's daemon."""
    clusters = {**first.settings.cluster, **second.settings.cluster}
    first.settings = msgspec.structs.replace(first.settings, cluster=clusters)
    first.daemon.settings = first.settings
    first.daemon.config.write_text(render_config(LoadedConfig(first.settings)))
    second.settings = first.settings


def test_two_clusters_get_what_one_account_can_pay(slurm_version: str) -> None:
    with bank_site(slurm_version, cluster="one") as one:
        conf = {"STEWARD_GATE_CONF": one.settings.gate_conf}
        # Its job ids begin at another number, so that charges show the cluster.
        with bank_site(
            slurm_version, cluster="two", controller_env=conf, first_job_id=100_000
        ) as two:
            joined(one, two)
            one.open({POOR: 0, RICH: 1_000_000 * MICRO})
            one.start()
            two.until_gate()
            storm = Storm(one, 60)
            admitted: list[int] = []
            threads = [
                threading.Thread(target=lambda site=site: admitted.extend(storm.submit(150, site)))
                for site in (one, two)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(600)
            assert len(admitted) == 60
            assert any(job >= 100_000 for job in admitted), "the second got nothing"
            assert one.link.get_means(POOR).available == 0
            storm.end(set(admitted), two)
