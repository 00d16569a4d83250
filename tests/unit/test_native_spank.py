"""SPANK plugin in the tests' slurmstepd, under ASan, UBSan and valgrind."""

import ctypes
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.native import Run, lines_of, needs_compiler, plain, run, sanitized, spool

__all__ = ["plain", "run", "sanitized", "spool"]

ALLOCATOR, SLURMD, SCRIPT, LOCAL = 3, 4, 5, 1
BATCH, EXTERN, INTERACTIVE = 0xFFFFFFFB, 0xFFFFFFFC, 0xFFFFFFFA

pytestmark = needs_compiler


def test_a_step_is_told_of_as_the_kernel_saw_it(run: Run, spool: Path) -> None:
    said = run(
        *("item tasks 2", "item cpus 3", "item stepmem 100", f"name {b'/bin/solve'.hex()}"),
        *("item restarts 2", "item array 4", "item index 7"),
        *("init SPOOL", "task 30 20 3", "task 60 60 -9", "reap", "exit"),
    )
    start, smgr, *tasks, end = lines_of(spool)
    common = {"v": 1, "j": 5, "n": "n1", "s": "0", "l": start["l"]}
    assert all(line.items() >= common.items() for line in (start, smgr, *tasks, end))
    assert (
        start.items()
        >= {
            "k": "start",
            "u": 1001,
            "g": 1002,
            "tasks": 2,
            "cpus": 3,
            "mem": 100 << 20,
            "name": "solve",
            "r": 2,
            "aj": 4,
            "at": "7",
        }.items()
    )
    assert smgr["tasks"] == 2
    kernel = [[int(word) for word in line.split()] for line in said.splitlines()]
    peak = 0
    for number, (line, (pid, status, user, system, rss)) in enumerate(
        zip(tasks, kernel, strict=True)
    ):
        assert (line["id"], line["pid"], line["st"]) == (number, pid, status)
        # Of a difference of two sums, each cut to whole microseconds.
        assert abs(line["ut"] - user) <= 1
        assert abs(line["sy"] - system) <= 1
        assert line.get("rss") == (rss if rss > peak else None)
        peak = max(peak, rss)
        assert "ep" not in line
    assert (end["k"], end["tasks"], end["rss"]) == ("end", 2, peak)
    assert "lost" not in end
    assert stat.S_IMODE((spool / "n1.log").stat().st_mode) == 0o600


def test_the_peak_of_a_task_that_had_less_than_another_is_left_out(run: Run, spool: Path) -> None:
    run("item tasks 2", "init SPOOL", "task 0 60 0", "task 0 20 0", "reap", "exit")
    first, second = (line for line in lines_of(spool) if line["k"] == "task")
    assert first["rss"] > 60 << 20
    assert "rss" not in second


@pytest.mark.parametrize("configured", [True, False])
def test_what_an_epilog_uses_is_no_tasks(run: Run, spool: Path, configured: bool) -> None:
    said = run(
        *(["taskepilog /etc/epilog"] if configured else []),
        *("item tasks 3", "init SPOOL", "epilogs 200 50"),
        *("task 20 20 0", "task 60 90 1", "task 10 0 0", "reap", "exit"),
    )
    tasks = [line for line in lines_of(spool) if line["k"] == "task"]
    kernel = [[int(word) for word in line.split()] for line in said.splitlines()]
    for line, (_pid, _status, user, system, _rss) in zip(tasks, kernel, strict=True):
        assert abs(line["ut"] - user) <= 1
        assert abs(line["sy"] - system) <= 1
        assert "ep" not in line
    # The third had less than others.
    assert [line.get("rss") for line in tasks] == [kernel[0][4], kernel[1][4], None]
    assert lines_of(spool)[-1]["rss"] == kernel[1][4]


def test_a_peak_below_an_epilogs_is_left_out(run: Run, spool: Path) -> None:
    run(
        *("item tasks 2", "init SPOOL", "epilogs 0 90", "task 0 20 0", "task 0 50 0"),
        *("reap", "exit"),
    )
    *_, first, second, end = lines_of(spool)
    assert "rss" in first
    assert "rss" not in second
    assert "rss" not in end


