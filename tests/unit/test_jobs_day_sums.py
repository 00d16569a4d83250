"""Day sums: they equal a recount of the lines after any facts, and reports with them the lines."""

import shutil
import zoneinfo
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import history
from harness.events import at, make_event, us
from harness.jobs import Books, record
from harness.site import ADA, COORDINATOR, ROOT, Site
from steward.core.access import Caller
from steward.core.config import Settings
from steward.core.events import ACCOUNTING_EXPIRE, Event
from steward.core.records import UsageLine
from steward.core.sqlite import Connection, open_database, open_reader, transaction
from steward.core.usage import AccountingExpiry
from steward.jobs import JobsConsumer, database_path
from steward.jobs.day_sum_queries import UsageShare, open_day_sums
from steward.jobs.day_sums import (
    add_cluster,
    continue_rebuild,
    find_incomplete_cluster,
    track_lines,
)
from steward.jobs.line_queries import LineFilter
from steward.jobs.lines import put_lines
from steward.jobs.sum_tables import CAPACITY, COMPLETE, USAGE, round_wait
from steward.jobs.tables import MIGRATIONS
from steward.jobs.zone_days import describe_zone
from steward.slurm.settings import ClusterSettings
from steward.slurm.times import load_zone

DAY = 86_400
HOUR = 3600
TABLES = ("usage_sum", "wait_sum", "count_sum", "capacity_sum", "crossing", "irregular", "node_run")
ZONES = ("UTC", "Europe/Paris", "America/Havana", "America/Sao_Paulo", "Pacific/Apia")


def read_sums(connection: Connection) -> list[Any]:
    """Return everything that is summed."""
    # An empty row of capacity counts nothing: what others changed in it cancels out.
    amounts = [f"{name} <> 0" for name in CAPACITY.amounts]
    conditions = {"capacity_sum": " OR ".join(amounts)}
    return [
        sorted(connection.execute(f"SELECT * FROM {table} WHERE {conditions.get(table, '1 = 1')}"))
        for table in TABLES
    ]


def recount(connection: Connection) -> list[Any]:
    """Sum all lines again, and return the sums; the database stays as it was."""
    connection.execute("BEGIN")
    for table in ("summed_day", *TABLES):
        connection.execute(f"DELETE FROM {table}")
    connection.execute("UPDATE summed SET upto = 0")
    while (summed := find_incomplete_cluster(connection)) is not None:
        continue_rebuild(connection, summed)
    sums = read_sums(connection)
    connection.execute("ROLLBACK")
    return sums


@st.composite
def facts(draw: Any) -> list[Event]:
    """Generate the records of a few jobs, which may contradict each other, in any order."""
    events: list[Event] = []
    for job_id in range(1, draw(st.integers(1, 4)) + 1):
        submit = draw(st.integers(0, 5 * DAY))
        for restarts in range(draw(st.integers(1, 2))):
            start = submit + draw(st.sampled_from([0, 60, DAY]))
            for number in range(draw(st.integers(1, 3))):
                end = start + draw(st.sampled_from([0, 1, HOUR, 20 * HOUR, 3 * DAY]))
                event = record(
                    *(job_id, submit),
                    draw(st.sampled_from(["RUNNING", "COMPLETED", "FAILED", "REQUEUED"])),
                    seen=end + number + draw(st.integers(0, 99)) / 100,
                    end=draw(st.sampled_from([None, end])),
                    whole=draw(st.booleans()),
                    restarts=restarts,
                    start=draw(st.sampled_from([at(start), at(start), None])),
                    eligible=at(submit + draw(st.sampled_from([0, 5]))),
                    reservation=draw(st.sampled_from(["", "", "maint"])),
                    account=draw(st.sampled_from(["physics", "chemistry"])),
                    partition=draw(st.sampled_from(["short", "long"])),
                    suspended_s=draw(st.sampled_from([None, 0, 30])),
                    cpus=draw(st.integers(1, 4)),
                    requested_cpus=draw(st.integers(1, 4)),
                    nodes=1,
                    tres_allocated=draw(st.sampled_from(["", "cpu=4,gres/gpu=2"])),
                    time_limit_s=draw(st.sampled_from([None, 600])),
                    nodelist=draw(st.sampled_from(["", "n1", "n-1,n2", "n[1-3]", "n[1-"])),
                )
                events.append(event)
            if draw(st.booleans()):
                size = {"state": "RESIZING", "end": start + 60, "cpus": 8}
                events.append(record(job_id, submit, start=at(start), restarts=restarts, **size))
            submit += 4 * DAY
    if draw(st.booleans()):
        moment = draw(st.integers(0, 10)) * DAY
        body = AccountingExpiry(before=at(moment))
        events.append(make_event(ACCOUNTING_EXPIRE, f"expire:{moment}", body, at(20 * DAY)))
    shuffled: list[Event] = draw(st.permutations(events))
    return shuffled


