"""The report about a gate that slurmctld cannot reach names the command that fixes it."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from steward.admin.plugins.job_submit import (
    DEFAULT_GATE_CONF,
    check_reach,
    find_gate_conf,
    find_gate_socket,
)

NOBODY = pwd.getpwnam("nobody")
SHOWN = {"SlurmUser": f"nobody({NOBODY.pw_uid})"}


@pytest.fixture
def run() -> Iterator[Path]:
    """Make a directory that everybody may pass, and below it one with the plugin's file."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    place = directory / "steward"
    place.mkdir(mode=0o755)
    (place / "gate.conf").write_text(f"# head\nsocket {place}/gate.sock\npolicy allow\n")
    yield place
    shutil.rmtree(directory)


def check(place: Path) -> list[str]:
    return check_reach(SHOWN, str(place / "gate.conf"))


def listen(place: Path, mode: int) -> None:
    """Open a socket, as the gate does."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(place / "gate.sock"))
    os.chmod(place / "gate.sock", mode)


def test_an_open_way_is_none_to_tell_of(run: Path) -> None:
    assert check(run) == []
    listen(run, 0o666)
    assert check(run) == []
    assert find_gate_socket(str(run / "gate.conf")) == f"{run}/gate.sock"


def test_a_closed_directory_is_told_once_with_what_opens_it(run: Path) -> None:
    run.chmod(0o700)
    (wrong,) = check(run)
    assert "SlurmUser nobody cannot enter" in wrong
    mend = wrong.rpartition(": ")[2]
    assert mend == f"chmod o+x {run}"
    subprocess.run(mend.split(), check=True)
    assert check(run) == []


def test_a_directory_further_up_counts_too(run: Path) -> None:
    run.parent.chmod(0o700)
    assert f"chmod o+x {run.parent}" in check(run)[0]


def test_who_owns_the_directory_gets_through(run: Path) -> None:
    run.chmod(0o700)
    owner = pwd.getpwuid(os.geteuid())
    assert check_reach({"SlurmUser": f"{owner.pw_name}({owner.pw_uid})"}, f"{run}/gate.conf") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask what another may")
def test_a_socket_that_does_not_let_slurm_user_in_is_told(run: Path) -> None:
    listen(run, 0o600)
    (line,) = check(run)
    assert 'plugin_users = ["nobody"]' in line


def test_nothing_is_said_where_slurm_user_is_not_known_or_root(run: Path) -> None:
    run.chmod(0o700)
    assert check_reach({}, f"{run}/gate.conf") == []
    assert check_reach({"SlurmUser": "root(0)"}, f"{run}/gate.conf") == []


def test_the_file_is_the_one_that_lua_or_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STEWARD_GATE_CONF", raising=False)
    lua = {"JobSubmitPlugins": "lua", "SLURM_CONF": str(tmp_path / "slurm.conf")}
    assert find_gate_conf(lua) == DEFAULT_GATE_CONF
    (tmp_path / "job_submit.lua").write_text('-- site\nsteward_gate_conf = "/run/here/gate.conf"\n')
    assert find_gate_conf(lua) == "/run/here/gate.conf"
    assert find_gate_conf({"JobSubmitPlugins": "lua"}, str(tmp_path)) == "/run/here/gate.conf"
    assert find_gate_conf({**lua, "JobSubmitPlugins": "steward"}) == DEFAULT_GATE_CONF
    monkeypatch.setenv("STEWARD_GATE_CONF", "/run/there/gate.conf")
    assert find_gate_conf({**lua, "JobSubmitPlugins": "steward"}) == "/run/there/gate.conf"
