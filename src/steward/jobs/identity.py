"""Job identity: assigns the runs and scripts of one job id to jobs.

:func:`resolve_jobs` is a pure function of everything known about (cluster, job id), so events may
come in any order. It walks through runs and scripts by time; each either continues the preceding
job or starts a new one, because Slurm reuses job ids.
"""

from datetime import datetime
from typing import Final

import msgspec

from steward.core.records import JobRecord
from steward.core.timestamps import to_micros
from steward.jobs.run_merge import RunFacts, merge_runs
from steward.slurm.job_states import LOST

SLACK_US: Final = 2_000_000
"""Tolerance between times, in µs.

Submit times have whole seconds and the spool's clock may be another machine's.
"""

PROMPT_US: Final = 60_000_000
"""Longest time from submission to script, in µs.

slurmctld writes the script while it answers the submission. A later script belongs to a job only
if Slurm still showed the job after it: with a reused id the script may be seen before the record,
and must not go to the former owner.
"""


class StoredScriptFacts(msgspec.Struct):
    """Script of a job id, as far as resolving needs it."""

    key: str
    spool_mtime_ns: int
    purged: bool = False

    @property
    def mtime_us(self) -> int:
        """Modification time of the script, µs since the epoch."""
        return self.spool_mtime_ns // 1000


class ResolvedJob(msgspec.Struct):
    """Job as resolved from runs and scripts.

    Attributes:
        first_submit_us: Submit time of its first run, µs since the epoch.
        runs: Its runs, first to last; empty if Slurm has not shown it.
        scripts: Its scripts, oldest first.
        record: Record merged from the runs; None without runs.
        is_replaced: Whether Slurm gave its id to another job and no longer has it.
    """

    first_submit_us: int
    runs: list[RunFacts]
    scripts: list[StoredScriptFacts]
    record: JobRecord | None = None
    is_replaced: bool = False

    @property
    def latest(self) -> RunFacts:
        """Last known run."""
        return self.runs[-1]

    @property
    def is_gone(self) -> bool:
        """Whether the job ended only because another one took its id; no source reported an end."""
        return self.is_replaced and not self.latest.is_over

    @property
    def is_over(self) -> bool:
        """Whether its last run ended without a requeue."""
        return self.is_replaced or self.latest.is_over

    def continues_with(self, run: RunFacts, record: JobRecord) -> bool:
        """Return True if ``run``, the next in time, belongs to this job."""
        own_record = self.record
        if own_record is None:
            return run.restarts > 0
        # To jobcomp plugins, Slurm 26.05 gives a later run's own SLUID as the original SLUID.
        is_reliable = run.restarts == 0 or record.original_sluid != record.sluid
        if own_record.original_sluid and record.original_sluid and is_reliable:
            return own_record.original_sluid == record.original_sluid
        if run.restarts == 0 or run.restarts < self.latest.restarts:
            return False
        return (
            _is_compatible(own_record.uid, record.uid, None)
            and _is_compatible(own_record.array_job_id, record.array_job_id, 0)
            and _is_compatible(own_record.het_job_id, record.het_job_id, 0)
        )

    def owns_script(self, script: StoredScriptFacts) -> bool:
        """Return True if ``script``, which is not older than this job, belongs to it."""
        # slurmctld forgets that a requeued het component has a script.
        if not any(may_have_script(run.merge_record()) for run in self.runs):
            return False
        if script.mtime_us <= max(run.confirmed_until_us for run in self.runs):
            return True
        return not self.scripts and script.mtime_us <= self.first_submit_us + PROMPT_US


def may_have_script(record: JobRecord) -> bool:
    """Return True if the spool can hold a script under the job's own id.

    An array has one script for all tasks. For a het job, sbatch gives each component but the
    leader a stand-in script, which never runs, and an environment of its own.
    """
    return record.batch is not False and record.array_job_id in (0, record.job_id)


def is_prompt(spool_mtime_ns: int, submit: datetime) -> bool:
    """Return True if a script was written at this submission, judging by its time."""
    return -SLACK_US <= spool_mtime_ns // 1000 - to_micros(submit) <= PROMPT_US


def resolve_jobs(runs: list[RunFacts], scripts: list[StoredScriptFacts]) -> list[ResolvedJob]:
    """Resolve the runs and scripts of one job id into jobs, oldest first.

    Args:
        runs: All known runs of this id.
        scripts: All stored scripts of this id.
    """
    jobs: list[ResolvedJob] = []
    runs = [run for run in runs if not run.is_forgotten]
    # A script follows the record of its own submission, whatever the clocks say.
    items: list[tuple[tuple[int, int, int, str], RunFacts | StoredScriptFacts]] = [
        ((run.submit_us, 0, run.restarts, ""), run) for run in runs
    ]
    items += [((script.mtime_us + SLACK_US, 1, 0, script.key), script) for script in scripts]
    items.sort(key=lambda item: item[0])
    for _order, item in items:
        current = jobs[-1] if jobs else None
        if isinstance(item, RunFacts):
            _place_run(jobs, current, item)
        elif current is not None and current.owns_script(item):
            _attach_script(current, item)
        else:
            jobs.append(ResolvedJob(floor_to_second(item.mtime_us), [], [item]))
    return jobs


def _place_run(jobs: list[ResolvedJob], current: ResolvedJob | None, run: RunFacts) -> None:
    """Add a run to the current job, or start a new job with it."""
    record = run.merge_record()
    if current is not None and current.continues_with(run, record):
        current.runs.append(run)
        current.record = merge_runs(current.runs)
    else:
        _mark_replaced(jobs, run)
        jobs.append(ResolvedJob(run.submit_us, [run], [], record))


def _mark_replaced(jobs: list[ResolvedJob], run: RunFacts) -> None:
    """Mark the former job of the id as over.

    A killed slurmctld forgot it, perhaps without any poll before the id was reused. If Slurm
    showed it after that, another crash brought it back.
    """
    former = next((job for job in reversed(jobs) if job.runs), None)
    if former is not None:
        shown_until_us = max(former_run.confirmed_until_us for former_run in former.runs)
        former.is_replaced = shown_until_us <= run.submit_us + SLACK_US
        if former.record is not None and former.is_gone:
            former.record = msgspec.structs.replace(former.record, state=LOST, reason="")


def _attach_script(job: ResolvedJob, script: StoredScriptFacts) -> None:
    """Add a script to a job."""
    if job.runs[0].restarts > 0:
        # The first run was missed, but the script dates from its submission.
        job.first_submit_us = min(job.first_submit_us, floor_to_second(script.mtime_us))
    job.scripts.append(script)


def floor_to_second(us: int) -> int:
    """Return the submit time Slurm would show for a script of this time, µs since the epoch."""
    return us // 1_000_000 * 1_000_000


def _is_compatible(first: int | None, second: int | None, unknown: int | None) -> bool:
    """Return True if two values are equal, or one is unknown."""
    return unknown in (first, second) or first == second
