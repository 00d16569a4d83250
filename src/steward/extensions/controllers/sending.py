"""Forwards what a controller's journal holds to the Steward that it reports to.

A consumer like any other: its cursor moves when the other side has said that
the events are durable there, and their bytes too. While it is away the
journal keeps both.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Final

from steward.core.config import Settings
from steward.core.consumers import Append, Rejected
from steward.core.errors import Refused, Unavailable
from steward.core.events import Event, JobScript, Kept, encode
from steward.core.incoming import StoreError, Stores
from steward.core.sqlite import open_database, transaction, translated
from steward.extensions.controllers import wire
from steward.extensions.controllers.admitting import KINDS
from steward.extensions.controllers.reaching import ReceiverLink, ReceiverUnavailable

_MIGRATIONS: Final = (
    "CREATE TABLE cursor (position INTEGER NOT NULL);\nINSERT INTO cursor VALUES (0);",
)
_BATCH_BYTES: Final = 4 << 20
_MOST_BYTES: Final = wire.LARGEST_FRAME - (1 << 20)


class Forward:
    """Forwards one cluster's events; see ``steward.core.consumers.Consumer``.

    Args:
        settings: The configuration; the database is ``forward-CLUSTER.db`` in its state_dir.
        cluster: Whose events.
        stores: Where bytes are kept until then.

    Raises:
        SqliteError: The database cannot be used.
        SqliteUnavailable: It cannot be used now.
    """

    kinds = KINDS
    batch_events = 256

    def __init__(self, settings: Settings, cluster: str, stores: Stores) -> None:
        self.name = f"forward.{cluster}"
        self._to = settings.forward.to
        self._link = ReceiverLink(settings.forward, cluster, settings.cluster[cluster].munge_socket)
        self._cluster = cluster
        self._stores = stores
        self._path = os.path.join(settings.state_dir, f"forward-{cluster}.db")
        self._database = open_database(self._path, _MIGRATIONS)
        # Of the events at hand: what is durable over there, and what will never be taken.
        self._durable: set[int] = set()
        self._refused: dict[int, str] = {}

    def cursor(self) -> int:
        """Position of the last event that was forwarded; 0 at first."""
        with translated(self._path):
            (position,) = self._database.execute("SELECT position FROM cursor").fetchone()
        return int(position)

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:  # noqa: ARG002 -- a Consumer's signature
        """Send events, and move the cursor when they are durable over there.

        Raises:
            Unavailable: The other side is away, or cannot write, or knows us not.
            Rejected: An event will never be taken, or its bytes are gone.
        """
        mine = [e for e in events if e.cluster == self._cluster and e.id not in self._durable]
        for event in mine:
            if event.id in self._refused:
                raise Rejected(self._refused[event.id], event)
        for batch, rows in self._batches(mine):
            answer = self._ask(rows)
            refused = dict(answer.refused)
            for index, event in enumerate(batch):
                if index in refused:
                    self._refused[event.id] = f"{self._to}: {refused[index]}"
                else:
                    self._durable.add(event.id)
        for event in mine:
            if event.id in self._refused:
                raise Rejected(self._refused[event.id], event)
        with transaction(self._database, self._path) as database:
            database.execute("UPDATE cursor SET position = ?", (upto,))
        self._durable.clear()
        self._refused.clear()

    def tick(self, append: Append) -> float:  # noqa: ARG002 -- a Consumer's signature
        """Nothing is due by the clock."""
        return 3600.0

    def close(self) -> None:
        """Let go of the connection and the database."""
        self._link.close()
        self._database.close()

    def _batches(self, events: Sequence[Event]) -> Iterator[tuple[list[Event], list[wire.Row]]]:
        """Cut events into batches of few enough bytes, each with its rows."""
        batch: list[Event] = []
        rows: list[wire.Row] = []
        size = 0
        for event in events:
            row = self._row(event)
            of_row = len(row.data) + len(row.script or b"") + len(row.environment or b"")
            if of_row > _MOST_BYTES:
                raise Rejected(f"{of_row} bytes are more than can be forwarded", event)
            if batch and size + of_row > _BATCH_BYTES:
                yield batch, rows
                batch, rows, size = [], [], 0
            batch.append(event)
            rows.append(row)
            size += of_row
        if batch:
            yield batch, rows

    def _row(self, event: Event) -> wire.Row:
        script = environment = None
        body = event.body
        if isinstance(body, JobScript):
            script = self._bytes(event, body, body.script)
            environment = self._bytes(event, body, body.environment)
        return wire.Row(event.kind, event.cluster, event.key, encode(event), script, environment)

    def _bytes(self, event: Event, body: JobScript, kept: Kept | None) -> bytes | None:
        if kept is None:
            return None
        try:
            return self._stores.read(body, kept)
        except (FileNotFoundError, StoreError) as error:
            raise Rejected(f"the bytes of job {body.job_id} are gone: {error}", event) from error

    def _ask(self, rows: list[wire.Row]) -> wire.Answer:
        """Send a batch and wait for the answer.

        Raises:
            Unavailable: There is none, or it is not ``durable``.
        """
        try:
            return self._link.ask(rows)
        except (wire.WireError, Refused) as error:
            self._link.close()
            raise ReceiverUnavailable(f"{self._to}: {error}", self._to) from error
        except Unavailable:
            self._link.close()
            raise
