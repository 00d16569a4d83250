"""Events that were decided on and are not in the journal yet.

What is said depends on all that was known when it was decided, so that a second
try, with more events at hand, might put other words under the same key. It is
therefore stored together with the facts that it came from, and the journal gets
it after that: however often a process is killed, what is said once is the same.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from steward.core.consumers import Append
from steward.core.events import Event, decode, encode
from steward.core.sqlite import Connection, transaction


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    cluster: str
    key: str
    data: msgspec.Raw


_pack: Final = msgspec.json.Encoder().encode
_unpack: Final = msgspec.json.Decoder(list[_Kept]).decode


class Outbox:
    """The table ``outbox`` of jobs.db: a row for each batch.

    Args:
        connection: The database.
        path: Its file.
    """

    def __init__(self, connection: Connection, path: str) -> None:
        self._connection = connection
        self._path = path
        rows = connection.execute("SELECT events FROM outbox ORDER BY number").fetchall()
        self._events: list[Event] = [
            decode(0, kept.kind, kept.cluster, kept.key, bytes(kept.data))
            for (packed,) in rows
            for kept in _unpack(packed)
        ]

    def put(self, events: Sequence[Event]) -> None:
        """Keep what is to be said, inside a transaction."""
        kept = [
            _Kept(event.kind, event.cluster, event.key, msgspec.Raw(encode(event)))
            for event in events
        ]
        self._connection.execute("INSERT INTO outbox (events) VALUES (?)", (_pack(kept),))

    def send(self, append: Append, upto: int | None = None, events: Sequence[Event] = ()) -> None:
        """Say what is there, then move the cursor.

        Args:
            append: Appends to the journal.
            upto: Where the cursor is to be; None to leave it.
            events: What was put there since, once that is committed.
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
