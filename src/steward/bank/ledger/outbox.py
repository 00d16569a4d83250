"""The right to be the only one who decides, for a time, with a number that grows.

Whoever holds a lease shows its number with each transaction: once another has taken
it, the ledger refuses the former holder, however late it wakes up.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Row, Table, delete, func, insert, select, update

from steward.bank.errors import BankUsage, LedgerUnavailable
from steward.bank.ledger.engine import Database
from steward.bank.ledger.postings import Session, clean
from steward.bank.ledger.records import Lease, OutboxItem
from steward.bank.ledger.tables import cursor, lease, mark, outbox, settlement, state, threshold
from steward.bank.records import Settlement
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


_KEPT_US: Final = 90 * 86_400 * 1_000_000
_DONE: Final = 1
_ASIDE: Final = 2


def put(session: Session, table: Table, values: dict[str, Any], *, replace: bool = False) -> bool:
    """Put a row into a table; one of the same primary key is replaced, or left as it is.

    Returns:
        Whether there is something new in it.
    """
    # Other writers wait, so nothing comes in between.
    same = [column == values[column.name] for column in table.primary_key]
    if session.row(select(*table.primary_key).where(*same)) is None:
        session.run(insert(table).values(values))
        return True
    if replace:
        session.run(update(table).where(*same).values(values))
    return replace


class Places:
    """Positions and small notes, by name.

    Args:
        session: The transaction.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def cursor(self, name: str) -> int:
        """A position; 0 where there is none."""
        chosen = select(cursor.c.position).where(cursor.c.name == name)
        return int(self._session.value(chosen) or 0)

    def move_cursor(self, name: str, position: int) -> None:
        """Move a position."""
        put(self._session, cursor, {"name": name, "position": position}, replace=True)

    def mark(self, name: str) -> str:
        """A note; "" where there is none."""
        return str(self._session.value(select(mark.c.said).where(mark.c.name == name)) or "")

    def set_mark(self, name: str, text: str) -> None:
        """Write a note, in place of what it said."""
        put(self._session, mark, {"name": name, "said": clean(text)}, replace=True)


class Settlements:
    """What the gate is to take off its holds, in order.

    Args:
        session: The transaction.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(
        self, hold: str, charge_key: str, amount: int, *, frees: int = 0, final: bool
    ) -> Settlement:
        """Add the next; see ``steward.bank.records.Settlement``."""
        self._session.settlement += 1
        made = Settlement(
            seq=self._session.settlement,
            hold=clean(hold),
            charge=clean(charge_key),
            amount=amount,
            frees=frees,
            final=final,
        )
        values = msgspec.structs.asdict(made) | {"final": int(final)}
        self._session.run(insert(settlement).values(values))
        return made

    def after(self, seq: int, limit: int = 1000) -> list[Settlement]:
        """Those that come after a number, in order."""
        chosen = select(settlement).where(settlement.c.seq > seq).order_by(settlement.c.seq)
        return [
            Settlement(
                seq=row.seq,
                hold=row.hold,
                charge=row.charge,
                amount=row.amount,
                frees=row.frees,
                final=bool(row.final),
            )
            for row in self._session.rows(chosen.limit(limit))
        ]

    def prune(self, upto: int) -> int:
        """Forget those up to a number, which the gate has taken; how many there were.

        The last stays, so that the proof knows where numbers go on.
        """
        old = (settlement.c.seq <= upto, settlement.c.seq < self._session.settlement)
        return self._session.run(delete(settlement).where(*old))


class Thresholds:
    """Which thresholds were told of, so that each is told once.

    Args:
        session: The transaction.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def tell(self, allocation: int, kind: str, value: int) -> bool:
        """Note that one is told now; False if it was before."""
        now_us = micros(self._session.now())
        values = {"allocation": allocation, "kind": kind, "value": value, "at_us": now_us}
        return put(self._session, threshold, values)

    def told(self, allocation: int, kind: str) -> int:
        """How many of a kind were told."""
        where = (threshold.c.allocation == allocation, threshold.c.kind == kind)
        return len(self._session.rows(select(threshold.c.value).where(*where)))

    def forget(self, allocation: int, kind: str) -> None:
        """Have them told again, since the allocation got something or lasts longer."""
        where = (threshold.c.allocation == allocation, threshold.c.kind == kind)
        self._session.run(delete(threshold).where(*where))


