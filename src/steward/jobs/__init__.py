"""Job records: jobs, runs, steps and scripts in jobs.db, merged from all observations.

:class:`JobsConsumer` writes jobs.db, :class:`Jobs` reads it. Names are imported on first use, so
that a command with one query does not load the consumer.
"""

from typing import TYPE_CHECKING

from steward.core.extensions import lazy_exports

if TYPE_CHECKING:
    from steward.jobs.consumer import JobsConsumer
    from steward.jobs.filters import Job, JobFilter, Position, Run, ScopeLike, Script, identity_of
    from steward.jobs.job_ids import JobName, JobNameError, display, parse
    from steward.jobs.queries import Jobs
    from steward.jobs.run_queries import KeptLaunch
    from steward.jobs.tables import Gap, database_path
else:
    __getattr__ = lazy_exports(
        __name__,
        run_queries=("KeptLaunch",),
        consumer=("JobsConsumer",),
        tables=(
            "Gap",
            "database_path",
        ),
        job_ids=(
            "JobName",
            "JobNameError",
            "display",
            "parse",
        ),
        queries=("Jobs",),
        filters=(
            "Job",
            "JobFilter",
            "Position",
            "Run",
            "ScopeLike",
            "Script",
            "identity_of",
        ),
    )

__all__ = [
    "Gap",
    "Job",
    "JobFilter",
    "JobName",
    "JobNameError",
    "Jobs",
    "JobsConsumer",
    "KeptLaunch",
    "Position",
    "Run",
    "ScopeLike",
    "Script",
    "database_path",
    "display",
    "identity_of",
    "parse",
]
