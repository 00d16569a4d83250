"""Lines that sacct shows, their order and shape, from jobs.db, from Parquet and from both."""

import json
from datetime import UTC
from pathlib import Path

import msgspec
import pytest

from harness.events import NOVEMBER
from harness.sacct import ADA, JOBS, asked, closed, ids, mixed, run, source, us
from steward.accounting.sacct.options import parse_sacct_options
from steward.accounting.sacct.output import stream_file_lines
from steward.accounting.sacct.requests import SacctAnswer, SacctText
from steward.accounting.sacct.selection import parse_limit_s, parse_window
from steward.core.records import UsageLine
from steward.extensions.jobacct_plugins.log.parquet import write_parquet
from steward.jobs.line_sources import LineSource, sort_into_scratch

__all__ = ["closed", "mixed", "source"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-X", "1 2 3 4 7_1 7_2 7_[3-9] 8+0 8+1 11 12 12 13"),
        ("-j 1", "1 1.batch 1.extern 1.0 1.2 1.10"),
        ("-j 1.0,1.batch", "1.batch 1.0"),
        ("-j 1.0,4", "1.0 4"),
        ("-X -j 7", "7_1 7_2 7_[3-9]"),
        ("-X -j 7_2", "7_2"),
        ("-X -j 7_[1-2]", "7_1 7_2"),
        ("-X -j 5", "7_1"),
        ("-X -j 8", "8+0 8+1"),
        ("-X -j 8+1", "8+1"),
        ("-X -j 9", "8+1"),
        ("-X -j 9 --whole-hetjob", "8+0 8+1"),
        ("-X -j 8 --whole-hetjob=no", "8+0"),
        ("-X -j 14", "14"),
        ("-X -j 11 -D", "11 11"),
        ("-X -j 13 -D", "13 13"),
        ("-X -u bob -S 2026-11-01", "2 10"),
        ("-X -u 1002", "2"),
        ("-X -A chem", "2"),
        ("-X -q high", "4"),
        ("-X -r batch -A chem,phys --name first,second", "1 2"),
        ("-X -g users -u bob", "2"),
        ("-X -g 101", ""),
        ("-X -N n[3-5]", "8+1"),
        ("-X -i 2-4", "8+1 12"),
        ("-X -i 3", "8+1"),
        ("-X -I 3", ""),
        ("-X -k 60", "1 2 3 4 7_1 7_2 7_[3-9] 8+0 8+1 11 12 12 13"),
        ("-X -k 61 -K 1-0", ""),
        ("-X -R Resources", "3"),
        ("-X -s PD", "3 7_[3-9]"),
        ("-X -s R", "2"),
        ("-X -s CA -S 08:00 -E now", "4"),
        ("-X -s f,ca -S 08:00 -E now", "4 7_1"),
        ("-X -s R -S 10:00:30", "1 2 4 7_1 7_2 8+0 8+1 11 12 13"),
        ("-X -S 2026-11-19 -E 2026-11-20", "10"),
        ("-X -S 2026-11-18 -E 2026-11-18T12:00", "15"),
        ("-X -S 2026-11-17 -E 2026-11-18T08:00", ""),
        ("-X -S 11:02 -E 11:03 -j 1,11", "11"),
        ("-X -S 10:00:30 -E 10:00:40 -j 11", "11"),
        ("-M other -X", ""),
    ],
)
def test_what_is_shown(source: LineSource, line: str, expected: str) -> None:
    assert ids(source, line) == expected.split()


def test_of_runs_of_one_id_the_last_of_the_window_is_shown(source: LineSource) -> None:
    assert asked(source, "-X -P -j 13 -o jobname") == "new\n"
    assert asked(source, "-X -P -j 13 -E 09:59 -o jobname") == "old\n"
    assert asked(source, "-X -P -j 12 -o state,nnodes") == "RESIZING|1\nCOMPLETED|2\n"
    assert asked(source, "-X -P -j 11 -D -o state,restarts") == "REQUEUED|0\nCOMPLETED|1\n"


def test_the_usual_table() -> None:
    text = asked(sort_into_scratch(JOBS, "lines"), "-j 1,3,4")
    # A blank stands behind every column, as in Slurm's own.
    assert text.splitlines()[:2] == [
        "1                 first      batch       phys          2  COMPLETED      0:0 ",
        "1.batch           batch                  phys          2  COMPLETED      0:0 ",
    ]
    assert text.splitlines()[-2:] == [
        "3                   job      batch       phys          0    PENDING      0:0 ",
        "4                   job      batch       phys          2 CANCELLED+     0:15 ",
    ]


def test_fields_of_runs_and_steps(source: LineSource) -> None:
    line = "-j 1.batch,1.0,3 -P -o jobid,maxrss,totalcpu,reqmem,nodelist,start,elapsed,alloctres"
    assert asked(source, line).splitlines() == [
        "1.batch|5240K|00:01.750||n1|2026-11-21T10:00:00|00:01:00|billing=2,cpu=2,mem=4G,node=1",
        "1.0|1G|||n1|2026-11-21T10:00:00|00:01:00|billing=2,cpu=2,mem=4G,node=1",
        "3||00:00:00|4G|None assigned|Unknown|00:00:00|",
    ]
    assert asked(source, "-j 1 -X -p -o jobid,user,uid") == "1|ada|1001|\n"
    assert asked(source, "-j 1 -X -P --delimiter=%% -o jobid,user") == "1%%ada\n"


def test_every_field_can_be_printed(source: LineSource) -> None:
    for style in ("-P", "-p", ""):
        text = asked(source, f"-j 1,2,3 -o all,peakmem,doubts,reserved {style}")
        assert len(text.splitlines()) == 8


