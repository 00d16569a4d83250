"""Connections to the gate: only users that the plugin runs as may connect."""

import logging
import os
import socket
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from harness.forks import fork_child
from harness.gate import PATIENCE_S, running_here, settings_of
from steward.bank.errors import GateUnavailable
from steward.bank.gate.connections import unix_listener
from steward.core.listeners import open_unix_listener
from steward.core.rpc import connect_socket
from steward.core.rpc_server import get_peer_uid

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root is others at will")
STRANGER, SLURM, OTHER = 65534, 4711, 4712


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Make a directory that every user can reach."""
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == os.geteuid() and str(directory) != "/":
            directory.chmod(directory.stat().st_mode | 0o711)
    return tmp_path


_REFUSED = 13


def can_connect(path: str, uid: int) -> bool:
    """Return whether a process of this user can connect."""

    def connect() -> None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        with suppress(PermissionError):
            socket.socket(socket.AF_UNIX).connect(path)
            os._exit(0)
        os._exit(_REFUSED)

    code = os.waitstatus_to_exitcode(os.waitpid(fork_child(connect), 0)[1])
    assert code in {0, _REFUSED}
    return code == 0


@as_root
@pytest.mark.parametrize("uids", [(), (0,), (SLURM,), (SLURM, OTHER, 0)])
def test_only_those_named_can_connect(place: Path, uids: Iterable[int]) -> None:
    path = str(place / "plugin.sock")
    with unix_listener(path, uids):
        found = {uid for uid in (0, STRANGER, SLURM, OTHER) if can_connect(path, uid)}
    assert found == {0, *uids}
    assert not os.path.exists(path)


@as_root
def test_where_it_can_be_nobodys_anybody_may_connect(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", refused)
    monkeypatch.setattr(os, "chown", refused)
    path = str(place / "plugin.sock")
    with unix_listener(path, (SLURM,)):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o666
        assert can_connect(path, STRANGER)
    assert "open to all users" in caplog.text


def test_a_file_that_is_no_socket_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "plugin.sock"
    path.write_text("kept")
    with pytest.raises(OSError, match="is not a socket"):
        open_unix_listener(str(path), 1)
    with pytest.raises(GateUnavailable, match="is not a socket"), unix_listener(str(path)):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["plugin.sock"]
    assert path.read_text() == "kept"


def test_who_is_turned_away_is_told_of_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(tmp_path)

    def uid_of(connection: socket.socket) -> int:
        is_plugins = os.path.basename(settings.gate_socket) in connection.getsockname()
        return STRANGER if is_plugins else get_peer_uid(connection)

    monkeypatch.setattr("steward.bank.gate.server.get_peer_uid", uid_of)
    with running_here(settings) as gate:
        gate.tell()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(100):
                with socket.socket(socket.AF_UNIX) as theirs:
                    theirs.settimeout(PATIENCE_S)
                    connect_socket(theirs, settings.gate_socket)
                    assert theirs.recv(1) == b""
    (record,) = caplog.records
    assert f"uid {STRANGER} may not use the gate" in record.getMessage()
