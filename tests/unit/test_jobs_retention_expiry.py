"""Jobs removed by accounting.expire do not come back with late events."""

from contextlib import closing
from pathlib import Path

import pytest

from harness.events import NOON, at
from harness.jobs import Books, record, script
from steward.core.events import ACCOUNTING_EXPIRE, RUN_END, RUN_START, Event
from steward.core.sqlite import open_reader
from steward.core.usage import AccountingExpiry
from steward.jobs import Jobs


def expire(seconds: float) -> Event:
    return Event(
        kind=ACCOUNTING_EXPIRE,
        cluster="c1",
        key=f"expire:{seconds}",
        at=NOON,
        seen_at=NOON,
        source="expire",
        body=AccountingExpiry(before=at(seconds), asked_by="root"),
    )


def lived(job_id: int, end: float = 50.0) -> list[Event]:
    return [
        record(job_id, 0),
        record(job_id, 0, "RUNNING", seen=5, start=at(4)),
        record(job_id, 0, "COMPLETED", seen=end + 1, end=end, start=at(4)),
    ]


def late(job_id: int, end: float = 50.0) -> Event:
    return record(job_id, 0, "COMPLETED", seen=300, end=end, start=at(4), source="jobcomp")


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path)


def kinds(books: Books) -> list[str]:
    return [event.kind for event in books.said]


@pytest.mark.parametrize("has_script", [False, True])
def test_a_late_end_brings_no_job_back(books: Books, has_script: bool) -> None:
    if has_script:
        books.take(script(7, 0.4))
    books.take(*lived(7))
    books.take(expire(200))
    said = kinds(books)
    assert said.count(RUN_END) == said.count(RUN_START) == 1
    books.take(late(7))
    # The whole of it once more, as one batch.
    books.take(*lived(7))
    assert [kind for kind in kinds(books) if kind in (RUN_START, RUN_END)] == [RUN_START, RUN_END]
    assert len(Jobs(books.path).find("7")) == int(has_script)
    with closing(open_reader(books.path)) as db:
        assert db.execute("SELECT count(*) FROM line").fetchone() == (0,)


def test_what_ended_later_or_is_known_is_taken_in(books: Books) -> None:
    books.take(*lived(7)[:2])
    books.take(expire(200))
    books.take(late(7), late(8, end=250), late(9))
    jobs = Jobs(books.path)
    assert [bool(jobs.find(str(job_id))) for job_id in (7, 8, 9)] == [True, True, False]
    assert jobs.find("7")[0].ended
    assert kinds(books).count(RUN_END) == 2


def test_the_later_run_of_a_job_whose_first_one_is_old(books: Books) -> None:
    books.take(record(7, 0), record(7, 100, "RUNNING", seen=210, start=at(110), restarts=1))
    books.take(expire(200))
    requeued = record(7, 0, "REQUEUED", seen=220, end=90, start=at(4), source="jobcomp")
    books.take(requeued, record(7, 100, "COMPLETED", seen=260, end=255, restarts=1))
    (job,) = Jobs(books.path).find("7")
    assert job.ended
    assert kinds(books).count(RUN_END) == 2


def test_a_late_first_run_of_a_forgotten_job(books: Books) -> None:
    requeued = record(7, 0, "REQUEUED", seen=95, end=90, start=at(4))
    books.take(requeued, record(7, 100, "COMPLETED", seen=160, end=155, restarts=1))
    books.take(expire(200))
    books.take(record(7, 0, "REQUEUED", seen=300, end=90, start=at(4), source="jobcomp"))
    assert Jobs(books.path).find("7") == []


def test_an_import_brings_old_jobs_in(books: Books) -> None:
    books.take(expire(200))
    books.take(record(7, 0, "COMPLETED", seen=300, end=50, start=at(4), source="slurmdbd"))
    assert Jobs(books.path).find("7")
