from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.estimates import CLUSTER, CPUS, NOW, SETTINGS, SU, estimator
from steward.bank.billing import derive_use, list_untracked_tres
from steward.bank.estimate import describe_record, parse_options
from steward.bank.prices import compute_price
from steward.bank.records import Rate, ResourceUse
from steward.bank.settings import BankPartitionSettings, BankSettings
from steward.core.records import JobRecord

HOUR = timedelta(hours=1)
DONE = JobRecord(
    job_id=7,
    uid=1,
    partition="main",
    qos="normal",
    state="COMPLETED",
    start=NOW,
    end=NOW + HOUR,
    time_limit_s=7200,
    nodelist="t1",
    tres_allocated="cpu=4,mem=2000M,node=1,billing=4",
    oversubscribe="OK",
)
CHARGED = BankSettings(over_limit="charge")


def using(
    record: JobRecord = DONE, rate: Rate = CPUS, settings: BankSettings = SETTINGS
) -> ResourceUse:
    return derive_use(record, rate, CLUSTER, settings)


def changed(**fields: object) -> JobRecord:
    return msgspec.structs.replace(DONE, **fields)


def test_a_run_is_what_it_had_for_as_long_as_it_had_it() -> None:
    assert using() == ResourceUse(
        tres={"cpu": 4, "mem": 2000, "node": 1, "billing": 4},
        start=NOW,
        seconds=3600,
        qos="normal",
        state="COMPLETED",
    )
    assert using(changed(state="CANCELLED by 7")).state == "CANCELLED"


def test_what_never_started_used_nothing() -> None:
    for record in (changed(start=None), changed(end=None), changed(end=NOW)):
        assert using(record).seconds == 0
        assert compute_price(using(record), CPUS, UTC).amount == 0


def test_time_past_the_limit_is_free_unless_it_is_said_not_to_be() -> None:
    late = changed(end=NOW + timedelta(seconds=7286))
    assert using(late).seconds == 7200
    assert using(late, settings=CHARGED).seconds == 7286
    of_main = BankSettings(partition={"main": BankPartitionSettings(over_limit="charge")})
    assert using(late, settings=of_main).seconds == 7286
    assert using(changed(end=NOW + 99 * HOUR, time_limit_s=None)).seconds == 99 * 3600


def test_a_limit_that_was_lowered_makes_no_time_free() -> None:
    # scontrol update timelimit=1, in the third hour.
    lowered = changed(end=NOW + 3 * HOUR, time_limit_s=60, state="TIMEOUT")
    assert using(lowered).seconds == 3 * 3600
    middle = NOW + HOUR
    pieces = [
        derive_use(lowered, CPUS, CLUSTER, SETTINGS, end=middle).seconds,
        derive_use(lowered, CPUS, CLUSTER, SETTINGS, begin=middle).seconds,
    ]
    assert pieces == [3600, 2 * 3600]
    assert derive_use(lowered, CPUS, None, SETTINGS).seconds == 3 * 3600


@pytest.mark.parametrize(
    ("over_s", "kill_wait_s", "is_free"),
    [(0, 30, True), (0, 5, False), (300, 5, True), (None, 5, False), (None, 30, True)],
)
def test_time_past_the_limit_is_free_as_far_as_slurm_lets_jobs_go(
    over_s: int | None, kill_wait_s: int, is_free: bool
) -> None:
    main = msgspec.structs.replace(CLUSTER.partitions["main"], over_time_s=over_s)
    picture = msgspec.structs.replace(CLUSTER, partitions={"main": main}, kill_wait_s=kill_wait_s)
    late = changed(end=NOW + timedelta(seconds=7200 + 105))
    found = derive_use(late, CPUS, picture, SETTINGS).seconds
    assert found == (7200 if is_free else 7200 + 105)


def test_suspended_time_is_free_unless_it_is_said_not_to_be() -> None:
    record = changed(suspended_s=600)
    assert using(record).seconds == 3000
    assert using(record, settings=BankSettings(suspended=True)).seconds == 3600
    # A limit is put off by it.
    late = changed(end=NOW + timedelta(seconds=9060), suspended_s=1800)
    assert using(late).seconds == 7200
    assert using(late, settings=BankSettings(suspended=True)).seconds == 9000


def test_pieces_of_a_resized_job_add_up_to_the_run() -> None:
    middle = NOW + timedelta(minutes=20)
    first = derive_use(DONE, CPUS, CLUSTER, SETTINGS, end=middle)
    second = derive_use(DONE, CPUS, CLUSTER, SETTINGS, begin=middle)
    assert (first.start, second.start) == (NOW, middle)
    assert first.seconds + second.seconds == using().seconds
    late = changed(end=NOW + timedelta(seconds=7260))
    assert derive_use(late, CPUS, CLUSTER, SETTINGS, begin=middle).seconds == 7200 - 1200
    suspended = derive_use(DONE, CPUS, CLUSTER, SETTINGS, begin=middle, suspended_s=60)
    assert suspended.seconds == 2400 - 60


