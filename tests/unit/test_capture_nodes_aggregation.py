"""Aggregation of node reports into events: few, reproducible, and without malformed lines."""

import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.events import NOON_US
from harness.nodes import line, task
from steward.capture.nodes.aggregation import (
    EARLIEST_VALID_US,
    MAX_LINE_BYTES,
    MAX_TASKS_PER_EVENT,
    aggregate_lines,
    find_flaw,
    parse_node_line,
)
from steward.core.events import Event, decode_event, encode_event
from steward.core.usage import ExitedTasks, NodeGap, StepEnd, StepStart

NOW = datetime.fromtimestamp(NOON_US / 1e6, UTC) + timedelta(minutes=5)
START = line("start", tasks=128, cpus=128, mem=2**30, name="a.out", r=1, aj=6, at="3")
END = line("end", tasks=128, rss=4096, peak=8192, cut=192000, csy=64000, crd=1, cwr=2)


def folded(body: bytes, node: str = "n1") -> list[Event]:
    return aggregate_lines("c1", node, body, NOW).events


def test_a_steps_tasks_on_a_node_are_one_event() -> None:
    body = START + line("smgr", tasks=128) + b"".join(map(task, range(128))) + END
    start, exits, end = folded(body)
    assert [start.kind, exits.kind, end.kind] == ["step.start", "task.exit", "step.end"]
    assert start.body == StepStart(
        job_id=7,
        step="0",
        node="n1",
        launched_us=NOON_US,
        uid=1000,
        gid=1000,
        tasks=128,
        cpus=128,
        memory_bytes=2**30,
        name="a.out",
        restarts=1,
        array_job_id=6,
        array_task="3",
    )
    assert isinstance(exits.body, ExitedTasks)
    assert [one.task for one in exits.body.tasks] == list(range(128))
    assert (exits.body.tasks[5].pid, exits.body.tasks[5].user_us) == (5005, 1500)
    assert isinstance(end.body, StepEnd)
    assert (end.body.peak_bytes, end.body.cgroup_written_bytes) == (8192, 2)
    assert {event.source for event in (start, exits, end)} == {"node"}


def test_a_repeat_has_the_same_keys_in_whatever_order() -> None:
    lines = [START, *map(task, range(10)), END, line("prolog"), line("epilog"), b"nonsense\n"]
    keys = {event.key for event in folded(b"".join(lines))}
    again = aggregate_lines("c1", "n1", b"".join(reversed(lines)), NOW + timedelta(hours=1)).events
    assert {event.key for event in again} == keys
    assert len(keys) == 6


def test_very_many_tasks_are_a_few_events() -> None:
    exits = folded(b"".join(map(task, range(2 * MAX_TASKS_PER_EVENT + 1))))
    assert [len(event.body.tasks) for event in exits] == [
        MAX_TASKS_PER_EVENT,
        MAX_TASKS_PER_EVENT,
        1,
    ]
    assert len({event.key for event in exits}) == 3
    assert max(len(encode_event(event)) for event in exits) < 1 << 20


def test_launches_of_one_step_are_told_apart() -> None:
    """The batch step of a requeued job has the same name again."""
    events = folded(b"".join([task(0), task(0, l=NOON_US + 1), task(0, s="batch"), task(0, j=8)]))
    assert len(events) == len({event.key for event in events}) == 4


@pytest.mark.parametrize(
    "odd",
    [
        b"{}\n",
        b"\0\0\0\0\n",
        b"[" * 3000 + b"\n",
        task(1, n="n2"),
        task(1, v=2),
        task(1, j=0),
        task(1, j=2**40),
        task(1, s="0; DROP TABLE"),
        task(1, s="0" * 200),
        task(1, ut=-1),
        task(1, ut=2**64),
        task(1, ut=1.5),
        task(1, t=5),
        task(1, l=0),
        task(1, t=NOON_US + 3 * 86400 * 10**6),
        task(1, k="reboot"),
        line("start", name="x" * 65),
        line("start", u=None),
        line("prolog", u=2**32),
        task(1, name="x" * MAX_LINE_BYTES),
        task(1)[:-30] + b"\n",
        b'{"v":1,"k":"task","n":"\xff"}\n',
    ],
)
def test_what_is_no_line_is_counted_and_harms_no_other(odd: bytes) -> None:
    exits, gap = folded(task(0) + odd + task(2))
    assert [one.task for one in exits.body.tasks] == [0, 2]
    assert gap.body == NodeGap(node="n1", why="garbled", lines=1)


