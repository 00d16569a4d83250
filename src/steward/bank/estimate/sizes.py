"""How much a job may be given at the most: the bound that no allocation of Slurm's exceeds.

Slurm gives whole cores on each node, so that how many nodes it takes decides
how much is lost to rounding, and a job that leaves that open may be spread over
as many as it has tasks. sbatch's own reckoning (``min_cpus`` of what was not
said) and slurmctld's (MaxMemPerCPU, DefCpuPerGPU) are followed where they make
a job larger. Sources: slurm.conf(5), sbatch(1), and what real Slurm allocates
in tests/integration/test_estimate_allocations.py.
"""

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Final

from steward.bank.estimate.request_limits import nodes_named
from steward.bank.prices import (
    HOUR_S,
    WHOLE,
    amount_of,
    amount_per_second,
    dearest,
    dearest_end,
    weighted,
)
from steward.bank.records import Description, Rate
from steward.slurm import tres
from steward.slurm.cluster_model import NodeShape, PartitionPicture, Picture
from steward.slurm.tres import is_size, parse_tres

_SOCKET: Final = "cr_socket"
_CPU: Final = "cr_cpu"
_GIB: Final = 1024
_SCALE: Final = _GIB * HOUR_S * WHOLE * WHOLE
"""What whole numbers are larger by than the amounts that they stand for."""

_BOARD: Final = "cr_board"


class Site:
    """A partition as an estimate sees it.

    Attributes:
        name: Its name.
        nodes: How many nodes one job can have at the most.
        min_nodes: How many each has at the least.
        whole: Whether every job has its nodes to itself.
        unit: How many CPUs are handed out at once: a core's, a socket's.
        is_scattered: Whether each CPU may come with a socket, or a board, of its own.
        threads: CPUs of a core at the most.
        thinnest: CPUs of a core at the least.
        counts_memory: Whether memory is a consumable resource.
        one_per_core: Whether no two tasks share a core (CR_ONE_TASK_PER_CORE).
        cpus: CPUs of its largest node.
        memory_mib: Memory of the node that has most.
        sockets: Sockets of the node that has most.
        most: Of each TRES what one node can give at the most.
        types: Types by GRES: ``{"gres/gpu": ("gres/gpu:a100",)}``.
    """

    def __init__(self, part: PartitionPicture, picture: Picture) -> None:
        self.part = part
        self.name = part.name
        shapes = [picture.shapes[number] for number, _ in part.shapes]
        self.shapes = shapes or [NodeShape()]
        selects = part.selects or picture.selects
        count = part.nodes or sum(many for _, many in part.shapes) or 1
        self.nodes = min(count, part.max_nodes) if part.max_nodes else count
        self.min_nodes = max(1, part.min_nodes)
        self.whole = part.exclusive or picture.linear
        self.threads = max(shape.cpus_per_core for shape in self.shapes)
        self.thinnest = min(shape.cpus_per_core for shape in self.shapes)
        self.unit = max(_unit(shape, selects) for shape in self.shapes)
        self.is_scattered = _SOCKET in selects or _BOARD in selects
        self.counts_memory = "memory" in selects
        self.one_per_core = "one_task_per_core" in f"{selects},{picture.selects}"
        self.cpus = max(shape.cpus for shape in self.shapes)
        self.memory_mib = max(shape.memory_mib for shape in self.shapes)
        self.sockets = max(shape.sockets for shape in self.shapes)
        self.most: dict[str, int] = {}
        for shape in self.shapes:
            for name, amount in shape.whole.items():
                self.most[name] = max(self.most.get(name, 0), amount)
        self.types = {
            name: tuple(of for of in self.most if of.startswith(f"{name}:"))
            for name in self.most
            if name.startswith("gres/") and ":" not in name
        }
        self.billing = {name: Fraction(weight) for name, weight in part.billing.items()}
        self.billing_max = picture.billing_max


