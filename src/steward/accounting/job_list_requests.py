"""Job list requests and replies: JobsRequest, JobRow, JobsAnswer, JobStatesRequest.

They are a stable interface, like those of ``steward.accounting.job_page.requests``: fields are
only added, with defaults.
"""

from datetime import datetime
from typing import Literal

import msgspec

from steward.archive.requests import JobSelection
from steward.core.actions import ActionMessage, Answer
from steward.jobs.queries import Order


class JobsRequest(JobSelection, frozen=True, kw_only=True):
    """Request of accounting.jobs: list jobs with their resources and usage.

    Without ``since``, jobs of all time.

    Attributes:
        order: Sort by first submit time, or by end for ended jobs; ``-`` puts the latest first.
        arrays: One row per array, or one per task; sorted by end, tasks are always separate.
        limit: Maximum number of rows.
        page: ``next`` of the previous reply, with the same filters and order; "" for the first
            page.
    """

    order: Order = "-submit"
    arrays: Literal["together", "apart"] = "together"
    limit: int = 50
    page: str = ""


class JobRow(ActionMessage, frozen=True, kw_only=True, omit_defaults=True):
    """Row of a job list: the last run of a job, or an array as a whole.

    Attributes:
        cluster: Cluster name.
        job: Job name as Slurm prints it; for an array's row, the array's.
        job_id: Raw id; for an array's row, that of one of its tasks.
        array_job_id: Id of its array; 0 if none.
        tasks: Number of tasks by state, in an array's row; such a row has no times and no usage.
        user: User name at submit time.
        verified: Whether Slurm has shown it.
        submit: First submit time.
        elapsed_s: Seconds from start to end or now, without suspension.
        waited_s: Seconds from eligible time to start or now.
        limit_s: Time limit in seconds; None if none.
        cpus: Allocated CPUs; requested ones while pending.
        memory_bytes: Allocated memory on all nodes; requested while pending.
        tres: Allocated TRES as Slurm writes them; requested ones while pending.
        cpu_used_s: CPU time of all tasks, in seconds.
        cpu: CPU efficiency: CPU time over elapsed time times CPUs; None while running.
        peak_bytes: Largest memory use on one node.
        memory: Memory efficiency: that peak over the memory allocated there.
    """

    cluster: str
    job: str
    job_id: int
    array_job_id: int = 0
    tasks: dict[str, int] = msgspec.field(default_factory=dict)
    name: str = ""
    user: str = ""
    uid: int | None = None
    account: str = ""
    partition: str = ""
    qos: str = ""
    state: str = ""
    reason: str = ""
    verified: bool = True
    submit: datetime | None = None
    eligible: datetime | None = None
    start: datetime | None = None
    end: datetime | None = None
    elapsed_s: float | None = None
    waited_s: float | None = None
    limit_s: int | None = None
    nodes: int | None = None
    nodelist: str = ""
    cpus: int | None = None
    memory_bytes: int | None = None
    tres: str = ""
    cpu_used_s: float | None = None
    cpu: float | None = None
    peak_bytes: int | None = None
    memory: float | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    restarts: int = 0


class JobsAnswer(Answer, frozen=True, kw_only=True):
    """Reply of accounting.jobs: one page of rows.

    Attributes:
        jobs: The rows.
        next: Pass this as ``page`` for the next page; "" on the last.
        zones: IANA time zone of each cluster; "" for the system's.
        now: Time of the reply.
    """

    jobs: tuple[JobRow, ...]
    now: datetime
    next: str = ""
    zones: dict[str, str] = msgspec.field(default_factory=dict)


class JobStatesRequest(JobSelection, frozen=True, kw_only=True):
    """Request of accounting.job_states: count jobs by state; without ``since``, of all time."""


class JobStatesAnswer(Answer, frozen=True, kw_only=True):
    """Reply of accounting.job_states; each array task counts.

    Attributes:
        states: Number of jobs by state, largest first; pending tasks that share a record count as
            one.
        total: Sum of all states.
        is_all: False if counting stopped at a limit.
    """

    states: dict[str, int]
    total: int
    is_all: bool = True
