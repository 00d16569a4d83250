"""The tables of history.db, and how spans are written as rows and read again."""

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from steward.reports.history.spans import NodesAlike, NodeSpan, ReservationSpan

NODE_COLUMNS: Final = ", ".join(NodeSpan.__struct_fields__)
RESERVATION_COLUMNS: Final = ", ".join(ReservationSpan.__struct_fields__)

MIGRATIONS: Final = (
    """
    CREATE TABLE cursor (position INTEGER NOT NULL);
    INSERT INTO cursor VALUES (0);
    CREATE TABLE mark (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;

    CREATE TABLE event (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        at_us INTEGER NOT NULL,
        kind TEXT NOT NULL,
        cluster TEXT NOT NULL,
        subject TEXT NOT NULL,
        failed INTEGER NOT NULL,
        key TEXT NOT NULL,
        data BLOB NOT NULL,
        UNIQUE (key, cluster)
    );
    CREATE INDEX event_by_time ON event (at_us, number);
    CREATE INDEX event_by_subject ON event (subject, kind, at_us, number);
    CREATE INDEX event_failed ON event (at_us, number) WHERE failed = 1;

    CREATE TABLE node_span (
        cluster TEXT NOT NULL,
        node TEXT NOT NULL,
        from_us INTEGER NOT NULL,
        until_us INTEGER NOT NULL,
        state TEXT NOT NULL,
        since_us INTEGER NOT NULL,
        is_known INTEGER NOT NULL,
        reason TEXT NOT NULL,
        reason_user TEXT NOT NULL,
        reason_uid INTEGER,
        reason_us INTEGER,
        partitions TEXT NOT NULL,
        cpus INTEGER NOT NULL,
        memory_bytes INTEGER NOT NULL,
        gpus INTEGER NOT NULL
    );
    CREATE INDEX node_span_by_node ON node_span (cluster, node, from_us);
    CREATE INDEX node_span_by_end ON node_span (until_us, from_us);
    CREATE UNIQUE INDEX node_span_open ON node_span (cluster, node)
        WHERE until_us = 4611686018427387904;

    CREATE TABLE reservation_span (
        cluster TEXT NOT NULL,
        name TEXT NOT NULL,
        from_us INTEGER NOT NULL,
        until_us INTEGER NOT NULL,
        nodes TEXT NOT NULL,
        flags TEXT NOT NULL
    );
    CREATE INDEX reservation_span_by_end ON reservation_span (until_us, from_us);
    CREATE UNIQUE INDEX reservation_span_open ON reservation_span (cluster, name)
        WHERE until_us = 4611686018427387904;
    """,
    """
    CREATE TABLE present (
        cluster TEXT NOT NULL,
        kind TEXT NOT NULL,
        subject TEXT NOT NULL,
        key TEXT NOT NULL,
        data BLOB NOT NULL,
        PRIMARY KEY (cluster, kind, subject)
    ) WITHOUT ROWID;
    CREATE INDEX node_span_by_begin ON node_span (cluster, from_us);
    CREATE INDEX event_by_kind ON event (kind, at_us, number);
    INSERT OR REPLACE INTO present
        SELECT cluster, kind, subject, key, data FROM event
        WHERE kind IN ('partition.state', 'reservation.state') ORDER BY at_us, number;
    """,
)

Span = TypeVar("Span", NodeSpan, ReservationSpan, NodesAlike)


def spans_of(kind: type[Span], rows: Sequence[Sequence[Any]]) -> list[Span]:
    """The spans of rows, each with all fields in their order."""
    # Not strict, since SQLite has 0 and 1 for False and True; the kind is known when it runs.
    return msgspec.convert(rows, list[kind], strict=False)  # type: ignore[valid-type]


def insertion(table: str, kind: type[msgspec.Struct]) -> str:
    """The statement that puts a span into a table."""
    fields = kind.__struct_fields__
    marks = ", ".join("?" * len(fields))
    return f"INSERT INTO {table} ({', '.join(fields)}) VALUES ({marks})"  # noqa: S608 -- our own names
