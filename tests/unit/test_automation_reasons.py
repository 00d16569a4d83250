"""Whose reason a node shows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.automation.node_reasons import (
    LONGEST,
    is_ours,
    is_slurms,
    ours,
    parted,
    says,
    signed_by,
)
from steward.core.errors import UsageError


def test_a_reason_is_signed() -> None:
    assert ours("bad DIMM", "ada") == "bad DIMM (steward: ada)"
    assert ours("  bad\n DIMM\t", "rule node-down") == "bad DIMM (steward: rule node-down)"


def test_what_slurmctld_said_stands_behind_it() -> None:
    assert ours("cable", "ada", "Not responding") == "cable; was: Not responding (steward: ada)"
    assert ours("Not responding", "ada", "Not responding") == "Not responding (steward: ada)"


def test_a_reason_that_is_there_already_is_known() -> None:
    assert says("cable (steward: ada)", "cable", "ada")
    assert says("cable; was: Not responding (steward: ada)", "cable", "ada")
    assert not says("cable; was: Not responding (steward: bela)", "cable", "ada")
    assert not says("cables (steward: ada)", "cable", "ada")
    assert not says("cable", "cable", "ada")


def test_a_signature_cannot_be_given() -> None:
    assert ours("x (steward: root)", "ada") == "x (steward: ada)"
    assert signed_by(ours("x", "ada) (steward: root")) != "root"


@pytest.mark.parametrize("reason", ["", "  ", "(steward: root)", "\0"])
def test_no_reason_is_none(reason: str) -> None:
    with pytest.raises(UsageError, match="reason="):
        ours(reason, "ada")


def test_people_replace_their_own_and_what_rules_said() -> None:
    assert is_ours("x (steward: ada)", "ada")
    assert not is_ours("x (steward: ada)", "bela")
    assert is_ours("x (steward: rule node-down)", "ada")


def test_rules_replace_what_rules_said_only() -> None:
    assert is_ours("x (steward: rule other)", "rule node-down")
    assert not is_ours("x (steward: ada)", "rule node-down")
    assert not is_ours("x", "rule node-down")


@pytest.mark.parametrize(
    "reason",
    [
        "Not responding",
        "Node unexpectedly rebooted",
        "Kill task failed",
        "Low RealMemory (reported:100 < 100.00% of configured:200)",
        "gres/gpu count reported lower than configured (0 < 4)",
        "batch job complete failure",
        "ResumeTimeout reached",
    ],
)
def test_what_slurmctld_says(reason: str) -> None:
    assert is_slurms(reason, True)
    assert not is_slurms(reason, False)
    assert not is_slurms(f"{reason} (steward: ada)", True)


@pytest.mark.parametrize(
    "reason", ["bad DIMM", "Not responding: I look at it", "reboot for the kernel", "", "gres"]
)
def test_what_people_say_as_slurm_user(reason: str) -> None:
    assert not is_slurms(reason, True)


@given(st.text(), st.text(), st.text())
def test_any_reason_is_one_line_that_is_ours(reason: str, speaker: str, old: str) -> None:
    try:
        text = ours(reason, speaker, old)
    except UsageError:
        return
    assert len(text) <= LONGEST
    assert text.isprintable()
    assert '"' not in text
    assert is_ours(text)


def test_what_slurmctld_puts_behind_a_reason_leaves_it_whose_it_was() -> None:
    """As it does from 23.11 on where a node that somebody drained does not answer."""
    given = ours("failed, look at it", "rule drain")
    for behind in ("Not responding", "Not responding : Node unexpectedly rebooted"):
        shown = f"{given} : {behind}"
        assert parted(shown) == (given, behind)
        assert signed_by(shown) == "rule drain"
        assert is_ours(shown, "rule other")
        assert says(shown, "failed, look at it", "rule drain")
    assert parted("fan : broken") == ("fan : broken", "")
    assert not is_ours("bad DIMM : Not responding")
    assert not is_ours(f"{given} : but alice wants it so")
