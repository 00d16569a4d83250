"""Imported runs and steps in jobs.db, in the job log and in plugins: each once, own facts first."""

from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from harness.archive import purge
from harness.events import at, us
from harness.imports import imported, imported_job, imported_run, imported_step
from harness.jobacct import LogSite, Scene, run, scene
from harness.jobs import script
from harness.steps import STEP, Clocked, books, done, lines, lines_of, running
from steward.core.consumers import Rejected
from steward.core.events import RUN_END, RUN_START, Event, ImportedJobs
from steward.core.records import UsageLine
from steward.core.sqlite import open_reader
from steward.jobs import JobsConsumer

__all__ = ["books", "scene"]


@pytest.fixture
def site(tmp_path: Path) -> LogSite:
    return LogSite(tmp_path)


def dump(books: Clocked) -> dict[str, list[Any]]:
    """Return the rows of jobs.db that an import writes."""
    connection = open_reader(books.path)
    tables = (
        "job",
        "run",
        "line",
        "accounted",
        "usage_sum",
        "wait_sum",
        "count_sum",
        "capacity_sum",
        "crossing",
        "irregular",
        "due",
    )
    rows = {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables}
    connection.close()
    return {table: sorted(found, key=repr) for table, found in rows.items()}


def histories() -> list[list[Event]]:
    """Return jobs of every kind that slurmdbd lists."""
    resized = imported_run(12, end=10, state="RESIZING", nodelist="n[1-2]", nodes=2)
    last = imported_run(12, end=30, start=at(10), suspended_s=3)
    first = imported_run(13, state="REQUEUED")
    second = imported_run(13, submit=20, end=40, restarts=1)
    array = imported_run(14, array_job_id=14, array_task="7", nodelist="", start=at(20))
    het = imported_run(15, het_job_id=16, het_offset=1, state="CANCELLED", cancelled_by=3)
    return [
        imported_job(11),
        [resized, last, imported_step(last)],
        [first, imported_step(first), second, imported_step(second)],
        [array],
        [het, imported_step(het, "0", nodelist="n1", max_rss_bytes=9)],
    ]


def test_a_packed_import_gives_the_same_records_as_its_events(tmp_path: Path) -> None:
    events = [event for job in histories() for event in job]
    singly, packed = Clocked(tmp_path / "singly"), Clocked(tmp_path / "packed")
    for event in events:
        singly.take(event)
    packed.take(imported(*events))
    singly_rows, packed_rows = dump(singly), dump(packed)
    assert singly_rows.keys() == packed_rows.keys()
    for table, rows in singly_rows.items():
        if table not in ("job", "run"):
            assert packed_rows[table] == rows, table
    for job_id in map(str, range(11, 16)):
        assert lines_of(packed, job_id) == lines_of(singly, job_id)
    assert not [event for event in packed.said if event.kind in (RUN_START, RUN_END)]


def test_importing_again_changes_nothing(books: Clocked) -> None:
    events = [event for job in histories() for event in job]
    books.take(imported(*events))
    before = dump(books)
    books.take(imported(*events))
    books.take(imported(*events[:4]), imported(*events[4:]))
    assert dump(books) == before
    assert books.said == []


def test_the_end_of_an_observed_run_is_published_whoever_reports_it(books: Clocked) -> None:
    books.take(running(), *STEP)
    books.take(imported(*imported_job(7, end=20)))
    (end,) = books.told(RUN_END)
    assert (end.body.source, end.body.record.end) == ("", at(20))
    found = lines(books)
    assert (found["0:0"].source, found["0:0"].user_us) == ("", 1_000_000)
    assert (found["0:extern"].source, found["0:extern"].user_us) == ("slurmdbd", 7)


def test_observed_facts_win_in_whatever_order(tmp_path: Path) -> None:
    first, last = Clocked(tmp_path / "first"), Clocked(tmp_path / "last")
    own = [running(), *STEP, done()]
    theirs = imported(*imported_job(7, name="theirs", end=21))
    first.take(theirs)
    first.take(*own)
    last.take(*own)
    last.take(theirs)
    assert lines_of(first) == lines_of(last)
    assert lines(last)["0:"].end_us == us(20)


def test_a_pack_that_cannot_be_used_is_rejected(books: Clocked, site: LogSite) -> None:
    block = imported(*imported_job(7))
    damaged = msgspec.structs.replace(block, body=ImportedJobs(runs=1, steps=2, data=b"junk"))
    with pytest.raises(Rejected, match="cannot unpack"):
        books.take(damaged)
    with pytest.raises(Rejected, match="no usable body"):
        books.take(imported(imported_run(7, uid=-1)))
    log = site.open_log()
    with pytest.raises(Rejected, match="cannot unpack"):
        log.apply([damaged], 1, lambda _: None)
    log.close()


def logged(site: LogSite) -> list[tuple[int, str, str, int | None]]:
    return [(line.job_id, line.step, line.source, line.user_us) for line in site.lines()]


def test_the_job_log_has_each_imported_run_and_step_once(site: LogSite) -> None:
    jobs = [imported_job(1), imported_job(2), imported_job(3)]
    site.write(imported(*jobs[0], *jobs[1]))
    expected = [
        (job_id, step, "slurmdbd", 7 if step else 14)
        for job_id in (1, 2)
        for step in ("", "batch", "extern")
    ]
    assert logged(site) == expected
    size = (site.location / "2026-03-01.jsonl").stat().st_size
    site.write(imported(*jobs[1]), imported(*jobs[0], *jobs[1]))
    assert (site.location / "2026-03-01.jsonl").stat().st_size == size
    site.write(imported(*jobs[0], *jobs[2], *jobs[1]))
    assert [line.job_id for line in site.lines() if not line.step] == [1, 2, 3]


