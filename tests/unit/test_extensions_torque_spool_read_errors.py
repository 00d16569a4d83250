"""Torque's spool while reads of it fail."""

import errno
import os
from pathlib import Path

import pytest

from harness.spool import Faults, faults, no_lease_signals
from harness.torque import Spool, TorqueCapture, spool, wait_for
from steward.capture.spool import CaptureLimits
from steward.core.events import JOB_MISSED, JOB_SEEN
from steward.extensions.torque.spool import TorqueTiming

__all__ = ["faults", "no_lease_signals", "spool"]

ERRORS = pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ENOTCONN])


def submit(spool: Spool, number: int) -> None:
    spool.script(f"{number}.vm", b"echo\n")
    spool.save(f"{number}.vm")


def purge(spool: Spool, number: int) -> None:
    for path in spool.jobs.glob(f"{number}.vm.*"):
        path.unlink()


def missed(site: TorqueCapture) -> list[int]:
    told = [event.body.job_ids for event in site.events if event.kind == JOB_MISSED]
    return sorted(job_id for job_ids in told for job_id in job_ids)


def watched(tmp_path: Path, spool: Spool, limits: CaptureLimits | None = None) -> TorqueCapture:
    """Make a Site that scans often, because its watches miss changes."""
    timing = TorqueTiming(rescan_s=0.05)
    site = TorqueCapture(tmp_path / "site", spool.jobs.parent, timing=timing, limits=limits)
    site.spool.process_events()
    return site


def unread(caplog: pytest.LogCaptureFixture) -> int:
    """Return the number of scripts that were reported as unreadable."""
    return caplog.text.count("from the spool yet")


@pytest.fixture
def site(tmp_path: Path, spool: Spool) -> TorqueCapture:
    return watched(tmp_path, spool)


@ERRORS
def test_a_read_that_fails_is_tried_again_also_of_what_was_removed(
    site: TorqueCapture, spool: Spool, faults: Faults, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    faults.error, faults.of = error, ""
    for number in range(1, 11):
        submit(spool, number)
    wait_for(site, lambda: unread(caplog) == 10)
    for number in range(1, 11):
        purge(spool, number)
    faults.error = 0
    wait_for(site, lambda: site.capture.captured == 10)
    site.finish()
    assert b"PBS_O_HOST=vm" in site.environment(7)
    assert site.bytes_of(7) == b"echo\n"
    assert missed(site) == []


def test_a_job_file_that_could_not_be_read_is_read_later(
    site: TorqueCapture, spool: Spool, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.error, faults.of = errno.EIO, ".JB"
    submit(spool, 7)
    wait_for(site, lambda: unread(caplog) == 1)
    faults.error = 0
    wait_for(site, lambda: any(event.kind == JOB_SEEN for event in site.events))
    wait_for(site, lambda: site.capture.captured == 1)
    site.finish()
    assert b"PBS_O_HOST=vm" in site.environment(7)


def test_a_script_whose_job_file_cannot_be_read_is_kept_without_it(
    tmp_path: Path, spool: Spool, faults: Faults
) -> None:
    site = watched(tmp_path, spool, CaptureLimits(hold_unread_s=0.3))
    faults.error, faults.of = errno.EIO, ".JB"
    submit(spool, 7)
    wait_for(site, lambda: site.capture.captured == 1)
    assert site.capture.finish()
    assert site.scripts()[7].body.flags == ("record-unreadable", "environment-unreadable")
    assert site.bytes_of(7) == b"echo\n"


def test_what_is_removed_before_it_could_be_read_is_told_to_be_lost(
    tmp_path: Path, spool: Spool, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    limits = CaptureLimits(hold_unread_s=0.0, first_rescan_s=0.5, longest_rescan_s=0.5)
    site = watched(tmp_path, spool, limits)
    faults.error, faults.of = errno.EIO, ""
    submit(spool, 7)
    submit(spool, 8)
    wait_for(site, lambda: unread(caplog) >= 2)
    purge(spool, 7)
    wait_for(site, lambda: missed(site) == [7])
    faults.error = 0
    wait_for(site, lambda: site.capture.captured == 1)
    site.finish()
    assert missed(site) == [7]


@pytest.mark.parametrize("call", ["of_opens", "of_stats"])
def test_a_script_that_cannot_be_opened_is_found_or_told_to_be_lost(
    site: TorqueCapture, spool: Spool, faults: Faults, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    faults.error, faults.of = errno.EIO, ".SC"
    getattr(faults, call)(monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    submit(spool, 7)
    submit(spool, 8)
    wait_for(site, lambda: faults.reads > 3)
    assert len(os.listdir("/proc/self/fd")) < before + 20, "each is closed"
    purge(spool, 7)
    wait_for(site, lambda: missed(site) == [7])
    faults.error = 0
    wait_for(site, lambda: site.capture.captured == 1)
    site.finish()
    assert missed(site) == [7]
    assert Path(spool.jobs / "8.vm.SC").exists()
