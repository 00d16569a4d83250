from datetime import timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.estimates import CLUSTER, CPUS, GRACE_S, NOW, SETTINGS, SU, estimator, quote
from steward.bank.errors import NoEstimate, NoRate
from steward.bank.estimate import (
    Estimator,
    apply_update,
    count_array_tasks,
    describe_record,
    estimate,
    parse_options,
)
from steward.bank.prices import compute_highest_price
from steward.bank.records import JobRequest, Rate, ResourceUse, TimeFactor
from steward.core.records import JobRecord
from steward.core.timestamps import to_micros

EVERYTHING = Rate(weights=dict.fromkeys(["cpu", "mem", "node", "gres/gpu", "billing"], SU))


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ("", 600),  # DefaultTime
        ("-p plain", 7200),  # else MaxTime
        ("-p gpu", 86400),  # else a day
        ("-t 5", 300),
        ("-t UNLIMITED", 3600),
        ("-t 0", 3600),
        ("-p gpu -t UNLIMITED", 86400),
        ("-t 1-0", 86400),  # longer than MaxTime: it waits until that is raised
        ("-p limited -t 5", 600),  # with OverTimeLimit
    ],
)
def test_the_time_that_a_job_may_have(options: str, seconds: int) -> None:
    assert quote(options).time_s == seconds + GRACE_S


def test_over_time_without_a_limit_is_the_sites_rule() -> None:
    over = msgspec.structs.replace(CLUSTER.partitions["main"], over_time_s=None)
    picture = msgspec.structs.replace(CLUSTER, partitions={"main": over})
    assert quote("-t 1", picture=picture).time_s == 60 + 86400 + GRACE_S


@pytest.mark.parametrize(
    ("options", "cpus"),
    [
        ("", 2),  # the whole of a core
        ("-n1", 2),
        ("-n3", 4),
        ("-p plain", 1),
        ("-n3 --ntasks-per-core=1", 6),
        ("-n4 --hint=nomultithread", 8),
        ("-n4 --threads-per-core=1", 8),
        ("-c4", 4),
        ("-c5", 6),
        ("-N3", 6),
        ("-N3 -n4", 6),
        ("-N2-4", 8),  # the most nodes
        ("-N2 --ntasks-per-node=3", 8),
        ("--mincpus=5", 6),
        ("-n4 -c3", 16),  # each on another node, in the worst case
        ("--exclusive", 16),
        ("-p excl", 16),  # the largest node
        ("-p excl -n20", 35),  # 19 on nodes of 4, and one of 16
        ("-p excl -N2", 32),
        ("-p gpu --gpus=2", 8),  # on two nodes, three for each
        ("-p gpu --gpus=1", 4),
        ("-p gpu --gpus=2 --cpus-per-gpu=5", 12),
        ("-p gpu --gpus-per-node=2 -N2", 12),
        ("-p limited -n1 --mem-per-cpu=5000", 4),  # three CPUs, so that none has more
        ("-p limited -n1 --mem=9000", 6),
        ("-p limited -n1 --mem=0", 16),
        ("-n2 -O", 2),
        ("-n4 -c3 -N3-4 --mincpus=4", 22),  # one has all that it can, and the others four each
        ("-n4 -N4 --mincpus=4", 16),
        ("-n7 --ntasks-per-node=1", 14),  # half of each core is left
        ("-n7 --ntasks-per-node=3", 14),
        ("-n8 --ntasks-per-node=4", 10),
        ("-n2 --ntasks-per-node=4", 4),  # space for four, though there are two
        ("-n12 --ntasks-per-socket=3", 24),
        ("-p limited -n1 -N1 --ntasks-per-node=3 --mem=9000", 6),  # two CPUs for each of three
        ("-p limited -n1 -N1 --ntasks-per-node=3 --mem=9000 --hint=nomultithread", 12),
        ("-p gpu -n4 -N3 --gpus-per-task=1", 18),  # all nodes as the one that has two
        ("-p gpu -n7 -N4 --gpus-per-task=1", 48),
        ("-p gpu -n5 --gpus=7", 48),
        ("-p gpu -n17 -N1-3 --gpus=5 --cpus-per-gpu=3", 32),
        ("-c2 --ntasks-per-node=4", 8),
        ("-p gpu -n4 -N2-4 --hint=nomultithread --gpus-per-task=1", 36),
        ("-n100000", 128),  # no more than there is
    ],
)
def test_cpus(options: str, cpus: int) -> None:
    assert quote(options).tres["cpu"] == cpus


