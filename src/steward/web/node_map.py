"""Node states in words and colours, and the map of a cluster's nodes by rack or partition.

:func:`describe_state` translates Slurm's state (``IDLE+DRAIN``) to a word and a severity;
:func:`build_node_map` groups nodes by name or partition and sorts each group by state.
:class:`NodeCache` caches the nodes of each cluster for ``pages/nodes.py``.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, Literal
from urllib.parse import quote

import msgspec
from markupsafe import Markup, escape

from steward.core.printable import escape_line
from steward.reports.history.requests import NodeSnapshot, NodesReply, NodesRequest
from steward.slurm.node_states import parse_node_state
from steward.web.authentication import AuthenticatedRequest

Severity = Literal["bad", "wait", "off", "busy", "good"]
"""Severity of a node state, worst first; each has a colour on the pages."""

NodeGrouping = Literal["name", "partition"]
"""How the map groups nodes: by the prefix of their names, or by partition."""

_SEVERITIES: Final[tuple[Severity, ...]] = ("bad", "wait", "off", "busy", "good")
_BASES: Final[dict[str, tuple[str, Severity]]] = {
    "DOWN": ("down", "bad"),
    "ERROR": ("error", "bad"),
    "ALLOCATED": ("allocated", "busy"),
    "MIXED": ("mixed", "busy"),
    "IDLE": ("idle", "good"),
    "FUTURE": ("future", "off"),
}
# In order of precedence: the first flag that a state has decides.
_FLAGS: Final[tuple[tuple[str, str, Severity], ...]] = (
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
_CLASSES: Final[dict[Severity, str]] = {
    "bad": "state-down",
    "wait": "state-drained",
    "off": "state-off",
    "busy": "state-allocated",
    "good": "state-idle",
}
"""CSS class of each severity."""
_NUMBERED: Final = re.compile(r"(.*?)([0-9]+)")
_LARGEST_GROUP: Final = 150
"""Largest group of nodes that differ only in a number; larger ones are split by hundreds."""
_HUNDRED: Final = 100
"""Large groups are split by number into ranges of this size."""
_SHORT_FROM: Final = 1000
"""From this many nodes on, cells show only the end of a name, and few have titles."""
_MOST_TITLES: Final = 250
"""Beyond this many nodes with a reason, large maps have no tooltips."""
_CACHED_NAMES: Final = 1 << 15
"""Node names whose parsed form is cached."""


class StateWord(msgspec.Struct, frozen=True):
    """A node state in words.

    Attributes:
        word: One or two words: ``down``, ``draining``.
        tone: Its severity.
    """

    word: str
    tone: Severity


@lru_cache(maxsize=1024)
def describe_state(state: str) -> StateWord:
    """Translate a node state to a word and its severity.

    Args:
        state: State as events report it: ``IDLE+DRAIN``.
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


def render_node_state(state: str) -> Markup:
    """Return a node's state as Slurm writes it, in the colour of its severity."""
    description = describe_state(state)
    return Markup('<span class="state {}" title="{}">{}</span>').format(
        _CLASSES[description.tone], description.word, escape_line(state)
    )


class StateCount(msgspec.Struct, frozen=True):
    """Number of nodes in a state."""

    word: str
    tone: Severity
    nodes: int


def count_node_states(nodes: Iterable[NodeSnapshot]) -> list[StateCount]:
    """Count nodes by state, worst first."""
    return count_states(Counter(node.state for node in nodes).items())


def count_states(states: Iterable[tuple[str, int]]) -> list[StateCount]:
    """Count nodes by state, from pairs of state and number."""
    counts: Counter[StateWord] = Counter()
    for state, count in states:
        counts[describe_state(state)] += count
    return [
        StateCount(state_word.word, state_word.tone, counts[state_word])
        for state_word in sorted(counts, key=_rank_state)
    ]


class MapCell(msgspec.Struct, frozen=True):
    """One node on the map.

    Attributes:
        node: Node name.
        text: Name, or its end if there are very many nodes.
        title: Tooltip; "" for none.
    """

    node: str
    text: str
    title: str = ""


@lru_cache(maxsize=_CACHED_NAMES)
def _quote_node(node: str) -> str:
    """Quote a node name for an address; cached."""
    return quote(node, safe="")


@lru_cache(maxsize=_CACHED_NAMES)
def _escape_text(text: str) -> str:
    """Escape text for HTML; cached."""
    return str(escape(text))


def _format_title(cell: MapCell) -> str:
    """Return the title attribute of a cell."""
    return f' title="{escape(cell.title)}"' if cell.title else ""


class StateRun(msgspec.Struct, frozen=True):
    """Nodes of a group that are in the same state."""

    word: str
    tone: Severity
    cells: list[MapCell]

    def links(self, base: str) -> Markup:
        """Return links to the nodes; a template would take several times as long for thousands.

        Args:
            base: Address that precedes a node's name.
        """
        start = f"<a href={escape(base)}"
        parts = (
            f"{start}{_quote_node(cell.node)}{_format_title(cell)}>{_escape_text(cell.text)}</a>"
            for cell in self.cells
        )
        return Markup("".join(parts))  # noqa: S704 -- every part is escaped


