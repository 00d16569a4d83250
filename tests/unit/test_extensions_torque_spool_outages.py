"""Torque's spool during failures: missing or moved directories, network disks, and overload."""

import os
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.spool import no_lease_signals
from harness.torque import Spool, TorqueCapture, site, spool, wait_for
from steward.capture.spool import SpoolUnavailable
from steward.capture.spool_entries import MOST_SCRIPT_BYTES
from steward.core.errors import Unavailable
from steward.core.events import JOB_END
from steward.core.records import JobRecord
from steward.extensions.torque.spool import TorqueTiming

__all__ = ["no_lease_signals", "site", "spool"]


@pytest.mark.parametrize("before", ["missing", "renamed", "replaced"])
def test_jobs_that_is_not_there_is_waited_for(tmp_path: Path, spool: Spool, before: str) -> None:
    root = spool.jobs.parent
    if before == "missing":
        root.rename(tmp_path / "away")
        root.mkdir()
    unfinished = JobRecord(job_id=9, submit=datetime(2026, 1, 1, tzinfo=UTC), state="RUNNING")
    here = [] if before != "missing" else [unfinished]
    timing = TorqueTiming(reattach_s=0.05, check_s=0.05)
    site = TorqueCapture(tmp_path / "site", root, timing=timing, unfinished=lambda: here)
    site.capture.run_turn()
    if before == "renamed":
        spool.jobs.rename(root / "jobs.old")
    elif before == "replaced":
        root.rename(tmp_path / "away")
        root.mkdir()
    for _ in range(10):
        site.capture.run_turn()
        time.sleep(0.01)
    assert site.events == [], "what is not there has ended no job"
    spool.jobs.mkdir()
    spool.script("7.vm", b"echo\n")
    spool.save("7.vm")
    wait_for(site, lambda: site.capture.captured == 1)
    assert site.capture.finish()
    assert site.bytes_of(7) == b"echo\n"


def test_once_does_not_wait_for_jobs_that_is_not_there(tmp_path: Path, spool: Spool) -> None:
    spool.jobs.rmdir()
    site = TorqueCapture(tmp_path / "site", spool.jobs.parent)
    with pytest.raises(SpoolUnavailable, match="spool/jobs: No such file"):
        site.capture.run_once()
    site.capture.finish()


def test_what_a_late_directory_lacks_ends_when_it_had_time_to_be_filled(
    tmp_path: Path, spool: Spool
) -> None:
    submitted = datetime(2026, 1, 1, tzinfo=UTC)
    unfinished = [JobRecord(job_id=number, submit=submitted, state="RUNNING") for number in (7, 9)]
    spool.jobs.rename(tmp_path / "away")
    timing = TorqueTiming(reattach_s=0.05, check_s=0.05, fill_s=0.3)
    root = spool.jobs.parent
    site = TorqueCapture(tmp_path / "site", root, timing=timing, unfinished=lambda: unfinished)
    site.capture.run_turn()
    spool.jobs.mkdir()
    wait_for(site, lambda: site.spool.due_s() == 0.05)
    assert site.events == []
    spool.save("7.vm")
    wait_for(site, lambda: any(event.kind == JOB_END for event in site.events))
    assert site.capture.finish()
    ended = [event.body.record.job_id for event in site.events if event.kind == JOB_END]
    assert ended == [9]


def test_jobs_end_when_the_records_of_unfinished_ones_can_be_read_again(
    tmp_path: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steward.extensions.torque.spool.END_LOST_RETRY_S", 0.05)
    answers = [Unavailable("jobs.db is locked"), Unavailable("jobs.db is locked")]

    def list_unfinished() -> list[JobRecord]:
        if answers:
            raise answers.pop()
        submitted = datetime(2026, 1, 1, tzinfo=UTC)
        return [JobRecord(job_id=9, submit=submitted, state="RUNNING")]

    site = TorqueCapture(tmp_path / "site", spool.jobs.parent, unfinished=list_unfinished)
    wait_for(site, lambda: any(event.kind == JOB_END for event in site.events))
    assert site.capture.finish()
    assert not answers


def test_files_that_are_moved_into_subdirectories_are_the_same_jobs(
    site: TorqueCapture, spool: Spool
) -> None:
    spool.save("7.vm", job_state="R")
    spool.script("7.vm", b"echo\n")
    wait_for(site, lambda: site.capture.captured == 1)
    (spool.jobs / "7").mkdir()
    site.capture.run_turn()
    for suffix in ("SC", "JB"):
        (spool.jobs / f"7.vm.{suffix}").rename(spool.jobs / "7" / f"7.vm.{suffix}")
    site.finish()
    assert [event for event in site.events if event.kind == JOB_END] == []
    assert len(site.jobs()) == 1


def test_jobs_without_a_script_hold_no_descriptor(
    tmp_path: Path, site: TorqueCapture, spool: Spool
) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for number in range(1, 40):
        spool.save(f"{number}.vm", server_flags="1")
    wait_for(site, lambda: len(site.events) == 39)
    assert count() <= before + 5
    # One that says that there is a script, which never came: held until it goes.
    for number in range(41, 80):
        spool.save(f"{number}.vm")
    wait_for(site, lambda: len(site.events) == 78)
    for path in spool.jobs.glob("*.JB"):
        path.unlink()
    wait_for(site, lambda: len(site.events) == 156)
    assert count() <= before + 5
    site.finish()


def test_on_a_network_only_what_has_changed_is_opened(
    tmp_path: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steward.extensions.torque.spool.find_network_type", lambda path: "nfs")
    for number in range(1, 20):
        spool.script(f"{number}.vm", b"echo\n")
        spool.save(f"{number}.vm")
    timing = TorqueTiming(rescan_s=0.0)
    site = TorqueCapture(tmp_path / "site", spool.jobs.parent, timing=timing)
    wait_for(site, lambda: site.capture.captured == 19)
    opened: list[str] = []
    really = os.open

    def count(path: str, *args: object, **more: object) -> int:
        opened.extend([str(path)] if str(path).startswith(str(spool.jobs)) else [])
        return really(path, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", count)
    for _ in range(5):
        site.spool.process_events()
    assert opened == []
    spool.save("7.vm", job_state="R", mtime="1795256300")
    site.spool.process_events()
    assert opened
    assert {Path(path).stem for path in opened} == {"7.vm"}
    site.capture.run_turn()
    assert site.capture.finish()
    assert site.jobs()["7"].record.state == "RUNNING"


def test_a_look_ends_before_it_is_taken_for_hung(tmp_path: Path, spool: Spool) -> None:
    site = TorqueCapture(
        tmp_path / "site", spool.jobs.parent, timing=TorqueTiming(poll_limit_s=0.0)
    )
    site.spool.process_events()
    for number in range(1, 10):
        spool.save(f"{number}.vm")
    site.spool.process_events()
    assert len(site.spool.ready) == 1
    assert site.spool.due_s() == 0.0
    site.finish()
    assert len(site.jobs()) == 9


def test_a_script_too_large_to_be_kept_is_said_to_be(site: TorqueCapture, spool: Spool) -> None:
    spool.script("7.vm", b"x")
    os.truncate(spool.jobs / "7.vm.SC", MOST_SCRIPT_BYTES + 1)
    spool.script("8.vm", b"x" * 99_999)
    for number in (7, 8):
        spool.save(f"{number}.vm")
    site.finish()
    body = site.scripts()[7].body
    assert (body.script, body.environment, body.flags) == (None, None, ("script-too-large",))
    assert len(site.bytes_of(8)) == 99_999
    assert site.jobs()["7"].script_key
