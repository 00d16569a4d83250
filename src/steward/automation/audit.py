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
from steward.core.databases import AUDIT
from steward.core.processes import read_boot_id, read_start_ticks
from steward.core.sqlite import Database, SqliteUnavailable
from steward.core.storage import Index, Table, encode_json

Ending = Literal["succeeded", "failed", "timeout"]
"""Outcomes that ``end`` records."""
Status = Literal["succeeded", "failed", "timeout", "running", "unfinished"]
"""Status of an entry as reported: an outcome, or how an entry without an end row stands."""
MAX_RESULT_BYTES: Final = 64 * 1024
"""Maximum size of a stored result, in bytes; a longer result is stored as null."""


class AuditStart(msgspec.Struct, frozen=True, kw_only=True):
    """Audit record of an operation that is about to run.

    Attributes:
        started: Start time, UTC.
        action: Name of the operation.
        cluster: Cluster it runs on.
        uid: Uid of the caller.
        user: Name of the caller; "" if the uid has none.
        how: How the caller was authenticated: ``socket``, ``local``, ``munge``, ``session``,
            ``token``; ``service NAME`` for a service principal.
        speaker: Name that signs reasons on nodes and jobs.
        force: Whether it may override reasons of others.
        parameters: Parameters of the operation, defaults included.
    """

    started: datetime
    action: str
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


class _Start(AuditStart, frozen=True, kw_only=True):
    """Stored start, with the process that runs the operation."""

    id: int = 0
    process: str


class _End(msgspec.Struct, frozen=True, kw_only=True):
    """Stored outcome of the operation with the same id."""

    id: int
    status: Ending
    message: str
    result: Any
    ended: datetime


_STARTS: Final = Table(
    _Start, "begun", key="id", autoincrement=True, indexes={"started": Index("started")}
)
_ENDS: Final = Table(_End, "ended", key="id", references={"id": "begun (id)"})
_MIGRATIONS: Final = (
    _STARTS.schema
    + _ENDS.schema
    + "".join(
        f"CREATE TRIGGER {table.name}_{verb} BEFORE {verb} ON {table.name}\n"
        "BEGIN SELECT RAISE(ABORT, 'an audit log is never changed'); END;\n"
        for table in (_STARTS, _ENDS)
        for verb in ("update", "delete")
    ),
)


class AuditLog:
    """Audit log in a state directory. Not thread-safe: use one per thread.

    Args:
        state_dir: Steward's state directory.
        read_only: Open for reading only.
    """

    def __init__(self, state_dir: str, *, read_only: bool = False) -> None:
        path = AUDIT.locate(state_dir)
        with _translate_errors():
            self._database = Database(path, _MIGRATIONS, read_only=read_only, for_owner=True)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def begin(self, start: AuditStart) -> int:
        """Record durably that an operation is about to run, and return its number.

        Raises:
            AuditUnavailable: The log cannot be written; the operation must not run.
        """
        row = _Start(**msgspec.structs.asdict(start), process=_identify_process())
        with _translate_errors(), self._database.transaction() as connection:
            number: int = _STARTS.insert(connection, row).lastrowid
        return number

    def end(
        self, number: int, status: Ending, message: str = "", result: Any = None, *, at: datetime
    ) -> None:
        """Record how an operation ended.

        Raises:
            AuditUnavailable: The log cannot be written; the operation has been done nevertheless.
        """
        if len(encode_json(result)) > MAX_RESULT_BYTES:
            result = None
        row = _End(id=number, status=status, message=message, result=result, ended=at)
        with _translate_errors(), self._database.transaction() as connection:
            _ENDS.insert(connection, row)

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
            ("begun.started >= ?", since),
            ("begun.id < ?", before or None),
            ("action = ?", ref or None),
            ("cluster = ?", cluster or None),
            ("uid = ?", uid),
        ):
            if value is not None:
                conditions.append(condition)
                values.append(value)
        return self._select(" AND ".join(conditions), *values, limit)

    def count_of_user(self, uid: int, since: datetime) -> int:
        """Return how many entries of a user began at or after a time.

        Raises:
            AuditUnavailable: The log cannot be read now.
        """
        with _translate_errors():
            return int(
                self._database.fetch_value(
                    "SELECT count(*) FROM begun WHERE started >= ? AND uid = ?", since, uid
                )
            )

    def find_entry(self, number: int) -> AuditRow | None:
        """Return the entry with this number, or None.

        Raises:
            AuditUnavailable: The log cannot be read now.
        """
        return next(iter(self._select("begun.id = ?", number, 1)), None)

    def _select(self, where_clause: str, *values: Any) -> list[AuditRow]:
        """Read entries that match a WHERE clause, newest first."""
        with _translate_errors():
            rows = self._database.fetch(
                f"SELECT {_STARTS.select_list}, {_ENDS.select_list} "  # noqa: S608 -- values are bound
                "FROM begun LEFT JOIN ended ON ended.id = begun.id "
                f"WHERE {where_clause} ORDER BY begun.id DESC LIMIT ?",
                *values,
            )
        return [_decode_row(row) for row in rows]


def _decode_row(row: tuple[Any, ...]) -> AuditRow:
    """Decode a start with its end, if any."""
    width = len(_STARTS.columns)
    fields = msgspec.structs.asdict(_STARTS.decode(row[:width]))
    process = fields.pop("process")
    if row[width] is None:
        return AuditRow(**fields, status="running" if _is_alive(process) else "unfinished")
    return AuditRow(**fields | msgspec.structs.asdict(_ENDS.decode(row[width:])))


def _identify_process() -> str:
    """Return an id of this process that is unique across reboots and reused pids."""
    return f"{read_boot_id()}:{os.getpid()}:{read_start_ticks(os.getpid())}"


def _is_alive(process: str) -> bool:
    """Return whether the process that began an entry still runs (id of ``_identify_process``)."""
    boot_id, _, rest = process.partition(":")
    pid, _, start_ticks = rest.partition(":")
    return (
        boot_id == read_boot_id() != ""
        and pid.isdigit()
        and start_ticks == str(read_start_ticks(int(pid))) != "0"
    )


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Convert errors of SQLite to AuditUnavailable."""
    try:
        yield
    except SqliteUnavailable as error:
        raise AuditUnavailable(
            f"audit log unavailable, so no action runs: {error}", error.offender
        ) from error
