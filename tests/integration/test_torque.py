"""Real ``steward archive watch --scheduler torque`` on a spool as a real server wrote it."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from file_tree import files_below
from job_submission import PATIENCE, wait_until

from harness.torque import BIG, Player, Step


def steward(*words: str) -> list[str]:
    return [sys.executable, "-m", "steward", "archive", *words]


def words_for(spool: Path, archive: Path) -> list[str]:
    options = ("--scheduler", "torque", "--spool", str(spool), "--archive", str(archive))
    # A Slurm command that were run would not be found, and be complained of.
    return steward("watch", "--cluster", "c", *options)


@contextmanager
def watching(spool: Path, archive: Path, log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            words_for(spool, archive), stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE * 30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def listed(archive: Path) -> dict[str, dict[str, object]]:
    done = subprocess.run(
        steward("list", "--archive", str(archive), "-S", "now-1day", "--json"),
        capture_output=True,
        timeout=PATIENCE * 60,
        check=True,
    )
    return {job["job"]: job for job in json.loads(done.stdout)["jobs"]}


def states_of(archive: Path) -> dict[str, object]:
    return {name: job["state"] for name, job in listed(archive).items()}


def kept(archive: Path) -> dict[str, bytes]:
    # Not by the whole name: a file keeps that which its job had when it was filed.
    paths = files_below(archive, "*.sh")
    return {path.name.partition("-")[0]: path.read_bytes() for path in paths}


@pytest.mark.parametrize("kind", ["flat", "subdirs"])
def test_watched_as_it_was_written_and_scanned_at_once(tmp_path: Path, kind: str) -> None:
    player = Player(kind, tmp_path / "spool")
    watched, scanned = tmp_path / "watched", tmp_path / "scanned"

    def in_time(step: Step) -> None:
        time.sleep(0.002)

    with watching(tmp_path / "spool", watched, tmp_path / "log"):
        wait_until((watched / ".steward" / "journal.db").exists, 60)
        player.play("completed", in_time)
        wait_until(lambda: len(kept(watched)) == 8, 60)
        once = subprocess.run(
            [*words_for(tmp_path / "spool", scanned), "--once"],
            capture_output=True,
            timeout=PATIENCE * 60,
            check=False,
        )
        assert once.returncode == 0, once.stderr
        assert b"Archived 8 new scripts" in once.stdout
        states = states_of(scanned)
        big = "2038" if kind == "subdirs" else "1028"
        assert states[big] == ("COMPLETED" if kind == "subdirs" else "CANCELLED")
        # Torque decides which job's end is written last.
        wait_until(lambda: states_of(watched) == states, 60)
    of_watched = listed(watched)
    assert of_watched == listed(scanned)
    assert len(of_watched) == 13
    assert kept(watched) == kept(scanned)
    assert BIG in kept(watched).values()
    first = 1021 if kind == "flat" else 2031
    assert of_watched[f"{first + 1}_3"]["job_id"] == 10**15 + (first + 1) * 10**7 + 3
    for path in (*watched.rglob("*"), *scanned.rglob("*")):
        if path.is_file():
            assert b"not-a-real-secret" not in path.read_bytes(), path
    assert "squeue" not in (tmp_path / "log").read_text()


def test_an_array_tasks_script_is_its_arrays(tmp_path: Path) -> None:
    player = Player("flat", tmp_path / "spool")
    player.play("running")
    subprocess.run([*words_for(tmp_path / "spool", tmp_path / "a"), "--once"], check=True)
    shown = subprocess.run(
        steward("show", "1022_3", "--archive", str(tmp_path / "a"), "--script"),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert b"#PBS" in shown.stdout or b"#!" in shown.stdout, shown.stderr


def test_a_scheduler_that_is_unknown_is_named(tmp_path: Path) -> None:
    words = steward("watch", "--cluster", "c", "--scheduler", "pbspro", "--once")
    done = subprocess.run(
        [*words, "--spool", str(tmp_path), "--archive", str(tmp_path / "a")],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert b"unknown scheduler 'pbspro': use one of slurm, torque" in done.stderr
