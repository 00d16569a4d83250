"""The ledger as a whole: transactions on it, leases, and the proof that it is right."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

from steward.bank.ledger import outbox
from steward.bank.ledger.accounts import Accounts
from steward.bank.ledger.allocations import Allocations
from steward.bank.ledger.charges import Charges
from steward.bank.ledger.engine import Database
from steward.bank.ledger.outbox import Leases, Outbox, Places, Settlements, Thresholds
from steward.bank.ledger.postings import Moves, Session
from steward.bank.ledger.proof import check
from steward.bank.ledger.queries import Course, Reading, books
from steward.bank.ledger.rates import Modes, Rates, rules
from steward.bank.ledger.records import Finding, Lease
from steward.bank.ledger.side_records import Refusals, RemoteHolds, Tokens, Told
from steward.bank.ledger.tables import bring_up_to_date
from steward.bank.ledger.transfers import Transfers
from steward.bank.records import Books, Rules


class Transaction:
    """All that can be asked and done in one transaction, each thing at its place.

    Args:
        session: The transaction.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._places = Places(session)
        self.accounts = Accounts(session)
        self.allocations = Allocations(session, self.accounts)
        self.charges = Charges(session, self.accounts, self.allocations, Moves(session))
        self.transfers = Transfers(session, self.accounts, self.allocations, self.charges)
        self.settlements = Settlements(session)
        self.rates = Rates(session)
        self.modes = Modes(session)
        self.reading = Reading(session, self.accounts, self.allocations)
        self.course = Course(session)
        self.thresholds = Thresholds(session)
        self.outbox = Outbox(session)
        self.tokens = Tokens(session)
        self.refusals = Refusals(session)
        self.told = Told(session)
        self.remote_holds = RemoteHolds(session)

    @property
    def seq(self) -> int:
        """Number of the last change of an account, its money, a rate or a mode."""
        return self._session.seq

    def cursor(self, name: str) -> int:
        """The position of a consumer; 0 where there is none."""
        return self._places.cursor(name)

    def move_cursor(self, name: str, position: int) -> None:
        """Move the position of a consumer, together with all else in the transaction."""
        self._places.move_cursor(name, position)

    def mark(self, name: str) -> str:
        """A small note; "" where there is none."""
        return self._places.mark(name)

    def set_mark(self, name: str, text: str) -> None:
        """Write a small note."""
        self._places.set_mark(name, text)

    def books(self, after_seq: int = 0) -> Books:
        """The accounts that have changed after a position, or all of them for 0."""
        return books(self._session, self.accounts, after_seq)

    def rules(self) -> Rules:
        """Every rate and mode."""
        return rules(self._session, self.rates, self.modes)

    def check(self) -> list[Finding]:
        """Prove the ledger; see ``steward.bank.ledger.proof``."""
        return check(self._session)


class Ledger:
    """The ledger, open; to be closed in the end.

    A process that forks opens one of its own afterwards.

    Args:
        database: The ledger's database. Closing the ledger closes it.
        now: The clock.

    Raises:
        LedgerUnavailable: Its database cannot be used now.
        BankError: A newer Steward created the database.
        SqliteError: The file cannot be used as it is.
    """

    def __init__(self, database: Database, now: Callable[[], datetime]) -> None:
        self._database = database
        self._now = now
        try:
            bring_up_to_date(self._database)
        except BaseException:
            self._database.close()
            raise
        self.leases = Leases(self._database, now)

    @property
    def url_shown(self) -> str:
        """Where it is, without the password."""
        return self._database.shown

    @property
    def is_shared(self) -> bool:
        """Whether processes on other hosts can work with it: not if it is a file."""
        return not self._database.is_sqlite

    @contextmanager
    def transaction(self, lease: Lease | None = None) -> Iterator[Transaction]:
        """One transaction: all of it is kept, or nothing. Other writers wait meanwhile.

        Args:
            lease: Which has to be held still.

        Raises:
            LedgerUnavailable: The database is away, full, or locked for too long. Where that
                happens at the end, it may have been kept all the same: what is done again has
                to be harmless, by its key or by its cursor.
            LeaseLost: Another has taken the lease.
        """
        with self._database.writing() as connection:
            session = Session(connection, self._now, writing=True)
            if lease is not None:
                outbox.check(connection, lease)
            yield Transaction(session)
            session.flush()

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """One look at the ledger as it is at its beginning; nothing can be changed.

        Raises:
            LedgerUnavailable: The database is away.
        """
        with self._database.reading() as connection:
            yield Transaction(Session(connection, self._now, writing=False))

    def check(self) -> list[Finding]:
        """Prove the ledger as it is now; no finding is the proof.

        Raises:
            LedgerUnavailable: The database is away.
        """
        with self.reading() as transaction:
            return transaction.check()

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()
