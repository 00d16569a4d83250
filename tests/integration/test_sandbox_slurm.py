"""Slurm in a sandbox: the requested version, options and daemons."""

import os
import socket
from pathlib import Path

import pytest
from job_submission import state_of, submit_to, wait_until
from sandboxes import directory, need_users, own

from steward.sandbox import Sandbox, SandboxError, SandboxSpec, slurm_install

__all__ = ["directory", "own"]

pytestmark = [pytest.mark.matrix, pytest.mark.interface]


def test_the_version_is_the_one_asked_for(sandbox: Sandbox, slurm_version: str) -> None:
    said = sandbox.run(["sinfo", "-V"]).stdout.split()[-1]
    assert said == sandbox.plan.slurm_version
    assert said.startswith(slurm_version)


def test_the_controller_can_crash_come_back_and_forget(own: Sandbox, submitter: str) -> None:
    job = submit_to(own, "#!/bin/sh\nsleep 100\n", user=submitter, hold=True)
    own.restart_controller()  # ended in order, it saves its jobs
    own.kill_controller()
    assert own.get_status()["slurmctld"] == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", own.plan.ports[0]))
    own.restart_controller()
    assert state_of(own, job) == "PENDING"
    own.restart_controller("-c")
    assert own.run(["squeue", "-h"]).stdout == ""


@pytest.mark.database
def test_jobs_are_in_slurms_own_books(booked_sandbox: Sandbox) -> None:
    user = next(iter(booked_sandbox.users))
    job = submit_to(booked_sandbox, "#!/bin/sh\nsrun true\nexit 3\n", user=user)
    words = ["sacct", "-n", "-P", "-j", str(job), "-o", "jobid,user,account,state,exitcode"]

    def ended() -> bool:
        lines = booked_sandbox.run(words, user=user).stdout.splitlines()
        return bool(lines) and all("FAILED" in line or "COMPLETED" in line for line in lines)

    wait_until(ended)
    lines = booked_sandbox.run(words, user=user).stdout.splitlines()
    assert lines[0] == f"{job}|{user}|physics|FAILED|3:0"
    assert f"{job}.0||physics|COMPLETED|0:0" in lines
    coordinators = ["sacctmgr", "-n", "-P", "show", "account", "withcoord", "format=account,coord"]
    assert f"physics|{user}" in booked_sandbox.run(coordinators).stdout.splitlines()


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a root directory")
def test_a_root_directory_that_cannot_be_fetched_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEWARD_ROOTS", str(tmp_path))
    monkeypatch.setenv("STEWARD_DEBIAN_MIRROR", "http://127.0.0.1:1/debian")
    with pytest.raises(SandboxError, match=r"debootstrap of trixie from http://127\.0\.0\.1:1"):
        slurm_install.ensure_root("24.11", print)
    assert [path.name for path in tmp_path.iterdir()] == ["24.11.lock"]


@pytest.mark.long
def test_a_cluster_goes_on_with_another_slurm(directory: str, slurm_version: str) -> None:
    if slurm_version:
        pytest.skip("begins with the installed Slurm")
    with Sandbox.up(SandboxSpec(directory=directory, nodes=1)) as own:
        need_users(own)
        user = next(iter(own.users))
        own.run(["srun", "true"], user=user)
        own.upgrade("24.11")
        # Slurm reads what three releases before it wrote, and these are further apart.
        own.restart_controller("-i")
        own.restart_service("slurmd.node1")
        wait_until(lambda: "idle" in own.run(["sinfo", "-h", "-o", "%t"]).stdout.split())
        assert "24.11" in own.run(["srun", "--version"], user=user).stdout
        held = submit_to(own, "#!/bin/sh\ntrue\n", user=user, hold=True)
        own.upgrade("26.05")
        own.restart_controller()
        own.restart_service("slurmd.node1")
        wait_until(lambda: "idle" in own.run(["sinfo", "-h", "-o", "%t"]).stdout.split())
        assert own.plan.slurm_version.startswith("26.05.")
        assert state_of(own, held) == "PENDING"
        own.run(["srun", "true"], user=user)


JOBCOMP = """
function slurm_jobcomp_log_record(job)
    local file = io.open("DIRECTORY/log/ended", "a")
    file:write("ended ", job.user_id, "\\n")
    file:close()
    return slurm.SUCCESS
end
"""


def test_a_script_runs_for_each_job_that_ends(directory: str, slurm_version: str) -> None:
    spec = SandboxSpec(
        directory=directory,
        nodes=1,
        slurm=slurm_version,
        jobcomp_lua=JOBCOMP.replace("DIRECTORY", directory),
    )
    with Sandbox.up(spec) as cluster:
        name, user = next(iter(cluster.users.items()))
        uid = user.uid
        cluster.run(["srun", "true"], user=name)
        ended = Path(f"{directory}/log/ended")
        wait_until(lambda: ended.exists() and ended.read_text() == f"ended {uid}\n")


def test_plugins_are_loaded_from_where_they_are_said_to_be(own: Sandbox, submitter: str) -> None:
    assert own.run(["srun", "true"], user=submitter).returncode == 0
    stack = Path(f"{own.directory}/etc/plugstack.conf")
    stack.write_text(f"required {own.directory}/run/none_such.so\n")
    failed = own.run(["srun", "true"], user=submitter, check=False)
    assert failed.returncode
    assert "none_such.so" in failed.stderr


def test_configuration_can_be_changed_under_way(own: Sandbox) -> None:
    own.configure("MinJobAge=17", "DebugFlags=Steps")
    own.configure("DebugFlags=NO_CONF_HASH", "Licenses=x:3")
    own.restart_controller()
    own.restart_service("slurmd.node1")
    shown = own.run(["scontrol", "show", "config"]).stdout
    assert {line.split()[-2] for line in shown.splitlines() if "MinJobAge" in line} == {"17"}
    assert Path(own.slurm_conf).read_text().count("DebugFlags") == 1
    with pytest.raises(SandboxError, match="use one line"):
        own.configure("A=1\nB=2")


def test_options_reach_slurm(directory: str, slurm_version: str, submitter: str) -> None:
    spec = SandboxSpec(
        directory=directory,
        nodes=2,
        slurm=slurm_version,
        first_job_id=100,
        max_job_id=101,
        min_job_age_s=2,
        private_data="jobs",
        job_requeue=False,
        extra=("DefMemPerNode=17",),
    )
    with Sandbox.up(spec) as sandbox:
        config = sandbox.run(["scontrol", "show", "config"]).stdout
        facts = dict(line.split("=", 1) for line in config.splitlines() if "=" in line)
        shown = {key.strip(): value.strip() for key, value in facts.items()}
        assert shown["PrivateData"].startswith("jobs")
        assert shown["JobRequeue"] == "0"
        assert shown["MinJobAge"].startswith("2 ")
        assert shown["DefMemPerNode"] == "17"
        assert shown["StateSaveLocation"] == sandbox.spool
        assert len(sandbox.run(["sinfo", "-h", "-N", "-p", "main"]).stdout.splitlines()) == 2
        assert submit_to(sandbox, "#!/bin/sh\n", user=submitter) == 100
