"""Spans: adjacent, never overlapping, each with the state of the last event before it."""

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from harness import history
from harness.events import at, us
from steward.core.events import Event
from steward.reports.history.spans import (
    OPEN_US,
    NodeSpan,
    clip_spans,
    get_reservation_end_us,
    is_node_down,
    is_planned_down,
    make_next_node_span,
    make_reservation_span,
)

STATES = ["IDLE", "DOWN", "IDLE+DRAIN", "ALLOCATED", "REMOVED"]
EVENTS = st.lists(
    st.tuples(st.integers(0, 500), st.sampled_from(STATES), st.sampled_from(["", "why", "else"])),
    min_size=1,
    max_size=30,
)


def spans_of(told: list[tuple[int, str, str]]) -> tuple[list[NodeSpan], list[Event]]:
    spans, events = list[NodeSpan](), list[Event]()
    old = ""
    for when, state, reason in told:
        event = history.node(when, "n1", state, old_state=old, reason=reason)
        span = make_next_node_span(spans[-1] if spans else None, event)
        if spans:
            spans[-1] = msgspec.structs.replace(spans[-1], until_us=span.from_us)
        spans.append(span)
        events.append(event)
        old = state
    return spans, events


@given(EVENTS)
def test_spans_touch_whatever_times_are_told(told: list[tuple[int, str, str]]) -> None:
    spans, _ = spans_of(told)
    assert spans[-1].until_us == OPEN_US
    for one, following in itertools.pairwise(spans):
        assert one.from_us <= one.until_us == following.from_us


@given(EVENTS, st.integers(0, 600))
def test_at_every_time_the_last_event_before_it_holds(
    told: list[tuple[int, str, str]], when: int
) -> None:
    told = sorted(told, key=lambda one: one[0])
    spans, events = spans_of(told)
    holding = [span for span in spans if span.from_us <= us(when) < span.until_us]
    last = [event for event in events if event.at <= at(when)]
    assert [span.state for span in holding] == [event.body.state for event in last[-1:]]


@given(EVENTS, st.integers(0, 300), st.integers(1, 300))
def test_what_is_cut_fills_the_time_since_the_first_event(
    told: list[tuple[int, str, str]], since: int, length: int
) -> None:
    spans, _ = spans_of(told)
    pieces = list(clip_spans(spans, us(since), us(since + length)))
    expected = max(0, us(since + length) - max(us(since), spans[0].from_us))
    assert sum(end - begin for _, begin, end in pieces) == expected
    assert all(us(since) <= begin < end <= us(since + length) for _, begin, end in pieces)


def test_a_new_reason_keeps_since_when_the_state_is() -> None:
    spans, _ = spans_of([(0, "IDLE", ""), (10, "DOWN", "a"), (30, "DOWN", "b")])
    assert [(span.since_us, span.is_known) for span in spans] == [
        (us(0), True),
        (us(10), True),
        (us(10), True),
    ]


def test_what_the_sensor_saw_first_may_be_old() -> None:
    first = make_next_node_span(None, history.node(5, "n1", "DOWN", source="start"))
    assert not first.is_known
    # A former version's events may have begun before this history.
    assert make_next_node_span(None, history.node(5, "n1", "DOWN", old_state="IDLE")).is_known
    assert not make_next_node_span(
        None, history.node(5, "n1", "DOWN", old_state="DOWN", reason="x")
    ).is_known


def test_capacity_that_is_not_told_is_what_it_was() -> None:
    first = make_next_node_span(None, history.node(0, "n1", "IDLE", cpus=8, gpus=2))
    then = make_next_node_span(
        first, history.node(1, "n1", "DOWN", old_state="IDLE", cpus=0, memory_bytes=0)
    )
    assert (then.cpus, then.gpus, then.memory_bytes) == (8, 2, first.memory_bytes)


def test_a_reservation_is_active_from_its_start_to_its_end() -> None:
    begun = history.reservation(103, "r", "ACTIVE", start=at(100), end=at(200), nodes="n[1-2]")
    span = make_reservation_span(begun)
    assert span is not None
    assert span.from_us == us(100)
    assert get_reservation_end_us(
        span, history.reservation(204, "r", "REMOVED", end=at(200))
    ) == us(200)
    # Taken away before its end, and a daily one whose times are tomorrow's by now.
    assert get_reservation_end_us(
        span, history.reservation(150, "r", "REMOVED", end=at(200))
    ) == us(150)
    assert get_reservation_end_us(
        span, history.reservation(204, "r", "INACTIVE", end=at(86_600))
    ) == us(204)
    assert make_reservation_span(history.reservation(0, "r", "INACTIVE", start=at(100))) is None


def test_what_slurmdbd_counts_as_down() -> None:
    down = ["DOWN", "DOWN+NOT_RESPONDING", "IDLE+DRAIN", "ERROR", "DOWN+POWERED_DOWN", "IDLE+FAIL"]
    up = ["IDLE", "MIXED", "ALLOCATED+DRAIN", "IDLE+COMPLETING+DRAIN", "MIXED+DRAIN", "IDLE+CLOUD"]
    assert [state for state in down + up if is_node_down(state)] == down
    assert is_planned_down("IDLE+CLOUD+POWERED_DOWN")
    assert not is_planned_down("DOWN")
