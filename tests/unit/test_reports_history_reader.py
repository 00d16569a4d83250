"""Sums over nodes that were alike lose nothing, and each node is in its own span at any time."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pysqlite3 import dbapi2

from harness import history
from harness.events import at, us
from harness.site import Site
from steward.core.events import PARTITION_STATE, PartitionState
from steward.reports.history.consumer import HISTORY_KINDS
from steward.reports.history.reader import HistoryEventFilter, HistoryReader, VisibleEvents
from steward.reports.history.spans import REMOVED, NodeSpan

NODES = [f"n{number}" for number in range(6)]
STATES = ["IDLE", "DOWN", "IDLE+DRAIN", REMOVED]
LENGTH = 400
Alike = tuple[int, int, str]


@pytest.fixture(params=range(4))
def past(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[HistoryReader, Site]]:
    """Generate changes of nodes, sometimes of several at once."""
    chance = random.Random(request.param)
    site = history.make_site(tmp_path)
    site.now = at(LENGTH)
    for _ in range(60):
        when, state = (
            chance.randrange(0, LENGTH, 5) + chance.choice((0, 0.25)),
            chance.choice(STATES),
        )
        told = [
            history.node(
                when, node, state, cpus=chance.choice((0, 4, 8)), gpus=chance.choice((0, 2))
            )
            for node in chance.sample(NODES, chance.choice((1, 1, 3)))
        ]
        site.feed(*told, history.node(when, "n1", state, cluster="c2"))
    reader = HistoryReader(site.settings.state_dir)
    yield reader, site
    reader.close()
    site.close()


def every_span(reader: HistoryReader) -> list[NodeSpan]:
    return reader.list_nodes_between("c1", us(-1), us(LENGTH + 1))


def test_nodes_summed_up_are_their_spans_in_sum(past: tuple[HistoryReader, Site]) -> None:
    reader, _ = past
    chance = random.Random(9)
    for _ in range(50):
        since = us(chance.randrange(LENGTH))
        until = since + chance.randrange(1, 200_000_000)
        cpus, gpus, nodes = Counter[Alike](), Counter[Alike](), Counter[Alike]()
        for span in every_span(reader):
            begin, end = max(span.from_us, since), min(span.until_us, until)
            if span.state != REMOVED and begin < end:
                nodes[begin, end, span.state] += 1
                cpus[begin, end, span.state] += span.cpus
                gpus[begin, end, span.state] += span.gpus
        found = reader.group_nodes_between("c1", since, until)
        # What lasts for no time at all may be told or not.
        lasting = [one for one in found if one.from_us < one.until_us]
        keys = [(one.from_us, one.until_us, one.state) for one in lasting]
        assert sorted(keys) == sorted(nodes)
        for key, one in zip(keys, lasting, strict=True):
            assert (one.nodes, one.cpus, one.gpus) == (nodes[key], cpus[key], gpus[key])


def test_at_any_time_each_node_is_in_the_span_that_holds_then(
    past: tuple[HistoryReader, Site],
) -> None:
    reader, _ = past
    for second in range(-5, LENGTH + 5):
        then = us(second)
        holding = [
            span
            for span in every_span(reader)
            if span.from_us <= then < span.until_us and span.state != REMOVED
        ]
        assert reader.list_nodes_at(then, ["c1"]) == holding
        some = [span for span in holding if span.node in ("n1", "n4")]
        assert reader.list_nodes_at(then, ["c1"], ["n1", "n4"]) == some
    assert reader.list_nodes_at(us(LENGTH), ["c1"], []) == []


def test_an_event_that_this_version_cannot_read_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = history.make_site(tmp_path)
    site.feed(
        history.node(1, "n1", "DOWN", source="trigger"),
        history.event(
            PARTITION_STATE, 2, PartitionState(partition="main", state="UP", source="trigger")
        ),
        history.event(PARTITION_STATE, 3, PartitionState(partition="wide", state="UP")),
        history.node(4, "n2", "DOWN"),
    )
    with closing(dbapi2.connect(f"{site.settings.state_dir}/history.db")) as database:
        for table in ("event", "present"):
            renamed = "CAST(replace(CAST(data AS TEXT), 'trigger', 'renamed') AS BLOB)"
            database.execute(f"UPDATE {table} SET data = {renamed}")
        database.commit()
    kinds = frozenset(HISTORY_KINDS)
    event_filter = HistoryEventFilter(visible={"c1": VisibleEvents(kinds=kinds)}, kinds=kinds)
    reader = HistoryReader(site.settings.state_dir)
    for _ in range(2):
        events = reader.list_events(event_filter, 10, lambda _: True)
        assert [event.at for event in events] == [at(4), at(3)]
    (partition,) = reader.list_present(PARTITION_STATE, ["c1"])
    assert partition.body.partition == "wide"
    reader.close()
    site.close()
    (line,) = [line for line in caplog.text.splitlines() if "node.state" in line]
    reason = "cannot decode event 1 (node.state): Invalid enum value 'renamed'"
    assert f"history.db: skipped an event: {reason}" in line