def test_an_epilog_that_cannot_be_told_from_its_task_is_marked(run: Run, spool: Path) -> None:
    # Its fork was not seen.
    run("taskepilog /etc/epilog", "item tasks 1", "init SPOOL", "task 0 0 0", "reap", "exit")
    # The hook runs in a child, which knows of its parent what /proc says.
    orders = ("contained", "item tasks 2", "init SPOOL")
    run(*orders, "epilogs 30 50", "task 0 0 0", "task 0 0 0", "reap", "exit")
    assert [line.get("ep") for line in lines_of(spool) if line["k"] == "task"] == [1, 1, 1]
    assert "rss" not in lines_of(spool)[-1]
    run(*orders, "task 0 0 0", "task 0 0 0", "reap", "exit")
    assert ["ep" in line for line in lines_of(spool) if line["k"] == "task"][3:] == [False, False]


@pytest.mark.parametrize(
    ("number", "title", "name"),
    [
        (BATCH, "slurmstepd: [5.batch]", "batch"),
        (EXTERN, "slurmstepd: [5.extern]", "extern"),
        (INTERACTIVE, "slurmstepd: [5.interactive]", "interactive"),
        (12, "slurmstepd: [5.12]", "12"),
        (1, "slurmstepd: [5.1+0]", "1+0"),
        (1, "slurmstepd: [5.1+12]", "1+12"),
        (1, "slurmstepd: [5.11+1]", "1"),
        (1, "slurmstepd: [5.1+", "1"),
        (1, "[5.1+1" + "1" * 100 + "]", "1"),
    ],
)
def test_a_step_has_the_name_that_slurm_gives_it(
    run: Run, spool: Path, number: int, title: str, name: str
) -> None:
    run(f"item step {number}", f"name {b'/bin/x'.hex()}", "init SPOOL", "exit", title=title)
    start, end = lines_of(spool)
    assert (start["s"], end["s"]) == (name, name)
    assert ("name" in start) == name[0].isdigit()


@pytest.mark.parametrize("context", [0, LOCAL, ALLOCATOR, SLURMD])
def test_elsewhere_it_does_nothing(run: Run, spool: Path, context: int) -> None:
    said = run(
        *(f"context {context}", "item tasks 1", "init SPOOL", "task 0 0 0", "again"),
        *("exit", "prolog SPOOL", "epilog SPOOL"),
    )
    assert said == ""
    assert list(spool.iterdir()) == []


def test_prolog_and_epilog_tell_of_the_job_alone(run: Run, spool: Path) -> None:
    run(f"context {SCRIPT}", "prolog SPOOL", "epilog SPOOL", "init SPOOL", "exit")
    kinds = [{key: line[key] for key in "kjnug"} for line in lines_of(spool)]
    owner = {"j": 5, "n": "n1", "u": 1001, "g": 1002}
    assert kinds == [{"k": "prolog", **owner}, {"k": "epilog", **owner}]


HOSTILE = [
    b'"},{"k":"end"',
    b"\\",
    b"\n\r\t\x01\x7f",
    "naïve \u2028 \U0001f600".encode(),
    b"\xff\xfe\xc0\x80\xed\xa0\x80\xf5\x80\x80\x80",
    b"\xf0\x9f\x98",
    b"\xe2\x82",
    b"%s%n%d%99999999d",
    b"$(reboot)`reboot`",
    b"/" * 80,
    b"a/",
    ("\u20ac" * 100).encode(),
    b"\x01" * 3000,
    b"",
]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_any_bytes_can_be_a_programs_name(run: Run, spool: Path, name: bytes) -> None:
    run(f"name {name.hex()}", "item tasks 1", "init SPOOL", "exit")
    start, end = lines_of(spool)
    assert (start["k"], end["k"]) == ("start", "end")
    cut = (name.rpartition(b"/")[2] or name)[:64]
    shown = start["name"].encode()
    assert len(shown) <= 64 * 3
    if cut.isascii():
        assert shown == cut
    else:
        assert start["name"].startswith(cut.decode(errors="replace")[:5])


@pytest.mark.parametrize("node", [b"../n1", b".", b"..", b"a/b", b"x" * 300])
def test_a_node_whose_name_is_no_files_name_writes_nothing(
    run: Run, spool: Path, node: bytes
) -> None:
    run(f"node {node.hex()}", "item tasks 1", "init SPOOL", "task 0 0 0", "reap", "exit")
    assert list(spool.iterdir()) == []
    assert [path.name for path in spool.parent.iterdir()] == ["spool"]


