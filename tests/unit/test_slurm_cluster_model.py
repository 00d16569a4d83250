from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.slurm import tres
from steward.slurm.cluster_model import ClusterModel, add_users, parse_cluster_model, parse_users
from steward.slurm.tres import parse_requested_gres, parse_tres
from steward.slurm.users import NameResolver

FIXTURES = Path(__file__).parent / "fixtures" / "slurm"
CONFIG = {
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CORE_MEMORY",
    "OverTimeLimit": "0 min",
    "MaxArraySize": "1001",
    "DefMemPerNode": "UNLIMITED",
    "MaxMemPerNode": "UNLIMITED",
    "AccountingStorageTRES": "cpu,mem,energy,node,billing",
    "AccountingStorageType": "accounting_storage/none",
    "PriorityFlags": "",
}
PARTITION = (
    "PartitionName=gpu Default=NO DefaultTime=00:10:00 MaxNodes=3 MaxTime=1-00:00:00 MinNodes=1 "
    "Nodes=g[1-2],c1 OverSubscribe=EXCLUSIVE OverTimeLimit=5 State=UP TotalCPUs=80 TotalNodes=3 "
    "SelectTypeParameters=CR_SOCKET JobDefaults=DefCpuPerGPU=3,DefMemPerGPU=4000 "
    "DefMemPerCPU=500 MaxMemPerCPU=2000 TRES=cpu=80,mem=160000M,node=3,billing=80,gres/gpu=8 "
    "TRESBillingWeights=CPU=1.0,Mem=0.25G,GRES/gpu:a100=2.5,Node=1"
)
NODES = (
    "NodeName=g1 Arch=x86_64 CoresPerSocket=8  CPUAlloc=0 CPUEfctv=30 CPUTot=32 "
    "AvailableFeatures=(null) Gres=gpu:a100:4(S:0-1),shard:8(S:0-1) RealMemory=64000 "
    "Sockets=2 Boards=1 State=IDLE ThreadsPerCore=2 Partitions=gpu,main  "
    "Reason=CPUTot=1 Partitions=none [root@2026-11-21T09:54:27]"
)


def shown(partitions: str = PARTITION, nodes: str = NODES, **config: str) -> ClusterModel:
    return parse_cluster_model(
        "c", {**CONFIG, **config}, partitions.encode(), nodes.encode(), zone="UTC"
    )


@pytest.mark.parametrize("version", ["22.05", "24.11", "25.11", "26.05"])
def test_what_four_versions_of_slurm_write(version: str) -> None:
    found = parse_cluster_model(
        "c",
        CONFIG,
        (FIXTURES / f"scontrol-partition-{version}.txt").read_bytes(),
        (FIXTURES / f"scontrol-node-{version}.txt").read_bytes(),
    )
    main = found.partitions["main"]
    assert found.default_partition == "main"
    assert main.nodes == 4
    assert [(found.shapes[shape].cpus, count) for shape, count in main.shapes] == [(8, 4)]
    assert found.shapes[0].nodes == "n[1-4]"
    assert found.shapes[0].cores == 8
    assert found.shapes[0].cpus_per_core == 1
    assert not main.exclusive
    assert main.over_time_s == 0
    assert main.max_nodes == 0
    assert main.max_time_s is not None
    assert main.def_mem_per_node_mib == 0
    assert found.max_array == 1001


def test_everything_that_a_partition_may_say() -> None:
    part = shown().partitions["gpu"]
    assert (part.default_time_s, part.max_time_s, part.over_time_s) == (600, 86400, 300)
    assert (part.max_nodes, part.min_nodes, part.exclusive) == (3, 1, True)
    assert (part.def_mem_per_cpu_mib, part.max_mem_per_cpu_mib) == (500, 2000)
    assert (part.def_cpu_per_gpu, part.def_mem_per_gpu_mib) == (3, 4000)
    assert part.selects == "cr_socket"
    assert part.billing == {"cpu": "1", "mem": "1/4096", "gres/gpu:a100": "5/2", "node": "1"}


@pytest.mark.parametrize(
    ("words", "exclusive"),
    [
        ("OverSubscribe=EXCLUSIVE", True),
        ("Exclusive=NODE OverSubscribe=NO", True),  # 26.05
        ("Exclusive=USER OverSubscribe=NO", False),
        ("ExclusiveUser=YES OverSubscribe=NO", False),
    ],
)
def test_partitions_of_whole_nodes(words: str, exclusive: bool) -> None:
    assert shown(f"PartitionName=a TotalNodes=0 {words}", "").partitions["a"].exclusive == exclusive


def test_a_node_is_what_slurm_says_and_not_what_its_reason_says() -> None:
    found = shown()
    node = found.shapes[0]
    assert (node.cpus, node.usable_cpus, node.cores, node.cpus_per_core) == (32, 30, 16, 2)
    assert node.whole == {
        "cpu": 30,
        "mem": 64000,
        "node": 1,
        "gres/gpu": 4,
        "gres/gpu:a100": 4,
        "gres/shard": 8,
    }


def test_nodes_that_are_counted_but_not_shown_are_what_is_left() -> None:
    found = shown()
    seen, unseen = (found.shapes[number] for number, _ in found.partitions["gpu"].shapes)
    assert seen.nodes == "g1"
    assert (unseen.count, unseen.cpus, unseen.memory_mib) == (2, 25, 48000)
    assert unseen.tres == {"gres/gpu": 2}


