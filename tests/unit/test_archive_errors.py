"""Errors of archive files name the file, or the root if the file has no name."""

import errno
import os
from pathlib import Path

import pytest

from steward.archive.errors import make_archive_unavailable


@pytest.mark.parametrize(
    ("filename", "location"),
    [
        (None, "cannot use archive /srv/archive: "),
        ("", "cannot use archive /srv/archive: "),
        ("7-run.sh", "cannot use archive /srv/archive ('7-run.sh'): "),
        ("/srv/archive/alpha", "cannot use archive /srv/archive/alpha: "),
    ],
)
def test_an_error_names_the_file_or_the_root(filename: str | None, location: str) -> None:
    error = OSError(errno.EIO, os.strerror(errno.EIO), filename)
    assert str(make_archive_unavailable("/srv/archive", error)).startswith(location)


def test_an_error_of_an_open_directory_names_the_root(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(NotADirectoryError) as caught:
            os.listdir(fd)
    finally:
        os.close(fd)
    found = make_archive_unavailable(str(tmp_path), caught.value)
    assert str(found).startswith(f"cannot use archive {tmp_path}: ")
