"""Authors of node reasons."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.automation.node_reasons import (
    MAX_REASON_LENGTH,
    is_replaceable_by,
    is_set_by_slurmctld,
    read_signer,
    shows_reason,
    sign_reason,
    split_slurm_suffix,
)
from steward.core.errors import UsageError


def test_a_reason_is_signed() -> None:
    assert sign_reason("bad DIMM", "ada") == "bad DIMM (steward: ada)"
    assert sign_reason("  bad\n DIMM\t", "rule node-down") == "bad DIMM (steward: rule node-down)"


def test_what_slurmctld_said_stands_behind_it() -> None:
    assert (
        sign_reason("cable", "ada", "Not responding") == "cable; was: Not responding (steward: ada)"
    )
    assert sign_reason("Not responding", "ada", "Not responding") == "Not responding (steward: ada)"


def test_a_reason_that_is_there_already_is_known() -> None:
    assert shows_reason("cable (steward: ada)", "cable", "ada")
    assert shows_reason("cable; was: Not responding (steward: ada)", "cable", "ada")
    assert not shows_reason("cable; was: Not responding (steward: bela)", "cable", "ada")
    assert not shows_reason("cables (steward: ada)", "cable", "ada")
    assert not shows_reason("cable", "cable", "ada")


def test_a_signature_cannot_be_given() -> None:
    assert sign_reason("x (steward: root)", "ada") == "x (steward: ada)"
    assert read_signer(sign_reason("x", "ada) (steward: root")) != "root"


@pytest.mark.parametrize("reason", ["", "  ", "(steward: root)", "\0"])
def test_no_reason_is_none(reason: str) -> None:
    with pytest.raises(UsageError, match="reason="):
        sign_reason(reason, "ada")


def test_people_replace_their_own_and_what_rules_said() -> None:
    assert is_replaceable_by("x (steward: ada)", "ada")
    assert not is_replaceable_by("x (steward: ada)", "bela")
    assert is_replaceable_by("x (steward: rule node-down)", "ada")


def test_rules_replace_what_rules_said_only() -> None:
    assert is_replaceable_by("x (steward: rule other)", "rule node-down")
    assert not is_replaceable_by("x (steward: ada)", "rule node-down")
    assert not is_replaceable_by("x", "rule node-down")


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
    assert is_set_by_slurmctld(reason, True)
    assert not is_set_by_slurmctld(reason, False)
    assert not is_set_by_slurmctld(f"{reason} (steward: ada)", True)


@pytest.mark.parametrize(
    "reason", ["bad DIMM", "Not responding: I look at it", "reboot for the kernel", "", "gres"]
)
def test_what_people_say_as_slurm_user(reason: str) -> None:
    assert not is_set_by_slurmctld(reason, True)


@given(st.text(), st.text(), st.text())
def test_any_reason_is_one_line_that_is_ours(reason: str, speaker: str, old: str) -> None:
    try:
        text = sign_reason(reason, speaker, old)
    except UsageError:
        return
    assert len(text) <= MAX_REASON_LENGTH
    assert text.isprintable()
    assert '"' not in text
    assert is_replaceable_by(text)


def test_what_slurmctld_puts_behind_a_reason_leaves_it_whose_it_was() -> None:
    """From 23.11 on slurmctld appends text to the reason if a drained node does not answer."""
    given = sign_reason("failed, look at it", "rule drain")
    for behind in ("Not responding", "Not responding : Node unexpectedly rebooted"):
        shown = f"{given} : {behind}"
        assert split_slurm_suffix(shown) == (given, behind)
        assert read_signer(shown) == "rule drain"
        assert is_replaceable_by(shown, "rule other")
        assert shows_reason(shown, "failed, look at it", "rule drain")
    assert split_slurm_suffix("fan : broken") == ("fan : broken", "")
    assert not is_replaceable_by("bad DIMM : Not responding")
    assert not is_replaceable_by(f"{given} : but alice wants it so")
