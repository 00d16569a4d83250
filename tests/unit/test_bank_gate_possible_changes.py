"""Changes of jobs by their users: none leads to a run that its account cannot pay."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.gate import CLUSTER, RATE, GateCore, account, job, now_us, picture, rules
from steward.bank.estimate import apply_update, describe_record
from steward.bank.gate import token
from steward.bank.gate.holds import POLL_MARGIN_US
from steward.bank.gate.requests import HoldRequest, PluginReply, PluginRequest, ShownJob
from steward.bank.money import MICRO
from steward.bank.records import JobRequest, Settlement
from steward.core.records import JobRecord

LOOK_MARGIN_S = POLL_MARGIN_US // 1_000_000


def changed(
    site: GateCore, what: JobRequest, jobs: str = "", by: int = 1000, *, at_us: int = 0
) -> PluginReply:
    """Return the gate's reply to a user's change of a job."""
    ask = PluginRequest(v=1, op="modify", cluster=CLUSTER, job=what, jobs=jobs, by=by)
    with site.store.transaction():
        user = site.ground.find_user(CLUSTER, by)
        return site.keeper.modify(ask, user, at_us or now_us(), is_lenient=False)


def test_another_run_that_is_to_begin_at_once_needs_what_the_former_has_used(
    tmp_path: Path,
) -> None:
    site = GateCore(tmp_path, account("chem", 15))
    comment = site.submit(job(9)).admin_comment
    seen = ShownJob(cluster=CLUSTER, job_id=5, uid=1000, admin_comment=comment, started=True)
    hold = token.find_tokens(comment)[0].id
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
    seen = ShownJob(cluster=CLUSTER, job_id=5, uid=1000, admin_comment=comment)
    with site.store.transaction():
        site.upkeep.confirm([seen], now_us())
    moved = job(9, uid=-1, job_id=5, account="phys")
    assert "charge one account. 5_1 cannot" in changed(site, moved, "5_1").say
    assert changed(site, job(9, uid=-1, job_id=5), "5_1").ok
    assert changed(site, moved, "5").ok
    site.ground.put_rules(rules("observe"))
    assert changed(site, moved, "5_1").ok


def test_a_het_jobs_component_has_its_own_hold(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 50))
    for number, minutes in ((5, 9), (6, 19)):
        comment = site.submit(job(minutes, het=True)).admin_comment
        seen = ShownJob(cluster=CLUSTER, job_id=number, uid=1000, admin_comment=comment)
        with site.store.transaction():
            site.upkeep.confirm([seen], now_us())
    assert changed(site, job(39, uid=-1, job_id=5), "5+1").ok, "20 more for the one of 20"
    assert site.free() == 0


def shown(site: GateCore, minutes: int, *, started: bool = False) -> None:
    """Show a job in the queue with these fields."""
    claim = HoldRequest(
        cluster=CLUSTER, job_id=5, description=job(minutes), started=started, is_exact=True
    )
    with site.store.transaction():
        assert site.upkeep.place_hold(claim, "alice", now_us()).is_paid


def test_a_job_that_has_never_started_is_held_for_less_once_the_queue_shows_that(
    tmp_path: Path,
) -> None:
    site = GateCore(tmp_path, account("chem", 50))
    comment = site.submit(job(29)).admin_comment
    seen = ShownJob(cluster=CLUSTER, job_id=5, uid=1000, admin_comment=comment)
    with site.store.transaction():
        site.upkeep.confirm([seen], now_us())
    assert changed(site, job(9, uid=-1, job_id=5)).ok
    site.look(LOOK_MARGIN_S - 1)
    shown(site, 9)
    assert site.free() == 20, "Slurm may have been looked at before"
    site.look(LOOK_MARGIN_S + 1)
    shown(site, 9)
    assert site.free() == 40
    site.keeper.load()
    assert site.free() == 40
    assert changed(site, job(29, uid=-1, job_id=5)).ok
    assert site.free() == 20, "it is as large as before only for another 20"
    with site.store.transaction():
        site.upkeep.confirm([msgspec.structs.replace(seen, started=True)], now_us())
    shown(site, 29, started=True)
    site.look(60)
    shown(site, 9, started=True)
    assert site.free() == 20, "of one that runs a lower limit frees nothing"


def submitted(site: GateCore, what: JobRequest) -> None:
    """Submit job 5 and show it in the queue."""
    said = site.submit(what)
    assert said.ok, said.say
    seen = ShownJob(cluster=CLUSTER, job_id=5, uid=1000, admin_comment=said.admin_comment)
    with site.store.transaction():
        site.upkeep.confirm([seen], now_us())


@pytest.mark.parametrize("held", [False, True])
def test_a_change_is_priced_by_what_the_changes_before_it_may_have_made_of_the_job(
    tmp_path: Path, *, held: bool
) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    submitted(site, job(9, held=held))
    assert changed(site, JobRequest(uid=-1, job_id=5, partition="licensed")).ok, "it is cheaper"
    dear = JobRequest(uid=-1, job_id=5, licenses="abq:9")
    said = changed(site, dear)
    assert not said.ok, "90 SU in the partition that Slurm may have put it into"
    assert "90.00 SU" in said.say
    assert changed(site, JobRequest(uid=-1, job_id=5, licenses="abq:3")).ok
    assert changed(site, JobRequest(uid=-1, job_id=5, released=True)).ok
    assert site.free() == 0


def looked_at(site: GateCore, what: JobRequest, *, at_us: int = 0) -> None:
    """Report a poll that shows the job; it follows the last change, unless a time is given."""
    at_us = at_us or now_us() + POLL_MARGIN_US + 1_000_000
    claim = HoldRequest(cluster=CLUSTER, job_id=5, description=what, is_exact=True)
    with site.store.transaction():
        site.upkeep.place_hold(claim, "alice", at_us)
        site.upkeep.record_poll(CLUSTER, at_us, at_us)
        assert site.upkeep.place_hold(claim, "alice", at_us).is_paid


def test_the_queues_word_ends_what_a_job_may_be(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    submitted(site, job(9))
    assert changed(site, JobRequest(uid=-1, job_id=5, partition="licensed")).ok
    dear = JobRequest(uid=-1, job_id=5, licenses="abq:9")
    looked_at(site, job(9))
    assert changed(site, dear).ok, "Slurm has refused the other partition"
    looked_at(site, job(9, licenses="abq:9"))
    site.keeper.load()
    assert not changed(site, JobRequest(uid=-1, job_id=5, partition="licensed")).ok


def test_the_queues_word_counts_for_what_costs_the_same(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    submitted(site, job(9, licenses="abq:1"))
    assert changed(site, JobRequest(uid=-1, job_id=5, partition="licensed")).ok
    looked_at(site, job(9, licenses="abq:1", partition="licensed"))
    assert changed(site, JobRequest(uid=-1, job_id=5, num_tasks=9, min_cpus=9)).ok
    assert site.free() == 20
    assert not changed(site, JobRequest(uid=-1, job_id=5, licenses="abq:9")).ok


def test_a_job_that_was_changed_too_often_unseen_waits_for_the_queue(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 3000))
    submitted(site, job(9, cpus=4))
    for count in range(1, 9):
        assert changed(site, JobRequest(uid=-1, job_id=5, licenses=f"abq:{count}")).ok
    last = JobRequest(uid=-1, job_id=5, licenses="abq:9")
    refused = changed(site, last)
    assert not refused.ok
    assert "the price of job 5 is unknown, because it changed several times since" in refused.say
    assert changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=1)).ok, "it is a decrease"
    assert not changed(site, JobRequest(uid=-1, job_id=5, max_nodes=1)).ok, "it had no number"
    assert changed(site, JobRequest(uid=-1, job_id=5, num_tasks=2, min_cpus=2)).ok
    assert not changed(site, JobRequest(uid=-1, job_id=5, num_tasks=5, min_cpus=5)).ok
    assert changed(site, JobRequest(uid=-1, job_id=5, licenses="abq:3")).ok, "it may be 8"
    assert not changed(site, JobRequest(uid=-1, job_id=5, licenses="xyz:1")).ok
    assert not changed(site, JobRequest(uid=-1, job_id=5, licenses="abq:9,xyz:1")).ok
    site.ground.put_rules(rules("observe"))
    assert changed(site, last).ok
    site.ground.put_rules(rules())
    looked_at(site, job(9, cpus=2, licenses="abq:9"))
    assert changed(site, last).ok


def test_time_limits_may_be_changed_as_often_as_one_likes(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 200))
    submitted(site, job(9))
    for minutes in (*range(10, 99), *range(99, 1, -1)):
        assert changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=minutes)).ok
    assert site.free() == 100, "Slurm may have refused to make it less"


def test_a_poll_that_began_before_a_change_frees_nothing_of_it(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    submitted(site, job(9))
    longer = JobRequest(uid=-1, job_id=5, time_limit_min=29)
    assert changed(site, longer, at_us=now_us() - 7_000_000).ok
    assert changed(site, longer).ok, "Slurm had refused the first"
    site.look(-1)
    shown(site, 9)
    assert site.free() == 0
    site.keeper.load()
    site.look(-1)
    shown(site, 9)
    assert site.free() == 0
    looked_at(site, job(9))
    assert site.free() == 20


def test_what_a_job_was_between_two_changes_frees_nothing_of_the_second(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    submitted(site, job(9))
    for minutes in (19, 29):
        assert changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=minutes)).ok
    shown(site, 19)
    assert site.free() == 0
    looked_at(site, job(29))
    assert site.free() == 0


def test_a_task_that_differs_is_priced_by_what_it_asks_for(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 20))
    submitted(site, job(9, array="0-1"))
    moved = JobRequest(uid=-1, job_id=5, partition="licensed")
    assert changed(site, moved, "5_1").ok
    site.look(LOOK_MARGIN_S + 1)
    shapes = job(9, array="0-1"), job(9, partition="licensed")
    claim = HoldRequest(cluster=CLUSTER, job_id=5, description=shapes[0], tasks=shapes[1:])
    with site.store.transaction():
        assert site.upkeep.place_hold(claim, "alice", now_us()).is_paid
    assert not changed(site, JobRequest(uid=-1, job_id=5, licenses="abq:9"), "5_1").ok
    assert changed(site, JobRequest(uid=-1, job_id=5, licenses="abq:1"), "5_1").ok


@pytest.mark.parametrize("means", [30, 5])
def test_what_makes_a_job_no_dearer_than_a_change_before_it_passes(
    tmp_path: Path, means: int
) -> None:
    site = GateCore(tmp_path, account("chem", 60))
    submitted(site, job(9, cpus=2))
    assert changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=29)).ok
    site.tell(account("chem", means))
    site.keeper.load()
    assert changed(site, JobRequest(uid=-1, job_id=5, num_tasks=1, min_cpus=1)).ok


def test_changes_are_forgotten_where_nothing_is_enforced_any_more(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    submitted(site, job(9))
    assert changed(site, JobRequest(uid=-1, job_id=5, partition="licensed")).ok
    site.ground.put_rules(rules("off"))
    looked_at(site, job(9, partition="licensed"))
    assert not site.keeper.balances.changed_holds


def test_a_poll_leaves_what_was_asked_for_each_cpu(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    rate = msgspec.structs.replace(RATE, partition="main", weights={"mem": 60 * MICRO})
    site.ground.put_rules(msgspec.structs.replace(rules(), rates=(rate,)))
    shape = msgspec.structs.replace(picture().shapes[0], memory_mib=1 << 20)
    site.ground.put_model(
        msgspec.structs.replace(picture(), selects="cr_core_memory", shapes=(shape,))
    )
    submitted(site, job(9, mem_per_cpu_mib=1024))
    assert site.free() == 20
    shown = job(9, pn_min_memory_mib=1024, num_tasks=1, cpus_per_task=None)
    for minutes in (8, 7):
        assert changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=minutes)).ok
        looked_at(site, msgspec.structs.replace(shown, time_limit_min=minutes))
        assert site.free() == 30 - minutes - 1
    assert not changed(site, JobRequest(uid=-1, job_id=5, num_tasks=8, min_cpus=8)).ok
    assert changed(site, JobRequest(uid=-1, job_id=5, num_tasks=3, min_cpus=3)).ok
    # Only the queue shows changes by other users.
    looked_at(site, job(9, pn_min_memory_mib=2048))
    assert changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=14)).ok
    assert site.free() == 0


def test_a_throttle_is_of_the_whole_array(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 35), arrays="running")
    submitted(site, job(9, array="1-10%1"))
    assert site.free() == 25
    throttle = JobRequest(uid=-1, job_id=5, array="10")
    assert not changed(site, throttle).ok
    assert not changed(site, msgspec.structs.replace(throttle, array="0")).ok, "all at once"
    assert changed(site, msgspec.structs.replace(throttle, array="3")).ok
    assert site.free() == 5
    looked_at(site, job(9, array="3-10%3"))
    assert not changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=11)).ok, "36 of 35"
    assert changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=10)).ok


_CHANGES = st.sampled_from(
    [
        JobRequest(uid=-1, job_id=5, **change)
        for change in (
            {"time_limit_min": 1},
            {"time_limit_min": 12},
            {"num_tasks": 1, "min_cpus": 1},
            {"num_tasks": 4, "min_cpus": 4},
            {"partition": "main"},
            {"partition": "licensed"},
            {"partition": "cheap"},
            {"licenses": "abq:1"},
            {"licenses": "abq:7"},
            {"account": "chem"},
            {"account": "phys"},
            {"released": True},
        )
    ]
)


class Step(NamedTuple):
    """Change of a job, with Slurm's decision about it and the next event at the gate."""

    change: JobRequest
    is_taken: bool
    then: str


