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
    allocated = parse_tres(record.tres_allocated)
    tres_counts = allocated or parse_tres(record.tres_requested)
    nodes = tres_counts.get("node") or record.nodes or 1
    cpus = allocated.get("cpu") or max(tres_counts.get("cpu", 0), record.cpus or 1)
    memory, memory_per_cpu = _split_memory(record, tres_counts, nodes, is_allocated=bool(allocated))
    counted_kinds = {strip_tres_type(name) for name in tres_counts}
    limit_s = record.time_limit_s
    return JobRequest(
        uid=-1 if record.uid is None else record.uid,
        job_id=record.array_job_id or record.job_id,
        account=record.account,
        partition=record.partition,
        qos=record.qos,
        reservation=record.reservation,
        # Slurm shows no time limit for a job with an unlimited one.
        time_limit_min=-1 if limit_s is None else -(-limit_s // 60),
        min_nodes=nodes,
        max_nodes=nodes
        if allocated
        else max(nodes, record.nodes or 1, _get_most_nodes(record, nodes)),
        # Each task with its CPUs; of an allocation only the total CPUs count.
        num_tasks=None if allocated else record.tasks,
        cpus_per_task=None if allocated else _divide_cpus(cpus, record.tasks),
        min_cpus=cpus,
        max_cpus=cpus if allocated else None,
        pn_min_memory_mib=memory,
        mem_per_cpu_mib=memory_per_cpu,
        exclusive=record.oversubscribe == "NO",
        array=_format_array(record),
        begin_us=to_micros_or_zero(record.eligible),
        held=record.reason in _HELD,
        het=bool(record.het_job_id),
        licenses=record.licenses,
        burst_buffers=",".join(
            f"{name}={amount}M" for name, amount in tres_counts.items() if name.startswith("bb/")
        ),
        tres_per_job=_format_gres(record, tres_counts, counted_kinds, is_allocated=bool(allocated)),
        tres_per_node="" if allocated else remove_kinds(record.tres_per_node, counted_kinds),
        tres_per_socket="" if allocated else remove_kinds(record.tres_per_socket, counted_kinds),
        tres_per_task="" if allocated else remove_kinds(record.tres_per_task, counted_kinds),
        cpus_per_tres="" if allocated else record.cpus_per_tres,
        mem_per_tres="" if allocated or "mem" in tres_counts else record.mem_per_tres,
        features=record.constraints,
        admin_comment=record.admin_comment,
    )


def apply_update(request: JobRequest, change: JobRequest) -> JobRequest:
    """Apply an update to a job's description; the update holds only the changed fields.

    A released job is assumed to start at once.

    Args:
        request: The description before the update.
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
        tasks, limit = request.array.partition("%")[0], changes["array"]
        changes["array"] = tasks if limit == "0" or not tasks else f"{tasks}%{limit}"
    if "num_tasks" in changes and "min_cpus" not in changes and request.cpus_per_task:
        changes["min_cpus"] = changes["num_tasks"] * request.cpus_per_task
    if "mem_per_cpu_mib" in changes:
        changes.setdefault("pn_min_memory_mib", None)
    elif "pn_min_memory_mib" in changes:
        changes["mem_per_cpu_mib"] = None
    if "min_nodes" in changes and "max_nodes" not in changes:
        max_nodes = request.max_nodes or 0
        changes["max_nodes"] = max(max_nodes, changes["min_nodes"]) if max_nodes else None
    return msgspec.structs.replace(request, **changes)


def is_compatible(request: JobRequest, queued: JobRequest, upper_bounds: Mapping[str, int]) -> bool:
    """Return True if a request, or one for less time, may be the job that the queue shows.

    Slurm shows a job's totals, not what it requests for each CPU, node, task or GPU.

    Args:
        request: A description as the user requested it.
        queued: A description from the queue, see :func:`describe_record`.
        upper_bounds: Upper bound of the allocation by TRES; empty if unknown.
    """
    if request.account.lower() not in ("", queued.account.lower()):
        return False
    for names, queued_names in ((request.partition, queued.partition), (request.qos, queued.qos)):
        if names and not set(queued_names.split(",")) <= set(names.split(",")):
            return False
    limit_min = request.time_limit_min or 0
    if limit_min > 0 and not 0 < (queued.time_limit_min or 0) <= limit_min:
        return False
    if request.array.partition("%")[2] != queued.array.partition("%")[2]:
        return False
    memory, queued_memory = _get_unit_memory(request), _get_unit_memory(queued)
    # The queue shows a running job's memory per node, even if the job requested it per CPU.
    is_waiting = queued.max_cpus is None
    if is_waiting and None not in (memory, queued_memory) and memory != queued_memory:
        return False
    minimum, queued_minimum = (
        _compute_minimum(request, request.min_nodes or 1),
        _compute_minimum(queued, queued.min_nodes or 1),
    )
    if minimum.keys() != queued_minimum.keys() or tres.parse_licenses(
        request.licenses
    ) != tres.parse_licenses(queued.licenses):
        return False
    max_by_kind: dict[str, int] = {}
    for name, count in upper_bounds.items():
        max_by_kind[strip_tres_type(name)] = max_by_kind.get(strip_tres_type(name), 0) + count
    return all(
        minimum[kind] <= queued_minimum[kind] <= max_by_kind.get(kind, queued_minimum[kind])
        for kind in queued_minimum
    )


def add_unshown_requests(queued: JobRequest, request: JobRequest, unshown_nodes: int) -> JobRequest:
    """Complete a waiting job's description from the queue by requests that squeue does not show.

    If Slurm rejects an update that raises the nodes, squeue may show only the raised CPUs; and it
    shows memory per CPU as memory per node.

    Args:
        queued: A description from the queue, see :func:`describe_record`.
        request: A description as the user requested it.
        unshown_nodes: Node count that the job may request although the queue shows fewer.
    """
    if queued.max_cpus is not None:
        return queued  # it runs
    changes: dict[str, Any] = {}
    nodes, queued_nodes = request.min_nodes or 1, queued.min_nodes or 1
    queued_minimum = _compute_minimum(queued, queued_nodes)
    if queued_nodes < nodes <= min(queued_minimum["cpu"], unshown_nodes):
        max_nodes = max(nodes, request.max_nodes or 0, queued.max_nodes or 0)
        changes |= {"min_nodes": nodes, "max_nodes": max_nodes}
        request_minimum = _compute_minimum(request, queued_nodes)
        if all(
            request_minimum.get(kind) == queued_minimum.get(kind)
            for kind in (request_minimum | queued_minimum)
            if "/" in kind
        ):
            changes |= {field: getattr(request, field) for field in GRES_FIELDS}
    if request.mem_per_cpu_mib and request.mem_per_cpu_mib == queued.pn_min_memory_mib:
        changes |= {"mem_per_cpu_mib": request.mem_per_cpu_mib, "pn_min_memory_mib": None}
    return msgspec.structs.replace(queued, **changes) if changes else queued


def _split_memory(
    record: JobRecord, tres_counts: dict[str, int], nodes: int, *, is_allocated: bool
) -> tuple[int | None, int | None]:
    """Return the memory of each node and of each CPU in MiB; at least one is None.

    squeue does not tell whether MinMemory is per node or per CPU. If the TRES fit neither, they
    are older than the request.
    """
    total, min_memory = tres_counts.get("mem"), record.min_memory_mib
    if total is None:
        return None, None
    # A node's share, so that all nodes together have what the job has.
    node_memory = -(-total // nodes)
    if is_allocated or min_memory is None or record.mem_per_tres or node_memory == min_memory:
        return node_memory, None
    if not min_memory:
        return 0, None
    return (
        (node_memory, None)
        if min_memory * tres_counts.get("cpu", 1) < total
        else (None, min_memory)
    )


def _get_unit_memory(job: JobRequest) -> int | None:
    """Return the memory of each CPU in MiB if the job sets it, else of each node."""
    return job.pn_min_memory_mib if job.mem_per_cpu_mib is None else job.mem_per_cpu_mib


def _compute_minimum(job: JobRequest, nodes: int) -> dict[str, int]:
    """Compute the minimum of CPUs, nodes and GRES by kind that a job needs on this many nodes."""
    tasks = job.num_tasks or 1
    cpus = 0 if job.overcommit else tasks * (job.cpus_per_task or 1)
    minimum = {"cpu": max(cpus, job.min_cpus or 0), "node": nodes}
    for gres, factor in (
        (job.tres_per_job, 1),
        (job.tres_per_socket, 1),
        (job.tres_per_node, nodes),
        (job.tres_per_task, tasks),
    ):
        kinds: dict[str, int] = {}
        for name, amount in parse_requested_gres(gres).items():
            kinds[strip_tres_type(name)] = kinds.get(strip_tres_type(name), 0) + amount * factor
        for kind, amount in kinds.items():
            minimum[kind] = max(minimum.get(kind, 0), amount)
    return minimum


def _divide_cpus(cpus: int, tasks: int | None) -> int | None:
    return None if not tasks or cpus <= tasks or cpus % tasks else cpus // tasks


def _get_most_nodes(record: JobRecord, nodes: int) -> int:
    """Return over how many nodes a waiting job may spread; a count of 1 is often the minimum."""
    return max(nodes, record.tasks or 1) if nodes == 1 else nodes


def _format_gres(
    record: JobRecord, tres_counts: dict[str, int], counted_kinds: set[str], *, is_allocated: bool
) -> str:
    """Return all of a job's GRES: counted ones as Slurm shows them, others as requested."""
    gres_counts = _split_gres_types(tres_counts)
    if not is_allocated:
        # squeue guesses the nodes of some jobs.
        record = msgspec.structs.replace(record, nodes=tres_counts.get("node") or record.nodes)
    requested = count_requested_kinds(record)
    if is_allocated:
        # A running job's nodes and tasks are fixed.
        gres_counts |= {
            name: count
            for name, count in requested.items()
            if strip_tres_type(name) not in counted_kinds
        }
    else:
        for name, count in requested.items():
            names = [gres for gres in gres_counts if strip_tres_type(gres) == strip_tres_type(name)]
            total = sum(gres_counts[gres] for gres in names)
            if names and count > total:
                gres_counts[name] = gres_counts.get(name, 0) + count - total
    parts = [f"{name}:{amount}" for name, amount in gres_counts.items() if amount]
    if not is_allocated:
        parts.append(remove_kinds(record.tres_per_job, counted_kinds))
    return ",".join(filter(None, parts))


def _split_gres_types(tres_counts: dict[str, int]) -> dict[str, int]:
    """Return GRES by type where a type is known; the rest by name."""
    gres_counts = {name: amount for name, amount in tres_counts.items() if name.startswith("gres/")}
    for name, amount in list(gres_counts.items()):
        kind, colon, _ = name.partition(":")
        if colon and kind in gres_counts:
            gres_counts[kind] -= amount
    return gres_counts


def _format_array(record: JobRecord) -> str:
    """Return the array tasks that a record stands for: those without records of their own."""
    if not record.array_job_id or record.array_task.isdecimal():
        return ""
    # Tasks that Slurm cut off count when they have records of their own.
    tasks, percent, limit = record.array_task.strip("[]").partition("%")
    return tasks.replace("...", "").strip(",") + percent + limit
