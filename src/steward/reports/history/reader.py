"""History reader: queries of history.db for node states, events and reservations.

:class:`HistoryReader` opens the database read-only and merges the sensor's status file (states of
the last poll) into present states. :class:`HistoryEventFilter` is the filter for events,
:class:`VisibleEvents` what a user may see of one cluster. :func:`open_history` opens a reader. Used
by ``history.*`` actions, reports and the web pages. Times are µs since the epoch.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final

import msgspec

from steward.core.events import (
    Event,
    EventError,
    NodeStatesFile,
    decode_event,
    node_states_path,
)
from steward.core.files import read_status
from steward.core.logs import LogLimit
from steward.core.sqlite import Connection, SqliteMissing, open_reader, translate_errors
from steward.core.storage import Record, Rows
from steward.core.timestamps import from_micros
from steward.reports.history.consumer import get_history_path
from steward.reports.history.spans import (
    NODE_GROUPS,
    NODE_SPANS,
    OPEN_US,
    REMOVED,
    RESERVATION_SPANS,
    NodeGroupSpan,
    NodeSpan,
    ReservationSpan,
)
from steward.slurm.node_states import strip_use_flags

log = logging.getLogger(__name__)

Position = tuple[int, int]
"""Position of an event: its time in µs since the epoch, and its number."""

_FETCH_BATCH: Final = 500
_AMONG: Final = "(SELECT value FROM json_each(:{}))"
# This index holds both times: spans that ended before or began later are never read from the table.
_BY_TIME: Final = "INDEXED BY node_span_by_end"
_BY_NODE: Final = "INDEXED BY node_span_by_node"
# The spans of a node never overlap.
_THEN: Final = f"""
    SELECT {NODE_SPANS.select_list} FROM node_span {{}}
    WHERE until_us > :at AND from_us <= :at AND state <> '{REMOVED}'
"""  # noqa: S608 -- our own columns
_NOW: Final = f"""
    SELECT {NODE_SPANS.select_list} FROM node_span INDEXED BY node_span_open
    WHERE until_us = {OPEN_US} AND state <> '{REMOVED}'
"""  # noqa: S608 -- our own columns
_ALIKE: Final = f"""
    SELECT max(from_us, :since) AS begin_us, min(until_us, :until) AS end_us, state,
    sum(cpus), sum(gpus), count(*) FROM node_span {_BY_TIME}
    WHERE until_us > :since AND from_us < :until AND cluster = :cluster AND state <> '{REMOVED}'
    GROUP BY begin_us, end_us, state
"""  # noqa: S608 -- our own columns


class VisibleEvents(msgspec.Struct, frozen=True):
    """Visible events of one cluster.

    Attributes:
        kinds: Kinds of which all events are visible.
        subjects: Further kinds, each with the only subjects that are visible.
    """

    kinds: frozenset[str]
    subjects: Mapping[str, frozenset[str]] = {}


class HistoryEventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter for events of the history.

    Attributes:
        visible: Visible events by cluster; other clusters are hidden.
        kinds: Kinds of events.
        nodes: Only node.state events of these nodes; None for all events.
        failed: Only events of nodes that failed.
        since_us: Earliest time, inclusive; None for any.
        until_us: Latest time, exclusive; None for any.
        before: Only events older than this position.
        after: Only events newer than this position.
    """

    visible: Mapping[str, VisibleEvents]
    kinds: frozenset[str]
    nodes: Sequence[str] | None = None
    failed: bool = False
    since_us: int | None = None
    until_us: int | None = None
    before: Position | None = None
    after: Position | None = None


_UNREADABLE_LIMIT: Final = LogLimit()
"""Limit of the warning about an event, which each request would repeat."""


def _decode_events(rows: Iterable[tuple[int, str, str, str, bytes]]) -> Iterator[Event]:
    """Yield the events of rows; one that this version cannot read hides no other."""
    for row in rows:
        try:
            yield decode_event(*row)
        except EventError as error:
            level = _UNREADABLE_LIMIT.choose_level(logging.WARNING, *row[:4])
            log.log(level, "history.db: skipped an event: %s", error)


