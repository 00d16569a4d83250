"""Calls to the gate: large requests are split, and the results are equal."""

import os
import time
from pathlib import Path

import pytest

from harness.gate import account, job, running, settings_of
from steward.bank.gate.client import GateClient
from steward.bank.gate.requests import ShownJob
from steward.core.databases import GATE


def test_holds_and_confirmations_are_the_same_in_pieces(tmp_path: Path) -> None:
    with running(settings_of(tmp_path)) as gate:
        gate.tell(account("chem", 10**12))
        comments = [gate.ask(job(30))["admin_comment"] for _ in range(450)]
        whole = gate.link.list_holds()
        assert len({hold.id for hold in whole}) == len(whole) == 450
        assert whole == sorted(whole, key=lambda hold: hold.created_us)
        assert gate.link.list_holds(limit=250) == whole[:250]
        assert gate.link.list_holds(after=whole[249].id) == whole[250:]
        assert gate.link.list_holds(limit=400, account="chem") == whole[:400]
        assert gate.link.list_holds(job_id=9) == gate.link.list_holds(account="other") == []
        seen = [
            ShownJob(cluster="c", job_id=number + 1, uid=1000, admin_comment=comment, started=False)
            for number, comment in enumerate(comments)
        ]
        seen.insert(
            60, ShownJob(cluster="c", job_id=999, uid=1000, admin_comment="", started=False)
        )
        found = gate.link.confirm_jobs(seen)
        assert found.pop(60) is None
        assert [(hold.id, hold.job_id) for hold in found if hold] == [
            (hold.id, number + 1) for number, hold in enumerate(whole)
        ]


def test_a_write_within_the_tick_of_the_one_before_changes_the_mark_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wal = Path(f"{GATE.locate(str(tmp_path))}-wal")
    wal.write_bytes(b"first")
    now_ns = wal.stat().st_mtime_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    client = GateClient(str(tmp_path))
    first = client.read_change_mark()
    # The clock of file times has not moved since, and the file is as long as before.
    wal.write_bytes(b"other")
    os.utime(wal, ns=(now_ns, now_ns))
    now_ns += 5_000_000_000
    second = client.read_change_mark()
    assert second != first
    assert client.read_change_mark() == second
