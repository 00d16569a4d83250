"""What a purge takes from the job log: all that a person wrote of the job, wherever it is."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from harness.events import NOON, at
from harness.jobacct import Fed, PowerCut, cut_power, event, run, settings_in, usage
from steward.core.events import (
    ARCHIVE_PURGE,
    RUN_START,
    STEP_ACCOUNTED,
    ArchivePurge,
    Event,
    script_key,
)
from steward.core.lines import Line
from steward.core.usage import StepAccounted
from steward.extensions.jobacct_plugins.log.blanking import Blanking
from steward.extensions.jobacct_plugins.log.consumer import LogConsumer
from steward.extensions.jobacct_plugins.log.reading import read_lines

PRIVATE: dict[str, Any] = {
    "name": "zq-name",
    "submit_line": "sbatch zq-line",
    "comment": "zq \u00e4\n\u2028" * 20,
    "work_dir": "/zq",
    "command": "/zq/command",
}
OPEN, LATE = "2026-03-01.jsonl", "2026-03-01.late.jsonl"


class Site:
    """A job log with a clock of its own."""

    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path
        self.settings = settings_in(tmp_path)
        self.location = tmp_path / "joblog"
        self.now = NOON + timedelta(hours=1)
        self.fed = Fed(self.settings)

    def consumer(self) -> LogConsumer:
        return LogConsumer(self.settings, now=lambda: self.now)

    def write(self, *events: Event) -> None:
        self.fed.tell(*events)
        consumer = self.consumer()
        self.fed.feed(consumer)
        while consumer.tick(lambda _: None) == 0.0:
            pass
        consumer.close()

    def close_days(self) -> None:
        self.now += timedelta(days=10)
        self.write()

    def text(self) -> bytes:
        """All that is in the log and in its database, unpacked."""
        packed = self.location.glob("*.zst")
        parts = [unpacked(path) for path in packed]
        parts += [path.read_bytes() for path in self.directory.glob("accounting-log.db*")]
        parts += [path.read_bytes() for path in self.location.glob("*.jsonl")]
        parts += [repr(rows_of(path)).encode() for path in self.location.glob("*.parquet")]
        return b"".join(parts)

    def lines(self) -> list[Line]:
        return list(read_lines(str(self.location)))


def unpacked(path: Path) -> bytes:
    import zstandard

    with path.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()


def rows_of(path: Path) -> list[Any]:
    import duckdb

    with duckdb.connect() as database:
        return database.sql(f"SELECT * FROM read_parquet('{path}')").fetchall()


def purge(job_id: int, seconds: float = 0.4, sink: str = "", cluster: str = "c1") -> Event:
    key = script_key(job_id, int(at(seconds).timestamp() * 1e9))
    body = ArchivePurge(script_keys=("odd", key), sink=sink, asked_by="root")
    return event(ARCHIVE_PURGE, f"purge:{job_id}:{seconds}:{sink}", body, at(100), cluster)


def accounted(job_id: int) -> Event:
    line = Line(cluster="c1", job_id=job_id, label="x", step="5", name="zq-step")
    body = StepAccounted(job_id=job_id, submit=at(0), line=line)
    return event(STEP_ACCOUNTED, f"accounted:{job_id}", body, at(5))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def fill(site: Site) -> None:
    """An ended job 1 and a running job 2 of which a person wrote, and another's job 3."""
    site.write(run(1, RUN_START, **PRIVATE), usage(1, "0"), accounted(1), run(1, **PRIVATE))
    site.write(run(2, RUN_START, **PRIVATE), accounted(2), run(3, name="kept", comment="kept"))


def test_a_growing_day_and_what_waits_are_blanked_in_place(site: Site) -> None:
    fill(site)
    assert site.text().count(b"zq-") > 3
    size = (site.location / OPEN).stat().st_size
    site.write(purge(1), purge(2))
    assert b"zq" not in site.text()
    assert (site.location / OPEN).stat().st_size == size
    assert {path.name for path in site.location.iterdir()} == {OPEN}
    site.write(run(2), run(1, key="again", correction=True, state="FAILED", exit_code=2))
    told = {(line.job_id, line.step): line for line in site.lines()}
    assert (told[1, ""].state, told[1, ""].user, told[1, "0"].name) == ("FAILED", "ada", "")
    assert (told[3, ""].name, told[3, ""].comment) == ("kept", "kept")
    assert (2, "5") in told


