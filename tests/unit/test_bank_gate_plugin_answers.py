"""Unforeseen requests: each fails for its sender alone."""

import socket
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.gate import (
    CLUSTER,
    PATIENCE_S,
    GateCore,
    account,
    job,
    now_us,
    picture,
    rules,
    running_here,
    settings_of,
)
from steward.bank.errors import NoEstimate
from steward.bank.estimate import Estimator
from steward.bank.gate.calls import GateOperations
from steward.bank.gate.plugin_answers import DecisionRight, PluginAnswerer
from steward.bank.gate.requests import HoldRequest, PluginReply, PluginRequest
from steward.bank.gate.requests import PriceRequest as Question
from steward.bank.gate.store import GateStore
from steward.bank.gate.user_names import UserNameCache
from steward.bank.money import MICRO
from steward.bank.records import JobRequest, Quote, UserBooks
from steward.bank.settings import BankPartitionSettings
from steward.core.rpc import connect_socket
from steward.core.sqlite import SqliteError
from steward.slurm.errors import SlurmError
from steward.slurm.users import NameResolver

STRANGE = ("node1,", "node1,,node2", "node[1-02]", "node[", "@all", "n[1-999999999]", ",")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make estimates fail for jobs with a reservation."""
    quote = Estimator.quote

    def failing(self: Estimator, job: JobRequest, *args: Any, **options: Any) -> Quote:
        if job.reservation == "slurm":
            raise SlurmError("'x' is no node list", (), "x")
        if job.reservation == "python":
            raise RecursionError
        return quote(self, job, *args, **options)

    monkeypatch.setattr(Estimator, "quote", failing)


class Asked:
    """Gate in this process that replies as a gate's process does."""

    def __init__(self, tmp_path: Path, site: GateCore) -> None:
        self.site = site
        self.right = DecisionRight(site.settings)
        self.clock = 1000.0
        names = UserNameCache(wait_s=30.0, clock=lambda: self.clock)
        self.answering = PluginAnswerer(site.keeper, self.right, names=names)
        self.right.record_ledger_contact()
        self.right.is_ready = True

    def call(self, op: str, body: Any) -> Any:
        """Return the reply to a call of one of Steward's processes."""
        site = self.site
        calls = GateOperations(
            site.settings.state_dir,
            site.keeper,
            site.upkeep,
            self.answering,
            self.right,
            on_lease=lambda: None,
            decide=lambda _requests, _now_us: [],
        )
        return calls.run(op, msgspec.Raw(msgspec.json.encode(body)))

    def __call__(self, what: JobRequest, op: Any = "submit", by: int = 1000) -> PluginReply:
        ask = PluginRequest(v=1, op=op, cluster=CLUSTER, job=what, by=by)
        with self.site.store.transaction():
            return self.answering.answer(ask, now_us())


@pytest.mark.parametrize("req_nodes", STRANGE)
def test_node_lists_of_all_sorts_are_decided_on(tmp_path: Path, req_nodes: str) -> None:
    ask = Asked(tmp_path, GateCore(tmp_path, account("chem", 5)))
    assert not ask(job(99, req_nodes=req_nodes)).ok
    assert ask(job(1)).admin_comment


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("what", ["slurm", "python"])
def test_a_job_that_cannot_be_estimated_is_refused_alone(tmp_path: Path, what: str) -> None:
    site = GateCore(tmp_path, account("chem", 50))
    ask = Asked(tmp_path, site)
    holds = site.keeper.balances
    for _ in range(3):
        said = ask(job(1, reservation=what))
        assert (said.ok, said.admin_comment) == (False, "")
        assert "the bank cannot price this job" in said.say
        assert ask(job(1)).admin_comment
    claim = HoldRequest(cluster=CLUSTER, job_id=5, description=job(4, reservation=what))
    asked = Question(cluster=CLUSTER, description=job(4, reservation=what))
    for op, body in (("place", claim), ("verdict", asked)):
        with pytest.raises(NoEstimate, match="cannot price the job"):
            ask.call(op, body)
    assert ask.call("place", msgspec.structs.replace(claim, description=job(4))).is_paid
    assert site.keeper.balances is holds, "nothing is read anew"
    site.ground.put_rules(rules("observe"))
    assert ask(job(1, reservation=what)).ok, "on paper all are let in"


