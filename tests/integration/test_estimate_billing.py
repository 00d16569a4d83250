"""Quotes and the option table against real Slurm: its billing, and sbatch's own options."""

import json
import re
import shlex
import string
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Final

import msgspec
import pytest
from job_submission import wait_until

from steward.bank.estimate import Estimator, describe_record, parse_options
from steward.bank.gate_sync import CONFIG_CHECK_S, MODEL_REFRESH_S, ClusterModels
from steward.bank.ledger import open_ledger
from steward.bank.records import Rate
from steward.bank.settings import BankSettings
from steward.core.config import Settings
from steward.core.records import JobRecord
from steward.sandbox import Sandbox, SandboxSpec
from steward.slurm.cluster_model import ClusterModel
from steward.slurm.sbatch_options import (
    ALIASES,
    ALL_OPTIONS,
    FLAGS,
    OPTIONAL_VALUE_OPTIONS,
    VALUE_OPTIONS,
)
from steward.slurm.tres import parse_tres

pytestmark = [pytest.mark.matrix, pytest.mark.interface, pytest.mark.database]

INSIDE: Final = str(Path(__file__).parent / "slurm_calls.py")
WEIGHTS: Final = (
    "CPU=1",
    "Mem=0.25G",
    "Node=3",
    "GRES/gpu=2",
    "GRES/gpu:a100=3",
    "License/abq=2.5",
)
COMBINATIONS: Final = tuple(
    ",".join(chosen) for size in range(len(WEIGHTS) + 1) for chosen in combinations(WEIGHTS, size)
)
"""All sets of weights; each is a partition's."""
REQUESTS: Final = (
    "-N1 -n4 --mem=8G --gres=gpu:a100:2 -L abq:2 -t 5",
    "-N1 -n3 --mem=5000 -L abq:3 -t 5",
    "-N2 -n4 --ntasks-per-node=2 --mem=4G --gres=gpu:a100:1 -L abq:2 -t 5",
)
SPREAD: Final = (
    "-N3 -n3 -c2 --mem-per-cpu=2G -L abq:4 -t 5",
    "-N4 --ntasks-per-node=1 --gpus-per-node=a100:1 --mem=8G -t 5",
    "-N2 --exclusive --mem=0 -t 5",
)
"""Requests of several nodes that Slurm allocates: all fit at the same time."""
BUFFERS: Final = """
local function succeed() return slurm.SUCCESS, "" end
for _, name in ipairs({"job_process", "job_teardown", "setup", "data_in", "test_data_in",
		"real_size", "paths", "pre_run", "post_run", "data_out", "test_data_out", "get_status"}) do
	_G["slurm_bb_" .. name] = succeed
end
function slurm_bb_pools()
	return slurm.SUCCESS, '{"pools":[{"id":"fast","quantity":1000,"granularity":1073741824}]}'
end
"""
"""Script burst_buffer.lua with a pool of 1000 GiB."""
EXCLUSIVE: Final = (
    (
        "-N1 --exclusive",
        "-N1 --exclusive --mem=1G",
        "-N1 --exclusive --mem-per-cpu=1G",
        "-N1 --exclusive --mem=0",
        "-N1 -n2 --exclusive --mem-per-cpu=700",
        "-N1 --exclusive=user --mem=1G",
        "-N1 -n3 --mem=1G",
        "-N1 -n3 --mem-per-cpu=1G",
        "-N1 -n3",
    ),
    (
        "-N2 -n2 --exclusive --mem=3G",
        "-N1 --exclusive --gres=gpu:1 --mem-per-gpu=1G",
        "-N1 --exclusive --gpus=2 --mem=2G",
        "-N1 --exclusive --gpus-per-node=1",
        "-N1 --exclusive --mem-per-cpu=5G",
        "-N2 -n2 --exclusive",
    ),
    (
        "-N1 --exclusive --mem-per-cpu=10G",
        "-N2-2 -n12 --exclusive --mem-per-cpu=1G",
        "-N1 -n4 --exclusive --hint=nomultithread --mem-per-cpu=1G",
        "-N1 -n1 --exclusive --gpus-per-task=1 --mem-per-gpu=1G",
        "-N1 --exclusive --ntasks-per-node=2 --mem=2G",
        "-N1 --exclusive --gpus-per-node=2 --mem=0",
    ),
    (
        "-n8 --exclusive --ntasks-per-node=4 --mem=5G",
        "-N1 --exclusive --gpus-per-socket=1 --sockets-per-node=1 --mem-per-gpu=1G",
        "-N1 --exclusive --gpus-per-socket=1 --sockets-per-node=1 --mem-per-cpu=1G",
        "-n1 --exclusive --mincpus=3 --mem=1G",
        "-n4 -c2 --exclusive --mincpus=3 --mem=1G",
    ),
)
"""Requests of exclusive nodes, and others beside them, as many as fit."""
DEFAULTS: Final = (
    "",
    "DefMemPerCPU=500",
    "DefMemPerNode=3000",
    "OverSubscribe=EXCLUSIVE",
    "OverSubscribe=EXCLUSIVE DefMemPerCPU=500",
    "OverSubscribe=EXCLUSIVE DefMemPerNode=3000",
    "MaxMemPerCPU=2000",
    "DefMemPerCPU=500 MaxMemPerNode=40000",
    "DefMemPerGPU=2000",
)
"""Options of the partitions in which exclusive jobs are billed."""
RATE: Final = Rate(number=1, weights={"billing": 1_000_000})
BANK: Final = BankSettings()


