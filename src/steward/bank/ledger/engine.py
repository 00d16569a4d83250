"""Database engine of the ledger: SQLite or PostgreSQL behind one interface.

:func:`ledger_url` reads the database URL from the settings; :class:`LedgerDatabase` opens
connections, runs read and write transactions and translates SQLAlchemy's errors into the bank's.

Writers queue: on SQLite by ``BEGIN IMMEDIATE``, on PostgreSQL by a lock on the one row of
``state``. So no transaction conflicts and needs a retry, and numbers are committed in
ascending order. Every wait has a time-out.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import sqlalchemy
from pysqlite3 import dbapi2
from sqlalchemy import URL, Connection, Engine, event
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from steward.bank.errors import BankError, LedgerUnavailable
from steward.core.config import Settings
from steward.core.databases import LEDGER
from steward.core.drivers import POSTGRESQL
from steward.core.errors import Unavailable
from steward.core.sqlite import open_database, translate_errors

_CONNECT_TIMEOUT_S: Final = 5
"""Time-out of a connection to PostgreSQL, in seconds."""
_LOCK_TIMEOUT_S: Final = 10
"""Longest wait for a lock, in seconds."""
_STATEMENT_TIMEOUT_S: Final = 20
"""Time-out of a statement on PostgreSQL, in seconds."""
_LOCK_POLL_S: Final = 0.002
"""Interval of attempts to begin a write on SQLite, in seconds."""
_WRITES: Final = {"steward_writes": True}
_READS: Final = {"steward_writes": False}
_SNAPSHOT_SQL: Final = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"
"""Statement that makes a PostgreSQL transaction a read-only snapshot."""

_CONNECT_OPTIONS: Final[dict[str, Any]] = {
    "connect_timeout": _CONNECT_TIMEOUT_S,
    "application_name": "steward",
    "tcp_user_timeout": _STATEMENT_TIMEOUT_S * 1000,
}
"""Connection parameters of libpq."""

_PERMANENT_ERRORS: Final = ("no such", "syntax error", "malformed")
"""Signs in SQLite's "operational" errors of permanent faults, where a retry does not help."""

_SESSION_OPTIONS: Final = " ".join(
    f"-c {name}={seconds * 1000}"
    for name, seconds in {
        "lock_timeout": _LOCK_TIMEOUT_S,
        "statement_timeout": _STATEMENT_TIMEOUT_S,
        # A session idle inside a transaction blocks all other writers.
        "idle_in_transaction_session_timeout": _LOCK_TIMEOUT_S,
    }.items()
)


def ledger_url(settings: Settings) -> URL:
    """Return the ledger's URL: ``[bank].database``, or ``ledger.db`` in the state directory.

    Raises:
        BankError: The setting is no URL of SQLite or PostgreSQL.
        LedgerUnavailable: The password file cannot be read.
    """
    text = settings.bank.database
    if not text:
        return URL.create("sqlite", database=LEDGER.locate(settings.state_dir))
    try:
        url = sqlalchemy.make_url(text)
    except ArgumentError as error:
        raise BankError(
            "[bank].database is not a URL: write postgresql+psycopg://user@host/db"
        ) from error
    kind = url.get_backend_name()
    if kind == "sqlite" and url.database:
        return URL.create("sqlite", database=os.path.abspath(url.database))
    if kind != "postgresql":
        raise BankError(
            f"[bank].database has the unsupported kind {kind}: use PostgreSQL or SQLite"
        )
    url = url.set(drivername="postgresql+psycopg")
    if settings.bank.password_file:
        url = url.set(password=_read_password(settings.bank.password_file))
    return url