class Outbox:
    """What is to be told elsewhere, and is tried until it is.

    Args:
        session: The transaction.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def put(self, kind: str, payload: bytes, *, key: str = "") -> int:
        """Add something; a key that was used before for its kind adds nothing.

        Returns:
            Its number.
        """
        if key:
            where = (outbox.c.kind == kind, outbox.c.item_key == clean(key))
            found = self._session.value(select(outbox.c.id).where(*where))
            if found is not None:
                return int(found)
        number = int(self._session.value(select(func.max(outbox.c.id))) or 0) + 1
        self._session.run(
            insert(outbox).values(
                id=number,
                kind=kind,
                item_key=clean(key) if key else None,
                payload=payload,
                tries=0,
                next_us=micros(self._session.now()),
                error="",
                done=0,
            )
        )
        return number

    def due(self, kind: str, now: datetime, limit: int = 100) -> list[OutboxItem]:
        """What is to be tried now, the first that came first."""
        chosen = (
            select(outbox)
            .where(outbox.c.kind == kind, outbox.c.done == 0, outbox.c.next_us <= micros(now))
            .order_by(outbox.c.id)
            .limit(limit)
        )
        return [_item(row) for row in self._session.rows(chosen)]

    def done(self, number: int) -> None:
        """It was told. Its key is remembered for some months, what it said is not."""
        now_us = micros(self._session.now())
        self._session.run(
            update(outbox)
            .where(outbox.c.id == number)
            .values(done=_DONE, payload=b"", next_us=now_us, error="")
        )
        # The last stays, so that numbers go on from there.
        last = self._session.value(select(func.max(outbox.c.id)))
        old = (outbox.c.done != 0, outbox.c.next_us < now_us - _KEPT_US, outbox.c.id < last)
        self._session.run(delete(outbox).where(*old))

    def later(self, number: int, next_at: datetime, error: str) -> None:
        """It could not be told now.

        Raises:
            BankUsage: There is nothing of that number.
        """
        changed = self._session.run(
            update(outbox)
            .where(outbox.c.id == number)
            .values(tries=outbox.c.tries + 1, next_us=micros(next_at), error=clean(error))
        )
        if not changed:
            raise BankUsage(f"nothing of number {number} waits to be told", number)

    def aside(self, number: int, error: str) -> None:
        """It is not tried any more: nobody will take it.

        Raises:
            BankUsage: There is nothing of that number.
        """
        self.later(number, self._session.now(), error)
        self._session.run(update(outbox).where(outbox.c.id == number).values(done=_ASIDE))

    def again(self, kinds: Sequence[str], numbers: Sequence[int]) -> int:
        """Have things tried at once that wait or were set aside; how many there were.

        Args:
            kinds: Of these kinds alone.
            numbers: These; all that were set aside if empty.
        """
        wanted = [outbox.c.kind.in_(kinds), outbox.c.done != _DONE]
        wanted.append(outbox.c.id.in_(numbers) if numbers else outbox.c.done == _ASIDE)
        now_us = micros(self._session.now())
        return self._session.run(
            update(outbox).where(*wanted).values(done=0, tries=0, next_us=now_us)
        )

    def untold(self, kinds: Sequence[str], limit: int = 1000) -> list[OutboxItem]:
        """What waits or was set aside, the first that came first."""
        wanted = (outbox.c.kind.in_(kinds), outbox.c.done != _DONE)
        chosen = select(outbox).where(*wanted).order_by(outbox.c.id).limit(limit)
        return [_item(row) for row in self._session.rows(chosen)]

    def waiting(self, kind: str) -> int:
        """How much of a kind waits."""
        where = (outbox.c.kind == kind, outbox.c.done == 0)
        return int(self._session.value(select(func.count()).select_from(outbox).where(*where)))

    def set_aside(self, kinds: Sequence[str]) -> int:
        """How much of some kinds was set aside."""
        where = (outbox.c.kind.in_(kinds), outbox.c.done == _ASIDE)
        return int(self._session.value(select(func.count()).select_from(outbox).where(*where)))


def _item(row: "Row[Any]") -> OutboxItem:
    return OutboxItem(
        id=row.id,
        kind=row.kind,
        key=row.item_key or "",
        payload=bytes(row.payload),
        tries=row.tries,
        next_at=moment(row.next_us),
        error=row.error,
        aside=row.done == _ASIDE,
    )
