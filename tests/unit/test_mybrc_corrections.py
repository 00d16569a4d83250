"""What is charged anew though no run ended reaches a real server elsewhere, as it is in the end."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from harness.bank import BY, HOUR, BankSite, rate
from harness.events import NOON
from servers.mybrc import balance, client_of, mybrc_settings, serving, token_of, with_money
from steward.bank.backfilling import backfill
from steward.bank.ledger import Account
from steward.bank.reconciling import reconcile
from steward.bank.records import Charge, Hold
from steward.bank.settings import BankSettings
from steward.core.config import Settings
from steward.core.events import RUN_END, Event
from steward.core.waiting import Stop
from steward.extensions.mybrc.noticing import Owners
from steward.extensions.mybrc.outgoing import KIND
from steward.extensions.mybrc.passing import Passing
from steward.extensions.mybrc.relaying import relay
from steward.extensions.mybrc.settings import RemoteBankSettings
from steward.jobs import Jobs
from steward.slurm.people import People

FULL = 1000 * HOUR


class Site(BankSite):
    """A bank, and the server elsewhere that it passes on to.

    Args:
        directory: For the states of both.
        there: The server elsewhere.
        url: Where that is.
    """

    def __init__(self, directory: Path, there: Settings, url: str) -> None:
        self.there = there
        self._url = url
        token = directory / "token"
        token.write_text(token_of(url))
        remote = RemoteBankSettings(url=f"{url}/api", token_file=str(token), timeout_s=20.0)
        super().__init__(directory / "here", bank=BankSettings(enabled=True, remote=remote))
        with self.ledger.transaction() as t:
            t.accounts.create(Account(name="chemistry"), BY)
        self.began(NOON - timedelta(hours=1))
        self._passing = Passing(self.settings, self.ledger, lambda: self.now)

    def seen(self, job_id: int, partition: str = "debug", held: int = 40 * HOUR) -> None:
        """A job that was seen to run, held for, and told."""
        self.feed(self.life(job_id, partition=partition)[:2])
        events = self.journal[-1:]
        holds = {
            ("c1", job_id): Hold(
                id="h", cluster="c1", job_id=job_id, account="physics", amount=held, created_us=1
            )
        }
        self._relay(events, holds)

    def ended(self, job_id: int, partition: str = "debug") -> None:
        """A job that is over, and was told as far as it is charged."""
        said = self.feed(self.life(job_id, partition=partition))
        self._relay([one for one in said if one.kind == RUN_END], {})

    def _relay(self, events: list[Event], holds: dict[tuple[str, int], Hold]) -> None:
        assert events
        with self.ledger.transaction() as t:
            shown = [(one, holds.get((one.cluster, one.body.record.job_id))) for one in events]
            relay(t, shown, NOON - timedelta(hours=1))

    def reconcile(self) -> None:
        """Compare and correct, as the minute's turn and ``steward bank reconcile`` do."""
        reconcile(
            *(self.settings, self.ledger, None, "c1", NOON - timedelta(hours=1)),
            is_dry=False,
            now=self.now,
        )

    def charge_of(self, job_id: int) -> Charge:
        with self.ledger.reading() as t:
            (row,) = t.charges.of_job("c1", job_id)
        return row.charge

    def post(self, charge: Charge, who: str = "root") -> None:
        """Somebody charges something."""
        with self.ledger.transaction() as t:
            t.charges.charge(charge, msgspec.structs.replace(BY, who=who))

    def send(self) -> int:
        """Tell what is due; how much waits afterwards."""
        self._passing.send_once(Stop(), lambda: None)
        with self.ledger.reading() as t:
            return t.outbox.waiting(KIND)

    def start_again(self) -> None:
        """End what sends, and start it anew."""
        self._passing.close()
        self._passing = Passing(self.settings, self.ledger, lambda: self.now)

    def told(self, job_id: int) -> tuple[str, str]:
        """What the server elsewhere has of a job: its amount, and its state."""
        with client_of(self._url, token_of(self._url)) as client:
            found = client.get("/jobs/").json()["results"]
        (job,) = [one for one in found if one["jobslurmid"] == str(job_id)]
        return job["amount"], job["jobstatus"]

    def close(self) -> None:
        self._passing.close()
        super().close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    directory = tmp_path / "there"
    directory.mkdir()
    there = mybrc_settings(directory)
    with_money(there, "physics", "chemistry")
    with serving(there) as url:
        made = Site(tmp_path, there, url)
        yield made
        made.close()


