"""Corrected charges reach a real myBRC server in their final state."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from harness import bank
from harness.bank import BY, HOUR, rate
from harness.events import NOON
from harness.mybrc import ReportingSite
from servers.mybrc import balance, client_of, mybrc_settings, serving, token_of, with_money
from steward.bank.backfill import backfill_cluster
from steward.bank.ledger import Account
from steward.bank.records import Charge
from steward.core.config import Settings
from steward.core.events import RUN_END
from steward.extensions.mybrc.outbox import MYBRC_KIND, JobOwners
from steward.jobs import Jobs
from steward.slurm.users import NameResolver

FULL = 1000 * HOUR


class CorrectedSite(ReportingSite):
    """Bank, and the server to which it reports.

    Args:
        directory: Directory of both.
        there: The server.
        url: URL of the server.
    """

    def __init__(self, directory: Path, there: Settings, url: str) -> None:
        super().__init__(directory, f"{url}/api", token=token_of(url))
        self.there = there
        self._url = url
        with self.ledger.transaction() as t:
            t.accounts.create(Account(name="chemistry"), BY)

    def seen(self, job_id: int, partition: str = "debug", held: int = 40 * HOUR) -> None:
        """Start a job with an SU hold, and queue its report."""
        waits, runs, _ = bank.life(job_id, partition=partition)
        bank.feed(self, [waits, runs])
        self.relay([runs], held)

    def ended(self, job_id: int, partition: str = "debug") -> None:
        """End a job, and queue its report."""
        said = bank.feed(self, bank.life(job_id, partition=partition))
        self.relay([one for one in said if one.kind == RUN_END])

    def charge_of(self, job_id: int) -> Charge:
        with self.ledger.reading() as t:
            (row,) = t.charges.list_of_job("c1", job_id)
        return row.charge

    def post(self, charge: Charge, who: str = "root") -> None:
        """Post a charge of another source."""
        with self.ledger.transaction() as t:
            t.charges.post(charge, msgspec.structs.replace(BY, who=who))

    def waiting(self) -> int:
        """Return the number of waiting messages after the due ones were sent."""
        self.send()
        with self.ledger.reading() as t:
            return t.outbox.count_pending(MYBRC_KIND)

    def told(self, job_id: int) -> tuple[str, str]:
        """Return amount and state of a job at the remote server."""
        with client_of(self._url, token_of(self._url)) as client:
            found = client.get("/jobs/").json()["results"]
        (job,) = [one for one in found if one["jobslurmid"] == str(job_id)]
        return job["amount"], job["jobstatus"]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[CorrectedSite]:
    directory = tmp_path / "there"
    directory.mkdir()
    there = mybrc_settings(directory)
    with_money(there, "physics", "chemistry")
    with serving(there) as url:
        made = CorrectedSite(tmp_path, there, url)
        yield made
        made.close()


def test_what_has_no_rate_yet_keeps_its_hold_there_until_it_is_charged(site: CorrectedSite) -> None:
    site.seen(1, "new")
    site.ended(1, "new")
    site.reconcile()
    assert site.waiting() == 0
    assert site.told(1) == ("40.00", "RUNNING")
    with site.ledger.transaction() as t:
        t.rates.add(rate("new", 3 * HOUR), BY)
    site.reconcile()
    assert site.waiting() == 0
    assert site.told(1) == ("6.00", "COMPLETED")
    assert balance(site.there) == bank.balance(site) == FULL - 6 * HOUR


def test_a_correction_is_told(site: CorrectedSite) -> None:
    site.seen(1)
    site.ended(1)
    site.reconcile()
    site.send()
    assert site.told(1) == ("2.00", "COMPLETED")
    wrong = msgspec.structs.replace(site.charge_of(1), amount=5 * HOUR, facts="")
    site.post(wrong, who="bank")
    site.send()
    assert balance(site.there) == FULL - 5 * HOUR
    site.reconcile()
    site.send()
    assert balance(site.there) == bank.balance(site) == FULL - 2 * HOUR


def test_a_refund_is_told(site: CorrectedSite) -> None:
    site.ended(1)
    site.reconcile()
    site.send()
    with site.ledger.transaction() as t:
        t.charges.refund(site.charge_of(1).key, BY, HOUR // 2)
    assert site.waiting() == 0
    assert balance(site.there) == bank.balance(site) == FULL - HOUR * 3 // 2


def test_a_correction_waits_until_its_users_uid_is_known(
    site: CorrectedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.ended(1)
    site.reconcile()
    site.send()
    charge = site.charge_of(1)
    uid = JobOwners(site.settings.state_dir).find_uid(charge)
    assert uid is not None
    # The directory of users is away, and jobs.db has forgotten the job.
    directory: dict[str, int] = {}
    monkeypatch.setattr(NameResolver, "uid", lambda _, user: directory.get(user))
    monkeypatch.setattr(Jobs, "list_run_events", lambda *_: [])
    site.post(msgspec.structs.replace(charge, user="ada", amount=9 * HOUR))
    assert site.waiting() == 1
    directory["ada"] = uid
    site.now += timedelta(minutes=2)
    assert site.waiting() == 0
    assert balance(site.there) == bank.balance(site) == FULL - 9 * HOUR


def test_who_does_not_pay_any_more_has_it_back_there(site: CorrectedSite) -> None:
    site.ended(1)
    site.reconcile()
    site.send()
    site.post(msgspec.structs.replace(site.charge_of(1), account="chemistry"))
    # A job there has one account for ever, so that the new one's part waits.
    assert site.waiting() == 1
    assert balance(site.there) == bank.balance(site) == FULL


def test_every_run_counts_though_one_alone_was_corrected(site: CorrectedSite) -> None:
    site.ended(1)
    site.reconcile()
    first = site.charge_of(1)
    site.post(msgspec.structs.replace(first, restarts=1, amount=7 * HOUR), who="bank")
    with site.ledger.transaction() as t:
        t.charges.refund(first.key, BY)
    site.send()
    assert site.told(1)[0] == "7.00"


def test_corrections_while_nobody_sends_are_told_later_and_once(site: CorrectedSite) -> None:
    site.ended(1)
    site.reconcile()
    site.send()
    site.post(msgspec.structs.replace(site.charge_of(1), amount=9 * HOUR))
    site.restart()
    assert site.waiting() == 0
    assert balance(site.there) == bank.balance(site) == FULL - 9 * HOUR
    site.restart()
    with site.ledger.reading() as t:
        assert t.charges.list_changed(0)
        told = t.read_mark("bank.corrections")
    site.send()
    with site.ledger.reading() as t:
        assert t.read_mark("bank.corrections") == told


def test_what_a_backfill_charges_is_not_told(site: CorrectedSite) -> None:
    bank.begin(site, NOON + timedelta(hours=2))
    bank.feed(site, bank.life(1))
    since, until = NOON - timedelta(hours=1), NOON + timedelta(hours=5)
    done = backfill_cluster(
        *(site.settings, site.ledger, "c1", since, until), is_dry=False, now=site.now
    )
    assert done.charges == 1
    assert site.waiting() == 0
    assert balance(site.there) == FULL
