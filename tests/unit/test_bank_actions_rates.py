"""Rates, modes and times that operators set, and the proof of the ledger."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import bank
from harness.events import NOON
from harness.gate import account, job, running, settings_of
from harness.site import ADA, OWNER, Site
from harness.slurm import Stage
from steward.bank.actions.maintenance import compare_holds_with_jobs
from steward.bank.errors import BankUsage
from steward.bank.ledger import Authorship, RejectedJob
from steward.bank.money import MICRO
from steward.bank.records import Hold, Rate
from steward.core.actions import ActionError
from steward.core.events import utc_now
from steward.slurm.cluster_model import ClusterModel, NodeShape


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return bank.make_shared_site(tmp_path)


def test_rates_say_what_they_cost_or_that_it_is_nothing(site: Site) -> None:
    for bad in (
        {},
        {"free": True, "weights": {"cpu": 1}},
        {"weights": {"cpu": -1}},
        {"minimum": -1, "weights": {"cpu": 1}},
        {"weights": {"cpu": 1}, "factors": [factor(day=7)]},
        {"weights": {"cpu": 1}, "factors": [factor(begin_min=5)]},
        {"weights": {"cpu": 1}, "qos_permille": {"lowprio": -1}},
        {"weights": {"cpu": 1}, "ends_permille": {"NODE_FAIL": -500}},
        {"weights": {"cpu": 1}, "cluster": "elsewhere"},
    ):
        with pytest.raises(BankUsage):
            site.ask("bank.rate_create", partition="gpu", **bad)
    made = site.ask("bank.rate_create", partition="gpu", weights={"gres/gpu": MICRO})
    assert made.rates[0].cluster == "c1"
    assert [one.partition for one in site.ask("bank.rate_show", ADA).rates] == ["debug", "gpu"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("foo", "use one of cpu, mem"),
        ("gpu", "use gres/gpu$"),
        ("cpus", "use cpu$"),
        ("CPU", "use cpu$"),
        ("memory", "use mem$"),
        ("gres/gpus", "use gres/gpu$"),
        ("gre/gpu", "use gres/gpu$"),
        ("licenses/matlab", "use license/matlab$"),
        ("gres/", "use one of"),
        ("energy", "a measurement"),
        ("fs/disk", "a measurement"),
    ],
)
def test_what_no_job_is_handed_is_not_weighed(site: Site, name: str, said: str) -> None:
    with pytest.raises(BankUsage, match=said):
        site.ask("bank.rate_create", partition="gpu", weights={name: MICRO})
    assert [one.partition for one in site.ask("bank.rate_show").rates] == ["debug"]


def test_a_gres_that_no_node_has_is_warned_of(site: Site) -> None:
    picture = ClusterModel(cluster="c1", shapes=(NodeShape(tres={"gres/gpu:a100": 4}),))
    with site.ledger.transaction() as t:
        t.set_mark("picture:c1", msgspec.json.encode(picture).decode())
    sound = {"cpu": 1, "gres/gpu": 1, "gres/gpu:a100": 1, "license/matlab@db": 1}
    assert site.ask("bank.rate_create", partition="*", weights=sound).warnings == ()
    told = site.ask("bank.rate_create", partition="*", weights={"gres/gpu:h100": 1}).warnings
    assert told == (
        "no node of cluster c1 has gres/gpu:h100 now; the cluster has gres/gpu, gres/gpu:a100",
    )


def factor(day: int = 1, begin_min: int = 0) -> dict[str, Any]:
    return {"days": [day], "begin_min": begin_min, "end_min": 5, "permille": 1}


def test_a_change_of_a_rate_leaves_the_rest(site: Site) -> None:
    with pytest.raises(BankUsage, match="gpu has no rate to change"):
        site.ask("bank.rate_change", partition="gpu", weights={"cpu": 2})
    with pytest.raises(BankUsage, match="nothing to change"):
        site.ask("bank.rate_change", partition="debug")
    made = site.ask(
        "bank.rate_create", partition="gpu", weights={"cpu": 1}, minimum=3, factors=[factor()]
    )
    site.now += timedelta(minutes=1)
    (changed,) = site.ask("bank.rate_change", partition="gpu", combine="max").rates
    assert (changed.weights, changed.combine, changed.minimum) == ({"cpu": 1}, "max", 3)
    assert changed.factors == made.rates[0].factors
    assert changed.number != made.rates[0].number
    site.now += timedelta(minutes=1)
    (free,) = site.ask("bank.rate_change", partition="gpu", free=True).rates
    assert (free.free, free.weights, free.minimum) == (True, {}, 0)
    site.now += timedelta(minutes=1)
    (dear,) = site.ask("bank.rate_change", partition="gpu", weights={"cpu": 7}).rates
    assert (dear.free, dear.weights, dear.combine) == (False, {"cpu": 7}, "max")


def test_a_change_of_a_rate_names_the_cluster_if_several_have_one(site: Site) -> None:
    clusters = {**site.settings.cluster, "c2": site.settings.cluster["c1"]}
    settings = msgspec.structs.replace(site.settings, cluster=clusters)
    site.context("bank").settings = settings
    for cluster in clusters:
        site.ask("bank.rate_create", partition="gpu", weights={"cpu": 1}, cluster=cluster)
    with pytest.raises(BankUsage, match="c1 and c2: name one with `cluster`"):
        site.ask("bank.rate_change", partition="gpu", weights={"cpu": 2})
    (changed,) = site.ask(
        "bank.rate_change", partition="gpu", weights={"cpu": 2}, cluster="c2"
    ).rates
    assert (changed.cluster, changed.weights) == ("c2", {"cpu": 2})


def test_the_last_rate_is_shown_and_what_is_to_come(site: Site) -> None:
    site.ask("bank.rate_create", partition="debug", weights={"cpu": 2})
    site.ask("bank.rate_create", partition="debug", free=True, valid_from="2027-01-01")
    shown = site.ask("bank.rate_show").rates
    assert [(one.weights, one.free) for one in shown] == [({"cpu": 2}, False), ({}, True)]
    assert len(site.ask("bank.rate_show", past=True).rates) == 3


def test_modes_are_set_and_taken_back(site: Site) -> None:
    assert site.ask("bank.mode", ADA).rules == ()
    site.ask("bank.mode", mode="enforce")
    rules = site.ask("bank.mode", mode="off", partition="debug", cluster="c1").rules
    assert {(one.mode, one.partition) for one in rules} == {("enforce", ""), ("off", "debug")}
    left = site.ask("bank.mode", mode="default", partition="debug", cluster="c1").rules
    assert [one.mode for one in left] == ["enforce"]
    with pytest.raises(ActionError, match="'strict'"):
        site.ask("bank.mode", mode="strict")
    with pytest.raises(BankUsage, match="unknown cluster"):
        site.ask("bank.mode", mode="enforce", cluster="c2")


def refusal(number: int, user: str = "ada", account: str = "physics", mode: Any = "observe") -> Any:
    return RejectedJob(
        id=f"gate:{number}",
        at=NOON,
        mode=mode,
        cluster="c1",
        uid=4001,
        user=user,
        account=account,
        amount=MICRO,
        reason="too dear\nmore",
    )


def test_what_would_have_been_refused(site: Site) -> None:
    with site.ledger.transaction() as t:
        t.rejections.add(refusal(1))
        t.rejections.add(refusal(2, user="gus"))
        t.rejections.add(refusal(3, mode="enforce"))
    assert [one.id for one in site.ask("bank.would_reject").rejections] == ["gate:1", "gate:2"]
    assert len(site.ask("bank.would_reject", all=True).rejections) == 3
    assert [one.id for one in site.ask("bank.would_reject", ADA).rejections] == ["gate:1"]
    assert len(site.ask("bank.would_reject", OWNER, account="physics").rejections) == 2
    assert not site.ask("bank.would_reject", since="now-1hour").rejections


def test_it_is_said_that_no_plugin_asks(site: Site, tmp_path: Path) -> None:
    assert site.ask("bank.mode", mode="enforce").warning == "", "without a gate nothing is known"
    settings = settings_of(tmp_path)
    with running(settings) as gate:
        for answer in (site.ask("bank.mode", mode="enforce"), site.ask("bank.would_reject")):
            assert "has not asked the gate yet" in answer.warning
            assert "steward plugins install" in answer.warning
        # With the plugin in place the advice is not to install it again.
        stage = Stage(tmp_path)
        plugins = "ClusterName = c1\nJobSubmitPlugins = lua\nStateSaveLocation = /spool\n"
        stage.answer("scontrol show config", plugins)
        of = msgspec.structs.replace(
            site.settings.cluster["c1"], slurm=True, slurm_bin=str(tmp_path)
        )
        settings = msgspec.structs.replace(site.settings, cluster={"c1": of})
        site.context("bank").settings = settings
        listed = site.ask("bank.would_reject")
        warned = listed.warning
        assert listed.empty_reason == "", "the list says nothing"
        assert "has not asked the gate yet, although slurm.conf lists job_submit/lua" in warned
        assert "steward plugins install" not in warned
        assert site.ask("bank.mode", mode="observe").warning == ""
        gate.tell(account("physics", 100))
        gate.ask(job(9))
        assert site.ask("bank.mode", mode="enforce").warning == ""
        listed = site.ask("bank.would_reject")
        assert listed.warning == ""
        assert listed.empty_reason == "No rejections in this period."
        site.now = utc_now() + timedelta(days=8)
        assert "has not asked the gate since 20" in site.ask("bank.would_reject").warning


def test_allocations_end_after_they_begin(site: Site) -> None:
    new = {"account": "optics", "amount": MICRO}
    with pytest.raises(ActionError, match="end"):
        site.ask("bank.allocation_create", **new)
    for times in ({"end": "2020-01-01"}, {"end": ""}, {"begin": "2028-01-01", "end": "2027-01-01"}):
        with pytest.raises(BankUsage):
            site.ask("bank.allocation_create", **new, **times)
    made = site.ask("bank.allocation_create", **new, end="2027-01-01", key="k").allocations[0]
    changed = site.ask(
        "bank.allocation_change", number=made.number, rollover="next", end="2028-01-01"
    )
    assert changed.allocations[0].rollover == "next"
    with pytest.raises(BankUsage):
        site.ask("bank.allocation_change", number=made.number, end="2020-01-01")
    with pytest.raises(BankUsage):
        site.ask("bank.allocation_change", number=999, note="x")
    for nothing in ({}, {"begin": "", "end": ""}):
        with pytest.raises(BankUsage, match="give `begin`, `end`, `rollover` or `note`"):
            site.ask("bank.allocation_change", number=made.number, **nothing)


def test_an_allocation_that_begins_now_is_created_once_by_a_key(site: Site) -> None:
    request = {"account": "optics", "amount": MICRO, "end": "2099-01-01", "key": "grant-4"}
    first = site.ask("bank.allocation_create", **request).allocations[0]
    site.now += timedelta(minutes=1)
    assert site.ask("bank.allocation_create", **request).allocations[0] == first
    with pytest.raises(BankUsage, match="was used for another request") as refusal:
        site.ask("bank.allocation_create", **request | {"amount": 2 * MICRO})
    assert "[" not in str(refusal.value)


def test_the_proof_says_that_holds_were_not_looked_at(site: Site) -> None:
    bank.charge(site, 1)
    answer = site.ask("bank.check")
    assert (answer.findings, answer.holds, answer.accounts) == ((), None, 3)


def test_the_proof_tells_of_what_slurm_does_not_count(site: Site) -> None:
    picture = ClusterModel(cluster="c1", accounting=True, tracked=("cpu", "mem", "node", "billing"))
    gpus = Rate(cluster="c1", partition="gpu", weights={"gres/gpu": MICRO}, valid_from=NOON)
    with site.ledger.transaction() as t:
        t.rates.add(gpus, Authorship(who="root"))
        t.set_mark("picture:c1", msgspec.json.encode(picture).decode())
    (found,) = site.ask("bank.check").findings
    assert (found.kind, found.object) == ("not-counted", "c1/gres/gpu")


def held(job_id: int, minutes_ago: int, site: Site) -> Hold:
    created = site.now - timedelta(minutes=minutes_ago)
    return Hold(
        id=f"h{job_id}",
        cluster="c1",
        job_id=job_id,
        account="physics",
        created_us=int(created.timestamp() * 1e6),
    )


def test_holds_are_compared_with_jobs(site: Site) -> None:
    for job_id in (1, 2, 3):
        bank.feed(site, bank.life(job_id)[:2])
    bank.feed(site, bank.life(4))
    bank.feed(site, bank.life(5, partition="unpriced")[:2])
    found = compare_holds_with_jobs(
        site.context("bank"), [held(1, 60, site), held(4, 60, site), held(9, 1, site)]
    )
    assert sorted((one.kind, one.object) for one in found) == [
        ("hold-without-job", "c1/4"),
        ("job-without-hold", "c1/2"),
        ("job-without-hold", "c1/3"),
    ]
    site.ask("bank.mode", mode="off")
    assert [
        one.object for one in compare_holds_with_jobs(site.context("bank"), [held(4, 60, site)])
    ] == ["c1/4"]
