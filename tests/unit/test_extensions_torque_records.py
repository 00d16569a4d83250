"""Job files of Torque: their fields in Slurm's terms, and hostile files."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.extensions.torque.records import (
    TorqueJob,
    TorqueRecordError,
    element_id,
    parse_job_file,
    parse_torque_job,
)
from steward.jobs.job_ids import MAX_RAW_ID

RECORDED = Path(__file__).parents[1] / "fixtures" / "torque" / "flat"
DONE = (RECORDED / "completed" / "1021.vm.JB").read_bytes()


def job(fixed: str = "", **attributes: str) -> TorqueJob:
    inner = "".join(
        f"<{name} flags='1'>{text}</{name}>"
        for name, text in {"ctime": "1795256224", **attributes}.items()
    )
    data = f"<job><jobid>7.vm</jobid>{fixed}<attributes>{inner}</attributes></job>"
    return parse_torque_job(data.encode(), "7.vm")


def test_every_recorded_file_is_read() -> None:
    files = [path for path in RECORDED.parent.rglob("*.??") if path.suffix in (".JB", ".TA")]
    assert len(files) == 78
    for path in files:
        assert parse_torque_job(path.read_bytes(), path.name).record.name


def test_a_text_beyond_all_measure_is_left_out_and_not_cut() -> None:
    assert job(submit_args="a" * 200_000).record.submit_line.endswith("a" * 200_000)
    assert job(submit_args="a" * 300_000).record.submit_line == "qsub"


@pytest.mark.parametrize(
    ("exit_status", "state", "code", "sign"),
    [
        ("0", "COMPLETED", 0, 0),
        ("3", "FAILED", 3, 0),
        ("255", "FAILED", 255, 0),
        ("256", "FAILED", 0, 0),
        ("271", "FAILED", 0, 15),
        ("100000", "FAILED", None, None),
        ("-1", "FAILED", None, None),
        ("-10", "OUT_OF_MEMORY", None, None),
        ("-11", "TIMEOUT", None, None),
        ("", "CANCELLED", None, None),
        ("x", "FAILED", None, None),
    ],
)
def test_how_it_ended(exit_status: str, state: str, code: int | None, sign: int | None) -> None:
    record = job(job_state="C", exit_status=exit_status).record
    assert (record.state, record.exit_code, record.exit_signal) == (state, code, sign)


@pytest.mark.parametrize(
    ("attributes", "state", "reason"),
    [
        ({"job_state": "Q"}, "PENDING", ""),
        ({"job_state": "H", "Hold_Types": "1"}, "PENDING", "JobHeldUser"),
        ({"job_state": "H", "Hold_Types": "3"}, "PENDING", "JobHeldUser"),
        ({"job_state": "H", "Hold_Types": "2"}, "PENDING", "JobHeldAdmin"),
        ({"job_state": "H", "Hold_Types": "4"}, "PENDING", "JobHeldAdmin"),
        ({"job_state": "H", "Hold_Types": "4", "depend": "afterok:6.vm"}, "PENDING", "Dependency"),
        ({"job_state": "H", "Hold_Types": "8"}, "PENDING", "JobArrayTaskLimit"),
        ({"job_state": "W"}, "PENDING", "BeginTime"),
        ({"job_state": "S"}, "SUSPENDED", ""),
        ({"job_state": "E"}, "COMPLETING", ""),
        ({"job_state": "?"}, "PENDING", ""),
    ],
)
def test_where_it_stands(attributes: dict[str, str], state: str, reason: str) -> None:
    record = job(**attributes).record
    assert (record.state, record.reason) == (state, reason)


def test_a_state_may_be_told_by_its_number_alone() -> None:
    assert job("<state>4</state>").record.state == "RUNNING"


@pytest.mark.parametrize(
    ("host", "nodelist", "nodes", "cpus"),
    [
        ("vm/0", "vm", 1, 1),
        ("n1/0+n1/1+n2/0", "n1,n2", 2, 3),
        ("n1/0-3+n2/0-1,7", "n1,n2", 2, 7),
    ],
)
def test_what_it_holds(host: str, nodelist: str, nodes: int, cpus: int) -> None:
    record = job(job_state="R", exec_host=host).record
    assert (record.nodelist, record.nodes, record.cpus) == (nodelist, nodes, cpus)


@pytest.mark.parametrize(
    ("asked", "nodes", "cpus"),
    [
        ("<nodect>2</nodect><nodes>2:ppn=4</nodes>", 2, 8),
        ("<nodect>3</nodect><nodes>2:ppn=4+1:ppn=8:gpu</nodes>", 3, 16),
        ("<nodect>1</nodect><nodes>node7:ppn=2</nodes>", 1, 2),
        ("<nodect>1</nodect><procs>12</procs>", 1, 12),
        ("<nodect>1</nodect>", 1, 1),
        ("", None, None),
    ],
)
def test_what_it_asks_for(asked: str, nodes: int | None, cpus: int | None) -> None:
    record = job(Resource_List=asked).record
    assert (record.nodes, record.cpus) == (nodes, cpus)


@pytest.mark.parametrize(
    ("walltime", "seconds"),
    [("300", 300), ("05:00", 300), ("01:00:01", 3601), ("1:01:00:00", 90000), ("x", None)],
)
def test_time_limits(walltime: str, seconds: int | None) -> None:
    asked = f"<walltime>{walltime}</walltime>"
    assert job(Resource_List=asked).record.time_limit_s == seconds


@given(st.integers(1, 99_999_999), st.integers(0, 9_999_999))
def test_an_elements_id_is_no_jobs_and_its_own(array: int, index: int) -> None:
    raw = element_id(array, index)
    assert 99_999_999 < raw <= MAX_RAW_ID
    assert (int(str(raw)[1:9]), int(str(raw)[9:])) == (array, index)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x00\x02\x04binary",
        b"<job>",
        b"<job/>",
        b"<array><jobid>7.vm</jobid></array>",
        b"<job><jobid>x.vm</jobid></job>",
        b"<job><jobid>7.vm</jobid></job>",
        DONE[: len(DONE) // 2],
        b"<!DOCTYPE job [<!ENTITY a 'b'>]><job><jobid>&a;</jobid></job>",
        b"<!DOCTYPE job SYSTEM 'file:///etc/passwd'><job/>",
        b"<job>" + b"<a>" * 50 + b"</a>" * 50 + b"</job>",
        b"<job>" + b"<a/>" * 10_000 + b"</job>",
        b"<job><jobid>&undefined;</jobid></job>",
        b"<?xml version='1.0' encoding='utf-7'?><job><jobid>+ADw-</jobid></job>",
        b"<job>\xff\xfe</job>",
    ],
)
def test_what_is_no_job_file_is_refused(data: bytes) -> None:
    with pytest.raises(TorqueRecordError, match=r"7\.vm"):
        parse_torque_job(data, "7.vm")


def test_a_file_beyond_all_bounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steward.extensions.torque.records.MAX_JOB_FILE_BYTES", len(DONE) - 1)
    with pytest.raises(TorqueRecordError, match="larger"):
        parse_job_file(DONE, "7.vm")


@given(st.binary(max_size=200), st.integers(0, len(DONE)), st.integers(0, 50))
def test_a_damaged_file_is_read_or_refused(rubbish: bytes, at: int, cut: int) -> None:
    try:
        parse_torque_job(DONE[:at] + rubbish + DONE[at + cut :], "7.vm")
    except TorqueRecordError:
        return


def test_text_is_taken_as_it_is() -> None:
    record = job(Job_Name="&lt;/Job_Name&gt;&#x1F600; ü").record
    assert record.name == "</Job_Name>\U0001f600 ü"