class HistoryReader:
    """Read-only access to history.db. Not thread-safe: use one instance per thread.

    Args:
        state_dir: Steward's state directory.

    Raises:
        SqliteUnavailable: The database does not exist yet, or cannot be read now.
    """

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir
        self._path = get_history_path(state_dir)
        self._database: Connection = open_reader(self._path)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def get_position(self) -> int:
        """Return the journal position up to which events are stored."""
        return self._query_number("SELECT position FROM cursor", {}) or 0

    def list_nodes_at(
        self,
        at_us: int | None,
        clusters: Iterable[str] | None = None,
        nodes: Collection[str] | None = None,
    ) -> list[NodeSpan]:
        """Return node states at a time, by cluster and name; nodes that did not exist are left out.

        For the present, the use of nodes by jobs is that of the sensor's last poll.

        Args:
            at_us: The time, µs since the epoch; None for now.
            clusters: Cluster names; None for all.
            nodes: Node names; None for all.
        """
        statement = _NOW if at_us is None else _THEN.format(_BY_NODE if nodes else _BY_TIME)
        values: dict[str, Any] = {} if at_us is None else {"at": at_us}
        for column, names in (("cluster", clusters), ("node", nodes)):
            if names is not None:
                statement += f" AND {column} IN {_AMONG.format(column)}"
                values[column] = _encode_json_list(names)
        spans = self._query_spans(NODE_SPANS, f"{statement} ORDER BY cluster, node", values)
        return self._merge_polled(spans) if at_us is None else spans

    def _merge_polled(self, spans: list[NodeSpan]) -> list[NodeSpan]:
        """Replace present states by those of the last poll where only the use by jobs differs."""
        state_of = self._make_state_lookup({span.cluster for span in spans})
        return [
            span
            if (state := state_of(span.cluster, span.node, span.state)) == span.state
            else msgspec.structs.replace(span, state=state)
            for span in spans
        ]

    def _make_state_lookup(self, clusters: Iterable[str]) -> Callable[[str, str, str], str]:
        """Make a function from cluster, node and state of the last event to the present state."""
        polled: dict[tuple[str, str], str] = {}
        for cluster, poll in self._read_polls(clusters):
            for state, nodes in poll.states.items():
                polled.update({(cluster, node): state for node in nodes})

        def state_of(cluster: str, node: str, last_state: str) -> str:
            state = polled.get((cluster, node), last_state)
            return state if strip_use_flags(state) == strip_use_flags(last_state) else last_state

        return state_of

    def find_silent_since(self, clusters: Iterable[str]) -> dict[str, datetime]:
        """Return the clusters whose slurmctld does not answer, with the time of its last answer."""
        return {
            cluster: poll.silent_since
            for cluster, poll in self._read_polls(clusters)
            if poll.silent_since is not None
        }

    def _read_polls(self, clusters: Iterable[str]) -> Iterator[tuple[str, NodeStatesFile]]:
        """Yield the sensor's last poll of each cluster."""
        for cluster in clusters:
            status = read_status(node_states_path(self._state_dir, cluster), NodeStatesFile)
            if status is not None:
                yield cluster, status[0]

    def get_nodes_tag(self, clusters: Iterable[str]) -> str:
        """Return a version tag that changes with any node's state; "" if no node is known."""
        with translate_errors(self._path):
            row = self._database.execute(
                # Include the time, because SQLite may reuse the row number of a purged row.
                "SELECT rowid, from_us FROM node_span ORDER BY rowid DESC LIMIT 1"
            ).fetchone()
        if row is None:
            return ""
        polled = [
            _get_mtime_ns(node_states_path(self._state_dir, name)) for name in sorted(clusters)
        ]
        return ".".join(map(str, [*row, *polled]))

    def count_nodes(self, clusters: Sequence[str]) -> list[tuple[str, str, int]]:
        """Count present nodes by state: tuples of cluster, state and number."""
        with translate_errors(self._path):
            rows = self._database.execute(
                "SELECT cluster, node, state FROM node_span "  # noqa: S608 -- values are bound
                f"WHERE until_us = {OPEN_US} AND state <> '{REMOVED}' "
                f"AND cluster IN {_AMONG.format('clusters')}",
                {"clusters": _encode_json_list(clusters)},
            ).fetchall()
        state_of = self._make_state_lookup(clusters)
        counts = Counter(
            (cluster, state_of(cluster, node, last_state)) for cluster, node, last_state in rows
        )
        return sorted((*key, nodes) for key, nodes in counts.items())

    def list_nodes_between(
        self, cluster: str, since_us: int, until_us: int, nodes: Iterable[str] | None = None
    ) -> list[NodeSpan]:
        """Return the spans of a cluster's nodes that overlap an interval, by name and begin.

        Args:
            cluster: The cluster's name.
            since_us: Begin of the interval, µs since the epoch.
            until_us: End of the interval.
            nodes: Node names; None for all.
        """
        condition = "" if nodes is None else f"AND node IN {_AMONG.format('nodes')} "
        return self._query_spans(
            NODE_SPANS,
            f"SELECT {NODE_SPANS.select_list} FROM node_span WHERE until_us > :since "  # noqa: S608 -- our own columns
            f"AND from_us < :until AND cluster = :cluster {condition}ORDER BY node, from_us",
            {
                "cluster": cluster,
                "since": since_us,
                "until": until_us,
                "nodes": None if nodes is None else _encode_json_list(nodes),
            },
        )

    def group_nodes_between(
        self, cluster: str, since_us: int, until_us: int
    ) -> list[NodeGroupSpan]:
        """Group a cluster's nodes by equal spans in an interval, clipped to it.

        Most nodes keep one state throughout: only their sums are fetched.
        """
        values = {"cluster": cluster, "since": since_us, "until": until_us}
        return self._query_spans(NODE_GROUPS, _ALIKE, values)

    def list_reservations_between(
        self, cluster: str, since_us: int, until_us: int
    ) -> list[ReservationSpan]:
        """Return a cluster's reservations that were active in an interval, by begin."""
        return self._query_spans(
            RESERVATION_SPANS,
            f"SELECT {RESERVATION_SPANS.select_list} FROM reservation_span WHERE until_us > :since "  # noqa: S608 -- our own columns
            "AND from_us < :until AND cluster = :cluster ORDER BY from_us, name",
            {"cluster": cluster, "since": since_us, "until": until_us},
        )

    def list_node_spans(
        self, cluster: str, node: str, since_us: int, until_us: int
    ) -> list[NodeSpan]:
        """Return the spans of one node that overlap an interval, by begin."""
        spans = self._query_spans(
            NODE_SPANS,
            f"SELECT {NODE_SPANS.select_list} FROM node_span WHERE cluster = :cluster "  # noqa: S608 -- our own columns
            "AND node = :node AND from_us < :until AND until_us > :since ORDER BY from_us",
            {"cluster": cluster, "node": node, "since": since_us, "until": until_us},
        )
        is_now = bool(spans) and spans[-1].until_us == OPEN_US
        return [*spans[:-1], *self._merge_polled(spans[-1:])] if is_now else spans

    def list_present(self, kind: str, clusters: Iterable[str]) -> list[Event]:
        """Return the last event about each existing subject of a kind, by cluster and name.

        Args:
            kind: One of ``PRESENT_KINDS`` in ``consumer``.
            clusters: Cluster names.
        """
        with translate_errors(self._path):
            rows = self._database.execute(
                "SELECT 0, kind, cluster, key, data FROM present WHERE kind = :kind "  # noqa: S608 -- values are bound
                f"AND cluster IN {_AMONG.format('clusters')} ORDER BY cluster, subject",
                {"kind": kind, "clusters": _encode_json_list(clusters)},
            ).fetchall()
        return [event for event in _decode_events(rows) if event.body.state != REMOVED]

    def find_nodes_begin_us(self, clusters: Iterable[str]) -> int | None:
        """Return when the history of these clusters' nodes begins; None if there is none."""
        begins = [
            self._query_number(
                "SELECT min(from_us) FROM node_span WHERE cluster = :cluster",
                {"cluster": cluster},
            )
            for cluster in clusters
        ]
        known_begins = [begin for begin in begins if begin is not None]
        return max(min(known_begins), self._get_purged_us()) if known_begins else None

    def find_begin(self) -> datetime | None:
        """Return the time of the oldest stored event; None if there is none."""
        at_us = self._query_number("SELECT min(at_us) FROM event", {})
        return None if at_us is None else from_micros(at_us)

    def list_events(
        self,
        event_filter: HistoryEventFilter,
        limit: int,
        is_visible: Callable[[Event], bool],
        *,
        oldest_first: bool = False,
    ) -> list[Event]:
        """Return events, newest first; their ids are numbers of the history, not of the journal.

        Args:
            event_filter: The filter.
            limit: Maximum number of events.
            is_visible: Decides for each event again whether the user may see it.
            oldest_first: Reverses the order, so that the limit keeps the oldest.
        """
        condition, values = _build_event_condition(event_filter)
        order = "ASC" if oldest_first else "DESC"
        events: list[Event] = []
        with translate_errors(self._path):
            cursor = self._database.execute(
                "SELECT number, kind, cluster, key, data FROM event "  # noqa: S608 -- values are bound
                f"WHERE {condition} ORDER BY at_us {order}, number {order}",
                values,
            )
            while len(events) < limit and (rows := cursor.fetchmany(_FETCH_BATCH)):
                events += filter(is_visible, _decode_events(rows))
            cursor.close()
        return events[:limit]

    def _get_purged_us(self) -> int:
        return self._query_number("SELECT purged_us FROM cursor", {}) or 0

    def _query_number(self, statement: str, values: Mapping[str, Any]) -> int | None:
        with translate_errors(self._path):
            row = self._database.execute(statement, values).fetchone()
        return None if row is None or row[0] is None else int(row[0])

    def _query_spans(
        self, rows: Rows[Record], statement: str, values: Mapping[str, Any]
    ) -> list[Record]:
        with translate_errors(self._path):
            found = self._database.execute(statement, values).fetchall()
        return rows.decode_all(found)


