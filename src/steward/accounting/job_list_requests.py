"""The shapes of lists of jobs: what is asked, and what is answered.

They are part of the same promise as those of ``steward.accounting.job_page.requests``.
"""

from datetime import datetime
from typing import Literal

import msgspec

from steward.archive.requests import Selection
from steward.core.actions import Answer, Shape
from steward.jobs.queries import Order


class JobsRequest(Selection, frozen=True, kw_only=True):
    """accounting.jobs: jobs with what they were given and used.

    Without ``since`` jobs of all time.

    Attributes:
        order: By first submit time, or, for jobs that have ended, by their end; with ``-``
            the latest first.
        arrays: Whether an array is one row, or each of its tasks; by their end tasks are
            always apart.
        limit: How many rows at most.
        page: ``next`` of the answer before, with the same filters and order; "" for the first.
    """

    order: Order = "-submit"
    arrays: Literal["together", "apart"] = "together"
    limit: int = 50
    page: str = ""


class JobRow(Shape, frozen=True, kw_only=True, omit_defaults=True):
    """A job as a list shows it: its last run, or an array as a whole.

    Attributes:
        cluster: Where it ran.
        job: Its name as Slurm prints it; of an array that is one row, the array's.
        job_id: Its raw id; of an array that of one of its tasks.
        array_job_id: The array's id; 0 for none.
        tasks: Of an array that is one row, how many tasks are in each state; such a row
            tells nothing of when it ran and what it used.
        user: What the uid resolved to at submit.
        verified: Whether Slurm has shown it.
        submit: First submit time.
        elapsed_s: From start to end, or to now, without the time that it was suspended.
        waited_s: From when it could start to its start, or to now.
        limit_s: The time limit; None for none.
        cpus: That it was given, or asked for while it waits.
        memory_bytes: Likewise, on all its nodes.
        tres: All of what it was given, or asked for, as Slurm writes it.
        cpu_used_s: CPU time of all its tasks.
        cpu: CPU time over elapsed time times CPUs; None while it runs.
        peak_bytes: Largest sum of memory on one node.
        memory: That over what it was given there.
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
    """Jobs, in the order that was asked for.

    Attributes:
        jobs: The rows.
        next: Give this as ``page`` for what follows; "" where nothing does.
        zones: For each cluster the IANA name of its time zone; "" for the system's.
        now: When this was found out.
    """

    jobs: tuple[JobRow, ...]
    now: datetime
    next: str = ""
    zones: dict[str, str] = msgspec.field(default_factory=dict)


class JobStatesRequest(Selection, frozen=True, kw_only=True):
    """accounting.job_states: how many jobs are in each state; without ``since`` of all time."""


class JobStatesAnswer(Answer, frozen=True, kw_only=True):
    """How many jobs are in each state, each task of an array by itself.

    Attributes:
        states: By state, the most first; tasks that wait together count as one.
        total: All of them.
        is_all: False where there are more than were counted.
    """

    states: dict[str, int]
    total: int
    is_all: bool = True
