"""Process of the gate: protocol, hostile peers, kills under load, and times without decisions."""

import os
import random
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from harness.gate import (
    CLUSTER,
    PATIENCE_S,
    RunningGate,
    account,
    job,
    now_us,
    picture,
    rules,
    running,
    settings_of,
)
from steward.bank.errors import BankRefused, BankUsage, GateUnavailable
from steward.bank.gate.client import GateClient
from steward.bank.gate.requests import VERSION, HoldRequest, PluginRequest, ShownJob
from steward.bank.money import MICRO
from steward.bank.records import GateBooks, JobRequest, ModeRule, Settlement
from steward.bank.settings import BankPartitionSettings, BankSettings
from steward.core.access import ClusterRoles, ClusterRolesFiles
from steward.core.events import utc_now
from steward.core.rpc import connect_socket


def test_a_job_from_its_submit_to_its_settlement(tmp_path: Path) -> None:
    with running(settings_of(tmp_path)) as gate:
        gate.tell(account("chem", 100))
        link = gate.link
        said = gate.ask(job(49, admin_comment="site words"))
        assert said["ok"]
        assert said["admin_comment"].startswith("site words steward=1.")
        refused = gate.ask(job(99))
        assert not refused["ok"]
        assert "100.00 SU, but account chem has 50.00 SU available" in refused["say"]
        assert "--time=49" in refused["say"]
        shown = ShownJob(
            cluster=CLUSTER, job_id=7, uid=1000, admin_comment=said["admin_comment"], started=True
        )
        forged = msgspec.structs.replace(shown, uid=1001)
        hold, none = link.confirm_jobs([shown, forged])
        assert none is None
        assert hold is not None
        assert (hold.job_id, hold.remaining) == (7, 50 * MICRO)
        assert link.list_holds(account="chem", user="alice") == [hold]
        assert link.sum_on_allocation(1) == 50 * MICRO
        assert gate.ask(job(10, job_id=7, uid=-1), op="modify")["ok"], "less is always granted"
        larger = gate.ask(job(120, job_id=7, uid=-1), op="modify")
        assert not larger["ok"]
        assert "more (121.00 SU in all)" in larger["say"]
        settlement = Settlement(seq=1, hold=hold.id, charge="k", amount=20 * MICRO, final=True)
        books = GateBooks(seq=2, accounts=(account("chem", 80),), after=1)
        assert link.settle([settlement], books) == 1
        assert link.settle([settlement], books) == 1
        assert link.get_means("chem", "alice").available == 80 * MICRO
        kinds = [fact.kind for fact in link.list_facts(0)]
        assert kinds == [
            *("hold.placed", "rejection", "hold.confirmed", "rejection"),
            *("hold.settled", "hold.released"),
        ]
        assert link.list_facts(link.get_status().facts) == []


def test_when_plugins_asked_last_outlives_the_gate(tmp_path: Path) -> None:
    with running(settings_of(tmp_path)) as gate:
        gate.tell(account("chem", 100))
        assert gate.link.get_verdict(CLUSTER, job(9)).ok
        assert gate.link.get_status().asked_at_us == 0, "Steward's own questions do not count"
        begun_us = now_us()
        gate.ask(job(9))
        asked_us = gate.link.get_status().asked_at_us
        assert begun_us <= asked_us <= now_us()
        gate.kill()
        gate.start()
        assert gate.link.get_status().asked_at_us == asked_us


