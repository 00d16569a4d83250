"""History consumer: copies state events from the journal to history.db and keeps them for years.

The journal trims events within hours. This consumer stores node, partition, reservation and daemon
states, rule executions and bank thresholds, and folds them into spans (:mod:`.spans`): one per node
state, one per active reservation. Events, spans and cursor change in one transaction, so each event
counts once however often the process is killed. ``retention_days`` of ``[history]`` limits the age,
except of present states: open spans, and the last event of each existing partition and reservation
(table ``present``). :mod:`.reader` reads the database.
"""

import os
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from steward.core.config import Settings
from steward.core.consumers import Append
from steward.core.events import (
    BANK_THRESHOLD,
    CONTROLLER_STATE,
    NODE_STATE,
    PARTITION_STATE,
    RESERVATION_STATE,
    RULE_EXECUTION,
    BankThreshold,
    ControllerState,
    Event,
    NodeState,
    PartitionState,
    ReservationState,
    RuleExecution,
    encode_event,
    utc_now,
)
from steward.core.sqlite import (
    Connection,
    create_for_owner,
    open_database,
    transaction,
    translate_errors,
)
from steward.core.timestamps import to_micros
from steward.reports.history.spans import (
    MIGRATIONS,
    NODE_COLUMNS,
    OPEN_US,
    REMOVED,
    RESERVATION_COLUMNS,
    NodeSpan,
    ReservationSpan,
    build_span_insert,
    convert_spans,
    get_reservation_end_us,
    make_next_node_span,
    make_reservation_span,
)

HISTORY_KINDS: Final = (
    *(NODE_STATE, PARTITION_STATE, RESERVATION_STATE, CONTROLLER_STATE),
    *(RULE_EXECUTION, BANK_THRESHOLD),
)
"""Kinds of events that the history stores."""

PRESENT_KINDS: Final = frozenset({PARTITION_STATE, RESERVATION_STATE})
"""Kinds whose last event per subject is kept until the subject is removed."""

PURGED_MARK: Final = "forgotten_us"
"""Name of the mark that stores the time up to which the history was purged, µs since the epoch."""

_NAME: Final = "history.db"
_BATCH: Final = 500
_PURGE_INTERVAL_S: Final = 3600.0
_PURGE_BATCH: Final = 2000

_PUT_NODE: Final = build_span_insert("node_span", NodeSpan)
_PUT_RESERVATION: Final = build_span_insert("reservation_span", ReservationSpan)
_PUT_PRESENT: Final = "INSERT OR REPLACE INTO present VALUES (?, ?, ?, ?, ?)"
_DROP_PRESENT: Final = "DELETE FROM present WHERE cluster = ? AND kind = ? AND subject = ?"
_OPEN_NODE: Final = (
    f"SELECT {NODE_COLUMNS} FROM node_span "  # noqa: S608 -- our own columns
    f"WHERE cluster = ? AND node = ? AND until_us = {OPEN_US}"
)
_OPEN_RESERVATION: Final = (
    f"SELECT {RESERVATION_COLUMNS} FROM reservation_span "  # noqa: S608 -- our own columns
    f"WHERE cluster = ? AND name = ? AND until_us = {OPEN_US}"
)


def get_history_path(state_dir: str) -> str:
    """Return the path of history.db."""
    return os.path.join(state_dir, _NAME)


