"""Permission to run actions on a real cluster, other actions, and the audit log."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from action_cluster import SLEEP, ActingSite, Hook, healthy, site
from job_submission import PATIENCE, submit_to, wait_until
from sandbox_daemon import STEWARD, Daemon

from steward.automation.operation import load_operations
from steward.core.config.reader import LoadedConfig, render_config
from steward.sandbox import Sandbox

__all__ = ["healthy", "site"]

# A test has a hundred commands run, each of which takes a second on a busy machine.
pytestmark = [pytest.mark.matrix, pytest.mark.wide, pytest.mark.timeout(900)]


def test_configuration(site: ActingSite) -> None:
    assert site.result("slurm.config.get", by="ada", item="cluster_name") == {
        "cluster_name": "sandbox"
    }
    every = site.result("slurm.config.get", by="ada")
    assert every["slurm_user"].startswith("slurm") or every["slurm_user_name"] == "slurm"
    assert "nosuchitem" in site.refused("slurm.config.get", by="ada", item="nosuchitem")


def test_rights(site: ActingSite) -> None:
    """Actions that change something are rejected without permission, before they begin."""
    one = site.nodes[0]
    given: dict[str, dict[str, Any]] = {
        "slurm.node.down": {"nodes": one, "reason": "x"},
        "slurm.node.drain": {"nodes": one, "reason": "x"},
        "slurm.node.resume": {"nodes": one},
        "slurm.node.update": {"nodes": one, "infos": {"weight": 2}},
        "slurm.node.reserve": {"nodes": one, "reservation_name": "r"},
        "slurm.node.unreserve": {"nodes": one, "reservation_name": "r"},
        "slurm.partition.update": {"partition": "main", "infos": {"state": "DOWN"}},
        "slurm.trigger.set": {"program": "/bin/true", "event": "down"},
        "slurm.trigger.unset": {"trigger_ids": "1"},
        "slurm.job.suspend": {"jobids": 1},
        "slurm.job.resume": {"jobids": 1},
        "notify.email": {"to": "root", "subject": "x"},
        "notify.webhook": {"name": "site", "subject": "x"},
        "local.command": {"program": "/bin/true"},
    }
    changing = {
        one.ref: one
        for one in load_operations().values()
        if not one.only_reads and one.role != "owner"
    }
    assert set(given) == set(changing)
    for ref, parameters in given.items():
        right = changing[ref].role
        assert f"{right}s" in site.refused(ref, by="ada", **parameters), ref
        if right == "administrator":
            assert "administrators" in site.refused(ref, by="olga", **parameters), ref
    assert site.node(one)["state"] == "IDLE"


def test_mail(site: ActingSite) -> None:
    done = site.result(
        "notify.email", by="olga", to="root,ops@example.org", subject="node1 is down", body="So."
    )
    assert done == {"to": ["root", "ops@example.org"], "sent": True}
    mail = site.mails.read_text()
    assert "node1 is down" in mail
    assert "root,ops@example.org" in mail
    assert "So." in mail
    dry = site.result("notify.email", "--dry-run", by="olga", to="root", subject="never")
    assert dry["sent"] is False
    assert "never" not in site.mails.read_text()
    why = site.refused("notify.email", by="olga", to="-oQ/tmp,x", subject="x")
    assert "invalid address" in why


def test_webhook(site: ActingSite) -> None:
    done = site.result("notify.webhook", by="olga", name="site", subject="s", body={"n": 1})
    assert done["answer"] == 204
    told = Hook.told[-1]
    assert (told["subject"], told["body"], told["by"]) == ("s", {"n": 1}, "olga")
    count = len(Hook.told)
    site.result("notify.webhook", "--dry-run", by="olga", name="site", subject="s")
    assert len(Hook.told) == count
    gone = site.run("notify.webhook", by="olga", name="gone", subject="s")
    assert (gone["status"], "404" in gone["message"]) == ("failed", True)
    why = site.refused("notify.webhook", by="olga", name="http://evil", subject="s")
    assert "unknown webhook" in why


def list_programs(site: ActingSite, *lines: str, mode: int = 0o644) -> None:
    site.programs.write_text("".join(f"{line}\n" for line in lines))
    site.programs.chmod(mode)


def test_programs(site: ActingSite) -> None:
    program = Path(site.cluster.directory) / "program"
    program.write_text('#!/bin/sh\nfor a in "$@"; do echo "<$a>"; done\necho err >&2\n')
    program.chmod(0o755)
    assert "is not allowed" in site.refused("local.command", program=str(program))
    list_programs(site, "# ours", f"{program}  # a test's", "/bin/false", "/bin/sleep")
    done = site.result("local.command", program=str(program), arguments=["a b", "$(id)", "; x"])
    assert done == {"exit_code": 0, "stdout": "<a b>\n<$(id)>\n<; x>\n", "stderr": "err\n"}
    failed = site.run("local.command", program="/bin/false")
    assert (failed["status"], failed["result"]["exit_code"]) == ("failed", 1)
    assert "is not allowed" in site.refused("local.command", program="/bin/true")
    assert "is not allowed" in site.refused("local.command", program=f"{program} x")
    dry = site.result("local.command", "--dry-run", program=str(program))
    assert dry["would_run"] is True
    program.chmod(0o777)
    assert "writable by root only" in site.refused("local.command", program=str(program))
    list_programs(site, "/bin/true", mode=0o664)
    assert "must belong to root" in site.refused("local.command", program="/bin/true")
    list_programs(site, "/bin/true")
    os.chown(site.programs, site.cluster.users["carl"].uid, -1)
    assert "must belong to root" in site.refused("local.command", program="/bin/true")
    site.programs.unlink()


def test_triggers(site: ActingSite) -> None:
    program = "/bin/true"
    assert "is not allowed" in site.refused("slurm.trigger.set", program=program, event="down")
    list_programs(site, program)
    number = site.result("slurm.trigger.set", program=f"{program} x", event="down")
    assert isinstance(number, int)
    again = site.result("slurm.trigger.set", program=f"{program} x", event="down")
    assert again == number
    one = site.nodes[0]
    on_node = site.result(
        "slurm.trigger.set", program=program, event="drain", nodes=one, offset="10"
    )
    assert on_node != number
    job = submit_to(site.cluster, SLEEP, user="ada", hold=True)
    ended = site.result("slurm.trigger.set", program=program, jobid=job, fini="true")
    shown = site.said("strigger", "--get")
    assert f"{ended}" in shown
    dry = site.result("slurm.trigger.set", "--dry-run", program=program, event="up")
    assert dry["event"] == "up"
    assert " up " not in site.said("strigger", "--get")
    refusals: tuple[dict[str, Any], ...] = (
        {"event": "burst_buffer"},
        {"event": "nosuchevent"},
        {},
        {"event": "down", "nodes": "nope"},
        {"jobid": "999999", "fini": "true"},
        {"jobid": str(job), "fini": "true", "event": "down"},
    )
    for given in refusals:
        assert site.refused("slurm.trigger.set", program=program, **given), given
    assert "never fires" in site.refused("slurm.trigger.set", program=program, event="burst_buffer")
    assert "999" in site.refused("slurm.trigger.unset", trigger_ids=f"{number},999")
    assert "slurm" in site.refused("slurm.trigger.unset", trigger_ids=number, user="ada")
    done = site.result("slurm.trigger.unset", trigger_ids=f"{number},{on_node},{ended}")
    assert all(line["changed"] for line in done.values())
    assert not any(
        line.split()[:1] == [str(number)] for line in site.said("strigger", "--get").splitlines()
    )
    site.result("slurm.job.cancel", by="root", jobids=job)
    site.programs.unlink()


def test_audit_says_who_and_what(healthy: ActingSite) -> None:
    site, one = healthy, healthy.nodes[0]
    by_socket = site.run("slurm.node.drain", nodes=one, reason="who")["id"]
    by_root = site.run("slurm.node.resume", "--force", by="root", nodes=one)["id"]
    rows = {row["id"]: row for row in site.audited()}
    assert (rows[by_socket]["user"], rows[by_socket]["how"]) == ("carl", "socket")
    assert (rows[by_root]["user"], rows[by_root]["how"]) == ("root", "local")
    assert (rows[by_root]["force"], rows[by_socket]["force"]) == (True, False)
    assert rows[by_socket]["parameters"] == {"nodes": one, "reason": "who"}
    assert rows[by_socket]["status"] == "succeeded"
    assert rows[by_socket]["result"][one]["changed"] is True
    state = site.daemon.state
    for name in os.listdir(state):
        if name.startswith("audit.db"):
            status = os.stat(state / name)
            assert (status.st_uid, status.st_mode & 0o777) == (os.stat(state).st_uid, 0o600), name
    own = site.daemon.ask_json("action", "audit", user="carl")["actions"]
    assert by_root in {row["id"] for row in own} or all(row["user"] == "carl" for row in own)
    assert site.daemon.ask_json("action", "audit", user="ada")["actions"] == [
        row for row in site.audited() if row["user"] == "ada"
    ]


def test_an_action_that_was_killed_has_no_end(site: ActingSite) -> None:
    list_programs(site, "/bin/sleep")
    running = site.cluster.popen(
        [
            STEWARD,
            *("action", "run", "local.command", "program=/bin/sleep", "arguments=300"),
        ],
        env={"STEWARD_CONFIG": str(site.daemon.config)},
    )

    def newest() -> Any:
        return site.audited()[0]

    wait_until(
        lambda: (
            bool(site.audited())
            and newest()["action"] == "local.command"
            and newest()["status"] == "running"
        )
    )
    running.send_signal(signal.SIGKILL)
    running.wait(PATIENCE * 10)
    assert newest()["status"] == "unfinished"
    assert newest()["ended"] is None
    site.programs.unlink()


def test_an_action_that_takes_too_long(site: ActingSite) -> None:
    list_programs(site, "/bin/sleep")
    settings = msgspec.structs.replace(
        site.daemon.settings,
        actions=msgspec.structs.replace(site.daemon.settings.actions, timeout_s=0.5),
    )
    hasty = site.daemon.home / "hasty.toml"
    hasty.write_text(render_config(LoadedConfig(settings)))
    began = time.monotonic()
    done = site.cluster.run(
        [STEWARD, "action", "run", "local.command", "program=/bin/sleep", "arguments=600",
         "--json", "--config", str(hasty)],
        check=False,
    )  # fmt: skip
    assert json.loads(done.stdout)["status"] == "timeout"
    assert time.monotonic() - began < 300
    site.programs.unlink()


def test_words_of_the_command_line(site: ActingSite) -> None:
    ask = site.daemon.ask
    assert "write NAME=VALUE" in ask("action", "run", "slurm.node.get", "n1", check=False).stderr
    assert (
        "twice" in ask("action", "run", "slurm.node.get", "nodes=a", "nodes=b", check=False).stderr
    )
    mistyped = ask("action", "run", "slurm.node.get", "node=a", check=False)
    assert "did you mean nodes?" in mistyped.stderr
    assert "slurm.node.get" in ask("action", "run", "slurm.node.got", check=False).stderr
    blank = ask("action", "run", "slurm.node.drain", "nodes= ", "reason=x", check=False)
    assert "missing nodes" in blank.stderr
    text = ask("action", "run", "slurm.config.get", "item=cluster_name", user="ada").stdout
    assert text.splitlines() == [
        "id: 0",
        "status: succeeded",
        "parameters:",
        "  item: cluster_name",
        "result:",
        "  cluster_name: sandbox",
    ]
    names = {one["action"] for one in site.daemon.ask_json("action", "list", user="ada")["actions"]}
    assert names == set(load_operations())
    assert "required" in ask("action", "help", "slurm.node.drain", user="ada").stdout


def test_who_may_by_slurms_own_books(booked_sandbox: Sandbox) -> None:
    """AdminLevel in slurmdbd makes operators and administrators, as it does for Slurm."""
    cluster = booked_sandbox
    for user, level in (("ada", "Operator"), ("bela", "Administrator")):
        cluster.run(["sacctmgr", "-i", "modify", "user", user, "set", f"adminlevel={level}"])
    daemon = Daemon(cluster, Path(cluster.directory) / "steward-actions")
    daemon.start()
    one = min(cluster.run(["sinfo", "-h", "-N", "-o", "%N"]).stdout.split())
    drain = ("action", "run", "slurm.node.drain", f"nodes={one}", "reason=books", "--dry-run")
    reserve = (
        *("action", "run", "slurm.node.reserve", f"nodes={one}", "reservation_name=r"),
        "--dry-run",
    )

    def code(words: tuple[str, ...], user: str) -> int:
        return int(daemon.ask(*words, user=user, check=False).returncode)

    try:
        wait_until(lambda: code(drain, "bela") == 0)
        assert code(reserve, "bela") == 0
        assert code(reserve, "ada") == 0
        assert "administrators" in daemon.ask(*drain, user="ada", check=False).stderr
    finally:
        daemon.close()
        for user in ("ada", "bela"):
            cluster.run(["sacctmgr", "-i", "modify", "user", user, "set", "adminlevel=None"])
