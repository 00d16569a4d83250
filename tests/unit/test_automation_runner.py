"""Runner of operations: permissions, target cluster, and audit log entries."""

import os
import stat
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.site import Site
from steward.automation import runner
from steward.automation.errors import (
    AuditUnavailable,
    InvalidParameters,
    OperationForbidden,
    UnknownOperation,
)
from steward.automation.operation import Operation, Parameters
from steward.automation.runner import OperationRun, OperationRunner
from steward.automation.settings import ActionsSettings
from steward.bank.gate.client import GateClient
from steward.bank.gate.requests import PluginReply, PluginRequest
from steward.bank.settings import BankSettings
from steward.core.access import Access, Caller, ClusterRoles, act_as
from steward.core.config import AccessSettings
from steward.core.events import utc_now
from steward.core.principals import RULES, STATUS

ROOT = Caller(uid=0, user="root", how="local")
ADA = Caller(uid=1001, user="ada")
OLGA = Caller(uid=1002, user="olga")
CARL = Caller(uid=1003, user="carl")
SECONDS = 120.0


class RunningSite(Site):
    """Two clusters without Slurm: olga is an operator of the first, carl administers both."""

    def __init__(self, tmp_path: Path) -> None:
        self.programs = tmp_path / "programs"
        self.programs.write_text("/bin/echo\n/bin/false\n/bin/sleep\n/bin/sh\n")
        super().__init__(
            tmp_path,
            clusters=("one", "two"),
            access=AccessSettings(administrators=("carl",)),
            actions=ActionsSettings(programs_file=str(self.programs), timeout_s=SECONDS),
        )
        standings = {"one": ClusterRoles(admins=frozenset({"olga"})), "two": ClusterRoles()}
        self.access = Access(self.settings.access, os.getuid(), standings.get)
        self.runner = OperationRunner(self.settings, self.access, self.registry)

    def run(self, asker: Caller = ROOT, **options: Any) -> Any:
        given = {"program": "/bin/echo", "arguments": ["a"]}
        return self.runner.run("local.command", given, asker, **options)


@pytest.fixture
def site(tmp_path: Path) -> RunningSite:
    if os.geteuid() != 0:
        pytest.skip("the list of programs is root's")
    return RunningSite(tmp_path)


def test_it_is_run_and_written_down(site: RunningSite) -> None:
    ran = site.run(CARL)
    assert (ran.id, ran.status, ran.cluster, ran.dry_run) == (1, "succeeded", "", False)
    assert ran.result == {"exit_code": 0, "stdout": "a\n", "stderr": ""}
    assert ran.parameters == {"program": "/bin/echo", "arguments": ["a"]}
    row = site.runner.audit.find_entry(1)
    assert row is not None
    assert (row.user, row.speaker, row.status, row.result) == (
        "carl", "carl", "succeeded", ran.result,
    )  # fmt: skip


def test_a_rule_speaks_for_itself(site: RunningSite) -> None:
    site.run(speaker="rule node-down")
    row = site.runner.audit.find_entry(1)
    assert row is not None
    assert (row.user, row.speaker) == ("root", "rule node-down")


def test_a_dry_run_writes_nothing_down(site: RunningSite) -> None:
    ran = site.run(dry_run=True)
    assert (ran.id, ran.dry_run, ran.result["would_run"]) == (0, True, True)
    assert not (site.state / "audit.db").exists()


@pytest.mark.parametrize("how", ["munge", "token"])
def test_programs_are_not_to_be_had_from_other_hosts(site: RunningSite, how: str) -> None:
    asker = Caller(uid=0, user="root", how=how)
    with pytest.raises(OperationForbidden, match="only for callers on this host"):
        site.run(asker)
    given = {"program": "/bin/echo", "event": "down"}
    with pytest.raises(OperationForbidden, match="only for callers on this host"):
        site.runner.run("slurm.trigger.set", given, asker)
    with pytest.raises(OperationForbidden, match="only for callers on this host"):
        site.ask(
            "automation.run", asker, action="local.command", parameters={"program": "/bin/echo"}
        )
    assert not (site.state / "audit.db").exists()