_STEPS = st.builds(
    Step,
    _CHANGES,
    st.booleans(),
    st.sampled_from(["", "", "a poll after it", "what the queue was before", "a restart"]),
)


@settings(deadline=None, print_blob=True)
@given(
    held=st.booleans(),
    means=st.tuples(st.integers(20, 200), st.integers(0, 200)),
    steps=st.lists(_STEPS, max_size=12),
    data=st.data(),
)
def test_whatever_slurm_refuses_of_changes_what_may_start_is_held_for(
    means: tuple[int, int], steps: list[Step], data: st.DataObject, *, held: bool
) -> None:
    with TemporaryDirectory() as directory:
        site = GateCore(
            Path(directory), account("chem", means[0]), account("phys", means[1], number=2)
        )
        since_poll = [job(9, held=held)]
        submitted(site, since_poll[0])
        at_us = now_us()
        for step in steps:
            at_us += 1_000_000
            if changed(site, step.change, at_us=at_us).ok and step.is_taken:
                since_poll.append(apply_update(since_poll[-1], step.change))
            if step.then == "a poll after it":
                since_poll = since_poll[-1:]
                at_us += POLL_MARGIN_US + 1_000_000
                looked_at(site, since_poll[0], at_us=at_us)
            elif step.then == "what the queue was before":
                claim = HoldRequest(
                    cluster=CLUSTER,
                    job_id=5,
                    description=data.draw(st.sampled_from(since_poll)),
                    is_exact=True,
                )
                with site.store.transaction():
                    site.upkeep.place_hold(claim, "alice", at_us)
            elif step.then:
                site.keeper.load()
            truth = since_poll[-1]
            if truth.held:
                continue
            needed = site.ground.quote(CLUSTER, truth, now_us()).amount
            holds = site.keeper.balances.holds.values()
            assert sum(one.remaining for one in holds if one.account == truth.account) >= needed
            assert min(site.free(), site.free("phys")) >= 0
        site.store.close()


