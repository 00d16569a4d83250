"""Each database is declared once, and only one process writes it."""

import ast
import fcntl
import importlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import steward
from harness.forks import fork_child
from steward.core import databases
from steward.core.databases import ACTIONS, DATABASES, SecondWriter, UnsafeLock, find_database
from steward.core.sqlite import open_database, open_reader

ROOT = Path(steward.__file__).parent
HOLD = """
import sys, time
from steward.core.sqlite import open_database
connection = open_database(sys.argv[1], ())
print("open", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _no_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "TAKEOVER_S", 0.0)


@contextmanager
def hold(path: Path) -> Iterator[int]:
    """Open a database for writing in another process, which is killed at the end."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield process.pid
        process.kill()


_REFUSED = 13


def is_refused(path: Path) -> bool:
    """Return whether the lock keeps a forked process from opening a database for writing."""
    pid = fork_child(lambda: try_to_open(path))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in {0, _REFUSED}
    return code == _REFUSED


def try_to_open(path: Path) -> None:
    try:
        open_database(str(path), ())
    except SecondWriter:
        os._exit(_REFUSED)


def test_a_second_writer_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    with hold(path) as pid:
        with pytest.raises(SecondWriter) as refused:
            open_database(str(path), ())
        open_reader(str(path)).close()
    assert str(refused.value) == (
        f"{path} is in use by process {pid}, and only the worker jobs may write it: stop that "
        "process, or use another state_dir"
    )
    open_database(str(path), ()).close()
    with hold(path):
        pass


def test_a_forked_process_has_no_lock_of_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "states-c1.db"
    connection = open_database(str(path), ())
    assert is_refused(path)
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def linger() -> None:
            ours.close()
            theirs.send(b"forked")
            theirs.recv(1)  # lives until the parent says so, or ends

        pid = fork_child(linger)
        assert ours.recv(6) == b"forked"
        connection.close()
        assert not is_refused(path)
        theirs.close()
        ours.send(b"x")
    os.waitpid(pid, 0)


def test_connections_of_one_process_share_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "gate.db"
    first, second = (open_database(str(path), ()) for _ in range(2))
    first.close()
    assert is_refused(path)
    second.close()
    assert not is_refused(path)


@pytest.mark.parametrize("name", ["rules.db", "audit.db", "ledger.db", "archive-c1.db", "other.db"])
def test_several_processes_write_a_database_without_one_writer(tmp_path: Path, name: str) -> None:
    with hold(tmp_path / name):
        open_database(str(tmp_path / name), ()).close()
    assert not (tmp_path / f"{name}.lock").exists()