def partitions(first: str = "") -> list[str]:
    """Return the lines of the partitions, one for each set of weights.

    Args:
        first: Options of the first partition, which has no weights.
    """
    weighted = (f"TRESBillingWeights={weights}" for weights in COMBINATIONS[1:])
    return [
        f"PartitionName=p{number} Nodes=g[1-9] MaxTime=60 {options}".rstrip()
        for number, options in enumerate([first, *weighted])
    ]


@pytest.fixture(scope="module")
def cluster(slurm_version: str) -> Iterator[Sandbox]:
    spec = SandboxSpec(
        slurm=slurm_version,
        nodes=1,
        accounting=True,
        # slurmctld shows a cloud's powered-down nodes with it only.
        private_data="cloud",
        extra=(
            "SelectTypeParameters=CR_Core_Memory",
            "GresTypes=gpu",
            "Licenses=abq:100",
            "AccountingStorageTRES=gres/gpu,gres/gpu:a100,license/abq",
            "ResumeProgram=/bin/true",
            "SuspendProgram=/bin/true",
            "SuspendTime=INFINITE",
            "ResumeTimeout=36000",
            "PriorityType=priority/multifactor",
            "NodeName=g[1-9] State=CLOUD CPUs=8 RealMemory=64000 Gres=gpu:a100:4",
            *partitions(),
        ),
    )
    with Sandbox.up(spec, report=print) as found:
        yield found


@pytest.mark.parametrize("flags", ["", "MAX_TRES", "MAX_TRES_GRES"])
def test_quotes_bill_as_slurm_does(cluster: Sandbox, flags: str) -> None:
    # A cluster always has some flag, so that its line can be replaced.
    cluster.configure(f"PriorityFlags={flags or 'ACCRUE_ALWAYS'}")
    cluster.restart_controller()
    settings = json.dumps(msgspec.to_builtins(cluster.make_cluster_settings()))
    told = cluster.run([sys.executable, INSIDE, settings, "picture"], text=False).stdout
    estimator = Estimator(msgspec.json.decode(told, type=ClusterModel), [RATE], BANK)
    asked = [f"-p p{n} -H {words}" for n in range(len(COMBINATIONS)) for words in REQUESTS]
    asked += [f"-p p{len(COMBINATIONS) - 1} {words}" for words in SPREAD]
    script = "".join(f"sbatch --parsable -o /dev/null {words} --wrap=true\n" for words in asked)
    user = next(iter(cluster.users))
    ids = cluster.run(["bash", "-e"], user=user, input=script, timeout_s=300).stdout.split()
    assert len(ids) == len(asked)
    allocated = ",".join(ids[-len(SPREAD) :])
    wait_until(lambda: not cluster.run(["squeue", "-h", "-t", "PD", "-j", allocated]).stdout, 120)
    shown = cluster.run(["scontrol", "show", "job", "--oneliner"]).stdout
    # For a job with both, the allocated TRES follow the requested ones.
    billed = {
        match[1]: int(match[2])
        for match in re.finditer(r"^JobId=(\d+) .*TRES=\S*?\bbilling=(\d+)", shown, re.MULTILINE)
    }
    cluster.run(["scancel", "--user", user])
    wait_until(lambda: not cluster.run(["squeue", "-h"]).stdout.strip())
    wrong = []
    for job, words in zip(ids, asked, strict=True):
        quoted = estimator.quote(parse_options(words.split()), datetime.now(UTC)).tres["billing"]
        if quoted != billed.get(job, 0):
            weights = COMBINATIONS[int(words.split()[1][1:])]
            wrong.append(f"{weights}: {words}: Slurm {billed.get(job, 0)}, quote {quoted}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(ids)} differ:", *wrong[:20]])


