"""Nodes in words and as a map: what a state means to people, and which nodes stand together."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, Literal
from urllib.parse import quote

import msgspec
from markupsafe import Markup, escape

from steward.reports.history.requests import NodesAnswer, NodesRequest, NodeThen
from steward.slurm.node_states import parse_node_state
from steward.web.authentication import Visit

Tone = Literal["bad", "wait", "off", "busy", "good"]
"""What a state asks of people, the worst first; pages have a colour for each."""

By = Literal["name", "partition"]

_TONES: Final[tuple[Tone, ...]] = ("bad", "wait", "off", "busy", "good")
_BASES: Final[dict[str, tuple[str, Tone]]] = {
    "DOWN": ("down", "bad"),
    "ERROR": ("error", "bad"),
    "ALLOCATED": ("allocated", "busy"),
    "MIXED": ("mixed", "busy"),
    "IDLE": ("idle", "good"),
    "FUTURE": ("future", "off"),
}
# The first that a state has says most of it.
_FLAGS: Final[tuple[tuple[str, str, Tone], ...]] = (
    ("FAIL", "failing", "bad"),
    ("INVALID_REG", "invalid", "bad"),
    ("MAINTENANCE", "maintenance", "wait"),
    ("REBOOT_ISSUED", "rebooting", "wait"),
    ("REBOOT_REQUESTED", "rebooting", "wait"),
    ("POWERED_DOWN", "powered down", "off"),
    ("POWERING_DOWN", "powering down", "off"),
    ("POWER_DOWN", "powering down", "off"),
    ("POWERING_UP", "powering up", "off"),
    ("POWER_UP", "powering up", "off"),
    ("NOT_RESPONDING", "not responding", "bad"),
    ("COMPLETING", "completing", "busy"),
    ("RESERVED", "reserved", "wait"),
    ("PLANNED", "planned", "busy"),
)
_CLASSES: Final[dict[Tone, str]] = {
    "bad": "state-down",
    "wait": "state-drained",
    "off": "state-off",
    "busy": "state-allocated",
    "good": "state-idle",
}
_NUMBERED: Final = re.compile(r"(.*?)([0-9]+)")
_TOGETHER: Final = 150
"""So many nodes whose names differ by a number alone stand together; more are cut by hundreds."""
_HUNDRED: Final = 100
_SHORT_FROM: Final = 1000
"""From so many nodes on a map's cells have but the end of a name in them, and few have titles."""
_MOST_TITLES: Final = 250
_REMEMBERED: Final = 1 << 15
"""So many names of nodes are taken apart but once."""


class StateWord(msgspec.Struct, frozen=True):
    """A state as people say it.

    Attributes:
        word: One or two words: ``down``, ``draining``.
        tone: What it asks of people.
    """

    word: str
    tone: Tone


@lru_cache(maxsize=1024)
def said(state: str) -> StateWord:
    """What a state means.

    Args:
        state: As events tell it: ``IDLE+DRAIN``.
    """
    base, flags = parse_node_state(state)
    if state.upper() == "REMOVED":
        return StateWord("removed", "off")
    if base in ("DOWN", "ERROR"):
        return StateWord(*_BASES[base])
    if "DRAIN" in flags:
        is_empty = base == "IDLE" and "COMPLETING" not in flags
        return StateWord("drained" if is_empty else "draining", "wait")
    for flag, word, tone in _FLAGS:
        if flag in flags:
            return StateWord(word, tone)
    return StateWord(*_BASES.get(base, (base.lower(), "off")))


def node_state(state: str) -> Markup:
    """A node's state for a page, as Slurm shows it, in the colour of what it means."""
    found = said(state)
    return Markup('<span class="state {}" title="{}">{}</span>').format(
        _CLASSES[found.tone], found.word, escape(state)
    )


class Count(msgspec.Struct, frozen=True):
    """How many nodes are in a state."""

    word: str
    tone: Tone
    nodes: int


def counts(nodes: Iterable[NodeThen]) -> list[Count]:
    """How many nodes are in which state, the worst first."""
    return counted(Counter(node.state for node in nodes).items())


def counted(states: Iterable[tuple[str, int]]) -> list[Count]:
    """The same of states and how many nodes are in each."""
    found: Counter[StateWord] = Counter()
    for state, nodes in states:
        found[said(state)] += nodes
    return [Count(one.word, one.tone, found[one]) for one in sorted(found, key=_rank)]


class Cell(msgspec.Struct, frozen=True):
    """One node on the map.

    Attributes:
        node: NodeName.
        text: What stands in it: the name, or where there are very many nodes its end.
        title: More of it; "" for nothing.
    """

    node: str
    text: str
    title: str = ""


@lru_cache(maxsize=_REMEMBERED)
def _address(node: str) -> str:
    return quote(node, safe="")


@lru_cache(maxsize=_REMEMBERED)
def _escaped(text: str) -> str:
    return str(escape(text))


