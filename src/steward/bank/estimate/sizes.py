"""Upper bound of a job's allocation: TRES that Slurm may allocate at most, for its estimate.

`PartitionLimits` and `PricedPartition` hold what a partition and a rate determine before any job is
known; they are computed once and used for every estimate. `compute_size` computes the bound for a
request (`JobRequest`) in a partition; `_DerivedRequest` derives tasks, nodes, CPUs, memory and GPUs
as Slurm would.

Slurm allocates whole cores on each node, so the number of nodes decides how much is lost to
rounding, and a job that leaves the number open may be spread over as many nodes as it has tasks.
The values that sbatch derives (``min_cpus`` of unset options) and slurmctld's (MaxMemPerCPU,
DefCpuPerGPU) are applied where they make a job larger. Sources: slurm.conf(5), sbatch(1), and what
real Slurm allocates in tests/integration/test_estimate_allocations.py. Memory is in MiB.
"""

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Final

from steward.bank.estimate.request_limits import bound_node_count
from steward.bank.prices import (
    HOUR_S,
    UNCHANGED_PERMILLE,
    apply_minimum_and_end,
    compute_highest_price_per_second,
    get_highest_end_permille,
    get_highest_permille,
    list_weighted_tres,
)
from steward.bank.records import JobRequest, Rate
from steward.slurm import tres
from steward.slurm.cluster_model import ClusterModel, NodeShape, PartitionModel
from steward.slurm.tres import is_size, parse_tres

_SOCKET: Final = "cr_socket"
_CPU: Final = "cr_cpu"
_GIB: Final = 1024
_SCALE: Final = _GIB * HOUR_S * UNCHANGED_PERMILLE * UNCHANGED_PERMILLE
"""Factor between the integers of the computation and the amounts that they stand for."""

_BOARD: Final = "cr_board"


class PartitionLimits:
    """Properties of a partition that an estimate needs.

    Attributes:
        name: Its name.
        nodes: Maximum number of nodes of one job.
        min_nodes: Minimum number of nodes of one job.
        whole: Whether every job gets its nodes exclusively.
        unit: Number of CPUs allocated at once: a core's, a socket's.
        is_scattered: Whether each CPU may come with its own socket or board.
        threads: Maximum number of CPUs per core.
        min_threads: Minimum number of CPUs per core.
        counts_memory: Whether memory is a consumable resource.
        is_one_task_per_core: Whether no two tasks share a core (CR_ONE_TASK_PER_CORE).
        cpus: CPUs of the largest node.
        memory_mib: Memory of the node with most memory.
        sockets: Sockets of the node with most sockets.
        max_by_tres: Maximum of each TRES on one node.
        types: Types by GRES: ``{"gres/gpu": ("gres/gpu:a100",)}``.
    """

    def __init__(self, partition: PartitionModel, model: ClusterModel) -> None:
        self.partition = partition
        self.name = partition.name
        shapes = [model.shapes[number] for number, _ in partition.shapes]
        self.shapes = shapes or [NodeShape()]
        selects = partition.selects or model.selects
        count = partition.nodes or sum(node_count for _, node_count in partition.shapes) or 1
        self.nodes = min(count, partition.max_nodes) if partition.max_nodes else count
        self.min_nodes = max(1, partition.min_nodes)
        self.whole = partition.exclusive or model.linear
        self.threads = max(shape.cpus_per_core for shape in self.shapes)
        self.min_threads = min(shape.cpus_per_core for shape in self.shapes)
        self.unit = max(_get_allocation_unit(shape, selects) for shape in self.shapes)
        self.is_scattered = _SOCKET in selects or _BOARD in selects
        self.counts_memory = "memory" in selects
        self.is_one_task_per_core = "one_task_per_core" in f"{selects},{model.selects}"
        self.cpus = max(shape.cpus for shape in self.shapes)
        self.memory_mib = max(shape.memory_mib for shape in self.shapes)
        self.sockets = max(shape.sockets for shape in self.shapes)
        self.max_by_tres: dict[str, int] = {}
        for shape in self.shapes:
            for name, amount in shape.whole.items():
                self.max_by_tres[name] = max(self.max_by_tres.get(name, 0), amount)
        self.types = {
            name: tuple(typed for typed in self.max_by_tres if typed.startswith(f"{name}:"))
            for name in self.max_by_tres
            if name.startswith("gres/") and ":" not in name
        }
        self.billing = {name: Fraction(weight) for name, weight in partition.billing.items()}
        self.billing_max = model.billing_max


