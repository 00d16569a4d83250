"""history.db as everybody but its consumer sees it: how nodes were, and what happened."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final

import msgspec

from steward.core.events import Event, NodesNow, decode, nodes_now_path
from steward.core.files import read_status
from steward.core.sqlite import Connection, SqliteUnavailable, open_reader, translated
from steward.core.timestamps import moment
from steward.reports.history.consumer import FORGOTTEN, database_path
from steward.reports.history.spans import (
    NODE_COLUMNS,
    OPEN_US,
    REMOVED,
    RESERVATION_COLUMNS,
    NodesAlike,
    NodeSpan,
    ReservationSpan,
    spans_of,
)
from steward.slurm.node_states import without_use

Position = tuple[int, int]
"""When an event happened, µs since the epoch, and its number."""

_AT_ONCE: Final = 500
_AMONG: Final = "(SELECT value FROM json_each(:{}))"
_COLUMNS: Final = ", ".join(f"span.{name}" for name in NODE_COLUMNS.split(", "))
# Both times stand in this index: neither what was over before nor what began later is looked
# at in the table.
_BY_TIME: Final = "INDEXED BY node_span_by_end"
_BY_NODE: Final = "INDEXED BY node_span_by_node"
# Spans of a node never overlap.
_THEN: Final = f"""
    SELECT {_COLUMNS} FROM node_span AS span {{}}
    WHERE span.until_us > :at AND span.from_us <= :at AND span.state <> '{REMOVED}'
"""  # noqa: S608 -- our own columns
_NOW: Final = f"""
    SELECT {_COLUMNS} FROM node_span AS span INDEXED BY node_span_open
    WHERE span.until_us = {OPEN_US} AND span.state <> '{REMOVED}'
"""  # noqa: S608 -- our own columns
_ALIKE: Final = f"""
    SELECT max(from_us, :since) AS begin_us, min(until_us, :until) AS end_us, state,
    sum(cpus), sum(gpus), count(*) FROM node_span {_BY_TIME}
    WHERE until_us > :since AND from_us < :until AND cluster = :cluster AND state <> '{REMOVED}'
    GROUP BY begin_us, end_us, state
"""  # noqa: S608 -- our own columns


class Visible(msgspec.Struct, frozen=True):
    """What may be seen of one cluster.

    Attributes:
        kinds: Events of these kinds, and …
        subjects: … of further kinds those about these subjects alone.
    """

    kinds: frozenset[str]
    subjects: Mapping[str, frozenset[str]] = {}


class EventsWanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which events.

    Attributes:
        visible: What may be seen, by cluster; of other clusters nothing.
        kinds: Of these kinds.
        nodes: Only node.state of these nodes; None for any.
        failed: Only nodes that failed.
        since_us: Happened at this time or later; None for any.
        until_us: Happened before this time; None for any.
        before: Older than this.
        after: Newer than this.
    """

    visible: Mapping[str, Visible]
    kinds: frozenset[str]
    nodes: Sequence[str] | None = None
    failed: bool = False
    since_us: int | None = None
    until_us: int | None = None
    before: Position | None = None
    after: Position | None = None


