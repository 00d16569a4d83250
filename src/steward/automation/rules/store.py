"""Rules database ``rules.db`` (SQLite): executions, taken nodes, node failures and switches.

:class:`Execution` is a row of the history, :class:`RulesStore` the database. The daemon's ``rules``
consumer writes it. Commands run by root or Steward's user read it, and enable and disable rules
there. It also holds the consumer's cursor and outbox, so that a decision and the cursor are one
transaction.

An execution is ``waiting`` until it is due, ``started`` while its action runs, then ``ended`` with
a status: ``succeeded``, ``failed``, ``timeout``, ``dry-run``, ``held-back`` (a limit prevented it)
or ``unknown`` (a crash left it open). A retry makes it ``waiting`` again.
"""

import os
from collections.abc import Container, Iterable, Sequence
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from steward.automation.rules.limits import TakenNode, find_return_partition
from steward.automation.rules.triggers import FAILURE_WINDOWS
from steward.core.events import Event
from steward.core.sqlite import (
    Connection,
    create_for_owner,
    open_database,
    open_reader,
    transaction,
    translate_errors,
)
from steward.core.timestamps import from_micros, to_micros

Phase = Literal["waiting", "started", "ended"]
"""Phase of an execution."""

STATUS_HELD_BACK: Final = "held-back"
"""Status of an execution that a limit prevented."""

RULES_MIGRATIONS: Final = (
    """
    CREATE TABLE cursor (position INTEGER NOT NULL);
    INSERT INTO cursor VALUES (0);
    CREATE TABLE outbox (number INTEGER PRIMARY KEY, events BLOB NOT NULL);
    CREATE TABLE mark (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;

    CREATE TABLE execution (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        rule TEXT NOT NULL,
        cluster TEXT NOT NULL,
        event TEXT NOT NULL,
        trigger TEXT NOT NULL,
        subject TEXT NOT NULL,
        action TEXT NOT NULL,
        parameters TEXT NOT NULL,
        dry_run INTEGER NOT NULL DEFAULT 0,
        passed INTEGER NOT NULL,
        phase TEXT NOT NULL CHECK (phase IN ('waiting', 'started', 'ended')),
        status TEXT NOT NULL DEFAULT '',
        message TEXT NOT NULL DEFAULT '',
        result TEXT NOT NULL DEFAULT 'null',
        audit INTEGER NOT NULL DEFAULT 0,
        tries INTEGER NOT NULL DEFAULT 0,
        at_us INTEGER NOT NULL,
        made_us INTEGER NOT NULL,
        next_us INTEGER NOT NULL,
        started_us INTEGER NOT NULL DEFAULT 0,
        ended_us INTEGER NOT NULL DEFAULT 0,
        UNIQUE (rule, cluster, event)
    );
    CREATE INDEX execution_open ON execution (phase, rule, next_us) WHERE phase != 'ended';
    CREATE INDEX execution_rate ON execution (rule, made_us) WHERE passed;
    CREATE INDEX execution_subject ON execution (rule, subject, made_us)
        WHERE status != 'held-back';
    CREATE INDEX execution_made ON execution (made_us);

    CREATE TABLE taken (
        cluster TEXT NOT NULL,
        node TEXT NOT NULL,
        rule TEXT NOT NULL,
        execution INTEGER NOT NULL,
        PRIMARY KEY (cluster, node, rule, execution)
    ) WITHOUT ROWID;

    CREATE TABLE failure (
        cluster TEXT NOT NULL,
        node TEXT NOT NULL,
        at_us INTEGER NOT NULL,
        event TEXT NOT NULL,
        PRIMARY KEY (cluster, node, at_us, event)
    ) WITHOUT ROWID;

    CREATE TABLE switch (
        rule TEXT PRIMARY KEY,
        enabled INTEGER NOT NULL,
        who TEXT NOT NULL,
        at_us INTEGER NOT NULL
    ) WITHOUT ROWID;
    """,
)
EXECUTION_COLUMNS: Final = (
    "id, rule, cluster, event, trigger, subject, action, parameters, dry_run, phase, status, "
    "message, result, audit, tries, at_us, made_us, next_us, started_us, ended_us"
)
"""Columns of an execution, in the order of :func:`decode_execution`."""


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """Execution: a rule's reaction to one event, from decision to end.

    Attributes:
        id: Number in the history; 0 until stored.
        rule: Name of the rule.
        cluster: Cluster of the event.
        event: Key of the event.
        trigger: Type of trigger.
        subject: Value by which the rule de-duplicates.
        action: Operation it runs.
        parameters: Rendered parameters.
        dry_run: Whether the action only reports what it would do.
        phase: ``waiting``, ``started`` or ``ended``.
        status: How it ended; "" before that.
        message: Last message about it.
        result: Result of the operation.
        audit: Number of the operation in the audit log; 0 if none.
        tries: Number of starts.
        at: Time of the event.
        made: Time of the decision.
        due: Time at which it is to start or be retried.
        started: Time of the last start; None if never.
        ended: Time of the end; None before that.
    """

    id: int = 0
    rule: str
    cluster: str
    event: str
    trigger: str
    subject: str
    action: str
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    dry_run: bool = False
    phase: Phase = "waiting"
    status: str = ""
    message: str = ""
    result: Any = None
    audit: int = 0
    tries: int = 0
    at: datetime
    made: datetime
    due: datetime
    started: datetime | None = None
    ended: datetime | None = None


class RuleSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """Administrator's override of whether a rule is enabled."""

    enabled: bool
    who: str
    at: datetime


def decode_execution(
    number: int,
    rule: str,
    cluster: str,
    event: str,
    trigger: str,
    subject: str,
    action: str,
    parameters: str,
    dry_run: int,
    phase: Phase,
    status: str,
    message: str,
    result: str,
    audit: int,
    tries: int,
    at_us: int,
    made_us: int,
    next_us: int,
    started_us: int,
    ended_us: int,
) -> Execution:
    """Decode a row of :data:`EXECUTION_COLUMNS`."""
    return Execution(
        id=number,
        rule=rule,
        cluster=cluster,
        event=event,
        trigger=trigger,
        subject=subject,
        action=action,
        parameters=msgspec.json.decode(parameters),
        dry_run=bool(dry_run),
        phase=phase,
        status=status,
        message=message,
        result=msgspec.json.decode(result),
        audit=audit,
        tries=tries,
        at=from_micros(at_us),
        made=from_micros(made_us),
        due=from_micros(next_us),
        started=from_micros(started_us) if started_us else None,
        ended=from_micros(ended_us) if ended_us else None,
    )


RULES_DATABASE: Final = "rules.db"
"""File name of the database in the state directory."""
_MAX_MESSAGE_LENGTH: Final = 1000
"""Maximum length of a stored message, in characters."""
_MAX_STORED_RESULT_BYTES: Final = 64 * 1024
"""Maximum size of a stored result, in bytes; a longer one is stored as null."""
_MAX_DELETED_AT_ONCE: Final = 1000
"""Executions deleted in one transaction."""


