"""Storms of submissions against an account that can pay for some of them only."""

from pathlib import Path

import expected_costs
from bank_cluster import ACCOUNTS, SHELL, BankSite
from job_submission import wait_until

from steward.bank.ledger import Authorship, open_ledger

_POOR, _RICH = ACCOUNTS[:2]


class Storm:
    """Jobs that wait for a file before they end, so that no SU hold is released meanwhile.

    Args:
        site: Site of the submissions; its account ``physics`` is empty at first, and
            ``chemistry`` has plenty.
        can_pay: Number of jobs for which ``physics`` will be able to pay.
    """

    def __init__(self, site: BankSite, can_pay: int) -> None:
        self.site = site
        self.go = Path(f"{site.cluster.directory}/go")
        self.script = f"{SHELL}while [ ! -e {self.go} ]; do sleep 0.3; done\n"
        self.price = self._price()
        self.deposit = can_pay * self.price
        self._pay_in()

    def _price(self) -> int:
        """Return the SU hold of one of these jobs."""
        job = self.site.submit(self.script, account=_RICH, time="10")
        found = self.site.link.list_holds(account=_RICH)
        self.site.as_user("scancel", str(job))
        assert len(found) == 1, found
        assert found[0].amount > 0
        return found[0].amount

    def _pay_in(self) -> None:
        ledger = open_ledger(self.site.settings)
        try:
            with ledger.transaction() as t:
                t.transfers.deposit(
                    _POOR, self.deposit, Authorship(who="root", why="for the storm")
                )
        finally:
            ledger.close()
        wait_until(lambda: self.site.link.get_means(_POOR).available == self.deposit, 30)

    def submit(self, count: int, site: BankSite | None = None) -> list[int]:
        """Submit jobs, 64 at a time; return the ids of the admitted ones."""
        return (site or self.site).storm(count, self.script, "--time=10")

    def end(self, jobs: set[int], *others: BankSite) -> None:
        """Let the jobs end, and check that the account paid exactly for them."""
        self.go.touch()
        sites = (self.site, *others)
        for site in sites:
            site.until_idle(300)
        self.site.until_charged(jobs, 120)
        ran = sum(
            amount
            for site in sites
            for job, amount in expected_costs.costs(expected_costs.by_slurmctld(site)).items()
        )
        rich = sum(charge for charge in self._spent_by_the_rich())
        wait_until(lambda: self.site.balance(_POOR) == self.deposit - ran + rich, 60)
        assert self.site.findings() == []

    def _spent_by_the_rich(self) -> list[int]:
        ledger = open_ledger(self.site.settings)
        try:
            with ledger.reading() as t:
                return [line.amount for line in t.queries.sum_usage(("account",), accounts=[_RICH])]
        finally:
            ledger.close()
