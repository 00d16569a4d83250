"""Job log: each record once, in the file of its run's day, despite crashes of the writer."""

import json
import os
import resource
import signal
import time
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

from harness.events import at
from harness.forks import fork_child
from harness.jobacct import LogSite, PowerCut, cut_power, event, run, usage
from steward.core.events import (
    ACCOUNTING_EXPIRE,
    RUN_END,
    RUN_START,
    RUN_SUSPEND,
    STEP_ACCOUNTED,
    Event,
)
from steward.core.records import UsageLine
from steward.core.sqlite import Connection
from steward.core.storage import move_cursor
from steward.core.usage import AccountedStep, AccountingExpiry
from steward.extensions.jobacct_plugins.log import consumer as log_consumer
from steward.extensions.jobacct_plugins.log.files import JobLogUnavailable, LogFiles, list_log_days
from steward.extensions.jobacct_plugins.log.reader import read_lines


def records(site: LogSite, name: str = "2026-03-01.jsonl") -> list[dict[str, Any]]:
    path = site.location / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kinds(site: LogSite, name: str = "2026-03-01.jsonl") -> list[str]:
    return [record["record"] for record in records(site, name)]


@pytest.fixture
def site(tmp_path: Path) -> LogSite:
    return LogSite(tmp_path)


def test_a_run_is_written_when_it_has_ended_all_at_once(site: LogSite) -> None:
    site.write(run(1, RUN_START), usage(1, tasks=2), run(1, RUN_SUSPEND))
    assert records(site) == []
    site.write(run(1, RUN_END))
    assert kinds(site) == [
        *("JOB_START", "JOB_STEP", "JOB_TASK", "JOB_TASK"),
        *("JOB_SUSPEND", "JOB_TERMINATED"),
    ]
    ids = [record["event"] for record in records(site)]
    assert ids[0] == "c1/run.start:1:0"
    assert ids[2:4] == ["c1/usage:1:0:batch:n1#0", "c1/usage:1:0:batch:n1#1"]
    assert len(set(ids)) == len(ids)
    assert (site.location / "2026-03-01.jsonl").stat().st_mode & 0o777 == 0o600
    assert site.location.stat().st_mode & 0o777 == 0o700


def test_the_day_is_that_of_the_end_where_the_cluster_is(site: LogSite) -> None:
    site.write(run(1, RUN_START), run(1), run(2, RUN_START, cluster="far"), run(2, cluster="far"))
    assert site.names() == ["2026-03-01.jsonl", "2026-03-02.jsonl"]
    assert {record["job_id"] for record in records(site, "2026-03-02.jsonl")} == {2}


def test_runs_of_a_requeued_job_and_pieces_are_told_apart(site: LogSite) -> None:
    piece = run(1, piece_end=at(4), key="piece", seconds=4, state="RESIZING", nodes=2)
    site.write(run(1, RUN_START), piece, run(1, state="REQUEUED"))
    site.write(run(1, RUN_START, restarts=1, seconds=40), run(1, restarts=1, seconds=40))
    assert kinds(site).count("JOB_TERMINATED") == 3
    lines = site.lines()
    assert [(line.restarts, line.state, line.is_latest) for line in lines] == [
        (0, "RESIZING", 0),
        (0, "REQUEUED", 0),
        (1, "COMPLETED", 1),
    ]
    assert lines[0].piece_us == int(at(4).timestamp() * 1e6)


def test_lines_are_those_that_sacct_shows(site: LogSite) -> None:
    site.write(run(1, RUN_START), usage(1, "batch"), usage(1, "0", 4), run(1))
    job, batch, srun = read_lines(str(site.location / "2026-03-01.jsonl"))
    assert (job.step, job.state, job.exit_code, job.name) == ("", "COMPLETED", 0, "job1")
    assert (batch.step, srun.step, srun.tasks) == ("batch", "0", 4)
    assert (srun.user_us, srun.max_rss_bytes, srun.max_rss_task) == (400_000, 4 << 20, 3)
    assert job.user_us == 500_000


def test_what_comes_after_the_end_goes_to_the_day_and_replaces(site: LogSite) -> None:
    site.write(run(1, RUN_START), usage(1, tasks=1), run(1))
    site.write(
        usage(1, tasks=3, key="more", correction=True),
        run(1, key="again", correction=True, state="FAILED", exit_code=3),
    )
    job, step = site.lines()
    assert (job.state, job.exit_code) == ("FAILED", 3)
    assert (step.tasks, step.user_us) == (3, 300_000)


def test_a_correction_of_the_end_stays_with_its_run(site: LogSite) -> None:
    site.write(run(1, RUN_START), run(1))
    site.write(run(1, key="again", correction=True, seconds=86400.0))
    assert site.names() == ["2026-03-01.jsonl"]


