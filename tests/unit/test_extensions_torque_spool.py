"""Torque's spool, scanned and watched in the order in which a real server wrote it."""

import gc
import os
import pwd
import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from harness.spool import no_lease_signals
from harness.torque import BIG, PIECE, Player, Spool, Step, TorqueCapture, site, spool, wait_for
from steward.core.events import JOB_END, JOB_SCRIPT
from steward.core.records import JobRecord
from steward.core.redaction import REDACTED
from steward.extensions.torque.spool import TorqueTiming

__all__ = ["no_lease_signals", "site", "spool"]

KINDS = pytest.mark.parametrize("kind", ["flat", "subdirs"])


def told(site: TorqueCapture) -> dict[str, tuple[JobRecord, bool, str]]:
    """Return the record of each job, without row numbers."""
    return {label: (job.record, job.ended, job.script_key) for label, job in site.jobs().items()}


def bodies(site: TorqueCapture) -> dict[int, object]:
    return {job_id: event.body for job_id, event in site.scripts().items()}


@KINDS
@pytest.mark.parametrize("pause", ["each", "seldom"])
def test_scanned_and_watched_are_the_same(tmp_path: Path, kind: str, pause: str) -> None:
    player = Player(kind, tmp_path / "spool")
    watched = TorqueCapture(tmp_path / "watched", tmp_path / "spool")
    count = 0

    def look(step: Step) -> None:
        nonlocal count
        count += 1
        if pause == "each" or count % 37 == 0:
            watched.capture.run_turn()

    watched.spool.process_events()
    player.play("completed", look)
    watched.finish()
    player.snapshot("completed", tmp_path / "finished" / "jobs")
    scanned = TorqueCapture(tmp_path / "scanned", tmp_path / "finished").finish()
    assert told(watched) == told(scanned)
    assert bodies(watched) == bodies(scanned)
    assert len(scanned.scripts()) == 8
    for job_id in scanned.scripts():
        assert watched.bytes_of(job_id) == scanned.bytes_of(job_id)
    assert watched.bytes_of(1028 if kind == "flat" else 2038) == BIG


@KINDS
@pytest.mark.parametrize("moment", ["queued", "running", "completed"])
def test_each_moment_is_read_as_it_was(tmp_path: Path, kind: str, moment: str) -> None:
    player = Player(kind, tmp_path / "spool")
    player.snapshot(moment, tmp_path / "at" / "jobs")
    first = 1021 if kind == "flat" else 2031
    states = {
        label: (job.record.state, job.record.exit_code)
        for label, job in TorqueCapture(tmp_path / "s", tmp_path / "at").finish().jobs().items()
    }
    waiting, runs, done = ("PENDING", None), ("RUNNING", None), ("COMPLETED", 0)
    # The big one was deleted from the queue in the one recording only.
    ends = ("CANCELLED", None) if kind == "flat" else done
    expected = {
        "queued": (waiting, waiting, waiting),
        "running": (runs, runs, ends if kind == "flat" else waiting),
        "completed": (done, done, ends),
    }[moment]
    assert (states[f"{first}"], states[f"{first + 1}_3"], states[f"{first + 7}"]) == expected
    assert len(states) == 13


def test_what_is_known_of_a_job(tmp_path: Path) -> None:
    player = Player("flat", tmp_path / "spool")
    player.snapshot("completed", tmp_path / "at" / "jobs")
    site = TorqueCapture(tmp_path / "s", tmp_path / "at").finish()
    jobs = site.jobs()
    record = jobs["1021"].record
    assert (record.uid, record.user, record.gid) == (0, pwd.getpwuid(0).pw_name, 0)
    assert record.start is not None
    assert record.end is not None
    assert record.submit is not None
    assert (record.end - record.start).total_seconds() == 25
    assert (record.start - record.submit).total_seconds() == 15
    assert (record.name, record.account, record.partition) == ("plain_job", "projA", "batch")
    assert (record.time_limit_s, record.nodelist, record.nodes, record.cpus) == (300, "vm", 1, 1)
    assert (record.work_dir, record.submit_line) == ("/home/tester/data", "qsub plain.sh")
    assert jobs["1022_3"].script_key == jobs["1022_[1-4]"].script_key
    assert jobs["1022_3"].script_key.startswith("script:1022:")
    assert jobs["1023"].record.reason == "JobHeldUser"
    assert jobs["1023"].record.name == "renamed"
    assert jobs["1029"].record.batch is False
    assert 1029 not in site.scripts()
    assert site.bytes_of(1025).count(b"\xe9") == 1
    assert not site.bytes_of(1024).endswith(b"\n")


