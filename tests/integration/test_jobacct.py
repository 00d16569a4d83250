"""Job log and accounting plugins in a real daemon, with kills of workers, and on a real Slurm.

``STEWARD_KILL_SEED`` repeats the instants of an earlier run.
"""

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from job_submission import Submit, wait_until
from sandbox_daemon import Daemon as ClusterDaemon
from spool_daemon import Daemon, chance_of, children_of, settings_in

from harness.events import NOON
from steward.accounting.settings import AccountingSettings
from steward.core.config import Settings
from steward.core.events import RUN_END, RUN_START, STEP_USAGE, Event
from steward.core.journal import JournalLink
from steward.core.records import JobRecord
from steward.core.usage import RunEvent, StepUsage, TaskUsage
from steward.core.waits import Stop
from steward.sandbox import Sandbox

DOCS = Path(__file__).parents[2] / "docs" / "plugins.md"

WILD = """
import os, signal, sys, time
from steward.extensions.jobacct_plugins import JobAcctPlugin

class Wild(JobAcctPlugin):
    plugin_name = "does what no plugin should"
    plugin_type = "jobacct/wild"

    def slurmctld_jobacct_init(self, location, parameters):
        self.path = os.path.join(os.environ["WILD"], "told")
        self.tell("init")

    def tell(self, text):
        with open(self.path, "a") as file:
            print(text, file=file)

    def slurmctld_jobacct_job_complete(self, job):
        self.tell(job.job_id)
        deed = job.job_id % 10
        if deed == 1:
            raise RuntimeError("no")
        if deed == 2:
            sys.exit(1)
        if deed == 3:
            time.sleep(1000)
        if deed == 4 and job.job_id < 10:
            os._exit(7)
        if deed == 5 and job.job_id < 10:
            os.kill(os.getpid(), signal.SIGSEGV)

    def slurmctld_jobacct_fini(self):
        self.tell("fini")
"""


def run(job_id: int) -> list[Event]:
    """Return the events of a run from the consumer ``jobs``: start, usage and end."""
    end = NOON + timedelta(minutes=job_id)
    record = JobRecord(
        job_id=job_id,
        submit=NOON,
        start=NOON,
        end=end,
        state="COMPLETED",
        user="ada",
        name=f"job{job_id}",
    )
    fact = RunEvent(job_id=job_id, first_submit=NOON, restarts=0, record=record)
    task = TaskUsage(task=0, pid=7, status=0, ended_us=0, user_us=1000, system_us=10)
    usage = StepUsage(
        job_id=job_id,
        first_submit=NOON,
        restarts=0,
        step="batch",
        node="n1",
        launched_us=1,
        tasks=(task,),
    )
    return [
        Event(
            kind=kind,
            cluster="c1",
            key=f"{kind}:{job_id}",
            at=end,
            # The journal need not keep old events for a consumer that has never started.
            seen_at=datetime.now(UTC),
            source="jobs",
            body=body,
        )
        for kind, body in ((RUN_START, fact), (STEP_USAGE, usage), (RUN_END, fact))
    ]


def tell(settings: Settings, jobs: range) -> None:
    """Append runs to the journal of a daemon."""
    link = JournalLink(settings.state_dir, Stop())
    for job_id in jobs:
        link.append(run(job_id))
    link.close()


def logged(settings: Settings) -> list[dict[str, Any]]:
    """Return the records of open days, except for a line that is being written."""
    files = sorted(Path(settings.state_dir, "joblog").glob("*.jsonl"))
    return [json.loads(line) for path in files for line in _whole_lines(path)]


def _whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().rpartition(b"\n")[0].splitlines()


def install(package: Path, target: Path) -> None:
    """Install a package as users do, but without a network."""
    words = ["install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", *words),
            *("--target", str(target), str(package)),
        ],
        check=True,
        timeout=240,
    )


def package_of(directory: Path, module: str, source: str, project: str) -> Path:
    directory.mkdir()
    (directory / f"{module}.py").write_text(source)
    (directory / "pyproject.toml").write_text(project)
    return directory


