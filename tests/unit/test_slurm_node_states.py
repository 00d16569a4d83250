from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.slurm.node_states import (
    format_node_state,
    is_available,
    is_drained,
    is_failing,
    is_not_responding,
    is_out_of_service,
    parse_node_state,
    parse_state_words,
    saves_power,
)

FLAGS: Final = (
    *("BLOCKED", "CLOUD", "COMPLETING", "DRAIN", "DYNAMIC_NORM", "EXTERNAL", "FAIL"),
    *("INVALID_REG", "MAINTENANCE", "NOT_RESPONDING", "PLANNED", "POWERED_DOWN"),
    *("POWERING_DOWN", "POWERING_UP", "POWER_DOWN", "REBOOT_ISSUED", "REBOOT_REQUESTED"),
    *("RESERVED", "SOMETHING_NEW"),
)
BASES: Final = ("ALLOCATED", "DOWN", "ERROR", "FUTURE", "IDLE", "MIXED", "UNKNOWN")


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("IDLE", "IDLE"),
        ("IDLE+CLOUD+POWERED_DOWN", "IDLE+CLOUD+POWERED_DOWN"),
        ("DOWN*+DRAIN", "DOWN+DRAIN+NOT_RESPONDING"),
        ("down*", "DOWN+NOT_RESPONDING"),
        ("drained", "IDLE+DRAIN"),
        ("drained*", "IDLE+DRAIN+NOT_RESPONDING"),
        ("draining@", "ALLOCATED+DRAIN+REBOOT_REQUESTED"),
        ("idle~", "IDLE+POWERED_DOWN"),
        ("alloc#", "ALLOCATED+POWERING_UP"),
        ("idle!", "IDLE+POWER_DOWN"),
        ("idle%", "IDLE+POWERING_DOWN"),
        ("mix$", "MIXED+MAINTENANCE"),
        ("down^", "DOWN+REBOOT_ISSUED"),
        ("mix-", "MIXED+PLANNED"),
        ("IDLE+DRAIN+MAINTENANCE+RESERVED", "IDLE+DRAIN+MAINTENANCE+RESERVED"),
        ("DOWN+DRAINED", "DOWN+DRAIN"),
        ("IDLE*$", "IDLE+MAINTENANCE+NOT_RESPONDING"),
        ("", "UNKNOWN"),
        ("?", "UNKNOWN"),
    ],
)
def test_spellings(text: str, state: str) -> None:
    assert format_node_state(*parse_node_state(text)) == state


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (["ALLOCATED", "DRAIN"], "ALLOCATED+DRAIN"),  # 24.11 and later
        (["allocated", "DRAIN"], "ALLOCATED+DRAIN"),  # 22.05: a word, and a list of flags
        (["NOT_RESPONDING", "DOWN"], "DOWN+NOT_RESPONDING"),
        ([], "UNKNOWN"),
    ],
)
def test_lists_of_json(words: list[str], state: str) -> None:
    assert format_node_state(*parse_state_words(words)) == state


@given(base=st.sampled_from(BASES), flags=st.sets(st.sampled_from(FLAGS)))
def test_what_is_shown_is_read_as_the_same(base: str, flags: set[str]) -> None:
    shown = format_node_state(base, flags)
    assert parse_node_state(shown) == (base, tuple(sorted(flags)))


@given(st.text())
def test_any_text_is_some_state(text: str) -> None:
    base, flags = parse_node_state(text)
    assert base in BASES
    assert list(flags) == sorted(set(flags))
    is_failing(text)
    is_available(text)


@pytest.mark.parametrize(
    ("state", "fails", "available"),
    [
        ("IDLE", False, True),
        ("MIXED+COMPLETING", False, True),
        ("IDLE+PLANNED", False, True),
        ("DOWN", True, False),
        ("DOWN+NOT_RESPONDING", True, False),
        ("IDLE+NOT_RESPONDING", True, False),
        ("ERROR", True, False),
        ("ALLOCATED+FAIL", True, False),
        ("IDLE+INVALID_REG", True, False),
        ("IDLE+DRAIN", False, False),
        ("DOWN+DRAIN+NOT_RESPONDING", False, False),
        ("IDLE+MAINTENANCE+RESERVED", False, False),
        ("DOWN+REBOOT_ISSUED", False, False),
        ("IDLE+CLOUD+POWERED_DOWN", False, True),
        ("ALLOCATED+CLOUD+NOT_RESPONDING+POWERING_UP", False, True),
        ("IDLE+CLOUD+POWERING_DOWN", False, False),
        ("IDLE+POWER_DOWN", False, False),
        # It was to boot for a job, and did not.
        ("DOWN+CLOUD+POWERED_DOWN", True, False),
        ("DOWN+CLOUD+NOT_RESPONDING", True, False),
        ("UNKNOWN+NOT_RESPONDING", True, False),
        ("UNKNOWN", False, False),
        ("UNKNOWN+CLOUD+POWERED_DOWN", False, True),
        ("FUTURE", False, False),
    ],
)
def test_what_is_a_failure(state: str, fails: bool, available: bool) -> None:
    assert is_failing(state) is fails
    assert is_available(state) is available


@pytest.mark.parametrize(
    ("state", "silent"),
    [
        ("IDLE+NOT_RESPONDING", True),
        ("ALLOCATED+CLOUD+NOT_RESPONDING", True),
        ("IDLE", False),
        ("DOWN+NOT_RESPONDING", False),
        ("UNKNOWN+NOT_RESPONDING", False),
        ("IDLE+DRAIN+NOT_RESPONDING", False),
        ("IDLE+FAIL+NOT_RESPONDING", False),
        ("IDLE+NOT_RESPONDING+POWERED_DOWN", False),
    ],
)
def test_what_only_does_not_answer(state: str, silent: bool) -> None:
    assert is_not_responding(state) is silent


def test_drained_and_powered_down() -> None:
    assert is_drained("ALLOCATED+DRAIN")
    assert is_drained("drained*")
    assert not is_drained("DOWN")
    assert is_out_of_service("DOWN+REBOOT_ISSUED")
    assert not is_out_of_service("DOWN+NOT_RESPONDING")
    assert saves_power("IDLE+POWERED_DOWN")
    assert saves_power("idle#")
    assert not saves_power("IDLE+CLOUD")
