"""Agent on a full disk: its directory empties again, whatever filled it.

The disk is a tmpfs of two megabytes, as on diskless nodes, so these tests need root.
"""

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.nodes import HearingSite, task
from servers.authority import Authority
from steward.agent import agent
from steward.agent.agent import Place, Spool
from steward.core.events import NODE_GAP


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "small"
    where.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(where)]
    if os.geteuid() != 0 or subprocess.run(words, check=False, timeout=30).returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True, timeout=30)


@pytest.fixture
def hearing(tmp_path: Path) -> Iterator[HearingSite]:
    here = HearingSite(tmp_path, Authority(tmp_path / "ca"))
    yield here
    here.close()


def fill(directory: Path) -> int:
    """Write tasks until the disk is full; return the number of complete lines."""
    number = 0
    descriptor = os.open(directory / "n1.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        while True:
            line = task(number % 1000, s=str(number // 1000))
            if os.write(descriptor, line) == len(line):
                number += 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return number
    finally:
        os.close(descriptor)


def free_of(directory: Path) -> int:
    system = os.statvfs(directory)
    return system.f_bavail * system.f_frsize


@pytest.mark.parametrize("was_there", [True, False])
def test_a_full_directory_empties_again(
    hearing: HearingSite, small: Path, monkeypatch: pytest.MonkeyPatch, was_there: bool
) -> None:
    """It empties even if the disk was full before the agent first ran."""
    if was_there:
        assert hearing.run_agent(small) == 0
    tasks = fill(small)
    assert free_of(small) == 0
    code = hearing.run_agent(small, "--limit", "120")
    assert code == (0 if was_there else 1)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 100.0)
    assert hearing.run_agent(small, "--limit", "120") == 0
    assert free_of(small) > 1 << 20
    found = {
        (event.body.step, one.task)
        for event in hearing.events()
        if event.kind != NODE_GAP
        for one in event.body.tasks
    }
    assert len(found) == tasks
    place = Place(str(small / "n1.place"))
    assert hearing.run_agent(small) == 0
    assert Place(str(small / "n1.place")).id == place.id


def test_it_empties_where_nobody_takes_the_lines(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--spool", str(small), "--to", "127.0.0.1:1", "--node", "n1", "--limit", "0"]
    words += ["--munge-socket", "/nonexistent"]
    assert agent.main(words) == 1
    tasks = fill(small)
    assert agent.main(words) == 1
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 100.0)
    assert agent.main(words) == 1
    assert free_of(small) > 1 << 20
    assert Place(str(small / "n1.place")).dropped >= tasks
    assert "No space" not in capsys.readouterr().err


def test_a_small_file_system_is_not_filled(small: Path) -> None:
    """The default sizes exceed the file system."""
    with (small / "n1.log").open("w") as file:
        file.writelines(f"{number:99d}\n" for number in range(4000))
    spool = Spool(str(small), "n1", 1 << 20, 64 << 20)
    spool.rotate_and_clean()
    assert (small / "n1.log.1").exists()
    with (small / "n1.log").open("w") as file:
        file.writelines(f"{number:99d}\n" for number in range(8000))
    spool.rotate_and_clean()
    spool.drop_excess()
    assert spool.place.dropped == 4000