@pytest.mark.parametrize(
    "kind", ["a symbolic link", "a file with 2 hard links", "not a regular file"]
)
def test_a_planted_lock_is_refused_and_nothing_is_written_to_it(tmp_path: Path, kind: str) -> None:
    victim, lock = tmp_path / "victim", tmp_path / "jobs.db.lock"
    victim.write_text("precious")
    match kind:
        case "a symbolic link":
            lock.symlink_to(victim)
        case "a file with 2 hard links":
            lock.hardlink_to(victim)
        case _:
            os.mkfifo(lock)
    with pytest.raises(UnsafeLock) as refused:
        open_database(str(tmp_path / "jobs.db"), ())
    assert str(refused.value) == (f"cannot lock {tmp_path}/jobs.db: {lock} is {kind}: remove it")
    assert victim.read_text() == "precious"
    lock.unlink()
    open_database(str(tmp_path / "jobs.db"), ()).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_lock_that_root_makes_is_the_databases_owners(tmp_path: Path) -> None:
    # As in a directory of root with mode 2770 of Steward's group.
    path = tmp_path / "jobs.db"
    path.touch(0o600)
    os.chown(path, 4001, 4002)
    open_database(str(path), ()).close()
    lock = tmp_path / "jobs.db.lock"
    assert (lock.stat().st_uid, lock.stat().st_gid) == (4001, 4002)
    os.chown(lock, 4003, 4002)
    with pytest.raises(UnsafeLock, match=r"owned by uid 4003, but the database by uid 4001"):
        open_database(str(path), ())


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"12 and more"])
def test_a_writer_that_has_not_written_its_pid_is_another_process(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "jobs.db"
    with hold(path):
        (tmp_path / "jobs.db.lock").write_bytes(content)
        with pytest.raises(SecondWriter, match=r"is in use by another process, "):
            open_database(str(path), ())


def test_a_lock_file_that_was_replaced_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "TAKEOVER_S", 5.0)
    path, lock = tmp_path / "jobs.db", tmp_path / "jobs.db.lock"
    take = fcntl.flock

    def replace(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", take)
        lock.unlink()
        lock.touch(0o600)
        take(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", replace)
    connection = open_database(str(path), ())
    with lock.open("rb") as file, pytest.raises(BlockingIOError):
        take(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    connection.close()


def test_threads_that_open_at_once_share_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = fcntl.flock

    def take_slowly(descriptor: int, operation: int) -> None:
        time.sleep(0.05)
        take(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", take_slowly)
    path = str(tmp_path / "jobs.db")
    with ThreadPoolExecutor(4) as pool:
        connections = list(pool.map(lambda _: open_database(path, ()), range(4)))
    for connection in connections:
        connection.close()


def test_a_process_that_is_forked_during_the_wait_leaves_the_lock_to_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "TAKEOVER_S", 30.0)
    path, waits = tmp_path / "jobs.db", threading.Event()
    sleep = time.sleep

    def wait(seconds: float) -> None:
        waits.set()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", wait)

    def check_child() -> None:
        # The child has neither the thread that waits nor what that thread held.
        names = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd")}
        open_database(str(tmp_path / "gate.db"), ()).close()
        assert str(tmp_path / "jobs.db.lock") not in names

    with ThreadPoolExecutor(1) as pool:
        with hold(path):
            opening = pool.submit(open_database, str(path), ())
            assert waits.wait(30)
            sleep(0.005)
            assert os.waitpid(fork_child(check_child), 0)[1] == 0
        opening.result(30).close()


def test_a_process_that_is_forked_as_a_lock_file_is_opened_does_not_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, is_open = tmp_path / "jobs.db", threading.Event()
    open_file = os.open

    def open_slowly(name: Any, *args: Any, **named: Any) -> int:
        descriptor = open_file(name, *args, **named)
        if name == f"{path}.lock" and not args[0] & os.O_CREAT:
            is_open.set()
            time.sleep(0.2)
        return descriptor

    def check_child() -> None:
        names = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd")}
        assert f"{path}.lock" not in names

    monkeypatch.setattr(os, "open", open_slowly)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(open_database, str(path), ())
        assert is_open.wait(30)
        assert os.waitpid(fork_child(check_child), 0)[1] == 0
        opening.result(30).close()


def test_the_file_of_each_name_is_the_one_declared_for_it() -> None:
    for file in DATABASES:
        assert find_database(file.name.replace("*", "x")) is file
    assert find_database("accounting-log.db") is databases.JOB_LOG
    assert find_database("catalog/g2/cursor.db") is databases.CATALOG_CURSOR
    assert find_database("catalog/g2/2026-01.db") is databases.CATALOG_MONTH
    assert find_database("copy.db") is None
    assert not databases.AUDIT.has_one_writer
    assert databases.SENSOR_STATES.locate("/s", "c1") == "/s/states-c1.db"


def test_only_the_declaration_names_a_database() -> None:
    names = {
        f"{path.relative_to(ROOT)}: {node.value}"
        for path in ROOT.rglob("*.py")
        if path.name != "databases.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"[\w/.{}-]*\.db", node.value)
    }
    assert names == {
        "admin/backup/creation.py: copy.db",
        "admin/backup/files.py: .db",
        "archive/catalog/generations.py: cursor.db",
        "archive/catalog/month.py: .db",
    }


def test_workers_of_the_daemon_and_of_a_controller_write_them() -> None:
    declared = {writer for file in DATABASES for writer in file.writers} - {ACTIONS}
    sources = "".join(
        path.read_text() for path in ROOT.rglob("*.py") if path.name != "databases.py"
    )
    for writer in declared:
        start = re.escape(writer.removesuffix("*"))
        assert re.search(rf'"{start}["{{]', sources), f"no worker is called {writer}"


def test_the_formats_of_all_databases_are_documented() -> None:
    page = (ROOT.parent.parent / "docs" / "formats.md").read_text()
    documented = set(re.findall(r"`(?:catalog/|[a-z*-]+\.db)`", page))
    declared = {
        "`catalog/`" if file.name.startswith("catalog/") else f"`{file.name}`" for file in DATABASES
    }
    assert declared - {"`accounting-log.db`"} == documented


@pytest.mark.parametrize(
    ("module", "name", "count"),
    [
        ("archive.catalog.generations", "_MIGRATIONS", 1),
        ("archive.catalog.month", "MIGRATIONS", 1),
        ("archive.files.index", "MIGRATIONS", 4),
        ("automation.audit", "_MIGRATIONS", 1),
        ("bank.gate.store", "_MIGRATIONS", 2),
        ("capture.sensor.store", "_MIGRATIONS", 1),
        ("core.journal.store", "_MIGRATIONS", 2),
        ("extensions.jobacct_plugins.log.state", "LOG_MIGRATIONS", 2),
        ("jobs.tables", "MIGRATIONS", 4),
        ("reports.history.spans", "MIGRATIONS", 2),
    ],
)
def test_a_database_of_any_earlier_version_is_migrated(module: str, name: str, count: int) -> None:
    # A database whose version is beyond the last migration counts as a newer Steward's.
    migrations = getattr(importlib.import_module(f"steward.{module}"), name)
    assert len(migrations) >= count
