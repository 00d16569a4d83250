"""Torque's spool while reads of it fail."""

import errno
import os
from pathlib import Path

import pytest
from spool_site import Faults, faults, no_lease_signals
from torque_site import Site, Spool, site, spool, wait_for

from steward.capture import spool as capture_spool
from steward.events import JOB_MISSED, JOB_SEEN
from steward.waiting import Backoff

__all__ = ["faults", "no_lease_signals", "site", "spool"]

ERRORS = pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ENOTCONN])


def submit(spool: Spool, number: int) -> None:
    spool.script(f"{number}.vm", b"echo\n")
    spool.save(f"{number}.vm")


def purge(spool: Spool, number: int) -> None:
    for path in spool.jobs.glob(f"{number}.vm.*"):
        path.unlink()


def missed(site: Site) -> list[int]:
    told = [event.body.job_ids for event in site.events if event.kind == JOB_MISSED]
    return sorted(job_id for job_ids in told for job_id in job_ids)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steward.capture.torque.spool._NETWORK_RESCAN_S", 0.05)


@ERRORS
def test_a_read_that_fails_is_tried_again_also_of_what_was_removed(
    site: Site, spool: Spool, faults: Faults, error: int
) -> None:
    faults.error, faults.of = error, ""
    for number in range(1, 11):
        submit(spool, number)
    wait_for(site, lambda: len(site.capture._unread) == 10)
    for number in range(1, 11):
        purge(spool, number)
    faults.error = 0
    wait_for(site, lambda: site.capture.captured == 10)
    site.finish()
    assert b"PBS_O_HOST=vm" in site.environment(7)
    assert site.bytes_of(7) == b"echo\n"
    assert missed(site) == []


def test_a_job_file_that_could_not_be_read_is_read_later(
    site: Site, spool: Spool, faults: Faults
) -> None:
    faults.error, faults.of = errno.EIO, ".JB"
    submit(spool, 7)
    wait_for(site, lambda: len(site.capture._unread) == 1)
    faults.error = 0
    wait_for(site, lambda: any(event.kind == JOB_SEEN for event in site.events))
    wait_for(site, lambda: site.capture.captured == 1)
    site.finish()
    assert b"PBS_O_HOST=vm" in site.environment(7)


def test_a_script_whose_job_file_cannot_be_read_is_kept_without_it(
    site: Site, spool: Spool, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_spool, "_HOLD_UNREAD_S", 0.3)
    faults.error, faults.of = errno.EIO, ".JB"
    submit(spool, 7)
    wait_for(site, lambda: site.capture.captured == 1)
    assert site.capture.finish()
    assert site.scripts()[7].body.flags == ("record-unreadable", "environment-unreadable")
    assert site.bytes_of(7) == b"echo\n"


def test_what_is_removed_before_it_could_be_read_is_told_to_be_lost(
    site: Site, spool: Spool, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_spool, "_HOLD_UNREAD_S", 0.0)
    site.capture._rescans = Backoff(0.5, 0.5)
    faults.error, faults.of = errno.EIO, ""
    submit(spool, 7)
    submit(spool, 8)
    wait_for(site, lambda: len(site.capture._released) == 2)
    purge(spool, 7)
    wait_for(site, lambda: missed(site) == [7])
    faults.error = 0
    wait_for(site, lambda: site.capture.captured == 1)
    site.finish()
    assert missed(site) == [7]


@pytest.mark.parametrize("call", ["of_opens", "of_stats"])
def test_a_script_that_cannot_be_opened_is_found_or_told_to_be_lost(
    site: Site, spool: Spool, faults: Faults, monkeypatch: pytest.MonkeyPatch, call: str
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
