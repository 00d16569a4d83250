"""Job page request and reply (``steward job``): PageRequest, PageAnswer and their parts.

The reply holds runs (:class:`RunPart`), steps (:class:`StepPart`), tasks and nodes, efficiency,
notes, why a job waits, and array summaries.

They travel over the socket and are the output of ``--json``, so they are a stable interface, see
docs/job.md: fields are only added, with defaults. Times are UTC, sizes bytes, durations seconds
where the name ends in ``_s``. A ``UsageLine`` has the fields that ``steward sacct --json``
documents.
"""

from datetime import datetime
from typing import Annotated, Final, Literal

import msgspec

from steward.core.actions import ActionMessage, Answer, Request, described
from steward.core.records import JobRecord, UsageLine

DEFAULT_SHOWN = 8
"""Default maximum of tasks and nodes shown per step."""
MAX_TASKS_SHOWN = 100_000
"""Upper limit of tasks shown per step."""
CPU_LOW: Final = 0.5
"""CPU efficiency below which CPUs were idle, as a share: half of them did no work."""
MEMORY_LOW: Final = 0.25
"""Memory efficiency below which far too much was requested, as a share."""
MEMORY_HIGH: Final = 0.95
"""Memory efficiency above which memory was nearly exhausted, as a share."""


class PageRequest(Request, frozen=True, kw_only=True):
    """Request of accounting.job: the page of one job."""

    job: Annotated[str, described("Id of the job: 123, 123_7, 123+1.")]
    cluster: Annotated[
        str, described("Cluster; may be empty if only one cluster has a job with this id.")
    ] = ""
    array: Annotated[
        bool, described("Summarize the whole array, even if ``job`` is one of its tasks.")
    ] = False
    tasks: Annotated[
        int, described("Maximum number of tasks per step, failed ones first.", ge=0)
    ] = DEFAULT_SHOWN
    nodes: Annotated[
        int,
        described("Maximum number of nodes per step, those without a known end first.", ge=0),
    ] = DEFAULT_SHOWN


class Efficiency(ActionMessage, frozen=True, kw_only=True):
    """Efficiency of a run: used over allocated; each share is None if unknown.

    Attributes:
        cpu: CPU time used over elapsed time times allocated CPUs.
        cpu_used_s: User and system time of all tasks, or of the cgroups if higher.
        cpu_allocated_s: Elapsed time times allocated CPUs.
        memory: Peak of the worst node over the memory allocated there.
        memory_used_bytes: The worst node's peak.
        memory_allocated_bytes: Memory allocated on the worst node.
        memory_node: The worst node.
        memory_at_least: Whether the peak is only the largest of several processes', so the sum may
            have been higher.
        time: Elapsed time over the time limit.
        elapsed_s: Seconds from start to end or now, without suspension.
        limit_s: Time limit in seconds.
        at_least: Whether reports are missing, so usage may have been higher.
    """

    cpu: float | None = None
    cpu_used_s: float | None = None
    cpu_allocated_s: float | None = None
    memory: float | None = None
    memory_used_bytes: int | None = None
    memory_allocated_bytes: int | None = None
    memory_node: str = ""
    memory_at_least: bool = False
    time: float | None = None
    elapsed_s: float | None = None
    limit_s: int | None = None
    at_least: bool = False


NoteKind = Literal[
    "memory-low",
    "memory-high",
    "cpu-low",
    "serial",
    "time-low",
    "time-high",
    "imbalance",
    "out-of-memory",
    "timeout",
    "failed-early",
    "node-fail",
]


class Note(ActionMessage, frozen=True, kw_only=True):
    """Remark on a run, from a closed list of kinds.

    Attributes:
        kind: Kind of remark.
        words: A sentence or two: what was found and what to do.
        step: Step it concerns; "" for the run.
    """

    kind: NoteKind
    words: str
    step: str = ""


