"""An archive of four jobs, and its commands as a user types them."""

from pathlib import Path
from typing import Any

import pytest

from harness.commands import fill_spool, steward
from steward.cli.app import run


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An archive of four jobs, kept once for all tests that only look."""
    home = tmp_path_factory.mktemp("site")
    return keep(home)


def keep(home: Path) -> str:
    fill_spool(home / "spool")
    root = str(home / "archive")
    words = ["--cluster", "c", "--spool", str(home / "spool"), "--archive", root, "--no-slurm"]
    done = steward("archive", "watch", *words, "--once")
    assert done.returncode == 0, done.stderr
    assert b"Kept 4 new scripts of c" in done.stdout
    return root


@pytest.fixture
def look(
    archive: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Runs a command of the archive here; its output and exit code."""
    monkeypatch.setenv("TZ", "UTC")

    def look(*words: str, code: int = 0) -> str:
        assert run(["archive", *words, "--archive", archive]) == code
        captured = capfdbinary.readouterr()
        look.raw = captured.out  # type: ignore[attr-defined] # for the tests of bytes
        return (captured.out if code == 0 else captured.out + captured.err).decode(
            "utf-8", "backslashreplace"
        )

    return look