def test_one_task_per_core() -> None:
    picture = msgspec.structs.replace(CLUSTER, selects="cr_core_memory,cr_one_task_per_core")
    assert quote("-n3", picture=picture).tres["cpu"] == 6
    assert quote("-n3 -c2", picture=picture).tres["cpu"] == 6


def test_cpus_sockets_and_whole_nodes_as_the_cluster_selects_them() -> None:
    for selects, cpus in (("cr_cpu_memory", 3), ("cr_socket", 24), ("cr_board", 48)):
        picture = msgspec.structs.replace(CLUSTER, selects=selects)
        assert quote("-n3", picture=picture).tres["cpu"] == cpus
    picture = msgspec.structs.replace(CLUSTER, linear=True)
    assert quote("-n1", picture=picture).tres["cpu"] == 16


@pytest.mark.parametrize(
    ("options", "memory"),
    [
        ("-n1", 1000),  # DefMemPerCPU of both CPUs of a core
        ("-n1 --mem=3G", 3072),
        ("-N2 --mem=3G", 6144),
        ("-n1 --mem=0", 32000),
        ("-n4 --mem-per-cpu=1000", 4000),
        ("-p Mixed -n1", 1000),
        ("-p Mixed -N2", 2000),
        ("-p plain", 4000),  # no option limits it: all of a node's
        ("-p gpu --gpus=2", 8000),
        ("-p gpu --gpus=2 --mem-per-gpu=1G", 2048),
        ("-p gpu -n5 -N3 --ntasks-per-node=2 --gpus-per-task=1", 24000),  # of six GPUs
        ("-p gpu -n1 --gpus-per-task=1 --mincpus=5", 4000),
        ("-p gpu -n1 --gpus-per-task=1 --mincpus=6", 8000),  # as of two tasks of three CPUs each
        ("-p gpu -n1 --gpus-per-task=1 --mincpus=12", 16000),
        ("-p gpu -n1 --gpus-per-task=1 --mincpus=6 -c6", 4000),
        ("-p gpu -n1 --gpus-per-task=1 --mincpus=6 --cpus-per-gpu=1", 8000),
        ("-p limited -n1 --mem-per-cpu=5000", 6668),
        ("--exclusive --mem=100", 32000),
    ],
)
def test_memory(options: str, memory: int) -> None:
    assert quote(options).tres["mem"] == memory


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ("--gpus=3", {"gres/gpu": 3}),
        ("--gpus=a100:3", {"gres/gpu": 3, "gres/gpu:a100": 3}),
        ("--gpus-per-node=2 -N2", {"gres/gpu": 4}),
        ("--gres=gpu:v100:1 -N3", {"gres/gpu": 3, "gres/gpu:v100": 3}),
        ("--gpus-per-task=1 -n3", {"gres/gpu": 3}),
        ("--gpus-per-task=1 -n5 -N1-4 --ntasks-per-node=2", {"gres/gpu": 8}),
        ("--gpus-per-task=1 --gpus=4", {"gres/gpu": 4}),
        ("--gpus-per-socket=1 --sockets-per-node=2 -N1", {"gres/gpu": 2}),
        ("-n4 --ntasks-per-gpu=2", {"gres/gpu": 2}),
        ("--exclusive", {"gres/gpu": 6, "gres/gpu:a100": 4, "gres/gpu:v100": 2}),
    ],
)
def test_gpus(options: str, gpus: dict[str, int]) -> None:
    found = quote(f"-p gpu {options}").tres
    assert {name: count for name, count in found.items() if name.startswith("gres/")} == gpus


def test_a_gpu_of_any_type_is_the_dearest_that_there_is() -> None:
    rate = Rate(weights={"gres/gpu": SU, "gres/gpu:a100": 5 * SU, "gres/gpu:h100": 9 * SU})
    assert quote("-p gpu --gpus=2 -t 59", rate).amount == 10 * SU
    assert quote("-p gpu --gpus=v100:2 -t 59", rate).amount == 2 * SU


def test_licenses() -> None:
    rate = Rate(weights={"license/matlab": SU})
    assert quote("-L matlab:3,other -t 59", rate).amount == 3 * SU


