"""Which lines sacct shows, in what order and shape: of jobs.db, of Parquet, of both together."""

import json
import tracemalloc
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steward.access import Access, Asker, Standing
from steward.accounting.errors import AccountingError
from steward.accounting.log.packing import write_parquet
from steward.accounting.room import AccountingRoom
from steward.accounting.sacct.listing import listed, sacct, sacct_of_file
from steward.accounting.sacct.options import options
from steward.accounting.sacct.selecting import limit_s, line_filter, named_jobs, window
from steward.accounting.sacct.shapes import SacctAnswer, SacctRequest, SacctText
from steward.accounting.sacct.sources import Both, Parquet, Source, scratch_of
from steward.config import AccessSettings, ClusterSettings, Settings
from steward.errors import UsageError
from steward.jobs import database_path
from steward.jobs.expiring import expire
from steward.jobs.line_queries import LineFilter, statement
from steward.jobs.lines import put_lines
from steward.jobs.tables import MIGRATIONS
from steward.lines import Line
from steward.sqlite import open_database, transaction

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
ROOT = Asker(uid=0, user="root", how="local")
ADA = Asker(uid=1001, user="ada")


def us(text: str) -> int:
    """µs of a time of that day, or of a date and time."""
    full = text if "T" in text else f"2026-11-21T{text}"
    return int(datetime.fromisoformat(full).replace(tzinfo=UTC).timestamp()) * 1_000_000


def run(job_id: int, begin: str = "10:00:00", end: str = "10:01:00", **fields: Any) -> Line:
    """A run of an hour's first minute, unless told otherwise; "" for a time that is not yet."""
    times = {
        "submit_us": us(begin),
        "eligible_us": us(begin),
        "start_us": us(begin),
        "end_us": us(end) if end else 0,
    }
    known = {
        "cluster": "main",
        "label": str(job_id),
        "uid": 1001,
        "user": "ada",
        "gid": 100,
        "group": "users",
        "account": "phys",
        "partition": "batch",
        "qos": "normal",
        "name": "job",
        "state": "COMPLETED",
        "exit_code": 0,
        "exit_signal": 0,
        "nodes": 1,
        "cpus": 2,
        "nodelist": "n1",
        "requested_cpus": 2,
        "requested_nodes": 1,
        "time_limit_s": 3600,
        "tres_requested": "cpu=2,mem=4G,node=1,billing=2",
        "tres_allocated": "cpu=2,mem=4G,node=1,billing=2",
        "first_submit_us": us(begin),
    }
    return Line(job_id=job_id, **{**known, **times, **fields})


def step(of: Line, name: str, **fields: Any) -> Line:
    return msgspec.structs.replace(of, step=name, name=name, tasks=1, **fields)


JOBS = [
    run(1, name="first"),
    step(run(1), "batch", user_us=1_500_000, system_us=250_000, max_rss_bytes=5_365_760),
    step(run(1), "0", max_rss_node="n1", max_rss_task=0, max_rss_bytes=1 << 30),
    step(run(1), "10"),
    step(run(1), "extern"),
    step(run(1), "2"),
    run(2, end="", state="RUNNING", user="bob", uid=1002, account="chem", name="second"),
    run(
        3,
        end="",
        state="PENDING",
        start_us=0,
        nodelist="",
        nodes=0,
        tres_allocated="",
        reason="Resources",
    ),
    run(4, state="CANCELLED", cancelled_by=1002, qos="high", exit_code=0, exit_signal=15),
    run(5, label="7_1", array_job_id=7, array_task="1", state="FAILED", exit_code=3),
    run(6, label="7_2", array_job_id=7, array_task="2"),
    run(
        7,
        end="",
        label="7_[3-9]",
        array_job_id=7,
        array_task="3-9",
        state="PENDING",
        start_us=0,
        nodelist="",
    ),
    run(8, label="8+0", het_job_id=8, het_offset=0),
    run(9, label="8+1", het_job_id=8, het_offset=1, nodelist="n[2-4]", nodes=3),
    run(10, begin="2026-11-19T08:00:00", end="2026-11-19T09:00:00", user="bob", uid=1002),
    # Requeued: the first run, and the second.
    run(11, restarts=0, is_latest=0, state="REQUEUED", first_submit_us=us("10:00:00")),
    run(11, begin="11:00:00", end="11:05:00", restarts=1, first_submit_us=us("10:00:00")),
    # Resized: what it was, and what it became.
    run(12, end="10:00:30", state="RESIZING", piece_us=us("10:00:30"), is_latest=0),
    run(12, nodes=2),
    # An id that was used before.
    run(13, begin="09:00:00", end="09:30:00", name="old"),
    run(13, name="new"),
    # Held: never eligible.
    run(14, end="", state="PENDING", start_us=0, eligible_us=0, nodelist=""),
]


