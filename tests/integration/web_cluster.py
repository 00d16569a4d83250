"""Cluster for the web pages: jobs with steps and scripts, node states and a bank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from accounting_cluster import BookedSite, spec_of
from bank_cluster import RATE
from job_submission import submit_to, wait_until
from sandboxes import passable_directory
from web_site import USERS, WebSite

from steward.bank.ledger import Account, Authorship, open_ledger
from steward.bank.money import MICRO
from steward.bank.settings import BankSettings
from steward.capture.settings import SensorSettings
from steward.jobs import Jobs, database_path
from steward.sandbox import Sandbox

CLUSTER = "box"
PATIENCE_S = 90


class JobSite:
    """Pages, and the cluster that they show.

    Args:
        cluster: Cluster of the daemon.
        web: Daemon and pages.
    """

    def __init__(self, cluster: Sandbox, web: WebSite) -> None:
        self.cluster = cluster
        self.web = web

    def submit(self, script: str, *, user: str = "ada", **options: Any) -> int:
        """Submit a batch script; return the job's id."""
        options.setdefault("output", "/dev/null")
        options.setdefault("account", "physics")
        return submit_to(self.cluster, f"#!/bin/bash\n{script}\n", user=user, **options)

    def state(self, job: object) -> str:
        """Return Steward's state of a job; "" for none."""
        books = Jobs(database_path(str(self.web.daemon.state)))
        try:
            found = books.find(str(job), CLUSTER)
        finally:
            books.close()
        return found[0].record.state if found else ""

    def until(self, job: object, *states: str) -> None:
        """Wait until Steward knows a job to be in one of these states."""
        wait_until(lambda: self.state(job) in states, PATIENCE_S)


@contextmanager
def job_site(
    slurm: str, *, cluster_options: dict[str, Any] | None = None, **web: Any
) -> Iterator[JobSite]:
    """Bring up the site, and shut it down.

    Args:
        slurm: Version of Slurm; the installed one if empty.
        cluster_options: Options of the cluster's SandboxSpec that differ.
        web: Settings of [web] that differ.
    """
    chosen = {"accounting": False, "user_names": USERS, "cpus": 8, **(cluster_options or {})}
    with passable_directory() as path:
        spec = spec_of(f"{path}/sandbox", slurm, **chosen)
        with Sandbox.up(spec, report=print) as cluster:
            books = BookedSite(cluster)
            home = books.daemon.home
            settings = {
                "nodes": books.daemon.settings.nodes,
                "cluster": books.daemon.settings.cluster,
                "bank": BankSettings(enabled=True, reconcile_s=5.0),
                "sensor": SensorSettings(
                    enabled=True,
                    helper="",
                    interval_s=0.5,
                    secret_file=f"{home}/trigger.secret",
                ),
            }
            site = WebSite(cluster, Path(home), settings=settings, web=web)
            books.daemon = site.daemon
            _open_bank(site)
            books.install_plugin()
            try:
                with site:
                    books.start_agent()
                    yield JobSite(cluster, site)
            finally:
                books.kill_agent()


def _open_bank(site: WebSite) -> None:
    site.daemon.state.mkdir(mode=0o700, exist_ok=True)
    by = Authorship(who="root", why="the tests' own")
    ledger = open_ledger(site.daemon.settings)
    try:
        with ledger.transaction() as t:
            t.rates.add(msgspec.structs.replace(RATE, cluster=CLUSTER), by)
            for account in ("physics", "chemistry"):
                t.accounts.create(Account(name=account), by)
                t.transfers.deposit(account, 1000 * MICRO, by)
    finally:
        ledger.close()
