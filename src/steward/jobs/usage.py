"""Usage of runs and steps: build accounting lines, as sacct shows them, from reports.

:func:`run_line` makes a run's line, :func:`step_line` a step's, and :func:`add_steps` adds the
steps' usage to the run. All are pure functions, because both the jobs consumer and readers of a
job log make lines, and must get the same result.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from steward.core.records import Line
from steward.core.timestamps import micros, micros_or_0
from steward.core.usage import RunFact, StepUsage
from steward.jobs.job_ids import display
from steward.jobs.lines import MOST, Spent, least, most, spent_by, total
from steward.slurm.job_states import base_state
from steward.slurm.nodelists import NodeListError, fold

_NAMED: Final = frozenset({"batch", "extern", "interactive"})

_OOM: Final = "OUT_OF_MEMORY"
_OOM_SIGNAL: Final = 125
"""Signal number that Slurm gives for a step that ran out of memory."""
_KILLED: Final = frozenset({9, 137 << 8, 9 | 128})
"""Wait statuses of a process killed with SIGKILL, and of a shell whose last command was."""

_SUMS: Final = (
    *("tasks", "user_us", "system_us", "cgroup_user_us", "cgroup_system_us"),
    *("read_bytes", "written_bytes", "minor_faults"),
)
_MAXIMA: Final = {
    "max_rss": "max_rss_bytes",
    "max_pages": "max_pages",
    "max_read": "max_read_bytes",
    "max_written": "max_written_bytes",
}
"""Prefix of ``_node`` and ``_task`` for each maximum, and the field with its value."""


def run_line(cluster: str, fact: RunFact, *, is_latest: bool = True, source: str = "") -> Line:
    """Build the line of a run, or of a piece of one, without its steps' usage.

    Args:
        cluster: Cluster name.
        fact: What is known about the run; for a piece, its record has the piece's times.
        is_latest: Whether it is the job's last run and not a former piece.
        source: Where it comes from, see ``Line.source``.
    """
    record = fact.record
    return Line(
        cluster=cluster,
        job_id=fact.job_id,
        label=display(record),
        first_submit_us=micros(fact.first_submit),
        restarts=fact.restarts,
        piece_us=micros_or_0(fact.piece_end),
        is_latest=int(is_latest),
        sluid=record.sluid,
        original_sluid=record.original_sluid,
        array_job_id=record.array_job_id,
        array_task=record.array_task,
        het_job_id=record.het_job_id,
        het_offset=record.het_offset,
        uid=record.uid,
        user=record.user,
        gid=record.gid,
        group=record.group,
        account=record.account,
        partition=record.partition,
        qos=record.qos,
        wckey=record.wckey,
        reservation=record.reservation,
        name=record.name,
        state=base_state(record.state),
        cancelled_by=record.cancelled_by,
        reason=record.reason,
        exit_code=record.exit_code,
        exit_signal=record.exit_signal,
        derived_exit_code=record.derived_exit_code,
        derived_exit_signal=record.derived_exit_signal,
        submit_us=micros_or_0(record.submit),
        eligible_us=micros_or_0(record.eligible),
        start_us=micros_or_0(record.start),
        end_us=micros_or_0(record.end),
        suspended_s=record.suspended_s or 0,
        time_limit_s=record.time_limit_s,
        nodes=record.nodes or 0,
        cpus=record.cpus or 0,
        nodelist=record.nodelist,
        requested_cpus=record.requested_cpus or 0,
        requested_nodes=record.requested_nodes or 0,
        tres_requested=record.tres_requested,
        tres_allocated=record.tres_allocated,
        priority=record.priority,
        constraints=record.constraints,
        licenses=record.licenses,
        container=record.container,
        failed_node=record.failed_node,
        flags=record.job_flags,
        extra=record.extra,
        comment=record.comment,
        admin_comment=record.admin_comment,
        system_comment=record.system_comment,
        submit_line=record.submit_line,
        work_dir=record.work_dir,
        stdin=record.stdin,
        stdout=record.stdout,
        stderr=record.stderr,
        oversubscribe=record.oversubscribe,
        source=source,
    )


def step_line(run: Line, launches: Iterable[StepUsage], *, is_over: bool | None = None) -> Line:
    """Build the line of a step.

    Args:
        run: Line of its run, or piece.
        launches: Reports of the step from each of its nodes, at least one; each has ``step``,
            ``node`` and ``launched_us``.
        is_over: Whether the run ended; None to read that from its line.
    """
    found = list(launches)
    return step_line_of(run, found[0].step, [spent_by(launch) for launch in found], is_over=is_over)


def step_line_of(
    run: Line, step: str, spent: Sequence[Spent], *, is_over: bool | None = None
) -> Line:
    """Build the line of a step from launches that are already summed up."""
    over = bool(run.end_us) if is_over is None else is_over
    nodes = sorted({one.node for one in spent})
    ends = [one.ended_us for one in spent if one.ended_us is not None]
    is_ended = over or len(ends) == len(spent)
    end_us = max(ends, default=run.end_us) if is_ended else 0
    started = total(max(one.started, one.reaped, one.known) for one in spent) or 0
    state, code, signal = _outcome(run, step, spent, is_ended=is_ended)
    peak = most((one.peak_bytes, one.node, None) for one in spent)
    cpus = total(one.cpus for one in spent) or 0
    names = [one.name for one in spent if one.name]
    fields: dict[str, Any] = {
        "step": step,
        "name": step if step in _NAMED else min(names, default=""),
        "state": state,
        "exit_code": code,
        "exit_signal": signal,
        "start_us": min(one.launched_us for one in spent),
        "end_us": end_us,
        "nodes": len(nodes),
        "cpus": cpus,
        "nodelist": _folded(nodes),
        "tres_allocated": _tres(cpus, [one.memory_bytes for one in spent], len(nodes)),
        "tasks": started,
        "peak_bytes": peak[0],
        "peak_node": peak[1],
        "peak_allocated_bytes": _allocated(spent, peak[1]),
        "doubts": _doubts(spent, is_over=over),
    }
    return _step_of(run, fields | _used(spent))


def add_steps(run: Line, steps: Iterable[Line]) -> Line:
    """Return a run's line with the usage of its steps: sums as in sacct.

    Maxima are the largest of the steps', with node and task; there is no mean over steps.
    """
    found = list(steps)
    if not found:
        return run
    fields: dict[str, Any] = {name: total(getattr(step, name) for step in found) for name in _SUMS}
    fields["tasks"] = fields["tasks"] or 0
    # If one step's cgroup exceeds its tasks, the other steps count with their tasks' time.
    for which in ("user", "system"):
        name = f"cgroup_{which}_us"
        if fields[name] is not None:
            counted = (
                getattr(step, f"{which}_us") if (mine := getattr(step, name)) is None else mine
                for step in found
            )
            fields[name] = total(counted)
    for name, value in _MAXIMA.items():
        triples = (
            (getattr(step, value), getattr(step, f"{name}_node"), getattr(step, f"{name}_task"))
            for step in found
        )
        fields[value], fields[f"{name}_node"], fields[f"{name}_task"] = most(triples)
    fields["min_cpu_us"], fields["min_cpu_node"], fields["min_cpu_task"] = least(
        (step.min_cpu_us, step.min_cpu_node, step.min_cpu_task) for step in found
    )
    peak = most((step.peak_bytes, step.peak_node, None) for step in found)
    fields["peak_bytes"], fields["peak_node"], _ = peak
    allocated = [
        step.peak_allocated_bytes
        for step in found
        if (step.peak_bytes, step.peak_node) == peak[:2] and step.peak_allocated_bytes is not None
    ]
    fields["peak_allocated_bytes"] = max(allocated, default=None)
    doubts = {doubt for step in found for doubt in step.doubts.split(",") if doubt}
    fields["doubts"] = ",".join(sorted(doubts))
    return msgspec.structs.replace(run, **fields)


def _step_of(run: Line, fields: dict[str, Any]) -> Line:
    """Build a step's line with the fields it shares with its run."""
    return Line(
        cluster=run.cluster,
        job_id=run.job_id,
        label=run.label,
        first_submit_us=run.first_submit_us,
        restarts=run.restarts,
        piece_us=run.piece_us,
        is_latest=run.is_latest,
        sluid=run.sluid,
        array_job_id=run.array_job_id,
        array_task=run.array_task,
        het_job_id=run.het_job_id,
        het_offset=run.het_offset,
        uid=run.uid,
        user=run.user,
        gid=run.gid,
        group=run.group,
        account=run.account,
        partition=run.partition,
        qos=run.qos,
        wckey=run.wckey,
        submit_us=run.submit_us,
        eligible_us=run.eligible_us,
        **fields,
    )


