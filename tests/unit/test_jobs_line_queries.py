"""Questions of sacct find runs by an index, and the same runs as a scan."""

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC
from pathlib import Path

import msgspec
import pytest

from harness.events import NOVEMBER
from harness.sacct import JOBS, ROOT, asked, ids, run
from steward.accounting.sacct.options import parse_sacct_options
from steward.accounting.sacct.selection import build_line_filter, parse_window
from steward.core.sqlite import Connection, open_database, transaction
from steward.core.timestamps import from_micros
from steward.jobs.day_sums import add_cluster, track_lines
from steward.jobs.line_sources import DatabaseSource, sort_into_scratch
from steward.jobs.lines import drop_lines, put_lines
from steward.jobs.run_queries import RunQueries
from steward.jobs.tables import MIGRATIONS

ALL_TIME = "-S 2026-01-01 -E now"


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    """Open a jobs.db with the lines of all kinds of jobs."""
    with closing(open_database(str(tmp_path / "jobs.db"), MIGRATIONS)) as opened:
        with transaction(opened):
            add_cluster(opened, "main", "UTC")
            with track_lines(opened, "main", {line.job_id for line in JOBS}):
                put_lines(opened, JOBS)
        yield opened


def explain(connection: Connection, line: str) -> list[str]:
    """Return the query plan of a question."""
    statements: list[str] = []
    request = parse_sacct_options(["-M", "main", *line.split()], {}, "UTC").request
    window = parse_window(request, NOVEMBER, UTC)
    line_filter = build_line_filter(ROOT, request, window, request.clusters, None)
    connection.set_trace_callback(statements.append)
    source = DatabaseSource(connection, "jobs.db")
    list(source.rows(line_filter, ["label"], steps=not request.allocations))
    connection.set_trace_callback(None)
    rows = connection.execute(f"EXPLAIN QUERY PLAN {statements[-1]}").fetchall()
    return [row[3] for row in rows]


@pytest.mark.parametrize(
    ("line", "index"),
    [
        (f"-X -s F {ALL_TIME}", "line_by_state (state=? AND end_us>? AND end_us<?)"),
        (f"-s F,TO,NF {ALL_TIME}", "line_by_state (state=? AND end_us>? AND end_us<?)"),
        (f"-u bob {ALL_TIME}", "line_by_user (user=? AND end_us>?)"),
        (f"-u 1002 {ALL_TIME}", "line_by_uid (uid=? AND end_us>?)"),
        (f"-A chem -s F {ALL_TIME}", "line_by_account (account=? AND end_us>?)"),
        (f"-N n2 {ALL_TIME}", "node_run USING PRIMARY KEY (node=? AND end_s>?)"),
        ("-X -N n[1-3]", "node_run USING PRIMARY KEY (node=? AND end_s>?)"),
        ("-j 1,5", "line_by_id (job_id=?)"),
        ("-j 7_1", "line_by_array (array_job_id=?)"),
        ("-X -S 10:00:30 -E 11:00", "line_by_end (end_us>?)"),
    ],
)
def test_a_question_searches_an_index_and_sorts_nothing(
    connection: Connection, line: str, index: str
) -> None:
    plan = explain(connection, line)
    assert any(index in step for step in plan)
    assert [step for step in plan if step.startswith("SCAN")] == []
    assert any(step.startswith("SEARCH line USING PRIMARY KEY (cluster=?") for step in plan)
    assert not [step for step in plan if "TEMP B-TREE" in step]


def test_observed_runs_are_counted_in_an_index_alone(connection: Connection) -> None:
    ended = run(9, end_us=max(line.end_us for line in JOBS) + 1)
    imported = msgspec.structs.replace(ended, job_id=10, source="slurmdbd")
    with transaction(connection):
        put_lines(connection, [ended, imported])
    statements: list[str] = []
    connection.set_trace_callback(statements.append)
    period = from_micros(ended.end_us), from_micros(ended.end_us + 1)
    assert RunQueries("jobs.db", connection).count_observed_runs(*period, "main") == 1
    connection.set_trace_callback(None)
    (plan,) = connection.execute(f"EXPLAIN QUERY PLAN {statements[-1]}").fetchall()
    assert "USING COVERING INDEX line_by_end (end_us>? AND end_us<?)" in plan[3]


@pytest.mark.parametrize("steps", ["", "-X "])
@pytest.mark.parametrize("window", ["", ALL_TIME, "-S 10:00:30", "-S 2026-11-18 -E 2026-11-20"])
@pytest.mark.parametrize(
    "line", ["-N n1", "-N n[3-5]", "-N none", "-s F", "-s CA,F,RQ", "-s F,CD,R", "-N n1 -s F"]
)
def test_an_index_finds_the_runs_that_a_scan_finds(
    connection: Connection, line: str, window: str, steps: str
) -> None:
    question = f"-a {steps}{line} {window}"
    scanned = asked(sort_into_scratch(JOBS, "lines"), question)
    assert asked(DatabaseSource(connection, "jobs.db"), question) == scanned


def test_the_node_index_is_used_once_it_is_complete(connection: Connection) -> None:
    source = DatabaseSource(connection, "jobs.db")
    connection.execute("UPDATE summed SET upto = 5")
    connection.execute("DELETE FROM node_run")
    assert ids(source, "-a -X -N n1") == ids(sort_into_scratch(JOBS, "lines"), "-a -X -N n1")
    assert not any("node_run" in step for step in explain(connection, "-N n1"))


def test_the_node_index_follows_changed_and_deleted_runs(connection: Connection) -> None:
    source = DatabaseSource(connection, "jobs.db")
    moved = run(9, label="8+1", het_job_id=8, het_offset=1, nodelist="n[3-4],m9", nodes=3)
    with transaction(connection), track_lines(connection, "main", {9, 4}):
        put_lines(connection, [moved])
        drop_lines(connection, "main", [(4, run(4).submit_us, 0)])
    assert ids(source, "-a -X -N n2") == []
    assert ids(source, "-a -X -N m9") == ["8+1"]
    rows = connection.execute(
        "SELECT node.name FROM node_run JOIN node ON number = node WHERE job_id IN (4, 9)"
    ).fetchall()
    assert sorted(rows) == [("m9",), ("n3",), ("n4",)]
