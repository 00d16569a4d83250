"""Ways to fill an archive: ``archive watch`` and ``archive import``; and ``config``."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.commands import SCRIPTS, fill_spool, steward
from steward.cli.app import run
from steward.core.config.reader import load_settings


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    fill_spool(tmp_path / "spool")
    return tmp_path / "spool"


def watch(spool: Path, archive: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    options = ["--cluster", "c", "--spool", str(spool), "--archive", str(archive), "--no-slurm"]
    return steward("archive", "watch", *options, "--once", *words)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an archive that was filled once, for all tests that add nothing to it."""
    home = tmp_path_factory.mktemp("watched")
    fill_spool(home / "spool")
    assert watch(home / "spool", home / "archive").returncode == 0
    return str(home / "archive")


def kept(archive: Path) -> set[bytes]:
    """Return the bytes of the archived scripts."""
    return {
        path.read_bytes()
        for path in archive.rglob("*")
        if path.is_file() and path.name.endswith((".sh", "_script"))
    }


def test_once_keeps_everything_and_nothing_twice(spool: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    assert watch(spool, archive).returncode == 0
    assert kept(archive) == set(SCRIPTS.values())
    again = watch(spool, archive)
    assert b"Archived 0 new scripts" in again.stdout
    assert len(list(archive.rglob("*.sh"))) == len(SCRIPTS)


def test_once_changes_nothing_but_the_archive(spool: Path, tmp_path: Path) -> None:
    def everything() -> list[tuple[str, int, int]]:
        return [
            (str(path), path.stat().st_mtime_ns, path.stat().st_mode) for path in spool.rglob("*")
        ]

    before = everything()
    watch(spool, tmp_path / "archive")
    assert everything() == before


def test_what_was_said_is_left_for_the_other_commands(spool: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    watch(spool, archive, "--layout", "sarchive", "--timezone", "Asia/Tokyo")
    settings = load_settings(str(archive / ".steward" / "steward.toml"))
    assert settings.files_sink("files").layout == "sarchive"
    assert settings.cluster["c"].timezone == "Asia/Tokyo"
    assert settings.state_dir == str(archive / ".steward")


def test_groups_period_mover_and_log_level_are_options(spool: Path, tmp_path: Path) -> None:
    archive, there = tmp_path / "archive", tmp_path / "there"
    words = [
        *("--layout", "sarchive-monthly", "--groups", "root,daemon,adm"),
        *("--log-level", "debug"),
    ]
    done = watch(spool, archive, *words)
    assert done.returncode == 0
    sink = load_settings(str(archive / ".steward" / "steward.toml")).files_sink("files")
    assert (sink.layout, sink.groups) == ("sarchive-monthly", ("root", "daemon", "adm"))
    lines = done.stderr.decode().splitlines()
    assert len([line for line in lines if ": captured script of " in line]) == len(SCRIPTS)
    assert len([line for line in lines if ": filed in " in line]) == len(SCRIPTS)
    refused = watch(spool, archive, "--move-to", str(there))
    assert refused.returncode == 2
    assert b"remove --move-to" in refused.stderr
    words = ["--cluster", "c", "--spool", str(spool), "--archive", str(tmp_path / "a")]
    words += [
        "--layout",
        "sarchive",
        "--no-slurm",
        "--move-to",
        str(there),
        "--move-after",
        "0",
        "--log-level",
        "debug",
    ]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "steward", "archive", "watch", *words], stderr=log
        )
    try:
        until = time.monotonic() + 120
        while (tmp_path / "log").read_text().count("moved to") < len(SCRIPTS):
            assert time.monotonic() < until, (tmp_path / "log").read_text()
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert kept(there) == set(SCRIPTS.values())


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--layout", "sarchive-weekly"], "sarchive-monthly"),
        (["--log-level", "loud"], "--log-level"),
        (["--layout", "{nonsense}"], "unknown field {nonsense}"),
        (["--timezone", "Mars/Olympus"], "Mars/Olympus"),
        (["--cluster", "a/b"], "invalid cluster name 'a/b'"),
    ],
)
def test_a_mistake_is_one_line_and_makes_nothing(
    spool: Path, tmp_path: Path, words: list[str], part: str
) -> None:
    archive = tmp_path / "archive"
    done = watch(spool, archive, *words)
    assert done.returncode == 2
    assert part in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    assert not archive.exists()


