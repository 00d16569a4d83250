"""Outbox of the ledger, with consumer cursors, hold settlements and notice thresholds.

Each is written in the transaction of the postings that it belongs to:

- :class:`Cursors`: consumer cursors and short notes, by name.
- :class:`Settlements`: amounts that the gate deducts from its SU holds, in order.
- :class:`Thresholds`: thresholds already reported, so that each is reported once.
- :class:`Outbox`: messages to deliver elsewhere, retried until delivered or dead letters.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy import Table, delete, func, select, update

from steward.bank.errors import BankUsage
from steward.bank.ledger.postings import LedgerSession
from steward.bank.ledger.records import DEAD_LETTER, DELIVERED, OutboxItem
from steward.bank.ledger.tables import (
    ConsumerCursor,
    Mark,
    ReportedThreshold,
    cursor,
    mark,
    outbox,
    settlement,
    threshold,
)
from steward.bank.records import Settlement
from steward.core.sqlalchemy_tables import sanitize_text

_KEY_RETENTION: Final = timedelta(days=90)
"""Time that the key of a delivered message is remembered."""


def insert_or_replace(
    session: LedgerSession, table: Table, record: msgspec.Struct, *, replace: bool = False
) -> bool:
    """Insert a record; with ``replace``, overwrite the row with the same primary key.

    Returns:
        True if a row was inserted or replaced.
    """
    # Other writers wait, so no row can appear between the check and the insert.
    conditions = [column == getattr(record, column.key) for column in table.primary_key]
    if session.fetch_row(select(*table.primary_key).where(*conditions)) is None:
        session.insert(table, record)
        return True
    if replace:
        values = msgspec.structs.asdict(record)
        session.execute(update(table).where(*conditions).values(values))
    return replace


class Cursors:
    """Consumer cursors and short notes, by name.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session

    def read_cursor(self, name: str) -> int:
        """Return a cursor; 0 if absent."""
        query = select(cursor.c.position).where(cursor.c.name == name)
        return int(self._session.fetch_value(query) or 0)

    def move_cursor(self, name: str, position: int) -> None:
        """Set a cursor."""
        new = ConsumerCursor(name=name, position=position)
        insert_or_replace(self._session, cursor, new, replace=True)

    def read_mark(self, name: str) -> str:
        """Return a note; "" if absent."""
        return str(self._session.fetch_value(select(mark.c.said).where(mark.c.name == name)) or "")

    def set_mark(self, name: str, text: str) -> None:
        """Write a note, replacing its text."""
        insert_or_replace(self._session, mark, Mark(name=name, said=text), replace=True)


class Settlements:
    """Settlements: amounts that the gate deducts from its SU holds, in order.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session

    def add(
        self, hold: str, charge_key: str, amount: int, *, frees: int = 0, final: bool
    ) -> Settlement:
        """Append a settlement; see ``steward.bank.records.Settlement``."""
        self._session.settlement += 1
        new = Settlement(
            seq=self._session.settlement,
            hold=sanitize_text(hold),
            charge=sanitize_text(charge_key),
            amount=amount,
            frees=frees,
            final=final,
        )
        self._session.insert(settlement, new)
        return new

    def list_after(self, seq: int, limit: int = 1000) -> list[Settlement]:
        """List settlements after a sequence number, in order."""
        query = select(settlement).where(settlement.c.seq > seq).order_by(settlement.c.seq)
        return self._session.fetch(Settlement, query.limit(limit))

    def prune(self, last_seq: int) -> int:
        """Delete settlements up to a number, which the gate has applied; return their count.

        The last one stays, so that the proof knows where the numbers continue.
        """
        conditions = (settlement.c.seq <= last_seq, settlement.c.seq < self._session.settlement)
        return self._session.execute(delete(settlement).where(*conditions))


class Thresholds:
    """Thresholds already reported, so that each is reported once.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session

    def record_reported(self, allocation: int, kind: str, value: int) -> bool:
        """Record that a threshold is reported now; return False if it was before."""
        at = self._session.now()
        reported = ReportedThreshold(allocation=allocation, kind=kind, value=value, at=at)
        return insert_or_replace(self._session, threshold, reported)

    def count_reported(self, allocation: int, kind: str) -> int:
        """Return how many thresholds of a kind were reported."""
        conditions = (threshold.c.allocation == allocation, threshold.c.kind == kind)
        return len(self._session.fetch_rows(select(threshold.c.value).where(*conditions)))

    def forget_reported(self, allocation: int, kind: str) -> None:
        """Delete reported thresholds, so that they are reported again.

        Used when the allocation got a deposit or lasts longer.
        """
        conditions = (threshold.c.allocation == allocation, threshold.c.kind == kind)
        self._session.execute(delete(threshold).where(*conditions))


