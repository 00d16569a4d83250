"""Job page action (``steward job``): find a job, check permission, and build its page.

:func:`build_run_part`, :func:`build_step_part` and :func:`build_array_part` build the parts of the
reply, with efficiency and notes. :func:`show_job_page` is the action; :class:`PageBuilder` finds
the job, reads its runs, steps and launches from jobs.db, and for a pending job asks Slurm why it
does not start (:func:`steward.accounting.job_page.pending_reasons.explain_waiting`).

Who may see a job record follows the cluster's PrivateData, as for rows of sacct. Fields as private
as a script are blanked for others.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from steward.accounting.context import AccountingContext
from steward.accounting.errors import AccountingError
from steward.accounting.job_page import job_efficiency
from steward.accounting.job_page.job_efficiency import (
    OUTPUT_NOT_OPENED,
    compute_cpu_used_s,
    compute_elapsed_s,
    compute_share,
    get_peak_memory,
    get_signal_name,
    get_task_cpu_s,
    rate_efficiency,
)
from steward.accounting.job_page.notes import format_size, write_notes
from steward.accounting.job_page.pending_reasons import apply_new_state, explain_waiting
from steward.accounting.job_page.requests import (
    DEFAULT_SHOWN,
    MAX_TASKS_SHOWN,
    ArrayPart,
    Efficiency,
    MemberPart,
    NodePart,
    NoteKind,
    PageAnswer,
    PageRequest,
    RunPart,
    StepPart,
    TaskPart,
    Waiting,
)
from steward.core.access import Caller
from steward.core.actions import action, route
from steward.core.errors import NotFound, UsageError
from steward.core.records import JobRecord, UsageLine
from steward.core.timestamps import to_micros
from steward.core.usage import StepUsage, TaskUsage
from steward.jobs import Job, Run, parse_job_name
from steward.slurm import WAITING, PendingJobs, PendingStatus
from steward.slurm.arrays import count_tasks

_US = 1_000_000
_NodeTask = tuple[str, TaskUsage]
"""Node and task that ran there."""


def build_run_part(
    line: UsageLine,
    steps: Sequence[tuple[UsageLine, Sequence[StepUsage]]],
    *,
    now_us: int,
    pieces: Iterable[UsageLine] = (),
    suspended_at: datetime | None = None,
    tasks: int = DEFAULT_SHOWN,
    nodes: int = DEFAULT_SHOWN,
) -> RunPart:
    """Build a run's part of the page.

    Args:
        line: The run's line.
        steps: Each step's line and its launches.
        now_us: Present time, µs since the epoch.
        pieces: Lines of the former sizes of a resized job.
        suspended_at: When it was last suspended or resumed.
        tasks: Maximum number of tasks shown per step.
        nodes: Maximum number of nodes shown per step.
    """
    pieces = tuple(pieces)
    efficiency = rate_efficiency(line, steps, now_us, pieces)
    parts = tuple(
        build_step_part(step, launches, now_us=now_us, tasks=tasks, nodes=nodes)
        for step, launches in steps
    )
    return RunPart(
        line=line,
        suspended_at=suspended_at,
        pieces=pieces,
        steps=parts,
        efficiency=efficiency,
        notes=write_notes(line, efficiency, parts),
    )


def build_step_part(
    line: UsageLine,
    launches: Sequence[StepUsage],
    *,
    now_us: int,
    tasks: int = DEFAULT_SHOWN,
    nodes: int = DEFAULT_SHOWN,
) -> StepPart:
    """Build a step's part of the page; arguments as for :func:`build_run_part`."""
    node_tasks = [(launch.node, task) for launch in launches for task in launch.tasks]
    outcomes = Counter(job_efficiency.decode_wait_status(task.status)[:2] for _, task in node_tasks)
    signals: Counter[int] = Counter()
    codes: Counter[int] = Counter()
    for (code, number), count in outcomes.items():
        if number:
            signals[number] += count
        else:
            codes[code] += count
    elapsed = compute_elapsed_s(line, now_us)
    allocated_s = elapsed * line.cpus if elapsed and line.cpus and line.end_us else None
    return StepPart(
        line=line,
        cpu=compute_share(compute_cpu_used_s(line), allocated_s),
        signals=dict(sorted(signals.items())),
        codes=dict(sorted(codes.items())) if set(codes) - {0} else {},
        balance=job_efficiency.compare_tasks(task for _, task in node_tasks),
        tasks=tuple(
            _build_task_part(node, task)
            for node, task in _select_tasks(node_tasks, min(tasks, MAX_TASKS_SHOWN))
        ),
        nodes=tuple(_build_node_part(launch) for launch in _select_launches(launches, nodes)),
        all_tasks=len(node_tasks),
        all_nodes=len({launch.node for launch in launches}),
    )


