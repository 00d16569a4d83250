"""Outbox: events that a consumer decided to append to the journal but has not appended yet.

The jobs consumer and the automation rules use it, each with the tables ``outbox`` and ``cursor`` of
its own database. An event depends on everything known when it was decided; a retry with more events
at hand might produce another body under the same key. So events are stored in the same transaction
as the data they follow from (:meth:`Outbox.add`), and appended to the journal afterwards
(:meth:`Outbox.send`). ``send`` is also called before the next batch, for events left by a crash.
So the journal gets the same event whenever the process is killed; appending it twice is harmless,
because the journal ignores a known key.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from steward.core.consumers import Append
from steward.core.events import Event, decode_event, encode_event
from steward.core.sqlite import Connection, transaction


class _StoredEvent(msgspec.Struct, frozen=True, array_like=True):
    """Stored event of a batch."""

    kind: str
    cluster: str
    key: str
    data: msgspec.Raw


_pack: Final = msgspec.json.Encoder().encode
_unpack: Final = msgspec.json.Decoder(list[_StoredEvent]).decode


class Outbox:
    """Table ``outbox`` of a consumer's database: one row per batch of events.

    Args:
        connection: Connection to the database.
        path: Path of the database.
    """

    def __init__(self, connection: Connection, path: str) -> None:
        self._connection = connection
        self._path = path
        rows = connection.execute("SELECT events FROM outbox ORDER BY number").fetchall()
        self._events: list[Event] = [
            decode_event(0, stored.kind, stored.cluster, stored.key, bytes(stored.data))
            for (packed,) in rows
            for stored in _unpack(packed)
        ]

    def put(self, events: Sequence[Event]) -> None:
        """Store events to append, inside a transaction."""
        stored_events = [
            _StoredEvent(event.kind, event.cluster, event.key, msgspec.Raw(encode_event(event)))
            for event in events
        ]
        self._connection.execute("INSERT INTO outbox (events) VALUES (?)", (_pack(stored_events),))

    def send(self, append: Append, upto: int | None = None, events: Sequence[Event] = ()) -> None:
        """Append the stored events to the journal, then delete them and move the cursor.

        Args:
            append: Appends to the journal.
            upto: New cursor; None to leave it.
            events: Events stored by :meth:`put` since, once committed.
        """
        self._events += events
        if not self._events and upto is None:
            return
        if self._events:
            append(self._events)
        with transaction(self._connection, self._path) as connection:
            connection.execute("DELETE FROM outbox")
            if upto is not None:
                connection.execute("UPDATE cursor SET position = ?", (upto,))
        self._events = []
