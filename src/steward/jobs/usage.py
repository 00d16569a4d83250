"""Usage of runs and steps: build accounting lines, as sacct shows them, from reports.

:func:`build_run_line` makes a run's line, :func:`build_step_line` a step's, and :func:`add_steps`
adds the steps' usage to the run; :func:`adopt_step_line` takes over an imported step. All are pure
functions, because both the jobs consumer and readers of a job log make lines, and must get the same
result.
"""

import os
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec

from steward.core.records import RUN_TIMES, USAGE_LINE_FIELDS, RunFields, UsageLine
from steward.core.timestamps import to_micros, to_micros_or_zero
from steward.core.usage import RunEvent, StepUsage
from steward.jobs.job_ids import format_job_name
from steward.jobs.lines import (
    MAX_INTEGER,
    LaunchUsage,
    find_maximum,
    find_minimum,
    sum_known,
    sum_launch,
)
from steward.slurm.job_states import strip_state_suffix
from steward.slurm.nodelists import NodeListError, fold_nodelist

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

_COUNTS: Final = ("suspended_s", "nodes", "cpus", "requested_cpus", "requested_nodes")
"""Numbers that are None in a record and 0 in a line while they are unknown."""

RUN_FIELDS: Final = (
    *("job_id", "restarts", "sluid", "array_job_id", "array_task", "het_job_id", "het_offset"),
    *("uid", "user", "gid", "group", "account", "partition", "qos", "wckey"),
)
"""Fields of a run's record that the lines of its steps repeat."""

_OF_STEPS: Final = {
    *("cluster", "label", "first_submit_us", "piece_us", "is_latest", *RUN_FIELDS),
    *("submit_us", "eligible_us"),
}
_TIMES: Final = {f"{name}_us": name for name in RUN_TIMES}
_OF_RECORDS: Final = {*RunFields.__struct_fields__, *_COUNTS, *_TIMES}
# In the order of UsageLine, because msgspec takes twice as long for fields in another one.
_INHERITED: Final = tuple(field for field in USAGE_LINE_FIELDS if field in _OF_STEPS)
"""Fields that a step's line takes from its run's line."""
_RECORDED: Final = tuple(field for field in USAGE_LINE_FIELDS if field in _OF_RECORDS)
"""Fields that a run's line takes from its record."""
_get_recorded = attrgetter(*(_TIMES.get(field, field) for field in _RECORDED))
_get_inherited = attrgetter(*_INHERITED)


def build_run_line(
    cluster: str, event: RunEvent, *, is_latest: bool = True, source: str = ""
) -> UsageLine:
    """Build the line of a run, or of a piece of one, without its steps' usage.

    Args:
        cluster: Cluster name.
        event: What is known about the run; for a piece, its record has the piece's times.
        is_latest: Whether it is the job's last run and not a former piece.
        source: Where it comes from, see ``UsageLine.source``.
    """
    record = event.record
    fields = dict(zip(_RECORDED, _get_recorded(record), strict=True))
    for name in _COUNTS:
        fields[name] = fields[name] or 0
    for name in _TIMES:
        fields[name] = to_micros_or_zero(fields[name])
    fields["job_id"], fields["restarts"] = event.job_id, event.restarts
    fields["state"] = strip_state_suffix(record.state)
    return UsageLine(
        cluster=cluster,
        label=format_job_name(record),
        first_submit_us=to_micros(event.first_submit),
        piece_us=to_micros_or_zero(event.piece_end),
        is_latest=int(is_latest),
        source=source,
        **fields,
    )


def build_step_line(
    run: UsageLine, launches: Iterable[StepUsage], *, is_over: bool | None = None
) -> UsageLine:
    """Build the line of a step.

    Args:
        run: Line of its run, or piece.
        launches: Reports of the step from each of its nodes, at least one; each has ``step``,
            ``node`` and ``launched_us``.
        is_over: Whether the run ended; None to read that from its line.
    """
    reports = list(launches)
    return build_summed_step_line(
        run, reports[0].step, [sum_launch(launch) for launch in reports], is_over=is_over
    )