def test_what_slurm_does_not_tell_is_left_out(run: Run, spool: Path) -> None:
    run("init SPOOL", "failing 1", "task 0 0 0", "exit")
    start, end = lines_of(spool)
    assert start.keys() == {"v", "k", "t", "j", "n", "s", "l", "u", "g"}
    assert end["tasks"] == 0
    run("failing 1", "init SPOOL", "exit", f"context {SCRIPT}", "prolog SPOOL")
    assert len(lines_of(spool)) == 2


def test_a_plugin_that_is_named_twice_tells_once(run: Run, spool: Path) -> None:
    run("item tasks 1", "init SPOOL", "init SPOOL", "task 0 0 0", "reap", "again", "exit", "exit")
    assert [line["k"] for line in lines_of(spool)] == ["start", "smgr", "task", "end"]


@pytest.mark.parametrize("argument", ["", "spool=", "spool=relative", "spool=/nowhere/at/all", "x"])
def test_without_a_directory_a_job_runs_on(run: Run, spool: Path, argument: str) -> None:
    assert run("item tasks 1", f"init {argument}", "task 0 0 0", "reap", "exit")
    assert list(spool.iterdir()) == []


def test_lines_that_are_lost_are_counted(run: Run, spool: Path) -> None:
    away = spool.with_name("away")
    run(
        *("item tasks 1", "init SPOOL", f"move {spool} {away}", "task 0 0 0", "reap"),
        *(f"move {away} {spool}", "exit"),
    )
    start, end = lines_of(spool)
    assert (start["k"], end["k"]) == ("start", "end")
    assert end["lost"] == 2  # smgr and task


def test_a_limit_on_files_kills_nobody(run: Run, spool: Path) -> None:
    (spool / "n1.log").write_bytes(b"x" * 9999 + b"\n")
    run("fsize 10000", "item tasks 1", "init SPOOL", "task 0 0 0", "reap", "exit")
    assert (spool / "n1.log").stat().st_size == 10000


def test_a_torn_line_tears_no_other(run: Run, spool: Path) -> None:
    (spool / "n1.log").write_bytes(b'{"v":1,"k":"task","t":17')
    run("item tasks 1", "init SPOOL", "exit")
    torn, *whole = (spool / "n1.log").read_bytes().splitlines()
    assert torn == b'{"v":1,"k":"task","t":17'
    assert [json.loads(line)["k"] for line in whole] == ["start", "end"]


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "dangling"])
def test_what_is_no_file_is_not_written_to(run: Run, spool: Path, kind: str) -> None:
    place, other = spool / "n1.log", spool.with_name("other")
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to(other)
        if kind == "link":
            other.write_bytes(b"")
    run("item tasks 1", "init SPOOL", "task 0 0 0", "reap", "exit")
    assert not other.exists() or other.read_bytes() == b""


def test_where_anybody_may_write_nothing_is_written(run: Run, spool: Path) -> None:
    spool.chmod(0o777)
    run("item tasks 1", "init SPOOL", "exit")
    assert list(spool.iterdir()) == []


def test_hooks_that_slurm_runs_in_children_know_of_each_other(
    plain: Path, run: Run, spool: Path
) -> None:
    said = run(
        *("contained", "item tasks 2", "init SPOOL", "task 300 100 0", "task 200 20 1", "reap"),
        "exit",
        program=str(plain),  # whose children cost little
    )
    tasks = [line for line in lines_of(spool) if line["k"] == "task"]
    tick_us = 1_000_000 // os.sysconf("SC_CLK_TCK")
    for line, words in zip(tasks, said.splitlines(), strict=True):
        _, status, user, system, _ = (int(word) for word in words.split())
        assert line["st"] == status
        # It includes the usage of the children forked for hooks.
        assert abs(line["ut"] + line["sy"] - user - system) <= 5 * tick_us
        assert "rss" not in line
    end = lines_of(spool)[-1]
    assert end["k"] == "end"
    assert end["tasks"] == 2
    assert end["rss"] > 100 << 20


