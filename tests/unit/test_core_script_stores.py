import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from job_submission import wait_until

from steward.archive.settings import FilesSinkSettings
from steward.core import script_stores
from steward.core.config import ArchiveSettings, Settings
from steward.core.events import IncomingFile
from steward.core.files import find_network_type
from steward.core.script_stores import (
    MARKER,
    IncomingStore,
    IncomingStores,
    LeftoverCount,
    StoreError,
    StoreUnavailable,
    make_incoming_filename,
    make_stores,
    parse_incoming_filename,
    read_hung_count,
)

NAME = make_incoming_filename("c1", 7, 123, 3, "script")


def test_bytes_come_back(tmp_path: Path) -> None:
    store = IncomingStore("state", str(tmp_path / "incoming"))
    kept = store.write(NAME, b"abc")
    store.sync()
    assert store.read(kept) == b"abc"
    assert (tmp_path / "incoming" / NAME).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "incoming").stat().st_mode & 0o777 == 0o700


def test_writing_again_leaves_the_first_file_alone(tmp_path: Path) -> None:
    store = IncomingStore("state", str(tmp_path / "incoming"))
    store.write(NAME, b"abc")
    inode = (tmp_path / "incoming" / NAME).stat().st_ino
    store.write(NAME, b"abc")
    assert (tmp_path / "incoming" / NAME).stat().st_ino == inode


def test_a_file_that_a_crash_cut_short_is_written_anew(tmp_path: Path) -> None:
    store = IncomingStore("state", str(tmp_path / "incoming"))
    store.prepare()
    (tmp_path / "incoming" / NAME).write_bytes(b"a")
    kept = store.write(NAME, b"abc")
    assert store.read(kept) == b"abc"


def test_a_root_without_its_marker_is_not_written(tmp_path: Path) -> None:
    store = IncomingStore("archive.files", str(tmp_path / ".incoming"), str(tmp_path / MARKER))
    with pytest.raises(StoreUnavailable, match="is its file system mounted"):
        store.prepare()
    assert not (tmp_path / ".incoming").exists()
    (tmp_path / MARKER).touch()
    store.check()
    kept = store.write(NAME, b"abc")
    (tmp_path / MARKER).unlink()
    with pytest.raises(StoreUnavailable):
        store.check()
    (tmp_path / MARKER).touch()
    assert store.read(kept) == b"abc"


def test_a_directory_that_was_replaced_is_opened_anew(tmp_path: Path) -> None:
    store = IncomingStore("state", str(tmp_path / "incoming"))
    store.write(NAME, b"abc")
    os.rename(tmp_path / "incoming", tmp_path / "gone")
    (tmp_path / "incoming").mkdir()
    store.check()
    store.write(NAME, b"abc")
    assert (tmp_path / "incoming" / NAME).exists()


def test_a_symlink_in_the_way_is_not_followed(tmp_path: Path) -> None:
    store = IncomingStore("state", str(tmp_path / "incoming"))
    store.prepare()
    (tmp_path / "victim").write_bytes(b"precious")
    os.symlink(tmp_path / "victim", tmp_path / "incoming" / NAME)
    with pytest.raises(StoreUnavailable):
        store.write(NAME, b"abc")
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_many_files_are_synced_as_few_are(tmp_path: Path) -> None:
    store = IncomingStore("state", str(tmp_path / "incoming"))
    for number in range(30):
        store.write(make_incoming_filename("c1", number, 1, 3, "script"), b"abc")
    store.sync()
    assert len(list(store.iterate_names())) == 30
    before = len(os.listdir("/proc/self/fd"))
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_a_path_is_made_of_our_names_only(tmp_path: Path) -> None:
    store = IncomingStore("state", str(tmp_path))
    with pytest.raises(StoreError):
        store.get_path(IncomingFile(path="../../etc/passwd", length=1, sha256=""))


def test_names_tell_what_files_are() -> None:
    name = parse_incoming_filename(NAME)
    assert name is not None
    assert (name.cluster, name.job_id, name.spool_mtime_ns, name.length) == ("c1", 7, 123, 3)
    assert parse_incoming_filename("c1.7.123.3.script.swp") is None


def test_unlinking_what_is_gone_is_harmless(tmp_path: Path) -> None:
    store = IncomingStore("state", str(tmp_path / "incoming"))
    kept = store.write(NAME, b"abc")
    store.unlink([kept.path, kept.path])
    assert list(store.iterate_names()) == []


def test_the_archive_comes_before_the_state_directory() -> None:
    settings = Settings(
        state_dir="/s", archive=ArchiveSettings(sink={"files": FilesSinkSettings(path="/a")})
    )
    assert [store.directory for store in make_stores(settings)] == ["/a/.incoming", "/s/incoming"]
    with pytest.raises(StoreError, match="was its sink removed"):
        make_stores(settings).get("archive.gone")


