"""Ledger tests on PostgreSQL, with outages."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import psycopg
import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis.stateful import run_state_machine_as_test

from ledger.accounts import AccountCases
from ledger.charges import ChargeCases
from ledger.concurrency import CrowdCases, position, proved, wait_until, writing
from ledger.fixtures import BY, account, charge, clock, ledger, settings_for
from ledger.schema import derived_parts, migrated_parts
from ledger.side_records import ListCases
from ledger.state_machine import SETTINGS, LedgerMachine
from ledger.transactions import MoneyCases
from servers.postgresql import PostgreSQL
from steward.bank.errors import LedgerUnavailable
from steward.bank.ledger import open_ledger
from steward.bank.ledger.engine import LedgerDatabase, ledger_url
from steward.bank.ledger.leases import LeaseLost
from steward.bank.ledger.ledger import Ledger
from steward.bank.ledger.tables import metadata
from steward.core.config import Settings
from steward.core.events import utc_now

__all__ = ["clock", "ledger"]


@pytest.fixture(scope="module")
def empty(postgresql: PostgreSQL) -> str:
    """Make an empty ledger that tests copy, because its schema takes time."""
    name = postgresql.new_database()
    open_ledger(settings_for("", postgresql.url(name))).close()
    return name


@pytest.fixture
def place(tmp_path: Path, postgresql: PostgreSQL, empty: str) -> Settings:
    return settings_for(str(tmp_path), postgresql.url(postgresql.new_database(empty)))


class TestAccounts(AccountCases): ...


class TestCharges(ChargeCases): ...


class TestLists(ListCases): ...


class TestMoney(MoneyCases): ...


class TestCrowd(CrowdCases):
    rounds = 4


def test_the_ledger_is_right_whatever_happens(postgresql: PostgreSQL, empty: str) -> None:
    class OnPostgresql(LedgerMachine):
        @staticmethod
        def fresh() -> Settings:
            return settings_for("", postgresql.url(postgresql.new_database(empty)))

    few = hypothesis.settings(SETTINGS, max_examples=10, stateful_step_count=20)
    run_state_machine_as_test(OnPostgresql, settings=few)


def test_two_open_a_new_ledger_at_once(postgresql: PostgreSQL) -> None:
    place = settings_for("", postgresql.url(postgresql.new_database()))
    with ThreadPoolExecutor() as pool:
        opened = list(pool.map(open_ledger, [place] * 3))
    for each in opened:
        assert each.check() == []
        assert each.is_shared
        each.close()


@pytest.mark.parametrize("table", ["ledger_transaction", "posting", "charge_version", "rate"])
def test_what_is_entered_stays(ledger: Ledger, place: Settings, table: str) -> None:
    with ledger.transaction() as t:
        account(t, "phys", 5)
        t.charges.post(charge(3), BY)
    for statement in (f"DELETE FROM {table}", f"TRUNCATE {table} CASCADE"):
        with connected(place) as direct, pytest.raises(psycopg.Error, match="never changed"):
            direct.execute(statement.encode())


def test_the_migrations_make_what_the_tables_say(ledger: Ledger, place: Settings) -> None:
    found = sqlalchemy.create_engine(place.bank.database, poolclass=sqlalchemy.NullPool)
    with found.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_the_migrations_make_the_keys_and_conditions_of_the_tables(
    ledger: Ledger, place: Settings
) -> None:
    engine = sqlalchemy.create_engine(place.bank.database, poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        assert migrated_parts(connection) == derived_parts()


def test_a_server_that_takes_no_changes_is_one_to_wait_for(place: Settings) -> None:
    follower = f"{place.bank.database}?options=-c default_transaction_read_only=on"
    ledger = open_ledger(settings_for("", follower))
    with ledger.reading() as t:
        assert t.accounts.list_all() == []
    with pytest.raises(LedgerUnavailable, match="read-only"), ledger.transaction() as t:
        t.move_cursor("bank", 1)
    ledger.close()


def test_the_proof_finds_what_was_changed(place: Settings) -> None:
    ledger = open_ledger(place)
    with ledger.transaction() as t:
        account(t, "phys", 5)
    with connected(place) as direct:
        direct.execute("UPDATE allocation SET balance = 6 WHERE number = 1")
        direct.execute("ALTER TABLE posting DISABLE TRIGGER ALL")
    assert {each.kind for each in ledger.check()} == {"balance", "unbalanced", "schema"}
    ledger.close()


def test_nothing_is_lost_or_doubled_when_the_server_is_killed(
    ledger: Ledger, place: Settings, postgresql: PostgreSQL
) -> None:
    with ledger.transaction() as t:
        account(t, "phys", 10)
    for _ in range(3):
        at = position(ledger, 0)
        with writing(place, "charge", "deposit"):
            wait_until(lambda at=at: position(ledger, 0) > at, "it charges")  # type: ignore[misc]
            postgresql.kill()
        with pytest.raises(LedgerUnavailable):
            position(ledger, 0)
        postgresql.start()
        proved(ledger, 0)


def test_a_server_that_stands_still_is_given_up(place: Settings, postgresql: PostgreSQL) -> None:
    ledger = Ledger(LedgerDatabase(ledger_url(place), reply_timeout_s=4.0), utc_now)
    with ledger.transaction() as t:
        account(t, "phys", 10)
    postgresql.pause()
    try:
        with pytest.raises(LedgerUnavailable):
            position(ledger, 0)
    finally:
        postgresql.resume()
    with ledger.transaction() as t:
        t.transfers.deposit("phys", 1, BY)
        assert t.queries.get_balance("phys") == 11
    ledger.close()


def test_a_writer_that_stands_still_does_not_stop_the_others(place: Settings) -> None:
    slow = open_ledger(place)
    with slow.transaction() as t:
        account(t, "phys", 10)
    other = open_ledger(place)

    def stand_still() -> None:
        with slow.transaction() as t:
            t.transfers.deposit("phys", 100, BY)
            wait_until(lambda: deposited_by(other), "the other has its turn")

    with pytest.raises(LedgerUnavailable):
        stand_still()
    with other.reading() as t:
        assert t.queries.get_balance("phys") == 11
    slow.close()
    other.close()


def deposited_by(other: Ledger) -> bool:
    """Deposit 1 micro-SU; return False if another transaction blocks it for too long."""
    try:
        with other.transaction() as t:
            t.transfers.deposit("phys", 1, BY)
    except LedgerUnavailable:
        return False
    return True


def test_a_lease_changes_hands_only_between_transactions(ledger: Ledger, place: Settings) -> None:
    mine = ledger.leases.take("bank", "here", 0.0)
    assert mine is not None
    with ThreadPoolExecutor(max_workers=1) as pool:
        with ledger.transaction(lease=mine) as t:
            account(t, "phys", 10)
            taking = pool.submit(ledger.leases.take, "bank", "there", 60.0)
            t.transfers.deposit("phys", 1, BY)
            assert not taking.done()
        theirs = taking.result(30)
    assert theirs is not None
    with ledger.transaction(lease=theirs) as t:
        assert t.queries.get_balance("phys") == 11
    with pytest.raises(LeaseLost), ledger.transaction(lease=mine) as t:
        t.transfers.deposit("phys", 1, BY)


def connected(place: Settings) -> "psycopg.Connection[tuple[object, ...]]":
    """Run SQL directly on the ledger's database."""
    dsn = place.bank.database.replace("postgresql+psycopg", "postgresql")
    return psycopg.connect(dsn, connect_timeout=10, autocommit=True)