class PricedPartition:
    """A rate applied to a partition, precomputed for fast prices.

    Attributes:
        rate: The rate.
        end_permille: The most expensive factor of how a job may end.
        whole: Whether nodes are charged or allocated whole.
        most_expensive_type: For each GRES with weights by type, the most expensive type in the
            partition.
        has_billing: Whether the rate weights Slurm's own billing.
    """

    def __init__(self, rate: Rate, limits: PartitionLimits) -> None:
        self.rate = rate
        self.end_permille = get_highest_end_permille(rate)
        self.whole = rate.whole_nodes or limits.whole
        self.has_billing = bool(rate.weights.get("billing"))
        self._is_typed = any(":" in name for name in rate.weights)
        self._factor = get_highest_permille(rate.factors)
        # A MiB has 1/1024 of a GiB's weight, so all other weights are scaled up by 1024.
        self._weights = [
            (name, weight if is_size(name) else weight * _GIB)
            for name, weight in rate.weights.items()
        ]
        self.most_expensive_type: dict[str, str] = {}
        for name, types in limits.types.items():
            billed = limits.billing if self.has_billing else {}
            if any(typed in rate.weights or typed in billed for typed in types):
                self.most_expensive_type[name] = max(
                    types, key=lambda typed: self._compute_type_cost(typed, billed)
                )

    def compute_cost(self, size: dict[str, int], seconds: int, qos: str) -> int:
        """Return the highest cost of these TRES for this many seconds.

        Equal to :func:`steward.bank.prices.compute_highest_price`, but in integers, which are many
        times faster than fractions; weights by type are left to the fractions.
        """
        rate = self.rate
        if self._is_typed or rate.free:
            exact = compute_highest_price_per_second(size, rate, qos) * seconds
            return apply_minimum_and_end(exact, rate, self.end_permille)
        parts = [size.get(name, 0) * weight for name, weight in self._weights]
        hourly = max(parts, default=0) if rate.combine == "max" else sum(parts)
        exact_of = hourly * seconds * self._factor * rate.qos_permille.get(qos, UNCHANGED_PERMILLE)
        least = rate.minimum * _SCALE
        # Half up: none of these is negative.
        whole = max(exact_of, least) * self.end_permille
        return (2 * whole + _SCALE * UNCHANGED_PERMILLE) // (2 * _SCALE * UNCHANGED_PERMILLE)

    def _compute_type_cost(self, typed: str, billed: Mapping[str, Fraction]) -> Fraction:
        amounts = {typed: 1, typed.partition(":")[0]: 1}
        by_billing = billed.get(typed, Fraction(0)) * self.rate.weights.get("billing", 0)
        return sum((cost for _, _, cost in list_weighted_tres(amounts, self.rate)), by_billing)


