"""States of jobs: what a filter by one of them selects."""

import pytest

from steward.slurm.job_states import PENDING, WAITING, StateError, in_full, selected_states


def test_pending_selects_the_flags_that_squeue_shows_in_its_place() -> None:
    assert set(selected_states("pd")) == PENDING
    assert {"EXPEDITING", "REQUEUE_HOLD", "PENDING"} <= PENDING < WAITING
    assert selected_states("RH") == ("REQUEUE_HOLD",)
    assert selected_states("cd") == ("COMPLETED",)


def test_a_state_without_a_short_name_is_known_in_full() -> None:
    assert in_full("expediting") == "EXPEDITING"
    with pytest.raises(StateError):
        in_full("EX")
