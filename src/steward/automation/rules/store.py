"""Rules database ``rules.db`` (SQLite): executions, taken nodes, node failures and switches.

:class:`Execution` is a row of the history, :class:`RulesStore` the database. The daemon's ``rules``
consumer writes it. Commands run by root or Steward's user read it, and enable and disable rules
there. It also holds the consumer's cursor and outbox, so that a decision and the cursor are one
transaction.

An execution is ``waiting`` until it is due, ``started`` while its action runs, then ``ended`` with
a status: ``succeeded``, ``failed``, ``timeout``, ``dry-run``, ``held-back`` (a limit prevented it)
or ``unknown`` (a crash left it open). A retry makes it ``waiting`` again.
"""

from collections.abc import Container, Iterable, Sequence
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from steward.automation.rules.limits import TakenNode, find_return_partition
from steward.automation.rules.triggers import FAILURE_WINDOWS
from steward.core.databases import RULES
from steward.core.events import Event
from steward.core.sqlite import Database
from steward.core.storage import OUTBOX, Cursor, Index, Rows, Table, encode_json
from steward.core.timestamps import from_micros, to_micros

Phase = Literal["waiting", "started", "ended"]
"""Phase of an execution."""

STATUS_HELD_BACK: Final = "held-back"
"""Status of an execution that a limit prevented."""


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
        attempts: Number of starts.
        at: Time of the event.
        triggered: Time of the decision.
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
    attempts: int = 0
    at: datetime
    triggered: datetime
    due: datetime
    started: datetime | None = None
    ended: datetime | None = None

    @property
    def subject_text(self) -> str:
        """Subject as people read it: its values, separated by blanks."""
        try:
            return " ".join(map(str, msgspec.json.decode(self.subject, type=list[Any])))
        except msgspec.DecodeError:  # cut
            return self.subject


class RuleSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """Administrator's override of whether a rule is enabled."""

    enabled: bool
    who: str
    at: datetime


class _StoredExecution(Execution, frozen=True, kw_only=True):
    """Execution, and whether it passed the limits at the decision."""

    passed: bool


class _TakenNode(msgspec.Struct, frozen=True):
    """Node that an execution took away."""

    cluster: str
    node: str
    rule: str
    execution: int


class _Failure(msgspec.Struct, frozen=True):
    """Failure of a node, with the key of its event."""

    cluster: str
    node: str
    at: datetime
    event: str


class _StoredSwitch(RuleSwitch, frozen=True, kw_only=True):
    """Override, with the name of its rule."""

    rule: str


class _RuleCursor(Cursor, frozen=True, kw_only=True):
    """Cursor, and when rules first ran here."""

    began: datetime | None = None


