"""Puts together what a job log tells of one run, into the lines that sacct shows of it."""

from collections.abc import Iterator
from datetime import datetime

import msgspec

from steward.core.lines import Line
from steward.core.moments import micros, moment
from steward.core.usage import RunFact, StepUsage, TaskUsage
from steward.extensions.jobacct_plugins.log.records import (
    AnyRecord,
    JobAccounted,
    JobStart,
    JobStep,
    JobSuspend,
    JobTask,
    JobTerminated,
)
from steward.jobs.lines import rank_of
from steward.jobs.usage import add_steps, as_step_of, run_line, step_line
from steward.slurm.states import base_state

_Launch = tuple[str, str, int]


class RunRecords:
    """What is told of one run; of what is told twice, the later counts."""

    def __init__(self) -> None:
        self._of_run: JobTerminated | JobStart | JobSuspend | None = None
        self._pieces: dict[datetime, JobTerminated] = {}
        self._launches: dict[_Launch, JobStep] = {}
        self._tasks: dict[_Launch, dict[int, TaskUsage]] = {}
        self._accounted: dict[str, JobAccounted] = {}

    def add(self, record: AnyRecord) -> None:
        """Take in the next record of the run."""
        if isinstance(record, JobTask):
            of_launch = self._tasks.setdefault(_launch(record), {})
            of_launch[record.task.task] = record.task
        elif isinstance(record, JobStep) and record.withdrawn:
            self._launches.pop(_launch(record), None)
            self._tasks.pop(_launch(record), None)
        elif isinstance(record, JobStep):
            self._launches[_launch(record)] = record
        elif isinstance(record, JobAccounted):
            self._accounted[record.line.step] = record
        elif isinstance(record, JobTerminated) and record.piece_end is not None:
            self._pieces[record.piece_end] = record
        elif isinstance(record, JobTerminated) or not isinstance(self._of_run, JobTerminated):
            # How a run ended is said by no record of its start, however late that comes.
            self._of_run = record

    def lines(self, *, is_latest: bool) -> Iterator[Line]:
        """The run's former sizes and the run, each before its steps in Slurm's order.

        Args:
            is_latest: Whether it is the job's last run.
        """
        ends = sorted(self._pieces)
        for end in ends:
            yield from self._part(self._pieces[end], _fact(self._pieces[end]), is_latest=False)
        if self._of_run is None:
            return
        fact = _fact(self._of_run)
        if ends:
            # Its current size began where the last former one ended.
            current = msgspec.structs.replace(fact.record, start=ends[-1])
            fact = msgspec.structs.replace(fact, record=current)
        # Another run of what was requeued follows, whether or not anybody has told of it yet.
        is_latest = is_latest and base_state(fact.record.state) != "REQUEUED"
        yield from self._part(self._of_run, fact, is_latest=is_latest)

    def _part(
        self, record: JobTerminated | JobStart | JobSuspend, fact: RunFact, *, is_latest: bool
    ) -> Iterator[Line]:
        run = run_line(record.cluster, fact, is_latest=is_latest, source=record.source)
        steps = sorted(self._steps(run), key=lambda line: (rank_of(line.step), line.step))
        yield add_steps(run, steps)
        yield from steps

    def _steps(self, run: Line) -> Iterator[Line]:
        by_step: dict[str, list[StepUsage]] = {}
        for launch in {**self._launches, **self._tasks}:
            if self._piece_at(launch[2]) == run.piece_us:
                usage = self._usage(run, launch)
                by_step.setdefault(usage.step, []).append(usage)
        for launches in by_step.values():
            yield step_line(run, launches, is_over=isinstance(self._of_run, JobTerminated))
        if run.piece_us:
            return
        known = {step for step, _, _ in {**self._launches, **self._tasks}}
        for step, accounted in self._accounted.items():
            if step not in known:
                yield as_step_of(run, accounted.line)

    def _piece_at(self, us: int) -> int:
        """The end (µs) of the piece in whose time this moment is; 0 for the current size."""
        ends = (micros(end) for end in sorted(self._pieces))
        return next((end_us for end_us in ends if us < end_us), 0)

    def _usage(self, run: Line, launch: _Launch) -> StepUsage:
        tasks = self._tasks.get(launch, {})
        usage = StepUsage(
            job_id=run.job_id,
            first_submit=moment(run.first_submit_us),
            restarts=run.restarts,
            step=launch[0],
            node=launch[1],
            launched_us=launch[2],
            tasks=tuple(tasks[number] for number in sorted(tasks)),
        )
        record = self._launches.get(launch)
        if record is None:
            return usage
        return msgspec.structs.replace(
            usage, ended_us=record.ended_us, start=record.start, end=record.end
        )


def _launch(record: JobStep | JobTask) -> _Launch:
    return record.step, record.node, record.launched_us


def _fact(record: JobTerminated | JobStart | JobSuspend) -> RunFact:
    return RunFact(
        job_id=record.job_id,
        first_submit=record.first_submit,
        restarts=record.restarts,
        record=record.job,
        piece_end=record.piece_end if isinstance(record, JobTerminated) else None,
    )
