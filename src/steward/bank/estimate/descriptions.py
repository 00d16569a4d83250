"""Descriptions of jobs (their requests), from queue records and from updates.

`describe_record` converts a queue record to a `JobRequest`; `apply_update` applies an update.
`is_compatible` and `add_unshown_requests` compare a known request with what the queue shows, since
squeue shows totals, not what a job requests per CPU, node, task or GPU. Memory is in MiB.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from steward.bank.records import GRES_FIELDS, JobRequest
from steward.core.records import JobRecord
from steward.core.timestamps import to_micros_or_zero
from steward.slurm import tres
from steward.slurm.tres import (
    count_requested_kinds,
    parse_requested_gres,
    parse_tres,
    remove_kinds,
    strip_tres_type,
)

_HELD: Final = frozenset({"JobHeldAdmin", "JobHeldUser"})
_UNSET: Final = JobRequest(uid=-1)


def describe_record(record: JobRecord) -> JobRequest:
    """Return a job's request as its queue record shows it.

    A job with an allocation is described by what it got, so that its estimate is what it has for as
    long as it may run; a waiting job by what Slurm computes that it needs. GRES that Slurm does not
    count in a job's TRES are taken as requested. An update that slurmctld rejects may change a
    job's requests without its TRES: the larger number counts.

    Args:
        record: A record from a poll, or of a single job.
    """
    has = parse_tres(record.tres_allocated)
    asked = has or parse_tres(record.tres_requested)
    nodes = asked.get("node") or record.nodes or 1
    cpus = has.get("cpu") or max(asked.get("cpu", 0), record.cpus or 1)
    memory, memory_of_cpu = _split_memory(record, asked, nodes, has=bool(has))
    counted = {strip_tres_type(name) for name in asked}
    limit = record.time_limit_s
    return JobRequest(
        uid=-1 if record.uid is None else record.uid,
        job_id=record.array_job_id or record.job_id,
        account=record.account,
        partition=record.partition,
        qos=record.qos,
        reservation=record.reservation,
        # Slurm shows no time limit for a job with an unlimited one.
        time_limit_min=-1 if limit is None else -(-limit // 60),
        min_nodes=nodes,
        max_nodes=nodes if has else max(nodes, record.nodes or 1, _get_most_nodes(record, nodes)),
        # Each task with its CPUs; of an allocation only the total CPUs count.
        num_tasks=None if has else record.tasks,
        cpus_per_task=None if has else _divide_cpus(cpus, record.tasks),
        min_cpus=cpus,
        max_cpus=cpus if has else None,
        pn_min_memory_mib=memory,
        mem_per_cpu_mib=memory_of_cpu,
        exclusive=record.oversubscribe == "NO",
        array=_format_array(record),
        begin_us=to_micros_or_zero(record.eligible),
        held=record.reason in _HELD,
        het=bool(record.het_job_id),
        licenses=record.licenses,
        burst_buffers=",".join(
            f"{name}={amount}M" for name, amount in asked.items() if name.startswith("bb/")
        ),
        tres_per_job=_format_gres(record, asked, counted, has=bool(has)),
        tres_per_node="" if has else remove_kinds(record.tres_per_node, counted),
        tres_per_socket="" if has else remove_kinds(record.tres_per_socket, counted),
        tres_per_task="" if has else remove_kinds(record.tres_per_task, counted),
        cpus_per_tres="" if has else record.cpus_per_tres,
        mem_per_tres="" if has or "mem" in asked else record.mem_per_tres,
        features=record.constraints,
        admin_comment=record.admin_comment,
    )


def apply_update(base: JobRequest, change: JobRequest) -> JobRequest:
    """Apply an update to a job's description; the update holds only the changed fields.

    A released job is assumed to start at once.

    Args:
        base: The description before the update.
        change: What ``scontrol update`` sends; unset fields stay.
    """
    changes = {
        field: value
        for field in JobRequest.__struct_fields__
        if field not in ("uid", "job_id", "released")
        and (value := getattr(change, field)) != getattr(_UNSET, field)
    }
    if change.released or not changes:
        # The only update in which Slurm sends no field is a release.
        changes |= {"held": False, "begin_us": change.begin_us}
    if "array" in changes:
        # An array update sets how many tasks may run at once, 0 for all.
        tasks, limit = base.array.partition("%")[0], changes["array"]
        changes["array"] = tasks if limit == "0" or not tasks else f"{tasks}%{limit}"
    if "num_tasks" in changes and "min_cpus" not in changes and base.cpus_per_task:
        changes["min_cpus"] = changes["num_tasks"] * base.cpus_per_task
    if "mem_per_cpu_mib" in changes:
        changes.setdefault("pn_min_memory_mib", None)
    elif "pn_min_memory_mib" in changes:
        changes["mem_per_cpu_mib"] = None
    if "min_nodes" in changes and "max_nodes" not in changes:
        most = base.max_nodes or 0
        changes["max_nodes"] = max(most, changes["min_nodes"]) if most else None
    return msgspec.structs.replace(base, **changes)


def is_compatible(asked: JobRequest, shown: JobRequest, most: Mapping[str, int]) -> bool:
    """Return True if a request, or one for less time, may be the job that the queue shows.

    Slurm shows a job's totals, not what it requests for each CPU, node, task or GPU.

    Args:
        asked: A description as the user requested it.
        shown: A description from the queue, see :func:`describe_record`.
        most: Upper bound of the allocation by TRES; empty if unknown.
    """
    if asked.account.lower() not in ("", shown.account.lower()):
        return False
    for names, names_shown in ((asked.partition, shown.partition), (asked.qos, shown.qos)):
        if names and not set(names_shown.split(",")) <= set(names.split(",")):
            return False
    limit_min = asked.time_limit_min or 0
    if limit_min > 0 and not 0 < (shown.time_limit_min or 0) <= limit_min:
        return False
    if asked.array.partition("%")[2] != shown.array.partition("%")[2]:
        return False
    memory, memory_shown = _get_unit_memory(asked), _get_unit_memory(shown)
    # The queue shows a running job's memory per node, even if the job requested it per CPU.
    is_waiting = shown.max_cpus is None
    if is_waiting and None not in (memory, memory_shown) and memory != memory_shown:
        return False
    least, has = (
        _compute_minimum(asked, asked.min_nodes or 1),
        _compute_minimum(shown, shown.min_nodes or 1),
    )
    if least.keys() != has.keys() or tres.parse_licenses(asked.licenses) != tres.parse_licenses(
        shown.licenses
    ):
        return False
    most_by_kind: dict[str, int] = {}
    for name, count in most.items():
        most_by_kind[strip_tres_type(name)] = most_by_kind.get(strip_tres_type(name), 0) + count
    return all(least[kind] <= has[kind] <= most_by_kind.get(kind, has[kind]) for kind in has)


def add_unshown_requests(shown: JobRequest, asked: JobRequest, unshown_nodes: int) -> JobRequest:
    """Complete a waiting job's description from the queue by requests that squeue does not show.

    If Slurm rejects an update that raises the nodes, squeue may show only the raised CPUs; and it
    shows memory per CPU as memory per node.

    Args:
        shown: A description from the queue, see :func:`describe_record`.
        asked: A description as the user requested it.
        unshown_nodes: Node count that the job may request although the queue shows fewer.
    """
    if shown.max_cpus is not None:
        return shown  # it runs
    changes: dict[str, Any] = {}
    nodes, nodes_shown = asked.min_nodes or 1, shown.min_nodes or 1
    least = _compute_minimum(shown, nodes_shown)
    if nodes_shown < nodes <= min(least["cpu"], unshown_nodes):
        most_nodes = max(nodes, asked.max_nodes or 0, shown.max_nodes or 0)
        changes |= {"min_nodes": nodes, "max_nodes": most_nodes}
        gres = _compute_minimum(asked, nodes_shown)
        if all(gres.get(kind) == least.get(kind) for kind in (gres | least) if "/" in kind):
            changes |= {field: getattr(asked, field) for field in GRES_FIELDS}
    if asked.mem_per_cpu_mib and asked.mem_per_cpu_mib == shown.pn_min_memory_mib:
        changes |= {"mem_per_cpu_mib": asked.mem_per_cpu_mib, "pn_min_memory_mib": None}
    return msgspec.structs.replace(shown, **changes) if changes else shown


def _split_memory(
    record: JobRecord, asked: dict[str, int], nodes: int, *, has: bool
) -> tuple[int | None, int | None]:
    """Return the memory of each node and of each CPU in MiB; at least one is None.

    squeue does not tell whether MinMemory is per node or per CPU. If the TRES fit neither, they
    are older than the request.
    """
    total, least = asked.get("mem"), record.min_memory_mib
    if total is None:
        return None, None
    # A node's share, so that all nodes together have what the job has.
    share = -(-total // nodes)
    if has or least is None or record.mem_per_tres or share == least:
        return share, None
    if not least:
        return 0, None
    return (share, None) if least * asked.get("cpu", 1) < total else (None, least)


def _get_unit_memory(job: JobRequest) -> int | None:
    """Return the memory of each CPU in MiB if the job sets it, else of each node."""
    return job.pn_min_memory_mib if job.mem_per_cpu_mib is None else job.mem_per_cpu_mib


def _compute_minimum(job: JobRequest, nodes: int) -> dict[str, int]:
    """Compute the minimum of CPUs, nodes and GRES by kind that a job needs on this many nodes."""
    tasks = job.num_tasks or 1
    cpus = 0 if job.overcommit else tasks * (job.cpus_per_task or 1)
    least = {"cpu": max(cpus, job.min_cpus or 0), "node": nodes}
    for text, count in (
        (job.tres_per_job, 1),
        (job.tres_per_socket, 1),
        (job.tres_per_node, nodes),
        (job.tres_per_task, tasks),
    ):
        kinds: dict[str, int] = {}
        for name, amount in parse_requested_gres(text).items():
            kinds[strip_tres_type(name)] = kinds.get(strip_tres_type(name), 0) + amount * count
        for kind, amount in kinds.items():
            least[kind] = max(least.get(kind, 0), amount)
    return least


def _divide_cpus(cpus: int, tasks: int | None) -> int | None:
    return None if not tasks or cpus <= tasks or cpus % tasks else cpus // tasks


def _get_most_nodes(record: JobRecord, nodes: int) -> int:
    """Return over how many nodes a waiting job may spread; a count of 1 is often the minimum."""
    return max(nodes, record.tasks or 1) if nodes == 1 else nodes


def _format_gres(record: JobRecord, asked: dict[str, int], counted: set[str], *, has: bool) -> str:
    """Return all of a job's GRES: counted ones as Slurm shows them, others as requested."""
    found = _split_gres_types(asked)
    if not has:
        # squeue guesses the nodes of some jobs.
        record = msgspec.structs.replace(record, nodes=asked.get("node") or record.nodes)
    others = count_requested_kinds(record)
    if has:
        # A running job's nodes and tasks are fixed.
        found |= {
            name: count for name, count in others.items() if strip_tres_type(name) not in counted
        }
    else:
        for name, count in others.items():
            names = [gres for gres in found if strip_tres_type(gres) == strip_tres_type(name)]
            total = sum(found[gres] for gres in names)
            if names and count > total:
                found[name] = found.get(name, 0) + count - total
    parts = [f"{name}:{amount}" for name, amount in found.items() if amount]
    if not has:
        parts.append(remove_kinds(record.tres_per_job, counted))
    return ",".join(filter(None, parts))


def _split_gres_types(amounts: dict[str, int]) -> dict[str, int]:
    """Return GRES by type where a type is known; the rest by name."""
    found = {name: amount for name, amount in amounts.items() if name.startswith("gres/")}
    for name, amount in list(found.items()):
        kind, colon, _ = name.partition(":")
        if colon and kind in found:
            found[kind] -= amount
    return found


def _format_array(record: JobRecord) -> str:
    """Return the array tasks that a record stands for: those without records of their own."""
    if not record.array_job_id or record.array_task.isdecimal():
        return ""
    # Tasks that Slurm cut off count when they have records of their own.
    tasks, percent, limit = record.array_task.strip("[]").partition("%")
    return tasks.replace("...", "").strip(",") + percent + limit
