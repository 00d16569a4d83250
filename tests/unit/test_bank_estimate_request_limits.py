"""Hostile job requests that try to delay the gate or to be estimated too low."""

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.estimates import CLUSTER, NOW, estimator
from harness.gate import CLUSTER as SITE
from harness.gate import GateCore, account, job, now_us
from steward.bank.errors import NoEstimate
from steward.bank.estimate.request_limits import bound_node_count
from steward.bank.gate.requests import HoldRequest, ShownJob
from steward.bank.records import JobRequest
from steward.slurm.nodelists import expand_nodelist

JOB = JobRequest(uid=1, partition="main", num_tasks=1)
MANY = msgspec.structs.replace(
    CLUSTER,
    partitions={
        f"p{number}": msgspec.structs.replace(CLUSTER.partitions["main"], name=f"p{number}")
        for number in range(64)
    },
)


def asking(**fields: object) -> JobRequest:
    return msgspec.structs.replace(JOB, **fields)


@pytest.mark.parametrize(
    ("nodelist", "count"),
    [
        ("", 0),
        ("n1", 1),
        ("n1,n1,n1", 1),
        ("n[1-3,7],gpu1", 5),
        ("n[01-03],n[1-3]", 6),
        ("r[1-2]n[1-3]", 6),
        ("n[1-3]-ib", 3),
        ("n[1-999999]", 8),
        ("n[1-9][1-9][1-9][1-9][1-9][1-9][1-9][1-9]", 8),
        ("n[1-999999999999]", 8),
        ("n[3-1]", 8),
        ("n[1-", 8),
        ("@all", 1),
        ("n[1-3]]", 8),
        (",".join(f"n{number}x{number}y" for number in range(4000)), 8),
        ("a" * 60_000 + "[1-8]", 8),
        ("[" * 60_000, 8),
        ("n1," * 100_000, 8),
    ],
)
def test_nodes_are_counted_without_writing_them_out(nodelist: str, count: int) -> None:
    assert bound_node_count(nodelist, 8) == count


@given(
    st.lists(
        st.tuples(st.sampled_from(["n", "gpu", "r1n"]), st.integers(0, 12), st.integers(0, 5)),
        min_size=1,
        max_size=6,
    )
)
def test_as_many_nodes_as_clustershell_finds(parts: list[tuple[str, int, int]]) -> None:
    text = ",".join(f"{name}[{first}-{first + more}]" for name, first, more in parts)
    assert bound_node_count(text, 1000) == len(set(expand_nodelist(text)))


@given(st.text(alphabet="n12[]-,@!& \x00é", max_size=40), st.integers(1, 20))
def test_whatever_is_written_is_a_count(text: str, most: int) -> None:
    assert 0 <= bound_node_count(text, most) <= most


def test_nodes_that_cannot_be_had_are_as_many_as_there_are() -> None:
    every = estimator().quote(asking(req_nodes="t[1-8]"), NOW).amount
    for nodelist in ("n[1-999999]", "n[0-9]x[0-9]x[0-9]x[0-9]x[0-9]x[0-9]", "t[1-"):
        assert estimator().quote(asking(req_nodes=nodelist), NOW).amount == every


@pytest.mark.parametrize(
    "fields",
    [
        {"array": "1," * 60_000 + "1"},
        {"array": "0-4000000000"},
        {"array": "0-9:0"},
        {"licenses": "matlab:1," * 200},
        {"licenses": "x" * 5000},
        {"features": "(" * 100_000},
        {"tres_per_job": ",".join(f"gres/gpu:{number}:1" for number in range(300))},
        {"tres_per_node": "gres/gpu:" * 1000},
        {"tres_per_task": "gres/gpu:1," * 100},
        {"cpus_per_tres": "gres/gpu:1," * 100},
        {"mem_per_tres": "9" * 5000},
        {"partition": "main," * 10_000},
        {"partition": ",".join(f"p{number}" for number in range(65))},
        {"qos": ",".join(f"q{number}" for number in range(65))},
        {"account": "a" * 5000},
    ],
)
def test_what_is_endless_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(NoEstimate):
        estimator().quote(asking(**fields), NOW)


def test_a_partition_that_is_named_often_is_one() -> None:
    once = estimator().quote(JOB, NOW)
    assert estimator().quote(asking(partition="main," * 500, qos="normal,normal"), NOW) == once


def test_the_most_that_is_let_through_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from steward.bank.estimate.sizes import requested_gres

    requested_gres.cache_clear()
    mark = random.Random(7).randrange(10**6)
    job = asking(
        partition=",".join(MANY.partitions),
        qos=",".join(f"q{number}" for number in range(4)),
        tres_per_job=",".join(f"gres/x{mark}y{number}:1" for number in range(60)),
    )
    assert estimator(picture=MANY).quote(job, NOW).amount > 0
    assert requested_gres.cache_info().misses < 10


def test_what_is_endless_is_not_kept(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 5))
    endless = "x," * 400_000
    for name in ("account", "partition", "req_nodes"):
        said = site.submit(msgspec.structs.replace(job(99), **{name: endless}))
        assert not said.ok
        assert len(said.say) < 10_000
    kept = [fact.rejection for fact in site.store.fetch_facts(0, 9) if fact.rejection]
    assert len(kept) == 3
    assert max(len(msgspec.json.encode(one)) for one in kept) < 20_000


def test_a_limit_that_is_lowered_frees_nothing_of_an_arrays_hold(tmp_path: Path) -> None:
    site = GateCore(tmp_path, account("chem", 100))
    said = site.submit(job(9, array="1-8"))
    assert site.free() == 20
    with site.store.transaction():
        seen = ShownJob(
            cluster=SITE, job_id=5, uid=1000, admin_comment=said.admin_comment, started=True
        )
        site.upkeep.confirm([seen], now_us())
        # Six tasks were cancelled, and the limit of the others was lowered to a minute.
        left = job(1, array="1-2")
        claim = HoldRequest(cluster=SITE, job_id=5, description=left, started=True, is_exact=True)
        assert site.upkeep.place_hold(claim, "alice", now_us()).is_paid
    assert site.free() == 80