class Priced:
    """A rate in a partition.

    Attributes:
        rate: The rate.
        end_permille: The dearest factor of how a job may end.
        whole: Whether nodes are charged whole, or are given whole.
        dearest_type: By GRES that has weights of its types: the dearest type in the partition.
        bills: Whether the rate weighs Slurm's own billing.
    """

    def __init__(self, rate: Rate, site: Site) -> None:
        self.rate = rate
        self.end_permille = dearest_end(rate)
        self.whole = rate.whole_nodes or site.whole
        self.bills = bool(rate.weights.get("billing"))
        self._is_typed = any(":" in name for name in rate.weights)
        self._factor = dearest(rate.factors)
        # Of a GiB's weight a MiB has the 1024th part, and so all others are made as much larger.
        self._weights = [
            (name, weight if is_size(name) else weight * _GIB)
            for name, weight in rate.weights.items()
        ]
        self.dearest_type: dict[str, str] = {}
        for name, types in site.types.items():
            billed = site.billing if self.bills else {}
            if any(of in rate.weights or of in billed for of in types):
                self.dearest_type[name] = max(types, key=lambda of: self._cost(of, billed))

    def amount(self, size: dict[str, int], seconds: int, qos: str) -> int:
        """What these TRES cost for so long at the most.

        The same as by :func:`steward.bank.prices.dearest_price`, in whole numbers, which are
        many times as fast as fractions; weights of types are left to the fractions.
        """
        rate = self.rate
        if self._is_typed or rate.free:
            exact = amount_per_second(size, rate, qos) * seconds
            return amount_of(exact, rate, self.end_permille)
        parts = [size.get(name, 0) * weight for name, weight in self._weights]
        hourly = max(parts, default=0) if rate.combine == "max" else sum(parts)
        exact_of = hourly * seconds * self._factor * rate.qos_permille.get(qos, WHOLE)
        least = rate.minimum * _SCALE
        # Half up: none of these is negative.
        whole = max(exact_of, least) * self.end_permille
        return (2 * whole + _SCALE * WHOLE) // (2 * _SCALE * WHOLE)

    def _cost(self, typed: str, billed: Mapping[str, Fraction]) -> Fraction:
        one = {typed: 1, typed.partition(":")[0]: 1}
        by_billing = billed.get(typed, Fraction(0)) * self.rate.weights.get("billing", 0)
        return sum((cost for _, _, cost in weighted(one, self.rate)), by_billing)


