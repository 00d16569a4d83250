"""Leases of the ledger: an exclusive right to act for a time.

The holder of a lease shows its fencing number, which grows, with each transaction
(:func:`check_lease`). Once another process takes the lease, the ledger rejects the former holder,
however late it wakes up.
"""

from collections.abc import Callable
from datetime import datetime, timedelta

import msgspec
from sqlalchemy import Connection, func, insert, select, update

from steward.bank.errors import LedgerUnavailable
from steward.bank.ledger.engine import LedgerDatabase
from steward.bank.ledger.records import Lease
from steward.bank.ledger.tables import lease, state
from steward.core.sqlalchemy_tables import decode_row
from steward.core.timestamps import from_micros, to_micros


class LeaseLost(LedgerUnavailable):
    """Error: another process took the lease, or it ended; ``offender`` is the lease's name."""


class Leases:
    """Leases: take, renew and release them, each call in its own transaction.

    Args:
        database: The ledger's database.
        now: The clock, used on SQLite; PostgreSQL uses the server's clock.
    """

    def __init__(self, database: LedgerDatabase, now: Callable[[], datetime]) -> None:
        self._database = database
        self._now = now

    def take(self, name: str, holder: str, duration_s: float) -> Lease | None:
        """Take a lease that is free or already held by this holder.

        Args:
            name: Name of the lease.
            holder: Unique name of the process that takes it.
            duration_s: Duration, in seconds.

        Returns:
            The lease with a new fencing number; None while another holds it.

        Raises:
            LedgerUnavailable: The database is unreachable.
        """
        with self._database.writing() as connection:
            _wait_for_writers(connection)
            now = self._current_time(connection)
            before = _find_lease(connection, name)
            if before is not None and before.holder != holder and before.until > now:
                return None
            fence = 1 if before is None else before.fence + 1
            until = now + timedelta(seconds=duration_s)
            taken = Lease(name=name, holder=holder, fence=fence, until=until)
            values = msgspec.structs.asdict(taken)
            if before is None:
                connection.execute(insert(lease), values)
            else:
                connection.execute(update(lease).where(lease.c.name == name).values(values))
        return taken

    def renew(self, held_lease: Lease, duration_s: float) -> Lease:
        """Extend a lease from now on, even after it ended if nobody took it.

        Raises:
            LeaseLost: Another process has taken it.
            LedgerUnavailable: The database is unreachable.
        """
        with self._database.writing() as connection:
            _wait_for_writers(connection)
            check_lease(connection, held_lease)
            until = self._current_time(connection) + timedelta(seconds=duration_s)
            connection.execute(
                update(lease).where(lease.c.name == held_lease.name).values(until=until)
            )
        return msgspec.structs.replace(held_lease, until=until)

    def release(self, held_lease: Lease) -> None:
        """Release a lease; no effect if another process has taken it.

        Raises:
            LedgerUnavailable: The database is unreachable.
        """
        with self._database.writing() as connection:
            _wait_for_writers(connection)
            connection.execute(
                update(lease)
                .where(lease.c.name == held_lease.name, lease.c.fence == held_lease.fence)
                .values(until=from_micros(0), fence=held_lease.fence + 1)
            )

    def find_holder(self, name: str) -> Lease | None:
        """Return the lease if someone holds it now, else None.

        Raises:
            LedgerUnavailable: The database is unreachable.
        """
        with self._database.reading() as connection:
            held_lease = _find_lease(connection, name)
            if held_lease is None or held_lease.until <= self._current_time(connection):
                return None
            return held_lease

    def _current_time(self, connection: Connection) -> datetime:
        """Return the current time: the process's clock on SQLite, the server's on PostgreSQL."""
        if self._database.is_sqlite:
            return self._now()
        server_time: datetime = connection.execute(select(func.clock_timestamp())).scalar_one()
        return from_micros(to_micros(server_time))


def check_lease(connection: Connection, held_lease: Lease) -> None:
    """Check that a lease is still held, in a transaction that locks out other writers.

    Raises:
        LeaseLost: Another process has taken it.
    """
    stored = _find_lease(connection, held_lease.name)
    if stored is None or (stored.fence, stored.holder) != (held_lease.fence, held_lease.holder):
        holder = stored.holder if stored is not None else "nobody"
        raise LeaseLost(f"lost the lease {held_lease.name}: {holder} holds it now", held_lease.name)


def _wait_for_writers(connection: Connection) -> None:
    """Wait for running writers, so that they finish before the lease changes hands."""
    connection.execute(select(state.c.id).with_for_update())


def _find_lease(connection: Connection, name: str) -> Lease | None:
    row = connection.execute(select(lease).where(lease.c.name == name)).first()
    return None if row is None else decode_row(Lease, row)