def test_closed_days_and_what_came_late_are_blanked(site: Site) -> None:
    fill(site)
    site.close_days()
    site.write(run(1, key="again", correction=True, state="FAILED", **PRIVATE))
    assert (site.location / LATE).exists()
    assert site.text().count(b"zq-name") > 4
    site.write(purge(1), purge(2))
    assert b"zq" not in site.text()
    assert not (site.location / LATE).exists()
    (parquet,) = site.location.glob("*.parquet")
    assert len(rows_of(parquet)) == 4
    assert {line.state for line in site.lines() if line.job_id == 1 and not line.step} == {"FAILED"}
    assert any(line.name == "kept" for line in site.lines())


def test_tasks_and_components_go_with_their_leader_and_none_else(site: Site) -> None:
    site.write(
        run(11, array_job_id=10, array_task="1", **PRIVATE),
        usage(11, "0"),
        run(21, het_job_id=20, het_offset=1, **PRIVATE),
        run(10, cluster="far", name="kept-far"),
        run(31, array_job_id=30, name="kept-other"),
    )
    site.write(purge(10), purge(20), purge(30, seconds=900.0), purge(31))
    text = site.text()
    assert b"zq" not in text
    assert b"kept-far" in text
    assert b"kept-other" in text
    (step,) = [line for line in site.lines() if line.step]
    assert (step.job_id, step.name) == (11, "")


def test_what_was_said_before_the_books_knew_of_the_purge_is_not_written(site: Site) -> None:
    site.write(run(1, RUN_START, **PRIVATE), purge(1), run(1, **PRIVATE))
    assert b"zq" not in site.text()
    site.write(purge(2))
    site.write(run(2, RUN_START, **PRIVATE), run(2, **PRIVATE))
    assert b"zq" not in site.text()


def test_a_purge_of_one_sink_leaves_the_log(site: Site) -> None:
    fill(site)
    before = (site.location / OPEN).read_bytes()
    site.write(purge(1, sink="files"))
    assert (site.location / OPEN).read_bytes() == before


def test_lines_that_are_no_records_stay(site: Site) -> None:
    site.location.mkdir()
    odd = b'nothing\n{"v":1}\n\xff\xfe\n[]\n' + b"x" * 100_000 + b"\n"
    (site.location / OPEN).write_bytes(odd)
    fill(site)
    site.write(purge(1), purge(2))
    assert (site.location / OPEN).read_bytes().startswith(odd)
    assert b"zq" not in site.text()


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("step", range(7))
def test_a_blanking_that_is_cut_short_is_taken_up(
    site: Site, step: int, is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(site)
    if is_closed:
        site.close_days()
    site.write(run(1, key="again", correction=True, **PRIVATE))
    told = len(site.lines())

    site.fed.tell(purge(1), purge(2))
    consumer = site.consumer()
    with monkeypatch.context() as patch:
        cut_power(patch, step)
        try:
            site.fed.feed(consumer)
            while consumer.tick(lambda _: None) == 0.0:
                pass
        except PowerCut:
            pass
        consumer.close()
    site.write()
    assert b"zq" not in site.text()
    assert len(site.lines()) == told
    assert not [path.name for path in site.location.iterdir() if path.name.startswith(".")]


def test_a_blanked_record_is_blanked_once() -> None:
    blanking = Blanking([("c1", 1, int(at(0.4).timestamp() * 1e6))])
    line = (
        b'{"cluster":"c1","job_id":1,"submit":"2026-03-01T12:00:00Z",'
        b'"first_submit":"2026-03-01T12:00:00Z","job":{"job_id":1,"name":"zq"},"later":[1]}\n'
    )
    blanking.learn(line)
    once = blanking.blank(line)
    assert b"zq" not in once
    assert (len(once), b'"later":[1]' in once) == (len(line), True)
    assert blanking.blank(once) is once
