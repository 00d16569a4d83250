"""Submit checks of the myBRC API ask the gate, so that holds count."""

import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from harness.gate import OPEN_GATE, RunningGate, account, job, rules, running
from servers.mybrc import BY, SU, mybrc_settings, with_money
from steward.bank.gate.client import GateClient
from steward.bank.gate.policy import find_mode
from steward.bank.ledger import Account, open_ledger
from steward.bank.records import ModeRule, UserBooks
from steward.bank.settings import BankSettings
from steward.core.config import Settings
from steward.daemon.consumer_workers import BalancePusher
from steward.extensions.mybrc.services import SubmitChecks
from steward.extensions.mybrc.wire import ApiError
from steward.slurm.settings import ClusterSettings
from steward.slurm.users import NameResolver

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger


@pytest.fixture
def site(tmp_path: Path) -> Settings:
    directory = tmp_path / "state"
    directory.mkdir()
    settings = mybrc_settings(directory, 1, gate=OPEN_GATE)
    with_money(settings, "physics")
    return settings


@pytest.fixture
def ledger(site: Settings) -> Iterator["Ledger"]:
    opened = open_ledger(site)
    yield opened
    opened.close()


def affording(settings: Settings, ledger: "Ledger") -> SubmitChecks:
    return SubmitChecks(settings, "c", ledger, GateClient(settings.state_dir, 5.0), NameResolver())


def can(settings: Settings, ledger: "Ledger", cost: str, account: str = "physics") -> bool:
    return affording(settings, ledger).check_job(cost, "4000001", account).success


@pytest.fixture
def gate(site: Settings) -> Iterator[RunningGate]:
    with running(site) as started:
        yield started


def test_what_is_held_cannot_be_had(gate: RunningGate, site: Settings, ledger: "Ledger") -> None:
    BalancePusher(ledger, gate.link).push()
    assert can(site, ledger, "1000.00")
    assert not can(site, ledger, "1000.01")
    gate.link.reserve("physics", 400 * SU, "a test")
    assert can(site, ledger, "600")
    answer = affording(site, ledger).check_job("600.01", "4000001", "PHYSICS")
    assert not answer.success
    assert "but account physics has 600.00 SU available" in str(answer.message)
    assert "400.00 SU held for other jobs" in str(answer.message)


def test_what_is_charged_is_known_to_the_gate_at_once(
    gate: RunningGate, site: Settings, ledger: "Ledger"
) -> None:
    pusher = BalancePusher(ledger, gate.link)
    pusher.push()
    for number in range(1, 4):
        with ledger.transaction() as t:
            t.transfers.withdraw("physics", 100 * SU, BY)
        pusher.push()
        assert gate.link.get_means("physics").balance == (1000 - 100 * number) * SU
    # Another gate, which has heard of nothing.
    gate.kill()
    for path in Path(site.state_dir).glob("gate.db*"):
        path.unlink()
    gate.start()
    pusher.push()
    assert gate.link.get_means("physics").balance == 700 * SU


def test_a_gate_that_has_not_been_told_says_no_more_than_the_ledger(
    gate: RunningGate, site: Settings, ledger: "Ledger"
) -> None:
    assert gate.state() is not None
    assert can(site, ledger, "1000")
    assert not can(site, ledger, "1000.01")


def test_without_a_gate_the_ledger_answers_or_the_policy(site: Settings, ledger: "Ledger") -> None:
    assert can(site, ledger, "1000")
    assert not can(site, ledger, "1000.01")
    denying = msgspec.structs.replace(site, gate=msgspec.structs.replace(site.gate, policy="deny"))
    assert not can(denying, ledger, "1")


def test_what_the_gate_refuses_by_any_rule_cannot_be_submitted(
    site: Settings, ledger: "Ledger"
) -> None:
    bank = BankSettings(enabled=True, hold_share=0.3, exempt=("op",))
    quiet = {"c": ClusterSettings(slurm=False)}
    strict = msgspec.structs.replace(site, bank=bank, cluster=quiet)
    asking = affording(strict, ledger)

    def success(cost: str, name: str, uid: int = 1000) -> bool:
        return asking.check_job(cost, str(uid), name).success

    users = (UserBooks(name="bob", limit=20 * SU, spent=5 * SU),)
    with running(strict) as gate:
        gate.tell(
            account("physics", 100, users=users),
            account("lab", 0, number=2, payer="physics", allocations=()),
            account("old", 100, number=3, closed=True),
            account("club", 100, number=4, only_listed=True),
        )
        assert gate.ask(job(24, account="lab"))["ok"], "25 of the 30 that one user may hold"
        for cost, is_ok in ((4, True), (9, False)):
            assert success(f"{cost + 1}", "physics") == is_ok
            assert gate.ask(job(cost, account="physics"))["ok"] == is_ok
        assert success("15", "physics", 1001)
        assert not success("15.01", "physics", 1001), "bob's limit"
        assert success("90", "physics", 1002), "who is exempt is never refused"
        assert not success("1", "old")
        assert not success("1", "club")
        gate.link.send_rules(rules("observe", seq=2))
        watched = asking.check_job("31", "1001", "physics")
        assert watched.success
        assert str(watched.message).startswith("The bank rejects no job in mode observe: Steward: ")
        gate.link.send_rules(msgspec.structs.replace(rules("observe", seq=3), modes=()))
        assert not success("31", "physics", 1001), "nobody has chosen to watch"


