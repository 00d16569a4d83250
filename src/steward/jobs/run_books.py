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
from steward.core.timestamps import to_micros
from steward.core.usage import RunEvent
from steward.jobs.identity import ResolvedJob
from steward.jobs.launches import LaunchRow, find_run, load_accounted, load_launches, put_launches
from steward.jobs.lines import drop_lines, load_step_usage, put_lines
from steward.jobs.run_events import RunEventMaker, make_digest
from steward.jobs.run_views import RunKey, RunView, build_run_views
from steward.jobs.tables import EXPIRED, NO_RUN, JobIdGroup, PublishedRun
from steward.jobs.usage import add_steps, adopt_step_line, build_run_line, build_summed_step_line

_Part = tuple[RunKey, int]
"""Key of a run, and end (µs) of its piece; 0 for its current size."""

_NONE: Final = frozenset({"", NO_RUN, EXPIRED})

_PUT_DUE: Final = """
    INSERT INTO due (cluster, job_id, at) VALUES (?, ?, ?)
    ON CONFLICT (cluster, job_id) DO UPDATE SET at = {0}
"""
_LATER: Final = _PUT_DUE.format("excluded.at")
_SOONER: Final = _PUT_DUE.format("min(at, excluded.at)")


class AccountingUpdate:
    """Update of the lines, launches and events of changed job ids.

    Args:
        connection: Connection to jobs.db, inside a transaction.
        now: Present time.
        is_silent: Append no events about ended runs, see :meth:`RunEventMaker.run`.
    """

    def __init__(self, connection: Connection, now: datetime, *, is_silent: bool = False) -> None:
        self._connection = connection
        self._now = now
        self._is_silent = is_silent
        self._lines: list[UsageLine] = []

    def settle(
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
        books = [_JobIdUpdate(group, jobs, purged) for group, jobs, purged in resolved]
        self._complete(cluster, [book for book in books if book.is_whole])
        for book in books:
            book.attribute()
        # A launch that moved to another run leaves a gap in the first run's steps.
        moved = [book for book in books if book.is_whole and not book.is_complete]
        self._complete(cluster, moved)
        for book in moved:
            book.attribute()
        said: list[Event] = []
        for book in books:
            self._write(book)
            said += self._say(book)
        put_lines(self._connection, self._lines)
        self._lines = []
        return said

    def _complete(self, cluster: str, books: Sequence["_JobIdUpdate"]) -> None:
        """Load all launches and imported step lines of these job ids."""
        if not books:
            return
        by_id = {book.group.job_id: book for book in books}
        for job_id, rows in load_launches(self._connection, cluster, by_id).items():
            launches = by_id[job_id].group.launches
            for key, row in rows.items():
                launches.setdefault(key, row)
        for job_id, lines in load_accounted(self._connection, cluster, by_id).items():
            by_id[job_id].accounted = lines
        for book in books:
            book.is_complete = True

    def _write(self, book: "_JobIdUpdate") -> None:
        """Write the lines of a job id's runs and steps; delete stale ones."""
        group = book.group
        job_id = group.job_id
        if book.is_complete:
            stale = [
                (job_id, *key)
                for key, told in group.told.items()
                if told.has_steps or (key not in book.by_key and told.basis not in _NONE)
            ]
            if stale:
                drop_lines(self._connection, group.cluster, stale)
        steps = book.steps()
        for view in book.runs:
            touched = {part: found for part, found in steps.items() if part[0] == view.key}
            if touched or book.is_complete or view.key in group.dirty_runs:
                self._lines += self._of_run(book, view, touched)
        for key in group.runs:
            if key not in book.by_key and key not in book.expired:
                book.tell(key, NO_RUN)

    def _of_run(
        self, book: "_JobIdUpdate", view: RunView, touched: dict[_Part, dict[str, list[LaunchRow]]]
    ) -> Iterable[UsageLine]:
        """Yield the lines of a run and of its steps that are updated."""
        group = book.group
        told = group.told.setdefault(view.key, PublishedRun())
        others: list[UsageLine] = []
        if told.has_steps and not book.is_complete:
            others = load_step_usage(self._connection, group.cluster, (group.job_id, *view.key))
        has_steps = bool(others)
        source = "" if view.run.is_ours else "slurmdbd"
        facts: list[RunEvent] = [view.fact(group.job_id, piece) for piece in view.parts]
        for fact in (*facts, view.current(group.job_id)):
            is_piece = fact.piece_end is not None
            is_latest = view.is_latest and not is_piece
            line = build_run_line(group.cluster, fact, is_latest=is_latest, source=source)
            mine = touched.get((view.key, line.piece_us), {})
            fresh = [
                _add_suspension(
                    view,
                    build_summed_step_line(
                        line, step, [row.spent() for row in rows], is_over=view.is_over
                    ),
                )
                for step, rows in mine.items()
            ]
            fresh += book.imported(view, line, set(mine))
            has_steps = has_steps or bool(fresh)
            kept = [
                other
                for other in others
                if other.piece_us == line.piece_us and other.step not in mine
            ]
            yield add_steps(line, [*kept, *fresh])
            yield from fresh
        book.tell(view.key, book.basis_of(view), has_steps=has_steps)

    def _say(self, book: "_JobIdUpdate") -> list[Event]:
        """Collect the events of a job id, and write its launches."""
        group = book.group
        sayer = RunEventMaker(group, self._now)
        by_run: dict[RunKey, list[LaunchRow]] = {}
        for row in group.launches.values():
            if row.run is not None:
                by_run.setdefault(row.run, []).append(row)
        for row in group.launches.values():
            if row.said_of is not None and row.said_of not in book.expired:
                sayer.withdraw(row, row.said_of, book.by_key.get(row.said_of))
        for view in book.runs:
            launches = by_run.get(view.key, [])
            sayer.run(view, launches, is_silent=self._is_silent)
            for row in launches:
                if row.is_dirty or not row.is_said or row.is_announced:
                    sayer.launch(view, row)
        dirty = [row for row in group.launches.values() if row.is_dirty]
        if dirty:
            put_launches(self._connection, group.cluster, group.job_id, dirty)
        self._put_due(book, sayer.due_us)
        return sayer.said

    def _put_due(self, book: "_JobIdUpdate", due_us: int | None) -> None:
        """Store when to settle the job id again, or clear it."""
        key = (book.group.cluster, book.group.job_id)
        if due_us is not None:
            statement = _LATER if book.is_complete else _SOONER
            self._connection.execute(statement, (*key, due_us))
        elif book.group.is_due:
            self._connection.execute("DELETE FROM due WHERE cluster = ? AND job_id = ?", key)


class _JobIdUpdate:
    """Job id while it is settled."""

    def __init__(
        self, group: JobIdGroup, jobs: Sequence[ResolvedJob], purged: Sequence[bool]
    ) -> None:
        self.group = group
        self.expired = {key for key, told in group.told.items() if told.basis == EXPIRED}
        self.runs: list[RunView] = []
        self.is_purged: dict[RunKey, bool] = {}
        for job, is_purged in zip(jobs, purged, strict=True):
            for view in build_run_views(job, is_purged=is_purged):
                if view.key in self.expired:
                    continue
                self.runs.append(view)
                self.is_purged[view.key] = is_purged
        self.by_key = {view.key: view for view in self.runs}
        self._bases = {
            view.key: _digest_basis(view, self.is_purged[view.key]) for view in self.runs
        }
        then = {key: told.basis for key, told in group.told.items() if told.basis not in _NONE}
        self.is_whole = group.is_whole or then != self._bases
        self.is_complete = False
        self.accounted: list[UsageLine] = []

    def basis_of(self, view: RunView) -> str:
        """Return the digest of what the step lines of a run depend on."""
        return self._bases[view.key]

    def tell(self, key: RunKey, basis: str, *, has_steps: bool = False) -> None:
        """Record the digest that a run's lines were made from."""
        told = self.group.told.setdefault(key, PublishedRun())
        if (told.basis, told.has_steps) != (basis, has_steps):
            told.basis, told.has_steps = basis, has_steps
            self.group.dirty_runs.add(key)

    def attribute(self) -> None:
        """Find the run of each launch to update.

        A run launches a step once per node. If a second launch fits too, it belongs to a run that
        slurmctld forgot unseen and whose id it reused.
        """
        for rows in self._by_place():
            free = self.runs
            for row in rows:
                view = find_run(row, free)
                self._attribute(row, view)
                free = [run for run in free if run is not view]

    def _by_place(self) -> Iterable[list[LaunchRow]]:
        """Return the launches to update, grouped by step and node, last first."""
        found: dict[tuple[str, str], list[LaunchRow]] = {}
        for (step, node, _launched_us), row in sorted(self.group.launches.items(), reverse=True):
            found.setdefault((step, node), []).append(row)
        if self.is_complete:
            return found.values()
        return (rows for rows in found.values() if any(row.is_news for row in rows))

    def _attribute(self, row: LaunchRow, view: RunView | None) -> None:
        """Assign a launch to a run and piece."""
        run = None if view is None else view.key
        piece_us = 0 if view is None else view.piece_at(row.key[2])
        if (run, piece_us) != (row.run, row.piece_us):
            if row.run is not None:
                self.is_whole = True
            row.move(run, piece_us)
        if run is not None and self.is_purged[run]:
            self._blank(row)

    @staticmethod
    def _blank(row: LaunchRow) -> None:
        """Remove private text from a launch."""
        start = row.facts.start
        if start is not None and start.name:
            row.facts.blank()
            row.is_news = row.is_dirty = True

    def steps(self) -> dict[_Part, dict[str, list[LaunchRow]]]:
        """Return the launches of each step to write, by part of a run."""
        wanted = {
            (row.run, row.piece_us, row.key[0])
            for row in self.group.launches.values()
            if row.run is not None and (row.is_dirty or self.is_complete)
        }
        found: dict[_Part, dict[str, list[LaunchRow]]] = {}
        for _key, row in sorted(self.group.launches.items()):
            step = row.key[0]
            if row.run is not None and (row.run, row.piece_us, step) in wanted:
                found.setdefault((row.run, row.piece_us), {}).setdefault(step, []).append(row)
        return found

    def imported(self, view: RunView, line: UsageLine, mine: set[str]) -> list[UsageLine]:
        """Return the step lines that are known only from imported accounting."""
        if line.piece_us:
            return []
        return [
            adopt_step_line(line, theirs)
            for theirs in self.accounted
            if theirs.submit_us == view.run.submit_us and theirs.step not in mine
        ]


def _add_suspension(view: RunView, step: UsageLine) -> UsageLine:
    """Return a step's line with the suspended time of its run, which nodes do not see."""
    suspended_s = view.suspended_between(step.start_us, step.end_us)
    return msgspec.structs.replace(step, suspended_s=suspended_s) if suspended_s else step


def _digest_basis(view: RunView, is_purged: bool) -> str:
    """Return the digest of everything that the step lines of a run depend on."""
    record = view.record
    return make_digest(
        [
            (view.first_submit_us, view.is_latest, view.is_over, view.until_us, is_purged),
            (record.state, to_micros(record.start) if record.start else None, record.end),
            (record.user, record.uid, record.gid, record.group, record.account, record.qos),
            (record.partition, record.wckey, record.eligible, record.sluid, record.nodelist),
            (record.array_job_id, record.array_task, record.het_job_id, record.het_offset),
            [(piece.end, piece.nodelist) for piece in view.parts],
            # For a run that goes on, every suspension would rebuild the lines of all steps.
            view.is_over and (record.suspended_s, list(view.run.halts.items())),
        ]
    )