def test_environments_are_cut_and_flagged(tmp_path: Path) -> None:
    player = Player("flat", tmp_path / "spool")
    player.snapshot("queued", tmp_path / "at" / "jobs")
    site = TorqueCapture(tmp_path / "s", tmp_path / "at").finish()
    entries = site.environment(1021)
    assert b"COMMA=a,b,c" in entries
    assert b"MULTI=line one\nline two\n\nline four" in entries
    assert b"SECRET_TOKEN=" + REDACTED in entries
    assert b"_=/usr/bin/qsub" in entries
    flags = {job_id: event.body.flags for job_id, event in site.scripts().items()}
    assert flags[1021] == ("environment-ambiguous",)
    assert flags[1022] == flags[1024] == ()
    assert flags[1025] == ("environment-missing",)
    assert flags[1026] == ("environment-ambiguous",)
    assert b'B="x y"' in site.environment(1024)
    assert b"not-a-real-secret" not in b"".join(
        path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()
    )


def test_nothing_is_lost_when_all_is_purged(tmp_path: Path) -> None:
    player = Player("flat", tmp_path / "spool")
    site = TorqueCapture(tmp_path / "s", tmp_path / "spool")
    player.play("", lambda step: site.capture.run_turn())
    site.finish()
    jobs = site.jobs()
    # The array's own file is removed without an end; so are jobs whose last save is not in the
    # recording. Held jobs are still there.
    assert jobs["1022_[1-4]"].ended
    assert jobs["1022_[1-4]"].record.state == "UNKNOWN"
    assert jobs["1023"].record.state == "PENDING"
    assert all(job.ended for label, job in jobs.items() if label != "1023")
    assert len(site.scripts()) == 8


def test_a_second_look_repeats_nothing_new(tmp_path: Path) -> None:
    player = Player("flat", tmp_path / "spool")
    player.play("running")
    first = TorqueCapture(tmp_path / "1", tmp_path / "spool").finish()
    again = TorqueCapture(tmp_path / "2", tmp_path / "spool").finish()
    assert {event.key for event in again.events} == {event.key for event in first.events}


def test_a_script_waits_for_its_job_file(site: TorqueCapture, spool: Spool) -> None:
    (spool.jobs / "7.vm.JB").touch()
    spool.script("7.vm", b"echo\n")
    for _ in range(20):
        site.capture.run_turn()
    assert not site.capture.captured
    spool.save("7.vm")
    wait_for(site, lambda: site.capture.captured == 1)
    site.finish()
    assert site.scripts()[7].body.flags == ()
    assert site.scripts()[7].body.claimed_dir == "/home/tester/data"


def test_a_script_without_a_job_file_is_kept_in_the_end(tmp_path: Path, spool: Spool) -> None:
    site = TorqueCapture(tmp_path / "site", spool.jobs.parent, timing=TorqueTiming(record_s=0.2))
    spool.script("7.vm", b"echo\n")
    spool.script("8.vm", b"echo\n")
    spool.save("8.vm", b"<job><jobid>8.vm</jobid>")
    wait_for(site, lambda: site.capture.captured == 2)
    site.finish()
    for job_id in (7, 8):
        assert site.scripts()[job_id].body.flags == ("record-unreadable", "environment-missing")
        assert site.bytes_of(job_id) == b"echo\n"


def test_pieces_that_come_late_are_waited_for(site: TorqueCapture, spool: Spool) -> None:
    spool.script("7.vm", b"x" * PIECE)
    spool.save("7.vm")
    for _ in range(20):
        site.capture.run_turn()
        time.sleep(0.01)
    assert not site.capture.captured
    spool.script("7.vm", b"y" * PIECE)
    for _ in range(20):
        site.capture.run_turn()
    assert not site.capture.captured
    spool.script("7.vm", b"end")
    wait_for(site, lambda: site.capture.captured == 1)
    site.finish()
    assert site.bytes_of(7) == b"x" * PIECE + b"y" * PIECE + b"end"


def test_a_script_of_whole_pieces_is_kept_after_a_while_and_again_when_it_grows(
    tmp_path: Path, spool: Spool
) -> None:
    site = TorqueCapture(tmp_path / "site", spool.jobs.parent, timing=TorqueTiming(pieces_s=0.2))
    site.spool.process_events()
    spool.save("7.vm")
    spool.script("7.vm", b"x" * PIECE)
    wait_for(site, lambda: site.capture.captured == 1)
    spool.script("7.vm", b"end")
    wait_for(site, lambda: site.capture.captured == 2)
    spool.save("7.vm", job_state="R", mtime="1795256300")
    site.finish()
    first, second = (event for event in site.events if event.kind == JOB_SCRIPT)
    assert first.body.flags == ("script-maybe-cut",)
    assert second.body.flags == ()
    assert site.store.read(second.body.script) == b"x" * PIECE + b"end"
    assert site.jobs()["7"].script_key == second.key


def test_what_waits_for_its_pieces_survives_a_purge(site: TorqueCapture, spool: Spool) -> None:
    spool.save("7.vm")
    spool.script("7.vm", b"x" * PIECE)
    site.spool.process_events()
    for name in ("7.vm.SC", "7.vm.JB"):
        (spool.jobs / name).unlink()
    wait_for(site, lambda: site.capture.captured == 1)
    site.finish()
    assert site.bytes_of(7) == b"x" * PIECE
    assert b"PBS_O_HOST=vm" in site.environment(7)
    assert site.jobs()["7"].record.state == "UNKNOWN"


