"""The tables of rules.db, and the records that are kept in them."""

from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from steward.core.moments import moment

Phase = Literal["waiting", "started", "ended"]

HELD_BACK: Final = "held-back"

MIGRATIONS: Final = (
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
COLUMNS: Final = (
    "id, rule, cluster, event, trigger, subject, action, parameters, dry_run, phase, status, "
    "message, result, audit, tries, at_us, made_us, next_us, started_us, ended_us"
)


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """One execution: what a rule does about one event.

    Attributes:
        id: Its number in the history; 0 until it is there.
        rule: The rule.
        cluster: Where the event happened.
        event: Key of the event.
        trigger: Type of the trigger that it was.
        subject: What it is about, for de-duplication.
        action: The operation.
        parameters: Its, rendered.
        dry_run: Whether it is only described.
        phase: Whether it waits, has been started, or has ended.
        status: How it ended; "" while it has not.
        message: What was said of it.
        result: What the operation gave.
        audit: The operation's number in the audit log; 0 for none.
        tries: How often it was started.
        at: When the event happened.
        made: When the rule decided.
        due: When it is to be started, or tried again.
        started: When it was started last; None for never.
        ended: When it ended; None for not.
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


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that somebody switched on or off."""

    enabled: bool
    who: str
    at: datetime


def execution_of(
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
    """The execution that a row of :data:`COLUMNS` is."""
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
        at=moment(at_us),
        made=moment(made_us),
        due=moment(next_us),
        started=moment(started_us) if started_us else None,
        ended=moment(ended_us) if ended_us else None,
    )