def as_step_of(run: Line, line: Line) -> Line:
    """Return a step's line from other accounting, with the fields of our run's line."""
    names = msgspec.structs.fields(Line)
    fields = {
        field.name: value
        for field in names
        if (value := getattr(line, field.name)) != field.default and field.name not in _INHERITED
    }
    return _step_of(run, fields)


_INHERITED: Final = frozenset(
    {
        *("cluster", "job_id", "label", "first_submit_us", "restarts", "piece_us", "is_latest"),
        *("sluid", "array_job_id", "array_task", "het_job_id", "het_offset", "uid", "user"),
        *("gid", "group", "account", "partition", "qos", "wckey", "submit_us", "eligible_us"),
    }
)
"""Fields that a step's line takes from its run's line."""


def _outcome(
    run: Line, step: str, spent: Sequence[Spent], *, is_ended: bool
) -> tuple[str, int | None, int | None]:
    """Return state, exit code and signal of a step as Slurm does: by the highest wait status."""
    if not is_ended:
        return "RUNNING", None, None
    if step == "extern":
        # Slurm always kills the extern step, so its status says nothing.
        return "COMPLETED", 0, 0
    statuses = [one.status for one in spent if one.status is not None]
    if not statuses:
        return (run.state if run.end_us else "COMPLETED"), None, None
    status = max(statuses)
    if run.state == _OOM and (status in _KILLED or (step == "batch" and status)):
        return _OOM, 0, _OOM_SIGNAL
    if os.WIFSIGNALED(status):
        return "CANCELLED", 0, os.WTERMSIG(status)
    code = os.WEXITSTATUS(status)
    return ("FAILED" if code else "COMPLETED"), code, 0