def _unit(shape: NodeShape, selects: str) -> int:
    """How many CPUs Slurm hands out at once on such a node; with CR_CPU each by itself."""
    if _BOARD in selects:
        return shape.cpus
    if _SOCKET in selects:
        return max(1, -(-shape.cpus // max(1, shape.sockets)))
    return 1 if _CPU in selects else shape.cpus_per_core


_GPU: Final = "gres/gpu"
_NOTHING: Final[dict[str, int]] = {}

# The same texts are read for each partition and QOS that a job names; nobody changes these.
requested_gres: Final = lru_cache(maxsize=256)(tres.requested_gres)
licenses: Final = lru_cache(maxsize=256)(tres.licenses)


def size_of(job: Description, site: Site, priced: Priced) -> dict[str, int]:
    """What one task of an array, or the job, may have allocated at the most.

    Args:
        job: What it asks for.
        site: The partition.
        priced: What it is priced by there.
    """
    asked = _Asked(job, site)
    is_alone = site.whole or job.exclusive or job.core_spec is not None
    if is_alone or priced.whole:
        found = _whole_nodes(job, site, asked)
    else:
        found = _shared_nodes(asked, priced)
    if job.licenses:
        found |= licenses(job.licenses)
    if asked.licenses:
        found |= asked.licenses
    if job.burst_buffers:
        found |= parse_tres(job.burst_buffers)
    if priced.bills:
        billed = found
        if is_alone:
            # Slurm allocates and bills no more memory than a job asks for, on whole nodes too.
            billed = {**found, "mem": asked.memory_of_whole_nodes(found)}
        elif priced.whole:
            # Nodes are charged whole by the rate alone: Slurm bills what it allocates.
            billed = {**found, **dict.fromkeys(site.most, 0), **_shared_nodes(asked, priced)}
        found["billing"] = _billing(billed, site)
    return found


class _Asked:
    """A request, with what Slurm makes of it in a partition.

    Attributes:
        tasks: How many tasks at the most.
        per_task: CPUs of one.
        nodes: How many nodes at the most.
        is_open: Whether it leaves open how many nodes.
        gres: GRES that it may be given altogether.
    """

    def __init__(self, job: Description, site: Site) -> None:
        self.job = job
        self.site = site
        self.gres: dict[str, int] = _NOTHING
        self.licenses: dict[str, int] = _NOTHING
        self.gpus = 0
        self.mem_per_cpu = job.mem_per_cpu_mib or 0
        self.per_node_cpus = job.pn_min_cpus or 0
        per_task = job.cpus_per_task or 1
        least = max(job.min_nodes or 1, site.min_nodes)
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
        limit = site.part.max_mem_per_cpu_mib
        if limit:
            if self.mem_per_cpu > limit:
                # slurmctld gives each task so many CPUs that none has more than the limit.
                ratio = -(-self.mem_per_cpu // limit)
                self.mem_per_cpu = -(-self.mem_per_cpu // ratio)
                per_task *= ratio
                min_cpus *= ratio
            elif job.pn_min_memory_mib is not None or job.mem_per_cpu_mib == 0:
                # And each node so many, --mem=0 and --mem-per-cpu=0 being all of its memory.
                of_node = job.pn_min_memory_mib or site.memory_mib
                self.per_node_cpus = max(self.per_node_cpus, -(-of_node // limit))
        self.per_task = per_task
        self.min_cpus = min_cpus
        self.tasks = self._tasks(least)
        if self.has_gres:
            self._ask_gres(least)
        self.nodes = self._nodes(least)
        self.unit = site.unit
        if self.has_gres:
            self._count_gres()
            # GPUs come with whole cores, with CR_CPU too.
            self.unit = max(site.unit, site.threads) if self.gpus else site.unit

    def _tasks(self, least: int) -> int:
        """Tasks that each have CPUs of their own."""
        job = self.job
        if job.overcommit and self.per_task == 1:
            return max(self.min_cpus, least)
        tasks = job.num_tasks
        if tasks is None:
            tasks = least * (job.ntasks_per_node or 1)
        return max(tasks, -(-self.min_cpus // self.per_task), 1)

    def _ask_gres(self, least: int) -> None:
        """GPUs and tasks, each of which may follow from the other."""
        job = self.job
        self._per_job = requested_gres(job.tres_per_job)
        self._per_node = requested_gres(job.tres_per_node)
        self._per_task = requested_gres(job.tres_per_task)
        self._per_socket = requested_gres(job.tres_per_socket)
        per_job, per_task = _gpus(self._per_job), _gpus(self._per_task)
        if job.num_tasks is None and per_job and per_task:
            self.tasks = max(self.tasks, -(-per_job // per_task))
        # With --overcommit tasks share CPUs, but not GPUs.
        self.count = max(self.tasks, job.num_tasks or 0)
        gpus = max(per_job, per_task * self.count, _gpus(self._per_node) * least)
        if job.ntasks_per_tres:
            self.tasks = max(self.tasks, gpus * job.ntasks_per_tres)
        self.count = max(self.tasks, self.count)
        # Each GPU may be on a node of its own.
        self._spread = max([self.tasks, gpus, *self._per_job.values()])
        if per_task and job.ntasks_per_node:
            # Every node gets GPUs, CPUs and memory for so many tasks, also where fewer are left.
            each = job.ntasks_per_node
            full = max(_up(self.count, each), max(job.max_nodes or 0, least) * each)
            self.tasks, self.count = max(self.tasks, full), max(self.count, full)

    def _nodes(self, least: int) -> int:
        job, site = self.job, self.site
        named = 0
        if job.req_nodes:
            named = nodes_named(job.req_nodes, site.nodes)
        self.is_open = not job.max_nodes
        if job.max_nodes:
            most = max(job.max_nodes, least, named)
        else:
            most = max(self._spread if self.has_gres else self.tasks, least, named)
            if job.overcommit and (job.ntasks_per_node or job.ntasks_per_socket):
                most = max(most, job.num_tasks or 0)
        return max(min(most, site.nodes), least)

    def _count_gres(self) -> None:
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
                    # The same GPUs, said twice: as a job's and as a task's.
                    found[name] = max(found.get(name, 0), amount * many)
                elif name.startswith("license/"):
                    self.licenses = {**self.licenses, name: amount * many}
        self.gres = found
        self.gpus = _gpus(found)
        if not self.gpus and self.job.ntasks_per_tres:
            # --ntasks-per-gpu without --gpus: as many GPUs as those tasks need.
            self.gpus = -(-self.tasks // self.job.ntasks_per_tres)
            self.gres = {**found, _GPU: self.gpus}

    def cpus(self) -> int:
        """CPUs, whole cores on every node."""
        nodes, tasks, per_task = self.nodes, self.tasks, self.per_task
        unit = self.unit
        job = self.job
        alone = self.cores_of(per_task)
        if self.site.is_scattered or self.is_thin() or self.is_apart():
            total = tasks * alone
        elif nodes == 1:
            total = _up(tasks * per_task, unit)
        elif self.is_open and unit % per_task == 0 and not job.min_nodes:
            total = self._filled(alone)
        else:
            loss = tasks * per_task + nodes * (unit - 1)
            total = min(tasks * alone, loss // unit * unit)
        total = max(total, self.cores_of(self.min_cpus))
        if not self.is_open or job.min_nodes or self.per_node_cpus or job.overcommit:
            least = self._least_of_node()
            if self.per_node_cpus:
                # Slurm lets one node have all CPUs but a core for each of the others, and then
                # gives those what each must have.
                total += (nodes - 1) * max(0, least - min(unit, self.site.thinnest))
            total = max(total, nodes * least)
        elif job.ntasks_per_node:
            # A node has CPUs for as many tasks as it may have, also where fewer are left.
            total = max(total, -(-tasks // job.ntasks_per_node) * self._least_of_node())
        if self.gpus:
            total = max(total, self._cpus_for_gpus(unit))
        if job.max_cpus:
            total = min(total, _up(max(job.max_cpus, self.min_cpus), unit))
        return min(total, nodes * _up(self.site.cpus, unit))

    def _filled(self, alone: int) -> int:
        """CPUs of tasks that fill cores, as far as nothing parts them."""
        job, unit = self.job, self.unit
        cpus, each = self.tasks * self.per_task, job.ntasks_per_node
        if job.ntasks_per_socket or (each and each * self.per_task % unit):
            return self.tasks * alone
        if each:
            cpus += -(-self.tasks // each) * (unit - 1)
        # Only the last node's last core can have room left.
        return min(self.tasks * alone, _up(cpus, unit))

    def is_thin(self) -> bool:
        """Whether it uses fewer threads of each core than there are, and is given them all."""
        threads = self.job.threads_per_core
        return threads is not None and 0 < threads < self.site.threads

    def cores_of(self, cpus: int) -> int:
        """So many CPUs in whole cores."""
        if self.site.is_scattered:
            return cpus * self.unit
        if self.is_thin():
            cpus = -(-cpus // (self.job.threads_per_core or 1)) * self.site.threads
        return _up(cpus, self.unit)

    def is_apart(self) -> bool:
        """Whether tasks leave CPUs of their cores that no other task may use."""
        at_once = self._at_once()
        return at_once > 0 and at_once * self.per_task % self.site.threads != 0

    def _at_once(self) -> int:
        """How many tasks may share a core; 0 for no limit."""
        return self.job.ntasks_per_core or (1 if self.site.one_per_core else 0)

    def _least_of_node(self) -> int:
        """What every node has at the least."""
        job = self.job
        threads = self.site.threads
        of_tasks = max(1, job.ntasks_per_node or 1)
        per_task = self.per_task
        if job.ntasks_per_node:
            # CPUs that a node must have for its memory are shared out evenly among its tasks.
            per_task = max(per_task, -(-self.per_node_cpus // of_tasks))
        if self.is_apart():
            of_tasks *= self.cores_of(per_task)
        else:
            of_tasks = self.cores_of(of_tasks * per_task)
        # Where a core serves one task, Slurm takes a core for each CPU that a node must have.
        per_node = self.per_node_cpus * (threads if self._at_once() == 1 else 1)
        # -B asks for nodes that have so many sockets and cores, and gets as many CPUs.
        geometry = (job.sockets_per_node or 1) * (job.cores_per_socket or 1)
        return max(
            of_tasks,
            self.cores_of(per_node),
            _up(geometry * threads, self.unit) if geometry > 1 else 0,
        )

    def _cpus_for_gpus(self, unit: int) -> int:
        job = self.job
        nodes = min(self.nodes, max(self.gpus, 1))
        if job.tres_per_socket:
            # How many CPUs sockets give for their GPUs differs by version.
            return self.nodes * _up(self.site.cpus, unit)
        per_gpu = self._cpus_per_gpu
        of_task = _gpus(self._per_task)
        if job.cpus_per_task is None and (of_task or not per_gpu):
            # For GPUs of tasks 26.05 goes by the partition's CPUs also where a job says fewer.
            per_gpu = max(per_gpu, self.site.part.def_cpu_per_gpu)
        if self._at_once() == 1:
            per_gpu *= self.site.threads
        if self._per_node and not (self._per_job or self._per_task or self._per_socket):
            return self.nodes * max(unit, self.cores_of(_gpus(self._per_node) * per_gpu))
        alike = self._alike(of_task or 1, per_gpu) if per_gpu else 0
        together = self.cores_of(self.gpus * per_gpu) + nodes * (unit - 1)
        # A node that is taken for its GPUs has CPUs for a task as well.
        return max(together // unit * unit, alike, self.nodes * self.cores_of(self.per_task))

    def _alike(self, of_task: int, per_gpu: int) -> int:
        """CPUs where each node has as many as the one with most GPUs, as 26.05 gives them.

        Args:
            of_task: GPUs of a task, that are on one node.
            per_gpu: CPUs that come with each.
        """
        job, site = self.job, self.site
        least = max(job.min_nodes or 1, site.min_nodes)
        count = -(-self.gpus // of_task)
        most = max(1, count - least + 1)
        most = min(most, max(1, site.most.get(_GPU, 0) // of_task))
        if job.ntasks_per_node and self._per_task:
            most = min(most, job.ntasks_per_node)
        found = 0
        for here in range(1, most + 1):
            cpus = self.cores_of(here * of_task * per_gpu)
            # So many on one node leave one for each other; and tasks may need more nodes.
            nodes = max(count - here + 1, -(-self.tasks * self.per_task // cpus))
            found = max(found, min(self.nodes, nodes) * cpus)
        return found

    def memory(self, cpus: int) -> int:
        """Memory in MiB; none where Slurm does not count it for any job."""
        job = self.job
        gpus = self._gpus_with_memory()
        if gpus and job.tres_per_socket and not self.mem_per_cpu and job.pn_min_memory_mib is None:
            # Slurm counts memory for more GPUs of sockets than it gives in the end.
            return self.nodes * self.site.memory_mib if self.site.counts_memory else 0
        return self._memory(cpus, self.nodes, gpus)

    def memory_of_whole_nodes(self, found: dict[str, int]) -> int:
        """Memory in MiB that Slurm allocates to a job with nodes to itself.

        Args:
            found: CPUs, GRES and number of these nodes.
        """
        # Memory for each GPU is allocated for every GPU of a node, if a job asks for any.
        gpus = max(self._gpus_with_memory(), found.get(_GPU, 0)) if self.gpus else 0
        return self._memory(found["cpu"], found["node"], gpus)

    def _memory(self, cpus: int, nodes: int, gpus: int) -> int:
        if not self.site.counts_memory:
            return 0
        job, part = self.job, self.site.part
        per_gpu = _gpus(requested_gres(job.mem_per_tres)) if job.mem_per_tres else 0
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
        """What the job itself asks for."""
        job = self.job
        return _gpus(requested_gres(job.cpus_per_tres)) if job.cpus_per_tres else 0

    def _gpus_with_memory(self) -> int:
        """GPUs that Slurm counts memory for.

        Of GPUs of tasks that is for as many tasks as a node's least CPUs would hold, though
        there be fewer.
        """
        of_task = _gpus(self._per_task) if self.has_gres else 0
        if not of_task or not self.per_node_cpus:
            return self.gpus
        # The partition's CPUs count also where a job says fewer.
        per_gpu = max(self._cpus_per_gpu, self.site.part.def_cpu_per_gpu)
        per_task = self.job.cpus_per_task or per_gpu * of_task or 1
        return max(self.gpus, self.nodes * (self.per_node_cpus // per_task) * of_task)


def _shared_nodes(asked: _Asked, priced: Priced) -> dict[str, int]:
    """TRES of a job that may share its nodes with others."""
    cpus = asked.cpus()
    found = {"cpu": cpus, "mem": asked.memory(cpus), "node": asked.nodes}
    for name, amount in asked.gres.items():
        _add_gres(found, name, amount, priced)
    return found


def _whole_nodes(job: Description, site: Site, asked: _Asked) -> dict[str, int]:
    """All that the nodes have: as many nodes as it takes of those that hold fewest tasks."""
    most = site.most
    if job.core_spec is not None:
        most = {**most, "cpu": site.cpus}
    nodes = asked.nodes
    each = {name: nodes * amount for name, amount in most.items()}
    if not asked.is_open or asked.has_gres or not (site.whole or job.exclusive):
        return each
    room = [(_room(job, asked, shape), shape) for shape in site.shapes]
    room = [(fits, shape) for fits, shape in room if fits > 0]
    least = max(job.min_nodes or 1, site.min_nodes)
    if not room or least > 1:
        return each
    fewest = min(fits for fits, _ in room)
    nodes = max(least, min(nodes, -(-asked.tasks // fewest)))
    found: dict[str, int] = {}
    for name, amount in most.items():
        # All but the last node are full of tasks, and the last may be the largest.
        dearest = max(Fraction(shape.whole.get(name, 0), fits) for fits, shape in room)
        found[name] = min(nodes * amount, int((asked.tasks - 1) * dearest) + amount)
    return found


def _room(job: Description, asked: _Asked, shape: NodeShape) -> int:
    """How many tasks an empty node takes, as far as is sure."""
    threads = shape.cpus_per_core
    usable = min(job.threads_per_core or threads, threads)
    per_task = asked.per_task
    if job.ntasks_per_node:
        # Slurm shares the CPUs that each node must have out among its tasks.
        per_task = max(per_task, -(-asked.per_node_cpus // job.ntasks_per_node))
    alone = -(-per_task // usable) * threads
    if usable == threads and threads % per_task == 0 and not asked.is_apart():
        alone = per_task
    limits = [shape.usable_cpus // alone]
    if asked.mem_per_cpu and asked.site.counts_memory:
        limits.append(shape.memory_mib // (asked.mem_per_cpu * asked.per_task))
    if job.ntasks_per_node:
        limits.append(job.ntasks_per_node)
    if job.ntasks_per_socket:
        limits.append(job.ntasks_per_socket * shape.sockets)
    return min(limits)


def _add_gres(found: dict[str, int], name: str, amount: int, priced: Priced) -> None:
    """Count a GRES under name and type; one without a type as the dearest that there is."""
    kind, colon, _ = name.partition(":")
    found[kind] = found.get(kind, 0) + amount
    typed = name if colon else priced.dearest_type.get(kind, "")
    if typed:
        found[typed] = found.get(typed, 0) + amount


def _billing(found: dict[str, int], site: Site) -> int:
    """Compute Slurm's own billing of these TRES (TRESBillingWeights), cut to a whole number."""
    if not site.billing:
        return found["cpu"]
    dearest, rest = Fraction(0), Fraction(0)
    for name, weight in site.billing.items():
        amount = found.get(name, 0) * weight
        if name.partition("/")[0] in site.billing_max:
            dearest = max(dearest, amount)
        else:
            rest += amount
    return int(dearest + rest)


def _gpus(amounts: dict[str, int]) -> int:
    return sum(
        amount for name, amount in amounts.items() if name == _GPU or name.startswith(f"{_GPU}:")
    )


def _up(amount: int, unit: int) -> int:
    return -(-amount // unit) * unit