class TaskPart(ActionMessage, frozen=True, kw_only=True, omit_defaults=True):
    """Task of a step.

    Attributes:
        task: Task id within the step.
        node: Node it ran on.
        exit_code: Exit code; 0 if a signal ended it.
        signal: Signal that ended it; 0 for none.
        core: Whether it dumped core.
        ended: When the node reaped it.
        cpu_s: User and system time, in seconds.
        max_rss_bytes: Peak memory; None if it cannot be separated from other tasks'.
        includes_epilog: Whether the usage includes a TaskEpilog's CPU time.
    """

    task: int
    node: str
    pid: int
    ended: datetime
    exit_code: int = 0
    signal: int = 0
    core: bool = False
    cpu_s: float = 0.0
    user_s: float = 0.0
    system_s: float = 0.0
    max_rss_bytes: int | None = None
    minor_faults: int = 0
    major_faults: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    voluntary_switches: int = 0
    involuntary_switches: int = 0
    includes_epilog: bool = False


class NodePart(ActionMessage, frozen=True, kw_only=True, omit_defaults=True):
    """Usage of a step on one node.

    Attributes:
        node: NodeName.
        cpus: CPUs available to it there.
        tasks: Number of tasks known to have ended there.
        started: Launch time.
        ended: End time; None if not reported.
        cpu_s: User and system time of its tasks, in seconds.
        cgroup_cpu_s: CPU time of its whole cgroup, in seconds.
        peak_bytes: Peak memory of the cgroup, or else of the largest process.
        memory_bytes: Memory available to it there.
        lost: Reports that the node could not write.
    """

    node: str
    cpus: int = 0
    tasks: int = 0
    started: datetime | None = None
    ended: datetime | None = None
    cpu_s: float = 0.0
    cgroup_cpu_s: float | None = None
    peak_bytes: int | None = None
    memory_bytes: int | None = None
    lost: int = 0


class Balance(ActionMessage, frozen=True, kw_only=True):
    """Balance of CPU time between the tasks of a step.

    Attributes:
        ratio: CPU time of the busiest task over the mean.
        busiest: The task with the most CPU time.
        busiest_s: Its CPU time, in seconds.
        idlest: The task with the least CPU time.
        idlest_s: Its CPU time, in seconds.
        mean_s: Mean CPU time, in seconds.
    """

    ratio: float
    busiest: int
    busiest_s: float
    idlest: int
    idlest_s: float
    mean_s: float


class StepPart(ActionMessage, frozen=True, kw_only=True):
    """Step of a run.

    Attributes:
        line: Its accounting line, as sacct shows it.
        cpu: CPU efficiency; None if unknown.
        signals: Number of tasks ended by each signal.
        codes: Number of tasks by exit code, if any is not 0.
        balance: Balance between its tasks; None for fewer than two, or without usage.
        tasks: Tasks that failed, or used most or least.
        nodes: Nodes without an end, or with the highest use.
        all_tasks: Number of known tasks.
        all_nodes: Number of known nodes.
    """

    line: UsageLine
    cpu: float | None = None
    signals: dict[int, int] = msgspec.field(default_factory=dict)
    codes: dict[int, int] = msgspec.field(default_factory=dict)
    balance: Balance | None = None
    tasks: tuple[TaskPart, ...] = ()
    nodes: tuple[NodePart, ...] = ()
    all_tasks: int = 0
    all_nodes: int = 0


class RunPart(ActionMessage, frozen=True, kw_only=True):
    """Run of a job.

    Attributes:
        line: Its accounting line, as sacct shows it.
        suspended_at: When it was last suspended or resumed.
        pieces: Lines of the former sizes of a resized job, oldest first.
        steps: Its steps, in Slurm's order.
        efficiency: Used over allocated resources.
        notes: Remarks on the run.
    """

    line: UsageLine
    suspended_at: datetime | None = None
    pieces: tuple[UsageLine, ...] = ()
    steps: tuple[StepPart, ...] = ()
    efficiency: Efficiency = Efficiency()
    notes: tuple[Note, ...] = ()

    @property
    def sizes(self) -> list[tuple[int, UsageLine]]:
        """Lines of the sizes that the job had, with their numbers."""
        return list(enumerate((*self.pieces, self.line), start=1))


