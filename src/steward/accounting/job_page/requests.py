"""The shapes of what 'steward job' asks and is answered.

They go over the socket and are what ``--json`` prints, so they are a promise to
other people's programs, see docs/job.md: fields are only ever added, with
defaults. Times are UTC, sizes bytes, durations seconds where the name ends so;
a ``Line`` has the fields that ``steward sacct --json`` documents.
"""

from datetime import datetime
from typing import Literal

import msgspec

from steward.core.actions import Answer, Request, Shape
from steward.core.records import JobRecord, Line

FEW = 8
"""Tasks and nodes of a step that are told unless more are asked for."""
MOST_TASKS = 100_000
"""Tasks of a step that are told at most."""


class PageRequest(Request, frozen=True, kw_only=True):
    """accounting.job: the page of one job.

    Attributes:
        job: Its id as Slurm writes it.
        cluster: Its cluster; "" where only one has such a job.
        array: Whether to sum up the array that it is, or is a task of.
        tasks: How many tasks of each step are told, the most notable first.
        nodes: How many nodes of each step, likewise.
    """

    job: str
    cluster: str = ""
    array: bool = False
    tasks: int = FEW
    nodes: int = FEW


class Efficiency(Shape, frozen=True, kw_only=True):
    """How much of what a run was given it used; each share None where it cannot be told.

    Attributes:
        cpu: CPU time used over elapsed time times allocated CPUs.
        cpu_used_s: User and system time of all tasks; of the cgroups where those had more.
        cpu_given_s: Elapsed time times allocated CPUs.
        memory: The worst node's peak over the memory that was allocated there.
        memory_used_bytes: That peak.
        memory_given_bytes: That memory.
        memory_node: That node.
        memory_at_least: Whether that peak is the largest process's alone, of several that
            ran there: the sum of all may have been more.
        time: Elapsed time over the time limit.
        elapsed_s: From start to end, or to now, without the time that it was suspended.
        limit_s: The time limit.
        at_least: Whether facts are missing, so that more may have been used.
    """

    cpu: float | None = None
    cpu_used_s: float | None = None
    cpu_given_s: float | None = None
    memory: float | None = None
    memory_used_bytes: int | None = None
    memory_given_bytes: int | None = None
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


class Note(Shape, frozen=True, kw_only=True):
    """A remark on a run, of a closed list.

    Attributes:
        kind: Which.
        words: A sentence or two: what was found, and what to do.
        step: The step that it is about; "" for the run.
    """

    kind: NoteKind
    words: str
    step: str = ""


class TaskPart(Shape, frozen=True, kw_only=True, omit_defaults=True):
    """A task.

    Attributes:
        task: Its id within the step.
        node: Where it ran.
        exit_code: What it returned; 0 where a signal ended it.
        signal: The signal that ended it; 0 for none.
        core: Whether it left a core dump.
        ended: When it was reaped.
        cpu_s: User and system time.
        max_rss_bytes: Its peak; None where it cannot be told from other tasks'.
        includes_epilog: Whether a TaskEpilog's CPU time is in it.
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


class NodePart(Shape, frozen=True, kw_only=True, omit_defaults=True):
    """What a step did on one node.

    Attributes:
        node: NodeName.
        cpus: CPUs that it could use there.
        tasks: Tasks that are known to have ended there.
        started: When it was launched.
        ended: When it was over; None where nobody said.
        cpu_s: User and system time of its tasks.
        cgroup_cpu_s: Of everything in its cgroup.
        peak_bytes: Peak of its memory: the cgroup's, or else the largest process's.
        memory_bytes: Memory that it could use there.
        lost: Facts that the node could not write.
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


class Balance(Shape, frozen=True, kw_only=True):
    """How evenly the tasks of a step worked.

    Attributes:
        ratio: CPU time of the busiest task over the mean of all.
        busiest: The task with the most CPU time.
        busiest_s: How much that was.
        idlest: The task with the least.
        idlest_s: How much that was.
        mean_s: The mean.
    """

    ratio: float
    busiest: int
    busiest_s: float
    idlest: int
    idlest_s: float
    mean_s: float