def test_no_memory_for_each_cpu_is_all_memory_of_a_node(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 30))
    rate = msgspec.structs.replace(RATE, partition="main", weights={"mem": 60 * MICRO})
    site.ground.put_rules(msgspec.structs.replace(rules(), rates=(rate,)))
    shape = msgspec.structs.replace(picture().shapes[0], memory_mib=8 << 10)
    part = msgspec.structs.replace(picture().partitions["main"], def_mem_per_cpu_mib=1024)
    site.ground.put_model(
        msgspec.structs.replace(
            picture(), selects="cr_core_memory", shapes=(shape,), partitions={"main": part}
        )
    )
    assert not site.submit(job(9, mem_per_cpu_mib=0)).ok, "80 SU"
    submitted(site, job(9, mem_per_cpu_mib=1024))
    assert not changed(site, JobRequest(uid=-1, job_id=5, mem_per_cpu_mib=0)).ok


def make_memory_site(directory: Path, su: int) -> GateCore:
    """Make a gate with a rate of one SU per GiB and minute, and nodes of 64 GiB."""
    site = GateCore(directory, account("chem", su))
    rate = msgspec.structs.replace(RATE, partition="main", weights={"mem": 60 * MICRO})
    site.ground.put_rules(msgspec.structs.replace(rules(), rates=(rate,)))
    shape = msgspec.structs.replace(picture().shapes[0], memory_mib=64 << 10)
    site.ground.put_model(
        msgspec.structs.replace(picture(), selects="cr_core_memory", shapes=(shape,))
    )
    return site