def open_books(directory: Path, zone: str) -> Books:
    """Open the consumer of jobs.db with a zone of the cluster c1."""
    books = Books(directory)
    books.consumer.close()
    cluster = {"c1": ClusterSettings(timezone=zone)}
    books.consumer = JobsConsumer(Settings(state_dir=str(directory), cluster=cluster))
    return books


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(facts(), st.integers(1, 4), st.sampled_from(ZONES))
def test_sums_equal_a_recount_after_any_order_of_late_facts(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event], size: int, zone: str
) -> None:
    books = open_books(tmp_path_factory.mktemp("books"), zone)
    with closing(books.consumer), closing(open_database(books.path, MIGRATIONS)) as copy:
        for start in range(0, len(events), size):
            books.take(*events[start : start + size])
            assert read_sums(copy) == recount(copy)
        books.take(*events)
        assert read_sums(copy) == recount(copy)


def test_a_change_of_zone_rebuilds_the_sums_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steward.jobs.day_sums.REBUILD_JOBS", 2)
    books = open_books(tmp_path, "Europe/Paris")
    ended = [
        record(number, 0, "COMPLETED", start=at(10), end=DAY, cpus=1, nodes=1, seen=DAY)
        for number in range(1, 6)
    ]
    books.take(*ended[:4])
    books.consumer.close()
    books = open_books(tmp_path, "America/Havana")
    with closing(books.consumer), closing(open_database(books.path, MIGRATIONS)) as copy:
        assert read_sums(copy) == [[] for _ in TABLES]
        assert books.consumer.tick(books.said.extend) == 0.0
        # One job id is behind the progress of the rebuild, another before it.
        times: dict[str, Any] = {"start": at(3 * DAY + 10), "end": 4 * DAY, "seen": 4 * DAY}
        late = [record(number, 3 * DAY, "FAILED", restarts=1, **times) for number in (1, 4)]
        books.take(*late, ended[4])
        assert open_day_sums(copy, "c1", [us(-9 * DAY), us(9 * DAY)]) is None
        while books.consumer.tick(books.said.extend) == 0.0:
            pass
        assert read_sums(copy) == recount(copy)
        days = "SELECT DISTINCT begin_us FROM usage_sum WHERE is_month = 0"
        assert len(copy.execute(days).fetchall()) == 4
        assert open_day_sums(copy, "c1", [us(-9 * DAY), us(9 * DAY)]) is not None


def test_a_database_of_an_earlier_version_is_summed_in_the_background(tmp_path: Path) -> None:
    path = database_path(str(tmp_path))
    with closing(open_database(path, MIGRATIONS[:-1])) as earlier, transaction(earlier):
        earlier.execute("CREATE TABLE day_sum (cluster TEXT)")
        rules = describe_zone("UTC")[1]
        earlier.execute("INSERT INTO summed VALUES ('c1', 'UTC', ?, ?)", (COMPLETE, rules))
        times: dict[str, Any] = {"start_us": us(0), "end_us": us(2 * DAY)}
        put_lines(earlier, [UsageLine(cluster="c1", job_id=1, label="1", cpus=1, **times)])
    cluster = {"c1": ClusterSettings(timezone="UTC")}
    events: list[Event] = []
    with (
        closing(JobsConsumer(Settings(state_dir=str(tmp_path), cluster=cluster))) as consumer,
        closing(open_database(path, MIGRATIONS)) as copy,
    ):
        assert open_day_sums(copy, "c1", [us(-9 * DAY), us(9 * DAY)]) is None
        while consumer.tick(events.extend) == 0.0:
            pass
        assert open_day_sums(copy, "c1", [us(-9 * DAY), us(9 * DAY)]) is not None
        assert copy.execute("SELECT sum(touched) FROM usage_sum").fetchone() == (4,)
        assert read_sums(copy) == recount(copy)