class HistoryConsumer:
    """Consumer ``history``: writes history.db. See ``steward.core.consumers.Consumer``.

    Args:
        settings: The whole configuration.
        clock: Returns the current time.

    Raises:
        SqliteUnavailable: The database cannot be opened now.
    """

    name = "history"
    kinds = frozenset(HISTORY_KINDS)
    batch_events = _BATCH

    def __init__(self, settings: Settings, clock: Callable[[], datetime] = utc_now) -> None:
        self._retention = timedelta(days=settings.history.retention_days)
        self._clock = clock
        self._path = get_history_path(settings.state_dir)
        create_for_owner(self._path)
        self._database: Connection = open_database(self._path, MIGRATIONS)
        self._purge_at = 0.0

    def cursor(self) -> int:
        """Return the position of the last stored event."""
        with translate_errors(self._path):
            (position,) = self._database.execute("SELECT position FROM cursor").fetchone()
        return int(position)

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:  # noqa: ARG002 - a consumer's shape
        """Store events and move the cursor to ``upto``.

        Raises:
            SqliteUnavailable: The database cannot be written now.
        """
        with transaction(self._database, self._path):
            for event in events:
                if self._insert_event(event):
                    self._update_spans(event)
            self._database.execute("UPDATE cursor SET position = max(position, ?)", (upto,))

    def tick(self, append: Append) -> float:  # noqa: ARG002 - a consumer's shape
        """Purge what is older than the retention; return seconds until the next purge.

        Raises:
            SqliteUnavailable: The database cannot be written now.
        """
        now = time.monotonic()
        if now >= self._purge_at:
            has_more = self._purge(to_micros(self._clock() - self._retention))
            self._purge_at = now + (1.0 if has_more else _PURGE_INTERVAL_S)
        return max(0.0, self._purge_at - now)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def _insert_event(self, event: Event) -> bool:
        """Insert an event; return whether it was new."""
        inserted = self._database.execute(
            "INSERT OR IGNORE INTO event (at_us, kind, cluster, subject, failed, key, data) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                *(to_micros(event.at), event.kind, event.cluster, get_event_subject(event)),
                *(bool(getattr(event.body, "failed", False)), event.key, encode_event(event)),
            ),
        )
        return bool(inserted.rowcount)

    def _update_spans(self, event: Event) -> None:
        """Update spans and present states by an event."""
        if event.kind == NODE_STATE:
            self._update_node_span(event)
        elif event.kind == RESERVATION_STATE:
            self._update_reservation_span(event)
        if event.kind in PRESENT_KINDS:
            self._store_present(event)

    def _store_present(self, event: Event) -> None:
        """Store the last event of a subject, or delete it if the subject was removed."""
        key = (event.cluster, event.kind, get_event_subject(event))
        if event.body.state == REMOVED:
            self._database.execute(_DROP_PRESENT, key)
        else:
            self._database.execute(_PUT_PRESENT, (*key, event.key, encode_event(event)))

    def _update_node_span(self, event: Event) -> None:
        """End a node's open span, and begin the next."""
        open_span = self._find_open_span(NodeSpan, _OPEN_NODE, event.cluster, event.body.node)
        span = make_next_node_span(open_span, event)
        if open_span is not None:
            self._close_span("node_span", "node", open_span.cluster, open_span.node, span.from_us)
        self._database.execute(_PUT_NODE, msgspec.structs.astuple(span))

    def _update_reservation_span(self, event: Event) -> None:
        """End a reservation's open span, and begin one if it is active."""
        name = event.body.reservation
        open_span = self._find_open_span(ReservationSpan, _OPEN_RESERVATION, event.cluster, name)
        span = make_reservation_span(event)
        if open_span is not None:
            end_us = get_reservation_end_us(open_span, event)
            self._close_span("reservation_span", "name", open_span.cluster, name, end_us)
        if span is not None:
            self._database.execute(_PUT_RESERVATION, msgspec.structs.astuple(span))

    def _find_open_span(self, kind: type[Any], statement: str, cluster: str, name: str) -> Any:
        rows = self._database.execute(statement, (cluster, name)).fetchall()
        return next(iter(convert_spans(kind, rows)), None)

    def _close_span(self, table: str, column: str, cluster: str, name: str, until_us: int) -> None:
        self._database.execute(
            f"UPDATE {table} SET until_us = ? "  # noqa: S608 -- our own names
            f"WHERE cluster = ? AND {column} = ? AND until_us = {OPEN_US}",
            (until_us, cluster, name),
        )

    def _purge(self, before_us: int) -> bool:
        """Purge a limited number of old rows; return whether there may be more."""
        removed = f"(until_us = {OPEN_US} AND state = '{REMOVED}' AND from_us < ?1)"
        conditions = {
            "event": "at_us < ?1",
            "node_span": f"until_us < ?1 OR {removed}",
            "reservation_span": "until_us < ?1",
        }
        max_deleted = 0
        with transaction(self._database, self._path):
            for table, condition in conditions.items():
                deleted = self._database.execute(
                    f"DELETE FROM {table} WHERE rowid IN "  # noqa: S608 -- our own names
                    f"(SELECT rowid FROM {table} WHERE {condition} LIMIT {_PURGE_BATCH})",
                    (before_us,),
                )
                max_deleted = max(max_deleted, deleted.rowcount)
            if max_deleted:
                self._database.execute(
                    "INSERT OR REPLACE INTO mark VALUES (?, ?)", (PURGED_MARK, before_us)
                )
        return max_deleted >= _PURGE_BATCH


def get_event_subject(event: Event) -> str:
    """Return the name of the node, partition, reservation, rule, account or daemon concerned."""
    body = event.body
    if isinstance(body, NodeState):
        return body.node
    if isinstance(body, PartitionState):
        return body.partition
    if isinstance(body, ReservationState):
        return body.reservation
    if isinstance(body, RuleExecution):
        return body.rule
    if isinstance(body, BankThreshold):
        return body.account
    return body.daemon if isinstance(body, ControllerState) else ""