WAITS = JobRecord(
    job_id=5,
    uid=1000,
    account="chem",
    partition="main",
    state="PENDING",
    time_limit_s=540,
    nodes=1,
    cpus=1,
    tasks=1,
    min_memory_mib=1024,
    tres_requested="cpu=1,mem=1G,node=1",
)


@pytest.mark.parametrize(
    ("change", "shown", "needed"),
    [
        # squeue of 22.05 and 24.11 after scontrol printed "Invalid feature".
        ({"min_nodes": 20, "max_nodes": 20}, {"cpus": 20}, 200),
        ({"min_nodes": 20, "max_nodes": 20}, {"cpus": 20, "nodes": 20, "tasks": 20}, 200),
        ({"pn_min_memory_mib": 20 << 10}, {"min_memory_mib": 20 << 10}, 200),
        ({"mem_per_cpu_mib": 20 << 10}, {"min_memory_mib": 20 << 10}, 200),
        # Of several fields Slurm may keep one.
        ({"min_nodes": 20, "licenses": "abq:1"}, {"cpus": 20}, 200),
        ({"min_nodes": 20, "pn_min_memory_mib": 100}, {"cpus": 20}, 200),
        ({"min_nodes": 20, "pn_min_memory_mib": 1500}, {"cpus": 20}, 200),
        ({"min_nodes": 20, "mem_per_cpu_mib": 100}, {"cpus": 20}, 200),
        ({"min_nodes": 20, "tres_per_node": "gres/disk:1"}, {"cpus": 20}, 200),
        # And where nothing has become of it.
        ({"min_nodes": 20, "max_nodes": 20}, {}, 10),
        ({"pn_min_memory_mib": 20 << 10}, {}, 10),
        ({"num_tasks": 20, "min_cpus": 20, "mem_per_cpu_mib": 1024}, {}, 10),
    ],
)
def test_the_hold_covers_a_rejected_update_that_slurm_applies_in_part(
    tmp_path: Path, change: dict[str, Any], shown: dict[str, int], needed: int
) -> None:
    site = make_memory_site(tmp_path, 300)
    submitted(site, job(9, pn_min_memory_mib=1024))
    assert changed(site, JobRequest(uid=-1, job_id=5, **change)).ok
    for _ in range(2):
        looked_at(site, describe_record(msgspec.structs.replace(WAITS, **shown)))
        assert site.free() == 300 - needed
        site.keeper.load()


