"""State files of slurmctld: when they show that nothing has changed, and when they cannot."""

import os
import time
from pathlib import Path

import pytest

from steward.slurm import SlurmError
from steward.slurm.settings import ClusterSettings
from steward.slurm.state_files import StateFiles

NAMES = ("job_state", "node_state", "part_state", "resv_state", "trigger_state")


def no_query() -> str:
    raise AssertionError


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    for name in NAMES:
        save(tmp_path / name, age_s=60)
    return tmp_path


def save(path: Path, *, age_s: float) -> None:
    """Replace a file, as slurmctld does."""
    new = path.with_suffix(".new")
    new.touch()
    at = time.time() - age_s
    os.utime(new, (at, at))
    new.rename(path)


def test_the_stamp_changes_with_each_file(spool: Path) -> None:
    files = StateFiles(ClusterSettings(spool=str(spool)), no_query)
    stamps = [files.read_stamp()]
    assert stamps[0] is not None
    assert files.read_stamp() == stamps[0]
    for name in NAMES:
        save(spool / name, age_s=30)
        stamps.append(files.read_stamp())
    assert len(set(stamps)) == len(NAMES) + 1


@pytest.mark.parametrize("age_s", [-60, 0, 5, 500])
def test_a_save_a_moment_ago_may_hide_a_change_and_an_old_one_is_of_another_slurmctld(
    spool: Path, age_s: float
) -> None:
    for name in NAMES:
        save(spool / name, age_s=max(age_s, 60))
    save(spool / "job_state", age_s=age_s)
    assert StateFiles(ClusterSettings(spool=str(spool)), no_query).read_stamp() is None


def test_a_new_slurmctld_has_not_written_all_files(spool: Path) -> None:
    files = StateFiles(ClusterSettings(spool=str(spool)), no_query)
    before = files.read_stamp()
    (spool / "resv_state").unlink()
    assert files.read_stamp() not in (None, before)
    for path in spool.iterdir():
        path.unlink()
    assert files.read_stamp() is None
    spool.rmdir()
    assert files.read_stamp() is None


def test_files_elsewhere_tell_nothing(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise SlurmError("slurmctld does not answer", ("scontrol",))

    assert StateFiles(ClusterSettings(), fail).read_stamp() is None
    assert StateFiles(ClusterSettings(), lambda: str(spool)).read_stamp() is not None
    assert StateFiles(ClusterSettings(slurm_prefix=("chroot",)), no_query).read_stamp() is None
    files = StateFiles(ClusterSettings(spool=str(spool)), no_query)
    assert files.read_stamp() is not None
    monkeypatch.setattr("steward.slurm.state_files.find_network_type", lambda _path: "nfs4")
    assert files.read_stamp() is None
