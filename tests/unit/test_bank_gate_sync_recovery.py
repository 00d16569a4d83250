"""Recovery of SU holds from tokens: only valid tokens count, each once, as Slurm shows the job."""

import os
from datetime import UTC, datetime
from pathlib import Path

from harness.gate import CLUSTER, SECRET, GateCore, account, job, now_us, running, settings_of
from steward.bank.gate import token
from steward.bank.gate.requests import HoldRequest, ShownJob
from steward.bank.gate.sync import rebuild_holds
from steward.bank.money import MICRO
from steward.bank.records import Settlement
from steward.core.records import JobRecord


def record(number: int, comment: str, **more: object) -> JobRecord:
    given = {
        "job_id": number,
        "uid": 1000,
        "user": "alice",
        "account": "chem",
        "partition": "main",
        "state": "PENDING",
        "submit": datetime.now(UTC),
        "time_limit_s": 540,
        "cpus": 1,
        "nodes": 1,
        "tasks": 1,
        "admin_comment": comment,
    }
    return JobRecord(**{**given, **more})  # type: ignore[arg-type]


def test_the_lost_holds_are_there_again(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 100))
    comments = [site.submit(job(9)).admin_comment for _ in range(4)]
    forged = token.make_token(bytes(32), token.make_hold_id(), 1, 1, "chem", CLUSTER, 1000)
    site.store.close()
    os.unlink(tmp_path / "state" / "gate.db")
    site = GateCore(tmp_path, account("chem", 100))
    assert site.free() == 100
    shown = [
        record(1, comments[0]),
        record(2, f"words {comments[1]} words", state="RUNNING", start=datetime.now(UTC)),
        record(3, comments[2], state="COMPLETED"),
        record(4, forged),
        record(5, comments[3], uid=1001, user="bob"),
        record(6, comments[0]),
    ]
    with site.store.transaction():
        assert rebuild_holds(site.keeper, CLUSTER, shown, now_us()) == 3
        assert rebuild_holds(site.keeper, CLUSTER, shown, now_us()) == 0
    assert site.free() == 70
    first, second = (site.keeper.balances.hold_by_job[CLUSTER, number] for number in (1, 2))
    assert (first.started, second.started) == (False, True)
    assert (first.amount, second.user) == (10 * MICRO, "alice")
    # The ended job's hold goes with its charge, or after a while without one.
    with site.store.transaction():
        site.upkeep.record_poll(CLUSTER, now_us() + 60_000_000, now_us())
        site.upkeep.settle(
            [Settlement(seq=1, hold=second.id, amount=MICRO, final=True)], None, now_us()
        )
    assert site.free() == 80
    with site.store.transaction():
        site.upkeep.tick(now_us() + 700_000_000)
    assert site.free() == 90


def test_an_arrays_records_make_one_hold(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 100))
    comment = site.submit(job(9, array="0-3")).admin_comment
    with site.store.transaction():
        site.upkeep.record_poll(CLUSTER, now_us() + 60_000_000, now_us())
    assert site.free() == 100
    shown = [
        record(11, comment, array_job_id=10, array_task="0", state="COMPLETED"),
        record(12, comment, array_job_id=10, array_task="1", state="RUNNING"),
        record(10, comment, array_job_id=10, array_task="2-3"),
    ]
    with site.store.transaction():
        assert rebuild_holds(site.keeper, CLUSTER, shown, now_us()) == 1
    assert site.free() == 60
    hold = site.keeper.balances.hold_by_job[CLUSTER, 10]
    seen = ShownJob(cluster=CLUSTER, job_id=10, uid=1000, admin_comment=comment)
    with site.store.transaction():
        (found,) = site.upkeep.confirm([seen], now_us())
    assert found is not None
    assert found.id == hold.id
    assert token.find_genuine_token(comment, SECRET, CLUSTER, 1000) is not None


def test_a_gate_whose_database_is_gone_numbers_its_facts_on(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with running(settings) as gate:
        gate.tell(account("chem", 100))
        comment = gate.ask(job(9))["admin_comment"]
        last = gate.link.list_facts(0)[-1].seq
        gate.kill()
        for name in ("gate.db", "gate.db-wal", "gate.db-shm"):
            (Path(settings.state_dir) / name).unlink(missing_ok=True)
        os.unlink(settings.gate_socket)
        gate.start()
        assert not os.path.exists(settings.gate_socket)
        gate.tell(account("chem", 100))
        seen = ShownJob(cluster=CLUSTER, job_id=1, uid=1000, admin_comment=comment)
        assert gate.link.confirm_jobs([seen]) == [None], (
            "Slurm was not asked here: it is covered anew"
        )
        claim = HoldRequest(cluster=CLUSTER, job_id=1, description=job(9))
        covered = gate.link.place_hold(claim)
        assert covered.hold is not None
        assert gate.link.list_facts(last)[0].seq > last
