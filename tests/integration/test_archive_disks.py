"""Files sink on disks that are really full, read-only or gone: it loses nothing."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import archive
from harness.archive import ENVIRONMENT
from harness.site import Site
from steward.archive.errors import ArchiveUnavailable
from steward.archive.files.verify import verify_sink


class Disk:
    """Small file system at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def mount(self, *options: str) -> None:
        text = ",".join(("size=4m", "nr_inodes=400", *options))
        done = self._run("mount", "-t", "tmpfs", "-o", text, "tmpfs", str(self.path))
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")

    def remount(self, options: str) -> None:
        self._must("mount", "-o", f"remount,{options}", str(self.path))

    def hide(self) -> None:
        """Mount another, empty file system on top, as an empty mount point would look."""
        self._must("mount", "-t", "tmpfs", "tmpfs", str(self.path))

    def uncover(self) -> None:
        self._must("umount", "-l", str(self.path))

    def _must(self, *argv: str) -> None:
        done = self._run(*argv)
        assert done.returncode == 0, done.stderr

    def _run(self, *argv: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    disk = Disk(tmp_path / "disk")
    disk.mount()
    yield disk
    while os.path.ismount(disk.path):
        subprocess.run(("umount", "-l", str(disk.path)), timeout=30, check=True)


def site_on(disk: Disk, tmp_path: Path) -> Site:
    return archive.make_site(tmp_path, slurm=False, path=str(disk.path / "archive"))


def fill(path: Path) -> None:
    with path.open("wb") as file:
        try:
            while True:
                file.write(bytes(65536))
                file.flush()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def use_up_inodes(directory: Path) -> list[Path]:
    made: list[Path] = []
    try:
        while True:
            path = directory / f"filler{len(made)}"
            path.touch()
            made.append(path)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    return made


def test_a_full_disk_is_told_and_recovers(disk: Disk, tmp_path: Path) -> None:
    site = site_on(disk, tmp_path)
    site.feed(archive.script(site, 1, store="state"))
    filler = disk.path / "filler"
    fill(filler)
    waiting = archive.script(site, 2, b"#" * 100_000, store="state")
    for _ in range(3):
        with pytest.raises(ArchiveUnavailable, match="the disk is full"):
            site.feed(waiting)
    filler.unlink()
    site.feed(waiting)
    assert sorted(archive.files(site)) == [
        f"unverified/alpha/2026/03/01/{number}-claim.{suffix}"
        for number in (1, 2)
        for suffix in ("env", "sh")
    ]
    assert list(verify_sink(site.settings, "files")) == []


def test_no_inodes_left_is_told_and_recovers(disk: Disk, tmp_path: Path) -> None:
    site = site_on(disk, tmp_path)
    script = archive.script(site, 1, store="state")
    fillers = use_up_inodes(disk.path)
    with pytest.raises(ArchiveUnavailable, match="the disk is full"):
        site.feed(script)
    for path in fillers:
        path.unlink()
    site.feed(script)
    assert len(archive.files(site)) == 2


def test_a_read_only_disk_is_told_and_recovers(disk: Disk, tmp_path: Path) -> None:
    site = site_on(disk, tmp_path)
    site.feed(archive.script(site, 1))
    waiting = archive.script(site, 2, store="state")
    disk.remount("ro")
    with pytest.raises(ArchiveUnavailable, match="read-only"):
        site.feed(waiting)
    disk.remount("rw")
    site.feed(waiting)
    assert len(archive.files(site)) == 4


def test_a_vanished_mount_is_told_and_recovers(disk: Disk, tmp_path: Path) -> None:
    site = site_on(disk, tmp_path)
    site.feed(archive.script(site, 1))
    waiting = archive.script(site, 2, store="state")
    disk.hide()
    with pytest.raises(ArchiveUnavailable, match="mounted"):
        site.feed(waiting)
    assert list(disk.path.iterdir()) == []
    (disk.path / "archive").mkdir()
    with pytest.raises(ArchiveUnavailable, match="mounted"):
        site.feed(waiting)
    assert list((disk.path / "archive").iterdir()) == []
    disk.uncover()
    site.feed(waiting)
    assert len(archive.files(site)) == 4


_WORKER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import msgspec
from harness import archive
from steward.core.events import decode_event
site = archive.make_site(Path({directory!r}), slurm={slurm})
events = [decode_event(*entry) for entry in msgspec.msgpack.decode(sys.stdin.buffer.read())]
print("ready", flush=True)
sink = archive.sink_of(site)
while sink.cursor() < len(events):
    start = sink.cursor()
    sink.apply(events[start : start + 7], min(start + 7, len(events)), site.append)
print("done", flush=True)
"""


@pytest.mark.parametrize("slurm", [False, True])
def test_a_sink_killed_at_any_moment_keeps_every_script_once(tmp_path: Path, slurm: bool) -> None:
    import msgspec

    from steward.core.events import encode_event

    site = archive.make_site(tmp_path, slurm=slurm)
    scripts = [
        archive.script(site, number, b"#!/bin/sh\n# %d\n" % number) for number in range(1, 301)
    ]
    events = list(scripts)
    if slurm:
        events += [archive.identity(script, name="x/y") for script in scripts]
    written = msgspec.msgpack.encode(
        [(n, e.kind, e.cluster, e.key, encode_event(e)) for n, e in enumerate(events, start=1)]
    )
    archive.sink_of(site).close()
    tests = str(Path(__file__).parents[1])
    program = _WORKER.format(tests=tests, directory=str(tmp_path), slurm=slurm)
    chance = random.Random(7)
    kills = 0
    for attempt in range(200):
        worker = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(written)
            worker.stdin.close()
            assert worker.stdout.readline() == b"ready\n"
            if attempt < 25:
                time.sleep(chance.uniform(0.0, 0.012))
                worker.send_signal(signal.SIGKILL)
            rest = worker.stdout.read()
            worker.wait(timeout=60)
        finally:
            worker.kill()
            worker.wait()
            worker.stdout.close()
        if rest == b"done\n":
            break
        kills += 1
    assert kills > 3
    site.reopen()
    files = archive.files(site)
    assert len(files) == 600
    found = sorted(data for path, data in files.items() if path.endswith(".sh"))
    assert found == sorted(b"#!/bin/sh\n# %d\n" % number for number in range(1, 301))
    assert {data for path, data in files.items() if path.endswith(".env")} == {ENVIRONMENT}
    assert list(verify_sink(site.settings, "files")) == []
