"""Admission decisions of the gate: mode, limits, size of the hold, and message."""

from pathlib import Path

import msgspec
import pytest

from harness.gate import CLUSTER, DAY_US, GateCore, account, job, now_us, rules
from steward.bank.gate import token
from steward.bank.gate.requests import HoldRequest, PluginRequest, ShownJob
from steward.bank.money import MICRO
from steward.bank.records import AllocationBooks, GateBooks, ModeRule, UserBooks
from steward.bank.settings import RejectionSettings


def test_where_nothing_fits_it_is_said_whom_to_ask_and_what_else_can_pay(tmp_path: Path) -> None:
    alice, spent_up = UserBooks(name="alice"), UserBooks(name="alice", limit=5 * MICRO)
    site = GateCore(
        tmp_path,
        account("chem", 0, owners=("olga", "carl")),
        account("lab", 0, number=2, payer="chem", users=(alice,)),
        account("math", 100, number=3, users=(alice,)),
        account("bio", 100, number=4, users=(UserBooks(name="bob"),)),
        account("old", 100, number=5, users=(alice,), closed=True),
        account("art", 100, number=6, users=(spent_up,)),
    )
    said = site.submit(job(9)).say.splitlines()
    assert said[2:] == [
        "  Your account math can pay it (--account=math).",
        "  To get more for account chem, ask its owners: olga or carl.",
    ]
    assert "account lab, ask its owners: olga or carl" in site.submit(job(9, account="lab")).say
    site.tell(account("chem", 0))
    assert site.submit(job(9)).say.endswith("account chem, ask an operator of the cluster.")
    assert "Your account" not in site.submit(job(9)).say


def test_without_a_time_limit_it_is_said_what_is_reckoned_with(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 10))
    said = site.submit(job(9, time_limit_min=None)).say
    assert "The job has no time limit, so the price is for 01:00:00: a shorter --time" in said
    assert "--time=9)" in said
    assert "no time limit" not in site.submit(job(60)).say


@pytest.mark.parametrize(
    ("rule", "mode"),
    [
        (ModeRule(mode="observe", account="chem"), "observe"),
        (ModeRule(mode="observe", partition="main"), "observe"),
        (ModeRule(mode="observe", partition="cheap"), "enforce"),
        (ModeRule(mode="off", cluster=CLUSTER), "off"),
        (ModeRule(mode="off", cluster="other"), "enforce"),
    ],
)
def test_the_rule_that_names_most_holds(tmp_path: Path, rule: ModeRule, mode: str) -> None:
    site = GateCore(tmp_path, account("chem", 5))
    site.ground.put_rules(rules("enforce", rule))
    said = site.submit(job(99))
    assert said.ok == (mode != "enforce")
    assert bool(said.admin_comment) == (mode == "observe")
    kinds = [
        (fact.kind, fact.rejection and fact.rejection.mode) for fact in site.store.fetch_facts(0, 9)
    ]
    told = {"enforce": [("rejection", "enforce")], "off": []}
    assert kinds == told.get(mode, [("hold.placed", None), ("rejection", "observe")])


def test_of_several_partitions_the_strictest_holds(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 5))
    site.ground.put_rules(rules("enforce", ModeRule(mode="off", partition="cheap")))
    assert site.submit(job(99, partition="cheap")).ok
    assert not site.submit(job(99, partition="cheap,main")).ok
    assert not site.submit(job(99, partition="")).ok, "the default partition is main"


