"""What Slurm shows of a job: the one record that sources fill and all rooms read."""

from datetime import datetime

import msgspec


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What Slurm shows of one job at one moment, in Slurm's terms.

    Times are UTC; None where Slurm shows none (Unknown, N/A). Text is "" where
    Slurm shows "(null)" or nothing. ``user`` and ``group`` are looked up by us
    from the ids, "" where they do not resolve; never Slurm's text.

    Attributes:
        job_id: The raw id (of an array task: its own).
        array_job_id: The array's id, 0 for a job that is no array.
        array_task: Task index, or for tasks not split off yet their expression ("1-9%2").
        het_job_id: The het leader's id, 0 for a job that is not heterogeneous.
        sluid: Slurm's lasting id of this run, where it shows one (26.05).
        original_sluid: The same of the first run; never changes.
        restarts: Restart count: 0 for the first run.
        submit: Submit time of this run (a requeue changes it).
        time_limit_s: Time limit in seconds; None for unlimited or the partition's.
        min_memory_mib: Requested minimum memory in MiB, per node or per CPU: squeue does not tell
            which. 0 for all memory of each node; None if unknown.
        exit_code: What the job returned, 0 to 255.
        exit_signal: The signal that ended it, 0 for none.
        batch: Whether it has a batch script.
        derived_exit_code: The highest code that any of its steps returned.
        derived_exit_signal: The signal of that step.
        cancelled_by: The uid that cancelled it; None where nobody did or nobody knows.
        suspended_at: When it was suspended or resumed last.
        suspended_s: Seconds that it was suspended altogether, as far as that is over.
        resized_at: When it was last given another size.
        constraints: Node features that it asked for.
        federation_origin: Name of the cluster that it was submitted to; "" for this one.
        federation_siblings: Names of clusters that hold a copy of it, as Slurm lists them.
        oversubscribe: Whether others may share its nodes: ``NO`` for a job that has them to
            itself, ``OK``, ``YES``, ``USER``, ``MCS``.
        tres_per_job: GRES and licenses that it asked for altogether (``gres/gpu:2``), as Slurm
            writes them; those for each node, socket and task stand beside it. TRES that Slurm
            does not count for any job are told by these alone.
        cpus_per_tres: CPUs that it asked for with each of them (``gres/gpu:4``).
        mem_per_tres: Memory likewise, in MiB.
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
    batch: bool | None = None
    array_job_id: int = 0
    array_task: str = ""
    het_job_id: int = 0
    het_offset: int = 0
    sluid: str = ""
    original_sluid: str = ""
    restarts: int = 0
    submit: datetime | None = None
    eligible: datetime | None = None
    start: datetime | None = None
    end: datetime | None = None
    time_limit_s: int | None = None
    nodes: int | None = None
    cpus: int | None = None
    tasks: int | None = None
    min_memory_mib: int | None = None
    tres_requested: str = ""
    tres_allocated: str = ""
    nodelist: str = ""
    dependency: str = ""
    reservation: str = ""
    submit_host: str = ""
    submit_line: str = ""
    command: str = ""
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
    suspended_at: datetime | None = None
    suspended_s: int | None = None
    resized_at: datetime | None = None
    requested_cpus: int | None = None
    requested_nodes: int | None = None
    priority: int | None = None
    wckey: str = ""
    constraints: str = ""
    licenses: str = ""
    container: str = ""
    batch_host: str = ""
    failed_node: str = ""
    system_comment: str = ""
    extra: str = ""
    job_flags: str = ""
    federation_origin: str = ""
    federation_siblings: str = ""
    oversubscribe: str = ""
    tres_per_job: str = ""
    tres_per_node: str = ""
    tres_per_socket: str = ""
    tres_per_task: str = ""
    cpus_per_tres: str = ""
    mem_per_tres: str = ""
