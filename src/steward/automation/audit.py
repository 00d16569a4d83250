"""Audit log of operations: who ran what on which cluster, and how it ended (SQLite).

:class:`AuditLog` opens ``audit.db`` in the state directory. ``begin`` writes a row before an
operation changes anything, ``end`` writes a second row when it has ended; database triggers forbid
updates and deletes. A row without an end row whose process is gone is reported as ``unfinished``:
that process was killed. Root and Steward's user both write the file, so it belongs to the owner of
the state directory.
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
    create_for_owner,
    open_database,
    open_reader,
    transaction,
    translate_errors,
)
from steward.core.timestamps import from_micros, to_micros

AUDIT_FILE: Final = "audit.db"
"""File name of the audit log in the state directory."""
Ending = Literal["succeeded", "failed", "timeout"]
"""Outcomes that ``end`` records."""
Status = Literal["succeeded", "failed", "timeout", "running", "unfinished"]
"""Status of an entry as reported: an outcome, or how an entry without an end row stands."""
MAX_RESULT_BYTES: Final = 64 * 1024
"""Maximum size of a stored result, in bytes; a longer result is stored as null."""

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


class AuditStart(msgspec.Struct, frozen=True, kw_only=True):
    """Audit record of an operation that is about to run.

    Attributes:
        at: Start time, UTC.
        ref: Name of the operation.
        cluster: Cluster it runs on.
        uid: Uid of the caller.
        user: Name of the caller; "" if the uid has none.
        how: How the caller was authenticated: ``socket``, ``local``, ``munge``, ``token``.
        speaker: Name that signs reasons on nodes and jobs.
        force: Whether it may override reasons of others.
        parameters: Parameters of the operation, defaults included.
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


class AuditRow(AuditStart, frozen=True, kw_only=True):
    """Audit log entry: an operation's start and, once it has ended, its outcome.

    Attributes:
        id: Number of the entry.
        status: How it ended; ``running`` while its process lives, ``unfinished`` if that process is
            gone without recording an end.
        message: Message at the end; "" if none.
        result: Result; None if absent or too long to store.
        ended: End time, UTC; None if it has not ended.
    """

    id: int
    status: Status
    message: str = ""
    result: Any = None
    ended: datetime | None = None


class AuditLog:
    """Audit log in a state directory. Not thread-safe: use one per thread.

    Args:
        state_dir: Steward's state directory.
        read_only: Open for reading only.
    """

    def __init__(self, state_dir: str, *, read_only: bool = False) -> None:
        self._path = os.path.join(state_dir, AUDIT_FILE)
        with _translate_errors():
            if read_only:
                self._connection = open_reader(self._path)
            else:
                create_for_owner(self._path)
                self._connection = open_database(self._path, _MIGRATIONS)

    def close(self) -> None:
        """Close the database."""
        connection: Connection = self._connection
        connection.close()

    def begin(self, start: AuditStart) -> int:
        """Record durably that an operation is about to run, and return its number.

        Raises:
            AuditUnavailable: The log cannot be written; the operation must not run.
        """
        row = (
            *(to_micros(start.at), start.ref, start.cluster, start.uid, start.user, start.how),
            *(start.speaker, start.force, _dump_value(start.parameters), _identify_process()),
        )
        with _translate_errors(), transaction(self._connection, self._path) as connection:
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
        """Record how an operation ended.

        Raises:
            AuditUnavailable: The log cannot be written; the operation has been done nevertheless.
        """
        encoded = _dump_value(result)
        encoded = encoded if len(encoded) <= MAX_RESULT_BYTES else "null"
        with _translate_errors(), transaction(self._connection, self._path) as connection:
            connection.execute(
                "INSERT INTO ended (id, at_us, status, message, result) VALUES (?, ?, ?, ?, ?)",
                (number, to_micros(at), status, message, encoded),
            )

    def list_entries(
        self,
        *,
        limit: int = 100,
        since: datetime | None = None,
        before: int = 0,
        ref: str = "",
        cluster: str = "",
        uid: int | None = None,
    ) -> list[AuditRow]:
        """Return the latest entries that match the filters, newest first.

        Args:
            limit: Maximum number of entries.
            since: Only entries that started at or after this time.
            before: Only entries with a lower number; 0 for all.
            ref: Only this operation; "" for all.
            cluster: Only this cluster; "" for all.
            uid: Only entries of this caller; None for all.

        Raises:
            AuditUnavailable: The log cannot be read now.
        """
        conditions: list[str] = ["1"]
        values: list[Any] = []
        for condition, value in (
            ("begun.at_us >= ?", None if since is None else to_micros(since)),
            ("begun.id < ?", before or None),
            ("ref = ?", ref or None),
            ("cluster = ?", cluster or None),
            ("uid = ?", uid),
        ):
            if value is not None:
                conditions.append(condition)
                values.append(value)
        return self._select(" AND ".join(conditions), (*values, limit))

    def find_entry(self, number: int) -> AuditRow | None:
        """Return the entry with this number, or None.

        Raises:
            AuditUnavailable: The log cannot be read now.
        """
        return next(iter(self._select("begun.id = ?", (number, 1))), None)

    def _select(self, where_clause: str, values: tuple[Any, ...]) -> list[AuditRow]:
        """Read entries that match a WHERE clause, newest first."""
        with _translate_errors(), translate_errors(self._path):
            rows = self._connection.execute(
                f"SELECT {_COLUMNS} FROM begun LEFT JOIN ended ON ended.id = begun.id "  # noqa: S608 -- values are bound
                f"WHERE {where_clause} ORDER BY begun.id DESC LIMIT ?",
                values,
            ).fetchall()
        return [_decode_row(*row) for row in rows]


def _decode_row(
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
    """Decode a row of ``_COLUMNS``."""
    return AuditRow(
        id=number,
        at=from_micros(at_us),
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
        ended=None if ended_us is None else from_micros(ended_us),
    )


def _dump_value(value: Any) -> str:
    """Encode a value as JSON text."""
    return msgspec.json.encode(value).decode()


def _identify_process() -> str:
    """Return an id of this process that is unique across reboots and reused pids."""
    return f"{_read_kernel_boot_id()}:{os.getpid()}:{_read_start_ticks(os.getpid())}"


def _is_alive(process: str) -> bool:
    """Return whether the process that began an entry still runs (id of ``_identify_process``)."""
    boot_id, _, rest = process.partition(":")
    pid, _, start_ticks = rest.partition(":")
    return (
        boot_id == _read_kernel_boot_id()
        and pid.isdigit()
        and start_ticks == _read_start_ticks(int(pid)) != ""
    )


def _read_kernel_boot_id() -> str:
    """Return the kernel's boot id."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _read_start_ticks(pid: int) -> str:
    """Return a process's start time in kernel ticks; "" if it does not exist or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name in brackets may contain anything, brackets and blanks included.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Convert errors of SQLite to AuditUnavailable."""
    try:
        yield
    except SqliteUnavailable as error:
        raise AuditUnavailable(
            f"the audit log is away, and nothing is done without it: {error}", error.offender
        ) from error