def test_on_paper_the_same_is_refused_as_in_earnest(tmp_path: Path) -> None:
    wanted = [job(9), job(99), job(4), job(9), job(2), job(3), job(1, uid=1001)]
    refused = {}
    for mode in ("observe", "enforce"):
        where = tmp_path / mode
        where.mkdir()
        site = GateCore(where, account("chem", 20), mode=mode)
        for one in wanted:
            site.submit(one)
        rows = [fact.rejection for fact in site.store.fetch_facts(0, 99) if fact.rejection]
        refused[mode] = [(row.amount, row.user, row.reason) for row in rows]
    assert refused["observe"] == refused["enforce"]
    assert [amount // MICRO for amount, _, _ in refused["enforce"]] == [100, 10, 4]


def test_accounts_that_may_not_pay(tmp_path: Path) -> None:
    listed = account("math", 9, number=2, only_listed=True, users=(UserBooks(name="bob"),))
    closed = account("old", 9, number=3, closed=True)
    site = GateCore(tmp_path, account("chem", 9), listed, closed)
    assert "unknown account phys" in site.submit(job(1, account="phys")).say
    assert "closed" in site.submit(job(1, account="old")).say
    assert "alice may not charge" in site.submit(job(1, account="math")).say
    assert site.submit(job(1, account="math", uid=1001)).ok
    assert site.submit(job(1, account="")).ok, "alice's default account is chem"
    assert "names no account" in site.submit(job(1, account="", uid=1001)).say
    assert "has no rate" in site.submit(job(1, partition="nothing")).say
    site.ground.bank = msgspec.structs.replace(site.ground.bank, unknown_accounts="allow")
    said = site.submit(job(1, account="phys"))
    assert (said.ok, said.admin_comment) == (True, "")


def test_limits_of_users_and_shares_of_accounts(tmp_path: Path) -> None:
    users = (UserBooks(name="alice", limit=20 * MICRO, spent=5 * MICRO),)
    site = GateCore(tmp_path, account("chem", 100, users=users), hold_share=0.3)
    assert site.submit(job(9)).ok
    said = site.submit(job(9))
    assert "limit of user alice in account chem leaves 5.00 SU" in said.say
    assert "limit of 20.00 SU, 5.00 SU are spent and 10.00 SU held" in said.say
    assert "--time=4)" in said.say
    assert site.submit(job(24, uid=1001)).ok
    assert "grow by only 5.00 SU" in site.submit(job(9, uid=1001)).say


def test_a_parent_pays_and_exempt_users_are_never_refused(tmp_path: Path) -> None:
    child = account("lab", 0, number=2, payer="chem", allocations=())
    site = GateCore(tmp_path, account("chem", 10), child, exempt=("op",))
    assert site.submit(job(7, account="lab")).ok
    assert site.free() == 2
    assert "Account lab (paid by chem)" in site.submit(job(7, account="lab")).say
    assert site.submit(job(99, uid=1002)).ok
    assert site.free() == -98
    assert "overdrawn" in site.submit(job(1)).say
    assert "overdrawn" in site.submit(job(1, held=True)).say, "also one that holds nothing yet"
    assert site.submit(job(99, partition="cheap")).ok, "what is free is free"


def test_what_is_not_eligible_yet_holds_nothing(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 10))
    later = now_us() + DAY_US
    for one in (job(9, held=True), job(9, begin_us=later)):
        said = site.submit(one)
        assert token.find_tokens(said.admin_comment)[0].amount == 0
    assert site.free() == 10
    soon = site.submit(job(4, begin_us=now_us() + 1_000_000))
    assert token.find_tokens(soon.admin_comment)[0].amount == 5 * MICRO
    with site.store.transaction():
        seen = ShownJob(cluster=CLUSTER, job_id=5, uid=1000, admin_comment=said.admin_comment)
        site.upkeep.confirm([seen], now_us())
        claim = HoldRequest(cluster=CLUSTER, job_id=5, description=job(4))
        covered = site.upkeep.place_hold(claim, "alice", now_us())
    assert covered.is_paid
    assert covered.hold is not None
    assert covered.hold.remaining == 5 * MICRO
    assert site.free() == 0


@pytest.mark.parametrize(("arrays", "held"), [("full", 80), ("running", 20), ("start", 0)])
def test_arrays_hold_by_the_sites_rule(tmp_path: Path, arrays: str, held: int) -> None:
    site = GateCore(tmp_path, account("chem", 100), arrays=arrays)
    assert site.submit(job(9, array="1-8%2")).ok
    assert site.free() == 100 - held


