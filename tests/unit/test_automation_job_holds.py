"""Owners of job holds, and the tasks of an array that a command affects."""

from typing import Any

import pytest

from steward.automation.job_holds import (
    format_requeue_mark,
    has_admin_hold,
    has_slurm_hold,
    is_held_pending,
    is_requeue_unfinished,
)
from steward.automation.node_reasons import sign_reason
from steward.automation.operations.jobs import select_targets
from steward.core.records import JobRecord


def job(**fields: Any) -> JobRecord:
    return JobRecord(**{"job_id": 7, "uid": 1, "state": "PENDING", "priority": 5, **fields})


@pytest.mark.parametrize(
    ("reason", "priority", "kept", "by_admin"),
    [
        ("", 5, False, False),
        ("Dependency", 5, False, False),
        ("BeginTime", None, False, False),
        ("JobHeldAdmin", 0, True, True),
        ("JobHeldAdmin", None, True, True),
        ("JobHeldUser", 0, True, False),
        ("job requeued in held state", 0, True, False),
        ("job_requeued_in_held_state", 0, True, False),
        ("launch failed requeued held", 0, True, False),
        ("JobArrayTaskLimit,JobHeldUser", 0, True, False),
        ("JobHeldAdmin,JobHeldUser", 0, True, True),
        ("JobArrayTaskLimit,BeginTime,JobHeldUser", 5, False, False),
        # Its owner cannot end the other reasons that keep it from starting.
        ("BadConstraints", 0, True, True),
        ("", 0, True, True),
    ],
)
def test_whose_hold(reason: str, priority: int | None, kept: bool, by_admin: bool) -> None:
    waits = job(reason=reason, priority=priority)
    assert (has_slurm_hold(waits), is_held_pending(waits)) == (kept, kept)
    assert has_admin_hold(waits) == by_admin
    runs = job(reason=reason, priority=priority, state="RUNNING")
    assert (has_slurm_hold(runs), is_held_pending(runs)) == (kept, False)
    assert has_admin_hold(runs) == by_admin


def test_a_requeue_that_has_not_ended() -> None:
    said = sign_reason(format_requeue_mark(["n2", "n1"]), "rule r")
    assert is_requeue_unfinished(said, "rule r")
    assert is_requeue_unfinished(said, "carl")
    assert not is_requeue_unfinished(sign_reason(format_requeue_mark(["n1"]), "carl"), "ada")
    assert not is_requeue_unfinished("requeued away from n1", "ada")
    assert not is_requeue_unfinished(sign_reason("the account is empty", "carl"), "carl")


def is_waiting(record: JobRecord) -> bool:
    return record.state == "PENDING"


def names(name: str, *records: JobRecord, whole: bool = True) -> list[str]:
    return [one.name for one in select_targets(name, records, is_waiting, allow_whole=whole)]


def test_targets() -> None:
    rest = job(array_job_id=7, array_task="3-6,9%2")
    runs = job(job_id=8, array_job_id=7, array_task="1", state="RUNNING")
    waits = job(job_id=9, array_job_id=7, array_task="2")
    assert names("7", rest, runs, waits) == ["7_[3-6,9]", "7_2"]
    assert names("7", rest, waits) == ["7"]
    assert names("7", rest, waits, whole=False) == ["7_[3-6,9]", "7_2"]
    assert names("7", runs) == []
    assert names("7_4", rest) == ["7_4"]
    assert names("9", waits) == ["9"]
    cut = job(array_job_id=7, array_task="3-6,9,...%2")
    assert names("7", cut, runs) == ["7"]


def test_a_heterogeneous_job_is_changed_as_one() -> None:
    parts = [job(job_id=7 + n, het_job_id=7, het_offset=n) for n in range(2)]
    assert names("7", *parts, whole=False) == ["7"]
    assert names("7+1", parts[1]) == ["7+1"]