def test_what_slurmd_held_hides_no_peak(plain: Path, run: Run, spool: Path) -> None:
    # The kernel books what a process held before it executed another program to that one.
    held = b"\1" * (200 << 20)
    run(
        *("contained", "item tasks 1", "init SPOOL", "task 0 60 0", "reap", "exit"),
        program=str(plain),
    )
    assert 60 << 20 < lines_of(spool)[-1]["rss"] < len(held)


def test_many_tasks_of_many_steps_share_a_file(plain: Path, run: Run, spool: Path) -> None:
    steps = [
        subprocess.Popen([plain], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for _ in range(8)
    ]
    for number, step in enumerate(steps):
        assert step.stdin
        # Two steps may begin in the same microsecond.
        orders = f"item tasks 200\nitem job 6\nitem step {number}\ninit spool={spool}\n"
        step.stdin.write(f"node {b'n1'.hex()}\n{orders}measure 200\nexit\n".encode())
        step.stdin.close()
    assert [step.wait(60) for step in steps] == [0] * 8
    lines = lines_of(spool)
    assert len(lines) == 8 * (200 + 3)
    assert len({(line["s"], line["l"]) for line in lines}) == 8


def test_other_threads_disturb_nothing(run: Run, spool: Path) -> None:
    run("threads 4", "item tasks 50", "init SPOOL", *["task 0 1 0"] * 50, "reap", "exit")
    assert sum(line["k"] == "task" for line in lines_of(spool)) == 50


@pytest.mark.skipif(not shutil.which("valgrind"), reason="needs valgrind")
def test_valgrind_finds_nothing(plain: Path, spool: Path) -> None:
    orders = [f"node {b'n1'.hex()}", f"name {HOSTILE[4].hex()}", "item tasks 2"]
    orders += [f"init spool={spool}", "task 0 1 0", "task 0 1 3", "reap", "exit"]
    result = subprocess.run(
        ["valgrind", "-q", "--error-exitcode=9", "--leak-check=full", str(plain)],
        input="\n".join(orders) + "\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [line["k"] for line in lines_of(spool)] == ["start", "smgr", "task", "task", "end"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of one page, full except for some bytes."""
    directory = tmp_path / "full"
    directory.mkdir(mode=0o700)
    libc = ctypes.CDLL(None, use_errno=True)
    place = os.fsencode(directory)
    if libc.mount(b"none", place, b"tmpfs", 0, b"size=8k,mode=0700") != 0:
        pytest.skip("may not mount a tmpfs")
    try:
        yield directory
    finally:
        libc.umount2(place, 2)


def test_a_full_disk_costs_lines_and_no_more(run: Run, full_disk: Path) -> None:
    filler = full_disk / "filler"
    log = full_disk / "n1.log"
    log.write_bytes(b" " * 3999 + b"\n")
    filler.write_bytes(b"x" * 4096)
    elsewhere = full_disk.with_name("filler")
    run(
        *(f"init spool={full_disk}", "item tasks 3", "task 0 0 0", "task 0 0 0", "task 0 0 0"),
        *("reap", "exit"),
    )
    # The first line was torn; then the disk was full.
    assert log.stat().st_size == 4096
    assert not elsewhere.exists()
    filler.unlink()
    run(f"init spool={full_disk}", "exit")
    torn, *whole = log.read_bytes().lstrip().splitlines()
    assert torn.startswith(b'{"v":1,"k":"start"')
    assert [json.loads(line)["k"] for line in whole] == ["start", "end"]


@pytest.fixture
def dead_server(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system whose server never answers, as NFS after a server failure."""
    directory = tmp_path / "dead"
    directory.mkdir()
    try:
        fd = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no FUSE: {error.strerror}")
    libc = ctypes.CDLL(None, use_errno=True)
    place = os.fsencode(directory)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"dead", place, b"fuse", 0, options) != 0:
        os.close(fd)
        pytest.skip("may not mount")
    try:
        yield directory
    finally:
        os.close(fd)  # which ends whoever waits
        libc.umount2(place, 2)


def test_a_server_that_is_away_stalls_no_job(run: Run, spool: Path, dead_server: Path) -> None:
    for directory in (dead_server, dead_server / "below" / "it"):
        run(f"init spool={directory}", "item tasks 1", "task 0 0 0", "reap", "exit")
        run(f"context {SCRIPT}", f"prolog spool={directory}")