class RulesStore:
    """Database of the rules.

    Args:
        state_dir: Steward's state directory.
        read_only: Open for reading only.

    Raises:
        SqliteUnavailable: It cannot be opened now, or does not exist when opened for reading.
    """

    def __init__(self, state_dir: str, *, read_only: bool = False) -> None:
        self.path = os.path.join(state_dir, RULES_DATABASE)
        self.connection: Connection
        if read_only:
            self.connection = open_reader(self.path)
        else:
            create_for_owner(self.path)
            self.connection = open_database(self.path, RULES_MIGRATIONS)

    def close(self) -> None:
        """Close the database."""
        self.connection.close()

    def get_cursor(self) -> int:
        """Return the journal position of the last event decided on."""
        return self._fetch_number("SELECT position FROM cursor")

    def move_cursor(self, position: int) -> None:
        """Set the journal position, within a transaction."""
        self.connection.execute("UPDATE cursor SET position = ?", (position,))

    def record_first_run(self, now: datetime) -> datetime:
        """Return when rules first ran here; events observed before are ignored."""
        with transaction(self.connection, self.path) as connection:
            connection.execute("INSERT OR IGNORE INTO mark VALUES ('began', ?)", (to_micros(now),))
        return from_micros(self._fetch_number("SELECT value FROM mark WHERE name = 'began'"))

    # -- decisions

    def insert(self, execution: Execution) -> Execution | None:
        """Store an execution, within a transaction; return None if it exists already."""
        cursor = self.connection.execute(
            "INSERT OR IGNORE INTO execution (rule, cluster, event, trigger, subject, action, "
            "parameters, dry_run, passed, phase, status, message, at_us, made_us, next_us, "
            "ended_us) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(
                    execution.rule,
                    execution.cluster,
                    execution.event,
                    execution.trigger,
                    execution.subject,
                    execution.action,
                ),
                *(
                    _encode_value(execution.parameters),
                    execution.dry_run,
                    execution.status != STATUS_HELD_BACK,
                ),
                *(execution.phase, execution.status),
                *(
                    execution.message[:_MAX_MESSAGE_LENGTH],
                    to_micros(execution.at),
                    to_micros(execution.made),
                ),
                *(
                    to_micros(execution.due),
                    0 if execution.ended is None else to_micros(execution.ended),
                ),
            ),
        )
        if not cursor.rowcount:
            return None
        return msgspec.structs.replace(execution, id=int(cursor.lastrowid))

    def is_decided(self, rule: str, event: Event) -> bool:
        """Return whether a rule has decided on an event."""
        row = self.connection.execute(
            "SELECT 1 FROM execution WHERE rule = ? AND cluster = ? AND event = ?",
            (rule, event.cluster, event.key),
        ).fetchone()
        return row is not None

    def count_executions_since(self, rule: str, since: datetime) -> int:
        """Count the executions of a rule since a time that were not held back at the decision."""
        return self._fetch_number(
            "SELECT count(*) FROM execution WHERE rule = ? AND made_us > ? AND passed",
            (rule, to_micros(since)),
        )

    def find_recent_execution(self, rule: str, subject: str, since: datetime) -> Execution | None:
        """Return the latest execution about a subject since a time that was not held back."""
        executions = self._select(
            "rule = ? AND subject = ? AND made_us > ? AND status != 'held-back' "
            "ORDER BY made_us DESC LIMIT 1",
            (rule, subject, to_micros(since)),
        )
        return executions[0] if executions else None

    # -- execution

    def list_due(self, now: datetime, busy: Container[str]) -> list[Execution]:
        """Return the oldest due execution of each rule that is not busy."""
        executions = self._select(
            "id IN (SELECT min(id) FROM execution WHERE phase = 'waiting' AND next_us <= ? "
            "GROUP BY rule) ORDER BY id",
            (to_micros(now),),
        )
        return [execution for execution in executions if execution.rule not in busy]

    def get_next_due(self) -> datetime | None:
        """Return when the next waiting execution is due."""
        (at_us,) = self._fetch_row("SELECT min(next_us) FROM execution WHERE phase = 'waiting'")
        return None if at_us is None else from_micros(at_us)

    def list_by_phase(self, phase: Phase) -> list[Execution]:
        """Return all executions in a phase, oldest first."""
        return self._select("phase = ? ORDER BY id", (phase,))

    def record_start(
        self, execution: Execution, now: datetime, nodes: Iterable[str] = ()
    ) -> Execution:
        """Record durably that an execution starts, with the nodes it may take away."""
        with transaction(self.connection, self.path) as connection:
            connection.execute(
                "UPDATE execution SET phase = 'started', tries = tries + 1, started_us = ? "
                "WHERE id = ?",
                (to_micros(now), execution.id),
            )
            connection.executemany(
                "INSERT OR REPLACE INTO taken VALUES (?, ?, ?, ?)",
                [(execution.cluster, node, execution.rule, execution.id) for node in nodes],
            )
        return msgspec.structs.replace(
            execution, phase="started", tries=execution.tries + 1, started=now
        )

    def schedule_retry(
        self, execution: Execution, due: datetime, message: str, *, counts: bool = True
    ) -> None:
        """Make an execution wait for a retry.

        Args:
            execution: The execution.
            due: Time of the retry.
            message: Reason.
            counts: Whether the last start counts as a try; False if nothing had begun.
        """
        with transaction(self.connection, self.path) as connection:
            connection.execute(
                "UPDATE execution SET phase = 'waiting', next_us = ?, message = ?, tries = ? "
                "WHERE id = ?",
                (
                    *(to_micros(due), message[:_MAX_MESSAGE_LENGTH]),
                    *(execution.tries if counts else max(0, execution.tries - 1), execution.id),
                ),
            )

    def record_end(
        self,
        execution: Execution,
        status: str,
        now: datetime,
        *,
        message: str = "",
        result: Any = None,
        audit: int = 0,
    ) -> Execution:
        """Record how an execution ended, within a transaction."""
        encoded = _encode_value(result)
        encoded = encoded if len(encoded) <= _MAX_STORED_RESULT_BYTES else "null"
        self.connection.execute(
            "UPDATE execution SET phase = 'ended', status = ?, message = ?, result = ?, "
            "audit = ?, ended_us = ? WHERE id = ?",
            (status, message[:_MAX_MESSAGE_LENGTH], encoded, audit, to_micros(now), execution.id),
        )
        return msgspec.structs.replace(
            execution,
            phase="ended",
            status=status,
            message=message[:_MAX_MESSAGE_LENGTH],
            audit=audit,
            ended=now,
        )

    # -- nodes taken away

    def list_taken_nodes(self, cluster: str) -> list[TakenNode]:
        """Return the nodes that rules have taken away and not given back."""
        rows = self._fetch_rows(
            "SELECT node, taken.rule, action, parameters FROM taken "
            "LEFT JOIN execution ON execution.id = taken.execution WHERE taken.cluster = ?",
            (cluster,),
        )
        return [
            TakenNode(
                node,
                rule,
                find_return_partition(action or "", msgspec.json.decode(parameters or "{}")),
            )
            for node, rule, action, parameters in rows
        ]

    def clear_taken_nodes(self, execution: Execution) -> None:
        """Remove an execution's taken nodes: it has changed nothing."""
        with transaction(self.connection, self.path) as connection:
            connection.execute("DELETE FROM taken WHERE execution = ?", (execution.id,))

    def release_nodes(self, cluster: str, available: Iterable[str], seen: datetime) -> None:
        """Remove nodes that accept jobs again, seen after the execution that took them had ended.

        Args:
            cluster: Cluster of the nodes.
            available: Nodes that accept jobs, and nodes that no longer exist.
            seen: Time when the query of nodes began.
        """
        with transaction(self.connection, self.path) as connection:
            connection.executemany(
                "DELETE FROM taken WHERE cluster = ? AND node = ? AND NOT EXISTS ("
                "SELECT 1 FROM execution WHERE id = taken.execution "
                "AND (phase != 'ended' OR ended_us >= ?))",
                [(cluster, node, to_micros(seen)) for node in available],
            )

    def insert_failures(self, events: Sequence[Event]) -> None:
        """Store failures of nodes, within a transaction."""
        self.connection.executemany(
            "INSERT OR IGNORE INTO failure VALUES (?, ?, ?, ?)",
            [(event.cluster, event.body.node, to_micros(event.at), event.key) for event in events],
        )

    def count_failures(self, event: Event) -> dict[str, int]:
        """Count the failures of an event's node up to the event, per window."""
        at_us = to_micros(event.at)
        sums = ", ".join("coalesce(sum(at_us > ?), 0)" for _ in FAILURE_WINDOWS)
        row = self._fetch_row(
            f"SELECT {sums} FROM failure WHERE cluster = ? AND node = ? AND at_us <= ?",  # noqa: S608 -- question marks
            (
                *(at_us - seconds * 1_000_000 for _, seconds in FAILURE_WINDOWS),
                *(event.cluster, event.body.node, at_us),
            ),
        )
        return {name: int(count) for (name, _), count in zip(FAILURE_WINDOWS, row, strict=True)}

    # -- commands and web pages

    def read_switches(self) -> dict[str, RuleSwitch]:
        """Return administrators' overrides, by rule."""
        rows = self._fetch_rows("SELECT rule, enabled, who, at_us FROM switch")
        return {
            rule: RuleSwitch(enabled=bool(enabled), who=who, at=from_micros(at_us))
            for rule, enabled, who, at_us in rows
        }

    def set_switch(self, rule: str, enabled: bool, who: str, now: datetime) -> None:
        """Enable or disable a rule, overriding its file."""
        with transaction(self.connection, self.path) as connection:
            connection.execute(
                "INSERT OR REPLACE INTO switch VALUES (?, ?, ?, ?)",
                (rule, enabled, who, to_micros(now)),
            )

    def list_executions(
        self,
        *,
        limit: int,
        rule: str = "",
        cluster: str = "",
        status: str = "",
        since: datetime | None = None,
        before: int = 0,
        number: int = 0,
    ) -> list[Execution]:
        """Return executions that match all given filters, newest first."""
        conditions: list[str] = ["1"]
        values: list[Any] = []
        for condition, value in (
            ("id = ?", number or None),
            ("id < ?", before or None),
            ("rule = ?", rule or None),
            ("cluster = ?", cluster or None),
            ("? IN (status, phase)", status or None),
            ("made_us >= ?", None if since is None else to_micros(since)),
        ):
            if value is not None:
                conditions.append(condition)
                values.append(value)
        return self._select(
            f"{' AND '.join(conditions)} ORDER BY id DESC LIMIT ?", (*values, limit)
        )

    def count_executions(self) -> dict[str, tuple[int, datetime]]:
        """Return the number of executions and the time of the last one, by rule."""
        rows = self._fetch_rows(
            "SELECT rule, count(*), max(made_us) FROM execution "
            "WHERE status != 'held-back' GROUP BY rule"
        )
        return {rule: (count, from_micros(last_us)) for rule, count, last_us in rows}

    def delete_old(self, before: datetime, failures_before: datetime) -> bool:
        """Delete up to 1,000 old executions; return True if more remain."""
        with transaction(self.connection, self.path) as connection:
            cursor = connection.execute(
                "DELETE FROM execution WHERE id IN (SELECT id FROM execution "
                "WHERE phase = 'ended' AND made_us < ? ORDER BY made_us LIMIT ?)",
                (to_micros(before), _MAX_DELETED_AT_ONCE),
            )
            connection.execute("DELETE FROM failure WHERE at_us < ?", (to_micros(failures_before),))
        return int(cursor.rowcount) == _MAX_DELETED_AT_ONCE

    def _select(self, where: str, values: Sequence[Any]) -> list[Execution]:
        """Read executions that match a WHERE clause."""
        statement = f"SELECT {EXECUTION_COLUMNS} FROM execution WHERE {where}"  # noqa: S608 -- our own words
        return [decode_execution(*row) for row in self._fetch_rows(statement, values)]

    def _fetch_rows(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return all rows of a query."""
        with translate_errors(self.path):
            rows: list[Any] = self.connection.execute(statement, values).fetchall()
        return rows

    def _fetch_row(self, statement: str, values: Sequence[Any] = ()) -> Any:
        """Return the first row of a query."""
        return self._fetch_rows(statement, values)[0]

    def _fetch_number(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Return the first value of a query, as integer."""
        return int(self._fetch_row(statement, values)[0])


def _encode_value(value: Any) -> str:
    """Encode a value as JSON text."""
    return msgspec.json.encode(value).decode()
