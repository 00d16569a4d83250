"""Hostile input of sacct: expensive options and records, forged lines."""

import tracemalloc
from datetime import UTC
from pathlib import Path

import pytest

from harness.events import NOVEMBER
from harness.sacct import JOBS, ROOT, asked, closed, ids, mixed, run, source, step
from steward.accounting.sacct.options import parse_sacct_options
from steward.accounting.sacct.output import format_lines
from steward.accounting.sacct.requests import SacctText
from steward.accounting.sacct.selection import build_line_filter, parse_named_jobs, parse_window
from steward.core.errors import UsageError
from steward.jobs.line_queries import LineFilter, build_statement
from steward.jobs.line_sources import LineSource, LineSourceError, ParquetSource, sort_into_scratch

__all__ = ["closed", "mixed", "source"]


def test_hostile_text_forges_no_line() -> None:
    lines = sort_into_scratch([run(1, name="x\n2|COMPLETED\x1b[2J|é")], "lines")
    text = asked(lines, "-X -P -j 1 -o jobid,jobname")
    assert text == "1|x\\n2|COMPLETED\\x1b[2J|é\n"
    assert asked(lines, "-X -j 1 -o jobname%8").count("\n") == 1


@pytest.mark.parametrize(
    ("columns", "is_refused"),
    [
        ("1 AS job_id", True),
        ("'x' AS job_id, 'main' AS cluster", True),
        ("[1] AS job_id, {'a': 1} AS cluster", True),
        ("1 AS job_id, 'main' AS cluster, 'soon' AS end_us", True),
        ("1 AS job_id, 'main' AS cluster", False),
        ("NULL AS job_id, 'main' AS cluster", False),
        ("1 AS job_id, NULL AS cluster", False),
        ("1 AS job_id, 'main' AS cluster, 2.5 AS cpus, 7 AS step, [1, 2] AS name", False),
        ("1 AS job_id, 'main' AS cluster, NULL::BLOB AS label, NULL AS step", False),
        ("-9223372036854775808 AS job_id, 'a' AS cluster, 9e18::BIGINT AS start_us", False),
    ],
)
def test_parquet_of_others_is_read_or_refused(
    tmp_path: Path, columns: str, is_refused: bool
) -> None:
    import duckdb

    path = str(tmp_path / "x.parquet")
    duckdb.execute(f"COPY (SELECT {columns}) TO '{path}' (FORMAT parquet)")
    asks = ("-o all -P", "-o all", "--json", "--parquet x", "-D -X")
    for line in (*(f"-j 1 {ask}" for ask in asks), *(f"-a {ask} -S 2026-01-01" for ask in asks)):
        try:
            asked(ParquetSource([path]), line)
        except LineSourceError:
            assert is_refused
        else:
            # Columns that are not requested are not computed.
            assert not is_refused or "-j 1 -o all" not in line


@pytest.mark.parametrize(
    "line",
    [
        "-j x",
        "-j 1.bogus",
        "-j 1.",
        "-j 1_[3-1]",
        "-j 1_[1-99999999]",
        "-s NOPE",
        "-i x",
        "-k x",
        "-S nope",
        "-S 13:00",
    ],
)
def test_what_cannot_be_asked(line: str) -> None:
    with pytest.raises(UsageError):
        asked(sort_into_scratch([], "lines"), line)


def test_a_short_text_that_means_too_many_nodes_is_refused() -> None:
    with pytest.raises(UsageError):
        asked(sort_into_scratch(JOBS, "lines"), "-N n[1-99999]m[1-99999]")


def test_nodes_are_counted_by_their_sum() -> None:
    lines = sort_into_scratch(JOBS, "lines")
    assert ids(lines, "-X -N m[1-400],n[3-400],x1") == ["8+1"]
    with pytest.raises(UsageError):
        asked(lines, "-N n[0-999998]")


def test_wide_lines_are_made_as_they_are_sent() -> None:
    lines = sort_into_scratch([run(number) for number in range(1, 2001)], "lines")
    wide = ",".join(["jobid%900", *["jobid"] * 99])
    tracemalloc.start()
    request = parse_sacct_options(["-X", "-a", "-o", wide], {}, "UTC").request
    when = parse_window(request, NOVEMBER, UTC)
    wanted = build_line_filter(ROOT, request, when, (), None)
    letters = 0
    for item in format_lines(lines, wanted, request, when, NOVEMBER, {"main": "UTC"}):
        letters += len(item.text) if isinstance(item, SacctText) else 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert letters == 2000 * 90_101
    assert peak < 16 << 20


def test_a_line_is_only_so_wide() -> None:
    with pytest.raises(UsageError):
        asked(sort_into_scratch([], "lines"), "-o jobid%10000" + ",jobid" * 10)


def test_hostile_names_of_jobs_and_steps_are_printed_as_escapes() -> None:
    odd = run(1, label="1\x1b[2J")
    lines = sort_into_scratch([odd, step(odd, "0\x1b]0;x")], "lines")
    text = asked(lines, "-P -j 1 -o jobid,jobidraw")
    assert text == "1\\x1b[2J|1\n1\\x1b[2J.0\\x1b]0;x|1.0\\x1b]0;x\n"


def test_very_many_jobs_can_be_named() -> None:
    named = ",".join(map(str, (*range(1, 15), *range(4_000_000_000, 4_000_019_000))))
    assert ids(sort_into_scratch(JOBS, "lines"), f"-X -j {named}")[:3] == ["1", "2", "3"]
    with pytest.raises(UsageError):
        parse_named_jobs(["1_["])


def test_tasks_of_many_arrays_are_asked_for_in_one_condition(source: LineSource) -> None:
    arrays = ",".join(f"{job_id}_[1-60]" for job_id in range(7, 307))
    assert ids(source, f"-X -j {arrays}") == ["7_1", "7_2", "7_[3-9]"]
    assert ids(source, "-X -j 7_[2,8-12:2],8+1,5_1,7_99") == ["7_2", "7_[3-9]", "8+1"]
    assert ids(source, "-j 7_[1-2].batch,1.0") == ["1.0"]
    wanted = LineFilter(jobs=parse_named_jobs(arrays.split(",")))
    assert len(build_statement(wanted, ["job_id"], match_tasks=lambda _: "held()").sql) < 20_000


def test_a_short_text_that_means_very_many_tasks_is_refused() -> None:
    tracemalloc.start()
    with pytest.raises(UsageError):
        parse_named_jobs([f"{job_id}_[0-9998]" for job_id in range(1, 20_000)])
    with pytest.raises(UsageError):
        parse_named_jobs([f"{job_id}" for job_id in range(1, 30_000)])
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_jobs_are_named_in_any_way_thousands_at_once() -> None:
    lines = sort_into_scratch(JOBS, "lines")
    sluids = ",".join(f"s{number:013d}" for number in range(9000))
    components = ",".join(f"{job_id}+{job_id % 7}" for job_id in range(8, 9000))
    steps = ",".join(f"1.{number}" for number in range(3000))
    assert ids(lines, f"-X -j {sluids}") == []
    assert ids(lines, f"-X -j {components},8+0") == ["8+0", "8+1"]
    assert ids(lines, f"-j {steps}") == ["1.0", "1.2", "1.10"]
