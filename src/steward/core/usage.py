"""Bodies of accounting events: steps and tasks of compute nodes, runs, gaps, plugin messages.

A *launch* is one step on one node at one time: (job id, step, node, launched). A requeued job
launches its batch step again under the same id and step, so the time belongs to the key.
Nodes know no submit time: they report :class:`StepStart`, :class:`ExitedTasks`, :class:`StepEnd`
and :class:`NodeJob`, and the receiver adds a :class:`NodeGap` where data is missing. The consumer
``jobs`` finds the run of each launch and publishes it as :class:`StepUsage` (``step.launch``,
``step.usage``), and the runs themselves as :class:`RunEvent`. ``events.py`` maps event kinds to
these Structs.
"""

from datetime import datetime

import msgspec

from steward.core.records import JobRecord, UsageLine


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Key of a launch, which every event about it carries.

    Attributes:
        job_id: Raw job id.
        step: Step as Slurm writes it after the dot: ``batch``, ``extern``, ``interactive``, ``0``.
        node: NodeName.
        launched_us: Time slurmstepd loaded the plugin on the node, µs since the epoch.
    """

    job_id: int
    step: str
    node: str
    launched_us: int


class StepStart(Launch, frozen=True, kw_only=True):
    """step.start: a step was launched on a node.

    Attributes:
        uid: Uid of the job.
        gid: Gid of the job.
        tasks: Number of tasks of the step on this node.
        cpus: CPUs the step may use on this node.
        memory_bytes: Memory the step may use on this node; None if no limit is set.
        name: Last part of the path of the program that srun was given; "" where unknown.
        restarts: The run's restart count from the job's environment; None if unknown.
        array_job_id: Id of the array; 0 for none.
        array_task: Index of the array task; "" for none.
    """

    uid: int
    gid: int = 0
    tasks: int = 0
    cpus: int = 0
    memory_bytes: int | None = None
    name: str = ""
    restarts: int | None = None
    array_job_id: int = 0
    array_task: str = ""


class TaskUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Resource use of one task until it was reaped: getrusage(2)'s figures, with their units.

    Attributes:
        task: Its id within the step.
        pid: Its process id on the node.
        status: The raw wait status, see wait(2).
        ended_us: When it was reaped, µs since the epoch.
        user_us: User CPU time, µs.
        system_us: System CPU time, µs.
        max_rss_bytes: Peak resident size; None where another of the node's tasks had more,
            which hides this one's.
        minor_faults: Page faults without I/O.
        major_faults: Page faults with I/O.
        read_bytes: Read from disks (blocks of 512 bytes, as ru_inblock counts).
        written_bytes: Written to disks.
        voluntary_switches: Voluntary context switches.
        involuntary_switches: Involuntary context switches.
        includes_epilog: Whether a TaskEpilog's CPU time is included.
    """

    task: int
    pid: int
    status: int
    ended_us: int
    user_us: int
    system_us: int
    max_rss_bytes: int | None = None
    minor_faults: int = 0
    major_faults: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    voluntary_switches: int = 0
    involuntary_switches: int = 0
    includes_epilog: bool = False


class ExitedTasks(Launch, frozen=True, kw_only=True):
    """task.exit: some tasks of a launch ended; each task is in at least one such event."""

    tasks: tuple[TaskUsage, ...]


class StepEnd(Launch, frozen=True, kw_only=True):
    """step.end: a step ended on a node.

    Attributes:
        tasks: Number of tasks reaped there.
        max_rss_bytes: Largest peak of any reaped process; exact for one task.
        peak_bytes: memory.peak of the step's cgroup; None where there is none.
        cgroup_user_us: User CPU time of the cgroup, µs, including daemonised processes.
        cgroup_system_us: System CPU time of the cgroup, µs.
        cgroup_read_bytes: io.stat's rbytes.
        cgroup_written_bytes: io.stat's wbytes.
        lost: Lines that could not be written on the node (disk full, directory missing).
    """

    tasks: int = 0
    max_rss_bytes: int | None = None
    peak_bytes: int | None = None
    cgroup_user_us: int | None = None
    cgroup_system_us: int | None = None
    cgroup_read_bytes: int | None = None
    cgroup_written_bytes: int | None = None
    lost: int = 0


