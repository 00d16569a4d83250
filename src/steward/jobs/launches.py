"""Launches of steps in jobs.db, and which run each was of.

Nodes know a job id and a time, no submit time. A launch belongs to the run in
whose time it lies, if that run is known to have had the node: a node may report
only on jobs that ran there. A run has one launch of a step on a node, the last that
fits it. What fits no run is kept, unattributed, until a later fact shows where it belongs.
"""

import functools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from steward.core.events import Event
from steward.core.records import Line
from steward.core.sqlite import Connection
from steward.core.timestamps import micros
from steward.core.usage import Launch, StepAccounted, StepEnd, StepStart, TasksExited, TaskUsage
from steward.jobs.identity import SLACK_US
from steward.jobs.lines import Spent, sum_up
from steward.jobs.run_views import RunKey, RunView
from steward.slurm.nodelists import NodeListError, expand

LaunchKey = tuple[str, str, int]
"""Step, node, and when it was launched (µs since the epoch)."""

_T = TypeVar("_T", StepStart, StepEnd, TaskUsage)

WITHDRAWN: Final = "-"
ANNOUNCED: Final = "+"
RETRACTED: Final = "*"
"""An announcement that was withdrawn."""

_FEW: Final = 8
"""Of so many tasks what they used together is summed up anew, of more it is stored, too."""


class LaunchFacts(msgspec.Struct, array_like=True):
    """All that was told of one launch.

    Attributes:
        start: What step.start said; None while that is not there.
        tasks: What is known of tasks, by their ids.
        end: What step.end said.
        ended_us: When that was, µs since the epoch.
    """

    start: StepStart | None = None
    tasks: dict[int, TaskUsage] = msgspec.field(default_factory=dict)
    end: StepEnd | None = None
    ended_us: int | None = None

    def add(self, event: Event) -> None:
        """Take in one more fact of it, in any order."""
        body: Launch = event.body
        if isinstance(body, StepStart):
            self.start = _better(self.start, body)
        elif isinstance(body, TasksExited):
            for task in body.tasks:
                self.tasks[task.task] = _better(self.tasks.get(task.task), task)
            self.tasks = dict(sorted(self.tasks.items()))
        elif isinstance(body, StepEnd):
            self.end = _better(self.end, body)
            at_us = micros(event.at)
            self.ended_us = at_us if self.ended_us is None else min(at_us, self.ended_us)

    def blank(self) -> None:
        """Forget what a person named."""
        if self.start is not None:
            self.start = msgspec.structs.replace(self.start, name="")


class LaunchRow(msgspec.Struct):
    """A launch as it is stored.

    Attributes:
        key: Its name within the job's id.
        run: The run that it is of; None if that is not known.
        piece_us: The end of the piece of a resized job that it is of; 0 for the current size.
        ended: Whether its end was told.
        seen_us: When the last fact of it came, µs since the epoch.
        said: Digest of all that was said of it; "" for nothing. Begins with :data:`WITHDRAWN`
            where that was taken back, with :data:`ANNOUNCED` where only the begin was said, with
            :data:`RETRACTED` where only that was said and was taken back.
        said_of: The run that it was said to be of, where it is none of that one any more.
        is_news: Whether facts have come.
        is_dirty: Whether it is to be written.
    """

    key: LaunchKey
    run: RunKey | None = None
    piece_us: int = 0
    ended: bool = False
    seen_us: int = 0
    said: str = ""
    said_of: RunKey | None = None
    is_news: bool = False
    is_dirty: bool = False
    packed: bytes = b""
    summed: bytes | None = None
    open_facts: LaunchFacts | None = None

    @property
    def facts(self) -> LaunchFacts:
        """All that was told of it."""
        if self.open_facts is None:
            self.open_facts = _unpack(self.packed) if self.packed else LaunchFacts()
        return self.open_facts

    def spent(self) -> Spent:
        """What it used."""
        if self.summed is not None and not self.is_news:
            return _decode_spent(self.summed)
        facts = self.facts
        _step, node, launched_us = self.key
        return sum_up(
            node, launched_us, facts.ended_us, facts.start, list(facts.tasks.values()), facts.end
        )

    def add(self, event: Event, now_us: int) -> None:
        """Take in one more fact of it."""
        self.facts.add(event)
        self.ended = self.facts.end is not None
        self.seen_us = now_us
        self.is_news = self.is_dirty = True

    @property
    def is_said(self) -> bool:
        """Whether anything is said of it that holds."""
        return bool(self.said) and not self.said.startswith((WITHDRAWN, RETRACTED))

    @property
    def is_announced(self) -> bool:
        """Whether its begin alone is said."""
        return self.said.startswith(ANNOUNCED)

    @property
    def has_usage(self) -> bool:
        """Whether its usage was ever said, also where that was taken back."""
        return bool(self.said) and not self.said.startswith((ANNOUNCED, RETRACTED))

    @property
    def restarts(self) -> int | None:
        """The restart count that the node told; None where it did not."""
        start = self.facts.start
        return None if start is None else start.restarts

    @property
    def uid(self) -> int | None:
        """The user whose step it was, as the node told; None where it did not."""
        if self.summed is not None and not self.is_news:
            # Its thousand tasks are not looked at for that.
            return _decode_spent(self.summed).uid
        start = self.facts.start
        return None if start is None else start.uid

    def move(self, run: RunKey | None, piece_us: int) -> None:
        """Put it to another run, or to another piece of its own."""
        if run != self.run and self.is_said and self.said_of is None:
            self.said_of = self.run
        elif run == self.said_of:
            self.said_of = None
        self.run, self.piece_us, self.is_dirty = run, piece_us, True