def test_a_line_behind_a_torn_one_is_found() -> None:
    """The disk was full in the middle of a line, and had space again for the next."""
    (exits,) = folded(task(0)[:40] + task(1))
    assert [one.task for one in exits.body.tasks] == [1]


def test_where_nothing_is_nothing_is_garbled() -> None:
    """The plugin begins with a newline after a torn line; two steps may do so at once."""
    assert len(folded(b"\n\n" + task(0) + b"\n" + task(1))) == 1


def test_a_flood_of_short_lines_is_not_looked_at() -> None:
    decoded = 0

    def count(_frame: object, event: str, function: Any) -> None:
        nonlocal decoded
        of = getattr(function, "__self__", None)
        decoded += event == "c_call" and isinstance(of, msgspec.json.Decoder)

    sys.setprofile(count)
    try:
        folded(task(0) + task(1))
        assert decoded == 2
        (gap,) = folded(b"a\n" * 1000 + b"{}\n" * 1000)
    finally:
        sys.setprofile(None)
    assert decoded == 2
    assert gap.body == NodeGap(node="n1", why="garbled", lines=2000)


def test_the_shortest_line_is_one() -> None:
    shortest = b'{"v":1,"k":"prolog","t":%d,"j":1,"n":"n","u":0}' % EARLIEST_VALID_US
    assert parse_node_line(shortest, "n", 2**62) is not None


def test_lost_lines_are_told() -> None:
    found = aggregate_lines("c1", "n1", task(0, lost=3) + line("end", lost=4), NOW)
    assert found.lost == 7
    assert [event.body.lines for event in found.events if event.kind == "node.gap"] == [3, 4]
    assert next(e.body.lost for e in found.events if e.kind == "step.end") == 4


def forged(event: Event, **changes: object) -> str:
    return find_flaw(
        msgspec.structs.replace(event, body=msgspec.structs.replace(event.body, **changes))
    )


def test_a_controllers_receiver_is_not_believed_blindly() -> None:
    start, exits, end = folded(START + task(0) + END)
    assert "invalid job id" in forged(start, job_id=0)
    assert "invalid step" in forged(exits, step="x")
    assert "does not match the launch" in forged(end, node="n2")
    assert "does not match the launch" in forged(exits, tasks=())
    assert "out of bounds" in forged(start, name="x" * 300)
    assert "out of bounds" in forged(end, peak_bytes=-1)
    (gap,) = folded(b"?\n")
    assert "does not match the gap" in forged(gap, why="strike")


values = st.one_of(st.none(), st.integers(), st.text(), st.booleans(), st.floats())
keys = st.sampled_from([*"vktjnslugr", "tasks", "cpus", "mem", "name", "aj", "at", "id", "pid"])
odd: st.SearchStrategy[dict[str, Any]] = st.dictionaries(keys, values)
hostile = st.one_of(
    st.binary(max_size=200),
    odd.map(lambda facts: task(1, **facts)),
    odd.map(lambda facts: line("start", **facts)),
    odd.map(lambda facts: line("end", **facts)),
)


@settings(deadline=None)
@given(st.lists(hostile, max_size=8))
def test_whatever_a_node_sends_only_sound_events_come_of_it(lines: list[bytes]) -> None:
    for event in folded(b"\n".join(lines)):
        again = decode_event(0, event.kind, event.cluster, event.key, encode_event(event))
        assert again == event
        assert find_flaw(again) == ""