def test_the_hold_covers_memory_per_cpu_on_several_nodes(tmp_path: Path) -> None:
    site = make_memory_site(tmp_path, 3000)
    submitted(site, job(9, cpus=16, min_nodes=2, max_nodes=2, mem_per_cpu_mib=1024))
    assert site.free() == 3000 - 160
    assert changed(site, JobRequest(uid=-1, job_id=5, mem_per_cpu_mib=8 << 10)).ok
    tres = "cpu=16,mem=16G,node=2"
    more = {"nodes": 2, "cpus": 16, "tasks": 16, "tres_requested": tres}
    record = msgspec.structs.replace(WAITS, **more, min_memory_mib=8 << 10)
    looked_at(site, describe_record(record))
    assert site.free() == 3000 - 1280, "it looks as if each node had 8 GiB, as its TRES say"


def test_the_hold_for_an_update_of_one_task_stays_while_the_array_waits(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 100))
    submitted(site, job(9, array="0-3"))
    assert changed(site, JobRequest(uid=-1, job_id=5, num_tasks=2, min_cpus=2), "5_1").ok
    assert changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=4), "5").ok
    for _ in range(3):
        # squeue shows a waiting task as its array is.
        looked_at(site, job(4, array="0-3"))
        assert site.free() == 20, "all tasks count as if they were changed"
        site.keeper.load()
    assert not changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=14), "5_1").ok
    assert changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=11), "5_1").ok


def test_the_hold_of_a_waiting_array_shrinks_once_the_queue_shows_less(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 100))
    submitted(site, job(9, cpus=2, array="0-3"))
    assert site.free() == 20
    assert changed(site, JobRequest(uid=-1, job_id=5, num_tasks=1, min_cpus=1), "5").ok
    looked_at(site, job(9, array="0-3"))
    assert site.free() == 60
    looked_at(site, job(9, array="0-1,3"))
    assert site.free() == 70


