"""Quotes: every user sees the price of a job, only members see the balance of an account."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import bank
from harness.bank import BY
from harness.gate import OPEN_GATE, running
from harness.site import ADA, BELA, NOBODY, OWNER, ROOT, Site
from steward.bank.errors import BankUsage, NotInBank
from steward.bank.gate.store import GateStore
from steward.bank.records import ModeRule
from steward.core.access import Caller
from steward.core.records import JobRecord
from steward.slurm import Slurm
from steward.slurm.cluster_model import ClusterModel, NodeShape, PartitionModel
from steward.slurm.settings import ClusterSettings

SHAPE = NodeShape(nodes="n[1-64]", count=64, cpus=64, usable_cpus=64, cores=64, memory_mib=65536)
PICTURE = ClusterModel(
    cluster="c1",
    taken_us=1,
    zone="UTC",
    partitions={"debug": PartitionModel(name="debug", shapes=((0, 64),), nodes=64)},
    default_partition="debug",
    shapes=(SHAPE,),
    selects="cr_core",
    users={4001: "ada", 4002: "bela"},
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = bank.make_shared_site(tmp_path)
    with made.ledger.transaction() as t:
        t.modes.set(ModeRule(mode="enforce", cluster="c1"), BY)
        t.set_mark("picture:c1", msgspec.json.encode(PICTURE).decode())
    with running(msgspec.structs.replace(made.settings, gate=OPEN_GATE)) as gate:
        assert made.context("bank").update_gate(0, rules=True)
        gate.link.send_model(PICTURE)
        yield made
    made.close()


def quote(site: Site, asker: Caller, hours: int, account: str = "physics") -> Any:
    options = ["-A", account, "-p", "debug", "-n", "1", "-t", f"{hours}:00:00"]
    return site.ask("bank.quote", asker, options=options)


@pytest.mark.parametrize("asker", [OWNER, ADA])
def test_its_own_people_hear_whether_a_job_would_be_let_in(site: Site, asker: Caller) -> None:
    assert quote(site, asker, 1).is_admitted is True
    dear = quote(site, asker, 5000)
    assert (dear.is_admitted, dear.available) == (False, 1_000_000_000)
    assert "Steward" in dear.message


@pytest.mark.parametrize("asker", [BELA, NOBODY])
def test_nobody_finds_out_by_quotes_what_anothers_account_has(site: Site, asker: Caller) -> None:
    for hours in (1, 5000):
        answer = quote(site, asker, hours)
        assert answer.amount > 0
        assert (answer.is_admitted, answer.message, answer.available) == (None, "", None)


def test_one_component_of_anothers_account_is_enough(site: Site) -> None:
    parts = ["-A", "chemistry", "-p", "debug", "-t", "60"]
    parts += [":", "-A", "physics", "-p", "debug", "-t", "60"]
    assert quote(site, BELA, 1, "chemistry").is_admitted is True
    answer = site.ask("bank.quote", BELA, options=parts)
    assert (answer.is_admitted, answer.available) == (None, None)


@pytest.mark.parametrize("user", ["nobody-here", "a\0b", "\udc80"])
def test_a_quote_for_a_user_that_cannot_be_is_refused(site: Site, user: str) -> None:
    with pytest.raises(BankUsage, match="unknown user"):
        site.ask("bank.quote", ROOT, options=["-A", "physics", "-t", "60"], user=user)


def test_a_model_of_another_version_is_replaced_by_asking_slurm(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    amount = quote(site, ADA, 1).amount
    with site.ledger.transaction() as t:
        t.set_mark("picture:c1", '{"cluster": 5}')
        assert t.read_model("c1") is None
    monkeypatch.setattr(site.context("bank"), "get_model", lambda _cluster: PICTURE)
    assert quote(site, ADA, 1).amount == amount


def test_only_a_job_that_steward_or_slurm_knows_is_allowed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allow(job: str) -> Any:
        return site.ask("bank.allow", job=job, until="now+1hour", reason="a deadline")

    bank.feed(site, bank.life(5)[:1])
    assert allow("5").job_id == 5
    with pytest.raises(NotInBank, match="unknown job 6 on cluster c1"):
        allow("6")
    cluster = {"c1": ClusterSettings()}
    asking = msgspec.structs.replace(site.settings, cluster=cluster)
    monkeypatch.setattr(site.context("bank"), "settings", asking)
    monkeypatch.setattr(Slurm, "job", lambda _self, job: [JobRecord(job_id=6)] * (job == 6))
    assert allow("6").job_id == 6, "the next poll will show it"
    with pytest.raises(NotInBank):
        allow("7")


def test_a_gate_starts_with_a_model_of_another_version(tmp_path: Path) -> None:
    store = GateStore(str(tmp_path))
    with store.transaction():
        store.put_model(PICTURE)
    other_version = [("picture:c2", '{"cluster": 5}'), ("rules", b'{"modes": 5}')]
    connection = store.connect()
    connection.executemany("INSERT INTO note VALUES (?, ?)", other_version)
    connection.close()
    assert store.load_models() == [PICTURE]
    assert store.load_rules() is None
    store.close()