def _read_password(path: str) -> str:
    """Read the first line of the password file."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LedgerUnavailable(f"cannot read [bank].password_file {path}: {error}") from error


class LedgerDatabase:
    """Connections to the ledger's database, with errors translated to the bank's.

    Args:
        url: The database's URL.
        reply_timeout_s: Longest wait for a reply of PostgreSQL, in seconds.
    """

    def __init__(self, url: URL, *, reply_timeout_s: float = _STATEMENT_TIMEOUT_S + 5.0) -> None:
        self.is_sqlite = url.get_backend_name() == "sqlite"
        self.display_url = url.render_as_string(hide_password=True)
        self.path = url.database or "" if self.is_sqlite else ""
        self._own_connection: Any = None
        with self._translate_errors():
            if self.is_sqlite:
                self._engine = _sqlite_engine(self.path)
            else:
                self._engine = _postgresql_engine(url, reply_timeout_s)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Run one write transaction: commit at the end, roll back on any error.

        Raises:
            LedgerUnavailable: The database is unreachable, full, or locked for too long.
            BankError: A constraint of the database forbids the change.
        """
        with self._translate_errors(), self._connect(_WRITES) as connection, connection.begin():
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Run one read-only transaction on a snapshot taken at its beginning.

        Raises:
            LedgerUnavailable: The database is unreachable.
        """
        with self._translate_errors(), self._connect(_READS) as connection, connection.begin():
            if not self.is_sqlite:
                connection.exec_driver_sql(_SNAPSHOT_SQL)
            yield connection

    def read_change_mark(self) -> int | None:
        """Return a number that differs after each commit, cheaply; None on PostgreSQL.

        The first call also lets ``shrink_databases`` shrink the file in the thread that calls.

        Raises:
            LedgerUnavailable: The database cannot be used now.
        """
        if not self.is_sqlite:
            return None
        with self._translate_errors():
            if self._own_connection is None:
                self._own_connection = open_database(self.path, (), timeout_s=_LOCK_TIMEOUT_S)
            with translate_errors(self.path):
                (mark,) = self._own_connection.execute("PRAGMA data_version").fetchone()
        return int(mark)

    def close(self) -> None:
        """Close all connections."""
        if self._own_connection is not None:
            self._own_connection.close()
        with suppress(DBAPIError):  # a broken connection cannot be closed cleanly
            self._engine.dispose()

    @contextmanager
    def _connect(self, options: Mapping[str, Any]) -> Iterator[Connection]:
        with self._engine.connect() as connection:
            yield connection.execution_options(**options)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate SQLAlchemy's errors into LedgerUnavailable and BankError."""
        try:
            yield
        except (OperationalError, InterfaceError) as error:
            if any(sign in str(error.orig) for sign in _PERMANENT_ERRORS):
                raise BankError(
                    f"cannot use the ledger {self.display_url}: {_error_line(error)}"
                ) from error
            raise LedgerUnavailable(
                f"cannot use the ledger {self.display_url}: {_error_line(error)}"
            ) from error
        except PoolTimeoutError as error:
            raise LedgerUnavailable(
                f"cannot use the ledger {self.display_url}: all connections are in use"
            ) from error
        except NoSuchModuleError as error:
            raise BankError(f"cannot use the ledger {self.display_url}: {error}") from error
        except IntegrityError as error:
            raise BankError(
                f"the ledger {self.display_url} rejects the change: {_error_line(error)}"
            ) from error
        except DBAPIError as error:
            if error.connection_invalidated or _is_standby(error):
                raise LedgerUnavailable(
                    f"cannot use the ledger {self.display_url}: {_error_line(error)}"
                ) from error
            raise BankError(
                f"cannot use the ledger {self.display_url}: {_error_line(error)}"
            ) from error
        except Unavailable as error:
            if isinstance(error, LedgerUnavailable) or not self.is_sqlite:
                raise
            if error.offender != self.path:
                raise  # from another service that the caller used inside the transaction
            raise LedgerUnavailable(f"cannot use the ledger: {error}", error.offender) from error


def _is_standby(error: DBAPIError) -> bool:
    """Return True if the server is a standby, which rejects changes (SQLSTATE 25006)."""
    return getattr(error.orig, "sqlstate", None) == "25006"


def _error_line(error: DBAPIError) -> str:
    """Return the first line of the database's error message."""
    text = str(error.orig).strip()
    return text.splitlines()[0] if text else type(error.orig).__name__


def _sqlite_engine(path: str) -> Engine:
    """Create the SQLAlchemy engine for SQLite, with write transactions that queue."""
    engine = sqlalchemy.create_engine(
        "sqlite://",
        module=dbapi2,
        creator=lambda: open_database(path, (), timeout_s=_LOCK_TIMEOUT_S, shrinks=False),
        poolclass=sqlalchemy.QueuePool,
        pool_size=2,
        pool_timeout=_LOCK_TIMEOUT_S,
    )

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("steward_writes", False)
        connection.exec_driver_sql(f"PRAGMA query_only={'OFF' if writes else 'ON'}")
        if not writes:
            connection.exec_driver_sql("BEGIN")
        elif not _begin_immediate(connection.connection.dbapi_connection):
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _begin_immediate(connection: Any) -> bool:
    """Begin a write transaction as soon as no other runs; False after the time-out.

    SQLite's own busy handler polls only every 100 ms in the end, and so hardly ever hits the
    gap between two transactions of a process that writes continuously.
    """
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    connection.execute("PRAGMA busy_timeout=0")
    try:
        while time.monotonic() < deadline:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except dbapi2.OperationalError as error:
                if "locked" not in str(error):
                    return False  # the caller tries once more, and reports the error
                time.sleep(_LOCK_POLL_S)
            else:
                return True
        return False
    finally:
        connection.execute(f"PRAGMA busy_timeout={_LOCK_TIMEOUT_S * 1000}")


def _postgresql_engine(url: URL, reply_timeout_s: float) -> Engine:
    """Create the SQLAlchemy engine for PostgreSQL, with time-outs."""
    try:
        from steward.bank.ledger.postgresql import connect_postgresql
    except ImportError as error:
        display_url = url.render_as_string(hide_password=True)
        raise LedgerUnavailable(
            f"the ledger {display_url}: {POSTGRESQL.missing_error}", POSTGRESQL.part
        ) from error

    parameters = url.translate_connect_args(username="user", database="dbname") | dict(url.query)
    options = f"{_SESSION_OPTIONS} {parameters.pop('options', '')}".rstrip()
    return sqlalchemy.create_engine(
        url,
        creator=lambda: connect_postgresql(
            reply_timeout_s,
            **_CONNECT_OPTIONS | parameters,
            options=options,
        ),
        pool_size=2,
        pool_timeout=_LOCK_TIMEOUT_S,
        pool_pre_ping=True,
    )
