"""slurmctld's gate asks the gate of another host over TLS: two real daemons, real Slurm."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import pytest
from bank_cluster import ACCOUNTS, SHELL, TIMEOUT_MS, BankSite, bank_site
from job_submission import wait_until
from sandbox_daemon import Daemon
from spool_daemon import children_of

from servers.authority import Authority
from servers.server import free_port
from steward.bank.gate.client import GateClient
from steward.bank.gate.requests import TIMEOUT_SHARE
from steward.bank.money import MICRO
from steward.bank.settings import GateSettings
from steward.core.config.reader import LoadedConfig, render_config
from steward.core.section import TlsSettings
from steward.extensions.controllers.settings import ForwardSettings, ReceiveSettings
from steward.slurm.settings import ClusterSettings

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

RICH, POOR = ACCOUNTS
ADDRESS: Final = "127.0.0.2"
"""Address of the host whose gate decides."""
ASKING, OTHER = "ctl2.example.org", "ctl9.example.org"
"""Hosts of slurmctld: of this cluster, and of another cluster."""
TRUE: Final = f"{SHELL}true\n"
SLEEP: Final = f"{SHELL}sleep 100\n"


class ControllerHost(Daemon):
    """``steward controller`` on the host of slurmctld, whose plugin asks this host's gate."""

    command = "controller"


