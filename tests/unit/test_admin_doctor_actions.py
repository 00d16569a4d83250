"""Actions of the doctor: checks run independently, and each finding has a fix."""

import errno
import json
import os
import re
import select
import signal
import subprocess
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest

from harness.commands import fill_spool, steward
from harness.doctor import DoctorSite, only, site
from harness.gate import running
from harness.site import ROOT
from servers.http_server import Quiet, answering
from servers.mybrc import mybrc_settings, serving, token_of
from steward.admin.doctor import data_checks
from steward.admin.doctor.actions import run_doctor
from steward.admin.doctor.check_processes import run_in_processes
from steward.admin.doctor.findings import (
    CheckFinding,
    DoctorContext,
    DoctorRequest,
    find_worst_status,
    make_ok,
)
from steward.bank.actions.maintenance import CheckReply, CheckRequest
from steward.bank.gate.requests import RemoteMeans
from steward.bank.ledger import LedgerFinding
from steward.bank.settings import BankSettings, RemoteBankSettings
from steward.core.access import Access, Caller
from steward.core.actions import Action, Registry
from steward.core.config import AccessSettings, Settings
from steward.core.errors import PermissionRefused, StewardError
from steward.slurm.settings import ClusterSettings

__all__ = ["site"]

LEDGER = DoctorRequest(only=("ledger",))


# Processes


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def hang() -> tuple[CheckFinding, ...]:
    time.sleep(600)
    raise AssertionError


def crash() -> tuple[CheckFinding, ...]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def refuse() -> tuple[CheckFinding, ...]:
    raise StewardError("the ledger is away")


def fail() -> tuple[CheckFinding, ...]:
    raise ZeroDivisionError("by zero")


def test_a_check_that_hangs_crashes_or_fails_stops_no_other() -> None:
    fine = (make_ok("a", "one"), make_ok("b", "x" * 1_000_000))
    before = children()
    found = run_in_processes([hang, crash, lambda: fine, refuse, fail, lambda: ()], 3.0)
    assert found[2] == fine
    assert found[5] == ()
    words = ["did not end within 3 s", "ended without a result", "the ledger is away", "by zero"]
    for said, word in zip([found[0], found[1], found[3], found[4]], words, strict=True):
        (one,) = said
        assert one.status == "wrong"
        assert word in one.finding
    assert children() == before


def test_a_check_for_which_there_is_no_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, calls = os.fork, iter(range(100))

    def fails() -> int:
        if next(calls) != 1:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    monkeypatch.setattr(os, "fork", fails)
    before = len(os.listdir("/proc/self/fd"))
    fine = (make_ok("a", "one"),)
    found = run_in_processes([lambda: fine] * 3, 60.0)
    assert found[1] == fine
    for said in (found[0], found[2]):
        (one,) = said
        assert one.status == "wrong"
        assert "cannot start the check: Resource temporarily" in one.finding
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_check_that_hangs_takes_its_commands_with_it(tmp_path: Path) -> None:
    ours, theirs = os.pipe()

    def command() -> tuple[CheckFinding, ...]:
        # It holds the pipe open for as long as it lives.
        subprocess.Popen(["sleep", "600"], start_new_session=True, pass_fds=[theirs])
        os.write(theirs, b"!")
        return hang()

    ((one,),) = run_in_processes([command], 5.0)
    os.close(theirs)
    assert "did not end within 5 s" in one.finding
    with os.fdopen(ours, "rb", buffering=0) as pipe:
        assert pipe.read(1) == b"!"
        assert select.select([pipe], [], [], 30)[0], "the command lives on"
        assert pipe.read(1) == b""


def test_the_worst_is_told_and_what_was_not_looked_at_is_no_fault() -> None:
    assert (
        find_worst_status(())
        == find_worst_status(("skipped",))
        == find_worst_status(("ok", "skipped"))
        == "ok"
    )
    assert find_worst_status(("ok", "warning", "skipped")) == "warning"
    assert find_worst_status(("warning", "wrong", "ok")) == "wrong"


