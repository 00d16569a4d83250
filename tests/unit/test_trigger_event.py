"""The event of slurm.trigger.set: a job alone names none."""

import pytest

from steward.automation.errors import WrongParameters
from steward.automation.operations.triggers import TriggerSet, _event


@pytest.mark.parametrize(
    ("fields", "event"),
    [({"fini": True}, "fini"), ({"event": "time"}, "time"), ({"event": "down"}, "down")],
)
def test_an_event_is_named(fields: dict[str, str | bool], event: str) -> None:
    assert _event(TriggerSet(program="/x", jobid=2, **fields), "2") == event  # type: ignore[arg-type]


def test_a_job_alone_is_refused_and_not_taken_for_its_time_limit() -> None:
    with pytest.raises(
        WrongParameters, match=r"fini=true.*event=time.*no trigger for a job's start"
    ):
        _event(TriggerSet(program="/x", jobid=2), "2")
