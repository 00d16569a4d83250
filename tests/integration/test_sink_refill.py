"""Several sinks under a daemon: an outage delays only one sink, and a new one is filled."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from file_tree import files_below
from spool_daemon import Daemon, archived, forget, settings_in, submit

import storm
from steward.archive.files.verify import verify_sink
from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings, JournalSettings, Settings
from steward.core.journal import JournalReader
from steward.core.redaction import REDACTED

pytestmark = pytest.mark.timeout(900)

BEFORE, DURING = range(1, 21), range(21, 121)
ALL = range(1, 121)
AFTER, EVERY = range(21, 31), range(1, 31)


def settings_of(home: Path, *sinks: str, keep_s: float = 3600.0) -> Settings:
    archive = ArchiveSettings(
        sink={name: FilesSinkSettings(path=str(home / name)) for name in sinks}
    )
    return settings_in(home, archive=archive, journal=JournalSettings(keep_s=keep_s))


def steward(daemon: Daemon, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "steward", *words, "--socket", daemon.settings.socket],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={name: value for name, value in os.environ.items() if "STEWARD" not in name},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def sinks(daemon: Daemon) -> dict[str, dict[str, Any]]:
    answer = msgspec.json.decode(steward(daemon, "archive", "sinks", "--json"))
    return {line["name"]: line for line in answer["sinks"]}


def has(daemon: Daemon, sink: str, jobs: range) -> bool:
    """Return whether a sink has the complete files of all these jobs."""
    root = Path(daemon.settings.sink_path(sink))
    names = {path.name for path in files_below(root, "[0-9]*-*")}
    found = [name.partition("-")[0] for name in names if name.endswith((".sh", ".env"))]
    return sorted(map(int, found)) == [job_id for job_id in jobs for _ in range(2)]


def assert_kept_in(daemon: Daemon, sink: str) -> None:
    for job_id, files in archived(daemon.settings, sink).items():
        assert files["sh"] == storm.script_of(job_id)
        assert files["env"] == storm.environment_of(job_id, REDACTED)
    assert list(verify_sink(daemon.settings, sink)) == []


def test_a_sink_whose_disk_is_away_delays_only_itself(tmp_path: Path) -> None:
    with Daemon(settings_of(tmp_path, "first", "second"), tmp_path) as daemon:
        submit(tmp_path, BEFORE)
        daemon.wait(lambda: has(daemon, "first", BEFORE) and has(daemon, "second", BEFORE))
        # As where a file system is not mounted: the mount point is there, and empty.
        (tmp_path / "second").rename(tmp_path / "unmounted")
        (tmp_path / "second").mkdir()
        submit(tmp_path, DURING)
        daemon.wait(lambda: has(daemon, "first", ALL))
        forget(tmp_path, ALL)
        daemon.wait(lambda: sinks(daemon)["second"]["backlog"] == len(DURING))
        found = sinks(daemon)
        second = found["second"]
        assert second["state"] == "waiting"
        assert "mounted" in second["error"]
        assert second["error_at"]
        assert second["oldest_s"] >= 0
        assert list((tmp_path / "second").iterdir()) == []
        (tmp_path / "second").rmdir()
        (tmp_path / "unmounted").rename(tmp_path / "second")
        daemon.wait(lambda: has(daemon, "second", ALL))
        daemon.wait(lambda: sinks(daemon)["second"]["backlog"] == 0)
        second = sinks(daemon)["second"]
        assert (second["state"], second["dead_letters"], second["missed"]) == ("running", 0, 0)
        assert "mounted" in second["error"], "it is told also when it is over"
        assert_kept_in(daemon, "first")
        assert_kept_in(daemon, "second")


def test_a_new_sink_is_filled_from_another_one(tmp_path: Path) -> None:
    with Daemon(settings_of(tmp_path, "first", keep_s=0.0), tmp_path) as daemon:
        submit(tmp_path, BEFORE)
        daemon.wait(lambda: has(daemon, "first", BEFORE))
        forget(tmp_path, BEFORE)
        daemon.wait(lambda: events_kept(daemon) == 0)
        assert daemon.stop() == 0
    settings = settings_of(tmp_path, "first", "third", keep_s=0.0)
    with Daemon(settings, tmp_path) as daemon:
        submit(tmp_path, AFTER)
        daemon.wait(lambda: has(daemon, "third", AFTER))
        assert "20 scripts" in steward(daemon, "archive", "resend", "--sink", "third", "--missing")
        daemon.wait(lambda: has(daemon, "third", EVERY))
        daemon.wait(lambda: sinks(daemon)["third"]["backlog"] == 0)
        assert sinks(daemon)["third"]["dead_letters"] == 0
        assert has(daemon, "first", EVERY)
        everything = steward(daemon, "archive", "resend", "--sink", "third")
        assert f"{len(EVERY)} scripts" in everything
        daemon.wait(lambda: sinks(daemon)["third"]["backlog"] == 0)
        assert has(daemon, "third", EVERY), "nothing is doubled"
        assert_kept_in(daemon, "first")
        assert_kept_in(daemon, "third")
        assert daemon.stop() == 0
        # As after the loss of a disk; its database went by hand.
        shutil.rmtree(tmp_path / "third")
        for path in Path(settings.state_dir).glob("archive-third.db*"):
            path.unlink()
        daemon.start()
        daemon.wait(lambda: sinks(daemon)["third"]["state"] == "running")
        assert "30 scripts" in steward(daemon, "archive", "resend", "--sink", "third")
        # Files are there before they are written down as filed.
        daemon.wait(lambda: has(daemon, "third", EVERY) and sinks(daemon)["third"]["backlog"] == 0)
        daemon.wait(lambda: list(verify_sink(daemon.settings, "third")) == [])
        assert_kept_in(daemon, "third")


def events_kept(daemon: Daemon) -> int:
    reader = JournalReader(daemon.settings.state_dir)
    try:
        return reader.count()
    finally:
        reader.close()