def test_the_hold_shrinks_once_the_queue_shows_fewer_nodes(tmp_path: Path) -> None:
    site = make_memory_site(tmp_path, 300)
    submitted(site, job(9, cpus=4, min_nodes=4, max_nodes=4, pn_min_memory_mib=1024))
    assert site.free() == 260
    assert changed(site, JobRequest(uid=-1, job_id=5, min_nodes=1, max_nodes=1)).ok
    shown = {"cpus": 4, "tasks": 1, "tres_requested": "cpu=4,mem=1G,node=1"}
    looked_at(site, describe_record(msgspec.structs.replace(WAITS, **shown)))
    assert site.free() == 290


def test_the_gate_prices_a_running_job_by_its_memory_per_cpu(tmp_path: Path) -> None:
    site = make_memory_site(tmp_path, 300)
    submitted(site, job(9, cpus=4, mem_per_cpu_mib=1024))
    assert changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=8)).ok
    runs = msgspec.structs.replace(
        WAITS,
        state="RUNNING",
        cpus=4,
        tasks=4,
        tres_requested="",
        tres_allocated="cpu=4,mem=4G,node=1",
    )
    claim = HoldRequest(cluster=CLUSTER, job_id=5, description=describe_record(runs), started=True)
    at_us = now_us() + POLL_MARGIN_US + 1_000_000
    with site.store.transaction():
        site.upkeep.record_poll(CLUSTER, at_us, at_us)
        site.upkeep.place_hold(claim, "alice", at_us)
    again = JobRequest(uid=-1, job_id=5, num_tasks=16, min_cpus=16, begin_us=1)
    assert changed(site, again).ok
    assert site.free() == 300 - 160


def test_an_update_after_a_cancelled_task_adds_the_cost_of_the_remaining_tasks(
    tmp_path: Path,
) -> None:
    site = GateCore(tmp_path, account("chem", 50))
    submitted(site, job(9, array="0-3"))
    looked_at(site, job(9, array="0-2"))
    assert site.free() == 20
    assert changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=12), "5").ok
    assert site.free() == 11


def test_array_updates_that_a_poll_has_shown_do_not_accumulate(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 9000))
    submitted(site, job(9, array="0-3"))
    assert changed(site, JobRequest(uid=-1, job_id=5, req_nodes="n1"), "5_1").ok
    for count in range(2, 22):
        changes: dict[str, Any] = {"num_tasks": count, "min_cpus": count}
        changes["time_limit_min"] = 9 + count
        assert changed(site, JobRequest(uid=-1, job_id=5, **changes), "5").ok
        looked_at(site, job(9 + count, cpus=count, array="0-3"))


@pytest.mark.parametrize("others", [0, 2, 8])
def test_different_tasks_displace_no_description_of_the_array(tmp_path: Path, others: int) -> None:
    site = GateCore(tmp_path, account("chem", 1000))
    submitted(site, job(9, cpus=16, array="0-15", partition="cheap"))
    nodes = JobRequest(uid=-1, job_id=5, min_nodes=8, max_nodes=8, pn_min_cpus=16)
    assert changed(site, nodes, "5").ok
    at_us = now_us() + POLL_MARGIN_US + 1_000_000
    shown = [job(9 - minutes, cpus=16, partition="cheap") for minutes in range(others + 1)]
    whole = msgspec.structs.replace(shown[0], array="0-15")
    claim = HoldRequest(
        cluster=CLUSTER, job_id=5, description=whole, tasks=tuple(shown[1:]), started=True
    )
    with site.store.transaction():
        site.upkeep.record_poll(CLUSTER, at_us, at_us)
        site.upkeep.place_hold(claim, "alice", at_us)
    said = changed(site, JobRequest(uid=-1, job_id=5, partition="main"), "5")
    assert not said.ok


@pytest.mark.parametrize(
    ("submitted_as", "change"),
    [
        # slurmctld keeps the fields that it set before the rejected one.
        ({"pn_min_memory_mib": 1024}, {"min_nodes": 20, "max_nodes": 20, "pn_min_memory_mib": 100}),
        ({"pn_min_memory_mib": 1024}, {"min_nodes": 20, "max_nodes": 20, "licenses": "abq:1"}),
        ({"licenses": "abq:9"}, {"partition": "licensed", "licenses": "abq:1"}),
    ],
)
def test_an_update_is_priced_as_if_slurm_applied_a_part_of_it(
    tmp_path: Path, submitted_as: dict[str, Any], change: dict[str, Any]
) -> None:
    is_of_memory = "min_nodes" in change
    site = (
        make_memory_site(tmp_path, 50) if is_of_memory else GateCore(tmp_path, account("chem", 50))
    )
    submitted(site, job(9, **submitted_as))
    assert not changed(site, JobRequest(uid=-1, job_id=5, **change)).ok
    for field in change.keys() - {"min_nodes", "max_nodes", "partition"}:
        lower = JobRequest(uid=-1, job_id=5, **{field: change[field]})
        assert changed(site, lower).ok, "one that lowers requests alone"