def build_summed_step_line(
    run: UsageLine, step: str, launches: Sequence[LaunchUsage], *, is_over: bool | None = None
) -> UsageLine:
    """Build the line of a step from launches that are already summed up."""
    has_ended = bool(run.end_us) if is_over is None else is_over
    nodes = sorted({launch.node for launch in launches})
    ends = [launch.ended_us for launch in launches if launch.ended_us is not None]
    is_ended = has_ended or len(ends) == len(launches)
    end_us = max(ends, default=run.end_us) if is_ended else 0
    task_count = (
        sum_known(max(launch.started, launch.ended_tasks, launch.known) for launch in launches) or 0
    )
    state, code, signal = _derive_outcome(run, step, launches, is_ended=is_ended)
    peak = find_maximum((launch.peak_bytes, launch.node, None) for launch in launches)
    cpus = sum_known(launch.cpus for launch in launches) or 0
    names = [launch.name for launch in launches if launch.name]
    fields: dict[str, Any] = {
        "step": step,
        "name": step if step in _NAMED else min(names, default=""),
        "state": state,
        "exit_code": code,
        "exit_signal": signal,
        "start_us": min(launch.launched_us for launch in launches),
        "end_us": end_us,
        "nodes": len(nodes),
        "cpus": cpus,
        "nodelist": _fold_nodes(nodes),
        "tres_allocated": _format_tres(
            cpus, [launch.memory_bytes for launch in launches], len(nodes)
        ),
        "tasks": task_count,
        "peak_bytes": peak[0],
        "peak_node": peak[1],
        "peak_allocated_bytes": _find_allocated_memory(launches, peak[1]),
        "doubts": _list_doubts(launches, is_over=has_ended),
    }
    return _make_step(run, fields | _sum_usage(launches))


def add_steps(run: UsageLine, steps: Iterable[UsageLine]) -> UsageLine:
    """Return a run's line with the usage of its steps: sums as in sacct.

    Maxima are the largest of the steps', with node and task; there is no mean over steps.
    """
    step_lines = list(steps)
    if not step_lines:
        return run
    fields: dict[str, Any] = {
        name: sum_known(getattr(step, name) for step in step_lines) for name in _SUMS
    }
    fields["tasks"] = fields["tasks"] or 0
    # If one step's cgroup exceeds its tasks, the other steps count with their tasks' time.
    for kind in ("user", "system"):
        name = f"cgroup_{kind}_us"
        if fields[name] is not None:
            times = (
                getattr(step, f"{kind}_us")
                if (cgroup_us := getattr(step, name)) is None
                else cgroup_us
                for step in step_lines
            )
            fields[name] = sum_known(times)
    for name, value in _MAXIMA.items():
        triples = (
            (getattr(step, value), getattr(step, f"{name}_node"), getattr(step, f"{name}_task"))
            for step in step_lines
        )
        fields[value], fields[f"{name}_node"], fields[f"{name}_task"] = find_maximum(triples)
    fields["min_cpu_us"], fields["min_cpu_node"], fields["min_cpu_task"] = find_minimum(
        (step.min_cpu_us, step.min_cpu_node, step.min_cpu_task) for step in step_lines
    )
    peak = find_maximum((step.peak_bytes, step.peak_node, None) for step in step_lines)
    fields["peak_bytes"], fields["peak_node"], _ = peak
    allocated = [
        step.peak_allocated_bytes
        for step in step_lines
        if (step.peak_bytes, step.peak_node) == peak[:2] and step.peak_allocated_bytes is not None
    ]
    fields["peak_allocated_bytes"] = max(allocated, default=None)
    doubts = {doubt for step in step_lines for doubt in step.doubts.split(",") if doubt}
    fields["doubts"] = ",".join(sorted(doubts))
    return msgspec.structs.replace(run, **fields)


def _make_step(run: UsageLine, fields: dict[str, Any]) -> UsageLine:
    """Build a step's line with the fields it shares with its run."""
    return UsageLine(**dict(zip(_INHERITED, _get_inherited(run), strict=True)), **fields)


def adopt_step_line(run: UsageLine, line: UsageLine) -> UsageLine:
    """Return a step's line from other accounting, with the fields of our run's line."""
    inherited = dict(zip(_INHERITED, _get_inherited(run), strict=True))
    return msgspec.structs.replace(line, **inherited)


