"""Run views: the runs of a resolved job, with start, end and pieces as accounting needs them.

:func:`build_run_views` turns a job's observations into :class:`RunView` objects. The jobs consumer
makes lines and run events from them; :meth:`steward.jobs.run_queries.RunQueries.list_run_events`
gives them to the bank.
"""

import sys
from datetime import datetime

import msgspec

from steward.core.records import JobRecord
from steward.core.timestamps import from_micros, to_micros, to_micros_or_zero
from steward.core.usage import RunEvent
from steward.jobs.identity import SLACK_US, ResolvedJob
from steward.jobs.run_merge import (
    IMPORTED,
    REQUEUED,
    RunFacts,
    fill_from_earlier_run,
    remove_private_text,
)
from steward.slurm.job_states import LOST, WAITING, strip_state_suffix
from steward.slurm.slurmdbd import merge_resized_runs

RunKey = tuple[int, int]
"""Submit time (µs since the epoch) and restart count; with cluster and job id, a run's key."""


class RunView(msgspec.Struct):
    """Run of a job as accounting sees it.

    Attributes:
        run: Its observations.
        record: Latest known record, with real start and end times: None if it has not started or
            ended, whatever the scheduler expects.
        pieces: Former sizes of a resized job, with their own times.
        is_over: Whether it ended, even with a requeue.
        has_reported_end: Whether a source reported the end time; otherwise the end is inferred.
        is_latest: Whether it is the job's last run.
        first_submit_us: First submit time of the job, µs since the epoch.
        until_us: Submit time of the next run, µs since the epoch; None for the last run.
        repeated_runs: Repetitions of the run after its end, which a killed slurmctld had forgotten.
    """

    run: RunFacts
    record: JobRecord
    pieces: list[JobRecord]
    is_over: bool
    has_reported_end: bool
    is_latest: bool
    first_submit_us: int
    until_us: int | None = None
    repeated_runs: list[JobRecord] = msgspec.field(default_factory=list)

    @property
    def key(self) -> RunKey:
        """Key of the run within its job id."""
        return self.run.submit_us, self.run.restarts

    @property
    def source(self) -> str:
        """Origin of its record, see ``UsageLine.source``."""
        return "" if self.run.has_own_source else IMPORTED

    def make_event(self, job_id: int, piece: JobRecord | None = None) -> RunEvent:
        """Return the body of an event about the run or one of its pieces."""
        return RunEvent(
            job_id=job_id,
            first_submit=from_micros(self.first_submit_us),
            restarts=self.run.restarts,
            record=self.record if piece is None else piece,
            piece_end=None if piece is None else piece.end,
            source=self.source,
            suspended_before_s=self.suspended_before_s if piece is None else 0,
        )

    def make_current_event(self, job_id: int) -> RunEvent:
        """Return the body for its current size only, which began where the last piece ended."""
        event = self.make_event(job_id)
        if not self.pieces:
            return event
        record = msgspec.structs.replace(
            self.record,
            start=self.pieces[-1].end,
            suspended_s=max(0, (self.record.suspended_s or 0) - self.suspended_before_s),
        )
        return msgspec.structs.replace(event, record=record, suspended_before_s=0)

    @property
    def additional_records(self) -> list[JobRecord]:
        """Pieces and repeated runs, which have lines and charges beside the run's own."""
        return [*self.pieces, *self.repeated_runs]

    @property
    def suspended_before_s(self) -> int:
        """Suspended time of the former sizes of a resized job, in seconds."""
        return sum(piece.suspended_s or 0 for piece in self.pieces)

    def count_suspended_s(self, start_us: int, end_us: int) -> int:
        """Return how long the run was suspended while one of its steps ran, in seconds.

        Args:
            start_us: Start of the step, µs since the epoch.
            end_us: End of the step; 0 if it runs.
        """
        total_s = self.record.suspended_s or 0
        if self.run.suspensions:
            end_us = end_us or sys.maxsize
            during_s = self.run.count_suspended_s(end_us) - self.run.count_suspended_s(start_us)
            return min(during_s, self.suspended_before_s + total_s) if self.is_over else during_s
        # The suspension times are unknown; only a step as long as the run surely has all of it.
        covers_run = (
            abs(start_us - to_micros_or_zero(self.record.start)) <= SLACK_US
            and abs(end_us - to_micros_or_zero(self.record.end)) <= SLACK_US
        )
        return total_s if covers_run and not self.pieces else 0

    def find_piece_end(self, moment_us: int) -> int:
        """Return the end (µs) of the piece that contains a moment; 0 for the current size."""
        for repeated in self.repeated_runs:
            if (
                repeated.start
                and repeated.end
                and to_micros(repeated.start) <= moment_us <= to_micros(repeated.end)
            ):
                return to_micros(repeated.end)
        for piece in self.pieces:
            if piece.end is not None and moment_us < to_micros(piece.end):
                return to_micros(piece.end)
        return 0

    def list_nodelists(self) -> list[str]:
        """Return the node lists of everything it ran on; empty if unknown."""
        lists = [record.nodelist for record in (self.record, *self.additional_records)]
        return list(dict.fromkeys(filter(None, lists)))


