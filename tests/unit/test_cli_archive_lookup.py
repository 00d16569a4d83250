"""Commands of the archive on a real archive: on terminals, in pipes and for programs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.commands import ENVIRONMENTS, HOSTILE, SCRIPTS, archive, keep, look, on_terminal
from steward.cli import commands, output
from steward.cli.app import run
from steward.core.journal import Journal

__all__ = ["archive", "look"]


def test_list_is_a_table_newest_first(look: Any) -> None:
    lines = look("list").splitlines()
    assert lines[0].split()[:2] == ["JobID", "JobName"]
    assert [line.split()[0] for line in lines[1:]] == ["104", "103", "102", "101"]


def test_list_for_programs(look: Any) -> None:
    lines = look("list", "-P", "-n", "-j", "101,102", "-o", "jobid,jobname,script").splitlines()
    size = {job: len(SCRIPTS[job]) for job in SCRIPTS}
    assert lines == [
        rf"102|evil\x1b[31m\n999\x7croot|{size[102]}",
        f"101|first|{size[101]}",
    ]


def test_list_as_json_is_documented_and_whole(look: Any) -> None:
    answer = msgspec.json.decode(look("list", "--json"))
    assert answer["version"] == 1
    assert answer["default_days"] == 7
    assert {job["name"] for job in answer["jobs"]} == {"first", HOSTILE, "third", "fourth"}


def test_list_filters(look: Any) -> None:
    assert look("list", "-n", "--name", "f*").count("\n") == 2
    assert look("list", "-n", "-S", "now+1hour") == ""
    assert look("list", "-n", "--limit", "1").split()[0] == "104"


@pytest.mark.parametrize(("words", "rows"), [([], 2), (["--limit", "0"], 4), (["-L", "3"], 3)])
def test_a_limit_of_none_lists_all_on_a_terminal_too(
    archive: str,
    words: list[str],
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setattr(commands, "TERMINAL_ROWS", 2)
    assert run(["archive", "list", "-P", "-n", "--archive", archive, *words]) == 0
    assert capsys.readouterr().out.count("\n") == rows


def test_a_wrong_time_is_one_line(look: Any) -> None:
    assert "invalid time 'sometime'" in look("list", "-S", "sometime", code=2)


def test_a_person_is_told_of_the_seven_days(archive: str) -> None:
    seen = on_terminal("archive", "list", "--archive", archive)
    assert "Jobs of the last seven days; use -S for more." in seen
    assert "\x1b[1" in seen
    assert "\x1b[31m" not in seen
    assert r"evil\x1b[31m\n999|root" in seen


def test_a_person_is_told_that_there_is_nothing(archive: str) -> None:
    seen = on_terminal("archive", "list", "-u", "nobody-at-all", "--archive", archive)
    assert seen.strip() == "No jobs in the last seven days; use -S for more."
    words = ("archive", "list", "-S", "2000-01-01", "-u", "nobody-at-all", "--archive", archive)
    assert on_terminal(*words).strip() == "No job matches."


def test_show_has_the_facts_and_the_script_as_it_is(look: Any) -> None:
    out = look("show", "101")
    head, _, script = out.partition("\n\n")
    assert "101 on c" in head
    assert "API_TOKEN" in head
    assert script == SCRIPTS[101].decode()


def test_show_script_is_byte_for_byte(look: Any) -> None:
    look("show", "103", "--script")
    assert look.raw == SCRIPTS[103]


def test_a_script_cannot_talk_to_the_terminal(archive: str) -> None:
    for words in (["show", "103"], ["show", "103", "--script"], ["search", "owned"]):
        seen = on_terminal("archive", *words, "--archive", archive)
        assert "\x1b]" not in seen
        assert "\x07" not in seen
        assert "owned" in seen


def test_show_highlights_what_slurm_reads(archive: str) -> None:
    assert "#SBATCH -n 1" in on_terminal("archive", "show", "101", "--archive", archive)


def test_what_is_longer_than_the_screen_is_paged(archive: str, tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    pager.write_text("#!/bin/sh\necho PAGED\ncat\n")
    pager.chmod(0o755)
    os.environ["PAGER"], before = str(pager), os.environ.get("PAGER")
    try:
        words = [sys.executable, "-c", _PAGING, archive]
        done = subprocess.run(words, capture_output=True, timeout=60, check=False, text=True)
    finally:
        os.environ.pop("PAGER")
        if before is not None:
            os.environ["PAGER"] = before
    assert done.stdout.startswith("PAGED\n"), done.stderr


_PAGING = """
import os, pty, sys
os.environ.update(LINES="3", COLUMNS="80", TERM="xterm")
pty.spawn([sys.executable, "-m", "steward", "archive", "show", "101", "--archive", sys.argv[1]])
"""


def test_show_sbatch_is_a_script_that_submits(look: Any) -> None:
    out = look("show", "101", "--sbatch")
    assert out.startswith("#!/bin/sh")
    assert "gmx mdrun" in out
    syntax = subprocess.run(["sh", "-n"], input=look.raw, check=False, capture_output=True)
    assert syntax.returncode == 0


def test_show_of_an_unknown_job(look: Any) -> None:
    assert look("show", "999", code=1) == "steward: unknown job 999\n"
    assert "steward: " in look("show", "../etc/passwd", code=2)


def test_env_is_redacted_and_one_variable_a_line(look: Any) -> None:
    lines = look("env", "101").splitlines()
    assert lines == [
        "SLURM_JOB_NAME=first",
        "API_TOKEN=[redacted by steward]",
        r"MULTI=a\nb=c",
        r"RAW=\xff\xfe",
    ]


def test_env_with_nul_is_byte_for_byte(look: Any) -> None:
    look("env", "101", "MULTI", "RAW", "-0")
    assert look.raw == b"\0".join(ENVIRONMENTS[101][2:]) + b"\0"


def test_diff_ends_as_diff_does(look: Any) -> None:
    out = look("diff", "101", "102", code=1)
    assert "-module load GROMACS/2023" in out
    assert "+module load GROMACS/2024" in out
    assert look("diff", "101", "101") == ""
    # A failed comparison must not look like a difference to a program.
    assert "unknown job 999" in look("diff", "101", "999", code=2)


def test_search_finds_exact_text_newest_first(look: Any) -> None:
    out = look("search", "GROMACS/202")
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == [
        "102",
        "101",
    ]
    assert "     3  module load GROMACS/2024" in out
    assert look("search", "nowhere to be found") == ""


def test_a_comma_is_part_of_what_is_searched_for(look: Any) -> None:
    assert look("search", "GROMACS/2023,GROMACS/2024") == ""
    assert look("search", "mdrun,", "-P", "-n") == ""
    assert look("search", ",", "-P", "-n") == ""


def test_pages_of_hits_are_one_answer(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "PAGE_ROWS", 1)
    answer = msgspec.json.decode(look("search", "mdrun", "--json", "--count", "-L", "0"))
    assert [hit["job"]["job_id"] for hit in answer["hits"]] == [102, 101]
    assert (answer["count"], answer["next"], set(answer["zones"])) == (2, "", {"c"})
    answer = msgspec.json.decode(look("search", "mdrun", "--json", "-L", "1"))
    assert len(answer["hits"]) == 1
    assert answer["next"]


@pytest.mark.parametrize(
    ("words", "heading"),
    [
        (("list",), "Cluster,JobID,JobName,"),
        (("search", "mdrun"), "Cluster,JobID,JobName,User,Submit,Line,Text"),
        (("secrets",), "Cluster,JobID,JobName,User,Line,Kind"),
        (("verify",), "Problem,Sink,Path,Detail"),
        (("sinks",), "Sink,Kind,State,"),
    ],
)
def test_every_table_is_one_for_spreadsheets(
    look: Any, words: tuple[str, ...], heading: str
) -> None:
    assert look(*words, "--csv").startswith(heading)


@pytest.mark.parametrize("words", [("search", "no such text"), ("secrets",), ("verify",)])
def test_an_unknown_column_is_an_error_without_rows_too(look: Any, words: tuple[str, ...]) -> None:
    assert "unknown column 'colour'" in look(*words, "-o", "colour", code=2)


def test_search_for_programs(look: Any) -> None:
    lines = look("search", "mdrun", "-P", "-n").splitlines()
    assert [line.split("|")[1] for line in lines] == ["102", "101"]
    assert look("search", "mdrun", "-o", "JobID", "-n").split() == ["102", "101"]
    answer = msgspec.json.decode(look("search", "mdrun", "--json", "--count"))
    assert answer["count"] == 2


def test_a_full_disk_behind_the_output_is_said_as_such(archive: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "steward", "archive", "list", "--archive", archive],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == b"steward: cannot write to stdout: No space left on device\n"


@pytest.mark.parametrize(
    "words",
    [
        ("erase", "-u", "ada", "-j", ""),
        ("erase", "-j", "101", "--sink", ""),
        ("erase", "-u", "ada", "-E", ""),
        ("list", "-u", ","),
        ("search", "echo", "--name", ""),
        ("show", "101", "--cluster", ""),
    ],
)
def test_a_filter_that_was_given_empty_is_not_taken_for_none(
    look: Any, words: tuple[str, ...]
) -> None:
    assert "has no value: give one" in look(*words, code=2)


def test_secrets_say_where_but_not_what(look: Any) -> None:
    out = look("secrets", "-P", "-n")
    assert out.split("|")[1] == "104"
    assert "glpat-aaaa" not in out


def test_verify_says_what_was_changed(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    root = keep(tmp_path)
    assert run(["archive", "verify", "--archive", root]) == 0
    (path,) = Path(root).rglob("101-first.sh")
    path.write_bytes(b"#!/bin/sh\nevil\n")
    capfdbinary.readouterr()
    assert run(["archive", "verify", "--archive", root, "-P", "-n"]) == 1
    assert capfdbinary.readouterr().out.startswith(b"changed|")
    assert run(["archive", "verify", "--archive", root, "--json"]) == 1
    answer = msgspec.json.decode(capfdbinary.readouterr().out)
    assert answer["summary"]["problems"] == 1
    assert answer["problems"][0]["problem"] == "changed"


def test_purge_only_says_what_it_would_do(look: Any, archive: str) -> None:
    assert run(["archive", "erase", "-j", "101", "--archive", archive]) == 0
    out = look("erase", "-j", "101", "-P", "-n")
    assert out.split("|")[1] == "101"
    assert look("list", "-n", "-j", "101").split()[0] == "101"


@pytest.mark.parametrize("named", [("-j", "999"), ("-u", "nobody-here")])
def test_what_is_not_there_is_neither_exported_nor_purged(
    look: Any,
    archive: str,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    named: tuple[str, ...],
) -> None:
    for target in (str(tmp_path / "out"), str(tmp_path / "out.tar"), "-"):
        assert "nothing exported" in look("export", target, *named, code=1)
    assert not list(tmp_path.iterdir())
    for words in ((), ("--yes",), ("-P", "-n"), ("--json",)):
        assert run(["archive", "erase", *named, *words, "--archive", archive]) == 1
        out, err = capfdbinary.readouterr()
        assert b"no archived script matches" in err
        assert (b'"scripts":[]' in out) == ("--json" in words)
    look("export", str(tmp_path / "quiet.tar"), "-E", "2020-01-01")
    assert (tmp_path / "quiet.tar").exists()


def test_purge_without_a_daemon_says_that_it_needs_one(look: Any) -> None:
    out = look("erase", "-j", "101", "--yes", code=1)
    assert "start 'steward serve'" in out
    assert look("list", "-n", "-j", "101").split()[0] == "101"


def test_reindex_finds_the_same_again(look: Any) -> None:
    assert look("reindex") == "Indexed 4 scripts, 4 of them distinct.\n"
    assert "102" in look("search", "GROMACS/2024")


def test_journal_status_and_list(archive: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["journal", "status", "-P", "-n", "--archive", archive]) == 0
    rows = [line.split("|") for line in capfd.readouterr().out.splitlines()]
    assert {row[0] for row in rows} == {"archive.files", "catalog", "history", "jobs"}
    assert all(row[2] == "0" and row[3] == "0" for row in rows)
    assert run(["journal", "status", "-o", "consumer", "-n", "--archive", archive]) == 0
    assert {*capfd.readouterr().out.split()} == {row[0] for row in rows}
    assert run(["journal", "list", "-k", "job.script", "-L", "2", "--archive", archive, "-n"]) == 0
    assert capfd.readouterr().out.count("job.script") == 2
    assert run(["journal", "list", "--json", "--archive", archive]) == 0
    answer = msgspec.json.decode(capfd.readouterr().out)
    assert {event["body"]["job_id"] for event in answer["events"]} == set(SCRIPTS)
    assert run(["journal", "list", "-k", "job.scrpt", "--archive", archive]) == 2
    assert "the kinds are" in capfd.readouterr().err


def test_journal_dead_replay_and_forget(archive: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["journal", "dead", "-P", "--archive", archive]) == 0
    assert capfd.readouterr().out.splitlines() == ["Consumer|ID|Kind|Cluster|Key|Since|Error"]
    for words in (["retry", "jobs"], ["forget", "jobs"]):
        assert run(["journal", *words, "--archive", archive]) == 1
        assert "steward: " in capfd.readouterr().err


def test_a_consumer_is_called_by_its_sinks_name_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    archive = keep(tmp_path)
    journal = Journal(f"{archive}/.steward")
    first = journal.head()
    journal.add_dead_letter("archive.files", first, "no room")
    journal.close()
    for name in ("files", "archive.files"):
        assert run(["journal", "dead", name, "-P", "-n", "--archive", archive]) == 0
        assert capfd.readouterr().out.startswith(f"archive.files|{first}|")
    assert run(["journal", "dead", "jobs", "-P", "-n", "--archive", archive]) == 0
    assert not capfd.readouterr().out
    for words in (["dead", "flies"], ["retry", "flies"], ["forget", "flies"]):
        assert run(["journal", *words, "--archive", archive]) == 2
        assert "unknown consumer 'flies': did you mean 'archive.files'?" in capfd.readouterr().err


def test_no_other_user_looks_into_the_archive_without_a_daemon(archive: str) -> None:
    own = Path(archive) / ".steward"
    for path in own.rglob("*"):
        assert not path.stat().st_mode & 0o077, path
