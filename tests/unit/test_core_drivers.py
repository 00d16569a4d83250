"""Missing drivers: each makes one sink or store unavailable, and the daemon runs."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from harness.commands import fill_spool
from harness.jobacct import LogSite, run
from steward.bank.errors import LedgerUnavailable
from steward.bank.ledger import open_ledger
from steward.bank.settings import BankSettings
from steward.core import drivers
from steward.core.config import Settings
from steward.core.config.reader import load_settings
from steward.core.drivers import DRIVERS, OptionalDriver
from steward.core.errors import Unavailable
from steward.core.events import Event
from steward.demo.components import format_configuration
from steward.extensions.jobacct_plugins.log.parquet import write_parquet
from steward.jobs.line_queries import LineFilter
from steward.jobs.line_sources import ParquetSource, list_closed_days
from steward.slurm.settings import ClusterSettings

CONFIG = """\
state_dir = "{root}/state"
run_dir = "{root}"
[cluster.c1]
slurm = false
spool = "{root}/spool"
[archive.sink.files]
path = "{root}/archive"
[archive.sink.es]
kind = "elasticsearch"
urls = ["http://127.0.0.1:9"]
[archive.sink.os]
kind = "opensearch"
urls = ["http://127.0.0.1:9"]
[archive.sink.ka]
kind = "kafka"
[archive.sink.ka.broker]
servers = ["127.0.0.1:9"]
[consume.topic.broker]
servers = ["127.0.0.1:9"]
[bank]
enabled = true
database = "postgresql+psycopg://steward@127.0.0.1:9/steward"
"""
PACKAGES = {
    "archive.sink.ka": "confluent-kafka",
    "consume.topic": "confluent-kafka",
    "bank.database": "psycopg",
    "accounting.type": "duckdb",
}
BLOCKED = "import sys\n" + "".join(f"sys.modules[{one.module!r}] = None\n" for one in DRIVERS)


class BareDaemon:
    """Daemon whose interpreter lacks the drivers."""

    def __init__(self, root: Path) -> None:
        (root / "blocked").mkdir()
        (root / "blocked/sitecustomize.py").write_text(BLOCKED)
        fill_spool(root / "spool")
        self.root = root
        self.path = root / "steward.toml"
        self.path.write_text(CONFIG.format(root=root))
        self.env = {
            **os.environ,
            "PYTHONPATH": str(root / "blocked"),
            "NOTIFY_SOCKET": str(root / "notify"),
            "COLUMNS": "400",
        }
        with open(root / "log", "wb") as log:
            self.process = subprocess.Popen(self._words("serve"), stderr=log, env=self.env)

    def _words(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "steward", *words, "--config", str(self.path)]

    def steward(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self._words(*words),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def log(self) -> str:
        return (self.root / "log").read_text(errors="replace")

    def wait_for_log(self, text: str) -> None:
        deadline = time.monotonic() + 120
        while text not in self.log():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[BareDaemon]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(120)
        site = BareDaemon(tmp_path)
        try:
            while b"READY=1" not in manager.recv(4096):
                pass
            yield site
        finally:
            site.end()


def block(monkeypatch: pytest.MonkeyPatch, driver: OptionalDriver) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == driver.module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, driver.module, None)


def test_the_daemon_runs_without_any_driver_and_tells_how_to_install_each(site: BareDaemon) -> None:
    for name in ("es", "os", "ka"):
        site.wait_for_log(f"archive.{name}")
    site.wait_for_log("the ledger postgresql")
    deadline = time.monotonic() + 120
    while len(list((site.root / "archive").rglob("10*.sh"))) < 4:
        assert time.monotonic() < deadline, site.log()
        time.sleep(0.1)

    done = site.steward("status", "--json")
    assert done.returncode == 0, done.stderr
    unavailable = json.loads(done.stdout)["unavailable"]
    assert unavailable.keys() == PACKAGES.keys()
    checked = site.steward("config", "check")
    assert checked.returncode == 0, checked.stderr
    shown = site.steward("status").stdout
    found = json.loads(site.steward("doctor", "--json").stdout)["findings"]
    told = [one["finding"] for one in found]
    log = site.log()
    for key, package in PACKAGES.items():
        line = f"the Python package {package} is not installed: run {sys.executable} -m pip install"
        assert unavailable[key].startswith(line)
        assert f"{line} '{package}" in checked.stderr.replace("[binary]", "")
        assert f"{key} is unavailable: {line}" in log.replace("[binary]", "")
        assert any(line in what for what in told), (key, told)
        assert line in shown
    assert "Traceback" not in log + done.stderr + checked.stderr
    assert "ModuleNotFoundError" not in log
    assert {
        one["object"] for one in found if one["check"] == "sinks" and one["status"] == "wrong"
    } == {
        "es",
        "os",
        "ka",
    }


def test_installation_follows_how_steward_was_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drivers.KAFKA.install_line == f"{sys.executable} -m pip install 'confluent-kafka>=2.8'"
    python = "py{}.{}".format(*sys.version_info)
    monkeypatch.setattr(sys, "prefix", "/opt/steward/python3.11")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert drivers.KAFKA.install_line == f"apt-get install ./steward-kafka_*+{python}_*.deb"
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert drivers.KAFKA.install_line == f"dnf install ./steward-kafka-*.{python}.*.rpm"


def test_the_demo_needs_no_driver(tmp_path: Path) -> None:
    path = tmp_path / "steward.toml"
    path.write_text(
        format_configuration(
            state_dir=f"{tmp_path}/state",
            run_dir=str(tmp_path),
            cluster_name="c1",
            cluster_settings=ClusterSettings(),
            munge_socket=f"{tmp_path}/munge",
            archive_dir=f"{tmp_path}/archive",
            part_lines=["[bank]", "enabled = true", ""],
        )
    )
    assert list(drivers.list_needed_drivers(load_settings(str(path)))) == []


def test_a_ledger_without_its_driver_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block(monkeypatch, drivers.POSTGRESQL)
    monkeypatch.delitem(sys.modules, "steward.bank.ledger.postgresql", raising=False)
    bank = BankSettings(enabled=True, database="postgresql://steward:secret@127.0.0.1:9/steward")
    with pytest.raises(LedgerUnavailable, match="psycopg is not installed") as caught:
        open_ledger(Settings(state_dir=str(tmp_path), bank=bank))
    assert "secret" not in str(caught.value)


def test_parquet_without_its_driver_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block(monkeypatch, drivers.PARQUET)
    with pytest.raises(Unavailable, match="duckdb is not installed"):
        write_parquet([], str(tmp_path / "lines"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Unavailable, match="duckdb is not installed"):
        list(ParquetSource([str(tmp_path / "lines")]).rows(LineFilter(), ["job_id"], steps=True))
    assert list_closed_days(str(tmp_path), 0, 2_000_000_000_000_000) == []
    (tmp_path / "2026-03-01.jsonl").touch()
    with pytest.raises(
        Unavailable, match=r"cannot read the closed days 2026-03-01 to 2026-03-01: .* not installed"
    ):
        list_closed_days(str(tmp_path), 0, 2_000_000_000_000_000)


def test_a_day_stays_open_until_the_driver_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site = LogSite(tmp_path)

    def write(*events: Event) -> list[str]:
        site.write(*events)
        return site.names()

    assert write(run(1)) == ["2026-03-01.jsonl"]
    site.now += timedelta(days=9)
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked/sitecustomize.py").write_text(BLOCKED)
    with monkeypatch.context() as without:
        without.setenv("PYTHONPATH", str(tmp_path / "blocked"))
        assert "2026-03-01.jsonl" in write()
    assert "duckdb is not installed" in caplog.text
    assert write() == ["2026-03-01.jsonl.zst", "2026-03-01.parquet"]