def test_what_the_link_asks_and_is_refused(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with pytest.raises(GateUnavailable, match="steward serve"):
        GateClient(settings.state_dir).get_status()
    with running(settings) as gate:
        link = gate.link
        gate.tell(account("chem", 100))
        quote = link.get_verdict(CLUSTER, job(9)).quote
        assert quote is not None
        assert quote.amount == 10 * MICRO
        assert not link.get_verdict(CLUSTER, job(300)).ok
        held = link.reserve("chem", 60 * MICRO, "a transfer")
        with pytest.raises(BankRefused, match=r"40\.00 SU available"):
            link.reserve("chem", 60 * MICRO, "another")
        with pytest.raises(BankUsage):
            link.get_means("phys")
        assert link.release(held.id, "done") == 60 * MICRO
        claim = HoldRequest(cluster=CLUSTER, job_id=9, description=job(9), started=True)
        assert link.place_hold(claim) == link.place_hold(claim)
        assert not link.place_hold(msgspec.structs.replace(claim, description=job(900))).is_paid
        assert link.send_books(GateBooks(seq=9, accounts=(account("chem", 1),), after=5)) == 1
        assert link.get_means("chem").balance == 100 * MICRO, (
            "news with a gap before are passed over"
        )
        assert link.report_poll(CLUSTER, utc_now()) == 0


def test_hostile_and_slow_peers_hold_nobody_up(tmp_path: Path) -> None:
    with running(settings_of(tmp_path)) as gate, ExitStack() as peers:
        gate.tell(account("chem", 1000))

        def peer(said: bytes) -> socket.socket:
            one = peers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            one.settimeout(PATIENCE_S)
            connect_socket(one, gate.settings.gate_socket)
            one.sendall(said)
            return one

        silent = [peer(said) for said in (b"", b'{"v":1', b"\xff\xfe") for _ in range(20)]
        assert gate.ask(job(1))["ok"]
        deep = b'{"v":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
        rubbish = [
            *(b"\n", b"{}\n", b"[]\n", b"\x00" * 1000 + b"\n", b"[" * 100_000 + b"\n", deep),
            b'{"v":2,"op":"submit","cluster":"c","job":{"uid":1}}\n',
            b'{"v":1,"op":"submit","cluster":"c","job":{"uid":"1"}}\n',
            b'{"v":1,"op":"steal","cluster":"c","job":{"uid":1}}\n',
        ]
        for line in rubbish:
            assert gate.say(line) == b"", line[:80]
        peer(b'{"v":1,"op":"submit","cluster":"c","job":{"uid":1000}}\n').close()
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            _flood(peer(b""))
        assert gate.ask(job(1))["ok"]
        for one in silent:
            # Each is dropped when its second is over.
            assert one.recv(1) == b""
        assert gate.ask(job(1, account="CHEM"))["ok"], "Slurm lowers the case of accounts"


def _flood(endless: socket.socket) -> None:
    while True:
        endless.sendall(b"x" * 100_000)


def test_without_books_the_policy_decides(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, partition={"main": BankPartitionSettings(policy="deny")})
    settings = msgspec.structs.replace(
        settings, bank=msgspec.structs.replace(settings.bank, without_ledger_s=0.0)
    )
    with running(settings) as gate:
        assert not os.path.exists(settings.gate_socket), "closed until the holds are known"
        gate.link.send_books(GateBooks(seq=1, accounts=(account("chem", 1),), whole=True))
        gate.wait(lambda: os.path.exists(settings.gate_socket))
        denied = gate.ask(job(1))
        assert not denied["ok"]
        assert "the bank does not answer" in denied["say"]
        assert gate.ask(job(1, partition="cheap"))["ok"]
        assert gate.ask(job(1, partition="cheap,main"))["ok"] is False
        gate.link.send_rules(rules())
        conf = Path(settings.gate_conf)
        lines = conf.read_text().splitlines()
        assert f"off_file {settings.gate_off}" in lines
        assert lines[-2:] == ["policy allow", "partition main deny"]
        gate.link.send_model(picture())
        lines = conf.read_text().splitlines()
        assert lines[-3:] == ["policy allow", "default_partition main", "partition main deny"]
        gate.link.send_rules(rules(mode="observe", seq=2))
        lines = conf.read_text().splitlines()
        assert "policy observe" in lines
        assert "partition main observe" in lines
        assert gate.ask(job(1))["ok"]
        chem = ModeRule(mode="enforce", account="chem")
        gate.link.send_rules(rules("observe", chem, seq=3))
        assert "partition main deny" in conf.read_text().splitlines()
        assert not gate.ask(job(1))["ok"]
        assert gate.ask(job(1, account="phys"))["ok"], "the gate knows the account's mode"


def test_with_postgresql_only_a_lease_gives_the_right(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    bank = BankSettings(enabled=True, database="postgresql+psycopg://nowhere/steward")
    with running(msgspec.structs.replace(settings, bank=bank)) as gate:
        secret = gate.link.grant_lease(3, 0.0)
        assert not gate.link.get_status().deciding
        assert gate.link.grant_lease(3, 60.0) == secret
        gate.tell(account("chem", 100))
        assert gate.ask(job(1))["ok"]
        gate.link.grant_lease(2, 60.0)
        gate.link.grant_lease(4, 0.0)
        assert gate.link.get_status().why == "another gate holds the lease to decide"
        assert "admin_comment" not in gate.ask(job(1)), "the policy lets it in"
        assert gate.link.grant_lease(5, 60.0, "ab" * 32) == "ab" * 32
        gate.wait_open()


def test_a_gate_killed_under_load_has_every_hold_again(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with running(settings_of(tmp_path)) as gate:
        gate.tell(account("chem", 100_000))
        answered: list[str] = []
        for _ in range(4):
            threads = [
                threading.Thread(target=_load, args=(gate, answered), daemon=True) for _ in range(6)
            ]
            for thread in threads:
                thread.start()
            wanted = len(answered) + chance.randrange(20, 200)
            gate.wait(lambda wanted=wanted: len(answered) >= wanted)
            gate.kill()
            for thread in threads:
                thread.join(PATIENCE_S)
            gate.start()
            gate.wait_open()
            found = gate.link.list_holds(limit=10**6)
            ids = {hold.id for hold in found}
            assert all(comment.split(".")[1] in ids for comment in answered)
            held = sum(hold.remaining for hold in found)
            assert gate.link.get_means("chem").held == held
            assert gate.link.get_means("chem").available == 100_000 * MICRO - held
            told = {fact.hold.hold for fact in gate.link.list_facts(0, 10**6) if fact.hold}
            assert told == ids
            assert found[-1].created_us <= now_us()


def _load(gate: RunningGate, answered: list[str]) -> None:
    while True:
        try:
            said = gate.ask(job(1))
        except (OSError, ValueError):
            return  # it was killed
        answered.append(said["admin_comment"])


def test_an_operator_is_known_as_soon_as_slurm_has_named_one(tmp_path: Path) -> None:
    with running(settings_of(tmp_path)) as gate:
        gate.tell(account("chem", 100))
        comment = gate.ask(job(49, held=True))["admin_comment"]
        gate.link.confirm_jobs(
            [ShownJob(cluster=CLUSTER, job_id=7, uid=1000, admin_comment=comment)]
        )
        change = JobRequest(uid=-1, job_id=7, released=True)
        ask = PluginRequest(v=VERSION, op="modify", cluster=CLUSTER, job=change, jobs="7", by=1002)
        assert "denied" in gate.link.grant(ask, "op", 0).say
        standings = ClusterRolesFiles(gate.settings.state_dir)
        standings.put(CLUSTER, ClusterRoles(admins=frozenset({"op"})))
        gate.wait(lambda: gate.link.grant(ask, "op", 0).ok)
        standings.put(CLUSTER, ClusterRoles())
        gate.wait(lambda: not gate.link.grant(ask, "op", 0).ok)
