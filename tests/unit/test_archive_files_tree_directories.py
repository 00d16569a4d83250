"""Directories that stay open between batches: they are those at their paths, as permitted."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness import archive
from harness.archive import DAY
from harness.site import Site
from steward.archive.files.permissions import FileReaders, read_acl_readers
from steward.archive.files.tree import ArchiveTree, DirectoryAccess
from steward.core.consumers import Rejected


def feed_job(site: Site, job_id: int) -> None:
    script = archive.script(site, job_id, b"echo %d" % job_id)
    site.feed(script, archive.identity(script))


def feed_users(site: Site, first: int, users: int) -> None:
    """Feed a job of each user in one batch."""
    scripts = [archive.script(site, first + number) for number in range(users)]
    jobs = [
        archive.identity(script, 5000 + number, f"user{number}")
        for number, script in enumerate(scripts)
    ]
    site.feed(*scripts, *jobs)


@contextmanager
def opened_directories(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the directories that are opened."""
    opened: list[str] = []
    real_open = os.open

    def record_open(path: str, flags: int, *arguments: int, **options: int) -> int:
        if flags & os.O_DIRECTORY:
            opened.append(path)
        return real_open(path, flags, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", record_open)
        yield opened


def test_a_directory_that_was_moved_away_is_made_again(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    feed_job(site, 1)
    user = archive.root_of(site) / "alpha/ada"
    user.rename(tmp_path / "moved")
    feed_job(site, 2)
    assert archive.files(site)[f"{DAY}/2-run.sh"] == b"echo 2"
    assert (user / "2026/03/01/MANIFEST.jsonl").read_bytes().count(b"\n") == 2
    moved = tmp_path / "moved/2026/03/01"
    assert {path.name for path in moved.iterdir()} == {"1-run.sh", "1-run.env", "MANIFEST.jsonl"}


def test_a_link_in_place_of_an_open_directory_is_refused(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    feed_job(site, 1)
    user = archive.root_of(site) / "alpha/ada"
    user.rename(tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    user.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Rejected, match="is not a directory"):
        feed_job(site, 2)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_an_open_directory_is_shut_again_if_its_mode_changed(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    feed_job(site, 1)
    day = archive.root_of(site) / DAY
    os.chmod(day, 0o751)
    feed_job(site, 2)
    assert not day.stat().st_mode & 0o007
    fd = os.open(day, os.O_RDONLY)
    assert read_acl_readers(fd) == FileReaders(4001)
    os.close(fd)


@pytest.mark.parametrize(("reopen_s", "is_opened"), [(3600.0, False), (0.0, True)])
def test_directories_are_opened_anew_after_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reopen_s: float, is_opened: bool
) -> None:
    monkeypatch.setattr("steward.archive.files.tree.REOPEN_S", reopen_s)
    site = archive.make_site(tmp_path)
    feed_job(site, 1)
    feed_job(site, 2)
    with opened_directories(monkeypatch) as opened:
        feed_job(site, 3)
    assert ("01" in opened) == is_opened


def test_directories_of_many_users_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = archive.make_site(tmp_path)
    feed_users(site, 100, 60)
    feed_users(site, 200, 60)
    with opened_directories(monkeypatch) as opened:
        feed_users(site, 300, 60)
    assert opened == []


def test_a_descriptor_stays_open_in_its_batch(tmp_path: Path) -> None:
    tree = ArchiveTree(str(tmp_path / "archive"))
    marker = tree.open("")
    tree.get_directory_fd("alpha/ada", DirectoryAccess())
    tree.open(marker)
    fd = tree.get_directory_fd("alpha/ada")
    access = DirectoryAccess(uid=4001, user_depth=2)
    assert tree.get_directory_fd("alpha/ada", access) == fd
    assert read_acl_readers(fd) == FileReaders(4001)
    tree.close()


def test_a_full_cache_keeps_the_descriptors_of_a_batch(tmp_path: Path) -> None:
    tree = ArchiveTree(str(tmp_path / "archive"))
    marker = tree.open("")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        tree.get_directory_fd(f"alpha/user{number}", DirectoryAccess())
    tree.open(marker)
    month = tree.get_directory_fd("alpha/ada/2026/11", DirectoryAccess())
    file_id = os.fstat(month).st_ino
    for day in ("28", "29"):
        tree.get_directory_fd(f"alpha/ada/2026/11/{day}", DirectoryAccess())
    assert os.fstat(month).st_ino == file_id
    assert len(os.listdir("/proc/self/fd")) - before < 150
    tree.close()