def test_a_refusal_may_send_the_job_elsewhere(tmp_path: Path) -> None:
    instead = {"chem": RejectionSettings(partition="cheap")}
    site = GateCore(tmp_path, account("chem", 5), rejection=instead)
    said = site.submit(job(99))
    assert (said.ok, said.partition) == (True, "cheap")
    assert said.say.endswith("the job was moved to partition cheap.")
    assert [fact.kind for fact in site.store.fetch_facts(0, 9)] == ["hold.placed", "rejection"]
    dear = {"chem": RejectionSettings(qos="low")}
    site.ground.bank = msgspec.structs.replace(site.ground.bank, rejection=dear)
    assert not site.submit(job(99)).ok, "what it would cost there cannot be paid either"


def test_a_federations_sibling_has_no_second_hold(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 100))
    other = msgspec.structs.replace(site.ground.models[CLUSTER], cluster="d")
    site.ground.put_model(other)
    rates = tuple(msgspec.structs.replace(rate, cluster="") for rate in rules().rates)
    site.ground.put_rules(msgspec.structs.replace(rules(), rates=rates))
    comment = site.submit(job(9)).admin_comment
    sibling = job(19, admin_comment=comment)
    assert site.submit(sibling, cluster="d").ok
    assert site.free() == 80, "the dearer of the two"
    with site.store.transaction():
        seen = ShownJob(cluster=CLUSTER, job_id=1, uid=1000, admin_comment=comment)
        site.upkeep.confirm([seen], now_us())
    again = site.submit(job(9, admin_comment=comment))
    assert again.ok
    assert site.free() == 70, "a copied token pays for nothing"
    assert len(token.find_tokens(again.admin_comment)) == 1
    forged = comment.replace("steward=1.", "steward=1.a", 1)
    assert site.submit(job(9, admin_comment=forged)).ok
    assert site.free() == 60


def test_a_change_needs_the_difference_or_another_account(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 30), account("phys", 15, number=2))
    comment = site.submit(job(9)).admin_comment
    with site.store.transaction():
        seen = ShownJob(cluster=CLUSTER, job_id=5, uid=1000, admin_comment=comment, started=True)
        site.upkeep.confirm([seen], now_us())
    longer = PluginRequest(v=1, op="modify", cluster=CLUSTER, job=job(19, uid=-1, job_id=5)).job
    assert site.modify(longer).ok
    assert site.modify(longer).ok, "Slurm asks once for each of an array's records"
    assert site.free() == 10
    assert not site.modify(job(39, uid=-1, job_id=5)).ok
    assert not site.modify(job(19, uid=-1, job_id=5, account="phys")).ok
    assert (site.free(), site.free("phys")) == (10, 15)
    site.tell(account("chem", 30), account("phys", 25, number=2))
    assert site.modify(job(19, uid=-1, job_id=5, account="phys")).ok
    assert (site.free(), site.free("phys")) == (10, 5), "Slurm may yet refuse either: all hold"
    with site.store.transaction():
        site.upkeep.record_poll(CLUSTER, now_us() + 60_000_000, now_us())
        claim = HoldRequest(cluster=CLUSTER, job_id=5, description=job(9), started=True)
        assert site.upkeep.place_hold(claim, "alice", now_us()).is_paid
    assert (site.free(), site.free("phys")) == (20, 25), "the queue did not show the change"


