"""The right to be the only one who decides, for a time, with a number that grows.

Whoever holds a lease shows its number with each transaction: once another has taken
it, the ledger refuses the former holder, however late it wakes up.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from steward.bank.errors import LedgerUnavailable
from steward.bank.ledger.asides import Lease
from steward.bank.ledger.engine import Database
from steward.bank.ledger.tables import lease, state
from steward.core.timestamps import micros, moment


class LeaseLost(LedgerUnavailable):
    """Another has taken the lease, or it ended; ``offender`` is its name."""


class Leases:
    """Taken, renewed and given back, each in a transaction of its own.

    Args:
        database: The ledger's.
        now: The clock, which counts where the database is a file; a server has one itself.
    """

    def __init__(self, database: Database, now: Callable[[], datetime]) -> None:
        self._database = database
        self._now = now

    def take(self, name: str, holder: str, for_s: float) -> Lease | None:
        """Take a lease that nobody holds, or that one holds oneself.

        Args:
            name: What it is about.
            holder: Who takes it; no other may use that name.
            for_s: For how long, in seconds.

        Returns:
            The lease, with a number of its own; None while another holds it.

        Raises:
            LedgerUnavailable: The database is away.
        """
        with self._database.writing() as connection:
            _lock(connection)
            now = self._time(connection)
            found = _find(connection, name)
            if found is not None and found.holder != holder and moment(found.until_us) > now:
                return None
            fence = 1 if found is None else found.fence + 1
            until_us = micros(now + timedelta(seconds=for_s))
            values = {"holder": holder, "fence": fence, "until_us": until_us}
            if found is None:
                connection.execute(insert(lease).values(name=name, **values))
            else:
                connection.execute(update(lease).where(lease.c.name == name).values(values))
        return Lease(name=name, holder=holder, fence=fence, until=moment(until_us))

    def renew(self, held: Lease, for_s: float) -> Lease:
        """Hold a lease for longer, from now on; also one that has ended, if nobody took it.

        Raises:
            LeaseLost: Another has taken it.
            LedgerUnavailable: The database is away.
        """
        with self._database.writing() as connection:
            _lock(connection)
            check(connection, held)
            until_us = micros(self._time(connection) + timedelta(seconds=for_s))
            connection.execute(
                update(lease).where(lease.c.name == held.name).values(until_us=until_us)
            )
        return Lease(name=held.name, holder=held.holder, fence=held.fence, until=moment(until_us))

    def release(self, held: Lease) -> None:
        """Let others have a lease; nothing if they have it already.

        Raises:
            LedgerUnavailable: The database is away.
        """
        with self._database.writing() as connection:
            _lock(connection)
            connection.execute(
                update(lease)
                .where(lease.c.name == held.name, lease.c.fence == held.fence)
                .values(until_us=0, fence=held.fence + 1)
            )

    def holder(self, name: str) -> Lease | None:
        """Who holds a lease now.

        Raises:
            LedgerUnavailable: The database is away.
        """
        with self._database.reading() as connection:
            found = _find(connection, name)
            if found is None or moment(found.until_us) <= self._time(connection):
                return None
            return Lease(
                name=name,
                holder=found.holder,
                fence=found.fence,
                until=moment(found.until_us),
            )

    def _time(self, connection: Connection) -> datetime:
        if self._database.is_sqlite:
            return self._now()
        told: datetime = connection.execute(select(func.clock_timestamp())).scalar_one()
        return moment(micros(told))


def check(connection: Connection, held: Lease) -> None:
    """See that a lease is still held, in a transaction that has locked out other writers.

    Raises:
        LeaseLost: Another has taken it.
    """
    found = _find(connection, held.name)
    if found is None or (found.fence, found.holder) != (held.fence, held.holder):
        other = found.holder if found is not None else "nobody"
        raise LeaseLost(f"the lease {held.name} is not ours any more: {other} has it", held.name)


def _lock(connection: Connection) -> None:
    """Wait for those that write: what they were allowed to do is done before it changes hands."""
    connection.execute(select(state.c.id).with_for_update())


def _find(connection: Connection, name: str) -> "Row[Any] | None":
    return connection.execute(select(lease).where(lease.c.name == name)).first()