def test_an_end_that_was_missed_is_an_end_without_a_time(site: TorqueCapture, spool: Spool) -> None:
    spool.save("7.vm", job_state="R")
    site.capture.run_turn()
    (spool.jobs / "7.vm.JB").unlink()
    site.finish()
    assert [event.body.record.state for event in site.events if event.kind == JOB_END] == [
        "UNKNOWN"
    ]


def test_what_ended_while_nobody_watched_is_ended_at_the_start(
    tmp_path: Path, spool: Spool
) -> None:
    spool.save("7.vm")
    first = TorqueCapture(tmp_path / "1", spool.jobs.parent).finish()
    (spool.jobs / "7.vm.JB").unlink()
    records = [job.record for job in first.jobs().values()]
    second = TorqueCapture(tmp_path / "2", spool.jobs.parent, unfinished=lambda: records).finish()
    (end,) = second.events
    assert (end.kind, end.body.record.job_id, end.body.record.state) == (JOB_END, 7, "UNKNOWN")


def test_a_hold_that_is_released_and_set_again_is_seen(site: TorqueCapture, spool: Spool) -> None:
    for number, letter in enumerate(["H", "Q", "H", "Q"]):
        spool.save("7.vm", job_state=letter, Hold_Types="1", mtime=str(1795256300 + number))
        site.capture.run_turn()
    site.finish()
    assert len({event.key for event in site.events}) == 4
    assert site.jobs()["7"].record.reason == ""


def test_a_requeued_job_is_another_run(site: TorqueCapture, spool: Spool) -> None:
    lives = [("Q", ""), ("R", "1"), ("Q", "1"), ("R", "2")]
    for number, (letter, starts) in enumerate(lives):
        spool.save("7.vm", job_state=letter, hop_count="1", mtime=str(1795256300 + number))
        path = spool.jobs / "7.vm.JB"
        if starts:
            count = f"<start_count flags='1'>{starts}</start_count></attributes>"
            spool.save("7.vm", path.read_bytes().replace(b"</attributes>", count.encode()))
        site.capture.run_turn()
    site.finish()
    assert site.jobs()["7"].record.restarts == 1
    assert site.jobs()["7"].record.state == "RUNNING"


@pytest.mark.parametrize("name", ["x.vm.JB", "0.vm.JB", "7.vm.BD", "7", "7-.vm.JB", "9" * 40])
def test_what_is_foreign_is_passed_over(site: TorqueCapture, spool: Spool, name: str) -> None:
    (spool.jobs / name).write_bytes(b"<job/>")
    spool.save("8.vm")
    site.finish()
    assert {event.body.record.job_id for event in site.events} == {8}


def test_links_and_directories_are_no_jobs(
    site: TorqueCapture, spool: Spool, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")
    (spool.jobs / "7.vm.SC").symlink_to(secret)
    (spool.jobs / "7.vm.JB").mkdir()
    os.mkfifo(spool.jobs / "9.vm.SC")
    spool.save("8.vm")
    site.finish()
    assert {event.body.record.job_id for event in site.events} == {8}


def test_a_file_of_another_job_is_not_believed(site: TorqueCapture, spool: Spool) -> None:
    spool.save("7.vm", jobid="8.vm")
    site.finish()
    assert site.events == []


def test_shares_meet_in_no_job(tmp_path: Path) -> None:
    player = Player("subdirs", tmp_path / "spool")
    player.play("completed")
    make = partial(TorqueCapture, root=tmp_path / "spool", of=2)
    parts = [make(tmp_path / str(share), share=share).finish() for share in (0, 1)]
    whole = TorqueCapture(tmp_path / "whole", tmp_path / "spool").finish()
    keys = [{event.key for event in part.events} for part in parts]
    assert not keys[0] & keys[1]
    assert keys[0] | keys[1] == {event.key for event in whole.events}


def test_a_spool_that_comes_back_is_watched_again(tmp_path: Path, spool: Spool) -> None:
    site = TorqueCapture(tmp_path / "site", spool.jobs.parent, timing=TorqueTiming(reattach_s=0.05))
    site.capture.run_turn()
    shutil.rmtree(spool.jobs)
    site.capture.run_turn()
    spool.jobs.mkdir()
    spool.save("7.vm")
    wait_for(site, lambda: bool(site.events))
    site.finish()


def test_scripts_are_taken_where_leases_do_not_work(
    site: TorqueCapture, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steward.extensions.torque.spool.has_no_writer", lambda fd, remote: None)
    spool.script("7.vm", b"echo\n")
    spool.save("7.vm")
    site.finish()
    assert site.bytes_of(7) == b"echo\n"


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    gc.collect()  # do not count descriptors that earlier tests have not closed yet
    before = len(os.listdir("/proc/self/fd"))
    player = Player("flat", tmp_path / "spool")
    site = TorqueCapture(tmp_path / "s", tmp_path / "spool")
    player.play("completed", lambda step: site.capture.run_turn())
    site.finish()
    site.store.close()
    assert len(os.listdir("/proc/self/fd")) == before