def _get_mtime_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return 0


@contextmanager
def open_history(state_dir: str) -> Iterator[HistoryReader | None]:
    """Open the history of a state directory as a context manager; None if there is none yet."""
    try:
        reader = HistoryReader(state_dir)
    except SqliteMissing:
        # The consumer creates the database when it starts; until then replies say that nothing is
        # known.
        yield None
        return
    try:
        yield reader
    finally:
        reader.close()


def _build_event_condition(event_filter: HistoryEventFilter) -> tuple[str, dict[str, Any]]:
    """Build the WHERE condition and its bound values."""
    values: dict[str, Any] = {"kinds": _encode_json_list(event_filter.kinds)}
    # The unary plus disables the index on kind: for many kinds, the index by time finds the newest.
    parts = [
        f"+kind IN {_AMONG.format('kinds')}",
        _build_visibility_condition(event_filter, values),
    ]
    if len(event_filter.kinds) == 1 and event_filter.nodes is None and not event_filter.failed:
        # For a single rare kind the index finds the newest events without scanning all others.
        (values["kinds"],) = event_filter.kinds
        parts[0] = "kind = :kinds"
    if event_filter.nodes is not None:
        values["nodes"] = _encode_json_list(event_filter.nodes)
        parts.append(f"+kind = 'node.state' AND subject IN {_AMONG.format('nodes')}")
    if event_filter.failed:
        parts.append("failed = 1")
    for name, sign in (("since_us", ">="), ("until_us", "<")):
        if getattr(event_filter, name) is not None:
            values[name] = getattr(event_filter, name)
            parts.append(f"at_us {sign} :{name}")
    for name, sign in (("before", "<"), ("after", ">")):
        position = getattr(event_filter, name)
        if position is not None:
            values[f"{name}_us"], values[f"{name}_number"] = position
            parts.append(f"(at_us, number) {sign} (:{name}_us, :{name}_number)")
    return " AND ".join(f"({part})" for part in parts), values


def _build_visibility_condition(event_filter: HistoryEventFilter, values: dict[str, Any]) -> str:
    """Build the SQL condition for the events that the user may see."""
    parts = ["1 = 0"]
    for number, (cluster, visible) in enumerate(event_filter.visible.items()):
        values[f"cluster{number}"] = cluster
        values[f"seen{number}"] = _encode_json_list(visible.kinds)
        conditions = [f"kind IN {_AMONG.format(f'seen{number}')}"]
        for index, (kind, subjects) in enumerate(visible.subjects.items()):
            name = f"{number}_{index}"
            values[f"kind{name}"], values[f"subjects{name}"] = kind, _encode_json_list(subjects)
            among = _AMONG.format(f"subjects{name}")
            conditions.append(f"(kind = :kind{name} AND subject IN {among})")
        parts.append(f"(cluster = :cluster{number} AND ({' OR '.join(conditions)}))")
    return " OR ".join(parts)


def _encode_json_list(values: Iterable[str]) -> str:
    return msgspec.json.encode(sorted(values)).decode()
