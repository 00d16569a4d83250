"""Full, read-only and missing disks under a running daemon: clear messages, no losses.

Every test removes jobs from the spool during the outage, as slurmctld would, and no test restarts
the daemon.
"""

import errno
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from spool_daemon import Daemon, ask, assert_kept, forget, journalled, settings_in, stored, submit

from steward.admin.status.requests import MetricsRequest
from steward.archive.files.verify import verify_sink
from steward.archive.settings import FilesSinkSettings
from steward.core.access import Caller
from steward.core.config import ArchiveSettings, Settings
from steward.daemon.contexts import make_registry

pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="mounting file systems needs root"),
    pytest.mark.timeout(900),
]

BEFORE, DURING, AFTER = range(1, 21), range(21, 61), range(61, 71)
ALL = range(1, 71)


class Disk:
    """Small file system, which a test can detach and attach again.

    Args:
        where: Directory of the mount point.
        size: Size, in tmpfs's syntax.
    """

    def __init__(self, where: Path, size: str) -> None:
        self._backing = where / "backing"
        self.path = where / "disk"
        self._filler = self._backing / "filler"
        self._backing.mkdir(parents=True)
        self.path.mkdir()
        made = _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(self._backing))
        if made.returncode:
            pytest.skip(f"mounting is not permitted here: {made.stderr.strip()}")
        self.attach()

    def attach(self) -> None:
        """Mount the file system."""
        done = _mount("--bind", str(self._backing), str(self.path))
        assert done.returncode == 0, done.stderr

    def detach(self) -> None:
        """Detach the file system while processes use it."""
        subprocess.run(("umount", "-l", str(self.path)), timeout=30, check=True)

    def remount(self, option: str) -> None:
        """Remount the file system as ``ro`` or ``rw``."""
        done = _mount("-o", f"remount,{option}", str(self._backing))
        assert done.returncode == 0, done.stderr

    def fill(self) -> None:
        """Fill the file system to the last byte."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def clear(self) -> None:
        """Undo :meth:`fill`."""
        self._filler.unlink()

    def close(self) -> None:
        """Unmount the file system for good."""
        for path in (self.path, self._backing):
            if os.path.ismount(path):
                subprocess.run(("umount", "-l", str(path)), timeout=30, check=True)


def _mount(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ("mount", *arguments), capture_output=True, text=True, timeout=30, check=False
    )


@pytest.fixture
def make_disk(fast: Path) -> Iterator[Callable[[str], Disk]]:
    disks: list[Disk] = []

    def make(size: str) -> Disk:
        disks.append(Disk(fast / f"d{len(disks)}", size))
        return disks[-1]

    yield make
    for disk in disks:
        disk.close()


def archive_on(disk: Disk) -> ArchiveSettings:
    return ArchiveSettings(sink={"files": FilesSinkSettings(path=str(disk.path / "archive"))})


def run_through(
    fast: Path, settings: Settings, begin: Callable[[], None], end: Callable[[], None], said: str
) -> None:
    """Run an outage of the archive from its first job to the last, with checks at every step."""
    with Daemon(settings, fast) as daemon:
        supervisor = daemon.pid
        submit(fast, BEFORE)
        daemon.wait(lambda: daemon.is_quiet(len(BEFORE)))
        begin()
        submit(fast, DURING)
        # Bytes go to the state directory instead, and there is nothing to wait for.
        daemon.wait(lambda: journalled(settings) == set(ALL) - set(AFTER))
        forget(fast, DURING)
        daemon.wait(lambda: waits_for(daemon, said))
        assert re.search(rf"error .*archive.files is waiting: .*{said}", daemon.log())
        assert re.search(rf"error .*cannot write captured scripts to .*{said}", daemon.log())
        end()
        submit(fast, AFTER)
        daemon.wait(lambda: daemon.is_quiet(len(ALL)), 60.0)
        daemon.wait(lambda: daemon.status("archive.files")[0] == "running")
        daemon.wait(lambda: "archive.files continues" in daemon.log())
        assert daemon.pid == supervisor
        assert "restarting it" not in daemon.log()
        assert daemon.stop() == 0
    assert_kept(settings, ALL)
    assert list(verify_sink(settings, "files")) == []
    assert ask(settings, "journal.db", "SELECT * FROM dead") == []


def waits_for(daemon: Daemon, said: str) -> bool:
    """Return whether the sink is waiting with these words."""
    state, detail = daemon.status("archive.files")
    return state == "waiting" and bool(re.search(said, detail))


def test_a_full_archive(fast: Path, make_disk: Callable[[str], Disk]) -> None:
    disk = make_disk("4m")
    settings = settings_in(fast, archive=archive_on(disk))
    run_through(fast, settings, disk.fill, disk.clear, "(is full|No space left)")


def test_a_read_only_archive(fast: Path, make_disk: Callable[[str], Disk]) -> None:
    disk = make_disk("4m")
    settings = settings_in(fast, archive=archive_on(disk))
    run_through(
        fast, settings, lambda: disk.remount("ro"), lambda: disk.remount("rw"), "[Rr]ead-only"
    )


@pytest.mark.parametrize("remade", [False, True])
def test_an_archive_whose_mount_vanishes(
    fast: Path, make_disk: Callable[[str], Disk], remade: bool
) -> None:
    disk = make_disk("4m")
    settings = settings_in(fast, archive=archive_on(disk))

    def begin() -> None:
        disk.detach()
        if remade:
            # An administrator creates the mount point's directory: that does not make it an
            # archive.
            (disk.path / "archive").mkdir()

    def end() -> None:
        written = [path for path in disk.path.rglob("*") if path != disk.path / "archive"]
        assert written == []
        disk.attach()

    run_through(fast, settings, begin, end, "is its file system mounted")


def test_bytes_in_a_store_whose_mount_vanishes(
    fast: Path, make_disk: Callable[[str], Disk]
) -> None:
    disk = make_disk("4m")
    settings = settings_in(fast, archive=archive_on(disk))
    with Daemon(settings, fast) as daemon:
        submit(fast, BEFORE)
        daemon.wait(lambda: daemon.is_quiet(len(BEFORE)))
        consumers = [part(daemon, f"steward {name}") for name in ("archive", "catalog")]
        for pid in consumers:
            os.kill(pid, signal.SIGSTOP)
        submit(fast, DURING)
        daemon.wait(lambda: journalled(settings) == set(BEFORE) | set(DURING))
        forget(fast, DURING)
        disk.detach()
        for pid in consumers:
            os.kill(pid, signal.SIGCONT)
        daemon.wait(lambda: daemon.status("archive.files")[0] == "waiting")
        daemon.wait(lambda: daemon.status("catalog")[0] == "waiting")
        disk.attach()
        submit(fast, AFTER)
        daemon.wait(lambda: daemon.is_quiet(len(ALL)), 60.0)
        assert daemon.stop() == 0
    assert_kept(settings, ALL)
    assert ask(settings, "journal.db", "SELECT * FROM dead") == []


def test_jobs_that_come_and_go_while_capture_stands_still_are_told_of(fast: Path) -> None:
    settings = settings_in(fast)
    with Daemon(settings, fast) as daemon:
        submit(fast, BEFORE)
        daemon.wait(lambda: daemon.is_quiet(len(BEFORE)))
        capturing = [
            pid
            for pid in daemon.parts()
            if Path(f"/proc/{pid}/comm").read_text().startswith("steward captur")
        ]
        assert capturing
        for pid in capturing:
            os.kill(pid, signal.SIGSTOP)
        submit(fast, DURING)
        forget(fast, DURING)
        for pid in capturing:
            os.kill(pid, signal.SIGCONT)
        lost = "SELECT job_id FROM missed ORDER BY job_id"
        missed = [(job_id,) for job_id in sorted(DURING)]
        daemon.wait(lambda: ask(settings, "jobs.db", lost) == missed)
        assert "slurmctld removed them before capture read them" in daemon.log()
        submit(fast, AFTER)
        daemon.wait(lambda: daemon.is_quiet(len(BEFORE) + len(AFTER)), 60.0)
        root = Caller(uid=0, user="root")
        text = make_registry(settings).call("status.metrics", root, MetricsRequest()).text
        assert f'steward_missed_scripts_total{{cluster="c1"}} {len(DURING)}.0' in text
        assert daemon.stop() == 0


def test_a_full_state_directory(fast: Path, make_disk: Callable[[str], Disk]) -> None:
    disk = make_disk("16m")
    settings = settings_in(fast, state_dir=str(disk.path / "state"))
    with Daemon(settings, fast) as daemon:
        submit(fast, BEFORE)
        daemon.wait(lambda: daemon.is_quiet(len(BEFORE)))
        disk.fill()
        submit(fast, DURING)
        daemon.wait(lambda: "cannot write the journal" in daemon.log())
        assert "disk is full" in daemon.log()
        daemon.wait(lambda: held(daemon) >= set(DURING))
        forget(fast, DURING)
        disk.clear()
        submit(fast, AFTER)
        daemon.wait(lambda: daemon.is_quiet(len(ALL)), 60.0)
        assert "restarting it" not in daemon.log()
        assert daemon.stop() == 0
    assert_kept(settings, ALL)


def test_one_full_disk_for_everything(fast: Path, make_disk: Callable[[str], Disk]) -> None:
    disk = make_disk("16m")
    settings = settings_in(fast, state_dir=str(disk.path / "state"), archive=archive_on(disk))
    with Daemon(settings, fast) as daemon:
        submit(fast, BEFORE)
        daemon.wait(lambda: daemon.is_quiet(len(BEFORE)))
        disk.fill()
        submit(fast, DURING)
        daemon.wait(lambda: "cannot write captured scripts to" in daemon.log())
        # slurmctld's unlink does not remove bytes of open files.
        daemon.wait(lambda: held(daemon) >= set(DURING))
        forget(fast, DURING)
        disk.clear()
        submit(fast, AFTER)
        daemon.wait(lambda: daemon.is_quiet(len(ALL)), 60.0)
        assert "restarting it" not in daemon.log()
        assert daemon.stop() == 0
    assert_kept(settings, ALL)


def held(daemon: Daemon) -> set[int]:
    """Return jobs whose files are in a store, or held open, or both, by a process of the daemon."""
    open_: dict[str, set[int]] = {"script": set(), "environment": set()}
    for pid in daemon.parts():
        for link in Path(f"/proc/{pid}/fd").iterdir():
            match = re.search(r"/job\.(\d+)/(script|environment)( \(deleted\))?$", _target(link))
            if match:
                open_[match[2]].add(int(match[1]))
    return stored(daemon.settings) | (open_["script"] & open_["environment"])


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


def part(daemon: Daemon, name: str) -> int:
    """Return the process of a worker, by the beginning of its name."""
    for pid in daemon.parts():
        if Path(f"/proc/{pid}/comm").read_text().strip() == name:
            return pid
    raise AssertionError(f"no part is called {name}")
