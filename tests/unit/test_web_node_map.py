"""Nodes on pages: the meaning of their states, and a map that stays small for many nodes."""

from datetime import UTC, datetime

import pytest

from steward.reports.history.requests import NodeSnapshot
from steward.web.node_map import (
    NodeGroup,
    build_node_map,
    count_node_states,
    describe_state,
    render_node_state,
)

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


def node(name: str, state: str = "IDLE", **fields: object) -> NodeSnapshot:
    return NodeSnapshot(cluster="c1", node=name, state=state, since=NOON, **fields)  # type: ignore[arg-type]


def names(groups: list[NodeGroup]) -> list[str]:
    return [cell.node for group in groups for run in group.runs for cell in run.cells]


@pytest.mark.parametrize(
    ("state", "word", "tone"),
    [
        ("IDLE", "idle", "good"),
        ("MIXED", "mixed", "busy"),
        ("ALLOCATED", "allocated", "busy"),
        ("DOWN+DRAIN+NOT_RESPONDING", "down", "bad"),
        ("DOWN+POWERED_DOWN", "down", "bad"),
        ("IDLE+DRAIN", "drained", "wait"),
        ("IDLE+COMPLETING+DRAIN", "draining", "wait"),
        ("MIXED+DRAIN", "draining", "wait"),
        ("IDLE+NOT_RESPONDING", "not responding", "bad"),
        ("IDLE+CLOUD+POWERED_DOWN", "powered down", "off"),
        ("IDLE+MAINTENANCE+RESERVED", "maintenance", "wait"),
        ("ALLOCATED+FAIL", "failing", "bad"),
        ("IDLE+PLANNED", "planned", "busy"),
        ("REMOVED", "removed", "off"),
        ("UNKNOWN", "unknown", "off"),
        ("IDLE+OF_TOMORROW", "idle", "good"),
        ("", "unknown", "off"),
    ],
)
def test_what_a_state_means(state: str, word: str, tone: str) -> None:
    assert (describe_state(state).word, describe_state(state).tone) == (word, tone)


def test_a_state_is_told_in_words_and_escaped() -> None:
    shown = render_node_state("IDLE+DRAIN")
    assert 'class="state state-drained"' in shown
    assert ">IDLE+DRAIN<" in shown
    assert "<b>" not in render_node_state("<b>")


def test_counts_begin_with_the_worst() -> None:
    found = count_node_states([node("a"), node("b", "DOWN"), node("c", "IDLE+DRAIN"), node("d")])
    assert [(one.word, one.nodes) for one in found] == [("down", 1), ("drained", 1), ("idle", 2)]


def test_the_map_groups_by_the_names_beginning_and_sorts_by_state() -> None:
    some = [
        node("r1n1"),
        node("r1n2", "DOWN", reason="<x>"),
        node("r1n10"),
        node("r2n1"),
        node("x"),
    ]
    groups = build_node_map(some)
    assert [group.label for group in groups] == ["r1n1 \N{EN DASH} r1n10", "r2n1", "x"]
    first = groups[0]
    assert [(run.word, [cell.text for cell in run.cells]) for run in first.runs] == [
        ("down", ["r1n2"]),
        ("idle", ["r1n1", "r1n10"]),
    ]
    links = first.runs[0].links("/nodes/c1/")
    assert links.startswith('<a href=/nodes/c1/r1n2 title="DOWN since 2026-11-22 12:00 UTC: ')
    assert links.endswith('&lt;x&gt;">r1n2</a>')
    assert sorted(names(groups)) == sorted(one.node for one in some)


def test_nodes_of_which_the_same_is_said_stand_by_name_whatever_their_states() -> None:
    states = ("MIXED+DRAIN", "ALLOCATED+DRAIN", "IDLE", "MIXED+DRAIN")
    (group,) = build_node_map([node(f"n{place}", state) for place, state in enumerate(states)])
    told = [(run.word, [cell.node for cell in run.cells]) for run in group.runs]
    assert told == [("draining", ["n0", "n1", "n3"]), ("idle", ["n2"])]


def test_the_map_groups_by_partitions() -> None:
    some = [node("a", partitions=("big", "main")), node("b", partitions=("main",)), node("c")]
    assert {group.label: group.nodes for group in build_node_map(some, "partition")} == {
        "big, main": 1,
        "main": 1,
        "in no partition": 1,
    }


def test_of_very_many_nodes_each_is_there_once_with_the_end_of_its_name() -> None:
    some = [node(f"n{number:04}", "MIXED" if number % 2 else "IDLE") for number in range(5000)]
    groups = build_node_map(some)
    assert sorted(names(groups)) == [one.node for one in some]
    assert len(groups) == 50
    assert groups[0].label == "n0000 \N{EN DASH} n0099"
    assert groups[0].runs[0].cells[0].text == "01"
    assert {cell.title for group in groups for run in group.runs for cell in run.cells} == {""}
    # Whose names are all alike but for case or length has names left to be seen.
    odd = build_node_map([node(f"a{number}") for number in range(1200)])
    assert all(cell.text for group in odd for run in group.runs for cell in run.cells)


def test_the_map_of_5000_nodes_is_light() -> None:
    states = ("IDLE", "MIXED", "ALLOCATED", "ALLOCATED", "DOWN+NOT_RESPONDING", "MIXED+DRAIN")
    groups = build_node_map([node(f"n{number:04}", states[number % 6]) for number in range(5000)])
    runs = [run for group in groups for run in group.runs]
    text = "".join(f"<p class={run.tone}>{run.word}{run.links('/nodes/box/')}" for run in runs)
    assert text.count("<a ") == 5000
    assert len(text) < 180_000


def test_one_node_alone_keeps_its_name_among_very_many() -> None:
    some = [*(node(f"n{number:04}") for number in range(1500)), node("login")]
    cells = [cell for group in build_node_map(some) for run in group.runs for cell in run.cells]
    assert next(cell.text for cell in cells if cell.node == "login") == "login"