class HistoryReader:
    """The history, opened for reading; to be used by one thread at a time.

    Args:
        state_dir: Steward's state directory.

    Raises:
        SqliteUnavailable: There is none yet, or it cannot be read now.
    """

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir
        self._path = database_path(state_dir)
        self._database: Connection = open_reader(self._path)

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()

    def position(self) -> int:
        """The journal's position up to which all is kept."""
        return self._number("SELECT position FROM cursor", {}) or 0

    def nodes_at(
        self,
        at_us: int | None,
        clusters: Iterable[str] | None = None,
        nodes: Collection[str] | None = None,
    ) -> list[NodeSpan]:
        """How nodes were at a time, by cluster and name; without those that were not there.

        Of now the sensor's last poll tells which nodes jobs use.

        Args:
            at_us: The time, µs since the epoch; None for now.
            clusters: Only of these clusters; of all if None.
            nodes: Only these; all if None.
        """
        statement = _NOW if at_us is None else _THEN.format(_BY_NODE if nodes else _BY_TIME)
        values: dict[str, Any] = {} if at_us is None else {"at": at_us}
        for column, among in (("cluster", clusters), ("node", nodes)):
            if among is not None:
                statement += f" AND span.{column} IN {_AMONG.format(column)}"
                values[column] = _json(among)
        spans = self._spans(NodeSpan, f"{statement} ORDER BY span.cluster, span.node", values)
        return self._with_use(spans) if at_us is None else spans

    def _with_use(self, spans: list[NodeSpan]) -> list[NodeSpan]:
        """Nodes' present spans, with the states of the last poll where only use differs."""
        state_of = self._present_states({span.cluster for span in spans})
        return [
            span
            if (state := state_of(span.cluster, span.node, span.state)) == span.state
            else msgspec.structs.replace(span, state=state)
            for span in spans
        ]

    def _present_states(self, clusters: Iterable[str]) -> Callable[[str, str, str], str]:
        """Tells the present state of a node by cluster, name, and the state that was told last."""
        polled: dict[tuple[str, str], str] = {}
        for cluster, now in self._polled(clusters):
            for state, nodes in now.states.items():
                polled.update({(cluster, node): state for node in nodes})

        def state_of(cluster: str, node: str, told: str) -> str:
            state = polled.get((cluster, node), told)
            return state if without_use(state) == without_use(told) else told

        return state_of

    def silent_since(self, clusters: Iterable[str]) -> dict[str, datetime]:
        """Those clusters whose slurmctld does not answer the sensor, and when it last did."""
        return {
            cluster: now.silent_since
            for cluster, now in self._polled(clusters)
            if now.silent_since is not None
        }

    def _polled(self, clusters: Iterable[str]) -> Iterator[tuple[str, NodesNow]]:
        for cluster in clusters:
            found = read_status(nodes_now_path(self._state_dir, cluster), NodesNow)
            if found is not None:
                yield cluster, found[0]

    def nodes_tag(self, clusters: Iterable[str]) -> str:
        """What is another text as soon as any node is otherwise; "" where none is known."""
        with translated(self._path):
            row = self._database.execute(
                # The time too, since the number of a row that was forgotten may be used again.
                "SELECT rowid, from_us FROM node_span ORDER BY rowid DESC LIMIT 1"
            ).fetchone()
        if row is None:
            return ""
        polled = [_changed_ns(nodes_now_path(self._state_dir, name)) for name in sorted(clusters)]
        return ".".join(map(str, [*row, *polled]))

    def node_counts(self, clusters: Sequence[str]) -> list[tuple[str, str, int]]:
        """How many nodes are in which state now: cluster, state, and how many."""
        with translated(self._path):
            rows = self._database.execute(
                "SELECT cluster, node, state FROM node_span "  # noqa: S608 -- values are bound
                f"WHERE until_us = {OPEN_US} AND state <> '{REMOVED}' "
                f"AND cluster IN {_AMONG.format('clusters')}",
                {"clusters": _json(clusters)},
            ).fetchall()
        state_of = self._present_states(clusters)
        counts = Counter((cluster, state_of(cluster, node, told)) for cluster, node, told in rows)
        return sorted((*key, nodes) for key, nodes in counts.items())

    def nodes_between(
        self, cluster: str, since_us: int, until_us: int, nodes: Iterable[str] | None = None
    ) -> list[NodeSpan]:
        """The spans of a cluster's nodes that reach into a time, by name and beginning.

        Args:
            cluster: The cluster's name.
            since_us: Where the time begins, µs since the epoch.
            until_us: Where it ends.
            nodes: Only these; all if None.
        """
        named = "" if nodes is None else f"AND node IN {_AMONG.format('nodes')} "
        return self._spans(
            NodeSpan,
            f"SELECT {NODE_COLUMNS} FROM node_span WHERE until_us > :since "  # noqa: S608 -- our own columns
            f"AND from_us < :until AND cluster = :cluster {named}ORDER BY node, from_us",
            {
                "cluster": cluster,
                "since": since_us,
                "until": until_us,
                "nodes": None if nodes is None else _json(nodes),
            },
        )

    def alike_between(self, cluster: str, since_us: int, until_us: int) -> list[NodesAlike]:
        """A cluster's nodes in a time, those together that had and lost a state together.

        Most are in one state all the time, of which nothing but their sums is fetched. Where
        a span reaches beyond the time it is cut.
        """
        values = {"cluster": cluster, "since": since_us, "until": until_us}
        return self._spans(NodesAlike, _ALIKE, values)

    def reservations_between(
        self, cluster: str, since_us: int, until_us: int
    ) -> list[ReservationSpan]:
        """A cluster's reservations that were active in a time, by beginning."""
        return self._spans(
            ReservationSpan,
            f"SELECT {RESERVATION_COLUMNS} FROM reservation_span WHERE until_us > :since "  # noqa: S608 -- our own columns
            "AND from_us < :until AND cluster = :cluster ORDER BY from_us, name",
            {"cluster": cluster, "since": since_us, "until": until_us},
        )

    def node_between(self, cluster: str, node: str, since_us: int, until_us: int) -> list[NodeSpan]:
        """The spans of one node that reach into a time, by beginning."""
        spans = self._spans(
            NodeSpan,
            f"SELECT {NODE_COLUMNS} FROM node_span WHERE cluster = :cluster "  # noqa: S608 -- our own columns
            "AND node = :node AND from_us < :until AND until_us > :since ORDER BY from_us",
            {"cluster": cluster, "node": node, "since": since_us, "until": until_us},
        )
        is_now = bool(spans) and spans[-1].until_us == OPEN_US
        return [*spans[:-1], *self._with_use(spans[-1:])] if is_now else spans

    def present(self, kind: str, clusters: Iterable[str]) -> list[Event]:
        """The last event of this kind about each thing that is there, by cluster and name.

        Args:
            kind: One of those that are kept so.
            clusters: Of these clusters.
        """
        with translated(self._path):
            rows = self._database.execute(
                "SELECT 0, kind, cluster, key, data FROM present WHERE kind = :kind "  # noqa: S608 -- values are bound
                f"AND cluster IN {_AMONG.format('clusters')} ORDER BY cluster, subject",
                {"kind": kind, "clusters": _json(clusters)},
            ).fetchall()
        return [event for event in (decode(*row) for row in rows) if event.body.state != REMOVED]

    def nodes_begin_us(self, clusters: Iterable[str]) -> int | None:
        """When the history of these clusters' nodes begins; None where there is none."""
        begins = [
            self._number(
                "SELECT min(from_us) FROM node_span WHERE cluster = :cluster",
                {"cluster": cluster},
            )
            for cluster in clusters
        ]
        known = [one for one in begins if one is not None]
        return max(min(known), self._forgotten_us()) if known else None

    def begins(self) -> datetime | None:
        """When the oldest event happened that is kept; None where there is none."""
        found = self._number("SELECT min(at_us) FROM event", {})
        return None if found is None else moment(found)

    def events(
        self,
        wanted: EventsWanted,
        limit: int,
        shows: Callable[[Event], bool],
        *,
        oldest_first: bool = False,
    ) -> list[Event]:
        """Events, newest first; their ids are the history's own numbers.

        Args:
            wanted: Which.
            limit: How many at most.
            shows: Decides of each once more whether it may be told.
            oldest_first: Turns the order round, so that the limit leaves the oldest.
        """
        condition, values = _condition(wanted)
        way = "ASC" if oldest_first else "DESC"
        found: list[Event] = []
        with translated(self._path):
            cursor = self._database.execute(
                "SELECT number, kind, cluster, key, data FROM event "  # noqa: S608 -- values are bound
                f"WHERE {condition} ORDER BY at_us {way}, number {way}",
                values,
            )
            while len(found) < limit and (rows := cursor.fetchmany(_AT_ONCE)):
                found += filter(shows, (decode(*row) for row in rows))
            cursor.close()
        return found[:limit]

    def _forgotten_us(self) -> int:
        return self._number("SELECT value FROM mark WHERE name = :name", {"name": FORGOTTEN}) or 0

    def _number(self, statement: str, values: Mapping[str, Any]) -> int | None:
        with translated(self._path):
            row = self._database.execute(statement, values).fetchone()
        return None if row is None or row[0] is None else int(row[0])

    def _spans(self, kind: type[Any], statement: str, values: Mapping[str, Any]) -> list[Any]:
        with translated(self._path):
            rows = self._database.execute(statement, values).fetchall()
        return spans_of(kind, rows)


