"""Who is who: jobs, runs and scripts, kept in jobs.db.

What the room offers is imported when it is first named: a command that asks
jobs.db one question need not load the consumer that keeps it.
"""

from typing import TYPE_CHECKING

from steward.core.offered import offered

if TYPE_CHECKING:
    from steward.jobs.accounts import KeptLaunch
    from steward.jobs.consumer import JobsConsumer
    from steward.jobs.gaps import Gap
    from steward.jobs.names import JobName, JobNameError, display, parse
    from steward.jobs.place import database_path
    from steward.jobs.queries import Jobs
    from steward.jobs.records import Job, JobFilter, Position, Run, ScopeLike, Script, identity_of
else:
    __getattr__ = offered(
        __name__,
        accounts=("KeptLaunch",),
        consumer=("JobsConsumer",),
        gaps=("Gap",),
        names=("JobName", "JobNameError", "display", "parse"),
        place=("database_path",),
        queries=("Jobs",),
        records=("Job", "JobFilter", "Position", "Run", "ScopeLike", "Script", "identity_of"),
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
