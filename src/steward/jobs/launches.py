"""Step launches in jobs.db: the table ``launch``, and which run each launch belongs to.

A launch is one step on one node, reported by the node's agent. :class:`LaunchFacts` merges its
reports, :class:`LaunchRow` is its row, and :func:`find_run` finds its run; the rest reads and
writes the tables ``launch`` and ``accounted`` (steps imported from slurmdbd).

Nodes know a job id and a time, but no submit time. A launch belongs to the run whose time contains
it, if that run is known to have had the node: a node may report only jobs that ran there. A run
has one launch of a step per node, the last that fits. A launch that fits no run is stored without
one until a later event shows where it belongs.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from steward.core.events import Event
from steward.core.records import UsageLine
from steward.core.sqlite import Connection
from steward.core.storage import Index, Table
from steward.core.timestamps import to_micros
from steward.core.usage import AccountedStep, ExitedTasks, Launch, StepEnd, StepStart, TaskUsage
from steward.jobs.compression import compress_json, decompress_json
from steward.jobs.identity import SLACK_US
from steward.jobs.lines import LaunchUsage, sum_reports
from steward.jobs.run_views import RunKey, RunView
from steward.slurm.nodelists import NodeListError, expand_nodelist

LaunchKey = tuple[str, str, int]
"""Key within a job id: step, node, launch time (µs since the epoch)."""

_T = TypeVar("_T", StepStart, StepEnd, TaskUsage)

USAGE_WITHDRAWN: Final = "-"
START_PUBLISHED: Final = "+"
START_WITHDRAWN: Final = "*"
"""Prefixes of :attr:`LaunchRow.published`: usage withdrawn, start published, start withdrawn."""

_MAX_UNSTORED_TASKS: Final = 8
"""Up to this many tasks, usage is summed on each read; for more tasks the sum is stored."""


class LaunchFacts(msgspec.Struct, array_like=True):
    """Everything reported about one launch.

    Attributes:
        start: Body of step.start, or None while missing.
        tasks: Usage of tasks by task id.
        end: Body of step.end, or None while missing.
        ended_us: Time of the end, µs since the epoch.
    """

    start: StepStart | None = None
    tasks: dict[int, TaskUsage] = msgspec.field(default_factory=dict)
    end: StepEnd | None = None
    ended_us: int | None = None

    def add_report(self, event: Event) -> None:
        """Add one report, in any order."""
        body: Launch = event.body
        if isinstance(body, StepStart):
            self.start = _choose_report(self.start, body)
        elif isinstance(body, ExitedTasks):
            for task in body.tasks:
                self.tasks[task.task] = _choose_report(self.tasks.get(task.task), task)
            self.tasks = dict(sorted(self.tasks.items()))
        elif isinstance(body, StepEnd):
            self.end = _choose_report(self.end, body)
            at_us = to_micros(event.at)
            self.ended_us = at_us if self.ended_us is None else min(at_us, self.ended_us)

    def blank_private_text(self) -> None:
        """Remove private text: the step's name."""
        if self.start is not None:
            self.start = msgspec.structs.replace(self.start, name="")


