"""Ledger: the open database, its transactions and leases, and the consistency check.

The attributes of a :class:`Transaction` give access to accounts, allocations, charges, rates, the
outbox and the other tables. :class:`Ledger` is what processes hold (made by
``steward.bank.ledger.open_ledger``): its ``transaction()`` yields a :class:`Transaction` that may
write, ``reading()`` one that may not. Its ``leases`` are taken outside of transactions.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

import msgspec

from steward.bank.ledger.accounts import Accounts
from steward.bank.ledger.allocations import Allocations
from steward.bank.ledger.charges import Charges
from steward.bank.ledger.engine import LedgerDatabase
from steward.bank.ledger.leases import Leases, check_lease
from steward.bank.ledger.outbox import Cursors, Outbox, Settlements, Thresholds
from steward.bank.ledger.postings import LedgerSession, TransferWriter
from steward.bank.ledger.proof import verify_ledger
from steward.bank.ledger.queries import BalanceHistory, LedgerQueries, export_books
from steward.bank.ledger.rates import LedgerModes, LedgerRates, export_rules
from steward.bank.ledger.records import Lease, LedgerFinding
from steward.bank.ledger.side_records import RejectedJobs, RemoteHolds, ReportedJobs, Tokens
from steward.bank.ledger.tables import upgrade_schema
from steward.bank.ledger.transfers import Transfers
from steward.bank.records import BankRules, GateBooks
from steward.slurm.cluster_model import ClusterModel

log = logging.getLogger(__name__)


class Transaction:
    """Access to all parts of the ledger within one database transaction.

    Args:
        session: The session of the transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session
        self._cursors = Cursors(session)
        self.accounts = Accounts(session)
        self.allocations = Allocations(session, self.accounts)
        self.charges = Charges(session, self.accounts, self.allocations, TransferWriter(session))
        self.transfers = Transfers(session, self.accounts, self.allocations, self.charges)
        self.settlements = Settlements(session)
        self.rates = LedgerRates(session)
        self.modes = LedgerModes(session)
        self.queries = LedgerQueries(session, self.accounts, self.allocations)
        self.balance_history = BalanceHistory(session)
        self.thresholds = Thresholds(session)
        self.outbox = Outbox(session)
        self.tokens = Tokens(session)
        self.rejections = RejectedJobs(session)
        self.told = ReportedJobs(session)
        self.remote_holds = RemoteHolds(session)

    @property
    def seq(self) -> int:
        """Return the number of the last change of an account, its money, a rate or a mode."""
        return self._session.seq

    def read_cursor(self, name: str) -> int:
        """Return the cursor of a consumer; 0 if it has none."""
        return self._cursors.read_cursor(name)

    def move_cursor(self, name: str, position: int) -> None:
        """Set the cursor of a consumer, in the same transaction as its effects."""
        self._cursors.move_cursor(name, position)

    def read_mark(self, name: str) -> str:
        """Return a short named note; "" if absent."""
        return self._cursors.read_mark(name)

    def set_mark(self, name: str, text: str) -> None:
        """Write a short named note."""
        self._cursors.set_mark(name, text)

    def read_model(self, cluster: str) -> ClusterModel | None:
        """Return a cluster's model stored last; None before the first and after an upgrade.

        Another version of Steward may have stored one that this one cannot decode; the bank
        replaces it at its next query of the cluster.
        """
        text = self.read_mark(f"picture:{cluster}")
        try:
            return msgspec.json.decode(text, type=ClusterModel) if text else None
        except msgspec.MsgspecError as error:
            log.debug("the stored model of cluster %s cannot be decoded: %s", cluster, error)
            return None

    def set_model(self, model: ClusterModel) -> None:
        """Store a cluster's model."""
        self.set_mark(f"picture:{model.cluster}", msgspec.json.encode(model).decode())

    def export_books(self, after_seq: int = 0) -> GateBooks:
        """Return the accounts that changed after a sequence number, for the gate; all for 0."""
        return export_books(self._session, self.accounts, after_seq)

    def export_rules(self) -> BankRules:
        """Return all rates and modes, for the gate."""
        return export_rules(self._session, self.rates, self.modes)

    def check(self) -> list[LedgerFinding]:
        """Check the ledger's invariants; see ``steward.bank.ledger.proof``."""
        return verify_ledger(self._session)


class Ledger:
    """Ledger on an open database; close it when done.

    A process that forks must open its own ledger afterwards.

    Args:
        database: The ledger's database. Closing the ledger closes it.
        now: The clock.

    Raises:
        LedgerUnavailable: The database cannot be used now.
        BankError: A newer Steward created the database.
        SqliteError: The file is not a usable SQLite database.
    """

    def __init__(self, database: LedgerDatabase, now: Callable[[], datetime]) -> None:
        self._database = database
        self._now = now
        try:
            upgrade_schema(self._database)
        except BaseException:
            self._database.close()
            raise
        self.leases = Leases(self._database, now)

    @property
    def display_url(self) -> str:
        """Return the database URL without the password."""
        return self._database.display_url

    @property
    def is_shared(self) -> bool:
        """Return True if processes on other hosts can use it: PostgreSQL, not a file."""
        return not self._database.is_sqlite

    @contextmanager
    def transaction(self, lease: Lease | None = None) -> Iterator[Transaction]:
        """Run one write transaction, all or nothing; other writers wait meanwhile.

        Args:
            lease: Lease that the caller must still hold; None for no check.

        Raises:
            LedgerUnavailable: The database is unreachable, full, or locked for too long. If this
                happens at commit, the changes may be stored all the same: a repeat must be
                harmless, by its key or by its cursor.
            LeaseLost: Another process has taken the lease.
        """
        with self._database.writing() as connection:
            session = LedgerSession(connection, self._now, writing=True)
            if lease is not None:
                check_lease(connection, lease)
            yield Transaction(session)
            session.flush()

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """Run one read-only transaction on a snapshot of the ledger.

        Raises:
            LedgerUnavailable: The database is unreachable.
        """
        with self._database.reading() as connection:
            yield Transaction(LedgerSession(connection, self._now, writing=False))

    def read_change_mark(self) -> int | None:
        """Return a number that differs after each commit, cheaply; None on PostgreSQL.

        Raises:
            LedgerUnavailable: The database cannot be read now.
        """
        return self._database.read_change_mark()

    def check(self) -> list[LedgerFinding]:
        """Check the ledger's invariants; an empty list means that all hold.

        Raises:
            LedgerUnavailable: The database is unreachable.
        """
        with self.reading() as transaction:
            return transaction.check()

    def close(self) -> None:
        """Close the database."""
        self._database.close()
