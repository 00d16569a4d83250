"""Files of root: root never writes in a directory that other users could have prepared."""

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from steward.admin.backup.archive import BackupUnavailable, create_backup_file
from steward.admin.plugins.installation import make_directory, replace_if_changed
from steward.archive.errors import ArchiveError
from steward.archive.files.tree import ArchiveTree
from steward.cli.export_target import ExportError, PartialFile
from steward.core.files import UnsafePath, open_directory, replace_file

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root is led by others' links")
MALLORY = 54321


@pytest.fixture
def place() -> Iterator[Path]:
    """Make a directory of root below /tmp, next to a victim's file."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        directory = Path(name)
        (directory / "victim").write_bytes(b"precious")
        (directory / "place").mkdir()
        yield directory / "place"


def metrics(path: Path) -> None:
    with replace_file(str(path), 0o640) as file:
        file.write(b"figures")


def backup(path: Path) -> None:
    with create_backup_file(str(path)):
        pass


def plugin(path: Path) -> None:
    make_directory(str(path.parent), 0o755)
    replace_if_changed(str(path), b"library", 0o755)


def export(path: Path) -> None:
    unfinished = PartialFile(str(path))
    with unfinished.file:
        unfinished.finish()


def archive(path: Path) -> None:
    tree = ArchiveTree(str(path.parent))
    try:
        tree.open("")
    finally:
        tree.close()


WRITES = (metrics, backup, plugin, export)
ERRORS = (OSError, BackupUnavailable, ExportError, ArchiveError)


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_is_whole_and_ours(place: Path, write: Callable[[Path], None]) -> None:
    write(place / "file")
    assert os.listdir(place) == ["file"]
    found = (place / "file").stat()
    assert found.st_uid == 0
    assert not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
def test_what_somebody_else_has_prepared_is_not_written_to(
    place: Path, write: Callable[[Path], None], mode: int
) -> None:
    victim = place.parent / "victim"
    for number in range(os.getpid() - 5, os.getpid() + 5):
        (place / f"file.{number}").symlink_to(victim)
    for name in ("file.partial", "file.part", "file.new"):
        (place / name).symlink_to(victim)
    os.chown(place, MALLORY, MALLORY)
    place.chmod(mode)
    with pytest.raises(ERRORS):
        write(place / "file")
    assert victim.read_bytes() == b"precious"
    assert not (place / "file").exists()


@pytest.mark.parametrize("write", [*WRITES, archive])
def test_no_link_on_the_way_is_followed(place: Path, write: Callable[[Path], None]) -> None:
    (place / "link").symlink_to(place.parent)
    before = sorted(os.listdir(place.parent))
    for path in (place / "link" / "file", place / "link" / "place" / "file"):
        with pytest.raises(ERRORS, match="symbolic link"):
            write(path)
    assert sorted(os.listdir(place.parent)) == before
    assert os.listdir(place) == ["link"]


@pytest.mark.parametrize(
    ("mode", "gid", "is_safe"),
    [
        (0o755, 0, True),
        (0o2750, MALLORY, True),
        (0o775, 0, True),
        (0o775, MALLORY, False),
        (0o757, 0, False),
        (0o777, 0, False),
        (0o1777, 0, True),
    ],
)
def test_a_directory_that_others_write_to_has_to_be_sticky(
    place: Path, mode: int, gid: int, *, is_safe: bool
) -> None:
    os.chown(place, 0, gid)
    place.chmod(mode)
    if is_safe:
        metrics(place / "file")
        assert (place / "file").read_bytes() == b"figures"
    else:
        with pytest.raises(UnsafePath, match="chmod go-w"):
            metrics(place / "file")
        assert os.listdir(place) == []


def test_a_link_under_the_files_name_is_replaced(place: Path) -> None:
    victim = place.parent / "victim"
    (place / "file").symlink_to(victim)
    metrics(place / "file")
    assert victim.read_bytes() == b"precious"
    assert not (place / "file").is_symlink()
    assert stat.S_IMODE((place / "file").stat().st_mode) == 0o640


def test_nothing_is_left_of_what_failed(place: Path) -> None:
    def fail() -> None:
        with replace_file(str(place / "file"), 0o600) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert os.listdir(place) == []


def test_a_directory_is_made_where_root_may_make_it(place: Path) -> None:
    os.close(open_directory(str(place / "a" / "b"), create_mode=0o700))
    assert stat.S_IMODE((place / "a" / "b").stat().st_mode) == 0o700
    os.chown(place, MALLORY, MALLORY)
    with pytest.raises(UnsafePath, match="belongs to uid"):
        open_directory(str(place / "c" / "d"), create_mode=0o700)
    os.close(open_directory(str(place / "e"), create_mode=0o700, trusted=(MALLORY,)))


def test_an_archive_that_everybody_writes_to_is_refused(place: Path) -> None:
    place.chmod(0o777)
    with pytest.raises(UnsafePath, match="everybody"):
        archive(place / "file")
    assert os.listdir(place) == []


def test_a_name_of_255_bytes_is_written(place: Path) -> None:
    metrics(place / ("é" * 127 + "x"))
    assert len(os.listdir(place)) == 1