# The spool, and the command


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    """Return an archive that was filled once, with its configuration."""
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
    assert findings[0]["finding"] == "4 scripts, all captured"
    path = watched / "spool/hash.5/job.205/script"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"#!/bin/sh\n\0")
    assert doctor(watched, "--only", "spool")[0] == 0  # it came just now
    os.utime(path, (time.time() - 600,) * 2)
    code, findings = doctor(watched, "--only", "spool")
    assert code == 1
    assert findings[0]["finding"] == "1 script of 5 not captured, job 205 first"


def test_everything_is_looked_at_where_nothing_runs(watched: Path) -> None:
    code, findings = doctor(watched)
    assert code == 1
    by_check = {str(one["check"]): one for one in findings}
    assert by_check["file"]["status"] == "ok"
    assert by_check["daemon"]["status"] == "wrong"
    assert by_check["spool"]["status"] == "ok"
    assert by_check["journal"]["status"] == "ok"
    assert by_check["slurm"]["status"] == "skipped"
    assert all(one["fix"] for one in findings if one["status"] == "wrong")
    assert not [one for one in findings if "the check failed" in str(one["finding"])]


def test_people_are_told_what_mends_it(watched: Path) -> None:
    config = str(watched / "archive/.steward/steward.toml")
    done = steward("doctor", "--config", config, "--only", "daemon,library")
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 1
    assert lines[0].split() == ["Check", "Object", "Status", "Finding"]
    assert any(line.startswith("library") and " ok " in line for line in lines)
    assert "    systemctl start steward" in lines
    assert lines[-1] == "1 wrong, 0 warnings, 1 ok."


def test_a_configuration_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "steward.toml"
    path.write_text("[cluster.c1]\nspol = '/x'\n")
    done = steward("doctor", "--json", "--config", str(path))
    (finding,) = json.loads(done.stdout)["findings"]
    assert done.returncode == 1
    assert (finding["check"], finding["status"]) == ("file", "wrong")
    assert "did you mean 'spool'?" in finding["finding"]


def test_checks_that_there_are_not(watched: Path) -> None:
    config = str(watched / "archive/.steward/steward.toml")
    done = steward("doctor", "--config", config, "--only", "spol")
    assert done.returncode == 2
    assert b"unknown check 'spol': the checks are settings, secrets, library" in done.stderr
    listed = json.loads(steward("doctor", "--list", "--json").stdout)
    assert {
        "name": "library",
        "help": "the SQLite library has no bug that corrupts databases",
    } in listed["checks"]


def test_only_operators_are_told(tmp_path: Path) -> None:
    settings = Settings(
        state_dir=str(tmp_path), cluster={"c1": ClusterSettings(slurm=False, spool="/x")}
    )
    access = Access(AccessSettings(operators=("op",)), 0, lambda _: None)
    room = DoctorContext(settings, access=access, make_registry=Registry)
    request = DoctorRequest(only=("library",))
    with pytest.raises(PermissionRefused):
        run_doctor(room, Caller(uid=1000, user="ada"), request)
    answer = run_doctor(room, Caller(uid=1001, user="op"), request)
    assert [(one.check, one.status) for one in answer.findings] == [("library", "ok")]
    assert answer.status == "ok"


def test_what_has_a_database_open_is_used_by_no_check(tmp_path: Path) -> None:
    opened: list[int] = []

    found: list[LedgerFinding] = []

    def check(context: list[int], _asker: Caller, _request: CheckRequest) -> CheckReply:
        return CheckReply(findings=tuple(found), accounts=len(context), position=0)

    def room() -> list[int]:
        opened.append(os.getpid())
        return list(opened)

    def fresh() -> Registry:
        action = Action(
            name="bank.check", help="", request=CheckRequest, answer=CheckReply, run=check
        )
        return Registry((action,), {"bank": room})

    used = fresh()
    used.call("bank.check", ROOT, CheckRequest())
    settings = Settings(state_dir=str(tmp_path), bank=BankSettings(enabled=True))
    access = Access(AccessSettings(), 0, lambda _: None)
    for _ in range(2):
        answer = run_doctor(
            DoctorContext(settings, access=access, make_registry=fresh), ROOT, LEDGER
        )
        # The check's own process opened its room, behind the one that is open here.
        assert answer.findings[0].finding == "the ledger is consistent: 2 accounts"
    assert opened == [os.getpid()]
    found.append(LedgerFinding(kind="unproved", finding="holds were not compared"))
    answer = run_doctor(DoctorContext(settings, access=access, make_registry=fresh), ROOT, LEDGER)
    assert [(one.status, one.finding) for one in answer.findings] == [
        ("warning", "holds were not compared")
    ]


