"""Purge in the job log: all texts of a job's owner, in every file."""

from pathlib import Path
from typing import Any

import pytest

from harness.events import at
from harness.jobacct import LogSite, PowerCut, cut_power, event, run, usage
from steward.core.events import (
    ARCHIVE_PURGE,
    RUN_START,
    STEP_ACCOUNTED,
    ArchivePurge,
    Event,
    make_script_key,
)
from steward.core.records import UsageLine
from steward.core.usage import AccountedStep
from steward.extensions.jobacct_plugins.log.purges import PurgeBlanker

PRIVATE: dict[str, Any] = {
    "name": "confidential-name",
    "submit_line": "sbatch confidential-line",
    "comment": "confidential \u00e4\n\u2028" * 20,
    "work_dir": "/confidential",
    "command": "/confidential/command",
}
OPEN, LATE = "2026-03-01.jsonl", "2026-03-01.late.jsonl"


def text_of(site: LogSite) -> bytes:
    """Return all text of the job log and its database, decompressed."""
    packed = site.location.glob("*.zst")
    parts = [unpacked(path) for path in packed]
    parts += [path.read_bytes() for path in site.state.glob("accounting-log.db*")]
    parts += [path.read_bytes() for path in site.location.glob("*.jsonl")]
    parts += [repr(rows_of(path)).encode() for path in site.location.glob("*.parquet")]
    return b"".join(parts)


def unpacked(path: Path) -> bytes:
    import zstandard

    with path.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()


def rows_of(path: Path) -> list[Any]:
    import duckdb

    with duckdb.connect() as database:
        return database.sql(f"SELECT * FROM read_parquet('{path}')").fetchall()


def purge(job_id: int, seconds: float = 0.4, sink: str = "", cluster: str = "c1") -> Event:
    key = make_script_key(job_id, int(at(seconds).timestamp() * 1e9))
    body = ArchivePurge(script_keys=("odd", key), sink=sink, asked_by="root")
    return event(ARCHIVE_PURGE, f"purge:{job_id}:{seconds}:{sink}", body, at(100), cluster)


def accounted(job_id: int) -> Event:
    line = UsageLine(cluster="c1", job_id=job_id, label="x", step="5", name="confidential-step")
    body = AccountedStep(job_id=job_id, submit=at(0), line=line)
    return event(STEP_ACCOUNTED, f"accounted:{job_id}", body, at(5))


@pytest.fixture
def site(tmp_path: Path) -> LogSite:
    return LogSite(tmp_path)


def fill(site: LogSite) -> None:
    """Fill the log with an ended job 1, a running job 2 of its user, and a job 3 of another."""
    site.write(run(1, RUN_START, **PRIVATE), usage(1, "0"), accounted(1), run(1, **PRIVATE))
    site.write(run(2, RUN_START, **PRIVATE), accounted(2), run(3, name="kept", comment="kept"))


def test_a_growing_day_and_what_waits_are_blanked_in_place(site: LogSite) -> None:
    fill(site)
    assert text_of(site).count(b"confidential-") > 3
    size = (site.location / OPEN).stat().st_size
    site.write(purge(1), purge(2))
    assert b"confidential" not in text_of(site)
    assert (site.location / OPEN).stat().st_size == size
    assert {path.name for path in site.location.iterdir()} == {OPEN}
    site.write(run(2), run(1, key="again", correction=True, state="FAILED", exit_code=2))
    told = {(line.job_id, line.step): line for line in site.lines()}
    assert (told[1, ""].state, told[1, ""].user, told[1, "0"].name) == ("FAILED", "ada", "")
    assert (told[3, ""].name, told[3, ""].comment) == ("kept", "kept")
    assert (2, "5") in told


def test_closed_days_and_what_came_late_are_blanked(site: LogSite) -> None:
    fill(site)
    site.close_days()
    site.write(run(1, key="again", correction=True, state="FAILED", **PRIVATE))
    assert (site.location / LATE).exists()
    assert text_of(site).count(b"confidential-name") > 4
    site.write(purge(1), purge(2))
    assert b"confidential" not in text_of(site)
    assert not (site.location / LATE).exists()
    (parquet,) = site.location.glob("*.parquet")
    assert len(rows_of(parquet)) == 4
    assert {line.state for line in site.lines() if line.job_id == 1 and not line.step} == {"FAILED"}
    assert any(line.name == "kept" for line in site.lines())


def test_tasks_and_components_go_with_their_leader_and_none_else(site: LogSite) -> None:
    site.write(
        run(11, array_job_id=10, array_task="1", **PRIVATE),
        usage(11, "0"),
        run(21, het_job_id=20, het_offset=1, **PRIVATE),
        run(10, cluster="far", name="kept-far"),
        run(31, array_job_id=30, name="kept-other"),
    )
    site.write(purge(10), purge(20), purge(30, seconds=900.0), purge(31))
    text = text_of(site)
    assert b"confidential" not in text
    assert b"kept-far" in text
    assert b"kept-other" in text
    (step,) = [line for line in site.lines() if line.step]
    assert (step.job_id, step.name) == (11, "")


def test_what_was_said_before_the_books_knew_of_the_purge_is_not_written(site: LogSite) -> None:
    site.write(run(1, RUN_START, **PRIVATE), purge(1), run(1, **PRIVATE))
    assert b"confidential" not in text_of(site)
    site.write(purge(2))
    site.write(run(2, RUN_START, **PRIVATE), run(2, **PRIVATE))
    assert b"confidential" not in text_of(site)


def test_a_purge_of_one_sink_leaves_the_log(site: LogSite) -> None:
    fill(site)
    before = (site.location / OPEN).read_bytes()
    site.write(purge(1, sink="files"))
    assert (site.location / OPEN).read_bytes() == before


def test_lines_that_are_no_records_stay(site: LogSite) -> None:
    site.location.mkdir()
    odd = b'nothing\n{"v":1}\n\xff\xfe\n[]\n' + b"x" * 100_000 + b"\n"
    (site.location / OPEN).write_bytes(odd)
    fill(site)
    site.write(purge(1), purge(2))
    assert (site.location / OPEN).read_bytes().startswith(odd)
    assert b"confidential" not in text_of(site)


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("step", range(7))
def test_a_blanking_that_is_cut_short_is_taken_up(
    site: LogSite, step: int, is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(site)
    if is_closed:
        site.close_days()
    site.write(run(1, key="again", correction=True, **PRIVATE))
    told = len(site.lines())

    site.append([purge(1), purge(2)])
    consumer = site.open_log()
    with monkeypatch.context() as patch:
        cut_power(patch, step)
        try:
            site.feed_one(consumer)
            while consumer.tick(lambda _: None) == 0.0:
                pass
        except PowerCut:
            pass
        consumer.close()
    site.write()
    assert b"confidential" not in text_of(site)
    assert len(site.lines()) == told
    assert not [path.name for path in site.location.iterdir() if path.name.startswith(".")]


def test_a_blanked_record_is_blanked_once() -> None:
    blanking = PurgeBlanker([("c1", 1, int(at(0.4).timestamp() * 1e6))])
    line = (
        b'{"cluster":"c1","job_id":1,"submit":"2026-03-01T12:00:00Z",'
        b'"first_submit":"2026-03-01T12:00:00Z","job":{"job_id":1,"name":"confidential"},"later":[1]}\n'
    )
    blanking.learn_run(line)
    once = blanking.blank_line(line)
    assert b"confidential" not in once
    assert (len(once), b'"later":[1]' in once) == (len(line), True)
    assert blanking.blank_line(once) is once
