"""Run views: the runs of a resolved job, with start, end and pieces as accounting needs them.

:func:`build_run_views` turns a job's observations into :class:`RunView` objects. The jobs consumer
makes lines and run events from them; :meth:`steward.jobs.run_queries.RunQueries.run_facts` gives
them to the bank.
"""

import sys
from datetime import datetime

import msgspec

from steward.core.records import JobRecord
from steward.core.timestamps import moment, to_micros, to_micros_or_zero
from steward.core.usage import RunEvent
from steward.jobs.identity import SLACK_US, ResolvedJob
from steward.jobs.run_merge import REQUEUED, RunFacts, fill_from_earlier_run, remove_private_text
from steward.slurm.accounting import merge_resized_runs
from steward.slurm.job_states import LOST, WAITING, strip_state_suffix

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
        is_sure: Whether a source reported the end time; otherwise the end is inferred.
        is_latest: Whether it is the job's last run.
        first_submit_us: First submit time of the job, µs since the epoch.
        until_us: Submit time of the next run, µs since the epoch; None for the last run.
        again: Repetitions of the run after its end, which a killed slurmctld had forgotten.
    """

    run: RunFacts
    record: JobRecord
    pieces: list[JobRecord]
    is_over: bool
    is_sure: bool
    is_latest: bool
    first_submit_us: int
    until_us: int | None = None
    again: list[JobRecord] = msgspec.field(default_factory=list)

    @property
    def key(self) -> RunKey:
        """Key of the run within its job id."""
        return self.run.submit_us, self.run.restarts

    def fact(self, job_id: int, piece: JobRecord | None = None) -> RunEvent:
        """Return the body of an event about the run or one of its pieces."""
        return RunEvent(
            job_id=job_id,
            first_submit=moment(self.first_submit_us),
            restarts=self.run.restarts,
            record=self.record if piece is None else piece,
            piece_end=None if piece is None else piece.end,
            source="" if self.run.is_ours else "slurmdbd",
            suspended_before_s=self.suspended_before_s if piece is None else 0,
        )

    def current(self, job_id: int) -> RunEvent:
        """Return the body for its current size only, which began where the last piece ended."""
        fact = self.fact(job_id)
        if not self.pieces:
            return fact
        record = msgspec.structs.replace(
            self.record,
            start=self.pieces[-1].end,
            suspended_s=max(0, (self.record.suspended_s or 0) - self.suspended_before_s),
        )
        return msgspec.structs.replace(fact, record=record, suspended_before_s=0)

    @property
    def parts(self) -> list[JobRecord]:
        """Pieces and repeated runs, which have lines and charges beside the run's own."""
        return [*self.pieces, *self.again]

    @property
    def suspended_before_s(self) -> int:
        """Suspended time of the former sizes of a resized job, in seconds."""
        return sum(piece.suspended_s or 0 for piece in self.pieces)

    def suspended_between(self, start_us: int, end_us: int) -> int:
        """Return how long the run was suspended while one of its steps ran, in seconds.

        Args:
            start_us: Start of the step, µs since the epoch.
            end_us: End of the step; 0 if it runs.
        """
        whole_s = self.record.suspended_s or 0
        if self.run.halts:
            end_us = end_us or sys.maxsize
            during_s = self.run.suspended_by(end_us) - self.run.suspended_by(start_us)
            return min(during_s, self.suspended_before_s + whole_s) if self.is_over else during_s
        # The suspension times are unknown; only a step as long as the run surely has all of it.
        is_all = (
            abs(start_us - to_micros_or_zero(self.record.start)) <= SLACK_US
            and abs(end_us - to_micros_or_zero(self.record.end)) <= SLACK_US
        )
        return whole_s if is_all and not self.pieces else 0

    def piece_at(self, us: int) -> int:
        """Return the end (µs) of the piece that contains a moment; 0 for the current size."""
        for part in self.again:
            if part.start and part.end and to_micros(part.start) <= us <= to_micros(part.end):
                return to_micros(part.end)
        for piece in self.pieces:
            if piece.end is not None and us < to_micros(piece.end):
                return to_micros(piece.end)
        return 0

    def nodelists(self) -> list[str]:
        """Return the node lists of everything it ran on; empty if unknown."""
        lists = [record.nodelist for record in (self.record, *self.parts)]
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
    found: list[RunView] = []
    before: JobRecord | None = None
    for number, run in enumerate(runs):
        follower = runs[number + 1] if number + 1 < len(runs) else None
        record = job.record if len(job.runs) == 1 else run.merged()
        if run.pieces and run.shown and not run.is_ours:
            record = merge_resized_runs([*(seen.record for seen in run.pieces.values()), record])[
                -1
            ]
        if is_purged:
            record = remove_private_text(record)
        if before is not None:
            record = fill_from_earlier_run(record, before)
        before = record
        ending = run.ending
        is_gone = follower is None and job.is_gone
        found.append(
            RunView(
                run=run,
                record=_complete_times(run, record, follower, is_gone=is_gone),
                pieces=_build_pieces(run, record),
                is_over=ending is not None or follower is not None or is_gone,
                is_sure=ending is not None and ending.record.end is not None,
                is_latest=follower is None,
                first_submit_us=job.first_submit_us,
                until_us=None if follower is None else follower.submit_us,
                again=_build_repeated_runs(run, record, is_purged=is_purged),
            )
        )
    return found


