"""The event of slurm.trigger.set: a job alone names none."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from steward.automation.errors import WrongParameters
from steward.automation.operations.triggers import TriggerSet, set_
from steward.config import Settings
from steward.config_automation import ActionsSettings

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the list of programs is root's")


def set_dry(tmp_path: Path, **fields: Any) -> str:
    """The event that a trigger of job 2 would be set for."""
    programs = tmp_path / "programs"
    programs.write_text("/bin/true\n")
    doing: Any = SimpleNamespace(
        cluster="c1",
        settings=Settings(actions=ActionsSettings(programs_file=str(programs))),
        triggers=SimpleNamespace(events=lambda: dict.fromkeys(("fini", "time", "down"), "")),
        slurm=SimpleNamespace(job=lambda job_id: [job_id]),
        dry_run=True,
    )
    would: dict[str, str] = set_(doing, TriggerSet(program="/bin/true", jobid=2, **fields))
    assert would["jobid"] == "2"
    return would["event"]


@pytest.mark.parametrize(
    ("fields", "event"),
    [({"fini": True}, "fini"), ({"event": "time"}, "time"), ({"event": "down"}, "down")],
)
def test_an_event_is_named(tmp_path: Path, fields: dict[str, str | bool], event: str) -> None:
    assert set_dry(tmp_path, **fields) == event


def test_a_job_alone_is_refused_and_not_taken_for_its_time_limit(tmp_path: Path) -> None:
    with pytest.raises(
        WrongParameters, match=r"fini=true.*event=time.*no trigger for a job's start"
    ):
        set_dry(tmp_path)
