"""A tree belongs to one Steward at a time: to one state directory, for all its processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import archive
from harness.commands import steward
from harness.site import Site
from steward.archive.errors import ArchiveUnavailable
from steward.archive.files.locks import CLAIM_FILE, TreeClaim
from steward.archive.files.sink import FilesSink
from steward.archive.files.tree import ArchiveTree
from steward.core.config.reader import load_settings


def other_site(tmp_path: Path, root: Path) -> Site:
    return archive.make_site(tmp_path / "other", path=str(root))


def test_a_tree_that_is_kept_is_not_kept_by_another(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    archive.sink_of(site).prepare()
    other = other_site(tmp_path, archive.root_of(site))
    with pytest.raises(ArchiveUnavailable, match=f"state in {site.state}: choose another"):
        archive.sink_of(other).prepare()
    archive.sink_of(site).close()
    archive.sink_of(other).prepare()
    assert (
        archive.root_of(site) / CLAIM_FILE
    ).read_text() == f"{os.uname().nodename} {other.state}\n"
    assert (archive.root_of(site) / CLAIM_FILE).stat().st_mode & 0o777 == 0o600
    archive.sink_of(other).close()


def test_processes_of_one_state_directory_keep_it_together(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    archive.sink_of(site).prepare()
    again = FilesSink(site.settings, "files", site.stores)
    again.prepare()
    archive.sink_of(site).close()
    other = other_site(tmp_path, archive.root_of(site))
    with pytest.raises(ArchiveUnavailable, match="is in use by another Steward"):
        archive.sink_of(other).prepare()
    again.close()
    archive.sink_of(other).prepare()
    archive.sink_of(other).close()


def test_who_was_killed_keeps_nothing(tmp_path: Path) -> None:
    root = tmp_path / "archive"
    root.mkdir()
    hold = (
        "import os, sys; from steward.archive.files.locks import TreeClaim; "
        "k = TreeClaim('/gone', sys.argv[1]); k.acquire(os.open(sys.argv[1], os.O_RDONLY)); "
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        keeper = TreeClaim(str(tmp_path), str(root))
        with pytest.raises(ArchiveUnavailable, match="with its state in /gone"):
            keeper.check()
        process.kill()
        process.wait()
    keeper.check()
    archive.sink_of(archive.make_site(tmp_path)).prepare()


def test_a_root_that_was_replaced_is_kept_anew(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    keeper = TreeClaim(str(tmp_path), str(tmp_path))
    for root in roots:
        root.mkdir()
        fd = os.open(root, os.O_RDONLY)
        keeper.acquire(fd)
        keeper.acquire(fd)
        os.close(fd)
    TreeClaim("/other", str(roots[0])).check()
    with pytest.raises(ArchiveUnavailable):
        TreeClaim("/other", str(roots[1])).check()
    keeper.release()
    TreeClaim("/other", str(roots[1])).check()


@pytest.mark.parametrize("command", ["watch", "consume"])
def test_a_command_does_not_start_in_a_tree_that_is_kept(tmp_path: Path, command: str) -> None:
    site = archive.make_site(tmp_path)
    archive.sink_of(site).prepare()
    (tmp_path / "spool").mkdir()
    words = ["--cluster", "c", "--spool", str(tmp_path / "spool"), "--no-slurm"]
    if command == "consume":
        words = ["--from", "kafka", "--server", "localhost:1"]
    done = steward("archive", command, *words, "--archive", str(archive.root_of(site)))
    assert done.returncode == 1
    assert b"is in use by another Steward" in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert not (archive.root_of(site) / ".steward").exists()
    archive.sink_of(site).close()
    if command == "watch":
        done = steward(
            "archive", command, *words, "--archive", str(archive.root_of(site)), "--once"
        )
        assert done.returncode == 0
        assert load_settings(
            str(archive.root_of(site) / ".steward/steward.toml")
        ).cluster.keys() == {"c"}


def test_a_tree_leaves_no_directory_open(tmp_path: Path) -> None:
    root = tmp_path / "archive"
    (root / "alpha").mkdir(parents=True)
    tree = ArchiveTree(str(root))
    for _ in range(2):
        tree.open_for_reading()
        tree.get_directory_fd("alpha")
        assert len(archive.list_open_files(root)) == 2
    tree.close()
    assert archive.list_open_files(root) == []
    tree.open_for_reading()
    del tree
    assert archive.list_open_files(root) == []
