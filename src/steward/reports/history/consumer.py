"""History consumer: copies state events from the journal to history.db and keeps them for years.

The journal trims events within hours. This consumer stores node, partition, reservation and daemon
states, rule executions and bank thresholds, and folds them into spans (:mod:`.spans`): one per node
state, one per active reservation. Events, spans and cursor change in one transaction, so each event
counts once however often the process is killed. ``history_days`` limits the age,
except of present states: open spans, and the last event of each existing partition and reservation
(table ``present``). :mod:`.reader` reads the database.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Final

from steward.core.config import Settings
from steward.core.consumers import DatabaseConsumer
from steward.core.databases import HISTORY
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
from steward.core.sqlite import Database
from steward.core.storage import Record, Table
from steward.core.timestamps import to_micros
from steward.reports.history.spans import (
    EVENTS,
    MIGRATIONS,
    NODE_SPANS,
    OPEN_US,
    PRESENT_EVENTS,
    REMOVED,
    RESERVATION_SPANS,
    PresentEvent,
    StoredEvent,
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

_PURGE_BATCH: Final = 2000

_DROP_PRESENT: Final = "DELETE FROM present WHERE cluster = ? AND kind = ? AND subject = ?"


def get_history_path(state_dir: str) -> str:
    """Return the path of history.db."""
    return HISTORY.locate(state_dir)


class HistoryConsumer(DatabaseConsumer):
    """Consumer ``history``: writes history.db. See ``steward.core.consumers.Consumer``.

    Args:
        settings: The whole configuration.
        clock: Returns the current time.

    Raises:
        SqliteUnavailable: The database cannot be opened now.
    """

    name = "history"
    kinds = frozenset(HISTORY_KINDS)
    gather_s = 0.5

    def __init__(self, settings: Settings, clock: Callable[[], datetime] = utc_now) -> None:
        self._retention = timedelta(days=settings.history_days)
        self._clock = clock
        path = get_history_path(settings.state_dir)
        super().__init__(Database(path, MIGRATIONS, for_owner=True))

    def _apply_events(self, events: Sequence[Event]) -> Sequence[Event]:
        for event in events:
            if self._insert_event(event):
                self._update_spans(event)
        return ()

    def _insert_event(self, event: Event) -> bool:
        """Insert an event; return whether it was new."""
        stored = StoredEvent(
            at_us=to_micros(event.at),
            kind=event.kind,
            cluster=event.cluster,
            subject=get_event_subject(event),
            failed=bool(getattr(event.body, "failed", False)),
            key=event.key,
            data=encode_event(event),
        )
        return bool(EVENTS.insert(self._connection, stored, "ignore").rowcount)

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
        subject = get_event_subject(event)
        if event.body.state == REMOVED:
            self._connection.execute(_DROP_PRESENT, (event.cluster, event.kind, subject))
        else:
            present = PresentEvent(
                cluster=event.cluster,
                kind=event.kind,
                subject=subject,
                key=event.key,
                data=encode_event(event),
            )
            PRESENT_EVENTS.insert(self._connection, present, "replace")

    def _update_node_span(self, event: Event) -> None:
        """End a node's open span, and begin the next."""
        name = event.body.node
        open_span = self._find_open_span(NODE_SPANS, "node", event.cluster, name)
        span = make_next_node_span(open_span, event)
        if open_span is not None:
            self._close_span("node_span", "node", open_span.cluster, name, span.from_us)
        NODE_SPANS.insert(self._connection, span)

    def _update_reservation_span(self, event: Event) -> None:
        """End a reservation's open span, and begin one if it is active."""
        name = event.body.reservation
        open_span = self._find_open_span(RESERVATION_SPANS, "name", event.cluster, name)
        span = make_reservation_span(event)
        if open_span is not None:
            end_us = get_reservation_end_us(open_span, event)
            self._close_span("reservation_span", "name", open_span.cluster, name, end_us)
        if span is not None:
            RESERVATION_SPANS.insert(self._connection, span)

    def _find_open_span(
        self, table: Table[Record], column: str, cluster: str, name: str
    ) -> Record | None:
        clause = f"WHERE cluster = ? AND {column} = ? AND until_us = {OPEN_US}"
        return next(iter(table.select(self._database, clause, cluster, name)), None)

    def _close_span(self, table: str, column: str, cluster: str, name: str, until_us: int) -> None:
        self._connection.execute(
            f"UPDATE {table} SET until_us = ? "  # noqa: S608 -- our own names
            f"WHERE cluster = ? AND {column} = ? AND until_us = {OPEN_US}",
            (until_us, cluster, name),
        )

    def _purge(self) -> bool:
        before_us = to_micros(self._clock() - self._retention)
        removed = f"(until_us = {OPEN_US} AND state = '{REMOVED}' AND from_us < ?1)"
        conditions = {
            "event": "at_us < ?1",
            "node_span": f"until_us < ?1 OR {removed}",
            "reservation_span": "until_us < ?1",
        }
        max_deleted = 0
        with self._database.transaction() as connection:
            for table, condition in conditions.items():
                deleted = connection.execute(
                    f"DELETE FROM {table} WHERE rowid IN "  # noqa: S608 -- our own names
                    f"(SELECT rowid FROM {table} WHERE {condition} LIMIT {_PURGE_BATCH})",
                    (before_us,),
                )
                max_deleted = max(max_deleted, deleted.rowcount)
            if max_deleted:
                connection.execute("UPDATE cursor SET purged_us = ?", (before_us,))
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
