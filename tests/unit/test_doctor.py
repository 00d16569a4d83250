"""The doctor as it is asked: no check stops another, and people are told what mends it."""

import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli_site import fill_spool, steward
from doctor_site import ROOT, site

from steward.access import Access, Asker
from steward.actions import Action, Registry
from steward.bank.asking_upkeep import CheckAnswer, CheckRequest
from steward.config import (
    AccessSettings,
    BankSettings,
    ClusterSettings,
    Settings,
)
from steward.doctor.actions import run
from steward.doctor.apart import run_apart
from steward.doctor.findings import Finding, ok, worst
from steward.doctor.room import DoctorRequest, DoctorRoom
from steward.errors import Refused, StewardError

__all__ = ["site"]

LEDGER = DoctorRequest(only=("ledger",))


# Processes


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def hang() -> tuple[Finding, ...]:
    time.sleep(600)
    raise AssertionError


def crash() -> tuple[Finding, ...]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def refuse() -> tuple[Finding, ...]:
    raise StewardError("the ledger is away")


def fail() -> tuple[Finding, ...]:
    raise ZeroDivisionError("by zero")


def test_a_check_that_hangs_crashes_or_fails_stops_no_other() -> None:
    fine = (ok("a", "one"), ok("b", "x" * 1_000_000))
    before = children()
    found = run_apart([hang, crash, lambda: fine, refuse, fail, lambda: ()], 3.0)
    assert found[2] == fine
    assert found[5] == ()
    words = ["took longer than 3 s", "ended without a word", "the ledger is away", "by zero"]
    for said, word in zip([found[0], found[1], found[3], found[4]], words, strict=True):
        (one,) = said
        assert one.status == "wrong"
        assert word in one.what
    assert children() == before


def test_a_check_that_hangs_takes_its_commands_with_it(tmp_path: Path) -> None:
    ours, theirs = os.pipe()

    def command() -> tuple[Finding, ...]:
        # It holds the pipe open for as long as it lives.
        subprocess.Popen(["sleep", "600"], start_new_session=True, pass_fds=[theirs])
        os.write(theirs, b"!")
        return hang()

    ((one,),) = run_apart([command], 5.0)
    os.close(theirs)
    assert "took longer than 5 s" in one.what
    with os.fdopen(ours, "rb", buffering=0) as pipe:
        assert pipe.read(1) == b"!"
        assert select.select([pipe], [], [], 30)[0], "the command lives on"
        assert pipe.read(1) == b""


def test_the_worst_is_told_and_what_was_not_looked_at_is_no_fault() -> None:
    assert worst(()) == worst(("skipped",)) == worst(("ok", "skipped")) == "ok"
    assert worst(("ok", "warning", "skipped")) == "warning"
    assert worst(("warning", "wrong", "ok")) == "wrong"


# The spool, and the command


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    """An archive that was filled once, with its configuration."""
    fill_spool(tmp_path / "spool")
    words = ("--once", "--no-slurm", "--spool", str(tmp_path / "spool"), "--cluster", "c1")
    done = steward("archive", "watch", *words, "--archive", str(tmp_path / "archive"))
    assert done.returncode == 0, done.stderr
    return tmp_path


def doctor(site: Path, *words: str) -> tuple[int, list[dict[str, object]]]:
    config = str(site / "archive/.steward/steward.toml")
    done = steward("doctor", "--json", "--config", config, *words)
    assert done.stderr == b""
    return done.returncode, json.loads(done.stdout)["findings"]


def test_a_script_that_was_not_taken_is_named(watched: Path) -> None:
    code, findings = doctor(watched, "--only", "spool")
    assert code == 0
    assert findings[0]["what"] == "4 scripts there for a while, all of them taken"
    path = watched / "spool/hash.5/job.205/script"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"#!/bin/sh\n\0")
    assert doctor(watched, "--only", "spool")[0] == 0  # it came just now
    os.utime(path, (time.time() - 600,) * 2)
    code, findings = doctor(watched, "--only", "spool")
    assert code == 1
    assert findings[0]["what"] == "1 script of 5 not taken, job 205 first"


