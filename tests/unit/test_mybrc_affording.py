"""Whether a job can be submitted is asked of the gate, so that what is held counts."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from gate_process import RunningGate, running, state_dir

from servers.mybrc import BY, SU, mybrc_settings, with_money
from steward.bank.gate.link import GateLink
from steward.bank.ledger import open_ledger
from steward.bank.mybrc.affording import Affording, mode_of
from steward.bank.mybrc.errors import ApiError
from steward.bank.records import ModeRule
from steward.config import BankSettings, GateSettings, Settings
from steward.daemon.mybrc import Pusher
from steward.slurm.people import People

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Ledger


@pytest.fixture
def site(tmp_path: Path) -> Settings:
    directory = Path(state_dir(tmp_path))
    gate = GateSettings(
        socket=str(directory / "plugin.sock"),
        off_switch=str(directory / "off"),
        plugin_conf=str(directory / "gate.conf"),
    )
    settings = mybrc_settings(directory, 1, gate=gate)
    with_money(settings, "physics")
    return settings


@pytest.fixture
def ledger(site: Settings) -> Iterator["Ledger"]:
    opened = open_ledger(site)
    yield opened
    opened.close()


def affording(settings: Settings, ledger: "Ledger") -> Affording:
    return Affording(settings, "c", ledger, GateLink(settings.state_dir, 5.0), People())


def can(settings: Settings, ledger: "Ledger", cost: str, account: str = "physics") -> bool:
    return affording(settings, ledger).answer(cost, "4000001", account).success


@pytest.fixture
def gate(site: Settings) -> Iterator[RunningGate]:
    with running(site) as started:
        yield started


def test_what_is_held_cannot_be_had(gate: RunningGate, site: Settings, ledger: "Ledger") -> None:
    Pusher(ledger, gate.link).push()
    assert can(site, ledger, "1000.00")
    assert not can(site, ledger, "1000.01")
    gate.link.reserve("physics", 400 * SU, "a test")
    assert can(site, ledger, "600")
    answer = affording(site, ledger).answer("600.01", "4000001", "PHYSICS")
    assert not answer.success
    assert "600.00 SU is free, 400.00 SU held" in str(answer.message)


def test_what_is_charged_is_known_to_the_gate_at_once(
    gate: RunningGate, site: Settings, ledger: "Ledger"
) -> None:
    pusher = Pusher(ledger, gate.link)
    pusher.push()
    for number in range(1, 4):
        with ledger.transaction() as t:
            t.transfers.withdraw("physics", 100 * SU, BY)
        pusher.push()
        assert gate.link.means("physics").balance == (1000 - 100 * number) * SU
    # Another gate, which has heard of nothing.
    gate.kill()
    for path in Path(site.state_dir).glob("gate.db*"):
        path.unlink()
    gate.start()
    pusher.push()
    assert gate.link.means("physics").balance == 700 * SU


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


def test_a_share_and_an_unknown_account(site: Settings, ledger: "Ledger") -> None:
    halved = msgspec.structs.replace(site, bank=BankSettings(enabled=True, hold_share=0.5))
    assert can(halved, ledger, "500")
    assert not can(halved, ledger, "500.01")
    with pytest.raises(ApiError):
        can(site, ledger, "1", "chemistry")
    lenient = msgspec.structs.replace(
        site, bank=BankSettings(enabled=True, unknown_accounts="allow")
    )
    assert can(lenient, ledger, "1", "chemistry")


@pytest.mark.parametrize(
    ("cost", "user"), [("x", "1"), ("1", "ada"), ("1", "4294967296"), ("1", "")]
)
def test_what_is_no_question(site: Settings, ledger: "Ledger", cost: str, user: str) -> None:
    with pytest.raises(ApiError) as refused:
        affording(site, ledger).answer(cost, user, "physics")
    assert refused.value.status == 400


def test_the_mode_that_names_most_goes_first() -> None:
    rules = (
        ModeRule(mode="gate"),
        ModeRule(mode="observe", cluster="c"),
        ModeRule(mode="off", cluster="d"),
        ModeRule(mode="gate", cluster="c", partition="long"),
        ModeRule(mode="off", account="physics"),
    )
    assert mode_of((), "c", "physics") is None
    assert mode_of(rules, "c", "biology") == "observe"
    assert mode_of(rules, "e", "biology") == "gate"
    assert mode_of(rules, "c", "physics") == "off"
