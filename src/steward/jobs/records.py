"""What jobs.db answers with, and how it is asked: the structs that other rooms build on."""

from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

import msgspec

from steward.core.events import JobIdentity, JobScript
from steward.core.records import JobRecord
from steward.jobs.names import display


class ScopeLike(Protocol):
    """Whose jobs of one cluster somebody may see; ``steward.core.access.Scope`` is one."""

    @property
    def everything(self) -> bool:
        """All of them; the other attributes then do not matter."""

    @property
    def uid(self) -> int | None:
        """Those of this uid."""

    @property
    def user(self) -> str:
        """Of those only what was submitted under this name; "" for any name."""

    @property
    def accounts(self) -> frozenset[str]:
        """Beside these, all that were charged to one of these accounts."""


Position = tuple[datetime, int, int]
"""First submit time, job id and number: submit times are in whole seconds."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One job: (cluster, job id, first submit time), however often it ran.

    Attributes:
        number: Its row in jobs.db; not lasting, only to be used with the database at hand.
        cluster: The cluster's name.
        job_id: The raw id (of an array task: its own).
        first_submit: Submit time of the first run, UTC; of a job that Slurm has not
            confirmed, and of one whose first run was never seen, the script's time.
        verified: Whether Slurm has shown this job. If not, only ``name`` is known, and
            that is what the environment claims.
        purged: Whether its script was purged, and its private text with it.
        ended: Whether its last run is over (and was not requeued).
        record: The latest that is known. ``user`` is the name that the uid resolved to
            when the job was first seen; state and times are those of the last run.
        script_key: Key of the job.script event; of an array task that of its array's
            script, of a het component that of its leader's. "" if there is none.
    """

    number: int
    cluster: str
    job_id: int
    first_submit: datetime
    verified: bool
    record: JobRecord
    purged: bool = False
    ended: bool = False
    script_key: str = ""

    @property
    def label(self) -> str:
        """The job's name as Slurm prints it: 123, 123_7, 123_[1-9%2], 123+1."""
        return display(self.record)

    @property
    def position(self) -> "Position":
        """Where it stands in a list, newest first: what ``Jobs.list`` takes as ``before``."""
        return self.first_submit, self.job_id, self.number


def identity_of(job: Job, script_key: str) -> JobIdentity | None:
    """What the consumer ``jobs`` has said of a script's job.

    Args:
        job: The job that the script itself belongs to, see ``Jobs.by_script``.
        script_key: Key of the job.script event.

    Returns:
        Whose it is; None while Slurm has not shown the job.
    """
    if not job.verified:
        return None
    return JobIdentity(
        script_key=script_key,
        job_id=job.job_id,
        first_submit=job.first_submit,
        record=job.record,
    )


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a job: (job, restart count).

    Attributes:
        restarts: Restart count; 0 for the first run.
        submit: Its submit time, UTC (a requeue changes it).
        ended: Whether it is over.
        record: The latest that is known of this run; its ``end`` is the first that was
            reported as final.
        late_end: End time, UTC, of a second end record, as Slurm before 25.11 writes one
            when a finished job is requeued: recorded, never to be used. None if there is none.
    """

    restarts: int
    submit: datetime
    ended: bool
    record: JobRecord
    late_end: datetime | None = None


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One kept script.

    Attributes:
        key: Key of the job.script event.
        cluster: The cluster's name.
        body: What the event said.
        job_number: ``Job.number`` of the job that it belongs to.
    """

    key: str
    cluster: str
    body: JobScript
    job_number: int


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs to list; an empty tuple or None does not restrict.

    Attributes:
        clusters: Names of clusters.
        users: Names at submit, or uids in digits.
        accounts: Accounts, in lower case as Slurm keeps them.
        partitions: Partitions; a job submitted to several ("a,b") matches each.
        names: Job names as shell patterns (``*``, ``?``, ``[…]``), case-sensitive.
        states: States as Slurm spells them ("FAILED"), in any case.
        jobs: Jobs as Slurm names them ("123" with all tasks of an array and all
            components of a het job, "123_7", "123+1", a SLUID).
        since: First submit at this time or later.
        until: First submit before this time.
        with_script: Only jobs with (True) or without (False) a script of their own.
        scopes: Who asks may see these, by cluster; a cluster that is not in it is not
            shown. None for everything.
    """

    clusters: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    with_script: bool | None = None
    scopes: Mapping[str, ScopeLike] | None = None
