"""The audit log: who had what done to a cluster, and what became of it.

A row is written before an action changes anything, and another when it has
ended; no row is ever changed. An action that was begun and has no end says by
that, that whoever ran it was killed meanwhile. Root and Steward's own user both
write it: its file belongs to the owner of the state directory.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from steward.automation.errors import AuditUnavailable
from steward.core.sqlite import (
    Connection,
    SqliteUnavailable,
    make_for_owner,
    open_database,
    open_reader,
    transaction,
    translated,
)
from steward.core.timestamps import micros, moment

NAME: Final = "audit.db"
Ending = Literal["succeeded", "failed", "timeout"]
Status = Literal["succeeded", "failed", "timeout", "running", "unfinished"]
LONGEST_RESULT: Final = 64 * 1024
"""Bytes of the longest result that is kept; of a longer one that it was left out."""

_MIGRATIONS: Final = (
    """
    CREATE TABLE begun (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at_us INTEGER NOT NULL,
        ref TEXT NOT NULL,
        cluster TEXT NOT NULL,
        uid INTEGER NOT NULL,
        user TEXT NOT NULL,
        how TEXT NOT NULL,
        speaker TEXT NOT NULL,
        force INTEGER NOT NULL,
        parameters TEXT NOT NULL,
        process TEXT NOT NULL
    );
    CREATE TABLE ended (
        id INTEGER PRIMARY KEY REFERENCES begun (id),
        at_us INTEGER NOT NULL,
        status TEXT NOT NULL,
        message TEXT NOT NULL,
        result TEXT NOT NULL
    );
    CREATE INDEX begun_at ON begun (at_us);
    CREATE TRIGGER begun_stays BEFORE UPDATE ON begun
        BEGIN SELECT RAISE(ABORT, 'an audit log is never changed'); END;
    CREATE TRIGGER begun_is_kept BEFORE DELETE ON begun
        BEGIN SELECT RAISE(ABORT, 'an audit log is never changed'); END;
    CREATE TRIGGER ended_stays BEFORE UPDATE ON ended
        BEGIN SELECT RAISE(ABORT, 'an audit log is never changed'); END;
    CREATE TRIGGER ended_is_kept BEFORE DELETE ON ended
        BEGIN SELECT RAISE(ABORT, 'an audit log is never changed'); END;
    """,
)
_COLUMNS: Final = (
    "begun.id, begun.at_us, ref, cluster, uid, user, how, speaker, force, parameters, process, "
    "ended.at_us, status, message, result"
)


class AuditBegun(msgspec.Struct, frozen=True, kw_only=True):
    """What is about to be done.

    Attributes:
        at: When, UTC.
        ref: The operation.
        cluster: Where.
        uid: Who asked …
        user: … by name; "" where the uid has none.
        how: How they were known: ``socket``, ``local``, ``munge``, ``token``.
        speaker: For whom a reason speaks.
        force: Whether others' reasons were to be overridden.
        parameters: The operation's, with defaults.
    """

    at: datetime
    ref: str
    cluster: str
    uid: int
    user: str
    how: str
    speaker: str
    force: bool
    parameters: dict[str, Any]


class AuditRow(AuditBegun, frozen=True, kw_only=True):
    """One action, as the log has it.

    Attributes:
        id: Its number.
        status: How it ended; ``running`` while whoever runs it does, and ``unfinished`` where
            that is gone without having told the end.
        message: What was said at its end; "" for nothing.
        result: What it gave; None where that was too long, or is not there.
        ended: When it ended; None for not.
    """

    id: int
    status: Status
    message: str = ""
    result: Any = None
    ended: datetime | None = None


class Audit:
    """The audit log of a state directory; to be used by one thread at a time.

    Args:
        state_dir: Steward's state directory.
        read_only: Whether nothing is to be written.
    """

    def __init__(self, state_dir: str, *, read_only: bool = False) -> None:
        self._path = os.path.join(state_dir, NAME)
        with _ours():
            if read_only:
                self._connection = open_reader(self._path)
            else:
                make_for_owner(self._path)
                self._connection = open_database(self._path, _MIGRATIONS)

    def close(self) -> None:
        """Let go of the file."""
        connection: Connection = self._connection
        connection.close()

    def begin(self, begun: AuditBegun) -> int:
        """Write down, durably, what is about to be done; its number.

        Raises:
            AuditUnavailable: It cannot be written: then it must not be done.
        """
        row = (
            *(micros(begun.at), begun.ref, begun.cluster, begun.uid, begun.user, begun.how),
            *(begun.speaker, begun.force, _json(begun.parameters), _this_process()),
        )
        with _ours(), transaction(self._connection, self._path) as connection:
            cursor = connection.execute(
                "INSERT INTO begun (at_us, ref, cluster, uid, user, how, speaker, force, "
                "parameters, process) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
        number: int = cursor.lastrowid
        return number

    def end(
        self, number: int, status: Ending, message: str = "", result: Any = None, *, at: datetime
    ) -> None:
        """Write down how it ended.

        Raises:
            AuditUnavailable: It cannot be written; it is done all the same.
        """
        kept = _json(result)
        kept = kept if len(kept) <= LONGEST_RESULT else "null"
        with _ours(), transaction(self._connection, self._path) as connection:
            connection.execute(
                "INSERT INTO ended (id, at_us, status, message, result) VALUES (?, ?, ?, ?, ?)",
                (number, micros(at), status, message, kept),
            )

    def rows(
        self,
        *,
        limit: int = 100,
        since: datetime | None = None,
        before: int = 0,
        ref: str = "",
        cluster: str = "",
        uid: int | None = None,
    ) -> list[AuditRow]:
        """The latest actions, newest first.

        Args:
            limit: How many at the most.
            since: Only what was begun since.
            before: Only actions of a lower number; 0 for all.
            ref: Only of this operation; "" for all.
            cluster: Only on this cluster; "" for all.
            uid: Only what this user asked for; all if None.

        Raises:
            AuditUnavailable: It cannot be read now.
        """
        where: list[str] = ["1"]
        values: list[Any] = []
        for condition, value in (
            ("begun.at_us >= ?", None if since is None else micros(since)),
            ("begun.id < ?", before or None),
            ("ref = ?", ref or None),
            ("cluster = ?", cluster or None),
            ("uid = ?", uid),
        ):
            if value is not None:
                where.append(condition)
                values.append(value)
        return self._select(" AND ".join(where), (*values, limit))

    def row(self, number: int) -> AuditRow | None:
        """One action; None where there is none of that number.

        Raises:
            AuditUnavailable: It cannot be read now.
        """
        return next(iter(self._select("begun.id = ?", (number, 1))), None)

    def _select(self, where: str, values: tuple[Any, ...]) -> list[AuditRow]:
        with _ours(), translated(self._path):
            rows = self._connection.execute(
                f"SELECT {_COLUMNS} FROM begun LEFT JOIN ended ON ended.id = begun.id "  # noqa: S608 -- values are bound
                f"WHERE {where} ORDER BY begun.id DESC LIMIT ?",
                values,
            ).fetchall()
        return [_row(*row) for row in rows]


def _row(
    number: int,
    at_us: int,
    ref: str,
    cluster: str,
    uid: int,
    user: str,
    how: str,
    speaker: str,
    force: int,
    parameters: str,
    process: str,
    ended_us: int | None,
    status: Ending | None,
    message: str | None,
    result: str | None,
) -> AuditRow:
    return AuditRow(
        id=number,
        at=moment(at_us),
        ref=ref,
        cluster=cluster,
        uid=uid,
        user=user,
        how=how,
        speaker=speaker,
        force=bool(force),
        parameters=msgspec.json.decode(parameters),
        status=status or ("running" if _is_alive(process) else "unfinished"),
        message=message or "",
        result=msgspec.json.decode(result or "null"),
        ended=None if ended_us is None else moment(ended_us),
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _this_process() -> str:
    """What this process is called for as long as the host is not started anew, and after."""
    return f"{_boot()}:{os.getpid()}:{_started(os.getpid())}"


def _is_alive(process: str) -> bool:
    boot, _, rest = process.partition(":")
    pid, _, started = rest.partition(":")
    return boot == _boot() and pid.isdigit() and started == _started(int(pid)) != ""


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _started(pid: int) -> str:
    """When a process was started, in the kernel's ticks; "" where there is none, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in brackets may hold anything, brackets and blanks too.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


@contextmanager
def _ours() -> Iterator[None]:
    try:
        yield
    except SqliteUnavailable as error:
        raise AuditUnavailable(
            f"the audit log is away, and nothing is done without it: {error}", error.offender
        ) from error
