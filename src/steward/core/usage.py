"""What compute nodes report of the steps that ran on them, and what becomes of it.

A *launch* is one step on one node at one time: (job id, step, node, launched).
A requeued job launches its batch step again under the same id and step, so the
time belongs to the name. Nodes know no submit time: which run a launch was of
is found out by the consumer ``jobs``, and said by ``step.launch`` and ``step.usage``.
"""

from datetime import datetime

import msgspec

from steward.core.records import JobRecord, Line


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a launch, which every fact of it carries.

    Attributes:
        job_id: The raw job id.
        step: As Slurm writes it behind the dot: ``batch``, ``extern``, ``interactive``, ``0``.
        node: NodeName.
        launched_us: When slurmstepd loaded the plugin there, µs since the epoch.
    """

    job_id: int
    step: str
    node: str
    launched_us: int


class StepStart(Launch, frozen=True, kw_only=True):
    """step.start: a step was launched on a node.

    Attributes:
        uid: The job's uid.
        gid: Its gid.
        tasks: How many tasks it has on this node.
        cpus: CPUs that it may use on this node.
        memory_bytes: Memory that it may use on this node; None where none is set.
        name: Last part of the path of the program that srun was given; "" where unknown.
        restarts: The run's restart count, as the job's environment has it; None if unknown.
        array_job_id: The array's id; 0 for none.
        array_task: The array task's index; "" for none.
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
    """What one task used until it was reaped: getrusage(2)'s figures, with their units.

    Attributes:
        task: Its id within the step.
        pid: Its process id on the node.
        status: The raw wait status, see wait(2).
        ended_us: When it was reaped, µs since the epoch.
        user_us: User CPU time, µs.
        system_us: System CPU time, µs.
        max_rss_bytes: Peak resident size; None where another of the node's tasks had more
            and this one's cannot be told.
        minor_faults: Page faults without I/O.
        major_faults: Page faults with I/O.
        read_bytes: Read from disks (blocks of 512 bytes, as ru_inblock counts).
        written_bytes: Written to disks.
        voluntary_switches: Context switches that it asked for.
        involuntary_switches: Context switches that it did not ask for.
        includes_epilog: Whether a TaskEpilog's CPU time is in it.
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


class TasksExited(Launch, frozen=True, kw_only=True):
    """task.exit: some tasks of a launch ended; each task is in one such event at least."""

    tasks: tuple[TaskUsage, ...]


class StepEnd(Launch, frozen=True, kw_only=True):
    """step.end: a step is over on a node.

    Attributes:
        tasks: How many tasks were reaped there.
        max_rss_bytes: Largest peak of any process that was reaped; exact for one task.
        peak_bytes: memory.peak of the step's cgroup; None where there is none.
        cgroup_user_us: User CPU time of the cgroup, µs, daemonised processes with it.
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
    """node.gap: a node lost facts, or says that it may have.

    Attributes:
        node: NodeName.
        why: ``reboot`` (a spool in memory went), ``lost`` (lines that were not written),
            ``garbled`` (lines that cannot be read).
        lines: How many, 0 where nobody can know.
        since: Nothing is missing from before; None where unknown.
    """

    node: str
    why: str
    lines: int = 0
    since: datetime | None = None


class RunFact(msgspec.Struct, frozen=True, kw_only=True):
    """run.start, run.suspend, run.end: what the consumer ``jobs`` has resolved of a run.

    Attributes:
        job_id: The raw job id.
        first_submit: With cluster and job_id, the job's identity.
        restarts: With those, the run's.
        record: The latest that is known of the run.
        piece_end: Of a resized job's former size: when that piece ended. None for a run.
        correction: Whether this says again, better, what was said before.
        source: Whose books tell of it, see ``Line.source``; "" for Steward's own sources.
        suspended_before_s: Of a resized job's last size: how much of the seconds that the
            record says it was suspended were its former sizes'.
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
    """step.launch, step.usage: a launch that belongs to this run has begun, or is over.

    step.launch has ``start`` and neither tasks nor an end. A launch whose end is known as soon
    as its begin has no step.launch.

    Attributes:
        job_id: The raw job id.
        first_submit: With cluster and job_id, the job's identity.
        restarts: With those, the run's.
        submit: The run's own submit time; None in events of a former version.
        step: The launch's step, see :class:`Launch`.
        node: Where it was.
        launched_us: When it was launched, µs since the epoch.
        ended_us: When the node said that it is over, µs; None where that was lost.
        run_end: When the run ended; None while it goes on.
        start: What step.start said; None where that was lost.
        tasks: All tasks that are known.
        end: What step.end said; None where that was lost.
        correction: Whether this says again, better, what was said before.
        withdrawn: Whether the launch turned out to be none of this run's: what was said of
            it for this run is to be forgotten, and nothing else is said here.
        announced: In step.usage whether step.launch told of the begin.
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


class StepAccounted(msgspec.Struct, frozen=True, kw_only=True):
    """step.accounted: another's books tell of a step; ours go before where we have them.

    Attributes:
        job_id: The raw job id.
        submit: Submit time of the run.
        line: What they say; its ``source`` names them.
    """

    job_id: int
    submit: datetime
    line: Line


class PluginMessage(msgspec.Struct, frozen=True, kw_only=True):
    """plugin.message: an accounting plugin's own words to its other half.

    Attributes:
        plugin_type: Who speaks: ``jobacct/…``.
        to: ``controller`` or the name of a node.
        sender: Likewise.
        data: The plugin's own content.
    """

    plugin_type: str
    to: str
    sender: str
    data: bytes


class AccountingExpire(msgspec.Struct, frozen=True, kw_only=True):
    """accounting.expire: the books of jobs that ended before a time are to be forgotten.

    Attributes:
        before: The time.
        asked_by: Who asked.
        keep_log: Whether the job log keeps them: they only leave jobs.db.
    """

    before: datetime
    asked_by: str = ""
    keep_log: bool = False