def _get_allocation_unit(shape: NodeShape, selects: str) -> int:
    """Return how many CPUs Slurm allocates at once on such a node; with CR_CPU each alone."""
    if _BOARD in selects:
        return shape.cpus
    if _SOCKET in selects:
        return max(1, -(-shape.cpus // max(1, shape.sockets)))
    return 1 if _CPU in selects else shape.cpus_per_core


_GPU: Final = "gres/gpu"
_NOTHING: Final[dict[str, int]] = {}

# The same texts are parsed for each partition and QOS of a job; nobody modifies the results.
requested_gres: Final = lru_cache(maxsize=256)(tres.parse_requested_gres)
"""Cached parser of GRES requests."""
licenses: Final = lru_cache(maxsize=256)(tres.parse_licenses)


def compute_size(
    job: JobRequest, limits: PartitionLimits, priced: PricedPartition
) -> dict[str, int]:
    """Return the TRES that a job, or one array task, may have allocated at most.

    Args:
        job: The job's request.
        limits: The partition.
        priced: The rate in this partition.
    """
    derived = _DerivedRequest(job, limits)
    is_alone = limits.whole or job.exclusive or job.core_spec is not None
    if is_alone or priced.whole:
        size = _whole_nodes(job, limits, derived)
    else:
        size = _compute_shared_size(derived, priced)
    if job.licenses:
        size |= licenses(job.licenses)
    if derived.licenses:
        size |= derived.licenses
    if job.burst_buffers:
        size |= parse_tres(job.burst_buffers)
    if priced.has_billing:
        billed_size = size
        if is_alone:
            # Slurm allocates and bills no more memory than a job requests, on whole nodes too.
            billed_size = {**size, "mem": derived.compute_whole_node_memory(size)}
        elif priced.whole:
            # Only the rate charges whole nodes: Slurm bills what it allocates.
            billed_size = {
                **size,
                **dict.fromkeys(limits.max_by_tres, 0),
                **_compute_shared_size(derived, priced),
            }
        size["billing"] = _compute_billing(billed_size, limits)
    return size


class _DerivedRequest:
    """A request, with the values that Slurm derives in a partition.

    Attributes:
        tasks: Maximum number of tasks.
        per_task: CPUs per task.
        nodes: Maximum number of nodes.
        is_open: Whether the request leaves the number of nodes open.
        gres: GRES that it may get in total.
    """

    def __init__(self, job: JobRequest, limits: PartitionLimits) -> None:
        self.job = job
        self.site = limits
        self.gres: dict[str, int] = _NOTHING
        self.licenses: dict[str, int] = _NOTHING
        self.gpus = 0
        self.mem_per_cpu = job.mem_per_cpu_mib or 0
        self.per_node_cpus = job.pn_min_cpus or 0
        per_task = job.cpus_per_task or 1
        least = max(job.min_nodes or 1, limits.min_nodes)
        self.has_gres = bool(
            job.ntasks_per_tres
            or job.tres_per_job
            or job.tres_per_node
            or job.tres_per_task
            or job.tres_per_socket
        )
        if job.tres_per_task:
            per_task = max(per_task, requested_gres(job.tres_per_task).get("cpu", 0))
        min_cpus = job.min_cpus or 0
        limit = limits.partition.max_mem_per_cpu_mib
        if limit:
            if self.mem_per_cpu > limit:
                # slurmctld gives each task so many CPUs that none has more than the limit.
                ratio = -(-self.mem_per_cpu // limit)
                self.mem_per_cpu = -(-self.mem_per_cpu // ratio)
                per_task *= ratio
                min_cpus *= ratio
            elif job.pn_min_memory_mib is not None or job.mem_per_cpu_mib == 0:
                # Likewise each node gets enough CPUs; --mem=0 and --mem-per-cpu=0 mean all of its
                # memory.
                of_node = job.pn_min_memory_mib or limits.memory_mib
                self.per_node_cpus = max(self.per_node_cpus, -(-of_node // limit))
        self.per_task = per_task
        self.min_cpus = min_cpus
        self.tasks = self._compute_tasks(least)
        if self.has_gres:
            self._derive_gres(least)
        self.nodes = self._compute_nodes(least)
        self.unit = limits.unit
        if self.has_gres:
            self._count_gres()
            # GPUs come with whole cores, with CR_CPU too.
            self.unit = max(limits.unit, limits.threads) if self.gpus else limits.unit

    def _compute_tasks(self, least: int) -> int:
        """Return the number of tasks with CPUs of their own."""
        job = self.job
        if job.overcommit and self.per_task == 1:
            return max(self.min_cpus, least)
        tasks = job.num_tasks
        if tasks is None:
            tasks = least * (job.ntasks_per_node or 1)
        return max(tasks, -(-self.min_cpus // self.per_task), 1)

    def _derive_gres(self, least: int) -> None:
        """Compute GPUs and tasks, each of which may follow from the other."""
        job = self.job
        self._per_job = requested_gres(job.tres_per_job)
        self._per_node = requested_gres(job.tres_per_node)
        self._per_task = requested_gres(job.tres_per_task)
        self._per_socket = requested_gres(job.tres_per_socket)
        per_job, per_task = _count_gpus(self._per_job), _count_gpus(self._per_task)
        if job.num_tasks is None and per_job and per_task:
            self.tasks = max(self.tasks, -(-per_job // per_task))
        # With --overcommit tasks share CPUs, but not GPUs.
        self.count = max(self.tasks, job.num_tasks or 0)
        gpus = max(per_job, per_task * self.count, _count_gpus(self._per_node) * least)
        if job.ntasks_per_tres:
            self.tasks = max(self.tasks, gpus * job.ntasks_per_tres)
        self.count = max(self.tasks, self.count)
        # Each GPU may be on a separate node.
        self._spread = max([self.tasks, gpus, *self._per_job.values()])
        if per_task and job.ntasks_per_node:
            # Every node gets GPUs, CPUs and memory for this many tasks, even if fewer are left.
            each = job.ntasks_per_node
            full = max(_round_up(self.count, each), max(job.max_nodes or 0, least) * each)
            self.tasks, self.count = max(self.tasks, full), max(self.count, full)

    def _compute_nodes(self, least: int) -> int:
        """Return the maximum number of nodes."""
        job, limits = self.job, self.site
        named = 0
        if job.req_nodes:
            named = bound_node_count(job.req_nodes, limits.nodes)
        self.is_open = not job.max_nodes
        if job.max_nodes:
            most = max(job.max_nodes, least, named)
        else:
            most = max(self._spread if self.has_gres else self.tasks, least, named)
            if job.overcommit and (job.ntasks_per_node or job.ntasks_per_socket):
                most = max(most, job.num_tasks or 0)
        return max(min(most, limits.nodes), least)

    def _count_gres(self) -> None:
        """Count GRES, licenses and GPUs, now that the number of nodes is known."""
        found: dict[str, int] = {}
        sockets = self.job.sockets_per_node or self.site.sockets
        for amounts, many in (
            (self._per_job, 1),
            (self._per_node, self.nodes),
            (self._per_task, self.count),
            (self._per_socket, sockets * self.nodes),
        ):
            for name, amount in amounts.items():
                if name.startswith("gres/"):
                    # The same GPUs may be requested per job and per task.
                    found[name] = max(found.get(name, 0), amount * many)
                elif name.startswith("license/"):
                    self.licenses = {**self.licenses, name: amount * many}
        self.gres = found
        self.gpus = _count_gpus(found)
        if not self.gpus and self.job.ntasks_per_tres:
            # --ntasks-per-gpu without --gpus: as many GPUs as those tasks need.
            self.gpus = -(-self.tasks // self.job.ntasks_per_tres)
            self.gres = {**found, _GPU: self.gpus}

    def compute_cpus(self) -> int:
        """Return the CPUs, in whole cores on every node."""
        nodes, tasks, per_task = self.nodes, self.tasks, self.per_task
        unit = self.unit
        job = self.job
        alone = self.round_to_cores(per_task)
        if self.site.is_scattered or self.uses_fewer_threads() or self.leaves_cpus_idle():
            total = tasks * alone
        elif nodes == 1:
            total = _round_up(tasks * per_task, unit)
        elif self.is_open and unit % per_task == 0 and not job.min_nodes:
            total = self._compute_packed_cpus(alone)
        else:
            loss = tasks * per_task + nodes * (unit - 1)
            total = min(tasks * alone, loss // unit * unit)
        total = max(total, self.round_to_cores(self.min_cpus))
        if not self.is_open or job.min_nodes or self.per_node_cpus or job.overcommit:
            least = self._compute_min_node_cpus()
            if self.per_node_cpus:
                # Slurm may put all CPUs but one core per other node on one node, and then gives the
                # others their minimum.
                total += (nodes - 1) * max(0, least - min(unit, self.site.min_threads))
            total = max(total, nodes * least)
        elif job.ntasks_per_node:
            # A node gets CPUs for its maximum number of tasks, even if fewer are left.
            total = max(total, -(-tasks // job.ntasks_per_node) * self._compute_min_node_cpus())
        if self.gpus:
            total = max(total, self._compute_gpu_cpus(unit))
        if job.max_cpus:
            total = min(total, _round_up(max(job.max_cpus, self.min_cpus), unit))
        return min(total, nodes * _round_up(self.site.cpus, unit))

    def _compute_packed_cpus(self, alone: int) -> int:
        """Return the CPUs of tasks that share cores, as far as nothing separates them."""
        job, unit = self.job, self.unit
        cpus, each = self.tasks * self.per_task, job.ntasks_per_node
        if job.ntasks_per_socket or (each and each * self.per_task % unit):
            return self.tasks * alone
        if each:
            cpus += -(-self.tasks // each) * (unit - 1)
        # Only the last node's last core can have room left.
        return min(self.tasks * alone, _round_up(cpus, unit))

    def uses_fewer_threads(self) -> bool:
        """Return True if the job uses fewer threads per core than there are, but gets all."""
        threads = self.job.threads_per_core
        return threads is not None and 0 < threads < self.site.threads

    def round_to_cores(self, cpus: int) -> int:
        """Round CPUs up to whole cores."""
        if self.site.is_scattered:
            return cpus * self.unit
        if self.uses_fewer_threads():
            cpus = -(-cpus // (self.job.threads_per_core or 1)) * self.site.threads
        return _round_up(cpus, self.unit)

    def leaves_cpus_idle(self) -> bool:
        """Return True if tasks leave CPUs of their cores that no other task may use."""
        at_once = self._tasks_per_core()
        return at_once > 0 and at_once * self.per_task % self.site.threads != 0

    def _tasks_per_core(self) -> int:
        """Return how many tasks may share a core; 0 for no limit."""
        return self.job.ntasks_per_core or (1 if self.site.is_one_task_per_core else 0)

    def _compute_min_node_cpus(self) -> int:
        """Return the minimum number of CPUs on every node."""
        job = self.job
        threads = self.site.threads
        of_tasks = max(1, job.ntasks_per_node or 1)
        per_task = self.per_task
        if job.ntasks_per_node:
            # CPUs that a node needs for its memory are distributed evenly over its tasks.
            per_task = max(per_task, -(-self.per_node_cpus // of_tasks))
        if self.leaves_cpus_idle():
            of_tasks *= self.round_to_cores(per_task)
        else:
            of_tasks = self.round_to_cores(of_tasks * per_task)
        # Where a core serves one task, Slurm takes a core for each CPU that a node must have.
        per_node = self.per_node_cpus * (threads if self._tasks_per_core() == 1 else 1)
        # -B requests nodes with this many sockets and cores, and gets as many CPUs.
        geometry = (job.sockets_per_node or 1) * (job.cores_per_socket or 1)
        return max(
            of_tasks,
            self.round_to_cores(per_node),
            _round_up(geometry * threads, self.unit) if geometry > 1 else 0,
        )

    def _compute_gpu_cpus(self, unit: int) -> int:
        """Return the CPUs that come with the GPUs."""
        job = self.job
        nodes = min(self.nodes, max(self.gpus, 1))
        if job.tres_per_socket:
            # How many CPUs sockets give for their GPUs differs by version.
            return self.nodes * _round_up(self.site.cpus, unit)
        per_gpu = self._cpus_per_gpu
        of_task = _count_gpus(self._per_task)
        if job.cpus_per_task is None and (of_task or not per_gpu):
            # For GPUs per task, 26.05 applies the partition's CPUs per GPU even if a job requests
            # fewer.
            per_gpu = max(per_gpu, self.site.partition.def_cpu_per_gpu)
        if self._tasks_per_core() == 1:
            per_gpu *= self.site.threads
        if self._per_node and not (self._per_job or self._per_task or self._per_socket):
            return self.nodes * max(
                unit, self.round_to_cores(_count_gpus(self._per_node) * per_gpu)
            )
        alike = self._compute_even_gpu_cpus(of_task or 1, per_gpu) if per_gpu else 0
        together = self.round_to_cores(self.gpus * per_gpu) + nodes * (unit - 1)
        # A node taken for its GPUs also has CPUs for a task.
        return max(together // unit * unit, alike, self.nodes * self.round_to_cores(self.per_task))

    def _compute_even_gpu_cpus(self, of_task: int, per_gpu: int) -> int:
        """Return the CPUs if each node gets as many as the one with most GPUs, as in 26.05.

        Args:
            of_task: GPUs per task, all on one node.
            per_gpu: CPUs per GPU.
        """
        job, limits = self.job, self.site
        least = max(job.min_nodes or 1, limits.min_nodes)
        count = -(-self.gpus // of_task)
        most = max(1, count - least + 1)
        most = min(most, max(1, limits.max_by_tres.get(_GPU, 0) // of_task))
        if job.ntasks_per_node and self._per_task:
            most = min(most, job.ntasks_per_node)
        found = 0
        for here in range(1, most + 1):
            cpus = self.round_to_cores(here * of_task * per_gpu)
            # This many on one node leave one for each other node; and tasks may need more nodes.
            nodes = max(count - here + 1, -(-self.tasks * self.per_task // cpus))
            found = max(found, min(self.nodes, nodes) * cpus)
        return found

    def compute_memory(self, cpus: int) -> int:
        """Return the memory in MiB; 0 if Slurm does not count it for any job."""
        job = self.job
        gpus = self._count_gpus_with_memory()
        if gpus and job.tres_per_socket and not self.mem_per_cpu and job.pn_min_memory_mib is None:
            # Slurm counts memory for more GPUs per socket than it finally allocates.
            return self.nodes * self.site.memory_mib if self.site.counts_memory else 0
        return self._compute_memory(cpus, self.nodes, gpus)

    def compute_whole_node_memory(self, size: dict[str, int]) -> int:
        """Return the memory in MiB that Slurm allocates to a job with exclusive nodes.

        Args:
            size: CPUs, GRES and number of these nodes.
        """
        # Memory per GPU is allocated for every GPU of a node, if a job requests any.
        gpus = max(self._count_gpus_with_memory(), size.get(_GPU, 0)) if self.gpus else 0
        return self._compute_memory(size["cpu"], size["node"], gpus)

    def _compute_memory(self, cpus: int, nodes: int, gpus: int) -> int:
        """Return the memory of these CPUs, nodes and GPUs, in MiB."""
        if not self.site.counts_memory:
            return 0
        job, part = self.job, self.site.partition
        per_gpu = _count_gpus(requested_gres(job.mem_per_tres)) if job.mem_per_tres else 0
        if self.mem_per_cpu:
            return cpus * self.mem_per_cpu
        if job.pn_min_memory_mib:
            return nodes * job.pn_min_memory_mib
        if per_gpu and gpus:
            return gpus * per_gpu
        if job.pn_min_memory_mib is None and job.mem_per_cpu_mib != 0:
            if gpus and part.def_mem_per_gpu_mib:
                return gpus * part.def_mem_per_gpu_mib
            if part.def_mem_per_cpu_mib:
                return cpus * part.def_mem_per_cpu_mib
            if part.def_mem_per_node_mib:
                return nodes * part.def_mem_per_node_mib
        return nodes * self.site.memory_mib

    @property
    def _cpus_per_gpu(self) -> int:
        """Return the CPUs per GPU that the job itself requests."""
        job = self.job
        return _count_gpus(requested_gres(job.cpus_per_tres)) if job.cpus_per_tres else 0

    def _count_gpus_with_memory(self) -> int:
        """Return the number of GPUs that Slurm counts memory for.

        For GPUs per task it counts as many tasks as a node's minimum CPUs could hold, even if there
        are fewer.
        """
        of_task = _count_gpus(self._per_task) if self.has_gres else 0
        if not of_task or not self.per_node_cpus:
            return self.gpus
        # The partition's CPUs per GPU count even if a job requests fewer.
        per_gpu = max(self._cpus_per_gpu, self.site.partition.def_cpu_per_gpu)
        per_task = self.job.cpus_per_task or per_gpu * of_task or 1
        return max(self.gpus, self.nodes * (self.per_node_cpus // per_task) * of_task)


def _compute_shared_size(derived: _DerivedRequest, priced: PricedPartition) -> dict[str, int]:
    """Return the TRES of a job that may share its nodes with others."""
    cpus = derived.compute_cpus()
    size = {"cpu": cpus, "mem": derived.compute_memory(cpus), "node": derived.nodes}
    for name, amount in derived.gres.items():
        _add_gres(size, name, amount, priced)
    return size


def _whole_nodes(
    job: JobRequest, limits: PartitionLimits, derived: _DerivedRequest
) -> dict[str, int]:
    """Return all TRES of the nodes: as many nodes as needed if all hold the fewest tasks."""
    max_by_tres = limits.max_by_tres
    if job.core_spec is not None:
        max_by_tres = {**max_by_tres, "cpu": limits.cpus}
    nodes = derived.nodes
    all_tres = {name: nodes * amount for name, amount in max_by_tres.items()}
    if not derived.is_open or derived.has_gres or not (limits.whole or job.exclusive):
        return all_tres
    fitting = [(_count_fitting_tasks(job, derived, shape), shape) for shape in limits.shapes]
    fitting = [(fits, shape) for fits, shape in fitting if fits > 0]
    min_nodes = max(job.min_nodes or 1, limits.min_nodes)
    if not fitting or min_nodes > 1:
        return all_tres
    fewest = min(fits for fits, _ in fitting)
    nodes = max(min_nodes, min(nodes, -(-derived.tasks // fewest)))
    size: dict[str, int] = {}
    for name, amount in max_by_tres.items():
        # All but the last node are full of tasks, and the last may be the largest.
        highest = max(Fraction(shape.whole.get(name, 0), fits) for fits, shape in fitting)
        size[name] = min(nodes * amount, int((derived.tasks - 1) * highest) + amount)
    return size


def _count_fitting_tasks(job: JobRequest, derived: _DerivedRequest, shape: NodeShape) -> int:
    """Return how many tasks an empty node surely holds."""
    threads = shape.cpus_per_core
    usable = min(job.threads_per_core or threads, threads)
    per_task = derived.per_task
    if job.ntasks_per_node:
        # Slurm distributes the CPUs that each node must have over its tasks.
        per_task = max(per_task, -(-derived.per_node_cpus // job.ntasks_per_node))
    alone = -(-per_task // usable) * threads
    if usable == threads and threads % per_task == 0 and not derived.leaves_cpus_idle():
        alone = per_task
    limits = [shape.usable_cpus // alone]
    if derived.mem_per_cpu and derived.site.counts_memory:
        limits.append(shape.memory_mib // (derived.mem_per_cpu * derived.per_task))
    if job.ntasks_per_node:
        limits.append(job.ntasks_per_node)
    if job.ntasks_per_socket:
        limits.append(job.ntasks_per_socket * shape.sockets)
    return min(limits)


def _add_gres(size: dict[str, int], name: str, amount: int, priced: PricedPartition) -> None:
    """Count a GRES by name and type; without a type, count the most expensive one."""
    kind, colon, _ = name.partition(":")
    size[kind] = size.get(kind, 0) + amount
    typed = name if colon else priced.most_expensive_type.get(kind, "")
    if typed:
        size[typed] = size.get(typed, 0) + amount


def _compute_billing(size: dict[str, int], limits: PartitionLimits) -> int:
    """Compute Slurm's own billing of these TRES (TRESBillingWeights), rounded down."""
    if not limits.billing:
        return size["cpu"]
    highest, rest = Fraction(0), Fraction(0)
    for name, weight in limits.billing.items():
        amount = size.get(name, 0) * weight
        if name.partition("/")[0] in limits.billing_max:
            highest = max(highest, amount)
        else:
            rest += amount
    return int(highest + rest)


def _count_gpus(amounts: dict[str, int]) -> int:
    return sum(
        amount for name, amount in amounts.items() if name == _GPU or name.startswith(f"{_GPU}:")
    )


def _round_up(amount: int, unit: int) -> int:
    return -(-amount // unit) * unit