def _select_tasks(node_tasks: Sequence[_NodeTask], limit: int) -> list[_NodeTask]:
    """Select the tasks to show: failed, busiest, largest, idlest; ordered by id."""
    if len(node_tasks) <= limit:
        return sorted(node_tasks, key=lambda item: item[1].task)
    failed = (item for item in node_tasks if item[1].status)
    lists: list[list[_NodeTask]] = [
        heapq.nsmallest(limit, failed, key=lambda item: item[1].task),
        heapq.nlargest(limit, node_tasks, key=lambda item: get_task_cpu_s(item[1])),
        heapq.nlargest(limit, node_tasks, key=lambda item: item[1].max_rss_bytes or 0),
        heapq.nsmallest(limit, node_tasks, key=lambda item: get_task_cpu_s(item[1])),
    ]
    return sorted(_take_in_turn(lists, limit), key=lambda item: item[1].task)


def _take_in_turn(lists: Sequence[Sequence[_NodeTask]], limit: int) -> list[_NodeTask]:
    """Take one item from each list in turn, without duplicates, until there are enough."""
    chosen: dict[int, _NodeTask] = {}
    for index in range(max((len(items) for items in lists), default=0)):
        for items in lists:
            if index < len(items) and len(chosen) < limit:
                chosen.setdefault(id(items[index][1]), items[index])
    return list(chosen.values())


def _select_launches(launches: Sequence[StepUsage], limit: int) -> list[StepUsage]:
    """Select the nodes to show: without an end, with the highest peak, with the most CPU time."""
    if len(launches) > limit:
        launches = heapq.nlargest(
            limit,
            launches,
            key=lambda launch: (
                launch.end is None,
                get_peak_memory(launch) or 0,
                _sum_cpu_s(launch),
            ),
        )
    return sorted(launches, key=lambda launch: (launch.node, launch.launched_us))


def _sum_cpu_s(launch: StepUsage) -> float:
    return sum(get_task_cpu_s(task) for task in launch.tasks)


def _build_node_part(launch: StepUsage) -> NodePart:
    """Build a node's part of the page."""
    start, end = launch.start, launch.end
    cgroup = None
    if end is not None and end.cgroup_user_us is not None:
        cgroup = (end.cgroup_user_us + (end.cgroup_system_us or 0)) / _US
    return NodePart(
        node=launch.node,
        cpus=start.cpus if start is not None else 0,
        tasks=len(launch.tasks),
        started=parse_us(launch.launched_us),
        ended=parse_us(launch.ended_us) if launch.ended_us else None,
        cpu_s=_sum_cpu_s(launch),
        cgroup_cpu_s=cgroup,
        peak_bytes=get_peak_memory(launch),
        memory_bytes=start.memory_bytes if start is not None else None,
        lost=end.lost if end is not None else 0,
    )


def _build_task_part(node: str, task: TaskUsage) -> TaskPart:
    """Build a task's part of the page."""
    code, number, core = job_efficiency.decode_wait_status(task.status)
    return TaskPart(
        task=task.task,
        node=node,
        pid=task.pid,
        ended=parse_us(task.ended_us),
        exit_code=code,
        signal=number,
        core=core,
        cpu_s=get_task_cpu_s(task),
        user_s=task.user_us / _US,
        system_s=task.system_us / _US,
        max_rss_bytes=task.max_rss_bytes,
        minor_faults=task.minor_faults,
        major_faults=task.major_faults,
        read_bytes=task.read_bytes,
        written_bytes=task.written_bytes,
        voluntary_switches=task.voluntary_switches,
        involuntary_switches=task.involuntary_switches,
        includes_epilog=task.includes_epilog,
    )


