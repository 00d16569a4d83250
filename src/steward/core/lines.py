"""A line of accounting: what sacct shows of one run, of a piece of one, or of one step.

The same fields stand in jobs.db, in Parquet and in what a job log is read
into, so that one view serves all three. A line holds plain values, for there
may be millions: times are µs since the epoch (UTC), 0 and "" stand for what is
not known unless None does.
"""

from typing import Final

import msgspec


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line.

    Attributes:
        cluster: The cluster's name.
        job_id: The raw job id.
        label: The job as Slurm prints it: 123, 123_7, 123_[1-9%2], 123+1; no step behind it.
        step: ``batch``, ``extern``, ``interactive``, ``0`` …; "" for the run itself.
        first_submit_us: With cluster and job_id the job's identity.
        restarts: With those, the run's.
        piece_us: Of a former size of a resized job, when that piece ended; 0 for a run.
        is_latest: Whether it is of the job's last run, and no former piece: without
            --duplicates sacct shows no other.
        name: Of the job; of a step its own.
        user: What the uid resolved to at submit.
        state: In capitals, without "by" or "+".
        reason: Why it waits, or waited last.
        suspended_s: Seconds that it was suspended.
        time_limit_s: Time limit; None for unlimited or the partition's.
        tasks: How many tasks ended, or were started where that is known better.
        user_us: User CPU time, µs, of all tasks; of a run of all its steps. None if unknown.
        system_us: System CPU time likewise.
        cgroup_user_us: The same of the cgroups, where those had more (daemonised processes).
        cgroup_system_us: Likewise.
        max_rss_bytes: Largest peak of a task; of one node where a task's is not known.
        max_rss_node: Where that was.
        max_rss_task: Which task it was; None if it is not a task's.
        ave_rss_bytes: Mean of the tasks whose peak is known.
        peak_bytes: Largest sum of memory on one node; where no cgroup tells, the largest
            process's, which is the least that it can have been.
        peak_node: Where that was.
        peak_allocated_bytes: Memory that was allocated there; None if unknown.
        doubts: What is missing or doubtful, with commas between: ``no-start``, ``no-end``,
            ``tasks-missing``, ``lost-lines``.
        source: Who reported it: "" for Steward's own sources, ``slurmdbd`` for a history
            that was imported.
    """

    cluster: str
    job_id: int
    label: str
    step: str = ""
    first_submit_us: int = 0
    restarts: int = 0
    piece_us: int = 0
    is_latest: int = 1
    sluid: str = ""
    original_sluid: str = ""
    array_job_id: int = 0
    array_task: str = ""
    het_job_id: int = 0
    het_offset: int = 0
    uid: int | None = None
    user: str = ""
    gid: int | None = None
    group: str = ""
    account: str = ""
    partition: str = ""
    qos: str = ""
    wckey: str = ""
    reservation: str = ""
    name: str = ""
    state: str = ""
    cancelled_by: int | None = None
    reason: str = ""
    exit_code: int | None = None
    exit_signal: int | None = None
    derived_exit_code: int | None = None
    derived_exit_signal: int | None = None
    submit_us: int = 0
    eligible_us: int = 0
    start_us: int = 0
    end_us: int = 0
    suspended_s: int = 0
    time_limit_s: int | None = None
    nodes: int = 0
    cpus: int = 0
    nodelist: str = ""
    requested_cpus: int = 0
    requested_nodes: int = 0
    tres_requested: str = ""
    tres_allocated: str = ""
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
    priority: int | None = None
    constraints: str = ""
    licenses: str = ""
    container: str = ""
    failed_node: str = ""
    flags: str = ""
    extra: str = ""
    comment: str = ""
    admin_comment: str = ""
    system_comment: str = ""
    submit_line: str = ""
    work_dir: str = ""
    stdin: str = ""
    stdout: str = ""
    stderr: str = ""
    oversubscribe: str = ""
    doubts: str = ""
    source: str = ""


FIELDS: Final = Line.__struct_fields__
"""The names of a line's fields, which are the columns of the table ``line`` and of Parquet."""