def test_the_job_log_keeps_its_own_record_of_a_run(site: LogSite) -> None:
    site.write(run(1, RUN_START), run(1, name="ours"))
    site.write(imported(*imported_job(1, name="theirs")))
    job, batch, extern = site.lines()
    assert (job.name, job.source, job.end_us) == ("ours", "", us(10))
    assert [(line.step, line.source) for line in (batch, extern)] == [
        ("batch", "slurmdbd"),
        ("extern", "slurmdbd"),
    ]
    size = (site.location / "2026-03-01.jsonl").stat().st_size
    site.write(imported(*imported_job(1, name="theirs"), imported_run(2)))
    assert [line.job_id for line in site.lines() if not line.step] == [1, 2]
    site.write(run(3, RUN_START), imported(*imported_job(3)), run(3, name="ours"))
    assert {line.name for line in site.lines() if line.job_id == 3 and not line.step} == {"ours"}
    assert size < (site.location / "2026-03-01.jsonl").stat().st_size


def test_the_job_log_tells_runs_and_sizes_apart(site: LogSite, books: Clocked) -> None:
    events = [event for job in histories() for event in job]
    site.write(imported(*events))
    books.take(imported(*events))

    def shown(line: UsageLine) -> tuple[Any, ...]:
        return line.job_id, line.restarts, line.piece_us, line.step, line.state, line.start_us

    expected = [line for job_id in range(11, 16) for line in lines_of(books, str(job_id))]
    assert Counter(map(shown, site.lines())) == Counter(map(shown, expected))


def continue_job(job_id: int, **fields: Any) -> list[Event]:
    """Return two events that bring a run's steps, the second those of the run before."""
    run, *steps = imported_job(job_id, **fields)
    return [imported(run, steps[0]), imported(run, steps[1], is_continued=True)]


@pytest.mark.parametrize("submit", [0, -40 * 86400])
def test_further_steps_of_a_run_follow_in_another_event(
    site: LogSite, books: Clocked, submit: int
) -> None:
    times = {"submit": submit, "end": submit + 20}
    first, second = continue_job(1, **times)
    site.write(first)
    # The job log knows runs that ended weeks ago.
    site.now += timedelta(hours=1)
    site.write(second)
    assert logged(site) == [
        (1, step, "slurmdbd", 7 if step else 14) for step in ("", "batch", "extern")
    ]
    books.take(first)
    books.take(second)
    together = Clocked(site.state / "together")
    together.take(imported(*imported_job(1, **times)))
    assert lines_of(books, "1") == lines_of(together, "1")


@pytest.mark.parametrize("imports_first", [True, False])
def test_the_job_log_has_an_old_run_once_however_late_an_import_repeats_it(
    site: LogSite, imports_first: bool
) -> None:
    first = imported(*imported_job(1))
    own = [run(1, RUN_START), run(1, name="ours")]
    site.write(*([first] if imports_first else own))
    expected = site.lines()
    for job_id, days in enumerate((30, 400), 2):
        site.now += timedelta(days=days)
        site.write()
        # Other runs in the same event give it another key, so the journal appends it.
        site.write(imported(*imported_job(1)[:1], *imported_job(job_id)))
        assert [line for line in site.lines() if line.job_id == 1] == expected
    assert {line.job_id for line in site.lines()} == {1, 2, 3}
    records = [msgspec.json.decode(line) for line in read_packed(site, "2026-03-01")]
    ends = [r for r in records if r["job_id"] == 1 and "/run.end:" in r["event"]]
    assert len(ends) == 1


def read_packed(site: LogSite, day: str) -> list[bytes]:
    """Return the records of a day of the job log, packed or not."""
    lines: list[bytes] = []
    for path in sorted(site.location.glob(f"{day}*.jsonl*")):
        with open(path, "rb") as file:
            reader = zstandard.open(file, "rb") if path.suffix == ".zst" else file
            lines += reader.read().splitlines()
    return lines


def test_texts_of_purged_jobs_do_not_come_back(site: LogSite) -> None:
    spooled = script(1, 0.4)
    consumer = JobsConsumer(site.settings)
    consumer.apply([spooled, running(1), done(1), purge(spooled)], 4, lambda _: None)
    consumer.close()
    secret = {"name": "confidential", "submit_line": "sbatch confidential"}
    events = imported_job(1, **secret)
    events.append(imported_step(events[0], "0", name="confidential-step"))
    site.write(imported(*events, *imported_job(2, name="kept")))
    text = (site.location / "2026-03-01.jsonl").read_text()
    assert "confidential" not in text
    assert "kept" in text
    assert {line.job_id for line in site.lines()} == {1, 2}


def test_plugins_are_called_for_imported_runs(scene: Scene) -> None:
    scene.take(imported(*imported_job(1), *imported_job(2)))
    assert scene.hooks()[2:-1] == ["job_start", "job_complete"] * 2
    assert [job.job_id for job in scene.of("job_complete")] == [1, 2]
    assert len({job.event_id for job in scene.of("job_complete")}) == 2


def test_plugins_are_called_once_for_a_run_in_two_events(scene: Scene) -> None:
    scene.take(*continue_job(1))
    assert scene.hooks()[2:-1] == ["job_start", "job_complete"]
