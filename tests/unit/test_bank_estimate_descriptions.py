import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.estimates import CLUSTER, NOW, SETTINGS, SU, estimator
from steward.bank.billing import derive_use, find_uncounted_tres
from steward.bank.estimate import describe_record
from steward.bank.records import Rate
from steward.core.records import JobRecord
from steward.slurm.tres import count_requested_kinds, remove_kinds

GPU = Rate(number=3, weights={"gres/gpu": SU})
WAITS = JobRecord(
    job_id=9,
    uid=1,
    account="physics",
    partition="gpu",
    state="PENDING",
    nodes=2,
    cpus=4,
    tasks=4,
    time_limit_s=3540,
    tres_requested="cpu=4,mem=4G,node=2,billing=4",
)
RUNS = msgspec.structs.replace(
    WAITS,
    state="RUNNING",
    tres_requested="",
    tres_allocated="cpu=4,mem=4G,node=2,billing=4",
    start=NOW,
    end=NOW,
)


@pytest.mark.parametrize("record", [WAITS, RUNS])
@pytest.mark.parametrize(
    ("asked", "gpus"),
    [
        ({"tres_per_job": "gres/gpu:3"}, 3),
        ({"tres_per_job": "gres:gpu:a100:3"}, 3),
        ({"tres_per_node": "gres/gpu:3"}, 6),
        ({"tres_per_task": "cpu:1,gres/gpu:1"}, 4),
        ({"tres_per_job": "gres/gpu:4", "tres_per_task": "gres/gpu:1"}, 4),
    ],
)
def test_gpus_that_slurm_does_not_count_are_as_the_job_asked(
    record: JobRecord, asked: dict[str, str], gpus: int
) -> None:
    job = describe_record(msgspec.structs.replace(record, **asked))
    quote = estimator(GPU).quote(job, NOW)
    assert (quote.tres["gres/gpu"], quote.amount) == (gpus, gpus * SU)


def test_gpus_that_slurm_counts_are_not_counted_twice() -> None:
    record = msgspec.structs.replace(
        WAITS,
        tres_requested="cpu=4,mem=4G,node=2,billing=4,gres/gpu=2",
        tres_per_node="gres/gpu:1,gres/shard:2",
    )
    job = describe_record(record)
    assert (job.tres_per_job, job.tres_per_node) == ("gres/gpu:2", "gres/shard:2")
    runs = msgspec.structs.replace(RUNS, tres_allocated=record.tres_requested, tres_per_job="gpu:2")
    assert describe_record(runs).tres_per_job == "gres/gpu:2"


@pytest.mark.parametrize(
    ("shown", "cpus", "memory"),
    [
        # As squeue shows a job that asks for memory of each node, or of each CPU.
        ({"min_memory_mib": 2048}, 4, (2048, None)),
        ({"min_memory_mib": 1024}, 4, (None, 1024)),
        ({"min_memory_mib": 0}, 4, (0, None)),
        # Its request may be newer than its TRES.
        ({"min_memory_mib": 9000}, 4, (None, 9000)),
        ({"min_memory_mib": 100}, 4, (2048, None)),
        ({"min_memory_mib": 2048, "cpus": 20}, 20, (2048, None)),
        # Memory of each GPU, and a squeue that does not show it.
        ({"min_memory_mib": 9000, "mem_per_tres": "gres/gpu:1024"}, 4, (2048, None)),
        ({}, 4, (2048, None)),
    ],
)
def test_description_of_takes_the_larger_of_request_and_tres(
    shown: dict[str, object], cpus: int, memory: tuple[int | None, int | None]
) -> None:
    job = describe_record(msgspec.structs.replace(WAITS, **shown))
    assert job.min_cpus == cpus
    assert (job.pn_min_memory_mib, job.mem_per_cpu_mib) == memory
    runs = describe_record(msgspec.structs.replace(RUNS, **{**shown, "cpus": 4}))
    assert (runs.min_cpus, runs.pn_min_memory_mib, runs.mem_per_cpu_mib) == (4, 2048, None)


def test_description_of_takes_gpus_per_task_if_the_tres_are_older() -> None:
    tres = "cpu=4,mem=4G,node=2,billing=4,gres/gpu=4"
    record = msgspec.structs.replace(
        WAITS, tasks=20, tres_requested=tres, tres_per_task="gres/gpu:1"
    )
    assert describe_record(record).tres_per_job == "gres/gpu:20"
    typed = msgspec.structs.replace(
        record, tres_requested=f"{tres},gres/gpu:a100=4", tres_per_task="gres/gpu:a100:1"
    )
    assert describe_record(typed).tres_per_job == "gres/gpu:a100:20"


def test_a_run_is_charged_the_gpus_that_slurm_did_not_count() -> None:
    run = msgspec.structs.replace(RUNS, tres_per_node="gres/gpu:a100:2")
    alone = msgspec.structs.replace(CLUSTER, accounting=False, tracked=("cpu", "gres/gpu"))
    untold = msgspec.structs.replace(CLUSTER, tracked=("cpu", "mem", "node", "billing"))
    for picture in (alone, untold):
        charged = derive_use(run, GPU, picture, SETTINGS).tres
        assert (charged["gres/gpu"], charged["gres/gpu:a100"]) == (4, 4)
        # What was held goes before.
        held = {"gres/gpu": 3}
        assert derive_use(run, GPU, picture, SETTINGS, hold_tres=held).tres["gres/gpu"] == 3
        # And if only other options were given, its request counts.
        assert derive_use(run, GPU, picture, SETTINGS, hold_tres={"cpu": 4}).tres["gres/gpu"] == 4
    counted = msgspec.structs.replace(CLUSTER, tracked=("cpu", "gres/gpu"))
    charged = derive_use(run, GPU, counted, SETTINGS).tres
    assert "gres/gpu" not in charged
    assert charged["gres/gpu:a100"] == 4, "what is counted without its type is known by the request"


def test_what_slurm_does_not_count_is_said() -> None:
    rates = [GPU, Rate(weights={"bb/cray": 1, "cpu": 1}), Rate(cluster="x", weights={"gres/x": 1})]
    picture = msgspec.structs.replace(CLUSTER, tracked=("cpu", "mem", "node", "billing"))
    bursts, gpus = find_uncounted_tres(rates, picture)
    assert (bursts.name, bursts.is_fixable, gpus.name, gpus.is_fixable) == (
        *("bb/cray", True),
        *("gres/gpu", True),
    )
    assert "are not charged for it" in bursts.what
    assert "charged the requested amount" in gpus.what
    alone = msgspec.structs.replace(picture, accounting=False)
    assert [one.is_fixable for one in find_uncounted_tres(rates, alone)] == [True, False]
    assert find_uncounted_tres(rates, CLUSTER) == []


def test_requests() -> None:
    record = JobRecord(job_id=1, nodes=2, tasks=3, tres_per_socket="gres/gpu:1", tres_per_job="x")
    assert count_requested_kinds(record, sockets=2) == {"gres/gpu": 4, "gres/x": 1}
    assert count_requested_kinds(JobRecord(job_id=1)) == {}
    assert remove_kinds("gres/gpu:2,gres/shard:1", {"gres/gpu"}) == "gres/shard:1"


@given(st.text(max_size=60))
def test_any_text_is_read(text: str) -> None:
    record = JobRecord(job_id=1, nodes=2, tres_per_node=text)
    assert all(amount >= 0 for amount in count_requested_kinds(record).values())
    assert len(remove_kinds(text, {"gres/gpu"})) <= len(text)
