"""Jobs consumer: applies events to jobs.db and assigns scripts, records and runs to jobs.

:class:`JobsConsumer` is the only place that decides which job a script, record or run belongs to.
Each event re-resolves everything known about its job id, so events may arrive late, twice and in
any order. The consumer also appends events (job.identity, run.start, run.end,
step.usage …), through an outbox.

:meth:`JobsConsumer.apply` validates the batch, appends what the outbox still holds from before a
crash, and then in one transaction loads the group of each job id, adds the events, resolves the
groups into jobs, makes the new events, and writes groups, outbox and cursor. After the commit it
appends the events. :meth:`JobsConsumer.tick` does the same for job ids whose waiting time is over
(table ``due``: an end without a time, a launch without an end) and for runs stored before the table
of lines existed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import groupby
from typing import Final

from steward.core.config import Settings
from steward.core.consumers import Append, DatabaseConsumer, Rejected
from steward.core.events import (
    ACCOUNTING_EXPIRE,
    ARCHIVE_PURGE,
    JOB_END,
    JOB_MISSED,
    JOB_SCRIPT,
    JOB_SEEN,
    JOB_STATE,
    JOBS_IMPORTED,
    NODE_GAP,
    STEP_ACCOUNTED,
    STEP_END,
    STEP_START,
    TASK_EXIT,
    ArchivePurge,
    Event,
    EventError,
    MissedJobs,
    utc_now,
)
from steward.core.imported import unpack_event
from steward.core.sqlite import Database, translate_errors
from steward.core.timestamps import to_micros
from steward.core.usage import AccountedStep, AccountingExpiry, Launch
from steward.jobs.accounting_update import AccountingUpdate
from steward.jobs.day_sums import add_cluster, continue_rebuild, find_incomplete_cluster
from steward.jobs.event_intake import add_event, get_job_id, validate_event
from steward.jobs.identity import resolve_jobs
from steward.jobs.launches import load_steps, put_accounted
from steward.jobs.lines import add_missing_columns
from steward.jobs.retention import LeaderScripts, drop_expired_events, expire_jobs, purge_scripts
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


class JobsConsumer(DatabaseConsumer):
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
            *(ACCOUNTING_EXPIRE, JOBS_IMPORTED),
        }
    )
    gather_s = 0.05
    has_outbox = True

    def __init__(self, settings: Settings, clock: Callable[[], datetime] = utc_now) -> None:
        self._path = database_path(settings.state_dir)
        self._clock = clock
        super().__init__(Database(self._path, MIGRATIONS))
        with translate_errors(self._path):
            # Overwrite replaced and deleted data, so that a purge leaves no copy in a free page.
            self._connection.execute("PRAGMA secure_delete=ON")
            add_missing_columns(self._connection)
        self._is_backfilled = False
        self._zones = {name: cluster.timezone for name, cluster in settings.cluster.items()}
        with translate_errors(self._path), self._database.transaction():
            summed = self._connection.execute("SELECT cluster FROM summed").fetchall()
            for cluster in {*self._zones, *(name for (name,) in summed)}:
                self._sum_cluster(cluster)

    def apply(self, events: Sequence[Event], upto: int, append: Append) -> None:
        """Apply events, append the resulting events, and move the cursor to ``upto``.

        Raises:
            SqliteUnavailable: The database cannot be written now.
            Rejected: An event's body is not what its kind promises.
        """
        events = list(_unpack_events(events))
        super().apply(events, upto, append)
        if any(event.kind == ARCHIVE_PURGE for event in events):
            with translate_errors(self._path):
                # Purged text must not stay in the WAL until something overwrites it.
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _apply_events(self, events: Sequence[Event]) -> Sequence[Event]:
        new_events: list[Event] = []
        for kind, same_kind in groupby(events, _get_lone_kind):
            if kind == ARCHIVE_PURGE:
                new_events += self._purge_scripts(same_kind)
            elif kind:
                for event in same_kind:
                    self._apply_lone_event(event)
            else:
                new_events += self._apply_job_events(list(same_kind))
        return new_events

    def tick(self, append: Append) -> float:
        """Re-resolve job ids whose waiting time is over; return seconds until the next call.

        Raises:
            SqliteUnavailable: The database cannot be written now.
        """
        self._send_events(append)
        with translate_errors(self._path):
            wait_s = self._get_wait_s()
            due = {} if wait_s > 0 else self._list_due()
            unpublished = {} if due or self._is_backfilled else self._list_unpublished()
            self._is_backfilled = not due and not unpublished
        if not due and not unpublished:
            return 0.0 if self._continue_rebuild() else max(wait_s, 0.1)
        with self._open_transaction() as new_events:
            for cluster, job_ids in (due or unpublished).items():
                writes = WriteBatch(self._connection)
                groups = load_groups(self._connection, cluster, job_ids)
                for group in groups.values():
                    group.needs_rebuild = group.is_due = True
                new_events.extend(
                    self._resolve_groups(
                        cluster, groups.values(), writes, self._clock(), is_silent=not due
                    )
                )
                writes.flush()
        self._send_events(append)
        return 0.0

    def _sum_cluster(self, cluster: str) -> None:
        """Begin the day sums of a cluster, or cut them again if its zone changed."""
        add_cluster(self._connection, cluster, self._zones.get(cluster, ""))

    def _continue_rebuild(self) -> bool:
        """Sum some lines of a cluster whose zone changed; return False if there is none."""
        with translate_errors(self._path):
            summed = find_incomplete_cluster(self._connection)
        if summed is None:
            return False
        with self._database.transaction():
            continue_rebuild(self._connection, summed)
        return True

    def _list_due(self) -> dict[str, list[int]]:
        """Return job ids whose waiting time is over, by cluster."""
        rows = self._connection.execute(
            # With a bound LIMIT, SQLite would compile the statement again at each use.
            f"SELECT cluster, job_id FROM due WHERE at <= ? ORDER BY at LIMIT {_CHUNK}",  # noqa: S608 -- a number
            (to_micros(self._clock()),),
        )
        return _group_by_cluster(rows)

    def _list_unpublished(self) -> dict[str, list[int]]:
        """Return job ids with runs that have no line, because they are older than the lines."""
        rows = self._connection.execute(
            "SELECT DISTINCT cluster, job_id FROM run WHERE told IS NULL LIMIT ?", (_CHUNK,)
        )
        return _group_by_cluster(rows)

    def _get_wait_s(self) -> float:
        """Return seconds until the next job id is due, 0 if one is, at most an hour."""
        (at_us,) = self._connection.execute("SELECT min(at) FROM due").fetchone()
        if at_us is None:
            return 3600.0
        wait_s: float = (at_us - to_micros(self._clock())) / 1e6
        return min(3600.0, max(0.0, wait_s))

    def _send_events(self, append: Append) -> None:
        """Append the stored events, then delete them without a sync.

        A power loss may only take a deletion. Other transactions survive it, because the journal
        will hold their results.
        """
        if not self._unsent:
            return
        with translate_errors(self._path):
            self._connection.execute("PRAGMA synchronous=NORMAL")
        try:
            super()._send_events(append)
        finally:
            self._connection.execute("PRAGMA synchronous=FULL")

    def _apply_job_events(self, events: Sequence[Event]) -> list[Event]:
        """Add events to the groups of their job ids; return the events to append."""
        by_cluster: dict[str, dict[int, list[Event]]] = {}
        for event in events:
            by_id = by_cluster.setdefault(event.cluster, {})
            by_id.setdefault(get_job_id(event), []).append(event)
        new_events: list[Event] = []
        now = self._clock()
        now_us = to_micros(now)
        writes = WriteBatch(self._connection)
        for cluster, by_id in by_cluster.items():
            known_ids = find_known_ids(self._connection, cluster, by_id)
            events_by_id = {}
            for job_id, job_events in by_id.items():
                event = job_events[0]
                if len(job_events) == 1 and event.kind == JOB_SCRIPT and job_id not in known_ids:
                    writes.put_new_script(cluster, event.key, event.body)
                else:
                    events_by_id[job_id] = job_events
            if not events_by_id:
                continue
            groups = self._load_groups(cluster, events_by_id)
            imported_steps: list[AccountedStep] = []
            for job_id, group in groups.items():
                for event in drop_expired_events(
                    self._connection, cluster, group, events_by_id[job_id]
                ):
                    if isinstance(event.body, AccountedStep):
                        imported_steps.append(event.body)
                    add_event(group, event, now_us)
            put_accounted(self._connection, cluster, imported_steps)
            new_events += self._resolve_groups(cluster, groups.values(), writes, now)
        writes.flush()
        return new_events

    def _load_groups(
        self, cluster: str, events_by_id: dict[int, list[Event]]
    ) -> dict[int, JobIdGroup]:
        """Load the groups of some job ids, with the launches of the steps that events concern."""
        groups = load_groups(self._connection, cluster, events_by_id)
        steps = {
            (job_id, event.body.step)
            for job_id, events in events_by_id.items()
            for event in events
            if isinstance(event.body, Launch)
        }
        if steps:
            for job_id, launches in load_steps(self._connection, cluster, steps).items():
                groups[job_id].launches = launches
        return groups

    def _resolve_groups(
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
        :meth:`steward.jobs.run_events.RunEventMaker.add_run`.
        """
        self._sum_cluster(cluster)
        new_events: list[Event] = []
        leaders = LeaderScripts(self._connection, cluster)
        resolved = [
            (group, resolve_jobs(list(group.runs.values()), list(group.scripts.values())))
            for group in groups
        ]
        leaders.load(job.record for _group, jobs in resolved for job in jobs)
        with_purged = [
            (group, jobs, [leaders.is_purged(job) for job in jobs]) for group, jobs in resolved
        ]
        for group, jobs, purged in with_purged:
            for job, is_purged in zip(jobs, purged, strict=True):
                if is_purged:
                    for run in job.runs:
                        run.blank_private_text()
                        group.dirty_runs.add((run.submit_us, run.restarts))
                elif job.record is not None and job.scripts:
                    new_events += make_identity_events(group, job, job.record, now)
        new_events += AccountingUpdate(self._connection, now, is_silent=is_silent).apply(
            cluster, with_purged
        )
        for group, jobs, purged in with_purged:
            writes.put_group(group, jobs, purged)
        return new_events

    def _apply_lone_event(self, event: Event) -> None:
        """Apply an event that concerns no single job id."""
        if isinstance(event.body, AccountingExpiry):
            expire_jobs(self._connection, event.cluster, event.body.before)
        elif isinstance(event.body, MissedJobs):
            put_missed(self._connection, event)
        else:
            put_gap(self._connection, event)

    def _purge_scripts(self, events: Iterable[Event]) -> list[Event]:
        """Purge scripts; return the events to append."""
        new_events: list[Event] = []
        for event in events:
            body: ArchivePurge = event.body
            if body.sink:
                continue
            keys = body.script_keys
            for start in range(0, len(keys), _CHUNK):
                chunk = keys[start : start + _CHUNK]
                for groups in purge_scripts(self._connection, event.cluster, chunk, _CHUNK):
                    writes = WriteBatch(self._connection)
                    new_events += self._resolve_groups(event.cluster, groups, writes, event.seen_at)
                    writes.flush()
        return new_events


def _unpack_events(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events, those of imports unpacked; reject what must not reach the database."""
    for event in events:
        try:
            for part in unpack_event(event):
                validate_event(part)
                yield part
        except EventError as error:
            raise Rejected(str(error), event) from error


def _get_lone_kind(event: Event) -> str:
    """Return the kind of an event that concerns no single job id; "" for all others."""
    return event.kind if event.kind in _LONE_KINDS else ""


def _group_by_cluster(rows: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Group job ids by cluster."""
    ids_by_cluster: dict[str, list[int]] = {}
    for cluster, job_id in rows:
        ids_by_cluster.setdefault(cluster, []).append(job_id)
    return ids_by_cluster
