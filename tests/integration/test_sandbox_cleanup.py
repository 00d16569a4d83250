"""Sandboxes leave nothing behind, whether commands or kills end them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from job_submission import PATIENCE, submit_to, wait_until
from sandboxes import directory, need_namespaces, own, processes_of

from steward.sandbox import Sandbox, SandboxError, SandboxSpec
from steward.sandbox.keeper_client import read_keepers as keepers_of

__all__ = ["directory", "own"]

pytestmark = [pytest.mark.matrix, pytest.mark.interface, pytest.mark.timeout(1800)]


def test_a_directory_in_use_or_of_others_is_refused(own: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"up in .* already"):
        Sandbox.up(own.plan.spec)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SandboxError, match="contains other files"):
        Sandbox.up(SandboxSpec(directory=str(tmp_path)))
    assert (tmp_path / "thesis.tex").exists()
    assert own.is_up()


def test_down_is_idempotent_and_removes_everything(directory: str, slurm_version: str) -> None:
    spec = SandboxSpec(directory=directory, nodes=1, slurm=slurm_version)
    Sandbox.up(spec, detached=True)
    sandbox = Sandbox.load(directory)
    user = next(iter(sandbox.users))
    submit_to(sandbox, "#!/bin/sh\nsetsid sleep 2345 &\nsleep 100\n", user=user)
    wait_until(lambda: any("sleep 2345" in line for line in processes_of(directory)))
    sandbox.down()
    sandbox.down()
    assert processes_of(directory) == []
    assert not os.path.exists(directory)
    with pytest.raises(SandboxError, match="no sandbox"):
        Sandbox.load(directory)


def test_down_can_keep_the_logs_and_up_begins_anew(directory: str, slurm_version: str) -> None:
    spec = SandboxSpec(directory=directory, nodes=1, slurm=slurm_version)
    sandbox = Sandbox.up(spec)
    sandbox.down(keep=True)
    assert os.path.exists(f"{directory}/log/slurmctld.log")
    assert processes_of(directory) == []
    with Sandbox.up(spec) as again:
        assert again.is_up()


@pytest.mark.parametrize("contained", [True, False])
@pytest.mark.parametrize("victim", ["keeper", "init"])
def test_killing_a_keeper_leaves_no_process(
    directory: str, slurm_version: str, victim: str, contained: bool
) -> None:
    if slurm_version and not contained:
        pytest.skip("another version needs namespaces")
    spec = SandboxSpec(directory=directory, nodes=1, slurm=slurm_version, contained=contained)
    Sandbox.up(spec, detached=True)
    sandbox = Sandbox.load(directory)
    user = next(iter(sandbox.users))
    submit_to(sandbox, "#!/bin/sh\nsetsid sleep 3456 &\nsleep 100\n", user=user)
    wait_until(lambda: any("sleep 3456" in line for line in processes_of(directory)))
    keepers = keepers_of(sandbox.directory)
    assert keepers is not None
    os.kill(getattr(keepers, victim).pid, signal.SIGKILL)
    wait_until(lambda: processes_of(directory) == [])
    wait_until(lambda: not sandbox.is_up())
    sandbox.down()


@pytest.mark.parametrize("contained", [True, False])
def test_killing_the_caller_leaves_nothing(
    directory: str, slurm_version: str, contained: bool
) -> None:
    if slurm_version and not contained:
        pytest.skip("another version needs namespaces")
    program = (
        "import sys, time\n"
        "from steward.sandbox import Sandbox, SandboxSpec\n"
        "spec = SandboxSpec(directory=sys.argv[1], nodes=1, slurm=sys.argv[2], "
        f"contained={contained})\n"
        "Sandbox.up(spec)\n"
        "print('up', flush=True)\n"
        "time.sleep(1000)\n"
    )
    argv = [sys.executable, "-c", program, directory, slurm_version]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "up\n"
        assert processes_of(directory) != []
        caller.kill()
    wait_until(lambda: processes_of(directory) == [])
    wait_until(lambda: not os.path.exists(directory))


def test_it_cannot_be_removed_from_inside(own: Sandbox) -> None:
    need_namespaces(own)
    program = "import sys; from steward.sandbox import Sandbox; Sandbox.load(sys.argv[1]).down()"
    result = own.run([sys.executable, "-c", program, own.directory], check=False)
    assert "from outside" in result.stderr
    assert own.is_up()
    assert own.run(["sinfo", "-h"]).stdout


def test_a_daemon_that_cannot_start_is_named(directory: str, slurm_version: str) -> None:
    spec = SandboxSpec(
        directory=directory, nodes=1, slurm=slurm_version, extra=("SelectType=select/none_such",)
    )
    with pytest.raises(SandboxError, match="slurmctld has ended") as caught:
        Sandbox.up(spec)
    assert "\n" not in str(caught.value)
    assert processes_of(directory) == []
    assert os.path.exists(f"{directory}/log")


def steward(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "steward", "sandbox", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE * 60, check=False)


def test_the_command_line(directory: str, slurm_version: str, tmp_path: Path) -> None:
    version = ["--slurm", slurm_version] if slurm_version else []
    script = tmp_path / "jobcomp.lua"
    script.write_text("function slurm_jobcomp_log_record(job)\nend\nreturn slurm.SUCCESS\n")
    loaded = ["--plugstack", "include {directory}/etc/more/*", "--jobcomp", str(script)]
    try:
        up = steward("up", "--dir", directory, "--nodes", "1", *loaded, *version)
        assert up.returncode == 0, up.stderr
        etc = Path(directory, "etc")
        assert (etc / "plugstack.conf").read_text() == f"include {etc}/more/*\n"
        assert (etc / "jobcomp.lua").read_text() == script.read_text()
        assert "JobCompType=jobcomp/lua" in (etc / "slurm.conf").read_text()
        assert f"in {directory}: 1 node," in up.stdout
        again = steward("up", "--dir", directory)
        assert again.returncode == 1
        assert again.stderr.startswith("steward: a sandbox is up in")
        assert again.stderr.count("\n") == 1
        assert steward("status", "--dir", directory).returncode == 0
        inside = ["run", "--dir", directory, "--"]
        assert steward(*inside, "sinfo", "-h", "-o", "%D").stdout == "1\n"
        assert steward(*inside, "sh", "-c", "exit 7").returncode == 7
        assert steward(*inside, "no-such-program").returncode == 127
        assert steward("run", "--dir", directory, "--user", "eve", "--", "id").returncode == 1
    finally:
        down = steward("down", "--dir", directory)
    assert down.returncode == 0, down.stderr
    assert processes_of(directory) == []
    assert steward("down", "--dir", directory).returncode == 0
    assert steward("status", "--dir", directory).returncode == 1


def test_in_the_foreground_it_ends_at_ctrl_c(directory: str, slurm_version: str) -> None:
    version = ["--slurm", slurm_version] if slurm_version else []
    words = ["sandbox", "up", "--foreground", "--dir", directory, "--nodes", "1", *version]
    argv = [sys.executable, "-m", "steward", *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert directory in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE * 30) == 0
        finally:
            process.kill()
    assert processes_of(directory) == []
    assert not os.path.exists(directory)


def test_an_interrupted_start_leaves_nothing(directory: str, slurm_version: str) -> None:
    version = ["--slurm", slurm_version] if slurm_version else []
    argv = [sys.executable, "-m", "steward", "sandbox", "up", "--dir", directory, *version]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: os.path.exists(f"{directory}/sandbox.json"))
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE * 60)
    wait_until(lambda: processes_of(directory) == [])
    assert not os.path.exists(directory)