def test_a_partitions_own_memory_hides_the_clusters() -> None:
    bare = "PartitionName=a TotalNodes=0 DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED"
    found = shown(bare, "", DefMemPerCPU="700", MaxMemPerNode="9000").partitions["a"]
    assert (found.def_mem_per_cpu_mib, found.max_mem_per_node_mib) == (700, 9000)
    own = "PartitionName=a TotalNodes=0 DefMemPerNode=1000"
    found = shown(own, "", DefMemPerCPU="700").partitions["a"]
    assert (found.def_mem_per_cpu_mib, found.def_mem_per_node_mib) == (0, 1000)


@pytest.mark.parametrize(
    ("own", "clusters", "seconds"),
    [("NONE", "5 min", 300), ("2", "5 min", 120), ("UNLIMITED", "0 min", None), ("NONE", "", 0)],
)
def test_over_time(own: str, clusters: str, seconds: int | None) -> None:
    line = f"PartitionName=a TotalNodes=0 OverTimeLimit={own}"
    assert shown(line, "", OverTimeLimit=clusters).partitions["a"].over_time_s == seconds


def test_what_can_be_charged_is_what_slurm_counts() -> None:
    found = shown(PriorityFlags="DEPTH_OBLIVIOUS,MAX_TRES", SelectType="select/linear")
    assert found.billing_max == ("cpu", "mem", "node", "gres")
    assert found.linear
    assert found.tracks("cpu")
    assert not found.tracks("gres/gpu")


@pytest.mark.parametrize(
    ("value", "asks"), [("", False), ("none", False), ("limits,qos", True), ("Associations", True)]
)
def test_whether_slurm_asks_for_an_association(value: str, asks: bool) -> None:
    assert shown(AccountingStorageEnforce=value).enforced == asks


def test_people_are_those_of_slurmdbd() -> None:
    known = NameResolver()
    users, accounts, qos = parse_users(
        b"root|physics\nnobody-of-that-name|x\nbad|a|b\n",
        b"physics||normal|\nphysics|root|high|\nphysics|root|low|debug\nphysics|a||\n",
        known,
    )
    assert users == {0: "root"}
    assert accounts == {"root": "physics", "nobody-of-that-name": "x"}
    assert qos == {"physics/root": "high", "physics/a": ""}
    found = add_users(shown(), (users, accounts, qos))
    assert msgspec.json.decode(msgspec.json.encode(found), type=ClusterModel, strict=False) == found


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_no_text_upsets_it(partitions: bytes, nodes: bytes) -> None:
    parse_cluster_model("c", CONFIG, b"PartitionName=" + partitions, b"NodeName=n1 " + nodes)


def test_tres_and_gres_as_they_are_written() -> None:
    assert parse_tres("cpu=4,mem=62.50G,node=2,gres/gpu:a=1,x,energy=1K") == {
        "cpu": 4,
        "mem": 64000,
        "node": 2,
        "gres/gpu:a": 1,
        "energy": 1024,
    }
    assert parse_tres("mem=500M")["mem"] == 500
    assert parse_tres("mem=1T")["mem"] == 1024**2
    assert tres.parse_gres("(null)") == {}
    assert tres.parse_gres("gpu:2,craynetwork:no_consume:4") == {
        "gres/gpu": 2,
        "gres/craynetwork": 4,
    }
    assert parse_requested_gres("gres/gpu:a100:2,gres/gpu,gpu:3,gres:shard:4") == {
        "gres/gpu:a100": 2,
        "gres/gpu": 4,
        "gres/shard": 4,
    }
    assert parse_requested_gres("license/matlab=2,cpu:4") == {"license/matlab": 2, "cpu": 4}
    assert tres.parse_licenses("matlab:2,abaqus@db=3,one") == {
        "license/matlab": 2,
        "license/abaqus@db": 3,
        "license/one": 1,
    }


@given(st.text(max_size=60))
def test_no_tres_upset_them(text: str) -> None:
    for read in (parse_tres, tres.parse_gres, parse_requested_gres, tres.parse_licenses):
        assert all(amount >= 0 for amount in read(text).values())


def test_kill_wait_is_slurms_own_where_it_is_not_told() -> None:
    for shown, seconds in (("5 sec", 5), ("", 30), ("0 sec", 0)):
        assert parse_cluster_model("c", {"KillWait": shown}, b"", b"").kill_wait_s == seconds


@pytest.mark.parametrize(
    ("flags", "dearest"),
    [
        ("", ()),
        ("FAIR_TREE", ()),
        ("MAX_TRES", ("cpu", "mem", "node", "gres")),
        ("ACCRUE_ALWAYS,MAX_TRES_GRES", ("cpu", "mem", "node")),
    ],
)
def test_what_billing_takes_the_dearest_of(flags: str, dearest: tuple[str, ...]) -> None:
    assert shown(PriorityFlags=flags).billing_max == dearest


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("CPU=1e1", {"cpu": "10"}),
        ("CPU=0x10", {"cpu": "16"}),
        ("CPU=+2,License/abq=.5", {"cpu": "2", "license/abq": "1/2"}),
        ("CPU=0.99999999999999999", {"cpu": "1"}),
        ("CPU=1e999999999,CPU=e5,CPU=0x.,CPU=.,CPU=inf", {}),
    ],
)
def test_weights_are_read_as_slurm_reads_numbers(written: str, read: dict[str, str]) -> None:
    before, name, _ = PARTITION.partition("TRESBillingWeights=")
    assert shown(before + name + written).partitions["gpu"].billing == read