def test_slurms_own_billing() -> None:
    rate = Rate(weights={"billing": SU})
    assert quote("-n4 -t 59", rate).amount == 4 * SU
    billing = {"cpu": "1", "mem": "1/1024"}
    main = msgspec.structs.replace(CLUSTER.partitions["main"], billing=billing)
    picture = msgspec.structs.replace(CLUSTER, partitions={"main": main})
    assert quote("-n4 --mem-per-cpu=1G -t 59", rate, picture=picture).amount == 8 * SU
    max_tres = ("cpu", "mem", "node", "gres")
    picture = msgspec.structs.replace(picture, billing_max=max_tres)
    assert quote("-n4 --mem-per-cpu=2G -t 59", rate, picture=picture).amount == 8 * SU


@pytest.mark.parametrize(
    ("dearest", "billed"),
    [((), 17), (("cpu", "mem", "node", "gres"), 9), (("cpu", "mem", "node"), 13)],
)
def test_licenses_are_added_to_the_dearest_of_a_node(dearest: tuple[str, ...], billed: int) -> None:
    billing = {"cpu": "1", "node": "4", "gres/gpu": "2", "license/abq": "5/2"}
    main = msgspec.structs.replace(CLUSTER.partitions["main"], billing=billing)
    picture = msgspec.structs.replace(CLUSTER, partitions={"main": main}, billing_max=dearest)
    rate = Rate(weights={"billing": SU})
    words = "-N1 -n4 --gres=gpu:2 -L abq:2"
    assert quote(words, rate, picture=picture).tres["billing"] == billed


@pytest.mark.parametrize(
    ("rate", "cost"),
    [(Rate(weights={"bb/lua": 2 * SU}), 6 * SU), (Rate(weights={"billing": SU}), 9 * SU)],
)
def test_burst_buffers_that_the_queue_shows_are_priced_by_the_gib(rate: Rate, cost: int) -> None:
    main = msgspec.structs.replace(CLUSTER.partitions["main"], billing={"bb/lua": "3/1024"})
    picture = msgspec.structs.replace(CLUSTER, partitions={"main": main})
    shown = "cpu=1,node=1,bb/lua=3G"
    record = JobRecord(job_id=1, time_limit_s=3540, partition="main", tres_requested=shown)
    found = Estimator(picture, [rate], SETTINGS).quote(describe_record(record), NOW)
    assert (found.tres["bb/lua"], found.amount) == (3072, cost)


def test_billing_is_cut_to_a_whole_number_as_slurm_does() -> None:
    main = msgspec.structs.replace(CLUSTER.partitions["main"], billing={"cpu": "3/5"})
    picture = msgspec.structs.replace(CLUSTER, partitions={"main": main})
    rate = Rate(weights={"billing": SU})
    billed = [quote(f"-N1 -n{n}", rate, picture=picture).tres for n in (2, 4, 8, 10)]
    assert [tres["billing"] for tres in billed] == [int(tres["cpu"] * 0.6) for tres in billed]


def test_whole_nodes_where_the_rate_says_so() -> None:
    rate = Rate(weights={"cpu": SU, "mem": SU}, whole_nodes=True)
    assert quote("-n1", rate).tres == {"cpu": 16, "mem": 32000, "node": 1}
    # No option puts its tasks on one node.
    assert quote("-n3", rate).tres["node"] == 3


def test_of_several_partitions_the_dearest() -> None:
    rates = [CPUS, Rate(number=2, partition="plain", weights={"cpu": 9 * SU})]
    found = quote("-p main,plain -t 59", *rates)
    assert (found.partition, found.rate, found.amount) == ("plain", 2, 9 * SU)
    assert quote("-p plain,main -t 59", *rates).amount == 9 * SU


def test_one_of_several_partitions_without_a_rate_is_refused_by_its_name() -> None:
    with pytest.raises(NoRate, match="partition Mixed"):
        quote("-p main,Mixed", Rate(partition="main", weights={"cpu": 1}))


def test_names_of_partitions_are_taken_as_they_are() -> None:
    assert quote("-p Mixed").partition == "Mixed"
    with pytest.raises(NoEstimate, match="mixed"):
        quote("-p mixed")


def test_without_a_partition_the_default_one() -> None:
    assert quote("").partition == "main"
    with pytest.raises(NoEstimate, match="no default"):
        quote("", picture=msgspec.structs.replace(CLUSTER, default_partition=""))


def test_accounts_are_in_lower_case_and_have_defaults() -> None:
    assert quote("-A PHYsics").account == "physics"
    assert quote("", uid=1).account == "physics"
    assert quote("", uid=2).account == "rest"


