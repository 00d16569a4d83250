"""CPU time of the gate for one question, with the worst texts that Slurm accepts."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from harness.gate import CLUSTER, RATE, GateCore, account, now_us, picture, rules
from harness.gate import job as usual_job
from steward.bank.estimate import count_array_tasks, sizes
from steward.bank.estimate.request_limits import LONGEST_TEXTS, Budget, count_nodes
from steward.bank.estimate.sizes import requested_gres
from steward.bank.gate.cpu_limits import USER_NS, CpuLimits
from steward.bank.gate.plugin_answers import DecisionRight, PluginAnswerer
from steward.bank.gate.requests import LONGEST_REQUEST, PluginReply, PluginRequest, ShownJob
from steward.bank.records import JobRequest
from steward.slurm.cluster_model import ClusterModel

_SEED = random.randrange(1 << 30)
_MOST_MS = 15.0
"""Maximum CPU time, in ms: three times the budget, because busy hosts have cold caches."""
_PARTITIONS = tuple(f"p{number:02}" for number in range(64))


def many_partitions() -> ClusterModel:
    usual = picture()
    main = usual.partitions["main"]
    more = {name: msgspec.structs.replace(main, name=name) for name in _PARTITIONS}
    return msgspec.structs.replace(usual, partitions=usual.partitions | more)


class AskedGate(GateCore):
    """Gate that answers questions of the submit plugin."""

    def __init__(self, directory: Path, su: int, mode: str = "enforce") -> None:
        super().__init__(directory, account("chem", su), mode=mode)
        priced = msgspec.structs.replace(RATE, partition="*")
        self.ground.put_rules(msgspec.structs.replace(rules(mode), rates=(priced,)))
        self.ground.put_model(many_partitions())
        self.second = 0
        self.right = DecisionRight(self.settings)
        self.right.is_ready = True
        self.right.record_ledger_contact()
        self.limits = CpuLimits(lambda: self.second)
        self.answering = PluginAnswerer(self.keeper, self.right, limits=self.limits)

    def ask(
        self, job: JobRequest, by: int = 1000, op: str = "submit", **more: object
    ) -> PluginReply:
        ask = PluginRequest(v=1, op=op, cluster=CLUSTER, job=job, by=by, **more)  # type: ignore[arg-type]
        with self.store.transaction():
            return self.answering.answer(ask, now_us())

    def cpu_ms(self, job: JobRequest) -> tuple[float, PluginReply]:
        """Return the CPU time of one question, the least of three, and the reply."""
        took = []
        for number in range(3):
            # Another second each time: it is one question that is measured, not a user's share.
            self.second += 1
            for cache in (requested_gres, sizes.licenses, count_nodes):
                cache.cache_clear()
            asked = msgspec.structs.replace(job, job_id=number)
            began_ns = time.thread_time_ns()
            said = self.ask(asked)
            took.append(time.thread_time_ns() - began_ns)
        return min(took) / 1e6, said


def filled(piece: str, longest: int) -> str:
    """Return a text of at most this many bytes, made of pieces with commas between them."""
    return ",".join([piece] * (longest // (len(piece) + 1)))


def counted(form: str, longest: int) -> str:
    """Return the same text with distinct pieces."""
    parts: list[str] = []
    used = number = 0
    while used + len(part := form.format(number)) + 1 <= longest:
        parts.append(part)
        used += len(part) + 1
        number += 1
    return ",".join(parts)


_WORST: dict[str, tuple[Callable[[int], str], ...]] = {
    "account": (lambda n: "a" * n, lambda n: "é" * (n // 2)),
    "partition": (
        lambda n: ",".join(_PARTITIONS),
        lambda n: filled("main", n),
        lambda n: counted("x{}", n),
    ),
    "qos": (
        lambda n: counted("q{}", 4 * 60),
        lambda n: filled("normal", n),
        lambda n: counted("q{}", n),
    ),
    "array": (
        lambda n: filled("1", n),
        lambda n: filled("0-1:2", n),
        lambda n: counted("{}", n),
        lambda n: "0-4000000",
    ),
    "req_nodes": (
        lambda n: filled("n1", n),
        lambda n: counted("n{}", n),
        lambda n: "," * n,
        lambda n: "n[" + counted("{}", 4000) + "]",
        lambda n: filled("n[1]", 4000),
        lambda n: filled("n[1]", 256 * 5),
        lambda n: "n[1-999999999][1-999999999]",
        lambda n: "[" * n,
    ),
    "licenses": (
        lambda n: counted("l{}:7", 400),
        lambda n: "x|" * (n // 2),
    ),
    **{
        name: (
            lambda n: ",".join(f"gres/gpu:t{number}:{number + 1}" for number in range(64)),
            lambda n: "gres/gpu:" * (n // 9),
            lambda n: filled("gpu:1", n),
        )
        for name in (
            *("tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task"),
            *("cpus_per_tres", "mem_per_tres"),
        )
    },
    "admin_comment": (
        lambda n: ("steward=1." * n)[:4096],
        lambda n: "steward=1.a.1.1.b " * (4096 // 18),
    ),
}


def described(texts: dict[str, str]) -> JobRequest:
    """Return an expensive job with these texts."""
    return msgspec.convert(msgspec.to_builtins(usual_job(10_000)) | texts, JobRequest)


def test_each_bounded_text_has_a_worst_case() -> None:
    assert set(LONGEST_TEXTS) - {"reservation", "features"} <= set(_WORST)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AskedGate]:
    print(f"hypothesis seed {_SEED}")
    where = tmp_path_factory.mktemp("gates")
    return {
        "admitted": AskedGate(where / "rich", 10**12),
        "refused": AskedGate(where / "poor", 100),
    }


@pytest.mark.parametrize("purse", ["admitted", "refused"])
@pytest.mark.parametrize("field", _WORST)
def test_the_worst_text_of_a_field_is_answered_within_the_budget(
    sites: dict[str, AskedGate], field: str, purse: str
) -> None:
    for make in _WORST[field]:
        text = make(LONGEST_TEXTS.get(field, 4096))
        job = described({field: text})
        took_ms, said = sites[purse].cpu_ms(job)
        print(f"{purse} {field}={text[:12]!r} ({len(text)}): {took_ms:.2f} ms, ok {said.ok}")
        assert took_ms < _MOST_MS


@seed(_SEED)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), purse=st.sampled_from(["admitted", "refused"]))
def test_worst_texts_together_are_answered_within_the_budget(
    sites: dict[str, AskedGate], data: st.DataObject, purse: str
) -> None:
    fields = data.draw(st.lists(st.sampled_from(sorted(_WORST)), min_size=1, unique=True))
    texts = {
        field: data.draw(st.sampled_from(_WORST[field]))(LONGEST_TEXTS.get(field, 4096))
        for field in fields
    }
    took_ms, _ = sites[purse].cpu_ms(described(texts))
    assert took_ms < _MOST_MS, f"seed {_SEED}"


def test_a_job_that_was_changed_again_and_again_is_answered_within_the_budget(
    tmp_path: Path,
) -> None:
    site = AskedGate(tmp_path, 10**12)
    said = site.ask(usual_job(10_000))
    seen = ShownJob(cluster=CLUSTER, job_id=5, uid=1000, admin_comment=said.admin_comment)
    with site.store.transaction():
        site.upkeep.confirm([seen], now_us())
    for field in ("req_nodes", "licenses", "tres_per_node", "array", "partition", "qos"):
        text = _WORST[field][0](LONGEST_TEXTS.get(field, 4096))
        began_ns = time.thread_time_ns()
        said = site.ask(JobRequest(uid=-1, job_id=5, **{field: text}), op="modify")  # type: ignore[arg-type]
        took_ms = (time.thread_time_ns() - began_ns) / 1e6
        print(f"{field}: {took_ms:.2f} ms, {said.say[:60]!r}")
        assert took_ms < _MOST_MS
        site.second += 1


def test_no_question_is_longer_than_the_gate_reads() -> None:
    # A control character becomes six bytes of JSON.
    most = sum(LONGEST_TEXTS.values()) + 2 * 4096
    assert 6 * most + 4096 < LONGEST_REQUEST


def test_an_array_is_read_once_for_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted_tasks_of(text: str) -> tuple[int, int]:
        read.append(text)
        return count_array_tasks(text)

    monkeypatch.setattr("steward.bank.estimate.estimator.count_array_tasks", counted_tasks_of)
    site = AskedGate(tmp_path, 100)
    said = site.ask(usual_job(10_000, array="0-9"))
    assert "The gate would admit a time limit of at most 00:09:00 (--time=9)" in said.say
    assert read == ["0-9"]


def test_a_refusal_goes_out_without_advice_when_the_budget_is_spent(tmp_path: Path) -> None:
    site = AskedGate(tmp_path, 100)
    with site.ground.limit_cpu(Budget(0)):
        said = site.submit(usual_job(10_000, array="0-9"))
    assert not said.ok
    assert "has 100.00 SU available" in said.say
    assert "The gate would admit" not in said.say
    assert "The gate would admit" in site.submit(usual_job(10_000, array="0-9")).say


def test_a_user_who_takes_too_much_of_the_gate_is_refused_without_a_price(tmp_path: Path) -> None:
    site = AskedGate(tmp_path, 10**9)
    site.limits.add(1000, USER_NS, is_het=False)
    holds = len(site.keeper.balances.holds)
    said = site.ask(usual_job())
    assert not said.ok
    assert "take too much of the gate's time" in said.say
    assert len(site.keeper.balances.holds) == holds
    assert site.ask(usual_job(), by=0).ok, "root submits for its users"
    assert site.ask(usual_job(uid=1001), by=1001).ok
    site.second += 1
    assert site.ask(usual_job()).ok


def test_nobody_is_refused_for_cpu_time_where_nothing_is_enforced(tmp_path: Path) -> None:
    for mode in ("observe", "off"):
        site = AskedGate(tmp_path / mode, 1, mode)
        site.limits.add(1000, USER_NS, is_het=False)
        assert site.ask(usual_job()).ok


def test_components_of_a_het_job_share_one_budget(tmp_path: Path) -> None:
    site = AskedGate(tmp_path, 10**9)
    usual = [site.ask(usual_job(het=True)) for _ in range(128)]
    assert all(said.ok for said in usual)
    site.second += 1
    long_list = counted("n{}", 60_000)
    began_ns = time.thread_time_ns()
    for number in range(128):
        site.ask(usual_job(het=True, req_nodes=f"m{number},{long_list}", partition="p01,p02"))
    took_ms = (time.thread_time_ns() - began_ns) / 1e6
    print(f"128 components with 60 KB of nodes each: {took_ms:.1f} ms")
    assert site.limits.budget(1000, is_het=True).is_spent()
    # Read in full each would take a millisecond and more.
    last = site.ask(usual_job(het=True, req_nodes=long_list))
    assert "takes too long to price" in last.say


@pytest.mark.parametrize("op", ["submit", "modify"])
def test_a_text_that_was_cut_is_refused_whatever_the_policy(
    tmp_path: Path, op: str, caplog: pytest.LogCaptureFixture
) -> None:
    site = AskedGate(tmp_path, 10**9)
    cut = usual_job(req_nodes="n1,n2", job_id=7 if op == "modify" else 0)
    said = site.ask(cut, op=op, oversize="req_nodes")
    assert not said.ok
    assert "--nodelist is longer than Slurm accepts" in said.say
    assert f"rejected a {op} by uid 1000" in caplog.text
    assert "--nodelist is too long" in caplog.text
    assert site.ask(cut, op=op, by=0, oversize="req_nodes").ok
    site.right.is_ready = False  # the policy holds, which is to allow
    assert site.ask(usual_job(), op=op).ok
    assert not site.ask(cut, op=op, oversize="req_nodes").ok
    for mode in ("observe", "off"):
        free = AskedGate(tmp_path / mode, 1, mode)
        assert free.ask(cut, op=op, oversize="req_nodes").ok


def test_a_list_of_partitions_that_is_cut_is_enforced_as_the_strictest(tmp_path: Path) -> None:
    from steward.bank.records import ModeRule

    site = AskedGate(tmp_path, 1, "observe")
    site.ground.put_rules(rules("observe", ModeRule(mode="enforce", partition="main")))
    observed = filled("cheap", 5000)
    assert not site.ask(usual_job(partition=observed), oversize="partition").ok
    assert site.ground.get_mode(CLUSTER, "cheap," * 70 + "main", "chem") == "enforce"
    assert site.ground.get_mode(CLUSTER, "cheap", "chem") == "observe"
