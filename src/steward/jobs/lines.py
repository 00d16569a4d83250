"""The table ``line`` of jobs.db: what sacct shows, made when facts come, not when it is asked.

A row is a Line. Rows lie in sacct's order, by job id, each run before its
steps, so that a listing of everything is one scan without a sort.
"""

import re
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from steward.core.lines import FIELDS, Line
from steward.core.sqlite import Connection
from steward.jobs.spent import MOST

RUN_RANK: Final = -1_000_000
"""The rank of a run's own line: before all its steps."""

_RANKS: Final = {"": RUN_RANK, "interactive": -6, "batch": -5, "extern": -4}
_NUMBERED: Final = re.compile(r"([0-9]{1,10})(?:\+[0-9]{1,10})?")
_HINTS: Final = typing.get_type_hints(Line)
_KEY: Final = ("cluster", "job_id", "submit_us", "restarts", "piece_us", "rank", "step")
_TEXTS: Final = tuple(_HINTS[field] is str and field not in _KEY for field in FIELDS)

COLUMNS: Final = ", ".join(f'"{field}"' for field in FIELDS)
"""All fields of a Line, in their order, for a SELECT that :func:`line_of` is to read."""


def _column(field: str) -> str:
    kind = "TEXT" if _HINTS[field] is str else "INTEGER"
    must = " NOT NULL" if field in _KEY else ""
    return f'"{field}" {kind}{must}'


TABLE: Final = f"""
    CREATE TABLE line (
        rank INTEGER NOT NULL,
        {", ".join(map(_column, FIELDS))},
        PRIMARY KEY ({", ".join(_KEY)})
    ) WITHOUT ROWID;
    CREATE INDEX line_by_end ON line (end_us, start_us, eligible_us) WHERE step = '';
    CREATE INDEX line_by_uid ON line (uid, end_us) WHERE step = '';
    CREATE INDEX line_by_user ON line (user, end_us) WHERE step = '';
    CREATE INDEX line_by_account ON line (account, end_us) WHERE step = '';
    CREATE INDEX line_by_id ON line (job_id) WHERE step = '';
    CREATE INDEX line_by_array ON line (array_job_id) WHERE array_job_id <> 0 AND step = '';
    CREATE INDEX line_by_het ON line (het_job_id) WHERE het_job_id <> 0 AND step = '';
"""
"""Makes the table; an index holds the lines of runs alone, which their steps lie beside."""

_PUT: Final = (
    f"INSERT OR REPLACE INTO line (rank, {COLUMNS}) "  # noqa: S608 -- our own column names
    f"VALUES ({', '.join('?' * (len(FIELDS) + 1))})"
)

_FIRST_USED: Final = FIELDS.index("user_us")
_LAST_USED: Final = FIELDS.index("minor_faults") + 1
_UNUSED: Final = msgspec.structs.astuple(Line(cluster="", job_id=0, label=""))[
    _FIRST_USED:_LAST_USED
]
_FEWER: Final = (*FIELDS[:_FIRST_USED], *FIELDS[_LAST_USED:])
_PUT_FEWER: Final = (
    f"""INSERT OR REPLACE INTO line (rank, {", ".join(f'"{field}"' for field in _FEWER)}) """  # noqa: S608 -- our own column names
    f"VALUES ({', '.join('?' * (len(_FEWER) + 1))})"
)
"""Of what used nothing, as of each job that waits, all columns about that are left out."""

_OF_RUN: Final = "WHERE cluster = ? AND job_id = ? AND submit_us = ? AND restarts = ?"
_SUMMED: Final = (
    *("cluster", "job_id", "label", "step", "piece_us", "tasks", "doubts"),
    *FIELDS[_FIRST_USED:_LAST_USED],
)
_SUMMED_TEXTS: Final = tuple(_HINTS[field] is str for field in _SUMMED)
_STEPS: Final = f"SELECT {', '.join(_SUMMED)} FROM line {_OF_RUN} AND step <> ''"  # noqa: S608 -- our own columns
_DROP: Final = f"DELETE FROM line {_OF_RUN}"  # noqa: S608 -- our own condition

RunKey3 = tuple[int, int, int]
"""Job id, submit time (µs since the epoch) and restart count of a run."""

_to_tuple = msgspec.structs.astuple


def rank_of(step: str) -> int:
    """Where a step stands among those of its run: as Slurm orders them, by their number."""
    rank = _RANKS.get(step)
    if rank is not None:
        return rank
    numbered = _NUMBERED.fullmatch(step)
    return int(numbered[1]) if numbered else -1


def row_of(line: Line) -> tuple[Any, ...]:
    """The row of a line: its rank, then its fields."""
    fields = zip(_TEXTS, _to_tuple(line), strict=True)
    return (
        rank_of(line.step),
        *[None if is_text and not value else value for is_text, value in fields],
    )


def line_of(row: Sequence[Any]) -> Line:
    """The line of a row with :data:`COLUMNS`."""
    fields: dict[str, Any] = {
        field: "" if is_text and value is None else value
        for field, is_text, value in zip(FIELDS, _TEXTS, row, strict=True)
    }
    return Line(**fields)


def used_by_steps(connection: Connection, cluster: str, run: RunKey3) -> list[Line]:
    """The lines of a run's steps, with what they used alone: there may be thousands.

    Args:
        connection: jobs.db.
        cluster: The cluster's name.
        run: Which run.
    """
    found = []
    for row in connection.execute(_STEPS, (cluster, *run)):
        fields: dict[str, Any] = {
            field: "" if is_text and value is None else value
            for field, is_text, value in zip(_SUMMED, _SUMMED_TEXTS, row, strict=True)
        }
        found.append(Line(**fields))
    return found


def drop_lines(connection: Connection, cluster: str, runs: Iterable[RunKey3]) -> None:
    """Forget the lines of these runs, their steps' and pieces' with them."""
    connection.executemany(_DROP, [(cluster, *run) for run in runs])


def widen(connection: Connection) -> None:
    """Give the table the columns that Line has got since it was made."""
    there = {row[1] for row in connection.execute("PRAGMA table_info(line)")}
    for field in FIELDS:
        if field not in there:
            connection.execute(f"ALTER TABLE line ADD COLUMN {_column(field)}")


def put_lines(connection: Connection, lines: Iterable[Line]) -> None:
    """Write lines over what is there of them, inside a transaction."""
    used: list[tuple[Any, ...]] = []
    unused: list[tuple[Any, ...]] = []
    for line in lines:
        row = row_of(line)
        if line.user_us is None and _to_tuple(line)[_FIRST_USED:_LAST_USED] == _UNUSED:
            unused.append((*row[: _FIRST_USED + 1], *row[_LAST_USED + 1 :]))
        else:
            used.append(row)
    for statement, rows in ((_PUT, used), (_PUT_FEWER, unused)):
        if not rows:
            continue
        try:
            connection.executemany(statement, rows)
        except OverflowError:
            # One number that does not fit must not cost a job its line.
            connection.executemany(statement, [_fitting(row) for row in rows])


def _fitting(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(max(-MOST, min(value, MOST)) if isinstance(value, int) else value for value in row)
