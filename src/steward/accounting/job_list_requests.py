"""Job list requests and replies: JobsRequest, JobRow, JobsAnswer, JobStatesRequest.

They are a stable interface, like those of ``steward.accounting.job_page.requests``: fields are
only added, with defaults.
"""

from datetime import datetime
from typing import Annotated, ClassVar, Final, Literal

import msgspec

from steward.accounting.job_page.phrases import describe_exit
from steward.archive.requests import JobSelection
from steward.core.actions import ActionMessage, Answer, described
from steward.core.layouts import Column, Layout, read_user
from steward.jobs.queries import Order

MAX_ROWS: Final = 1000
"""Maximum number of rows in a reply."""


class JobsRequest(JobSelection, frozen=True, kw_only=True):
    """Request of accounting.jobs: list jobs with their resources and usage.

    Without ``since``, jobs of all time.
    """

    order: Annotated[
        Order,
        described(
            "Sort by first submit time, or by end for ended jobs; ``-`` puts the latest first."
        ),
    ] = "-submit"
    arrays: Annotated[
        Literal["together", "apart"],
        described(
            "One row per array, or one per task. A list sorted by end always has one per task."
        ),
    ] = "together"
    limit: Annotated[int, described("Maximum number of rows.", ge=1, le=MAX_ROWS)] = 50
    page: Annotated[
        str,
        described(
            "``next`` of the previous reply, with the same filters and order; first page if empty."
        ),
    ] = ""


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


def _read_path_name(row: JobRow, _: object) -> str | int:
    """Return a job's id for addresses: an array's, not an expression of its tasks."""
    return row.job_id if "[" in row.job else row.job


def _read_state(row: JobRow, _: object) -> str | dict[str, int]:
    """Return a job's state, or the number of an array's tasks in each state."""
    return row.tasks or row.state or ("UNKNOWN" if row.verified else "UNVERIFIED")


def _describe_end(row: JobRow, _: object) -> str:
    return "" if row.tasks else describe_exit(row.exit_code, row.exit_signal)


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
    layout: ClassVar[Layout] = (
        Column("Cluster", "cluster", show="several"),
        Column(
            "JobID",
            "job",
            title="Job",
            link="job",
            target=_read_path_name,
            is_key=True,
            right=True,
        ),
        Column("Name", "name"),
        Column("User", read_user),
        Column("Account", "account"),
        Column("Partition", "partition"),
        Column("QOS", "qos", show="requested"),
        Column("State", _read_state, "state"),
        Column("Reason", "reason", show="requested"),
        Column("Submit", "submit", "time", title="Submitted"),
        Column("Eligible", "eligible", "time", show="requested"),
        Column("Start", "start", "time", title="Started", show="requested"),
        Column("End", "end", "time", title="Ended", show="requested"),
        Column("WaitTime", "waited_s", "duration", title="Wait time", show="requested"),
        Column("Elapsed", "elapsed_s", "duration"),
        Column(
            "Limit",
            lambda row, _: row.limit_s or None,
            "duration",
            title="Time limit",
            show="requested",
        ),
        Column("Nodes", "nodes", "count", show="requested"),
        Column("NodeList", "nodelist", title="Node list", show="requested"),
        Column("CPUs", "cpus", "count"),
        Column("Memory", "memory_bytes", "bytes", show="requested"),
        Column("TRES", "tres", show="requested"),
        Column("CPU", "cpu", "percent", title="CPU efficiency"),
        Column("CPUTime", "cpu_used_s", "duration", title="CPU time", show="requested"),
        Column("Peak", "peak_bytes", "bytes", title="Memory peak"),
        Column("MemUsed", "memory", "percent", title="Memory efficiency", show="requested"),
        Column("Exit", _describe_end, right=True, show="requested"),
        Column("Restarts", lambda row, _: row.restarts or None, "count", show="requested"),
    )


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
