"""Workers that feed consumers: one process runs each, and the log says what it waits for."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from harness.site import Site
from steward.automation.settings import RulesSettings
from steward.bank.settings import BankSettings
from steward.core import databases
from steward.core.databases import SecondWriter
from steward.core.sqlite import SqliteUnavailable
from steward.core.waits import Stop
from steward.daemon import consumer_workers
from steward.daemon.consumer_workers import wait_for_resource
from steward.daemon.workers import make_workers
from steward.extensions.search_servers import OpenSearchSinkSettings

HOLD = """
import sys, time
from steward.core.sqlite import lock_database
lock = lock_database(sys.argv[1])
print("locked", flush=True)
time.sleep(60)
"""


@contextmanager
def hold(path: str) -> Iterator[int]:
    """Run as the worker of a database in another process, which is killed at the end."""
    command = [sys.executable, "-c", HOLD, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        yield process.pid
        process.kill()


@pytest.mark.parametrize(
    ("worker", "database"),
    [("archive.there", "archive-there.db"), ("rules", "rules.db"), ("bank", "ledger.db")],
)
def test_a_second_worker_with_effects_outside_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str, database: str
) -> None:
    monkeypatch.setattr(databases, "TAKEOVER_S", 0.0)
    site = Site(tmp_path)
    sink = OpenSearchSinkSettings(urls=("http://127.0.0.1:9",))
    settings = msgspec.structs.replace(
        site.settings,
        archive=msgspec.structs.replace(site.settings.archive, sink={"there": sink}),
        rules=RulesSettings(mode="on"),
        bank=BankSettings(enabled=True),
    )
    (spec,) = [spec for spec in make_workers(settings) if spec.name == worker]
    stop = Stop()
    with (
        hold(os.path.join(settings.state_dir, database)) as pid,
        pytest.raises(SecondWriter, match=rf"/{database} is in use by process {pid}, ") as refused,
    ):
        spec.run(stop, stop.set)
    # Actions and, of a sink, its mover write it, too.
    kind = worker.replace("there", "*")
    assert f"and only one process may run its worker {kind}: stop" in str(refused.value)


def fail_until(count: int, error: Exception) -> Callable[[], str]:
    """Return a function that fails this many times."""
    errors = [error] * count

    def make() -> str:
        if errors:
            raise errors.pop()
        return "made"

    return make


def test_a_database_that_cannot_be_opened_is_logged_once_after_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = SqliteUnavailable("cannot open /s/journal.db: Permission denied")
    stop = Stop()
    assert wait_for_resource(fail_until(2, error), stop, lambda: None) == "made"
    assert caplog.records == []
    monkeypatch.setattr(consumer_workers, "DATABASE_PATIENCE_S", 0.01)
    assert wait_for_resource(fail_until(3, error), stop, lambda: None) == "made"
    (record,) = caplog.records
    assert (record.levelno, record.message) == (
        logging.ERROR,
        f"waiting: {error}; run 'steward doctor --only state'",
    )