@pytest.mark.parametrize("selects", ["CR_Core_Memory", "CR_Core"])
def test_memory_of_exclusive_jobs_is_quoted_as_slurm_bills_it(
    cluster: Sandbox, selects: str
) -> None:
    lines = [
        f"PartitionName=p{number} Nodes=g[1-9] MaxTime=60 TRESBillingWeights=CPU=1,Mem=1G {of}"
        for number, of in enumerate(DEFAULTS)
    ]
    cluster.configure(f"SelectTypeParameters={selects}", "PriorityFlags=ACCRUE_ALWAYS", *lines)
    cluster.restart_controller()
    wrong, count = [], 0
    try:
        estimator = Estimator(picture_of(cluster), [RATE], BANK)
        for number, of in enumerate(DEFAULTS):
            for batch in EXCLUSIVE:
                asked = [f"-p p{number} -t 5 {words}" for words in batch]
                for words, billed in zip(asked, bill(cluster, asked), strict=True):
                    job = parse_options(words.split())
                    tres = estimator.quote(job, datetime.now(UTC)).tres
                    count += billed is not None
                    if billed is not None and tres["billing"] != billed:
                        wrong.append(f"{of}: {words}: Slurm {billed}, quote {tres}")
    finally:
        cluster.configure("SelectTypeParameters=CR_Core_Memory", *partitions())
        cluster.restart_controller()
    assert not wrong, "\n".join([f"{len(wrong)} of {count} differ:", *wrong])
    assert count > 60


def picture_of(cluster: Sandbox) -> ClusterModel:
    """Return the cluster's model, queried as the bank does."""
    settings = json.dumps(msgspec.to_builtins(cluster.make_cluster_settings()))
    reply = cluster.run([sys.executable, INSIDE, settings, "picture"], text=False).stdout
    return msgspec.json.decode(reply, type=ClusterModel)


def bill(cluster: Sandbox, requests: Sequence[str]) -> list[int | None]:
    """Have Slurm allocate jobs at once.

    Returns:
        Slurm's billing of each, None for a request that it rejects or cannot place.
    """
    script = "".join(
        f"sbatch --parsable -o /dev/null {words} --wrap=true 2>/dev/null || echo 0\n"
        for words in requests
    )
    user = next(iter(cluster.users))
    ids = cluster.run(["bash"], user=user, input=script, timeout_s=300).stdout.split()
    assert len(ids) == len(requests)
    words = ["squeue", "-h", "-t", "PD", "-o", "%r"]
    wait_until(lambda: "None" not in cluster.run(words).stdout.split(), 120)
    shown = cluster.run(["scontrol", "show", "job", "--oneliner"]).stdout
    cluster.run(["scancel", "--user", user])
    wait_until(lambda: not cluster.run(["squeue", "-h"]).stdout.strip(), 120)
    billed: dict[str, int] = {}
    for line in shown.splitlines():
        found = re.search(r"^JobId=(\d+) .* AllocTRES=\S*?\bbilling=(\d+)", line)
        found = found or re.search(r"^JobId=(\d+) .* NodeList=\S.* TRES=\S*?\bbilling=(\d+)", line)
        if found and "JobState=PENDING" not in line:
            billed[found[1]] = int(found[2])
    return [billed.get(job) for job in ids]