class Outbox:
    """Outbox: messages for other systems, retried until delivered.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session

    def add(self, kind: str, payload: bytes, *, key: str = "") -> int:
        """Add a message; a key already used for this kind adds nothing.

        Returns:
            Number of the message.
        """
        if key:
            conditions = (outbox.c.kind == kind, outbox.c.key == key)
            earlier = self._session.fetch_value(select(outbox.c.id).where(*conditions))
            if earlier is not None:
                return int(earlier)
        number = int(self._session.fetch_value(select(func.max(outbox.c.id))) or 0) + 1
        now = self._session.now()
        new = OutboxItem(id=number, kind=kind, key=key, payload=payload, next_at=now)
        self._session.insert(outbox, new)
        return number

    def list_due(self, kind: str, now: datetime, limit: int = 100) -> list[OutboxItem]:
        """List the messages of a kind to send now, oldest first."""
        query = (
            select(outbox)
            .where(outbox.c.kind == kind, outbox.c.done == 0, outbox.c.next_at <= now)
            .order_by(outbox.c.id)
            .limit(limit)
        )
        return self._session.fetch(OutboxItem, query)

    def mark_delivered(self, number: int) -> None:
        """Mark a message as delivered: delete its payload, remember its key for 90 days."""
        now = self._session.now()
        self._session.execute(
            update(outbox)
            .where(outbox.c.id == number)
            .values(done=DELIVERED, payload=b"", next_at=now, error="")
        )
        # The last row stays, so that the numbers continue from it.
        last = self._session.fetch_value(select(func.max(outbox.c.id)))
        conditions = (
            outbox.c.done != 0,
            outbox.c.next_at < now - _KEY_RETENTION,
            outbox.c.id < last,
        )
        self._session.execute(delete(outbox).where(*conditions))

    def record_failure(self, number: int, next_at: datetime, error: str) -> None:
        """Record a failed attempt and when to retry.

        Raises:
            BankUsage: No message has that number.
        """
        changed = self._session.execute(
            update(outbox)
            .where(outbox.c.id == number)
            .values(tries=outbox.c.tries + 1, next_at=next_at, error=error)
        )
        if not changed:
            raise BankUsage(
                f"unknown notice {number}: 'steward bank notices' lists undelivered ones", number
            )

    def make_dead_letter(self, number: int, error: str) -> None:
        """Make a message a dead letter: the receiver rejects it, so it is not retried.

        Raises:
            BankUsage: No message has that number.
        """
        self.record_failure(number, self._session.now(), error)
        self._session.execute(update(outbox).where(outbox.c.id == number).values(done=DEAD_LETTER))

    def retry(self, kinds: Sequence[str], numbers: Sequence[int]) -> int:
        """Retry pending messages and dead letters at once; return their count.

        Args:
            kinds: Kinds of messages to retry.
            numbers: Numbers to retry; all dead letters if empty.
        """
        conditions = [outbox.c.kind.in_(kinds), outbox.c.done != DELIVERED]
        conditions.append(outbox.c.id.in_(numbers) if numbers else outbox.c.done == DEAD_LETTER)
        now = self._session.now()
        return self._session.execute(
            update(outbox).where(*conditions).values(done=0, tries=0, next_at=now)
        )

    def list_undelivered(self, kinds: Sequence[str], limit: int = 1000) -> list[OutboxItem]:
        """List undelivered messages, dead letters included, oldest first."""
        conditions = (outbox.c.kind.in_(kinds), outbox.c.done != DELIVERED)
        query = select(outbox).where(*conditions).order_by(outbox.c.id).limit(limit)
        return self._session.fetch(OutboxItem, query)

    def count_pending(self, kind: str) -> int:
        """Count the pending messages of a kind."""
        conditions = (outbox.c.kind == kind, outbox.c.done == 0)
        return int(
            self._session.fetch_value(select(func.count()).select_from(outbox).where(*conditions))
        )

    def count_dead_letters(self, kinds: Sequence[str]) -> int:
        """Count the dead letters of some kinds."""
        conditions = (outbox.c.kind.in_(kinds), outbox.c.done == DEAD_LETTER)
        return int(
            self._session.fetch_value(select(func.count()).select_from(outbox).where(*conditions))
        )
