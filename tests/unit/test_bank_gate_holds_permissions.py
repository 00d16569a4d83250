"""Changes of jobs by other users than the owner: the gate prices each and grants it once."""

from pathlib import Path

import pytest

from harness.gate import CLUSTER, GateCore, account, job, now_us
from steward.bank.gate.requests import Allowance, HoldRequest, PluginReply, PluginRequest, ShownJob
from steward.bank.records import JobRequest
from steward.core.access import ClusterRoles

OWNER, COORDINATOR, OPERATOR, STRANGER, SLURM = 1000, 1001, 1002, 1003, 64030
NAMES = {OWNER: "alice", COORDINATOR: "bob", OPERATOR: "op", STRANGER: "mallory", SLURM: "slurm"}
RUN = 2
"""Restart count of the run for which changes are granted."""
RELEASE = JobRequest(uid=-1, job_id=5, released=True)
DENIED = "Steward: permission denied: the job belongs to another user"


@pytest.fixture
def site(tmp_path: Path) -> GateCore:
    """Make a Site with 10 SU, a job of 10 SU that its owner holds, and permissions."""
    site = GateCore(tmp_path, account("chem", 10))
    site.ground.slurm_uids = frozenset({0, SLURM})
    standing = ClusterRoles(admins=frozenset({"op"}), coordinators={"chem": frozenset({"bob"})})
    site.ground.put_roles(CLUSTER, standing)
    queued(site, job(9, held=True))
    return site


def queued(site: GateCore, what: JobRequest, number: int = 5) -> None:
    said = site.submit(what)
    assert said.ok, said.say
    with site.store.transaction():
        seen = ShownJob(cluster=CLUSTER, job_id=number, uid=OWNER, admin_comment=said.admin_comment)
        site.upkeep.confirm([seen], now_us())


def changed(site: GateCore, what: JobRequest, by: int, *, grant: bool = False) -> PluginReply:
    ask = PluginRequest(v=1, op="modify", cluster=CLUSTER, job=what, jobs=str(what.job_id), by=by)
    with site.store.transaction():
        if grant:
            return site.keeper.grant(ask, NAMES[by], RUN, now_us())
        return site.keeper.modify(ask, NAMES.get(by, ""), now_us(), is_lenient=False)


@pytest.mark.parametrize("by", [OWNER, COORDINATOR, OPERATOR, SLURM])
@pytest.mark.parametrize(
    "change",
    [
        RELEASE,
        JobRequest(uid=-1, job_id=5, time_limit_min=3000),
        JobRequest(uid=-1, job_id=5, released=True, num_tasks=8, min_cpus=8),
        JobRequest(uid=-1, job_id=5, released=True, account="phys"),
    ],
)
def test_a_change_is_priced_whoever_sends_it(site: GateCore, by: int, change: JobRequest) -> None:
    site.tell(account("chem", 9), account("phys", 9, number=2))
    said = changed(site, change, by)
    assert not said.ok
    assert said.say
    assert (site.free(), site.free("phys")) == (9, 9)


@pytest.mark.parametrize("by", [OWNER, COORDINATOR, OPERATOR, SLURM])
def test_a_change_that_can_be_paid_is_held_for_once(site: GateCore, by: int) -> None:
    assert changed(site, RELEASE, by).ok
    assert site.free() == 0
    assert changed(site, RELEASE, by).ok, "Slurm asks once for each of an array's records"
    assert site.free() == 0


@pytest.mark.parametrize("means", [9, 10])
def test_a_stranger_learns_and_changes_nothing(site: GateCore, means: int) -> None:
    site.tell(account("chem", means))
    before = site.store.read_changes
    for change in (RELEASE, JobRequest(uid=-1, job_id=5, time_limit_min=1)):
        said = changed(site, change, STRANGER)
        assert (said.ok, said.say) == (False, DENIED)
    assert site.store.read_changes == before
    assert site.free() == means


def test_a_stranger_is_left_to_slurm_where_nothing_is_enforced(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 10), mode="observe")
    queued(site, job(9))
    assert changed(site, RELEASE, STRANGER).ok


def test_root_passes_and_is_held_for_and_marked(site: GateCore) -> None:
    site.tell(account("chem", 9))
    assert changed(site, RELEASE, 0).ok
    assert site.free() == -1, "further jobs are refused"
    refusal = site.store.fetch_facts(0, 100)[-1].rejection
    assert refusal is not None
    assert "admitted for root" in refusal.reason
    claim = HoldRequest(cluster=CLUSTER, job_id=5, description=job(9))
    with site.store.transaction():
        assert site.upkeep.place_hold(claim, "alice", now_us()).is_paid, "the poll lets it be, too"
    assert site.free() == -1
    longer = JobRequest(uid=-1, job_id=5, time_limit_min=3000)
    assert not changed(site, longer, OWNER).ok, "what root let pass is no leave for its owner"


