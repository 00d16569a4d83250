"""Exports appear under their name only when complete, and can be repeated."""

import errno
import fcntl
import io
import os
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.archive.export import ExportFile
from steward.archive.requests import JobLine
from steward.cli.export_target import FORMATS, ExportError, check_path, open_target

AT = datetime(2026, 3, 5, 12, 0, tzinfo=UTC)
TARS = [kind for kind in FORMATS if kind != "dir"]


def file(number: int = 1, data: bytes = b"#!/bin/sh\n") -> ExportFile:
    return ExportFile(
        path=f"alpha/ada/{number}-run.sh",
        data=data,
        modified=AT,
        job=JobLine(cluster="alpha", job=str(number), job_id=number),
        script_key=f"script:{number}:1",
        sha256="00",
    )


def export(path: Path, *files: ExportFile, ending: BaseException | None = None) -> None:
    with open_target(str(path)) as target:
        for one in files:
            target.add(one)
        if ending is not None:
            raise ending


@pytest.mark.parametrize("kind", TARS)
@pytest.mark.parametrize("ending", [KeyboardInterrupt(), ExportError("gone"), OSError("x")])
def test_a_tar_that_is_cut_short_is_not_there(
    tmp_path: Path, kind: str, ending: BaseException
) -> None:
    path = tmp_path / f"all.{kind}"
    with pytest.raises((type(ending), ExportError)):
        export(path, *map(file, range(50)), ending=ending)
    assert os.listdir(tmp_path) == []
    export(path, file())
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("kind", TARS)
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ExportError, match="No space left"):
        export(tmp_path / f"all.{kind}", file())
    assert os.listdir(tmp_path) == []


def test_what_a_kill_left_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "all.tar"
    (tmp_path / "all.tar.part").write_bytes(b"x" * 100_000)
    export(path, file())
    assert os.listdir(tmp_path) == ["all.tar"]
    with tarfile.open(path) as tar:
        assert tar.getnames() == ["alpha/ada/1-run.sh", "MANIFEST.jsonl"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["all.tar", "all"])
def test_two_exports_to_one_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with open_target(str(path)) as first:
        first.add(file(1))
        with pytest.raises(ExportError, match="another export"):
            export(path, file(2))
        first.add(file(3))
    with pytest.raises(ExportError, match="File exists"):
        export(path, file(2))
    assert len(os.listdir(tmp_path)) == 1


def test_a_name_that_was_taken_meanwhile_is_left_to_who_took_it(tmp_path: Path) -> None:
    path = tmp_path / "all.tar"

    def late() -> None:
        with open_target(str(path)) as target:
            target.add(file())
            path.write_bytes(b"mine")

    with pytest.raises(ExportError, match="File exists"):
        late()
    assert os.listdir(tmp_path) == ["all.tar"]
    assert path.read_bytes() == b"mine"


def test_what_lies_in_wait_is_not_written_to(tmp_path: Path) -> None:
    secret, part = tmp_path / "secret", tmp_path / "all.tar.part"
    secret.write_bytes(b"mine")
    for lie in (part.symlink_to, part.hardlink_to):
        lie(secret)
        with pytest.raises(ExportError):
            export(tmp_path / "all.tar", file())
        part.unlink()
    os.mkfifo(part)
    with pytest.raises(ExportError):
        export(tmp_path / "all.tar", file())
    assert secret.read_bytes() == b"mine"


def test_a_directory_says_what_is_whole_and_is_completed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        export(out, file(1), file(2), ending=KeyboardInterrupt())
    assert "is incomplete: MANIFEST.jsonl.part lists its files" in capsys.readouterr().err
    assert not (out / "MANIFEST.jsonl").exists()
    lines = (out / "MANIFEST.jsonl.part").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["path"] for line in lines] == [file(1).path, file(2).path]
    (out / "alpha/ada/3-run.sh.part").write_bytes(b"cut sh")
    before = (out / file(1).path).stat()
    export(out, *map(file, (1, 2, 3)))
    assert len((out / "MANIFEST.jsonl").read_bytes().splitlines()) == 3
    assert sorted(os.listdir(out / "alpha/ada")) == ["1-run.sh", "2-run.sh", "3-run.sh"]
    assert (out / file(1).path).stat().st_ino == before.st_ino
    assert sorted(os.listdir(out)) == ["MANIFEST.jsonl", "alpha"]
    assert capsys.readouterr().err == ""


def test_a_file_of_others_in_a_directory_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "out" / file().path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"somebody's\n")
    with pytest.raises(ExportError, match="File exists"):
        export(tmp_path / "out", file())
    assert path.read_bytes() == b"somebody's\n"
    assert not (tmp_path / "out/MANIFEST.jsonl").exists()


def test_a_pipe_that_is_cut_short_does_not_end_like_a_tar(monkeypatch: pytest.MonkeyPatch) -> None:
    def piped(ending: BaseException | None) -> bytes:
        class Out:
            buffer = io.BytesIO()

        monkeypatch.setattr("sys.stdout", Out)
        if ending is None:
            export(Path("-"), file())
        else:
            with pytest.raises(KeyboardInterrupt):
                export(Path("-"), file(), ending=ending)
        return Out.buffer.getvalue()

    assert piped(None).endswith(bytes(1024))
    cut = piped(KeyboardInterrupt())
    assert not cut.endswith(bytes(1024))
    assert b"MANIFEST.jsonl" not in cut


def test_where_the_lock_is_held_by_a_process_that_ended(tmp_path: Path) -> None:
    part = tmp_path / "all.tar.part"
    with part.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ExportError, match="another export"):
            export(tmp_path / "all.tar", file())
    export(tmp_path / "all.tar", file())


@given(st.text(max_size=20))
def test_no_path_leads_out(path: str) -> None:
    try:
        parts = check_path(path).split("/")
    except ExportError:
        return
    assert all(part not in {"", ".", ".."} for part in parts)
    assert not path.startswith("/")


def test_the_same_files_are_the_same_bytes(tmp_path: Path) -> None:
    def once(name: str) -> Any:
        export(tmp_path / name, file(1), file(2))
        return (tmp_path / name).read_bytes()

    assert once("a.tar.gz") == once("b.tar.gz")
