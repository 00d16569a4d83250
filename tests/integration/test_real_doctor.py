"""Doctor on a real daemon and Slurm: without findings, then with one fault after another."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from job_submission import submit_to, wait_until
from pysqlite3 import dbapi2
from sandbox_daemon import STEWARD, Daemon

from servers.server import free_port
from steward.archive.settings import FilesSinkSettings
from steward.automation.settings import RulesSettings
from steward.bank.settings import BankSettings
from steward.core.config import AccessSettings, ArchiveSettings
from steward.core.config.reader import LoadedConfig, render_config
from steward.extensions.search_servers.settings import OpenSearchSinkSettings
from steward.sandbox import Sandbox, SandboxSpec

pytestmark = [pytest.mark.wide, pytest.mark.timeout(900)]

JOB = "#!/bin/sh\ntrue\n"


class Patient:
    """Daemon, and the findings of the doctor about it."""

    def __init__(self, cluster: Sandbox) -> None:
        self.cluster = cluster
        self.users = list(cluster.users)
        self.daemon = daemon = Daemon(cluster, Path(cluster.directory) / "steward")
        daemon.settings = msgspec.structs.replace(
            daemon.settings,
            access=AccessSettings(operators=(self.users[0],)),
            bank=BankSettings(enabled=True, unknown_accounts="allow"),
        )
        self.write()
        daemon.start()
        self.unpriced = self.says("--only", "prices")["prices box"]
        daemon.ask("bank", "rate", "create", "*", "--weight", "cpu=1")

    def write(self) -> None:
        """Write the present configuration."""
        self.daemon.config.write_text(render_config(LoadedConfig(self.daemon.settings)))
        self.daemon.config.chmod(0o640)

    def says(self, *words: str) -> dict[str, dict[str, Any]]:
        """Return its findings by check and object."""
        done = self.daemon.ask("doctor", "--json", *words, check=False)
        assert done.returncode in (0, 1), done.stderr
        answer = json.loads(done.stdout)
        assert (answer["status"] == "wrong") == (done.returncode == 1)
        return {f"{one['check']} {one['object']}".strip(): one for one in answer["findings"]}

    def wrong(self, *words: str) -> set[str]:
        """Return the findings that are wrong."""
        return {name for name, one in self.says(*words).items() if one["status"] == "wrong"}


@pytest.fixture(scope="module")
def patient(slurm_version: str) -> Iterator[Patient]:
    with Sandbox.up(SandboxSpec(slurm=slurm_version, nodes=1), report=print) as cluster:
        patient = Patient(cluster)
        try:
            yield patient
        finally:
            patient.daemon.close()


@pytest.mark.matrix
@pytest.mark.interface
def test_a_daemon_that_is_well(patient: Patient) -> None:
    submit_to(patient.cluster, JOB, user=patient.users[0], output="/dev/null")
    wait_until(lambda: patient.wrong() == set(), 60)
    found = patient.says()
    assert found["clocks box"]["status"] == "ok", found["clocks box"]
    assert found["slurm box"]["status"] == "ok", found["slurm box"]
    assert found["snapshots box"]["status"] == "ok"
    assert found["ledger"]["status"] == "ok"
    assert found["gate"]["status"] == "ok"
    assert "the check failed" not in str(found)


def test_operators_ask_the_daemon_and_others_are_refused(patient: Patient) -> None:
    operator, other = patient.users[:2]
    done = patient.daemon.ask("doctor", "--json", user=operator, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {one["check"] for one in json.loads(done.stdout)["findings"]} >= {"spool", "ledger"}
    done = patient.daemon.ask("doctor", user=other, check=False)
    assert done.returncode == 1
    assert "only operators" in done.stderr


@pytest.mark.matrix
@pytest.mark.interface
def test_slurmctld_is_away(patient: Patient) -> None:
    patient.cluster.stop_service("slurmctld")
    try:
        found = patient.says()
        assert {name for name, one in found.items() if one["status"] == "wrong"} == {"slurm box"}
        # A ping that a busy host leaves without an answer is another's fault.
        wait_until(lambda: "is not running" in patient.says()["slurm box"]["finding"], 60)
        assert found["clocks box"]["status"] == found["jobcomp box"]["status"] == "skipped"
        # Checks that do not concern slurmctld run all the same.
        assert found["spool box"]["status"] == found["ledger"]["status"] == "ok"
    finally:
        patient.cluster.restart_controller()


def test_a_part_that_was_killed_is_told(patient: Patient) -> None:
    before = patient.says("--only", "workers")
    assert before["workers"]["status"] == "ok"
    children = Path(f"/proc/{patient.daemon.pid}/task/{patient.daemon.pid}/children")
    named = {
        Path(f"/proc/{pid}/comm").read_text().strip(): int(pid)
        for pid in children.read_text().split()
    }
    os.kill(named["steward catalog"], signal.SIGKILL)
    wait_until(lambda: "workers catalog" in patient.says("--only", "workers"), 30)
    wait_until(lambda: patient.wrong("--only", "workers") == set(), 30)
    told = patient.says("--only", "workers")["workers catalog"]
    assert told["status"] == "warning"
    assert "restarted 1 time:" in told["finding"]


def test_the_off_switch_is_told_with_what_mends_it(patient: Patient) -> None:
    switch = Path(patient.daemon.settings.gate_off)
    switch.touch()
    try:
        assert patient.wrong() == {"gate gate.off"}
        done = patient.daemon.ask("doctor", "--only", "gate", check=False)
        assert f"    rm {switch}" in done.stdout.splitlines()
    finally:
        switch.unlink()


def test_a_spool_that_nobody_watches(patient: Patient) -> None:
    stale = Path(patient.cluster.spool) / "hash.7" / "job.77777"
    stale.mkdir(parents=True)
    # A script that the daemon did take would be known: this one came and is old at once.
    script = stale / "script"
    patient.daemon.stop()
    try:
        script.write_bytes(b"#!/bin/sh\n\0")
        os.utime(script, (1_790_000_000, 1_790_000_000))
        found = patient.says("--only", "spool,daemon,workers")
        assert found["daemon"]["status"] == found["workers"]["status"] == "wrong"
        assert "1 script of" in found["spool box"]["finding"]
        assert "job 77777" in found["spool box"]["finding"]
    finally:
        shutil.rmtree(stale)
        patient.daemon.start()
    wait_until(lambda: patient.wrong() == set(), 60)


def test_a_ledger_that_does_not_add_up(patient: Patient) -> None:
    path = f"{patient.daemon.settings.state_dir}/ledger.db"
    connection = dbapi2.connect(path)
    try:
        # As a disk's error might, past everything that keeps entries as they are.
        connection.execute("UPDATE allocation SET balance = balance + 1 WHERE number = 1")
        connection.commit()
        assert patient.wrong("--only", "ledger") != set()
        connection.execute("UPDATE allocation SET balance = balance - 1 WHERE number = 1")
        connection.commit()
    finally:
        connection.close()
    assert patient.wrong("--only", "ledger") == set()


def test_partitions_that_nobody_gave_a_rate(patient: Patient) -> None:
    assert patient.unpriced["status"] == "wrong"
    assert patient.unpriced["finding"].endswith("whose jobs are not charged yet: debug, main")
    assert patient.says("--only", "prices")["prices box"]["status"] == "ok"


def test_a_rule_that_cannot_be_read(patient: Patient) -> None:
    kept = patient.daemon.settings
    directory = patient.daemon.home / "rules.d"
    directory.mkdir()
    (directory / "broken.yaml").write_text("name: broken\n")
    rules = RulesSettings(mode="on", directories=(str(directory), "shipped"))
    patient.daemon.settings = msgspec.structs.replace(kept, rules=rules)
    patient.write()
    try:
        assert patient.wrong("--only", "rules") == {"rules broken.yaml"}
        (directory / "broken.yaml").unlink()
        assert patient.says("--only", "rules")["rules"]["status"] == "ok"
    finally:
        patient.daemon.settings = kept
        patient.write()


def test_a_search_server_that_is_away(patient: Patient) -> None:
    kept = patient.daemon.settings
    url = f"http://127.0.0.1:{free_port()}"
    sinks = {**kept.archive.sink, "search": OpenSearchSinkSettings(urls=(url,))}
    patient.daemon.settings = msgspec.structs.replace(kept, archive=ArchiveSettings(sink=sinks))
    patient.write()
    try:
        found = patient.says("--only", "sinks")
        assert found["sinks files"]["status"] == "ok"
        assert found["sinks search"]["status"] == "wrong"
        assert found["sinks search"]["checked"] == url
    finally:
        patient.daemon.settings = kept
        patient.write()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_disk_that_is_full(patient: Patient, tmp_path: Path) -> None:
    kept = patient.daemon.settings
    small = Path(patient.cluster.directory) / "small"
    small.mkdir()
    patient.cluster.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", str(small)])
    patient.daemon.settings = msgspec.structs.replace(
        kept, archive=ArchiveSettings(sink={"files": FilesSinkSettings(path=str(small))})
    )
    patient.write()
    try:
        assert patient.wrong("--only", "disks") == set()
        patient.cluster.run(["dd", "if=/dev/zero", f"of={small}/x", "bs=1k", "count=1020"])
        assert patient.wrong("--only", "disks") == {"disks archive.files"}
    finally:
        patient.daemon.settings = kept
        patient.write()
        patient.cluster.run(["umount", str(small)])


def test_the_command_needs_no_daemon_to_say_that_there_is_none(patient: Patient) -> None:
    empty = {"STEWARD_CONFIG": "/nowhere/steward.toml"}
    done = patient.cluster.run([STEWARD, "doctor", "--json"], env=empty, check=False)
    assert done.returncode == 1
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["check"], finding["status"]) == ("file", "wrong")
    assert "no such file: name the configuration" in finding["finding"]