def test_an_operator_allows_one_job_until_a_time(site: GateCore) -> None:
    site.tell(account("chem", 9))
    until_us = now_us() + 60_000_000
    with site.store.transaction():
        site.keeper.allow(Allowance(cluster=CLUSTER, job_id=5, by="op", until_us=until_us))
    site.keeper.load()
    assert changed(site, RELEASE, OWNER).ok
    assert site.free() == -1
    assert "allowed by op" in site.store.fetch_facts(0, 100)[-1].rejection.reason  # type: ignore[union-attr]
    with site.store.transaction():
        site.upkeep.tick(until_us)
    assert not changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=3000), OWNER).ok
    assert list(site.store.load_allowances()) == []


def test_what_makes_a_job_no_dearer_passes_also_without_means(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 10))
    queued(site, job(9))
    site.tell(account("chem", 0, closed=True))
    for by in (OWNER, COORDINATOR, SLURM):
        site.ground.put_roles(CLUSTER, ClusterRoles(coordinators={"chem": frozenset({"bob"})}))
        site.ground.slurm_uids = frozenset({0, SLURM})
        assert changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=5), by).ok
    assert not changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=50), OWNER).ok


def test_a_grant_is_consumed_once_by_slurmuser(site: GateCore) -> None:
    assert changed(site, RELEASE, OWNER, grant=True).ok
    assert site.free() == 0
    site.tell(account("chem", 5))
    assert changed(site, RELEASE, SLURM).ok, "it is granted"
    assert not changed(site, RELEASE, SLURM).ok, "once"


def test_a_grant_is_for_its_change_alone(site: GateCore) -> None:
    assert changed(site, RELEASE, OWNER, grant=True).ok
    site.tell(account("chem", 5))
    assert not changed(site, JobRequest(uid=-1, job_id=5, time_limit_min=3000), SLURM).ok
    assert not changed(site, RELEASE, COORDINATOR).ok, "it is Steward that sends it"


def test_an_unconsumed_grant_gives_its_hold_back(site: GateCore) -> None:
    assert changed(site, RELEASE, OWNER, grant=True).ok
    assert site.free() == 0
    with site.store.transaction():
        site.upkeep.tick(now_us() + 11_000_000)
    assert site.free() == 10
    site.tell(account("chem", 5))
    assert not changed(site, RELEASE, SLURM).ok


@pytest.mark.parametrize("restarts", [0, RUN, RUN + 1])
def test_a_grant_is_for_its_run_alone(site: GateCore, restarts: int) -> None:
    assert changed(site, RELEASE, OWNER, grant=True).ok
    assert site.free() == 0
    with site.store.transaction():
        seen = ShownJob(cluster=CLUSTER, job_id=5, uid=OWNER, restarts=restarts)
        site.upkeep.confirm([seen], now_us())
    is_over = restarts > RUN
    assert site.free() == (10 if is_over else 0), "an earlier poll may be told late"
    site.tell(account("chem", 5))
    assert changed(site, RELEASE, SLURM).ok != is_over


@pytest.mark.parametrize("by", [OWNER, STRANGER])
def test_what_cannot_be_paid_is_not_granted(site: GateCore, by: int) -> None:
    site.tell(account("chem", 9))
    said = changed(site, RELEASE, by, grant=True)
    assert not said.ok
    assert said.say
    assert not changed(site, RELEASE, SLURM).ok


@pytest.mark.parametrize("by", [COORDINATOR, OPERATOR])
def test_a_job_that_was_just_submitted_is_not_changed_unseen(site: GateCore, by: int) -> None:
    assert not site.submit(job(90)).ok
    site.tell(account("chem", 100))
    assert site.submit(job(20)).ok
    said = changed(site, JobRequest(uid=-1, job_id=6, time_limit_min=3000), by)
    assert "the bank has not seen the new job 6 yet" in said.say
    assert changed(site, JobRequest(uid=-1, job_id=6, time_limit_min=3000), STRANGER).ok


def test_a_queued_job_that_cannot_be_paid_is_not_released_by_anybody(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 5))
    site.ground.slurm_uids = frozenset({0, SLURM})
    site.ground.put_roles(CLUSTER, ClusterRoles(admins=frozenset({"op"})))
    claim = HoldRequest(cluster=CLUSTER, job_id=5, description=job(9))
    with site.store.transaction():
        assert not site.upkeep.place_hold(claim, "alice", now_us()).is_paid
    assert site.free() == 5
    for by in (OWNER, OPERATOR, SLURM):
        assert not changed(site, RELEASE, by).ok
    site.tell(account("chem", 10))
    assert changed(site, RELEASE, SLURM).ok
