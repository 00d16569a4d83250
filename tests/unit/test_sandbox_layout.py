"""Directories of sandboxes: safe ones are used, others rejected in one line."""

import os
import shutil
import socket
from pathlib import Path

import pytest

from steward.core.processes import read_start_ticks
from steward.sandbox import (
    Sandbox,
    SandboxError,
    SandboxSpec,
    SlurmNotInstalled,
    layout,
    slurm_install,
)
from steward.sandbox.spec import MARKER, ProcessId, is_alive


def refuse(line: str) -> None:
    pytest.fail(f"nothing was to be said: {line}")


def test_no_slurm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_args, **_kwargs: None)
    with pytest.raises(SlurmNotInstalled, match="install slurmctld, slurmd"):
        slurm_install.find_slurm("", refuse)


def test_an_unknown_version_names_those_that_are_known() -> None:
    with pytest.raises(SlurmNotInstalled, match=r"the versions are 24\.11 and 26\.05"):
        slurm_install.find_slurm("19.05", refuse)


@pytest.mark.skipif(os.geteuid() != 0, reason="without root it fails for that")
def test_a_version_without_debootstrap_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STEWARD_ROOTS", str(tmp_path / "roots"))
    monkeypatch.setattr(shutil, "which", lambda *_args, **_kwargs: None)
    with pytest.raises(SlurmNotInstalled, match="apt-get install debootstrap"):
        slurm_install.ensure_root("24.11", refuse)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has roots")
def test_a_root_that_is_whole_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STEWARD_ROOTS", str(tmp_path))
    (tmp_path / "24.11").mkdir()
    (tmp_path / "24.11" / ".steward-root").touch()
    assert slurm_install.ensure_root("24.11.5", refuse) == f"{tmp_path.resolve()}/24.11"


def test_a_damaged_root_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="is damaged"):
        slurm_install.get_loader_paths(str(tmp_path))


def test_loading_names_the_roots_own_libraries(tmp_path: Path) -> None:
    libraries = tmp_path / "usr/lib/x86_64-linux-gnu"
    (libraries / "slurm-wlm").mkdir(parents=True)
    (tmp_path / "usr/lib64").mkdir()
    (tmp_path / "usr/lib64/ld-linux-x86-64.so.2").touch()
    how = slurm_install.get_loader_paths(str(tmp_path))
    assert how.loader == f"{tmp_path}/usr/lib64/ld-linux-x86-64.so.2"
    assert str(libraries) in how.library_dirs
    assert how.plugins == f"{libraries}/slurm-wlm"


def test_what_is_no_sandbox_is_not_loaded_and_not_removed(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="no sandbox in"):
        Sandbox.load(str(tmp_path))
    layout.remove_directory(str(tmp_path))
    assert tmp_path.exists()
    (tmp_path / MARKER).write_text("{")
    with pytest.raises(SandboxError, match="cannot read"):
        Sandbox.load(str(tmp_path))
    layout.remove_directory(str(tmp_path))
    assert tmp_path.exists()


def test_a_link_is_never_removed_through(tmp_path: Path) -> None:
    (tmp_path / "box/keeper").mkdir(parents=True)
    (tmp_path / "link").symlink_to("box")
    layout.remove_directory(f"{tmp_path}/link")
    assert (tmp_path / "box/keeper").is_dir()
    layout.remove_directory(f"{tmp_path}/box")
    assert not (tmp_path / "box").exists()


def test_what_is_locked_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "keeper").mkdir()
    held = layout.lock_directory(str(tmp_path))
    assert held is not None
    assert layout.lock_directory(str(tmp_path)) is None
    with pytest.raises(SandboxError, match="is still up"):
        layout.remove_directory(str(tmp_path))
    os.close(held)


@pytest.mark.parametrize("name", ["a b", "x" * 100])
def test_a_path_that_sockets_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SandboxError, match="invalid directory"):
        layout.claim_directory(f"{tmp_path}/{name}")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_taken_for_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SandboxError, match="not a directory, or belongs to another user"):
        layout.claim_directory(f"{tmp_path}/file")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(SandboxError, match="not a directory, or belongs to another user"):
        layout.claim_directory(f"{tmp_path}/link")


def test_reserved_ports_are_ours_alone_but_daemons_can_listen() -> None:
    ports, held = layout.reserve_ports(3)
    try:
        assert len(set(ports)) == 3
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("0.0.0.0", ports[0]))
        with socket.socket() as daemon:
            daemon.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            daemon.bind(("0.0.0.0", ports[0]))
            daemon.listen()
    finally:
        for sock in held:
            sock.close()


def test_a_spec_is_checked_before_anything_is_made(tmp_path: Path) -> None:
    spec = SandboxSpec(directory=f"{tmp_path}/box", extra=("A=1\nB=2",))
    with pytest.raises(SandboxError, match="use one line"):
        Sandbox.up(spec)
    assert list(tmp_path.iterdir()) == []


def test_a_process_is_known_by_number_and_start() -> None:
    me = ProcessId(pid=os.getpid(), started=read_start_ticks(os.getpid()))
    assert is_alive(me)
    assert not is_alive(ProcessId(pid=me.pid, started=me.started + 1))
    assert not is_alive(ProcessId(pid=0, started=0))
