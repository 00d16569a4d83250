"""Samples of a node: cgroups as files, hostile names, and batches in bounded memory."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.agent import readings
from steward.agent.readings import NodeReader
from steward.agent.sampling import BatchRejected, BatchUnavailable, SampleBuffer, send_waiting


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_unified_job(scope: Path, name: str) -> None:
    job = scope / name
    for group in (job, job / "step_0"):
        write(group / "cpu.stat", "usage_usec 9\nuser_usec 5\nsystem_usec 4\n")
        write(group / "memory.stat", "anon 100\nfile 70\nshmem 30\nslab 3\nkernel_stack 2\n")
        write(group / "memory.max", "max\n")
    write(job / "memory.events", "oom 1\noom_kill 2\n")
    write(job / "memory.pressure", "some avg10=0.00 total=77\nfull avg10=0.00 total=5\n")
    write(job / "step_0/user/task_0/cgroup.procs", "41\n42\n")
    write(job / "step_0/slurm/cgroup.procs", "40\n")


@pytest.mark.parametrize("scope", ["slurmstepd.scope", "n1_slurmstepd.scope", "slurm_n1"])
def test_version_2(tmp_path: Path, scope: str) -> None:
    write_unified_job(tmp_path / "cgroup/system.slice" / scope, "job_7")
    write_unified_job(tmp_path / "cgroup/system.slice/n2_slurmstepd.scope", "job_8")
    write(tmp_path / "proc/41/io", "rchar: 10\nwchar: 20\n")
    reader = NodeReader("n1", str(tmp_path / "cgroup"), str(tmp_path / "proc"))
    found = dict(reader.read()[1:])
    assert set(found) == {(7, "", ""), (7, "", "0")}
    assert found[7, "", ""] == {
        "cpu_user_us": 5,
        "cpu_system_us": 4,
        "anon_bytes": 100,
        "shmem_bytes": 30,
        "file_bytes": 40,
        "kernel_bytes": 5,
        "oom_kills": 2,
        "pressure_memory_us": 77,
        "processes": 2,
        "read_bytes": 10,
        "written_bytes": 20,
    }
    reader.close()


def test_version_1(tmp_path: Path) -> None:
    for controller in ("memory", "cpu,cpuacct"):
        base = tmp_path / "cgroup" / controller / "slurm_n1/uid_5/job_7"
        (base / "step_batch/task_0").mkdir(parents=True)
        write(base / "step_batch/task_0/cgroup.procs", "41\n")
    cpu = tmp_path / "cgroup/cpu,cpuacct/slurm_n1/uid_5/job_7"
    write(cpu / "cpuacct.stat", "user 3\nsystem 1\n")
    write(cpu / "cpuacct.usage", "40000000\n")
    write(cpu / "cpu.stat", "throttled_time 5000\n")
    memory = tmp_path / "cgroup/memory/slurm_n1/uid_5/job_7"
    write(memory / "memory.stat", "total_rss 9\ntotal_cache 8\ntotal_shmem 3\n")
    write(memory / "memory.limit_in_bytes", "9223372036854771712\n")
    reader = NodeReader("n1", str(tmp_path / "cgroup"), str(tmp_path / "proc"))
    job = dict(reader.read())[7, "", ""]
    assert job == {
        "cpu_user_us": 30000,
        "cpu_system_us": 10000,
        "throttled_us": 5,
        "anon_bytes": 9,
        "shmem_bytes": 3,
        "file_bytes": 5,
        "processes": 1,
    }
    reader.close()


@given(st.text())
def test_hostile_names(name: str) -> None:
    job = readings.parse_job_name(name)
    assert job is None or job == (int(name[4:]) if name[:4] == "job_" else None, job[1])
    step = readings.parse_step_name(name)
    assert step is None or name == f"step_{step}"


@given(st.binary())
def test_hostile_files(text: bytes) -> None:
    readings.parse_stat(text)
    readings.parse_title(text)
    for number in (
        readings.parse_number(text),
        readings.parse_pressure(text),
        *readings.parse_table(text).values(),
    ):
        assert number is None or number >= 0


def test_a_batch_is_sent_again_unchanged() -> None:
    buffer = SampleBuffer("n1", "boot", first=1)
    buffer.add(5, [((7, "", "0"), {"processes": 1})])
    batch = buffer.next_batch()
    buffer.add(6, [((None, "", ""), {"processes": 2})])
    assert batch is not None
    assert buffer.next_batch() == batch
    assert json.loads(batch[1]) == {
        "v": 1,
        "node": "n1",
        "boot": "boot",
        "batch": 1,
        "dropped": 0,
        "samples": [{"at_ms": 5, "job": 7, "step": "0", "sluid": "", "values": {"processes": 1}}],
    }


def test_the_oldest_samples_are_dropped_and_counted() -> None:
    buffer = SampleBuffer("n1", "boot", most_bytes=1000, first=1)
    for at_ms in range(100):
        buffer.add(at_ms, [((7, "", ""), {"processes": 1})])
    batch = buffer.next_batch()
    assert batch is not None
    body = json.loads(batch[1])
    assert body["samples"][-1]["at_ms"] == 99
    assert body["dropped"] + len(body["samples"]) == 100


def test_failures_of_the_receiver() -> None:
    buffer = SampleBuffer("n1", "boot", first=1)
    buffer.add(5, [((7, "", ""), {"processes": 1})])
    errors: list[Exception] = [BatchUnavailable("away", 7.0), BatchRejected("no")]
    messages: list[str] = []

    def deliver(number: int, body: bytes) -> None:
        if errors:
            raise errors.pop(0)
        assert (number, json.loads(body)["dropped"]) == (2, 1)

    assert send_waiting(buffer, deliver, messages.append) == 7.0
    assert send_waiting(buffer, deliver, messages.append) == 0.0
    buffer.add(6, [((7, "", ""), {"processes": 1})])
    assert send_waiting(buffer, deliver, messages.append) == 0.0
    assert messages == ["away", "no"]