def run_of(row: LaunchRow, runs: Sequence[RunView]) -> RunView | None:
    """The run that a launch was of; None if it fits none.

    Args:
        row: The launch.
        runs: All runs of the job's id.
    """
    _step, node, launched_us = row.key
    found = [
        run
        for run in runs
        if _holds(run, launched_us) and _has_node(run, node) and _is_users(run, row)
    ]
    if len(found) > 1:
        restarts = row.restarts
        found = [run for run in found if run.run.restarts == restarts] or found
    # Of those that it may be the one that began last before it.
    return max(found, key=_begin_us, default=None)


def _begin_us(run: RunView) -> int:
    start = run.record.start
    return run.run.submit_us if start is None else micros(start)


def _holds(run: RunView, launched_us: int) -> bool:
    if run.is_over and run.record.start is None and run.is_sure:
        return False
    if launched_us < _begin_us(run) - SLACK_US:
        return False
    end = run.record.end
    until_us = micros(end) if end is not None else run.until_us
    return until_us is None or launched_us <= until_us + SLACK_US


def _has_node(run: RunView, node: str) -> bool:
    return any(node == nodes or node in _nodes(nodes) for nodes in run.nodelists())


def _is_users(run: RunView, row: LaunchRow) -> bool:
    uid = run.record.uid
    return uid is None or row.uid in (None, uid)


@functools.lru_cache(maxsize=64)
def _nodes(nodelist: str) -> frozenset[str]:
    try:
        return frozenset(expand(nodelist))
    except NodeListError:
        return frozenset()


def _better(known: _T | None, new: _T) -> _T:
    """Of the same fact told twice in different words always the same one."""
    if known is None or known == new:
        return new
    return max(known, new, key=msgspec.json.encode)


_encode = msgspec.json.Encoder().encode
_decode_facts = msgspec.json.Decoder(LaunchFacts).decode
_decode_line = msgspec.json.Decoder(Line).decode
_decode_spent = msgspec.json.Decoder(Spent).decode


def _unpack(stored: bytes) -> LaunchFacts:
    return _decode_facts(stored if stored.startswith(b"[") else zlib.decompress(stored))


COLUMNS: Final = (
    "job_id, step, node, launched, submit, restarts, piece, ended, seen_at, said, summed, facts"
)
"""Of the table ``launch``: what :func:`launch_of` reads."""