def _derive_outcome(
    run: UsageLine, step: str, launches: Sequence[LaunchUsage], *, is_ended: bool
) -> tuple[str, int | None, int | None]:
    """Return state, exit code and signal of a step as Slurm does: by the highest wait status."""
    if not is_ended:
        return "RUNNING", None, None
    if step == "extern":
        # Slurm always kills the extern step, so its status says nothing.
        return "COMPLETED", 0, 0
    statuses = [launch.status for launch in launches if launch.status is not None]
    if not statuses:
        return (run.state if run.end_us else "COMPLETED"), None, None
    status = max(statuses)
    if run.state == _OOM and (status in _KILLED or (step == "batch" and status)):
        return _OOM, 0, _OOM_SIGNAL
    if os.WIFSIGNALED(status):
        return "CANCELLED", 0, os.WTERMSIG(status)
    code = os.WEXITSTATUS(status)
    return ("FAILED" if code else "COMPLETED"), code, 0


def _sum_usage(launches: Sequence[LaunchUsage]) -> dict[str, Any]:
    """Sum up the usage fields of a step's launches."""
    known_tasks = sum(launch.known for launch in launches)
    rss_count = sum(launch.rss_known for launch in launches)
    has_cgroup = any(launch.cgroup_us is not None for launch in launches)
    fields: dict[str, Any] = {
        "user_us": sum_known(launch.user_us for launch in launches),
        "system_us": sum_known(launch.system_us for launch in launches),
        "cgroup_user_us": sum_known(launch.cpu_time_us[0] for launch in launches)
        if has_cgroup
        else None,
        "cgroup_system_us": sum_known(launch.cpu_time_us[1] for launch in launches)
        if has_cgroup
        else None,
        "minor_faults": sum_known(launch.minor_faults for launch in launches),
        "read_bytes": sum_known(launch.read_bytes for launch in launches),
        "written_bytes": sum_known(launch.written_bytes for launch in launches),
        "ave_rss_bytes": min(sum(launch.rss_sum for launch in launches), MAX_INTEGER) // rss_count
        if rss_count
        else None,
    }
    if known_tasks:
        cpu_us = sum_known((fields["user_us"], fields["system_us"])) or 0
        fields["ave_cpu_us"] = cpu_us // known_tasks
        fields["ave_pages"] = (
            sum_known(launch.pages_sum for launch in launches) or 0
        ) // known_tasks
        fields["ave_read_bytes"] = (
            sum_known(launch.task_read_sum for launch in launches) or 0
        ) // known_tasks
        fields["ave_written_bytes"] = (
            sum_known(launch.task_written_sum for launch in launches) or 0
        ) // known_tasks
    for name, value in _MAXIMA.items():
        maxima = [(launch.get_maximum(name), launch.node) for launch in launches]
        fields[value], fields[f"{name}_node"], fields[f"{name}_task"] = find_maximum(
            (largest, node, task) for (largest, task), node in maxima
        )
    fields["min_cpu_us"], fields["min_cpu_node"], fields["min_cpu_task"] = find_minimum(
        (launch.min_cpu_us, launch.node, launch.min_cpu_task) for launch in launches
    )
    return fields


def _list_doubts(launches: Sequence[LaunchUsage], *, is_over: bool) -> str:
    """Return what is missing of a step (``no-start``, ``tasks-missing`` …), comma-separated."""
    doubts = set()
    for launch in launches:
        if launch.lacks_start:
            doubts.add("no-start")
        if launch.ended_us is None and is_over:
            doubts.add("no-end")
        if launch.ended_us is not None and launch.known < max(launch.ended_tasks, launch.started):
            doubts.add("tasks-missing")
        if launch.lost:
            doubts.add("lost-lines")
    return ",".join(sorted(doubts))


def _find_allocated_memory(launches: Sequence[LaunchUsage], node: str) -> int | None:
    """Return the largest memory limit of a step's launches on a node."""
    limits = [
        launch.memory_bytes for launch in launches if launch.node == node and launch.memory_bytes
    ]
    return max(limits, default=None)


def _fold_nodes(nodes: Sequence[str]) -> str:
    """Fold node names into a node list; join them if a name is malformed."""
    if len(nodes) == 1:
        return nodes[0]
    try:
        return fold_nodelist(nodes)
    except NodeListError:
        return ",".join(nodes)


def _format_tres(cpus: int, memory: Sequence[int | None], nodes: int) -> str:
    """Format allocated TRES of a step."""
    parts = [f"cpu={cpus}"] if cpus else []
    bytes_ = sum(limit or 0 for limit in memory)
    if bytes_:
        size, unit = bytes_ >> 10, "K"
        for larger in "MGT":
            if size % 1024:
                break
            size, unit = size >> 10, larger
        parts.append(f"mem={size}{unit}")
    return ",".join([*parts, f"node={nodes}"])