def test_whatever_fails_in_a_decision_refuses_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = GateCore(tmp_path, account("chem", 50))
    ask = Asked(tmp_path, site)
    known = site.ground.find_account
    failing = [1]

    def account_of(cluster: str, what: JobRequest, user: str) -> str:
        if what.reservation and failing:
            failing.pop()
            raise ValueError("nobody has thought of this")
        return known(cluster, what, user)

    monkeypatch.setattr(site.ground, "find_account", account_of)
    said = ask(job(1, reservation="x"))
    assert not said.ok
    assert "the bank cannot price this job" in said.say
    failing.append(1)
    assert ask(job(1, reservation="x", uid=0)).ok, "root is never refused"
    site.ground.put_rules(rules("observe"))
    failing.append(1)
    assert ask(job(1, reservation="x")).ok


def test_a_decision_that_cannot_be_carried_out_does_not_let_others_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert = GateStore.insert

    def failing(self: GateStore, hold: Any, quote: Any, what: JobRequest | None) -> None:
        if what is not None and what.reservation:
            raise OverflowError("Python int too large to convert to SQLite INTEGER")
        insert(self, hold, quote, what)

    monkeypatch.setattr(GateStore, "insert", failing)
    jobs = [job(9), job(9), job(1, reservation="x"), job(4)]
    with running_here(settings_of(tmp_path)) as gate, ExitStack() as sockets:
        gate.tell(account("chem", 15))
        with gate.paused():
            asked = [sockets.enter_context(socket.socket(socket.AF_UNIX)) for _ in jobs]
            for connection, one in zip(asked, jobs, strict=True):
                connection.settimeout(PATIENCE_S)
                connect_socket(connection, gate.settings.gate_socket)
                ask = PluginRequest(v=1, op="submit", cluster=CLUSTER, job=one)
                connection.sendall(msgspec.json.encode(ask) + b"\n")
        said = [msgspec.json.decode(connection.recv(65536)) for connection in asked]
        assert [one["ok"] for one in said] == [True, False, False, True]
        assert gate.link.get_means("chem").available == 0
        assert sorted(hold.remaining // MICRO for hold in gate.link.list_holds()) == [5, 10]


def test_what_fails_half_way_is_undone_with_all_that_came_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    ask = Asked(tmp_path, site)
    assert ask(job(9)).ok

    def failing(*_: Any) -> str:
        raise ValueError("nobody has thought of this")

    monkeypatch.setattr("steward.bank.gate.token.make_token", failing)
    with pytest.raises(SqliteError, match="a request failed"):
        ask(job(9))
    site.keeper.load()
    assert site.free() == 20
    assert [fact.kind for fact in site.store.fetch_facts(0, 9)] == ["hold.placed"]


def test_partitions_without_end_are_refused_soon(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 50))
    ask = Asked(tmp_path, site)
    tracemalloc.start()
    assert not ask(job(1, partition="," * 500_000)).ok
    assert not ask(job(1, partition="main," * 100_000, account="a" * 100_000)).ok
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 100_000


def test_under_deny_changes_are_refused_while_nobody_can_decide(tmp_path: Path) -> None:
    site = GateCore(
        tmp_path,
        account("chem", 50),
        partition={"cheap": BankPartitionSettings(policy="deny")},
        exempt=("op",),
    )
    ask = Asked(tmp_path, site)
    ask.right.is_ready = False
    longer = job(99, uid=-1, job_id=5, partition="")
    to_cheap = msgspec.structs.replace(longer, partition="cheap")
    assert ask(longer, "modify").ok
    said = ask(to_cheap, "modify")
    assert not said.ok
    assert "its outage policy rejects changes of jobs" in said.say
    assert ask(to_cheap, "modify", by=0).ok, "root does as it will"
    assert ask(to_cheap, "modify", by=1002).ok, "and so do operators"
    assert not ask(job(1, partition="cheap")).ok
    ask.right.is_ready = True
    with site.store.transaction():
        claim = HoldRequest(cluster=CLUSTER, job_id=5, description=job(1, partition="cheap"))
        assert site.upkeep.place_hold(claim, "alice", now_us()).hold
    ask.right.is_ready = False
    assert not ask(longer, "modify").ok, "it is in a partition whose policy says so"