class LaunchRow(msgspec.Struct):
    """Row of the table ``launch``.

    Attributes:
        key: Key within its job id.
        run: Key of its run; None if unknown.
        piece_end_us: End (µs) of its piece of a resized job; 0 for the current size.
        ended: Whether its end was reported.
        last_report_us: Time of the last report, µs since the epoch.
        published: Digest of the last event published about it; "" for none. Begins with
            :data:`USAGE_WITHDRAWN` if its usage was withdrawn, with :data:`START_PUBLISHED` if
            only its start was published, with :data:`START_WITHDRAWN` if only that was published
            and then withdrawn.
        published_run: The run that the last event named, if the launch has moved to another run
            since.
        has_new_reports: Whether new reports came.
        is_dirty: Whether the row must be written.
        packed_facts: Stored form of the reports, compressed once the launch ended.
        packed_usage: Stored form of the usage, if the launch has many tasks.
        decoded_facts: The decoded reports; None until they are needed.
    """

    key: LaunchKey
    run: RunKey | None = None
    piece_end_us: int = 0
    ended: bool = False
    last_report_us: int = 0
    published: str = ""
    published_run: RunKey | None = None
    has_new_reports: bool = False
    is_dirty: bool = False
    packed_facts: bytes = b""
    packed_usage: bytes | None = None
    decoded_facts: LaunchFacts | None = None

    @property
    def facts(self) -> LaunchFacts:
        """Everything reported about it."""
        if self.decoded_facts is None:
            self.decoded_facts = _unpack(self.packed_facts) if self.packed_facts else LaunchFacts()
        return self.decoded_facts

    def sum_usage(self) -> LaunchUsage:
        """Return what the launch used."""
        if self.packed_usage is not None and not self.has_new_reports:
            return _decode_spent(self.packed_usage)
        facts = self.facts
        _step, node, launched_us = self.key
        return sum_reports(
            node, launched_us, facts.ended_us, facts.start, list(facts.tasks.values()), facts.end
        )

    def add_report(self, event: Event, now_us: int) -> None:
        """Add one report."""
        self.facts.add_report(event)
        self.ended = self.facts.end is not None
        self.last_report_us = now_us
        self.has_new_reports = self.is_dirty = True

    @property
    def is_published(self) -> bool:
        """Whether a published event about it is still valid."""
        return bool(self.published) and not self.published.startswith(
            (USAGE_WITHDRAWN, START_WITHDRAWN)
        )

    @property
    def is_only_start_published(self) -> bool:
        """Whether only its start was published."""
        return self.published.startswith(START_PUBLISHED)

    @property
    def has_usage(self) -> bool:
        """Whether its usage was ever published, even if withdrawn since."""
        return bool(self.published) and not self.published.startswith(
            (START_PUBLISHED, START_WITHDRAWN)
        )

    @property
    def restarts(self) -> int | None:
        """Restart count that the node reported, or None."""
        start = self.facts.start
        return None if start is None else start.restarts

    @property
    def uid(self) -> int | None:
        """Uid of the step's user as the node reported it, or None."""
        if self.packed_usage is not None and not self.has_new_reports:
            # Avoids unpacking thousands of tasks.
            return _decode_spent(self.packed_usage).uid
        start = self.facts.start
        return None if start is None else start.uid

    def assign(self, run_key: RunKey | None, piece_end_us: int) -> None:
        """Assign it to another run, or to another piece of its run."""
        if run_key != self.run and self.is_published and self.published_run is None:
            self.published_run = self.run
        elif run_key == self.published_run:
            self.published_run = None
        self.run, self.piece_end_us, self.is_dirty = run_key, piece_end_us, True


def find_run(launch: LaunchRow, runs: Sequence[RunView]) -> RunView | None:
    """Return the run of a launch, or None if it fits none.

    Args:
        launch: The launch.
        runs: All runs of the job id.
    """
    _step, node, launched_us = launch.key
    candidates = [
        run
        for run in runs
        if _contains_time(run, launched_us) and _has_node(run, node) and _has_same_user(run, launch)
    ]
    if len(candidates) > 1:
        restarts = launch.restarts
        candidates = [run for run in candidates if run.run.restarts == restarts] or candidates
    # Of several candidates, the one that began last.
    return max(candidates, key=_get_begin_us, default=None)


def _get_begin_us(run: RunView) -> int:
    """Return the start of a run, or its submit time if it has none."""
    start = run.record.start
    return run.run.submit_us if start is None else to_micros(start)


def _contains_time(run: RunView, launched_us: int) -> bool:
    """Return True if a launch time lies within a run, with some tolerance."""
    if run.is_over and run.record.start is None and run.has_reported_end:
        return False
    if launched_us < _get_begin_us(run) - SLACK_US:
        return False
    end = run.record.end
    latest_us = to_micros(end) if end is not None else run.until_us
    return latest_us is None or launched_us <= latest_us + SLACK_US


def _has_node(run: RunView, node: str) -> bool:
    """Return True if a run is known to have had a node."""
    return any(node == nodes or node in _expand_nodes(nodes) for nodes in run.list_nodelists())


def _has_same_user(run: RunView, launch: LaunchRow) -> bool:
    """Return True unless run and launch have different uids."""
    uid = run.record.uid
    return uid is None or launch.uid in (None, uid)


@functools.lru_cache(maxsize=64)
def _expand_nodes(nodelist: str) -> frozenset[str]:
    """Expand a node list; empty if malformed."""
    try:
        return frozenset(expand_nodelist(nodelist))
    except NodeListError:
        return frozenset()


def _choose_report(old: _T | None, new: _T) -> _T:
    """Choose between two versions of one report, always the same one."""
    if old is None or old == new:
        return new
    return max(old, new, key=msgspec.json.encode)


_encode = msgspec.json.Encoder().encode
_decode_facts = msgspec.json.Decoder(LaunchFacts).decode
_decode_line = msgspec.json.Decoder(UsageLine).decode
_decode_spent = msgspec.json.Decoder(LaunchUsage).decode


def _unpack(stored: bytes) -> LaunchFacts:
    """Decode stored facts, which are compressed once the launch ended."""
    return _decode_facts(decompress_json(stored))


class _StoredLaunch(msgspec.Struct, frozen=True):
    """Row of the table ``launch``: ``said`` is :attr:`LaunchRow.published`."""

    cluster: str
    job_id: int
    step: str
    node: str
    launched: int
    submit: int | None
    restarts: int | None
    piece: int
    ended: bool
    seen_at: int
    said: str | None
    summed: bytes | None
    facts: bytes


