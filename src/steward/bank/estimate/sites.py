"""What a partition and a rate settle before any job is known: worked out once, asked often."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Final

from steward.bank.factors import WHOLE, dearest
from steward.bank.prices import HOUR_S, amount_of, amount_per_second, dearest_end, weighted
from steward.bank.records import Rate
from steward.slurm.cluster_model import NodeShape, PartitionPicture, Picture
from steward.slurm.tres import is_size

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
