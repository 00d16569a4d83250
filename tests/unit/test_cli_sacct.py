"""``steward sacct``: its output, errors and exit codes."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from steward.cli import app
from steward.cli.sacct import execute_sacct
from steward.core.records import UsageLine
from steward.core.sqlite import open_database, transaction
from steward.jobs import database_path
from steward.jobs.lines import put_lines
from steward.jobs.tables import MIGRATIONS

US = 1_795_000_000_000_000
LINE: dict[str, Any] = {
    "cluster": "main",
    "job_id": 7,
    "label": "7",
    "first_submit_us": US,
    "submit_us": US,
    "eligible_us": US,
    "start_us": US,
    "end_us": US + 60_000_000,
    "uid": os.geteuid(),
    "state": "COMPLETED",
    "name": "näme",
    "nodelist": "n1",
    "cpus": 2,
}


@pytest.fixture(autouse=True)
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (tmp_path / "spool").mkdir()
    config = tmp_path / "steward.toml"
    config.write_text(
        f'state_dir = "{state}"\nrun_dir = "{tmp_path}/none"\n'
        f'[cluster.main]\nspool = "{tmp_path}/spool"\ntimezone = "UTC"\n'
    )
    connection = open_database(database_path(str(state)), MIGRATIONS)
    with transaction(connection):
        put_lines(connection, [UsageLine(**LINE), UsageLine(**LINE, step="batch")])
    connection.close()
    monkeypatch.setenv("STEWARD_CONFIG", str(config))
    monkeypatch.setenv("TZ", "UTC")
    for name in ("STEWARD_SOCKET", "SACCT_FORMAT", "SLURM_TIME_FORMAT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute_sacct(["-j", "7", "-P", "-o", "jobid,jobname,start"]) == 0
    assert capsys.readouterr().out == (
        "JobID|JobName|Start\n7|näme|2026-11-18T11:06:40\n7.batch|näme|2026-11-18T11:06:40\n"
    )
    assert execute_sacct(["-j", "7", "-n", "-X", "-o", "jobid%5,jobname%-3,state%4"]) == 0
    assert capsys.readouterr().out == "    7 nä+ COM+ \n"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--nonsense"], 2),
        (["-o", "nope"], 2),
        (["-M", "nope"], 2),
        (["-S", "nope"], 2),
        (["-x", "1"], 2),
        (["-f", "/nonexistent/log"], 1),
        (["-j", "7", "--config", "/nonexistent.toml"], 1),
        (["-B", "-j", "12345"], 1),
    ],
)
def test_an_error_is_one_line_and_nothing_else(
    words: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute_sacct(words) in (code, 2)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("steward: ")
    assert said.err.count("\n") == 1


def test_json_and_yaml_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute_sacct(["-j", "7", "--json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert execute_sacct(["-j", "7", "--yaml"]) == 0
    as_yaml = yaml.safe_load(capsys.readouterr().out)
    assert as_json["jobs"] == as_yaml["jobs"]
    assert as_json["jobs"][0]["name"] == "näme"
    for words in (["-j", "8", "--json"], ["-j", "8", "--yaml"]):
        assert execute_sacct(words) == 0
        assert yaml.safe_load(capsys.readouterr().out)["jobs"] == []


def test_parquet_is_written_whole_or_not_at_all(
    books: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = books / "jobs.parquet"
    assert execute_sacct(["-j", "7", "--parquet", str(path)]) == 0
    assert execute_sacct(["-f", str(path), "-j", "7", "-n", "-P", "-o", "jobid"]) == 0
    assert capsys.readouterr().out.split() == ["7", "7.batch"]
    assert execute_sacct(["-j", "7", "--parquet", str(path)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert execute_sacct(["-j", "7", "--parquet", str(books / "no" / "x.parquet")]) == 1
    assert sorted(one.name for one in books.iterdir() if "parquet" in one.name) == [path.name]


def test_what_it_tells_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for word, begun in (("-e", "Account "), ("-V", "slurm 26.05 (steward "), ("-h", "Usage: ")):
        assert execute_sacct([word]) == 0
        assert capsys.readouterr().out.startswith(begun)
    assert execute_sacct(["-j", "7", "-v", "-n"]) == 0
    assert "sacct: jobs from 1970-01-01T00:00:00 to " in capsys.readouterr().err


def test_it_stands_among_the_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["sacct", "-j", "7", "-n", "-X", "-P", "-o", "jobid"]) == 0
    assert capsys.readouterr().out == "7\n"
    assert app.run(["sacct", "--nonsense"]) == 2


def test_under_slurms_own_name(books: Path) -> None:
    program = Path(__file__).parents[2] / "libexec/steward/bin/sacct"
    words = [str(program), "-j", "7", "-n", "-X", "-P", "-o", "jobid,state"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "7|COMPLETED\n"
