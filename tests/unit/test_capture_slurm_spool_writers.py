"""Unfinished scripts: capture takes none half, on any file system."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from inotify_simple import INotify

from harness.spool import Watch, contents, make_spool, no_lease_signals, submit, take, watch
from steward.capture.slurm_spool import read_spooled_script

__all__ = ["no_lease_signals", "watch"]


def test_a_new_job_is_taken_when_its_writer_has_closed_it(tmp_path: Path, watch: Watch) -> None:
    spool = watch(make_spool(tmp_path))
    spool.process_events()
    directory = tmp_path / "hash.7" / "job.7"
    directory.mkdir()
    spool.process_events()
    (directory / "environment").write_bytes(b"\0\0\0\0")
    with open(directory / "script", "wb") as out:
        out.write(b"half")
        out.flush()
        for _ in range(5):
            spool.process_events()
        assert not spool.ready, "its writer has it open"
        out.write(b" and half\0")
    (grabbed,) = take(spool)
    assert grabbed.environment_fd >= 0
    assert contents(grabbed) == b"half and half\0"


def test_a_watch_that_comes_late_asks_for_a_lease(tmp_path: Path, watch: Watch) -> None:
    directory = make_spool(tmp_path) / "hash.7" / "job.7"
    directory.mkdir()
    with open(directory / "script", "wb") as out:
        out.write(b"half")
        out.flush()
        spool = watch(tmp_path)
        for _ in range(5):
            spool.process_events()
        assert not spool.ready
        out.write(b"\0")
    (grabbed,) = take(spool)
    assert contents(grabbed) == b"half\0"
    probe = os.open(directory / "script", os.O_RDONLY)
    assert fcntl.fcntl(probe, fcntl.F_GETLEASE) == fcntl.F_UNLCK, "the lease is dropped"
    os.close(probe)


def test_a_script_whose_writer_is_about_to_open_it_is_waited_for(
    tmp_path: Path, watch: Watch
) -> None:
    spool = watch(make_spool(tmp_path))
    spool.process_events()
    directory = tmp_path / "hash.7" / "job.7"
    directory.mkdir()
    # open(2) makes a file and then counts itself as its writer: a look may fall between the two.
    os.mknod(directory / "script", 0o600)
    for _ in range(5):
        spool.process_events()
    assert not spool.ready, "it is empty"
    assert read_spooled_script(str(tmp_path), 7) is None
    (directory / "script").write_bytes(b"whole\0")
    (grabbed,) = take(spool)
    assert grabbed.mtime_ns == (directory / "script").stat().st_mtime_ns
    assert contents(grabbed) == b"whole\0"
    assert read_spooled_script(str(tmp_path), 7) == (grabbed.mtime_ns, b"whole")


def test_an_unlink_cannot_take_the_bytes(tmp_path: Path, watch: Watch) -> None:
    spool = watch(make_spool(tmp_path))
    spool.process_events()
    directory = submit(tmp_path, 5, b"short")
    spool.process_events()
    shutil.rmtree(directory)
    (grabbed,) = take(spool)
    assert contents(grabbed) == b"short\0"


def test_nor_the_environment_of_a_script_that_is_still_being_written(
    tmp_path: Path, watch: Watch
) -> None:
    spool = watch(make_spool(tmp_path))
    directory = submit(tmp_path, 5, b"half")
    with open(directory / "script", "ab") as out:
        spool.process_events()
        assert not spool.ready
        shutil.rmtree(directory)
        out.write(b" and half\0")
    (grabbed,) = take(spool)
    assert grabbed.environment_fd >= 0
    assert contents(grabbed) == b"half\0 and half\0"


def test_a_writer_in_another_process_is_waited_for(tmp_path: Path, watch: Watch) -> None:
    spool = watch(make_spool(tmp_path))
    spool.process_events()
    writer = (
        "import os,sys,time\n"
        "d=sys.argv[1]; os.mkdir(d)\n"
        "f=open(d+'/script','wb',0)\n"
        "for i in range(20): f.write(b'line\\n'); time.sleep(0.005)\n"
        "f.write(b'\\0'); f.close()\n"
    )
    directory = str(tmp_path / "hash.4" / "job.4")
    process = subprocess.Popen([sys.executable, "-c", writer, directory])
    (grabbed,) = take(spool, timeout_s=20)
    assert contents(grabbed) == b"line\n" * 20 + b"\0"
    assert process.wait(20) == 0


def test_without_leases_a_script_must_have_settled(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, command: int, argument: int = 0) -> int:
        raise OSError(22, "Invalid argument")

    make_spool(tmp_path)
    submit(tmp_path, 1, b"settled")
    monkeypatch.setattr("steward.capture.spool_entries.fcntl.fcntl", refuse)
    spool = watch(tmp_path)
    spool.process_events()
    assert not spool.ready, "its size must be seen twice"
    (grabbed,) = take(spool)
    assert contents(grabbed) == b"settled\0"


def test_on_a_network_file_system_a_refused_lease_says_nothing(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "NFSv4 holds no delegation")

    monkeypatch.setattr("steward.capture.slurm_spool.find_network_type", lambda path: "NFS")
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    make_spool(tmp_path)
    submit(tmp_path, 1)
    (grabbed,) = take(watch(tmp_path))
    assert grabbed.job_id == 1
    grabbed.close()


def test_on_a_network_file_system_what_another_host_writes_is_found_by_scanning(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("steward.capture.slurm_spool.find_network_type", lambda path: "NFS")

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "no leases here")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    make_spool(tmp_path)
    spool = watch(tmp_path, rescan_s=0.02, without_nul_s=60.0)
    # This host's kernel gets no notification.
    monkeypatch.setattr(INotify, "read", lambda inotify, timeout: [])
    with caplog.at_level("INFO"):
        spool.process_events()
    told = f"{tmp_path} is on NFS, where inotify misses writes of other hosts"
    assert [told in record.getMessage() for record in caplog.records] == [True]
    submit(tmp_path, 1, b"#!/bin/sh\nhere\n")
    writing = submit(tmp_path, 2, b"#!/bin/sh\n") / "script"
    writing.write_bytes(b"#!/bin/sh\n")
    (first,) = take(spool)
    assert (first.job_id, contents(first)) == (1, b"#!/bin/sh\nhere\n\0")
    writing.write_bytes(b"#!/bin/sh\nall of it\n\0")
    (second,) = take(spool)
    assert (second.job_id, contents(second)) == (2, b"#!/bin/sh\nall of it\n\0")


def test_a_script_that_is_closed_between_two_looks_has_the_time_it_ends_with(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_spool(tmp_path)
    script = submit(tmp_path, 1) / "script"
    really = fcntl.fcntl

    def last_moment(fd: int, command: int, argument: int = 0) -> int:
        if argument == fcntl.F_RDLCK:
            script.write_bytes(b"the end\0")
            os.utime(script, ns=(5, 5))
        return really(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", last_moment)
    (grabbed,) = take(watch(tmp_path))
    assert grabbed.mtime_ns == 5, "else the next scan takes it for another job's script"
    grabbed.close()
