"""Job log and jobs.db agree about each run, whatever the order of its events."""

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.events import at
from harness.jobacct import LogSite
from harness.jobs import record
from harness.steps import Clocked, done, exited, histories, launched, running
from harness.steps import ended as ended_step
from steward.core.events import STEP_USAGE, Event
from steward.core.records import UsageLine
from steward.core.sqlite import open_reader
from steward.core.timestamps import to_micros
from steward.core.usage import StepUsage
from steward.jobs.lines import COLUMNS, row_to_line


def ended(lines: list[UsageLine]) -> list[UsageLine]:
    """Return the lines of ended runs, in sacct's order.

    The log does not know of a later run before it begins, nor of an earlier one that is
    reported late.
    """
    runs = {
        (line.job_id, line.submit_us, line.restarts)
        for line in lines
        if not line.step and not line.piece_us and line.end_us
    }
    lines = [msgspec.structs.replace(line, is_latest=1, first_submit_us=0) for line in lines]
    mine = [line for line in lines if (line.job_id, line.submit_us, line.restarts) in runs]
    return sorted(mine, key=lambda line: (line.submit_us, line.restarts, line.piece_us, line.step))


def moved(said: list[Event], launches: list[tuple[Any, ...]]) -> set[int]:
    """Return submit times of runs whose launch turned out to belong to another run.

    The log keeps the lines of such a launch, because nothing withdraws them.
    """
    runs: dict[tuple[Any, ...], set[int]] = {}
    for event in said:
        if event.kind == STEP_USAGE:
            body: StepUsage = event.body
            assert body.submit is not None
            launch = (body.step, body.node, body.launched_us)
            runs.setdefault(launch, set()).add(to_micros(body.submit))
    for step, node, launched_us, submit_us in launches:
        if (step, node, launched_us) in runs:
            runs[step, node, launched_us].add(submit_us or 0)
    return {submit for found in runs.values() if len(found) > 1 for submit in found}


def plain(lines: list[UsageLine]) -> list[dict[str, Any]]:
    """Return each line as plain values, which are easier to compare by eye."""
    return [msgspec.to_builtins(line) for line in lines]


def both(
    books: Clocked, batch: int
) -> tuple[list[Event], list[UsageLine], list[UsageLine], list[tuple[Any, ...]]]:
    """Return the events, the lines of the log, those of jobs.db, and the launches."""
    site = LogSite(books.directory)
    log = site.open_log()
    said = [
        msgspec.structs.replace(event, id=number)
        for number, event in enumerate(books.said, start=1)
        if event.kind in log.kinds
    ]
    for start in range(0, len(said), batch):
        log.apply(said[start : start + batch], start + batch, lambda _: None)
    log.close()
    reader = open_reader(books.path)
    rows = reader.execute(f"SELECT {COLUMNS} FROM line").fetchall()
    launches = reader.execute("SELECT step, node, launched, submit FROM launch").fetchall()
    reader.close()
    found = site.lines() if site.location.exists() else []
    return said, found, list(map(row_to_line, rows)), launches


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(histories(), st.data())
def test_log_and_database_say_the_same(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(events))
    batch = data.draw(st.integers(1, 5))
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as base:
        books = Clocked(Path(base))
        for start in range(0, len(shuffled), batch):
            books.take(*shuffled[start : start + batch])
        books.tick(10_000)
        books.consumer.close()
        said, found, rows, launches = both(books, batch)
        odd = moved(said, launches)
        in_db = [line for line in ended(rows) if line.submit_us not in odd]
        # A run may turn out to be none: two with the same restart count are of two jobs.
        runs = {(line.submit_us, line.restarts) for line in in_db}
        in_log = [line for line in ended(found) if (line.submit_us, line.restarts) in runs]
        assert plain(in_log) == plain(in_db)


def test_steps_are_under_the_size_that_a_job_had(tmp_path: Path) -> None:
    books = Clocked(tmp_path)
    books.take(running(), launched(7, 4, "0"), exited(7, 4, step="0"), ended_step(7, 4, 8, "0"))
    piece: dict[str, Any] = {"nodelist": "n[1-3]", "start": at(2), "source": "jobcomp"}
    books.take(record(7, 0, "RESIZING", seen=10, end=3000, **piece))
    books.take(launched(7, 12, "1"), exited(7, 12, step="1"), ended_step(7, 12, 14, "1"))
    books.take(done(nodelist="n1"))
    books.consumer.close()
    _, found, rows, _ = both(books, 100)
    assert [line.step for line in found] == ["", "0", "", "1"]
    assert plain(ended(found)) == plain(ended(rows))
