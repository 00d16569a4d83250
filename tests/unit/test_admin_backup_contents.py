"""Backup contents: files in their order, rejections, and the journal that waits."""

import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.events import script_event
from steward.admin.backup.archive import BackupError, is_safe_member
from steward.admin.backup.creation import DatabaseSnapshots
from steward.admin.backup.files import list_named_files, select_files, sort_databases
from steward.automation.settings import RulesSettings
from steward.bank.settings import BankSettings
from steward.core.config import JournalSettings, Settings
from steward.core.journal import Journal, JournalLink, JournalReader
from steward.core.journal.control import HoldTrimming, WritePositions, send_command
from steward.core.journal.server import JournalServer
from steward.core.journal.store import encode_rows, prepare_restored
from steward.core.script_stores import make_stores
from steward.core.sqlite import open_database, transaction
from steward.core.waits import Stop
from steward.slurm.settings import ClusterSettings


def test_each_stands_before_what_it_has_its_numbers_from() -> None:
    given = ["journal.db", "rules.db", "jobs.db", "catalog/g2/2026-01.db", "ledger.db"]
    given += ["catalog/g2/cursor.db", "catalog/g1/cursor.db", "history.db"]
    found = sort_databases(given)
    assert sorted(found) == sorted(given)
    at = {name: number for number, name in enumerate(found)}
    assert at["catalog/g2/cursor.db"] < at["catalog/g2/2026-01.db"]
    assert at["rules.db"] == len(found) - 2, "what it does outside is not to be done twice"
    assert found[-1] == "journal.db"


def table(path: Path) -> None:
    db = open_database(str(path), ("CREATE TABLE t (n INTEGER);",))
    with transaction(db):
        db.execute("INSERT INTO t VALUES (1)")
    db.close()


def rows(path: Path) -> list[int]:
    db = open_database(str(path), ("CREATE TABLE t (n INTEGER);",))
    found = [row[0] for row in db.execute("SELECT n FROM t")]
    db.close()
    return found


def test_a_copy_is_what_was_there_when_all_were_looked_at(tmp_path: Path) -> None:
    for name in ("a.db", "b.db"):
        table(tmp_path / name)
    with DatabaseSnapshots(str(tmp_path), ["a.db", "b.db"]) as looks:
        for name in ("a.db", "b.db"):
            db = open_database(str(tmp_path / name), ("CREATE TABLE t (n INTEGER);",))
            with transaction(db):
                db.execute("INSERT INTO t VALUES (2)")
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            db.close()
            looks.copy_database(name, str(tmp_path / f"copy-{name}"))
    for name in ("a.db", "b.db"):
        assert rows(tmp_path / name) == [1, 2]
        assert rows(tmp_path / f"copy-{name}") == [1]
        assert (tmp_path / f"copy-{name}").stat().st_mode & 0o777 == 0o600


def test_a_damaged_database_is_not_copied(tmp_path: Path) -> None:
    db = open_database(str(tmp_path / "a.db"), ("CREATE TABLE t (n INTEGER, x TEXT);",))
    with transaction(db):
        db.executemany("INSERT INTO t VALUES (?, ?)", [(n, "x" * 100) for n in range(500)])
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    data = bytearray((tmp_path / "a.db").read_bytes())
    data[4 * 4096 : 4 * 4096 + 100] = b"\xff" * 100
    (tmp_path / "a.db").write_bytes(data)
    with (
        DatabaseSnapshots(str(tmp_path), ["a.db"]) as looks,
        pytest.raises(BackupError, match="is damaged"),
    ):
        looks.copy_database("a.db", str(tmp_path / "copy.db"))


