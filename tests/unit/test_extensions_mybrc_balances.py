"""Balances that follow a remote myBRC server, with their age."""

import pwd
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import bank
from harness.bank import BY
from harness.events import NOON
from harness.gate import OPEN_GATE, RunningGate, job, picture, rules, running
from harness.mybrc import ReportingSite
from servers.mybrc import SU, mybrc_settings, serving, token_of, with_money
from servers.mybrc_reference import ReferenceBank
from steward.bank.gate.client import GateClient
from steward.bank.ledger import Account
from steward.core.events import utc_now
from steward.core.waits import Stop
from steward.daemon.consumer_workers import BalancePusher
from steward.extensions.mybrc.balances import MAX_COST, RemoteBalances

ALICE, BOB = "daemon", "bin"
UIDS = {name: pwd.getpwnam(name).pw_uid for name in (ALICE, BOB)}
WORDS = [None, "", "No.", "to account balance 1e9 would exceed account allocation NaN", "x" * 10**6]


class FollowingSite(ReportingSite):
    """Bank whose balances are at the reference server, with a running gate."""

    def __init__(self, directory: Path, url: str, **remote: Any) -> None:
        remote = {"balance_age_s": 1800.0, **remote}
        super().__init__(directory, url, money=0, began=NOON, **remote)
        with self.ledger.transaction() as t:
            for name in UIDS:
                t.accounts.set_user("physics", name, BY, limit=None)
        self.balances = self._open_balances()

    def _open_balances(self) -> RemoteBalances:
        link = GateClient(self.settings.state_dir)
        return RemoteBalances(
            self.settings, self.ledger, link, BalancePusher(self.ledger, link).push, utc_now
        )

    def follow(self, rounds: int = 1) -> None:
        """Update the balances this many times."""
        for _ in range(rounds):
            self.balances.close()
            self.balances = self._open_balances()
            self.balances.poll_once(Stop(), lambda: None)

    def close(self) -> None:
        self.balances.close()
        super().close()


@pytest.fixture
def reference() -> ReferenceBank:
    return ReferenceBank()


@pytest.fixture
def url(reference: ReferenceBank) -> Iterator[str]:
    with reference.serving() as server:
        yield f"http://127.0.0.1:{server.server_port}/api"


@pytest.fixture
def site(tmp_path: Path, url: str) -> Iterator[FollowingSite]:
    made = FollowingSite(tmp_path, url)
    yield made
    made.close()


@pytest.mark.parametrize("words", WORDS)
def test_a_balance_follows_whatever_the_words(
    site: FollowingSite, reference: ReferenceBank, words: str | None
) -> None:
    reference.words = words
    for used, most, left in (("30", "100", 70), ("30.01", "5000", 4969.99), ("7", "7", 0)):
        reference.usage, reference.allocation = Decimal(used), Decimal(most)
        site.follow()
        assert bank.balance(site) == round(left * SU)
        assert site.ledger.check() == []
    reference.allocation = None
    site.follow()
    assert bank.balance(site) == MAX_COST


