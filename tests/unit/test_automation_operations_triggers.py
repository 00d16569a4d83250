"""Event of slurm.trigger.set: the job alone names no event."""

from types import SimpleNamespace
from typing import Any

import pytest

from steward.automation.errors import InvalidParameters
from steward.automation.operations import triggers
from steward.automation.operations.triggers import TriggerSetParameters, set_trigger
from steward.core.config import Settings


@pytest.fixture(autouse=True)
def any_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every user set a trigger; only root could write a list of programs that counts."""
    monkeypatch.setattr(triggers, "require_listed_program", lambda *_: None)


def set_dry(**fields: Any) -> str:
    """Return the event for which a trigger of job 2 would be set."""
    doing: Any = SimpleNamespace(
        cluster="c1",
        settings=Settings(),
        triggers=SimpleNamespace(list_events=lambda: dict.fromkeys(("fini", "time", "down"), "")),
        slurm=SimpleNamespace(job=lambda job_id: [job_id]),
        dry_run=True,
    )
    would: dict[str, str] = set_trigger(
        doing, TriggerSetParameters(program="/bin/true", jobid=2, **fields)
    )
    assert would["jobid"] == "2"
    return would["event"]


@pytest.mark.parametrize(
    ("fields", "event"),
    [({"fini": True}, "fini"), ({"event": "time"}, "time"), ({"event": "down"}, "down")],
)
def test_an_event_is_named(fields: dict[str, str | bool], event: str) -> None:
    assert set_dry(**fields) == event


def test_a_job_alone_is_refused_and_not_taken_for_its_time_limit() -> None:
    with pytest.raises(InvalidParameters, match=r"fini=true.*event=time.*no event for a start"):
        set_dry()