@pytest.fixture
def zones(tmp_path: Path) -> Iterator[Path]:
    """Make a directory the only source of zones, as a new tzdata would."""
    directory = tmp_path / "zones" / "Europe"
    directory.mkdir(parents=True)
    yield directory
    zoneinfo.reset_tzpath()
    zoneinfo.ZoneInfo.clear_cache()
    load_zone.cache_clear()
    describe_zone.cache_clear()


def test_changed_rules_of_a_zone_rebuild_the_sums_under_the_same_name(
    tmp_path: Path, zones: Path
) -> None:
    books = open_books(tmp_path, "Europe/Paris")
    ended: dict[str, Any] = {"start": at(10), "end": DAY, "seen": DAY}
    books.take(record(1, 0, "COMPLETED", cpus=1, nodes=1, **ended))
    books.consumer.close()
    cluster = {"c1": ClusterSettings(timezone="Europe/Paris")}
    sources = {
        name: next(path for path in (Path(top, name) for top in zoneinfo.TZPATH) if path.exists())
        for name in ("Europe/Paris", "America/Havana")
    }
    with closing(open_database(books.path, MIGRATIONS)) as copy:
        before = read_sums(copy)
        for zone, is_same in (("Europe/Paris", True), ("America/Havana", False)):
            shutil.copy(sources[zone], zones / "Paris")
            # As after a restart of the daemon.
            zoneinfo.reset_tzpath(to=[str(zones.parent)])
            zoneinfo.ZoneInfo.clear_cache()
            load_zone.cache_clear()
            describe_zone.cache_clear()
            settings_of_zone = Settings(state_dir=str(tmp_path), cluster=cluster)
            with closing(JobsConsumer(settings_of_zone)) as consumer:
                assert (read_sums(copy) == before) is is_same
                while consumer.tick(books.said.extend) == 0.0:
                    pass
            assert (read_sums(copy) == before) is is_same
            assert read_sums(copy) == recount(copy)


def test_irregular_runs_that_began_after_a_period_are_not_read_for_it(tmp_path: Path) -> None:
    books = open_books(tmp_path, "UTC")
    # Fractions of a second make a run irregular.
    for number, day in ((1, 1), (2, 4), (3, 9)):
        times: dict[str, Any] = {
            "start": at(day * DAY + 0.5),
            "end": day * DAY + HOUR,
            "seen": day * DAY + HOUR,
        }
        books.take(record(number, day * DAY, "COMPLETED", cpus=1, nodes=1, **times))
    books.take(record(4, 4 * DAY, "COMPLETED", start=at(4 * DAY), end=5 * DAY, seen=5 * DAY))
    with closing(books.consumer), closing(open_reader(books.path)) as reader:
        irregular = reader.execute("SELECT count(*), min(since_us) FROM irregular").fetchone()
        assert irregular == (3, us(DAY + 0.5))
        sums = open_day_sums(reader, "c1", [us(3.5 * DAY), us(6 * DAY)])
        assert sums is not None
        assert {job_id for job_id, _, _ in sums.list_irregular()} == {2}
        query = sums.select_jobs()
        job_ids = {job_id for (job_id,) in reader.execute(query.sql, query.values)}
        assert job_ids - {4} == {2}


STRIDES = st.sampled_from([6 * HOUR, 6 * HOUR, 5 * DAY])
"""Distance of starts and of bounds: within days, or within months."""