def test_what_runs_has_run_until_now_and_what_is_cut_until_then() -> None:
    lines = sort_into_scratch(JOBS, "lines")
    assert asked(lines, "-X -P -j 2 -o elapsed,end") == "02:00:00|Unknown\n"
    cut = "-X -P -T -S 10:00:20 -E 10:00:50 -j 1,2 -o start,end,elapsed"
    assert asked(lines, cut).splitlines() == [
        "2026-11-21T10:00:20|2026-11-21T10:00:50|00:00:30",
        "2026-11-21T10:00:20|2026-11-21T10:00:50|00:00:30",
    ]


def test_documents_hold_a_jobs_steps(source: LineSource) -> None:
    documents = [json.loads(line) for line in asked(source, "-j 1,2 --json").splitlines()]
    assert [document["label"] for document in documents] == ["1", "2"]
    first, second = documents
    assert [of["step"]["id"] for of in first["steps"]] == ["batch", "extern", "0", "2", "10"]
    assert first["steps"][0]["usage"]["max_rss_bytes"] == 5_365_760
    assert first["steps"][0]["time"]["user"] == {"seconds": 1, "microseconds": 500_000}
    assert first["tres"]["allocated"]["mem"] == "4G"
    assert second["time"]["end"] == 0
    assert second["time"]["elapsed"] == 7200
    assert second["state"]["current"] == ["RUNNING"]


def test_whole_lines_come_back(source: LineSource) -> None:
    lines = asked(source, "-j 1 --parquet x").splitlines()
    decoded = [msgspec.json.decode(line, type=UsageLine) for line in lines]
    assert decoded[0] == JOBS[0]
    assert {line.step for line in decoded} == {"", "batch", "extern", "0", "2", "10"}


def test_a_file_can_be_asked(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(JOBS, str(path))
    request = parse_sacct_options(
        ["-f", str(path), "-X", "-j", "1,2", "-P", "-o", "jobid"], {}, "UTC"
    ).request
    items = list(stream_file_lines(str(path), ADA, request))
    assert [item.text for item in items if isinstance(item, SacctText)] == ["1\n2\n"]
    assert isinstance(items[-1], SacctAnswer)
    assert items[-1].lines == 2


@pytest.mark.parametrize(
    ("line", "since", "until"),
    [
        ("", "00:00:00", "12:00:00"),
        ("-S 08:00", "08:00:00", "12:00:00"),
        ("-E 08:00", "00:00:00", "08:00:00"),
        ("-s R", "12:00:00", "12:00:00"),
        ("-s R -S 08:00", "08:00:00", "08:00:00"),
        ("-s R -S 08:00 -E 09:00", "08:00:00", "09:00:00"),
        ("-j 1", "1970-01-01T00:00:00", "12:00:00"),
        ("-j 1 -s R", "1970-01-01T00:00:00", "12:00:00"),
        ("-j 1 -s R -S 08:00", "08:00:00", "08:00:00"),
        ("-S now-1day", "2026-11-20T12:00:00", "12:00:00"),
    ],
)
def test_the_window_of_time(line: str, since: str, until: str) -> None:
    found = parse_window(parse_sacct_options(line.split(), {}).request, NOVEMBER, UTC)
    assert (found.since_us, found.until_us) == (us(since), us(until))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10", 600), ("1:30", 90), ("1:30:00", 5400), ("1-0", 86400), ("1-12:30", 131_400)],
)
def test_time_limits(text: str, seconds: int) -> None:
    assert parse_limit_s(text) == seconds


def test_named_jobs_are_shown_whenever_they_are_to_begin() -> None:
    later = run(1, begin="2026-12-01T00:00:00", end="", state="PENDING", start_us=0)
    lines = sort_into_scratch([later], "lines")
    assert ids(lines, "-X -j 1") == ["1"]
    assert ids(lines, "-X -j 1 -E 11:00") == []


def test_what_never_began_is_said_to_have_begun_never() -> None:
    never = run(1, state="CANCELLED", start_us=0, nodelist="")
    lines = sort_into_scratch([never, JOBS[7]], "lines")
    assert asked(lines, "-X -P -j 1,3 -o start") == "None\nUnknown\n"
    cut = "-X -P -T -S 10:00:20 -E 10:00:50 -j 1,3 -o start,end,elapsed"
    line = "2026-11-21T10:00:50|2026-11-21T10:00:50|00:00:00\n"
    assert asked(lines, cut) == 2 * line


@pytest.mark.parametrize(
    ("state", "eligible"),
    [("EXPEDITING", "10:00:00"), ("REQUEUE_HOLD", ""), ("SPECIAL_EXIT", "")],
)
def test_a_run_that_waits_under_a_flag_is_pending(state: str, eligible: str) -> None:
    waits = run(
        20,
        end="",
        state=state,
        start_us=0,
        eligible_us=us(eligible) if eligible else 0,
        nodelist="",
        restarts=1,
        first_submit_us=us("09:00:00"),
    )
    failed = run(
        20,
        *("09:00:00", "09:01:00"),
        state="FAILED",
        first_submit_us=us("09:00:00"),
    )
    source = sort_into_scratch([failed, waits], "lines")
    assert asked(source, "-X -P -s PD -j 20 -o state,restarts") == "PENDING|1\n"
    assert asked(source, "-X -P -D -j 20 -o state") == "FAILED\nPENDING\n"


def test_paths_are_expanded_on_request() -> None:
    source = sort_into_scratch([run(21, stdout="/home/%u/%x-%j")], "lines")
    assert asked(source, "-X -P -j 21 -o stdout") == "/home/%u/%x-%j\n"
    assert asked(source, "-X -P -j 21 -o stdout --expand-patterns") == "/home/ada/job-21\n"
