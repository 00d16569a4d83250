"""Status of a daemon that really runs."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bank_cluster import ACCOUNTS, SHELL, bank_site
from job_submission import wait_until
from prometheus_client.parser import text_string_to_metric_families
from sandbox_daemon import Daemon as DaemonInside
from spool_daemon import Daemon, settings_in, submit

import write_dashboard
from steward.admin.status.requests import MetricsRequest, StatusShowAnswer, StatusShowRequest
from steward.admin.status.workers import read_daemon_status
from steward.bank.gate.client import GateClient
from steward.bank.gate.requests import RemoteMeans
from steward.bank.money import MICRO
from steward.core.access import Caller
from steward.core.config.reader import LoadedConfig, render_config
from steward.core.databases import DATABASES, SecondWriter
from steward.core.errors import PermissionRefused
from steward.core.sqlite import SqliteError, open_database
from steward.daemon.contexts import make_registry
from steward.sandbox import Sandbox

WRITE = """
import sys
from steward.core.sqlite import open_database
from steward.jobs.tables import MIGRATIONS
open_database(sys.argv[1], MIGRATIONS).close()
"""


def told(daemon: Daemon | DaemonInside, home: Path, *words: str) -> str:
    """Return the output of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "steward", *words, "--config", str(home / "steward.toml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def figures(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return each figure of a scrape by its name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_declared_worker_alone_writes_each_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steward.core.databases.TAKEOVER_S", 0.0)

    def find_writers() -> dict[str, str]:
        status = read_daemon_status(daemon.settings.state_dir)
        workers = {str(line.pid): line.name for line in status.workers} if status else {}
        writers = {}
        for file in filter(lambda file: file.has_one_writer, DATABASES):
            path = file.locate(daemon.settings.state_dir, "c1")
            if os.path.exists(path):
                try:
                    open_database(path, ()).close()
                except SecondWriter as refusal:
                    _, _, holder = str(refusal).partition(" by process ")
                    writers[file.name] = workers.get(holder.partition(",")[0], "unknown")
                except SqliteError:
                    writers[file.name] = "none"  # the newer schema comes after the lock
        return writers

    settings = settings_in(tmp_path)
    with Daemon(settings, tmp_path) as daemon:
        submit(tmp_path, range(1, 4))
        daemon.wait(lambda: daemon.is_quiet(3))
        declared = {file.name: file.writers[0] for file in DATABASES}
        names = ("journal.db", "jobs.db", "history.db", "accounting-log.db")
        writers = {name: declared[name] for name in names}
        daemon.wait(lambda: find_writers() == writers)
        for pid in daemon.parts():
            os.kill(pid, signal.SIGKILL)
        submit(tmp_path, range(4, 6))
        daemon.wait(lambda: daemon.is_quiet(5))
        daemon.wait(lambda: find_writers() == writers)
        second = subprocess.run(
            [sys.executable, "-c", WRITE, f"{settings.state_dir}/jobs.db"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "only the worker jobs may write it" in second.stderr
        assert daemon.stop() == 0
        subprocess.run([sys.executable, "-c", WRITE, f"{settings.state_dir}/jobs.db"], check=True)


def test_a_daemon_is_told_of_part_by_part(tmp_path: Path) -> None:
    with Daemon(settings_in(tmp_path), tmp_path) as daemon:
        submit(tmp_path, range(1, 4))
        daemon.wait(lambda: daemon.is_quiet(3))

        def show() -> Any:
            return json.loads(told(daemon, tmp_path, "status", "--json"))

        daemon.wait(lambda: all(part["pid"] for part in show()["workers"]))
        first = show()
        assert first["running"] is True
        assert first["unknown"] == {}
        parts = {part["name"]: part for part in first["workers"]}
        assert {part["pid"] for part in parts.values()} == set(daemon.parts())
        assert {one["name"] for one in first["consumers"]} >= {"jobs", "archive.files"}
        assert all(one["lag"] == 0 for one in first["consumers"])
        assert [one["state"] for one in first["sinks"]] == ["running"]
        assert first["journal"]["head"] >= 3

        os.kill(parts["jobs"]["pid"], signal.SIGKILL)
        daemon.wait(lambda: told_of(show(), "jobs")["restarts"] == 1)
        daemon.wait(lambda: told_of(show(), "jobs")["pid"] not in (0, parts["jobs"]["pid"]))
        now = told_of(show(), "jobs")
        assert now["error"] == "was ended by signal 9"
        assert now["error_at"] is not None
        others = {p["name"]: p["pid"] for p in show()["workers"] if p["name"] != "jobs"}
        assert others == {name: p["pid"] for name, p in parts.items() if name != "jobs"}

        found = figures(told(daemon, tmp_path, "metrics"))
        assert found["steward_up", ()] == 1
        assert found["steward_worker_restarts_total", (("worker", "jobs"),)] == 1
        assert found["steward_worker_restarts_total", (("worker", "journal"),)] == 0
        assert found["steward_consumer_lag_events", (("consumer", "jobs"),)] == 0
        assert found["steward_sink_up", (("kind", "files"), ("sink", "files"))] == 1
        told(daemon, tmp_path, "metrics", "--output", str(tmp_path / "steward.prom"))
        assert figures((tmp_path / "steward.prom").read_text()).keys() == found.keys()
        rows = told(daemon, tmp_path, "status", "-P").splitlines()
        assert "worker jobs|running|1 restart, the last because it was ended by signal 9" in rows
    # A killed supervisor left its file, which does not count as a running daemon.
    answer = msgspec.json.decode(told(daemon, tmp_path, "status", "--json"), type=StatusShowAnswer)
    assert not answer.running
    assert not answer.workers
    assert figures(told(daemon, tmp_path, "metrics"))["steward_up", ()] == 0


def test_a_daemon_in_a_container_is_told_of_from_outside(sandbox: Sandbox) -> None:
    daemon = DaemonInside(sandbox, Path(sandbox.directory) / "seen-from-outside")

    def shown() -> Any:
        return json.loads(told(daemon, daemon.home, "status", "--json"))

    daemon.start()
    try:
        outside, inside = shown(), daemon.ask_json("status")
        # Process ids inside belong to other processes here, or to none.
        assert inside["workers"][0]["pid"] != 0
        for one in (outside, inside):
            assert one["running"] is True
            assert one["since"] == inside["since"]
            assert {part["name"]: part["pid"] for part in one["workers"]} == {
                part["name"]: part["pid"] for part in inside["workers"]
            }
        assert figures(told(daemon, daemon.home, "metrics"))["steward_up", ()] == 1
        doctor = told(daemon, daemon.home, "doctor", "--only", "daemon,workers", "--json")
        assert {one["status"] for one in json.loads(doctor)["findings"]} == {"ok"}
    finally:
        daemon.close()
    # Killed: the status file belongs to no running daemon, even if its pid is in use again.
    assert shown()["running"] is False
    assert shown()["workers"] == []


def test_a_second_daemon_does_not_speak_for_the_first(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    (tmp_path / "second").mkdir()
    with Daemon(settings, tmp_path) as first:

        def pids() -> set[int]:
            return {
                part["pid"]
                for part in json.loads(told(first, tmp_path, "status", "--json"))["workers"]
            }

        first.wait(lambda: first.is_quiet(0) and bool(pids()) and 0 not in pids())
        assert pids() == set(first.parts())
        with Daemon(settings, tmp_path / "second") as second:
            second.wait(lambda: "another Steward uses" in second.log())
            assert pids() == set(first.parts())
            first.kill()
            second.wait(lambda: bool(pids()) and pids() <= set(second.parts()))


def told_of(answer: Any, part: str) -> Any:
    """Return the status of one worker."""
    (found,) = (one for one in answer["workers"] if one["name"] == part)
    return found


def test_only_operators_and_the_web_process_are_told(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    with Daemon(settings, tmp_path) as daemon:
        daemon.wait(lambda: daemon.is_quiet(0))
        mine = msgspec.structs.replace(
            settings, web=msgspec.structs.replace(settings.web, user="nobody")
        )
        ask = make_registry(mine).call
        somebody, nobody = Caller(uid=4001, user="ada"), Caller(uid=65534, user="nobody")
        with pytest.raises(PermissionRefused):
            ask("status.show", somebody, StatusShowRequest())
        with pytest.raises(PermissionRefused):
            ask("status.metrics", somebody, MetricsRequest())
        with pytest.raises(PermissionRefused):
            ask("status.show", nobody, StatusShowRequest())
        assert "steward_up 1.0" in ask("status.metrics", nobody, MetricsRequest()).text


@pytest.mark.wide
@pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser")
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_the_dashboard_names_only_what_a_real_scrape_has(slurm_version: str) -> None:
    assert write_dashboard.PATH.read_text() == write_dashboard.text()
    with bank_site(slurm_version) as site, socket.create_server(("127.0.0.1", 0)) as pages:
        port = pages.getsockname()[1]
        web = msgspec.structs.replace(site.settings.web, listen=f"127.0.0.1:{port}")
        site.settings = site.daemon.settings = msgspec.structs.replace(site.settings, web=web)
        site.daemon.config.write_text(render_config(LoadedConfig(site.settings)))
        site.open({ACCOUNTS[0]: 1000 * MICRO})
        site.start()
        job = site.submit(f"{SHELL}sleep 2\n", time="1")
        site.until_charged([job])
        wait_until(lambda: "steward_reconciled_time" in site.daemon.ask("metrics").stdout, 60)
        # As it is where accounts have what a myBRC server says.
        means = RemoteMeans(at_us=time.time_ns() // 1000)
        GateClient(site.settings.state_dir).send_remote_means({ACCOUNTS[0]: means})
        found = site.daemon.ask("metrics").stdout
    had = {sample[0] for sample in figures(found)}
    # It is there only while something is wrong.
    had.add("steward_unknown")
    queries = [
        target["expr"]
        for panel in write_dashboard.dashboard()["panels"]
        for target in panel.get("targets", ())
    ]
    named = {name for query in queries for name in re.findall(r"steward_\w+", query)}
    assert named <= had, named - had
    # And every field of the status appears as a metric.
    assert {name for name in had if not name.endswith(("_created", "_info"))} <= named
    assert ("steward_web_up", ()) in figures(found)
    assert figures(found)["steward_slurm_up", (("cluster", "sandbox"),)] == 1
