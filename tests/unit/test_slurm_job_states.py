"""Job states: the jobs that a filter by one of them selects."""

import pytest

from steward.slurm.job_states import PENDING, WAITING, StateError, expand_state, expand_state_filter


def test_pending_selects_the_flags_that_squeue_shows_in_its_place() -> None:
    assert set(expand_state_filter("pd")) == PENDING
    assert {"EXPEDITING", "REQUEUE_HOLD", "PENDING"} <= PENDING < WAITING
    assert expand_state_filter("RH") == ("REQUEUE_HOLD",)
    assert expand_state_filter("cd") == ("COMPLETED",)


def test_a_state_without_a_short_name_is_known_in_full() -> None:
    assert expand_state("expediting") == "EXPEDITING"
    with pytest.raises(StateError):
        expand_state("EX")
