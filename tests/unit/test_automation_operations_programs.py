"""Programs that operations may start."""

import os
from pathlib import Path

import pytest

from steward.automation.errors import OperationForbidden
from steward.automation.operations.programs import (
    ProgramsFileError,
    read_listed_programs,
    require_listed_program,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the list is root's")


def lists(tmp_path: Path, text: str, mode: int = 0o644) -> str:
    path = tmp_path / "programs"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_path_a_line(tmp_path: Path) -> None:
    text = "# ours\n/bin/true\n  /bin/false  # too\n\nrelative\n/with a blank\n"
    assert read_listed_programs(lists(tmp_path, text)) == {
        "/bin/true",
        "/bin/false",
        "/with a blank",
    }


def test_where_there_is_no_list_nothing_is_listed(tmp_path: Path) -> None:
    assert read_listed_programs(str(tmp_path / "nowhere")) == frozenset()
    with pytest.raises(OperationForbidden, match="root must add it to"):
        require_listed_program("/bin/true", str(tmp_path / "nowhere"))


def test_only_what_is_listed(tmp_path: Path) -> None:
    programs = lists(tmp_path, "/bin/true\n/nowhere/program\n/etc\n/etc/passwd\n")
    require_listed_program("/bin/true", programs)
    for path in ("/bin/false", "true", "/bin/../bin/true", "/bin/true ", "/bin/true\n", ""):
        with pytest.raises(OperationForbidden):
            require_listed_program(path, programs)
    for path in ("/nowhere/program", "/etc", "/etc/passwd"):
        with pytest.raises(OperationForbidden, match=r"cannot start|not an executable file"):
            require_listed_program(path, programs)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_list_that_others_can_write_lists_nothing(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ProgramsFileError, match="must belong to root"):
        read_listed_programs(lists(tmp_path, "/bin/true\n", mode))


def test_a_list_of_somebody_elses(tmp_path: Path) -> None:
    path = lists(tmp_path, "/bin/true\n")
    os.chown(path, 65534, 0)
    with pytest.raises(ProgramsFileError, match="must belong to root"):
        read_listed_programs(path)


@pytest.mark.parametrize("change", ["owner", "mode"])
def test_a_list_in_somebody_elses_directory(tmp_path: Path, change: str) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir()
    path = lists(directory, "/bin/true\n")
    if change == "owner":
        os.chown(directory, 65534, 0)
    else:
        directory.chmod(0o777)
    with pytest.raises(ProgramsFileError, match="must belong to root"):
        read_listed_programs(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ProgramsFileError, match="must belong to root"):
        read_listed_programs(str(link))


def test_a_program_that_others_can_write(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o775)
    with pytest.raises(ProgramsFileError, match="writable by root only"):
        require_listed_program(str(program), lists(tmp_path, f"{program}\n"))


def test_a_list_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ProgramsFileError):
        read_listed_programs(str(tmp_path))


@pytest.mark.parametrize("whose", ["program", "directory", "above", "link"])
def test_a_program_that_somebody_else_could_exchange(tmp_path: Path, whose: str) -> None:
    above = tmp_path / "above"
    directory = above / "directory"
    directory.mkdir(parents=True)
    program = directory / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    link = tmp_path / "link"
    link.symlink_to(program)
    programs = lists(tmp_path, f"{program}\n{link}\n")
    require_listed_program(str(program), programs)
    require_listed_program(str(link), programs)
    theirs = {"program": program, "directory": directory, "above": above, "link": link}[whose]
    os.chown(theirs, 65534, 65534, follow_symlinks=False)
    with pytest.raises(ProgramsFileError, match="must belong to root"):
        require_listed_program(str(link), programs)
    if whose != "link":
        with pytest.raises(ProgramsFileError, match="must belong to root"):
            require_listed_program(str(program), programs)
