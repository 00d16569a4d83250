"""Who is who: which runs and which scripts of one job id make one job.

A pure function of all that is known of (cluster, job id), so that facts may
come in any order. Runs and scripts are walked through by time, and each either
goes on with the job before it or begins another.
"""

from datetime import datetime
from typing import Final

import msgspec

from steward.core.records import JobRecord
from steward.core.timestamps import micros
from steward.jobs.run_merge import RunFacts, merge_runs
from steward.slurm.job_states import LOST

SLACK_US: Final = 2_000_000
"""Submit times have whole seconds, and the spool's clock may be another machine's."""

PROMPT_US: Final = 60_000_000
"""slurmctld writes a script while it answers the submission. A script that is later than
this is of a job only if Slurm still showed the job after it: of a re-used id the
script may be seen before the record, and must not go to the former owner."""


class KeptScript(msgspec.Struct):
    """What resolving needs to know of a script."""

    key: str
    spool_mtime_ns: int
    purged: bool = False

    @property
    def mtime_us(self) -> int:
        """Time of the script, µs since the epoch."""
        return self.spool_mtime_ns // 1000


class Resolved(msgspec.Struct):
    """One job, as the facts show it.

    Attributes:
        first_submit_us: Submit time of its first run, µs since the epoch.
        runs: Its runs, first to last; none if Slurm has not shown it.
        scripts: Its scripts, oldest first.
        record: Made of the runs; None if there are none.
        is_replaced: Whether Slurm gave its id to another job, and so has it no more.
    """

    first_submit_us: int
    runs: list[RunFacts]
    scripts: list[KeptScript]
    record: JobRecord | None = None
    is_replaced: bool = False

    @property
    def latest(self) -> RunFacts:
        """The last run that is known."""
        return self.runs[-1]

    @property
    def is_gone(self) -> bool:
        """Whether it is over because it is replaced: nothing told that it ended."""
        return self.is_replaced and not self.latest.is_over

    @property
    def is_over(self) -> bool:
        """Whether its last run ended, and was not requeued for another."""
        return self.is_replaced or self.latest.is_over

    def goes_on_with(self, run: RunFacts, record: JobRecord) -> bool:
        """Whether ``run``, the next in time, is of this job."""
        mine = self.record
        if mine is None:
            return run.restarts > 0
        # To jobcomp plugins Slurm 26.05 gives as the original id of a later run that run's own.
        is_told = run.restarts == 0 or record.original_sluid != record.sluid
        if mine.original_sluid and record.original_sluid and is_told:
            return mine.original_sluid == record.original_sluid
        if run.restarts == 0 or run.restarts < self.latest.restarts:
            return False
        return (
            _agree(mine.uid, record.uid, None)
            and _agree(mine.array_job_id, record.array_job_id, 0)
            and _agree(mine.het_job_id, record.het_job_id, 0)
        )

    def takes(self, script: KeptScript) -> bool:
        """Whether ``script``, which is not older than this job, is of this job."""
        # Of a het job's component that was requeued, slurmctld forgets that it has a script.
        if not any(may_have_script(run.merged()) for run in self.runs):
            return False
        if script.mtime_us <= max(run.shown_until_us for run in self.runs):
            return True
        return not self.scripts and script.mtime_us <= self.first_submit_us + PROMPT_US


def may_have_script(record: JobRecord) -> bool:
    """Whether the spool can hold a script under the job's own id.

    An array has one for all its tasks; of a het job sbatch gives each component but the
    leader a stand-in, which never runs, and an environment of its own.
    """
    return record.batch is not False and record.array_job_id in (0, record.job_id)


def is_prompt(spool_mtime_ns: int, submit: datetime) -> bool:
    """Whether a script of this time was written at a submission."""
    return -SLACK_US <= spool_mtime_ns // 1000 - micros(submit) <= PROMPT_US


def resolve(runs: list[RunFacts], scripts: list[KeptScript]) -> list[Resolved]:
    """The jobs that had one id, oldest first.

    Args:
        runs: All that is known of runs under this id.
        scripts: All scripts that were kept under this id.
    """
    jobs: list[Resolved] = []
    runs = [run for run in runs if not run.is_forgotten]
    # A script comes after the record of its own submission, whatever the clocks say.
    items: list[tuple[tuple[int, int, int, str], RunFacts | KeptScript]] = [
        ((run.submit_us, 0, run.restarts, ""), run) for run in runs
    ]
    items += [((script.mtime_us + SLACK_US, 1, 0, script.key), script) for script in scripts]
    items.sort(key=lambda item: item[0])
    for _order, item in items:
        current = jobs[-1] if jobs else None
        if isinstance(item, RunFacts):
            _place_run(jobs, current, item)
        elif current is not None and current.takes(item):
            _give(current, item)
        else:
            jobs.append(Resolved(whole_second(item.mtime_us), [], [item]))
    return jobs


def _place_run(jobs: list[Resolved], current: Resolved | None, run: RunFacts) -> None:
    record = run.merged()
    if current is not None and current.goes_on_with(run, record):
        current.runs.append(run)
        current.record = merge_runs(current.runs)
    else:
        _replace(jobs, run)
        jobs.append(Resolved(run.submit_us, [run], [], record))


def _replace(jobs: list[Resolved], run: RunFacts) -> None:
    """The job that had the id until now is over.

    A slurmctld that was killed forgot it, and nobody may have looked before the id was used
    again. Where it was shown after that, another crash brought it back.
    """
    former = next((job for job in reversed(jobs) if job.runs), None)
    if former is not None:
        shown_until_us = max(one.shown_until_us for one in former.runs)
        former.is_replaced = shown_until_us <= run.submit_us + SLACK_US
        if former.record is not None and former.is_gone:
            former.record = msgspec.structs.replace(former.record, state=LOST, reason="")


def _give(job: Resolved, script: KeptScript) -> None:
    if job.runs[0].restarts > 0:
        # Its first run was never seen, but the script was written at its submission.
        job.first_submit_us = min(job.first_submit_us, whole_second(script.mtime_us))
    job.scripts.append(script)


def whole_second(us: int) -> int:
    """The submit time that Slurm would show of a script with this time, µs since the epoch."""
    return us // 1_000_000 * 1_000_000


def _agree(mine: int | None, theirs: int | None, unknown: int | None) -> bool:
    return unknown in (mine, theirs) or mine == theirs
