"""Jobs without an SU hold, because they are held or begin later: effects of changes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.gate import CLUSTER, HOUR_MIN, GateCore, account, job, now_us
from steward.bank.gate.holds import POLL_MARGIN_US
from steward.bank.gate.requests import HoldRequest, PluginReply, PluginRequest, ShownJob
from steward.bank.records import JobRequest

NUMBER = 5
LATER_US = now_us() + HOUR_MIN * 60_000_000


def put_off(site: GateCore, minutes: int, number: int = NUMBER, **more: Any) -> None:
    """Submit a job that holds no SU yet, and show it in the queue."""
    said = site.submit(job(minutes, **more))
    assert said.ok
    with site.store.transaction():
        seen = ShownJob(cluster=CLUSTER, job_id=number, uid=1000, admin_comment=said.admin_comment)
        site.upkeep.confirm([seen], now_us())


def changed(site: GateCore, number: int = NUMBER, **changes: Any) -> PluginReply:
    return site.modify(JobRequest(uid=-1, job_id=number, **changes))


def looked(site: GateCore, minutes: int, **more: Any) -> None:
    """Show the job in the queue with these fields."""
    claim = HoldRequest(cluster=CLUSTER, job_id=NUMBER, description=job(minutes, **more))
    with site.store.transaction():
        assert site.upkeep.place_hold(claim, "alice", now_us()).is_paid


@pytest.mark.parametrize("changes", [{}, {"released": True}])
def test_a_release_needs_all_that_the_job_may_cost(tmp_path: Path, changes: dict[str, Any]) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    put_off(site, 99, held=True)
    put_off(site, 19, 6, held=True)
    put_off(site, 19, 7, held=True, begin_us=LATER_US)
    said = changed(site, **changes)
    assert not said.ok
    assert "100.00 SU" in said.say
    assert changed(site, 6, **changes).ok
    assert site.free() == 10
    assert not changed(site, 7, **changes).ok, "the first has it"


def test_a_release_that_says_more_is_one_all_the_same(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    put_off(site, 99, held=True)
    assert not changed(site, time_limit_min=98, released=True).ok
    assert changed(site, time_limit_min=19, released=True).ok
    assert site.free() == 10


def test_what_is_to_begin_now_is_held_for(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    put_off(site, 99, begin_us=LATER_US)
    put_off(site, 9, 6, begin_us=LATER_US)
    assert not changed(site, begin_us=now_us()).ok
    assert changed(site, 6, begin_us=now_us()).ok
    assert site.free() == 20


@pytest.mark.parametrize("off", [{"held": True}, {"begin_us": LATER_US}])
def test_what_holds_nothing_is_not_made_larger_than_can_be_paid(
    tmp_path: Path, off: dict[str, Any]
) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    put_off(site, 9, **off)
    assert not changed(site, time_limit_min=39).ok
    assert changed(site, time_limit_min=24).ok
    assert site.free() == 30
    # A release is then of the larger one.
    site.tell(account("chem", 20))
    assert not changed(site, begin_us=now_us(), released=True).ok


def test_what_is_held_for_is_not_put_off_by_a_change(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    put_off(site, 9)
    assert changed(site, begin_us=LATER_US).ok
    assert not changed(site, begin_us=LATER_US, time_limit_min=39).ok
    assert not changed(site, held=True, time_limit_min=39).ok
    assert changed(site, time_limit_min=19).ok
    assert site.free() == 10


def test_only_the_queue_makes_it_less(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    put_off(site, 99, held=True)
    assert changed(site, time_limit_min=9).ok
    assert not changed(site, released=True).ok, "Slurm may have refused that"
    looked(site, 9, held=True)
    assert not changed(site, released=True).ok, "this may have been seen before the change"
    site.look(POLL_MARGIN_US // 1_000_000 + 1)
    looked(site, 9, held=True)
    assert changed(site, released=True).ok
    assert site.free() == 20


def test_what_is_refused_puts_off_nothing_that_was_changed_before(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    put_off(site, 99, held=True)
    changed_us = now_us() - POLL_MARGIN_US - 1
    what = JobRequest(uid=-1, job_id=NUMBER, time_limit_min=9)
    ask = PluginRequest(v=1, op="modify", cluster=CLUSTER, job=what, by=1000)
    with site.store.transaction():
        assert site.keeper.modify(ask, "", changed_us, is_lenient=False).ok
    assert not changed(site, released=True).ok
    site.look()
    looked(site, 9, held=True)
    assert changed(site, released=True).ok, "who tries again and again would wait for ever"


def test_a_job_not_seen_yet_is_not_changed_by_its_user(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 30), account("phys", 30, number=2))
    said = site.submit(job(99, held=True))
    ask = PluginRequest(
        v=1, op="modify", cluster=CLUSTER, job=JobRequest(uid=-1, job_id=77), by=1000
    )
    with site.store.transaction():
        refused = site.keeper.modify(ask, "", now_us(), is_lenient=False)
        for other in ({"by": 1001}, {"by": 0}, {"by": -1}, {"cluster": "other"}):
            asked = msgspec.structs.replace(ask, **other)
            assert site.keeper.modify(asked, "", now_us(), is_lenient=False).ok
        assert site.keeper.modify(ask, "", now_us(), is_lenient=True).ok
    assert not refused.ok
    assert "the bank has not seen the new job 77 yet" in refused.say
    with site.store.transaction():
        seen = ShownJob(cluster=CLUSTER, job_id=6, uid=1000, admin_comment=said.admin_comment)
        site.upkeep.confirm([seen], now_us())
        assert site.keeper.modify(ask, "", now_us(), is_lenient=False).ok, "none is unseen now"