_PUT: Final = (
    f"INSERT INTO launch (cluster, {COLUMNS}) VALUES ({', '.join('?' * 13)}) "  # noqa: S608 -- our own columns
    "ON CONFLICT (cluster, job_id, step, node, launched) DO UPDATE SET submit = excluded.submit, "
    "restarts = excluded.restarts, piece = excluded.piece, ended = excluded.ended, "
    "seen_at = excluded.seen_at, said = excluded.said, summed = excluded.summed, "
    "facts = excluded.facts"
)


def load_accounted(
    connection: Connection, cluster: str, job_ids: Iterable[int]
) -> dict[int, list[Line]]:
    """What others' books tell of the steps of these jobs; each line has its run's submit time."""
    rows = connection.execute(
        "SELECT job_id, line FROM accounted WHERE cluster = ? "
        "AND job_id IN (SELECT value FROM json_each(?)) ORDER BY job_id, submit, step",
        (cluster, _encode(list(job_ids)).decode()),
    )
    found: dict[int, list[Line]] = {}
    for job_id, line in rows:
        found.setdefault(job_id, []).append(_decode_line(line))
    return found


def put_accounted(connection: Connection, cluster: str, facts: StepAccounted) -> None:
    """Keep what another's books tell of a step."""
    submit_us = micros(facts.submit.replace(microsecond=0))
    line = msgspec.structs.replace(facts.line, submit_us=submit_us)
    connection.execute(
        "INSERT OR REPLACE INTO accounted (cluster, job_id, submit, step, line) "
        "VALUES (?, ?, ?, ?, ?)",
        (cluster, facts.job_id, submit_us, line.step, _encode(line)),
    )


def load_launches(
    connection: Connection, cluster: str, job_ids: Iterable[int]
) -> dict[int, dict[LaunchKey, LaunchRow]]:
    """All launches of these jobs."""
    rows = connection.execute(
        f"SELECT {COLUMNS} FROM launch WHERE cluster = ? "  # noqa: S608 -- our own columns
        "AND job_id IN (SELECT value FROM json_each(?))",
        (cluster, _encode(list(job_ids)).decode()),
    )
    return _rows(rows)


def load_steps(
    connection: Connection, cluster: str, steps: Iterable[tuple[int, str]]
) -> dict[int, dict[LaunchKey, LaunchRow]]:
    """All launches of these steps, each given by its job id and its name."""
    rows = connection.execute(
        f"SELECT {COLUMNS} FROM launch WHERE cluster = ? AND (job_id, step) IN "  # noqa: S608 -- our own columns
        "(SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?))",
        (cluster, _encode(list(steps)).decode()),
    )
    return _rows(rows)


def _rows(rows: Iterable[tuple[Any, ...]]) -> dict[int, dict[LaunchKey, LaunchRow]]:
    found: dict[int, dict[LaunchKey, LaunchRow]] = {}
    for row in rows:
        job_id, launch = launch_of(row)
        found.setdefault(job_id, {})[launch.key] = launch
    return found


def launch_of(row: tuple[Any, ...]) -> tuple[int, LaunchRow]:
    """A row of the table: job id, and what is stored of the launch."""
    job_id, step, node, launched, submit, restarts, piece, ended, seen, said, summed, facts = row
    run = None if submit is None else (submit, restarts)
    fields = ((step, node, launched), run, piece, bool(ended), seen, said or "")
    return job_id, LaunchRow(*fields, packed=facts, summed=summed)


def put_launches(
    connection: Connection, cluster: str, job_id: int, rows: Iterable[LaunchRow]
) -> None:
    """Write launches, inside a transaction."""
    connection.executemany(_PUT, [_to_row(cluster, job_id, row) for row in rows])


def _to_row(cluster: str, job_id: int, row: LaunchRow) -> tuple[object, ...]:
    if row.open_facts is not None:
        data = _encode(row.open_facts)
        row.packed = zlib.compress(data, 1) if row.ended else data
        is_many = len(row.open_facts.tasks) > _FEW
        row.summed = _encode(row.spent()) if is_many else None
        row.is_news = False
    submit, restarts = row.run or (None, None)
    return (
        *(cluster, job_id, *row.key, submit, restarts, row.piece_us, int(row.ended)),
        *(row.seen_us, row.said or None, row.summed, row.packed),
    )