def test_what_cannot_be_priced_is_an_error_of_that_job(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 50))
    with pytest.raises(NoEstimate):
        site.ground.quote(CLUSTER, job(1, array="x-y"), now_us())


def test_whose_name_is_not_known_is_refused_where_users_have_limits(tmp_path: Path) -> None:
    users = (UserBooks(name="alice", limit=20 * MICRO), UserBooks(name="bob"))
    site = GateCore(tmp_path, account("chem", 100, users=users), account("phys", 100, number=2))
    nameless = job(50, uid=4242)
    said = site.submit(nameless)
    assert not said.ok
    assert "cannot look up the name of uid 4242" in said.say
    assert site.submit(msgspec.structs.replace(nameless, account="phys")).ok, "it has no limits"
    assert site.submit(msgspec.structs.replace(nameless, uid=0)).ok, "root needs no name"
    claim = HoldRequest(cluster=CLUSTER, job_id=5, description=nameless)
    with site.store.transaction():
        assert not site.upkeep.place_hold(claim, "", now_us()).is_paid
        assert site.upkeep.place_hold(claim, "bob", now_us()).is_paid


def test_a_name_that_does_not_resolve_is_asked_for_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    answers = ["", "ada", ""]
    monkeypatch.setattr(NameResolver, "user", lambda *_: answers.pop(0))
    names = UserNameCache(wait_s=30.0, clock=lambda: clock[0])
    assert names.find_user(5) == ""
    assert names.find_user(5) == ""
    clock[0] += 6
    assert names.find_user(5) == "ada"
    clock[0] += 601
    assert names.find_user(5) == "ada", "an answer that is none takes no name away"
    assert answers == []


def test_a_name_that_comes_later_counts_for_what_was_let_in_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = (UserBooks(name="eve", limit=20 * MICRO),)
    site = GateCore(tmp_path, account("chem", 100, users=users), account("phys", 100, number=2))
    ask = Asked(tmp_path, site)
    with site.store.transaction():
        claim = HoldRequest(cluster=CLUSTER, job_id=5, description=job(9, uid=4242, account="phys"))
        assert site.upkeep.place_hold(claim, "", now_us()).hold
    moved = job(9, uid=-1, job_id=5, account="chem")
    monkeypatch.setattr(NameResolver, "user", lambda *_: "")
    assert "cannot look up" in ask(moved, "modify", by=4242).say
    monkeypatch.setattr(NameResolver, "user", lambda *_: "eve")
    ask.clock += 6
    assert ask(moved, "modify", by=4242).ok
    longer = job(29, uid=-1, job_id=5, account="chem")
    assert "spending limit of user eve in account chem leaves" in ask(longer, "modify", by=4242).say


def test_who_has_no_association_cannot_have_others_money_held(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 100))
    shown = msgspec.structs.replace(picture(), enforced=True, qos={"chem/alice": ""})
    site.ground.put_model(shown)
    assert site.submit(job(9, account="CHEM")).admin_comment
    for uid in (1001, 65534):
        assert "has no association with account chem" in site.submit(job(50, uid=uid)).say
    assert site.free() == 90
    assert site.submit(job(9, uid=0)).ok
    site.ground.put_model(msgspec.structs.replace(shown, qos={}))
    assert site.submit(job(9, uid=1001)).ok, "nothing is known of associations"
    site.ground.put_model(msgspec.structs.replace(shown, enforced=False))
    assert site.submit(job(9, uid=1001)).ok, "Slurm lets everybody in"
