"""Fixtures that keep unit tests fast: their files lie in memory if it has space.

A commit of SQLite waits for the disk twice, and the tests commit thousands of times. They do
not test whether a disk keeps commits.
"""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 1 << 30
CHOSEN_BY = ("TMPDIR", "PYTEST_DEBUG_TEMPROOT")

# Full collections come before modules: see collect_garbage().
gc.set_threshold(100_000, 50, 50)

# A machine that is busy for a moment is no failure.
hypothesis.settings.register_profile("unit", deadline=None)
hypothesis.settings.load_profile("unit")


def in_memory() -> bool:
    """Return whether a tmpfs exists, has space, and permits executables."""
    if not MEMORY.is_mount():
        return False
    volume = os.statvfs(MEMORY)
    room = volume.f_bavail * volume.f_frsize >= ENOUGH_BYTES
    return room and not volume.f_flag & os.ST_NOEXEC and os.access(MEMORY, os.W_OK)


@pytest.fixture(scope="session")
def tmp_path_factory(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> pytest.TempPathFactory:
    """Return pytest's own factory in memory, unless somebody chose another directory."""
    chosen = pytestconfig.getoption("basetemp") or any(map(os.environ.get, CHOSEN_BY))
    if chosen or not in_memory():
        return tmp_path_factory
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
        factory = pytest.TempPathFactory.from_config(pytestconfig, _ispytest=True)
        factory.getbasetemp()
    return factory


@pytest.fixture(autouse=True, scope="module")
def collect_garbage() -> None:
    """Free what the last module left: descriptors, and memory of which each fork copies the tables.

    What Hypothesis and pytest keep to the end is not looked through again and again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def no_alarm() -> Iterator[None]:
    """Fail if a module leaves an alarm: it would end the test process minutes later."""
    yield
    remaining_s, _ = signal.setitimer(signal.ITIMER_REAL, 0.0)
    assert not remaining_s, "a time limit outlives what it limits"
