"""The directory of the gate's socket: slurmctld is another user, and must come in."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from harness.gate import account, running, settings_of
from steward.bank.gate import plugin_conf


@pytest.fixture
def private() -> Iterator[None]:
    """A directory as a daemon of root creates it: private to root."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("private")
def test_what_is_made_is_open_whatever_the_umask(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(settings_of(tmp_path), run_dir=f"{tmp_path}/run")
    with running(settings) as running_gate:
        running_gate.tell(account("chem", 9))
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o755


def test_one_that_is_closed_is_left_so_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o700)
    with caplog.at_level(logging.WARNING):
        plugin_conf.make_shared_directory(str(tmp_path))
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    assert f"chmod o+x {tmp_path}" in caplog.text
