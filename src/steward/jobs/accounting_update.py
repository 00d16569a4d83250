"""Accounting update of the jobs consumer: attribute launches to runs, write lines, append events.

:class:`AccountingUpdate` settles the groups of changed job ids. If a run changed in anything its
steps' lines depend on, all lines of its job id are rebuilt. Otherwise only the steps with new
events are, because a job may have thousands of steps on thousands of nodes.

Order: find the run of each launch; load the other launches of job ids that must be rebuilt; write
the lines; make the events (:class:`steward.jobs.run_events.RunEventMaker`); write the launches; and
store in table ``due`` when to settle the job id again.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

import msgspec

from steward.core.events import Event
from steward.core.records import UsageLine
from steward.core.sqlite import Connection
from steward.core.usage import RunEvent
from steward.jobs.day_sums import track_lines
from steward.jobs.identity import ResolvedJob
from steward.jobs.launches import LaunchRow, find_run, load_accounted, load_launches, put_launches
from steward.jobs.lines import drop_lines, load_step_usage, put_lines
from steward.jobs.run_events import RunEventMaker, make_digest
from steward.jobs.run_views import RunKey, RunView, build_run_views
from steward.jobs.tables import DUE_JOBS, EXPIRED, NO_RUN, DueJob, JobIdGroup, PublishedRun
from steward.jobs.usage import (
    RUN_FIELDS,
    add_steps,
    adopt_step_line,
    build_run_line,
    build_summed_step_line,
)

_RunPiece = tuple[RunKey, int]
"""Key of a run, and end (µs) of its piece; 0 for its current size."""

_NONE: Final = frozenset({"", NO_RUN, EXPIRED})

_LATER: Final = DUE_JOBS.build_upsert(("at",))
_SOONER: Final = DUE_JOBS.build_upsert(()) + "at = min(at, excluded.at)"


class AccountingUpdate:
    """Update of the lines, launches and events of changed job ids.

    Args:
        connection: Connection to jobs.db, inside a transaction.
        now: Present time.
        is_silent: Append no events about ended runs, see :meth:`RunEventMaker.add_run`.
    """

    def __init__(self, connection: Connection, now: datetime, *, is_silent: bool = False) -> None:
        self._connection = connection
        self._now = now
        self._is_silent = is_silent
        self._lines: list[UsageLine] = []

    def apply(
        self,
        cluster: str,
        resolved: Iterable[tuple[JobIdGroup, Sequence[ResolvedJob], Sequence[bool]]],
    ) -> list[Event]:
        """Update the accounting of some job ids of one cluster; return the events to append.

        Args:
            cluster: Cluster name.
            resolved: For each id its group, its jobs, and for each job whether its private text
                was purged.

        Returns:
            The events to append to the journal.
        """
        updates = [_JobIdUpdate(group, jobs, purged) for group, jobs, purged in resolved]
        job_ids = [update.group.job_id for update in updates]
        with track_lines(self._connection, cluster, job_ids):
            return self._apply_updates(cluster, updates)

    def _apply_updates(self, cluster: str, updates: Sequence["_JobIdUpdate"]) -> list[Event]:
        """Write the lines and launches of job ids; return the events to append."""
        self._load_complete(cluster, [update for update in updates if update.needs_rebuild])
        for update in updates:
            update.attribute_launches()
        # A launch that moved to another run leaves a gap in the first run's steps.
        with_moved = [
            update for update in updates if update.needs_rebuild and not update.is_complete
        ]
        self._load_complete(cluster, with_moved)
        for update in with_moved:
            update.attribute_launches()
        events: list[Event] = []
        for update in updates:
            self._write_lines(update)
            events += self._make_events(update)
        put_lines(self._connection, self._lines)
        self._lines = []
        return events

    def _load_complete(self, cluster: str, updates: Sequence["_JobIdUpdate"]) -> None:
        """Load all launches and imported step lines of these job ids."""
        if not updates:
            return
        by_id = {update.group.job_id: update for update in updates}
        for job_id, rows in load_launches(self._connection, cluster, by_id).items():
            launches = by_id[job_id].group.launches
            for key, row in rows.items():
                launches.setdefault(key, row)
        for job_id, lines in load_accounted(self._connection, cluster, by_id).items():
            by_id[job_id].imported_lines = lines
        for update in updates:
            update.is_complete = True

    def _write_lines(self, update: "_JobIdUpdate") -> None:
        """Write the lines of a job id's runs and steps; delete stale ones."""
        group = update.group
        job_id = group.job_id
        if update.is_complete:
            stale = [
                (job_id, *key)
                for key, published in group.published_runs.items()
                if published.has_steps
                or (key not in update.by_key and published.lines_digest not in _NONE)
            ]
            if stale:
                drop_lines(self._connection, group.cluster, stale)
        steps = update.group_steps()
        for view in update.runs:
            changed_steps = {
                part: by_step for part, by_step in steps.items() if part[0] == view.key
            }
            if changed_steps or update.is_complete or view.key in group.dirty_runs:
                self._lines += self._build_lines(update, view, changed_steps)
        for key in group.runs:
            if key not in update.by_key and key not in update.expired:
                update.record_lines_digest(key, NO_RUN)

    def _build_lines(
        self,
        update: "_JobIdUpdate",
        view: RunView,
        changed_steps: dict[_RunPiece, dict[str, list[LaunchRow]]],
    ) -> Iterable[UsageLine]:
        """Yield the lines of a run and of its steps that are updated."""
        group = update.group
        published = group.published_runs.setdefault(view.key, PublishedRun())
        stored_steps: list[UsageLine] = []
        if published.has_steps and not update.is_complete:
            stored_steps = load_step_usage(
                self._connection, group.cluster, (group.job_id, *view.key)
            )
        has_steps = bool(stored_steps)
        piece_events: list[RunEvent] = [
            view.make_event(group.job_id, piece) for piece in view.additional_records
        ]
        for event in (*piece_events, view.make_current_event(group.job_id)):
            is_piece = event.piece_end is not None
            is_latest = view.is_latest and not is_piece
            line = build_run_line(group.cluster, event, is_latest=is_latest, source=view.source)
            step_launches = changed_steps.get((view.key, line.piece_us), {})
            new_steps = [
                _add_suspension(
                    view,
                    build_summed_step_line(
                        line, step, [row.sum_usage() for row in rows], is_over=view.is_over
                    ),
                )
                for step, rows in step_launches.items()
            ]
            new_steps += update.adopt_imported_steps(view, line, set(step_launches))
            has_steps = has_steps or bool(new_steps)
            unchanged = [
                stored
                for stored in stored_steps
                if stored.piece_us == line.piece_us and stored.step not in step_launches
            ]
            yield add_steps(line, [*unchanged, *new_steps])
            yield from new_steps
        update.record_lines_digest(view.key, update.get_lines_digest(view), has_steps=has_steps)

    def _make_events(self, update: "_JobIdUpdate") -> list[Event]:
        """Collect the events of a job id, and write its launches."""
        group = update.group
        event_maker = RunEventMaker(group, self._now)
        by_run: dict[RunKey, list[LaunchRow]] = {}
        for row in group.launches.values():
            if row.run is not None:
                by_run.setdefault(row.run, []).append(row)
        for row in group.launches.values():
            if row.published_run is not None and row.published_run not in update.expired:
                event_maker.withdraw_launch(
                    row, row.published_run, update.by_key.get(row.published_run)
                )
        for view in update.runs:
            launches = by_run.get(view.key, [])
            # Consumers of imported runs read them from jobs.imported themselves.
            is_silent = self._is_silent or bool(view.source)
            event_maker.add_run(view, launches, is_silent=is_silent)
            for row in launches:
                if row.is_dirty or not row.is_published or row.is_only_start_published:
                    event_maker.add_launch(view, row)
        dirty = [row for row in group.launches.values() if row.is_dirty]
        if dirty:
            put_launches(self._connection, group.cluster, group.job_id, dirty)
        self._put_due(update, event_maker.due_us)
        return event_maker.events

    def _put_due(self, update: "_JobIdUpdate", due_us: int | None) -> None:
        """Store when to settle the job id again, or clear it."""
        key = (update.group.cluster, update.group.job_id)
        if due_us is not None:
            statement = _LATER if update.is_complete else _SOONER
            self._connection.execute(statement, DUE_JOBS.encode(DueJob(*key, due_us)))
        elif update.group.is_due:
            self._connection.execute("DELETE FROM due WHERE cluster = ? AND job_id = ?", key)


