"""Backups made during a storm, and restored in another place.

``STEWARD_BACKUP_SEED`` repeats the moments of an earlier run.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from spool_daemon import (
    Daemon,
    ask,
    assert_kept,
    chance_of,
    filed,
    journalled,
    settings_in,
    submit,
)

import storm
from steward.archive.files.verify import verify_sink
from steward.archive.settings import FilesSinkSettings
from steward.core.config import JournalSettings, Settings
from steward.core.config.reader import DEFAULT_PATH

pytestmark = pytest.mark.timeout(1200)

JOBS = 400
RATE = 30.0
BURST = 3


def steward(*words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [sys.executable, "-m", "steward", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def elsewhere(settings: Settings, directory: Path) -> Settings:
    """Return settings of the same Steward in another place, on the same spool."""
    directory.mkdir()
    return msgspec.structs.replace(
        settings,
        state_dir=str(directory / "state"),
        run_dir=str(directory / "state"),
        archive=msgspec.structs.replace(
            settings.archive, sink={"files": FilesSinkSettings(path=str(directory / "archive"))}
        ),
    )


def scripts(settings: Settings) -> list[tuple[Any, ...]]:
    """Return every script that jobs.db knows."""
    return sorted(ask(settings, "jobs.db", "SELECT key FROM script"))


@contextmanager
def storming(home: Path) -> Iterator["Future[int]"]:
    """Run a storm in the spool below ``home`` within the block.

    Yields:
        A future of the number of jobs, at least JOBS, which ends with the block.
    """
    over = threading.Event()

    def play() -> int:
        jobs = 0
        while jobs < JOBS or not over.is_set():
            submit(home, range(jobs + 1, jobs + 1 + BURST))
            jobs += BURST
            time.sleep(BURST / RATE)
        return jobs

    with ThreadPoolExecutor(max_workers=1) as pool:
        playing = pool.submit(play)
        try:
            yield playing
        finally:
            over.set()


@pytest.mark.wide
@pytest.mark.parametrize("turn", range(2))
def test_what_is_put_back_has_everything_once(tmp_path: Path, turn: int) -> None:
    chance = chance_of("STEWARD_BACKUP_SEED")
    # Trim applied events at once, so that no event is read twice by chance.
    settings = settings_in(tmp_path, journal=JournalSettings(keep_s=0.0))
    saved = tmp_path / "saved.tar.zst"
    with Daemon(settings, tmp_path) as daemon:
        with storming(tmp_path) as storm_of:
            daemon.wait(lambda: filed(settings) > chance.randrange(1, JOBS // 4))
            said = steward(
                *("backup", str(saved), "--with-archive", "--json"),
                *("--config", str(tmp_path / "steward.toml")),
            )
        jobs = storm_of.result()
        manifest = json.loads(said.stdout)
        assert manifest["running"] is True
        daemon.wait(lambda: daemon.is_quiet(jobs))
        whole = scripts(settings)
    assert saved.stat().st_mode & 0o777 == 0o600

    there = elsewhere(settings, tmp_path / "there")
    # slurmctld has forgotten the jobs in the backup: no other source has them.
    other = Daemon(there, tmp_path / "there")
    steward("restore", str(saved), "--config", str(tmp_path / "there" / "steward.toml"))
    seen = journalled(there)
    assert 0 < len(seen) < jobs
    for job_id in seen:
        shutil.rmtree(tmp_path / "spool" / f"hash.{job_id % 10}" / f"job.{job_id}")
    with other:
        other.wait(lambda: other.is_quiet(jobs), 60)
        assert_kept(there, range(1, jobs + 1))
        assert scripts(there) == whole
        assert ask(there, "journal.db", "SELECT * FROM dead") == []
        # Every consumer has reported its position: the journal is trimmed again.
        other.wait(lambda: ask(there, "journal.db", "SELECT count(*) FROM event") == [(0,)], 60)
    assert list(verify_sink(there, "files")) == []


def test_nothing_redacted_and_nothing_transient_is_in_it(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    saved = tmp_path / "saved.tar.zst"
    config = ("--config", str(tmp_path / "steward.toml"))
    with Daemon(settings, tmp_path) as daemon:
        submit(tmp_path, range(1, 6))
        daemon.wait(lambda: daemon.is_quiet(5))
        steward("backup", str(saved), *config)
        names, holds = unpacked(saved)
        assert not [job_id for job_id in range(1, 6) if storm.secret_of(job_id) in holds]
        assert storm.script_of(3) in holds
        for name in ("state/daemon.json", "state/journal.lock", "state/journal.db-wal"):
            assert name not in names
        for name in ("state/journal.db", "state/jobs.db", "state/archive-files.db"):
            assert name in names
        assert f"config{tmp_path}/steward.toml" in names
        assert not [name for name in names if name.startswith("archive/")]
        again = steward("backup", str(saved), *config, check=False)
        assert again.returncode == 1
        assert "exists already" in again.stderr
        # A state in use is never restored into, with any option.
        for more in ((), ("--force",)):
            words = ("restore", str(saved), *config, *more)
            refused = steward(*words, check=False)
            assert refused.returncode == 1
            assert "another Steward uses" in refused.stderr
        assert [path.name for path in tmp_path.glob(".steward-backup-*")] == []
    refused = steward("restore", str(saved), *config, check=False)
    assert "is not empty" in refused.stderr
    before = journalled(settings)
    steward("restore", str(saved), *config, "--force")
    (aside,) = (tmp_path / "state").glob("before-restore-*")
    assert (aside / "jobs.db").exists()
    assert journalled(settings) == before
    # A backup of the restored state, while no daemon runs, has no trace of the former state.
    later = tmp_path / "later.tar.zst"
    steward("backup", str(later), *config)
    assert not [name for name in unpacked(later)[0] if "before-restore" in name]


@pytest.mark.wide
@pytest.mark.skipif(os.path.exists(DEFAULT_PATH), reason="this host has a configuration")
def test_a_host_that_has_nothing_gets_it_all(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    saved = tmp_path / "saved.tar.zst"
    config = tmp_path / "steward.toml"
    with Daemon(settings, tmp_path) as daemon:
        submit(tmp_path, range(1, 6))
        daemon.wait(lambda: daemon.is_quiet(5))
        steward("backup", str(saved), "--with-archive", "--config", str(config))
        written = config.read_text()
    for gone in ("state", "archive"):
        shutil.rmtree(tmp_path / gone)
    config.unlink()
    said = steward("restore", str(saved)).stdout
    assert f"wrote  {config}" in said
    assert config.read_text() == written
    assert config.stat().st_mode & 0o077 == config.stat().st_mode & 0o044
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert_kept(settings, range(1, 6))
    # Existing files stay: a configuration changed since the backup takes precedence.
    config.write_text(f"# changed\n{written}")
    again = steward("restore", str(saved), "--force").stdout
    assert f"left   {config}" in again
    assert config.read_text().startswith("# changed")


def unpacked(path: Path) -> tuple[set[str], bytes]:
    """Return the names in a backup, and all its bytes."""
    data = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).readall()
    plain = path.with_suffix(".plain")
    plain.write_bytes(data)
    with tarfile.open(plain) as tar:
        return set(tar.getnames()), data


@pytest.mark.wide
def test_a_damaged_backup_is_put_back_nowhere(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    saved = tmp_path / "saved.tar.zst"
    with Daemon(settings, tmp_path) as daemon:
        submit(tmp_path, range(1, 4))
        daemon.wait(lambda: daemon.is_quiet(3))
        steward("backup", str(saved), "--config", str(tmp_path / "steward.toml"))
    assert "is complete" in steward("restore", str(saved), "--check").stdout
    there = elsewhere(settings, tmp_path / "there")
    Daemon(there, tmp_path / "there")
    data = saved.read_bytes()
    plain = zstandard.ZstdDecompressor().stream_reader(data).readall()
    at = plain.index(b"SQLite format 3") + 5000
    changed = plain[:at] + bytes([plain[at] ^ 1]) + plain[at + 1 :]
    for wrong, what in (
        (data[: len(data) // 2], "damaged"),
        (data[:100], "damaged"),
        (data[:-60] + b"\0" * 60, "damaged"),
        (zstandard.compress(changed), "is damaged: the checksum of"),
        (
            zstandard.compress(plain[: plain.index(b"steward-backup.json")] + bytes(10240)),
            "is incomplete",
        ),
        (b"not a backup", "not a backup"),
    ):
        bad = tmp_path / "bad.tar.zst"
        bad.write_bytes(wrong)
        for words in (("--check",), ("--config", str(tmp_path / "there" / "steward.toml"))):
            done = steward("restore", str(bad), *words, check=False)
            assert done.returncode == 1
            assert what in done.stderr, done.stderr
            assert done.stderr.count("\n") == 1
    assert not (tmp_path / "there" / "state").exists()


@pytest.mark.wide
def test_waiting_scripts_need_their_archive(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    saved = tmp_path / "saved.tar.zst"
    config = ("--config", str(tmp_path / "steward.toml"))
    with Daemon(settings, tmp_path) as daemon:
        submit(tmp_path, range(1, 4))
        daemon.wait(lambda: daemon.is_quiet(3))
        steward("backup", str(saved), *config)
    there = elsewhere(settings, tmp_path / "there")
    Daemon(there, tmp_path / "there")
    words = ("restore", str(saved), "--config", str(tmp_path / "there" / "steward.toml"))
    refused = steward(*words, check=False)
    assert "is missing: mount it or restore it first" in refused.stderr
    shutil.copytree(tmp_path / "archive", tmp_path / "there" / "archive")
    steward(*words)
    assert journalled(there) == {1, 2, 3}


def unfinished(saved: Path) -> list[Path]:
    """Return the files of an incomplete backup."""
    return list(saved.parent.glob(f".{saved.name}.*"))


def kill_in_the_middle(saved: Path) -> None:
    """Begin a backup and kill it; it may have ended before."""
    making = subprocess.Popen(
        [
            *(sys.executable, "-m", "steward", "backup", str(saved)),
            *("--config", str(saved.parent / "steward.toml")),
        ]
    )
    while not unfinished(saved) and making.poll() is None:
        time.sleep(0.001)
    making.send_signal(signal.SIGKILL)
    assert making.wait() in (0, -signal.SIGKILL)


@pytest.mark.wide
def test_a_backup_that_is_killed_leaves_nothing_that_looks_like_one(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    with Daemon(settings, tmp_path) as daemon:
        submit(tmp_path, range(1, 200))
        daemon.wait(lambda: daemon.is_quiet(199))
        saved = tmp_path / "saved.tar.zst"
        while not unfinished(saved):
            # One that was through before anybody looked is made again.
            saved.unlink(missing_ok=True)
            kill_in_the_middle(saved)
        assert not saved.exists()
        assert daemon.is_quiet(199)
        steward("backup", str(saved), "--config", str(tmp_path / "steward.toml"))
        assert "is complete" in steward("restore", str(saved), "--check").stdout
        assert not unfinished(saved)
