"""Estimates and quotes on a cluster without a Slurm."""

from datetime import UTC, datetime

from steward.bank.estimate import Estimator, parse_options
from steward.bank.records import Quote, Rate
from steward.bank.settings import BankSettings
from steward.slurm.cluster_model import ClusterModel, NodeShape, PartitionModel

SU = 1_000_000
NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
GRACE_S = 60

THREADED = NodeShape(
    nodes="t[1-8]", count=8, cpus=16, usable_cpus=16, cores=8, sockets=2, memory_mib=32000
)
PLAIN = NodeShape(
    nodes="s[1-4]", count=4, cpus=4, usable_cpus=4, cores=4, sockets=4, memory_mib=4000
)
GPUS = NodeShape(
    nodes="g[1-4]",
    count=4,
    cpus=32,
    usable_cpus=32,
    cores=16,
    sockets=2,
    memory_mib=64000,
    tres={"gres/gpu": 6, "gres/gpu:a100": 4, "gres/gpu:v100": 2},
)


def part(name: str, *shapes: int, **more: object) -> PartitionModel:
    """Return a partition of the cluster's node shapes with these indexes."""
    counts = tuple((shape, (8, 4, 4)[shape]) for shape in shapes)
    total = sum(count for _, count in counts)
    return PartitionModel(name=name, shapes=counts, nodes=total, **more)  # type: ignore[arg-type] # fields by name


CLUSTER = ClusterModel(
    cluster="c",
    default_partition="main",
    shapes=(THREADED, PLAIN, GPUS),
    selects="cr_core_memory",
    accounting=True,
    users={1: "ada", 2: "bela"},
    accounts={"ada": "physics"},
    qos={"physics/bela": "high"},
    partitions={
        of.name: of
        for of in (
            part("main", 0, default_time_s=600, max_time_s=3600, def_mem_per_cpu_mib=500),
            part("plain", 1, max_time_s=7200),
            part("gpu", 2, def_cpu_per_gpu=3, def_mem_per_gpu_mib=4000),
            part("excl", 0, 1, exclusive=True),
            part("limited", 0, max_mem_per_cpu_mib=2000, max_nodes=2, over_time_s=300),
            part("Mixed", 0, 1, def_mem_per_node_mib=1000, min_nodes=1),
        )
    },
)
CPUS = Rate(number=1, weights={"cpu": SU})
SETTINGS = BankSettings(default_account="rest")


def estimator(*rates: Rate, picture: ClusterModel = CLUSTER) -> Estimator:
    """Return an estimator with these rates; one SU per CPU hour by default."""
    return Estimator(picture, rates or [CPUS], SETTINGS)


def quote(options: str, *rates: Rate, uid: int = 1, picture: ClusterModel = CLUSTER) -> Quote:
    """Return the quote of a job with these options of sbatch."""
    job = parse_options(options.split(), uid=uid)
    return estimator(*rates, picture=picture).quote(job, NOW)