def _drop_duplicate_runs(runs: list[RunFacts]) -> list[RunFacts]:
    """Return the runs without entries that are not runs.

    While a requeued job completes, Slurm shows its new restart count with the old submit time.
    That is not a run yet; of the same count, the later submit time is the run's.
    """
    found: dict[int, RunFacts] = {}
    before: RunFacts | None = None
    for run in runs:
        is_new = before is None or run.submit_us != before.submit_us or run.ending is not None
        if is_new:
            found[run.restarts] = before = run
    return list(found.values())


def _complete_times(
    run: RunFacts, record: JobRecord, follower: RunFacts | None, *, is_gone: bool
) -> JobRecord:
    """Return a run's record with its real times and state."""
    changes: dict[str, object] = {"start": _get_start(run, record)}
    if record.submit is None or record.restarts != run.restarts:
        changes |= {"submit": moment(run.submit_us), "restarts": run.restarts}
    if run.ending is None:
        changes["end"] = None
    if is_gone:
        changes |= {"state": LOST, "reason": ""}
    if run.is_lost and follower is not None:
        # It was gone only until its next run became known.
        changes["state"] = REQUEUED
    if run.ending is None and follower is not None:
        # No source reported the end; it was over when the job was requeued.
        changes |= {"state": REQUEUED, "end": moment(follower.submit_us)}
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
    is_nothing = record.start == record.end and not record.nodelist
    return None if is_nothing else record.start


def _build_repeated_runs(run: RunFacts, record: JobRecord, *, is_purged: bool) -> list[JobRecord]:
    """Return repeated runs after the run's end as records of their own."""
    found = []
    for seen in run.again.values():
        own = remove_private_text(seen.record) if is_purged else seen.record
        submit = moment(run.submit_us)
        found.append(msgspec.structs.replace(fill_from_earlier_run(own, record), submit=submit))
    return found


def _get_suspended_s(
    run: RunFacts, piece: JobRecord, start: datetime | None, end: datetime
) -> int | None:
    """Return the suspended seconds of a piece, from slurmdbd or else from the queue."""
    if piece.suspended_s is not None or not run.halts:
        return piece.suspended_s
    before_s = 0 if start is None else run.suspended_by(to_micros(start))
    return run.suspended_by(to_micros(end)) - before_s


def _build_pieces(run: RunFacts, record: JobRecord) -> list[JobRecord]:
    """Return the former sizes of a run; two reports within seconds count as one."""
    found: list[JobRecord] = []
    if not run.pieces:
        return found
    start = _get_start(run, record)
    for seen in run.pieces.values():
        piece = seen.record
        end = piece.end
        if end is None or (start and end <= start):
            continue
        last = found[-1] if found else None
        if last is not None and last.end is not None and last.nodelist == piece.nodelist:
            is_told_twice = to_micros(end) - to_micros(last.end) <= SLACK_US
            if is_told_twice:
                continue
        start = found[-1].end if found else (start or piece.start)
        full = fill_from_earlier_run(piece, record)
        found.append(
            msgspec.structs.replace(
                full,
                start=start,
                submit=moment(run.submit_us),
                eligible=piece.eligible or record.eligible,
                suspended_s=_get_suspended_s(run, piece, start, end),
            )
        )
    return found