class _JobIdUpdate:
    """Job id while it is settled."""

    def __init__(
        self, group: JobIdGroup, jobs: Sequence[ResolvedJob], purged: Sequence[bool]
    ) -> None:
        self.group = group
        self.expired = {
            key
            for key, published in group.published_runs.items()
            if published.lines_digest == EXPIRED
        }
        self.runs: list[RunView] = []
        self.is_purged: dict[RunKey, bool] = {}
        for job, is_purged in zip(jobs, purged, strict=True):
            for view in build_run_views(job, is_purged=is_purged):
                if view.key in self.expired:
                    continue
                self.runs.append(view)
                self.is_purged[view.key] = is_purged
        self.by_key = {view.key: view for view in self.runs}
        self._digests = {
            view.key: _make_lines_digest(view, self.is_purged[view.key]) for view in self.runs
        }
        stored_digests = {
            key: published.lines_digest
            for key, published in group.published_runs.items()
            if published.lines_digest not in _NONE
        }
        self.needs_rebuild = group.needs_rebuild or stored_digests != self._digests
        self.is_complete = False
        self.imported_lines: list[UsageLine] = []

    def get_lines_digest(self, view: RunView) -> str:
        """Return the digest of what the step lines of a run depend on."""
        return self._digests[view.key]

    def record_lines_digest(
        self, key: RunKey, lines_digest: str, *, has_steps: bool = False
    ) -> None:
        """Record the digest that a run's lines were made from."""
        published = self.group.published_runs.setdefault(key, PublishedRun())
        if (published.lines_digest, published.has_steps) != (lines_digest, has_steps):
            published.lines_digest, published.has_steps = lines_digest, has_steps
            self.group.dirty_runs.add(key)

    def attribute_launches(self) -> None:
        """Find the run of each launch to update.

        A run launches a step once per node. If a second launch fits too, it belongs to a run that
        slurmctld forgot unseen and whose id it reused.
        """
        for rows in self._group_by_place():
            candidates = self.runs
            for row in rows:
                view = find_run(row, candidates)
                self._attribute_launch(row, view)
                candidates = [run for run in candidates if run is not view]

    def _group_by_place(self) -> Iterable[list[LaunchRow]]:
        """Return the launches to update, grouped by step and node, last first."""
        by_place: dict[tuple[str, str], list[LaunchRow]] = {}
        for (step, node, _launched_us), row in sorted(self.group.launches.items(), reverse=True):
            by_place.setdefault((step, node), []).append(row)
        if self.is_complete:
            return by_place.values()
        return (rows for rows in by_place.values() if any(row.has_new_reports for row in rows))

    def _attribute_launch(self, row: LaunchRow, view: RunView | None) -> None:
        """Assign a launch to a run and piece."""
        run = None if view is None else view.key
        piece_us = 0 if view is None else view.find_piece_end(row.key[2])
        if (run, piece_us) != (row.run, row.piece_end_us):
            if row.run is not None:
                self.needs_rebuild = True
            row.assign(run, piece_us)
        if run is not None and self.is_purged[run]:
            self._blank_launch(row)

    @staticmethod
    def _blank_launch(row: LaunchRow) -> None:
        """Remove private text from a launch."""
        start = row.facts.start
        if start is not None and start.name:
            row.facts.blank_private_text()
            row.has_new_reports = row.is_dirty = True

    def group_steps(self) -> dict[_RunPiece, dict[str, list[LaunchRow]]]:
        """Return the launches of each step to write, by part of a run."""
        step_keys = {
            (row.run, row.piece_end_us, row.key[0])
            for row in self.group.launches.values()
            if row.run is not None and (row.is_dirty or self.is_complete)
        }
        steps: dict[_RunPiece, dict[str, list[LaunchRow]]] = {}
        for _key, row in sorted(self.group.launches.items()):
            step = row.key[0]
            if row.run is not None and (row.run, row.piece_end_us, step) in step_keys:
                steps.setdefault((row.run, row.piece_end_us), {}).setdefault(step, []).append(row)
        return steps

    def adopt_imported_steps(
        self, view: RunView, line: UsageLine, known_steps: set[str]
    ) -> list[UsageLine]:
        """Return the step lines that are known only from imported accounting."""
        if line.piece_us:
            return []
        return [
            adopt_step_line(line, imported)
            for imported in self.imported_lines
            if imported.submit_us == view.run.submit_us and imported.step not in known_steps
        ]


def _add_suspension(view: RunView, step: UsageLine) -> UsageLine:
    """Return a step's line with the suspended time of its run, which nodes do not see."""
    suspended_s = view.count_suspended_s(step.start_us, step.end_us)
    return msgspec.structs.replace(step, suspended_s=suspended_s) if suspended_s else step


def _make_lines_digest(view: RunView, is_purged: bool) -> str:
    """Return the digest of everything that the step lines of a run depend on."""
    record = view.record
    return make_digest(
        [
            (view.first_submit_us, view.is_latest, view.is_over, view.until_us, is_purged),
            [getattr(record, field) for field in RUN_FIELDS],
            (record.state, record.eligible, record.start, record.end, record.nodelist),
            [(piece.end, piece.nodelist) for piece in view.additional_records],
            # For a run that goes on, every suspension would rebuild the lines of all steps.
            view.is_over and (record.suspended_s, list(view.run.suspensions.items())),
        ]
    )