def test_burst_buffers_are_held_as_slurm_bills_them(cluster: Sandbox) -> None:
    program = Path(cluster.slurm_conf).with_name("burst_buffer.lua")
    program.write_text(BUFFERS)
    program.chmod(0o644)
    weights = "TRESBillingWeights=CPU=1,Node=2,License/abq=2.5,BB/lua=0.5G"
    cluster.configure(
        "BurstBufferType=burst_buffer/lua",
        "AccountingStorageTRES=gres/gpu,gres/gpu:a100,license/abq,bb/lua",
        "PriorityFlags=MAX_TRES",
        *partitions(weights),
    )
    cluster.restart_controller()
    user = next(iter(cluster.users))
    words = [
        "sbatch",
        "--parsable",
        "-o",
        "/dev/null",
        "-p",
        "p0",
        "-N1",
        "-n4",
        "-L",
        "abq:1",
        "-t",
        "5",
    ]
    script = "#!/bin/sh\n#BB_LUA pool=fast capacity="
    settings = json.dumps(msgspec.to_builtins(cluster.make_cluster_settings()))

    def ask(question: str) -> bytes:
        return bytes(cluster.run([sys.executable, INSIDE, settings, question], text=False).stdout)

    def records() -> dict[int, JobRecord]:
        found = msgspec.json.decode(ask("queue"), type=list[JobRecord])
        return {record.job_id: record for record in found}

    try:
        held = int(cluster.run([*words, "-H"], user=user, input=f"{script}2500M\n").stdout)
        job = int(cluster.run(words, user=user, input=f"{script}7G\n").stdout)
        wait_until(lambda: "billing=" in records()[job].tres_allocated, 120)
        estimator = Estimator(msgspec.json.decode(ask("picture"), type=ClusterModel), [RATE], BANK)
        jobs = records()
        quotes = {
            number: estimator.quote(describe_record(jobs[number]), datetime.now(UTC)).tres
            for number in (held, job)
        }
        # The pool gives whole GiB.
        assert quotes[held]["bb/lua"] == 3 * 1024
        billing = parse_tres(jobs[job].tres_allocated)["billing"]
        assert billing == 10, "the dearest of CPUs and nodes, and all of the others"
        assert quotes[job]["billing"] == billing
    finally:
        cluster.run(["scancel", "--user", user])
        wait_until(lambda: not cluster.run(["squeue", "-h"]).stdout.strip(), 120)
        cluster.configure(*partitions())
        cluster.restart_controller()


def test_weights_are_those_of_slurmctld_without_a_sensor(cluster: Sandbox, tmp_path: Path) -> None:
    settings = Settings(
        state_dir=str(tmp_path),
        cluster={"sandbox": cluster.make_cluster_settings()},
        bank=BankSettings(enabled=True),
    )
    ledger = open_ledger(settings)
    waited_s = 0.0
    pictures = ClusterModels(settings, ledger, lambda: waited_s)

    def billing() -> dict[str, str] | None:
        nonlocal waited_s
        waited_s += CONFIG_CHECK_S
        assert waited_s < MODEL_REFRESH_S, "no picture is asked for because it is old"
        pictures.query_due()
        picture = pictures.get_model("sandbox")
        return picture.partitions["p0"].billing if picture else None

    def set_weights(weights: str) -> None:
        cluster.configure(*partitions(f"TRESBillingWeights={weights}"))

    try:
        wait_until(lambda: billing() == {})
        set_weights("CPU=3")
        cluster.restart_controller()
        wait_until(lambda: billing() == {"cpu": "3"})
        set_weights("CPU=5")
        cluster.run(["scontrol", "reconfigure"])
        wait_until(lambda: "CPU=5" in shown(cluster, "p0"), 60)
        wait_until(lambda: billing() == {"cpu": "5"})
        cluster.run(["scontrol", "update", "PartitionName=p0", "TRESBillingWeights=CPU=7"])
        wait_until(lambda: billing() == {"cpu": "7"})
    finally:
        ledger.close()
        cluster.configure(*partitions())
        cluster.restart_controller()