def blocks() -> tuple[str, str]:
    """Return the plugin that docs/plugins.md shows: its module and its project file."""
    text = DOCS.read_text(encoding="utf-8")
    (module,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (project,) = re.findall(r"```ini\n(.*?)```", text, re.DOTALL)
    return module, project


def test_the_plugin_of_the_docs_is_thirty_lines_and_works(
    fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, project = blocks()
    assert len(module.splitlines()) <= 30
    install(package_of(fast / "csv", "site_jobacct", module, project), fast / "site")
    monkeypatch.setenv("PYTHONPATH", str(fast / "site"))
    accounting = AccountingSettings(type="jobacct/log,jobacct/csv", location=str(fast / "books"))
    settings = settings_in(fast, accounting=accounting)
    path = fast / "books" / "runs.csv"

    def rows() -> list[list[str]]:
        with path.open(newline="") as file:
            return list(csv.reader(file))

    with Daemon(settings, fast) as daemon:
        tell(settings, range(1, 21))
        daemon.wait(lambda: path.exists() and len(rows()) == 20)
        assert rows()[0][:4] == ["c1/run.end:1", "1", "ada", "COMPLETED"]
        # A reload starts new processes, and forgets nothing.
        os.kill(daemon.pid, signal.SIGHUP)
        tell(settings, range(21, 31))
        daemon.wait(lambda: len({row[0] for row in rows()}) == 30)
        daemon.wait(lambda: len(list((fast / "books").glob("*.jsonl"))) == 1)
        answer = subprocess.run(
            [sys.executable, "-m", "steward", "accounting", "plugins", "--json"],
            env={**os.environ, "STEWARD_CONFIG": str(fast / "steward.toml")},
            check=True,
            capture_output=True,
            timeout=60,
        )
        plugins = {one["type"]: one for one in json.loads(answer.stdout)["plugins"]}
        assert plugins["jobacct/csv"]["package"] == "site-jobacct 1.0"
        assert [one["used"] for one in plugins.values()] == [True, True, False]
        assert daemon.stop() == 0


@pytest.mark.long
def test_a_plugin_gone_wild_harms_nobody_but_itself(
    fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = blocks()[1].replace("csv = ", "wild = ").replace("CsvPlugin", "Wild")
    install(package_of(fast / "wild", "site_jobacct", WILD, project), fast / "site")
    monkeypatch.setenv("PYTHONPATH", str(fast / "site"))
    monkeypatch.setenv("WILD", str(fast))
    accounting = AccountingSettings(type="jobacct/log,jobacct/wild", hook_timeout_s=0.3)
    settings = settings_in(fast, accounting=accounting)
    with Daemon(settings, fast) as daemon:
        tell(settings, range(1, 31))
        daemon.wait(lambda: len(logged(settings)) == 4 * 30)
        path = fast / "told"
        daemon.wait(lambda: path.exists() and "30" in path.read_text().split(), 90.0)
        assert daemon.stop() == 0
        said = daemon.log()
    told = path.read_text().split()
    counts = {job_id: told.count(str(job_id)) for job_id in range(1, 31)}
    # Thrice alone, and before that perhaps in a batch with others, which are called again.
    assert {counts.pop(4), counts.pop(5)} <= {3, 4}
    assert set(counts.values()) <= {1, 2}
    assert told[-1] == "fini"
    assert "worker accounting.plugins.wild was ended by signal 11" in said
    assert "worker accounting.log" not in said
    found = subprocess.run(
        [sys.executable, "-m", "steward", "accounting", "plugins", "-P"],
        env={**os.environ, "STEWARD_CONFIG": str(fast / "steward.toml")},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert "jobacct/wild|yes|site-jobacct 1.0|" in found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [10, pytest.param(60, marks=pytest.mark.long)])
def test_kills_of_the_daemon_double_no_record_and_lose_none(fast: Path, kills: int) -> None:
    chance = chance_of("STEWARD_KILL_SEED")
    settings = settings_in(fast)
    total = kills * 60
    done = 0
    with Daemon(settings, fast) as daemon:
        for _ in range(kills):
            tell(settings, range(done + 1, done + 61))
            done += 60
            time.sleep(chance.uniform(0.0, 0.2))
            victims = [pid for pid in daemon.parts() if chance.random() < 0.5]
            if victims and chance.random() < 0.7:
                for pid in set(victims) & set(children_of(daemon.pid)):
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        os.kill(pid, signal.SIGKILL)
            else:
                daemon.kill()
                daemon.start()
        daemon.wait(lambda: len(logged(settings)) >= 4 * total, 60.0)
        assert daemon.stop() == 0
    ids = [record["event"] for record in logged(settings)]
    assert len(ids) == len(set(ids)) == 4 * total


@pytest.mark.matrix
@pytest.mark.interface
def test_jobs_of_a_real_slurm_are_in_the_log(sandbox: Sandbox, submit: Submit) -> None:
    daemon = ClusterDaemon(sandbox, Path(sandbox.directory) / "steward-jobacct")
    daemon.start()
    try:
        good = submit("#!/bin/sh\nsleep 1\n", job_name="good")
        bad = submit("#!/bin/sh\nexit 3\n", job_name="bad")
        location = daemon.state / "joblog"

        def records() -> list[dict[str, Any]]:
            dumped = daemon.ask("accounting", "dump", "-S", "now-1hour").stdout
            return [json.loads(line) for line in dumped.splitlines()]

        def ended() -> dict[int, dict[str, Any]]:
            return {
                one["job_id"]: one["job"] for one in records() if one["record"] == "JOB_TERMINATED"
            }

        wait_until(lambda: {good, bad} <= ended().keys(), 60)
        jobs = ended()
        assert (jobs[good]["state"], jobs[good]["exit_code"]) == ("COMPLETED", 0)
        assert (jobs[bad]["state"], jobs[bad]["exit_code"]) == ("FAILED", 3)
        started = [one for one in records() if one["record"] == "JOB_START"]
        assert {good, bad} <= {one["job_id"] for one in started}
        ids = [one["event"] for one in records()]
        assert len(ids) == len(set(ids))
        assert location.stat().st_mode & 0o777 == 0o700
        user = next(iter(sandbox.users))
        refused = daemon.ask("accounting", "dump", user=user, check=False)
        assert refused.returncode == 1
        assert "only operators" in refused.stderr
        said = daemon.ask("accounting", "purge", "--before", "now-1hour")
        assert "nothing removed yet" in said.stderr
    finally:
        daemon.close()