def test_a_stranger_changes_no_hold(tmp_path: Path) -> None:
    """slurmctld asks its plugins before it checks the job's owner."""
    site = GateCore(tmp_path, account("chem", 30), account("phys", 30, number=2))
    comment = site.submit(job(9)).admin_comment
    with site.store.transaction():
        seen = ShownJob(cluster=CLUSTER, job_id=5, uid=1000, admin_comment=comment, started=True)
        site.upkeep.confirm([seen], now_us())
        for changes in (job(19, uid=-1, job_id=5), job(9, uid=-1, job_id=5, account="phys")):
            ask = PluginRequest(v=1, op="modify", cluster=CLUSTER, job=changes, by=65534)
            before = site.store.write_count
            said = site.keeper.modify(ask, "nobody", now_us(), is_lenient=False)
            assert not said.ok
            assert said.say == "Steward: permission denied: the job belongs to another user"
            assert site.store.write_count == before, "a stranger writes nothing"
    assert (site.free(), site.free("phys")) == (20, 30)


def test_a_change_that_the_queue_shows_is_held_once(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 25))
    comment = site.submit(job(9)).admin_comment
    with site.store.transaction():
        site.upkeep.confirm(
            [ShownJob(cluster=CLUSTER, job_id=5, uid=1000, admin_comment=comment)], now_us()
        )
    assert site.modify(job(19, uid=-1, job_id=5)).ok
    assert site.free() == 5
    with site.store.transaction():
        claim = HoldRequest(cluster=CLUSTER, job_id=5, description=job(19))
        assert site.upkeep.place_hold(claim, "alice", now_us()).is_paid
    assert site.free() == 5
    assert site.modify(job(999, uid=-1, job_id=77)).ok, "one without a hold is looked at later"


def test_holds_move_when_an_allocation_ends(tmp_path: Path) -> None:
    begin = now_us()
    first = AllocationBooks(number=1, balance=50 * MICRO, end_us=begin + DAY_US)
    last = AllocationBooks(number=2, balance=0)
    following = AllocationBooks(number=3, balance=15 * MICRO, begin_us=begin + DAY_US)
    site = GateCore(tmp_path, account("chem", 0, allocations=(first, last, following)))
    comments = [site.submit(job(9)).admin_comment for _ in range(3)]
    with site.store.transaction():
        for number, comment in enumerate(comments, 1):
            seen = ShownJob(
                cluster=CLUSTER,
                job_id=number,
                uid=1000,
                admin_comment=comment,
                started=number == 1,
            )
            site.upkeep.confirm([seen], begin)
    refused = site.submit(job(40))
    assert "The next allocation, 15.00 SU, begins on " in refused.say
    with site.store.transaction():
        site.upkeep.tick(begin)
        site.upkeep.tick(begin + DAY_US)
        assert site.upkeep.allocation_mover.sum_started(1) == 10 * MICRO
        stranded = site.upkeep.allocation_mover.list_stranded()
    assert [hold.job_id for hold in stranded] == [3]
    assert site.free(at_us=begin + DAY_US) == 5
    more = msgspec.structs.replace(following, balance=20 * MICRO)
    site.tell(account("chem", 0, allocations=(last, more)), at_us=begin + DAY_US)
    assert site.upkeep.allocation_mover.list_stranded() == []
    with site.store.transaction():
        late = GateBooks(seq=0, accounts=(), after=0)
        assert site.upkeep.apply_books(late, begin) == site.seq, "older news are passed over"


def test_a_job_that_starts_after_its_allocation_ended_is_held_for_all_the_same(
    tmp_path: Path,
) -> None:
    begin = now_us()
    first = AllocationBooks(number=1, balance=50 * MICRO, end_us=begin + DAY_US)
    last = AllocationBooks(number=2, balance=5 * MICRO)
    site = GateCore(tmp_path, account("chem", 0, allocations=(first, last)))
    comment = site.submit(job(9)).admin_comment
    with site.store.transaction():
        site.upkeep.tick(begin + DAY_US)
    assert site.free(at_us=begin + DAY_US) == 5, "it waits for money"
    seen = ShownJob(cluster=CLUSTER, job_id=1, uid=1000, admin_comment=comment, started=True)
    with site.store.transaction():
        site.upkeep.confirm([seen], begin + DAY_US)
    assert site.free(at_us=begin + DAY_US) == -5
