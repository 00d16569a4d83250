"""Exports of the archive: to directories, tars and pipes."""

import hashlib
import io
import stat
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from harness.commands import SCRIPTS, archive, look

__all__ = ["archive", "look"]


@pytest.mark.parametrize("name", ["all.tar", "all.tgz"])
def test_an_export_in_a_tar_is_private(look: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    look("export", str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "File exists" in look("export", str(path), code=1)


def test_export_to_a_directory(look: Any, tmp_path: Path) -> None:
    target = tmp_path / "out"
    look("export", str(target))
    lines = [
        msgspec.json.decode(line) for line in (target / "MANIFEST.jsonl").read_bytes().splitlines()
    ]
    assert len(lines) == 8
    for line in lines:
        path = target / line["path"]
        data = path.read_bytes()
        assert hashlib.sha256(data).hexdigest() == line["sha256"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    scripts = {line["job"]["job_id"]: line for line in lines if line["path"].endswith(".sh")}
    assert (target / scripts[103]["path"]).read_bytes() == SCRIPTS[103]
    assert "File exists" in look("export", str(target), code=1)


@pytest.mark.parametrize("name", ["out.tar", "out.tar.gz", "out.tar.xz", "out.tgz"])
def test_export_to_a_tar(look: Any, tmp_path: Path, name: str) -> None:
    target = str(tmp_path / name)
    look("export", target, "-j", "101", "--no-env")
    with tarfile.open(target) as tar:
        names = tar.getnames()
        assert len(names) == 2
        member = tar.extractfile(names[0])
        assert member is not None
        assert member.read() == SCRIPTS[101]


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "tar.xz", "tar.zst"])
def test_the_same_export_is_the_same_bytes(look: Any, tmp_path: Path, kind: str) -> None:
    first, second = tmp_path / f"first.{kind}", tmp_path / "second"
    look("export", str(first))
    look("export", str(second), "--format", kind)
    assert first.read_bytes() == second.read_bytes()
    data = first.read_bytes()
    if kind == "tar.zst":
        data = zstandard.ZstdDecompressor().stream_reader(data).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [name.rpartition("/")[2] for name in tar.getnames()[-1:]] == ["MANIFEST.jsonl"]
        assert {(member.uid, member.uname, member.mode) for member in tar} == {(0, "", 0o600)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.tar", "dir"), ("a.tar", "tar.gz"), ("a.tgz", "tar"), ("a.zst", "tar.gz"), ("a.gz", "tar")],
)
def test_a_format_that_is_not_the_names_is_an_error(
    look: Any, tmp_path: Path, name: str, kind: str
) -> None:
    said = look("export", str(tmp_path / name), "--format", kind, code=2)
    assert f"--format is {kind}" in said
    assert not list(tmp_path.iterdir())


def test_a_format_is_one_that_there_is(look: Any, tmp_path: Path) -> None:
    look("export", str(tmp_path / "all.zst"), "--format", "tar.zst", "-j", "101")
    assert (tmp_path / "all.zst").read_bytes()[:4] == b"\x28\xb5\x2f\xfd"
    assert "use dir, tar" in look("export", str(tmp_path / "x"), "--format", "zip", code=2)
    assert "cannot write a directory" in look("export", "-", "--format", "dir", code=2)


def test_export_to_a_pipe(look: Any) -> None:
    look("export", "-", "-j", "101", "--no-env")
    assert SCRIPTS[101] in look.raw
    assert look.raw[257:262] == b"ustar"


@pytest.mark.parametrize("name", ["a.zip", "a.tar.bz2", "a.gz", "A.TAR.GZ", "a.tar.Z"])
def test_an_export_makes_no_directory_called_like_a_file(
    look: Any, tmp_path: Path, name: str
) -> None:
    assert "--format" in look("export", str(tmp_path / name), code=2)
    assert not list(tmp_path.iterdir())
    look("export", str(tmp_path / name), "--format", "dir", "--no-env")
    assert (tmp_path / name / "MANIFEST.jsonl").exists()
