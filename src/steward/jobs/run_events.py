"""Events that the jobs consumer appends about jobs (job.identity), runs and launches.

:func:`make_identity_events` makes the events that tell the archive which job a script belongs to,
again whenever what the archive keeps changes. :class:`RunEventMaker` makes the events about runs
and launches of one job id: run.start, run.suspend, run.end, step.launch and step.usage. Both
compare with what was published before, and publish corrections under new keys.
"""

import hashlib
from datetime import datetime
from typing import Final

import msgspec

from steward.core.events import (
    JOB_IDENTITY,
    RUN_END,
    RUN_START,
    RUN_SUSPEND,
    STEP_LAUNCH,
    STEP_USAGE,
    Event,
    JobIdentity,
)
from steward.core.records import JobRecord
from steward.core.timestamps import from_micros, to_micros, to_micros_or_zero
from steward.core.usage import RunEvent, StepUsage
from steward.jobs.identity import SLACK_US, ResolvedJob
from steward.jobs.launches import START_PUBLISHED, START_WITHDRAWN, USAGE_WITHDRAWN, LaunchRow
from steward.jobs.run_views import RunKey, RunView
from steward.jobs.tables import JobIdGroup, PublishedIdentity, PublishedRun

SOURCE: Final = "jobs"

# Fields in an archive's manifest, apart from times. A change publishes job.identity again.
_LASTING: Final = (
    "name",
    "group",
    "account",
    "partition",
    "qos",
    "batch",
    "array_job_id",
    "het_job_id",
    "time_limit_s",
    "tres_requested",
    "submit_host",
    "submit_line",
    "command",
    "work_dir",
    "stdin",
    "stdout",
    "stderr",
)

_encode = msgspec.json.Encoder().encode


def make_identity_events(
    group: JobIdGroup, job: ResolvedJob, record: JobRecord, now: datetime
) -> list[Event]:
    """Return the new job.identity events for a job's scripts."""
    lasting = _digest(_encode([getattr(record, field) for field in _LASTING]))
    latest_run = job.latest
    end_us = latest_run.end_us if job.is_over else None
    events = []
    for script in job.scripts:
        row = group.scripts[script.key]
        if row.purged:
            continue
        facts = (job.first_submit_us, record.uid, record.user, end_us, lasting)
        reason = _find_change(row.published, facts)
        if not reason:
            continue
        last_chain = row.published.chain if row.published else ""
        chain = _digest(_encode([last_chain, facts]))
        row.published = PublishedIdentity(*facts, chain)
        row.is_dirty = True
        identity = JobIdentity(
            script_key=row.key,
            job_id=group.job_id,
            first_submit=from_micros(job.first_submit_us),
            record=record,
            why=reason,
        )
        events.append(
            Event(
                kind=JOB_IDENTITY,
                cluster=group.cluster,
                key=f"identity:{row.key}:{chain}",
                at=now,
                seen_at=now,
                source=SOURCE,
                body=identity,
            )
        )
    return events


def _find_change(
    published: PublishedIdentity | None, facts: tuple[int, int | None, str, int | None, str]
) -> str:
    """Return why a script's identity must be published (again), or ""."""
    first_submit_us, uid, user, end_us, lasting = facts
    if published is None or (published.first_submit_us, published.uid) != (first_submit_us, uid):
        return "bound"
    if published.user != user:
        return "renamed"
    if end_us is not None and published.end_us != end_us:
        return "ended"
    return "updated" if published.lasting != lasting else ""


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


END_TIME_WAIT_US: Final = 120_000_000
"""Longest wait for the end time of a run whose absence alone shows that it ended, in µs."""

LAUNCH_END_WAIT_US: Final = 600_000_000
"""Longest wait for the end of a launch, after the run's end and the last report, in µs."""


def make_digest(value: object) -> str:
    """Return a short digest of a value that JSON can encode."""
    return hashlib.blake2b(_encode(value), digest_size=9).hexdigest()