def test_steps_of_another_s_books_find_their_run(site: LogSite) -> None:
    def accounted(job_id: int, step: str) -> Event:
        line = UsageLine(cluster="x", job_id=9, label="9", step=step, user_us=7, source="slurmdbd")
        body = AccountedStep(job_id=job_id, submit=at(0), line=line)
        return event(STEP_ACCOUNTED, f"accounted:{job_id}:{step}", body, at(5))

    site.write(accounted(1, "batch"), accounted(1, "0"), usage(1, "0"), run(1))
    site.write(accounted(1, "1"))
    job, *steps = site.lines()
    assert [(line.job_id, line.step, line.user_us, line.source) for line in steps] == [
        (1, "batch", 7, "slurmdbd"),
        (1, "0", 100_000, ""),
        (1, "1", 7, "slurmdbd"),
    ]
    assert job.user_us == 100_014


def test_a_closed_day_is_packed_and_has_its_lines_in_parquet(site: LogSite) -> None:
    import duckdb

    odd: dict[str, Any] = {
        "name": "a\x00b\n\"'|\u202e\ud7ff",
        "comment": "",
        "submit_line": "x" * 10_000,
    }
    site.write(run(2, **odd), run(1, RUN_START), usage(1, "extern"), usage(1, "0", 2), run(1))
    before = site.lines()
    site.close_days()
    assert site.names() == ["2026-03-01.jsonl.zst", "2026-03-01.parquet"]
    assert {(site.location / name).stat().st_mode & 0o777 for name in site.names()} == {0o600}
    assert site.lines() == before
    path = str(site.location / "2026-03-01.parquet")
    relation = duckdb.connect().sql(f"SELECT * FROM read_parquet('{path}')")
    assert relation.columns == list(UsageLine.__struct_fields__)
    rows = [
        UsageLine(
            **{
                name: value
                for name, value in zip(relation.columns, row, strict=True)
                if value is not None
            }
        )
        for row in relation.fetchall()
    ]
    assert sorted(rows, key=repr) == sorted(before, key=repr)
    assert [(row.job_id, row.step) for row in rows] == [(1, ""), (1, "extern"), (1, "0"), (2, "")]


def test_a_day_is_closed_no_sooner_than_the_settings_say(site: LogSite) -> None:
    site.write(run(1))
    site.now = datetime.fromisoformat("2026-03-04T23:59:00+00:00")
    site.write()
    assert site.names() == ["2026-03-01.jsonl"]
    site.now = datetime.fromisoformat("2026-03-05T13:01:00+00:00")
    site.write()
    assert site.names() == ["2026-03-01.jsonl.zst", "2026-03-01.parquet"]


def test_late_facts_wait_beside_a_closed_day_and_are_merged(site: LogSite) -> None:
    site.write(run(1), run(2))
    site.close_days()
    site.write(usage(1, "0", 2), run(2, key="again", correction=True, state="FAILED"))
    assert site.names() == [
        "2026-03-01.jsonl.zst",
        "2026-03-01.late.jsonl",
        "2026-03-01.parquet",
    ]
    told = sorted(map(repr, site.lines()))
    site.now += timedelta(hours=2)
    site.write()
    assert site.names() == ["2026-03-01.jsonl.zst", "2026-03-01.parquet"]
    assert sorted(map(repr, site.lines())) == told
    assert {line.state for line in site.lines() if not line.step} == {
        "COMPLETED",
        "FAILED",
    }


def test_a_run_that_was_requeued_into_another_day_is_not_the_latest_there(site: LogSite) -> None:
    import duckdb

    site.write(run(1, state="REQUEUED"), run(1, RUN_START, restarts=1, seconds=90_000))
    site.close_days()
    path = str(site.location / "2026-03-01.parquet")
    assert duckdb.connect().sql(f"SELECT is_latest FROM '{path}'").fetchall() == [(0,)]


