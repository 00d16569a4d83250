import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.events import NOON
from steward.core.records import JobRecord
from steward.slurm.job_details import (
    build_job_details,
    parse_job_target,
    read_extras,
    split_segments,
)

FIXTURES = Path(__file__).parent / "fixtures" / "slurm"
SHOWN = (
    " JobName={name} UserId=alice(1001) GroupId=alice(1001) Nice=0 Requeue=1 Restarts=0 "
    "Reboot=0 TimeLimit=01:00:00 AccrueTime=2026-11-21T09:54:24 ReqNodeList=(null) "
    "ExcNodeList=n[1-2] CPUs/Task=2 MinMemoryNode=2000M Contiguous=0 Network={network} "
    "Command=(null) WorkDir=/tmp"
)


@pytest.mark.parametrize(
    ("version", "job"), [("22.05", 206), ("24.11", 3), ("25.11", 3), ("26.05", 3)]
)
def test_what_four_versions_show_beside_the_record(version: str, job: int) -> None:
    text = split_segments((FIXTURES / f"scontrol-job-{version}.txt").read_bytes())
    assert len(text) == 4
    shown = build_job_details(
        JobRecord(job_id=job, name="two-tasks"),
        read_extras(JobRecord(job_id=job, name="two-tasks"), text),
    )
    assert (shown["nice"], shown["requeue"], shown["reboot"]) == (0, True, False)
    assert (shown["contiguous"], shown["cpus_per_task"]) == (False, 1)
    assert isinstance(shown["accrue_time"], int)
    assert shown["exc_nodes"] is shown["req_nodes"] is shown["deadline"] is None
    assert shown["time_limit_str"] == "00:10:00"
    (array,) = (job_id for job_id in text if " ArrayTaskId=" in text[job_id])
    task = read_extras(JobRecord(job_id=array, name="array"), text)
    assert task["ArrayTaskThrottle"] == "2"
    spaced = next(job_id for job_id in text if "JobName=name with spaces" in text[job_id])
    assert read_extras(JobRecord(job_id=spaced, name="name with spaces"), text)["Nice"] == "0"
    # Of a job whose name is another meanwhile nothing is sure.
    assert read_extras(JobRecord(job_id=spaced, name="name"), text) == {}
    assert read_extras(JobRecord(job_id=99, name="x"), text) == {}


def test_names_and_values() -> None:
    shown = build_job_details(
        JobRecord(
            job_id=214,
            name="array",
            uid=1002,
            user="bob",
            array_job_id=208,
            array_task="2",
            state="FAILED",
            submit=NOON,
            time_limit_s=300,
            nodes=1,
            cpus=4,
            nodelist="n1",
            exit_code=3,
            exit_signal=0,
            constraints="gpu",
        )
    )
    assert (shown["job_id"], shown["array_job_id"], shown["array_task_id"]) == (214, 208, 2)
    assert shown["array_task_str"] is None
    assert (shown["user_id"], shown["user_name"], shown["job_state"]) == (1002, "bob", "FAILED")
    assert (shown["submit_time"], shown["start_time"]) == (int(NOON.timestamp()), None)
    assert (shown["time_limit"], shown["exit_code"], shown["features"]) == (5, "3:0", "gpu")
    assert (shown["comment"], shown["state_reason"], shown["restart_cnt"]) == (None, "None", 0)
    assert "nice" not in shown
    json.dumps(shown)
    waiting = build_job_details(JobRecord(job_id=208, array_job_id=208, array_task="3-6%2"))
    assert (waiting["array_task_id"], waiting["array_task_str"]) == (None, "3-6%2")
    alone = build_job_details(JobRecord(job_id=1))
    assert alone["array_job_id"] is alone["het_job_id"] is alone["het_job_offset"] is None


def test_every_field_is_there_in_every_case() -> None:
    quick = build_job_details(JobRecord(job_id=1, name="x"))
    full = build_job_details(JobRecord(job_id=1, name="x"), {"Nice": "5"})
    assert quick.keys() < full.keys()
    assert (full["nice"], full["requeue"], full["exc_nodes"]) == (5, None, None)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(texts, texts)
def test_no_text_changes_what_slurm_says(name: str, network: str) -> None:
    line = "JobId=5" + SHOWN.format(name=name, network=network)
    other = "JobId=6" + SHOWN.format(name="plain", network="(null)")
    text = split_segments(f"{line}\n{other}\n".encode())
    plain = read_extras(JobRecord(job_id=6, name="plain"), text)
    assert plain["ExcNodeList"] == "n[1-2]"
    found = read_extras(JobRecord(job_id=5, name=name), text)
    assert found.items() <= plain.items()


def test_a_line_in_a_text_takes_away_what_it_speaks_of() -> None:
    forged = "JobId=6" + SHOWN.format(name="plain", network="(null)").replace("n[1-2]", "n9")
    line = "JobId=5" + SHOWN.format(name=f"x\n{forged}", network="(null)")
    other = "JobId=6" + SHOWN.format(name="plain", network="(null)")
    text = split_segments(f"{line}\n{other}\n".encode())
    assert read_extras(JobRecord(job_id=6, name="plain"), text) == {}
    same = "JobId=7" + SHOWN.format(name="x", network="a ExcNodeList=n9")
    found = read_extras(JobRecord(job_id=7, name="x"), split_segments(same.encode()))
    assert "ExcNodeList" not in found
    assert found["Nice"] == "0"


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("12", (12, None, None)),
        ("12_3", (12, 3, None)),
        ("12+1", (12, None, 1)),
        ("12_3+1", None),
        ("", None),
        ("12_[1-3]", None),
        ("-12", None),
        ("12.0", None),
        ("١٢", None),
        ("99999999999", None),
    ],
)
def test_names_of_jobs(name: str, ids: tuple[int, int | None, int | None] | None) -> None:
    assert parse_job_target(name) == ids