@st.composite
def run_lines(draw: Any) -> list[UsageLine]:
    """Generate the lines of runs that have ended, run or wait; a few are irregular."""
    lines = []
    stride = draw(STRIDES)
    for job_id in range(1, draw(st.integers(1, 12)) + 1):
        start = draw(st.integers(0, 12 * 4)) * stride + draw(st.sampled_from([0, 0, 1, 0.5]))
        length = draw(st.sampled_from([0, 1, HOUR, 12 * HOUR, DAY, 3 * DAY, 2.5, None]))
        line = UsageLine(
            cluster="c1",
            job_id=job_id,
            label=str(job_id),
            submit_us=us(start - 60),
            eligible_us=us(start - draw(st.sampled_from([5000, 700, 60, 0, -30]))),
            start_us=us(start) if draw(st.integers(0, 9)) else 0,
            end_us=0 if length is None else us(start + length),
            suspended_s=draw(st.sampled_from([0, 0, 100])),
            uid=draw(st.sampled_from([None, 4001, 4002])),
            user=draw(st.sampled_from(["", "ada", "bela"])),
            account=draw(st.sampled_from(["", "physics", "chemistry"])),
            partition=draw(st.sampled_from(["main", "long"])),
            state=draw(st.sampled_from(["COMPLETED", "FAILED", "RUNNING"])),
            cpus=draw(st.integers(0, 4)),
            requested_cpus=draw(st.integers(0, 40)),
            reservation=draw(st.sampled_from(["", "", "", "maint"])),
            array_task=draw(st.sampled_from(["", "1-3"])),
            nodes=draw(st.integers(0, 2)),
            tres_allocated=draw(st.sampled_from(["", "mem=3G,gres/gpu=2"])),
            time_limit_s=draw(st.sampled_from([None, 0, HOUR])),
            user_us=draw(st.sampled_from([None, 0, 1_234_567])),
            cgroup_user_us=draw(st.sampled_from([None, 7_654_321])),
            peak_bytes=draw(st.sampled_from([None, 0, 123_456_789])),
            peak_allocated_bytes=draw(st.sampled_from([None, 1 << 30])),
        )
        lines.append(line)
        if length and not draw(st.integers(0, 5)):
            piece = {"piece_us": us(start), "start_us": us(start - DAY), "end_us": us(start)}
            account = draw(st.sampled_from(["physics", line.account]))
            lines.append(msgspec.structs.replace(line, account=account, state="RESIZING", **piece))
    return lines


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = history.make_site(tmp_path_factory.mktemp("site"))
    site.feed(
        history.node(DAY + 100, "n1", "IDLE", source="start", cpus=8, gpus=4),
        history.node(DAY + 100, "n2", "IDLE", source="start", cpus=8),
        history.node(3 * DAY + 777, "n2", "DOWN", old_state="IDLE", cpus=8),
        history.reservation(4 * DAY, "maint", "ACTIVE", nodes="n1", flags="SPEC_NODES"),
    )
    yield site
    site.close()


BOUNDS = st.tuples(st.integers(0, 16 * 4), STRIDES).map(lambda bound: bound[0] * bound[1])
SUMMED_REPORTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("accounts", {}),
    ("users", {}),
    ("waste", {}),
    ("jobs", {"sizes": [2, 3]}),
    ("partitions", {}),
    ("waits", {}),
    ("waits", {"group": "size"}),
)


def ask_reports(site: Site, who: Caller, request: dict[str, Any]) -> list[Any]:
    """Return the replies of the reports that sums can answer."""
    return [
        site.ask(f"reports.{name}", who, **request, **report) for name, report in SUMMED_REPORTS
    ]