def test_what_is_made_again_by_itself_is_left_out(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path), cluster={"c1": ClusterSettings()})
    for name in ("journal.db", "journal.db-wal", "journal.db-shm", "journal.lock", "daemon.json"):
        (tmp_path / name).touch()
    for name in ("gate.db", "poll-c1.json", "roles-c1.json", "imports.json", "gate.key"):
        (tmp_path / name).touch()
    for name in ("incoming/x", "archive/a", "joblog/2026-01-01.jsonl", "before-restore-1/jobs.db"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (tmp_path / "catalog" / "g1").mkdir(parents=True)
    (tmp_path / "catalog" / "g1" / "cursor.db").touch()
    (tmp_path / "catalog" / "current").symlink_to("g1")
    (tmp_path / "away").symlink_to("/etc/passwd")
    what = select_files(settings, with_catalog=True)
    assert set(what.databases) == {"journal.db", "catalog/g1/cursor.db"}
    assert set(what.files) == {"gate.key", "imports.json", "joblog/2026-01-01.jsonl"}
    assert what.links == {"catalog/current": "g1"}
    assert select_files(settings, with_catalog=False).databases == ("journal.db",)


def test_the_files_that_a_configuration_names_are_taken(tmp_path: Path) -> None:
    (tmp_path / "rules.d").mkdir()
    (tmp_path / "rules.d" / "one.yaml").touch()
    (tmp_path / "password").touch()
    (tmp_path / "steward.log").touch()
    settings = Settings(
        log_file=str(tmp_path / "steward.log"),
        bank=BankSettings(password_file=str(tmp_path / "password")),
        rules=RulesSettings(directories=(str(tmp_path / "rules.d"), "/nowhere")),
    )
    found = list_named_files(settings)
    assert [path for path in found if path.startswith(str(tmp_path))] == [
        str(tmp_path / "password"),
        str(tmp_path / "rules.d" / "one.yaml"),
    ]


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    "info",
    [
        member("/etc/passwd"),
        member("state/../../etc/passwd"),
        member("state//journal.db"),
        member("state/./journal.db"),
        member("elsewhere/journal.db"),
        member("statement/journal.db"),
        member("archive"),
        member("joblog"),
        member("elsewhere", tarfile.DIRTYPE),
        member("state/x", tarfile.SYMTYPE, "/etc"),
        member("state/x", tarfile.SYMTYPE, ".."),
        member("state/x", tarfile.SYMTYPE, "../../etc"),
        member("config/x", tarfile.SYMTYPE, "y"),
        member("state/x", tarfile.LNKTYPE, "state/y"),
        member("state/x", tarfile.CHRTYPE),
        member("state/x", tarfile.FIFOTYPE),
    ],
    ids=lambda info: f"{info.name}:{info.type.decode()}:{info.linkname}",
)
def test_what_leads_out_of_its_place_is_refused(info: tarfile.TarInfo) -> None:
    assert not is_safe_member(info)


def test_what_a_backup_holds_is_let_in() -> None:
    for info in (
        member("state/catalog/g1/2026-01.db"),
        member("state/catalog/current", tarfile.SYMTYPE, "g1"),
        member("incoming/archive.files/c1.1.2.3.script"),
        member("config/etc/steward/steward.toml"),
        member("archive/files", tarfile.DIRTYPE),
        member("joblog", tarfile.DIRTYPE),
    ):
        assert is_safe_member(info), info.name


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[str]:
    stop = Stop()
    server = JournalServer(
        str(tmp_path),
        JournalSettings(keep_s=0.0),
        make_stores(Settings(state_dir=str(tmp_path))),
        trim_every_s=0.1,
    )
    thread = threading.Thread(target=server.run, args=(stop,))
    thread.start()
    yield str(tmp_path)
    stop.set()
    thread.join(10)


def test_the_journal_removes_nothing_while_it_is_held(writer: str) -> None:
    link = JournalLink(writer, Stop())
    send_command(writer, HoldTrimming(3600.0))
    link.append([script_event(n) for n in range(5)])
    link.send_message("passed", "jobs", 5, "running", "")
    assert send_command(writer, WritePositions()) == 5
    reader = JournalReader(writer)
    # Longer than the writer waits from one look to the next.
    assert not threading.Event().wait(1.0)
    assert reader.count() == 5
    send_command(writer, HoldTrimming(0))
    for _ in range(3000):
        if not reader.count():
            break
        threading.Event().wait(0.01)
    assert reader.count() == 0
    link.close()


def test_a_journal_that_is_put_back_waits_for_everyone(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.append(encode_rows([script_event(n) for n in range(5)]))
    for name, position in (("jobs", 5), ("catalog", 3)):
        journal.record_position(name, position, "running", "")
    journal.record_position("archive.old", 0, "waiting", "away")
    journal.detach("archive.old")
    journal.close()
    prepare_restored(str(tmp_path / "journal.db"), leap=1000)
    journal = Journal(str(tmp_path))
    assert journal.list_attached() == {"jobs": 0, "catalog": 0}
    assert journal.list_trimmable(10) == []
    # A ledger outside the backup may have applied 6 to 1004: none of these positions returns.
    journal.append(encode_rows([script_event(7)]))
    assert journal.head() == 1006
    journal.close()
