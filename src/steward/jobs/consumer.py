"""Jobs consumer: applies events to jobs.db and assigns scripts, records and runs to jobs.

:class:`JobsConsumer` is the only place that decides which job a script, record or run belongs to.
Each event re-resolves everything known about its job id, so events may arrive late, twice and in
any order. The consumer also appends events of its own (job.identity, run.start, run.end,
step.usage …), through an outbox.

:meth:`JobsConsumer.apply` validates the batch, appends what the outbox still holds from before a
crash, and then in one transaction loads the group of each job id, adds the events, resolves the
groups into jobs, makes the new events, and writes groups and outbox. After the commit the outbox
appends the events and moves the cursor. :meth:`JobsConsumer.tick` does the same for job ids whose
waiting time is over (table ``due``: an end without a time, a launch without an end) and for runs
stored before the table of lines existed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import groupby
from typing import Final

from steward.core.config import Settings
from steward.core.consumers import Append
from steward.core.events import (
    ACCOUNTING_EXPIRE,
    ARCHIVE_PURGE,
    JOB_END,
    JOB_MISSED,
    JOB_SCRIPT,
    JOB_SEEN,
    JOB_STATE,
    NODE_GAP,
    STEP_ACCOUNTED,
    STEP_END,
    STEP_START,
    TASK_EXIT,
    ArchivePurge,
    Event,
    MissedJobs,
    utc_now,
)
from steward.core.sqlite import Connection, open_database, transaction, translate_errors
from steward.core.timestamps import to_micros
from steward.core.usage import AccountedStep, AccountingExpiry, Launch
from steward.jobs.event_intake import add_event, get_job_id, validate_event
from steward.jobs.identity import resolve_jobs
from steward.jobs.launches import load_steps, put_accounted
from steward.jobs.lines import add_missing_columns
from steward.jobs.outbox import Outbox
from steward.jobs.retention import LeaderScripts, drop_expired_events, expire_jobs, forget_scripts
from steward.jobs.run_books import AccountingUpdate
from steward.jobs.run_events import make_identity_events
from steward.jobs.tables import (
    MIGRATIONS,
    JobIdGroup,
    database_path,
    find_known_ids,
    load_groups,
    put_gap,
    put_missed,
)
from steward.jobs.writes import WriteBatch

_CHUNK: Final = 500

_LONE_KINDS: Final = frozenset({ARCHIVE_PURGE, ACCOUNTING_EXPIRE, NODE_GAP, JOB_MISSED})


class JobsConsumer:
    """Consumer ``jobs``: keeps jobs.db; see ``steward.core.consumers.Consumer``.

    Args:
        settings: The configuration; the database is ``jobs.db`` in its state_dir.
        clock: Returns the present time.

    Raises:
        SqliteError: The database cannot be used.
        SqliteUnavailable: The database cannot be used now. Retry later.
    """

    name = "jobs"
    kinds = frozenset(
        {
            *(JOB_SCRIPT, JOB_SEEN, JOB_STATE, JOB_END, ARCHIVE_PURGE),
            *(STEP_START, TASK_EXIT, STEP_END, STEP_ACCOUNTED, NODE_GAP, JOB_MISSED),
            ACCOUNTING_EXPIRE,
        }
    )
    batch_events = 500

    def __init__(self, settings: Settings, clock: Callable[[], datetime] = utc_now) -> None:
        self._path = database_path(settings.state_dir)
        self._clock = clock
        self._connection = open_database(self._path, MIGRATIONS)
        with translate_errors(self._path):
            # Overwrite replaced and deleted data, so that a purge leaves no copy in a free page.
            self._connection.execute("PRAGMA secure_delete=ON")
            add_missing_columns(self._connection)
            self._outbox = Outbox(self._connection, self._path)
        self._is_backfilled = False

    def cursor(self) -> int:
        """Return the journal position of the last applied event; 0 at first."""
        with translate_errors(self._path):
            (position,) = self._connection.execute("SELECT position FROM cursor").fetchone()
        return int(position)

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        """Apply events, append the resulting events, and move the cursor to ``upto``.

        Raises:
            SqliteUnavailable: The database cannot be written now.
            Rejected: An event's body is not what its kind promises.
        """
        for event in events:
            validate_event(event)
        self._outbox.send(append)
        with self._durable() as connection:
            said: list[Event] = []
            for kind, stretch in groupby(events, _get_lone_kind):
                if kind == ARCHIVE_PURGE:
                    said += self._purge(stretch)
                elif kind:
                    for event in stretch:
                        self._note(event)
                else:
                    said += self._take_in(list(stretch))
            if said:
                self._outbox.put(said)
            else:
                connection.execute("UPDATE cursor SET position = ?", (upto,))
        if said:
            self._outbox.send(append, upto, said)
        if any(event.kind == ARCHIVE_PURGE for event in events):
            with translate_errors(self._path):
                # Purged text must not stay in the WAL until something overwrites it.
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def tick(self, append: Append) -> float:
        """Re-resolve job ids whose waiting time is over; return seconds until the next call.

        Raises:
            SqliteUnavailable: The database cannot be written now.
        """
        self._outbox.send(append)
        with translate_errors(self._path):
            due = self._due()
            untold = {} if due or self._is_backfilled else self._untold()
            self._is_backfilled = not due and not untold
        if not due and not untold:
            return self._until_due_s()
        with self._durable():
            said: list[Event] = []
            for cluster, job_ids in (due or untold).items():
                writes = WriteBatch(self._connection)
                groups = load_groups(self._connection, cluster, job_ids)
                for group in groups.values():
                    group.is_whole = group.is_due = True
                said += self._settle(
                    cluster, groups.values(), writes, self._clock(), is_silent=not due
                )
                writes.flush()
            if said:
                self._outbox.put(said)
        self._outbox.send(append, events=said)
        return 0.0

    def _due(self) -> dict[str, list[int]]:
        """Return job ids whose waiting time is over, by cluster."""
        rows = self._connection.execute(
            "SELECT cluster, job_id FROM due WHERE at <= ? ORDER BY at LIMIT ?",
            (to_micros(self._clock()), _CHUNK),
        )
        return _group_by_cluster(rows)

    def _untold(self) -> dict[str, list[int]]:
        """Return job ids with runs that have no line, because they are older than the lines."""
        rows = self._connection.execute(
            "SELECT DISTINCT cluster, job_id FROM run WHERE told IS NULL LIMIT ?", (_CHUNK,)
        )
        return _group_by_cluster(rows)

    def _until_due_s(self) -> float:
        """Return seconds until the next job id is due, at most an hour."""
        (at_us,) = self._connection.execute("SELECT min(at) FROM due").fetchone()
        if at_us is None:
            return 3600.0
        wait_s: float = (at_us - to_micros(self._clock())) / 1e6
        return min(3600.0, max(0.1, wait_s))

    @contextmanager
    def _durable(self) -> Iterator[Connection]:
        """Open a transaction that survives a power loss, because the journal will hold its results.

        Other transactions are not synced: the journal replays what a power loss takes of them.
        """
        with translate_errors(self._path):
            self._connection.execute("PRAGMA synchronous=FULL")
        try:
            with transaction(self._connection, self._path) as connection:
                yield connection
        finally:
            self._connection.execute("PRAGMA synchronous=NORMAL")

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def _take_in(self, events: Sequence[Event]) -> list[Event]:
        """Add events to the groups of their job ids; return the events to append."""
        by_cluster: dict[str, dict[int, list[Event]]] = {}
        for event in events:
            by_id = by_cluster.setdefault(event.cluster, {})
            by_id.setdefault(get_job_id(event), []).append(event)
        said: list[Event] = []
        now = self._clock()
        now_us = to_micros(now)
        writes = WriteBatch(self._connection)
        for cluster, by_id in by_cluster.items():
            seen_before = find_known_ids(self._connection, cluster, by_id)
            news = {}
            for job_id, of_job in by_id.items():
                event = of_job[0]
                if len(of_job) == 1 and event.kind == JOB_SCRIPT and job_id not in seen_before:
                    writes.put_new(cluster, event.key, event.body)
                else:
                    news[job_id] = of_job
            groups = self._load(cluster, news) if news else {}
            for job_id, group in groups.items():
                for event in drop_expired_events(self._connection, cluster, group, news[job_id]):
                    if isinstance(event.body, AccountedStep):
                        put_accounted(self._connection, cluster, event.body)
                    add_event(group, event, now_us)
            said += self._settle(cluster, groups.values(), writes, now)
        writes.flush()
        return said

    def _load(self, cluster: str, news: dict[int, list[Event]]) -> dict[int, JobIdGroup]:
        """Load the groups of some job ids, with the launches of the steps that events concern."""
        groups = load_groups(self._connection, cluster, news)
        steps = {
            (job_id, event.body.step)
            for job_id, events in news.items()
            for event in events
            if isinstance(event.body, Launch)
        }
        if steps:
            for job_id, launches in load_steps(self._connection, cluster, steps).items():
                groups[job_id].launches = launches
        return groups

    def _settle(
        self,
        cluster: str,
        groups: Iterable[JobIdGroup],
        writes: WriteBatch,
        now: datetime,
        *,
        is_silent: bool = False,
    ) -> list[Event]:
        """Resolve groups into jobs and collect the rows to write; return the events to append.

        ``is_silent`` suppresses events about ended runs, see
        :meth:`steward.jobs.run_events.RunEventMaker.run`.
        """
        said: list[Event] = []
        leaders = LeaderScripts(self._connection, cluster)
        resolved = [
            (group, resolve_jobs(list(group.runs.values()), list(group.scripts.values())))
            for group in groups
        ]
        leaders.look_up(job.record for _group, jobs in resolved for job in jobs)
        settled = [
            (group, jobs, [leaders.is_purged(job) for job in jobs]) for group, jobs in resolved
        ]
        for group, jobs, purged in settled:
            for job, is_purged in zip(jobs, purged, strict=True):
                if is_purged:
                    for run in job.runs:
                        run.blank()
                        group.dirty_runs.add((run.submit_us, run.restarts))
                elif job.record is not None and job.scripts:
                    said += make_identity_events(group, job, job.record, now)
        said += AccountingUpdate(self._connection, now, is_silent=is_silent).settle(
            cluster, settled
        )
        for group, jobs, purged in settled:
            writes.put(group, jobs, purged)
        return said

    def _note(self, event: Event) -> None:
        """Apply an event that concerns no single job id."""
        if isinstance(event.body, AccountingExpiry):
            expire_jobs(self._connection, event.cluster, event.body.before)
        elif isinstance(event.body, MissedJobs):
            put_missed(self._connection, event)
        else:
            put_gap(self._connection, event)

    def _purge(self, events: Iterable[Event]) -> list[Event]:
        """Purge scripts; return the events to append."""
        said: list[Event] = []
        for event in events:
            body: ArchivePurge = event.body
            if body.sink:
                continue
            keys = body.script_keys
            for start in range(0, len(keys), _CHUNK):
                chunk = keys[start : start + _CHUNK]
                for groups in forget_scripts(self._connection, event.cluster, chunk, _CHUNK):
                    writes = WriteBatch(self._connection)
                    said += self._settle(event.cluster, groups, writes, event.seen_at)
                    writes.flush()
        return said


def _get_lone_kind(event: Event) -> str:
    """Return the kind of an event that concerns no single job id; "" for all others."""
    return event.kind if event.kind in _LONE_KINDS else ""


def _group_by_cluster(rows: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Group job ids by cluster."""
    found: dict[str, list[int]] = {}
    for cluster, job_id in rows:
        found.setdefault(cluster, []).append(job_id)
    return found
