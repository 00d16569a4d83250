"""The ledger's file and schema, and findings of its proof after tampering."""

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from pysqlite3 import dbapi2

from harness.empty_ledger import empty, place
from ledger.concurrency import CrowdCases
from ledger.fixtures import (
    BY,
    NOON,
    Clock,
    account,
    allocation,
    charge,
    clock,
    ledger,
    settings_for,
)
from ledger.schema import derived_parts, migrated_parts
from steward.bank.errors import BankError, LedgerUnavailable
from steward.bank.ledger import Authorship, open_ledger
from steward.bank.ledger.engine import LedgerDatabase, ledger_url
from steward.bank.ledger.ledger import Ledger
from steward.bank.ledger.tables import MIGRATIONS, NEWEST_REVISION, metadata
from steward.bank.settings import BankSettings
from steward.core.config import Settings
from steward.core.errors import StewardError

__all__ = ["clock", "empty", "ledger", "place"]


class TestCrowd(CrowdCases): ...


@pytest.fixture
def tampered(place: Settings, clock: Clock) -> Iterator[Ledger]:
    """Return a ledger with some transactions, which the test damages."""
    opened = open_ledger(place, clock)
    with opened.transaction() as t:
        account(t, "phys", 100)
        account(t, "chem")
        allocation(t, "phys", 50)
        t.charges.post(charge(70), BY)
        t.settlements.add("h", charge(0).key, 70, final=True)
    yield opened
    opened.close()


def edit(place: Settings, *statements: str) -> None:
    """Change the ledger's file directly."""
    connection = dbapi2.connect(f"{place.state_dir}/ledger.db", isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_the_file_is_stewards_alone(tmp_path: Path) -> None:
    made = open_ledger(settings_for(str(tmp_path)))
    with made.transaction() as t:
        account(t, "phys")
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "ledger.db" in made.display_url
    assert not made.is_shared
    made.close()


def test_a_commit_waits_for_the_disk(place: Settings) -> None:
    database = LedgerDatabase(ledger_url(place))
    with database.reading() as connection:
        found = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("synchronous", "journal_mode", "foreign_keys")
        ]
    database.close()
    assert found == [2, "wal", 1]


def test_the_migrations_make_what_the_tables_say(ledger: Ledger, place: Settings) -> None:
    engine = sqlalchemy.create_engine(
        "sqlite://", creator=lambda: dbapi2.connect(f"{place.state_dir}/ledger.db"), module=dbapi2
    )
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_the_migrations_make_the_keys_and_conditions_of_the_tables(
    ledger: Ledger, place: Settings
) -> None:
    database = LedgerDatabase(ledger_url(place))
    with database.reading() as connection:
        assert migrated_parts(connection) == derived_parts()
        inspector = sqlalchemy.inspect(connection)
        for table in metadata.sorted_tables:
            made = {
                check["name"]: check["sqltext"]
                for check in inspector.get_check_constraints(table.name)
            }
            for constraint in table.constraints:
                if isinstance(constraint, sqlalchemy.CheckConstraint):
                    assert str(constraint.sqltext) == made[str(constraint.name)]
    database.close()


def test_the_newest_migration_is_the_one_that_is_worked_with() -> None:
    assert ScriptDirectory(str(MIGRATIONS)).get_heads() == [NEWEST_REVISION]


@pytest.mark.parametrize(
    "revision", [each.revision for each in ScriptDirectory(str(MIGRATIONS)).walk_revisions()]
)
def test_a_ledger_of_each_revision_is_brought_up_to_date(tmp_path: Path, revision: str) -> None:
    place = settings_for(str(tmp_path))
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    database = LedgerDatabase(ledger_url(place))
    with database.writing() as config.attributes["connection"]:
        command.upgrade(config, revision)
    database.close()
    open_ledger(place).close()
    database = LedgerDatabase(ledger_url(place))
    with database.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    database.close()


def test_a_ledger_of_a_newer_steward_is_left_alone(tampered: Ledger, place: Settings) -> None:
    edit(place, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(BankError, match="newer Steward"):
        open_ledger(place)


def test_a_state_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnavailable, match="nowhere"):
        open_ledger(settings_for(str(tmp_path / "nowhere")))