@pytest.mark.parametrize("step", range(6))
def test_a_closing_that_is_cut_short_is_taken_up(
    site: LogSite, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write(run(1), run(2))
    told = sorted(map(repr, site.lines()))
    site.now += timedelta(days=10)
    with monkeypatch.context() as patch:
        cut_power(patch, step)
        consumer = site.open_log()
        if step < 5:
            with pytest.raises(PowerCut):
                consumer.tick(lambda _: None)
        consumer.close()
    (site.location / ".2026-03-01.parquet.lines.new").write_bytes(b"left behind")
    site.write()
    assert site.names() == ["2026-03-01.jsonl.zst", "2026-03-01.parquet"]
    assert sorted(map(repr, site.lines())) == told


def test_expire_removes_whole_days_that_are_over(site: LogSite) -> None:
    def expire(before: datetime) -> Event:
        body = AccountingExpiry(before=before)
        return event(ACCOUNTING_EXPIRE, f"expire:{before}", body, site.now)

    site.write(run(1), run(2, seconds=86400.0))
    site.write(expire(datetime.fromisoformat("2026-03-02T00:00:00+00:00")))
    assert [day.day for day in list_log_days(str(site.location))] == ["2026-03-02"]
    site.close_days()
    site.write(expire(site.now))
    assert site.names() == []


def test_a_full_disk_loses_and_doubles_nothing(site: LogSite) -> None:
    site.write(run(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (site.location / "2026-03-01.jsonl").stat().st_size
    site.append([run(2), run(3)])
    consumer = site.open_log()
    events = site.reader.read(consumer.cursor(), consumer.kinds, 10)
    # One that takes a few bytes before it is full; SQLite has less than that in its files.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, hard))
    try:
        with pytest.raises(Exception, match=r"File too large|disk"):
            consumer.apply(events[0], events[1], lambda _: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    consumer.apply(events[0], events[1], lambda _: None)
    consumer.close()
    assert [record["job_id"] for record in records(site)] == [1, 2, 3]


def test_a_torn_append_is_cut_off(tmp_path: Path) -> None:
    files = LogFiles(str(tmp_path / "log"))
    length = files.append("day.jsonl", 0, [b"one\n"])
    with open(files.file_path("day.jsonl"), "ab") as file:
        file.write(b"tw")
    assert files.append("day.jsonl", length, [b"t", b"wo\n"]) == 8
    assert Path(files.file_path("day.jsonl")).read_bytes() == b"one\ntwo\n"
    os.truncate(files.file_path("day.jsonl"), 4)
    assert files.append("day.jsonl", 8, [b"three\n"]) == 10
    assert files.find_valid_length("day.jsonl") == 10
    with open(files.file_path("day.jsonl"), "ab") as file:
        file.write(b"half a li")
    assert files.find_valid_length("day.jsonl") == 10
    os.unlink(files.file_path("day.jsonl"))
    os.symlink(tmp_path / "elsewhere", files.file_path("day.jsonl"))
    with pytest.raises(JobLogUnavailable):
        files.append("day.jsonl", 0, [b"no\n"])


def test_a_log_whose_database_was_lost_is_written_on(site: LogSite) -> None:
    site.write(run(1))
    for path in Path(site.settings.state_dir).glob("accounting-log.db*"):
        path.unlink()
    site.write(run(2))
    # The journal still had the first event, which comes twice and is one line all the same.
    assert [record["job_id"] for record in records(site)] == [1, 1, 2]
    assert [line.job_id for line in site.lines()] == [1, 2]


def _consume_and_die(directory: Path, after_s: float, batches: int) -> None:
    """Run the consumer in a separate process until it is killed.

    A kill between append and commit is too unlikely, so the process kills itself there, after
    some batches.
    """

    def consume() -> None:
        left = batches

        def dangerous(connection: Connection, position: int) -> None:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            move_cursor(connection, position)

        log_consumer.move_cursor = dangerous  # type: ignore[attr-defined]
        site = LogSite(directory)
        consumer = site.open_log()
        consumer.batch_events = 3
        while True:
            site.feed_one(consumer, turns=1)

    pid = fork_child(consume)
    until = time.monotonic() + after_s
    status = 0
    ended = 0
    while time.monotonic() < until and not ended:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_kills_at_random_instants_double_no_line_and_lose_none(tmp_path: Path) -> None:
    seed = int(os.environ.get("STEWARD_KILL_SEED", time.time_ns() % 10**6))
    print(f"STEWARD_KILL_SEED={seed}")
    chance = Random(seed)
    site = LogSite(tmp_path)
    jobs = range(1, 601)
    for job_id in jobs:
        site.append(
            [run(job_id, RUN_START), usage(job_id, "0", 3), run(job_id, seconds=job_id * 600.0)]
        )
    site.writer.close()  # the child is the journal's one writer
    for _ in range(25):
        _consume_and_die(site.directory, chance.uniform(0.01, 0.08), chance.randint(2, 40))
    site = LogSite(tmp_path)
    site.write()
    found = [
        record
        for day in list_log_days(str(site.location))
        for record in records(site, f"{day.day}.jsonl")
    ]
    ids = [record["event"] for record in found]
    assert len(ids) == len(set(ids)) == len(jobs) * 6
    assert {record["job_id"] for record in found} == set(jobs)