def test_the_qos_that_slurm_will_give() -> None:
    rate = Rate(weights={"cpu": SU}, qos_permille={"high": 3000, "normal": 2000})
    assert quote("-t 59 -p plain", rate).amount == 2 * SU
    assert quote("-t 59 -p plain -A physics", rate, uid=2).amount == 3 * SU
    assert quote("-t 59 -p plain -q low", rate).amount == SU
    assert quote("-t 59 -p plain -q low,high", rate).amount == 3 * SU
    bare = msgspec.structs.replace(CLUSTER, accounting=False)
    assert quote("-t 59 -p plain", rate, picture=bare).amount == SU


def test_every_factor_at_its_dearest() -> None:
    rate = Rate(
        weights={"cpu": SU},
        factors=(TimeFactor(days=(0,), begin_min=0, end_min=60, permille=4000),),
        ends_permille={"NODE_FAIL": 0, "TIMEOUT": 1500},
        minimum=5,
    )
    assert quote("-t 59 -p plain", rate).amount == 6 * SU
    assert quote("-t 59 -p plain", Rate(weights={"cpu": 1}, minimum=5)).amount == 5


def test_free_only_where_it_is_written() -> None:
    assert quote("", Rate(free=True)).amount == 0
    with pytest.raises(NoRate):
        quote("", Rate())
    with pytest.raises(NoRate):
        quote("", Rate(cluster="another", weights={"cpu": 1}))


def test_the_rate_is_that_of_the_first_submission() -> None:
    rates = [CPUS, Rate(number=2, weights={"cpu": 2 * SU}, valid_from=NOW)]
    found = estimator(*rates)
    job = parse_options(["-p", "plain", "-t", "59"])
    assert found.quote(job, NOW).rate == 2
    assert found.quote(job, NOW - timedelta(days=1)).rate == 1
    assert found.quote(job, NOW).rate == 2


def test_an_array_is_all_its_tasks() -> None:
    found = quote("-a 0-9:2%2 -p plain -t 59")
    assert (found.tasks, found.at_once, found.per_task, found.amount) == (5, 2, SU, 5 * SU)


@pytest.mark.parametrize(
    ("expression", "counts"),
    [("5", (1, 1)), ("1,3,5-9:2%4", (5, 4)), ("[0-99%0]", (100, 100)), (" 1-2 , 4", (3, 3))],
)
def test_array_tasks(expression: str, counts: tuple[int, int]) -> None:
    assert count_array_tasks(expression) == counts


@pytest.mark.parametrize(
    "expression", ["", "x", "1-", "9-1", "1-9:0", "1,,2", "1%x", "0-99999999", "٣", "1-2-3"]
)
def test_no_array_tasks(expression: str) -> None:
    with pytest.raises(NoEstimate, match="array"):
        count_array_tasks(expression)


@given(st.text(max_size=30))
def test_no_expression_upsets_it(expression: str) -> None:
    try:
        tasks, at_once = count_array_tasks(expression)
    except NoEstimate:
        return
    assert 1 <= at_once <= tasks


def test_what_nobody_could_pay_is_no_amount() -> None:
    with pytest.raises(NoEstimate, match="exceeds the largest possible balance"):
        quote("-n128 -a 0-999999 -t 365-0", Rate(weights={"cpu": 10**12}))


def test_an_update_that_makes_a_job_larger() -> None:
    base = parse_options(["-n2", "-t", "10", "--mem=1G", "-p", "plain"], uid=1)
    longer = apply_update(base, JobRequest(uid=0, job_id=7, time_limit_min=20))
    assert (longer.uid, longer.num_tasks, longer.time_limit_min) == (1, 2, 20)
    moved = apply_update(base, JobRequest(uid=0, partition="main"))
    assert estimator().quote(moved, NOW).partition == "main"
    wider = apply_update(base, JobRequest(uid=0, mem_per_cpu_mib=100, min_nodes=3))
    assert (wider.pn_min_memory_mib, wider.mem_per_cpu_mib, wider.min_nodes) == (None, 100, 3)


def test_the_longest_limit_that_an_amount_pays() -> None:
    job = parse_options(["-p", "plain", "-n2"])
    found = estimator()
    assert found.find_longest_limit(job, 2 * SU, NOW) == 59
    assert found.find_longest_limit(job, 1, NOW) is None
    limited = msgspec.structs.replace(job, time_limit_min=59)
    assert found.quote(limited, NOW).amount == 2 * SU