def test_a_file_that_is_no_ledger(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_bytes(os.urandom(8192))
    with pytest.raises(StewardError):
        open_ledger(settings_for(str(tmp_path)))


@pytest.mark.parametrize("url", ["mysql://db/steward", "nonsense", "sqlite://"])
def test_a_database_that_is_none(tmp_path: Path, url: str) -> None:
    with pytest.raises(BankError):
        open_ledger(settings_for(str(tmp_path), url))


def test_the_password_comes_from_its_file_and_is_not_shown(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    bank = BankSettings(database="postgresql://steward@db/x", password_file=str(secret))
    with pytest.raises(LedgerUnavailable, match="password_file"):
        ledger_url(Settings(bank=bank))
    secret.write_text("hunter2\n")
    url = ledger_url(Settings(bank=bank))
    assert (url.password, url.drivername) == ("hunter2", "postgresql+psycopg")
    assert "hunter2" not in LedgerDatabase(url).display_url


def test_nobody_listens(tmp_path: Path) -> None:
    url = "postgresql+psycopg://steward:hunter2@127.0.0.1:1/steward"
    with pytest.raises(LedgerUnavailable) as caught:
        open_ledger(settings_for(str(tmp_path), url))
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "table", ["ledger_transaction", "posting", "charge_version", "rate", "settlement"]
)
def test_what_is_entered_stays(tampered: Ledger, place: Settings, table: str) -> None:
    edit(
        place,
        "INSERT OR IGNORE INTO rate VALUES (1, 'tux', '*', '', 0, 0, x'')",
    )
    # A settlement may go, once the gate has taken it.
    statements = [f"UPDATE {table} SET rowid = rowid", f"DELETE FROM {table}"]
    for statement in statements[: 1 if table == "settlement" else 2]:
        with pytest.raises(dbapi2.IntegrityError, match="never changed"):
            edit(place, statement)


@pytest.mark.parametrize(
    ("statements", "kind"),
    [
        (["UPDATE allocation SET balance = balance + 1 WHERE number = 1"], "balance"),
        (["UPDATE allocation SET granted = granted + 1 WHERE number = 1"], "balance"),
        (["UPDATE charge SET amount = 71"], "charge"),
        (["UPDATE charge SET refunded = 5"], "charge"),
        (["UPDATE charge SET versions = 2"], "charge"),
        (["UPDATE member SET spent = 1"], "spent"),
        (["UPDATE state SET seq = seq + 1"], "numbers"),
        (["UPDATE state SET settlement = 9"], "numbers"),
        (["UPDATE account SET parent = 'gone' WHERE name = 'phys'"], "account"),
        (
            [
                "UPDATE account SET parent = 'chem' WHERE name = 'phys'",
                "UPDATE account SET parent = 'phys' WHERE name = 'chem'",
            ],
            "account",
        ),
        (["DROP TRIGGER posting_never_UPDATE"], "schema"),
        (
            [
                "DROP TRIGGER posting_never_UPDATE",
                "UPDATE posting SET amount = amount + 1 WHERE allocation = 1",
            ],
            "unbalanced",
        ),
        (
            ["DROP TRIGGER posting_never_DELETE", "DELETE FROM posting WHERE allocation = 1"],
            "balance",
        ),
    ],
)
def test_the_proof_finds_what_was_changed(
    tampered: Ledger, place: Settings, statements: list[str], kind: str
) -> None:
    assert tampered.check() == []
    edit(place, *statements)
    found = tampered.check()
    assert kind in {each.kind for each in found}, found


def test_a_balance_that_was_changed_meanwhile_is_not_written_over(
    tampered: Ledger, place: Settings
) -> None:
    with tampered.transaction() as t:
        t.transfers.deposit("phys", 1, Authorship(who="a"))
    # A dated allocation below zero is refused by the database itself.
    with pytest.raises(dbapi2.IntegrityError, match="not_below_zero"):
        edit(place, "UPDATE allocation SET balance = -1 WHERE end_us IS NOT NULL")


def test_two_open_a_new_ledger_at_once(tmp_path: Path) -> None:
    place = settings_for(str(tmp_path))
    with ThreadPoolExecutor() as pool:
        one, other = pool.map(open_ledger, [place, place])
    with one.transaction() as t:
        account(t, "phys", 5)
    with other.reading() as t:
        assert t.queries.get_balance("phys", at=None) == 5
        assert t.queries.get_statement("phys", end=NOON).lines == ()
    one.close()
    other.close()