def test_who_is_not_listed_and_what_is_closed_without_a_gate(
    site: Settings, ledger: "Ledger"
) -> None:
    def can_daemon(cost: str) -> bool:
        uid = pwd.getpwnam("daemon").pw_uid
        return affording(site, ledger).check_job(cost, str(uid), "club").success

    with ledger.transaction() as t:
        t.accounts.create(Account(name="club", only_listed=True), BY)
        t.transfers.deposit("club", SU, BY)
    assert not can_daemon("1")
    with ledger.transaction() as t:
        t.accounts.set_user("club", "daemon", BY, limit=SU // 2)
    assert can_daemon("0.50")
    assert not can_daemon("0.51")
    with ledger.transaction() as t:
        t.modes.set(ModeRule(mode="off", account="club"), BY)
    assert can_daemon("0.51")


@pytest.mark.parametrize(
    ("bank", "change", "limit"),
    [
        ({}, {}, None),
        ({}, {"credit_limit": 50 * SU}, None),
        ({"hold_share": 0.3}, {}, None),
        ({"hold_share": 0.3}, {"credit_limit": 50 * SU}, 35 * SU),
        ({}, {}, 20 * SU),
        ({"exempt": ("daemon",)}, {}, 20 * SU),
        ({"hold_share": 0.3, "exempt": ("bin",)}, {}, None),
        ({}, {"closed": True}, None),
        ({}, {"only_listed": True}, None),
        ({}, {"only_listed": True}, 20 * SU),
    ],
)
def test_the_ledger_answers_as_the_gate_does_where_nothing_is_held(
    site: Settings,
    ledger: "Ledger",
    bank: dict[str, Any],
    change: dict[str, Any],
    limit: int | None,
) -> None:
    settings = msgspec.structs.replace(site, bank=BankSettings(enabled=True, **bank))
    uids = [pwd.getpwnam(name).pw_uid for name in ("daemon", "bin")] + [0, 4000001]
    with ledger.transaction() as t:
        t.accounts.create(Account(name="lab"), BY)
        t.transfers.deposit("lab", 100 * SU, BY)
        t.accounts.create(Account(name="room", parent="lab", parent_pays=True), BY)
        for name in ("lab", "room"):
            if limit is not None:
                t.accounts.set_user(name, "daemon", BY, limit=limit)
            t.accounts.change(name, BY, **change)

    def answers() -> list[tuple[str, int, int, bool]]:
        asking = affording(settings, ledger)
        return [
            (name, uid, cost, asking.check_job(str(cost), str(uid), name).success)
            for name in ("lab", "room")
            for uid in uids
            for cost in (1, 20, 21, 30, 31, 45, 46, 100, 101, 150, 151)
        ]

    by_ledger = answers()
    with running(settings) as gate:
        BalancePusher(ledger, gate.link).push()
        gate.wait(lambda: bool((state := gate.state()) and state.position))
        assert by_ledger == answers()


def test_an_unknown_account(site: Settings, ledger: "Ledger") -> None:
    for name in ("chemistry", " "):
        with pytest.raises(ApiError):
            can(site, ledger, "1", name)
    lenient = msgspec.structs.replace(
        site, bank=BankSettings(enabled=True, unknown_accounts="allow")
    )
    assert can(lenient, ledger, "1", "chemistry")


@pytest.mark.parametrize(
    ("cost", "user"), [("x", "1"), ("1", "ada"), ("1", "4294967296"), ("1", "")]
)
def test_what_is_no_question(site: Settings, ledger: "Ledger", cost: str, user: str) -> None:
    with pytest.raises(ApiError) as refused:
        affording(site, ledger).check_job(cost, user, "physics")
    assert refused.value.status == 400


def test_the_mode_that_names_most_goes_first() -> None:
    rules = (
        ModeRule(mode="enforce"),
        ModeRule(mode="observe", cluster="c"),
        ModeRule(mode="off", cluster="d"),
        ModeRule(mode="enforce", cluster="c", partition="long"),
        ModeRule(mode="off", account="physics"),
    )
    assert find_mode((), "c", "", "physics") is None
    assert find_mode(rules, "c", "", "biology") == "observe"
    assert find_mode(rules, "c", "long", "biology") == "enforce"
    assert find_mode(rules, "e", "", "biology") == "enforce"
    assert find_mode(rules, "c", "long", "physics") == "off"