def test_it_is_refused_before_anything_is_written(site: RunningSite) -> None:
    for asker in (ADA, OLGA, Caller(uid=4711)):
        with pytest.raises(OperationForbidden, match="administrators"):
            site.run(asker)
    with pytest.raises(UnknownOperation):
        site.runner.run("local.comand", {}, ROOT)
    with pytest.raises(InvalidParameters, match="program"):
        site.runner.run("local.command", {}, ROOT)
    with pytest.raises(OperationForbidden, match="root must add it to"):
        site.runner.run("local.command", {"program": "/bin/true"}, ROOT)
    assert not (site.state / "audit.db").exists()


def test_what_is_done_on_no_cluster_is_for_operators_of_each(site: RunningSite) -> None:
    given = {"to": "root", "subject": "x"}
    with pytest.raises(OperationForbidden, match="operators"):
        site.runner.run("notify.email", given, OLGA, dry_run=True)
    ran = site.runner.run("notify.email", given, OLGA, dry_run=True, cluster="one")
    assert ran.cluster == "one"
    with pytest.raises(OperationForbidden, match="operators of two"):
        site.runner.run("notify.email", given, OLGA, dry_run=True, cluster="two")
    with pytest.raises(OperationForbidden, match="operators of nowhere"):
        site.runner.run("notify.email", given, OLGA, dry_run=True, cluster="nowhere")
    assert site.runner.run("notify.email", given, CARL, dry_run=True).status == "succeeded"


def test_a_cluster_is_named_where_there_are_several(site: RunningSite) -> None:
    given = {"nodes": "n1"}
    with pytest.raises(InvalidParameters, match=r"add --cluster.*one, two"):
        site.runner.run("slurm.node.resume", given, ROOT)
    with pytest.raises(InvalidParameters, match="unknown cluster 'three'"):
        site.runner.run("slurm.node.resume", given, ROOT, cluster="three")
    with pytest.raises(InvalidParameters, match="cannot be queried from this host"):
        site.runner.run("slurm.node.resume", given, ROOT, cluster="one")


def test_a_program_that_fails(site: RunningSite) -> None:
    ran = site.runner.run("local.command", {"program": "/bin/false"}, ROOT)
    assert (ran.status, ran.message) == ("failed", "/bin/false ended with 1")
    assert ran.result["exit_code"] == 1
    row = site.runner.audit.find_entry(ran.id)
    assert row is not None
    assert (row.status, row.message) == ("failed", ran.message)


def test_a_program_that_does_not_end(site: RunningSite) -> None:
    given = {"program": "/bin/sh", "arguments": ["-c", "sleep 3600 & echo $!; wait"]}
    ran = site.runner.run("local.command", given, ROOT, timeout_s=1.0)
    assert ran.status == "timeout"
    assert "longer than 1 s" in ran.message
    row = site.runner.audit.find_entry(ran.id)
    assert row is not None
    assert row.status == "timeout"


def test_a_program_that_says_much(site: RunningSite) -> None:
    given = {"program": "/bin/sh", "arguments": ["-c", "head -c 3000000 /dev/zero | tr '\\0' x"]}
    ran = site.runner.run("local.command", given, ROOT)
    assert ran.result["stdout"] == "x" * 65536


def test_arguments_are_no_shells(site: RunningSite) -> None:
    words = ["$(id)", "`id`", "; id", "a b", "", "-n", "*", "\n"]
    given = {"program": "/bin/sh", "arguments": ["-c", 'printf "<%s>" "$@"', "sh", *words]}
    ran = site.runner.run("local.command", given, ROOT)
    assert ran.result["stdout"] == "".join(f"<{word}>" for word in words)
    with pytest.raises(InvalidParameters, match="NUL"):
        site.runner.run("local.command", {"program": "/bin/echo", "arguments": ["\0"]}, ROOT)


def test_what_cannot_be_written_down_is_not_done(site: RunningSite) -> None:
    (site.state / "audit.db").mkdir()
    marker = site.state / "marker"
    given = {"program": "/bin/sh", "arguments": ["-c", f"touch {marker}"]}
    with pytest.raises(AuditUnavailable):
        site.runner.run("local.command", given, ROOT)
    assert not marker.exists()


