"""Job records: JobRecord, Slurm's fields of one job, and UsageLine, one run or step for accounting.

Sources (polls, jobcomp, sacct) fill a :class:`JobRecord`; consumers read it from events.
:class:`UsageLine` is a row of the table ``line``, which sacct, job pages and reports read.
jobs.db, Parquet files and a job log that is read in have the same columns
(``USAGE_LINE_FIELDS``), so that one view serves all three. It holds plain values, because there
may be millions of them: times are µs since the epoch, UTC; 0 and "" mean unknown, except in fields
that may be None.

Both extend :class:`RunFields`; conversions follow from it and from ``RUN_TIMES``.
"""

from datetime import datetime
from typing import Final

import msgspec


class RunFields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields that the record of a run and its line have in common.

    Text is "" where Slurm shows "(null)" or nothing.

    Attributes:
        job_id: Raw job id (of an array task: its own).
        array_job_id: The array's id, 0 for a job that is no array.
        array_task: Task index, or for tasks not split off yet their expression ("1-9%2").
        het_job_id: The het leader's id, 0 for a job that is not heterogeneous.
        sluid: Slurm's lasting id of this run, where it shows one (26.05).
        original_sluid: The same of the first run; never changes.
        restarts: Restart count: 0 for the first run.
        time_limit_s: Time limit in seconds; None for unlimited or the partition's.
        exit_code: What the job returned, 0 to 255.
        exit_signal: The signal that ended it, 0 for none.
        derived_exit_code: The highest code that any of its steps returned.
        derived_exit_signal: The signal of that step.
        cancelled_by: Uid that cancelled the job; None if nobody did or it is unknown.
        constraints: Requested node features.
        oversubscribe: Whether other jobs may share its nodes: ``NO`` (exclusive nodes),
            ``OK``, ``YES``, ``USER``, ``MCS``.
        name: Name of the job, or of the step.
        user: User name that the uid resolved to at submit.
        state: In capitals, without "by" or "+".
        reason: Slurm's reason for waiting, now or last.
    """

    job_id: int
    name: str = ""
    uid: int | None = None
    user: str = ""
    gid: int | None = None
    group: str = ""
    account: str = ""
    partition: str = ""
    qos: str = ""
    state: str = ""
    reason: str = ""
    array_job_id: int = 0
    array_task: str = ""
    het_job_id: int = 0
    het_offset: int = 0
    sluid: str = ""
    original_sluid: str = ""
    restarts: int = 0
    time_limit_s: int | None = None
    tres_requested: str = ""
    tres_allocated: str = ""
    nodelist: str = ""
    reservation: str = ""
    submit_line: str = ""
    work_dir: str = ""
    stdin: str = ""
    stdout: str = ""
    stderr: str = ""
    comment: str = ""
    admin_comment: str = ""
    exit_code: int | None = None
    exit_signal: int | None = None
    derived_exit_code: int | None = None
    derived_exit_signal: int | None = None
    cancelled_by: int | None = None
    priority: int | None = None
    wckey: str = ""
    constraints: str = ""
    licenses: str = ""
    container: str = ""
    failed_node: str = ""
    system_comment: str = ""
    extra: str = ""
    job_flags: str = ""
    oversubscribe: str = ""


class JobRecord(RunFields, frozen=True, kw_only=True, omit_defaults=True):
    """Slurm's fields of one job at one moment, in Slurm's terms.

    Times are UTC; None where Slurm shows none (Unknown, N/A). Text is "" where Slurm shows
    "(null)" or nothing. Steward looks ``user`` and ``group`` up from the ids; they are "" for ids
    that do not resolve and never Slurm's text.

    Attributes:
        submit: Submit time of this run (a requeue changes it).
        min_memory_mib: Requested minimum memory in MiB, per node or per CPU: squeue does not tell
            which. 0 for all memory of each node; None if unknown.
        batch: Whether it has a batch script.
        suspended_at: Time of the last suspend or resume.
        suspended_s: Total time of completed suspensions, in seconds.
        resized_at: Time of the last resize.
        federation_origin: Name of the cluster that it was submitted to; "" for this one.
        federation_siblings: Names of clusters that hold a copy of it, as Slurm lists them.
        tres_per_job: GRES and licenses requested for the whole job (``gres/gpu:2``), as Slurm
            writes them; requests per node, socket and task are in the next fields. TRES that
            Slurm counts for no job appear only here.
        cpus_per_tres: CPUs requested with each TRES (``gres/gpu:4``).
        mem_per_tres: Memory requested with each TRES, in MiB.
    """

    batch: bool | None = None
    submit: datetime | None = None
    eligible: datetime | None = None
    start: datetime | None = None
    end: datetime | None = None
    nodes: int | None = None
    cpus: int | None = None
    tasks: int | None = None
    min_memory_mib: int | None = None
    dependency: str = ""
    submit_host: str = ""
    command: str = ""
    suspended_at: datetime | None = None
    suspended_s: int | None = None
    resized_at: datetime | None = None
    requested_cpus: int | None = None
    requested_nodes: int | None = None
    batch_host: str = ""
    federation_origin: str = ""
    federation_siblings: str = ""
    tres_per_job: str = ""
    tres_per_node: str = ""
    tres_per_socket: str = ""
    tres_per_task: str = ""
    cpus_per_tres: str = ""
    mem_per_tres: str = ""


class UsageLine(RunFields, frozen=True, kw_only=True, omit_defaults=True):
    """Accounting record of one run, one piece of a resized job's run, or one step.

    Attributes:
        cluster: Name of the cluster.
        label: The job as Slurm prints it: 123, 123_7, 123_[1-9%2], 123+1; no step behind it.
        step: ``batch``, ``extern``, ``interactive``, ``0`` …; "" for the run itself.
        first_submit_us: First submit time; with cluster and job_id the job's identity.
        piece_us: End time of a resized job's earlier size ("piece"); 0 for a whole run.
        is_latest: Whether it is of the job's last run and not an earlier size: without
            --duplicates sacct shows no other.
        suspended_s: Time suspended, in seconds.
        tasks: Number of tasks that ended, or that were started where that is known better.
        user_us: User CPU time, µs, of all tasks; of a run of all its steps. None if unknown.
        system_us: System CPU time likewise.
        cgroup_user_us: User CPU time of the cgroups, where higher (daemonised processes).
        cgroup_system_us: System CPU time of the cgroups, where higher.
        max_rss_bytes: Largest peak of a task; of one node where a task's is not known.
        max_rss_node: Node of that peak.
        max_rss_task: Task of that peak; None if it is not a task's.
        ave_rss_bytes: Mean over the tasks whose peak is known.
        peak_bytes: Largest sum of memory on one node; without cgroup data the largest
            process's peak, a lower bound.
        peak_node: Node of that sum.
        peak_allocated_bytes: Memory allocated on that node; None if unknown.
        doubts: Missing or doubtful data, comma-separated: ``no-start``, ``no-end``,
            ``tasks-missing``, ``lost-lines``.
        source: Origin of the record: "" for Steward's own sources, ``slurmdbd`` for imported
            history.
    """

    cluster: str
    label: str
    step: str = ""
    first_submit_us: int = 0
    piece_us: int = 0
    is_latest: int = 1
    submit_us: int = 0
    eligible_us: int = 0
    start_us: int = 0
    end_us: int = 0
    suspended_s: int = 0
    nodes: int = 0
    cpus: int = 0
    requested_cpus: int = 0
    requested_nodes: int = 0
    tasks: int = 0
    user_us: int | None = None
    system_us: int | None = None
    cgroup_user_us: int | None = None
    cgroup_system_us: int | None = None
    min_cpu_us: int | None = None
    min_cpu_node: str = ""
    min_cpu_task: int | None = None
    ave_cpu_us: int | None = None
    max_rss_bytes: int | None = None
    max_rss_node: str = ""
    max_rss_task: int | None = None
    ave_rss_bytes: int | None = None
    peak_bytes: int | None = None
    peak_node: str = ""
    peak_allocated_bytes: int | None = None
    max_pages: int | None = None
    max_pages_node: str = ""
    max_pages_task: int | None = None
    ave_pages: int | None = None
    max_read_bytes: int | None = None
    max_read_node: str = ""
    max_read_task: int | None = None
    ave_read_bytes: int | None = None
    read_bytes: int | None = None
    max_written_bytes: int | None = None
    max_written_node: str = ""
    max_written_task: int | None = None
    ave_written_bytes: int | None = None
    written_bytes: int | None = None
    minor_faults: int | None = None
    doubts: str = ""
    source: str = ""


USAGE_LINE_FIELDS: Final = UsageLine.__struct_fields__
"""Field names of a UsageLine, which are the columns of the table ``line`` and of Parquet files."""

RUN_TIMES: Final = ("submit", "eligible", "start", "end")
"""Times of a run: fields of its record, and with ``_us`` of its line."""
