"""Aborted programs end with all their child processes, and the wait for them is bounded."""

import logging
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from steward.core.processes import kill_descendants, kill_group

Program = subprocess.Popen[bytes]


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    """Run programs in a process group that ends with the test."""
    begun: list[Program] = []
    yield begun
    for program in begun:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait(30)


def start(programs: list[Program], script: str) -> Program:
    program = subprocess.Popen(
        ["sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    programs.append(program)
    return program


def line_of(program: Program) -> int:
    assert program.stdout is not None
    return int(program.stdout.readline())


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_for_end(pid: int) -> None:
    """Wait for the end of a process that is no child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(descriptor) as file:
        select.select([file], [], [], 30)


def test_it_ends_with_what_it_started(programs: list[Program]) -> None:
    program = start(programs, "trap '' TERM; sleep 600 & echo $!; wait")
    child = line_of(program)
    kill_group(program)
    assert program.returncode == -signal.SIGKILL
    wait_for_end(child)
    assert not is_running(child)
    assert all(pipe is None or pipe.closed for pipe in (program.stdin, program.stdout))


def test_what_it_left_running_ends_too(programs: list[Program]) -> None:
    program = start(programs, "sleep 600 >&- 2>&- & echo $!")
    child = line_of(program)
    assert program.wait(30) == 0
    assert is_running(child)
    kill_group(program)
    wait_for_end(child)
    assert not is_running(child)


def test_what_was_not_written_goes_nowhere(programs: list[Program]) -> None:
    program = start(programs, "exec <&-; echo 0; sleep 600")
    line_of(program)
    assert program.stdin is not None
    program.stdin.write(b"waits in the buffer")
    kill_group(program)
    assert program.returncode == -signal.SIGKILL


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone becomes somebody else")
def test_what_is_another_users_is_left_behind(
    programs: list[Program], caplog: pytest.LogCaptureFixture
) -> None:
    """Slurm's commands may run under sudo: the error is reported although the process stays."""
    program = start(programs, "sleep 600")
    os.setresuid(65534, 65534, 0)
    try:
        with caplog.at_level(logging.WARNING):
            kill_group(program, reap_s=0.1)
    finally:
        os.setresuid(0, 0, 0)
    assert is_running(program.pid)
    assert f"pid {program.pid}" in caplog.text


TREE = """
import os, subprocess, sys
words = ["sleep", "600"]
apart = subprocess.Popen(words, start_new_session=True)
beside = subprocess.Popen(words)
if sys.argv[1:]:
    print(apart.pid, beside.pid, flush=True)
else:
    below = subprocess.Popen([sys.executable, __file__, "last"], start_new_session=True)
    print(apart.pid, beside.pid, below.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_listed", [True, False])
def test_all_that_descends_from_a_process_ends_but_what_is_kept(
    tmp_path: Path,
    programs: list[Program],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_listed: bool,
) -> None:
    if not is_listed:  # as by a kernel without CONFIG_PROC_CHILDREN
        exists = os.path.exists
        monkeypatch.setattr(
            os.path, "exists", lambda path: os.path.basename(path) != "children" and exists(path)
        )
    tree = tmp_path / "tree.py"
    tree.write_text(TREE)
    program = start(programs, f"exec {sys.executable} {tree}")
    assert program.stdout is not None
    found = [int(word) for _ in range(2) for word in program.stdout.readline().split()]
    assert len(found) == 5
    kept = found[0]
    kill_descendants(program.pid, {kept})
    for pid in found:
        if pid != kept:
            wait_for_end(pid)
    assert [pid for pid in found if is_running(pid)] == [kept]
    assert is_running(program.pid)
    kill_descendants(program.pid)
    wait_for_end(kept)
    assert not is_running(kept)
    kill_group(program)


def test_what_cannot_be_looked_for_is_said(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        kill_descendants(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files" in caplog.text