class RunEventMaker:
    """Maker of new events about the runs and launches of one job id.

    Args:
        group: Everything known about the job id; records what was published.
        now: Present time.

    The events are collected in ``events``.
    """

    def __init__(self, group: JobIdGroup, now: datetime) -> None:
        self._group = group
        self._now = now
        self._now_us = to_micros(now)
        self.events: list[Event] = []
        self.due_us: int | None = None
        """When to settle the job id again without a new event, µs since the epoch; or None."""

    def add_run(self, view: RunView, launches: list[LaunchRow], *, is_silent: bool = False) -> None:
        """Add the new events of a run.

        Args:
            view: The run.
            launches: Launches of its steps.
            is_silent: Only record the events of an ended run, because it ended before any consumer
                existed.
        """
        published = self._get_published(view)
        old_content = _encode(published)
        event_count = len(self.events)
        if view.is_over and not published.over_us:
            published.over_us = self._now_us
        elif not view.is_over:
            published.over_us = 0
        self._publish_start(view, published, launches)
        self._publish_suspensions(view, published)
        for piece in view.additional_records:
            self._publish_piece(view, published, piece)
        self._publish_end(view, published)
        if is_silent and view.is_over:
            del self.events[event_count:]
        if _encode(published) != old_content:
            self._group.dirty_runs.add(view.key)

    def _get_published(self, view: RunView) -> PublishedRun:
        """Return what was published about a run."""
        return self._group.published_runs.setdefault(view.key, PublishedRun())

    def _publish_start(
        self, view: RunView, published: PublishedRun, launches: list[LaunchRow]
    ) -> None:
        """Publish or correct run.start; without a start time, use the first launch."""
        record = view.record
        is_guess = record.start is None
        if is_guess:
            if view.is_over or published.start is not None or not launches:
                return
            first_us = min(row.key[2] for row in launches)
            record = msgspec.structs.replace(record, start=from_micros(first_us), state="RUNNING")
        start_us = to_micros_or_zero(record.start)
        if published.start is None:
            published.start = (start_us, record.nodelist, record.tres_allocated)
            published.is_guess = is_guess
            self._add_run_event(RUN_START, view, record, at=record.start)
            return
        published_us, nodelist, published_tres = published.start
        is_same = abs(start_us - published_us) <= (SLACK_US if published.is_guess else 0)
        if (
            is_same
            and (nodelist or not record.nodelist)
            and (published_tres or not record.tres_allocated)
        ):
            return
        if is_same:
            start_us = published_us
        published.start = (
            start_us,
            nodelist or record.nodelist,
            published_tres or record.tres_allocated,
        )
        published.is_guess = published.is_guess and is_same
        self._add_correction(RUN_START, view, published, record, record.start, published.start)

    def _publish_suspensions(self, view: RunView, published: PublishedRun) -> None:
        """Publish new suspensions and resumptions of a run."""
        suspensions = [
            suspension for suspension in self._group.suspensions if suspension[0] == view.key
        ]
        for _key, at_us, observed in sorted(suspensions, key=lambda suspension: suspension[1]):
            if at_us <= published.suspended_us:
                continue
            published.suspended_us = at_us
            record = msgspec.structs.replace(
                view.record,
                state=observed.state,
                suspended_at=observed.suspended_at,
                suspended_s=observed.suspended_s,
            )
            self._add_run_event(
                RUN_SUSPEND, view, record, at=from_micros(at_us), key_suffix=f":{at_us}"
            )

    def _publish_piece(self, view: RunView, published: PublishedRun, piece: JobRecord) -> None:
        """Publish or correct the end of a former size of a resized job."""
        end_us = to_micros_or_zero(piece.end)
        digest = _digest_end(piece)
        published_digest = published.pieces.get(end_us)
        if published_digest == digest:
            return
        published.pieces[end_us] = digest
        if published_digest is None:
            self._add_run_event(
                RUN_END, view, piece, at=piece.end, key_suffix=f":piece:{end_us}", is_piece=True
            )
        else:
            self._add_correction(RUN_END, view, published, piece, piece.end, digest, is_piece=True)

    def _publish_end(self, view: RunView, published: PublishedRun) -> None:
        """Publish or correct run.end; wait while the end time is uncertain."""
        if not view.is_over:
            return
        if (
            not view.has_reported_end
            and not published.end
            and not self._is_due(published.over_us + END_TIME_WAIT_US)
        ):
            return
        digest = _digest_end(view.record)
        if published.end == digest:
            return
        # If no source gave the end time, use the time when the end was first noticed.
        at = view.record.end or from_micros(published.over_us)
        if not published.end:
            published.end = digest
            self._add_run_event(RUN_END, view, view.record, at=at)
        else:
            published.end = digest
            self._add_correction(RUN_END, view, published, view.record, at, digest)

    def add_launch(self, view: RunView, row: LaunchRow) -> None:
        """Add the new events of a launch that belongs to this run."""
        published = self._get_published(view)
        if not row.ended and (not row.is_published or row.is_only_start_published):
            if not view.is_over:
                self._publish_launch_start(view, row)
                return
            if not self._is_due(max(row.last_report_us, published.over_us) + LAUNCH_END_WAIT_US):
                return
        facts = row.facts
        step, node, launched_us = row.key
        usage = StepUsage(
            job_id=self._group.job_id,
            first_submit=from_micros(view.first_submit_us),
            restarts=view.run.restarts,
            submit=from_micros(view.run.submit_us),
            step=step,
            node=node,
            launched_us=launched_us,
            ended_us=facts.ended_us,
            run_end=view.record.end,
            start=facts.start,
            tasks=tuple(facts.tasks.values()),
            end=facts.end,
            correction=row.has_usage,
            announced=row.is_only_start_published,
        )
        digest = make_digest([view.key, _strip_volatile(usage)])
        if row.published.partition(":")[0] == digest:
            return
        at = self._now if facts.ended_us is None else from_micros(facts.ended_us)
        self._add_launch_event(STEP_USAGE, row, digest, at, usage)

    def _publish_launch_start(self, view: RunView, row: LaunchRow) -> None:
        """Publish the start of a launch, unless that or its usage was published."""
        start = row.facts.start
        if start is None or row.is_only_start_published or row.has_usage:
            return
        step, node, launched_us = row.key
        usage = StepUsage(
            job_id=self._group.job_id,
            first_submit=from_micros(view.first_submit_us),
            restarts=view.run.restarts,
            submit=from_micros(view.run.submit_us),
            step=step,
            node=node,
            launched_us=launched_us,
            start=start,
        )
        self._add_launch_event(STEP_LAUNCH, row, START_PUBLISHED, from_micros(launched_us), usage)

    def withdraw_launch(self, row: LaunchRow, run: RunKey, view: RunView | None) -> None:
        """Withdraw what was published about a launch that no longer belongs to a run.

        Args:
            row: The launch.
            run: Key of the run that was published.
            view: That run as now known; None if it turned out not to be a run.
        """
        step, node, launched_us = row.key
        usage = StepUsage(
            job_id=self._group.job_id,
            first_submit=from_micros(run[0] if view is None else view.first_submit_us),
            restarts=run[1],
            submit=from_micros(run[0]),
            step=step,
            node=node,
            launched_us=launched_us,
            run_end=None if view is None else view.record.end,
            correction=True,
            withdrawn=True,
        )
        row.published_run = None
        if row.is_only_start_published:
            self._add_launch_event(STEP_LAUNCH, row, START_WITHDRAWN, self._now, usage)
        else:
            self._add_launch_event(STEP_USAGE, row, USAGE_WITHDRAWN, self._now, usage)

    def _add_launch_event(
        self, kind: str, row: LaunchRow, content: str, at: datetime, usage: StepUsage
    ) -> None:
        """Add an event about a launch, under a new key if it corrects another."""
        key = f"{kind}:{usage.job_id}:{usage.step}:{usage.node}:{usage.launched_us}"
        if row.has_usage or (row.published and kind == STEP_LAUNCH):
            key += f":{make_digest([row.published, content])}"
        # The last content, and a digest of all before it: the same content after another is new.
        row.published = f"{content}:{make_digest([row.published])}"
        row.is_dirty = True
        self._add_event(kind, key, at, usage)

    def _is_due(self, at_us: int) -> bool:
        """Return True if a time has come; otherwise note when to settle again."""
        if at_us <= self._now_us:
            return True
        self.due_us = at_us if self.due_us is None else min(self.due_us, at_us)
        return False

    def _add_run_event(
        self,
        kind: str,
        view: RunView,
        record: JobRecord,
        *,
        at: datetime | None,
        key_suffix: str = "",
        is_piece: bool = False,
        is_correction: bool = False,
    ) -> None:
        """Add an event about a run."""
        job_id = self._group.job_id
        body = RunEvent(
            job_id=job_id,
            first_submit=from_micros(view.first_submit_us),
            restarts=view.run.restarts,
            record=record,
            piece_end=record.end if is_piece else None,
            correction=is_correction,
            source=view.source,
            suspended_before_s=0 if is_piece else view.suspended_before_s,
        )
        key = f"{kind}:{job_id}:{view.run.submit_us // 1_000_000}:{view.run.restarts}{key_suffix}"
        self._add_event(kind, key, at or self._now, body)

    def _add_correction(
        self,
        kind: str,
        view: RunView,
        published: PublishedRun,
        record: JobRecord,
        at: datetime | None,
        content: object,
        *,
        is_piece: bool = False,
    ) -> None:
        """Add a correction, under a key that depends on all corrections before."""
        published.chain = make_digest([published.chain, kind, content])
        self._add_run_event(
            kind,
            view,
            record,
            at=at,
            key_suffix=f":{published.chain}",
            is_piece=is_piece,
            is_correction=True,
        )

    def _add_event(self, kind: str, key: str, at: datetime, body: RunEvent | StepUsage) -> None:
        """Add an event to the list."""
        self.events.append(
            Event(
                kind=kind,
                cluster=self._group.cluster,
                key=key,
                at=at,
                seen_at=self._now,
                source=SOURCE,
                body=body,
            )
        )


def _digest_end(record: JobRecord) -> str:
    """Return the digest of everything published about an end."""
    return make_digest(
        [
            record.start,
            record.end,
            record.state,
            record.exit_code,
            record.exit_signal,
            record.nodelist,
            record.tres_allocated,
            record.suspended_s or 0,
        ]
    )


def _strip_volatile(usage: StepUsage) -> StepUsage:
    """Return a usage without fields whose change is no news: the run's end, purged names."""
    start = usage.start
    if start is not None and start.name:
        start = msgspec.structs.replace(start, name="")
    return msgspec.structs.replace(
        usage,
        start=start,
        run_end=None,
        correction=False,
        announced=False,
        first_submit=from_micros(0),
    )
