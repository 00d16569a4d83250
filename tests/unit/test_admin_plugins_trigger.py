"""Installation of the trigger helper: remaining settings, owner of the secret, and the socket."""

import os
import pwd
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from steward.admin.plugins.errors import PluginInstallError
from steward.admin.plugins.trigger import check_trigger, install_trigger
from steward.capture.settings import SensorSettings

NOBODY = pwd.getpwnam("nobody")
CONFIG = {"SlurmUser": f"nobody({NOBODY.pw_uid})"}

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """Make a directory that every user can enter."""
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def test_paths_other_than_the_defaults_are_to_be_set(tmp_path: Path) -> None:
    helper, secret = str(tmp_path / "helper"), str(tmp_path / "secret")
    done = install_trigger(helper, secret)
    assert done.written_paths == (helper, secret)
    (line,) = done.remaining
    assert line.endswith(f'enabled = true, helper = "{helper}", secret_file = "{secret}"')
    assert SensorSettings().helper not in line


def test_a_path_that_cannot_be_made_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PluginInstallError, match=r"file.*: Not a directory"):
        install_trigger(f"{tmp_path}/file/helper", f"{tmp_path}/secret")


@only_root
def test_the_secret_is_slurm_users_alone(open_directory: Path) -> None:
    helper, secret = open_directory / "helper", open_directory / "secret"
    install_trigger(str(helper), str(secret), user="nobody")
    status = secret.stat()
    assert (status.st_uid, status.st_gid) == (NOBODY.pw_uid, NOBODY.pw_gid)
    assert status.st_mode & 0o777 == 0o600
    away = str(open_directory / "away")
    assert check_trigger(CONFIG, str(helper), str(secret), away) == []


@only_root
def test_a_socket_that_slurm_user_cannot_reach_is_a_fault(open_directory: Path) -> None:
    helper, secret = str(open_directory / "helper"), str(open_directory / "secret")
    install_trigger(helper, secret, user="nobody")
    path = open_directory / "trigger.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        assert check_trigger(CONFIG, helper, secret, str(path)) == [
            f"SlurmUser nobody cannot reach {path}: give the user access to its directories"
        ]
        path.chmod(0o666)
        assert check_trigger(CONFIG, helper, secret, str(path)) == []