def test_what_has_no_rate_yet_keeps_its_hold_there_until_it_is_charged(site: Site) -> None:
    site.seen(1, "new")
    site.ended(1, "new")
    site.reconcile()
    assert site.send() == 0
    assert site.told(1) == ("40.00", "RUNNING")
    with site.ledger.transaction() as t:
        t.rates.add(rate("new", 3 * HOUR), BY)
    site.reconcile()
    assert site.send() == 0
    assert site.told(1) == ("6.00", "COMPLETED")
    assert balance(site.there) == site.balance() == FULL - 6 * HOUR


def test_a_correction_is_told(site: Site) -> None:
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
    assert balance(site.there) == site.balance() == FULL - 2 * HOUR


def test_a_refund_is_told(site: Site) -> None:
    site.ended(1)
    site.reconcile()
    site.send()
    with site.ledger.transaction() as t:
        t.charges.refund(site.charge_of(1).key, BY, HOUR // 2)
    assert site.send() == 0
    assert balance(site.there) == site.balance() == FULL - HOUR * 3 // 2


def test_a_correction_waits_until_its_users_uid_is_known(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.ended(1)
    site.reconcile()
    site.send()
    charge = site.charge_of(1)
    uid = Owners(site.settings.state_dir).uid(charge)
    assert uid is not None
    # The directory of users is away, and jobs.db has forgotten the job.
    directory: dict[str, int] = {}
    monkeypatch.setattr(People, "uid", lambda _, user: directory.get(user))
    monkeypatch.setattr(Jobs, "run_facts", lambda *_: [])
    site.post(msgspec.structs.replace(charge, user="ada", amount=9 * HOUR))
    assert site.send() == 1
    directory["ada"] = uid
    site.now += timedelta(minutes=2)
    assert site.send() == 0
    assert balance(site.there) == site.balance() == FULL - 9 * HOUR


def test_who_does_not_pay_any_more_has_it_back_there(site: Site) -> None:
    site.ended(1)
    site.reconcile()
    site.send()
    site.post(msgspec.structs.replace(site.charge_of(1), account="chemistry"))
    # A job there has one account for ever, so that the new one's part waits.
    assert site.send() == 1
    assert balance(site.there) == site.balance() == FULL


def test_every_run_counts_though_one_alone_was_corrected(site: Site) -> None:
    site.ended(1)
    site.reconcile()
    first = site.charge_of(1)
    site.post(msgspec.structs.replace(first, restarts=1, amount=7 * HOUR), who="bank")
    with site.ledger.transaction() as t:
        t.charges.refund(first.key, BY)
    site.send()
    assert site.told(1)[0] == "7.00"


def test_corrections_while_nobody_sends_are_told_later_and_once(site: Site) -> None:
    site.ended(1)
    site.reconcile()
    site.send()
    site.post(msgspec.structs.replace(site.charge_of(1), amount=9 * HOUR))
    site.start_again()
    assert site.send() == 0
    assert balance(site.there) == site.balance() == FULL - 9 * HOUR
    site.start_again()
    with site.ledger.reading() as t:
        assert t.charges.changed(0)
        told = t.mark("bank.corrections")
    site.send()
    with site.ledger.reading() as t:
        assert t.mark("bank.corrections") == told


def test_what_a_backfill_charges_is_not_told(site: Site) -> None:
    site.began(NOON + timedelta(hours=2))
    site.feed(site.life(1))
    since, until = NOON - timedelta(hours=1), NOON + timedelta(hours=5)
    done = backfill(*(site.settings, site.ledger, "c1", since, until), is_dry=False, now=site.now)
    assert done.charges == 1
    assert site.send() == 0
    assert balance(site.there) == FULL