def _used(spent: Sequence[Spent]) -> dict[str, Any]:
    """Sum up the usage fields of a step's launches."""
    known = sum(one.known for one in spent)
    with_rss = sum(one.rss_known for one in spent)
    has_more = any(one.cgroup_us is not None for one in spent)
    fields: dict[str, Any] = {
        "user_us": total(one.user_us for one in spent),
        "system_us": total(one.system_us for one in spent),
        "cgroup_user_us": total(one.most_us[0] for one in spent) if has_more else None,
        "cgroup_system_us": total(one.most_us[1] for one in spent) if has_more else None,
        "minor_faults": total(one.minor_faults for one in spent),
        "read_bytes": total(one.read_bytes for one in spent),
        "written_bytes": total(one.written_bytes for one in spent),
        "ave_rss_bytes": min(sum(one.rss_sum for one in spent), MOST) // with_rss
        if with_rss
        else None,
    }
    if known:
        cpu_us = total((fields["user_us"], fields["system_us"])) or 0
        fields["ave_cpu_us"] = cpu_us // known
        fields["ave_pages"] = (total(one.pages_sum for one in spent) or 0) // known
        fields["ave_read_bytes"] = (total(one.task_read_sum for one in spent) or 0) // known
        fields["ave_written_bytes"] = (total(one.task_written_sum for one in spent) or 0) // known
    for name, value in _MAXIMA.items():
        tops = [(one.top(name), one.node) for one in spent]
        fields[value], fields[f"{name}_node"], fields[f"{name}_task"] = most(
            (largest, node, task) for (largest, task), node in tops
        )
    fields["min_cpu_us"], fields["min_cpu_node"], fields["min_cpu_task"] = least(
        (one.min_cpu_us, one.node, one.min_cpu_task) for one in spent
    )
    return fields


def _doubts(spent: Sequence[Spent], *, is_over: bool) -> str:
    """Return the doubts about a step, comma-separated."""
    found = set()
    for one in spent:
        if one.is_startless:
            found.add("no-start")
        if one.ended_us is None and is_over:
            found.add("no-end")
        if one.ended_us is not None and one.known < max(one.reaped, one.started):
            found.add("tasks-missing")
        if one.lost:
            found.add("lost-lines")
    return ",".join(sorted(found))


def _allocated(spent: Sequence[Spent], node: str) -> int | None:
    """Return the largest memory limit of a step's launches on a node."""
    known = [one.memory_bytes for one in spent if one.node == node and one.memory_bytes]
    return max(known, default=None)


def _folded(nodes: Sequence[str]) -> str:
    """Fold node names into a node list; join them if a name is malformed."""
    if len(nodes) == 1:
        return nodes[0]
    try:
        return fold(nodes)
    except NodeListError:
        return ",".join(nodes)


def _tres(cpus: int, memory: Sequence[int | None], nodes: int) -> str:
    """Format allocated TRES of a step."""
    parts = [f"cpu={cpus}"] if cpus else []
    bytes_ = sum(one or 0 for one in memory)
    if bytes_:
        size, unit = bytes_ >> 10, "K"
        for larger in "MGT":
            if size % 1024:
                break
            size, unit = size >> 10, larger
        parts.append(f"mem={size}{unit}")
    return ",".join([*parts, f"node={nodes}"])