def parse_us(us: int) -> datetime:
    """Convert µs since the epoch to a time; the epoch itself if out of range."""
    try:
        return datetime.fromtimestamp(us / _US, UTC)
    except (OverflowError, OSError, ValueError):
        return datetime.fromtimestamp(0, UTC)


_FAILED: Final = ("OUT_OF_MEMORY", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "FAILED", "DEADLINE")
_MOST_WORST: Final = 12


class _Member(msgspec.Struct, frozen=True):
    """Task of an array with its efficiency."""

    line: UsageLine
    efficiency: Efficiency


def build_array_part(
    job: str,
    lines: Iterable[UsageLine],
    *,
    now_us: int,
    waiting: str = "",
    waiting_tasks: int = 0,
) -> ArrayPart:
    """Build the summary of an array.

    Args:
        job: Name of the array.
        lines: Line of the last run of each task that has a record of its own.
        now_us: Present time, µs since the epoch.
        waiting: Task expression of the tasks without one.
        waiting_tasks: Number of those tasks.
    """
    members = [_Member(line, rate_efficiency(line, (), now_us)) for line in lines]
    states = Counter(member.line.state or "UNKNOWN" for member in members)
    if waiting_tasks:
        states["PENDING"] += waiting_tasks
    notes: Counter[NoteKind] = Counter()
    for member in members:
        notes.update(note.kind for note in write_notes(member.line, member.efficiency, ()))
    ended = [member for member in members if member.line.end_us]
    return ArrayPart(
        job=job,
        states=dict(states.most_common()),
        tasks=len(members),
        waiting=waiting,
        cpu=job_efficiency.summarize_values(member.efficiency.cpu for member in ended),
        memory=job_efficiency.summarize_values(member.efficiency.memory for member in ended),
        time=job_efficiency.summarize_values(member.efficiency.time for member in ended),
        elapsed_s=job_efficiency.summarize_values(member.efficiency.elapsed_s for member in ended),
        cpu_used_s=sum(member.efficiency.cpu_used_s or 0.0 for member in members),
        notes=dict(notes.most_common()),
        worst=_select_worst(ended),
    )