def test_everything_is_looked_at_where_nothing_runs(watched: Path) -> None:
    code, findings = doctor(watched)
    assert code == 1
    by_check = {str(one["check"]): one for one in findings}
    assert by_check["file"]["status"] == "ok"
    assert by_check["daemon"]["status"] == "wrong"
    assert by_check["spool"]["status"] == "ok"
    assert by_check["journal"]["status"] == "ok"
    assert by_check["slurm"]["status"] == "skipped"
    assert all(one["mend"] for one in findings if one["status"] == "wrong")
    assert not [one for one in findings if "the check failed" in str(one["what"])]


def test_people_are_told_what_mends_it(watched: Path) -> None:
    config = str(watched / "archive/.steward/steward.toml")
    done = steward("doctor", "--config", config, "--only", "daemon,library")
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 1
    assert lines[0].split() == ["Check", "Of", "Status", "What"]
    assert any(line.startswith("library") and " ok " in line for line in lines)
    assert "    systemctl start steward" in lines
    assert lines[-1] == "1 wrong, 0 warnings, 1 as they should be."


def test_a_configuration_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "steward.toml"
    path.write_text("[cluster.c1]\nspol = '/x'\n")
    done = steward("doctor", "--json", "--config", str(path))
    (finding,) = json.loads(done.stdout)["findings"]
    assert done.returncode == 1
    assert (finding["check"], finding["status"]) == ("file", "wrong")
    assert "did you mean 'spool'?" in finding["what"]


def test_checks_that_there_are_not(watched: Path) -> None:
    config = str(watched / "archive/.steward/steward.toml")
    done = steward("doctor", "--config", config, "--only", "spol")
    assert done.returncode == 2
    assert b"there is no check 'spol': there are settings, secrets, library" in done.stderr
    listed = json.loads(steward("doctor", "--list", "--json").stdout)
    assert {"name": "library", "help": "SQLite is one that loses nothing"} in listed


def test_only_operators_are_told(tmp_path: Path) -> None:
    settings = Settings(
        state_dir=str(tmp_path), cluster={"c1": ClusterSettings(slurm=False, spool="/x")}
    )
    access = Access(AccessSettings(operators=("op",)), 0, lambda _: None)
    room = DoctorRoom(settings, access=access, fresh=Registry)
    request = DoctorRequest(only=("library",))
    with pytest.raises(Refused):
        run(room, Asker(uid=1000, user="ada"), request)
    answer = run(room, Asker(uid=1001, user="op"), request)
    assert [(one.check, one.status) for one in answer.findings] == [("library", "ok")]
    assert answer.status == "ok"


def test_what_has_a_database_open_is_used_by_no_check(tmp_path: Path) -> None:
    opened: list[int] = []

    def check(context: list[int], _asker: Asker, _request: CheckRequest) -> CheckAnswer:
        return CheckAnswer(findings=(), accounts=len(context), position=0)

    def room() -> list[int]:
        opened.append(os.getpid())
        return list(opened)

    def fresh() -> Registry:
        action = Action(
            name="bank.check", help="", request=CheckRequest, answer=CheckAnswer, run=check
        )
        return Registry((action,), {"bank": room})

    used = fresh()
    used.call("bank.check", ROOT, CheckRequest())
    settings = Settings(state_dir=str(tmp_path), bank=BankSettings(enabled=True))
    access = Access(AccessSettings(), 0, lambda _: None)
    for _ in range(2):
        answer = run(DoctorRoom(settings, access=access, fresh=fresh), ROOT, LEDGER)
        # The check's own process opened its room, behind the one that is open here.
        assert answer.findings[0].what == "the books of 2 accounts add up"
    assert opened == [os.getpid()]
