"""Scripts in slurmctld's spool while entries appear and vanish and queues overflow."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from inotify_simple import INotify

from harness.spool import Watch, contents, make_spool, no_lease_signals, submit, take, watch

__all__ = ["no_lease_signals", "watch"]


def test_what_lies_there_is_found_at_the_start(tmp_path: Path, watch: Watch) -> None:
    make_spool(tmp_path)
    for job_id in (1, 12, 123):
        submit(tmp_path, job_id, b"job %d" % job_id)
    found = take(watch(tmp_path), 3)
    assert sorted(contents(grabbed) for grabbed in found) == [b"job 1\0", b"job 12\0", b"job 123\0"]


def test_what_was_captured_before_is_not_taken_again(tmp_path: Path, watch: Watch) -> None:
    make_spool(tmp_path)
    directory = submit(tmp_path, 1)
    mtime_ns = (directory / "script").stat().st_mtime_ns
    spool = watch(tmp_path, is_captured=lambda job_id, at: (job_id, at) == (1, mtime_ns))
    submit(tmp_path, 2)
    (grabbed,) = take(spool)
    assert grabbed.job_id == 2
    grabbed.close()


def test_a_job_removed_before_its_script_came_is_counted(tmp_path: Path, watch: Watch) -> None:
    spool = watch(make_spool(tmp_path))
    spool.process_events()
    directory = tmp_path / "hash.5" / "job.5"
    directory.mkdir()
    spool.process_events()
    directory.rmdir()
    spool.process_events()
    assert spool.vanished == [5]
    submit(tmp_path, 5, b"again")
    (grabbed,) = take(spool)
    assert contents(grabbed) == b"again\0"


def test_a_job_that_a_scan_took_was_not_missed(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = watch(make_spool(tmp_path))
    spool.process_events()
    really = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("hash.5"):
            submit(tmp_path, 5, b"taken")
            shutil.rmtree(submit(tmp_path, 15, b"missed"))
        return really(path)

    # They come while it scans: the events are read after what the scan has found.
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        spool.rescan()
        spool.process_events()
    shutil.rmtree(tmp_path / "hash.5/job.5")
    spool.rescan()
    (grabbed,) = take(spool)
    grabbed.close()
    spool.process_events()
    assert spool.vanished == [15]


def test_a_hash_directory_may_appear_late(tmp_path: Path, watch: Watch) -> None:
    spool = watch(tmp_path)
    spool.process_events()
    submit(tmp_path, 3, b"first of its hash")
    (grabbed,) = take(spool)
    assert contents(grabbed) == b"first of its hash\0"


def test_the_spool_itself_may_appear_late_and_go_and_come_back(
    tmp_path: Path,
    watch: Watch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = tmp_path / "spool"
    spool = watch(root, reattach_s=0.1)
    for _ in range(3):
        spool.process_events()
    assert caplog.text.count("is it slurmctld's spool?") == 1
    submit(make_spool(root), 1)
    (grabbed,) = take(spool)
    grabbed.close()
    shutil.rmtree(root)
    for _ in range(3):
        spool.process_events()
    assert "is gone" in caplog.text
    submit(make_spool(root), 2)
    (grabbed,) = take(spool)
    assert grabbed.job_id == 2
    grabbed.close()


def test_a_hard_linked_script_alone_is_taken(tmp_path: Path, watch: Watch) -> None:
    spool = watch(make_spool(tmp_path))
    leader = submit(tmp_path, 10, b"burst buffer")
    for grabbed in take(spool):
        grabbed.close()
    directory = tmp_path / "hash.1" / "job.11"
    directory.mkdir()
    spool.process_events()
    os.link(leader / "script", directory / "script")
    (grabbed,) = take(spool)
    assert (grabbed.job_id, grabbed.environment_fd) == (11, -1)
    assert contents(grabbed) == b"burst buffer\0"


def test_foreign_entries_are_passed_over(tmp_path: Path, watch: Watch) -> None:
    make_spool(tmp_path)
    (tmp_path / "job_state").write_bytes(b"x")
    (tmp_path / "hash.x").mkdir()
    nest = tmp_path / "hash.1"
    (nest / "job.1").write_bytes(b"a file")
    (nest / "job.-1").mkdir()
    (nest / "job.01").mkdir()
    (nest / "job.1x").mkdir()
    (nest / "notes").mkdir()
    (nest / "job.21").mkdir()
    os.symlink("/etc/passwd", nest / "job.21" / "script")
    (nest / "job.31").mkdir()
    os.mkfifo(nest / "job.31" / "script")
    (nest / "job.41" / "script").mkdir(parents=True)
    submit(tmp_path, 51)
    found = take(watch(tmp_path), 2, timeout_s=0.3)
    assert [grabbed.job_id for grabbed in found] == [51]
    found[0].close()


def test_a_reused_id_is_taken_again(tmp_path: Path, watch: Watch) -> None:
    spool = watch(make_spool(tmp_path))
    spool.process_events()
    for text in (b"first", b"second"):
        directory = submit(tmp_path, 9, text)
        (grabbed,) = take(spool)
        assert contents(grabbed) == text + b"\0"
        shutil.rmtree(directory)
        spool.process_events()


def test_an_overflow_of_the_queue_loses_nothing(
    tmp_path: Path, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    spool = watch(make_spool(tmp_path))
    spool.process_events()
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 100_000:
        pytest.skip(f"fs.inotify.max_queued_events is {limit}: too long to overflow")
    submit(tmp_path, 1, b"early")
    noise = tmp_path / "hash.2" / "noise"
    for number in range(limit // 2 + 1):
        noise.with_name(f"a{number % 2}").touch()
        noise.with_name(f"a{number % 2}").unlink()
        noise.with_name(f"b{number % 2}").touch()
        noise.with_name(f"b{number % 2}").unlink()
    submit(tmp_path, 2, b"late")
    found = take(spool, 2)
    assert sorted(contents(grabbed) for grabbed in found) == [b"early\0", b"late\0"]
    assert "overflowed" in caplog.text


def test_two_shares_take_every_job_once(tmp_path: Path, watch: Watch) -> None:
    make_spool(tmp_path)
    for job_id in range(1, 41):
        submit(tmp_path, job_id)
    left = take(watch(tmp_path, share=0, process_count=2), 20)
    right = take(watch(tmp_path, share=1, process_count=2), 20)
    assert {g.job_id % 2 for g in left} == {0}
    assert {g.job_id % 2 for g in right} == {1}
    assert len(left) + len(right) == 40
    for grabbed in left + right:
        grabbed.close()


def test_more_than_can_be_held_is_found_in_turns(tmp_path: Path, watch: Watch) -> None:
    spool = watch(make_spool(tmp_path), max_held=7)
    spool.process_events()
    for job_id in range(1, 51):
        submit(tmp_path, job_id)
    seen = set()
    for _ in range(50):
        for grabbed in take(spool):
            seen.add(grabbed.job_id)
            grabbed.close()
        if len(seen) == 50:
            break
    assert seen == set(range(1, 51))


def test_a_script_is_not_passed_over_when_no_descriptor_is_left(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_spool(tmp_path)
    for job_id in range(1, 6):
        submit(tmp_path, job_id)
    really, left = os.open, 5

    def scarce(path: str, *args: int, **options: int) -> int:
        nonlocal left
        if path.startswith("job."):
            left -= 1
            if left in (0, 1, 2):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return really(path, *args, **options)

    monkeypatch.setattr(os, "open", scarce)
    found = take(watch(tmp_path, rescan_s=0.05), 5)
    assert sorted(grabbed.job_id for grabbed in found) == [1, 2, 3, 4, 5]
    assert all(grabbed.environment_fd >= 0 for grabbed in found)
    for grabbed in found:
        grabbed.close()


def test_scanning_ends_when_watches_are_to_be_had_again(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    spool = watch(make_spool(tmp_path), rescan_s=0.0)
    really, has_watches = INotify.add_watch, False

    def scarce(inotify: INotify, path: str, mask: int) -> int:
        if not has_watches and path != str(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(really(inotify, path, mask))

    monkeypatch.setattr(INotify, "add_watch", scarce)
    for _ in range(3):
        spool.process_events()
    assert spool.due_s() == 0.0, "only scanning finds what is new"
    assert caplog.text.count("no inotify watches left") == 1
    has_watches = True
    spool.process_events()
    assert spool.due_s() == 60.0
    assert caplog.text.count("watching all of") == 1
    submit(tmp_path, 3, b"by its watch")
    (grabbed,) = take(spool)
    assert contents(grabbed) == b"by its watch\0"