def round_waits(row: Any) -> Any:
    """Return the row of a report with its waits as in sums."""
    names = ("median_s", "p90_s", "longest_s")
    waits = {name: getattr(row, name, None) for name in names}
    return msgspec.structs.replace(
        row, **{name: round_wait(wait) for name, wait in waits.items() if wait is not None}
    )


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    run_lines(),
    st.tuples(BOUNDS, BOUNDS, st.sampled_from([0, 0, 1, 100, 1700])),
    st.sampled_from(ZONES),
    st.sampled_from(ZONES),
    st.sampled_from(["", "day", "week", "month"]),
    st.sampled_from(
        [{}, {"accounts": ["physics"]}, {"users": ["ada", "4002"]}, {"partitions": ["long"]}]
    ),
    st.sampled_from([ROOT, ADA, COORDINATOR]),
)
def test_reports_from_sums_equal_reports_from_lines(
    site: Site,
    lines: list[UsageLine],
    bounds: tuple[int, int, int],
    zone: str,
    asked_zone: str,
    by: str,
    chosen: dict[str, Any],
    who: Caller,
) -> None:
    site.now = at(400 * DAY)
    since, length, more = bounds
    request = {
        **chosen,
        "since": at(since - DAY + more // 2).isoformat(),
        "until": at(since + max(length, 60) + more).isoformat(),
        "clusters": ["c1"],
        "zone": asked_zone,
        "by": by,
    }
    path = database_path(site.settings.state_dir)
    with closing(open_database(path, MIGRATIONS)) as books:
        with transaction(books):
            books.execute("DELETE FROM line")
            books.execute("DELETE FROM summed")
            add_cluster(books, "c1", zone)
            for line in lines:
                with track_lines(books, "c1", [line.job_id]):
                    put_lines(books, [line])
        assert read_sums(books) == recount(books)
        by_time = {name: request[name] for name in ("since", "until", "clusters", "zone", "by")}
        with_sums = [*ask_reports(site, who, request), site.ask("reports.cluster", who, **by_time)]
        with transaction(books):
            books.execute("DELETE FROM summed")
        from_lines = [*ask_reports(site, who, request), site.ask("reports.cluster", who, **by_time)]
        for reply, expected in zip(with_sums, from_lines, strict=True):
            assert not expected.is_summed
            rows = map(round_waits, expected.rows) if reply.is_summed else expected.rows
            assert reply.rows == tuple(rows)


def add_days(site: Site, count: int) -> None:
    """Write 20 runs an hour long for each of some days, and one that crosses midnight."""
    path = database_path(site.settings.state_dir)
    with closing(open_database(path, MIGRATIONS)) as books, transaction(books):
        books.execute("DELETE FROM line")
        books.execute("DELETE FROM summed")
        add_cluster(books, "c1", "UTC")
        for day in range(count):
            starts = [*range(20), 11.5]
            runs = [
                UsageLine(
                    cluster="c1",
                    job_id=day * 100 + number + 1,
                    label="",
                    start_us=us((day * 24 + start) * HOUR),
                    end_us=us((day * 24 + start + 1) * HOUR),
                    account="physics",
                    state="COMPLETED",
                    cpus=1,
                )
                for number, start in enumerate(starts)
            ]
            with track_lines(books, "c1", [run.job_id for run in runs]):
                put_lines(books, runs)


def test_waste_from_sums_leaves_out_users_without_an_ended_run(site: Site) -> None:
    site.now = at(100 * DAY)
    path = database_path(site.settings.state_dir)
    line = UsageLine(
        cluster="c1",
        job_id=1,
        label="",
        start_us=us(DAY),
        end_us=us(5 * DAY),
        state="COMPLETED",
        cpus=1,
    )
    with closing(open_database(path, MIGRATIONS)) as books, transaction(books):
        books.execute("DELETE FROM line")
        books.execute("DELETE FROM summed")
        add_cluster(books, "c1", "UTC")
        with track_lines(books, "c1", [1]):
            put_lines(books, [line])
    period = {"since": at(0).isoformat(), "until": at(4 * DAY).isoformat(), "clusters": ["c1"]}
    usage = site.ask("reports.users", ROOT, **period)
    assert (usage.is_summed, len(usage.rows)) == (True, 1)
    waste = site.ask("reports.waste", ROOT, **period)
    assert (waste.is_summed, waste.rows) == (True, ())


def test_a_report_reads_a_row_of_each_day_and_the_runs_at_its_ends(site: Site) -> None:
    site.now = at(100 * DAY)
    add_days(site, 60)
    path = database_path(site.settings.state_dir)
    with closing(open_reader(path)) as reader:
        # From 18:00 on the tenth day to 6:00 on the fortieth.
        sums = open_day_sums(reader, "c1", [us((10 * 24 + 6) * HOUR), us((39 * 24 + 18) * HOUR)])
        assert sums is not None
        jobs = sums.select_jobs()
        job_ids = {row[0] for row in reader.execute(jobs.sql, jobs.values)}
        inner = sums.inner[0]
        rows = reader.execute(
            "SELECT count(*) FROM usage_sum WHERE is_month = 0 AND begin_us >= ? AND begin_us < ?",
            inner,
        ).fetchone()
        assert rows == (29,)
        # Of 600 runs only those of the two days that are cut.
        assert 20 < len(job_ids) <= 2 * 22
        assert not sums.list_irregular()
        columns = ("account", "user", "uid")
        assert len(list(sums.list_shares(UsageShare, USAGE, LineFilter(), columns))) == 1


@pytest.mark.parametrize(
    ("report", "request_fields"),
    [
        ("waits", {"group": "user"}),
        ("waits", {"group": "size", "sizes": [3]}),
        ("waits", {"accounts": ["physics"]}),
        ("partitions", {"users": ["ada"]}),
        ("jobs", {"partitions": ["main"]}),
    ],
)
def test_a_report_that_sums_cannot_answer_says_so(
    site: Site, report: str, request_fields: dict[str, Any]
) -> None:
    site.now = at(100 * DAY)
    add_days(site, 4)
    period = {"since": at(0).isoformat(), "until": at(4 * DAY).isoformat(), "clusters": ["c1"]}
    assert site.ask(f"reports.{report}", ROOT, **period).is_summed
    assert not site.ask(f"reports.{report}", ROOT, **period, **request_fields).is_summed


def count_sum_rows(reader: Connection, statements: list[str]) -> list[int]:
    """Return how many rows of sums each statement reads."""
    counts = []
    for statement in statements:
        _, found, source = statement.partition(" FROM (SELECT ")
        if found:
            sql = f"SELECT count(*){found}{source.partition(' GROUP BY ')[0]}"
            counts += [count for (count,) in reader.execute(sql)]
    return counts


def test_a_report_reads_a_row_of_each_whole_month(site: Site) -> None:
    site.now = at(400 * DAY)
    # From 1 March to 29 May.
    add_days(site, 90)
    path = database_path(site.settings.state_dir)
    with closing(open_reader(path)) as reader:
        statements: list[str] = []
        sums = open_day_sums(reader, "c1", [us(2 * DAY - 12 * HOUR), us(89 * DAY - 12 * HOUR)])
        assert sums is not None
        reader.set_trace_callback(statements.append)
        (whole, *parts) = sums.list_shares(UsageShare, USAGE, LineFilter(), ())
        reader.set_trace_callback(None)
        # Days of March and of May, and the month of April.
        assert count_sum_rows(reader, statements) == [29, 1, 28]
        # One run of each day is from the day before.
        assert [share.jobs for share in (whole, *parts)] == [29 * 21 + 1, 30 * 21, 28 * 21]


def test_reports_search_sums_and_lines_by_index(site: Site) -> None:
    site.now = at(100 * DAY)
    add_days(site, 40)
    statements: list[str] = []
    path = database_path(site.settings.state_dir)
    original = open_reader

    def open_traced(*arguments: Any, **options: Any) -> Connection:
        connection = original(*arguments, **options)
        connection.set_trace_callback(statements.append)
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steward.jobs.line_sources.open_reader", open_traced)
        request = {"since": at(2 * DAY).isoformat(), "until": at(35 * DAY).isoformat()}
        replies = ask_reports(site, ROOT, {**request, "clusters": ["c1"]})
        assert all(reply.is_summed for reply in replies)
    queries = [
        statement
        for statement in statements
        if statement.startswith("SELECT") and ("_sum" in statement or "step = ''" in statement)
    ]
    with closing(open_reader(path)) as reader:
        plans = [row[3] for sql in queries for row in reader.execute(f"EXPLAIN QUERY PLAN {sql}")]
    for table in ("usage_sum", "wait_sum", "count_sum"):
        assert any(plan.startswith(f"SEARCH {table} USING PRIMARY KEY") for plan in plans)
    assert any("line_by_end" in plan for plan in plans)
    assert not [plan for plan in plans if plan.startswith("SCAN") and "json_each" not in plan]


def test_capacity_from_sums_equals_lines_where_bounds_cut_quarters(site: Site) -> None:
    site.now = at(100 * DAY)
    path = database_path(site.settings.state_dir)
    begin, end = DAY + 11 * HOUR + 600, 3 * DAY + 120
    # Runs that are eligible, start or end in a cut quarter, or pass it; and one that never started.
    times = [
        (begin - HOUR, begin - 100, end + HOUR),
        (begin - 200, begin + 100, begin + 200),
        (begin + 100, begin + 200, begin + HOUR),
        (begin - HOUR, begin + 7 * HOUR, begin + 8 * HOUR),
        (end - HOUR, end - 50, end + 50),
        (end - 50, end + 50, end + HOUR),
        (begin - 300, None, end + 300),
    ]
    with closing(open_database(path, MIGRATIONS)) as books:
        with transaction(books):
            books.execute("DELETE FROM line")
            books.execute("DELETE FROM summed")
            add_cluster(books, "c1", "UTC")
            for number, (eligible, start, ended) in enumerate(times, 1):
                line = UsageLine(
                    cluster="c1",
                    job_id=number,
                    label="",
                    eligible_us=us(eligible),
                    start_us=0 if start is None else us(start),
                    end_us=us(ended),
                    state="COMPLETED",
                    cpus=number % 3,
                    requested_cpus=1,
                    tres_allocated="gres/gpu=1",
                )
                with track_lines(books, "c1", [number]):
                    put_lines(books, [line])
        request = {"since": at(begin).isoformat(), "until": at(end).isoformat(), "clusters": ["c1"]}
        summed = site.ask("reports.cluster", ROOT, **request, by="day")
        books.execute("DELETE FROM summed")
        expected = site.ask("reports.cluster", ROOT, **request, by="day")
    assert (summed.is_summed, expected.is_summed) == (True, False)
    assert summed.rows == expected.rows
    assert all(row.planned_cpu_s and row.idle_cpu_s and row.allocated_gpu_s for row in summed.rows)