@pytest.mark.parametrize(
    ("submitted_as", "change", "shown", "needed"),
    [
        ({"time_limit_min": None}, {"time_limit_min": 9}, {}, 10),
        ({"partition": ""}, {"partition": "cheap"}, {"partition": "cheap"}, 0),
        ({"partition": "main,cheap"}, {"partition": "cheap"}, {"partition": "cheap"}, 0),
        ({"exclusive": True}, {"time_limit_min": 8}, {"time_limit_min": 8}, 9),
        (
            {"num_tasks": 16, "min_cpus": 16, "pn_min_cpus": 16},
            {"num_tasks": 1, "min_cpus": 1, "pn_min_cpus": 1},
            {},
            10,
        ),
    ],
)
def test_the_hold_shrinks_once_the_queue_shows_a_decrease(
    tmp_path: Path,
    submitted_as: dict[str, Any],
    change: dict[str, Any],
    shown: dict[str, Any],
    needed: int,
) -> None:
    site = GateCore(tmp_path, account("chem", 3000))
    submitted(site, msgspec.structs.replace(job(9), **submitted_as))
    assert changed(site, JobRequest(uid=-1, job_id=5, **change)).ok
    looked_at(site, msgspec.structs.replace(job(9), **shown))
    assert site.free() == 3000 - needed


def test_a_job_that_begins_later_is_paid_by_what_the_queue_shows(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 70))
    later = msgspec.structs.replace(job(9), time_limit_min=None, begin_us=2**60)
    submitted(site, later)
    assert changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=9)).ok
    looked_at(site, job(9, begin_us=2**60))
    site.tell(account("chem", 30))
    looked_at(site, job(9))
    assert site.free() == 20


def test_memory_per_cpu_of_a_throttled_array_stays_known(tmp_path: Path) -> None:
    site = make_memory_site(tmp_path, 900)
    submitted(site, job(9, array="0-3%2", mem_per_cpu_mib=1024))
    assert changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=8), "5").ok
    waiting = msgspec.structs.replace(WAITS, time_limit_s=480, array_job_id=5, array_task="0-3%2")
    shown = describe_record(waiting)
    shorter = msgspec.structs.replace(shown, array="", job_id=0, time_limit_min=5)
    claim = HoldRequest(cluster=CLUSTER, job_id=5, description=shown, tasks=(shorter,))
    at_us = now_us() + POLL_MARGIN_US + 1_000_000
    with site.store.transaction():
        site.upkeep.record_poll(CLUSTER, at_us, at_us)
        site.upkeep.place_hold(claim, "alice", at_us)
    assert changed(site, JobRequest(uid=-1, job_id=5, num_tasks=8, min_cpus=8), "5").ok
    assert site.free() == 900 - 4 * 8 * 9


def test_the_hold_covers_nodes_that_slurm_keeps_without_accounting(tmp_path: Path) -> None:
    site = make_memory_site(tmp_path, 300)
    submitted(site, job(9, pn_min_memory_mib=1024))
    assert changed(site, JobRequest(uid=-1, job_id=5, min_nodes=20, max_nodes=20)).ok
    looked_at(site, describe_record(msgspec.structs.replace(WAITS, account="", cpus=20)))
    assert site.free() == 100


def test_fewer_cpus_of_a_task_may_be_more_tasks(tmp_path: Path) -> None:
    site = make_memory_site(tmp_path, 300)
    asked = {"cpus_per_task": 4, "min_cpus": 4, "pn_min_memory_mib": 1024}
    submitted(site, msgspec.structs.replace(job(9, array="0-3"), **asked))
    assert changed(site, JobRequest(uid=-1, job_id=5, cpus_per_task=1), "5_1").ok
    free = site.free()
    tres = {"cpus": 4, "tasks": 1, "tres_requested": "cpu=4,mem=1G,node=1"}
    waiting = msgspec.structs.replace(WAITS, array_job_id=5, array_task="0-3", **tres)
    looked_at(site, describe_record(waiting))
    assert site.free() == free
