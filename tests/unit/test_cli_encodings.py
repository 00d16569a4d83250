"""Output in encodings that lack characters of a job's name."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from harness.commands import steward
from harness.spool import environment_bytes, make_spool, submit

NAME = "né漢"
COMMANDS = (
    ["list", "--name", NAME],
    ["list", "-P", "-n", "-o", "jobname"],
    ["show", "1"],
    ["list", "--json"],
)
CODE = """
import sys
from steward.__main__ import main
for words in {commands}:
    sys.argv = ["steward", "archive", *words, "--archive", {archive!r}]
    assert main() == 0
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\\0")
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make an archive of one job."""
    home = tmp_path_factory.mktemp("encodings")
    name = f"SLURM_JOB_NAME={NAME}".encode()
    submit(make_spool(home / "spool"), 1, environment=environment_bytes(name))
    root = str(home / "archive")
    words = ["--cluster", "c", "--spool", str(home / "spool"), "--archive", root, "--no-slurm"]
    assert steward("archive", "watch", *words, "--once").returncode == 0
    return root


def run_with(code: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        timeout=60,
        check=False,
        env=kept | environment,
    )


@pytest.mark.parametrize(
    ("environment", "encoding", "shown"),
    [
        ({"LC_ALL": "C"}, "utf-8", NAME),
        (
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            "ascii",
            r"n\xe9\u6f22",
        ),
        ({"PYTHONIOENCODING": "ascii"}, "ascii", r"n\xe9\u6f22"),
        ({"PYTHONIOENCODING": "latin-1"}, "latin-1", r"né\u6f22"),
    ],
    ids=["C", "C-without-UTF-8", "ascii", "latin-1"],
)
def test_a_name_is_never_lost_nor_an_error(
    archive: str, environment: dict[str, str], encoding: str, shown: str
) -> None:
    done = run_with(CODE.format(commands=ascii(COMMANDS), archive=archive), **environment)
    assert done.stderr == b""
    table, parsable, facts, document, _ = done.stdout.split(b"\0")
    assert shown in table.decode(encoding)
    assert parsable.decode(encoding) == f"{shown}\n"
    assert shown in facts.decode(encoding)
    assert msgspec.json.decode(document)["jobs"][0]["name"] == NAME


def test_a_closed_output_is_no_error(archive: str) -> None:
    words = [sys.executable, "-m", "steward", "archive", "list", "--archive", archive]
    shell = ["sh", "-c", 'exec "$@" >&-', "sh"]
    done = subprocess.run([*shell, *words], stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_help_can_be_printed(encoding: str) -> None:
    code = "import sys; from steward.__main__ import main; sys.argv[1:] = {}; sys.exit(main())"
    done = run_with(code.format(["archive", "list", "-h"]), PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"i" in done.stdout


def test_a_configuration_is_utf_8_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "steward.toml"
    path.write_text(f'state_dir = "/srv/{NAME}"\n[cluster.c]\nspool = "/s"\n', "utf-8")
    code = "import sys; from steward.__main__ import main; sys.argv[1:] = {}; sys.exit(main())"
    words = ["config", "show", "--config", str(path)]
    done = run_with(code.format(words), PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr
    assert f'"/srv/{NAME}"' in done.stdout.decode()
