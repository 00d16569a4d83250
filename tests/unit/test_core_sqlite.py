import os
import re
import resource
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pysqlite3 import dbapi2

from steward.core import sqlite
from steward.core.files import resolve_path
from steward.core.sqlite import (
    Database,
    SqliteError,
    SqliteUnavailable,
    check_schema_version,
    open_database,
    open_reader,
    open_scratch,
    transaction,
    use_scratch_directory,
)

SCHEMA = ("CREATE TABLE t (x);", "CREATE TABLE u (y); INSERT INTO u VALUES (1);")


def test_migrations_run_once_each(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    open_database(path, SCHEMA[:1]).close()
    db = open_database(path, SCHEMA)
    assert db.execute("SELECT y FROM u").fetchall() == [(1,)]
    open_database(path, SCHEMA).close()
    assert db.execute("SELECT count(*) FROM u").fetchone() == (1,)


def test_a_failed_transaction_leaves_nothing(tmp_path: Path) -> None:
    db = open_database(str(tmp_path / "a.db"), SCHEMA)

    def fail() -> None:
        with transaction(db):
            db.execute("INSERT INTO t VALUES (1)")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert db.execute("SELECT count(*) FROM t").fetchone() == (0,)


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    open_database(path, SCHEMA)
    reader = open_reader(path)
    with pytest.raises(SqliteUnavailable, match="readonly"), transaction(reader, path):
        reader.execute("INSERT INTO t VALUES (1)")


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(b"not a database at all, but long enough to look like one" * 20)
    with pytest.raises(SqliteError, match=r"a\.db"):
        open_database(str(path), SCHEMA)


def test_a_full_disk_is_unavailable(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    db = open_database(path, SCHEMA)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(SqliteUnavailable), transaction(db, path):
            db.execute("INSERT INTO t VALUES (zeroblob(1000000))")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with transaction(db, path):
        db.execute("INSERT INTO t VALUES (zeroblob(1000000))")


def test_statements_of_a_script_are_told_apart(tmp_path: Path) -> None:
    script = """
    -- a remark; with a semicolon
    CREATE TABLE t (x TEXT DEFAULT 'a;b');
    CREATE TRIGGER keep BEFORE DELETE ON t BEGIN SELECT RAISE(ABORT, 'no; never'); END;
    INSERT INTO t DEFAULT VALUES; -- and one behind
    INSERT INTO t VALUES ('last')
    """
    db = open_database(str(tmp_path / "a.db"), (script,))
    assert db.execute("SELECT x FROM t").fetchall() == [("a;b",), ("last",)]
    with pytest.raises(SqliteError, match="no; never"), transaction(db):
        db.execute("DELETE FROM t")


def test_a_migration_that_fails_leaves_the_schema_as_it_was(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with pytest.raises(SqliteError):
        open_database(path, ("CREATE TABLE t (x);", "CREATE TABLE u (y); CREATE TABLE t (z);"))
    db = open_database(path, ("CREATE TABLE t (x);",))
    names = [row[0] for row in db.execute("SELECT name FROM sqlite_master")]
    assert names == ["t"]


def test_many_may_be_the_first_to_open_it(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    schema = (*SCHEMA, "CREATE TABLE v (z); INSERT INTO v VALUES (1);")
    pids = []
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                open_database(path, schema)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 8
    assert open_database(path, schema).execute("SELECT count(*) FROM v").fetchone() == (1,)


def test_one_that_is_only_begun_is_none_yet(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    (tmp_path / "a.db").touch()
    open_reader(path).close()
    with pytest.raises(SqliteUnavailable, match="is being created"):
        open_reader(path, migrated=True)
    open_database(path, ("CREATE TABLE t (n INTEGER);",)).close()
    open_reader(path, migrated=True).close()


def test_a_newer_one_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    check_schema_version(path, 1)
    open_database(path, ("CREATE TABLE t (n INTEGER);", "CREATE TABLE u (n INTEGER);")).close()
    check_schema_version(path, 2)
    with pytest.raises(SqliteError, match="written by a newer Steward"):
        check_schema_version(path, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be led by others' links")
@pytest.mark.parametrize("place", ["jobs.db", "catalog"])
def test_root_makes_no_database_where_a_link_of_another_user_leads(
    tmp_path: Path, place: str
) -> None:
    state, target = tmp_path / "state", tmp_path / "target"
    state.mkdir()
    (state / place).symlink_to(target)
    os.chown(state / place, 4001, 4002, follow_symlinks=False)
    path = state / place if place == "jobs.db" else state / place / "cursor.db"
    target.mkdir() if place == "catalog" else None
    message = f"{state / place} is a symbolic link of uid 4001, which root does not follow: remove"
    for use in (
        lambda: open_database(str(path), ()),
        lambda: Database(str(path), (), for_owner=True),
    ):
        with pytest.raises(SqliteUnavailable, match=re.escape(message.removeprefix(f"{path} "))):
            use()
    assert not target.exists() or not list(target.iterdir())
    os.chown(state / place, 0, 0, follow_symlinks=False)
    open_database(str(path), ()).close()
    assert target.is_file() or (target / "cursor.db").is_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be led by others' links")
def test_root_writes_nothing_if_a_link_replaces_a_database_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "copy.db"
    path.symlink_to(victim)
    monkeypatch.setattr(sqlite, "resolve_path", lambda text: text)
    with pytest.raises(
        SqliteUnavailable, match=r"copy\.db: another process replaced it: try again"
    ):
        open_database(str(path), ("CREATE TABLE t (a)",))
    assert victim.read_bytes() == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="others' links stay as they are")
def test_root_resolves_its_own_links_only(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a/../c")
    (tmp_path / "c").symlink_to(tmp_path / "d")
    assert resolve_path(str(tmp_path / "b" / "x.db")) == str(tmp_path / "d" / "x.db")
    (tmp_path / "d").symlink_to("b")
    with pytest.raises(OSError, match="Too many levels"):
        resolve_path(str(tmp_path / "b"))


def test_a_path_need_not_be_text(tmp_path: Path) -> None:
    path = os.path.join(tmp_path, os.fsdecode(b"\xff%20?.db"))
    open_database(path, SCHEMA).close()
    assert open_reader(path).execute("SELECT y FROM u").fetchall() == [(1,)]


def test_a_scratch_database_is_a_file_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with closing(open_scratch("CREATE TABLE t (x);")) as scratch:
        scratch.executemany("INSERT INTO t VALUES (?)", ((b"x" * 1000,) for _ in range(8000)))
        assert scratch.execute("SELECT count(*) FROM t").fetchone() == (8000,)
        assert not list(tmp_path.iterdir())
        names = [entry for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
        files = [entry.stat() for entry in names]
        # SQLite keeps 2 MB in memory, and writes the other pages.
        assert any(file.st_nlink == 0 and file.st_size > 5_000_000 for file in files)


def test_no_place_for_a_scratch_database_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    with pytest.raises(SqliteUnavailable, match=r"temporary file in .*/gone: No such file"):
        open_scratch("CREATE TABLE t (x);")


def find_scratch_directories() -> set[str]:
    """Return the directories of this process's open files without a name."""
    targets = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_file()]
    return {os.path.dirname(target) for target in targets if "/steward-" in target}


def test_scratch_databases_of_a_daemon_are_in_its_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary directory may be in memory."""
    monkeypatch.delenv("TMPDIR", raising=False)
    with closing(open_scratch("CREATE TABLE t (x);")):
        assert find_scratch_directories() == {"/var/tmp"}
    monkeypatch.setattr("steward.core.sqlite.scratch_directory", "/var/tmp")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "steward-left").touch()
    (scratch / "directory").mkdir()
    use_scratch_directory(str(tmp_path))
    assert [path.name for path in scratch.iterdir()] == ["directory"], "a killed process left one"
    assert scratch.stat().st_mode & 0o777 == 0o700
    with closing(open_scratch("CREATE TABLE t (x);")):
        assert find_scratch_directories() == {str(scratch)}
    connect = dbapi2.connect

    def connect_while_another_starts(*arguments: Any, **options: Any) -> Any:
        connection = connect(*arguments, **options)
        use_scratch_directory(str(tmp_path))
        return connection

    monkeypatch.setattr(dbapi2, "connect", connect_while_another_starts)
    with closing(open_scratch("CREATE TABLE t (x);")) as connection:
        connection.execute("INSERT INTO t VALUES (1)")
    monkeypatch.setattr(dbapi2, "connect", connect)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with closing(open_scratch("CREATE TABLE t (x);")):
        assert find_scratch_directories() == {str(tmp_path)}
