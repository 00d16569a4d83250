"""Changes of jobs by their users: none leads to a run that its account cannot pay."""

from pathlib import Path

import msgspec

from harness.gate import CLUSTER, GateCore, account, job, now_us, rules
from steward.bank.gate import token
from steward.bank.gate.shapes import Claim, Said, Seen, Submit
from steward.bank.money import MICRO
from steward.bank.records import Description, Settlement


def changed(site: GateCore, what: Description, jobs: str = "", by: int = 1000) -> Said:
    """What a user is answered who changes a job."""
    ask = Submit(v=1, op="modify", cluster=CLUSTER, job=what, jobs=jobs, by=by)
    with site.store.transaction():
        return site.keeper.modify(ask, site.ground.user_of(CLUSTER, by), now_us(), is_lenient=False)


def test_another_run_that_is_to_begin_at_once_needs_what_the_former_has_used(
    tmp_path: Path,
) -> None:
    site = GateCore(tmp_path, account("chem", 15))
    comment = site.submit(job(9)).admin_comment
    seen = Seen(cluster=CLUSTER, job_id=5, uid=1000, admin_comment=comment, started=True)
    hold = token.find(comment)[0].id
    with site.store.transaction():
        site.upkeep.confirm([seen], now_us())
        site.upkeep.settle([Settlement(seq=1, hold=hold, amount=6 * MICRO)], None, now_us())
    site.tell(account("chem", 9))
    now = job(9, uid=-1, job_id=5, begin_us=now_us())
    assert not changed(site, now).ok, "4 SU of 10 are left, and 5 are free"
    assert not changed(site, job(9, uid=-1, job_id=5, released=True)).ok
    assert changed(site, job(9, uid=-1, job_id=5)).ok, "it asks for no more than before"
    site.tell(account("chem", 10))
    assert changed(site, now).ok
    assert site.free() == 0


def test_an_array_is_paid_by_one_account(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 50), account("phys", 50, number=2))
    comment = site.submit(job(9, array="0-1")).admin_comment
    seen = Seen(cluster=CLUSTER, job_id=5, uid=1000, admin_comment=comment)
    with site.store.transaction():
        site.upkeep.confirm([seen], now_us())
    moved = job(9, uid=-1, job_id=5, account="phys")
    assert "is paid by one account: 5_1 cannot" in changed(site, moved, "5_1").say
    assert changed(site, job(9, uid=-1, job_id=5), "5_1").ok
    assert changed(site, moved, "5").ok
    site.ground.put_rules(rules("observe"))
    assert changed(site, moved, "5_1").ok


def test_a_het_jobs_component_has_its_own_hold(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 50))
    for number, minutes in ((5, 9), (6, 19)):
        comment = site.submit(job(minutes, het=True)).admin_comment
        seen = Seen(cluster=CLUSTER, job_id=number, uid=1000, admin_comment=comment)
        with site.store.transaction():
            site.upkeep.confirm([seen], now_us())
    assert changed(site, job(39, uid=-1, job_id=5), "5+1").ok, "20 more for the one of 20"
    assert site.free() == 0


def shown(site: GateCore, minutes: int, after_s: int = 0, *, started: bool = False) -> None:
    """The queue shows a job so, some seconds from now."""
    at_us = now_us() + after_s * 1_000_000
    claim = Claim(
        cluster=CLUSTER, job_id=5, description=job(minutes), started=started, is_exact=True
    )
    with site.store.transaction():
        assert site.upkeep.cover(claim, "alice", at_us).is_paid


def test_a_job_that_has_never_started_is_held_for_less_once_the_queue_shows_that(
    tmp_path: Path,
) -> None:
    site = GateCore(tmp_path, account("chem", 50))
    comment = site.submit(job(29)).admin_comment
    seen = Seen(cluster=CLUSTER, job_id=5, uid=1000, admin_comment=comment)
    with site.store.transaction():
        site.upkeep.confirm([seen], now_us())
    assert changed(site, job(9, uid=-1, job_id=5)).ok
    shown(site, 9)
    assert site.free() == 20, "Slurm may have been looked at before"
    shown(site, 9, 21)
    assert site.free() == 40
    site.keeper.load()
    assert site.free() == 40
    assert changed(site, job(29, uid=-1, job_id=5)).ok
    assert site.free() == 20, "it is as large as before only for another 20"
    with site.store.transaction():
        site.upkeep.confirm([msgspec.structs.replace(seen, started=True)], now_us())
    shown(site, 29, started=True)
    shown(site, 9, 60, started=True)
    assert site.free() == 20, "of one that runs a lower limit frees nothing"