@pytest.mark.parametrize(
    ("record", "rate"),
    [
        (DONE, Rate(weights={"cpu": 1}, whole_nodes=True)),
        (changed(oversubscribe="NO"), CPUS),
        (changed(partition="excl"), CPUS),
    ],
)
def test_whole_nodes_are_charged_whole(record: JobRecord, rate: Rate) -> None:
    assert using(record, rate).tres == {"cpu": 16, "mem": 32000, "node": 1, "billing": 4}


def test_nodes_that_nobody_knows_are_charged_as_they_were_allocated() -> None:
    rate = Rate(weights={"cpu": 1}, whole_nodes=True)
    for nodelist in ("gone[1-2]", "t[1", ""):
        assert using(changed(nodelist=nodelist), rate).tres["cpu"] == 4
    assert derive_use(DONE, rate, None, SETTINGS).tres["cpu"] == 4
    grown = msgspec.structs.replace(
        CLUSTER, shapes=(msgspec.structs.replace(CLUSTER.shapes[0], usable_cpus=12, cpus=12),)
    )
    assert derive_use(DONE, rate, grown, SETTINGS).tres["cpu"] == 12


def test_licenses_are_those_that_were_asked_for() -> None:
    assert using(changed(licenses="matlab:2")).tres["license/matlab"] == 2


def test_what_slurm_does_not_count_is_as_it_was_held() -> None:
    rate = Rate(weights={"gres/gpu": 2 * SU, "cpu": SU, "license/x": 1})
    cpus = msgspec.structs.replace(CLUSTER, tracked=("cpu", "mem", "node", "billing"))
    held = {"gres/gpu": 2, "cpu": 99}
    assert list_untracked_tres(rate, cpus) == ["gres/gpu"]
    found = derive_use(DONE, rate, cpus, SETTINGS, hold_tres=held).tres
    assert (found["gres/gpu"], found["cpu"]) == (2, 4)
    counted = msgspec.structs.replace(cpus, tracked=(*cpus.tracked, "gres/gpu"))
    assert "gres/gpu" not in derive_use(DONE, rate, counted, SETTINGS, hold_tres=held).tres
    assert not list_untracked_tres(rate, counted)


def test_a_job_that_waits_is_what_slurm_reckons_that_it_needs() -> None:
    record = JobRecord(
        job_id=9,
        uid=1,
        account="physics",
        partition="main",
        state="PENDING",
        reason="JobHeldUser",
        nodes=2,
        cpus=6,
        tasks=3,
        time_limit_s=1800,
        array_job_id=9,
        array_task="0-9%2",
        tres_requested="cpu=6,mem=4G,node=2,billing=6,gres/gpu=2,gres/gpu:a100=2",
        admin_comment="steward=1.x",
        oversubscribe="NO",
    )
    job = describe_record(record)
    assert (job.uid, job.job_id, job.account, job.held, job.array) == (
        1,
        9,
        "physics",
        True,
        "0-9%2",
    )
    assert (job.num_tasks, job.cpus_per_task, job.min_cpus, job.min_nodes) == (3, 2, 6, 2)
    assert (job.pn_min_memory_mib, job.tres_per_job) == (2048, "gres/gpu:a100:2")
    assert (job.time_limit_min, job.exclusive, job.admin_comment) == (30, True, "steward=1.x")
    # Texts that Slurm truncated do not change the count of the others.
    cut = msgspec.structs.replace(record, array_task="1,3,5,...%2")
    assert describe_record(cut).array == "1,3,5%2"
    assert not describe_record(msgspec.structs.replace(record, array_task="4")).array


def test_a_job_that_runs_is_what_it_has() -> None:
    record = JobRecord(
        job_id=9,
        uid=1,
        partition="main",
        state="RUNNING",
        nodes=3,
        cpus=10,
        tasks=5,
        time_limit_s=3540,
        tres_allocated="cpu=10,mem=5000M,node=3,billing=10",
    )
    found = estimator().quote(describe_record(record), NOW)
    assert (found.tres["cpu"], found.tres["node"], found.amount) == (10, 3, 10 * SU)
    assert 5000 <= found.tres["mem"] <= 5002


@given(
    st.sampled_from(["-n1", "-n3 -c2", "-N2 --mem=3G", "-N2-3", "-n8", "--mem-per-cpu=900"]),
    st.integers(1, 500),
    st.integers(0, 40_000),
    st.integers(0, 59),
)
def test_a_charge_within_the_limit_is_never_above_its_estimate(
    options: str, minutes: int, ran_s: int, late_s: int
) -> None:
    job = parse_options([*options.split(), "-t", str(minutes)], uid=1)
    rate = Rate(weights={"cpu": SU, "mem": SU // 3, "node": 7}, minimum=11)
    quote = estimator(rate).quote(job, NOW)
    tres = ",".join(
        f"{name}={amount}{'M' if name == 'mem' else ''}" for name, amount in quote.tres.items()
    )
    ran = timedelta(seconds=min(ran_s, minutes * 60 + late_s))
    limit_s = minutes * 60
    record = changed(tres_allocated=tres, end=NOW + ran, time_limit_s=limit_s)
    for settings in (SETTINGS, CHARGED):
        start = datetime(2026, 3, 2, 12, tzinfo=UTC)
        assert start == NOW
        assert compute_price(using(record, rate, settings), rate, UTC).amount <= quote.amount
