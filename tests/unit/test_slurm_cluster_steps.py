import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.slurm.cluster import parse_steps

FIXTURES = Path(__file__).parent / "fixtures" / "slurm"
STEP = (
    "StepId={job}.{step} UserId=1001 StartTime=2026-11-21T09:54:24 TimeLimit=UNLIMITED "
    "State=RUNNING Partition=main NodeList=n1 Nodes=1 CPUs=2 Tasks=2 Name={name} "
    "Network={network} TRES=cpu=2,mem=0,node=1 ResvPorts=(null) CPUFreqReq=Default Dist=Block "
    "SrunHost:Pid=localhost:6707"
)


def asked(version: str, job: int) -> bytes:
    """Return scontrol's output for one job."""
    lines = (FIXTURES / f"scontrol-step-{version}.txt").read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if re.match(rb"StepId=%d[._]" % job, line))


@pytest.mark.parametrize(
    ("version", "job"), [("22.05", 206), ("24.11", 3), ("25.11", 3), ("26.05", 3)]
)
def test_steps_of_four_versions(version: str, job: int) -> None:
    out = asked(version, job)
    (found,) = parse_steps(out, job).items()
    assert found[0] == str(job)
    assert list(found[1]) == ["batch", "0"]
    batch, first = found[1].values()
    assert (batch["step_id"], batch["name"], batch["srun_host_pid"]) == ("batch", "batch", None)
    assert (first["name"], first["state"], first["nodes"]) == ("sleep", "RUNNING", "n1")
    assert (first["num_tasks"], first["num_cpus"], first["num_nodes"]) == (2, 2, 1)
    assert (first["user_id"], first["partition"], first["network"]) == (1001, "main", None)
    assert first["tres_alloc_str"] == "cpu=2,mem=0,node=1"
    assert isinstance(first["start_time"], int)
    assert first["time_limit"] == "UNLIMITED"
    assert parse_steps(out, 999) == {}


@pytest.mark.parametrize("version", ["24.11", "25.11", "26.05"])
def test_steps_of_array_tasks(version: str) -> None:
    out = asked(version, 5)
    assert {job: list(found) for job, found in parse_steps(out, 5).items()} == {
        "5_1": ["batch"],
        "5_2": ["batch"],
    }
    assert list(parse_steps(out, 5, task=2)) == ["5_2"]
    assert parse_steps(out, 5, task=3) == {}


def test_components_and_what_waits_for_a_number() -> None:
    text = "\n".join(
        (
            STEP.format(job="7+1", step="0", name="a", network="(null)"),
            STEP.format(job="7+0", step="TDB", name="(null)", network="(null)"),
        )
    )
    assert {job: list(found) for job, found in parse_steps(text.encode(), 7).items()} == {
        "7+1": ["0"],
        "7+0": ["TBD"],
    }
    assert list(parse_steps(text.encode(), 7, het_offset=1)) == ["7+1"]


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.just(
    "x\n" + STEP.format(job="9", step="0", name="y", network="z") + "\n"
)


@given(names)
def test_no_name_makes_another_jobs_step(name: str) -> None:
    text = STEP.format(job="8", step="0", name=name, network="(null)") + "\n"
    text += STEP.format(job="8", step="1", name="plain", network="(null)") + "\n"
    found = parse_steps(text.encode("utf-8", "surrogatepass"), 8)
    assert list(found) == ["8"]
    assert list(found["8"]) == ["0", "1"]
    zero = found["8"]["0"]
    assert (zero["state"], zero["user_id"], zero["nodes"]) == ("RUNNING", 1001, "n1")
    if name not in ("", "(null)", "(null):0", "N/A", "None", "Unknown"):
        assert zero["name"] == name
    assert zero["tres_alloc_str"] == "cpu=2,mem=0,node=1"