def test_the_way_to_a_quote() -> None:
    job = parse_options(["-a", "0-9", "-p", "plain", "-t", "59"], uid=1)
    found = estimate(job, CLUSTER, [CPUS], SETTINGS, NOW)
    assert [(line.description, line.amount) for line in found.lines] == [
        ("partition plain, QOS normal, by rate 1", None),
        ("1 cpu x 1.00 an hour", SU),
        ("sum per hour", SU),
        ("01:00:00", None),
        ("price for this time", SU),
        ("sum", SU),
        ("x 10 array tasks", 10 * SU),
    ]


weights = st.dictionaries(
    st.sampled_from(["cpu", "mem", "node", "gres/gpu", "gres/gpu:a100", "billing"]),
    st.integers(1, 10**9),
    min_size=1,
)


@given(
    weights,
    st.sampled_from(["sum", "max"]),
    st.integers(0, 10**8),
    st.integers(0, 3000),
    st.integers(1, 10_000),
    st.integers(1, 12),
    st.sampled_from(["main", "gpu", "excl", "Mixed"]),
    st.sampled_from(["", "--gpus=2", "--gres=gpu:a100:1"]),
)
def test_whole_numbers_and_fractions_agree(
    of: dict[str, int],
    combine: str,
    minimum: int,
    permille: int,
    minutes: int,
    tasks: int,
    partition: str,
    gpus: str,
) -> None:
    rate = Rate(
        weights=of,
        combine=combine,  # type: ignore[arg-type] # one of the two
        minimum=minimum,
        qos_permille={"normal": permille},
        ends_permille={"FAILED": 1300},
    )
    found = quote(f"-p {partition} -n{tasks} -t {minutes} {gpus}", rate)
    use = ResourceUse(tres=found.tres, seconds=found.time_s, qos=found.qos)
    assert found.amount == compute_highest_price(use, rate).amount


@given(
    st.builds(
        JobRequest,
        uid=st.just(1),
        partition=st.sampled_from(["", "main", "gpu", "excl", "limited"]),
        time_limit_min=st.none() | st.integers(-1, 10**6),
        min_nodes=st.none() | st.integers(0, 20),
        max_nodes=st.none() | st.integers(0, 20),
        num_tasks=st.none() | st.integers(0, 200),
        cpus_per_task=st.none() | st.integers(0, 70),
        min_cpus=st.none() | st.integers(0, 10_000),
        pn_min_memory_mib=st.none() | st.integers(0, 10**6),
        mem_per_cpu_mib=st.none() | st.integers(0, 10**5),
        ntasks_per_node=st.none() | st.integers(0, 20),
        ntasks_per_core=st.none() | st.integers(0, 3),
        ntasks_per_socket=st.none() | st.integers(0, 3),
        threads_per_core=st.none() | st.integers(0, 3),
        sockets_per_node=st.none() | st.integers(0, 3),
        core_spec=st.none() | st.integers(0, 3),
        exclusive=st.booleans(),
        overcommit=st.booleans(),
        req_nodes=st.sampled_from(["", "t1", "t[1-3]"]),
        licenses=st.text(max_size=10),
        tres_per_job=st.text(max_size=10) | st.just("gres/gpu:4"),
        tres_per_node=st.text(max_size=10) | st.just("gres/gpu:a100:1"),
        tres_per_task=st.text(max_size=10) | st.just("gres/gpu:1"),
        cpus_per_tres=st.sampled_from(["", "gres/gpu:3", "x"]),
        mem_per_tres=st.sampled_from(["", "gres/gpu:3", "x"]),
    )
)
def test_whatever_is_asked_for_costs_something(job: JobRequest) -> None:
    found = estimator(EVERYTHING).quote(job, NOW)
    assert found.amount > 0
    assert found.tres["cpu"] >= 1
    assert found.tres["node"] >= 1
    assert found.time_s >= GRACE_S


def test_a_job_keeps_its_price_whatever_rate_is_entered_later() -> None:
    later = NOW + timedelta(hours=1)
    late = Rate(number=2, partition="main", weights={"cpu": 9 * SU}, created_us=to_micros(later))
    prices = estimator(CPUS, late)
    job = JobRequest(uid=1, partition="main")
    assert [prices.quote(job, at).rate for at in (NOW, later, NOW, later)] == [1, 2, 1, 2]