class NodeGroup(msgspec.Struct, frozen=True):
    """Nodes that the map shows together.

    Attributes:
        label: What they have in common.
        nodes: Number of nodes.
        runs: Nodes by state, worst first.
    """

    label: str
    nodes: int
    runs: list[StateRun]


def build_node_map(
    nodes: Sequence[NodeSnapshot], grouping: NodeGrouping = "name"
) -> list[NodeGroup]:
    """Return the map of a cluster's nodes.

    Each group is sorted by state: problems come first, and each state is named once.

    Args:
        nodes: The nodes, ordered by name.
        grouping: Group by the prefix of the name (a rack, as a rule) or by partitions.
    """
    is_large = len(nodes) >= _SHORT_FROM
    has_titles = sum(1 for node in nodes if node.reason) <= _MOST_TITLES
    groups = []
    for label, members in (
        _group_by_name(nodes) if grouping == "name" else _group_by_partition(nodes)
    ).items():
        prefix_length = _measure_prefix([node.node for node in members]) if is_large else 0
        runs: dict[StateWord, list[MapCell]] = {}
        cells_by_state: dict[str, list[MapCell]] = {}
        for node in members:
            title = _describe_node(node) if not is_large or (has_titles and node.reason) else ""
            cell = MapCell(node.node, node.node[prefix_length:] or node.node, title)
            cells = cells_by_state.get(node.state)
            if cells is None:
                cells = cells_by_state[node.state] = runs.setdefault(describe_state(node.state), [])
            cells.append(cell)
        sorted_runs = sorted(runs.items(), key=lambda item: _rank_state(item[0]))
        groups.append(
            NodeGroup(
                label,
                len(members),
                [
                    StateRun(state_word.word, state_word.tone, cells)
                    for state_word, cells in sorted_runs
                ],
            )
        )
    return groups


def _rank_state(state_word: StateWord) -> tuple[int, str]:
    """Return the sort key of a state: worst first, then by word."""
    return _SEVERITIES.index(state_word.tone), state_word.word


def _describe_node(node: NodeSnapshot) -> str:
    """Describe a node: state, since when, and reason."""
    since = node.since.strftime("%Y-%m-%d %H:%M UTC")
    return f"{node.state} since {since}" + (f": {node.reason}" if node.reason else "")


@lru_cache(maxsize=_CACHED_NAMES)
def _split_name(name: str) -> tuple[str, int]:
    """Split a name into the part before its number, and the number."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, 0)


def _group_by_name(nodes: Sequence[NodeSnapshot]) -> dict[str, list[NodeSnapshot]]:
    """Group nodes by the prefix of their names; split large groups by hundreds."""
    racks: dict[str, list[tuple[int, NodeSnapshot]]] = {}
    for node in nodes:
        prefix, number = _split_name(node.node)
        racks.setdefault(prefix, []).append((number, node))
    groups: dict[str, list[NodeSnapshot]] = {}
    for members in racks.values():
        members.sort(key=lambda item: item[0])
        if len(members) <= _LARGEST_GROUP:
            groups[_format_range(members)] = [node for _, node in members]
            continue
        hundreds: dict[int, list[tuple[int, NodeSnapshot]]] = {}
        for number, node in members:
            hundreds.setdefault(number // _HUNDRED, []).append((number, node))
        groups |= {_format_range(chunk): [node for _, node in chunk] for chunk in hundreds.values()}
    return groups


def _format_range(members: Sequence[tuple[int, NodeSnapshot]]) -> str:
    """Return the first and last name of a group."""
    first, last = members[0][1].node, members[-1][1].node
    return first if first == last else f"{first} \N{EN DASH} {last}"


def _measure_prefix(names: Sequence[str]) -> int:
    """Return the length of the common prefix of names."""
    first, last = min(names), max(names)
    pairs = enumerate(zip(first, last, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(last)))


def _group_by_partition(nodes: Sequence[NodeSnapshot]) -> dict[str, list[NodeSnapshot]]:
    """Group nodes by the partitions that they are in."""
    groups: dict[str, list[NodeSnapshot]] = {}
    for node in nodes:
        groups.setdefault(", ".join(node.partitions) or "in no partition", []).append(node)
    return dict(sorted(groups.items()))


class NodeCache:
    """Cache of the last node list of each cluster."""

    def __init__(self) -> None:
        self._replies: dict[str, NodesReply] = {}

    async def fetch_nodes(self, auth: AuthenticatedRequest, cluster: str) -> NodesReply:
        """Return the current state of all nodes of a cluster.

        Args:
            auth: Request that the page is for.
            cluster: A configured cluster.

        Raises:
            StewardError: The daemon failed or rejected the request.
        """
        cached = self._replies.get(cluster)
        request = NodesRequest(cluster=cluster, known=cached.tag if cached else "")
        reply: NodesReply = await auth.call_action("history.nodes", request)
        if cached is not None and reply.is_known:
            return msgspec.structs.replace(reply, nodes=cached.nodes)
        self._replies[cluster] = reply
        return reply