class TwoHosts:
    """Host whose gate decides, and host of slurmctld, each with its own files.

    Args:
        site: The cluster, with the daemon of the host whose gate decides.
        directory: Directory of the certificates.
    """

    def __init__(self, site: BankSite, directory: Path) -> None:
        self.site = site
        self._authority = Authority(directory)
        certificate, key = self._authority.certificate(f"IP:{ADDRESS}")
        tls = TlsSettings(
            certificate_file=certificate, key_file=key, client_ca_file=self._authority.file
        )
        self._gate, self._receiver = (f"{ADDRESS}:{free_port()}" for _ in range(2))
        site.settings = site.daemon.settings = msgspec.structs.replace(
            site.settings,
            # gate.conf, which slurmctld reads, is the other host's.
            run_dir=str(site.daemon.home / "run"),
            cluster={
                site.name: msgspec.structs.replace(
                    site.settings.cluster[site.name], controllers=(ASKING,)
                ),
                "other": ClusterSettings(remote=True, controllers=(OTHER,)),
            },
            tls={"host": tls},
            gate=GateSettings(listen=self._gate, tls=tls),
            receive=ReceiveSettings(listen=self._receiver, tls=tls),
        )
        site.daemon.config.write_text(render_config(LoadedConfig(site.settings)))
        self.controller = ControllerHost(site.cluster, site.daemon.home.with_name("controller"))
        self.use_certificate(ASKING)

    def use_certificate(self, name: str) -> None:
        """Write the configuration of slurmctld's host with the certificate of a host."""
        certificate, key = self._authority.certificate(f"DNS:{name}")
        tls = TlsSettings(certificate_file=certificate, key_file=key, ca_file=self._authority.file)
        cluster = msgspec.structs.replace(
            self.site.settings.cluster[self.site.name], controllers=(), jobcomp_lines=""
        )
        self.controller.settings = msgspec.structs.replace(
            self.controller.settings,
            run_dir=str(self.site.run_dir),
            cluster={self.site.name: cluster},
            tls={"host": tls},
            gate=GateSettings(ask=self._gate, tls=tls, timeout_ms=TIMEOUT_MS),
            forward=ForwardSettings(to=self._receiver, tls=tls),
        )
        self.controller.config.write_text(render_config(LoadedConfig(self.controller.settings)))

    @contextmanager
    def other_certificate(self) -> Iterator[None]:
        """Give slurmctld's host a certificate of another cluster within the block."""
        for name in (OTHER, ASKING):
            self.controller.close()
            self.use_certificate(name)
            self.controller.start()
            if name == OTHER:
                yield

    def submit(self) -> int:
        """Submit a job that stays in the queue; return its id."""
        return self.site.submit(SLEEP, time="5")

    def has_token(self, job: int) -> bool:
        """Return True if a gate decided on a job, rather than the outage policy."""
        return "steward=1." in self.site.cluster.run(["scontrol", "show", "job", str(job)]).stdout

    def submit_decided(self, script: str) -> int:
        """Submit jobs until the other host's gate decides on one: a busy host is late at times."""
        jobs: list[int] = []

        def is_decided() -> bool:
            jobs.append(self.site.submit(script, time="5"))
            return self.has_token(jobs[-1])

        wait_until(is_decided, 60)
        return jobs[-1]

    def count_timeouts(self) -> int:
        """Return how often slurmctld waited for its host's gate until the time-out."""
        log = Path(f"{self.site.cluster.directory}/log/slurmctld.log")
        return log.read_text(errors="replace").count("does not answer")

    def count_by_policy(self) -> int:
        """Return the number of answers by the outage policy on slurmctld's host."""
        return GateClient(self.controller.settings.state_dir).get_status().tally.by_policy

    def get_held_jobs(self) -> set[int]:
        """Return the jobs with an SU hold in the gate that decides."""
        return {hold.job_id for hold in self.site.holds()}

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop every process of the host whose gate decides within the block."""
        supervisor = self.site.daemon.pid
        pids = [supervisor, *children_of(supervisor)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def hosts(slurm_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with bank_site(slurm_version) as site:
        hosts = TwoHosts(site, tmp_path_factory.mktemp("authority"))
        site.open({RICH: 1_000_000 * MICRO, POOR: 0})
        site.start()
        hosts.controller.start()
        try:
            yield hosts
        except BaseException:
            print(hosts.controller.log()[-5000:])
            raise
        finally:
            hosts.controller.close()


def test_the_gate_of_another_host_admits_and_charges_a_job(hosts: TwoHosts) -> None:
    job = hosts.submit_decided(f"{SHELL}sleep 2\n")
    wait_until(lambda: job in hosts.site.charged(), 60)
    assert hosts.site.charged()[job] > 0


def test_the_gate_of_another_host_rejects_a_job_without_funds(hosts: TwoHosts) -> None:
    def is_rejected() -> bool:
        done = hosts.site.tries(TRUE, f"--account={POOR}")
        if done.returncode == 0:
            assert not hosts.has_token(int(done.stdout)), "the gate admitted it"
            return False
        assert f"account {POOR} has" in done.stderr
        return True

    wait_until(is_rejected, 60)


def test_the_policy_decides_while_the_other_host_is_away(hosts: TwoHosts) -> None:
    site = hosts.site
    hosts.submit_decided(SLEEP)
    timeouts, answers = hosts.count_timeouts(), hosts.count_by_policy()
    wait_s = TIMEOUT_MS / 1000 * TIMEOUT_SHARE
    with hosts.frozen():
        jobs = {hosts.submit() for _ in range(5)}
        # Three lists in a row without a reply: from then on nobody waits.
        began = time.monotonic()
        jobs |= set(site.storm(32, SLEEP, "--time=5", at_once=32))
        assert time.monotonic() - began < 32 * wait_s, "each job waited for the other host"
    site.kill_daemon()
    jobs |= {hosts.submit() for _ in range(5)}
    assert len(jobs) == 42
    assert not any(map(hosts.has_token, jobs))
    assert hosts.count_by_policy() - answers == 42
    assert hosts.count_timeouts() == timeouts, "slurmctld waited for its own host's gate"
    site.start()
    hosts.submit_decided(SLEEP)
    wait_until(lambda: jobs <= hosts.get_held_jobs(), 90)
    site.as_root("scancel", "--user", site.user)
    site.until_idle()


def test_a_certificate_of_another_clusters_host_gets_no_decision(hosts: TwoHosts) -> None:
    hosts.submit_decided(TRUE)
    with hosts.other_certificate():
        reason = (
            f"the certificate is for {OTHER}, which is none of the 'controllers' of cluster "
            f"'{hosts.site.name}'"
        )
        jobs: list[int] = []

        def is_logged() -> bool:
            # The policy decides without a question until the connection is open.
            jobs.append(hosts.submit())
            return reason in hosts.controller.log()

        wait_until(is_logged, 60)
        assert not any(map(hosts.has_token, jobs))
    hosts.submit_decided(TRUE)