def test_a_mybrc_server_that_cannot_be_told_is_a_finding(site: DoctorSite, tmp_path: Path) -> None:
    assert only(data_checks.check_remote_bank(site.ground())).status == "skipped"
    directory = tmp_path / "there"
    directory.mkdir()
    with serving(mybrc_settings(directory)) as url:
        token = tmp_path / "token"
        token.write_text(token_of(url))
        for path, status, said in (
            ("/api", "ok", "it answers"),
            ("/apis", "wrong", "404. Is the path in [bank.remote] url right?"),
        ):
            remote = RemoteBankSettings(url=f"{url}{path}", token_file=str(token))
            site.reopen(bank=BankSettings(enabled=True, remote=remote))
            found = only(data_checks.check_remote_bank(site.ground()))
            assert (found.status, said in found.finding) == (status, True)
    found = only(data_checks.check_remote_bank(site.ground()))
    assert (found.status, "refused" in found.finding) == ("wrong", True)


class ReadOnly(Quiet, BaseHTTPRequestHandler):
    """myBRC server that accepts nothing, or fails on anything but jobs."""

    writes: ClassVar[HTTPStatus] = HTTPStatus.FORBIDDEN

    def do_GET(self) -> None:
        """Send a list of jobs."""
        self._say(HTTPStatus.OK)

    def do_POST(self) -> None:
        """Reject a job."""
        self._say(self.writes)

    def _say(self, status: HTTPStatus) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


@pytest.mark.parametrize(
    ("writes", "status"),
    [
        (HTTPStatus.FORBIDDEN, "wrong"),
        (HTTPStatus.UNAUTHORIZED, "wrong"),
        (HTTPStatus.BAD_REQUEST, "ok"),
        (HTTPStatus.INTERNAL_SERVER_ERROR, "ok"),
    ],
)
def test_a_token_that_may_only_read_is_a_finding(
    site: DoctorSite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writes: HTTPStatus,
    status: str,
) -> None:
    monkeypatch.setattr(ReadOnly, "writes", writes)
    token = tmp_path / "token"
    token.write_text("x")
    with answering(ReadOnly) as server:
        url = f"http://127.0.0.1:{server.server_port}/api"
        remote = RemoteBankSettings(url=url, token_file=str(token))
        site.reopen(bank=BankSettings(enabled=True, remote=remote))
        found = only(data_checks.check_remote_bank(site.ground()))
    assert (found.status, str(writes.value) in found.finding) == (status, status == "wrong")


def test_balances_at_a_mybrc_server_that_are_old_are_a_finding(
    site: DoctorSite, tmp_path: Path
) -> None:
    for name in ("there", "here"):
        tmp_path.joinpath(name).mkdir()
    token = tmp_path / "token"
    with serving(mybrc_settings(tmp_path / "there")) as url:
        token.write_text(token_of(url))
        remote = RemoteBankSettings(url=f"{url}/api", token_file=str(token), balance_age_s=1800.0)
        bank_settings = BankSettings(enabled=True, remote=remote)
        site.reopen(bank=bank_settings, state_dir=str(tmp_path / "here"))
        with running(site.settings) as started:
            now_us = time.time_ns() // 1000
            for at_us, status, said in (
                (0, "wrong", "no balance is known"),
                (now_us, "ok", "the oldest balance is "),
                (now_us - 3_600_000_000, "wrong", "the outage policy allow applies"),
            ):
                if at_us:
                    started.link.send_remote_means({"physics": RemoteMeans(at_us=at_us)})
                answers, balances = data_checks.check_remote_bank(site.ground())
                assert (answers.status, balances.status) == ("ok", status)
                assert said in balances.finding
    asked = re.match(r"the last balance is (\d+) s old", balances.finding)
    assert asked is not None
    assert 3600 <= int(asked[1]) < 4800
