"""Random requests, and a cluster of many small nodes on which a real slurmctld allocates them.

The nodes belong to a cloud that is powered down: slurmctld allocates them as others, and the
jobs then wait for nodes that never come. A thousand allocations take seconds and need no slurmd.
"""

import random
from typing import Final

from steward.bank.records import Rate
from steward.sandbox import SandboxSpec

_KINDS: Final = (
    "NodeName=t[1-24] State=CLOUD Sockets=2 CoresPerSocket=4 ThreadsPerCore=2 RealMemory=32000",
    (
        "NodeName=g[1-12] State=CLOUD Sockets=2 CoresPerSocket=8 ThreadsPerCore=2 RealMemory=64000 "
        "Gres=gpu:a100:4,gpu:v100:2"
    ),
    "NodeName=s[1-24] State=CLOUD Sockets=4 CoresPerSocket=1 ThreadsPerCore=1 RealMemory=4000",
)
_PARTITIONS: Final = (
    "PartitionName=thr Nodes=t[1-24] DefaultTime=10 MaxTime=60 DefMemPerCPU=500 MaxMemPerCPU=2000",
    (
        "PartitionName=gpu Nodes=g[1-12] MaxTime=60 DefCpuPerGPU=3 DefMemPerGPU=4000 "
        "TRESBillingWeights=CPU=1,Mem=0.25G{gpus}"
    ),
    "PartitionName=excl Nodes=s[1-12],t[1-12] OverSubscribe=EXCLUSIVE MaxTime=60",
    "PartitionName=mix Nodes=s[1-24],t[1-24],g[1-12] MaxTime=60 DefMemPerNode=1000",
    "PartitionName=bare Nodes=s[1-24],t[13-24]",
)

RATES: Final = (
    Rate(number=1, weights={"cpu": 1_000_000}),
    Rate(number=2, weights={"mem": 1_000_000}),
    Rate(number=3, weights={"node": 1_000_000}),
    Rate(number=4, weights={"gres/gpu": 1_000_000}),
    Rate(number=5, weights={"gres/gpu:a100": 3_000_000, "gres/gpu": 1_000_000}),
    Rate(number=6, weights={"billing": 1_000_000}),
    Rate(number=7, weights={"cpu": 1_000_000, "mem": 250_000, "gres/gpu": 9_000_000}),
    Rate(number=8, weights={"cpu": 1_000_000, "mem": 250_000}, combine="max"),
    Rate(number=9, weights={"cpu": 1_000_000, "mem": 250_000}, whole_nodes=True),
)
"""One rate for each TRES alone, so that no other TRES hides a low estimate."""


def spec(version: str, selects: str, *, accounting: bool) -> SandboxSpec:
    """Return the spec of a cluster with these SelectTypeParameters."""
    counted = ["AccountingStorageTRES=gres/gpu,gres/gpu:a100,gres/gpu:v100"] if accounting else []
    return SandboxSpec(
        slurm=version,
        nodes=1,
        accounting=accounting,
        # Without it nodes of a cloud that are powered down are not shown.
        private_data="cloud",
        extra=(
            f"SelectTypeParameters={selects}",
            "GresTypes=gpu",
            *counted,
            "ResumeProgram=/bin/true",
            "SuspendProgram=/bin/true",
            "SuspendTime=INFINITE",
            "ResumeTimeout=36000",
            *_KINDS,
            # slurmctld knows GRES as TRES only where there is a slurmdbd.
            *(line.format(gpus=",GRES/gpu=10" if accounting else "") for line in _PARTITIONS),
        ),
    )


def request(chance: random.Random) -> list[str]:
    """Return random sbatch options of one job."""
    partition = chance.choice(["thr", "thr", "gpu", "excl", "mix", "bare"])
    words = [f"--partition={partition}"]
    words += _tasks(chance)
    words += _memory(chance)
    if partition in ("gpu", "mix") and chance.random() < (0.8 if partition == "gpu" else 0.2):
        words += _gpus(chance)
    if chance.random() < 0.08:
        words.append("--exclusive")
    if chance.random() < 0.5:
        words.append(f"--time={chance.randint(1, 60)}")
    return words


def _tasks(chance: random.Random) -> list[str]:
    words: list[str] = []
    if chance.random() < 0.7:
        words.append(f"--ntasks={chance.choice([1, 1, 2, 3, 4, 5, 7, 8, 12, 17])}")
    if chance.random() < 0.4:
        words.append(f"--cpus-per-task={chance.choice([1, 2, 3, 4, 5])}")
    words += _nodes(chance)
    if chance.random() < 0.12:
        words.append(f"--ntasks-per-core={chance.choice([1, 2])}")
    if chance.random() < 0.12:
        words.append(chance.choice(["--hint=nomultithread", "--threads-per-core=1"]))
    if chance.random() < 0.08:
        words.append(f"--mincpus={chance.randint(1, 6)}")
    if chance.random() < 0.08:
        words.append(f"--ntasks-per-socket={chance.randint(1, 3)}")
    if chance.random() < 0.05:
        words.append("--overcommit")
    if chance.random() < 0.05:
        words.append(f"--sockets-per-node={chance.randint(1, 2)}")
    if chance.random() < 0.05:
        words.append(f"--cores-per-socket={chance.randint(1, 4)}")
    return words


def _nodes(chance: random.Random) -> list[str]:
    words: list[str] = []
    has_nodes = chance.random() < 0.35
    if has_nodes:
        least = chance.randint(1, 4)
        words.append(f"--nodes={least}" + chance.choice(["", f"-{least + chance.randint(0, 3)}"]))
    if chance.random() < (0.4 if has_nodes else 0.08):
        words.append(f"--ntasks-per-node={chance.randint(1, 4)}")
    return words


def _memory(chance: random.Random) -> list[str]:
    return chance.choice(
        [
            [],
            [],
            [],
            [f"--mem={chance.choice([0, 100, 700, 3000, 9000])}"],
            [f"--mem-per-cpu={chance.choice([100, 900, 2500, 5000])}"],
        ]
    )


def _gpus(chance: random.Random) -> list[str]:
    kind = chance.choice(["", "", "a100:", "v100:"])
    words = chance.choice(
        [
            [f"--gpus={kind}{chance.randint(1, 9)}"],
            [f"--gpus-per-node={kind}{chance.randint(1, 3)}"],
            [f"--gres=gpu:{kind}{chance.randint(1, 3)}"],
            [f"--gpus-per-task={kind}1"],
            [f"--gpus-per-socket={kind}1", "--sockets-per-node=2"],
        ]
    )
    if chance.random() < 0.2:
        words.append(f"--cpus-per-gpu={chance.randint(1, 4)}")
    if chance.random() < 0.2:
        words.append(f"--mem-per-gpu={chance.randint(100, 5000)}")
    if chance.random() < 0.1:
        words.append(f"--ntasks-per-gpu={chance.randint(1, 2)}")
    return words