class Waiting(ActionMessage, frozen=True, kw_only=True):
    """Reason why a job is pending.

    Attributes:
        reason: Slurm's word.
        explanation: Its explanation as a sentence; "" for a word that is not Slurm's own.
        details: Details: the limit, the jobs it depends on, the reservation.
        expected_start: Start that Slurm expects; None if not given.
        expected_nodes: Nodes that Slurm expects.
        priority: Its priority; None if unknown.
        queried: Whether Slurm was queried just now; otherwise this is the last known state.
        error: Why Slurm could not be queried; "" if it was.
    """

    reason: str
    explanation: str = ""
    details: tuple[str, ...] = ()
    expected_start: datetime | None = None
    expected_nodes: str = ""
    priority: int | None = None
    queried: bool = False
    error: str = ""


class Spread(ActionMessage, frozen=True, kw_only=True):
    """Distribution of a value over the tasks of an array: quartiles, minimum and maximum."""

    minimum: float
    lower_quartile: float
    median: float
    upper_quartile: float
    maximum: float
    count: int


class MemberPart(ActionMessage, frozen=True, kw_only=True):
    """Task of an array, in the array's summary.

    Attributes:
        job: Job name: 123_7.
        reason: Why the summary lists it.
    """

    job: str
    state: str
    reason: str
    elapsed_s: float | None = None
    cpu: float | None = None
    memory: float | None = None
    exit_code: int | None = None
    exit_signal: int | None = None


class ArrayPart(ActionMessage, frozen=True, kw_only=True):
    """Summary of an array.

    Attributes:
        job: Name of the array.
        states: Number of tasks by state.
        waiting: Expression of tasks without a record of their own: "4-9".
        tasks: Number of tasks with a record of their own.
        cpu: Distribution of the CPU efficiency of ended tasks; None if none ended.
        memory: Distribution of the memory efficiency.
        time: Distribution of elapsed time over the limit.
        elapsed_s: Distribution of elapsed time, in seconds.
        cpu_used_s: CPU time of all tasks, in seconds.
        notes: Number of tasks by kind of note.
        worst: Tasks to look at first.
    """

    job: str
    states: dict[str, int]
    tasks: int
    waiting: str = ""
    cpu: Spread | None = None
    memory: Spread | None = None
    time: Spread | None = None
    elapsed_s: Spread | None = None
    cpu_used_s: float = 0.0
    notes: dict[NoteKind, int] = msgspec.field(default_factory=dict)
    worst: tuple[MemberPart, ...] = ()


class PageAnswer(Answer, frozen=True, kw_only=True):
    """Reply of accounting.job: the page of a job.

    Attributes:
        job: Job name as Slurm prints it.
        cluster: Cluster name.
        job_id: Raw job id.
        verified: Whether Slurm has shown it.
        record: Record of the last run. Fields as private as scripts (submit line, comments, paths)
            are "" without permission to read them.
        runs: Runs, first to last; empty for an array's summary.
        waiting: Why it is pending; None if it is not.
        ahead: Whether Slurm just reported a newer state than jobs.db has; the reply shows Slurm's.
        array: Summary of the array, if requested.
        components: Names of an array's tasks or a het job's components that have records, if the
            whole was named; at most a hundred.
        others: First submit times of other jobs with the same id.
        now: Time of the reply.
        zone: IANA time zone of the cluster; "" for the system's.
        hears_nodes: Whether compute nodes are configured to report.
        cpu_low: Threshold below which CPU efficiency gets a note.
        memory_low: Threshold below which memory efficiency gets a note.
        memory_high: Threshold above which memory efficiency gets a note.
    """

    job: str
    cluster: str
    job_id: int
    verified: bool
    record: JobRecord
    now: datetime
    runs: tuple[RunPart, ...] = ()
    waiting: Waiting | None = None
    ahead: bool = False
    array: ArrayPart | None = None
    components: tuple[str, ...] = ()
    others: tuple[datetime, ...] = ()
    zone: str = ""
    hears_nodes: bool = False
    cpu_low: float = CPU_LOW
    memory_low: float = MEMORY_LOW
    memory_high: float = MEMORY_HIGH
