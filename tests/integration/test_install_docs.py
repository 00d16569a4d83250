"""docs/install.md, followed word for word on a host with nothing but Slurm."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from install_page import HOST, blocks, exit_code
from job_submission import submit_to, wait_until
from plain_host import PlainHost

from steward.sandbox import Sandbox, SandboxSpec

pytestmark = [
    pytest.mark.wide,
    pytest.mark.database,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0, reason="installs things, in namespaces of its own"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

ROOT: Final = Path(__file__).parents[2]


def test_every_block_says_where_it_is_typed() -> None:
    for where, kind, text in blocks():
        assert where or kind in ("toml", "ini"), f"who types this?\n{text}"
        place = where.split(",")[0]
        known = (*HOST, "in slurm.conf", "in plugstack.conf", "at the end", "")
        assert place in known or place.startswith("not followed: "), where


@pytest.fixture
def host(slurm_version: str) -> Iterator[PlainHost]:
    if slurm_version:
        pytest.skip("packages are installed beside the installed Slurm")
    with Sandbox.up(SandboxSpec(nodes=1, accounting=True), report=print) as cluster:
        plain = PlainHost(cluster)
        try:
            yield plain
        finally:
            plain.close()
            for name in ("steward", "steward-agent", "steward-web", "steward-listen"):
                print(f"--- {name}\n{plain.log(name)[-4000:]}")


def packages() -> Path | None:
    """Return the directory of the package, if one was built."""
    built = os.environ.get("STEWARD_DIST", str(ROOT / "dist"))
    return Path(built) if list(Path(built).glob("steward_*+py3.11_amd64.deb")) else None


def stand_in(host: PlainHost) -> None:
    """Create the files of the package if none was built."""
    program = Path(sys.executable).parent / "steward"
    host.type(
        f"ln -s {program} /usr/bin/steward\n"
        f"cp {ROOT}/packaging/systemd/* /lib/systemd/system/\n"
        "steward agent --write /usr/local/sbin/steward-agent\n"
        "useradd --system --no-create-home steward-web\n"
        "useradd --system --no-create-home steward-listen\n"
    ).check_returncode()


class Reader:
    """Reader who follows the page."""

    def __init__(self, host: PlainHost) -> None:
        self.host = host
        self.cluster = host.cluster
        self.user = next(iter(host.cluster.users))
        self.packages = packages()

    def follow(self, where: str, text: str) -> None:
        """Do what a block instructs."""
        place, *rest = where.split(", ")
        if place == "in slurm.conf":
            self.cluster.configure(*text.splitlines())
        elif place == "in plugstack.conf":
            self.host.type(f"cat >> /etc/slurm/plugstack.conf <<'END'\n{text}END\n")
        elif place in (*HOST, "at the end"):
            if "after a job" in rest:
                self.run_a_job()
            self.type(text, exit_code(where))

    def type(self, text: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        """Type a block; check that its last line ends with the exit code."""
        if self.packages is None:
            lines = text.splitlines(True)
            text = "".join(line for line in lines if not re.search("apt-get.*steward", line))
        done = self.host.type(text, cwd=str(self.packages or "/"))
        print(text, done.stdout, done.stderr)
        assert done.returncode == code, f"{text}\n{done.stdout}\n{done.stderr}"
        return done

    def run_a_job(self) -> None:
        """Run a job with usage reports of every kind."""
        busy = "i=0; while test $i -lt 300000; do i=$((i+1)); done; sleep 1.2"
        script = f"#!/bin/sh\n#SBATCH -n1 -t5 -A physics -o /dev/null\nsrun sh -c '{busy}'\n"
        job = submit_to(self.cluster, script, user=self.user)
        wait_until(lambda: self.books(job) == ["COMPLETED", "COMPLETED", "COMPLETED"], 60)
        wait_until(lambda: self.charged(job) > 0, 60)
        # The doctor reports a restarted worker for a while, which is no fault.
        wait_until(lambda: self.doctor()[0] == 0, 60)

    def books(self, job: int) -> list[str]:
        """Return the states of the job and its steps in Steward's records."""
        done = self.host.type(f"steward sacct -n -P -j {job} -o state")
        print(done.stdout, done.stderr)
        return str(done.stdout).split()

    def charged(self, job: int) -> int:
        """Return the charge of the job, in micro-SU."""
        done = self.host.type(f"steward bank explain {job} --json")
        return int(json.loads(done.stdout)["amount"]) if done.returncode == 0 else 0

    def doctor(self) -> tuple[int, dict[str, str]]:
        done = self.host.type("steward doctor --json")
        found = json.loads(done.stdout)["findings"]
        print([one for one in found if one["status"] in ("wrong", "warning")])
        return done.returncode, {f"{one['check']} {one['object']}": one["status"] for one in found}


def test_the_page_makes_a_working_steward_of_a_plain_slurm(host: PlainHost) -> None:
    reader = Reader(host)
    if reader.packages is None:
        stand_in(host)
    *steps, (removal, _, last) = (one for one in blocks() if not one[0].startswith("not followed"))
    assert removal == "at the end"
    for where, _, text in steps:
        reader.follow(where, text)
    looked_at = ("spool box", "jobcomp", "spank", "submit", "triggers", "ledger", "gate", "nodes")

    def is_well() -> bool:
        code, told = reader.doctor()
        return code == 0 and {told[name] for name in told if name.split()[0] in looked_at} == {"ok"}

    # The agent's first batch, before the first job, was rejected: this host's name is no node's.
    # The doctor reports it until a later batch was accepted and recorded.
    wait_until(is_well, 60)

    # Its users are served, and its bank refuses who has nothing.
    ada, *_ = reader.cluster.users
    listed = host.type("steward archive list -n -P -o jobname", user=ada)
    assert listed.stdout.split() == ["sbatch"]
    asked = ["sbatch", "-A", "chemistry", "-t", "5", "--wrap", "true"]
    refused = reader.cluster.run(asked, user=ada, check=False)
    assert refused.returncode != 0
    assert "chemistry" in refused.stderr

    # So it looks for Steward's own user, too, who is not root.
    own = host.type("setpriv --reuid slurm --regid slurm --init-groups steward doctor --json")
    assert own.returncode == 0, own.stdout + own.stderr

    reader.follow(removal, last)
    assert host.read("/etc/steward/steward.toml")
    assert host.type("steward doctor --only daemon").returncode != 0