def _changed_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return 0


@contextmanager
def history_of(state_dir: str) -> Iterator[HistoryReader | None]:
    """The history that a state directory holds, while it is read; None where there is none yet."""
    try:
        found = HistoryReader(state_dir)
    except SqliteUnavailable:
        # The consumer makes it when it starts: until then nothing is known, and that is said.
        yield None
        return
    try:
        yield found
    finally:
        found.close()


def _condition(wanted: EventsWanted) -> tuple[str, dict[str, Any]]:
    """The condition of a WHERE, and the values that are bound in it."""
    values: dict[str, Any] = {"kinds": _json(wanted.kinds)}
    # A plus keeps an index from being used for it: of many kinds the newest are found by time.
    parts = [f"+kind IN {_AMONG.format('kinds')}", _visible(wanted, values)]
    if len(wanted.kinds) == 1 and wanted.nodes is None and not wanted.failed:
        # Of a kind that is rare an index finds the newest without passing all the others.
        (values["kinds"],) = wanted.kinds
        parts[0] = "kind = :kinds"
    if wanted.nodes is not None:
        values["nodes"] = _json(wanted.nodes)
        parts.append(f"+kind = 'node.state' AND subject IN {_AMONG.format('nodes')}")
    if wanted.failed:
        parts.append("failed = 1")
    for name, sign in (("since_us", ">="), ("until_us", "<")):
        if getattr(wanted, name) is not None:
            values[name] = getattr(wanted, name)
            parts.append(f"at_us {sign} :{name}")
    for name, sign in (("before", "<"), ("after", ">")):
        position = getattr(wanted, name)
        if position is not None:
            values[f"{name}_us"], values[f"{name}_number"] = position
            parts.append(f"(at_us, number) {sign} (:{name}_us, :{name}_number)")
    return " AND ".join(f"({part})" for part in parts), values


def _visible(wanted: EventsWanted, values: dict[str, Any]) -> str:
    parts = ["1 = 0"]
    for number, (cluster, of) in enumerate(wanted.visible.items()):
        values[f"cluster{number}"] = cluster
        values[f"seen{number}"] = _json(of.kinds)
        seen = [f"kind IN {_AMONG.format(f'seen{number}')}"]
        for other, (kind, subjects) in enumerate(of.subjects.items()):
            name = f"{number}_{other}"
            values[f"kind{name}"], values[f"subjects{name}"] = kind, _json(subjects)
            among = _AMONG.format(f"subjects{name}")
            seen.append(f"(kind = :kind{name} AND subject IN {among})")
        parts.append(f"(cluster = :cluster{number} AND ({' OR '.join(seen)}))")
    return " OR ".join(parts)


def _json(values: Iterable[str]) -> str:
    return msgspec.json.encode(sorted(values)).decode()