_CURSOR: Final = Table(_RuleCursor, "cursor", has_one_row=True)
_EXECUTIONS: Final = Table(
    _StoredExecution,
    "execution",
    key="id",
    autoincrement=True,
    indexes={
        "of_event": Index("rule, cluster, event", is_unique=True),
        "open": Index("phase, rule, due", where="phase != 'ended'"),
        "rate": Index("rule, triggered", where="passed"),
        "subject": Index("rule, subject, triggered", where="status != 'held-back'"),
        "triggered": Index("triggered"),
    },
)
_ROWS: Final = Rows(Execution)
_TAKEN_NODES: Final = Table(_TakenNode, "taken", key="cluster, node, rule, execution")
_FAILURES: Final = Table(_Failure, "failure", key="cluster, node, at, event")
_SWITCHES: Final = Table(_StoredSwitch, "switch", key="rule")
_TABLES: Final = (OUTBOX, _CURSOR, _EXECUTIONS, _TAKEN_NODES, _FAILURES, _SWITCHES)
_SCHEMA: Final = "".join(table.schema for table in _TABLES)

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
        path = RULES.locate(state_dir)
        self.database = Database(path, (_SCHEMA,), read_only=read_only, for_owner=True)

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def record_first_run(self, now: datetime) -> datetime:
        """Return when rules first ran here; events observed before are ignored."""
        with self.database.transaction() as connection:
            connection.execute("UPDATE cursor SET began = ? WHERE began IS NULL", (now,))
        return from_micros(self.database.fetch_value("SELECT began FROM cursor"))

    # -- decisions

    def insert(self, execution: Execution) -> Execution | None:
        """Store an execution, within a transaction; return None if it exists already."""
        fields = msgspec.structs.asdict(execution)
        fields["message"] = execution.message[:_MAX_MESSAGE_LENGTH]
        stored = _StoredExecution(**fields, passed=execution.status != STATUS_HELD_BACK)
        cursor = _EXECUTIONS.insert(self.database.connection, stored, "ignore")
        if not cursor.rowcount:
            return None
        return msgspec.structs.replace(execution, id=int(cursor.lastrowid))

    def is_decided(self, rule: str, event: Event) -> bool:
        """Return whether a rule has decided on an event."""
        return bool(
            self.database.fetch(
                "SELECT 1 FROM execution WHERE rule = ? AND cluster = ? AND event = ?",
                *(rule, event.cluster, event.key),
            )
        )

    def count_executions_since(self, rule: str, since: datetime) -> int:
        """Count the executions of a rule since a time that were not held back at the decision."""
        return int(
            self.database.fetch_value(
                "SELECT count(*) FROM execution WHERE rule = ? AND triggered > ? AND passed",
                rule,
                since,
            )
        )

    def find_recent_execution(self, rule: str, subject: str, since: datetime) -> Execution | None:
        """Return the latest execution about a subject since a time that was not held back."""
        executions = self._select(
            "rule = ? AND subject = ? AND triggered > ? AND status != 'held-back' "
            "ORDER BY triggered DESC LIMIT 1",
            *(rule, subject, since),
        )
        return executions[0] if executions else None

    # -- execution

    def list_due(self, now: datetime, busy: Container[str]) -> list[Execution]:
        """Return the oldest due execution of each rule that is not busy."""
        executions = self._select(
            "id IN (SELECT min(id) FROM execution WHERE phase = 'waiting' AND due <= ? "
            "GROUP BY rule) ORDER BY id",
            now,
        )
        return [execution for execution in executions if execution.rule not in busy]

    def get_next_due(self) -> datetime | None:
        """Return when the next waiting execution is due."""
        due_us = self.database.fetch_value("SELECT min(due) FROM execution WHERE phase = 'waiting'")
        return None if due_us is None else from_micros(due_us)

    def list_by_phase(self, phase: Phase) -> list[Execution]:
        """Return all executions in a phase, oldest first."""
        return self._select("phase = ? ORDER BY id", phase)

    def record_start(
        self, execution: Execution, now: datetime, nodes: Iterable[str] = ()
    ) -> Execution:
        """Record durably that an execution starts, with the nodes it may take away."""
        with self.database.transaction() as connection:
            connection.execute(
                "UPDATE execution SET phase = 'started', attempts = attempts + 1, started = ? "
                "WHERE id = ?",
                (now, execution.id),
            )
            taken_nodes = [
                _TakenNode(execution.cluster, node, execution.rule, execution.id) for node in nodes
            ]
            _TAKEN_NODES.insert_all(connection, taken_nodes, "replace")
        return msgspec.structs.replace(
            execution, phase="started", attempts=execution.attempts + 1, started=now
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
        with self.database.transaction() as connection:
            connection.execute(
                "UPDATE execution SET phase = 'waiting', due = ?, message = ?, attempts = ? "
                "WHERE id = ?",
                (
                    *(due, message[:_MAX_MESSAGE_LENGTH]),
                    *(
                        execution.attempts if counts else max(0, execution.attempts - 1),
                        execution.id,
                    ),
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
        encoded = encode_json(result)
        self.database.connection.execute(
            "UPDATE execution SET phase = 'ended', status = ?, message = ?, result = ?, "
            "audit = ?, ended = ? WHERE id = ?",
            (
                *(status, message[:_MAX_MESSAGE_LENGTH]),
                encoded if len(encoded) <= _MAX_STORED_RESULT_BYTES else None,
                *(audit, now, execution.id),
            ),
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
        rows = self.database.fetch(
            "SELECT node, taken.rule, action, parameters FROM taken "
            "LEFT JOIN execution ON execution.id = taken.execution WHERE taken.cluster = ?",
            cluster,
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
        with self.database.transaction() as connection:
            connection.execute("DELETE FROM taken WHERE execution = ?", (execution.id,))

    def release_nodes(self, cluster: str, available: Iterable[str], seen: datetime) -> None:
        """Remove nodes that accept jobs again, seen after the execution that took them had ended.

        Args:
            cluster: Cluster of the nodes.
            available: Nodes that accept jobs, and nodes that no longer exist.
            seen: Time when the query of nodes began.
        """
        with self.database.transaction() as connection:
            connection.executemany(
                "DELETE FROM taken WHERE cluster = ? AND node = ? AND NOT EXISTS ("
                "SELECT 1 FROM execution WHERE id = taken.execution "
                "AND (phase != 'ended' OR ended >= ?))",
                [(cluster, node, seen) for node in available],
            )

    def insert_failures(self, events: Sequence[Event]) -> None:
        """Store failures of nodes, within a transaction."""
        failures = [
            _Failure(event.cluster, event.body.node, event.at, event.key) for event in events
        ]
        _FAILURES.insert_all(self.database.connection, failures, "ignore")

    def count_failures(self, event: Event) -> dict[str, int]:
        """Count the failures of an event's node up to the event, per window."""
        at_us = to_micros(event.at)
        sums = ", ".join("coalesce(sum(at > ?), 0)" for _ in FAILURE_WINDOWS)
        (row,) = self.database.fetch(
            f"SELECT {sums} FROM failure WHERE cluster = ? AND node = ? AND at <= ?",  # noqa: S608 -- question marks
            *(at_us - seconds * 1_000_000 for _, seconds in FAILURE_WINDOWS),
            *(event.cluster, event.body.node, at_us),
        )
        return {name: int(count) for (name, _), count in zip(FAILURE_WINDOWS, row, strict=True)}

    # -- commands and web pages

    def read_switches(self) -> dict[str, RuleSwitch]:
        """Return administrators' overrides, by rule."""
        return {switch.rule: switch for switch in _SWITCHES.select(self.database)}

    def set_switch(self, rule: str, enabled: bool, who: str, now: datetime) -> None:
        """Enable or disable a rule, overriding its file."""
        with self.database.transaction() as connection:
            switch = _StoredSwitch(rule=rule, enabled=enabled, who=who, at=now)
            _SWITCHES.insert(connection, switch, "replace")

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
            ("triggered >= ?", since),
        ):
            if value is not None:
                conditions.append(condition)
                values.append(value)
        return self._select(f"{' AND '.join(conditions)} ORDER BY id DESC LIMIT ?", *values, limit)

    def count_executions(self) -> dict[str, tuple[int, datetime]]:
        """Return the number of executions and the time of the last one, by rule."""
        rows = self.database.fetch(
            "SELECT rule, count(*), max(triggered) FROM execution "
            "WHERE status != 'held-back' GROUP BY rule"
        )
        return {rule: (count, from_micros(last_us)) for rule, count, last_us in rows}

    def delete_old(self, before: datetime, failures_before: datetime) -> bool:
        """Delete up to 1,000 old executions; return True if more remain."""
        with self.database.transaction() as connection:
            cursor = connection.execute(
                "DELETE FROM execution WHERE id IN (SELECT id FROM execution "
                "WHERE phase = 'ended' AND triggered < ? ORDER BY triggered LIMIT ?)",
                (before, _MAX_DELETED_AT_ONCE),
            )
            connection.execute("DELETE FROM failure WHERE at < ?", (failures_before,))
        return int(cursor.rowcount) == _MAX_DELETED_AT_ONCE

    def _select(self, where: str, *values: Any) -> list[Execution]:
        """Read executions that match a WHERE clause."""
        statement = f"SELECT {_ROWS.select_list} FROM execution WHERE {where}"  # noqa: S608 -- our own words
        return _ROWS.fetch(self.database, statement, *values)
