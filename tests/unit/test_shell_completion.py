"""Shell completion: bash runs its script, and the scripts for zsh and fish are checked."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from packages import completion
from packages.shapes import Shape, below, whole

Ask = Callable[..., list[str]]
_ASK = """
source "$1"
shift
compopt() { :; }
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_steward
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def command() -> Shape:
    return whole()


@pytest.fixture(scope="module")
def bash_file(command: Shape, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "steward"
    path.write_text(completion.bash(command))
    return path


@pytest.fixture
def ask(bash_file: Path) -> Ask:
    def call(*words: str) -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", _ASK, "bash", bash_file, *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stderr == ""
        return done.stdout.split()

    return call


CASES = [
    (("steward", "arch"), ["archive"]),
    (("steward", "--debug", "arch"), ["archive"]),
    (("steward", "archive", "li"), ["list"]),
    (("steward", "archive", "list", "--sta"), ["--state", "--starttime"]),
    (("steward", "archive", "list", "--state", ""), []),
    (("steward", "archive", "list", "--state", "=", ""), []),
    (("steward", "bank", "account", "crea"), ["create"]),
    (("steward", "bank", "allocation", "create", "x", "--rollover", ""), ["none", "next"]),
    (("steward", "bank", "allocation", "create", "x", "--rollover", "=", "ne"), ["next"]),
    (("steward", "archive", "import", "job"), ["job_archive"]),
    # A group that does something by itself has options, and their values are no commands.
    (("steward", "events", "--config", "archive", "ta"), ["tail"]),
    (("steward", "events", "--config", "=", "archive", "ta"), ["tail"]),
    (("steward", "sacct", "--starttime", "archive", "--units", ""), ["K", "M", "G", "T", "P"]),
    (("steward", "sacct", "--start"), ["--starttime"]),
    (("steward", "sacct", "-o", "jobid,elapsedr"), ["jobid,elapsedraw"]),
    (("steward", "nonsense", ""), list[str]()),
]


@pytest.mark.parametrize(("words", "wanted"), CASES, ids=" ".join)
def test_bash_completes(ask: Ask, words: tuple[str, ...], wanted: list[str]) -> None:
    found = ask(*words)
    if words[-2:] == ("nonsense", ""):
        assert "archive" in found  # what is no command may yet become one
        return
    assert sorted(found) == sorted(wanted)


def test_bash_completes_files_and_directories(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "some.toml").touch()
    (tmp_path / "somewhere").mkdir()
    start = str(tmp_path / "some")
    assert sorted(ask("steward", "config", "check", "--config", start)) == [
        f"{tmp_path}/some.toml",
        f"{tmp_path}/somewhere",
    ]
    assert ask("steward", "archive", "list", "--archive", start) == [f"{tmp_path}/somewhere"]


def test_every_command_and_option_is_in_each_file(command: Shape) -> None:
    files = (completion.bash(command), completion.zsh(command), completion.fish(command))
    for shape in below(command):
        for text in files:
            assert shape.path[-1] in text
        for option in shape.options:
            for name in option.names:
                assert name in files[0]
                assert f"*{name}" in files[1]
                fishs = f"-l {name[2:]} " if name.startswith("--") else f"-s {name[1:]} "
                assert fishs in files[2]


@pytest.mark.parametrize(("shell", "name"), [("zsh", "_steward"), ("fish", "steward.fish")])
def test_other_shells_can_read_theirs(
    command: Shape, tmp_path: Path, shell: str, name: str
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    path = tmp_path / name
    path.write_text(completion.zsh(command) if shell == "zsh" else completion.fish(command))
    subprocess.run([shell, "-n", path], check=True, timeout=60)


def test_fish_completes(command: Shape, tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not here")
    path = tmp_path / "steward.fish"
    path.write_text(completion.fish(command))
    asked = {
        "steward archive li": ["list"],
        "steward events --config archive ta": ["tail"],
        "steward sacct --units ": ["G", "K", "M", "P", "T"],
        "steward archive show --sb": ["--sbatch"],
    }
    for line, wanted in asked.items():
        done = subprocess.run(
            ["fish", "-N", "-c", f"source {path}; complete -C {line!r}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert [row.partition("\t")[0] for row in done.stdout.splitlines()] == wanted, line