def _titled(cell: Cell) -> str:
    return f' title="{escape(cell.title)}"' if cell.title else ""


class Run(msgspec.Struct, frozen=True):
    """Nodes of a group that are in the same state."""

    word: str
    tone: Tone
    cells: list[Cell]

    def links(self, base: str) -> Markup:
        """A link to each, made here since a template takes several times as long for thousands.

        Args:
            base: The address that a node's name is put behind.
        """
        start = f"<a href={escape(base)}"
        parts = (
            f"{start}{_address(cell.node)}{_titled(cell)}>{_escaped(cell.text)}</a>"
            for cell in self.cells
        )
        return Markup("".join(parts))  # noqa: S704 -- every part is escaped


class Group(msgspec.Struct, frozen=True):
    """Nodes that stand together.

    Attributes:
        label: What they have in common.
        nodes: How many they are.
        runs: They, by state, the worst first.
    """

    label: str
    nodes: int
    runs: list[Run]


def node_map(nodes: Sequence[NodeThen], by: By = "name") -> list[Group]:
    """The map of a cluster's nodes.

    In each group the nodes are sorted by state: what is wrong stands first, and the state
    needs to be said but once for all that are in it.

    Args:
        nodes: They, by name.
        by: What makes a group: the name's beginning, as racks are called, or the partitions.
    """
    is_short = len(nodes) >= _SHORT_FROM
    told = sum(1 for node in nodes if node.reason) <= _MOST_TITLES
    found = []
    for label, some in (_by_name(nodes) if by == "name" else _by_partition(nodes)).items():
        start = _shared([node.node for node in some]) if is_short else 0
        runs: dict[StateWord, list[Cell]] = {}
        in_state: dict[str, list[Cell]] = {}
        for node in some:
            title = _title(node) if not is_short or (told and node.reason) else ""
            cell = Cell(node.node, node.node[start:] or node.node, title)
            cells = in_state.get(node.state)
            if cells is None:
                cells = in_state[node.state] = runs.setdefault(said(node.state), [])
            cells.append(cell)
        ordered = sorted(runs.items(), key=lambda item: _rank(item[0]))
        found.append(
            Group(label, len(some), [Run(one.word, one.tone, cells) for one, cells in ordered])
        )
    return found


def _rank(one: StateWord) -> tuple[int, str]:
    return _TONES.index(one.tone), one.word


def _title(node: NodeThen) -> str:
    since = node.since.strftime("%Y-%m-%d %H:%M UTC")
    return f"{node.state} since {since}" + (f": {node.reason}" if node.reason else "")


@lru_cache(maxsize=_REMEMBERED)
def _parted(name: str) -> tuple[str, int]:
    """A name without its number, and that."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, 0)


def _by_name(nodes: Sequence[NodeThen]) -> dict[str, list[NodeThen]]:
    racks: dict[str, list[tuple[int, NodeThen]]] = {}
    for node in nodes:
        prefix, number = _parted(node.node)
        racks.setdefault(prefix, []).append((number, node))
    found: dict[str, list[NodeThen]] = {}
    for some in racks.values():
        some.sort(key=lambda item: item[0])
        if len(some) <= _TOGETHER:
            found[_label(some)] = [node for _, node in some]
            continue
        hundreds: dict[int, list[tuple[int, NodeThen]]] = {}
        for number, node in some:
            hundreds.setdefault(number // _HUNDRED, []).append((number, node))
        found |= {_label(part): [node for _, node in part] for part in hundreds.values()}
    return found


def _label(some: Sequence[tuple[int, NodeThen]]) -> str:
    first, last = some[0][1].node, some[-1][1].node
    return first if first == last else f"{first} \N{EN DASH} {last}"


def _shared(names: Sequence[str]) -> int:
    """How many letters all names begin with alike."""
    first, last = min(names), max(names)
    pairs = enumerate(zip(first, last, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(last)))


def _by_partition(nodes: Sequence[NodeThen]) -> dict[str, list[NodeThen]]:
    found: dict[str, list[NodeThen]] = {}
    for node in nodes:
        found.setdefault(", ".join(node.partitions) or "in no partition", []).append(node)
    return dict(sorted(found.items()))


class KnownNodes:
    """What was told of each cluster's nodes last."""

    def __init__(self) -> None:
        self._told: dict[str, NodesAnswer] = {}

    async def of(self, visit: Visit, cluster: str) -> NodesAnswer:
        """How all nodes of a cluster are now.

        Args:
            visit: Whose page it is for.
            cluster: One of those that there are.

        Raises:
            StewardError: Whatever the daemon refuses or cannot do.
        """
        told = self._told.get(cluster)
        request = NodesRequest(cluster=cluster, known=told.tag if told else "")
        answer: NodesAnswer = await visit.ask("history.nodes", request)
        if told is not None and answer.is_known:
            return msgspec.structs.replace(answer, nodes=told.nodes)
        self._told[cluster] = answer
        return answer