class NodeJob(msgspec.Struct, frozen=True, kw_only=True):
    """node.prolog, node.epilog: a job's Prolog or Epilog ran on a node."""

    job_id: int
    node: str
    uid: int
    gid: int = 0


class NodeGap(msgspec.Struct, frozen=True, kw_only=True):
    """node.gap: a node lost events, or reports that it may have.

    Attributes:
        node: NodeName; ``slurmctld`` for lost lines of jobcomp.
        why: ``reboot`` (a spool in memory was lost), ``lost`` (lines that were not written),
            ``garbled`` (unreadable lines).
        lines: Number of lost lines, 0 where unknowable.
        since: Time before which nothing is missing; None where unknown.
    """

    node: str
    why: str
    lines: int = 0
    since: datetime | None = None


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """run.start, run.suspend, run.end: a run's record, merged by the consumer ``jobs``.

    Attributes:
        job_id: Raw job id.
        first_submit: First submit time; identifies the job with cluster and job_id.
        restarts: Restart count; identifies the run of that job.
        record: Latest known record of the run.
        piece_end: End time of a resized job's earlier size ("piece"). None for a run.
        correction: Whether this corrects an earlier event.
        source: Origin of the record, see ``UsageLine.source``; "" for Steward's own sources.
        suspended_before_s: For a resized job's last size: the part of the record's suspended
            seconds that belongs to its earlier sizes.
    """

    job_id: int
    first_submit: datetime
    restarts: int
    record: JobRecord
    piece_end: datetime | None = None
    correction: bool = False
    source: str = ""
    suspended_before_s: int = 0


class StepUsage(msgspec.Struct, frozen=True, kw_only=True):
    """step.launch, step.usage: a launch of this run began, or ended.

    step.launch has ``start`` and neither tasks nor an end. A launch whose end is known as soon
    as its begin has no step.launch.

    Attributes:
        job_id: Raw job id.
        first_submit: First submit time; identifies the job with cluster and job_id.
        restarts: Restart count; identifies the run of that job.
        submit: The run's own submit time; None in events of an older version.
        step: The launch's step, see :class:`Launch`.
        node: Node of the launch.
        launched_us: Launch time, µs since the epoch.
        ended_us: End time from the node, µs; None if that line was lost.
        run_end: End of the run; None while it goes on.
        start: Body of step.start; None if that was lost.
        tasks: All known tasks.
        end: Body of step.end; None if that was lost.
        correction: Whether this corrects an earlier event.
        withdrawn: Whether the launch belongs to another run after all: consumers forget what
            they know of it for this run. The other fields are then empty.
        announced: In step.usage, whether a step.launch preceded it.
    """

    job_id: int
    first_submit: datetime
    restarts: int
    submit: datetime | None = None
    step: str = ""
    node: str = ""
    launched_us: int = 0
    ended_us: int | None = None
    run_end: datetime | None = None
    start: StepStart | None = None
    tasks: tuple[TaskUsage, ...] = ()
    end: StepEnd | None = None
    correction: bool = False
    withdrawn: bool = False
    announced: bool = False


class AccountedStep(msgspec.Struct, frozen=True, kw_only=True):
    """step.accounted: another accounting database's record of a step; our own takes precedence.

    Attributes:
        job_id: Raw job id.
        submit: Submit time of the run.
        line: The record; its ``source`` names the database.
    """

    job_id: int
    submit: datetime
    line: UsageLine


class PluginMessage(msgspec.Struct, frozen=True, kw_only=True):
    """plugin.message: a message between the two halves of an accounting plugin.

    Attributes:
        plugin_type: Type of the plugin: ``jobacct/…``.
        to: Receiver: ``controller`` or the name of a node.
        sender: Sender, likewise.
        data: Content, opaque to Steward.
    """

    plugin_type: str
    to: str
    sender: str
    data: bytes


class AccountingExpiry(msgspec.Struct, frozen=True, kw_only=True):
    """accounting.expire: delete accounting records of jobs that ended before a time.

    Attributes:
        before: The time.
        asked_by: User who requested it.
        keep_log: Whether to delete from jobs.db only and keep the job log.
    """

    before: datetime
    asked_by: str = ""
    keep_log: bool = False