def test_a_spool_that_is_not_there_is_said(tmp_path: Path) -> None:
    done = watch(tmp_path / "none", tmp_path / "archive")
    assert done.returncode == 1
    assert b"none: No such file or directory" in done.stderr
    assert not (tmp_path / "archive").exists()


def test_without_slurm_the_spool_must_be_named(tmp_path: Path) -> None:
    done = steward(
        "archive", "watch", "--cluster", "c", "--archive", str(tmp_path / "a"), "--no-slurm"
    )
    assert done.returncode == 2
    assert b"give --spool" in done.stderr


def test_an_archive_within_the_spool_is_refused(spool: Path) -> None:
    done = watch(spool, spool / "archive")
    assert done.returncode == 2
    assert b"lies in the spool" in done.stderr


def test_watch_goes_on_until_it_is_told_to_end(spool: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    words = ["--cluster", "c", "--spool", str(spool), "--archive", str(archive), "--no-slurm"]
    process = subprocess.Popen(
        [sys.executable, "-m", "steward", "archive", "watch", *words],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 30
        while kept(archive) != set(SCRIPTS.values()) and time.monotonic() < until:
            time.sleep(0.05)
        assert kept(archive) == set(SCRIPTS.values())
        os.kill(process.pid, signal.SIGTERM)
        _, log = process.communicate(timeout=20)
        assert process.returncode == 0, log
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_import_takes_over_a_tree_of_job_archive(spool: Path, tmp_path: Path) -> None:
    archive, tree = tmp_path / "archive", tmp_path / "tree" / "root" / "2020" / "01"
    watch(spool, archive)
    tree.mkdir(parents=True)
    (tree / "77-old.sh").write_bytes(b"#!/bin/sh\nold\n")
    where = ["--archive", str(archive)]
    done = steward("archive", "import", "job_archive", str(tmp_path / "tree"), *where)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"Imported 1 script,")
    watch(spool, archive)
    listed = steward("archive", "list", "-P", "-n", "-j", "77", *where).stdout
    assert b"|77|old|root|" in listed


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["sarchive"], "the directory is missing"),
        (["slurmdbd", "/tree", "-S", "now-1day"], "remove the argument"),
        (["slurmdbd"], "no start time given: add -S"),
        (["job_archive", "/nonexistent/tree"], "/nonexistent/tree"),
        (["job_archive", "/tmp", "--cluster", "other"], "use one of c"),
    ],
)
def test_import_says_what_is_wrong(
    watched: str, capfd: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    assert run(["archive", "import", *words, "--archive", watched]) in (1, 2)
    said = capfd.readouterr().err
    assert part in said
    assert "Traceback" not in said


def test_config_check_and_show(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steward.toml"
    path.write_text('state_dir = "/srv/s"\n[cluster.main]\nspool = "/s"\n')
    assert run(["config", "check", "--config", str(path)]) == 0
    assert "is valid" in capfd.readouterr().out
    assert run(["config", "show", "--config", str(path)]) == 0
    shown = capfd.readouterr().out
    assert 'state_dir = "/srv/s"  # steward.toml:1' in shown
    (tmp_path / "again.toml").write_text(shown)
    assert load_settings(str(tmp_path / "again.toml")) == load_settings(str(path))
    path.write_text('state_dirr = "/srv/s"\n')
    assert run(["config", "check", "--config", str(path)]) == 2
    assert ":1: unknown key 'state_dirr': did you mean 'state_dir'?" in capfd.readouterr().err