class _StoredStep(msgspec.Struct, frozen=True):
    """Row of the table ``accounted``: a step that was imported."""

    cluster: str
    job_id: int
    submit: int
    step: str
    line: bytes


LAUNCHES: Final = Table(
    *(_StoredLaunch, "launch"),
    unique="cluster, job_id, step, node, launched",
    indexes={
        "unattributed": Index("launched", where="submit IS NULL"),
        "unended": Index("launched", where="ended = 0"),
    },
)
ACCOUNTED: Final = Table(_StoredStep, "accounted", key="cluster, job_id, submit, step")
_PUT: Final = LAUNCHES.build_upsert()


def load_accounted(
    connection: Connection, cluster: str, job_ids: Iterable[int]
) -> dict[int, list[UsageLine]]:
    """Load imported step lines by job id; each line has its run's submit time."""
    rows = connection.execute(
        "SELECT job_id, line FROM accounted WHERE cluster = ? "
        "AND job_id IN (SELECT value FROM json_each(?)) ORDER BY job_id, submit, step",
        (cluster, _encode(list(job_ids)).decode()),
    )
    lines_by_id: dict[int, list[UsageLine]] = {}
    for job_id, line in rows:
        lines_by_id.setdefault(job_id, []).append(_decode_line(line))
    return lines_by_id


def put_accounted(connection: Connection, cluster: str, steps: Iterable[AccountedStep]) -> None:
    """Store the lines of steps that were imported from other accounting."""
    rows = []
    for step in steps:
        submit_us = to_micros(step.submit.replace(microsecond=0))
        line = msgspec.structs.replace(step.line, submit_us=submit_us)
        rows.append(_StoredStep(cluster, step.job_id, submit_us, line.step, _encode(line)))
    if rows:
        ACCOUNTED.insert_all(connection, rows, "replace")


def load_launches(
    connection: Connection, cluster: str, job_ids: Iterable[int]
) -> dict[int, dict[LaunchKey, LaunchRow]]:
    """Load all launches of these job ids."""
    rows = connection.execute(
        f"SELECT {LAUNCHES.select_list} FROM launch WHERE cluster = ? "  # noqa: S608 -- our own columns
        "AND job_id IN (SELECT value FROM json_each(?))",
        (cluster, _encode(list(job_ids)).decode()),
    )
    return _group_rows(rows)


def load_steps(
    connection: Connection, cluster: str, steps: Iterable[tuple[int, str]]
) -> dict[int, dict[LaunchKey, LaunchRow]]:
    """Load all launches of these steps, each given as (job id, step)."""
    rows = connection.execute(
        f"SELECT {LAUNCHES.select_list} FROM launch WHERE cluster = ? AND (job_id, step) IN "  # noqa: S608 -- our own columns
        "(SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?))",
        (cluster, _encode(list(steps)).decode()),
    )
    return _group_rows(rows)


def _group_rows(rows: Iterable[tuple[Any, ...]]) -> dict[int, dict[LaunchKey, LaunchRow]]:
    """Group the launches of a query by job id."""
    launches_by_id: dict[int, dict[LaunchKey, LaunchRow]] = {}
    for row in rows:
        job_id, launch = row_to_launch(row)
        launches_by_id.setdefault(job_id, {})[launch.key] = launch
    return launches_by_id


def row_to_launch(values: Sequence[Any]) -> tuple[int, LaunchRow]:
    """Convert a row of the table into job id and launch."""
    row = _StoredLaunch(*values)
    return row.job_id, LaunchRow(
        key=(row.step, row.node, row.launched),
        run=None if row.submit is None or row.restarts is None else (row.submit, row.restarts),
        piece_end_us=row.piece,
        ended=bool(row.ended),
        last_report_us=row.seen_at,
        published=row.said or "",
        packed_facts=row.facts,
        packed_usage=row.summed,
    )


def put_launches(
    connection: Connection, cluster: str, job_id: int, launches: Iterable[LaunchRow]
) -> None:
    """Write launches, inside a transaction."""
    connection.executemany(_PUT, [_to_row(cluster, job_id, launch) for launch in launches])


def _to_row(cluster: str, job_id: int, launch: LaunchRow) -> tuple[object, ...]:
    """Convert a launch to the values of its row."""
    if launch.decoded_facts is not None:
        encoded_facts = _encode(launch.decoded_facts)
        launch.packed_facts = (
            compress_json(encoded_facts, is_final=True) if launch.ended else encoded_facts
        )
        has_many_tasks = len(launch.decoded_facts.tasks) > _MAX_UNSTORED_TASKS
        launch.packed_usage = _encode(launch.sum_usage()) if has_many_tasks else None
        launch.has_new_reports = False
    submit, restarts = launch.run or (None, None)
    return (
        *(cluster, job_id, *launch.key, submit, restarts, launch.piece_end_us, int(launch.ended)),
        *(
            launch.last_report_us,
            launch.published or None,
            launch.packed_usage,
            launch.packed_facts,
        ),
    )