def build_run_views(job: ResolvedJob, *, is_purged: bool = False) -> list[RunView]:
    """Return the runs of a job, first to last; empty if Slurm has not shown it.

    Args:
        job: The job.
        is_purged: Remove private text.
    """
    if job.record is None:
        return []
    runs = _drop_duplicate_runs(job.runs)
    views: list[RunView] = []
    earlier: JobRecord | None = None
    for index, run in enumerate(runs):
        next_run = runs[index + 1] if index + 1 < len(runs) else None
        record = job.record if len(job.runs) == 1 else run.merge_record()
        if run.pieces and run.observations and not run.has_own_source:
            record = merge_resized_runs(
                [*(observation.record for observation in run.pieces.values()), record]
            )[-1]
        if is_purged:
            record = remove_private_text(record)
        if earlier is not None:
            record = fill_from_earlier_run(record, earlier)
        earlier = record
        ending = run.ending
        is_gone = next_run is None and job.is_gone
        views.append(
            RunView(
                run=run,
                record=_complete_times(run, record, next_run, is_gone=is_gone),
                pieces=_build_pieces(run, record),
                is_over=ending is not None or next_run is not None or is_gone,
                has_reported_end=ending is not None and ending.record.end is not None,
                is_latest=next_run is None,
                first_submit_us=job.first_submit_us,
                until_us=None if next_run is None else next_run.submit_us,
                repeated_runs=_build_repeated_runs(run, record, is_purged=is_purged),
            )
        )
    return views


def _drop_duplicate_runs(runs: list[RunFacts]) -> list[RunFacts]:
    """Return the runs without entries that are not runs.

    While a requeued job completes, Slurm shows its new restart count with the old submit time.
    That is not a run yet; of the same count, the later submit time is the run's.
    """
    by_restarts: dict[int, RunFacts] = {}
    previous: RunFacts | None = None
    for run in runs:
        is_new = previous is None or run.submit_us != previous.submit_us or run.ending is not None
        if is_new:
            by_restarts[run.restarts] = previous = run
    return list(by_restarts.values())


def _complete_times(
    run: RunFacts, record: JobRecord, next_run: RunFacts | None, *, is_gone: bool
) -> JobRecord:
    """Return a run's record with its real times and state."""
    changes: dict[str, object] = {"start": _get_start(run, record)}
    if record.submit is None or record.restarts != run.restarts:
        changes |= {"submit": from_micros(run.submit_us), "restarts": run.restarts}
    if run.ending is None:
        changes["end"] = None
    if is_gone:
        changes |= {"state": LOST, "reason": ""}
    if run.is_lost and next_run is not None:
        # It was gone only until its next run became known.
        changes["state"] = REQUEUED
    if run.ending is None and next_run is not None:
        # No source reported the end; it was over when the job was requeued.
        changes |= {"state": REQUEUED, "end": from_micros(next_run.submit_us)}
    if all(getattr(record, field) == value for field, value in changes.items()):
        return record
    return msgspec.structs.replace(record, **changes)


def _get_start(run: RunFacts, record: JobRecord) -> datetime | None:
    """Return when a run began; None if it did not.

    For a pending job, Slurm shows the expected start; for a job cancelled before its start, the
    end as its start.
    """
    if run.ending is None:
        return None if strip_state_suffix(record.state) in WAITING else record.start
    never_ran = record.start == record.end and not record.nodelist
    return None if never_ran else record.start


def _build_repeated_runs(run: RunFacts, record: JobRecord, *, is_purged: bool) -> list[JobRecord]:
    """Return repeated runs after the run's end as records of their own."""
    records = []
    for observation in run.repeated_ends.values():
        repeated = remove_private_text(observation.record) if is_purged else observation.record
        submit = from_micros(run.submit_us)
        records.append(
            msgspec.structs.replace(fill_from_earlier_run(repeated, record), submit=submit)
        )
    return records


def _get_suspended_s(
    run: RunFacts, piece: JobRecord, start: datetime | None, end: datetime
) -> int | None:
    """Return the suspended seconds of a piece, from slurmdbd or else from the queue."""
    if piece.suspended_s is not None or not run.suspensions:
        return piece.suspended_s
    before_s = 0 if start is None else run.count_suspended_s(to_micros(start))
    return run.count_suspended_s(to_micros(end)) - before_s


def _build_pieces(run: RunFacts, record: JobRecord) -> list[JobRecord]:
    """Return the former sizes of a run; two reports within seconds count as one."""
    pieces: list[JobRecord] = []
    if not run.pieces:
        return pieces
    start = _get_start(run, record)
    for observation in run.pieces.values():
        piece = observation.record
        end = piece.end
        if end is None or (start and end <= start):
            continue
        last = pieces[-1] if pieces else None
        if last is not None and last.end is not None and last.nodelist == piece.nodelist:
            is_duplicate = to_micros(end) - to_micros(last.end) <= SLACK_US
            if is_duplicate:
                continue
        start = pieces[-1].end if pieces else (start or piece.start)
        completed = fill_from_earlier_run(piece, record)
        pieces.append(
            msgspec.structs.replace(
                completed,
                start=start,
                submit=from_micros(run.submit_us),
                eligible=piece.eligible or record.eligible,
                suspended_s=_get_suspended_s(run, piece, start, end),
            )
        )
    return pieces
