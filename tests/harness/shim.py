"""The SPANK plugin in a slurmstepd of our own making: ``tests/native/harness.c``."""

import json
import shutil
import subprocess
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from steward.admin.plugins.building import LIBRARY, SOURCES

HARNESS = Path(__file__).parents[1] / "native" / "harness.c"
CC = shutil.which("cc") or ""
HEADERS = Path("/usr/include/slurm/spank.h")

needs_compiler = pytest.mark.skipif(
    not CC or not HEADERS.exists(), reason="needs a C compiler and Slurm's headers"
)

Run = Callable[..., str]


def compile_harness(directory: Path, *flags: str) -> Path:
    """The harness and the plugin as one program."""
    target = directory / "harness"
    native = resources.files("steward.native")
    sources = [str(HARNESS), *(str(native / name) for name in SOURCES[LIBRARY])]
    words = [CC, "-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", *flags, f"-I{native}"]
    words += ["-rdynamic", "-pthread", "-Wl,--wrap=open", "-Wl,--wrap=fopen"]
    subprocess.run([*words, "-o", str(target), *sources], check=True, timeout=100)
    return target


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_harness(
        tmp_path_factory.mktemp("asan"),
        *("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    )


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_harness(tmp_path_factory.mktemp("plain"), "-O2")


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    directory = tmp_path / "spool"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def run(sanitized: Path, spool: Path) -> Run:
    """Give a slurmstepd orders; returns what it says."""

    def call(*orders: str, program: str = "", title: str = "slurmstepd: [5.0]") -> str:
        lines = [f"node {b'n1'.hex()}", "item job 5", "item uid 1001", "item gid 1002", *orders]
        text = "".join(line.replace("SPOOL", f"spool={spool}") + "\n" for line in lines)
        result = subprocess.run(
            [title],
            executable=program or str(sanitized),
            input=text,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        return result.stdout

    return call


def lines_of(spool: Path, node: str = "n1") -> list[dict[str, Any]]:
    data = (spool / f"{node}.log").read_bytes()
    assert data.endswith(b"\n")
    found = data.splitlines(keepends=True)
    assert all(len(line) <= 4096 for line in found)
    return [json.loads(line) for line in found if line.strip()]
