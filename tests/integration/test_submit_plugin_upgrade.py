"""Slurm upgrade as in docs/gate.md: slurmctld starts, and asks the gate."""

import os
import sys
from pathlib import Path

import pytest
from gate_cluster import AskingSite, headers
from job_submission import submit_to, wait_until
from sandboxes import passable_directory

from servers.gate import AskedGate
from steward.admin.plugins.build import build_plugins
from steward.sandbox import Sandbox, SandboxError, SandboxSpec

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="other versions of Slurm take root"),
]


def check(cluster: Sandbox, version: str) -> tuple[int, str]:
    words = ["plugins", "check", "--job-submit", "--slurm", version]
    done = cluster.run([sys.executable, "-m", "steward", *words], check=False)
    return done.returncode, done.stdout + done.stderr


def test_builds_of_both_versions_in_plugindir_carry_it_over() -> None:
    with passable_directory() as path:
        old = build_plugins(headers("24.11"), f"{path}/lib")
        new = build_plugins(headers("26.05"), f"{path}/lib")
        (path / "run").mkdir()
        (path / "run").chmod(0o777)
        spec = SandboxSpec(
            nodes=1,
            slurm="24.11",
            job_submit=("steward",),
            plugin_dirs=tuple(str(Path(built.path).parent) for built in (new, old)),
            controller_env={"STEWARD_GATE_CONF": f"{path}/run/gate.conf"},
        )
        with AskedGate(path / "run/gate.sock") as gate, Sandbox.up(spec) as cluster:
            AskingSite(cluster, gate, path / "run").conf()
            user = next(iter(cluster.users))

            def is_asked() -> bool:
                before = len(gate.asked)
                submit_to(cluster, "#!/bin/sh\n", user=user, hold=True, output="/dev/null")
                return len(gate.asked) > before

            wait_until(is_asked)
            assert check(cluster, str(old.version))[0] == 0
            assert check(cluster, str(new.version))[0] == 0
            code, said = check(cluster, "27.05.1")
            assert (code, "slurmctld 27.05.1 would not start" in said) == (1, True), said
            cluster.upgrade("26.05")
            cluster.restart_controller()
            wait_until(is_asked)


def test_without_a_build_slurmctld_does_not_start_and_the_check_had_said_so() -> None:
    with passable_directory() as path:
        new = build_plugins(headers("24.11"), f"{path}/lib")
        directory = str(Path(new.path).parent)
        spec = SandboxSpec(nodes=1, plugin_dirs=(directory,))
        with Sandbox.up(spec) as cluster:
            cluster.configure("JobSubmitPlugins=steward")
            cluster.restart_service("slurmctld")
            wait_until(lambda: cluster.get_status()["slurmctld"] == 0)
            with pytest.raises(SandboxError, match="does not answer"):
                cluster.restart_controller(timeout_s=3)
            # Taking it out is one line of slurm.conf.
            cluster.configure("JobSubmitPlugins=require_timelimit")
            cluster.restart_controller()