def test_others_than_operators_are_shown_what_they_did(site: RunningSite) -> None:
    site.run(CARL)
    site.run(ROOT)
    assert len(site.ask("automation.audit", ROOT).actions) == 2
    assert len(site.ask("automation.audit", CARL).actions) == 2
    assert site.ask("automation.audit", ADA).actions == ()
    assert site.ask("automation.audit", ADA, id=1).actions == ()
    assert len(site.ask("automation.audit", ROOT, action="local.command", limit=1).actions) == 1
    assert len(site.ask("automation.audit", ROOT, since="now+1hour").actions) == 0
    with pytest.raises(OperationForbidden):
        site.ask("automation.audit", Caller(uid=4711))


def test_nobody_is_shown_an_audit_that_is_not_there(site: RunningSite) -> None:
    assert site.ask("automation.audit", ROOT).actions == ()


def test_everything_is_listed_and_helped_with(site: RunningSite) -> None:
    every = site.ask("automation.list", ADA).actions
    for one in every:
        assert site.ask("automation.help", ADA, action=one.action).actions == (one,)
    assert "slurm.node.drain" in {one.action for one in every}


def test_the_log_is_stewards_alone(site: RunningSite) -> None:
    site.run()
    mode = (site.state / "audit.db").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


def test_a_service_principal_has_no_privilege_of_its_process(
    site: RunningSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders: list[tuple[int, str]] = []

    def grant(_: object, change: PluginRequest, user: str, restarts: int) -> PluginReply:
        senders.append((change.by, user))
        return PluginReply(v=change.v, ok=restarts == 0)

    monkeypatch.setattr(GateClient, "grant", grant)
    settings = msgspec.structs.replace(site.settings, bank=BankSettings(enabled=True))
    for caller in (ROOT, ADA, act_as(RULES), act_as(STATUS)):
        operation = OperationRun(
            *("slurm.job.release", settings, site.access, site.registry, caller, "one"),
            speaker="s",
            dry_run=False,
            force=False,
            timeout_s=SECONDS,
            on_begin=lambda: None,
        )
        operation.request_admission("7", 7, restarts=0, starts_job=True)
        operation.require_role("owner", os.geteuid() if caller.service else caller.uid)
    assert senders == [(0, "root"), (1001, "ada"), (-1, ""), (-1, "")]
    assert operation.caller.uid == os.geteuid()
    monkeypatch.setattr(site.access, "is_operator", lambda *_: False)
    with pytest.raises(OperationForbidden):
        operation.require_role("owner", os.geteuid())


class OwnJob(Parameters, frozen=True, kw_only=True):
    reason: str = ""


def hold(context: OperationRun, _parameters: OwnJob) -> bool:
    context.require_role("owner", ADA.uid)
    context.begin()
    return True


def test_only_operators_fill_the_audit_log(
    site: RunningSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Operation(
        name="automation.test.hold",
        help="",
        request=OwnJob,
        answer=bool,  # type: ignore[arg-type] # a result, as those of operations are
        run=hold,
        role="owner",
        on_cluster=False,
    )
    monkeypatch.setattr(runner, "find_operation", lambda _: own)
    monkeypatch.setattr(runner, "MAX_OWN_PER_HOUR", 2)
    large = {"reason": "x" * runner.MAX_OWN_PARAMETER_BYTES}
    with pytest.raises(InvalidParameters, match="more than 16384 bytes"):
        site.runner.run("test.hold", large, ADA)
    assert [site.runner.run("test.hold", {}, ADA).id for _ in range(2)] == [1, 2]
    with pytest.raises(OperationForbidden, match="you ran 2 actions within an hour"):
        site.runner.run("test.hold", {}, ADA)
    assert [site.runner.run("test.hold", large, by).id for by in (CARL, ROOT, CARL)] == [3, 4, 5]
    later = utc_now() + timedelta(minutes=61)
    monkeypatch.setattr(runner, "utc_now", lambda: later)
    assert site.runner.run("test.hold", {}, ADA).id == 6


def test_without_its_audit_log_an_operation_does_not_begin_later(site: RunningSite) -> None:
    attempts: list[int] = []

    def fail() -> None:
        attempts.append(1)
        raise AuditUnavailable("the disk is full")

    run = OperationRun(
        *("test.hold", site.settings, site.access, site.registry, ROOT, ""),
        speaker="root",
        dry_run=False,
        force=False,
        timeout_s=SECONDS,
        on_begin=fail,
    )
    for _ in range(2):
        with pytest.raises(AuditUnavailable):
            run.begin()
    assert len(attempts) == 2
