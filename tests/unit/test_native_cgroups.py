"""Cgroup values that the SPANK plugin reads, in versions 1 and 2, from prepared files."""

from pathlib import Path

import pytest

from harness.native import Run, lines_of, needs_compiler, run, sanitized, spool

__all__ = ["run", "sanitized", "spool"]

pytestmark = needs_compiler

UNIFIED = {
    "memory.peak": "123456789\n",
    "cpu.stat": "usage_usec 700\nuser_usec 500\nsystem_usec 200\nnr_periods 0\n",
    "io.stat": "8:0 rbytes=4096 wbytes=1 rios=1 wios=1\n\n8:16 rbytes=1 wbytes=8192 dbytes=3\n",
}
UNIFIED_SAYS = {"peak": 123456789, "cut": 500, "csy": 200, "crd": 4097, "cwr": 8193}
STEP = "system.slice/slurmstepd.scope/job_5/step_0"


def tables(directory: Path, membership: str, mounts: dict[str, str]) -> str:
    """Return the order that shows these cgroups to the plugin: by mount point, type and options."""
    (directory / "cgroup").write_text(membership)
    lines = [
        f"{number} 1 0:{number} / {point} rw,nosuid shared:9 - {kind}\n"
        for number, (point, kind) in enumerate(mounts.items(), 30)
    ]
    (directory / "mountinfo").write_text("no mount at all\n" + "".join(lines))
    return f"tables {directory}"


def fill(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True)
    for name, text in files.items():
        (directory / name).write_text(text)


@pytest.mark.parametrize("left_out", [(), ("memory.peak",), ("io.stat", "cpu.stat")])
def test_a_cgroup_of_version_2(
    run: Run, spool: Path, tmp_path: Path, left_out: tuple[str, ...]
) -> None:
    point = tmp_path / "a mount"
    fill(point / STEP, {name: text for name, text in UNIFIED.items() if name not in left_out})
    fill(point / STEP / "user" / "task_0", {"memory.peak": "1\n", "cpu.stat": "user_usec 1\n"})
    # slurmstepd's task_0 is below user, whose figures are the step's without slurmstepd's own.
    for name, text in UNIFIED.items():
        if name not in left_out:
            (point / STEP / "user" / name).write_text(text)
        (point / STEP / name).write_text("9 user_usec 9 rbytes=9\n")
    order = tables(
        tmp_path,
        f"0::/{STEP}/user/task_0\n",
        {str(point).replace(" ", "\\040"): "cgroup2 cgroup2 rw,nsdelegate"},
    )
    run(order, "item tasks 1", "init SPOOL", "task 0 0 0", "reap", "exit")
    end = lines_of(spool)[-1]
    gone = {
        *(("peak",) if "memory.peak" in left_out else ()),
        *(("cut", "csy", "crd", "cwr") if "io.stat" in left_out else ()),
    }
    said = {key: end[key] for key in UNIFIED_SAYS if key in end}
    assert said == {key: value for key, value in UNIFIED_SAYS.items() if key not in gone}


def test_controllers_of_a_hybrid_are_with_version_1(run: Run, spool: Path, tmp_path: Path) -> None:
    path = "slurm/uid_1/job_5/step_0"
    fill(tmp_path / "v2" / STEP, UNIFIED)
    fill(tmp_path / "memory" / path, {"memory.max_usage_in_bytes": "4096\n"})
    fill(
        tmp_path / "cpu" / path,
        {"cpuacct.usage_user": "7000999\n", "cpuacct.usage_sys": "2000\n"},
    )
    fill(
        tmp_path / "blkio" / path,
        {
            "blkio.throttle.io_service_bytes_recursive": "8:0 Read 10\n8:0 Write 20\n"
            "8:0 Total 30\n8:16 Read 1\nTotal 31\n"
        },
    )
    order = tables(
        tmp_path,
        f"9:memory:/{path}/task_0\n8:cpu,cpuacct:/{path}/task_0\n7:blkio:/{path}\n0::/{STEP}\n",
        {
            str(tmp_path / "v2"): "cgroup2 cgroup2 rw",
            str(tmp_path / "memory"): "cgroup cgroup rw,memory",
            str(tmp_path / "cpu"): "cgroup cgroup rw,cpu,cpuacct",
            str(tmp_path / "blkio"): "cgroup cgroup rw,blkio",
        },
    )
    run(order, "item tasks 1", "init SPOOL", "task 0 0 0", "reap", "exit")
    end = lines_of(spool)[-1]
    said = {key: end[key] for key in UNIFIED_SAYS}
    assert said == {"peak": 4096, "cut": 7000, "csy": 2, "crd": 11, "cwr": 20}


@pytest.mark.parametrize("path", ["/", "/system.slice/slurmd.service", "/../../job_5/step_0"])
def test_a_cgroup_that_is_no_steps_is_not_read(
    run: Run, spool: Path, tmp_path: Path, path: str
) -> None:
    fill(tmp_path / "v2", UNIFIED)
    order = tables(tmp_path, f"0::{path}\n", {str(tmp_path / "v2"): "cgroup2 cgroup2 rw"})
    run(order, "item tasks 1", "init SPOOL", "task 0 0 0", "reap", "exit")
    assert not UNIFIED_SAYS.keys() & lines_of(spool)[-1].keys()
