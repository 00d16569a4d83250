"""Service principals: their rights, who can become one, and every place that acts as one."""

import ast
import functools
import logging
import os
import re
import socket
import time
import typing
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import steward
from harness.forks import fork_child
from harness.rules import DRAIN
from harness.site import Site
from harness.socket import Question, Told, serving
from steward.admin.credentials import store
from steward.admin.credentials.munge_authentication import make_ticket
from steward.admin.credentials.sessions import CredentialsContext
from steward.automation.errors import RuleError
from steward.automation.operation import load_operations
from steward.automation.rules.parser import parse_rule
from steward.automation.runner import OperationRunner
from steward.bank.ledger import Account, Authorship
from steward.bank.ledger.records import TransferKind
from steward.core.access import Access, Caller, ClusterRoles, act_as, raise_rights
from steward.core.actions import Action, ActionError, Registry
from steward.core.config import AccessSettings
from steward.core.errors import PermissionRefused, StewardError
from steward.core.events import utc_now
from steward.core.logs import LogLimit
from steward.core.principals import (
    BANK,
    PRINCIPALS,
    RULES,
    STATUS,
    ServicePrincipal,
)
from steward.core.rpc import VERSION, ActionRequest
from steward.daemon.registry import ACTIONS
from steward.slurm.job_changes import JobChanges

ROOT = Path(steward.__file__).parent

GIVING = {"Caller", "ServicePrincipal", "act_as", "raise_rights"}
"""Names that make a caller, a principal, or a caller with a principal's rights."""

CALLERS = {
    "admin/credentials/sessions.py CredentialsContext.find_caller": 2,
    "core/access.py act_as": 1,
    "core/access.py get_process_user": 1,
    "daemon/request_service.py RequestService._identify_caller": 1,
}
"""Places that make a Caller: the ways in, the process itself, and service principals."""

PROCESS_USERS = {
    "cli/sacct.py _query_jobs",
    "cli/sacct.py _query_records",
    "client/client.py _run_here",
    "client/places.py run_locally",
    "core/access.py act_as",
}
"""Places that act as the user of this process: commands without a daemon."""

WITHOUT_CALLER = {"automation/rules/execution.py RunnerPerformer.__init__": "RULES"}
"""Places that act as a service principal, because there is no caller."""

RAISED = {
    "admin/status/metrics.py show_metrics": "STATUS",
    "admin/status/summary.py show_status": "STATUS",
}
"""Places that give a caller the rights of a service principal."""

LOWERED = {"core/actions.py Registry.call": {"rank"}}
"""Places that change a caller."""

CALLING = {
    "admin/doctor/context.py CheckContext.call_action": "self.caller",
    "admin/status/summary.py _collect_bank": "service",
    "admin/status/summary.py _collect_gaps": "service",
    "admin/status/summary.py _collect_journal": "service",
    "admin/status/summary.py collect_status": "service",
    "automation/runner.py OperationRun.call_action": "self.caller",
    "client/client.py _run_here": "get_process_user()",
    "client/places.py run_locally": "get_process_user()",
    "daemon/request_service.py RequestService._run": "asker",
    "daemon/request_service.py RequestService._run_once": "asker",
}
"""Places that run an action, with the caller that they pass."""

CHANGING = {
    "automation/runner.py OperationRun.cluster_changes": "ClusterChanges",
    "automation/runner.py OperationRun.jobs": "JobChanges",
    "automation/runner.py OperationRun.triggers": "Triggers",
    "admin/doctor/slurm_checks.py _check_triggers": "Triggers",
    "bank/enforcement.py UnpaidJobs.__init__": "JobChanges",
    "capture/sensor/triggers.py StewardTriggers.__init__": "Triggers",
}
"""Places that open a client which can change a cluster: operations, the bank's enforcement, the
sensor, and a health check that reads."""


