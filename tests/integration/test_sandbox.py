"""Sandbox on real Slurm: it runs jobs, and does not affect the host."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from job_submission import Submit, state_of, submit_to, wait_until
from sandboxes import directory, need_users, own, processes_of

from steward.core.processes import read_start_ticks
from steward.sandbox import Sandbox, SandboxError, SandboxSpec

__all__ = ["directory", "own"]

pytestmark = [pytest.mark.matrix, pytest.mark.interface]


def test_a_job_runs_as_the_one_who_submitted_it(
    sandbox: Sandbox, submit: Submit, submitter: str
) -> None:
    user = sandbox.users[submitter]
    inside = user.home.startswith(sandbox.directory)
    where = user.home if inside else f"{sandbox.directory}/home"
    job = submit("#!/bin/sh\nid -un\n", output=f"{where}/who-%j", chdir=where)
    wait_until(lambda: state_of(sandbox, job) == "COMPLETED")
    result = Path(f"{where}/who-{job}")
    assert result.read_text() == f"{submitter}\n"
    assert result.stat().st_uid == user.uid


def test_users_cannot_read_each_other(sandbox: Sandbox) -> None:
    need_users(sandbox)
    one, other = list(sandbox.users.values())[:2]
    sandbox.run(["sh", "-c", "echo mine > ~/secret"], user=one.name)
    result = sandbox.run(["cat", f"{one.home}/secret"], user=other.name, check=False)
    assert result.returncode != 0
    assert "mine" not in result.stdout
    for private in (sandbox.spool, f"{sandbox.directory}/etc/munge.key"):
        assert sandbox.run(["ls", "-A", private], user=other.name, check=False).stdout in (
            "",
            f"{private}\n",
        )
    key = sandbox.run(["cat", f"{sandbox.directory}/etc/munge.key"], user=other.name, check=False)
    assert key.returncode != 0


def test_steward_can_be_run_by_every_user(sandbox: Sandbox) -> None:
    for user in sandbox.users:
        result = sandbox.run([sys.executable, "-c", "import steward; print(1)"], user=user)
        assert result.stdout == "1\n"


def test_the_machine_is_left_as_it_was(sandbox: Sandbox) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    assert sandbox.directory not in mounts
    if len(sandbox.users) > 1:
        passwd = Path("/etc/passwd").read_text()
        assert not [name for name in sandbox.users if f"{sandbox.directory}/home/{name}" in passwd]


def test_run_gives_input_output_and_exit_code(sandbox: Sandbox) -> None:
    result = sandbox.run(["sh", "-c", "cat; echo no >&2; exit 3"], input="yes", check=False)
    assert (result.stdout, result.stderr, result.returncode) == ("yes", "no\n", 3)
    with pytest.raises(SandboxError, match="ended with 3: no"):
        sandbox.run(["sh", "-c", "echo no >&2; exit 3"])


def test_run_ends_what_takes_too_long(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="did not end"):
        sandbox.run(["sleep", "4321"], timeout_s=0.3)
    assert not [line for line in processes_of(sandbox.directory) if "sleep 4321" in line]


def test_an_unknown_user_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="unknown user 'eve'"):
        sandbox.run(["true"], user="eve")


def test_signals_reach_the_program_inside(sandbox: Sandbox) -> None:
    script = "trap 'echo got; exit 5' TERM; echo ready; while :; do sleep 0.1; done"
    with sandbox.popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.read() == "got\n"
        assert process.wait(30) == 5


def test_killing_the_caller_side_kills_the_program(sandbox: Sandbox) -> None:
    with sandbox.popen(["sleep", "1234"], stdout=subprocess.DEVNULL) as process:
        inner = process.inner_pid
        assert inner
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: read_start_ticks(inner) == 0)


def test_a_program_killed_inside_is_seen_as_killed(sandbox: Sandbox) -> None:
    with sandbox.popen(["sleep", "1234"]) as process:
        process.kill()
        assert process.wait(30) == -signal.SIGKILL


def test_two_sandboxes_side_by_side(own: Sandbox, sandbox: Sandbox, submitter: str) -> None:
    assert own.directory != sandbox.directory
    assert not set(own.plan.ports) & set(sandbox.plan.ports)
    first = submit_to(own, "#!/bin/sh\nsleep 100\n", user=submitter, job_name="only-here")
    assert str(first) in own.run(["squeue", "-h", "-o", "%i"]).stdout.split()
    assert "only-here" not in sandbox.run(["squeue", "-h", "-o", "%j"]).stdout
    munge = own.run(["sh", "-c", f"munge -n -S {own.plan.munge_socket}"]).stdout
    other = ["unmunge", "-S", sandbox.plan.munge_socket]
    assert sandbox.run(other, input=munge, check=False).returncode != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users to let in")
def test_users_get_into_a_sandbox_below_closed_directories(
    directory: str, slurm_version: str
) -> None:
    closed = Path(directory) / "closed" / "more"
    closed.mkdir(parents=True)
    closed.chmod(0o700)
    closed.parent.chmod(0o700)
    spec = SandboxSpec(directory=str(closed / "sandbox"), nodes=1, slurm=slurm_version)
    with Sandbox.up(spec) as below:
        name, user = next(iter(below.users.items()))
        below.run(["touch", "mine"], user=name)
        assert (Path(user.home) / "mine").exists()
        listed = below.run(["ls", str(closed.parent)], user=name, check=False)
        assert listed.returncode != 0


def test_held_ports_are_for_the_daemons_alone(own: Sandbox) -> None:
    for port in own.plan.ports:
        with socket.socket() as sock, pytest.raises(OSError, match="in use"):
            sock.bind(("0.0.0.0", port))


def test_settings_name_what_steward_needs(sandbox: Sandbox) -> None:
    settings = sandbox.make_cluster_settings()
    assert os.path.isdir(settings.spool)
    squeue = [f"{settings.slurm_bin}/squeue", "-h"]
    env = {"SLURM_CONF": settings.slurm_conf, "PATH": "/usr/bin:/bin"}
    assert sandbox.run(squeue, env=env).returncode == 0