def parquet_of(lines: Sequence[Line], path: Path) -> Source:
    write_parquet(lines, str(path))
    return Parquet([str(path)])


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return parquet_of(JOBS, tmp_path_factory.mktemp("closed") / "2026-11-21.parquet")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Half of the jobs are in one, half in the other, and some in both; no het job is torn."""
    path = tmp_path_factory.mktemp("mixed") / "2026-11-21.parquet"
    here = [line for line in JOBS if line.job_id % 2 or line.job_id > 7]
    there = [line for line in JOBS if (not line.job_id % 2 and line.job_id != 8) or line.job_id < 4]
    return Both(scratch_of(here, "here"), parquet_of(there, path))


@pytest.fixture(scope="module", params=["database", "parquet", "both"])
def source(request: pytest.FixtureRequest, closed: Source, mixed: Source) -> Source:
    return {"database": scratch_of(JOBS, "lines"), "parquet": closed, "both": mixed}[request.param]


def asked(source: Source, line: str, asker: Asker = ROOT) -> str:
    request = options(line.split(), {}, "UTC").request
    when = window(request, NOW, UTC)
    wanted = line_filter(asker, request, when, request.clusters, None)
    items = listed(source, wanted, request, when, NOW, {"main": "UTC"})
    return "".join(item.text for item in items if isinstance(item, SacctText))


def ids(source: Source, line: str) -> list[str]:
    return asked(source, f"{line} -P -o jobid").split()


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
        ("-X -S 11:02 -E 11:03 -j 1,11", "11"),
        ("-X -S 10:00:30 -E 10:00:40 -j 11", "11"),
        ("-M other -X", ""),
    ],
)
def test_what_is_shown(source: Source, line: str, expected: str) -> None:
    assert ids(source, line) == expected.split()


def test_of_runs_of_one_id_the_last_of_the_window_is_shown(source: Source) -> None:
    assert asked(source, "-X -P -j 13 -o jobname") == "new\n"
    assert asked(source, "-X -P -j 13 -E 09:59 -o jobname") == "old\n"
    assert asked(source, "-X -P -j 12 -o state,nnodes") == "RESIZING|1\nCOMPLETED|2\n"
    assert asked(source, "-X -P -j 11 -D -o state,restarts") == "REQUEUED|0\nCOMPLETED|1\n"


def test_the_usual_table() -> None:
    text = asked(scratch_of(JOBS, "lines"), "-j 1,3,4")
    # A blank stands behind every column, as in Slurm's own.
    assert text.splitlines()[:2] == [
        "1                 first      batch       phys          2  COMPLETED      0:0 ",
        "1.batch           batch                  phys          2  COMPLETED      0:0 ",
    ]
    assert text.splitlines()[-2:] == [
        "3                   job      batch       phys          0    PENDING      0:0 ",
        "4                   job      batch       phys          2 CANCELLED+     0:15 ",
    ]


def test_fields_of_runs_and_steps(source: Source) -> None:
    line = "-j 1.batch,1.0,3 -P -o jobid,maxrss,totalcpu,reqmem,nodelist,start,elapsed,alloctres"
    assert asked(source, line).splitlines() == [
        "1.batch|5240K|00:01.750||n1|2026-11-21T10:00:00|00:01:00|billing=2,cpu=2,mem=4G,node=1",
        "1.0|1G|||n1|2026-11-21T10:00:00|00:01:00|billing=2,cpu=2,mem=4G,node=1",
        "3||00:00:00|4G|None assigned|Unknown|00:00:00|",
    ]
    assert asked(source, "-j 1 -X -p -o jobid,user,uid") == "1|ada|1001|\n"
    assert asked(source, "-j 1 -X -P --delimiter=%% -o jobid,user") == "1%%ada\n"


def test_every_field_can_be_printed(source: Source) -> None:
    for style in ("-P", "-p", ""):
        text = asked(source, f"-j 1,2,3 -o all,peakmem,doubts,reserved {style}")
        assert len(text.splitlines()) == 8


def test_what_runs_has_run_until_now_and_what_is_cut_until_then() -> None:
    lines = scratch_of(JOBS, "lines")
    assert asked(lines, "-X -P -j 2 -o elapsed,end") == "02:00:00|Unknown\n"
    cut = "-X -P -T -S 10:00:20 -E 10:00:50 -j 1,2 -o start,end,elapsed"
    assert asked(lines, cut).splitlines() == [
        "2026-11-21T10:00:20|2026-11-21T10:00:50|00:00:30",
        "2026-11-21T10:00:20|2026-11-21T10:00:50|00:00:30",
    ]


def test_hostile_text_forges_no_line() -> None:
    lines = scratch_of([run(1, name="x\n2|COMPLETED\x1b[2J|é")], "lines")
    text = asked(lines, "-X -P -j 1 -o jobid,jobname")
    assert text == "1|x\\n2|COMPLETED\\x1b[2J|é\n"
    assert asked(lines, "-X -j 1 -o jobname%8").count("\n") == 1


def test_documents_hold_a_jobs_steps(source: Source) -> None:
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


def test_whole_lines_come_back(source: Source) -> None:
    lines = asked(source, "-j 1 --parquet x").splitlines()
    decoded = [msgspec.json.decode(line, type=Line) for line in lines]
    assert decoded[0] == JOBS[0]
    assert {line.step for line in decoded} == {"", "batch", "extern", "0", "2", "10"}


def test_a_file_can_be_asked(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(JOBS, str(path))
    request = options(["-f", str(path), "-X", "-j", "1,2", "-P", "-o", "jobid"], {}, "UTC").request
    items = list(sacct_of_file(str(path), ADA, request))
    assert [item.text for item in items if isinstance(item, SacctText)] == ["1\n2\n"]
    assert isinstance(items[-1], SacctAnswer)
    assert items[-1].lines == 2


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
            asked(Parquet([path]), line)
        except AccountingError:
            assert is_refused
        else:
            # A column that nobody asks for is not looked at.
            assert not is_refused or "-j 1 -o all" not in line


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
    found = window(options(line.split(), {}).request, NOW, UTC)
    assert (found.since_us, found.until_us) == (us(since), us(until))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10", 600), ("1:30", 90), ("1:30:00", 5400), ("1-0", 86400), ("1-12:30", 131_400)],
)
def test_time_limits(text: str, seconds: int) -> None:
    assert limit_s(text) == seconds


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
        asked(scratch_of([], "lines"), line)


def test_a_short_text_that_means_too_many_nodes_is_refused() -> None:
    with pytest.raises(UsageError):
        asked(scratch_of(JOBS, "lines"), "-N n[1-99999]m[1-99999]")


def test_nodes_are_counted_by_their_sum() -> None:
    lines = scratch_of(JOBS, "lines")
    assert ids(lines, "-X -N m[1-400],n[3-400],x1") == ["8+1"]
    with pytest.raises(UsageError):
        asked(lines, "-N n[0-999998]")


def test_wide_lines_are_made_as_they_are_sent() -> None:
    lines = scratch_of([run(number) for number in range(1, 2001)], "lines")
    wide = ",".join(["jobid%900", *["jobid"] * 99])
    tracemalloc.start()
    request = options(["-X", "-a", "-o", wide], {}, "UTC").request
    when = window(request, NOW, UTC)
    wanted = line_filter(ROOT, request, when, (), None)
    letters = 0
    for item in listed(lines, wanted, request, when, NOW, {"main": "UTC"}):
        letters += len(item.text) if isinstance(item, SacctText) else 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert letters == 2000 * 90_101
    assert peak < 16 << 20


def test_a_line_is_only_so_wide() -> None:
    with pytest.raises(UsageError):
        asked(scratch_of([], "lines"), "-o jobid%10000" + ",jobid" * 10)


def test_named_jobs_are_shown_whenever_they_are_to_begin() -> None:
    later = run(1, begin="2026-12-01T00:00:00", end="", state="PENDING", start_us=0)
    lines = scratch_of([later], "lines")
    assert ids(lines, "-X -j 1") == ["1"]
    assert ids(lines, "-X -j 1 -E 11:00") == []


def test_what_never_began_is_said_to_have_begun_never() -> None:
    never = run(1, state="CANCELLED", start_us=0, nodelist="")
    lines = scratch_of([never, JOBS[7]], "lines")
    assert asked(lines, "-X -P -j 1,3 -o start") == "None\nUnknown\n"
    cut = "-X -P -T -S 10:00:20 -E 10:00:50 -j 1,3 -o start,end,elapsed"
    line = "2026-11-21T10:00:50|2026-11-21T10:00:50|00:00:00\n"
    assert asked(lines, cut) == 2 * line


def test_hostile_names_of_jobs_and_steps_are_printed_as_escapes() -> None:
    odd = run(1, label="1\x1b[2J")
    lines = scratch_of([odd, step(odd, "0\x1b]0;x")], "lines")
    text = asked(lines, "-P -j 1 -o jobid,jobidraw")
    assert text == "1\\x1b[2J|1\n1\\x1b[2J.0\\x1b]0;x|1.0\\x1b]0;x\n"


def test_very_many_jobs_can_be_named() -> None:
    named = ",".join(map(str, (*range(1, 15), *range(4_000_000_000, 4_000_019_000))))
    assert ids(scratch_of(JOBS, "lines"), f"-X -j {named}")[:3] == ["1", "2", "3"]
    with pytest.raises(UsageError):
        named_jobs(["1_["])


def test_tasks_of_many_arrays_are_asked_for_in_one_condition(source: Source) -> None:
    arrays = ",".join(f"{job_id}_[1-60]" for job_id in range(7, 307))
    assert ids(source, f"-X -j {arrays}") == ["7_1", "7_2", "7_[3-9]"]
    assert ids(source, "-X -j 7_[2,8-12:2],8+1,5_1,7_99") == ["7_2", "7_[3-9]", "8+1"]
    assert ids(source, "-j 7_[1-2].batch,1.0") == ["1.0"]
    wanted = LineFilter(jobs=named_jobs(arrays.split(",")))
    assert len(statement(wanted, ["job_id"], holds=lambda _: "held()").sql) < 20_000


def test_a_short_text_that_means_very_many_tasks_is_refused() -> None:
    tracemalloc.start()
    with pytest.raises(UsageError):
        named_jobs([f"{job_id}_[0-9998]" for job_id in range(1, 20_000)])
    with pytest.raises(UsageError):
        named_jobs([f"{job_id}" for job_id in range(1, 30_000)])
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_jobs_are_named_in_any_way_thousands_at_once() -> None:
    lines = scratch_of(JOBS, "lines")
    sluids = ",".join(f"s{number:013d}" for number in range(9000))
    components = ",".join(f"{job_id}+{job_id % 7}" for job_id in range(8, 9000))
    steps = ",".join(f"1.{number}" for number in range(3000))
    assert ids(lines, f"-X -j {sluids}") == []
    assert ids(lines, f"-X -j {components},8+0") == ["8+0", "8+1"]
    assert ids(lines, f"-j {steps}") == ["1.0", "1.2", "1.10"]


# ---------------------------------------------------------------- who may see what


@pytest.fixture
def room(tmp_path: Path) -> Callable[[Standing | None], AccountingRoom]:
    connection = open_database(database_path(str(tmp_path)), MIGRATIONS)
    with transaction(connection):
        put_lines(connection, JOBS)
    connection.close()
    made = Settings(state_dir=str(tmp_path), cluster={"main": ClusterSettings(timezone="UTC")})

    def make(standing: Standing | None) -> AccountingRoom:
        access = Access(AccessSettings(operators=("oper",)), 999, lambda _: standing)
        return AccountingRoom(made, access=access, now=lambda: NOW)

    return make


def seen(room: AccountingRoom, asker: Asker, **fields: Any) -> set[str]:
    request = SacctRequest(
        allocations=True, style="parsable2", format="user", starttime="2026-11-01", **fields
    )
    items = sacct(room, asker, request)
    return set("".join(item.text for item in items if isinstance(item, SacctText)).split())


@pytest.mark.parametrize(
    ("asker", "standing", "fields", "expected"),
    [
        (ADA, Standing(), {}, {"ada"}),
        (ADA, Standing(), {"all_users": True}, {"ada", "bob"}),
        (ADA, Standing(), {"users": ("bob",)}, {"bob"}),
        (ADA, Standing(private_data=frozenset({"jobs"})), {"all_users": True}, {"ada"}),
        (ADA, Standing(private_data=frozenset({"jobs"})), {"users": ("bob",)}, set()),
        (ADA, Standing(private_data=frozenset({"jobs"})), {"jobs": ("2",)}, set()),
        (ADA, None, {"all_users": True}, {"ada"}),
        (
            ADA,
            Standing(private_data=frozenset({"jobs"}), coordinators={"chem": frozenset({"ada"})}),
            {"all_users": True, "accounts": ("chem",)},
            {"bob"},
        ),
        (Asker(uid=5, user="oper"), None, {"all_users": True}, {"ada", "bob"}),
        (ROOT, None, {}, {"ada", "bob"}),
        (Asker(uid=1002, user=""), None, {}, {"bob"}),
    ],
)
def test_who_may_see_what(
    room: Callable[[Standing | None], AccountingRoom],
    asker: Asker,
    standing: Standing | None,
    fields: dict[str, Any],
    expected: set[str],
) -> None:
    assert seen(room(standing), asker, **fields) == expected


# ---------------------------------------------------------------- all sources say the same


@st.composite
def some_lines(draw: st.DrawFn) -> list[Line]:
    """Runs and steps at whole hours; the key of each is its own."""
    made: dict[tuple[Any, ...], Line] = {}
    for _ in range(draw(st.integers(0, 12))):
        begin = NOW - timedelta(hours=draw(st.integers(1, 40)))
        submit_us = int(begin.timestamp()) * 1_000_000
        ended = draw(st.booleans())
        of = run(
            draw(st.integers(1, 5)),
            uid=draw(st.sampled_from([1001, 1002])),
            state=draw(st.sampled_from(["COMPLETED", "FAILED"])) if ended else "RUNNING",
        )
        of = msgspec.structs.replace(
            of,
            submit_us=submit_us,
            first_submit_us=submit_us,
            eligible_us=submit_us,
            start_us=submit_us,
            end_us=submit_us + draw(st.integers(1, 5)) * 3_600_000_000 if ended else 0,
        )
        for name in draw(st.sets(st.sampled_from(["", "batch", "0", "1"]))) | {""}:
            made.setdefault((of.job_id, submit_us, name), step(of, name) if name else of)
    # A step lies with the run that was made first under its key.
    return [line for key, line in made.items() if (*key[:2], "") in made]


@given(
    some_lines(),
    st.sampled_from(["", "-X", "-D", "-X -D"]),
    st.sampled_from(
        ["-S now-2day", "-S now-9hour", "-j 1,3", "-j 2.batch", "-s CD -S now-9hour -E now", "-s R"]
    ),
    st.sampled_from(["", "-u 1001"]),
    st.integers(0, 5),
)
@settings(deadline=None, max_examples=12)
def test_all_sources_say_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[Line],
    shape: str,
    which: str,
    whose: str,
    cut: int,
) -> None:
    line = f"{shape} {which} {whose} -P -o jobid,submit,state"
    directory = tmp_path_factory.mktemp("same")
    expected = asked(scratch_of(lines, "lines"), line)
    assert asked(parquet_of(lines, directory / "a.parquet"), line) == expected
    here = [of for of in lines if of.job_id >= cut]
    there = [of for of in lines if of.job_id <= cut]
    both = Both(scratch_of(here, "here"), parquet_of(there, directory / "b.parquet"))
    assert asked(both, line) == expected


def test_what_has_left_jobs_db_is_found_in_closed_days(
    room: Callable[[Standing | None], AccountingRoom], tmp_path: Path
) -> None:
    books = room(None)
    old = run(900, begin="2026-10-01T08:00:00", end="2026-10-01T09:00:00", name="old")
    (tmp_path / "joblog").mkdir()
    write_parquet([old, step(old, "batch")], str(tmp_path / "joblog" / "2026-10-01.parquet"))

    def asked_of_books(*words: str) -> list[str]:
        request = options([*words, "-P", "-o", "jobid"], {}, "UTC").request
        items = sacct(books, ROOT, request)
        return "".join(item.text for item in items if isinstance(item, SacctText)).split()

    # Nothing has expired as far as is known: no file is looked at.
    assert asked_of_books("-j", "900") == []
    connection = open_database(database_path(str(tmp_path)), MIGRATIONS)
    with transaction(connection):
        expire(connection, "main", datetime(2026, 11, 1, tzinfo=UTC))
    connection.close()
    assert asked_of_books("-j", "900") == ["900", "900.batch"]
    assert asked_of_books("-j", "900,1", "-X") == ["1", "900"]
    assert asked_of_books("-j", "1", "-X") == ["1"]
    assert asked_of_books("-X", "-S", "2026-10-01", "-E", "2026-10-02") == ["900"]
    assert "900" not in asked_of_books("-X", "-S", "2026-11-02")
