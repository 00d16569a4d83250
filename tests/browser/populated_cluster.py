"""Cluster with jobs, states and charges, for tests in a browser."""

from typing import Final

from browser_user import Person
from job_submission import wait_until
from playwright.sync_api import Browser
from web_cluster import CLUSTER, JobSite

TOKEN = "hush-hush-hush"
"""A secret in a job's environment."""
DEPOSIT: Final = {"kind": "deposit", "amount": "9", "reason": "x"}
"""Deposit form of an account's page, for users who may deposit."""
OPERATORS_FORMS: Final = (
    ("/cluster/box/change", {"verb": "drain", "nodes": "node1", "reason": "x", "sure": "yes"}),
    ("/rules/switch", {"rule": "x", "to": "off"}),
)
"""Forms for operators: address and fields of each."""


class Stage:
    """Cluster with some history.

    Attributes:
        site: The cluster and the pages.
        browser: The browser.
        worked: A completed job of ada.
        failed: A failed job of the same name.
        waits: A pending job.
        array: An array.
    """

    def __init__(self, site: JobSite, browser: Browser, *, reason: str = "bad <b>DIMM</b>") -> None:
        self.site = site
        self.browser = browser
        ask = site.web.daemon.ask
        ask("bank", "account", "change", "physics", "--owners", "grace", "--reason", "test")
        work = "srun -n2 bash -c 'for i in $(seq 50000); do :; done; sleep 1'"
        env = {"API_TOKEN": TOKEN}
        self.worked = site.submit(work, job_name="train", ntasks=2, env=env)
        site.until(self.worked, "COMPLETED")
        self.failed = site.submit("echo other\nexit 3", job_name="train", time="5")
        site.until(self.failed, "FAILED")
        self.array = site.submit("sleep 0", array="1-4", job_name="sweep")
        for number in range(60):
            site.submit("sleep 0", job_name=f"many{number}", begin="now+1days")
        self.waits = site.submit("sleep 100", job_name="waits", begin="now+1days")
        site.until(self.waits, "PENDING")
        site.cluster.run(
            ["scontrol", "update", "nodename=node2", "state=drain", f"reason={reason}"]
        )
        wait_until(lambda: "node2" in ask("events", "list").stdout)

    def person(self, user: str, **options: object) -> Person:
        """Return a user with a browser window."""
        return Person(self.browser, self.site.web, user, **options)

    @property
    def pages(self) -> tuple[str, ...]:
        """Return the pages of the cluster's jobs, accounts and nodes."""
        job = f"/jobs/{CLUSTER}/{self.worked}"
        return (
            *(job, f"{job}/environment", f"{job}/compare?with={self.failed}"),
            *(f"/jobs/{CLUSTER}/{self.array}_2", "/accounts/physics", "/users/ada"),
            *("/nodes/box/node2", "/accounts/physics/statement?since=2020-01-01"),
        )