RULE = DRAIN.partition("context:")[0]


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield each call in the tree: the function around it, the called name, and the call."""
    for where, node in _nodes():
        if isinstance(node, ast.Call):
            yield where, _name(node.func), node


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@functools.cache
def _nodes() -> list[tuple[str, ast.AST]]:
    """Return calls, imported names, and uses of names that give rights, with functions."""

    def walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*names, child.name)
            elif isinstance(child, ast.Call | ast.alias) or _name(child) in GIVING:
                yield ".".join(names), child
            yield from walk(child, inner)

    return [
        (f"{path.relative_to(ROOT)} {where}", node)
        for path in sorted(ROOT.rglob("*.py"))
        for where, node in walk(ast.parse(path.read_text()), ())
    ]


def test_a_caller_is_made_in_these_places_only() -> None:
    made = [where for where, name, _ in calls() if name == "Caller"]
    assert {where: made.count(where) for where in made} == CALLERS


def test_the_process_user_acts_in_these_places_only() -> None:
    assert {where for where, name, _ in calls() if name == "get_process_user"} == PROCESS_USERS


def test_a_service_principal_acts_without_a_caller_in_these_places_only() -> None:
    acting = {where: node for where, name, node in calls() if name == "act_as"}
    del acting["core/access.py raise_rights"]
    assert {where: ast.unparse(node.args[0]) for where, node in acting.items()} == WITHOUT_CALLER


def test_rights_are_raised_in_these_places_only() -> None:
    raising = {where: node for where, name, node in calls() if name == "raise_rights"}
    assert {where: ast.unparse(node.args[1]) for where, node in raising.items()} == RAISED


def test_a_caller_is_changed_in_these_places_only() -> None:
    fields = {field.name for field in msgspec.structs.fields(Caller)} - {"uid", "user", "how"}
    changing = {}
    for where, name, node in calls():
        changed = {keyword.arg for keyword in node.keywords if keyword.arg in fields}
        if name == "replace" and changed:
            changing[where] = changed
    assert changing == LOWERED


def test_an_action_runs_for_the_caller_who_asked() -> None:
    running = {
        where: ast.unparse(node.args[1])
        for where, name, node in calls()
        if name == "call" and "registry" in ast.unparse(node.func)
    }
    assert running == CALLING


def test_what_gives_rights_has_no_other_name_and_is_called_at_once() -> None:
    called = Counter(name for _, name, _ in calls())
    named = Counter(_name(node) for _, node in _nodes() if not isinstance(node, ast.Call))
    assert all(named[name] == called[name] > 0 for name in ("act_as", "raise_rights"))
    renamed = {
        where: node.name
        for where, node in _nodes()
        if isinstance(node, ast.alias) and node.name in GIVING and node.asname
    }
    assert renamed == {}
    made = {where for where, name, _ in calls() if name == "ServicePrincipal"}
    assert made == {"core/principals.py "}


def test_a_cluster_is_changed_in_these_places_only() -> None:
    clients = {"JobChanges", "ClusterChanges", "Triggers"}
    found = {where: name for where, name, _ in calls() if name in clients}
    assert found == CHANGING


def test_no_request_can_hold_a_caller_or_a_principal() -> None:
    structs = {ActionRequest, *(action.request for action in ACTIONS.values())}
    structs |= {operation.request for operation in load_operations().values()}
    for struct in structs:
        shown = str(typing.get_type_hints(struct, include_extras=True))
        assert "Caller" not in shown, struct
        assert "ServicePrincipal" not in shown, struct


def test_every_permission_names_something_that_exists() -> None:
    known = {*ACTIONS, *load_operations()}
    known |= {f"ledger.{kind}" for kind in typing.get_args(TransferKind)}
    for principal in PRINCIPALS.values():
        changes = {name.removeprefix("slurm.job.") for name in principal.permissions - known}
        assert all(hasattr(JobChanges, name) for name in changes), principal
        assert principal.permissions, principal
    assert all(name == principal.name for name, principal in PRINCIPALS.items())


def test_rules_may_run_every_operation() -> None:
    withheld: set[str] = set()
    assert set(load_operations()) - RULES.permissions == withheld


def test_the_documentation_lists_every_principal_with_its_permissions() -> None:
    page = (ROOT.parents[1] / "docs" / "safety.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (.+) \|$", page, re.MULTILINE)
    listed = {name: frozenset(re.findall(r"`([\w.]+)`", text)) for name, text in rows}
    operations = frozenset(load_operations())
    assert listed.pop("rules") == RULES.permissions - operations
    permissions = {name: one.permissions for name, one in PRINCIPALS.items() if one != RULES}
    assert listed == permissions


def test_status_changes_nothing() -> None:
    assert not any(ACTIONS[name].writes for name in STATUS.permissions)
    assert STATUS.role == "operator"


def services() -> list[Any]:
    return [pytest.param(one, id=one.name) for one in PRINCIPALS.values()]


@pytest.mark.parametrize("principal", services())
def test_a_principal_is_refused_every_action_that_is_not_listed(
    principal: ServicePrincipal,
) -> None:
    caller = act_as(principal)
    assert (caller.how, caller.service, caller.uid) == ("service", principal, os.geteuid())
    registry = Registry(tuple(ACTIONS.values()))
    for name in ACTIONS:
        if name in principal.permissions:
            with pytest.raises(ActionError, match=f"{name} takes a "):
                registry.call(name, caller, None)
        else:
            with pytest.raises(PermissionRefused, match=f"'{principal.name}'.* may not run {name}"):
                registry.call(name, caller, None)


def test_the_registry_and_the_runner_refuse_what_is_not_listed(tmp_path: Path) -> None:
    site = Site(tmp_path)
    registry = Registry(tuple(ACTIONS.values()))
    with pytest.raises(PermissionRefused, match=r"'rules'.* may not run bank\.deposit"):
        registry.call("bank.deposit", act_as(RULES), None)
    runner = OperationRunner(site.settings, site.access, registry)
    with pytest.raises(PermissionRefused, match=r"'status'.* may not run slurm\.node\.drain"):
        runner.run("slurm.node.drain", {"nodes": "n1", "reason": "x"}, act_as(STATUS))
    with pytest.raises(PermissionRefused, match=r"may not run notify\.email"):
        runner.check("notify.email", {"to": ["a"], "subject": "s", "body": "b"}, act_as(STATUS))


def test_a_principal_has_its_own_role_and_no_users() -> None:
    roles = ClusterRoles(admins=frozenset({"root", "rules"}), administrators=frozenset({"root"}))
    settings = AccessSettings(administrators=("root",), operators=("root", "bank"))
    access = Access(settings, os.geteuid(), lambda _: roles)
    assert access.is_operator(act_as(STATUS), "c")
    assert not access.is_administrator(act_as(STATUS), "c")
    assert access.is_administrator(act_as(RULES), "c")


def test_a_raise_of_rights_is_logged_with_who_and_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("steward.core.access.RAISED_RIGHTS_LIMIT", LogLimit())
    caller = Caller(uid=1001, user="ada", how="token", scopes=frozenset({"read"}))
    assert raise_rights(caller, STATUS, "status.show") == act_as(STATUS)
    (record,) = caplog.records
    assert record.getMessage() == (
        "rights raised: ada (token, uid 1001) runs status.show as service principal 'status'"
    )


def test_a_repeated_raise_of_rights_is_logged_once_an_hour_by_all_processes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("steward.core.access.RAISED_RIGHTS_LIMIT", LogLimit())
    ada, bob = (Caller(uid=uid, user=user) for uid, user in ((1001, "ada"), (1002, "bob")))
    child = fork_child(lambda: raise_rights(ada, STATUS, "metrics.show"))
    assert os.waitpid(child, 0)[1] == 0
    now = time.monotonic()
    for caller, action in ((ada, "metrics.show"), (ada, "status.show"), (bob, "metrics.show")):
        raise_rights(caller, STATUS, action)
    monkeypatch.setattr(time, "monotonic", lambda: now + 3601.0)
    for _ in range(2):
        raise_rights(ada, STATUS, "metrics.show")
    levels = [record.levelname for record in caplog.records]
    assert levels == ["DEBUG", "INFO", "INFO", "INFO", "DEBUG"]


def test_a_principal_raises_no_rights(caplog: pytest.LogCaptureFixture) -> None:
    for principal in (STATUS, RULES):
        with pytest.raises(PermissionRefused, match="'rules' of Steward may not run"):
            raise_rights(act_as(RULES), principal, "status.show")
    assert not caplog.records


def test_no_user_signs_as_a_principal() -> None:
    assert Caller(uid=1001, user="ada").signature == "ada"
    assert Caller(uid=1001).signature == "uid 1001"
    assert act_as(BANK).signature == "bank"
    for name in PRINCIPALS:
        assert Caller(uid=1001, user=name).signature == "uid 1001"


def test_the_name_of_a_principal_gives_a_user_nothing() -> None:
    access = Access(AccessSettings(), 900, lambda _: ClusterRoles())
    for name in PRINCIPALS:
        for how in ("service", "socket", "munge", "token"):
            caller = Caller(uid=1001, user=name, how=how)
            assert not access.is_operator(caller, "c")
            assert not access.is_administrator(caller, "c")


def test_the_ledger_refuses_a_principal_what_is_not_listed(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with (
        site.ledger.transaction() as t,
        pytest.raises(PermissionRefused, match=r"'bank'.* may not run ledger\.account\.create"),
    ):
        t.accounts.create(Account(name="physics"), Authorship(who=BANK.name))


def test_no_secret_makes_a_service(tmp_path: Path) -> None:
    site = Site(tmp_path)
    context = CredentialsContext(site.settings, access=site.access)
    for secret in ("service", "service rules", "rules", "st_rules", '{"service":"rules"}'):
        with pytest.raises(StewardError):
            context.find_caller(secret)


def test_a_request_that_names_a_principal_is_refused(tmp_path: Path) -> None:
    line = b'{"v":1,"action":"status.show","args":{},"service":"rules","how":"service"}'
    message = msgspec.json.decode(line, type=ActionRequest)
    assert not hasattr(message, "service")
    registry = Registry(tuple(ACTIONS.values()))
    for fields in ({"service": "rules"}, {"principal": "rules"}, {"asker": {"uid": 0}}):
        with pytest.raises(StewardError):
            registry.decode("status.show", fields)
        with pytest.raises(StewardError):
            registry.decode("automation.run", {"action": "slurm.node.get", **fields})


def show_caller(_context: Any, asker: Caller, _request: Question) -> Told:
    return Told(text=f"{asker.how} {asker.service}", uid=asker.uid, user=asker.user, pid=0)


def test_a_peer_of_the_socket_stays_who_it_is(tmp_path: Path) -> None:
    probe = Action(name="t.show", help="", request=Question, answer=Told, run=show_caller)
    path = str(tmp_path / "socket")
    named = {"service": "rules", "how": "service", "uid": 0, "user": "rules", "rank": "full"}
    claims: list[dict[str, Any]] = [{}, named, {"caller": named}, {"asker": named}]
    with serving(path, asked=Registry((probe,), {"t": lambda: None})):
        for claim in claims:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
                message = {"v": VERSION, "action": "t.show", "args": {}, **claim}
                connection.sendall(msgspec.json.encode(message) + b"\n")
                reply = msgspec.json.decode(connection.makefile("rb").readline())
            told = reply["answer"]
            assert (told["text"], told["uid"]) == ("socket None", os.geteuid()), claim


@pytest.mark.parametrize("user", PRINCIPALS)
def test_a_user_with_the_name_of_a_principal_stays_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    monkeypatch.setattr(store, "has_user_name", lambda _uid, name: name == user)
    site = Site(tmp_path)
    context = CredentialsContext(site.settings, access=site.access)
    now = utc_now()
    credential: dict[str, Any] = {"uid": 4001, "user": user, "how": "service", "now": now}
    credential["expires"] = now + timedelta(hours=1)
    secrets = {
        "munge": make_ticket(4001, user, now),
        "session": context.store.create("session", **credential)[0],
        "token": context.store.create("token", scopes=("admin",), **credential)[0],
    }
    runner = OperationRunner(site.settings, site.access, site.registry)
    for how, secret in secrets.items():
        caller = context.find_caller(secret)
        assert (caller.how, caller.service, caller.signature) == (how, None, "uid 4001")
        assert not site.access.is_operator(caller, "c1")
        with pytest.raises(PermissionRefused):
            runner.run("notify.email", {"to": ["a"], "subject": "s", "body": "b"}, caller)


@pytest.mark.parametrize(
    "extra",
    ["service: bank", "principal: bank", "run_as: bank", "context: {steward: {service: x}}"],
)
def test_a_rule_file_cannot_name_a_principal(extra: str) -> None:
    with pytest.raises(RuleError, match="unknown key"):
        parse_rule(f"{RULE}{extra}\n", "/etc/a.yaml")


def test_the_user_of_a_rule_file_is_nobody(tmp_path: Path) -> None:
    rule = parse_rule(f"{RULE}context: {{user: bank}}\n", "/etc/a.yaml")
    assert "bank" not in str(msgspec.to_builtins(rule, builtin_types=(datetime,)))