def test_a_changed_gres_count_is_known_soon_after_the_restart(
    cluster: Sandbox, tmp_path: Path
) -> None:
    settings = Settings(
        state_dir=str(tmp_path),
        cluster={"sandbox": cluster.make_cluster_settings()},
        bank=BankSettings(enabled=True),
    )
    conf = Path(cluster.slurm_conf)
    gres_conf = conf.with_name("gres.conf")
    devices = [conf.with_name(f"gpu{number}") for number in range(4)]
    before = re.findall(r"^NodeName=.*$", conf.read_text(), re.MULTILINE)
    ledger = open_ledger(settings)
    waited_s = 0.0
    pictures = ClusterModels(settings, ledger, lambda: waited_s)

    def look() -> ClusterModel | None:
        nonlocal waited_s
        waited_s += CONFIG_CHECK_S
        pictures.query_due()
        return pictures.get_model("sandbox")

    def gres() -> int:
        picture = look()
        shapes = picture.shapes if picture else ()
        return sum(shape.tres.get("gres/gpu", 0) for shape in shapes if shape.nodes == "node1")

    def set_gres(count: int) -> None:
        """Restart slurmctld, query the model, and only then let the node register."""
        # Slurm counts a GPU by its device file, and takes any file for one.
        files = f"{conf.parent}/gpu[0-{count - 1}]"
        gres_conf.write_text(f"NodeName=node1 Name=gpu Type=a100 File={files}\n")
        of_node1 = f" Gres=gpu:a100:{count}"
        cluster.configure(
            *(f"{line}{of_node1 if 'NodeName=node1 ' in line else ''}" for line in before)
        )
        cluster.stop_service("slurmd.node1")
        cluster.restart_controller()
        restarted_us = time.time_ns() // 1000
        wait_until(lambda: (picture := look()) is not None and picture.taken_us > restarted_us)
        cluster.start_service("slurmd.node1")
        words = ["scontrol", "-o", "show", "node", "node1"]
        wait_until(lambda: registered(cluster.run(words).stdout, count), 60)

    def registered(node: str, count: int) -> bool:
        return f" Gres=gpu:a100:{count} " in node and not re.search("State=(UNKNOWN|DOWN)", node)

    try:
        for device in devices:
            device.touch()
        set_gres(2)
        wait_until(lambda: gres() == 2)
        set_gres(4)
        registered_s = waited_s
        # 24.11 and 26.05 show the old count until the node registers; without a second picture
        # soon after the first, Steward would know the new one a minute later.
        while gres() != 4:
            assert waited_s < registered_s + MODEL_REFRESH_S / 2
    finally:
        ledger.close()
        for path in (gres_conf, *devices):
            path.unlink(missing_ok=True)
        cluster.configure(*before)
        cluster.restart_controller()
        cluster.restart_service("slurmd.node1")


def shown(cluster: Sandbox, partition: str) -> str:
    """Return what scontrol shows of a partition."""
    return str(cluster.run(["scontrol", "show", "partition", partition], check=False).stdout)


def test_the_option_table_is_that_of_sbatch(cluster: Sandbox) -> None:
    names = options(cluster)
    assert {"time", "job-name", "licenses"} < names
    lacking = names - ALL_OPTIONS
    assert not lacking
    takes_value = complaints(cluster, [f"--{name}" for name in sorted(names)])
    takes_none = complaints(cluster, [f"--{name}=x" for name in sorted(names)])
    for name in sorted(names):
        of = ALIASES.get(name, name)
        if "requires an argument" in takes_value[f"--{name}"]:
            assert of in VALUE_OPTIONS, name
        elif "doesn't allow an argument" in takes_none[f"--{name}=x"]:
            # Without a value it does not matter whether another version takes one behind "=".
            assert of in FLAGS | OPTIONAL_VALUE_OPTIONS, name
        else:
            assert of in OPTIONAL_VALUE_OPTIONS, name


def options(cluster: Sandbox) -> set[str]:
    """Return all long options of sbatch: getopt lists those that begin with a letter."""
    said = complaints(cluster, [f"--{letter}" for letter in string.ascii_lowercase])
    found = set(re.findall(r"'--([a-z][a-z-]+)'", "".join(said.values())))
    return found | single_names(said)


def single_names(said: dict[str, str]) -> set[str]:
    """Find an option that is the only one with its letter, which getopt does not list."""
    return {
        option
        for option in ALL_OPTIONS
        if len([word for word in ALL_OPTIONS if word[0] == option[0]]) == 1
        and "unrecognized" not in said[f"--{option[0]}"]
    }


def complaints(cluster: Sandbox, words: list[str]) -> dict[str, str]:
    """Return the first line that sbatch writes to standard error for each of these options."""
    script = "".join(
        f"sbatch {shlex.quote(word)} </dev/null 2>&1 >/dev/null | head -n 1 | tr -d '\\n'; echo\n"
        for word in words
    )
    said = cluster.run(["bash"], input=script, timeout_s=300).stdout.splitlines()
    return dict(zip(words, said, strict=True))
