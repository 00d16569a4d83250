"""Gate with the Lua plugin, as the documentation installs it, without a cluster name."""

import os
import shutil
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import pytest
from bank_cluster import ACCOUNTS, SHELL, bank_site
from gate_cluster import LUA_SOCKETS, put_lua
from job_submission import wait_until
from sandboxes import passable_directory

from steward.bank.money import MICRO

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.interface,
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
    pytest.mark.skipif(not glob(LUA_SOCKETS), reason="needs LuaSocket"),
]


@pytest.fixture
def directory() -> Iterator[Path]:
    with passable_directory() as path:
        yield path


def test_the_only_cluster_needs_no_name(slurm_version: str, directory: Path) -> None:
    env = put_lua(directory, cluster="")
    lua = (directory / "etc" / "job_submit.lua").read_text()
    assert "steward_gate_cluster" not in lua
    with bank_site(
        slurm_version, job_submit=("lua",), job_submit_lua=lua, controller_env=env
    ) as site:
        site.open({ACCOUNTS[0]: 40 * MICRO})
        site.start()
        wait_until(lambda: site.tries(f"{SHELL}true\n", "--time=9-0").returncode != 0, 60)
        refused = site.tries(f"{SHELL}true\n", "--time=9-0")
        assert "account physics has 40.00 SU available" in refused.stderr
        held = site.submit(f"{SHELL}sleep 100\n", time="40:00:00", hold=True)
        wait_until(lambda: held in {hold.job_id for hold in site.holds()}, 60)
        assert not site.as_user("scontrol", "release", str(held))
        job = site.submit(f"{SHELL}sleep 100\n", time="60")
        assert site.held() > 0
        shown = site.cluster.run(["scontrol", "show", "job", str(job)]).stdout
        assert "steward=1." in shown