def test_the_server_may_be_another_steward(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    settings = mybrc_settings(there)
    with_money(settings, "physics", amount=321_090_000)
    with serving(settings) as server:
        site = FollowingSite(tmp_path, f"{server}/mybrc-rest")
        (tmp_path / "token").write_text(token_of(server))
        site.follow()
        assert bank.balance(site) == 321_090_000
        site.close()


def test_few_questions_are_asked_where_little_has_changed(
    tmp_path: Path, url: str, reference: ReferenceBank
) -> None:
    site = FollowingSite(tmp_path, url, balance_age_s=0.03)
    reference.words = "No."
    site.balances.poll_once(Stop(), lambda: None)
    first = len(reference.questions)
    assert first <= 2 * 40
    for used, most in ((0, 6), (0, 6), (Decimal("3.17"), 40)):
        reference.usage += used
        before = len(reference.questions)
        while len(reference.questions) == before:
            site.balances.poll_once(Stop(), lambda: None)
        assert len(reference.questions) - before <= most
    assert bank.balance(site) == round(996.83 * SU)
    site.close()


@pytest.mark.parametrize("is_sent", [True, False], ids=["told", "not told yet"])
def test_what_is_held_or_charged_is_taken_off_once(
    site: FollowingSite, reference: ReferenceBank, is_sent: bool
) -> None:
    waits, runs, ends = bank.life(1)
    site.follow()
    assert bank.balance(site) == 1000 * SU
    site.show([waits])
    site.follow()
    assert bank.balance(site) == 1000 * SU
    site.show([runs])
    assert reference.usage == Decimal("51.67")
    site.follow()
    # The gate subtracts the hold itself.
    assert bank.balance(site) == 1000 * SU
    reference.usage += 100
    site.follow()
    assert bank.balance(site) == 900 * SU
    site.show([ends], is_sent=is_sent)
    assert bank.balance(site) == 898 * SU
    site.follow()
    # Until it is reported, the server counts the hold, too: rather too little available than too
    # much.
    assert bank.balance(site) == 898 * SU
    site.show([])
    assert reference.usage == 102
    site.follow()
    assert bank.balance(site) == 898 * SU


def test_a_charge_while_the_server_is_asked_makes_the_answer_void(
    site: FollowingSite, reference: ReferenceBank
) -> None:
    def charge() -> None:
        reference.asked = lambda: None
        bank.feed(site, bank.life(1))
        site.show([])
        with site.ledger.transaction() as t:
            t.transfers.adjust("physics", -5 * SU, BY)

    site.follow()
    reference.usage, reference.asked = Decimal(400), charge
    site.follow()
    assert bank.balance(site) == 993 * SU
    site.follow()
    assert bank.balance(site) == 598 * SU


def test_charges_while_the_server_is_asked_delay_nothing(
    site: FollowingSite, reference: ReferenceBank
) -> None:
    waits, runs, ends = bank.life(1)
    site.follow()
    site.show([waits, runs])

    def charge() -> None:
        reference.asked = lambda: None
        site.show([ends], is_sent=False)

    reference.usage += 400
    reference.asked = charge
    site.follow()
    assert bank.balance(site) == 598 * SU


def test_a_user_may_have_less_than_the_account(
    site: FollowingSite, reference: ReferenceBank
) -> None:
    with running(with_policy(site, "deny")) as gate:
        gate.link.send_rules(rules("enforce"))
        gate.link.send_model(picture())
        site.follow()
        gate.wait_open()

        def free(user: str) -> int:
            asked = job(4, uid=UIDS[user], account="physics")
            verdicts = [
                gate.link.get_verdict("c", asked, user, cost=cost * SU).ok for cost in (4, 40, 400)
            ]
            return sum(verdicts)

        assert (free(ALICE), free(BOB)) == (3, 3)
        reference.users = {str(UIDS[ALICE]): (Decimal(10), Decimal(50))}
        site.follow()
        assert (free(ALICE), free(BOB)) == (2, 3)
        reference.strangers.add(str(UIDS[BOB]))
        site.follow()
        assert (free(ALICE), free(BOB)) == (2, 0)
        reference.users, reference.strangers = {}, set()
        site.follow()
        assert (free(ALICE), free(BOB)) == (3, 3)


def with_policy(site: FollowingSite, policy: Any) -> Any:
    return msgspec.structs.replace(
        site.settings, gate=msgspec.structs.replace(OPEN_GATE, policy=policy)
    )


def open_gate(gate: RunningGate) -> None:
    gate.link.send_rules(rules("enforce"))
    gate.link.send_model(picture())


def test_the_gate_decides_by_the_servers_balance_and_says_how_old_it_is(
    site: FollowingSite, reference: ReferenceBank
) -> None:
    reference.usage = Decimal(950)
    with running(with_policy(site, "deny")) as gate:
        open_gate(gate)
        site.follow()
        gate.wait_open()
        dear = job(59, account="physics")
        refused = gate.ask(dear)
        assert not refused["ok"]
        assert "account physics has 50.00 SU available" in refused["say"]
        assert "The balance is from 127.0.0.1, queried on " in refused["say"]
        assert gate.ask(job(39, account="physics"))["ok"]
        means = gate.link.get_means("physics")
        assert (means.balance, means.held) == (50 * SU, 40 * SU)
        assert 0 <= time.time() - means.at_us / 1e6 < 60
        # A hold here that the server does not know stays held.
        site.follow()
        assert gate.link.get_means("physics").available == 10 * SU


@pytest.mark.parametrize("policy", ["allow", "deny"])
def test_the_policy_decides_where_the_server_has_been_away_for_too_long(
    tmp_path: Path, reference: ReferenceBank, policy: str
) -> None:
    with reference.serving() as server:
        site = FollowingSite(
            tmp_path, f"http://127.0.0.1:{server.server_port}/api", balance_age_s=2.0
        )
        reference.usage = Decimal(950)
        with running(with_policy(site, policy)) as gate:
            open_gate(gate)
            BalancePusher(site.ledger, gate.link).push()
            gate.wait_open()
            dear = job(59, account="physics")
            never = gate.ask(dear)
            assert never["ok"] == (policy == "allow")
            assert policy == "allow" or "was not queried yet" in never["say"]
            server.shutdown()
            server.server_close()
            site.follow(3)
            away = gate.ask(dear)
            assert away["ok"] == (policy == "allow")
        site.close()


def test_a_restart_while_the_server_is_away_forgets_no_figure(
    tmp_path: Path, reference: ReferenceBank
) -> None:
    with reference.serving() as server:
        site = FollowingSite(tmp_path, f"http://127.0.0.1:{server.server_port}/api")
        reference.usage = Decimal(950)
        site.follow()
        server.shutdown()
        server.server_close()
        with running(with_policy(site, "deny")) as gate:
            open_gate(gate)
            BalancePusher(site.ledger, gate.link).push()
            gate.wait_open()
            site.follow()
            site.balances.poll_once(Stop(), lambda: None)
            assert "has 50.00 SU available" in gate.ask(job(59, account="physics"))["say"]
            assert gate.ask(job(39, account="physics"))["ok"]
        site.close()


def test_accounts_that_draw_on_another_or_are_closed_are_not_asked_for(
    site: FollowingSite, reference: ReferenceBank
) -> None:
    with site.ledger.transaction() as t:
        t.accounts.create(Account(name="lab", parent="physics", parent_pays=True), BY)
        t.accounts.create(Account(name="old", closed=True), BY)
        for name in ("lab", "old"):
            t.accounts.set_user(name, ALICE, BY, limit=None)
        t.accounts.create(Account(name="unknown-there"), BY)
        t.accounts.set_user("unknown-there", ALICE, BY, limit=None)
    for _ in range(4):
        site.balances.poll_once(Stop(), lambda: None)
    assert set(reference.questions) == {"physics", "unknown-there"}
    assert bank.balance(site) == 1000 * SU
    with site.ledger.reading() as t:
        assert t.queries.get_balance("unknown-there") == 0


@pytest.mark.parametrize("words", [7, None, ["x"], {"a": 1}])
def test_an_answer_that_is_none_changes_nothing(
    site: FollowingSite, reference: ReferenceBank, caplog: pytest.LogCaptureFixture, words: Any
) -> None:
    site.follow()
    reference.usage = Decimal(500)
    reference.words = words if words is not None else {"null": None}
    site.follow()
    assert bank.balance(site) == 1000 * SU
    assert "[bank.remote] url" in caplog.text
