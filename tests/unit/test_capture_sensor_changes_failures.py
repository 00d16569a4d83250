"""Node failures: changes that the sensor reports as one, each once."""

import pytest

from harness.sensor import SILENT, SensorRun, site

__all__ = ["site"]

GONE = "DOWN+NOT_RESPONDING"


@pytest.mark.parametrize(
    "state",
    [
        *("IDLE+DRAIN", "IDLE+POWERED_DOWN", "IDLE+CLOUD+POWERED_DOWN", "IDLE+POWERING_UP"),
        *("IDLE+PLANNED", "IDLE+MAINTENANCE", "ALLOCATED", "MIXED+DRAIN", "IDLE+REBOOT_ISSUED"),
    ],
)
def test_what_somebody_wants_is_no_failure(site: SensorRun, state: str) -> None:
    site.turn()
    site.news()
    site.shown.states["n1"] = state
    site.turn()
    (body,) = site.news()
    assert (body.state, body.failed) == (state, False)


@pytest.mark.parametrize("state", ["DOWN", "DOWN+NOT_RESPONDING", "ERROR", "IDLE+FAIL"])
def test_what_fails_has_failed_once(site: SensorRun, state: str) -> None:
    site.turn()
    site.news()
    site.shown.states["n1"] = state
    site.turn()
    assert [body.failed for body in site.news()] == [True]
    site.shown.reasons["n1"] = ("somebody looks at it", "root", None)
    site.turn()
    assert [body.failed for body in site.news()] == [False]


@pytest.mark.parametrize("before", ["IDLE+DRAIN", "DOWN", GONE, "ALLOCATED+DRAIN", "IDLE+FAIL"])
@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize(
    ("then", "failed"),
    [
        (["IDLE"], [False]),
        (["MIXED"], [False]),
        ([GONE], [True]),
        # It answers, and fails afterwards.
        (["IDLE", SILENT, GONE], [False, True, False]),
        (["ALLOCATED+NOT_RESPONDING", GONE], [False, True]),
        (["IDLE+DRAIN+NOT_RESPONDING", SILENT, "IDLE"], [False, False, False]),
        # Resumed in vain, again and again.
        ([GONE, SILENT, GONE], [True, False, True]),
    ],
)
def test_a_node_that_was_resumed_has_not_failed_while_its_slurmd_is_asked(
    site: SensorRun, before: str, is_killed: bool, then: list[str], failed: list[bool]
) -> None:
    site.turn()
    for state in (before, SILENT):
        site.shown.states["n1"] = state
        site.turn()
        # No state changed: no event.
        site.turn()
    assert [(body.state, body.failed) for body in site.news()[-1:]] == [(SILENT, False)]
    told = []
    for state in then:
        if is_killed:
            site.restart()
        site.shown.states["n1"] = state
        site.turn()
        site.turn()
        told += [body.failed for body in site.news() if body.node == "n1"]
    assert told == failed


def test_a_node_that_falls_silent_fails_once_whatever_its_jobs_do(site: SensorRun) -> None:
    site.turn()
    site.news()
    for state in ("ALLOCATED+NOT_RESPONDING", SILENT, "MIXED+NOT_RESPONDING", GONE):
        site.shown.states["n1"] = state
        site.turn()
    assert [body.failed for body in site.news()] == [True, False, False, False]
