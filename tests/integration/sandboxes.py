"""Sandboxes for single tests, and the processes that they leave on the host."""

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from steward.admin.plugins import build
from steward.admin.plugins.build import PluginBuild
from steward.sandbox import Sandbox, SandboxSpec


def need_users(sandbox: Sandbox) -> None:
    if len(sandbox.users) < 2:
        pytest.skip("without root or namespaces there is one user only")


def need_namespaces(sandbox: Sandbox) -> None:
    if not sandbox.plan.contained:
        pytest.skip("namespaces are not permitted here")


def processes_of(directory: str) -> list[str]:
    """Return the command lines of all processes on the host that belong to a sandbox."""
    found = []
    needle = os.fsencode(directory)
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes()
            if needle in words or needle in Path(f"/proc/{name}/environ").read_bytes():
                found.append(words.replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended, or belongs to another user
    return found


@functools.cache
def _compiled(headers: str) -> tuple["tempfile.TemporaryDirectory[str]", PluginBuild]:
    directory = tempfile.TemporaryDirectory(prefix="steward-built-")
    return directory, build.build_plugins(headers, directory.name)


def build_plugins(headers: str, libdir: str) -> PluginBuild:
    """Put the plugins into ``libdir``, compiled once in this process for the same headers.

    Args:
        headers: Directory with slurm/spank.h.
        libdir: Directory of builds for all versions; created if missing.
    """
    directory, built = _compiled(headers)
    shutil.copytree(directory.name, libdir, dirs_exist_ok=True)
    os.chmod(libdir, 0o755)
    return PluginBuild(
        path=os.path.join(libdir, os.path.relpath(built.path, directory.name)),
        version=built.version,
    )


@contextmanager
def passable_directory() -> Iterator[Path]:
    """Make a directory that sandboxes' users can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="steward-test-") as path:
        Path(path).chmod(0o755)
        yield Path(path)


@pytest.fixture
def directory() -> Iterator[str]:
    """Make a directory for a sandbox of this test."""
    with passable_directory() as path:
        yield str(path / "sandbox")


@pytest.fixture
def own(directory: str, slurm_version: str) -> Iterator[Sandbox]:
    """Bring up a small cluster for this test."""
    spec = SandboxSpec(directory=directory, nodes=1, slurm=slurm_version)
    with Sandbox.up(spec) as sandbox:
        yield sandbox
