"""``steward archive sinks`` and ``resend`` on a real archive, without a daemon."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.commands import SCRIPTS, fill_spool, on_terminal, steward
from steward.archive.requests import SinkLine, SinksReply
from steward.cli import commands
from steward.cli.app import run


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> str:
    home = tmp_path_factory.mktemp("site")
    fill_spool(home / "spool")
    root = str(home / "archive")
    words = ["--cluster", "c", "--spool", str(home / "spool"), "--archive", root, "--no-slurm"]
    done = steward("archive", "watch", *words, "--once")
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def look(archive: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TZ", "UTC")

    def look(*words: str, code: int = 0) -> tuple[str, str]:
        assert run(["archive", *words, "--archive", archive]) == code
        out, err = capfd.readouterr()
        return out, err

    return look


def test_sinks_are_a_table_for_people(look: Any, archive: str) -> None:
    out, _ = look("sinks")
    heading, line = out.splitlines()
    assert heading.split() == [
        *("Sink", "Kind", "State", "Backlog", "Oldest", "Rate"),
        *("DeadLetters", "ErrorAt", "LastError"),
    ]
    assert line.split()[:4] == ["files", "files", "running", "0"]
    assert "running" in on_terminal("archive", "sinks", "--archive", archive)


def test_sinks_are_told_to_programs(look: Any) -> None:
    out, _ = look("sinks", "-P", "-o", "sink,backlog,lag,oldest,missed,lasterror")
    assert out == "Sink|Backlog|Lag|Oldest|Missed|LastError\nfiles|0|0||0|\n"
    answer = msgspec.json.decode(look("sinks", "--json")[0])
    assert answer["version"] == 1
    (line,) = answer["sinks"]
    assert msgspec.convert(line, SinkLine).kind == "files"


def test_an_age_is_written_as_slurm_does(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ages = (None, 0.0, 187.4, 3600.0, 93784.0)
    lines = [SinkLine(name="a", kind="kafka", state="running", oldest_s=age) for age in ages]
    reply = SinksReply(sinks=tuple(lines))
    monkeypatch.setattr(commands, "stream_action", lambda *_: iter([reply]))
    out, _ = look("sinks", "-n", "-o", "oldest")
    assert [line.strip() for line in out.splitlines()] == [
        *("", "00:00", "03:07", "01:00:00", "1-02:03:04")
    ]
    assert look("sinks", "-n", "-P", "-o", "oldest")[0] == "\n0\n187\n3600\n93784\n"


def test_resend_needs_the_daemon_and_a_sink_that_there_is(look: Any) -> None:
    _, err = look("resend", "--sink", "files", "--since", "now-1day", code=1)
    assert "start 'steward serve'" in err
    _, err = look("resend", "--sink", "tape", code=2)
    assert "unknown sink 'tape': use one of files" in err
    _, err = look("resend", "--sink", "", code=2)
    assert "--sink has no value: give one" in err


def test_resend_of_nothing_needs_nobody(look: Any) -> None:
    out, _ = look("resend", "--sink", "files", "--until", "2020-01-01")
    assert out == "Sink files archives 0 scripts again, 0 bytes.\n"
    out, _ = look("resend", "--sink", "files", "--missing", "--json")
    answer = msgspec.json.decode(out)
    assert (answer["scripts"], answer["present"]) == (0, len(SCRIPTS))


def test_a_purge_says_which_sinks_it_reaches(look: Any, archive: str) -> None:
    _, err = look("erase", "-j", "101")
    assert err.endswith(", from files\n")
    assert list(Path(archive).rglob("101-*.sh"))