def _select_worst(ended: Sequence[_Member]) -> tuple[MemberPart, ...]:
    """Select the tasks to show: failed ones, then the extremes of each measure."""
    failed = [member for member in ended if member.line.state in _FAILED]
    chosen: dict[str, MemberPart] = {}
    for member in heapq.nsmallest(_MOST_WORST // 2, failed, key=_rank_failure):
        _add_member(chosen, member, _format_failure(member.line))
    with_cpu = [member for member in ended if member.efficiency.cpu is not None]
    with_memory = [member for member in ended if member.efficiency.memory is not None]
    if len(ended) > 1:
        for member in heapq.nsmallest(
            2, with_cpu, key=lambda candidate: candidate.efficiency.cpu or 0.0
        ):
            _add_member(chosen, member, "least CPU efficiency")
        for member in heapq.nlargest(
            2, with_memory, key=lambda candidate: candidate.efficiency.memory or 0.0
        ):
            peak = format_size(member.efficiency.memory_used_bytes or 0)
            _add_member(chosen, member, f"most memory, {peak}")
        _add_longest(chosen, ended)
    return tuple(list(chosen.values())[:_MOST_WORST])


def _add_longest(chosen: dict[str, MemberPart], ended: Sequence[_Member]) -> None:
    """Add the two tasks that ran longest, unless all ran equally long."""
    longest = heapq.nlargest(2, ended, key=lambda candidate: candidate.efficiency.elapsed_s or 0.0)
    most = longest[0].efficiency.elapsed_s or 0.0
    least = min(member.efficiency.elapsed_s or 0.0 for member in ended)
    for member in longest:
        elapsed = member.efficiency.elapsed_s or 0.0
        if elapsed > least:
            _add_member(chosen, member, "ran longest" if elapsed == most else "ran second longest")


def _rank_failure(member: _Member) -> tuple[int, int]:
    """Return the sort key of a failed task: gravity of the state, then job id."""
    return _FAILED.index(member.line.state), member.line.job_id


def _format_failure(line: UsageLine) -> str:
    """Return in a few words how a task failed."""
    if line.exit_signal == OUTPUT_NOT_OPENED:
        return "output not opened"
    if line.exit_signal:
        return get_signal_name(line.exit_signal)
    if line.state == "FAILED" and line.exit_code:
        return f"exit code {line.exit_code}"
    return line.state.lower().replace("_", " ")


def _add_member(chosen: dict[str, MemberPart], member: _Member, reason: str) -> None:
    """Add a task to the summary, or another reason to a task already in it."""
    line, efficiency = member.line, member.efficiency
    if line.label in chosen:
        previous = chosen[line.label]
        reason = f"{previous.reason}; {reason}"
    chosen[line.label] = MemberPart(
        job=line.label,
        state=line.state,
        reason=reason,
        elapsed_s=efficiency.elapsed_s,
        cpu=efficiency.cpu,
        memory=efficiency.memory,
        exit_code=line.exit_code,
        exit_signal=line.exit_signal,
    )


_PRIVATE: Final = (
    *("submit_line", "command", "work_dir", "stdin", "stdout", "stderr"),
    *("comment", "admin_comment", "system_comment", "extra", "container"),
)
"""Fields shown only to those who may read the job's script."""
_MOST_PARTS: Final = 100


class NoSuchJob(AccountingError, NotFound):
    """No job of this name exists, or none that the requester may see."""


@action(
    "accounting.job",
    scope="read",
    routes=(route("GET /jobs/{job}", "Show a job with its resource use and efficiency."),),
)
def show_job_page(context: AccountingContext, asker: Caller, request: PageRequest) -> PageAnswer:
    """Show a job with its resource use and efficiency."""
    return PageBuilder(context).build(asker, request)


class PageBuilder:
    """Builder of job pages.

    Args:
        context: Gives access to jobs.db, settings and permissions.
    """

    def __init__(self, context: AccountingContext) -> None:
        self._settings = context.settings
        self._access = context.access
        self._jobs = context.jobs
        self._zone = context.get_zone
        self._now = context.now()
        self._now_us = to_micros(self._now)

    def build(self, asker: Caller, request: PageRequest) -> PageAnswer:
        """Return the page of a job.

        Raises:
            JobNameError: The text is not a job name.
            NoSuchJob: No such job exists, or none that the requester may see.
            UsageError: Several clusters have such a job, or a summary of an array was requested
                for a job that is none.
        """
        with self._jobs.snapshot():
            job, others = self._find_job(asker, request)
            may_read = self._can_read(asker, job)
            page = PageAnswer(
                job=job.label,
                cluster=job.cluster,
                job_id=job.job_id,
                verified=job.verified,
                record=job.record if may_read else strip_private_fields(job.record),
                now=self._now,
                others=tuple(other.first_submit for other in others),
                zone=self._zone(job.cluster),
                hears_nodes=bool(self._settings.nodes.listen or self._settings.receive.listen),
            )
            if request.array:
                return msgspec.structs.replace(page, array=self._build_array(job))
            page = msgspec.structs.replace(
                page,
                components=self._list_parts(job, request),
                runs=self._build_runs(job, request, may_read=may_read),
            )
        pending = self._explain_pending(asker, job)
        if isinstance(pending, PendingStatus):
            return apply_new_state(page, pending)
        return msgspec.structs.replace(page, waiting=pending)

    def _find_job(self, asker: Caller, request: PageRequest) -> tuple[Job, list[Job]]:
        """Return the newest visible job of this name, and others with the same id."""
        text, cluster = request.job, request.cluster
        visible = [
            job
            for job in self._jobs.find(text, cluster)
            if self._access.can_see_job(asker, job.cluster, job.record.uid, job.record.account)
        ]
        if not visible:
            where = f" on cluster {cluster}" if cluster else ""
            raise NoSuchJob(f"unknown job {text}{where}, or permission denied", text)
        clusters = sorted({job.cluster for job in visible})
        if len(clusters) > 1:
            raise UsageError(
                f"job {text} exists on the clusters {', '.join(clusters)}: name one with --cluster",
                text,
            )
        return visible[0], [job for job in visible[1:] if job.job_id == visible[0].job_id]

    def _can_read(self, asker: Caller, job: Job) -> bool:
        """Return True if the requester may read the job's script and private text."""
        record = job.record
        return self._access.can_read_script(
            asker,
            job.cluster,
            uid=record.uid,
            user_at_submit=record.user,
            account=record.account,
        )

    def _list_parts(self, job: Job, request: PageRequest) -> tuple[str, ...]:
        """Return the names of array tasks or het components."""
        record = job.record
        if (
            not (record.array_job_id or record.het_job_id)
            or not parse_job_name(request.job).is_whole
        ):
            return ()
        return tuple(part.label for part in self._jobs.list_parts(job)[:_MOST_PARTS])

    def _build_runs(self, job: Job, request: PageRequest, *, may_read: bool) -> tuple[RunPart, ...]:
        """Build the parts for all runs of a job."""
        lines = self._jobs.list_lines(job)
        if not may_read:
            lines = [_strip_private_line(line) for line in lines]
        launches: dict[int, list[StepUsage]] = {}
        for launch in self._jobs.list_launches(job):
            launches.setdefault(launch.restarts, []).append(launch)
        return tuple(
            self._build_run(
                run, _select_run_lines(lines, run), launches.get(run.restarts, ()), request
            )
            for run in self._jobs.list_runs(job)
            if any(line.restarts == run.restarts and not line.step for line in lines)
        )

    def _build_run(
        self,
        run: Run,
        lines: Sequence[UsageLine],
        launches: Iterable[StepUsage],
        request: PageRequest,
    ) -> RunPart:
        """Build the part for one run."""
        by_step: dict[str, list[StepUsage]] = {}
        for launch in launches:
            by_step.setdefault(launch.step, []).append(launch)
        last_sizes = [line for line in lines if not line.step and not line.piece_us]
        return build_run_part(
            last_sizes[-1] if last_sizes else lines[-1],
            [(line, by_step.get(line.step, ())) for line in lines if line.step],
            now_us=self._now_us,
            pieces=[line for line in lines if not line.step and line.piece_us],
            suspended_at=run.record.suspended_at,
            tasks=request.tasks,
            nodes=request.nodes,
        )

    def _build_array(self, job: Job) -> ArrayPart:
        """Build the summary of the job's array."""
        record = job.record
        if not record.array_job_id:
            raise UsageError(f"job {job.label} is not an array: run 'steward job {job.label}'", job)
        leader = self._jobs.find(str(record.array_job_id), job.cluster)
        # With a reused id, only this array's tasks.
        members = [
            job,
            *(member for root in leader[:1] for member in (root, *self._jobs.list_parts(root))),
        ]
        tasks = {member.number: member for member in members if member.record.uid == record.uid}
        waiting = [
            member.record.array_task
            for member in tasks.values()
            if member.record.array_task and not member.record.array_task.isdecimal()
        ]
        lines = [
            line
            for member in tasks.values()
            if member.record.array_task.isdecimal()
            for line in self._jobs.list_lines(member)
            if line.is_latest and not line.step and not line.piece_us
        ]
        return build_array_part(
            str(record.array_job_id),
            lines,
            now_us=self._now_us,
            waiting=",".join(waiting),
            waiting_tasks=sum(count_tasks(expression) for expression in waiting),
        )

    def _explain_pending(self, asker: Caller, job: Job) -> Waiting | PendingStatus | None:
        """Return why the job is pending, its newer state, or None."""
        if job.record.state not in WAITING or not job.verified:
            return None
        cluster = self._settings.cluster.get(job.cluster)
        can_query = cluster is not None and cluster.asks_slurm and not cluster.remote
        pending = PendingJobs(job.cluster, cluster) if can_query and cluster is not None else None

        def state_of(job_id: int) -> str:
            for other in self._jobs.find(str(job_id), job.cluster)[:1]:
                record = other.record
                if self._access.can_see_job(asker, job.cluster, record.uid, record.account):
                    return record.state
            return ""

        may_read = self._can_read(asker, job)
        return explain_waiting(job.record, pending, state_of, may_read=may_read)


def strip_private_fields(record: JobRecord) -> JobRecord:
    """Return a record without the fields that are as private as a script."""
    return msgspec.structs.replace(record, **dict.fromkeys(_PRIVATE, ""))


def _strip_private_line(line: UsageLine) -> UsageLine:
    private = {field: "" for field in _PRIVATE if field in UsageLine.__struct_fields__}
    return msgspec.structs.replace(line, **private)


def _select_run_lines(lines: Iterable[UsageLine], run: Run) -> list[UsageLine]:
    return [line for line in lines if line.restarts == run.restarts]