def test_a_store_on_a_network_file_system_is_refused_without_touching_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path / "archive")
    (tmp_path / "archive" / ".incoming").mkdir(parents=True)
    (tmp_path / "archive" / MARKER).touch()
    (tmp_path / "archive" / ".incoming" / NAME).write_bytes(b"abc")
    local = IncomingStore("archive.files", f"{root}/.incoming", f"{root}/{MARKER}")
    local.check()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "27 1 254:0 / / rw - ext4 /dev/vda rw\n"
        f"40 27 0:50 / {root} rw shared:7 - nfs4 server:/x rw,hard\n"
    )
    listed = partial(find_network_type, mounts=str(mounts))
    monkeypatch.setattr("steward.core.script_stores.find_network_type", listed)

    def hang(name: str) -> object:
        def call(path: object, *args: object, **options: object) -> object:
            assert not str(path).startswith(root), f"{name} would wait for a dead server"
            return really[name](path, *args, **options)

        return call

    names = ("stat", "lstat", "open", "mkdir", "chmod", "scandir", "readlink", "statvfs")
    really = {name: getattr(os, name) for name in names}
    with monkeypatch.context() as dead:
        for name in names:
            dead.setattr(os, name, hang(name))
        store = IncomingStore("archive.files", f"{root}/.incoming", f"{root}/{MARKER}")
        for call in (store.prepare, store.check, local.check):
            with pytest.raises(StoreError, match="on a network file system"):
                call()
        with pytest.raises(StoreError, match="on a network file system"):
            store.write(NAME, b"abc")
        with pytest.raises(StoreError, match="on a network file system"):
            store.unlink([NAME])
        assert list(store.iterate_names()) == []
        assert store.find_local_directory() == ""


def test_kept_bytes_are_counted(tmp_path: Path) -> None:
    store = IncomingStore("state", str(tmp_path / "incoming"))
    leftovers = LeftoverCount(IncomingStores([store]), state_dir=str(tmp_path), every_s=0.0)
    leftovers.update(0)  # there is no directory yet
    store.write(NAME, b"abc")
    store.write(make_incoming_filename("c1", 8, 123, 5, "env"), b"abcde")

    def counts(known_bytes: int, leftover_bytes: int) -> bool:
        leftovers.update(known_bytes)
        return leftovers.size == leftover_bytes

    wait_until(lambda: counts(0, 8))
    wait_until(lambda: counts(3, 5))
    # Files that an unfinished append names are on the disk before they are in the journal.
    wait_until(lambda: counts(9, 0))
    leftovers.close()


def test_a_daily_count_runs_once_a_day(tmp_path: Path) -> None:
    store = IncomingStore("state", str(tmp_path / "incoming"))
    store.write(NAME, b"abc")
    leftovers = LeftoverCount(IncomingStores([store]), state_dir=str(tmp_path))

    def count() -> int:
        leftovers.update(0)
        return leftovers.size

    wait_until(lambda: count() == 3)
    store.write(make_incoming_filename("c1", 8, 123, 5, "env"), b"abcde")
    assert {count() for _ in range(100)} == {3}


def test_a_count_that_cannot_be_killed_is_the_only_one_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = IncomingStore("state", str(tmp_path / "incoming"))
    store.write(NAME, b"abc")
    leftovers = LeftoverCount(IncomingStores([store]), state_dir=str(tmp_path), every_s=0.0)
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        started.append(real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with monkeypatch.context() as hung:
        hung.setattr(script_stores, "COUNT_FILES", "import time; time.sleep(60)")
        # A process in the kernel's state D ignores the signal like this one, which never gets it.
        hung.setattr(os, "killpg", lambda _pid, _signal: None)
        for _ in range(4):
            leftovers.update(0)
            leftovers.refresh()
    (process,) = started
    count = read_hung_count(str(tmp_path))
    assert count is not None
    assert (count.pid, count.directories) == (process.pid, (store.directory,))
    process.kill()
    process.wait()

    def has_counted() -> bool:
        leftovers.update(0)
        return leftovers.size == 3

    wait_until(has_counted)
    assert read_hung_count(str(tmp_path)) is None
    leftovers.close()


def test_a_hung_count_of_an_earlier_process_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "incoming-count.json").write_text('{"pid":1,"since":"2026-03-01T12:00:00Z"}')
    assert read_hung_count(str(tmp_path)) is not None
    LeftoverCount(IncomingStores([]), state_dir=str(tmp_path)).close()
    assert read_hung_count(str(tmp_path)) is None