class StepPart(Shape, frozen=True, kw_only=True):
    """One step of a run.

    Attributes:
        line: What sacct shows of it.
        cpu: Its CPU efficiency, as of a run; None where it cannot be told.
        signals: How many tasks each signal ended.
        codes: How many tasks returned each exit code, where any returned another than 0.
        balance: Between its tasks; None for less than two, or where nothing was used.
        tasks: The most notable tasks.
        nodes: The most notable nodes.
        all_tasks: How many tasks are known.
        all_nodes: How many nodes are known.
    """

    line: Line
    cpu: float | None = None
    signals: dict[int, int] = msgspec.field(default_factory=dict)
    codes: dict[int, int] = msgspec.field(default_factory=dict)
    balance: Balance | None = None
    tasks: tuple[TaskPart, ...] = ()
    nodes: tuple[NodePart, ...] = ()
    all_tasks: int = 0
    all_nodes: int = 0


class RunPart(Shape, frozen=True, kw_only=True):
    """One run of a job.

    Attributes:
        line: What sacct shows of it.
        suspended_at: When it was suspended or resumed last.
        pieces: Of a resized job what it had before, oldest first.
        steps: Its steps, in Slurm's order.
        efficiency: How much of what it was given it used.
        notes: What is to be remarked on.
    """

    line: Line
    suspended_at: datetime | None = None
    pieces: tuple[Line, ...] = ()
    steps: tuple[StepPart, ...] = ()
    efficiency: Efficiency = Efficiency()
    notes: tuple[Note, ...] = ()


class Waiting(Shape, frozen=True, kw_only=True):
    """Why a job waits.

    Attributes:
        reason: Slurm's word.
        words: The same as a sentence; "" for a word that is not Slurm's own.
        behind: What is behind it: the limit, the jobs that it waits for, the reservation.
        expected_start: When Slurm expects to start it; None where it does not say.
        expected_nodes: Where.
        priority: Its priority; None where it is not known.
        asked: Whether Slurm was asked just now; else this is what was seen last.
        trouble: Why Slurm could not be asked; "" where it could.
    """

    reason: str
    words: str = ""
    behind: tuple[str, ...] = ()
    expected_start: datetime | None = None
    expected_nodes: str = ""
    priority: int | None = None
    asked: bool = False
    trouble: str = ""


class Spread(Shape, frozen=True, kw_only=True):
    """How a figure is spread over the tasks of an array."""

    least: float
    quarter: float
    middle: float
    three_quarters: float
    most: float
    count: int


class MemberPart(Shape, frozen=True, kw_only=True):
    """A task of an array, as its summary names it.

    Attributes:
        job: Its name: 123_7.
        why: Why it is named.
    """

    job: str
    state: str
    why: str
    elapsed_s: float | None = None
    cpu: float | None = None
    memory: float | None = None
    exit_code: int | None = None
    exit_signal: int | None = None


class ArrayPart(Shape, frozen=True, kw_only=True):
    """An array, summed up.

    Attributes:
        job: Its name.
        states: How many tasks are in each state.
        waiting: Which tasks have no record of their own yet: "4-9".
        tasks: How many tasks have a record of their own.
        cpu: Spread of the CPU efficiency of tasks that have ended; None for none.
        memory: Of the memory efficiency.
        time: Of elapsed time over the limit.
        elapsed_s: Of elapsed time.
        cpu_used_s: CPU time of all tasks.
        notes: How many tasks each kind of note is about.
        worst: The tasks to look at first.
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
    notes: dict[str, int] = msgspec.field(default_factory=dict)
    worst: tuple[MemberPart, ...] = ()


class PageAnswer(Answer, frozen=True, kw_only=True):
    """The page of a job.

    Attributes:
        job: Its name as Slurm prints it.
        cluster: Its cluster.
        job_id: Its raw id.
        verified: Whether Slurm has shown it.
        record: What Slurm shows of its last run. Texts that are as private as scripts
            (submit line, comments, paths) are "" for who may not read them.
        runs: Its runs, first to last; of an array that is summed up none.
        waiting: Why it waits; None where it does not.
        ahead: Whether Slurm, asked why it waits, said that it does not any more: its state
            is what Slurm said, and the books are yet to be told.
        array: The sum of an array, where that was asked for.
        parts: Names of an array's tasks or a het job's components, where it was named as a
            whole and has such; at most a hundred.
        others: First submit times of other jobs that Slurm gave the same id.
        now: When this was found out.
        zone: IANA name of the cluster's zone; "" for the system's.
        hears_nodes: Whether compute nodes report here at all.
        cpu_low: The share of [accounting.notes] below which CPU efficiency is remarked on.
        memory_low: Likewise of memory.
        memory_high: And above which.
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
    parts: tuple[str, ...] = ()
    others: tuple[datetime, ...] = ()
    zone: str = ""
    hears_nodes: bool = False
    cpu_low: float = 0.5
    memory_low: float = 0.25
    memory_high: float = 0.95
