"""Job records: jobs, runs, steps and scripts in jobs.db, merged from all observations.

:class:`JobsConsumer` writes jobs.db, :class:`Jobs` reads it. Names are imported on first use, so
that a command with one query does not load the consumer.

Path of an event: ``consumer`` receives it, ``event_intake`` adds it to the group of its job id
(``tables``), ``run_merge`` and ``identity`` resolve the group into runs and jobs,
``accounting_update`` attributes ``launches`` to runs (``run_views``) and writes accounting
``lines`` (``usage``) and their ``day_sums``, ``run_events`` makes the resulting events, ``writes``
stores the group, and ``outbox`` appends the events to the journal. ``queries``, ``run_queries`` and
``filters`` read jobs.db; ``line_queries`` and ``line_sources`` read lines, also of files;
``day_sum_queries`` reads sums (``sum_tables``) for reports; ``retention`` purges and expires.
"""

from typing import TYPE_CHECKING

from steward.core.extensions import make_lazy_getattr

if TYPE_CHECKING:
    from steward.jobs.consumer import JobsConsumer
    from steward.jobs.filters import (
        Job,
        JobFilter,
        JobScope,
        ListPosition,
        Run,
        Script,
        build_identity,
    )
    from steward.jobs.job_ids import JobName, JobNameError, format_job_name, parse_job_name
    from steward.jobs.queries import Jobs
    from steward.jobs.run_queries import StoredLaunch
    from steward.jobs.tables import NodeLoss, database_path
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        run_queries=("StoredLaunch",),
        consumer=("JobsConsumer",),
        tables=(
            "NodeLoss",
            "database_path",
        ),
        job_ids=(
            "JobName",
            "JobNameError",
            "format_job_name",
            "parse_job_name",
        ),
        queries=("Jobs",),
        filters=(
            "Job",
            "JobFilter",
            "ListPosition",
            "Run",
            "JobScope",
            "Script",
            "build_identity",
        ),
    )

__all__ = [
    "Job",
    "JobFilter",
    "JobName",
    "JobNameError",
    "JobScope",
    "Jobs",
    "JobsConsumer",
    "ListPosition",
    "NodeLoss",
    "Run",
    "Script",
    "StoredLaunch",
    "build_identity",
    "database_path",
    "format_job_name",
    "parse_job_name",
]
